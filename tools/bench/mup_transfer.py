"""Transfer of the learning rate across widths, with muP and without it: loss against rate, one curve for each width.

    python -m tools.bench.mup_transfer --heads 2 4 8 16 --exponents -11 -10 -9 -8 -7 -6 -5 --out build/mup.jsonl
    python -m tools.bench.mup_transfer --out build/mup.jsonl --picture docs/images/mup_transfer.png

Trains nanogpt-cpu with two layers and larger logits, from width 64 (2 heads), on the source of Python's standard
library, at rates that are powers of two. Each result is a line of the file, and the same command skips those that are
there. Without --heads it only prints the tables. Figure 1 of "Tensor Programs V" (Yang et al. 2022, arXiv 2203.03466)
is of this kind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import plimsoll as pl
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.tables import TableSection, render

PARAMETRIZATIONS = ("muP", "usual")
_BASE_HEADS = 2
_LOSS = "eval/stdlib/loss"


@dataclass(frozen=True)
class Setting:
    """The settings of a run.

    Attributes:
        parametrization: "muP" or "usual".
        heads: number of heads of 32 channels, which determines the width.
        exponent: binary logarithm of the peak learning rate.
        seed: seed of initialization and data.
    """

    parametrization: str
    heads: int
    exponent: float
    seed: int


@dataclass(frozen=True)
class Result:
    """A trained run.

    Attributes:
        setting: its settings.
        loss: held-out loss after the last step, in nats per byte; infinite if training diverged.
        steps: number of steps.
    """

    setting: Setting
    loss: float
    steps: int


def build_base(steps: int, logit_divisor: float) -> pl.Config:
    """Return the config of the narrowest width, which is the base of muP."""
    return pl.load_config(
        "nanogpt-cpu",
        {
            "model.dim": 32 * _BASE_HEADS,
            "model.stack.num_layers": 2,
            "model.head.logit_divisor": logit_divisor,
            "model.stack.pattern.0.attention.num_heads": _BASE_HEADS,
            "model.stack.pattern.0.mlp.hidden": 128 * _BASE_HEADS,
            "data.global_batch_size": 8,
            "trainer.max_steps": steps,
            "trainer.eval_every": None,
            "trainer.eval_batches": 100,
            "trainer.save_every": steps,
            "trainer.log_every": 50,
            "trainer.tensorboard": False,
            "compiler.use_accelerator_options": False,
        },
    )


def train(setting: Setting, steps: int, logit_divisor: float) -> Result:
    """Train one setting in a temporary folder."""
    base = build_base(steps, logit_divisor)
    config = pl.widen(base, setting.heads, mup=setting.parametrization == "muP")
    base_rate = base.learner.optimizer.learning_rate.peak_value
    # Optimizers of rules have their own rates, which muP has divided.
    for _, part in config.learner.walk():
        if isinstance(part, pl.Config) and part.takes("peak_value"):
            part.peak_value *= 2.0**setting.exponent / base_rate
    config.trainer.seed = setting.seed
    config.data.seed = setting.seed
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        try:
            loss = float(pl.train(config, folder).metrics[_LOSS].values[-1])
        except pl.RunError as error:
            if error.code != ExitCode.NONFINITE:
                raise
            loss = math.inf
    return Result(setting, loss, steps)


def read_results(path: Path) -> list[Result]:
    """Read the lines of a file of results; none if it does not exist."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Result(Setting(**row["setting"]), row["loss"], row["steps"]) for row in rows]


def collect_curve(results: Iterable[Result], parametrization: str, heads: int) -> dict[float, float]:
    """Return {exponent: loss, the mean over seeds} of one width, ascending."""
    losses: dict[float, list[float]] = {}
    for result in results:
        # At the base width, both parametrizations are the same.
        is_same = heads == _BASE_HEADS or result.setting.parametrization == parametrization
        if result.setting.heads == heads and is_same:
            losses.setdefault(result.setting.exponent, []).append(result.loss)
    return {exponent: sum(values) / len(values) for exponent, values in sorted(losses.items())}


