"""Records results of TRL's preference losses for small random models, so that `make test` does not need TRL.

    python -m tools.record_preferences [--seed=N] [--out=FOLDER]

Writes one file per loss (tools/peers/preference_cases.py), and `recorded.json`: versions, seed, command, date, and the
arguments of TRL's trainers. Needs the `peers` extra (torch, transformers, trl).
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from tools.peers import preference_theirs
from tools.peers.preference_cases import CASES, MODEL
from tools.peers.preference_recording import PREFERENCES, save


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Records what TRL computes of preferences for small random models.")
    # With this seed, KTO's KL estimate is positive in some batches, and negative (clamped to 0) in others.
    parser.add_argument("--seed", type=int, default=30)
    parser.add_argument("--out", type=Path, default=PREFERENCES)
    args = parser.parse_args()
    losses = {}
    for name, case in CASES.items():
        file = args.out / f"{name}.npz"
        results = preference_theirs.compute(case, args.seed)
        save(file, results)
        metrics = {metric: float(value) for metric, value in results.metrics.items()}
        losses[name] = {"trainer": case.trainer, "arguments": case.arguments, "loss": float(results.loss), **metrics}
        print(f"{name}: {file.stat().st_size / 1000:.0f} kB, {losses[name]}")
    about = {
        "command": f"python -m tools.record_preferences --seed={args.seed}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seed": args.seed,
        "versions": preference_theirs.versions(),
        "config": MODEL.facts,
        "losses": losses,
    }
    (args.out / "recorded.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
