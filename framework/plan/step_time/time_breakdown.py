"""The estimated time of a step and of its programs, in parts that add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.plan_report import TimeReport
from plimsoll.framework.plan.step_time.schedule_simulation import Activity

# User-facing names of what bounds a step. Everything that the cores do besides matrix products is named after its usual
# bound, memory.
MATRIX_UNITS = "matrix units"
MEMORY = "memory"
LINKS = "links"
OTHER_SLICES = "other slices"
HOST_LINK = "host link"
PYTHON = "Python"
PARTS = (MATRIX_UNITS, MEMORY, LINKS, OTHER_SLICES, HOST_LINK, PYTHON)


@dataclass(frozen=True)
class StepTime:
    """Exposed seconds of a step, by what they are spent on; hidden work is not counted.

    Attributes:
        matrix_units: matrix products and attention kernels.
        memory: everything else that a device computes or copies in its own memory: norms, activations, the update.
        links: waiting for other devices of a slice.
        other_slices: waiting for other slices, over the network between them.
        host_link: waiting for host memory.
        python: waiting for Python to start the next program.
        basis: a sentence that describes the method of the estimate and its reliability.
        lanes: see `TimeReport`.
    """

    matrix_units: float
    memory: float
    links: float
    host_link: float
    python: float
    basis: str
    other_slices: float = 0.0
    lanes: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[str, float]:
        """{name of the bound: seconds}."""
        seconds = (self.matrix_units, self.memory, self.links, self.other_slices, self.host_link, self.python)
        return dict(zip(PARTS, seconds, strict=True))

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def bound_by(self) -> str:
        """Name of the largest part."""
        return max(PARTS, key=lambda name: self.parts[name])

    def after(self, earlier: StepTime) -> StepTime:
        """Return the sum of this time and that of `earlier`, which runs before it."""
        return replace(
            self,
            matrix_units=earlier.matrix_units + self.matrix_units,
            memory=earlier.memory + self.memory,
            links=earlier.links + self.links,
            other_slices=earlier.other_slices + self.other_slices,
            host_link=earlier.host_link + self.host_link,
            python=earlier.python + self.python,
            # They show the step alone.
            lanes={},
        )

    def report(self, *, tokens: int | None, model_flops: float | None, peak_flops: float | None) -> TimeReport:
        """Return the time entry of a plan's report.

        Args:
            tokens: tokens of a step on all devices; None for a function that has none.
            model_flops: FLOPs of a step on all devices that the model needs, excluding recomputation; None if unknown.
            peak_flops: peak FLOP/s of all devices together; None if not published.
        """
        utilization = None
        if model_flops and peak_flops:
            utilization = model_flops / peak_flops / self.seconds
        return TimeReport(
            seconds=self.seconds,
            tokens_per_second=tokens / self.seconds if tokens else None,
            model_flops_utilization=utilization,
            bound_by=self.bound_by,
            parts=dict(self.parts),
            basis=self.basis,
            lanes={name: list(shares) for name, shares in self.lanes.items()},
        )


@dataclass(frozen=True)
class StepProgram:
    """A program of a step, which may have one or several, and the number of times it runs in the step."""

    module: Module
    runs: int


@dataclass(frozen=True)
class ProgramTime:
    """Seconds of one run of a program on an accelerator.

    Attributes:
        products: seconds of matrix products and attention kernels.
        others: seconds of everything else that the cores do.
        links: seconds of collectives within a slice that compute does not hide.
        other_slices: seconds of waiting for other slices.
        host_waits: seconds of waiting for host transfers that the program itself does not hide.
        activity: when its cores and links are busy.
    """

    products: float
    others: float
    links: float
    host_waits: float
    activity: Activity
    other_slices: float = 0.0
