"""The estimated time of a step, in parts that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# What bounds a step, as a person is told it. Whatever the cores do besides products is told by what usually bounds it.
MATRIX_UNITS = "matrix units"
MEMORY = "memory"
LINKS = "links"
HOST_LINK = "host link"
PYTHON = "Python"
PARTS = (MATRIX_UNITS, MEMORY, LINKS, HOST_LINK, PYTHON)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step that nothing else hides, by what they are spent on.

    Attributes:
        matrix_units: matrix products and attention kernels.
        memory: everything else that a device computes or copies in its own memory: norms, activations, the update.
        links: waiting for other devices.
        host_link: waiting for host memory.
        python: waiting for Python to start the next program.
        basis: a sentence: what it was estimated by, and how sure it is.
    """

    matrix_units: float
    memory: float
    links: float
    host_link: float
    python: float
    basis: str

    @property
    def parts(self) -> Mapping[str, float]:
        """{what bounds: seconds}"""
        seconds = (self.matrix_units, self.memory, self.links, self.host_link, self.python)
        return dict(zip(PARTS, seconds, strict=True))

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def bound_by(self) -> str:
        """The part that is largest."""
        return max(PARTS, key=lambda name: self.parts[name])

    def after(self, earlier: StepTime) -> StepTime:
        """The time of this and of what runs before it."""
        return replace(
            self,
            matrix_units=earlier.matrix_units + self.matrix_units,
            memory=earlier.memory + self.memory,
            links=earlier.links + self.links,
            host_link=earlier.host_link + self.host_link,
            python=earlier.python + self.python,
        )

    def report(self, *, tokens: int | None, model_flops: float | None, peak_flops: float | None) -> dict[str, Any]:
        """What a report of the plan says of the time.

        Args:
            tokens: of a step, on all devices; None for a function that has none.
            model_flops: likewise FLOPs that the model needs, without what is recomputed.
            peak_flops: of all devices, a second; None where not published.
        """
        utilization = None
        if model_flops and peak_flops:
            utilization = model_flops / peak_flops / self.seconds
        return {
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if tokens else None,
            "model_flops_utilization": utilization,
            "bound_by": self.bound_by,
            "parts": dict(self.parts),
            "basis": self.basis,
        }
