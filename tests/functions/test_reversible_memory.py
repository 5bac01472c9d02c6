"""Memory of the compiled gradient of a stack: the temporaries of a reversible scan do not grow with depth."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import plimsoll as pl

FEW = 16
MANY = 1024
ROWS = 64
DIM = 32
STREAM_BYTES = ROWS * DIM * 4


def branch(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def pair() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return pl.additive_coupling(lambda w, x: branch(w["f"], x), lambda w, x: branch(w["g"], x))


def run_coupled(weights: Any, x: Any) -> Any:
    return pl.reversible_scan(*pair(), weights, x)


def unknown(weights: Any, x: Any) -> Any:
    """Run the same layers with wrapped functions, so that the scan does not know that they are a coupling."""
    forward, inverse = pair()
    return pl.reversible_scan(lambda w, x: forward(w, x), lambda w, y: inverse(w, y), weights, x)


def plain(weights: Any, x: Any) -> Any:
    forward, _ = pair()
    y, _ = jax.lax.scan(lambda x, w: (forward(w, x), None), x, weights)
    return y


def temporary_bytes(run: Callable[[Any, Any], Any], layers: int, device: Any) -> int:
    """Return the bytes of the compiled gradient's temporaries, without arguments and results."""

    def loss(weights: Any, x: Any) -> jax.Array:
        y1, y2 = run(weights, x)
        return jnp.sum(y1 * y1) + jnp.sum(y2 * y2)

    sharding = SingleDeviceSharding(device)
    weight = jax.ShapeDtypeStruct((layers, DIM, DIM), jnp.float32, sharding=sharding)
    stream = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32, sharding=sharding)
    gradient = jax.jit(jax.grad(loss, (0, 1)), out_shardings=sharding)
    compiled = gradient.lower({"f": weight, "g": weight}, (stream, stream)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("run", [run_coupled, unknown])
def test_temporaries_are_flat_on_cpu(run: Callable[[Any, Any], Any]) -> None:
    device = jax.devices("cpu")[0]
    few = temporary_bytes(run, FEW, device)
    many = temporary_bytes(run, MANY, device)
    assert few <= many <= few + STREAM_BYTES
    # At most a few streams and one layer's weights.
    assert many < 32 * STREAM_BYTES


def test_plain_scan_temporaries_grow_on_cpu() -> None:
    """Each additional layer adds at least the residuals of two branches."""
    device = jax.devices("cpu")[0]
    grown = temporary_bytes(plain, MANY, device) - temporary_bytes(plain, FEW, device)
    assert grown >= (MANY - FEW) * 2 * STREAM_BYTES


@pytest.mark.pairs
def test_temporaries_are_flat_on_tpu() -> None:
    """This uses the TPU compiler on a machine without a TPU."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    from plimsoll.framework.plan import targets

    targets.set_environment("v5e-1")
    device = targets.resolve("v5e-1").devices()[0]
    few = temporary_bytes(run_coupled, FEW, device)
    many = temporary_bytes(run_coupled, MANY, device)
    assert many <= few + STREAM_BYTES
    grown = temporary_bytes(plain, MANY, device) - temporary_bytes(plain, FEW, device)
    assert grown >= (MANY - FEW) * 2 * STREAM_BYTES
