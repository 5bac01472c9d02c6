"""Preference losses compared to recorded results of TRL (`python -m tools.record_preferences`), padded and packed.

The limit is the promised 1e-5 relative; the actual difference is float32 rounding, about 1e-6.
"""

import json

import numpy as np
import pytest

from tools.peers import preference_ours as ours
from tools.peers.preference_cases import CASES, MODEL
from tools.peers.preference_recording import PREFERENCES, load

LIMIT = 1e-5
ABOUT = json.loads((PREFERENCES / "recorded.json").read_text())
LAYOUTS = {"packed": True, "padded": False}


def too_far(errors):
    return {path: error for path, error in errors.items() if not error <= LIMIT}


@pytest.mark.once("dpo-packed", "kto-packed")
@pytest.mark.parametrize("layout", ["packed", pytest.param("padded", marks=pytest.mark.pairs)])
@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_metrics(name, layout):
    results = load(PREFERENCES / f"{name}.npz")
    errors = ours.gradient_errors(CASES[name], results, ABOUT["seed"], packed=LAYOUTS[layout])
    assert len(errors) > 15
    assert too_far(errors) == {}


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dpo", "padded"),
        *(
            pytest.param(name, layout, marks=pytest.mark.pairs)
            for name in CASES
            for layout in LAYOUTS
            if (name, layout) != ("dpo", "padded")
        ),
    ],
)
def test_ten_adamw_steps(name, layout):
    results = load(PREFERENCES / f"{name}.npz")
    moved = max(np.abs(results.trained[tensor] - weight).max() for tensor, weight in results.weights.items())
    assert moved > 5e-3, "weights that hardly move would say little about the updates"
    errors = ours.training_errors(CASES[name], results, ABOUT["seed"], packed=LAYOUTS[layout])
    assert too_far(errors) == {}


def test_recorded_files_cover_these_losses_and_are_small():
    assert ABOUT["versions"].keys() >= {"torch", "transformers", "trl"}
    assert ABOUT["command"] == f"python -m tools.record_preferences --seed={ABOUT['seed']}"
    assert ABOUT["config"] == MODEL.facts, "the model changed: record again"
    recorded = {name: (loss["trainer"], loss["arguments"]) for name, loss in ABOUT["losses"].items()}
    assert recorded == {name: (case.trainer, case.arguments) for name, case in CASES.items()}, "record again"
    files = sorted(PREFERENCES.glob("*.npz"))
    assert {file.stem for file in files} == set(CASES)
    assert sum(file.stat().st_size for file in files) < 700_000


def test_nothing_is_trivial_in_the_recorded_losses():
    """No gradient is zero, the reference is a different model, and KTO's estimate of KL has an effect."""
    for name in CASES:
        results = load(PREFERENCES / f"{name}.npz")
        for tensor, gradient in results.gradients.items():
            assert np.linalg.norm(gradient) > 1e-4, (name, tensor)
            assert np.abs(results.weights[tensor] - results.reference[tensor]).max() > 0.1, (name, tensor)
    assert ABOUT["losses"]["kto"]["kl"] > 0.1
