"""Calls of Pallas kernels for GPUs in programs that are compiled where there is no GPU, for plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

T = TypeVar("T")

# Any that Pallas knows: our kernels do not depend on it. XLA compiles them for the GPUs of the program.
_KNOWN_DEVICE = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")


def call_kernel(kernel: Callable[..., T], *arrays: Any) -> T:
    """Return kernel(*arrays).

    Without a GPU, Pallas since jax 0.11 needs the name of one to lower kernels for, and accepts only some names.

    Args:
        kernel: result of `pallas_call`, for Triton.
        *arrays: its arguments.
    """
    if jax.default_backend() == "gpu":
        return kernel(*arrays)
    leaves, tree = jax.tree.flatten(arrays)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    with describe_absent_gpu():
        trace = jax.make_jaxpr(lambda *leaves: kernel(*tree.unflatten(leaves)), return_shape=True)
        jaxpr, out_shapes = trace(*shapes)
    return jax.tree.structure(out_shapes).unflatten(_kernel_p.bind(*leaves, jaxpr=jaxpr))


def describe_absent_gpu() -> AbstractContextManager[None]:
    """Return a context in which kernels are traced for a GPU that Pallas knows, although there is none."""
    # The mesh in use at this place may have GPUs that Pallas does not know.
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=_KNOWN_DEVICE))


# A primitive, because the arrays belong to the mesh in use.
_kernel_p = Primitive("gpu_kernel")
_kernel_p.multiple_results = True
_kernel_p.def_abstract_eval(lambda *_, jaxpr: [ShapedArray(aval.shape, aval.dtype) for aval in jaxpr.out_avals])
mlir.register_lowering(
    _kernel_p,
    lambda ctx, *operands, jaxpr: mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands),
    platform="cuda",
)
