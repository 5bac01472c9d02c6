"""Re-runs a traced function operation by operation, with factored matrices for the arrays that have adapters.

An operation without such a matrix is not changed. An operation that moves the matrix is applied to W and to both
factors, and a product becomes x W + scale * (x A) B (`factored_matrix.py`). Loops, branches and calls are rebuilt
around their interpreted bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from plimsoll.extras.functions.factored_matrix import FactoredMatrix, Value, apply_view, lookup, product, split_matrix
from plimsoll.framework.plan.jaxpr_analysis import scan_counts

# Arrays, and matrices in factored form.
Values = list[Value]
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

    def run(self, jaxpr: Jaxpr, constants: Sequence[Value], arguments: Sequence[Value]) -> Values:
        """Return the results of a traced function: arrays, or matrices in factored form."""
        values: dict[Var, Value] = {}
        values.update(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def value(variable: Var | Literal) -> Value:
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
        matrices = [operand for operand in operands if isinstance(operand, FactoredMatrix)]
        arrays = [operand for operand in operands if not isinstance(operand, FactoredMatrix)]
        if not matrices:
            return _apply_operation(equation, arrays)
        name = equation.primitive.name
        if name in _CONTROL_FLOW:
            return _CONTROL_FLOW[name](self, equation, operands)
        if name == "split":
            return list(split_matrix(matrices[0], equation))
        result = None
        if name == "dot_general":
            result = product(equation, operands)
        elif name == "gather":
            result = lookup(equation, operands)
        elif len(matrices) == 1 and (operands[0] is matrices[0] or name == "mul"):
            result = apply_view(matrices[0], equation, arrays)
        if result is not None:
            return [result]
        return _apply_operation(equation, self.arrays(operands, equation))

    def array(self, value: Value, equation: JaxprEqn | None) -> jax.Array:
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

    def arrays(self, values: Sequence[Value], equation: JaxprEqn | None) -> list[jax.Array]:
        """Return all values as arrays. Raise AdapterError as `array` does."""
        return [self.array(value, equation) for value in values]


def _apply_operation(equation: JaxprEqn, operands: list[jax.Array]) -> Values:
    """Apply the operation itself to arrays."""
    params: dict[str, object] = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


# --- loops, branches and calls ---------------------------------------------------------------------------------------


def _call(interpreter: Interpreter, equation: JaxprEqn, operands: Values) -> Values:
    """Interpret the body of a called function inline."""
    # Custom derivative functions know nothing about factors, so the function body itself is differentiated instead.
    closed = equation.params["call_jaxpr"] if "call_jaxpr" in equation.params else equation.params["jaxpr"]
    return interpreter.run(closed.jaxpr, closed.consts, operands)


def _jit(interpreter: Interpreter, equation: JaxprEqn, operands: Values) -> Values:
    """Interpret a `jax.jit` call, and apply the shardings of its results."""
    results = _call(interpreter, equation, operands)
    constrained = []
    for result, sharding in zip(results, equation.params["out_shardings"], strict=True):
        is_given = isinstance(sharding, jax.sharding.Sharding) and not isinstance(result, FactoredMatrix)
        constrained.append(lax.with_sharding_constraint(result, sharding) if is_given else result)
    return constrained


def _checkpoint(interpreter: Interpreter, equation: JaxprEqn, operands: Values) -> Values:
    """Interpret the body of a `jax.checkpoint` under the same policy."""

    def run_checkpointed(*values: Value) -> list[jax.Array]:
        return interpreter.arrays(interpreter.run(equation.params["jaxpr"], (), values), equation)

    params = equation.params
    return jax.checkpoint(run_checkpointed, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)


def _cond(interpreter: Interpreter, equation: JaxprEqn, operands: Values) -> Values:
    """Rebuild `lax.cond` or `lax.switch` with interpreted branches."""
    index, *values = operands

    def branch(closed: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
        return lambda *inner: interpreter.arrays(interpreter.run(closed.jaxpr, closed.consts, inner), equation)

    return lax.switch(index, [branch(closed) for closed in equation.params["branches"]], *values)


def _while(interpreter: Interpreter, equation: JaxprEqn, operands: Values) -> Values:
    """Rebuild `lax.while_loop` with an interpreted condition and body."""
    params = equation.params
    num_condition = params["cond_nconsts"]
    num_constants = num_condition + params["body_nconsts"]
    condition_constants = operands[:num_condition]
    body_constants = operands[num_condition:num_constants]
    initial = operands[num_constants:]
    condition = params["cond_jaxpr"]
    body = params["body_jaxpr"]
    carry = _Carry(interpreter, equation, body.jaxpr, params["body_nconsts"], initial)

    def run_condition(arrays: list[jax.Array]) -> Value:
        values = [*condition_constants, *carry.insert_matrices(arrays)]
        (result,) = interpreter.run(condition.jaxpr, condition.consts, values)
        return result

    def run_body(arrays: list[jax.Array]) -> list[jax.Array]:
        return carry.arrays(interpreter.run(body.jaxpr, body.consts, [*body_constants, *carry.insert_matrices(arrays)]))

    return carry.insert_matrices(lax.while_loop(run_condition, run_body, carry.arrays(initial)))


def _scan(interpreter: Interpreter, equation: JaxprEqn, operands: Values) -> Values:
    """Rebuild `lax.scan`. Each iteration gets one matrix of a stack; a matrix in the carry must stay the same."""
    params = equation.params
    num_constants, num_carry = scan_counts(params)
    num_before_stacks = num_constants + num_carry
    constants = operands[:num_constants]
    initial = operands[num_constants:num_before_stacks]
    closed = params["jaxpr"]
    carry = _Carry(interpreter, equation, closed.jaxpr, num_constants, initial)
    stacks = [_Stack(operand) for operand in operands[num_before_stacks:]]

    def step(arrays: list[jax.Array], slices: list[list[jax.Array]]) -> tuple[list[jax.Array], list[jax.Array]]:
        layers = [stack.layer(leaves) for stack, leaves in zip(stacks, slices, strict=True)]
        results = interpreter.run(closed.jaxpr, closed.consts, [*constants, *carry.insert_matrices(arrays), *layers])
        new_carry = carry.arrays(results[:num_carry])
        return new_carry, interpreter.arrays(results[num_carry:], equation)

    last, outputs = lax.scan(
        step,
        carry.arrays(initial),
        [stack.sliced for stack in stacks],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry.insert_matrices(last), *outputs]


class _Carry:
    """Carry of a loop: arrays, and factored matrices that every iteration passes on unchanged."""

    def __init__(
        self, interpreter: Interpreter, equation: JaxprEqn, body: Jaxpr, num_constants: int, initial: Sequence[Value]
    ):
        self.interpreter = interpreter
        self.equation = equation
        # {position in the carry: matrix}
        self.matrices: dict[int, FactoredMatrix] = {}
        for position, value in enumerate(initial):
            incoming: Var = body.invars[num_constants + position]
            if isinstance(value, FactoredMatrix) and body.outvars[position] is incoming:
                self.matrices[position] = value

    def arrays(self, values: Sequence[Value]) -> list[jax.Array]:
        """Return the carry without the unchanged matrices. Raise AdapterError if it has any other matrix."""
        changing = [value for position, value in enumerate(values) if position not in self.matrices]
        return self.interpreter.arrays(changing, self.equation)

    def insert_matrices(self, arrays: Sequence[jax.Array]) -> Values:
        """Return the full carry, with the unchanged matrices."""
        remaining = iter(arrays)
        count = len(arrays) + len(self.matrices)
        return [self.matrices[position] if position in self.matrices else next(remaining) for position in range(count)]


class _Stack:
    """A value that a scan slices along its first axis.

    Attributes:
        sliced: the leaves to slice: those whose first axis is as long as the scan.
    """

    def __init__(self, value: Value):
        self._leaves, self._structure = jax.tree.flatten(value)
        length = value.shape[0]
        self._is_sliced = [leaf.shape[0] == length for leaf in self._leaves]
        self.sliced = [leaf for leaf, is_sliced in zip(self._leaves, self._is_sliced, strict=True) if is_sliced]

    def layer(self, slices: Sequence[jax.Array]) -> Value:
        """Return the value for one iteration, given the slices of the arrays."""
        remaining = iter(slices)
        leaves = []
        for leaf, is_sliced in zip(self._leaves, self._is_sliced, strict=True):
            # A factor of size 1 along that axis is the same in all iterations.
            leaves.append(next(remaining) if is_sliced else leaf[0])
        return self._structure.unflatten(leaves)


_Rule = Callable[[Interpreter, JaxprEqn, Values], Values]
# {primitive: function that interprets it}
_CONTROL_FLOW: dict[str, _Rule] = {
    "closed_call": _call,
    "cond": _cond,
    "core_call": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "jit": _jit,
    "pjit": _jit,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "while": _while,
}
