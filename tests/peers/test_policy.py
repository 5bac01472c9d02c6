"""GRPO compared to TRL's GRPOTrainer: recorded (`python -m tools.record_policy`), and live on other data.

The live comparison uses other weights and samples. Log-probabilities of the samples are far from the model's, so a
third of the ratios are clipped.
"""

import importlib
import importlib.util

import jax
import numpy as np
import pytest

from tools.peers import policy_ours
from tools.peers.policy_cases import CASES, get_case_path, load

LIMIT = 1e-5
SEED = 11


@pytest.mark.pairs
@pytest.mark.parametrize("name", CASES)
def test_recorded(name: str):
    samples, theirs = load(get_case_path(name))
    loss, grads, advantages_B = policy_ours.loss_and_gradients(CASES[name], samples, theirs)
    np.testing.assert_allclose(advantages_B, theirs.advantages, rtol=1e-6)
    assert theirs.metrics["clipped"] > 0.2, "a loss without clipped ratios would say little"
    assert loss == pytest.approx(theirs.loss, rel=LIMIT)
    errors = policy_ours.relative_errors(grads, theirs)
    assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}


@pytest.fixture(scope="module")
def policy_theirs(theirs, request: pytest.FixtureRequest):
    """The module tools.peers.policy_theirs; TRL is in the same extra as torch and transformers."""
    if importlib.util.find_spec("trl") is None:
        refuse = pytest.fail if request.config.option.markexpr == "peers" else pytest.skip
        refuse("not installed: trl")
    return importlib.import_module("tools.peers.policy_theirs")


live = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::trl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _mark_live(test):
    for mark in live:
        test = mark(test)
    return test


@_mark_live
@pytest.mark.parametrize("name", CASES)
def test_live(name: str, policy_theirs):
    case = CASES[name]
    theirs = policy_theirs.compute(case, SEED)
    loss, grads, _ = policy_ours.loss_and_gradients(case, policy_theirs.Samples.draw(SEED), theirs)
    assert loss == pytest.approx(theirs.loss, rel=LIMIT)
    errors = policy_ours.relative_errors(grads, theirs)
    assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}


@_mark_live
@pytest.mark.parametrize("name", CASES)
def test_float64(name: str, policy_theirs):
    """Both sides use float64, except for the advantages, which are float32 in both."""
    case = CASES[name]
    theirs = policy_theirs.compute(case, SEED, wide=True)
    with jax.enable_x64(True):
        samples = policy_theirs.Samples.draw(SEED)
        loss, grads, _ = policy_ours.loss_and_gradients(case, samples, theirs, dtype="float64")
    assert loss.dtype == np.float64
    # The two sides round advantages to float32 at different points.
    assert loss == pytest.approx(float(theirs.loss), rel=1e-6)
    errors = policy_ours.relative_errors(grads, theirs)
    assert {path: error for path, error in errors.items() if not error <= 1e-6} == {}
