"""Dependence: which inputs of an optimizer's update each of its results is computed from, read off the traced program.

`reach` finds out by trial how far a gradient spreads; its trials compile several small programs at each start of a run.
Whether one parameter's update depends on another's gradient can mostly be read off the jaxpr, which takes no compiler:
where no path leads from that gradient to that update, there is no dependence. The other way round it is no proof, as a
path may carry nothing (`x * 0`), and then the trial decides.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from framework.layout import Nested, flatten, unflatten
from framework.optimizers.partition import owner_of

Inputs = int  # a set of inputs of a program, a bit for each


def keeps_apart(optimizer: Any, specs: Nested) -> bool:
    """Whether, by the text of the update, nothing of a parameter ever depends on the gradient of another parameter.

    Args:
        optimizer: `init` and `update`, as in optax.
        specs: the parameters of one unit.
    """
    params = {path: jax.ShapeDtypeStruct(spec.shape, "float32") for path, spec in flatten(specs).items()}
    # Each gets company of its own shape: what is alone in this unit is not in the next, under the same optimizer.
    params |= {f"beside/{path}": param for path, param in params.items()}
    param_tree = unflatten(params)
    state = jax.eval_shape(optimizer.init, param_tree)
    path_of_name = {tuple(path.split("/")): path for path in params}

    def owner_of_state(path: str) -> str | None:
        return path_of_name.get(owner_of(tuple(path.split("/")), path_of_name) or ())

    def update(grads: Any, state: Any, params: Any) -> tuple[list[Any], list[Any]]:
        updates, new_state = optimizer.update(grads, state, params)
        return jax.tree.leaves(updates), jax.tree.leaves(new_state)

    traced = jax.make_jaxpr(update)(param_tree, state, param_tree)
    # The parameter that each leaf belongs to, in the order of the leaves; a step counter belongs to none.
    param_owners: list[str | None] = [*flatten(param_tree)]
    state_owners = [owner_of_state(path) for path in flatten(state)]
    input_owners = [*param_owners, *state_owners, *param_owners]
    result_owners = [*param_owners, *state_owners]
    if len(traced.jaxpr.outvars) != len(result_owners):
        return False  # a state that changes its structure: nothing is known of it
    for owner, inputs in zip(result_owners, _dependence(traced.jaxpr), strict=True):
        for number, input_owner in enumerate(input_owners):
            # Everything may read a shared counter. That none takes anything from a gradient is seen where the counter
            # is a result, whose owner is None.
            if inputs >> number & 1 and input_owner not in (owner, None):
                return False
    return True


def _dependence(jaxpr: Jaxpr) -> list[Inputs]:
    """Of each result, the inputs that a path leads from."""
    known: dict[Any, Inputs] = {var: 1 << number for number, var in enumerate(jaxpr.invars)}

    def of(var: Any) -> Inputs:
        return 0 if isinstance(var, Literal) else known.get(var, 0)  # constants depend on nothing

    for eqn in jaxpr.eqns:
        operands = [of(var) for var in eqn.invars]
        everything = 0
        for operand in operands:
            everything |= operand
        results = [everything] * len(eqn.outvars)
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit", "closed_call") else None
        if inner is not None:  # a call of a function: its results may each depend on some of the arguments only
            results = [_through(inputs, operands) for inputs in _dependence(inner.jaxpr)]
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [of(var) for var in jaxpr.outvars]


def _through(inputs: Inputs, operands: list[Inputs]) -> Inputs:
    """What the inputs of an inner program are computed from."""
    found = 0
    for number, operand in enumerate(operands):
        if inputs >> number & 1:
            found |= operand
    return found
