"""What is kept of a run of torch and transformers, and the inputs that both sides get."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from framework.data.packing import Batch, pack
from tools.peers.families import BATCH, SEQ_LEN, VOCAB

Tensors = dict[str, np.ndarray]
FOLDER = Path(__file__).resolve().parents[2] / "tests" / "peers" / "recorded"
# What is recorded of objectives other than next tokens; preferences have a folder of their own.
TUNING = FOLDER / "tuning"
COUNTED = 32  # targets that the loss counts
TRAINING_STEPS = 10
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
SEPARATOR = 0  # opens a document; no other token has this id
# Lengths of the documents of each packed row: one full row, and one with padding behind its last document.
DOCUMENTS = ((8, 12), (5, 6, 3))


@dataclass(frozen=True)
class Inputs:
    """Token ids, drawn from a seed.

    Args:
        windows: int32[B, S + 1], inputs and the targets that follow them.
        ignored: bool[B, S], targets that the loss leaves out: as many as leave a power of two, whose inverse is exact.
        training: int32[steps, B, S + 1], one batch per training step; they repeat, so that the loss falls.
        packed: int32[B, S + 1], rows of several documents; the second begins inside of one.
    """

    windows: np.ndarray
    ignored: np.ndarray
    training: np.ndarray
    packed: np.ndarray

    @staticmethod
    def draw(seed: int) -> Inputs:
        """New ones."""
        rng = np.random.default_rng(seed)
        shape = (BATCH, SEQ_LEN + 1)
        packed = rng.integers(1, VOCAB, shape, dtype=np.int32)
        for row, lengths in enumerate(DOCUMENTS):
            packed[row, np.cumsum(lengths)[:-1]] = SEPARATOR
        packed[0, 0] = SEPARATOR
        ignored = np.arange(BATCH * SEQ_LEN) >= COUNTED
        distinct = rng.integers(0, VOCAB, (3, *shape), dtype=np.int32)
        return Inputs(
            windows=rng.integers(0, VOCAB, shape, dtype=np.int32),
            ignored=rng.permutation(ignored).reshape(BATCH, SEQ_LEN),
            training=distinct[np.arange(TRAINING_STEPS) % len(distinct)],
            packed=packed,
        )

    def batch(self) -> Batch:
        """`windows` as the data pipeline would hand them to the model."""
        batch = pack(list(self.windows), SEQ_LEN, separators=None)
        batch["weights"] = np.where(self.ignored, np.float32(0), batch["weights"])
        return batch

    def training_batches(self) -> list[Batch]:
        """One batch per step."""
        return [pack(list(windows), SEQ_LEN, separators=None) for windows in self.training]

    def packed_batch(self) -> Batch:
        """`packed` with masks between documents, made by the data pipeline; what is past the last one is padding."""
        rows = [row[: sum(lengths) + 1] for row, lengths in zip(self.packed, DOCUMENTS, strict=True)]
        return pack(rows, SEQ_LEN, separators=[SEPARATOR] * len(rows))


@dataclass(frozen=True)
class Results:
    """What transformers and torch computed, in float32, under their names.

    Args:
        weights: the first parameters; float16 numbers, so that a file of half the size holds them exactly.
        logits: float32[B, S, V] of `windows`.
        loss: float32 scalar, mean cross-entropy of the targets that are not ignored.
        gradients: of that loss.
        packed_logits: float32[B, S, V], each document of `packed` alone; zero at padding.
        losses: float32[steps], before each update.
        update_norms: by our path, float32 scalars: how far all updates together moved each parameter.
    """

    weights: Tensors
    logits: np.ndarray
    loss: np.ndarray
    gradients: Tensors
    packed_logits: np.ndarray
    losses: np.ndarray
    update_norms: Tensors

    @staticmethod
    def of_gradients(weights: Tensors, logits: np.ndarray, loss: np.ndarray, gradients: Tensors) -> Results:
        """Where nothing was packed and nothing trained."""
        return Results(weights, logits, loss, gradients, np.zeros(0), np.zeros(0), {})


def save(path: Path, inputs: Inputs, results: Results) -> None:
    """Writes both into one compressed file, weights as float16."""
    arrays: Tensors = {}
    for part in (inputs, results):
        for field in fields(part):
            value = getattr(part, field.name)
            arrays |= (
                {f"{field.name}:{k}": v for k, v in value.items()} if isinstance(value, dict) else {field.name: value}
            )
    for key in arrays:
        if key.startswith("weights:"):
            half = arrays[key].astype(np.float16)
            assert np.array_equal(half.astype(np.float32), arrays[key]), key
            arrays[key] = half
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]


def load(path: Path) -> tuple[Inputs, Results]:
    """Reads what `save` wrote; weights as float32."""
    single: Tensors = {}
    groups: dict[str, Tensors] = {}
    with np.load(path) as file:
        for key in file.files:
            group, _, name = key.partition(":")
            if name:
                groups.setdefault(group, {})[name] = file[key]
            else:
                single[group] = file[key]
    groups["weights"] = {name: array.astype(np.float32) for name, array in groups["weights"].items()}
    inputs = Inputs(**{field.name: single.pop(field.name) for field in fields(Inputs)})
    return inputs, Results(**single, **groups)  # pyright: ignore[reportArgumentType]
