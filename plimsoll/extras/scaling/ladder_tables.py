"""Tables and the picture of a ladder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plimsoll.extras.scaling.ladder_record import LadderRecord
from plimsoll.extras.scaling.power_law import LEVELS, Interval, PowerLawFit, Prediction
from plimsoll.framework.terminal.tables import TableSection, human_count

LADDER_PICTURE = "ladder.png"
# Points of the curve and its band in the picture.
_CURVE_POINTS = 100
_BAND_POINTS = 7


def make_tables(record: LadderRecord) -> list[TableSection]:
    """Return the tables of a ladder with losses: rungs, the fit, the holdout and extrapolations."""
    rows = [["rung", "parameters", "without embedding", "tokens", "FLOPs", record.metric, "fitted"]]
    for rung in record.rungs:
        counts = [human_count(value) for value in (rung.parameters, rung.non_embedding_parameters, rung.tokens)]
        loss = "-" if rung.loss is None else f"{rung.loss:.5g}"
        fitted = "-" if record.fit is None else f"{record.fit.law.predict(rung.flops):.5g}"
        rows.append([rung.name, *counts, f"{rung.flops:.3g}", loss, fitted])
    sections = [TableSection("rungs of the ladder", rows, numbers=True)]
    if record.fit is not None:
        sections.append(_make_fit_table(record.fit))
    predictions = []
    if record.holdout is not None:
        holdout = record.holdout
        result = f"{holdout.loss:.5g} (predicted {100 * holdout.error:+.2f}%)"
        predictions.append([f"{holdout.name}, held out", *_make_cells(holdout.prediction), result])
    predictions += [[one.name, *_make_cells(one.prediction), "-"] for one in record.extrapolations]
    if predictions:
        heads = ["run", "FLOPs", "loss", *(f"{100 * level:g}% interval" for level in LEVELS), "measured"]
        sections.append(TableSection("predictions", [heads, *predictions], numbers=True))
    return sections


def make_notes(record: LadderRecord) -> list[str]:
    """Return what a reader of the tables should know, one line each."""
    notes = []
    if record.fit is not None and record.fit.note:
        notes.append(record.fit.note)
    if record.holdout is not None and record.holdout.fit.note:
        notes.append(f"holdout: {record.holdout.fit.note}")
    trained = [rung.flops for rung in record.rungs if rung.loss is not None]
    for one in record.extrapolations:
        ratio = one.prediction.flops / max(trained)
        if ratio > 1:
            notes.append(f"{one.name} is {ratio:.3g} times the compute of the largest rung: the law may not hold there")
    return notes


def _make_fit_table(fit: PowerLawFit) -> TableSection:
    values = {"E": fit.law.irreducible, "A": fit.law.scale, "alpha": fit.law.exponent}
    rows = [["parameter", "value", *(f"{100 * level:g}% interval" for level in LEVELS)]]
    for name, value in values.items():
        if name == "E" and fit.fixed_irreducible is not None:
            cells = ["fixed"] * len(LEVELS)
        else:
            cells = _make_interval_cells(fit.intervals.get(name, []))
        rows.append([name, f"{value:.4g}", *cells])
    if fit.residual_std is not None:
        rows.append(["residuals of log(loss)", f"{fit.residual_std:.2g}", *[""] * len(LEVELS)])
    return TableSection("fit: loss(C) = E + A * C^-alpha, C in FLOPs", rows, numbers=True)


def _make_cells(prediction: Prediction) -> list[str]:
    return [f"{prediction.flops:.3g}", f"{prediction.loss:.5g}", *_make_interval_cells(prediction.intervals)]


def _make_interval_cells(intervals: Sequence[Interval]) -> list[str]:
    """Return a cell for each level."""
    by_level = {one.level: one for one in intervals}
    cells = []
    for level in LEVELS:
        interval = by_level.get(level)
        if interval is None:
            cells.append("-")
            continue
        low, high = ("unbounded" if end is None else f"{end:.4g}" for end in (interval.low, interval.high))
        cells.append(f"{low} to {high}")
    return cells


def plot_ladder(record: LadderRecord, path: Path) -> Path:
    """Plot loss against compute with the fit and its prediction intervals; returns the path.

    Args:
        record: a ladder with losses.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained", dpi=150)
    axes = figure.subplots()
    points = {rung.name: (rung.flops, rung.loss) for rung in record.rungs if rung.loss is not None}
    flops = [one for one, _ in points.values()]
    fit = record.fit
    if fit is not None:
        highest = max([*flops, *(one.prediction.flops for one in record.extrapolations)])
        ends = (math.log(min(flops)), math.log(highest))
        if fit.intervals:
            band = np.exp(np.linspace(*ends, _BAND_POINTS))
            predictions = [fit.predict(float(x)) for x in band]
            for index, level in reversed(list(enumerate(LEVELS))):
                intervals = [one.intervals[index] for one in predictions]
                lows = [one.low if one.low is not None else np.nan for one in intervals]
                highs = [one.high if one.high is not None else np.nan for one in intervals]
                label = f"{100 * level:g}% prediction interval"
                # The narrow band covers the wide one.
                alpha = 0.3 if index == 0 else 0.15
                axes.fill_between(band, lows, highs, color="C0", alpha=alpha, linewidth=0, label=label)
        curve = np.exp(np.linspace(*ends, _CURVE_POINTS))
        law = fit.law
        label = f"{law.irreducible:.3g} + {law.scale:.3g} C^-{law.exponent:.3g}"
        axes.plot(curve, [law.predict(float(x)) for x in curve], color="C0", label=label)
        for one in record.extrapolations:
            axes.plot([one.prediction.flops], [one.prediction.loss], "x", color="C3", label=one.name)
    axes.plot(flops, [loss for _, loss in points.values()], "o", color="black", label="measured")
    for name, point in points.items():
        axes.annotate(name, point, fontsize="x-small", xytext=(4, 4), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel(record.metric)
    axes.set_title(f"ladder of {record.config}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    figure.savefig(path)
    return path
