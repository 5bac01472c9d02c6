"""Stored results of TRL's preference losses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from tools.peers.recording import FOLDER, Tensors

PREFERENCES = FOLDER / "preferences"
# Groups of tensors whose values are exact float16 numbers, so that a file of half the size stores them without loss.
_HALVES = ("weights", "reference")


@dataclass(frozen=True)
class PreferenceResults:
    """Results of TRL in float32, under the names of published weights.

    Args:
        weights, reference: weights of the model before training, and of the reference model.
        loss: float32 scalar of a batch.
        gradients: gradients of that loss.
        metrics: metrics of that batch that TRL has, by our names.
        losses: float32[steps], loss before each update.
        trained: the weights after these steps.
    """

    weights: Tensors
    reference: Tensors
    loss: np.ndarray
    gradients: Tensors
    metrics: Tensors
    losses: np.ndarray
    trained: Tensors


def save(path: Path, results: PreferenceResults) -> None:
    """Write one compressed file."""
    arrays: Tensors = {}
    for field in fields(results):
        value = getattr(results, field.name)
        if not isinstance(value, dict):
            arrays[field.name] = value
            continue
        for name, array in value.items():
            rounded_array = array.astype(np.float16) if field.name in _HALVES else array
            assert np.array_equal(rounded_array.astype(np.float32), array), name
            arrays[f"{field.name}:{name}"] = rounded_array
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]


def load(path: Path) -> PreferenceResults:
    """Read a file that `save` wrote; tensors are float32."""
    groups: dict[str, Tensors] = {field.name: {} for field in fields(PreferenceResults)}
    single: Tensors = {}
    with np.load(path) as file:
        for key in file.files:
            group, _, name = key.partition(":")
            if name:
                groups[group][name] = file[key].astype(np.float32)
            else:
                single[group] = file[key]
    return PreferenceResults(**{**groups, **single})  # pyright: ignore[reportArgumentType]
