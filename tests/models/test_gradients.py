"""Gradients of whole models in float64, compared to central differences of the loss along random directions."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layout import flatten, path_name
from tests.support import small

FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64"}


def gpt2():
    """GPT-2 with tied tables, learned positions, biases, dropout with fixed masks, a chunked head, and full remat."""
    return small.gpt2(**FLOAT64, head__chunk_tokens=32), "full"


def llama():
    """Llama with grouped queries, rotary positions, QK norms, a window, both soft caps, z-loss, an unrolled stack."""
    model = small.llama(**FLOAT64, head__softcap=5.0, head__z_loss=0.01, stack__unroll=0)
    attention = small.block(model).attention
    attention.qk_norm, attention.window, attention.softcap = config_for(RMSNorm), 9, 3.0
    return model, "none"


@pytest.mark.once("llama")
@pytest.mark.parametrize("family", [gpt2, llama])
def test_gradients_equal_central_differences(family):
    with jax.enable_x64(True):
        model, remat = family()
        program = small.program(small.experiment(model, documents=True, memory={"remat": remat}))
        state = jax.device_get(program.init())
        # Move away from the initial values, so that scales are not 1 and biases are not 0.
        rng = np.random.default_rng(0)
        shake = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape), state["parameter"])
        gradients = small.compile_gradients(program)
        batch = program.put(small.host_batch(program))

        def evaluate(params):
            (loss, _), grads = gradients(replace(state, parameter=params), batch)
            return float(loss), grads

        _, grads = evaluate(shake)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float64")}
        # Test along all parameters together and along single leaves, so that a large gradient cannot hide a small one.
        paths = list(flatten(shake))
        chosen = [paths, paths, *([path] for path in paths if "bias" in path or "norm" in path or "embed" in path)]
        step = 1e-5
        for names in chosen[:12]:
            direction = jax.tree_util.tree_map_with_path(
                lambda keypath, p, names=names: rng.normal(size=p.shape) * (path_name(keypath) in names), shake
            )
            ahead, behind = (
                evaluate(jax.tree.map(lambda p, d, h=h: p + h * d, shake, direction))[0] for h in (step, -step)
            )
            expected = (ahead - behind) / (2 * step)
            actual = sum(
                float(np.sum(np.asarray(g) * d))
                for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
            )
            np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9, err_msg=str(names[:2]))
