"""Stages of the training data: batches against a plain reference, positions across borders, and every wrong stage."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grain import MapDataset

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.order import BatchOrder, GlobalOrder, permute_index
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import Mixture, TextFiles
from plimsoll.framework.data.stages import DataStage

LENGTHS = {"a": 3000, "b": 1700}


@pytest.fixture
def mixture(tmp_path: Path) -> Config:
    """Two files of random ASCII text."""
    draw = np.random.default_rng(0)
    sources = []
    for name, length in LENGTHS.items():
        (tmp_path / f"{name}.txt").write_bytes(draw.integers(97, 123, length).astype(np.uint8).tobytes())
        sources.append(config_for(TextFiles, paths=[str(tmp_path / f"{name}.txt")]))
    return config_for(Mixture, sources=sources, weights=[3.0, 1.0])


def stage(**fields: Any) -> Config:
    return config_for(DataStage, **fields)


# Weights change at 5, 11 and 20, the length at 11 and 17. Batches of 16 x 16, 8 x 32 and 2 x 32 tokens.
STAGES = {
    "5": stage(weights=[1, 2]),
    "11": stage(seq_len=32, weights=[1, 0]),
    "17": stage(global_batch_size=2),
    "20": stage(weights=[0, 1]),
}
PLAIN = [(0, 16, 16, (3, 1)), (5, 16, 16, (1, 2)), (11, 32, 8, (1, 0)), (17, 32, 2, (1, 0)), (20, 32, 2, (0, 1))]


def reference(folder: Path, seed: int, num_batches: int) -> list[np.ndarray]:
    """Return the tokens of every batch: grain chooses the sources, counters are the positions, slices are the rows."""
    texts = [np.frombuffer((folder / f"{name}.txt").read_bytes(), np.uint8).astype(np.int32) for name in LENGTHS]
    texts = [np.concatenate([[256], text]) for text in texts]  # the separator opens a document
    batches = []
    positions = [0, 0]
    source: Any
    last_length = 16
    for (start, length, size, weights), stop in zip(PLAIN, [*(row[0] for row in PLAIN[1:]), num_batches], strict=True):
        rows = [(len(text) - 1) // length for text in texts]
        if length != last_length:
            old_rows = [(len(text) - 1) // last_length for text in texts]
            positions = [math.ceil(p * new / old) for p, new, old in zip(positions, rows, old_rows, strict=True)]
            last_length = length
        drawn = [index for index, weight in enumerate(weights) if weight]
        endless = [MapDataset.range(10**6).map(lambda _, index=index: index) for index in drawn]
        chosen = MapDataset.mix(endless, [weights[index] / sum(weights) for index in drawn]) if len(drawn) > 1 else None
        sequence = 0
        for _ in range(start, stop):
            batch = []
            for _ in range(size):
                source = drawn[0] if chosen is None else chosen[sequence]
                epoch, place = divmod(positions[source], rows[source])
                window = permute_index(place, rows[source], f"{seed}/{source}/{epoch}")
                batch.append(texts[source][window * length : (window + 1) * length])
                positions[source] += 1
                sequence += 1
            batches.append(np.stack(batch))
    return batches


def test_batches_equal_a_plain_reference(mixture: Config, pipeline: Callable[..., DataPipeline], tmp_path: Path):
    built = pipeline(source=mixture, stages=STAGES, seq_len=16, global_batch_size=16, seed=7)
    expected = reference(tmp_path, 7, 60)
    for index, tokens in enumerate(expected):
        size = len(tokens)
        batch = built.train_batch(index, range(size))
        assert np.array_equal(batch["tokens"], tokens), index
        assert np.array_equal(batch["targets"][:, :-1], tokens[:, 1:])
        # A process reads some of the rows, from any step on, in any order of steps.
        assert np.array_equal(built.train_batch(index, [size - 1])["tokens"], tokens[size - 1 :])
    assert np.array_equal(built.train_batch(3, [5])["tokens"], expected[3][5:6])


def test_an_iterator_ends_at_the_border_and_the_next_one_continues(mixture: Config, pipeline, tmp_path: Path):
    built = pipeline(source=mixture, stages=STAGES, seq_len=16, global_batch_size=16)
    order = BatchOrder(left_out=(4, 12))
    batches = []
    step = 2
    while step < 25:
        border = built.find_border(step, order)
        size = built.stages[
            max(i for i, one in enumerate(built.stages) if one.start <= order.batch_after(step))
        ].batch_size
        with built.train_iterator(step, range(size), order) as iterator:
            read = list(itertools.islice(iterator, 25 - step))
        assert border is None or step + len(read) == border
        batches += read
        step += len(read)
    # Batch 4 and batch 12 are left out, and the borders stay at their batches.
    assert [index for index, _ in batches] == [2, 3, *range(5, 12), *range(13, 27)]
    assert [len(batch["tokens"]) for _, batch in batches] == [16] * 8 + [8] * 5 + [2] * 10


def test_a_weight_does_not_restart_a_source(mixture: Config, pipeline):
    """Within an epoch of each source, no window is read twice, although the weights change."""
    stages = {"4": stage(weights=[1, 1]), "9": stage(weights=[1, 5])}
    built = pipeline(source=mixture, stages=stages, seq_len=16, global_batch_size=4)
    places = [built.locate(sequence) for sequence in range(200)]
    for source, length in enumerate(LENGTHS.values()):
        windows = [window for at, window in places if at == source]
        count = length // 16
        assert len(windows) >= 50
        epoch = windows[:count]
        assert len(set(epoch)) == len(epoch)
    assert [at for at, _ in places].count(0) == built.count_drawn(50)[0]


def test_the_position_of_a_mixture_is_its_count():
    for weights in ([0.9, 0.1], [0.5, 0.3, 0.2], [0.0, 1.0], [0.7, 0.0, 0.3]):
        order = GlobalOrder([40, 30, 20][: len(weights)], weights, seed=1, starts=[5, 6, 7][: len(weights)])
        sources = [order.locate(sequence)[0] for sequence in range(300)]
        for count in (0, 1, 2, 57, 299):
            expected = [[5, 6, 7][i] + sources[:count].count(i) for i in range(len(weights))]
            assert order.positions_after(count) == expected


def test_tokens_and_epochs_are_counted_across_borders(mixture: Config, pipeline):
    built = pipeline(source=mixture, stages=STAGES, seq_len=16, global_batch_size=16)
    order = BatchOrder(left_out=(3, 18))
    tokens = [16 * 16] * 11 + [8 * 32] * 6 + [2 * 32] * 30
    for steps in (0, 1, 4, 5, 12, 20, 30):
        trained = [tokens[order.batch_after(step)] for step in range(steps)]
        assert built.count_items(steps, order) == sum(trained)
    # An epoch reads the rows of the sources that are drawn from.
    epochs = [16 / (187 + 106)] * 11 + [8 / 93] * 6 + [2 / 93] * 3 + [2 / 53] * 100
    for batches in (0, 3, 11, 15, 19, 40):
        assert built.count_epochs(batches) == pytest.approx(sum(epochs[:batches]))
    for count in (0.5, 0.9, 1.2, 2.0):
        steps = built.epoch_steps(count)
        assert sum(epochs[: steps - 1]) < count <= sum(epochs[:steps]) + 1e-9


def test_a_stage_that_has_not_started_may_change(mixture: Config, pipeline, tmp_path: Path):
    """Annealing starts from a run without stages, also with a new source."""
    alone = config_for(TextFiles, paths=[str(tmp_path / "a.txt")])
    plain = pipeline("plain", source=alone)
    later = {"0": stage(weights=[1, 0]), "20": stage(weights=[1, 3])}
    annealed = pipeline("annealed", source=mixture, stages=later)
    assert annealed.fingerprint_before(20) == plain.fingerprint()
    assert annealed.fingerprint_before(21) == annealed.fingerprint() != plain.fingerprint()
    for index in (0, 19):
        assert np.array_equal(
            annealed.train_batch(index, range(8))["tokens"], plain.train_batch(index, range(8))["tokens"]
        )
    other = pipeline("other", source=mixture, stages={**later, "20": stage(weights=[2, 3])})
    assert other.fingerprint_before(20) == annealed.fingerprint_before(20)
    assert other.fingerprint_before(21) != annealed.fingerprint_before(21)
    # Stages that change nothing up to there do not change the fingerprint of a plain mixture.
    assert pipeline("m", source=mixture).fingerprint() == pipeline(
        "n", source=mixture, stages=STAGES
    ).fingerprint_before(5)


def test_a_new_stage_need_not_divide_the_batches_before_it(mixture: Config, pipeline):
    """A run resumes with a batch that the new stage's length divides, although it does not divide the old batch."""
    old = pipeline("old", source=mixture, seq_len=16, global_batch_size=3)
    new = pipeline("new", source=mixture, stages={"20": stage(seq_len=32)}, seq_len=16, global_batch_size=4)
    assert new.fingerprint_at(3, 10) == old.fingerprint()
    with pytest.raises(ValueError, match="does not divide the 48 tokens"):
        new.fingerprint_at(3, 21)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"-5": stage(weights=[1, 1])}, r"data.stages.-5: expected the step"),
        ({"1e3": stage(weights=[1, 1])}, r"data.stages.1e3: expected the step"),
        ({"5": stage()}, r"data.stages.5: changes nothing"),
        ({"0": stage(seq_len=8)}, r"data.stages.0: set data.seq_len"),
        ({"5": stage(weights=[1, 1, 1])}, r"data.stages.5.weights: expected one for each of 2 sources, given 3"),
        ({"5": stage(weights=[0, 0])}, r"weights: expected at least one weight above 0"),
        ({"5": stage(weights=[1, math.inf])}, r"weights: expected numbers of at least 0, given inf"),
        ({"5": stage(seq_len=48)}, r"seq_len = 48 does not divide the 256 tokens of a step"),
        ({"5": stage(seq_len=2048)}, r"seq_len = 2048 does not divide"),
        ({"5": config_for(TextFiles, paths=["x"])}, r"data.stages.5: expected a DataStage"),
    ],
)
def test_wrong_stages_are_refused_before_any_file_is_read(stages: dict, message: str, mixture: Config, pipeline):
    with pytest.raises(ValueError, match=message):
        pipeline(source=mixture, stages=stages, seq_len=32, setup=False)


def test_stages_need_a_mixture_to_weight_and_enough_text(mixture: Config, pipeline, tmp_path: Path):
    alone = config_for(TextFiles, paths=[str(tmp_path / "a.txt")])
    with pytest.raises(ValueError, match=r"data.stages.5.weights: data.source is no Mixture"):
        pipeline(source=alone, stages={"5": stage(weights=[1])}, setup=False)
    long = {"5": stage(seq_len=2048, global_batch_size=1)}
    with pytest.raises(ValueError, match=r"data.stages.5: data.source.sources.1: 1701 tokens are too few: .*=2048"):
        pipeline(source=mixture, stages=long)
    with pytest.raises(ValueError, match=r"expected numbers? >= 0|greater|at least 0|>= 0"):
        stage(weights=[1, -1])
