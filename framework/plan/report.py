"""A plan as text: the table of one, and the table that compares several. May import: framework.metrics.tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from framework.metrics.tables import Section, human_bytes, human_count

Report = dict[str, Any]
# What the bytes at a peak are divided into, in this order everywhere.
KEYS: tuple[str, ...] = (
    *("parameters", "frozen", "buffers", "gradients", "optimizer_state"),
    *("ema", "batch", "activations", "other"),
)
_LINES = 12


def verdict(report: Report) -> str:
    """`fits: 8.61 GiB of 15.75 GiB, 7.14 GiB to spare`."""
    need, limit = report["device_allocated_bytes"], report["device_limit_bytes"]
    for phase, figures in report["phases"].items():
        if figures["device_peak_bytes"] > need:
            need, name = figures["device_peak_bytes"], phase
            return f"{_verdict(report['fits'], need, limit)} ({name} needs the most)"
    return _verdict(report["fits"], need, limit)


def _verdict(fits: bool, need: int, limit: int | None) -> str:
    if limit is None:
        return f"needs {human_bytes(need)} per device; the limit is not known"
    spare = f"{human_bytes(abs(limit - need))} {'to spare' if limit >= need else 'too much'}"
    return f"{'fits' if fits else 'DOES NOT FIT'}: {human_bytes(need)} of {human_bytes(limit)} per device, {spare}"


def sections(report: Report) -> list[Section]:
    """Everything a person wants to see of one plan."""
    peak = report["device_peak_bytes"]
    parts = [(key, size, report["host_breakdown"].get(key, 0)) for key, size in report["breakdown"].items()]
    rows = [
        [key.replace("_", " "), human_bytes(size), f"{100 * size / peak:.1f}%", human_bytes(host) if host else "-"]
        for key, size, host in parts
        if size or host
    ]
    gaps = report["device_allocated_bytes"] - peak
    if gaps:
        rows.append(["left empty by packing", human_bytes(gaps), f"{100 * gaps / peak:.1f}%", "-"])
    rows.append(["peak", human_bytes(report["device_allocated_bytes"]), "", human_bytes(report["host_peak_bytes"])])
    header = ["", "device", "", "its host"]
    found = [
        Section("plan", _about(report)),
        Section("per device, at the instant of the training step's peak", [header, *rows], numbers=True),
    ]
    if report["largest"]:
        lines = [
            [one["name"], one["shape"] + (f" x {one['count']}" if one["count"] > 1 else ""), human_bytes(one["bytes"])]
            for one in report["largest"][:_LINES]
        ]
        found.append(Section("largest buffers", lines))
    if report["phases"]:
        phases = report["phases"].items()
        lines = [[n, human_bytes(p["device_peak_bytes"]), human_bytes(p["host_peak_bytes"])] for n, p in phases]
        found.append(Section("phases, per device", [["", "device", "its host"], *lines], numbers=True))
    found.append(Section("work", _work(report)))
    if report["zero_gradients"]:
        lines = [[one["path"], human_bytes(one["bytes"])] for one in report["zero_gradients"]]
        found.append(Section("never trained: the gradient is zero whatever the data (freeze them by a rule)", lines))
    if report["suggestions"]:
        found.append(Section("would fit", [[one["setting"], needs(one)] for one in report["suggestions"]]))
    return found


def needs(suggestion: Report) -> str:
    """What a suggested setting needs, and how far that is known."""
    size = human_bytes(suggestion["device_peak_bytes"])
    return f"{size}, compiled" if suggestion["compiled"] else f"about {size}, not compiled"


def _about(report: Report) -> list[list[str]]:
    mesh = "  ".join(f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1) or "one device"
    rows = [
        ["config", " ".join([report["config"], *report.get("settings", [])])],
        ["target", f"{report['target']}: {report['devices']} devices, {report['processes']} hosts; mesh {mesh}"],
        ["verdict", verdict(report)],
    ]
    if report["message"]:
        rows.append(["the compiler says", report["message"]])
    if report["host_process_bytes"]:
        limit = report["host_limit_bytes"]
        of = f" of {human_bytes(limit)}" if limit else ""
        rows.append(["memory of a host", human_bytes(report["host_process_bytes"]) + of])
    rows += [["note", note] for note in report["notes"]]
    error, closed = report["estimate"]["error"], human_bytes(report["estimate"]["device_peak_bytes"])
    if report["estimated"]:
        rows.append(["from", "the closed form; without --estimate it is compiled"])
    elif error is not None:
        rows.append(["closed form", f"{closed} ({100 * error:+.1f}%)"])
    return rows


def _work(report: Report) -> list[list[str]]:
    rows = [
        ["FLOPs per step", f"{human_count(report['flops_per_step'])}, all devices"],
        ["FLOPs per token", f"{human_count(report['flops_per_token'])} ({_useful(report)} of the model's own)"],
    ]
    if report["collective_bytes"]:
        parts = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sorted(report["collective_bytes"].items()))
        rows.append(["between devices", f"{parts}; per device and step"])
    if report["host_transfer_bytes"]:
        rows.append(["device and host", f"{human_bytes(report['host_transfer_bytes'])} per device and step"])
    if report["compile_seconds"]:
        rows.append(["compiled in", f"{report['compile_seconds']:.0f} s"])
    return rows


def _useful(report: Report) -> str:
    return human_count(report["model_flops_per_token"])


def comparison(reports: Sequence[Report]) -> Section:
    """One row per plan, with the settings that it does not share with all; the parts are those at its own peak."""
    common = [one for one in reports[0]["settings"] if all(one in report["settings"] for report in reports)]
    keys = [key for key in reports[0]["breakdown"] if any(report["breakdown"][key] for report in reports)]
    hosted = any(report["host_peak_bytes"] for report in reports)
    header = ["setting", "needs", "", *(key.replace("_", " ") for key in keys), *(["host"] if hosted else []), "FLOPs"]
    rows = [
        [
            " ".join(setting for setting in report["settings"] if setting not in common) or report["config"],
            human_bytes(report["device_allocated_bytes"]),
            "fits" if report["fits"] else "TOO BIG",
            *(human_bytes(report["breakdown"][key]) for key in keys),
            *([human_bytes(report["host_peak_bytes"])] if hosted else []),
            human_count(report["flops_per_step"]),
        ]
        for report in reports
    ]
    limit = human_bytes(reports[0]["device_limit_bytes"])
    name = " ".join([reports[0]["config"], *common])
    return Section(f"{name} on {reports[0]['target']}, {limit} per device", [header, *rows], True)
