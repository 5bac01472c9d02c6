"""Compare the losses of runs with 8-bit products with those of runs without: small models, several seeds.

    python -m tools.bench.precision_quality --workdir=runs/precision [--seeds 0 1 2] [--models llama qwen]
        [--recipes float32 fp8_tensor ...]

Trains a Llama and a Qwen3 of 1.8M parameters (`stdlib-tiny`, with half of its rows' length) with `plimsoll train`, in
WORKDIR/MODEL-RECIPE-SEED. Finished runs are not repeated, and interrupted ones resume. Prints a table. Takes 3 to 6
minutes per run on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from plimsoll.framework.layers.low_precision import RECIPES, RecipeName
from plimsoll.framework.terminal.tables import TableSection, render
from tools.bench.experts_quality import last_bits, train_or_load

# Blocks of 128 x 128 divide this width of the MLP, but not stdlib-tiny's.
_COMMON = [
    "--config.data.seq_len=128",
    "--config.trainer.sample_tokens=0",
    "--config.model.stack.pattern.0.mlp.hidden=384",
]
# Overrides of stdlib-tiny, which is a Llama. Qwen3 normalizes queries and keys, and shares keys and the table. A table
# that is also the head's needs smaller initial values and steps.
_MODELS = {
    "llama": [],
    "qwen": [
        "--config.model.stack.pattern.0.attention.qk_norm=plimsoll.RMSNorm",
        "--config.model.stack.pattern.0.attention.num_kv_heads=1",
        "--config.model.head.tied=true",
        "--config.model.embed.init.stddev=0.05",
        "--config.learner.rules.0.optimizer.learning_rate.peak_value=0.02",
    ],
}
_PLAIN = "float32"
# Blocks do not divide the 64 channels of Qwen's keys and values.
_WITH_BLOCKS = "attention/(query|output)|mlp"


def measure_bits(model: str, recipe: RecipeName | Literal["float32"], seed: int, workdir: Path, steps: int) -> float:
    """Return the bits per byte of the held-out text after training."""
    rules: dict[str, str] = {}
    if recipe != _PLAIN:
        has_blocks = RECIPES[recipe].blocks is not None
        rules = {_WITH_BLOCKS if has_blocks and model == "qwen" else "attention|mlp": recipe}
    overrides = [f"--config.trainer.seed={seed}", f"--config.model.precision={json.dumps(rules)}"]
    folder = workdir / f"{model}-{recipe}-{seed}"
    return last_bits(train_or_load("stdlib-tiny", folder, [*_COMMON, *_MODELS[model], *overrides], steps))


def main(argv: list[str]) -> int:
    """Print the table and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--models", choices=list(_MODELS), nargs="+", default=list(_MODELS))
    parser.add_argument("--recipes", choices=[_PLAIN, *RECIPES], nargs="+", default=[_PLAIN, *RECIPES])
    args = parser.parse_args(argv)
    table = [["model", "products", *(f"seed {seed}" for seed in args.seeds), "of float32, mean", "worst"]]
    for model in args.models:
        plain: list[float] = []
        for recipe in args.recipes:
            bits = [measure_bits(model, recipe, seed, args.workdir, args.steps) for seed in args.seeds]
            plain = plain or bits
            changes = [100 * (one / other - 1) for one, other in zip(bits, plain, strict=True)]
            mean = sum(changes) / len(changes)
            table.append([model, recipe, *(f"{one:.4f}" for one in bits), f"{mean:+.2f}%", f"{max(changes):+.2f}%"])
    about = [["steps", str(args.steps)], ["versions", f"jax {version('jax')}, jaxlib {version('jaxlib')}"]]
    print(render([TableSection("bits per byte of the held-out text", table), TableSection("about", about)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
