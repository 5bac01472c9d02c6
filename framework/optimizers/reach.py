"""Reach: whether an optimizer's update of one parameter depends on the gradient of another.

State is kept per unit (see framework.learner), so a transformation that mixes parameters, a global norm say, would see
one layer at a time and be silently wrong. That is tried out, not assumed: three steps on small arrays, once clean and
once with a spoiled gradient in one leaf; then the updates of all other leaves must be equal to the bit. One step would
not show it for transformations that act on what they saw before (D-Adaptation, apply_if_finite).

May import: framework.layout, JAX, optax.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from framework.layout import Nested, flatten

_STEPS = 3
_LARGEST = 4  # dimensions of the arrays that are tried


def mixes_parameters(optimizer: Any, specs: Nested) -> bool:
    """Whether spoiling one leaf's gradient changes another's update.

    Args:
        optimizer: `init` and `update`, as in optax.
        specs: the parameters of one unit; their paths and numbers of dimensions are kept, sizes are not.
    """
    shapes = {path: tuple(min(dim, _LARGEST) for dim in spec.shape) for path, spec in flatten(specs).items()}
    first = next(iter(shapes))
    treedef = jax.tree.structure(specs)
    if len(shapes) == 1:  # something must be there that could change
        shapes = {"a": shapes[first], "b": shapes[first]}
        treedef = jax.tree.structure({"a": 0, "b": 0})
        first = "a"
    rng = np.random.default_rng(0)
    draw = {path: rng.normal(size=(_STEPS + 1, *shape)).astype(np.float32) for path, shape in shapes.items()}

    @jax.jit
    def updates_of(spoil: jax.Array) -> Any:
        params = jax.tree.unflatten(treedef, [draw[path][-1] for path in shapes])
        state, seen = optimizer.init(params), []
        for step in range(_STEPS):
            grads = [draw[path][step] + (spoil[step] if path == first else 0.0) for path in shapes]
            updates, state = optimizer.update(jax.tree.unflatten(treedef, grads), state, params)
            params = optax.apply_updates(params, updates)
            seen.append(updates)
        return seen

    clean = jax.device_get(updates_of(jnp.zeros(_STEPS)))
    for value in (1e3, np.nan):
        spoiled = jax.device_get(updates_of(jnp.zeros(_STEPS).at[1].set(value)))
        for before, after in zip(clean, spoiled, strict=True):
            pairs = zip(shapes, jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            if any(path != first and not np.array_equal(a, b, equal_nan=True) for path, a, b in pairs):
                return True
    return False
