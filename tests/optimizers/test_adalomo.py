"""AdaLomo compared to the paper's equations in float64, its state, and its locality."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.layout import ParameterSpec, flatten, unflatten
from plimsoll.framework.optimizers.adalomo import adalomo
from plimsoll.framework.optimizers.partition import add_partition
from plimsoll.framework.optimizers.update_locality import probe

SHAPES = {"wide/weight": (6, 20), "high/weight": (20, 6), "row/weight": (1, 20), "norm/scale": (20,)}


def paper(p, grads, *, rate, decay, clip, min_scale):
    """Train by arXiv 2310.10195, algorithm 1 and section 3; vectors as in Adafactor, whose second moment it uses."""
    row = column = whole = 0.0
    for step, g in enumerate(grads, start=1):
        beta, square = 1 - step**-0.8, g**2 + 1e-30
        if p.ndim == 2:
            row = beta * row + (1 - beta) * square.mean(axis=1, keepdims=True)
            column = beta * column + (1 - beta) * square.mean(axis=0, keepdims=True)
            v = row * column / row.mean()
        else:
            v = whole = beta * whole + (1 - beta) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt((u**2).mean()) / clip)
        scale = rate * max(min_scale, np.sqrt((p**2).mean()))
        p = p * (1 - scale * decay) - scale * u
    return p


@pytest.mark.parametrize(("clip", "start"), [(1.0, 0.3), (0.5, 0.3), (1.0, 1e-5)])
def test_the_papers_equations_in_float64(clip, start):
    rng = np.random.default_rng(0)
    draw = lambda size: {path: size * rng.normal(size=shape) for path, shape in SHAPES.items()}  # noqa: E731
    # Sizes vary, so that beta and the clipping matter. The first gradients contain zeros, whose moments are only eps.
    params, grads = draw(start), [draw(size) for size in (1e-3, 5.0, 0.1, 1.0, 30.0, 1e-4, 1.0)]
    grads[0]["wide/weight"][2] = 0.0
    with jax.enable_x64(True):
        optimizer = adalomo(learning_rate=0.05, weight_decay=0.2, clip_threshold=clip)
        actual = jax.tree.map(jnp.asarray, unflatten(params))
        state = optimizer.init(actual)
        for tree in grads:
            updates, state = jax.jit(optimizer.update)(unflatten(tree), state, actual)
            actual = optax.apply_updates(actual, updates)
        for path, value in flatten(jax.device_get(actual)).items():
            assert value.dtype == np.float64
            expected = paper(
                params[path], [tree[path] for tree in grads], rate=0.05, decay=0.2, clip=clip, min_scale=1e-3
            )
            # optax computes beta in float32
            np.testing.assert_allclose(value, expected, rtol=2e-7, atol=2e-7 * start, err_msg=path)


def test_state_is_tiny_and_sharded_like_the_weights():
    spec = ParameterSpec((4096, 1024), "float32", ("fsdp", "model"), roles=("in", "out"))
    optimizer = add_partition(adalomo(learning_rate=0.1))
    leaves = flatten(optimizer.partition({"weight": spec}))
    assert sum(leaf.num_bytes for leaf in leaves.values()) / spec.size < 0.01
    cut = {leaf.shape: leaf.mesh_axes for leaf in leaves.values() if leaf.size > 1}
    assert cut == {(4096,): ("fsdp",), (1024,): ("model",)}
    assert probe(optimizer, {"weight": spec}) == "tensor"  # separate rows would each be clipped separately


def test_a_schedule():
    optimizer, params = adalomo(learning_rate=lambda count: 0.1 * (count == 1)), {"scale": jnp.ones(8)}
    state = optimizer.init(params)
    for moves in (False, True, False):
        updates, state = optimizer.update({"scale": jnp.ones(8)}, state, params)
        assert bool(jnp.all(updates["scale"] != 0)) == moves
