"""`value_and_update`: `jax.value_and_grad` for trees with trained modules, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from plimsoll.extras.functions.cotangent_origins import CotangentOrigin, trace_origins
from plimsoll.extras.functions.encoding import Tree
from plimsoll.extras.functions.trained import Trained
from plimsoll.extras.functions.use_tracker import describe_double_use


def value_and_update(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Tree]]:
    """Make a function of the loss's arguments that returns the loss and its first argument after the update.

        value, params = pl.value_and_update(loss)(params, batch)

    In the returned tree, each `Trained` is the one after the update; any other leaf is its gradient, as from
    `jax.value_and_grad`. The traced backward pass is checked before it runs. An error names any module that would be
    updated wrongly: one whose weights are used twice, are read outside its call, or do not affect the loss.

    Complexity: the computation is that of `jax.value_and_grad`. The check takes time proportional to the number of
    operations each time the program is traced; under `jax.jit` that is once.

    Args:
        loss: `loss(params, *args, **kwargs) -> scalar`, or (scalar, auxiliary outputs) with `has_aux`.
        has_aux: whether the loss returns auxiliary outputs, as in `jax.value_and_grad`.

    Raises:
        ValueError: from the returned function: a module would be updated wrongly.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=has_aux)

    def run_checked(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        def call_with_params(params: Tree) -> tuple[Any, Tree]:
            return value_and_grad(params, *args, **kwargs)

        program, shapes = jax.make_jaxpr(call_with_params, return_shape=True)(params)
        num_params = len(jax.tree.leaves(params))
        # The value and auxiliary outputs come first.
        origins = trace_origins(program.jaxpr)[-num_params:]
        _check(jax.tree.unflatten(jax.tree.structure(params), origins))
        # Run the program that was checked instead of tracing the loss again.
        results = jaxpr_as_fun(program)(*jax.tree.leaves(params))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run_checked


def _check(origins: Tree) -> None:
    """Raise ValueError unless each `Trained` results from exactly one update; the tree's leaves are origins."""
    nodes = jax.tree.leaves(origins, is_leaf=lambda node: isinstance(node, Trained))
    for node in nodes:
        if isinstance(node, Trained):
            leaf_origins = jax.tree.leaves(node)
            _check_use(node.name, leaf_origins)
            for origin in leaf_origins:
                _check_leaf(node.name, origin)


def _check_use(name: str, origins: list[CotangentOrigin]) -> None:
    """Raise ValueError if no leaf of a module comes from an update."""
    if all(origin.is_zero for origin in origins):
        raise ValueError(
            f"the module {name!r} is not used: the loss does not depend on it, so zeros would be returned for its "
            "weights; remove it from the trained parameters"
        )
    if not any(origin.modules for origin in origins):
        raise ValueError(
            f"the module {name!r} is not used by an eager call: its gradient comes from {_list_origins(origins)}; call "
            "the module, or get its weights through eager_weights"
        )


def _check_leaf(name: str, origin: CotangentOrigin) -> None:
    """Raise ValueError if a leaf is not the result of exactly one update."""
    if origin.is_in_some_branches:
        raise ValueError(
            f"the module {name!r} is used in some branches of a condition: the other branches would return zeros for "
            "its weights; move the condition into the module"
        )
    if len(origin.modules) > 1:
        raise ValueError(describe_double_use(name, set(origin.modules)))
    if origin.others or not origin.modules:
        raise ValueError(
            f"the module {name!r} is also used outside its eager call: JAX would add the gradient from "
            f"{_list_origins([origin])} to the new weights; get the weights once from eager_weights, and use them as "
            "often as you like"
        )


def _list_origins(origins: list[CotangentOrigin]) -> str:
    """Return the names of the operations that a gradient comes from."""
    return ", ".join(sorted({operation for origin in origins for operation in origin.others}))
