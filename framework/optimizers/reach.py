"""Reach: how far the gradient of one element spreads in an optimizer's update.

State is kept per unit (see framework.learner), and may be streamed in smaller pieces still, so what a transformation
looks at decides what it may be given: a global norm would see one layer at a time, Adafactor's row means a block of the
rows, and be silently wrong. That is tried out, not assumed: three steps on small arrays, once clean and once with one
element of a gradient spoiled; whatever else then changes, to the bit, was reached. One step would not show it for
transformations that act on what they saw before (D-Adaptation, SM3, apply_if_finite).

May import: framework.layout, framework.optimizers.partition, JAX, optax.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from framework.layout import Nested, flatten, unflatten
from framework.optimizers.partition import owner_of

Reach = Literal["element", "row", "tensor", "unit", "global"]
REACHES: tuple[Reach, ...] = get_args(Reach)  # from the shortest to the widest
_SIZES = (3, 5, 4)  # of the dimensions of the arrays that are tried
_STEPS = 3
_SPOILED = 1  # the step


def probe(optimizer: Any, specs: Nested) -> Reach:
    """The smallest part of a unit that can be updated without the rest.

    Args:
        optimizer: `init` and `update`, as in optax.
        specs: the parameters of one unit. Paths and numbers of dimensions are kept for the trial, sizes are not.

    Returns:
        "element"; "row", a slice along the first axis; "tensor"; "unit", all parameters that share an instance, when
        what belongs to no parameter in the state depends on gradients or is a PRNG key (pieces would all draw the same
        noise); "global" when one parameter's update depends on another's gradient. Vectors are never cut: what happens
        inside of them counts only where there is nothing larger.
    """
    shapes = {path: spec.shape for path, spec in flatten(specs).items()}
    found: set[Reach] = {"element"}
    # Of the true sizes: optimizers factor what is large and keep the rest whole.
    for leaf, owner in _state(optimizer, shapes).values():
        if owner is not None and leaf.size > 1 and leaf.shape != shapes[owner]:
            found.add("tensor")

    shapes = _toys(shapes)
    owners = {f"state/{path}": owner for path, (_, owner) in _state(optimizer, shapes).items()}
    owners |= {f"update/{path}": path for path in shapes}
    trial = _Trial(optimizer, shapes)
    clean = trial.run(None, 0.0)
    smallest_cut = 2 if any(len(shape) > 1 for shape in shapes.values()) else 1  # dimensions
    for path in {len(shape): path for path, shape in shapes.items()}.values():  # one of each number of dimensions
        for value in (1e3, np.nan):
            for name, after in trial.run(path, value).items():
                before = clean[name]
                if owners[name] != path:
                    found.add(_elsewhere(before, after, owners[name]))
                elif before.shape[1:] == shapes[path] and len(shapes[path]) >= smallest_cut:
                    found.add(_inside(before, after))
    return max(found, key=REACHES.index)


def _state(optimizer: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[jax.ShapeDtypeStruct, str | None]]:
    """{path: (a leaf of the state, the path of the parameter that it belongs to)}."""
    params = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    owners = {tuple(path.split("/")): path for path in shapes}
    state = flatten(jax.eval_shape(optimizer.init, unflatten(params)))
    return {path: (leaf, owners.get(owner_of(tuple(path.split("/")), owners) or ())) for path, leaf in state.items()}


def _toys(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Small shapes; what is the only one of its number of dimensions gets company, which could change with it."""
    dims = [len(shape) for shape in shapes.values()]
    lonely = {f"beside/{path}": shape for path, shape in shapes.items() if dims.count(len(shape)) == 1}
    return {
        path: tuple(min(dim, _SIZES[axis % len(_SIZES)]) for axis, dim in enumerate(shape))
        for path, shape in {**lonely, **shapes}.items()
    }


class _Trial:
    """A few steps of an optimizer on drawn numbers, compiled once."""

    def __init__(self, optimizer: Any, shapes: dict[str, tuple[int, ...]]):
        rng = np.random.default_rng(0)
        draws = [{path: rng.normal(size=s).astype(np.float32) for path, s in shapes.items()} for _ in range(_STEPS + 1)]
        self.params, self.grads = unflatten(draws[0]), draws[1:]
        self.state = jax.jit(optimizer.init)(self.params)

        @jax.jit
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, updates

        self.step = step

    def run(self, path: str | None, value: float) -> dict[str, np.ndarray]:
        """Updates and states by path, of all steps, with `value` in the gradient of the leaf at `path`."""
        params, state, seen = self.params, self.state, []
        for index, grads in enumerate(self.grads):
            if index == _SPOILED and path is not None:
                spoiled = grads[path].copy()
                spoiled[_at(spoiled.shape)] = value
                grads = {**grads, path: spoiled}
            params, state, updates = self.step(params, state, unflatten(grads))
            seen.append({name: _bits(leaf) for name, leaf in flatten({"update": updates, "state": state}).items()})
        return {name: np.stack([step[name] for step in seen]) for name in seen[0]}


def _bits(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _at(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The element that is spoiled."""
    return tuple(min(1, dim - 1) for dim in shape)


def _changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where two leaves, [steps, ...], differ in any step."""
    return ((before != after) & ~((before != before) & (after != after))).any(axis=0)  # NaN is NaN


def _elsewhere(before: np.ndarray, after: np.ndarray, owner: str | None) -> Reach:
    """What a leaf says that is not of the parameter whose gradient was spoiled."""
    changed = bool(_changed(before, after).any())
    if owner is None:  # a number of updates or a constant is the same for each piece; a key is, too, but must not be
        return "unit" if changed or before.dtype.kind == "u" else "element"
    return "global" if changed else "element"


def _inside(before: np.ndarray, after: np.ndarray) -> Reach:
    """What a leaf says of the parameter whose gradient was spoiled, in one element."""
    changed = _changed(before, after)
    at = _at(changed.shape)
    changed[at] = False
    return "tensor" if np.delete(changed, at[:1], axis=0).any() else "row" if changed.any() else "element"
