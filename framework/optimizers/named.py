"""Optimizers by short name: `--config.learner.optimizer=lion`. Others go by dotted name (docs/optimizers.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from plimsoll.framework.optimizers.adalomo import adalomo
from plimsoll.framework.optimizers.adam_mini import adam_mini
from plimsoll.framework.optimizers.lowrank import apollo, apollo_mini
from plimsoll.framework.optimizers.matrices import galore, muon
from plimsoll.framework.optimizers.quantized import adamw8bit

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": optax.adamw,
    "adafactor": optax.adafactor,
    "lion": optax.lion,
    "adalomo": adalomo,
    "adam_mini": adam_mini,
    "adamw8bit": adamw8bit,
    "muon": muon,
    "galore": galore,
    "apollo": apollo,
    "apollo_mini": apollo_mini,
}
