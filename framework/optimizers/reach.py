"""Reach: how far the gradient of one element spreads in an optimizer's update.

State is kept per unit (see framework.learner.learner), and may be streamed in smaller pieces still, so what a
transformation looks at decides what it may be given: a global norm would see one layer at a time, Adafactor's row means
a block of the rows, and be silently wrong. That is tried out, not assumed: three steps on small arrays, once clean and
once with one element of a gradient spoiled; whatever else then changes, to the bit, was reached. One step would not
show it for transformations that act on what they saw before (D-Adaptation, SM3, apply_if_finite).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from framework.devices import executables
from framework.layout import Nested, flatten, unflatten
from framework.optimizers.partition import owner_of

Reach = Literal["element", "row", "tensor", "unit", "global"]
# From the shortest to the widest.
_REACHES: tuple[Reach, ...] = get_args(Reach)
# The sizes of the dimensions of the arrays that are tried.
_SIZES = (3, 5, 4)
Shapes = dict[str, tuple[int, ...]]


def probe(optimizer: Any, specs: Nested) -> Reach:
    """The smallest part of a unit that can be updated without the rest.

    Args:
        optimizer: `init` and `update`, as in optax.
        specs: the parameters of one unit. Paths and numbers of dimensions are kept for the trial, sizes are not.

    Returns:
        "element"; "row", a slice along the first axis; "tensor"; "unit", all that share an instance, when what belongs
        to no parameter in the state depends on gradients or is a PRNG key (pieces would all draw the same noise);
        "global" when one parameter's update depends on another's gradient. Vectors are never cut: what happens inside
        of them counts only where there is nothing larger.
    """
    shapes: Shapes = {path: spec.shape for path, spec in flatten(specs).items()}
    reaches: set[Reach] = {"element"}
    # Only the true sizes show what is summed over: optimizers factor what is large.
    for leaf, owner in _state(optimizer, shapes).values():
        if owner and leaf.shape not in ((), shapes[owner]):
            reaches = {"tensor"}
    toy_shapes = _toys(shapes)
    owners = {}
    toy_state = _state(optimizer, toy_shapes)
    for path, (_leaf, owner) in toy_state.items():
        owners[f"state/{path}"] = owner
    for path in toy_shapes:
        owners[f"update/{path}"] = path
    # Schedules may ask while a step is traced: the trial runs all the same. What is above must not be under this, as
    # it would make arrays of the true sizes.
    with jax.ensure_compile_time_eval():
        return max(reaches | _tried(optimizer, toy_shapes, owners), key=_REACHES.index)


def _tried(optimizer: Any, toy_shapes: Shapes, owners: dict[str, str | None]) -> set[Reach]:
    """How far the gradients of single elements reached in a trial, at least "element".

    Args:
        optimizer: `init` and `update`, as in optax.
        toy_shapes: by path of a parameter.
        owners: the parameter that each array of a trial belongs to, by its path, or None.
    """
    reaches: set[Reach] = {"element"}
    run = _trial(optimizer, toy_shapes)
    clean = run(None, 0.0)
    has_matrices = any(len(shape) > 1 for shape in toy_shapes.values())
    min_ndim = 2 if has_matrices else 1
    # One path of each shape, not of each number of dimensions: in one row, tensor and row are the same, and in one
    # column, row and element.
    path_by_shape = {shape: path for path, shape in toy_shapes.items()}
    for path in path_by_shape.values():
        shape = toy_shapes[path]
        # A large value shows what depends on sizes, NaN what depends on tests for finiteness.
        for value in (1e3, np.nan):
            results = run(path, value)
            for name, spoiled in results.items():
                changed = _changed(clean[name], spoiled)
                owner = owners.get(name)
                if owner is None:
                    # Without an owner are counters and constants, which are the same for each piece, and keys.
                    is_key = clean[name].dtype.kind == "u"
                    reaches.add("unit" if changed.any() or is_key else "element")
                elif owner != path:
                    reaches.add("global" if changed.any() else "element")
                elif changed.shape == shape and len(shape) >= min_ndim:
                    reaches.add(_reach_within(changed))
    return reaches


def _changed(clean: np.ndarray, spoiled: np.ndarray) -> np.ndarray:
    """Which elements differ in any of the steps. Two NaN are equal.

    Args:
        clean, spoiled: [3, ...], of three steps.

    Returns:
        bool, [...].
    """
    is_nan_in_both = (clean != clean) & (spoiled != spoiled)
    return ((clean != spoiled) & ~is_nan_in_both).any(axis=0)


def _reach_within(changed: np.ndarray) -> Reach:
    """How far the gradient of the spoiled element spreads within its tensor.

    Args:
        changed: bool, in the tensor's shape; the spoiled element is cleared.
    """
    place = _spoiled(changed.shape)
    # The element itself always changes.
    changed[place] = False
    other_rows = np.delete(changed, place[:1], axis=0)
    if other_rows.any():
        return "tensor"
    return "row" if changed.any() else "element"


def _state(optimizer: Any, shapes: Shapes) -> dict[str, tuple[jax.ShapeDtypeStruct, str | None]]:
    """{path: (a leaf of the state, the path of the parameter that it belongs to)}."""
    params = {}
    for path, shape in shapes.items():
        params[path] = jax.ShapeDtypeStruct(shape, "float32")
    path_of_name = {tuple(path.split("/")): path for path in shapes}
    state = jax.eval_shape(optimizer.init, unflatten(params))
    leaves = {}
    for path, leaf in flatten(state).items():
        owner_name = owner_of(tuple(path.split("/")), path_of_name)
        leaves[path] = (leaf, path_of_name.get(owner_name or ()))
    return leaves


def _toys(shapes: Shapes) -> Shapes:
    """Small shapes; the only one of its number of dimensions gets company, which could change with it."""
    ndims = [len(shape) for shape in shapes.values()]
    company = {}
    for path, shape in shapes.items():
        if ndims.count(len(shape)) == 1:
            company[f"beside/{path}"] = shape
    toy_shapes = {}
    for path, shape in {**company, **shapes}.items():
        # There may be more dimensions than sizes: the sizes are used again from the first.
        toy_shapes[path] = tuple(map(min, shape, _SIZES * len(shape)))
    return toy_shapes


def _spoiled(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element whose gradient is spoiled: off the edge, where an axis has more than one element."""
    return tuple(min(1, dim - 1) for dim in shape)


