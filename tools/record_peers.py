"""Records results of torch and transformers for small random models, so that `make test` needs neither.

    python -m tools.record_peers [--seed=N] [--out=FOLDER] [--family=NAME ...]

Writes one file per family (tools/peers/families.py), the rotary tables, and `recorded.json`: versions, seed, command,
date, the configs, and torch's own float32 rounding error. With --family, writes only the files of those families. Needs
the `peers` extra (torch, transformers).
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.peers import theirs
from tools.peers.families import FAMILIES, ROTARY
from tools.peers.recording import FOLDER, Inputs, save


def record(out: Path, seed: int, names: list[str]) -> dict[str, Any]:
    """Write the array files of these families; return their entries of the JSON file."""
    families = {}
    for index, (name, family) in enumerate(FAMILIES.items()):
        if name not in names:
            continue
        inputs = Inputs.draw(seed + index)
        model = theirs.build(family, seed + index)
        rounding = theirs.rounding(family, model, inputs)
        results = theirs.compute(model, family, inputs)
        save(out / f"{name}.npz", inputs, results)
        families[name] = {
            "config": family.facts,
            "loss": float(results.loss),
            "losses": [float(loss) for loss in results.losses],
            "float32_against_float64": rounding,
        }
        print(f"{name}: {(out / f'{name}.npz').stat().st_size / 1000:.0f} kB, {rounding}")
    tables = {}
    for name in ROTARY:
        tables |= {f"{name}:{key}": value for key, value in theirs.rotary(name).items()}
    np.savez_compressed(out / "rotary.npz", **tables)  # pyright: ignore[reportArgumentType]
    return families


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Records what torch and transformers compute for small random models.")
    parser.add_argument("--seed", type=int, default=20_260)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "recorded.json"
    families = json.loads(file.read_text())["families"] if args.family else {}
    families |= record(args.out, args.seed, args.family or list(FAMILIES))
    about = {
        "command": f"python -m tools.record_peers --seed={args.seed}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seed": args.seed,
        "versions": theirs.versions(),
        "families": families,
    }
    file.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
