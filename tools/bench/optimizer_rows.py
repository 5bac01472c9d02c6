"""Rows of the tools.bench.optimizers comparison, one per optimizer, and the run that they share.

All rows train a model of 1M parameters (`optimizer_model.py`) on the same tokens: float32 compute, gradients clipped to
a global norm of 1, a linear warm-up over a tenth of the steps, a cosine down to a tenth of the peak, no weight decay,
no rules.

Imports configs, framework.
"""

from __future__ import annotations

from dataclasses import dataclass

import optax

from plimsoll import configs
from plimsoll.framework.config import Config, config_for

WARMUP, END = 0.1, 0.1  # fraction of the steps; fraction of the peak rate
BATCH = 4  # sequences of 256 tokens
MODEL = "tools/bench/optimizer_model.py:one_million"


@dataclass(frozen=True)
class Row:
    """An optimizer and its settings, as given on the command line.

    Args:
        title: name in the table.
        sets: overrides by dotted path, in order; the first one selects the optimizer.
        rates: learning rates to try, ascending; or the name of the row whose best rate is used.
        weights: whether the row belongs to the second table, which compares dtypes of weights.
        baseline: name of the row to compare with.
    """

    title: str
    sets: dict[str, str]
    rates: tuple[float, ...] | str
    weights: bool = False
    baseline: str = "adamw"


def _row(title: str, optimizer: str, rates: tuple[float, ...] | str, **more: str) -> Row:
    """Build a row with `learner.optimizer`. Keywords are paths such as `learner__moment_dtype`, or optimizer fields."""
    sets = {"learner.optimizer": optimizer}
    for name, value in more.items():
        sets[name.replace("__", ".") if "__" in name else f"learner.optimizer.{name}"] = value
    return Row(title, sets, rates)


_BF16 = {"learner__moment_dtype": "bfloat16"}
_ADAM = (2e-3, 5e-3, 1.25e-2)
_RELATIVE = (0.03, 0.1, 0.3)  # rates of steps that are relative to the size of the weights, which is 0.02 at first
_LION = (2e-4, 5e-4, 1.25e-3)
_TABLES = """[{"$class": "plimsoll.Rule", "pattern": "^embed|norm",
    "set": {"learning_rate.peak_value": 0.0125, "learning_rate.end_value": 0.00125}}]"""
ROWS = {
    "adamw": _row("AdamW", "adamw", _ADAM, b2="0.95"),
    "adamw_two": _row("AdamW, 0.0125 for embedding and norms", "adamw", _ADAM, b2="0.95", learner__rules=_TABLES),
    "adamw_bf16": _row("AdamW, bf16 moments", "adamw", "adamw", b2="0.95", **_BF16),
    "lamb": _row("LAMB", "optax.lamb", (0.01, 0.03, 0.1), b2="0.95"),
    "adamw8bit": _row("AdamW, 8 bits", "adamw8bit", "adamw", b2="0.95"),
    "adamw8bit_tables": _row("AdamW, 8 bits, tables too", "adamw8bit", "adamw", b2="0.95", tables="8bit"),
    "lion": _row("Lion, bf16 momentum", "lion", _LION, b1="0.95", b2="0.98", **_BF16),
    "adam_mini": _row("Adam-mini", "adam_mini", _ADAM, b2="0.95"),
    "adam_mini_bf16": _row("Adam-mini, bf16 moments", "adam_mini", "adam_mini", b2="0.95", **_BF16),
    "muon": _row("Muon, AdamW for the rest", "muon", _ADAM, b2="0.95"),
    "muon_bf16": _row("Muon, bf16 moments", "muon", "muon", b2="0.95", **_BF16),
    "galore": _row("GaLore, rank 32", "galore", _ADAM, rank="32", b2="0.95"),
    "apollo": _row("APOLLO, rank 32", "apollo", _ADAM, rank="32", b2="0.95"),
    "apollo_mini": _row("APOLLO-Mini", "apollo_mini", _ADAM, b2="0.95"),
    "adafactor_momentum": _row("Adafactor, bf16 momentum", "adafactor", _RELATIVE, momentum="0.9", **_BF16),
    "adafactor": _row("Adafactor", "adafactor", "adalomo"),
    "adalomo": _row("AdaLomo", "adalomo", _RELATIVE),
}


def _weights(title: str, of: str, **learner: str) -> Row:
    """Build a row that runs another row's optimizer at its best rate with bf16 weights.

    Moments are float32 unless that row sets another dtype.
    """
    sets = {"model.param_dtype": "bfloat16", "learner.moment_dtype": "float32"} | ROWS[of].sets
    return Row(title, sets | {f"learner.{name}": v for name, v in learner.items()}, of, weights=True, baseline="master")


ROWS |= {
    "master": _weights("AdamW, f32 master weights", "adamw", master_dtype="float32"),
    "stochastic": _weights("AdamW, stochastic rounding", "adamw", rounding="stochastic"),
    "kahan": _weights("AdamW, Kahan summation", "adamw", rounding="kahan"),
    "nearest": _weights("AdamW, rounding to nearest", "adamw"),
    "adalomo_stochastic": _weights("AdaLomo, stochastic rounding", "adalomo", rounding="stochastic"),
    "lion_stochastic": _weights("Lion, bf16 momentum, stochastic rounding", "lion", rounding="stochastic"),
}


def build(row: Row, rate: float, seed: int, steps: int, spec: str = MODEL) -> Config:
    """Build the config of one run. Raises ConfigError if a row's path or value does not exist."""
    config = configs.load(spec)
    config.learner.rules, config.learner.master_dtype = [], None
    for path, text in row.sets.items():
        config.override(path, text)
    config.learner.optimizer.learning_rate = config_for(
        optax.warmup_cosine_decay_schedule,
        init_value=0.0,
        peak_value=rate,
        warmup_steps=max(1, round(WARMUP * steps)),
        decay_steps=steps,
        end_value=END * rate,
    )
    for name in ("weight_decay", "adam_weight_decay"):
        if name in config.learner.optimizer:
            config.learner.optimizer.set_path(name, 0.0)
    config.data.seed = config.trainer.seed = seed
    config.data.global_batch_size = BATCH
    config.trainer.max_steps = steps
    return config
