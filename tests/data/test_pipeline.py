"""The pipeline as the trainer uses it: deterministic global batches, any split of rows, resuming, evaluation."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import JsonLines, Mixture, StdlibSource, TextFiles, TokenMemmap, flatten_sources
from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer, NoTokenizer
from plimsoll.framework.data.vocabulary import training_text
from plimsoll.framework.run.report import compression_lines, compressor_bits_per_byte

B, S = 8, 32


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_batch_depends_only_on_seed_and_step(documents, pipeline):
    documents()
    one, two, other = pipeline(), pipeline("elsewhere"), pipeline("third", seed=1)
    for step in (0, 1, 7, 10**6):
        assert equal(one.train_batch(step, range(B)), two.train_batch(step, range(B)))
        assert not equal(one.train_batch(step, range(B)), other.train_batch(step, range(B)))
    assert not equal(one.train_batch(0, range(B)), one.train_batch(1, range(B)))
    masked = pipeline("fourth", document_mask=True)
    assert one.fingerprint() == two.fingerprint()
    assert len({one.fingerprint(), other.fingerprint(), masked.fingerprint()}) == 3
    plain, also = one.train_batch(2, range(B)), masked.train_batch(2, range(B))
    assert set(also) - set(plain) == {"positions", "segments"}
    assert equal(plain, {name: also[name] for name in plain})


@pytest.mark.parametrize("sizes", [(12, 6), (6, 12), (7, 5)])
def test_epoch_has_each_sequence_once_for_any_batch_size(documents, pipeline, sizes):
    documents(count=60)
    before, after = (pipeline(global_batch_size=size) for size in sizes)
    assert after.fingerprint() != before.fingerprint() == after.fingerprint_at(sizes[0])
    order = BatchOrder().with_batch_size(10, *sizes)
    assert BatchOrder.from_json(json.loads(json.dumps(order.to_json()))) == order
    steps = after.epoch_steps(1, order.origin)
    batches = [before.train_batch(step, range(sizes[0])) for step in range(10)]
    with after.train_iterator(10, range(sizes[1]), order) as later:
        batches += [next(later)[1] for _ in range(10, steps)]
    rows = [row.tobytes() for batch in batches for row in batch["tokens"]]
    assert before.num_rows <= len(rows) < before.num_rows + sizes[1]
    assert len(rows[10 * sizes[0] :]) > 2 * sizes[1]
    every = before.train_leaves[0].rows
    assert sorted(rows[: before.num_rows]) == sorted(every.row(i)["tokens"].tobytes() for i in range(before.num_rows))


def test_skipped_rows_stay_skipped_for_any_batch_size():
    order = BatchOrder(left_out=(2, 6)).with_batch_size(4, 12, 6)
    assert order.batch_after(4) == 5
    assert order.sequences_after(4, 6) == 60
    # Batch 6 of size 12 has sequences 72 to 83: with batches of size 6 from sequence 60 on, these are two batches.
    assert [order.origin + order.batch_after(step) * 6 for step in range(4, 8)] == [60, 66, 84, 90]
    assert order.with_batch_size(6, 6, 12).sequences_after(6, 12) == 84


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_hold_rows_from_one_global_batch(documents, pipeline, processes: int):
    documents()
    built = pipeline(document_mask=True)
    for step in (0, 5):
        whole = built.train_batch(step, range(B))
        for process in range(processes):
            rows = range(process, B, processes)
            assert equal(built.train_batch(step, rows), {name: array[rows] for name, array in whole.items()})


def test_resuming_at_a_step_equals_the_uninterrupted_run(documents, pipeline):
    documents()
    with pipeline().train_iterator(0, range(B)) as run:
        undisturbed = [next(run) for _ in range(12)]
    with pipeline("resumed").train_iterator(5, range(B)) as run:
        resumed = [next(run) for _ in range(7)]
    assert [step for step, _ in resumed] == list(range(5, 12))
    assert all(equal(a, b) for (_, a), (_, b) in zip(undisturbed[5:], resumed, strict=True))


def test_epochs_tile_the_stream_and_differ(documents, pipeline):
    texts = documents()
    built = pipeline()
    (report,) = built.source_report()
    stream = [token for text in texts for token in [256, *text.encode()]]
    assert (report.tokens, report.documents, report.bytes) == (len(stream), len(texts), len("".join(texts).encode()))
    assert report.sequences == (len(stream) - 1) // S
    expected = {tuple(stream[i * S : i * S + S + 1]) for i in range(report.sequences)}
    rows = [
        (*batch["tokens"][row], batch["targets"][row][-1])
        for batch in (built.train_batch(step, range(B)) for step in range(2 * report.sequences // B + 1))
        for row in range(B)
    ]
    first, second = rows[: report.sequences], rows[report.sequences : 2 * report.sequences]
    assert set(map(tuple, first)) == expected
    assert sorted(first) == sorted(second)
    assert first != second


# ---- evaluation


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_evaluation_reads_each_token_once_and_counts_every_byte(documents, pipeline, tmp_path: Path, kind: str):
    documents()
    texts = documents("held", count=23, seed=9)
    tokenizer = config_for(ByteTokenizer) if kind == "bytes" else config_for(BPETokenizer, vocab_size=300)
    held = config_for(TextFiles, paths=[str(tmp_path / "held/*.txt")])
    built = pipeline(validation={"held": held}, tokenizer=tokenizer)
    expected = [t for tokens in built.tokenizer.encode_batch(texts) for t in [built.tokenizer.eos_id, *tokens]]
    batches = list(built.eval_batches("held", range(B)))
    assert len(batches) == math.ceil(math.ceil((len(expected) - 1) / S) / B)
    assert {batch["tokens"].shape for batch in batches} == {(B, S)}
    used = [batch["weights"] > 0 for batch in batches]
    assert np.concatenate([b["targets"][u] for b, u in zip(batches, used, strict=True)]).tolist() == expected[1:]
    assert np.concatenate([b["tokens"][u] for b, u in zip(batches, used, strict=True)]).tolist() == expected[:-1]
    text = "".join(texts).encode()
    assert built.document_text("held") == text
    assert sum((built.tokenizer.byte_lengths[b["targets"]] * b["weights"]).sum() for b in batches) == len(text)


def test_evaluation_in_parts_and_limits(documents, pipeline, tmp_path: Path):
    documents()
    documents("held", count=30, seed=3)
    held = config_for(TextFiles, paths=[str(tmp_path / "held/*.txt")])
    built = pipeline(validation={"held": held}, document_mask=True)
    whole = list(built.eval_batches("held", range(B)))
    for batch, part in zip(whole, built.eval_batches("held", [5, 2]), strict=True):
        assert equal(part, {name: array[[5, 2]] for name, array in batch.items()})
    ends = list(built.eval_batches("held", range(B), limit=2))
    assert [batch["tokens"].tolist() for batch in ends] == [whole[0]["tokens"].tolist(), whole[-1]["tokens"].tolist()]
    assert len(list(built.eval_batches("held", range(B), limit=10**6))) == len(whole)
    assert (whole[-1]["segments"][whole[-1]["weights"] == 0] == 0).all()


def test_compressors_on_known_text(documents, pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = compressor_bits_per_byte(b"abcdefgh" * 10_000)
    assert sizes.keys() == {"gzip -9", "xz -9"}
    assert 0 < sizes["xz -9"] < sizes["gzip -9"] < 0.1
    documents()
    built = pipeline(validation={"held": config_for(TextFiles, paths=[str(tmp_path / "corpus/*.txt")])})
    evaluation = {"eval/held/bits_per_byte": 2.5}
    line = compression_lines(built, evaluation)[0]
    assert re.match(r"held: 2.500 bits per byte; on the same \S+ [KM]iB of text gzip -9 ", line)
    # With a limit, the compressors get only that part, and the line reports it.
    line = compression_lines(built, evaluation, limit=2, workdir="runs/a")[0]
    num_batches = len(built.eval_batch_numbers("held"))
    command = "plimsoll evaluate --workdir=runs/a --validation"
    assert line.startswith(f"held: 2.500 bits per byte of 2 of {num_batches} batches (all: {command}); on the same ")
    part = built.document_text("held", limit=2)
    bits = compressor_bits_per_byte(part)["gzip -9"]
    assert line.endswith(f"gzip -9 {bits:.3f}, xz -9 {compressor_bits_per_byte(part)['xz -9']:.3f}")
    whole = built.document_text("held")
    assert 0 < len(part) < len(whole)
    assert part[:20] == whole[:20]
    assert part[-20:] == whole[-20:]
    # The explanation is printed only if some compressor beats the model.
    assert len(compression_lines(built, {"eval/held/bits_per_byte": 0.01})) == 1
    _, why = compression_lines(built, {"eval/held/bits_per_byte": 100.0})
    assert why.startswith("fewer bits with gzip -9 and xz -9: ")
    monkeypatch.setattr("plimsoll.framework.run.report._MAX_COMPRESSED_BYTES", 1000)
    (line,) = compression_lines(built, evaluation)
    assert re.fullmatch(r"held: 2.500 bits per byte; .* of text is too much to compress for comparison", line)


# ---- mixtures, memmaps, caches


def test_mixture_samples_by_weight_also_when_nested(documents, pipeline, tmp_path: Path):
    for name, letter in (("a", "a"), ("b", "b"), ("c", "c")):
        (tmp_path / f"{name}.txt").write_text(letter * 4000)
    file = {name: config_for(TextFiles, paths=[str(tmp_path / f"{name}.txt")]) for name in "abc"}
    inner = config_for(Mixture, sources=[file["b"], file["c"]], weights=[3.0, 1.0])
    built = pipeline(source=config_for(Mixture, sources=[file["a"], inner], weights=[1.0, 1.0]))
    assert [row.name for row in built.source_report()] == ["train.0", "train.1.0", "train.1.1"]
    assert [leaf.weight for leaf in built.train_leaves] == [0.5, 0.375, 0.125]
    last = np.concatenate([built.train_batch(step, range(B))["targets"][:, -1] for step in range(100)])
    shares = [np.mean(last == ord(letter)) for letter in "abc"]
    np.testing.assert_allclose(shares, [0.5, 0.375, 0.125], atol=0.01)
    whole = built.train_batch(4, range(B))["tokens"]
    assert np.array_equal(built.train_batch(4, [1, 6])["tokens"], whole[[1, 6]])
    heavier = pipeline("x", source=config_for(Mixture, sources=[file["a"], inner], weights=[2.0, 1.0]))
    assert heavier.fingerprint() != built.fingerprint()


def test_a_memmap_without_a_tokenizer(tmp_path: Path, pipeline):
    tokens = np.random.default_rng(0).integers(0, 500, 5000).astype("<u2")
    tokens.tofile(tmp_path / "train.bin")
    source = config_for(TokenMemmap, path=str(tmp_path / "train.bin"))
    built = pipeline(source=source, tokenizer=config_for(NoTokenizer, vocab_size=500), validation={"same": source})
    assert not built.tokenizer.has_text
    assert sum(int(b["weights"].sum()) for b in built.eval_batches("same", range(B))) == 4999
    with pytest.raises(ValueError, match=r"NoTokenizer"):
        built.document_text("same")
    with pytest.raises(ValueError, match=r"document_mask needs a known separator"):
        pipeline("b", source=source, tokenizer=config_for(NoTokenizer, vocab_size=500), document_mask=True)
    masked = pipeline(
        "c", source=source, tokenizer=config_for(NoTokenizer, vocab_size=500, eos_id=7), document_mask=True
    )
    batch = masked.train_batch(0, range(B))
    assert (np.diff(batch["segments"], axis=1) == (batch["tokens"][:, 1:] == 7)).all()


def test_the_cache_is_used_by_content(documents, pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents()
    cache = str(tmp_path / "cache")
    first = pipeline("one", cache_dir=cache)
    assert not (tmp_path / "one/data").exists()
    with monkeypatch.context() as patch:
        patch.setattr("plimsoll.framework.data.pipeline.write_tokens", lambda *a: pytest.fail("tokenized again"))
        again = pipeline("two", cache_dir=cache, seq_len=16)
    assert again.source_report()[0].sha256 == first.source_report()[0].sha256
    (tmp_path / "corpus/0003.txt").write_text("changed")
    changed = pipeline("three", cache_dir=cache)
    assert changed.fingerprint() != first.fingerprint()
    bpe = pipeline("four", cache_dir=cache, tokenizer=config_for(BPETokenizer, vocab_size=300))
    assert len(list(Path(cache).glob("tokens-*"))) == 3
    (record,) = [json.loads(p.read_text()) for p in Path(cache).glob("tokens-*/source.json")][:1]
    assert record["kind"] == "TextFiles"
    assert bpe.tokenizer.digest in "".join(p.read_text() for p in Path(cache).glob("tokens-*/tokens.json"))


def test_bpe_trains_on_the_training_sources_only_by_weight(tmp_path: Path, pipeline):
    for name in ("aa", "bb", "zz"):
        lines = "".join(json.dumps({"text": name * 50}) + "\n" for _ in range(200))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    a, b, held = (config_for(JsonLines, paths=[str(tmp_path / f"{name}.jsonl")]) for name in ("aa", "bb", "zz"))
    mixture = config_for(Mixture, sources=[a, b], weights=[3.0, 1.0])
    pipeline(source=mixture, tokenizer=config_for(BPETokenizer, vocab_size=261), validation={"held": held})
    vocab = json.loads((tmp_path / "workdir/tokenizer.json").read_text())["model"]["vocab"]
    assert "aa" in vocab
    assert "zz" not in vocab
    texts = list(training_text(list(flatten_sources(mixture.instantiate(), "data.source", "train")), 4000))
    assert [sum(text[0] == letter for text in texts) for letter in "ab"] == [30, 10]


@pytest.mark.pairs
def test_the_standard_library_end_to_end(tmp_path: Path):
    config = config_for(
        DataPipeline, source=config_for(StdlibSource), tokenizer=config_for(ByteTokenizer),
        validation={"stdlib": config_for(StdlibSource, split="validation")}, seq_len=256, global_batch_size=16,
    )  # fmt: skip
    built = Config.from_json(config.to_json()).instantiate()
    built.setup(tmp_path)
    train, held = built.source_report()
    assert train.bytes > 5_000_000
    assert 0.02 < held.bytes / train.bytes < 0.10
    assert built.tokenizer.decode(built.train_batch(0, [0])["tokens"][0])
    sizes = compressor_bits_per_byte(built.document_text("stdlib"))
    assert 1.2 < sizes["xz -9"] < sizes["gzip -9"] < 2.5
