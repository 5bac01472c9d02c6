"""Counts the work of one device in a traced program, before compilation, for the analytical estimate."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from plimsoll.framework.plan.jaxpr_analysis import LOCAL_ATTENTION, LOCAL_GROUPED_PRODUCT, inner_jaxprs

# For these, the bytes that a device receives are the difference between the sizes of results and operands.
_GATHERS = ("all_gather", "reduce_scatter", "psum_scatter")
# For these, the bytes that a device receives are this factor times the operands, in a ring of many devices.
_RECEIVED = {"psum": 2, "psum_invariant": 2, "all_to_all": 1, "ppermute": 1}
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", LOCAL_ATTENTION, LOCAL_GROUPED_PRODUCT)


class TracedWork(NamedTuple):
    """Bytes that a program moves on one device.

    Attributes:
        product_bytes: bytes of the operands and results of matrix products, attention and Pallas kernels. XLA fuses
            most other work into the producers or consumers of these arrays.
        received_bytes: bytes received from other devices.
    """

    product_bytes: int = 0
    received_bytes: int = 0

    def __mul__(self, runs: int) -> TracedWork:  # type: ignore[override]
        return TracedWork(runs * self.product_bytes, runs * self.received_bytes)


def count_traced_work(jaxpr: ClosedJaxpr | Jaxpr) -> TracedWork:
    """Return the work of a program on one device; loops count by trip count, and only the largest branch counts."""
    equations: Any = getattr(jaxpr, "jaxpr", jaxpr)
    product_bytes = 0
    received_bytes = 0
    for equation in equations.eqns:
        work = _work_for_equation(equation)
        product_bytes += work.product_bytes
        received_bytes += work.received_bytes
    return TracedWork(product_bytes, received_bytes)


def _work_for_equation(equation: JaxprEqn) -> TracedWork:
    name = equation.primitive.name
    taken_bytes = sum(map(_num_bytes, equation.invars))
    made_bytes = sum(map(_num_bytes, equation.outvars))
    if name in _PRODUCTS:
        return TracedWork(product_bytes=taken_bytes + made_bytes)
    if name in _GATHERS:
        return TracedWork(received_bytes=abs(made_bytes - taken_bytes))
    if name in _RECEIVED:
        return TracedWork(received_bytes=_RECEIVED[name] * taken_bytes)
    if name == "pallas_call":
        return TracedWork(product_bytes=taken_bytes + made_bytes)
    inner = list(map(count_traced_work, inner_jaxprs(equation.params)))
    if not inner:
        return TracedWork()
    if name == "cond":
        return max(inner)
    work = TracedWork(sum(one.product_bytes for one in inner), sum(one.received_bytes for one in inner))
    return work * equation.params["length"] if name == "scan" else work


def _num_bytes(variable: Any) -> int:
    aval = variable.aval
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0
    return math.prod(shape) * getattr(getattr(aval, "dtype", None), "itemsize", 4)
