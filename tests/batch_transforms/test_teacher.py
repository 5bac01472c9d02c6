"""The teacher of a run: its stored values match what it computes and are found by row; everything else is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from plimsoll.framework.batch_transforms.teacher import Teacher
from plimsoll.framework.batch_transforms.teacher_files import (
    TeacherFacts,
    TeacherOutputs,
    TeacherRows,
    TeacherWriter,
    row_key,
)
from plimsoll.framework.batch_transforms.teacher_scoring import (
    IDS,
    LOG_PROBS,
    TAIL,
    TeacherScorer,
    hash_sources,
    list_rows,
    store,
    weights_digest,
)
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TextFiles
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.layout import TrainState
from plimsoll.framework.objectives.distillation import Distillation
from plimsoll.framework.program.program import Program
from tests.support import small

TOP_K = 8
VOCAB = 257


def write_texts(folder: Path, *, words: int = 2000) -> Path:
    """Write a training text and a held-out text to a new folder, and return the folder."""
    folder.mkdir()
    rng = np.random.default_rng(words)
    for name, count in (("train", words), ("valid", 60)):
        text = " ".join(rng.choice(["the", "quick", "brown", "fox", "jumps", "over"], count))
        (folder / f"{name}.txt").write_text(text)
    return folder


def experiment(folder: Path, *, layers: int, mesh: dict[str, int] | None = None, masked: bool = False) -> Config:
    """Return the config of a byte-level llama with `layers` layers on the folder's texts."""
    config = small.experiment(small.llama(vocab_size=VOCAB, stack__num_layers=layers), mesh=mesh)
    config.data = config_for(
        DataPipeline,
        source=config_for(TextFiles, paths=[str(folder / "train.txt")]),
        validation={"held": config_for(TextFiles, paths=[str(folder / "valid.txt")])},
        tokenizer=config_for(ByteTokenizer),
        seq_len=32,
        global_batch_size=8,
        document_mask=masked,
        cache_dir=str(folder / "cache"),
    )
    return config


def student(folder: Path, scores: Path, *, top_k: int = TOP_K, **fields) -> Config:
    """Return the config of a student that reads the scores."""
    config = experiment(folder, layers=1, **fields)
    config.model.head.objective = config_for(Distillation, alpha=0.0)
    config.batch_transform = config_for(Teacher, path=str(scores), top_k=top_k)
    return config


def build_scorer(folder: Path, program: Program, state, data: DataPipeline, *, top_k: int = TOP_K) -> TeacherScorer:
    facts = TeacherFacts(
        weights=weights_digest(program.weights(state)),
        tokenizer=data.tokenizer.digest,
        vocab_size=VOCAB,
        seq_len=data.seq_len,
        top_k=top_k,
        data=hash_sources(data),
    )
    return TeacherScorer(program, state, facts, averaged=False, batch_size=4)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "documents"])
def teacher_scores(request, tmp_path_factory) -> tuple[Path, Path, Program, dict, bool]:
    """(texts, scores, the teacher, its state, whether documents are masked)."""
    root = tmp_path_factory.mktemp("teacher")
    texts = write_texts(root / "texts")
    config = experiment(texts, layers=2, masked=request.param)
    program = small.program(config)
    state = program.init()
    data = program.experiment.data
    data.setup(root / "teacher")
    config.trainer.max_steps = 10
    num_added, num_rows = store(
        build_scorer(texts, program, state, data), list_rows(config.instantiate(), data, "run"), root / "scores"
    )
    assert num_added == num_rows > 80
    return texts, root / "scores", program, state, request.param


def open_program(config: Config, workdir: Path) -> Program:
    program = small.program(config)
    program.experiment.data.setup(workdir)
    batch_transform = program.experiment.batch_transform
    assert batch_transform is not None
    batch_transform.open(program, workdir, is_new_run=True, log=lambda line: None)
    return program


def compute_teacher_log_probs(program: Program, state, batch) -> np.ndarray:
    """Return the teacher's log-probabilities of every token, float64[B, S, V]."""
    ctx = program.evaluation_context({name: jnp.asarray(value) for name, value in batch.items()})
    logits = program.experiment.language_model.logits(program.weights(state), ctx, state.buffer)
    return log_softmax(np.asarray(logits, np.float64), axis=-1)


