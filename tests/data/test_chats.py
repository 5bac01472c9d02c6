"""Conversations: their rendering, targets and packing, and errors that name the malformed row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.chats import ChatSource
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.sources import TextFiles
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.launch.prepare import prepare
from tests.support import pretrained

RECORDED = json.loads((Path(__file__).parent / "recorded_chats.json").read_text())


def make_tokenizer(tmp_path: Path, family: str, **config: Any) -> PretrainedTokenizer:
    tokenizer = PretrainedTokenizer(path=str(pretrained.write(tmp_path / family, family, **config)), vocab_size=512)
    (tmp_path / "kept").mkdir(exist_ok=True)
    tokenizer.prepare(tmp_path / "kept", None, write=True)
    return tokenizer


def encode_rows(tokenizer: PretrainedTokenizer, *rows: Any, tmp_path: Path, **fields: Any) -> list[tuple[list, list]]:
    """Return (ids, targets) of each row, read through a file."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ChatSource(paths=[str(path)], **fields)
    values = source.codec(tokenizer).encode_batch(list(source.documents()))
    return [((value >> 1).tolist(), (value & 1).tolist()) for value in values]


def messages(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return start + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


@pytest.mark.parametrize("tags", [True, False], ids=["generation-tags", "common-prefix"])
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_tokens_and_masks_match_transformers(family: str, tags: bool, tmp_path: Path):
    """The recorded values are computed by tests/peers/test_chats.py."""
    template = pretrained.FAMILIES[family][-1]
    tokenizer = make_tokenizer(
        tmp_path, family, chat_template=template if tags else pretrained.without_generation(template)
    )
    expected = RECORDED[family]
    ours = encode_rows(tokenizer, *[{"messages": chat} for chat in pretrained.CHATS], tmp_path=tmp_path)
    assert len(ours) == len(expected) == 4
    for (ids, targets), theirs in zip(ours, expected, strict=True):
        assert ids == theirs["input_ids"]
        assert targets == theirs["assistant_masks"]
        assert 0 < sum(targets) < len(ids)
        assert {ids[i] for i in range(len(ids)) if targets[i]} & {*tokenizer.stop_ids, 4 if family == "gemma" else -1}


QWEN3 = (  # like Qwen 3's: only the last answer has thoughts
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.last %}{% set content = '<think>\n\n</think>\n\n' + content %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_writes_the_last_answer_in_another_way(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path, "chatml", chat_template=QWEN3)
    ((ids, targets),) = encode_rows(tokenizer, {"messages": messages("a", "the fox", "b", "dog")}, tmp_path=tmp_path)
    text = [tokenizer.table[i].decode() or f"[{i}]" for i in ids]
    assert "".join(t for t, target in zip(text, targets, strict=True) if target) == (
        "the fox[2]<think>\n\n</think>\n\ndog[2]"
    )


QWEN3_TOOLS = (  # like Qwen 3's: thoughts only after the last question, tool results as user turns
    "{% set ns = namespace(query=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.query %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ '<call>' + call.name + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<response>' + m.content + '</response><|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SUFFIX = (  # a suffix after the last turn, and turns without an end token
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if loop.last %}"
    "{{ '<|endoftext|>' }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
U, A, T = "user", "assistant", "tool"
CALL = {"tool_calls": [{"name": "ls"}]}
NO_THOUGHT = "<think>\n\n</think>\n\n"
ALTERED = {
    "two answers in a row": (
        QWEN3, {}, [(U, "a"), (A, "the fox"), (A, "dog")],
        ["the fox[2]", NO_THOUGHT + "dog[2]"],
    ),
    "three, then a question": (
        QWEN3, {}, [(U, "a"), (A, "fox"), (A, "fox"), (A, "dog"), (U, "b"), (A, "dog"), (A, "fox")],
        ["fox[2]", "fox[2]", "dog[2]", "dog[2]", NO_THOUGHT + "fox[2]"],
    ),
    "an answer opens the conversation": (
        QWEN3, {}, [(A, "the fox"), (U, "a"), (A, "dog")],
        ["the fox[2]", NO_THOUGHT + "dog[2]"],
    ),
    "tools, then a question": (
        QWEN3_TOOLS, {},
        [(U, "a"), (A, "", {**CALL, "reasoning_content": "hm"}), (T, "x"), (A, "fox"), (U, "b"), (A, "dog")],
        ["<call>ls</call>[2]", "fox[2]", NO_THOUGHT + "dog[2]"],
    ),
    "no thoughts": (
        QWEN3_TOOLS, {"enable_thinking": False},
        [(U, "a"), (A, "<b>"), (A, "<think"), (U, "b"), (A, "dog"), (A, "fox")],
        ["<b>[2]", "<think[2]", "dog[2]", "fox[2]"],
    ),
    "a suffix": (SUFFIX, {}, [(U, "a"), (A, "fox"), (A, "fox"), (U, "b"), (A, "dog")], ["fox", "fox", "dog[0]"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ALTERED)
def test_templates_that_change_messages(case: str, tmp_path: Path):
    """The targets are each answer and its end token, in order, without the text that the template writes in between."""
    template, variables, turns, expected = ALTERED[case]
    tokenizer = make_tokenizer(tmp_path, "chatml", chat_template=template)
    chat = [{"role": turn[0], "content": turn[1], **(turn[2] if len(turn) > 2 else {})} for turn in turns]
    ((ids, targets),) = encode_rows(tokenizer, {"messages": chat}, tmp_path=tmp_path, template_variables=variables)
    pieces, previous = [], 0
    for i, target in zip(ids, targets, strict=True):
        if target and not previous:
            pieces.append("")
        if target:
            pieces[-1] += tokenizer.table[i].decode() or f"[{i}]"
        previous = target
    assert pieces == expected


@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_special_tokens_come_only_from_the_template(family: str, tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path, family)
    attack = "".join(tokenizer.special_tokens) + "x"
    plain, attacked = encode_rows(
        tokenizer, {"messages": messages("x", "y")}, {"messages": messages(attack, "y")}, tmp_path=tmp_path
    )
    ids = [tokenizer._library.token_to_id(token) for token in tokenizer.special_tokens]
    assert [i for i in plain[0] if i in ids] == [i for i in attacked[0] if i in ids]
    assert attack.encode() in tokenizer.decode_bytes(attacked[0])
    assert tokenizer.decode_bytes(np.array(attacked[0])[np.array(attacked[1]) > 0]).strip() == b"y"


def test_every_format_gives_the_same_rows(tmp_path: Path):
    tokenizer, chat = make_tokenizer(tmp_path, "chatml"), messages("who are you?", "a model", system="short")
    rows = [
        {"messages": chat, "id": 1},
        {"conversations": [{"from": f, "value": m["content"]} for f, m in zip(["system", "human", "gpt"], chat)]},  # noqa: B905
        {"prompt": "who are you?", "completion": "a model", "system": "short"},
        {"prompt": chat[:2], "completion": chat[2:]},
        {"instruction": "who are you?", "input": "", "output": "a model", "system": "short"},
    ]
    results = encode_rows(tokenizer, *rows, tmp_path=tmp_path)
    assert all(result == results[0] for result in results)
    parquet.write_table(pyarrow.table({"messages": [chat, chat[1:]]}), tmp_path / "x.parquet")
    source = ChatSource(paths=[str(tmp_path / "x.parquet")])
    first, second = source.codec(tokenizer).encode_batch(list(source.documents()))
    assert (first >> 1).tolist() == results[0][0]
    assert len(second) < len(first)
    with_input = encode_rows(tokenizer, {"instruction": "a", "input": "b", "output": "c"}, tmp_path=tmp_path)[0][0]
    assert b"a\n\nb" in tokenizer.decode_bytes(with_input)


def test_template_variables_and_tools_reach_the_template(tmp_path: Path):
    template = "{{ who }}{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = make_tokenizer(tmp_path, "chatml", chat_template=template)
    row = {"messages": messages("a", "b"), "tools": [{"name": "é"}]}
    ((ids, _),) = encode_rows(tokenizer, row, tmp_path=tmp_path, template_variables={"who": "me"})
    assert tokenizer.decode_bytes(ids).decode() == 'me[{"name": "é"}]ab'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [', r"line 2 \(byte \d+\): not JSON"),
        ("[1]", r"line 2 \(byte \d+\): expected a JSON object, given list"),
        ('{"text": "a"}', "expected a row with messages, .*, given one with text"),
        ('{"messages": []}', "expected a row with messages"),
        ('{"messages": [{"role": "user"}]}', "line 2 .*: message 0: content is NoneType, expected text"),
        ('{"messages": [{"role": "user", "content": "a"}, 3]}', 'message 1: expected {"role": ..., "content": ...}'),
        ('{"conversations": [{"from": "gpt", "value": 3}]}', "message 0: content is int"),
        ('{"prompt": "a", "completion": null}', "message 1: content is NoneType"),
        ('{"instruction": "\\ud83d", "output": "b"}', "surrogates not allowed"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2 .*the chat template .*roles must alternate"),
    ],
)
def test_a_malformed_row_is_named(row: str, message: str, tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages("a", "b")}) + "\n" + row + "\n")
    built = make_pipeline(tmp_path, family="mistral", setup=False)
    with pytest.raises(ValueError, match=rf"data.source: {tmp_path}/chats.jsonl, .*{message}"):
        built.setup(tmp_path / "run")


# ---- the pipeline


def make_pipeline(tmp_path: Path, *, family: str = "chatml", setup: bool = True, run: str = "run", **fields: Any):
    folder = pretrained.write(tmp_path / family, family, **fields.pop("config", {}))
    if not isinstance(fields.get("source"), Config):
        paths = [str(tmp_path / "chats.jsonl")]
        fields["source"] = config_for(ChatSource, **{"paths": paths, **fields.pop("source", {})})
    defaults: dict[str, Any] = {
        "tokenizer": config_for(PretrainedTokenizer, path=str(folder), vocab_size=512),
        "seq_len": 64,
        "global_batch_size": 4,
    }
    built = config_for(DataPipeline, **{**defaults, **fields}).instantiate()
    if setup:
        built.setup(tmp_path / run)
    return built


def write_chats(tmp_path: Path, count: int = 60) -> list[list[dict[str, str]]]:
    """Write and return distinct chats of many lengths.

    The last three: a prompt longer than 65 tokens, no answer, and an answer that is cut.
    """
    words = pretrained.TEXTS[0].split()
    texts = [" ".join(words[(i * k) % 9] for k in range(1, 2 + (i * 7) % 6)) + f" {i}" for i in range(count)]
    chats = [messages(text, text[::-1][: i % 9 + 1]) for i, text in enumerate(texts)]
    chats += [messages("x" * 200, "cut away"), messages("no answer"), messages("cut", "y" * 200)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return chats


def split_segments(batches: list[dict[str, np.ndarray]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (tokens of a conversation, its targets) of each segment; checks positions, shifts and padding too."""
    found = []
    for batch in batches:
        assert (batch["weights"][batch["segments"] == 0] == 0).all()
        for row in range(len(batch["tokens"])):
            for segment in range(1, batch["segments"][row].max() + 1):
                (at,) = np.nonzero(batch["segments"][row] == segment)
                assert (np.diff(at) == 1).all()
                assert batch["positions"][row][at].tolist() == list(range(len(at)))
                tokens, targets = batch["tokens"][row][at], batch["targets"][row][at]
                assert (tokens[1:] == targets[:-1]).all()
                counted = (0, *batch["weights"][row][at].astype(int).tolist())
                found.append(((*tokens.tolist(), int(targets[-1])), counted))
    return found


def test_conversations_are_packed_whole_and_every_one_comes_once_an_epoch(tmp_path: Path):
    chats = write_chats(tmp_path)
    built = make_pipeline(tmp_path)
    (report,) = built.source_report()
    assert report.documents == 63
    assert report.note.endswith("1 conversations truncated to 65 tokens, 2 without an answer skipped")
    assert float(report.note.split("%")[0]) < 12
    assert built.document_mask
    expected = {}
    for ids, targets in encode_rows(built.tokenizer, *[{"messages": c} for c in chats], tmp_path=tmp_path):
        if any(targets[1:65]):
            expected[tuple(ids[:65])] = tuple(targets[:65])
    assert len(expected) == 61
    rows = [built.train_batch(step, range(4)) for step in range(2 * report.sequences)]
    flat = [{name: array[row : row + 1] for name, array in batch.items()} for batch in rows for row in range(4)]
    first, second = flat[: report.sequences], flat[report.sequences : 2 * report.sequences]
    assert dict(split_segments(first)) == expected
    assert sorted(split_segments(first)) == sorted(split_segments(second))
    assert [row["tokens"].tolist() for row in first] != [row["tokens"].tolist() for row in second]


def test_batches_depend_only_on_seed_and_step(tmp_path: Path):
    write_chats(tmp_path)
    one, two, other = (
        make_pipeline(tmp_path),
        make_pipeline(tmp_path, run="two"),
        make_pipeline(tmp_path, run="3", seed=1),
    )
    for step in (0, 5, 1000):
        whole = one.train_batch(step, range(4))
        for name, array in two.train_batch(step, [3, 1]).items():
            assert np.array_equal(array, whole[name][[3, 1]])
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    assert sorted(split_segments([one.train_batch(0, range(4))])) != sorted(
        split_segments([other.train_batch(0, range(4))])
    )


def test_new_template_changes_the_fingerprint(tmp_path: Path):
    write_chats(tmp_path)
    before = make_pipeline(tmp_path)
    changed = pretrained.CHATML.replace("assistant\\n", "Assistant\\n").replace("message['content'] +", "'!' +")
    after = make_pipeline(tmp_path, config={"chat_template": changed})
    assert before.fingerprint() != after.fingerprint()


def test_the_split_is_disjoint_complete_and_stable(tmp_path: Path):
    write_chats(tmp_path, 300)
    parts = {}
    for split in ("all", "train", "validation"):
        source = ChatSource(paths=[str(tmp_path / "chats.jsonl")], split=split, validation_fraction=0.2)
        parts[split] = [json.loads(text)[1] for text in source.documents()]
    assert 30 < len(parts["validation"]) < 90
    assert [chat for chat in parts["all"] if chat not in parts["validation"]] == parts["train"]
    few = ChatSource(paths=source.paths, split="validation", validation_fraction=0.001)
    assert len(list(few.documents())) < 4
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    (tmp_path / "chats.jsonl").write_text("\n".join(lines[::-1]))
    again = [json.loads(text)[1] for text in source.documents()]
    assert again == parts["validation"][::-1]


def test_evaluation_counts_the_answers(tmp_path: Path):
    write_chats(tmp_path)
    half = {"paths": [str(tmp_path / "chats.jsonl")], "validation_fraction": 0.5}
    held = config_for(ChatSource, split="validation", **half)
    built = make_pipeline(tmp_path, source={**half, "split": "train"}, validation={"held": held})
    batches = list(built.eval_batches("held", range(4)))
    assert [row.name for row in built.source_report()] == ["train", "held"]
    counted = sum(batch["weights"].sum() for batch in batches)
    text = built.document_text("held")
    lengths = sum((built.tokenizer.byte_lengths[b["targets"]] * b["weights"]).sum() for b in batches)
    assert len(text) == lengths
    assert counted > 0
    train = {tokens for tokens, _ in split_segments([built.train_batch(s, range(4)) for s in range(20)])}
    assert not train & {tokens for tokens, _ in split_segments(batches)}


@pytest.mark.parametrize("family", ["llama3", "gemma"])
def test_plain_text_with_a_published_tokenizer(family: str, tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} fox\n" * 300)
    text = config_for(TextFiles, paths=[str(tmp_path / "*.txt")])
    built = make_pipeline(tmp_path, family=family, source=text, validation={"same": text})
    opening = built.tokenizer.bos_id
    batches = list(built.eval_batches("same", range(4)))
    assert batches[0]["tokens"][0, 0] == opening
    assert sum(batch["weights"][batch["targets"] == opening].sum() for batch in batches) == 1  # of the second document
    assert built.document_text("same").decode() == "the a fox\n" * 300 + "the b fox\n" * 300


def test_epochs_in_steps(tmp_path: Path):
    write_chats(tmp_path)
    built = make_pipeline(tmp_path)
    sequences = built.source_report()[0].sequences
    assert built.epoch_steps(1) == -(-sequences // 4)
    assert built.epoch_steps(2.5) == -(-5 * sequences // 8)


def test_conversations_are_not_prepared(tmp_path: Path):
    write_chats(tmp_path)
    folder = str(pretrained.write(tmp_path / "chatml", "chatml"))
    config = config_for(
        DataPipeline,
        source=config_for(ChatSource, paths=[str(tmp_path / "chats.jsonl")]),
        tokenizer=config_for(PretrainedTokenizer, path=folder, vocab_size=512),
        seq_len=64,
        global_batch_size=4,
    )
    with pytest.raises(ValueError, match=r"data.source: conversations cannot be prepared; .* data.cache_dir"):
        prepare(config, tmp_path / "out", force=False)


def test_untrainable_conversations_are_refused(tmp_path: Path):
    write_chats(tmp_path)
    with pytest.raises(
        ValueError, match=r"data.source: ChatSource needs .* a PretrainedTokenizer, given ByteTokenizer"
    ):
        make_pipeline(tmp_path, tokenizer=config_for(ByteTokenizer))
    with pytest.raises(
        ValueError, match=r"data.source: .*has no chat template: put a chat_template.jinja there, or set"
    ):
        make_pipeline(tmp_path, config={"chat_template": None})
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages("no answer")}))
    with pytest.raises(ValueError, match=r"data.source: no conversation has an answer within data.seq_len=64"):
        make_pipeline(tmp_path)
