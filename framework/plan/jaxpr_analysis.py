"""Analyzes a program before it is compiled: its matrix-product FLOPs, and parameters without a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from plimsoll.framework.layers.block_rounding import PRODUCT_KERNEL
from plimsoll.framework.layout import PyTree
from plimsoll.framework.plan.grouped_products import count_further_rounds, count_grouped_flops


@dataclass(frozen=True)
class FlopCount:
    """Matrix-product FLOPs over all devices; a multiply-add counts 2.

    Attributes:
        flops: number of floating-point operations.
        uncounted_loops: number of loops around matrix products whose trip count depends on data; each is counted as one
            iteration.
        fp8, int8: the part of `flops` in products of 8-bit floats, and of 8-bit integers.
        mask_excess: FLOPs that attention kernels compute beyond one half of theirs, counted twice; negative if masks
            leave less. See `LOCAL_ATTENTION`.
    """

    flops: int = 0
    uncounted_loops: int = 0
    fp8: int = 0
    int8: int = 0
    mask_excess: int = 0

    def scale(self, factor: int) -> FlopCount:
        """Return the count of `factor` runs."""
        return replace(
            self,
            flops=factor * self.flops,
            fp8=factor * self.fp8,
            int8=factor * self.int8,
            mask_excess=factor * self.mask_excess,
        )


def flops(jaxpr: ClosedJaxpr | Jaxpr) -> FlopCount:
    """Return the FLOPs of all matrix products and convolutions of a computation, including remat.

    Loops count by their trip count (a `fori_loop` between constants is a scan), branches by the most expensive one.
    Experts count the work of an even router.
    Code under shard_map counts once per device, replicas included. A Pallas kernel counts its author's cost estimate,
    or else its whole grid: blocks that splash skips because the causal mask empties them are counted, as in PaLM's
    formula (arXiv 2204.02311, appendix B). The same holds for cuDNN's attention. Other custom calls count as 0.
    """
    program = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return _sum(map(_count_flops, program.eqns))


def sum_flops(calls: Iterable[ClosedJaxpr]) -> FlopCount:
    """Return the sum of `flops` over calls of programs; a program that is called several times counts each time."""
    # Calls of one program share a jaxpr, which is walked only once.
    counts: dict[int, FlopCount] = {}
    call_counts = []
    for jaxpr in calls:
        if id(jaxpr) not in counts:
            counts[id(jaxpr)] = flops(jaxpr)
        call_counts.append(counts[id(jaxpr)])
    return _sum(call_counts)


def _sum(counts: Iterable[FlopCount]) -> FlopCount:
    total = FlopCount()
    for count in counts:
        total = FlopCount(
            total.flops + count.flops,
            total.uncounted_loops + count.uncounted_loops,
            total.fp8 + count.fp8,
            total.int8 + count.int8,
            total.mask_excess + count.mask_excess,
        )
    return total


# Attention in products of B N S T H multiply-adds. Forward: q k and w v; backward: q k again, dv, dw, dq, dk. Products
# that involve v have the head size of the values, which differs from that of the keys in latent attention.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_CUDNN = {
    "dot_product_attention_fwd_wrapper": _FORWARD_PRODUCTS,
    "dot_product_attention_bwd_wrapper": _BACKWARD_PRODUCTS,
}
# Primitives that represent kernels in framework.plan.device_trace. Attention has the fraction of its products that its
# mask leaves, `seen_share`, on the device that has most.
LOCAL_ATTENTION = "attention_kernel"
LOCAL_GROUPED_PRODUCT = "grouped_products"
LOCAL_EXCHANGE = "row_exchange"
# Primitives of products of 8-bit floats with a scale for each block: that of `jax.nn.scaled_matmul`, and ours.
SCALED_PRODUCTS = ("scaled_matmul_wrapper", PRODUCT_KERNEL)


def _count_flops(eqn: JaxprEqn) -> FlopCount:
    name = eqn.primitive.name
    params = eqn.params
    shapes: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in (*eqn.invars, *eqn.outvars)]
    if name == "dot_general":
        (contracted_axes, _), _ = params["dimension_numbers"]
        contracted_size = math.prod(shapes[0][axis] for axis in contracted_axes)
        num_flops = 2 * math.prod(shapes[-1]) * contracted_size
        dtype = getattr(eqn.invars[0].aval, "dtype", jnp.dtype("float32"))
        is_8_bit = dtype.itemsize == 1
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return FlopCount(
            num_flops, fp8=num_flops * (is_8_bit and is_float), int8=num_flops * (is_8_bit and not is_float)
        )
    if name == "conv_general_dilated":
        # The sum runs over all kernel dimensions except the output channels.
        _, *summed_axes = params["dimension_numbers"].rhs_spec
        summed_size = math.prod(shapes[1][axis] for axis in summed_axes)
        return FlopCount(2 * math.prod(shapes[-1]) * summed_size)
    if name in _CUDNN:
        # Keys are [B, T, K, H] or, with layout 1, [B, K, T, H].
        length_axis = 2 if params["layout"] else 1
        key_length = shapes[1][length_axis]
        return FlopCount(2 * _CUDNN[name] * math.prod(shapes[0]) * key_length)
    if name == LOCAL_ATTENTION:
        # Operands are queries, keys and values, heads first; the backward kernel has additional ones.
        is_backward = len(eqn.invars) > 3
        *rows, key_dim = shapes[0]
        key_length, value_dim = shapes[2][2:]
        key_products = 3 if is_backward else 1
        value_products = 2 if is_backward else 1
        channels = key_products * key_dim + value_products * value_dim
        num_flops = 2 * math.prod(rows) * key_length * channels
        # Time is estimated as if kernels skipped half of their products, as causal masks let them do.
        return FlopCount(num_flops, mask_excess=round((2 * params["seen_share"] - 1) * num_flops))
    if name in SCALED_PRODUCTS:
        # [B, M, K] and [B, N, K], or without B.
        num_flops = 2 * math.prod(shapes[-1]) * shapes[0][-1]
        return FlopCount(num_flops, fp8=num_flops)
    if name == LOCAL_GROUPED_PRODUCT:
        return FlopCount(params["flops"])
    if name == "ragged_dot_general":
        # Every row is multiplied with the weights of exactly one group.
        dimensions = params["ragged_dot_dimension_numbers"]
        (contracted_axes, _), _ = dimensions.dot_dimension_numbers
        rows, weights = shapes[:2]
        # The gradient of the weights sums over rows, and its result has a group axis.
        if set(dimensions.lhs_ragged_dimensions) & set(contracted_axes):
            return FlopCount(2 * math.prod(rows) * math.prod(weights) // rows[contracted_axes[0]])
        contracted_size = math.prod(rows[axis] for axis in contracted_axes)
        return FlopCount(2 * math.prod(shapes[-1]) * contracted_size)
    # A grouped product is a kernel, a function that calls one, or a loop over experts.
    if name in ("pallas_call", "jit", "pjit", "scan"):
        float_shapes = []
        for var, shape in zip((*eqn.invars, *eqn.outvars), shapes, strict=True):
            dtype = getattr(var.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                float_shapes.append(shape)
        work = count_grouped_flops(str(eqn.source_info.name_stack), float_shapes)
        if work:
            return FlopCount(work)
    if name == "while":
        rounds = count_further_rounds(str(eqn.source_info.name_stack))
        if rounds is not None:
            return _sum(map(flops, inner_jaxprs(params))).scale(rounds)
    if name == "pallas_call" and params["cost_estimate"] is not None:
        return FlopCount(int(params["cost_estimate"].flops))
    return _flops_inside(name, params)


def _flops_inside(name: str, params: dict[str, Any]) -> FlopCount:
    """Return the FLOPs of an equation's inner programs, times the number of runs."""
    inner_counts = list(map(flops, inner_jaxprs(params)))
    total = _sum(inner_counts)
    if name == "cond":
        total = max(inner_counts, key=lambda count: (count.flops, count.uncounted_loops))
    grid = params["grid_mapping"].grid if name == "pallas_call" else ()
    # A kernel's grid may depend on data too; its sizes are then not integers.
    if name == "while" or not all(isinstance(size, int) for size in grid):
        return replace(total, uncounted_loops=total.uncounted_loops + (total.flops > 0))
    runs = math.prod(grid)
    if name == "scan":
        runs *= params["length"]
    if name == "shard_map":
        # The body is the program of one device.
        runs *= math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return total.scale(runs)


