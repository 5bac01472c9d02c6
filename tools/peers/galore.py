"""Records results of galore-torch (its authors' GaLore), so that `make test` needs neither it nor torch.

    python -m tools.peers.galore

Writes tests/optimizers/recorded/galore.json: the weights of three matrices after each step. galore-torch 1.0 requires
bitsandbytes for an optimizer that is not needed here, so install it with `pip install --no-deps galore-torch==1.0` in
addition to the `peers` extra. Its "reverse_std" projects the larger side, as optax does; its default, as in the paper,
projects the smaller side.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).resolve().parents[2] / "tests" / "optimizers" / "recorded" / "galore.json"
SHAPES = {"wide": (6, 10), "high": (10, 6), "square": (8, 8)}
STEPS = 8
RATE, OPTIONS = 0.02, {"rank": 3, "scale": 0.25}
# The signs of singular vectors are arbitrary, and moments are kept when they change. So there is one projection with
# moments, and several without.
CASES = {"moments": {"update_proj_gap": 20, "betas": (0.9, 0.999)}, "gaps": {"update_proj_gap": 3, "betas": (0.0, 0.0)}}


def inputs(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return (weights, gradients) in float32; three singular values of the gradients dominate."""
    rng = np.random.default_rng(sum(map(ord, name)))
    rows, columns = SHAPES[name]
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    spectrum = np.asarray([8, 4, 2], np.float32)
    grads = [draw(rows, 3) * spectrum @ draw(3, columns) + 0.1 * draw(rows, columns) for _ in range(STEPS)]
    return draw(rows, columns), grads


def is_installed() -> bool:
    """Return whether galore-torch and torch are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("galore_torch", "torch", "transformers"))


def train(name: str, case: str) -> list[np.ndarray]:
    """Return the weights after each step of galore-torch's AdamW."""
    import torch

    found = importlib.util.find_spec("galore_torch")
    assert found is not None
    package: Any = types.ModuleType("galore_torch")  # the package's own __init__ would import bitsandbytes
    package.__path__, package.__spec__ = found.submodule_search_locations, found
    sys.modules.setdefault("galore_torch", package)
    adamw = importlib.import_module("galore_torch.adamw").AdamW
    start, grads = inputs(name)
    weight = torch.nn.Parameter(torch.tensor(start))
    group = {"params": [weight], "proj_type": "reverse_std", **OPTIONS, **CASES[case]}
    optimizer = adamw([group], lr=RATE, eps=1e-8, no_deprecation_warning=True)
    history = []
    for grad in grads:
        weight.grad = torch.tensor(grad)
        optimizer.step()
        history.append(weight.detach().numpy().copy())
    return history


def main() -> None:
    """Record the results."""
    about = {
        "command": "python -m tools.peers.galore",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("galore-torch", "torch", "transformers")},
        "weights": {
            f"{name} {case}": [np.round(w.astype(float), 7).tolist() for w in train(name, case)]
            for name in SHAPES
            for case in CASES
        },
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
