"""APOLLO and APOLLO-Mini compared to the paper's equations in float64, their state, and edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.config import config_for
from plimsoll.framework.layout import ParameterSpec, flatten, fold_in_name, unflatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.lowrank import apollo, apollo_mini
from plimsoll.framework.optimizers.update_locality import probe

ROLES = {
    "wide/weight": ((6, 20), ("in", "out")),
    "high/weight": ((20, 6), ("in", "out")),
    "square/weight": ((8, 8), ("in", "out")),
    "token": ((16, 6), ("vocab", "out")),
    "norm/scale": ((20,), ("channel",)),
}
SHAPES = {path: shape for path, (shape, _) in ROLES.items()}
SPECS = unflatten(
    {
        path: ParameterSpec(shape, "float32", ("fsdp", "model")[: len(shape)], roles=r)
        for path, (shape, r) in ROLES.items()
    }
)
RATE, DECAY, B1, B2, EPS, INTERVAL, GROWTH = 0.05, 0.2, 0.8, 0.95, 1e-8, 7, 1.01
STEPS = 24  # the projection P is drawn four times
OPTIONS = {"learning_rate": RATE, "weight_decay": DECAY, "b1": B1, "b2": B2, "update_interval": INTERVAL}


def draws(seed, steps=STEPS):
    """Return gradients of different sizes, so that the limiter and Adam's moments matter."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=steps))
    return [{path: size * rng.normal(size=shape) for path, shape in SHAPES.items()} for size in sizes]


def paper(path, p, grads, *, rank, alpha, per, side, seed, growth=GROWTH):
    """Train one parameter by algorithm 1 of arXiv 2412.05270, with the paper's alpha.

    `side` is the projected axis; None means Adam. Return the parameter, the projections, and the number of steps in
    which the limiter was active.
    """
    m = v = last = 0.0
    projections, limited = [], 0
    for t, g in enumerate(grads):
        low = g
        if side is not None:
            key = jax.random.fold_in(fold_in_name(jax.random.key(seed, impl="threefry2x32"), path), t // INTERVAL)
            r = min(rank, g.shape[side])
            projection = np.asarray(jax.random.normal(key, (r, g.shape[side]), jnp.float64)) / np.sqrt(r)
            projections.append(projection)
            low = projection @ (g.T if side else g)
        m, v = B1 * m + (1 - B1) * low, B2 * v + (1 - B2) * low**2
        u = (m / (1 - B1 ** (t + 1))) / (np.sqrt(v / (1 - B2 ** (t + 1))) + EPS)
        if side is not None:
            axis = 0 if per == "channel" else None
            s = np.linalg.norm(u, axis=axis) / np.linalg.norm(low, axis=axis)
            u = alpha * (g * (s[:, None] if side and per == "channel" else s))
            norm = np.linalg.norm(u)
            if t and norm / last > growth:
                u, limited = u * growth * last / norm, limited + 1
            last = np.linalg.norm(u)
        p = p - RATE * u - RATE * DECAY * p
    return p, projections, limited


# name: (the optimizer, then its rank, alpha, and `per` in the equations, for matrices and for tables; None is Adam).
CASES = {
    "apollo": (apollo(rank=3, **OPTIONS), 3, 1.0, "channel", None),
    "full rank": (apollo(rank=256, scale=4.0, tables="same", **OPTIONS), 256, 2.0, "channel", "channel"),
    "per tensor": (apollo(rank=2, per="tensor", tables="same", **OPTIONS), 2, 1.0, "tensor", "tensor"),
    "mini": (apollo_mini(tables="same", **OPTIONS), 1, 128**0.5, "tensor", "tensor"),
    "mini, factored": (apollo_mini(**OPTIONS), 1, 128**0.5, "tensor", "factored"),
    "mini, adam": (apollo_mini(tables="adam", **OPTIONS), 1, 128**0.5, "tensor", None),
}


def adafactor(p, grads):
    """Train by algorithm 4 of arXiv 1804.04235, with the decay of section 7.2 and a relative step of one."""
    row = column = 0.0
    for t, g in enumerate(grads, start=1):
        beta = 1 - t**-0.8
        row = beta * row + (1 - beta) * (g**2 + 1e-30).mean(axis=1, keepdims=True)
        column = beta * column + (1 - beta) * (g**2 + 1e-30).mean(axis=0, keepdims=True)
        u = g / np.sqrt(row * column / row.mean())
        p = p - RATE * u / max(1.0, np.sqrt((u**2).mean())) - RATE * DECAY * p
    return p


def get_projected_axis(path, per_table):
    shape = SHAPES[path]
    if len(shape) != 2 or (path == "token" and per_table is None):
        return None
    return int(shape[0] > shape[1])


@pytest.mark.pairs
@pytest.mark.parametrize("name", CASES)
def test_the_papers_equations_in_float64(name):
    optimizer, rank, alpha, per, per_table = CASES[name]
    optimizer = optimizer.fit_to_specs(SPECS)
    [params], grads, seed = draws(0, 1), draws(1), 2**32 - 5
    with jax.enable_x64(True):
        actual = jax.tree.map(jnp.asarray, unflatten(params))
        state, update = optimizer.init(actual), jax.jit(optimizer.update)
        for tree in grads:
            updates, state = update(unflatten(tree), state, actual, seed=jnp.uint32(seed))
            actual = optax.apply_updates(actual, updates)
        for path, value in flatten(jax.device_get(actual)).items():
            own, side = per_table if path == "token" else per, get_projected_axis(path, per_table)
            assert value.dtype == np.float64
            if own == "factored":  # optax computes its decay in float32
                factored = adafactor(params[path], [g[path] for g in grads])
                np.testing.assert_allclose(value, factored, rtol=1e-6, atol=1e-6)
                continue
            wanted = {"rank": rank, "alpha": alpha, "per": own, "side": side, "seed": seed}
            expected, projections, limited = paper(path, params[path], [g[path] for g in grads], **wanted)
            np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10, err_msg=path)
            if side is not None:
                assert STEPS / 4 < limited < STEPS
                assert len({p.tobytes() for p in projections}) == 4
                assert projections[0].tobytes() == projections[INTERVAL - 1].tobytes()


