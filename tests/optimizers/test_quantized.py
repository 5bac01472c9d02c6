"""8-bit AdamW compared to the paper's map and blocks in float64 numpy; its state and its update locality."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layout import ParameterSpec, flatten, unflatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.quantized import Moment, adamw8bit, decode, encode
from plimsoll.framework.optimizers.update_locality import probe
from tests.support import updates

B1, B2, EPS, RATE, DECAY = 0.9, 0.99, 1e-8, 0.05, 0.1
# Two whole blocks and a short one; only a short block; a table, with blocks along rows; parameters with float moments.
SPECS = {
    "long/weight": ParameterSpec((600, 24), "float32", ("fsdp", "model"), roles=("in", "out")),
    "short/weight": ParameterSpec((40, 120), "float32", ("model", "fsdp"), roles=("hidden", "out")),
    "kernel": ParameterSpec((3, 3, 32, 20), "float32", roles=("height", "width", "in", "out")),
    "token": ParameterSpec((20, 300), "float32", ("model", "fsdp"), roles=("vocab", "out")),
    "small/weight": ParameterSpec((8, 8), "float32", ("fsdp", None), roles=("in", "out")),
    "norm/scale": ParameterSpec((5000,), "float32", roles=("channel",)),
}
AXES = {"long/weight": 0, "short/weight": 0, "kernel": 2, "token": 1}  # of the blocks


def dynamic_map(signed: bool) -> np.ndarray:
    """Return the paper's map (section 2.2, figure 2), float64[256] ascending; unsigned for second moments."""
    positive = [0.0, 1.0]
    for decade in range(7):
        borders = np.linspace(0.1, 1.0, 2 ** (decade if signed else decade + 1) + 1)
        positive += list(10.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2)
    return np.sort(positive + ([-x for x in positive if 0 < x < 1] if signed else []))


def nearest(x: np.ndarray, signed: bool) -> np.ndarray:
    numbers = dynamic_map(signed)
    codes = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, x, side="right")
    return codes if signed else np.where((codes == 0) & (x > 0), 1, codes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_encode_the_nearest_number(signed, dtype):
    rng, numbers = np.random.default_rng(0), dynamic_map(signed)
    x = np.clip(rng.normal(size=20_000) * 10.0 ** rng.uniform(-8, 0.3, size=20_000), -1, 1)
    x = np.concatenate([x, numbers, [-1.0]]) if signed else np.abs(np.concatenate([x, numbers, [1e-30]]))
    with jax.enable_x64(dtype == "float64"):
        codes = np.asarray(jax.jit(lambda x: encode(x, signed=signed))(x.astype(dtype)))
        back = jax.jit(lambda codes: decode(codes, jnp.dtype(dtype), signed=signed))(np.arange(256, dtype=np.uint8))
        assert (codes.dtype, back.dtype) == (np.uint8, dtype)
    np.testing.assert_array_equal(codes, nearest(x, signed))
    np.testing.assert_allclose(back, numbers, rtol=2e-7 if dtype == "float32" else 1e-14, atol=0)


def round_trip(x: np.ndarray, axis: int | None, block: int, signed: bool) -> np.ndarray:
    """Return a moment after it was stored and loaded."""
    if axis is None:
        return x
    blocks = [x.take(range(i, min(i + block, x.shape[axis])), axis) for i in range(0, x.shape[axis], block)]
    scales = [np.abs(part).max(axis, keepdims=True) for part in blocks]
    parts = [s * dynamic_map(signed)[nearest(part / s, signed)] for part, s in zip(blocks, scales, strict=True)]
    return np.concatenate(parts, axis)


def paper(p: np.ndarray, grads: list[np.ndarray], axis: int | None, block: int) -> np.ndarray:
    mu = nu = np.zeros_like(p)
    for step, g in enumerate(grads, start=1):
        mu, nu = B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g**2
        u = mu / (1 - B1**step) / (np.sqrt(nu / (1 - B2**step)) + EPS)
        mu, nu = round_trip(mu, axis, block, True), round_trip(nu, axis, block, False)
        p = p - RATE * (u + DECAY * p)
    return p


def optimizer(**fields: Any) -> Any:
    return adamw8bit(learning_rate=RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, **fields)


def draw(rng: np.random.Generator, size: float) -> dict[str, np.ndarray]:
    """Return elements of very different sizes, like those of gradients."""
    return {k: size * rng.normal(size=s.shape) * 10 ** rng.uniform(-4, 0, size=s.shape) for k, s in SPECS.items()}


@pytest.mark.pairs
@pytest.mark.parametrize(("tables", "block"), [("float32", 256), ("8bit", 256), ("8bit", 64)])
def test_the_papers_equations_in_float64(tables, block):
    rng = np.random.default_rng(1)
    params, grads = draw(rng, 1.0), [draw(rng, size) for size in (1e-3, 1.0, 0.1, 30.0, 1e-4, 1.0)]
    with jax.enable_x64(True):
        fitted = optimizer(tables=tables, block=block).fit_to_specs(unflatten(SPECS))
        actual = jax.tree.map(jnp.asarray, unflatten(params))
        state, update = fitted.init(actual), jax.jit(fitted.update)
        for tree in grads:
            change, state = update(unflatten(tree), state, actual)
            actual = optax.apply_updates(actual, change)
    for path, value in flatten(jax.device_get(actual)).items():
        axis = AXES.get(path) if path != "token" or tables == "8bit" else None
        expected = paper(params[path], [tree[path] for tree in grads], axis, block)
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=path)


