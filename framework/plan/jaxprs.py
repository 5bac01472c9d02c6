"""What can be read off a program before it is compiled: its matrix-product FLOPs, and parameters without a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr


class FlopCount(NamedTuple):
    """Floating-point operations of matrix products, over all devices; a multiply-add counts 2.

    Args:
        flops: how many.
        uncounted_loops: loops around matrix products whose number of iterations depends on data: counted as one each.
    """

    flops: int = 0
    uncounted_loops: int = 0


def flops(jaxpr: ClosedJaxpr | Jaxpr) -> FlopCount:
    """The matrix products and convolutions of the whole computation, with what remat recomputes.

    Loops count by their trip counts (a `fori_loop` between constants is a scan), branches by the largest. What runs
    under shard_map counts once per device, replicas included. A Pallas kernel counts what its author says it costs, or
    else its whole grid: blocks that splash skips because the causal mask empties them are counted, as in PaLM's
    formula (arXiv 2204.02311, appendix B), and likewise in cuDNN's attention. Other custom calls count nothing.
    """
    return _sum(map(_flops_of, _open(jaxpr).eqns))


def _sum(counts: Any) -> FlopCount:
    return FlopCount(*map(sum, zip(FlopCount(), *counts, strict=True)))


# Attention in products of B N S T H multiply-adds: q k and w v; backward q k again, dv, dw, dq, dk.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_CUDNN = {
    "dot_product_attention_fwd_wrapper": _FORWARD_PRODUCTS,
    "dot_product_attention_bwd_wrapper": _BACKWARD_PRODUCTS,
}
LOCAL_ATTENTION = "attention_kernel"  # what stands for a kernel in framework.plan.local_step


def _flops_of(eqn: JaxprEqn) -> FlopCount:
    name, params = eqn.primitive.name, eqn.params
    shapes: list[Any] = [getattr(var.aval, "shape", ()) for var in (*eqn.invars, *eqn.outvars)]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return FlopCount(2 * math.prod(shapes[-1]) * math.prod(shapes[0][axis] for axis in contracted))
    if name == "conv_general_dilated":
        _, *others = params["dimension_numbers"].rhs_spec  # all dimensions of the kernel but its output channels
        return FlopCount(2 * math.prod(shapes[-1]) * math.prod(shapes[1][axis] for axis in others))
    if name in _CUDNN:
        length = shapes[1][2 if params["layout"] else 1]  # of keys [B, T, K, H] or, layout 1, [B, K, T, H]
        return FlopCount(2 * _CUDNN[name] * math.prod(shapes[0]) * length)
    if name == LOCAL_ATTENTION:  # operands are queries, keys, values; of the backward pass more; heads come first
        products = _BACKWARD_PRODUCTS if len(eqn.invars) > 3 else _FORWARD_PRODUCTS
        return FlopCount(2 * products * math.prod(shapes[0]) * shapes[1][2])
    if name == "pallas_call" and params["cost_estimate"] is not None:
        return FlopCount(int(params["cost_estimate"].flops))
    inner = list(map(flops, inner_jaxprs(params)))
    total = max(inner) if name == "cond" else _sum(inner)
    grid = params["grid_mapping"].grid if name == "pallas_call" else ()
    if name == "while" or not all(isinstance(size, int) for size in grid):
        return FlopCount(total.flops, total.uncounted_loops + (total.flops > 0))
    axes = params["newly_manual_axes"] if name == "shard_map" else ()
    runs = math.prod((params["length"] if name == "scan" else 1, *grid, *(params["mesh"].shape[axis] for axis in axes)))
    return FlopCount(total.flops * runs, total.uncounted_loops)


def inner_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """The programs that an equation holds, by its params: loops, branches, jit, checkpoint, custom rules, kernels."""
    values = [value if isinstance(value, (tuple, list)) else (value,) for value in params.values()]
    return [_open(item) for items in values for item in items if hasattr(_open(item), "eqns")]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def unreached(loss: Callable[..., jax.Array], params: Any, *others: Any) -> list[bool]:
    """For each leaf of `params`, whether the gradient of `loss(params, *others)` is zero whatever the data, because no
    derivative passes from one to the other: behind a `stop_gradient`, say.

    JAX's removal of dead code says which tangents the derivative does not depend on. It knows nothing of numbers: a
    factor of zero is taken for a way, so a zero may be missed, never invented.
    """

    def derivative(tangents: Any, params: Any, *others: Any) -> jax.Array:
        return jax.jvp(lambda params: loss(params, *others), (params,), (tangents,))[1]

    _, used = dce_jaxpr(jax.make_jaxpr(derivative)(params, params, *others).jaxpr, [True])
    return [not one for one in used[: len(jax.tree.leaves(params))]]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are its carry.

    Args:
        params: parameters of the `scan` equation.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    # From jax 0.11 on, the operands are described by a tree of three parts: constants, carry, what is scanned over.
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))
