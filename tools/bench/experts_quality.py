"""Compare a mixture of experts with its dense twin: bits per byte at equal tokens, and balance of the experts' load.

    python -m tools.bench.experts_quality --workdir=runs/experts_quality [--seeds 0 1] [--steps=1500]

Trains `stdlib-tiny` and `moe-tiny` (a token's two experts together are as wide as the dense MLP) with `plimsoll train`
for each seed, in WORKDIR/NAME-SEED. Finished runs are not repeated, and interrupted ones resume. Prints a table, and
plots the first mixture to WORKDIR/balance.png. Takes about 5 and 8 minutes per run on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plimsoll.framework.metrics.jsonl import read_metrics
from plimsoll.framework.terminal.tables import TableSection, render

DENSE, MIXTURE = "stdlib-tiny", "moe-tiny"
_BITS = "eval/stdlib/bits_per_byte"
_LAYERS = "train/stack/block0/mlp/"


def train_or_load(config: str, folder: Path, overrides: list[str], steps: int) -> list[dict[str, Any]]:
    """Train a config in `folder` unless it is already trained; return its metrics, a dict per line of metrics.jsonl."""
    metrics_file = folder / "metrics.jsonl"
    rows = read_metrics(metrics_file) if metrics_file.exists() else []
    if not any(row["step"] == steps and _BITS in row for row in rows):
        command = [sys.executable, "-m", "launch", "train", f"--config={config}", f"--workdir={folder}"]
        subprocess.run([*command, f"--config.trainer.max_steps={steps}", *overrides], check=True)
        rows = read_metrics(metrics_file)
    return rows


def last_bits(rows: list[dict[str, Any]]) -> float:
    """Return the bits per byte of the held-out text at the end."""
    return [row[_BITS] for row in rows if _BITS in row][-1]


def draw_balance(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot each expert's load over training as a multiple of its even share, averaged over layers."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    measured = [row for row in rows if f"{_LAYERS}load_max" in row]
    steps = [row["step"] for row in measured]

    def series(name: str) -> list[float]:
        return [row[f"{_LAYERS}{name}"] for row in measured]

    figure, (load_axes, entropy_axes) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    load_axes.fill_between(
        steps, series("load_min"), series("load_max"), color="0.9", label="least and most of a layer"
    )
    names = sorted(name for name in measured[0] if name.startswith(f"{_LAYERS}load/"))
    for name in names:
        load_axes.plot(steps, [row[name] for row in measured], linewidth=0.8)
    load_axes.axhline(1.0, color="0.3", linestyle=":", linewidth=1)
    load_axes.set_ylabel("tokens of an expert / even share")
    load_axes.set_ylim(bottom=0)
    load_axes.legend(loc="upper right")
    load_axes.set_title(f"{MIXTURE}: {len(names)} experts, mean over layers")
    entropy_axes.plot(steps, series("entropy"), color="tab:purple", linewidth=1)
    entropy_axes.set_ylabel("router's entropy, nats")
    entropy_axes.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str]) -> int:
    """Print the table and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args(argv)
    table = [["seed", DENSE, MIXTURE, "mixture / dense"]]
    for seed in args.seeds:
        seed_flag = [f"--config.trainer.seed={seed}"]
        dense_rows = train_or_load(DENSE, args.workdir / f"{DENSE}-{seed}", seed_flag, args.steps)
        mixture_rows = train_or_load(MIXTURE, args.workdir / f"{MIXTURE}-{seed}", seed_flag, args.steps)
        if seed == args.seeds[0]:
            draw_balance(mixture_rows, args.workdir / "balance.png")
        dense_bits = last_bits(dense_rows)
        mixture_bits = last_bits(mixture_rows)
        table.append([str(seed), f"{dense_bits:.4f}", f"{mixture_bits:.4f}", f"{mixture_bits / dense_bits:.4f}"])
    about = [["steps", str(args.steps)], ["versions", f"jax {version('jax')}, jaxlib {version('jaxlib')}"]]
    print(render([TableSection("bits per byte of the held-out text", table), TableSection("about", about)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
