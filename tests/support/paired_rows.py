"""A user config file: a preference run on plain text, in which the two halves of each row form a pair.

The first half of a row is preferred, the second rejected, so a run with a reference model needs no preference data.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.batches import RowSet, Shapes
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.norm import LayerNorm
from plimsoll.framework.objectives.preferences import DPO
from tests.support.tiny import tiny


class Halves(DataPipeline):
    """Rows of text as pairs: `segments` 1 and 2, and `ends` set at the end of each half."""

    def arrays(self, *, evaluation: bool = False) -> Shapes:
        shapes = super().arrays(evaluation=evaluation)
        return {**shapes, "ends": shapes["weights"]}

    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        return to_pair(super().training_row(sequence, source, index))

    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        num_rows, read = super().evaluation_rows(name)
        return num_rows, lambda index: to_pair(read(index))

    def row_sets(self) -> dict[str, RowSet]:
        return {
            name: replace_row(rows, lambda index, rows=rows: to_pair(rows.row(index)))
            for name, rows in super().row_sets().items()
        }


def replace_row(rows: RowSet, row: Callable[[int], Batch]) -> RowSet:
    """Return the row set with another function that reads a row."""
    return dataclasses.replace(rows, row=row)


def to_pair(row: Batch) -> Batch:
    """Return the row as a pair; an incomplete row becomes padding."""
    length = len(row["weights"])
    half = length // 2
    number = np.repeat([1, 2], [half, length - half]).astype(np.int32)
    whole = np.int32(row["weights"].all())
    ends = np.zeros(length, np.float32)
    ends[[half - 1, length - 1]] = 1.0
    positions = np.concatenate([np.arange(half), np.arange(length - half)]).astype(np.int32)
    return {
        **row,
        "weights": row["weights"] * whole,
        "segments": number * whole,
        "positions": positions * whole,
        "ends": ends * whole,
    }


def dpo() -> Config:
    """tiny (0.05M parameters) trained by DPO, with the kind of reference that Reference chooses."""
    config = tiny()
    config.data = config_for(Halves, **{**{name: config.data[name] for name in config.data}, "document_mask": True})
    config.model.head = config_for(LMHead, norm=config_for(LayerNorm), tied=True, objective=config_for(DPO))
    config.batch_transform = config_for(Reference)
    config.trainer.eval_every = 6
    return config


def dpo_lora() -> Config:
    """dpo, with LoRA adapters."""
    config = dpo()
    config.model.lora = config_for(LoRA, rank=4)
    return config
