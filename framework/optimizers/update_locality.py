"""Update locality: how far the gradient of one element spreads in an optimizer's update.

State is kept per layer (see framework.learner.learner) and may be streamed in even smaller chunks. So it matters which
values a transformation combines: a global norm would see one layer at a time, and Adafactor's row means one block of
the rows, and both would be silently wrong. This is tested, not assumed: three steps on small arrays run once clean and
once with one element of a gradient perturbed. Any other value that then changes, to the bit, was reached. A single step
would not show it for transformations that react to earlier steps (D-Adaptation, SM3, apply_if_finite).

A trial compiles several small programs. Whether one parameter's update depends on another's gradient can mostly be read
off the jaxpr, without a compiler: if no path leads from that gradient to that update, there is no dependence. The
converse does not hold, because a path may carry nothing (`x * 0`); in that case the trial decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr, Var
from jax.extend.core import Literal as LiteralVar

from plimsoll.framework.devices import executables
from plimsoll.framework.layout import Nested, PyTree, flatten, unflatten
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, find_owner

UpdateLocality = Literal["element", "row", "tensor", "layer", "global"]
# From the most local to the widest.
_LOCALITIES: tuple[UpdateLocality, ...] = get_args(UpdateLocality)
# Dimension sizes of the arrays in the trial.
_SIZES = (3, 5, 4)
Shapes = dict[str, tuple[int, ...]]
Optimizer = optax.GradientTransformation | PartitionedGradientTransformation
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


# --- by trials -------------------------------------------------------------------------------------------------------


def probe(optimizer: Optimizer, specs: Nested) -> UpdateLocality:
    """Return the smallest part of an update unit that can be updated without the rest.

    Args:
        optimizer: `init` and `update`, as in optax.
        specs: parameters of one update unit. The trial keeps paths and numbers of dimensions, but not sizes.

    Returns:
        "element"; "row", a slice along the first axis; "tensor"; "layer", all parameters that share an optimizer
        instance, if state that belongs to no parameter depends on gradients or is a PRNG key (all chunks would draw the
        same noise); "global", if one parameter's update depends on another's gradient. Vectors are never split:
        dependence within them counts only if there is nothing larger.
    """
    shapes: Shapes = {path: spec.shape for path, spec in flatten(specs).items()}
    localities: set[UpdateLocality] = {"element"}
    # Only the real sizes show which axes are summed over, because optimizers factor large dimensions.
    state = _init_abstract_state(optimizer, shapes)
    state_owners = _find_state_owners(state, shapes)
    for path, leaf in flatten(state).items():
        owner = state_owners[path]
        if owner and leaf.shape not in ((), shapes[owner]):
            localities = {"tensor"}
    toy_shapes = _shrink_shapes(shapes)
    toy_state = _init_abstract_state(optimizer, toy_shapes)
    owners: dict[str, str | None] = {}
    for path, owner in _find_state_owners(toy_state, toy_shapes).items():
        owners[f"state/{path}"] = owner
    for path in toy_shapes:
        owners[f"update/{path}"] = path
    # Schedules may call this while a step is traced; the trial runs eagerly all the same. The code above must not be
    # under this context, as it would allocate arrays of the real sizes.
    with jax.ensure_compile_time_eval():
        return max(localities | _measure_spread(optimizer, toy_shapes, owners), key=_LOCALITIES.index)


def _measure_spread(optimizer: Optimizer, toy_shapes: Shapes, owners: dict[str, str | None]) -> set[UpdateLocality]:
    """Return how far the gradients of single elements spread in a trial, at least "element".

    Args:
        optimizer: `init` and `update`, as in optax.
        toy_shapes: shapes of the trial's parameters, by path.
        owners: by path, the parameter that each array of a trial belongs to, or None.
    """
    localities: set[UpdateLocality] = {"element"}
    trial = _Trial(optimizer, toy_shapes)
    clean = trial.run(None, 0.0)
    has_matrices = any(len(shape) > 1 for shape in toy_shapes.values())
    min_ndim = 2 if has_matrices else 1
    # One path per shape, not per number of dimensions: with a single row, tensor and row are the same, and with a
    # single column, row and element are.
    path_by_shape = {shape: path for path, shape in toy_shapes.items()}
    for path in path_by_shape.values():
        shape = toy_shapes[path]
        # A large value shows dependence on magnitudes; NaN shows dependence on tests for finiteness.
        for value in (1e3, np.nan):
            for name, spoiled in trial.run(path, value).items():
                # Elements that differ in any of the three steps. Two NaN are equal.
                is_nan_in_both = (clean[name] != clean[name]) & (spoiled != spoiled)
                changed = ((clean[name] != spoiled) & ~is_nan_in_both).any(axis=0)
                owner = owners.get(name)
                if owner is None:
                    # Leaves without an owner are counters and constants, the same for each chunk, and keys.
                    is_key = clean[name].dtype.kind == "u"
                    localities.add("layer" if changed.any() or is_key else "element")
                elif owner != path:
                    localities.add("global" if changed.any() else "element")
                elif changed.shape == shape and len(shape) >= min_ndim:
                    # How far the gradient of the element spreads within its tensor; the element itself always changes.
                    position = _get_perturbed_index(shape)
                    changed[position] = False
                    other_rows = np.delete(changed, position[:1], axis=0)
                    if other_rows.any():
                        localities.add("tensor")
                    else:
                        localities.add("row" if changed.any() else "element")
    return localities


def _init_abstract_state(optimizer: Optimizer, shapes: Shapes) -> PyTree:
    """Return the shapes and dtypes of the optimizer's state for float32 parameters of these shapes."""
    params = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    return jax.eval_shape(optimizer.init, unflatten(params))