def train(optimizer, grads):
    params = unflatten({path: np.ones(shape, np.float32) for path, shape in SHAPES.items()})
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for tree in grads:
        updates, state = update(jax.tree.map(np.float32, unflatten(tree)), state, params, seed=np.uint32(0))
        params = jax.tree.map(np.add, params, jax.device_get(updates))
    return flatten(params)


def test_a_projection_for_each_parameter_and_layer():
    """The same gradient is projected differently for a parameter with another name and for another seed."""
    optimizer = apollo_mini(learning_rate=0.1, tables="same")
    grads = {name: jnp.arange(1.0, 121.0).reshape(6, 20) for name in ("one", "other")}
    state = optimizer.init(grads)

    update = jax.jit(optimizer.update)

    def mu(seed):
        return jax.tree.leaves(update(grads, state, grads, seed=jnp.uint32(seed))[1][0].adam.mu)

    (one, other), (again, _), (layer, _) = mu(0), mu(0), mu(1)
    assert (one == again).all()
    assert not np.allclose(one, other)
    assert not np.allclose(one, layer)
    none = jax.tree.leaves(update(grads, state, grads)[1][0].adam.mu)
    assert (none[0] == one).all()


def test_the_same_projection_on_any_mesh():
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    placed = NamedSharding(Mesh(devices, ("fsdp", "model")), PartitionSpec("fsdp", "model"))
    optimizer, g = apollo(learning_rate=0.1, rank=4), np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    one, eight = ({"w": jnp.asarray(g)}, {"w": jax.device_put(g, placed)})

    def update_once(tree):
        return jax.jit(optimizer.update)(tree, optimizer.init(tree), tree, seed=jnp.uint32(7))

    for a, b in zip(jax.tree.leaves(update_once(one)), jax.tree.leaves(update_once(eight)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("width", [128, 1024, 4096])
def test_mini_state_is_below_a_tenth_byte_per_parameter(width):
    """Count a Llama with a vocabulary of 32k: embedding, head, and a layer's matrices and norms times the layers."""
    hidden, layers = 11 * width // 4, max(4, width // 128)
    matrix = {f"m{i}": (width, width) for i in range(4)} | {"up": (width, hidden), "down": (hidden, width)}
    layer = {path: ParameterSpec(shape, "float32", roles=("in", "out")) for path, shape in matrix.items()}
    layer |= {f"norm{i}": ParameterSpec((width,), "float32", roles=("channel",)) for i in range(2)}
    tables = {name: ParameterSpec((32000, width), "float32", roles=("vocab", "out")) for name in ("token", "head")}
    mini = apollo_mini(learning_rate=0.1)
    state, weights = 0, 0
    for specs, times in ((layer, layers), (tables, 1)):
        state += times * sum(leaf.num_bytes for leaf in flatten(mini.fit_to_specs(specs).partition(specs)).values())
        weights += times * sum(spec.size for spec in specs.values())
    assert 0 < state / weights < 0.1


def test_state_is_sharded_and_projections_are_not_stored():
    optimizer = apollo(learning_rate=0.1, rank=4, tables="same").fit_to_specs(SPECS)
    leaves = flatten(optimizer.partition(SPECS))
    state = flatten(
        jax.eval_shape(optimizer.init, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), SPECS))
    )
    assert {path: leaf.shape for path, leaf in leaves.items()} == {path: x.shape for path, x in state.items()}
    cut = {
        path.removeprefix("0/adam/mu/"): (leaf.shape, leaf.mesh_axes) for path, leaf in leaves.items() if "/mu/" in path
    }
    assert cut == {
        "wide/weight": ((4, 20), ("fsdp", "model")),
        "high/weight": ((4, 20), ("model", "fsdp")),
        "square/weight": ((4, 8), ("fsdp", "model")),
        "token": ((4, 16), ("model", "fsdp")),
        "norm/scale": ((20,), ("fsdp",)),
    }
    assert {path for path, leaf in leaves.items() if leaf.shape == ()} == {
        "0/adam/count",
        *(f"0/norm/{path}" for path, shape in SHAPES.items() if len(shape) == 2),
    }
    assert probe(optimizer, SPECS) == "tensor"


