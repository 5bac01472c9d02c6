"""Writes the Markdown page of `tools.bench.autotune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from plimsoll.extras.autotune.settings import Setting, flags
from plimsoll.framework.plan.cache import versions
from plimsoll.framework.terminal.tables import human_bytes, human_duration

_HEAD = """# Autotuning on eight pairs

The settings that `plimsoll plan --auto` chooses for a model on a machine ([autotuning.md](../autotuning.md)), next to
the same search with one setting for all layers, and next to the best of a sweep of a smaller space
(`tools/bench/autotune.py` defines it). `python -m tools.bench.autotune` wrote this page on {day}: two CPU cores with
other work, {versions}; the GPU rows are from an environment with the `plan-gpu` extra. Bytes are those of the target's
compiler. Seconds of a step are those of the analytical estimate, by which both sides are ranked; no step ran. If
nothing has to be offloaded, less than 92% may be used: the next faster setting does not fit.

"""
_CHOICES = """| pair | allowed | device | of its limit | host | a step | pass the link | search | again | choice |
|---|---|---|---|---|---|---|---|---|---|
"""
_COMPARED = """
## Against switches for all layers, and a sweep

"Sweep": the choice's seconds over those of the best of the smaller space; below 1.00 the choice is faster.

| pair | a step: choice | switches | pass the link: choice | switches | sweep | of settings |
|---|---|---|---|---|---|---|
"""


def render_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page in Markdown."""
    used_versions = ", ".join(f"{name} {version}" for name, version in versions("jax", "jaxlib", "libtpu").items())
    head = _HEAD.format(day=date.today().isoformat(), versions=used_versions)
    choices = "".join(_choice_line(row) for row in rows)
    compared = "".join(_comparison_line(row) for row in rows if row["choice"] is not None)
    return f"{head}{_CHOICES}{choices}{_COMPARED}{compared}"


def _choice_line(row: Mapping[str, Any]) -> str:
    choice = row["choice"]
    if choice is None:
        return _line([row["pair"], "", "does not fit", "", "", "", "", f"{row['searched']:.0f} s", "", row["failure"]])
    limit = choice["machine"]["device_bytes"]
    judge = "" if choice["compiled"] else " (estimate)"
    overrides = flags(Setting(*pair) for pair in choice["settings"])
    cells = [
        row["pair"],
        ", ".join(choice["allowed"]),
        f"{human_bytes(choice['peak'])}{judge}",
        "" if limit is None else f"{100 * choice['peak'] / limit:.1f}%",
        human_bytes(choice["host"]) if choice["host"] else "-",
        _seconds(choice["seconds"]),
        human_bytes(choice["moved"]) if choice["moved"] else "-",
        f"{row['searched']:.0f} s",
        f"{row['again']:.1f} s",
        f"`{overrides}`" if overrides else "as it is",
    ]
    return _line(cells)


def _comparison_line(row: Mapping[str, Any]) -> str:
    choice = row["choice"]
    switched = row["switched"]
    best = row["best_of_sweep"]
    ratio = "none fits" if best is None else f"{choice['seconds'] / best:.3f}"
    cells = [
        row["pair"],
        _seconds(choice["seconds"]),
        "none fits" if switched is None else _seconds(switched["seconds"]),
        human_bytes(choice["moved"]),
        "-" if switched is None else human_bytes(switched["moved"]),
        ratio,
        str(row["swept"]),
    ]
    return _line(cells)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else human_duration(seconds)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
