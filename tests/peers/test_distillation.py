"""Teacher-student divergences compared to recorded results of TRL's GKD, and live to TRL and torch's kl_div."""

import importlib.util

import numpy as np
import pytest

from tools.peers import distillation as peers


def assert_equal(actual: peers.LossAndGrad, loss: float, grad: np.ndarray) -> None:
    assert actual.loss == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(actual.grad, grad, atol=1e-12 * np.abs(grad).max())


@pytest.mark.parametrize("name", peers.SETTINGS)
def test_divergences_are_those_that_trl_computed(name):
    recorded = np.load(peers.FILE)
    logits = peers.Logits(recorded["student"], recorded["teacher"], recorded["labels"])
    actual = peers.ours(logits, peers.SETTINGS[name])
    assert_equal(actual, float(recorded[f"{name}: loss"]), recorded[f"{name}: grad"])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", peers.SETTINGS)
def test_divergences_match_trl_and_torch(name, libraries):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("not installed: trl")
    logits = peers.Logits.draw(7)
    setting = peers.SETTINGS[name]
    actual = peers.ours(logits, setting)
    assert_equal(actual, *peers.by_trl(logits, setting))
    if setting.divergence != "jsd":
        assert_equal(actual, *peers.by_torch(logits, setting))