def assert_is_what_the_teacher_says(complete_batch, log_probs: np.ndarray, counted: np.ndarray, top_k: int) -> None:
    ids, values, tail = (np.asarray(complete_batch[name]) for name in (IDS, LOG_PROBS, TAIL))
    assert ids.shape == (*log_probs.shape[:2], top_k)
    expected = np.take_along_axis(log_probs, ids, -1)
    np.testing.assert_allclose(values[counted], expected[counted], rtol=1e-3, atol=1e-4)
    assert (np.diff(expected, axis=-1)[counted] <= 1e-6).all()
    others = log_probs.copy()
    np.put_along_axis(others, ids, -np.inf, -1)
    np.testing.assert_allclose(tail[counted], logsumexp(others, axis=-1)[counted], rtol=1e-3, atol=5e-4)
    assert (expected.min(-1) >= others.max(-1) - 1e-6)[counted].all()


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [None, {"data": 2, "seq": 4}], ids=["one", "eight"])
@pytest.mark.parametrize("top_k", [TOP_K, 3])
def test_batches_contain_the_teacher_scores(teacher_scores, tmp_path, mesh, top_k):
    """Test rows in a different order than in the files, training and evaluation, fewer tokens, and eight devices."""
    texts, scores, teacher, state, masked = teacher_scores
    config = student(texts, scores, top_k=top_k, mesh=mesh, masked=masked)
    program = open_program(config, tmp_path)
    data = program.experiment.data
    for batch in (data.train_batch(3, program.rows), data.train_batch(0, program.rows[::-1])):
        complete_batch = program.complete_batch(TrainState(), program.put(batch))
        assert set(complete_batch) == set(program.batch_specs)
        delivered = {name: batch[name] for name in data.arrays()}
        counted = batch["weights"] > 0
        assert_is_what_the_teacher_says(
            complete_batch, compute_teacher_log_probs(teacher, state, delivered), counted, top_k
        )
    with data.eval_batches("held", program.rows) as batches:
        last = list(batches)[-1]
    # The last batch of an evaluation has rows with only padding.
    padding = last["weights"].sum(1) == 0
    assert padding.any()
    complete_batch = program.complete_batch(TrainState(), program.put(last))
    delivered = {name: last[name] for name in data.arrays()}
    assert_is_what_the_teacher_says(
        complete_batch, compute_teacher_log_probs(teacher, state, delivered), last["weights"] > 0, top_k
    )
    assert (np.asarray(complete_batch[TAIL])[padding] == 0).all()


@pytest.mark.pairs
def test_a_student_trains_and_evaluates(teacher_scores, tmp_path):
    texts, scores, _, _, masked = teacher_scores
    program = open_program(student(texts, scores, masked=masked), tmp_path)
    data = program.experiment.data
    state = program.init()
    divergences = []
    for step in range(8):
        batch = data.train_batch(step, program.rows)
        state, metrics = program.step(state, program.put(batch))
        divergences.append(float(metrics["head/kl"]))
    assert divergences[-1] < 0.8 * divergences[0]
    with data.eval_batches("held", program.rows) as batches:
        sums = program.evaluate(state, program.put(next(iter(batches))))
    summary = program.experiment.model.summary({name: float(value) for name, value in sums.items()})
    assert {"loss", "kl", "nll", "perplexity", "agreement"} <= set(summary)


def refusal(config: Config, workdir: Path) -> str:
    """Return the one-line error that refuses a run on this config."""
    with pytest.raises((ValueError, FileNotFoundError)) as info:
        open_program(config, workdir)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.first(1)
