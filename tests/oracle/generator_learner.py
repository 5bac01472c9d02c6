"""Draws the learner of a random experiment: optimizer, learning-rate schedule, rules, clipping, EMA."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.oracle import experiments as plain

if TYPE_CHECKING:
    from tests.oracle.generator import Dice

# name: (learning rate that moves weights by a few percent per step, choices of fields). A large eps keeps Adam and its
# variants from turning a gradient that is only rounding error into a full update.
_OPTIMIZERS: dict[str, tuple[float, list[dict[str, Any]]]] = {
    "sgd": (0.05, [{}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}]),
    "adam": (1e-2, [{"eps": 1e-4}]),
    "adamw": (1e-2, [{"eps": 1e-4, "weight_decay": 0.1}, {"eps": 1e-3, "b2": 0.95, "weight_decay": 0.01}]),
    "amsgrad": (1e-2, [{"eps": 1e-4}]),
    "yogi": (1e-2, [{}]),
    "adagrad": (3e-2, [{}]),
    "rmsprop": (3e-3, [{"eps": 1e-4}, {"eps": 1e-4, "momentum": 0.9}]),
    "adamaxw": (1e-2, [{"eps": 1e-4, "weight_decay": 0.1}]),
    "adan": (1e-2, [{"eps": 1e-4}, {"eps": 1e-4, "weight_decay": 0.1}]),
    "lion": (3e-3, [{"weight_decay": 0.1}]),
    "adafactor": (1e-2, [{"min_dim_size_to_factor": 8}, {"min_dim_size_to_factor": 8, "weight_decay_rate": 1e-3}]),
    "adabelief": (1e-2, [{}]),
    "lamb": (1e-2, [{"weight_decay": 0.1}]),
    "novograd": (1e-2, [{"weight_decay": 0.01}]),
    "sm3": (1e-2, [{}]),
    "lars": (1.0, [{"weight_decay": 0.01}]),
    "muon": (1e-2, [{}, {"weight_decay": 0.1}]),
}
# Optimizers that make almost no update from a gradient that is only rounding error.
INSENSITIVE = ("sgd", "adam", "adamw", "amsgrad", "yogi", "adagrad", "rmsprop", "adamaxw", "adan", "clip_then_adamw")
# Optimizers that do not divide by small gradients, whose relative error is large in bfloat16.
SMOOTH = ("sgd", "adagrad")
_PATTERNS = ("norm", "embed", "head/", "bias", "attention", "mlp", "block0/mlp", "^shared", "query|key", "lora_b", "up")


def draw_optimizer(dice: Dice, names: Sequence[str] | None = None) -> plain.Optimizer:
    """Return an optimizer; AdamW is four times as likely as any other."""
    known = [name for name in (names or _OPTIMIZERS) if name in _OPTIMIZERS]
    name = dice.pick(known + ["adamw"] * 3 * ("adamw" in known))
    rate, choices = _OPTIMIZERS[name]
    peak = dice.log_uniform(0.5 * rate, 1.5 * rate)
    takes_schedule = name != "sm3"  # optax.sm3 negates the learning rate, which only works for a number
    rate = _schedule(dice, peak) if takes_schedule and dice.chance(0.5) else peak
    return plain.Optimizer(name, rate, dice.pick(choices))


def _schedule(dice: Dice, peak: float) -> tuple[str, dict[str, Any]]:
    return dice.pick(
        [
            ("cosine_decay_schedule", {"init_value": peak, "decay_steps": 5, "alpha": 0.1}),
            ("linear_schedule", {"init_value": peak, "end_value": 0.1 * peak, "transition_steps": 3}),
            ("exponential_decay", {"init_value": peak, "transition_steps": 2, "decay_rate": 0.5}),
            (
                "warmup_cosine_decay_schedule",
                {"init_value": 0.1 * peak, "peak_value": peak, "warmup_steps": 2, "decay_steps": 6},
            ),
        ]
    )


def draw_learner(
    dice: Dice, optimizer: plain.Optimizer, model: plain.Model, paths: Sequence[str], precision: str
) -> plain.Learner:
    """Return a learner for a model with these parameter paths."""
    whole = precision != "mixed" and dice.chance(0.08)
    if whole:
        optimizer = plain.Optimizer("clip_then_adamw", optimizer.rate, {"max_norm": 0.5, "weight_decay": 0.05})
    clip, clip_mode = None, "global_norm"
    if dice.chance(0.75):
        clip_mode = dice.pick(["global_norm", "global_norm", "previous_norm", "update_rms", "norm_growth"])
        clip = {"update_rms": dice.pick([0.3, 1.0]), "norm_growth": dice.pick([1.01, 1.2])}.get(clip_mode)
        clip = dice.log_uniform(0.1, 3.0) if clip is None else clip
    return plain.Learner(
        optimizer,
        scope="model" if whole else "layer",
        rules=_rules(dice, optimizer, model, paths, precision),
        clip=clip,
        clip_mode=clip_mode,
        ema=dice.pick([None, None, 0.9, 0.5]),
    )


def _rules(
    dice: Dice, optimizer: plain.Optimizer, model: plain.Model, paths: Sequence[str], precision: str
) -> tuple[plain.Rule, ...]:
    """Return up to two rules. Each applies to some parameters, and together they never freeze everything."""
    trained = [path for path in paths if model.lora is None or re.search("lora_[ab]$", path)]
    left, learning, rules = set(trained), set(trained), []
    for _ in range(dice.pick([0, 0, 1, 2])):
        # With adapters, only their parameters count as matches, because the rest is frozen anyway.
        pattern = dice.pick(_PATTERNS)
        matched = {path for path in left if re.search(pattern, path)}
        freeze = dice.chance(0.5)
        if not matched or (freeze and not learning - matched):
            continue
        left -= matched
        if freeze:
            learning -= matched
            rules.append(plain.Rule(pattern, freeze=True))
        elif dice.chance(0.5):
            rules.append(plain.Rule(pattern, set=_change_field(dice, optimizer)))
        else:
            rate = dice.log_uniform(1e-3, 1e-2)
            other = dice.pick(["sgd", "adamw"])
            other = "sgd" if precision == "mixed" else other
            fields = {"momentum": 0.5} if other == "sgd" else {"eps": 1e-4, "weight_decay": 0.2}
            rules.append(plain.Rule(pattern, optimizer=plain.Optimizer(other, rate, fields)))
    return tuple(rules)


def _change_field(dice: Dice, optimizer: plain.Optimizer) -> dict[str, Any]:
    if "weight_decay" in optimizer.fields:
        return {"weight_decay": 0.0}
    return {"learning_rate": dice.log_uniform(1e-3, 1e-2)}
