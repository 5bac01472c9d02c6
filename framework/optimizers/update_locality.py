"""Update locality: how far the gradient of one element spreads in an optimizer's update.

State is kept per layer (see framework.learner.learner) and may be streamed in even smaller chunks. So it matters which
values a transformation combines: a global norm would see one layer at a time, and Adafactor's row means one block of
the rows, and both would be silently wrong. This is tested, not assumed: three steps on small arrays run once clean and
once with one element of a gradient perturbed. Any other value that then changes, to the bit, was reached. A single step
would not show it for transformations that react to earlier steps (D-Adaptation, SM3, apply_if_finite).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.devices import executables
from plimsoll.framework.layout import Nested, flatten, unflatten
from plimsoll.framework.optimizers.partition import find_owner

UpdateLocality = Literal["element", "row", "tensor", "layer", "global"]
# From the most local to the widest.
_LOCALITIES: tuple[UpdateLocality, ...] = get_args(UpdateLocality)
# Dimension sizes of the arrays in the trial.
_SIZES = (3, 5, 4)
Shapes = dict[str, tuple[int, ...]]


def probe(optimizer: Any, specs: Nested) -> UpdateLocality:
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
    for leaf, owner in _find_state_owners(optimizer, shapes).values():
        if owner and leaf.shape not in ((), shapes[owner]):
            localities = {"tensor"}
    toy_shapes = _shrink_shapes(shapes)
    owners = {}
    toy_state = _find_state_owners(optimizer, toy_shapes)
    for path, (_leaf, owner) in toy_state.items():
        owners[f"state/{path}"] = owner
    for path in toy_shapes:
        owners[f"update/{path}"] = path
    # Schedules may call this while a step is traced; the trial runs eagerly all the same. The code above must not be
    # under this context, as it would allocate arrays of the real sizes.
    with jax.ensure_compile_time_eval():
        return max(localities | _measure_spread(optimizer, toy_shapes, owners), key=_LOCALITIES.index)


def _measure_spread(optimizer: Any, toy_shapes: Shapes, owners: dict[str, str | None]) -> set[UpdateLocality]:
    """Return how far the gradients of single elements spread in a trial, at least "element".

    Args:
        optimizer: `init` and `update`, as in optax.
        toy_shapes: shapes of the trial's parameters, by path.
        owners: by path, the parameter that each array of a trial belongs to, or None.
    """
    localities: set[UpdateLocality] = {"element"}
    run = _make_trial(optimizer, toy_shapes)
    clean = run(None, 0.0)
    has_matrices = any(len(shape) > 1 for shape in toy_shapes.values())
    min_ndim = 2 if has_matrices else 1
    # One path per shape, not per number of dimensions: with a single row, tensor and row are the same, and with a
    # single column, row and element are.
    path_by_shape = {shape: path for path, shape in toy_shapes.items()}
    for path in path_by_shape.values():
        shape = toy_shapes[path]
        # A large value shows dependence on magnitudes; NaN shows dependence on tests for finiteness.
        for value in (1e3, np.nan):
            results = run(path, value)
            for name, spoiled in results.items():
                changed = _find_changes(clean[name], spoiled)
                owner = owners.get(name)
                if owner is None:
                    # Leaves without an owner are counters and constants, the same for each chunk, and keys.
                    is_key = clean[name].dtype.kind == "u"
                    localities.add("layer" if changed.any() or is_key else "element")
                elif owner != path:
                    localities.add("global" if changed.any() else "element")
                elif changed.shape == shape and len(shape) >= min_ndim:
                    localities.add(_locality_within(changed))
    return localities


def _find_changes(clean: np.ndarray, spoiled: np.ndarray) -> np.ndarray:
    """Return which elements differ in any of the steps. Two NaN are equal.

    Args:
        clean, spoiled: values from three steps, [3, ...].

    Returns:
        bool [...].
    """
    is_nan_in_both = (clean != clean) & (spoiled != spoiled)
    return ((clean != spoiled) & ~is_nan_in_both).any(axis=0)


def _locality_within(changed: np.ndarray) -> UpdateLocality:
    """Return how far the gradient of the perturbed element spreads within its tensor.

    Args:
        changed: bool, in the tensor's shape; the entry of the perturbed element is cleared in place.
    """
    position = _get_perturbed_index(changed.shape)
    # The element itself always changes.
    changed[position] = False
    other_rows = np.delete(changed, position[:1], axis=0)
    if other_rows.any():
        return "tensor"
    return "row" if changed.any() else "element"


def _find_state_owners(optimizer: Any, shapes: Shapes) -> dict[str, tuple[jax.ShapeDtypeStruct, str | None]]:
    """Return {path: (a state leaf, the path of the parameter that it belongs to)}."""
    params = {}
    for path, shape in shapes.items():
        params[path] = jax.ShapeDtypeStruct(shape, "float32")
    path_of_name = {tuple(path.split("/")): path for path in shapes}
    state = jax.eval_shape(optimizer.init, unflatten(params))
    leaves = {}
    for path, leaf in flatten(state).items():
        owner_name = find_owner(tuple(path.split("/")), path_of_name)
        leaves[path] = (leaf, path_of_name.get(owner_name or ()))
    return leaves


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


def _make_trial(optimizer: Any, shapes: Shapes) -> Callable[[str | None, float], dict[str, np.ndarray]]:
    """Return run(path, value): updates and states of three steps, [3, ...] by path, with `value` in one gradient."""
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
            # NumPy has no dtype for PRNG keys, so their words are compared.
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return jax.random.key_data(x) if is_key else x

        seen = jax.tree.map(comparable, {"update": updates, "state": state})
        return (optax.apply_updates(params, updates), state), seen

    def run(path: str | None, value: float) -> dict[str, np.ndarray]:
        params_and_state = start
        seen = []
        for index, clean_grads in enumerate(clean_steps):
            grads = {name: grad.copy() for name, grad in clean_grads.items()}
            # Perturbs the second of three steps, so that earlier state can react and later steps can show the effect.
            if index == 1 and path is not None:
                grads[path][_get_perturbed_index(shapes[path])] = value
            inputs = (*params_and_state, unflatten(grads))
            params_and_state, leaves = executables.call(step, inputs)
            seen.append(flatten(leaves))
        stacks = {}
        for name in seen[0]:
            stacks[name] = np.stack([leaves[name] for leaves in seen])
        return stacks

    return run