def test_incompatible_teacher_files_are_refused(teacher_scores, tmp_path):
    texts, scores, _, _, masked = teacher_scores

    def line(change, *, folder=texts, path=scores) -> str:
        config = student(folder, path, masked=masked)
        change(config)
        return refusal(config, tmp_path / "run")

    def keep(config):
        """Change nothing."""

    assert "holds no teacher.json: expected a folder that `plimsoll score`" in line(keep, path=tmp_path / "none")
    assert "stored for data.seq_len = 32, the run has 16" in line(lambda c: c.data.set_path("seq_len", 16))
    assert f"stored with --top_k={TOP_K}, batch_transform.top_k = 9 needs" in line(
        lambda c: c.batch_transform.set_path("top_k", 9)
    )
    assert "batch_transform.top_k = 300: expected at most" in line(lambda c: c.batch_transform.set_path("top_k", 300))
    others = write_texts(tmp_path / "others", words=1999)
    assert re.search(r"stored for other data than data.source \(\w{12}; stored: train", line(keep, folder=others))
    assert "nothing reads its arrays" in line(lambda c: c.model.head.set_path("objective", None))
    # Adding or removing the document mask makes it different data.
    assert "stored for other data" in line(lambda c: c.data.set_path("document_mask", not masked))


def test_a_row_that_is_not_stored_is_named(teacher_scores, tmp_path):
    texts, scores, _, _, masked = teacher_scores
    program = open_program(student(texts, scores, masked=masked), tmp_path)
    batch = program.experiment.data.train_batch(0, program.rows)
    batch["tokens"] = batch["tokens"] + 1
    with pytest.raises(
        ValueError, match=r"a row that the run reads is not among its .* stored rows; run `plimsoll score` again"
    ):
        program.complete_batch(TrainState(), program.put(batch))


def test_missing_rows_fail_before_compilation(teacher_scores, tmp_path):
    texts, scores, _, _, masked = teacher_scores
    config = student(texts, scores, masked=masked)
    num_stored = TeacherRows(scores).num_rows
    program = open_program(config, tmp_path)
    program.experiment.batch_transform.check_files(program, tmp_path, is_new_run=True)
    few = tmp_path / "few"
    rows = TeacherRows(scores)
    writer = TeacherWriter(few, rows.facts)
    with writer.open():
        writer.append(rows.take(list(range(num_stored - 3))))
        writer.commit()
    program = open_program(student(texts, few, masked=masked), tmp_path)
    message = rf"3 are not among its {num_stored - 3:,} stored rows; run `plimsoll score`"
    with pytest.raises(ValueError, match=message) as raised:
        program.experiment.batch_transform.check_files(program, tmp_path, is_new_run=True)
    assert "\n" not in str(raised.value)


