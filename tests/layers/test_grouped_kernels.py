"""The grouped matmul kernels, interpreted on the CPU, compared to a loop over experts in float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layers.experts import grouped, grouped_gpu, grouped_tpu

INPUTS, OUTPUTS = 48, 64
KERNELS = {"megablox": grouped_tpu, "triton": grouped_gpu}
SIZES = {
    "uneven": [70, 0, 3, 130, 1],
    "all on one": [0, 0, 600, 0, 0],
    "whole tiles": [64, 128, 64, 0, 256],
    "nothing here": [0, 0, 0, 0, 0],
}


def make_rows(sizes: list[int], implementation: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [N, I] and gradients [N, O]; the spare rows are NaN, as a kernel may have left them."""
    used = sum(sizes)
    # At least one row is spare, even if the implementation needs none.
    count = grouped.with_spare_rows(used + 1, implementation)
    draw = np.random.default_rng(0)
    x_NI = np.full((count, INPUTS), np.nan, np.float32)
    grad_NO = np.full((count, OUTPUTS), np.nan, np.float32)
    x_NI[:used] = draw.normal(size=(used, INPUTS))
    grad_NO[:used] = draw.normal(size=(used, OUTPUTS))
    return x_NI, grad_NO


def by_expert(sizes: list[int]) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.pairs
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_multiply_each_row_by_its_expert(implementation: str, name: str):
    kernels: ModuleType = KERNELS[implementation]
    sizes = SIZES[name]
    x_NI, grad_NO = make_rows(sizes, implementation)
    weight_EIO = np.random.default_rng(1).normal(size=(len(sizes), INPUTS, OUTPUTS)).astype(np.float32)
    sizes_E = jnp.asarray(sizes, jnp.int32)
    y_NO = kernels.rows_times_weights(x_NI, weight_EIO, sizes_E, interpret=True)
    x_grad_NI = kernels.rows_times_weights(grad_NO, weight_EIO, sizes_E, transpose=True, interpret=True)
    weight_grads = kernels.weight_gradients(x_NI, grad_NO, sizes_E, interpret=True)
    for expert, rows in enumerate(by_expert(sizes)):
        weight = weight_EIO[expert].astype(np.float64)
        expert_x, expert_grad = x_NI[rows].astype(np.float64), grad_NO[rows].astype(np.float64)
        np.testing.assert_allclose(y_NO[rows], expert_x @ weight, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(x_grad_NI[rows], expert_grad @ weight.T, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(weight_grads[expert], expert_x.T @ expert_grad, rtol=1e-5, atol=2e-4)


@pytest.mark.pairs
def test_the_kernel_for_gpus_cuts_wide_axes_into_tiles():
    sizes = [3, 65]
    width = 160
    count = grouped.with_spare_rows(68, "triton")
    draw = np.random.default_rng(2)
    x_NI = draw.normal(size=(count, width)).astype(np.float32)
    weight_EIO = draw.normal(size=(2, width, 256)).astype(np.float32)
    y_NO = grouped_gpu.rows_times_weights(x_NI, weight_EIO, jnp.asarray(sizes, jnp.int32), interpret=True)
    for expert, rows in enumerate(by_expert(sizes)):
        np.testing.assert_allclose(y_NO[rows], x_NI[rows] @ weight_EIO[expert], rtol=1e-4, atol=1e-3)


@pytest.mark.pairs
@pytest.mark.parametrize("rank", [3, 8])
def test_the_kernel_for_gpus_takes_few_columns(rank: int):
    """Adapters have few columns."""
    sizes = [5, 60]
    count = grouped.with_spare_rows(65, "triton")
    draw = np.random.default_rng(3)
    x_NI = draw.normal(size=(count, INPUTS)).astype(np.float32)
    low_NR = draw.normal(size=(count, rank)).astype(np.float32)
    weight_EIR = draw.normal(size=(2, INPUTS, rank)).astype(np.float32)
    sizes_E = jnp.asarray(sizes, jnp.int32)
    y_NR = grouped_gpu.rows_times_weights(x_NI, weight_EIR, sizes_E, interpret=True)
    x_grad_NI = grouped_gpu.rows_times_weights(low_NR, weight_EIR, sizes_E, transpose=True, interpret=True)
    weight_grads = grouped_gpu.weight_gradients(x_NI, low_NR, sizes_E, interpret=True)
    assert weight_grads.shape == weight_EIR.shape
    for expert, rows in enumerate(by_expert(sizes)):
        np.testing.assert_allclose(y_NR[rows], x_NI[rows] @ weight_EIR[expert], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(x_grad_NI[rows], low_NR[rows] @ weight_EIR[expert].T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(weight_grads[expert], x_NI[rows].T @ low_NR[rows], rtol=1e-4, atol=1e-4)


def test_rows_beyond_32_bits_are_refused_by_name():
    rows = jax.ShapeDtypeStruct((1 << 20, 2048), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((4, 2048, 64), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    with pytest.raises(ValueError, match=r"2147483648 elements .* raise learner.accumulate"):
        jax.eval_shape(grouped_gpu.rows_times_weights, rows, weight, sizes)


def test_auto_picks_the_platform_kernel_for_supported_dtypes():
    def choose(platform: str, dtype: Any) -> str:
        return grouped.choose_implementation("auto", platform, jnp.dtype(dtype))

    assert choose("cpu", jnp.bfloat16) == "blocks"
    assert choose("tpu", jnp.bfloat16) == "megablox"
    assert choose("gpu", jnp.float32) == "triton"
    assert choose("gpu", jnp.float64) == choose("tpu", jnp.float64) == "blocks"


def test_kernel_for_another_platform_is_refused_by_name():
    with pytest.raises(ValueError, match="'megablox' is for tpu, not cpu; try auto"):
        grouped.choose_implementation("megablox", "cpu", jnp.dtype(jnp.float32))
