"""The `config.trainer.stop` section: rules that end a run before its last step; and the metrics that a config names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from plimsoll.framework.config import ConfigError, NonNegativeFloat, PositiveInt, component, did_you_mean

Mode = Literal["min", "max"]
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
# The groups of metrics that an evaluation writes: of the weights, and of their moving averages.
_WEIGHT_KINDS = ("eval", "eval_ema")


@component
class StopRules:
    """Rules that end a run before its last step: it evaluates and saves that step, and exits with code 8.

    Args:
        metric: metric of an evaluation that `patience` and `target` observe, named as in metrics.jsonl,
            "eval/SET/NAME"; NAME is enough if there is one validation set.
        mode: whether lower (min) or higher (max) values of the metric are better.
        patience: number of evaluations in a row without an improvement after which the run stops.
        min_improvement: smallest change of the metric that counts as an improvement.
        target: value of the metric at which the run stops.
        wall_clock: time that the run may take in all of its starts, such as 90s, 30m, 2h or 1h30m, by the clock of
            process 0; the time between two starts does not count.
    """

    def __init__(
        self,
        *,
        metric: str = "loss",
        mode: Mode = "min",
        patience: PositiveInt | None = None,
        min_improvement: NonNegativeFloat = 0.0,
        target: float | None = None,
        wall_clock: str | None = None,
    ):
        if min_improvement and patience is None:
            raise ValueError(f"min_improvement = {min_improvement:g} requires patience")
        if target is not None and not math.isfinite(target):
            raise ValueError(f"target: expected a finite number, given {target}")
        self.metric = metric
        self.mode: Mode = mode
        self.patience = patience
        self.min_improvement = min_improvement
        self.target = target
        self.wall_clock = wall_clock
        self.wall_seconds = None if wall_clock is None else parse_duration(wall_clock)

    @property
    def reads_metric(self) -> bool:
        """Whether a rule observes the metric."""
        return self.patience is not None or self.target is not None

    def reaches_target(self, value: float) -> bool:
        """Return whether a value of the metric is at the target or better."""
        if self.target is None:
            return False
        return value <= self.target if self.mode == "min" else value >= self.target


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 30m, 2h, 1h30m or 1d. Raises ValueError for any other text."""
    compact = text.replace(" ", "")
    seconds = 0.0
    if _DURATION.fullmatch(compact):
        for number, unit in re.findall(r"([\d.]+)([dhms])", compact):
            seconds += float(number) * _SECONDS[unit]
    if not seconds > 0:
        raise ValueError(f"wall_clock: expected a duration such as 90s, 30m, 2h, 1h30m or 1d, given {text!r}")
    return seconds


def resolve_metric(name: str, sets: Sequence[str], *, path: str, has_averages: bool) -> str:
    """Return the full name of a metric that evaluations write, "eval/SET/NAME".

    Args:
        name: the full name, or only NAME if there is one validation set.
        sets: names of the validation sets.
        path: field of the config that has the name, for errors.
        has_averages: whether the run has moving averages, whose metrics are "eval_ema/SET/NAME".

    Raises:
        ConfigError: no evaluation writes such a metric.
    """
    if not sets:
        raise ConfigError(f"{name} is a metric of evaluations, but data.validation has no sets", path=path)
    if "/" not in name:
        if len(sets) == 1:
            return f"eval/{sets[0]}/{name}"
        choices = ", ".join(f"eval/{one}/{name}" for one in sets)
        raise ConfigError(f"expected a validation set with the metric: {choices}; given {name!r}", path=path)
    kind, _, rest = name.partition("/")
    if kind not in _WEIGHT_KINDS or not rest:
        raise ConfigError(f"expected a metric of evaluations, eval/SET/NAME, given {name!r}", path=path)
    if kind == "eval_ema" and not has_averages:
        raise ConfigError(f"{name} is a metric of averaged weights, but learner.ema is not set", path=path)
    if not any(rest.startswith(f"{one}/") for one in sets):
        given = rest.partition("/")[0]
        raise ConfigError(f"no validation set {given!r} in {name!r}{did_you_mean(given, sets)}", path=path)
    return name
