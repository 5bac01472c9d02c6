"""Changes to the training itself that autotuning may make, if the user allows them by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence

import optax

from plimsoll.extras.autotune.settings import Setting, Settings, setting
from plimsoll.framework.config import Config, ConfigError, config_for, did_you_mean, get_schema, get_target
from plimsoll.framework.optimizers.quantized import adamw8bit

MASTER = "learner.master_dtype"
MOMENTS = "learner.moment_dtype"
ROUNDING = "learner.rounding"
OPTIMIZER = "learner.optimizer"
# {name: description}
ALLOWED = {
    "rounding": "no master copy: bfloat16 weights with stochastic rounding (learner.rounding=stochastic)",
    "moments": "moments in bfloat16 (learner.moment_dtype)",
    "optimizer8bit": "AdamW with 8-bit moments and the same hyperparameters (learner.optimizer)",
}
# These two exclude each other: with the 8-bit optimizer the moments already have a dtype.
_EXCLUSIVE = {"moments", "optimizer8bit"}


def parse_allowed(text: str) -> tuple[str, ...]:
    """Parse a list of names such as "rounding,optimizer8bit". Raises ConfigError for an unknown name.

    Args:
        text: names, separated by commas.

    Returns:
        The names in the order of `ALLOWED`, without duplicates.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    # An empty list is an error, too: report it under the text itself.
    for name in names or [text]:
        if name not in ALLOWED:
            hint = did_you_mean(name, ALLOWED)
            raise ConfigError(f"--allow={text}: {name!r} is not one of {', '.join(ALLOWED)}{hint}")
    return tuple(name for name in ALLOWED if name in names)


def list_variants(config: Config, names: Sequence[str], fixed: Collection[str]) -> list[Settings]:
    """Return every combination of the allowed changes, starting with no change.

    Args:
        config: config, resolved for the target.
        names: allowed changes, keys of `ALLOWED`.
        fixed: paths of fields that the user has set.
    """
    changes = {}
    for name in names:
        change = _build_change(config, name)
        if change and not any(one.path in fixed for one in change):
            changes[name] = change
    variants: list[Settings] = []
    for count in range(len(changes) + 1):
        for chosen in itertools.combinations(changes, count):
            if not set(chosen) >= _EXCLUSIVE:
                variants.append(tuple(itertools.chain.from_iterable(changes[name] for name in chosen)))
    return variants


def _build_change(config: Config, name: str) -> Settings:
    """Return the settings of an allowed change; empty if they would change nothing or do not suit the config."""
    learner = config.learner
    if name == "rounding":
        # Stochastic rounding replaces the master copy only for weights that are stored in bfloat16.
        is_possible = learner.master_dtype is not None and str(config.model.get("param_dtype")) == "bfloat16"
        return (setting(MASTER, None), setting(ROUNDING, "stochastic")) if is_possible else ()
    if name == "moments":
        return (setting(MOMENTS, "bfloat16"),) if str(learner.moment_dtype) != "bfloat16" else ()
    optimizer = learner.optimizer
    if get_target(optimizer) is not optax.adamw:
        return ()
    shared_fields = {field: optimizer[field] for field in get_schema(config_for(adamw8bit)) if field in optimizer}
    # JSON keeps the override on one line, so that it can be pasted.
    return (Setting(OPTIMIZER, json.dumps(config_for(adamw8bit, **shared_fields).to_dict())),)
