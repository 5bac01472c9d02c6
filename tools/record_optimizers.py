"""Records results of the optimizers of torchao, adam-mini and lomo-optim, so that `make test` needs none of them.

    python -m tools.record_optimizers [--out=FOLDER]

Writes one file per optimizer (tools/peers/optimizer_cases.py) and `recorded.json`: versions, command, date. Needs the
`peers` extra.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import numpy as np

from tools.peers import optimizers
from tools.peers.optimizer_cases import CASES, FOLDER


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Records what other people's optimizers compute.")
    parser.add_argument("--out", type=Path, default=FOLDER)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        np.savez_compressed(out / f"{name}.npz", **optimizers.compute(name))  # pyright: ignore[reportArgumentType]
        print(f"{name}: {(out / f'{name}.npz').stat().st_size / 1000:.0f} kB")
    about = {
        "command": "python -m tools.record_optimizers",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": optimizers.versions(),
    }
    (out / "recorded.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
