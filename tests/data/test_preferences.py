"""Pairs and unpaired preferences: which tokens are targets, which sequences share a row, and which rows are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.preferences import PairSource, UnpairedSource
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.sources import Mixture, TextFiles
from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer
from tests.support import pretrained
from tests.support.preference_rows import CHATS, TEXTS, THUMBS

USER = {"role": "user", "content": "who?"}
GOOD = {"role": "assistant", "content": "a model"}
BAD = {"role": "assistant", "content": "a fox"}
LABEL = {"prompt": "2+2=", "completion": "4", "label": True}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_pipeline(
    folder: Path,
    rows: list[Any],
    source: Any = PairSource,
    workdir: str = "workdir",
    *,
    setup: bool = True,
    **fields: Any,
) -> DataPipeline:
    """Return a byte-level pipeline over a file with these rows."""
    path = write_rows(folder / "rows.jsonl", rows)
    source_fields = {name: fields.pop(name) for name in ("unusable", "packed", "strings", "split") if name in fields}
    fields["source"] = source
    if not isinstance(source, Config):
        fields["source"] = config_for(source, paths=[str(path)], **source_fields)
    fields.setdefault("tokenizer", config_for(ByteTokenizer))
    config: Config = config_for(DataPipeline, **{"seq_len": 64, "global_batch_size": 2, **fields})
    pipeline = config.instantiate()
    if setup:
        pipeline.setup(folder / workdir)
    return pipeline


def read_all_rows(pipeline: DataPipeline) -> list[Batch]:
    rows = pipeline.train_leaves[0].rows
    return [rows.row(index) for index in range(rows.num_rows)]


def split_sequences(row: Batch) -> list[tuple[str, str, int, float]]:
    """Return (prompt, answer, label, number of ends) of each sequence, with <> for the separator."""

    def text(ids: list[int]) -> str:
        return "".join("<>" if token == 256 else chr(token) for token in ids)

    sequences = []
    for segment in range(1, int(row["segments"].max()) + 1):
        columns = np.flatnonzero(row["segments"] == segment)
        np.testing.assert_array_equal(columns, np.arange(columns[0], columns[-1] + 1))
        np.testing.assert_array_equal(row["positions"][columns], np.arange(len(columns)))
        np.testing.assert_array_equal(row["tokens"][columns][1:], row["targets"][columns][:-1])
        tokens = [*row["tokens"][columns].tolist(), int(row["targets"][columns[-1]])]
        weights = [0, *row["weights"][columns].tolist()]
        prompt = [token for token, weight in zip(tokens, weights, strict=True) if not weight]
        answer = [token for token, weight in zip(tokens, weights, strict=True) if weight]
        assert prompt + answer == tokens
        labels = set(row["labels"][columns].tolist()) if "labels" in row else {0.0}
        assert len(labels) == 1
        assert row["ends"][columns][:-1].sum() == 0
        sequences.append((text(prompt), text(answer), int(labels.pop()), float(row["ends"][columns].sum())))
    padding = row["segments"] == 0
    for name, values in row.items():
        assert not values[padding].any(), name
    return sequences


# --- tokens ----------------------------------------------------------------------------------------------------------


def make_pretrained_tokenizer(tmp_path: Path, family: str, **config: Any) -> PretrainedTokenizer:
    tokenizer = PretrainedTokenizer(path=str(pretrained.write(tmp_path / family, family, **config)), vocab_size=512)
    (tmp_path / "kept").mkdir(exist_ok=True)
    tokenizer.prepare(tmp_path / "kept", None, write=True)
    return tokenizer


def encode_answers(
    tokenizer: PretrainedTokenizer, row: dict[str, Any], tmp_path: Path
) -> list[tuple[list[int], list[int]]]:
    """Return (ids of the prompt, ids of the answer) for each answer of a row."""
    source = PairSource(paths=[str(write_rows(tmp_path / "pair.jsonl", [row]))])
    (values,) = source.codec(tokenizer).encode_batch(list(source.documents()))
    marks = np.flatnonzero(values >= 2 * tokenizer.vocab_size)
    assert values[marks].tolist() == [2 * 512 + 1, 2 * 512 + 2]
    sequences = []
    for start, stop in zip(marks + 1, [*marks[1:], len(values)], strict=True):
        sequence = values[start:stop]
        is_answer = sequence & 1 == 1
        sequences.append(((sequence[~is_answer] >> 1).tolist(), (sequence[is_answer] >> 1).tolist()))
    return sequences


@pytest.mark.parametrize("tags", [True, False], ids=["generation-tags", "common-prefix"])
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_answers_are_rendered_by_the_template_and_earlier_ones_are_no_targets(family: str, tags: bool, tmp_path: Path):
    template = pretrained.FAMILIES[family][-1]
    template = template if tags else pretrained.without_generation(template)
    tokenizer = make_pretrained_tokenizer(tmp_path, family, chat_template=template)
    turns = [USER, GOOD, USER]
    row = {"prompt": turns, "chosen": [GOOD], "rejected": [BAD]}
    for (prompt, answer), message in zip(encode_answers(tokenizer, row, tmp_path), [GOOD, BAD], strict=True):
        whole, _ = tokenizer.render([*turns, message])
        (expected,) = tokenizer.encode_rendered([whole])
        # The rendering continues after an answer with the template's own text, which is not learned.
        ids = list(expected.ids)
        start = next(i for i in range(len(ids)) if ids[i : i + len(answer)] == answer and i >= len(prompt) - 2)
        assert ids[:start] == prompt[:start]
        assert tokenizer.decode_bytes(answer).decode().strip() == message["content"]
        assert tokenizer.decode_bytes(prompt).decode().count("a model") == 1


@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_texts_follow_their_prompt_as_the_model_is_given_it(family: str, tmp_path: Path):
    tokenizer = make_pretrained_tokenizer(tmp_path, family)
    row = {"prompt": "the fo", "chosen": "x jumps", "rejected": "es"}
    for (prompt, answer), text in zip(encode_answers(tokenizer, row, tmp_path), ["x jumps", "es"], strict=True):
        assert prompt == tokenizer.encode_prompt("the fo")
        assert answer[-1] == tokenizer.eos_id
        assert tokenizer.decode_bytes(answer).decode() == text
    eos_token = tokenizer.special["eos_token"]
    ended = {"prompt": "the fo", "chosen": f"x jumps{eos_token}", "rejected": "es"}
    assert encode_answers(tokenizer, ended, tmp_path) == encode_answers(tokenizer, row, tmp_path)


def test_an_empty_prompt_is_the_separator(tmp_path: Path):
    rows = read_all_rows(make_pipeline(tmp_path, [{"prompt": "", "chosen": "b", "rejected": "c"}] * 2, packed=False))
    assert split_sequences(rows[0]) == [("<>", "b<>", 0, 1.0), ("<>", "c<>", 0, 1.0)]


RECORDED = json.loads((Path(__file__).parent / "recorded_preferences.json").read_text())


def split_ids(row: Batch) -> list[tuple[list[int], list[int]]]:
    """Return (ids of the prompt, ids of the answer) of the two sequences in a row."""
    sequences = []
    for segment in (1, 2):
        columns = row["segments"] == segment
        first_answer = int(np.argmax(row["weights"][columns]))
        tokens = [*row["tokens"][columns].tolist(), int(row["targets"][columns][-1])]
        sequences.append((tokens[: first_answer + 1], tokens[first_answer + 1 :]))
        assert row["weights"][columns].sum() == len(sequences[-1][1]), "all behind the prompt is the answer"
    return sequences


@pytest.mark.parametrize(
    ("kind", "rows", "source"),
    [("texts", TEXTS, PairSource), ("chats", CHATS, PairSource), ("thumbs", THUMBS, UnpairedSource)],
)
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_tokens_match_trl(family: str, kind: str, rows: list[Any], source: type, tmp_path: Path):
    """The recorded values are computed by tests/peers/test_preference_data.py."""
    folder = str(pretrained.write(tmp_path / family, family))
    tokenizer = config_for(PretrainedTokenizer, path=folder, vocab_size=512)
    pipeline = make_pipeline(
        tmp_path, rows, source, tokenizer=tokenizer, seq_len=512, packed=False, global_batch_size=1
    )
    ours = sorted(map(split_ids, read_all_rows(pipeline)))
    theirs = sorted(RECORDED[family][kind])
    assert len(ours) == len(theirs) == len(rows)
    library = pipeline.tokenizer._library
    for (first, second), (prompt, first_answer, second_answer, *_) in zip(ours, theirs, strict=True):
        for (our_prompt, our_answer), their_answer in ((first, first_answer), (second, second_answer)):
            assert our_prompt == prompt
            # The line feed that templates write after an answer opens the next turn, so it is no target here.
            assert their_answer[: len(our_answer)] == our_answer
            assert not library.decode(their_answer[len(our_answer) :], skip_special_tokens=False).strip()
            assert kind == "chats" or their_answer == our_answer


# --- rows ------------------------------------------------------------------------------------------------------------


def some_pairs(count: int, longest: int = 12) -> list[dict[str, str]]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, longest, (count, 3)).tolist()
    return [
        {"prompt": f"{i}" + "p" * a, "chosen": f"{i}" + "c" * b, "rejected": f"{i}" + "r" * c}
        for i, (a, b, c) in enumerate(lengths)
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_pairs_stay_together_and_each_is_there_once(packed: bool, tmp_path: Path):
    pairs = some_pairs(50)
    pipeline = make_pipeline(tmp_path, pairs, packed=packed)
    sequences = [split_sequences(row) for row in read_all_rows(pipeline)]
    assert all(len(row) == 2 for row in sequences) != packed
    together = []
    for row in sequences:
        together += list(zip(row[::2], row[1::2], strict=True))
    expected = []
    for pair in pairs:
        prompt = "<>" + pair["prompt"]
        expected.append(tuple((prompt, pair[name] + "<>", 0, 1.0) for name in ("chosen", "rejected")))
    assert sorted(together) == sorted(expected)
    note = pipeline.train_leaves[0].rows.note
    assert note.startswith("50 examples of two sequences, ")
    assert note.endswith("0 with truncated answers, 0 skipped")
    assert len(sequences) == 50 or packed


def test_answers_are_truncated_evenly_in_full_rows(tmp_path: Path):
    rows = [
        {"prompt": "pppp", "chosen": "c" * 3, "rejected": "r" * 50},
        {"prompt": "pppp", "chosen": "C" * 40, "rejected": "R" * 50},
        {"prompt": "pppp", "chosen": "fits", "rejected": "too"},
    ]
    pipeline = make_pipeline(tmp_path, rows, seq_len=20)
    by_first_letter = {split_sequences(row)[0][1][0]: split_sequences(row) for row in read_all_rows(pipeline)}
    # Twenty columns hold 22 tokens in two sequences; each prompt takes 5 of them.
    assert [answer for _, answer, _, _ in by_first_letter["c"]] == ["ccc<>", "r" * 8]
    assert [answer for _, answer, _, _ in by_first_letter["C"]] == ["C" * 6, "R" * 6]
    assert [answer for _, answer, _, _ in by_first_letter["f"]] == ["fits<>", "too<>"]
    assert {prompt for row in by_first_letter.values() for prompt, *_ in row} == {"<>pppp"}
    assert "2 with truncated answers, 0 skipped" in pipeline.train_leaves[0].rows.note


def test_oversized_prompt_is_an_error_or_skipped(tmp_path: Path):
    rows = [PAIR, {**PAIR, "prompt": "p" * 31}, {**PAIR, "prompt": "p" * 32}, PAIR]
    message = (
        r"^data.source: .*rows.jsonl, line 3 \(byte \d+\): its prompt of 33 tokens leaves no room for two answers in a "
        r"row of data.seq_len=64, which holds the prompt twice; expected a shorter prompt, a longer data.seq_len"
    )
    with pytest.raises(ValueError, match=message):
        make_pipeline(tmp_path, rows, packed=False)
    pipeline = make_pipeline(tmp_path, rows, packed=False, unusable="leave_out")
    rows_left = [split_sequences(row) for row in read_all_rows(pipeline)]
    assert sorted(len(row[0][0]) for row in rows_left) == [6, 6, 33]
    longest = max(rows_left, key=lambda row: len(row[0][0]))
    assert [answer for _, answer, _, _ in longest] == ["4", "5"]
    assert "1 with truncated answers, 1 skipped" in pipeline.train_leaves[0].rows.note


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PAIR, "chosen": " \n"}, "the chosen answer is empty"),
        ({**PAIR, "rejected": ""}, "the rejected answer is empty"),
        ({**PAIR, "rejected": "4"}, "both answers are the same"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "both answers are the same"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "the rejected answer is empty"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "'rejected' is a conversation"),
    ],
)
def test_useless_answers_are_an_error_or_left_out(row: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"^data.source: .*rows.jsonl, line 2 \(byte \d+\): .*{message}"):
        make_pipeline(tmp_path, [PAIR, row, PAIR])
    assert not list((tmp_path / "workdir/data").glob("*tokens*"))
    if "conversation" not in message:
        pipeline = make_pipeline(tmp_path, [PAIR, row, PAIR], unusable="leave_out", packed=False)
        assert pipeline.num_rows == 2
        assert pipeline.train_leaves[0].rows.note.endswith("0 with truncated answers, 1 skipped")


def test_too_few_rows_for_a_batch(tmp_path: Path):
    message = r"data.source: its answers fill 1 rows of data.seq_len=64, too few .*global_batch_size=2; .* packed=false"
    with pytest.raises(ValueError, match=message):
        make_pipeline(tmp_path, [PAIR, PAIR])
    assert make_pipeline(tmp_path, [PAIR, PAIR], packed=False).num_rows == 2


def test_no_pair_is_left(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no pairs fit in rows of data.seq_len=4"):
        make_pipeline(tmp_path, [PAIR], unusable="leave_out", seq_len=4)


def test_unpaired_rows_are_next_to_their_mismatch(tmp_path: Path):
    rows = [{"prompt": p, "completion": c, "label": c in "acde"} for p, c in ["Pa", "Qb", "Qc", "Qd", "Re"]]
    pipeline = make_pipeline(tmp_path, rows, UnpairedSource, global_batch_size=1)
    sequences = [sequence for row in read_all_rows(pipeline) for sequence in split_sequences(row)]
    together = sorted(zip(sequences[::2], sequences[1::2], strict=True))
    mismatches = [((p, a), b) for (p, a, _, _), (q, b, _, _) in together if p == q]
    # A mismatch is the previous answer to another prompt; the last answer precedes the first.
    assert mismatches == [
        (("<>P", "a<>"), "e<>"),
        (("<>Q", "b<>"), "a<>"),
        (("<>Q", "c<>"), "a<>"),
        (("<>Q", "d<>"), "a<>"),
        (("<>R", "e<>"), "d<>"),
    ]
    assert [(first[2:], second[2:]) for first, second in together] == [
        ((-1 if first[1] == "b<>" else 1, 1.0), (0, 0.0)) for first, _ in together
    ]
    assert pipeline.train_leaves[0].rows.note.endswith("4 desirable and 1 undesirable")


def test_kl_answers_for_one_prompt_wrap_around(tmp_path: Path):
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in ["Pa", "Pb", "Qc", "Pd", "Pe"]]
    pipeline = make_pipeline(tmp_path, rows, UnpairedSource, global_batch_size=1)
    sequences = [sequence for row in read_all_rows(pipeline) for sequence in split_sequences(row)]
    mismatch_by_answer = {first[1]: second[1] for first, second in zip(sequences[::2], sequences[1::2], strict=True)}
    assert mismatch_by_answer == {"a<>": "c<>", "b<>": "c<>", "c<>": "b<>", "d<>": "c<>", "e<>": "c<>"}


def test_warnings_about_unpaired_answers(tmp_path: Path):
    rows = [{"prompt": p, "completion": c, "label": c == "c"} for p, c in ["Pa", "Qb", "Rc"]]
    for name in ("both", "desirable", "undesirable", "long"):
        (tmp_path / name).mkdir()
    assert make_pipeline(tmp_path / "both", rows, UnpairedSource, global_batch_size=1).warnings() == []
    for label, kind in ((1, "desirable"), (0, "undesirable")):
        alike = [{**row, "label": label} for row in rows]
        (warning,) = make_pipeline(tmp_path / kind, alike, UnpairedSource, global_batch_size=1).warnings()
        assert warning.startswith(f"data.source: all 3 labeled answers are {kind}: ")
    long = [{"prompt": f"{number}", "chosen": "a" * 20, "rejected": "b" * 20} for number in range(4)]
    (warning,) = make_pipeline(tmp_path / "long", long, seq_len=16, global_batch_size=1).warnings()
    assert warning.startswith(
        "data.source: answers are truncated in 4 of 4 examples, because a row of data.seq_len=16 holds two"
    )


def test_pairs_convert_to_unpaired_rows(tmp_path: Path):
    pipeline = make_pipeline(tmp_path, some_pairs(6), UnpairedSource)
    sequences = [sequence for row in read_all_rows(pipeline) for sequence in split_sequences(row)]
    assert sum(label for _, _, label, _ in sequences) == 0
    assert sum(ends for *_, ends in sequences) == 12
    for (prompt, _, _, _), (same_prompt, mismatch, _, _) in zip(sequences[::2], sequences[1::2], strict=True):
        assert prompt == same_prompt
        assert prompt[2] != mismatch[0], "an answer to the same prompt"


def test_single_unpaired_row_has_no_mismatch(tmp_path: Path):
    with pytest.raises(ValueError, match=r"data.source: only one labeled answer: .*; expected more rows"):
        make_pipeline(tmp_path, [LABEL], UnpairedSource)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [PairSource, UnpairedSource])
def test_batches_have_the_arrays_that_are_promised(source: type, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", some_pairs(40))
    validation = {"held_out": config_for(source, paths=[str(path)], split="validation", validation_fraction=0.3)}
    pipeline = make_pipeline(tmp_path, some_pairs(40), source, validation=validation)
    for evaluation in (False, True):
        promised = pipeline.arrays(evaluation=evaluation)
        batches = [pipeline.train_batch(0, [0, 1])]
        if evaluation:
            with pipeline.eval_batches("held_out", [0, 1]) as iterator:
                batches = list(iterator)
        for batch in batches:
            assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == promised
    assert ("labels" in promised) == (source is UnpairedSource)
    assert {"ends", "segments", "positions", "bytes"} <= promised.keys()


def test_batches_depend_only_on_seed_and_step_and_are_sharded(tmp_path: Path):
    pipeline = make_pipeline(tmp_path, some_pairs(60), global_batch_size=4)
    again = make_pipeline(tmp_path, some_pairs(60), global_batch_size=4, workdir="other")
    other_seed = make_pipeline(tmp_path, some_pairs(60), global_batch_size=4, seed=1)
    assert pipeline.fingerprint() == again.fingerprint() != other_seed.fingerprint()
    with pipeline.train_iterator(0, range(4)) as whole_run, again.train_iterator(3, [2, 3]) as resumed:
        batches = [next(whole_run) for _ in range(9)]
        for index, batch in batches[3:]:
            resumed_index, rows = next(resumed)
            assert index == resumed_index
            for name, array in batch.items():
                np.testing.assert_array_equal(array[2:], rows[name])
    first = other_seed.train_batch(0, range(4))
    assert any((first[name] != batches[0][1][name]).any() for name in first)


def test_fingerprint_covers_everything_that_changes_rows(tmp_path: Path):
    fingerprints = {
        make_pipeline(tmp_path, some_pairs(60), packed=packed, seq_len=seq_len).fingerprint()
        for packed in (True, False)
        for seq_len in (40, 64)
    }
    assert len(fingerprints) == 4
    # They all share one tokenization.
    assert len(list((tmp_path / "workdir/data").glob("tokens-*"))) == 1


def test_a_process_that_does_not_write_reads_the_same(tmp_path: Path):
    primary = make_pipeline(tmp_path, some_pairs(20))
    reader = make_pipeline(tmp_path, some_pairs(20), setup=False)
    reader.setup(tmp_path / "workdir", is_primary=False)
    for name, array in primary.train_batch(5, [1]).items():
        np.testing.assert_array_equal(array, reader.train_batch(5, [1])[name])


def test_parts_are_disjoint_by_prompt_and_parquet_is_read(tmp_path: Path):
    rows = [{"prompt": f"q{i % 40}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(120)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts = {}
    for split in ("train", "validation", "all"):
        source = PairSource(paths=[str(tmp_path / "rows.parquet")], split=split, validation_fraction=0.3)
        prompts[split] = [json.loads(document)[1] for document in source.documents()]
    assert len(prompts["train"]) + len(prompts["validation"]) == len(prompts["all"]) == 120
    assert not set(prompts["train"]) & set(prompts["validation"])
    assert set(prompts["validation"])
    table = pyarrow.Table.from_pylist([{"prompt": "a", "chosen": None, "rejected": "b"}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows.parquet, row 0: field 'chosen' is null"):
        list(PairSource(paths=[str(tmp_path / "rows.parquet")]).documents())


def test_tokenizer_is_trained_on_the_pairs_text(tmp_path: Path):
    rows = [{"prompt": "abab", "chosen": f"abab{i}", "rejected": f"cdcd{i}"} for i in range(30)]
    source = PairSource(paths=[str(write_rows(tmp_path / "a.jsonl", rows))])
    assert list(source.training_texts())[:3] == ["abab", "abab0", "cdcd0"]
    tokenizer = config_for(BPETokenizer, vocab_size=262)
    pipeline = make_pipeline(tmp_path, rows, tokenizer=tokenizer)
    assert pipeline.tokenizer.encode_document("abab") == [0, pipeline.tokenizer._library.token_to_id("abab")]


def test_messages_need_a_template_and_sources_must_match(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1 .*: messages need the chat template of a Pretrained"):
        make_pipeline(tmp_path, [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}])
    pairs = config_for(PairSource, paths=[str(tmp_path / "rows.jsonl")])
    text = config_for(TextFiles, paths=[str(tmp_path / "rows.jsonl")])
    mixture = config_for(Mixture, sources=[pairs, text], weights=[1.0, 1.0])
    message = (
        r"data.source.sources.1 is a TextFiles and data.source.sources.0 a PairSource: expected sources of one kind"
    )
    with pytest.raises(ValueError, match=message):
        make_pipeline(tmp_path, [PAIR], source=mixture, setup=False)