def test_state_is_two_bytes_sharded_like_the_weights():
    fitted = optimizer(tables="8bit").fit_to_specs(unflatten(SPECS))
    specs = fitted.partition(unflatten(SPECS))
    made = jax.eval_shape(fitted.init, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), unflatten(SPECS)))
    assert jax.tree.structure(specs) == jax.tree.structure(made)
    leaves = flatten(specs)
    for path, leaf in flatten(made).items():
        assert (leaves[path].shape, leaves[path].dtype) == (leaf.shape, leaf.dtype), path
    assert {leaf.owner for path, leaf in leaves.items() if path != "0/count"} == SPECS.keys()
    scales = {path: (leaves[f"0/mu/{path}/scale"].shape, leaves[f"0/mu/{path}/scale"].mesh_axes) for path in AXES}
    assert scales == {
        "long/weight": ((3, 24), ("fsdp", "model")),
        "short/weight": ((1, 120), ("model", "fsdp")),
        "kernel": ((3, 3, 1, 20), (None,) * 4),
        "token": ((20, 2), ("model", "fsdp")),
    }
    assert leaves["0/nu/token/codes"].mesh_axes == ("model", "fsdp")
    assert {path for path in SPECS if f"0/mu/{path}" in leaves} == {"small/weight", "norm/scale"}
    large = ParameterSpec((4096, 1024), "bfloat16", roles=("in", "out"))
    state = jax.tree.leaves(optimizer().partition({"weight": large}))
    assert sum(leaf.num_bytes for leaf in state) == large.size * (2 + 2 * 4 / 256) + 4


def test_tables_keep_precise_moments_by_default():
    assert isinstance(optimizer(tables="8bit").fit_to_specs(SPECS).partition(SPECS)[0].mu["token"], Moment)
    assert not isinstance(optimizer().fit_to_specs(SPECS).partition(SPECS)[0].mu["token"], Moment)
    assert isinstance(optimizer().partition(SPECS)[0].mu["token"], Moment)  # no roles: not known to be a table


def learner(**fields: Any) -> Learner:
    config = config_for(adamw8bit, learning_rate=0.01, block=4, min_size=64)
    return config_for(Learner, optimizer=config, **fields).instantiate(specs=updates.specs())


def test_rows_cannot_be_updated_separately():
    """A split into rows would cut blocks. The trial's small arrays cannot show this: nothing in them is quantized."""
    made = learner()
    assert [made.update_locality(group) for group in made.groups] == [
        "tensor",
        "element",
        "tensor",
    ]  # embed, head, stack
    assert probe(adamw8bit(learning_rate=0.1), {"weight": SPECS["long/weight"]}) == "tensor"


@pytest.mark.pairs
def test_a_dtype_for_moments_is_for_the_precise_ones_and_the_scales():
    params, grads = updates.draw(0), updates.gradients(5)
    made = learner(moment_dtype="bfloat16")
    kept = updates.ours(made, params, grads)[-1]
    dtypes = {path.split("/")[-1]: leaf.dtype for path, leaf in flatten(kept.optimizer["stack"]).items()}
    assert dtypes["codes"] == jnp.uint32
    assert dtypes["scale"] == dtypes["bias"] == jnp.bfloat16
    precise = updates.ours(learner(), params, grads)[-1]
    params, precise_params, kept_params = jax.device_get((params, precise.params, kept.params))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), precise_params, params)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), precise_params, kept_params)
    ratios = jax.tree.leaves(jax.tree.map(lambda a, m: a / m, apart, moved))
    assert 0 < max(ratios) < 0.1


def test_a_bad_name_is_an_error():
    with pytest.raises(ValueError, match=r"tables"):
        config_for(adamw8bit, learning_rate=0.1).tables = "int8"
    with pytest.raises(ValueError, match=r"block"):
        config_for(adamw8bit, learning_rate=0.1).block = 0
