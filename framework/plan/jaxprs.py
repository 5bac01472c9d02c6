"""What can be read off a program before it is compiled: its matrix-product FLOPs, and outputs that are always zero.

Both walk a jaxpr (`jax.make_jaxpr(f)(...)`, or `jitted.trace(...).jaxpr`) into all that holds one: loops, branches,
jit, checkpoint, custom derivatives, shard_map, Pallas kernels. May import: JAX.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of matrix products, over all devices; a multiply-add counts 2.

    Args:
        flops: how many.
        uncounted_loops: loops around matrix products whose number of iterations depends on data: counted as one each.
    """

    flops: int = 0
    uncounted_loops: int = 0

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(self.flops + other.flops, self.uncounted_loops + other.uncounted_loops)


def flops(jaxpr: ClosedJaxpr | Jaxpr) -> FlopCount:
    """The matrix products and convolutions of the whole computation, with what remat recomputes.

    Loops count by their trip counts (a `fori_loop` between constants is a scan), branches by the largest. What runs
    under shard_map counts once per device, replicas included. A Pallas kernel counts what its author says it costs, or
    else its whole grid: blocks that splash skips because the causal mask empties them are counted, as in PaLM's
    formula (arXiv 2204.02311, appendix B), and likewise in cuDNN's attention. Other custom calls count nothing.
    """
    return sum((_flops_of(eqn) for eqn in _open(jaxpr).eqns), FlopCount())


# cuDNN's attention in products of B N S T H multiply-adds: q k and w v; backward q k again, dv, dw, dq, dk.
_CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}


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
    inner = [flops(jaxpr) for jaxpr in inner_jaxprs(params)]
    if name == "cond":
        return max(inner, key=lambda branch: branch.flops)
    if name == "pallas_call" and params["cost_estimate"] is not None:
        return FlopCount(int(params["cost_estimate"].flops))
    total = sum(inner, FlopCount())
    grid = params["grid_mapping"].grid if name == "pallas_call" else ()
    if name == "while" or not all(isinstance(size, int) for size in grid):
        return total + FlopCount(uncounted_loops=int(total.flops > 0))
    axes = params["newly_manual_axes"] if name == "shard_map" else ()
    runs = math.prod((params["length"] if name == "scan" else 1, *grid, *(params["mesh"].shape[axis] for axis in axes)))
    return FlopCount(total.flops * runs, total.uncounted_loops)


def zero_outputs(jaxpr: ClosedJaxpr) -> list[bool]:
    """For each output, whether it is zero whatever the (finite) inputs are, because it is made of zeros alone.

    Of a program that returns gradients, these are the parameters that the loss does not reach, such as those behind a
    `stop_gradient`. What an unknown operation gives is taken for non-zero, so a zero may be missed, never invented.
    """
    return _zeros(jaxpr, [False] * len(jaxpr.jaxpr.invars))


# A result is zero when every operand in this slice is: the others are indices, predicates and divisors.
_LINEAR = (
    "abs add add_any all_gather all_to_all broadcast_in_dim concatenate conj convert_element_type copy copy_p cumsum "
    "imag max min name neg pad pbroadcast ppermute psum psum_invariant pvary real reduce_max reduce_min "
    "reduce_precision reduce_scatter reduce_sum reshape reshard rev sharding_constraint sign slice split sqrt square "
    "squeeze stack stop_gradient sub tanh tile transpose"
)
_DECISIVE = {
    **dict.fromkeys(_LINEAR.split(), slice(None)),
    **dict.fromkeys(("div", "dynamic_slice", "gather"), slice(0, 1)),
    **dict.fromkeys(("scatter", "scatter-add"), slice(0, None, 2)),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}


def _zeros(jaxpr: ClosedJaxpr | Jaxpr, inputs: list[bool]) -> list[bool]:
    """Which outputs are zero, given which inputs are."""
    body = _open(jaxpr)
    zero = dict.fromkeys(body.constvars, False) | dict(zip(body.invars, inputs, strict=True))

    def known(atom: Any) -> bool:
        return not np.any(atom.val) if isinstance(atom, Literal) else zero[atom]

    for eqn in body.eqns:
        zero.update(zip(eqn.outvars, _zeros_of(eqn, [known(atom) for atom in eqn.invars]), strict=True))
    return [known(atom) for atom in body.outvars]


def _zeros_of(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    name, params = eqn.primitive.name, eqn.params
    if name in _DECISIVE:
        return [all(inputs[_DECISIVE[name]])] * len(eqn.outvars)
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return [any(inputs)]
    if name in ("optimization_barrier", "device_put"):  # any number of arrays, each for itself
        return inputs
    if name == "cond":
        return [all(outputs) for outputs in zip(*(_zeros(b, inputs[1:]) for b in params["branches"]), strict=True)]
    if name == "while":
        return _loop(params["body_jaxpr"], inputs[params["cond_nconsts"] :], params["body_nconsts"], len(eqn.outvars))
    if name == "scan":
        return _loop(params["jaxpr"], inputs, params["num_consts"], params["num_carry"])
    inner = inner_jaxprs(params)
    if len(inner) == 1 and len(inner[0].invars) == len(inputs):
        return _zeros(inner[0], inputs)  # jit, checkpoint, custom derivatives, shard_map
    return [False] * len(eqn.outvars)


def _loop(body: ClosedJaxpr, inputs: list[bool], num_consts: int, num_carry: int) -> list[bool]:
    """Outputs of a loop. A carry is zero if it starts so and stays so; each round drops one at least, so it ends."""
    consts, carry, xs = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
    while True:
        outputs = _zeros(body, consts + carry + xs)
        kept = [before and after for before, after in zip(carry, outputs[:num_carry], strict=True)]
        if kept == carry:
            return kept + outputs[num_carry:]
        carry = kept


def inner_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """The programs that an equation holds, by its params: the bodies of loops, branches, calls."""
    values = [value if isinstance(value, (tuple, list)) else (value,) for value in params.values()]
    return [_open(item) for items in values for item in items if hasattr(_open(item), "eqns")]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