def _find_state_owners(state: PyTree, paths: Iterable[str]) -> dict[str, str | None]:
    """Return {path of a state leaf: path of the parameter that it belongs to, or None}, in the order of the leaves.

    Args:
        state: an optimizer's state.
        paths: paths of the parameters.
    """
    path_of_name = {tuple(path.split("/")): path for path in paths}
    owners = {}
    for path in flatten(state):
        owner_name = find_owner(tuple(path.split("/")), path_of_name)
        owners[path] = path_of_name.get(owner_name or ())
    return owners


def _shrink_shapes(shapes: Shapes) -> Shapes:
    """Return small shapes. A shape with a unique number of dimensions gets a duplicate that could change with it."""
    ndims = [len(shape) for shape in shapes.values()]
    duplicates = {}
    for path, shape in shapes.items():
        if ndims.count(len(shape)) == 1:
            duplicates[f"duplicate/{path}"] = shape
    toy_shapes = {}
    for path, shape in {**duplicates, **shapes}.items():
        # There may be more dimensions than sizes; then the sizes repeat from the first.
        toy_shapes[path] = tuple(map(min, shape, _SIZES * len(shape)))
    return toy_shapes


def _get_perturbed_index(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element to perturb: off the edge on each axis with more than one element."""
    return tuple(min(1, dim - 1) for dim in shape)


class _Trial:
    """Three steps of an optimizer on random arrays, which can be repeated with one perturbed gradient.

    Args:
        optimizer: `init` and `update`, as in optax.
        shapes: shapes of the parameters, by path.
    """

    def __init__(self, optimizer: Optimizer, shapes: Shapes):
        rng = np.random.default_rng(0)
        # First the parameters, then the gradients of each step.
        draws = []
        for _ in range(4):
            draws.append({path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()})
        self.shapes = shapes
        self.clean_grads = draws[1:]
        self.params = unflatten(draws[0])
        self.state = jax.jit(optimizer.init)(self.params)
        self.optimizer = optimizer
        self.jit_step = jax.jit(self._step)

    def run(self, path: str | None, value: float) -> dict[str, np.ndarray]:
        """Return updates and states of the three steps, [3, ...] by path, with `value` in one gradient."""
        params, state = self.params, self.state
        seen = []
        for index, clean_grads in enumerate(self.clean_grads):
            grads = {name: grad.copy() for name, grad in clean_grads.items()}
            # Perturbs the second of three steps, so that earlier state can react and later steps can show the effect.
            if index == 1 and path is not None:
                grads[path][_get_perturbed_index(self.shapes[path])] = value
            (params, state), leaves = executables.call(self.jit_step, (params, state, unflatten(grads)))
            seen.append(flatten(leaves))
        return {name: np.stack([leaves[name] for leaves in seen]) for name in seen[0]}

    def _step(self, inputs: tuple[Nested, PyTree, Nested]) -> tuple[tuple[PyTree, PyTree], Nested]:
        """Return ((new parameters, new state), updates and state as arrays that NumPy can compare)."""
        params, state, grads = inputs
        updates, state = self.optimizer.update(grads, state, params)
        seen = {"update": updates, "state": state}
        leaves = []
        for leaf in jax.tree.leaves(seen):
            # NumPy has no dtype for PRNG keys, so their words are compared.
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            leaves.append(jax.random.key_data(leaf) if is_key else leaf)
        return (optax.apply_updates(params, updates), state), jax.tree.unflatten(jax.tree.structure(seen), leaves)


# --- by the jaxpr ----------------------------------------------------------------------------------------------------


def proves_independence(optimizer: Optimizer, specs: Nested) -> bool:
    """Return whether the traced update proves that no parameter depends on another parameter's gradient.

    Args:
        optimizer: `init` and `update`, as in optax.
        specs: parameters of one update unit.
    """
    shapes = {path: spec.shape for path, spec in flatten(specs).items()}
    # Each parameter gets a copy of its shape, since a single one here may have others in a different update unit.
    shapes |= {f"duplicate/{path}": shape for path, shape in shapes.items()}
    params = unflatten({path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()})
    state = _init_abstract_state(optimizer, shapes)

    traced = jax.make_jaxpr(optimizer.update)(params, state, params)
    # The parameter that each leaf belongs to, in leaf order; a step counter belongs to none.
    param_owners: list[str | None] = [*flatten(params)]
    state_owners = [*_find_state_owners(state, shapes).values()]
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
    inputs_of_var: dict[Var, Inputs] = {}
    for number, var in enumerate(jaxpr.invars):
        inputs_of_var[var] = 1 << number

    def get_inputs(var: Var | LiteralVar) -> Inputs:
        # Constants, literal or captured, depend on nothing.
        if isinstance(var, LiteralVar):
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
