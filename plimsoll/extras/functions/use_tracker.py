"""Tracks which weights a function being differentiated has used, to refuse a second use."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from plimsoll.extras.functions.trained import Trained

# Array classes that a differentiated function sees. A jitted function sees others, in which a second use may be
# correct (an evaluation), so those are not checked.
_DIFFERENTIATED = {"JVPTracer", "LinearizeTracer"}


class UseTracker:
    """The traced arrays that were used, each with the module that used it; entries disappear with their trace."""

    def __init__(self) -> None:
        # By identity, because traced arrays are not hashable.
        self._user_by_array: dict[int, tuple[weakref.ref[Any], str]] = {}

    def record(self, trained: Trained, name: str) -> None:
        """Record a use.

        Raises:
            ValueError: the same weights were used before in the same differentiated function.
        """
        for leaf in jax.tree.leaves(trained):
            if type(leaf).__name__ not in _DIFFERENTIATED:
                continue
            reference, first_name = self._user_by_array.get(id(leaf), (None, ""))
            if reference is not None and reference() is leaf:
                raise ValueError(describe_double_use(trained.name, {first_name, name}))
            self._user_by_array[id(leaf)] = (weakref.ref(leaf, self._forget(id(leaf))), name)

    def _forget(self, key: int) -> Any:
        def forget(reference: Any) -> None:
            # The id may have been reused for another array.
            if self._user_by_array.get(key, (None, ""))[0] is reference:
                del self._user_by_array[key]

        return forget


def describe_double_use(name: str, modules: set[str]) -> str:
    """Return the error message for weights that are used more than once."""
    by = "" if modules == {name} else f", by {', '.join(sorted(modules))}"
    return (
        f"the module {name!r} is used twice{by}: each use would update the weights by its own part of the gradient, "
        "and JAX would add the results; get the weights once from eager_weights, and use them as often as you like"
    )


USE_TRACKER = UseTracker()
