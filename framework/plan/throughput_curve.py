"""Tokens per second at larger batches: the points of the curve, its knee, and its tables.

A larger batch spreads what each step does once over more tokens: the update, and its transfers to and from the host.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from plimsoll.framework.plan.plan_report import TimeReport
from plimsoll.framework.terminal.tables import TableSection, human_count, human_duration

# The knee has at least this fraction of the highest rate.
KNEE_SHARE = 0.9
# The curve ends when four times the tokens raise the rate by less than this factor.
LEAST_RISE = 1.02
# The curve ends at this multiple of the config's batch.
MOST_BATCHES = 64

CurveEnd = Literal["flat", "memory", "no accumulation", "limit"]


@dataclass(frozen=True)
class ThroughputPoint:
    """The estimated rate at one batch size.

    Attributes:
        batch: global batch size, in rows (data.global_batch_size).
        accumulate: number of microbatches (learner.accumulate).
        tokens_per_step: tokens (or other items) in a step on all devices.
        device_peak_bytes: bytes of device memory at the peak of the step, per device.
        host_need_bytes: everything that the memory of a host has to hold, in bytes.
        overrides: the overrides of the config that this point needs, as flags.
        time: estimated time of a step.
    """

    batch: int
    accumulate: int
    tokens_per_step: int
    device_peak_bytes: int
    host_need_bytes: int
    overrides: str
    time: TimeReport

    @property
    def rate(self) -> float:
        """Tokens per second on all devices."""
        return self.tokens_per_step / self.time.seconds

    @property
    def bound_text(self) -> str:
        """The largest part of the step's time, with its share, such as `host link 71%`."""
        return f"{self.time.bound_by} {self.time.parts[self.time.bound_by] / self.time.seconds:.0%}"


@dataclass(frozen=True)
class ThroughputCurve:
    """The estimated rates of some settings at increasing batch sizes that fit.

    Attributes:
        item: what `tokens_per_step` counts, in the singular.
        points: one point for each batch size, smallest first. The first is the config's own batch.
        end: why there is no larger batch: "flat" (the rate hardly rises), "memory" (it does not fit), "no
            accumulation" (it would fit only in more microbatches, but their number cannot change), or "limit" (64
            times the batch of the config).
        exhausted: the memory that twice the batch exceeds: "device", "host" or "device and host"; "" if the curve ends
            for another reason.
    """

    item: str
    points: tuple[ThroughputPoint, ...]
    end: CurveEnd
    exhausted: str = ""

    @property
    def knee(self) -> ThroughputPoint:
        """The point with the fewest tokens per step that reaches 90% of the highest rate of the curve."""
        highest = max(point.rate for point in self.points)
        return next(point for point in self.points if point.rate >= KNEE_SHARE * highest)

    @property
    def end_text(self) -> str:
        """The reason why there is no larger batch, in words."""
        if self.end == "flat":
            return f"the last two doublings together raise the rate by less than {LEAST_RISE - 1:.0%}"
        if self.end == "memory":
            return (
                f"{self.exhausted} memory has no room for twice the batch, however many microbatches it is split into"
            )
        if self.end == "no accumulation":
            return f"{self.exhausted} memory has no room for twice the batch, and learner.accumulate cannot change"
        return f"{MOST_BATCHES} times the batch of the config is the most that is tried"

    def to_json(self) -> dict[str, Any]:
        """Return a dict that JSON can represent, with the tokens per step of the knee."""
        return {**asdict(self), "knee": self.knee.tokens_per_step}

    def sections(self, name: str = "") -> list[TableSection]:
        """Return the table of the points, and one that describes the knee.

        Args:
            name: name of the curve in the headings, if there are several.
        """
        knee = self.knee
        rows = [[f"{self.item}s per step", "batch", "accumulate", "step time", f"{self.item}s/s", "bound by", ""]]
        for point in self.points:
            mark = "knee" if point is knee else ""
            sizes = [f"{point.tokens_per_step:,}", str(point.batch), str(point.accumulate)]
            time = [human_duration(point.time.seconds), human_count(point.rate)]
            rows.append([*sizes, *time, point.bound_text, mark])
        about = f"{KNEE_SHARE:.0%} of the highest rate with the fewest {self.item}s per step"
        knee_rows = [["knee", about], ["overrides", knee.overrides or "none"], ["end of the curve", self.end_text]]
        suffix = f", {name}" if name else ""
        return [
            TableSection(f"{self.item}s per second by batch, estimated{suffix}", rows),
            TableSection(f"knee of the curve{suffix}", knee_rows),
        ]
