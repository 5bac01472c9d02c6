"""Optimizers for matrices, applied to experts: each expert's matrix is updated as if it were the only parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.configs.parts import no_decay
from plimsoll.framework.config import config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layout import ParameterSpec, flatten, unflatten
from plimsoll.framework.optimizers.lowrank import apollo, apollo_mini
from plimsoll.framework.optimizers.matrices import galore, muon
from plimsoll.framework.optimizers.quantized import adamw8bit
from tests.support import small

EXPERTS = 3
SHAPES = {"mlp/experts/up": (8, 12), "mlp/experts/down": (12, 8)}
OTHER = "attention/query/weight"
MAKES = {
    "galore": galore(learning_rate=0.02, rank=3, update_proj_gap=2, weight_decay=0.1),
    "apollo": apollo(learning_rate=0.02, rank=3, update_interval=2, weight_decay=0.1),
    "apollo per tensor": apollo(learning_rate=0.02, rank=2, per="tensor", update_interval=2),
    "apollo_mini": apollo_mini(learning_rate=0.02, update_interval=2),
    "muon": muon(learning_rate=0.02, weight_decay=0.1),
    "adamw8bit": adamw8bit(learning_rate=0.02, min_size=0, block=4),
}


def specs(shapes, experts):
    """Return specs of a layer's parameters: stacks of experts or one expert, and a matrix outside the experts."""
    stack = (EXPERTS,) if experts else ()
    axes = ("expert",) if experts else ()
    roles = ("expert",) if experts else ()
    flat = {
        path: ParameterSpec(stack + shape, "float32", (*axes, "fsdp", "model"), roles=(*roles, "in", "hidden"))
        for path, shape in shapes.items()
    }
    flat[OTHER] = ParameterSpec((8, 8), "float32", ("fsdp", "model"), roles=("in", "out"))
    return unflatten(flat)


def train(optimizer, specs, params, grads):
    optimizer = optimizer.fit_to_specs(specs)
    state = optimizer.init(params)
    extra = {"seed": jnp.uint32(7)} if optimizer.draws else {}
    step = jax.jit(lambda g, state, params: optimizer.update(g, state, params, **extra))
    for tree in grads:
        updates, state = step(tree, state, params)
        params = optax.apply_updates(params, updates)
    return flatten(jax.device_get(params)), state


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MAKES)
def test_each_expert_is_updated_independently(name):
    rng = np.random.default_rng(0)

    def draw(spec):
        # Gradients of different size per expert, so that shared state would be noticed.
        sizes = np.array([0.1, 1.0, 10.0]).reshape(-1, 1, 1) if len(spec.shape) == 3 else 1.0
        return (sizes * rng.standard_normal(spec.shape)).astype(np.float32)

    whole = specs(SHAPES, experts=True)
    params = jax.tree.map(draw, whole)
    grads = [jax.tree.map(draw, whole) for _ in range(5)]
    found, state = train(MAKES[name], whole, params, grads)
    for expert in range(EXPERTS):
        # The layer without the other experts.
        def alone(tree, expert=expert):
            return jax.tree.map(lambda x: x[expert] if x.ndim == 3 else x, tree)

        one = specs(SHAPES, experts=False)
        expected, _ = train(MAKES[name], one, alone(params), [alone(tree) for tree in grads])
        for path in SHAPES:
            np.testing.assert_allclose(found[path][expert], expected[path], rtol=2e-5, atol=2e-6, err_msg=path)
        np.testing.assert_allclose(found[OTHER], expected[OTHER], rtol=2e-5, atol=2e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.uint32)


@pytest.mark.parametrize("name", ["galore", "apollo", "apollo_mini"])
def test_expert_states_are_sharded_like_experts_and_are_small(name):
    whole = specs({"mlp/experts/up": (64, 96)}, experts=True)
    optimizer = MAKES[name].fit_to_specs(whole)
    state = jax.eval_shape(optimizer.init, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), whole))
    leaves = flatten(optimizer.partition(whole))
    assert jax.tree.map(lambda s: (s.shape, s.dtype), list(leaves.values())) == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)
    ]
    owned = [leaf for leaf in leaves.values() if leaf.owner == "mlp/experts/up"]
    assert len(owned) >= 3
    assert all(leaf.shape[0] == EXPERTS and leaf.mesh_axes[0] == "expert" for leaf in owned)
    assert sum(leaf.size for leaf in owned) < 0.2 * EXPERTS * 64 * 96
    counters = [leaf for leaf in leaves.values() if leaf.owner is None]
    assert counters
    assert all(leaf.shape == () and leaf.counts_updates for leaf in counters)


@pytest.mark.pairs
def test_weight_decay_covers_expert_matrices_and_no_bias():
    """The named configs use `no_decay("norm|bias")`; with zero gradients, only decayed parameters shrink."""
    model = small.llama()
    small.block(model).mlp = mixture(experts=4, top_k=2, hidden=24)
    small.block(model).attention.linear.bias = True
    rate = 0.1
    optimizer = config_for(optax.adamw, learning_rate=rate, weight_decay=0.5)
    config = small.experiment(model, optimizer=optimizer, rules=[no_decay("norm|bias")], clip=None)
    program = small.program(config)
    before = small.arrays(program.init().parameter)
    batch = small.host_batch(program)
    batch["weights"][:] = 0.0
    # Without counted targets there is no loss, so gradients are zero.
    state, _ = program.step(program.init(), program.put(batch))
    after = small.arrays(state.parameter)
    decayed = {
        path for path in before if np.abs(before[path]).max() > 0 and not np.array_equal(before[path], after[path])
    }
    experts = {f"stack/block0/mlp/experts/{name}" for name in ("gate", "up", "down")}
    assert {*experts, "stack/block0/mlp/router/weight"} <= decayed
    assert not any("norm" in path or "bias" in path for path in decayed)
    for path in experts:
        np.testing.assert_allclose(after[path], before[path] * (1 - rate * 0.5), rtol=1e-6)
