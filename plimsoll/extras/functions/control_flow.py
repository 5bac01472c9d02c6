"""Loops, branches and calls whose operands include matrices with adapters. Imports jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from plimsoll.extras.functions.factored import FactoredMatrix
from plimsoll.framework.plan.jaxpr_analysis import scan_counts

# Arrays, and matrices in factored form.
Values = list[Any]


class Runner(Protocol):
    """Interpreter of the inner functions; implemented by `interpreter.Interpreter`."""

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> Values:
        """Return the results of a traced function: arrays, or matrices in factored form."""
        ...

    def arrays(self, values: Sequence[Any], equation: JaxprEqn | None) -> Values:
        """Return all values as arrays. Raise AdapterError for a factored matrix that must not be materialized."""
        ...


def _call(runner: Runner, equation: JaxprEqn, operands: Values) -> Values:
    """Interpret the body of a called function inline."""
    # Custom derivative functions know nothing about factors, so the function body itself is differentiated instead.
    closed = equation.params["call_jaxpr"] if "call_jaxpr" in equation.params else equation.params["jaxpr"]
    return runner.run(closed.jaxpr, closed.consts, operands)


def _jit(runner: Runner, equation: JaxprEqn, operands: Values) -> Values:
    """Interpret a `jax.jit` call, and apply the shardings of its results."""
    results = _call(runner, equation, operands)
    constrained = []
    for result, sharding in zip(results, equation.params["out_shardings"], strict=True):
        is_given = isinstance(sharding, jax.sharding.Sharding) and not isinstance(result, FactoredMatrix)
        constrained.append(lax.with_sharding_constraint(result, sharding) if is_given else result)
    return constrained


def _checkpoint(runner: Runner, equation: JaxprEqn, operands: Values) -> Values:
    """Interpret the body of a `jax.checkpoint` under the same policy."""

    def run_checkpointed(*values: Any) -> Values:
        return runner.arrays(runner.run(equation.params["jaxpr"], (), values), equation)

    params = equation.params
    return jax.checkpoint(run_checkpointed, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)


def _cond(runner: Runner, equation: JaxprEqn, operands: Values) -> Values:
    """Rebuild `lax.cond` or `lax.switch` with interpreted branches."""
    index, *values = operands

    def branch(closed: Any) -> Callable[..., Values]:
        return lambda *inner: runner.arrays(runner.run(closed.jaxpr, closed.consts, inner), equation)

    return lax.switch(index, [branch(closed) for closed in equation.params["branches"]], *values)


def _while(runner: Runner, equation: JaxprEqn, operands: Values) -> Values:
    """Rebuild `lax.while_loop` with an interpreted condition and body."""
    params = equation.params
    num_condition = params["cond_nconsts"]
    num_constants = num_condition + params["body_nconsts"]
    condition_constants = operands[:num_condition]
    body_constants = operands[num_condition:num_constants]
    initial = operands[num_constants:]
    condition = params["cond_jaxpr"]
    body = params["body_jaxpr"]
    carry = _Carry(runner, equation, body.jaxpr, params["body_nconsts"], initial)

    def run_condition(arrays: Values) -> Any:
        values = [*condition_constants, *carry.insert_matrices(arrays)]
        (result,) = runner.run(condition.jaxpr, condition.consts, values)
        return result

    def run_body(arrays: Values) -> Values:
        return carry.arrays(runner.run(body.jaxpr, body.consts, [*body_constants, *carry.insert_matrices(arrays)]))

    return carry.insert_matrices(lax.while_loop(run_condition, run_body, carry.arrays(initial)))


def _scan(runner: Runner, equation: JaxprEqn, operands: Values) -> Values:
    """Rebuild `lax.scan`. Each iteration gets one matrix of a stack; a matrix in the carry must stay the same."""
    params = equation.params
    num_constants, num_carry = scan_counts(params)
    num_before_stacks = num_constants + num_carry
    constants = operands[:num_constants]
    initial = operands[num_constants:num_before_stacks]
    closed = params["jaxpr"]
    carry = _Carry(runner, equation, closed.jaxpr, num_constants, initial)
    stacks = [_Stack(operand) for operand in operands[num_before_stacks:]]

    def step(arrays: Values, slices: Values) -> tuple[Values, Values]:
        layers = [stack.layer(leaves) for stack, leaves in zip(stacks, slices, strict=True)]
        results = runner.run(closed.jaxpr, closed.consts, [*constants, *carry.insert_matrices(arrays), *layers])
        new_carry = carry.arrays(results[:num_carry])
        return new_carry, runner.arrays(results[num_carry:], equation)

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

    def __init__(self, runner: Runner, equation: JaxprEqn, body: Any, num_constants: int, initial: Sequence[Any]):
        self.runner = runner
        self.equation = equation
        # {position in the carry: matrix}
        self.matrices: dict[int, FactoredMatrix] = {}
        for position, value in enumerate(initial):
            incoming: Var = body.invars[num_constants + position]
            if isinstance(value, FactoredMatrix) and body.outvars[position] is incoming:
                self.matrices[position] = value

    def arrays(self, values: Sequence[Any]) -> Values:
        """Return the carry without the unchanged matrices. Raise AdapterError if it has any other matrix."""
        changing = [value for position, value in enumerate(values) if position not in self.matrices]
        return self.runner.arrays(changing, self.equation)

    def insert_matrices(self, arrays: Sequence[Any]) -> Values:
        """Return the full carry, with the unchanged matrices."""
        remaining = iter(arrays)
        count = len(arrays) + len(self.matrices)
        return [self.matrices[position] if position in self.matrices else next(remaining) for position in range(count)]


class _Stack:
    """A value that a scan slices along its first axis.

    Attributes:
        sliced: the leaves to slice: those whose first axis is as long as the scan.
    """

    def __init__(self, value: Any):
        self._leaves, self._structure = jax.tree.flatten(value)
        length = value.shape[0]
        self._is_sliced = [leaf.shape[0] == length for leaf in self._leaves]
        self.sliced = [leaf for leaf, is_sliced in zip(self._leaves, self._is_sliced, strict=True) if is_sliced]

    def layer(self, slices: Sequence[Any]) -> Any:
        """Return the value for one iteration, given the slices of the arrays."""
        remaining = iter(slices)
        leaves = []
        for leaf, is_sliced in zip(self._leaves, self._is_sliced, strict=True):
            # A factor of size 1 along that axis is the same in all iterations.
            leaves.append(next(remaining) if is_sliced else leaf[0])
        return self._structure.unflatten(leaves)


_Rule = Callable[[Runner, JaxprEqn, Values], Values]
# {primitive: function that interprets it}
RULES: dict[str, _Rule] = {
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
