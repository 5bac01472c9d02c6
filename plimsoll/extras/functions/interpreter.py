"""Re-runs a traced function operation by operation, with factored matrices for the arrays that have adapters.

An operation without such a matrix is not changed. An operation that moves the matrix is applied to W and to both
factors (`matrix_views.py`), a product becomes x W + scale * (x A) B (`products.py`), and loops, branches and calls are
rebuilt around their interpreted bodies (`control_flow.py`). Imports jax.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from plimsoll.extras.functions import control_flow
from plimsoll.extras.functions.control_flow import Values
from plimsoll.extras.functions.factored import FactoredMatrix
from plimsoll.extras.functions.matrix_views import apply_view, split_matrix
from plimsoll.extras.functions.products import lookup, product

# Keeps this file out of tracebacks of compiled programs, so that they show the user's line.
source_info_util.register_exclusion(__file__)


class AdapterError(ValueError):
    """Raised if a matrix with an adapter, or in 4 bits, reaches an operation that has no factored form."""


@dataclass(frozen=True)
class Interpreter:
    """Interpreter of traced functions with factored matrices.

    Attributes:
        materialize: a regex, searched in paths, that selects the matrices that may become full arrays if an operation
            needs it. None: no matrix may.
    """

    materialize: re.Pattern[str] | None

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> Values:
        """Return the results of a traced function: arrays, or matrices in factored form."""
        values: dict[Var, Any] = {}
        values.update(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def value(variable: Var | Literal) -> Any:
            return variable.val if isinstance(variable, Literal) else values[variable]

        for equation in jaxpr.eqns:
            operands = [value(variable) for variable in equation.invars]
            source = equation.source_info
            name_stack = source_info_util.current_name_stack() + source.name_stack
            with source_info_util.user_context(source.traceback, name_stack=name_stack), equation.ctx.manager:
                results = self._results(equation, operands)
            values.update(zip(equation.outvars, results, strict=True))
        return [value(variable) for variable in jaxpr.outvars]

    def _results(self, equation: JaxprEqn, operands: Values) -> Values:
        if not any(isinstance(operand, FactoredMatrix) for operand in operands):
            return _apply_operation(equation, operands)
        name = equation.primitive.name
        if name in control_flow.RULES:
            return control_flow.RULES[name](self, equation, operands)
        if name == "split":
            return list(split_matrix(operands[0], equation))
        result = None
        if name == "dot_general":
            result = product(equation, operands)
        elif name == "gather":
            result = lookup(equation, operands)
        elif isinstance(operands[0], FactoredMatrix) and not any(
            isinstance(other, FactoredMatrix) for other in operands[1:]
        ):
            result = apply_view(operands[0], equation, operands[1:])
        elif name == "mul" and not isinstance(operands[0], FactoredMatrix):
            result = apply_view(operands[1], equation, operands[:1])
        if result is not None:
            return [result]
        return _apply_operation(equation, [self.array(operand, equation) for operand in operands])

    def array(self, value: Any, equation: JaxprEqn | None) -> Any:
        """Return a value as an array.

        Raises:
            AdapterError: the value is a factored matrix that must not be materialized.
        """
        if not isinstance(value, FactoredMatrix):
            return value
        if self.materialize is not None and self.materialize.search(value.path):
            return value.dense()
        location = "the function's results"
        if equation is not None:
            location = f"`{equation.primitive.name}` at {source_info_util.summarize(equation.source_info)}"
        raise AdapterError(
            f"{value.path}: the matrix reaches {location}, which has no factored form; choose another target, "
            f"or pass materialize={value.path!r} to compute the full matrix there"
        )

    def arrays(self, values: Sequence[Any], equation: JaxprEqn | None) -> Values:
        """Return all values as arrays. Raise AdapterError as `array` does."""
        return [self.array(value, equation) for value in values]


def _apply_operation(equation: JaxprEqn, operands: Values) -> Values:
    """Apply the operation itself to arrays."""
    params: Any = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]
