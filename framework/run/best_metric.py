"""The best value of a metric so far, and the number of evaluations since then."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from plimsoll.framework.config import ConfigError, did_you_mean
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.stop_rules import Mode


@dataclass
class BestMetric:
    """The best value of a metric among the evaluations of a run. Checkpoints store it, so a resumed run continues it.

    Attributes:
        metric: full name of the metric.
        mode: whether lower (min) or higher (max) values are better.
        min_improvement: smallest change that counts as an improvement.
        value: best value; None before the first one. A value that is not a number is never the best.
        step: step of that value.
        evaluations: number of evaluations since then.
        last_step: step of the last evaluation that was counted.
    """

    metric: str
    mode: Mode = "min"
    min_improvement: float = 0.0
    value: float | None = None
    step: int | None = None
    evaluations: int = 0
    last_step: int | None = None

    def count(self, step: int, value: float) -> bool:
        """Count an evaluation, unless it was counted before; returns whether it is an improvement."""
        if step == self.last_step:
            return False
        self.last_step = step
        sign = 1.0 if self.mode == "min" else -1.0
        # A comparison with a value that is not a number is false.
        improves = sign * value < (float("inf") if self.value is None else sign * self.value - self.min_improvement)
        if improves:
            self.value = value
            self.step = step
            self.evaluations = 0
        else:
            self.evaluations += 1
        return improves

    def to_json(self) -> dict[str, object]:
        """Return the state that a checkpoint stores."""
        return asdict(self)

    def restore(self, stored: dict[str, Any] | None) -> None:
        """Continue from a checkpoint; start again if it has none, or that of another metric or mode."""
        state = stored or {}
        if (state.get("metric"), state.get("mode")) != (self.metric, self.mode):
            state = {}
        self.value = state.get("value")
        self.step = state.get("step")
        self.evaluations = state.get("evaluations", 0)
        self.last_step = state.get("last_step")


def check_metrics(program: Program) -> None:
    """Raise ConfigError if an evaluation does not have a metric that the trainer's rules read. Compiles nothing."""
    experiment = program.experiment
    metrics = {"trainer.stop.metric": experiment.stop_metric, "trainer.keep_best": experiment.best_metric}
    if not any(metrics.values()):
        return
    # Sums of 1 have every metric that sums of other numbers have.
    names = experiment.model.summary(dict.fromkeys(program.backend.evaluation_sums(), 1.0))
    for path, metric in metrics.items():
        if metric is not None:
            check_metric(metric, names, path)


def check_metric(metric: str, names: Any, path: str) -> None:
    """Raise ConfigError if the last part of a metric is not among the names that an evaluation has."""
    # The name of a set has no slash, and that of a metric may have some.
    name = metric.split("/", 2)[2]
    if name not in names:
        raise ConfigError(f"evaluations have no metric {name!r}{did_you_mean(name, names)}", path=path)
