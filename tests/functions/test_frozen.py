"""`check_frozen`: a step passes if and only if it makes no other buffer of a frozen weight's size."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plimsoll as pl

SHAPE = jax.ShapeDtypeStruct
# Too large for a TPU to keep intermediates in on-chip memory, and no two arrays have the same size.
TRAINED = SHAPE((1536, 128), jnp.float32)
PARAMS = {"frozen": SHAPE((1024, 1536), jnp.bfloat16), "trained": TRAINED, "bias": SHAPE((1536,), jnp.float32)}
BATCH = SHAPE((96, 1024), jnp.bfloat16)


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.dot(batch, params["frozen"], preferred_element_type=jnp.float32) + params["bias"]
    return jnp.mean(jnp.square(jax.nn.gelu(hidden) @ params["trained"]))


def in_float32(params: Any) -> Any:
    """Return the same parameters in float32, which XLA for CPU multiplies without inserting a cast."""
    return jax.tree.map(lambda leaf: SHAPE(leaf.shape, jnp.float32), params)


def good(params: Any, batch: Any) -> Any:
    value, gradient = pl.differentiate(loss, trainable="trained|bias")(params, batch)
    return value, gradient


def with_frozen_gradient(params: Any, batch: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, batch)
    return value, gradient


def with_cast(params: Any, batch: Any) -> Any:
    # The barrier keeps the compiler from fusing the cast into the product, which would cost no memory.
    whole = jax.lax.optimization_barrier(params["frozen"].astype(jnp.float16))
    return good({**params, "frozen": whole.astype(batch.dtype)}, batch)


def with_result(params: Any, batch: Any) -> Any:
    return params["frozen"], good(params, batch)


BAD_STEPS = [
    (with_frozen_gradient, "transpose(jvp", "[1024,1536]"),
    (with_cast, "convert_element_type", "[1024,1536]"),
    (with_result, "copy of params['frozen']", "[1024,1536]"),
]


def test_step_without_extra_buffers_passes():
    arguments = in_float32((PARAMS, BATCH))
    pl.check_frozen(jax.jit(good), *arguments, frozen="params/frozen")
    pl.check_frozen(good, *arguments, frozen={"frozen": arguments[0]["frozen"]})


@pytest.mark.parametrize(("step", "operation", "array"), BAD_STEPS)
def test_a_step_that_makes_another_buffer_fails_and_names_it(step: Callable[..., Any], operation: str, array: str):
    with pytest.raises(pl.FrozenBufferError) as error:
        pl.check_frozen(jax.jit(step), *in_float32((PARAMS, BATCH)), frozen="params/frozen")
    assert isinstance(error.value, AssertionError)
    for word in (operation, array, "as large as params/frozen:", "test_frozen.py" if "jvp" in operation else ""):
        assert word in str(error.value)
    assert all(buffer.leaves == ("params/frozen",) for buffer in error.value.buffers)


@pytest.mark.parametrize("name", ["good", *(step.__name__ for step, _, _ in BAD_STEPS)])
def test_same_when_compiled_for_an_absent_tpu(name: str):
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    step = globals()[name]
    if step is good:
        pl.check_frozen(step, PARAMS, BATCH, frozen="params/frozen", target="v5e-1")
        return
    with pytest.raises(pl.FrozenBufferError, match=r"\[1024,1536\]"):
        pl.check_frozen(step, PARAMS, BATCH, frozen="params/frozen", target="v5e-1")


@pytest.mark.pairs
def test_tpu_prefetch_into_vmem_is_not_counted():
    """The TPU prefetches weights that are adjacent in a program, in slices that become one array in on-chip memory."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    layer = {"up": SHAPE((1024, 4096), jnp.bfloat16), "down": SHAPE((4096, 1024), jnp.bfloat16)}

    def layers(params: Any, batch: Any) -> jax.Array:
        for weights in params:
            batch = batch + jax.nn.gelu(batch @ weights["up"]) @ weights["down"]
        return jnp.mean(jnp.square(batch))

    params = [layer, layer]
    adapters = jax.eval_shape(lambda: pl.lora_init(jax.random.key(0), params, "up|down", rank=16))
    step = jax.value_and_grad(pl.with_lora(layers), argnums=1)
    pl.check_frozen(step, params, adapters, SHAPE((500, 1024), jnp.bfloat16), frozen="^params/", target="v5e-1")


def test_a_donated_leaf_may_be_returned():
    arguments = in_float32((PARAMS, BATCH))
    pl.check_frozen(jax.jit(with_result, donate_argnums=0), *arguments, frozen="params/frozen")


def test_sharded_leaves_count_by_shard_and_whole():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P(None, "data"))
    params, batch = in_float32((PARAMS, BATCH))
    params["frozen"] = SHAPE((1024, 1536), jnp.float32, sharding=sharding)

    def double(params: Any, batch: Any) -> Any:
        return params["frozen"] * 2

    sharded = jax.jit(double, out_shardings=sharding)
    whole = jax.jit(double, out_shardings=NamedSharding(mesh, P()))
    with pytest.raises(pl.FrozenBufferError, match=r"f32\[1024,768\]"):
        pl.check_frozen(sharded, params, batch, frozen="params/frozen")
    with pytest.raises(pl.FrozenBufferError, match=r"f32\[1024,1536\]"):
        pl.check_frozen(whole, params, batch, frozen="params/frozen")


@pytest.mark.parametrize(
    ("frozen", "batch", "words"),
    [
        ("params/forzen", BATCH, ["matches none of 4 leaves", "nearest: 'params/frozen'"]),
        ("bias", BATCH, ["none of the 1 leaves has two axes", "params/bias [1536]"]),
        ("params/frozen", SHAPE((1536, 1024), jnp.float32), ["batch [1536, 1024] is not frozen", "as many elements"]),
    ],
)
def test_vacuous_check_is_an_error(frozen: str, batch: Any, words: list[str]):
    with pytest.raises(ValueError) as error:
        pl.check_frozen(good, PARAMS, batch, frozen=frozen)
    for word in words:
        assert word in str(error.value)
