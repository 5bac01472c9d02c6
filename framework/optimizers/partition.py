"""PartitionedGradientTransformation: an optax transformation that also defines the layout of its state.

The layout is derived for any optax transformation, including a user's own, without running it. The state's shapes come
from `eval_shape(init)`. A state leaf belongs to the parameter whose path ends the leaf's path, or comes last in it (SM3
keeps a list for each parameter); the longest such path wins. Leaves that are not shaped like their parameter
(Adafactor's rows and columns) get their axes from a second probe, in which every dimension has a unique size. A leaf
without an owner is a counter. (optax's tree_map_params fails on masked states.)

Counters that are the number of updates, the same in all layers, have a role in their specs
(`OptStateSpec.counts_updates`). A transformation with an explicit partition declares it with `NUMBER_OF_UPDATES`; for
all others `_counts_updates` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.layout import MeshAxes, Nested, OptStateSpec, ParameterSpec, flatten, key_name

# Spec of the number of updates, for transformations with an explicit partition.
NUMBER_OF_UPDATES = OptStateSpec((), "int32", counts_updates=True)
# optax's name for the number of updates in all of its states.
_OPTAX_COUNT = "count"


class PartitionedGradientTransformation(NamedTuple):
    """optax's `init` and `update`, and `partition`, which returns OptStateSpecs in the structure of the state.

    An explicit partition must use NUMBER_OF_UPDATES for the leaf that counts updates, so that layers can share it.

    Attributes:
        without_transfers: the same transformation for one layer and without its own transfers, if `update` moves state
            between memories.
        fit_to_specs: function that fits the transformation to the parameters of one update unit, if it treats them by
            the roles of their axes.
        draws: whether `update` takes `seed`, a uint32 scalar that differs between layers and stays the same in every
            step.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    partition: Callable[[Nested], Any]
    without_transfers: PartitionedGradientTransformation | None = None
    fit_to_specs: Callable[[Nested], PartitionedGradientTransformation] | None = None
    draws: bool = False


def add_partition(
    optimizer: optax.GradientTransformation | PartitionedGradientTransformation,
) -> PartitionedGradientTransformation:
    """Return an optax transformation with a derived partition; one that has its own is returned unchanged."""
    if isinstance(optimizer, PartitionedGradientTransformation):
        return optimizer

    def partition(param_specs: Nested) -> Any:
        return _partition(optimizer, param_specs)

    init, update = optax.with_extra_args_support(optimizer)
    return PartitionedGradientTransformation(init, update, partition)


def _partition(optimizer: optax.GradientTransformation, param_specs: Nested) -> Any:
    """Return the derived specs of an optimizer's state.

    Raises:
        ValueError: the state holds a PRNG key.
    """
    owners = {tuple(path.split("/")): spec for path, spec in flatten(param_specs).items()}
    state = jax.eval_shape(optimizer.init, _abstract(param_specs))
    # Sizes are unique within a parameter and keep the order of its dimensions, ties in order of position, so that an
    # optimizer that treats its largest dimensions differently chooses the same ones.
    probe = jax.eval_shape(optimizer.init, _abstract(param_specs, unique=True))
    probe_shapes = {}
    for keypath, leaf in jax.tree_util.tree_leaves_with_path(probe):
        probe_shapes[_name(keypath)] = leaf.shape

    def make_spec(keypath: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> OptStateSpec:
        name = _name(keypath)
        owner = find_owner(name, owners)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"learner.optimizer: {'/'.join(name)} of its state is a PRNG key. Each layer has its own optimizer "
                "instance, and all of them would draw the same noise; expected a transformation without randomness"
            )
        if owner is None:
            return OptStateSpec(leaf.shape, leaf.dtype, counts_updates=_counts_updates(name, leaf))
        axes = _axes(leaf.shape, probe_shapes.get(name, ()), owners[owner])
        return OptStateSpec(leaf.shape, leaf.dtype, axes, owner="/".join(owner))

    return jax.tree_util.tree_map_with_path(make_spec, state)


def _counts_updates(name: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> bool:
    """Return whether a leaf of a derived state that belongs to no parameter is the number of updates.

    It must be an integer scalar. Dtype and shape are not sufficient, because they also match counters that may differ
    between layers (the number of times that a layer's gradient was not finite). So it must have optax's name, too. A
    transformation with another name for its counter keeps one number per layer, with equal results.
    """
    is_integer_scalar = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)
    return is_integer_scalar and name[-1:] == (_OPTAX_COUNT,)


def _name(keypath: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of a leaf's pytree keys."""
    return tuple(key_name(key) for key in keypath)


def _unique_size(dim: int, axis: int) -> int:
    # Unique for tensors of up to 16 axes.
    return dim * 16 + axis


def _abstract(specs: Nested, *, unique: bool = False) -> Any:
    """Return the parameters' shapes and dtypes; with `unique`, each axis of a parameter has a unique size."""

    def abstract_param(spec: ParameterSpec) -> jax.ShapeDtypeStruct:
        shape = spec.shape
        if unique:
            shape = tuple(_unique_size(dim, axis) for axis, dim in enumerate(spec.shape))
        return jax.ShapeDtypeStruct(shape, spec.dtype)

    return jax.tree.map(abstract_param, specs)


def find_owner(path: tuple[str, ...], owners: Container[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the path of the parameter that a state leaf belongs to; None for a counter.

    Args:
        path: names of the leaf's pytree keys.
        owners: paths of the parameters.
    """
    # Suffixes are tried first, and at each end longer runs of names before shorter ones.
    for end in range(len(path), 0, -1):
        for start in range(end):
            run = path[start:end]
            if run in owners:
                return run
    return None


def _axes(shape: tuple[int, ...], probe_shape: tuple[int, ...], owner: ParameterSpec) -> MeshAxes:
    """Return the mesh axes of a state leaf that belongs to a parameter.

    Args:
        shape: shape of the leaf.
        probe_shape: shape of the leaf if each axis of the parameter has a unique size.
        owner: the parameter.
    """
    if shape == owner.shape:
        return owner.mesh_axes
    # A state whose structure depends on the sizes does not reveal its axes, so the leaf is replicated.
    if len(shape) != len(probe_shape):
        return (None,) * len(shape)
    axis_by_size = {}
    for axis, dim in enumerate(owner.shape):
        axis_by_size[_unique_size(dim, axis)] = axis
    mesh_axes = []
    for size, probe_size in zip(shape, probe_shape, strict=True):
        axis = axis_by_size.get(probe_size)
        if axis is not None and owner.shape[axis] == size:
            mesh_axes.append(owner.mesh_axes[axis])
        else:
            mesh_axes.append(None)
    return tuple(mesh_axes)


def mirrors_parameter(spec: OptStateSpec) -> bool:
    """Return whether a state leaf is a moment: it belongs to a parameter, is floating point, and is not a scalar."""
    return spec.owner is not None and spec.shape != () and jnp.issubdtype(spec.dtype, jnp.floating)
