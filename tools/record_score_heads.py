"""Records results of transformers and TRL for a small classifier and reward model, so that `make test` needs neither.

    python -m tools.record_score_heads [--seed=N] [--out=FOLDER]

Writes a file for each kind (tools/peers/score_heads.py): weights, logits, loss, gradients, and the losses of ten steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tools.peers import score_heads, theirs
from tools.peers.recording import TUNING

KINDS: tuple[score_heads.Task, ...] = ("classify", "reward")


def record(out: Path, seed: int, kind: score_heads.Task) -> Path:
    """Write the file of a kind, and return its path."""
    family = score_heads.build_family(score_heads.RECORDED_SHAPE, kind)
    model = theirs.build(family, seed)
    weights = theirs.get_weights(model)
    logits, loss, gradients = score_heads.their_gradients(model, score_heads.Sequences.draw(seed), kind)
    arrays: dict[str, Any] = {"seed": np.asarray(seed), "logits": logits, "loss": loss}
    # The weights are exact float16 numbers, see `theirs.build`.
    arrays |= {f"weights:{name}": tensor.astype(np.float16) for name, tensor in weights.items()}
    arrays |= {f"gradients:{name}": tensor for name, tensor in gradients.items()}
    arrays["losses"] = score_heads.their_training(model, score_heads.training_sequences(seed), kind)
    file = out / f"scored-{kind}.npz"
    np.savez_compressed(file, **arrays)
    return file


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Records what transformers and TRL compute for small score models.")
    parser.add_argument("--seed", type=int, default=20_260)
    parser.add_argument("--out", type=Path, default=TUNING)
    args = parser.parse_args()
    for kind in KINDS:
        file = record(args.out, args.seed, kind)
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
