"""Published memory outside of the program, next to our table: outside_record.jsonl, one figure per line with a quote.

    python -m tools.bench.outside_record     # the figures and ours, a line each

`python -m tools.bench.record_plans --table` writes the same table into the page of the public record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.devices.reserved_memory import get_scheduler_limit_bytes, list_reserved_parts
from tools.bench.public_record import FactSource

RECORD = Path(__file__).with_name("outside_record.jsonl")
_UNITS = {"GB": 1e9, "MB": 1e6, "GiB": 2.0**30, "MiB": 2.0**20}
# Parts that each communicator has.
_COMMUNICATOR_PARTS = ("NCCL rings", "NCCL NVLink")


@dataclass(frozen=True)
class OutsideFigure:
    """One line of the record: published memory that is not the program's, or that XLA allows a program.

    Attributes:
        what: what was measured.
        machine: accelerator, by its name in the accelerator tables.
        devices: number of GPUs.
        value: value in `unit`, as published.
        unit: GB, MB, GiB or MiB.
        source: location and quote.
        differs: difference from what our table describes.
        mesh: {mesh axis: size}.
        parts: first words of the parts of our table that the figure includes; empty for all.
        communicators: number of communicators, if the source states it.
        slop_factor: xla_gpu_memory_limit_slop_factor, if the figure is a step's temporaries.
        known_slop_factor, known_value: another slop factor and the temporaries with it, which the prediction starts
            from.
    """

    what: str
    machine: str
    devices: int
    value: float
    unit: str
    source: FactSource
    differs: str
    mesh: dict[str, int] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    communicators: int = 1
    slop_factor: float | None = None
    known_slop_factor: float | None = None
    known_value: float | None = None

    def predict(self) -> float:
        """Return our figure in `unit`."""
        spec = spec_for(self.machine)
        if self.slop_factor is not None:
            assert self.known_slop_factor is not None
            assert self.known_value is not None
            assert spec.memory_bytes is not None
            limits = [
                get_scheduler_limit_bytes(spec.memory_bytes, 0, factor)
                for factor in (self.slop_factor, self.known_slop_factor)
            ]
            return self.known_value * limits[0] / limits[1]
        total = 0
        for part in list_reserved_parts(spec, self.devices, self.mesh):
            if self.parts and not part.name.startswith(self.parts):
                continue
            count = self.communicators if part.name.startswith(_COMMUNICATOR_PARTS) else 1
            total += count * part.bytes
        return total / _UNITS[self.unit]

    def cells(self) -> list[str]:
        """Return the cells of the figure's row: what, theirs, ours, distance, and why they differ."""
        predicted = self.predict()
        title = f"[{spec_for(self.machine).name} x {self.devices}: {self.what}]({self.source.page})"
        distance = f"{100 * (predicted / self.value - 1):+.0f}%"
        return [title, f"{self.value:g} {self.unit}", f"{_format(predicted)} {self.unit}", distance, self.differs]


def _format(value: float) -> str:
    """Return a figure with as many digits as published ones have."""
    return f"{value:.0f}" if value >= 200 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def read_figures(path: Path = RECORD) -> list[OutsideFigure]:
    """Read the record."""
    figures = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        source = FactSource(**values.pop("source"))
        parts = tuple(values.pop("parts", ()))
        figures.append(OutsideFigure(**values, source=source, parts=parts))
    return figures


def section() -> list[str]:
    """Return the section of the page of the public record."""
    lines = [
        "## Memory outside of the program",
        "",
        "Published figures of what CUDA and NCCL take outside of XLA's pool, and of the temporaries that XLA's slop",
        "factor allows, next to `framework/devices/outside_the_pool.toml`. Each line of",
        "`tools/bench/outside_record.jsonl` has a quote. Not measured by us: we had no access to these machines.",
        "",
        "| figure | theirs | ours | distance | why they differ |",
        "|---|---|---|---|---|",
    ]
    return [*lines, *(f"| {' | '.join(figure.cells())} |" for figure in read_figures())]


if __name__ == "__main__":
    for one in read_figures():
        print(", ".join(one.cells()[:4]))