def inner_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """Return the inner programs in an equation's params: loops, branches, jit, checkpoint, custom rules, kernels."""
    bodies = []
    for value in params.values():
        # Branches are in tuples.
        items = value if isinstance(value, (tuple, list)) else (value,)
        for item in items:
            # A closed jaxpr has an open one.
            body = getattr(item, "jaxpr", item)
            if hasattr(body, "eqns"):
                bodies.append(body)
    return bodies


def find_zero_gradients(loss: Callable[..., jax.Array], params: PyTree, *inputs: PyTree) -> list[bool]:
    """Return, for each leaf of `params`, whether the gradient of `loss(params, *inputs)` is zero for any data.

    That is the case if no derivative reaches the leaf, for example behind a `stop_gradient`.

    JAX's dead-code elimination finds which tangents the derivative does not depend on. It ignores values: a factor of
    zero still counts as a dependency. So a zero gradient may be missed, but never reported falsely.

    Args:
        loss: function that returns a scalar.
        params: tree of arrays or abstract arrays.
        *inputs: further arguments of `loss`.
    """

    def derivative(tangents: PyTree, params: PyTree, *inputs: PyTree) -> jax.Array:
        return jax.jvp(lambda params: loss(params, *inputs), (params,), (tangents,))[1]

    closed = jax.make_jaxpr(derivative)(params, params, *inputs)
    _, used = dce_jaxpr(closed.jaxpr, [True])
    # The tangents of `params` are the first arguments.
    num_leaves = len(jax.tree.leaves(params))
    return [not is_used for is_used in used[:num_leaves]]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return (number of constants, number of carries) among the operands of a scan.

    Args:
        params: parameters of the `scan` equation.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    # Since jax 0.11 a tree of three parts describes the operands: constants, carry, and the scanned arrays.
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))
