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
_REACHES: tuple[Reach, ...] = get_args(Reach)  # from the shortest to the widest
_SIZES = (3, 5, 4)  # of the dimensions of the arrays that are tried
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
    state = _state(optimizer, shapes).values()  # of the true sizes: optimizers factor what is large
    summed = any(owner and leaf.shape not in ((), shapes[owner]) for leaf, owner in state)
    found: set[Reach] = {"tensor" if summed else "element"}
    shapes = _toys(shapes)
    owners = {f"state/{path}": owner for path, (_, owner) in _state(optimizer, shapes).items()}
    owners |= {f"update/{path}": path for path in shapes}
    run = _trial(optimizer, shapes)
    clean, cut = run(None, 0.0), 2 if any(len(shape) > 1 for shape in shapes.values()) else 1
    # One of each shape, not of each number of dimensions: in one row, tensor and row are the same, and in one column,
    # row and element.
    for path in {shape: path for path, shape in shapes.items()}.values():
        for value in (1e3, np.nan):
            for name, after in run(path, value).items():
                before, at = clean[name], _spoiled(shapes[path])
                changed = ((before != after) & ~((before != before) & (after != after))).any(axis=0)  # NaN is NaN
                if (owner := owners.get(name)) is None:  # the same for each piece: counters, constants; but no key
                    found.add("unit" if changed.any() or before.dtype.kind == "u" else "element")
                elif owner != path:
                    found.add("global" if changed.any() else "element")
                elif changed.shape == shapes[path] and len(at) >= cut:
                    changed[at] = False
                    others = np.delete(changed, at[:1], axis=0)
                    found.add("tensor" if others.any() else "row" if changed.any() else "element")
    return max(found, key=_REACHES.index)


def _state(optimizer: Any, shapes: Shapes) -> dict[str, tuple[jax.ShapeDtypeStruct, str | None]]:
    """{path: (a leaf of the state, the path of the parameter that it belongs to)}."""
    params = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    owners = {tuple(path.split("/")): path for path in shapes}
    state = flatten(jax.eval_shape(optimizer.init, unflatten(params)))
    return {path: (leaf, owners.get(owner_of(tuple(path.split("/")), owners) or ())) for path, leaf in state.items()}


def _toys(shapes: Shapes) -> Shapes:
    """Small shapes; what is the only one of its number of dimensions gets company, which could change with it."""
    dims = [len(shape) for shape in shapes.values()]
    lonely = {f"beside/{path}": shape for path, shape in shapes.items() if dims.count(len(shape)) == 1}
    return {path: tuple(map(min, shape, _SIZES * len(shape))) for path, shape in {**lonely, **shapes}.items()}


def _spoiled(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The element whose gradient is spoiled: off the edge, where there is another."""
    return tuple(min(1, dim - 1) for dim in shape)


def _trial(optimizer: Any, shapes: Shapes) -> Callable[[str | None, float], dict[str, np.ndarray]]:
    """run(path, value): all updates and states of three steps, [3, ...] by path, with `value` in one gradient."""
    rng = np.random.default_rng(0)
    params, *draws = [{path: rng.normal(size=s).astype(np.float32) for path, s in shapes.items()} for _ in range(4)]
    start = unflatten(params), jax.jit(optimizer.init)(unflatten(params))

    @jax.jit
    def step(inputs: tuple[Any, Any, Any]) -> Any:
        params, state, grads = inputs
        updates, state = optimizer.update(grads, state, params)
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
        seen = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, {"update": updates, "state": state})
        return (optax.apply_updates(params, updates), state), seen

    def run(path: str | None, value: float) -> dict[str, np.ndarray]:
        kept, seen = start, []
        for index, draw in enumerate(draws):
            grads = {name: grad.copy() for name, grad in draw.items()}
            if index == 1 and path is not None:
                grads[path][_spoiled(shapes[path])] = value
            kept, leaves = executables.call(step, (*kept, unflatten(grads)))
            seen.append(flatten(leaves))
        return {name: np.stack([leaves[name] for leaves in seen]) for name in seen[0]}

    return run
