"""Dependence of an optimizer's results on the inputs of its update, read off the traced program.

`update_locality` runs trials to find out how far a gradient spreads, which compiles several small programs at each
start of a run. Whether one parameter's update depends on another's gradient can mostly be read off the jaxpr, without
a compiler: if no path leads from that gradient to that update, there is no dependence. The converse does not hold,
because a path may carry nothing (`x * 0`); in that case the trial decides.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from plimsoll.framework.layout import Nested, flatten, unflatten
from plimsoll.framework.optimizers.partition import find_owner

# A set of program inputs, one bit for each.
Inputs = int
# Primitives that call a function, and the parameter that holds its program.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def proves_independence(optimizer: Any, specs: Nested) -> bool:
    """Return whether the traced update proves that no parameter depends on another parameter's gradient.

    Args:
        optimizer: `init` and `update`, as in optax.
        specs: parameters of one update unit.
    """
    params = {}
    for path, spec in flatten(specs).items():
        params[path] = jax.ShapeDtypeStruct(spec.shape, "float32")
    # Each parameter gets a copy of its shape, since a single one here may have others in a different update unit.
    params |= {f"duplicate/{path}": param for path, param in params.items()}
    param_tree = unflatten(params)
    state = jax.eval_shape(optimizer.init, param_tree)
    path_of_name = {tuple(path.split("/")): path for path in params}

    def find_state_owner(path: str) -> str | None:
        owner_name = find_owner(tuple(path.split("/")), path_of_name)
        return path_of_name.get(owner_name or ())

    def update(grads: Any, state: Any, params: Any) -> tuple[list[Any], list[Any]]:
        updates, new_state = optimizer.update(grads, state, params)
        return jax.tree.leaves(updates), jax.tree.leaves(new_state)

    traced = jax.make_jaxpr(update)(param_tree, state, param_tree)
    # The parameter that each leaf belongs to, in leaf order; a step counter belongs to none.
    param_owners: list[str | None] = [*flatten(param_tree)]
    state_owners = [find_state_owner(path) for path in flatten(state)]
    input_owners = [*param_owners, *state_owners, *param_owners]
    result_owners = [*param_owners, *state_owners]
    if len(traced.jaxpr.outvars) != len(result_owners):
        # The state changes its structure, so the results cannot be matched with their owners.
        return False
    for owner, inputs in zip(result_owners, find_result_inputs(traced.jaxpr), strict=True):
        for number, input_owner in enumerate(input_owners):
            # Every result may read a shared counter. If a counter itself depended on a gradient, that would show where
            # the counter is a result, whose owner is None.
            is_read = inputs >> number & 1
            if is_read and input_owner not in (owner, None):
                return False
    return True


def find_result_inputs(jaxpr: Jaxpr) -> list[Inputs]:
    """Return, for each result, the inputs that a path leads from."""
    inputs_of_var: dict[Any, Inputs] = {}
    for number, var in enumerate(jaxpr.invars):
        inputs_of_var[var] = 1 << number

    def get_inputs(var: Any) -> Inputs:
        # Constants, literal or captured, depend on nothing.
        if isinstance(var, Literal):
            return 0
        return inputs_of_var.get(var, 0)

    for eqn in jaxpr.eqns:
        operands = [get_inputs(var) for var in eqn.invars]
        name = eqn.primitive.name
        if name in _CALLS and _CALLS[name] in eqn.params:
            # Each result of a called function may depend on only some of its arguments.
            inner = eqn.params[_CALLS[name]]
            results = [_map_to_outer(inputs, operands) for inputs in find_result_inputs(inner.jaxpr)]
        elif name == "cond":
            # Any branch may be taken; the first operand decides which.
            results = [operands[0]] * len(eqn.outvars)
            for branch in eqn.params["branches"]:
                for number, inputs in enumerate(find_result_inputs(branch.jaxpr)):
                    results[number] |= _map_to_outer(inputs, operands[1:])
        else:
            union = 0
            for operand in operands:
                union |= operand
            results = [union] * len(eqn.outvars)
        inputs_of_var |= dict(zip(eqn.outvars, results, strict=True))
    return [get_inputs(var) for var in jaxpr.outvars]


def _map_to_outer(inputs: Inputs, operands: list[Inputs]) -> Inputs:
    """Return the inputs of the outer program from which some inputs of an inner program are computed.

    Args:
        inputs: a set of inputs of the inner program.
        operands: for each input of the inner program, the outer inputs that it depends on.
    """
    outer_inputs = 0
    for number, operand in enumerate(operands):
        if inputs >> number & 1:
            outer_inputs |= operand
    return outer_inputs
