"""A plan as text: the table of one, and the table that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from framework.devices.mesh import mesh_text
from framework.terminal.tables import Section, human_bytes, human_count

Report = dict[str, Any]
# What the bytes at a peak are divided into, in this order everywhere.
KEYS: tuple[str, ...] = (
    *("parameters", "frozen", "buffers", "gradients", "optimizer_state"),
    *("ema", "batch", "activations", "other"),
)
_LINES = 12


def verdict(report: Report) -> str:
    """`fits: 8.61 GiB of 15.75 GiB, 7.14 GiB to spare`."""
    need, limit, which = report["device_allocated_bytes"], report["device_limit_bytes"], ""
    for phase, figures in report["phases"].items():
        if figures["device_peak_bytes"] > need:
            need, which = figures["device_peak_bytes"], f" ({phase} needs the most)"
            break
    if limit is None:
        return f"needs {human_bytes(need)} per device; the limit is not known{which}"
    spare = f"{human_bytes(abs(limit - need))} {'to spare' if limit >= need else 'too much'}"
    fits = "fits" if report["fits"] else "DOES NOT FIT"
    return f"{fits}: {human_bytes(need)} of {human_bytes(limit)} per device, {spare}{which}"


def sections(report: Report) -> list[Section]:
    """Everything a person wants to see of one plan."""
    peak, gaps = report["device_peak_bytes"], report["device_allocated_bytes"] - report["device_peak_bytes"]
    parts = [
        (key.replace("_", " "), size, report["host_breakdown"].get(key)) for key, size in report["breakdown"].items()
    ]
    parts.append(("left empty by packing", gaps, 0))
    rows = [["", "device", "", "its host"]]
    for name, size, host in parts:
        if size or host:
            rows.append([name, human_bytes(size), f"{100 * size / peak:.1f}%", human_bytes(host) if host else "-"])
    rows.append(["peak", human_bytes(report["device_allocated_bytes"]), "", human_bytes(report["host_peak_bytes"])])
    largest = [
        [one["name"], one["shape"] + f" x {one['count']}" * (one["count"] > 1), human_bytes(one["bytes"])]
        for one in report["largest"][:_LINES]
    ]
    phases = [
        [name, human_bytes(phase["device_peak_bytes"]), human_bytes(phase["host_peak_bytes"])]
        for name, phase in report["phases"].items()
    ]
    zero = [[one["path"], human_bytes(one["bytes"])] for one in report["zero_gradients"]]
    fitting = [[one["setting"], needs(one)] for one in report["suggestions"]]
    found = [
        Section("plan", _about(report)),
        Section("per device, at the instant of the training step's peak", rows, numbers=True),
        Section("largest buffers", largest),
        Section("phases, per device", phases and [["", "device", "its host"], *phases], numbers=True),
        Section("work", _work(report)),
        Section("never trained: the gradient is zero whatever the data (freeze them by a rule)", zero),
        Section("would fit", fitting),
    ]
    return [section for section in found if section.rows]


def needs(suggestion: Report) -> str:
    """What a suggested setting needs, and how far that is known."""
    size = human_bytes(suggestion["device_peak_bytes"])
    return f"{size}, compiled" if suggestion["compiled"] else f"about {size}, not compiled"


def _about(report: Report) -> list[list[str]]:
    sizes = {axis: size for axis, size in report["mesh"].items() if size > 1}
    mesh = mesh_text(sizes, report["mesh_across"], report["platform"]) or "one device"
    rows = [
        ["config", " ".join([report["config"], *report.get("settings", [])])],
        ["target", f"{report['target']}: {report['devices']} devices, {report['processes']} hosts; mesh {mesh}"],
        ["verdict", verdict(report)],
    ]
    if report["message"]:
        rows.append(["the compiler says", report["message"]])
    if used := report["host_process_bytes"]:
        limit = report["host_limit_bytes"]
        rows.append(["memory of a host", human_bytes(used) + (f" of {human_bytes(limit)}" if limit else "")])
    rows += [["note", note] for note in report["notes"]]
    closed = report["estimate"]
    if report["estimated"]:
        rows.append(["from", "the closed form; without --estimate it is compiled"])
    elif closed["error"] is not None:
        compiled = f"the {human_bytes(report['device_peak_bytes'])} that are alive at the peak, packing apart"
        difference = f"{100 * abs(closed['error']):.1f}% {'more' if closed['error'] > 0 else 'less'} than"
        rows.append(["closed form", f"{human_bytes(closed['device_peak_bytes'])}, {difference} {compiled}"])
    return rows


def _work(report: Report) -> list[list[str]]:
    own = f"({human_count(report['model_flops_per_token'])} of the model's own)"
    rows = [
        ["FLOPs per step", f"{human_count(report['flops_per_step'])}, all devices"],
        [f"FLOPs per {report['item']}", f"{human_count(report['flops_per_token'])} {own}"],
    ]
    if report["collective_bytes"]:
        parts = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sorted(report["collective_bytes"].items()))
        rows.append(["between devices", f"{parts}; per device and step"])
    if report["host_transfer_bytes"]:
        rows.append(["device and host", f"{human_bytes(report['host_transfer_bytes'])} per device and step"])
    if report["compile_seconds"]:
        rows.append(["compiled in", f"{report['compile_seconds']:.0f} s"])
    return rows


def comparison(reports: Sequence[Report]) -> Section:
    """One row per plan, with the settings that it does not share with all; the parts are those at its own peak."""
    first = reports[0]
    common = [one for one in first["settings"] if all(one in report["settings"] for report in reports)]
    keys = [key for key in first["breakdown"] if any(report["breakdown"][key] for report in reports)]
    host = ["host"] if any(report["host_peak_bytes"] for report in reports) else []
    rows = [["setting", "needs", "", *(key.replace("_", " ") for key in keys), *host, "FLOPs"]]
    for report in reports:
        sizes = [report["breakdown"][key] for key in keys] + [report["host_peak_bytes"] for _ in host]
        own = " ".join(setting for setting in report["settings"] if setting not in common)
        verdict = [human_bytes(report["device_allocated_bytes"]), "fits" if report["fits"] else "TOO BIG"]
        rows.append(
            [own or report["config"], *verdict, *map(human_bytes, sizes), human_count(report["flops_per_step"])]
        )
    name, limit = " ".join([first["config"], *common]), human_bytes(first["device_limit_bytes"])
    return Section(f"{name} on {first['target']}, {limit} per device", rows, True)
