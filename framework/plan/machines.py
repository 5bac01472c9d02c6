"""Which machine a config needs: one table of many targets, and the smallest that carries it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from framework.devices.accelerators import ACCELERATORS
from framework.plan import target_names, targets
from framework.plan.report import Report, time_cells
from framework.plan.targets import Target
from framework.terminal.tables import Section, human_bytes

# So many devices of a kind are tried for the smallest machine: a card, a host, and what Cloud has of a slice.
_CARDS = (1, 2, 4, 8)
_MOST_DEVICES = 256


def names_of(text: str) -> list[str]:
    """The targets of a list, "4090,h100x8": each once, in order."""
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(name for name in names if name))


def candidates() -> list[str]:
    """Names of machines, by the device memory of all their devices together, the smallest first."""
    machine_by_name = {name: targets.resolve(name) for name in [*_card_names(), *_slice_names()]}

    def size(name: str) -> tuple[int, int, str]:
        # Of as much memory, the one with fewer devices, then the name, so that the order is always the same.
        return total_bytes(machine_by_name[name]), machine_by_name[name].num_devices, name

    return sorted(machine_by_name, key=size)


def total_bytes(machine: Target) -> int:
    """Device memory that programs may use, of all devices together."""
    return (machine.limit_bytes or 0) * machine.num_devices


def _card_names() -> Iterator[str]:
    for spec in ACCELERATORS:
        if spec.platform != "gpu" or spec.limit_bytes is None:
            continue
        for count in _CARDS:
            # A rented machine has all of its GPUs, or one of them; cards are put into a machine one by one.
            if count in (1, spec.chips_per_host) or spec.chips_per_host is None:
                yield spec.name if count == 1 else f"{spec.name}x{count}"


def _slice_names() -> Iterator[str]:
    for family in {spec.name for spec in ACCELERATORS if spec.topologies}:
        for size in target_names.topology_by_size(family):
            name = f"{family}-{size}"
            if targets.resolve(name).num_devices <= _MOST_DEVICES:
                yield name


def carries(report: Report) -> bool:
    """Whether the target carries the config, as it is or with settings that change nothing of what is computed."""
    return bool(report["fits"] or report["suggestions"])


def table(reports: Sequence[Report], left_out: dict[str, str]) -> list[Section]:
    """One row for each target: what the config needs there, and the cheapest settings under which it fits.

    Args:
        reports: plans of one config.
        left_out: {target: why the config cannot be trained there at all}.
    """
    header = ["target", "has, per device", "needs", "", "a step", "bound by"]
    rows = [[*header, "or", "by", "with the first settings that fit"]]
    for report in reports:
        has = human_bytes(report["device_limit_bytes"]) if report["device_limit_bytes"] else "not known"
        if report["devices"] > 1:
            has = f"{report['devices']} x {has}"
        verdict = "fits" if report["fits"] else "TOO BIG"
        row = [report["target"], has, human_bytes(report["device_allocated_bytes"]), verdict, *time_cells(report)]
        rows.append(row + _first_settings(report))
    impossible = [[name, reason] for name, reason in left_out.items()]
    sections = [Section(" ".join(_title(reports)), rows)] if reports else []
    return sections + ([Section("not possible", impossible)] if impossible else [])


def _title(reports: Sequence[Report]) -> list[str]:
    shared_settings = [
        setting for setting in reports[0]["settings"] if all(setting in report["settings"] for report in reports)
    ]
    return [reports[0]["config"], *shared_settings]


def _first_settings(report: Report) -> list[str]:
    """[the bytes, who says so, the settings]; suggestions begin with those that cost least."""
    if report["fits"]:
        return ["", "closed form" if report["estimated"] else "compiler", "as it is"]
    if not report["suggestions"]:
        return ["", "closed form", "none that was tried"]
    first = report["suggestions"][0]
    judge = "compiler" if first["compiled"] and not report["estimated"] else "closed form"
    return [human_bytes(first["device_peak_bytes"]), judge, first["setting"]]