def test_resumed_run_requires_the_same_teacher(teacher_scores, tmp_path):
    texts, scores, _, _, masked = teacher_scores
    workdir = tmp_path / "run"
    workdir.mkdir()
    open_program(student(texts, scores, masked=masked), workdir)
    record = (workdir / "teacher.json").read_text()
    other = tmp_path / "other"
    rows = TeacherRows(scores)
    with TeacherWriter(other, replace(rows.facts, weights="x" * 64)).open() as writer:
        writer.append(rows.take(list(range(rows.num_rows))))
        writer.commit()
    program = small.program(student(texts, other, masked=masked))
    program.experiment.data.setup(workdir)
    batch_transform = program.experiment.batch_transform
    with pytest.raises(ValueError, match=r"a different teacher \(weights xxxxxxxxxxxx; the run started with"):
        batch_transform.check_files(program, workdir, is_new_run=False)
    # An evaluation opens the given teacher, and writes nothing.
    batch_transform.open(program, workdir, is_new_run=False, log=lambda line: None)
    assert (workdir / "teacher.json").read_text() == record
    batch_transform.check_files(program, workdir, is_new_run=True)
    for damaged in ("[]", "{}", '{"weights": 1}', "["):
        (workdir / "teacher.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"teacher\.json|Expecting value"):
            batch_transform.check_files(program, workdir, is_new_run=False)


FACTS = TeacherFacts("w" * 64, "t" * 64, VOCAB, 4, 2, {"train": "d" * 64})


def random_rows(count: int, seed: int = 0) -> TeacherOutputs:
    rng = np.random.default_rng(seed)
    empty = FACTS.empty(count)
    return TeacherOutputs(*(rng.integers(0, 99, array.shape).astype(array.dtype) for array in empty.arrays))


def test_uncommitted_rows_are_rewritten(tmp_path):
    """After a kill between `append` and `commit`, the bytes equal those of an uninterrupted writer."""
    first, second = random_rows(3), random_rows(2, seed=1)
    for name in ("whole", "killed"):
        with TeacherWriter(tmp_path / name, FACTS).open() as writer:
            writer.append(first)
            writer.commit()
            writer.append(second)
            if name == "whole":
                writer.commit()
    assert TeacherWriter(tmp_path / "killed", FACTS).num_rows == 3
    with TeacherWriter(tmp_path / "killed", FACTS).open() as writer:
        writer.append(second)
        writer.commit()
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes(), path.name
    rows = TeacherRows(tmp_path / "whole")
    number = rows.number_by_key.get(second.keys[1].tobytes())
    assert number == 4
    for stored, expected in zip(rows.take([4, 0]).arrays, second.arrays, strict=True):
        np.testing.assert_array_equal(stored[0], expected[1])


def test_file_sizes_match_the_docs(tmp_path):
    with TeacherWriter(tmp_path, FACTS).open() as writer:
        writer.append(random_rows(5))
        writer.commit()
    sizes = sum(path.stat().st_size for path in tmp_path.glob("*.bin"))
    assert sizes == 5 * (4 * (2 * 4 + 4) + 20) == 5 * FACTS.row_bytes


@pytest.mark.parametrize("name", ["ids", "log_probs", "tails", "checksums"])
def test_modified_row_is_refused(tmp_path, name):
    with TeacherWriter(tmp_path, FACTS).open() as writer:
        writer.append(random_rows(5))
        writer.commit()
    path = tmp_path / f"{name}.bin"
    content = bytearray(path.read_bytes())
    row_bytes = len(content) // 5
    content[3 * row_bytes : 4 * row_bytes] = bytes(row_bytes)
    path.write_bytes(content)
    rows = TeacherRows(tmp_path)
    rows.take([0, 4, 2])
    with pytest.raises(ValueError, match="is damaged: row 3 does not match its checksum"):
        rows.take([0, 3])


def test_unrelated_files_are_not_touched(tmp_path):
    with TeacherWriter(tmp_path, FACTS).open() as writer:
        writer.append(random_rows(5))
        writer.commit()
        with pytest.raises(ValueError, match="another process is writing there"):
            TeacherWriter(tmp_path, FACTS).open().__enter__()
    other = TeacherFacts(**{**vars(FACTS), "weights": "x" * 64})
    with pytest.raises(
        ValueError, match="the outputs of a teacher with different weights: wwwwwwwwwwww, not xxxxxxxxxxxx;"
    ):
        TeacherWriter(tmp_path, other)
    (tmp_path / "ids.bin").write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"ids.bin has 5 bytes; its 5 rows take 80"):
        TeacherRows(tmp_path)
    manifest = json.loads((tmp_path / "teacher.json").read_text())
    (tmp_path / "teacher.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(ValueError, match="has format 1; this version reads format 2: run `plimsoll score`"):
        TeacherRows(tmp_path)
    (tmp_path / "teacher.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a valid file of `plimsoll score`"):
        TeacherRows(tmp_path)


def test_equal_tokens_in_other_documents_are_another_row():
    tokens = np.arange(4, dtype=np.int32)
    one, two = np.array([1, 1, 1, 1], np.int32), np.array([1, 1, 2, 2], np.int32)
    keys = {row_key({"tokens": tokens}), *(row_key({"tokens": tokens, "segments": x}) for x in (one, two))}
    assert len(keys) == 3


def test_weight_digest_depends_on_every_weight():
    weights = {"a": jnp.ones(3), "b": {"c": jnp.zeros((2, 2))}}
    changed = jax.tree.map(lambda x: x, weights)
    changed["b"]["c"] = weights["b"]["c"].at[1, 1].set(1e-6)
    assert weights_digest(weights) == weights_digest(jax.tree.map(lambda x: x + 0, weights)) != weights_digest(changed)