def test_moments_in_bfloat16_but_no_norms():
    config = config_for(apollo, learning_rate=0.1, rank=4)
    learner = config_for(Learner, optimizer=config, moment_dtype="bfloat16").instantiate(specs={"stage": SPECS})
    leaves = flatten(learner.optimizer_specs())
    assert {leaf.dtype for path, leaf in leaves.items() if "/mu/" in path or "/nu/" in path} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for path, leaf in leaves.items() if "/norm/" in path and "scale" not in path} == {
        jnp.dtype("float32")
    }


@pytest.mark.pairs
@pytest.mark.parametrize("tables", ["adam", "factored", "same"])
@pytest.mark.parametrize("make", [apollo, apollo_mini])
def test_zero_gradients_change_nothing(make, tables):
    optimizer = make(learning_rate=0.1, tables=tables).fit_to_specs(SPECS)
    grads = draws(0, 3)
    nothing = {path: np.zeros(shape) for path, shape in SHAPES.items()}
    still = train(optimizer, [nothing] * 3)
    assert all((x == 1).all() for x in still.values())
    # The limiter does not hold back a matrix whose first gradient is zero, and rows without gradients do not move.
    late = [nothing, *grads]
    for tree in grads:
        tree["token"][3] = 0.0
    update_once = train(optimizer, late)
    assert all(np.isfinite(x).all() and (x != 1).any() for x in update_once.values())
    assert (update_once["token"][3] == 1).all()


@pytest.mark.pairs
def test_one_huge_element_makes_no_nan():
    made = (apollo(learning_rate=0.1, rank=2, tables="same"), apollo_mini(learning_rate=0.1))
    fitted = [optimizer.fit_to_specs(SPECS) for optimizer in made]  # each update is compiled once
    for huge in (1e8, 1e15):
        grads = draws(0, 4)
        for path in SHAPES:
            grads[1][path].flat[5] = huge
        for optimizer in fitted:
            after = train(optimizer, grads)
            assert all(np.isfinite(x).all() for x in after.values()), huge
            assert all(np.abs(x).max() < 50 for x in after.values()), huge


@pytest.mark.pairs
def test_steps_are_as_large_as_adamws_without_a_scale():
    """With scale = None, a rank below the width and random gradients, step sizes agree within a fifth."""
    rng = np.random.default_rng(0)
    grads = [{"w": jnp.asarray(rng.normal(size=(64, 96)), jnp.float32)} for _ in range(30)]

    def size(optimizer):
        state, update = optimizer.init(grads[0]), jax.jit(optimizer.update)
        for tree in grads:
            updates, state = update(tree, state, grads[0])
        return float(optax.tree.norm(updates))

    adam = size(optax.adamw(0.1, weight_decay=0.0))
    assert abs(size(apollo(learning_rate=0.1, rank=8, scale=None)) / adam - 1) < 0.2
    assert abs(size(apollo_mini(learning_rate=0.1, scale=None)) / adam - 1) < 0.2
    assert abs(size(apollo_mini(learning_rate=0.1, scale=16.0)) / adam - 0.5) < 0.1