def interpolate_best(curve: Mapping[float, float]) -> float:
    """Return the exponent of the lowest loss, by a parabola through the best point and its neighbors."""
    exponents = list(curve)
    index = exponents.index(min(curve, key=curve.__getitem__))
    if not 0 < index < len(exponents) - 1:
        return exponents[index]
    nearest = exponents[index - 1 : index + 2]
    # The middle of the three is 0, so that the parabola is well conditioned.
    square, slope, _ = np.polyfit([one - exponents[index] for one in nearest], [curve[one] for one in nearest], 2)
    return exponents[index] - slope / (2 * square)


def make_table(results: Sequence[Result], parametrization: str) -> TableSection:
    """Return the table of losses by width and rate, with the best rate of each width."""
    widths = sorted({result.setting.heads for result in results})
    exponents = sorted({result.setting.exponent for result in results})
    rows = [["width", *(f"2^{one:g}" for one in exponents), "best rate", "interpolated", "cost of the base's rate"]]
    base_curve = collect_curve(results, parametrization, _BASE_HEADS)
    base_best = min(base_curve, key=base_curve.__getitem__)
    for heads in widths:
        curve = collect_curve(results, parametrization, heads)
        cells = [f"{curve[exponent]:.3f}" if exponent in curve else "" for exponent in exponents]
        best = min(curve, key=curve.__getitem__)
        cost = f"+{curve[base_best] - curve[best]:.3f}" if base_best in curve else ""
        rows.append([str(32 * heads), *cells, f"2^{best:g}", f"2^{interpolate_best(curve):.1f}", cost])
    return TableSection(f"held-out loss (nats per byte), {parametrization} parametrization", rows, numbers=True)


def plot(results: Sequence[Result], path: Path) -> None:
    """Plot the loss against the rate, one panel for each parametrization, one curve for each width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(PARAMETRIZATIONS), sharey=True)
    widths = sorted({result.setting.heads for result in results})
    for axes, parametrization in zip(panels, PARAMETRIZATIONS, strict=True):
        for index, heads in enumerate(widths):
            curve = collect_curve(results, parametrization, heads)
            color = f"C{index}"
            axes.plot(list(curve), list(curve.values()), marker="o", color=color, label=f"width {32 * heads}")
            best = min(curve, key=curve.__getitem__)
            axes.plot([best], [curve[best]], marker="*", markersize=14, color=color)
        axes.set_title(parametrization)
        axes.set_xlabel("log2 of the peak learning rate")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats per byte")
    panels[0].legend(fontsize="small", loc="upper center")
    figure.savefig(path)


def main() -> None:
    """Train the missing runs, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[], help="widths to train, in heads of 32 channels")
    parser.add_argument("--exponents", type=float, nargs="+", default=[], help="binary logarithms of the rates")
    parser.add_argument("--parametrizations", nargs="+", choices=PARAMETRIZATIONS, default=PARAMETRIZATIONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=300, help="length of a run")
    parser.add_argument(
        "--logit_divisor",
        type=float,
        default=0.25,
        help="head.logit_divisor of the base; the default was tuned at its width",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each run")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    args = parser.parse_args()
    done = {result.setting for result in read_results(args.out)}
    for seed in args.seeds:
        for heads in args.heads:
            for parametrization in args.parametrizations if heads != _BASE_HEADS else PARAMETRIZATIONS[:1]:
                for exponent in args.exponents:
                    setting = Setting(parametrization, heads, exponent, seed)
                    if setting in done:
                        continue
                    result = train(setting, args.steps, args.logit_divisor)
                    # One write, so that a kill leaves whole lines.
                    with args.out.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
                    print(setting, f"{result.loss:.4f}", flush=True)
    results = read_results(args.out)
    print(render([make_table(results, name) for name in args.parametrizations]), end="")
    if args.picture:
        plot(results, args.picture)


if __name__ == "__main__":
    main()
