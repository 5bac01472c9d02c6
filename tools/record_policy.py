"""Records results of TRL's GRPOTrainer for sampled answers, so that `make test` needs neither torch nor TRL.

    python -m tools.record_policy [--seed=N] [--out=FOLDER]

Writes a file for each case of tools/peers/policy_cases.py. Needs torch, transformers and trl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.peers import policy_theirs
from tools.peers.policy_cases import CASES, get_case_path, save
from tools.peers.recording import TUNING


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Records what TRL's GRPOTrainer computes of sampled answers.")
    parser.add_argument("--seed", type=int, default=20_260)
    parser.add_argument("--out", type=Path, default=TUNING)
    args = parser.parse_args()
    print(policy_theirs.versions())
    for name, case in CASES.items():
        results = policy_theirs.compute(case, args.seed)
        path = get_case_path(name, args.out)
        save(path, args.seed, results)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB, loss {float(results.loss)}, {results.metrics}")


if __name__ == "__main__":
    main()
