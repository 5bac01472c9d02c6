"""Stored results of torch and transformers, and the inputs that both sides use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from plimsoll.framework.data.packing import Batch, pack
from tools.peers.families import BATCH, SEQ_LEN, VOCAB

Tensors = dict[str, np.ndarray]
FOLDER = Path(__file__).resolve().parents[2] / "tests" / "peers" / "recorded"
# Records of objectives other than next-token prediction; preferences have their own folder.
TUNING = FOLDER / "tuning"
COUNTED = 32  # number of targets that the loss counts
TRAINING_STEPS = 10
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
SEPARATOR = 0  # starts a document; no other token has this id
# Lengths of the documents in each packed row: one full row, and one with padding after its last document.
DOCUMENTS = ((8, 12), (5, 6, 3))


@dataclass(frozen=True)
class Inputs:
    """Token ids, drawn from a seed.

    Args:
        windows: int32[B, S + 1], inputs and the targets that follow them.
        ignored: bool[B, S], targets that the loss leaves out. The number of the others is a power of two, so that its
            inverse is exact.
        training: int32[steps, B, S + 1], one batch per training step; they repeat, so that the loss falls.
        packed: int32[B, S + 1], rows of several documents; the second row starts inside a document.
    """

    windows: np.ndarray
    ignored: np.ndarray
    training: np.ndarray
    packed: np.ndarray

    @staticmethod
    def draw(seed: int) -> Inputs:
        """Draw inputs."""
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
        """Return `windows` in the form that the data pipeline passes to the model."""
        batch = pack(list(self.windows), SEQ_LEN, separators=None)
        batch["weights"] = np.where(self.ignored, np.float32(0), batch["weights"])
        return batch

    def training_batches(self) -> list[Batch]:
        """Return one batch per step."""
        return [pack(list(windows), SEQ_LEN, separators=None) for windows in self.training]

    def pack_batch(self) -> Batch:
        """Return `packed` with document masks, made by the data pipeline; what follows the last document is padding."""
        rows = [row[: sum(lengths) + 1] for row, lengths in zip(self.packed, DOCUMENTS, strict=True)]
        return pack(rows, SEQ_LEN, separators=[SEPARATOR] * len(rows))


@dataclass(frozen=True)
class PeerResults:
    """Results of transformers and torch in float32, under their names.

    Args:
        weights: the initial parameters; exact float16 numbers, so that a file of half the size stores them without
            loss.
        logits: float32[B, S, V] of `windows`.
        loss: float32 scalar, mean cross-entropy of the targets that are not ignored.
        gradients: gradients of that loss.
        packed_logits: float32[B, S, V], each document of `packed` on its own; zero at padding.
        losses: float32[steps], loss before each update.
        update_norms: norm of each parameter's change over all updates, by our path; float32 scalars.
    """

    weights: Tensors
    logits: np.ndarray
    loss: np.ndarray
    gradients: Tensors
    packed_logits: np.ndarray
    losses: np.ndarray
    update_norms: Tensors

    @staticmethod
    def from_gradients(weights: Tensors, logits: np.ndarray, loss: np.ndarray, gradients: Tensors) -> PeerResults:
        """Build results without packed inputs and without training."""
        return PeerResults(weights, logits, loss, gradients, np.zeros(0), np.zeros(0), {})


def save(path: Path, inputs: Inputs, results: PeerResults) -> None:
    """Write both into one compressed file, weights as float16."""
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


def load(path: Path) -> tuple[Inputs, PeerResults]:
    """Read a file that `save` wrote; weights become float32."""
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
    return inputs, PeerResults(**single, **groups)  # pyright: ignore[reportArgumentType]