def _trial(optimizer: Any, shapes: Shapes) -> Callable[[str | None, float], dict[str, np.ndarray]]:
    """run(path, value): all updates and states of three steps, [3, ...] by path, with `value` in one gradient."""
    rng = np.random.default_rng(0)

    def draw() -> dict[str, np.ndarray]:
        arrays = {}
        for path, shape in shapes.items():
            arrays[path] = rng.normal(size=shape).astype(np.float32)
        return arrays

    params = draw()
    clean_steps = [draw() for _ in range(3)]
    state = jax.jit(optimizer.init)(unflatten(params))
    start = (unflatten(params), state)

    @jax.jit
    def step(inputs: tuple[Any, Any, Any]) -> Any:
        params, state, grads = inputs
        updates, state = optimizer.update(grads, state, params)

        def comparable(x: jax.Array) -> jax.Array:
            # NumPy has no dtype for PRNG keys: their words are compared.
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return jax.random.key_data(x) if is_key else x

        seen = jax.tree.map(comparable, {"update": updates, "state": state})
        return (optax.apply_updates(params, updates), state), seen

    def run(path: str | None, value: float) -> dict[str, np.ndarray]:
        params_and_state = start
        seen = []
        for index, clean_grads in enumerate(clean_steps):
            grads = {name: grad.copy() for name, grad in clean_grads.items()}
            # Spoiled in the second of three steps: what was seen before it may act, and what it left may show.
            if index == 1 and path is not None:
                grads[path][_spoiled(shapes[path])] = value
            inputs = (*params_and_state, unflatten(grads))
            params_and_state, leaves = executables.call(step, inputs)
            seen.append(flatten(leaves))
        stacks = {}
        for name in seen[0]:
            stacks[name] = np.stack([leaves[name] for leaves in seen])
        return stacks

    return run
