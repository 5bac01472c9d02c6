"""Which optimizers mix parameters: those are refused, as each layer has an optimizer of its own."""

import jax
import optax
import pytest

from framework.layout import ParameterSpec
from framework.optimizers.reach import mixes_parameters

SPECS = {
    "attention": {"weight": ParameterSpec((64, 32), "float32", roles=("in", "out"))},
    "norm": {"scale": ParameterSpec((64,), "float32", roles=("channel",))},
}
ONE = {"token": ParameterSpec((64, 32), "float32", roles=("vocab", "out"))}


def sign_of_own_mean() -> optax.GradientTransformation:
    """A user's own: looks at one tensor at a time."""
    return optax.stateless(lambda grads, params: jax.tree.map(lambda g: -0.01 * jax.numpy.sign(g - g.mean()), grads))


LOCAL = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "own": sign_of_own_mean(),
}
GLOBAL = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "finite": optax.apply_if_finite(optax.adamw(1e-3), 3),
    "prodigy": optax.contrib.prodigy(1.0),
}


@pytest.mark.parametrize("name", LOCAL)
def test_local(name: str) -> None:
    assert not mixes_parameters(LOCAL[name], SPECS)


@pytest.mark.parametrize("name", GLOBAL)
@pytest.mark.parametrize("specs", [SPECS, ONE], ids=["two", "one"])
def test_global(name: str, specs: dict) -> None:
    assert mixes_parameters(GLOBAL[name], specs)
