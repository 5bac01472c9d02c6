"""What of the training itself a choice may change, if somebody allows it by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence

import optax

from framework.config import Config, ConfigError, config_for, did_you_mean, schema_of, target_of
from framework.optimizers.quantized import adamw8bit
from framework.plan.auto.settings import Setting, Settings, setting

MASTER = "learner.master_dtype"
MOMENTS = "learner.moment_dtype"
ROUNDING = "learner.rounding"
OPTIMIZER = "learner.optimizer"
# {name: what it means}
ALLOWED = {
    "rounding": "no master copy of the weights: bfloat16 ones are rounded at random (learner.rounding=stochastic)",
    "moments": "moments in bfloat16 (learner.moment_dtype)",
    "optimizer8bit": "AdamW with moments in 8 bits and the same hyperparameters (learner.optimizer)",
}
# 8 bits are the dtype of moments already.
_APART = {"moments", "optimizer8bit"}


def names_of(text: str) -> tuple[str, ...]:
    """The names in a list, "rounding,optimizer8bit". Raises ConfigError: one of them is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in ALLOWED:
            raise ConfigError(f"--allow={text}: {name!r} is none of {', '.join(ALLOWED)}{did_you_mean(name, ALLOWED)}")
    return tuple(name for name in ALLOWED if name in names)


def variants(config: Config, names: Sequence[str], fixed: Collection[str]) -> list[Settings]:
    """The changes that the names allow, and those of several of them together; no change comes first.

    Args:
        config: resolved for the target.
        names: of `ALLOWED`.
        fixed: paths that somebody has set.
    """
    changes = {}
    for name in names:
        change = _change(config, name)
        if change and not any(one.path in fixed for one in change):
            changes[name] = change
    together: list[Settings] = []
    for count in range(len(changes) + 1):
        for chosen in itertools.combinations(changes, count):
            if not set(chosen) >= _APART:
                together.append(tuple(itertools.chain.from_iterable(changes[name] for name in chosen)))
    return together


def _change(config: Config, name: str) -> Settings:
    """The settings of a name; none where they would change nothing of this config, or do not go with it."""
    learner = config.learner
    if name == "rounding":
        is_possible = learner.master_dtype is not None and str(config.model.get("param_dtype")) == "bfloat16"
        return (setting(MASTER, None), setting(ROUNDING, "stochastic")) if is_possible else ()
    if name == "moments":
        return (setting(MOMENTS, "bfloat16"),) if str(learner.moment_dtype) != "bfloat16" else ()
    optimizer = learner.optimizer
    if target_of(optimizer) is not optax.adamw:
        return ()
    shared_fields = {field: optimizer[field] for field in schema_of(config_for(adamw8bit)) if field in optimizer}
    # In one line, as overrides are pasted.
    return (Setting(OPTIMIZER, json.dumps(config_for(adamw8bit, **shared_fields).to_dict())),)
