"""Primitive that marks new weights and state in the program of a backward pass; an identity.

`cotangent_origins` finds it in the traced backward pass. It has no derivative and no batching rule, so second
derivatives, and `jax.vmap` over the backward pass, raise an error that names the module. They would be silently wrong.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from plimsoll.extras.functions.encoding import Tree

update_p = Primitive("plimsoll_update")
update_p.multiple_results = True


def mark_update(new: Tree, name: str) -> Tree:
    """Return the new weights and state of a module unchanged, marked in the traced program.

    Raises:
        ValueError: later, if the surrounding function is differentiated or batched.
    """
    leaves, structure = jax.tree.flatten(new)
    return jax.tree.unflatten(structure, update_p.bind(*leaves, module=name))


def apply_barrier(tree: Tree) -> Tree:
    """Pass the tree through a barrier, so that a consumer of any of its arrays waits for all of them."""
    leaves, structure = jax.tree.flatten(tree)
    # Cotangents of integers (float0) hold no data and are not arrays of the program.
    arrays = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    waiting = iter(jax.lax.optimization_barrier(arrays))
    tied_leaves = [leaf if leaf.dtype == jax.dtypes.float0 else next(waiting) for leaf in leaves]
    return jax.tree.unflatten(structure, tied_leaves)


def _return_arrays(*arrays: Any, module: str) -> list[Any]:
    return list(arrays)


def _lower(context: Any, *arrays: Any, module: str) -> Any:
    return arrays


def _refuse_derivative(primals: Any, tangents: Any, *, module: str) -> Any:
    raise ValueError(
        f"{module}: it is updated in the backward pass, which has no derivative of its own; take second derivatives of "
        "the plain function"
    )


def _refuse_batching(operands: Any, axes: Any, *, module: str) -> Any:
    raise ValueError(
        f"{module}: jax.vmap over its backward pass would update the weights once per row of the batch; call jax.vmap "
        "inside the module instead, so that its weights get the sum of the rows' gradients"
    )


update_p.def_impl(_return_arrays)
update_p.def_abstract_eval(_return_arrays)
mlir.register_lowering(update_p, _lower)
ad.primitive_jvps[update_p] = _refuse_derivative
batching.primitive_batchers[update_p] = _refuse_batching
