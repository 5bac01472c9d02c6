"""PartitionedGradientTransformation: an optax transformation that also defines the layout of its state.

The layout is derived for any optax transformation, including a user's own, without running it. The state's shapes come
from `eval_shape(init)`. A state leaf belongs to the parameter whose path ends the leaf's path, or comes last in it (SM3
keeps a list for each parameter); the longest such path wins. Leaves that are not shaped like their parameter
(Adafactor's rows and columns) get their axes from a second probe, in which every dimension has a unique size. A leaf
without an owner is a counter. (optax's tree_map_params fails on masked states.)

Counters that are the number of updates, the same in all layers, have a role in their specs
(`OptStateSpec.counts_updates`). A transformation with an explicit partition declares it with `NUMBER_OF_UPDATES`; for
all others, `_derive_partition` decides by name, dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.layout import MeshAxes, Nested, OptStateSpec, ParameterSpec, PyTree, flatten, key_name

# Spec of the number of updates, for transformations with an explicit partition.
NUMBER_OF_UPDATES = OptStateSpec((), "int32", counts_updates=True)
# optax's name for the number of updates in all of its states.
_OPTAX_COUNT = "count"


@dataclass(frozen=True)
class PartitionedGradientTransformation:
    """optax's `init` and `update`, and `partition`, which returns OptStateSpecs in the structure of the state.

    An explicit partition must use NUMBER_OF_UPDATES for the leaf that counts updates, so that layers can share it.

    Attributes:
        init: (parameters) -> state.
        update: (gradients, state, parameters) -> (updates, new state).
        partition: (specs of the parameters) -> specs of the state.
        without_transfers: the same transformation for one layer and without its own transfers, if `update` moves state
            between memories.
        fit_to_specs: function that fits the transformation to the parameters of one update unit, if it treats them by
            the roles of their axes.
        draws: whether `update` takes `seed`, a uint32 scalar that differs between layers and stays the same in every
            step.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    partition: Callable[[Nested], PyTree]
    without_transfers: PartitionedGradientTransformation | None = None
    fit_to_specs: Callable[[Nested], PartitionedGradientTransformation] | None = None
    draws: bool = False


def add_partition(
    optimizer: optax.GradientTransformation | PartitionedGradientTransformation,
) -> PartitionedGradientTransformation:
    """Return an optax transformation with a derived partition; one that has its own is returned unchanged."""
    if isinstance(optimizer, PartitionedGradientTransformation):
        return optimizer
    init, update = optax.with_extra_args_support(optimizer)
    return PartitionedGradientTransformation(init, update, partial(_derive_partition, optimizer))


def _derive_partition(optimizer: optax.GradientTransformation, param_specs: Nested) -> PyTree:
    """Return the specs of an optimizer's state.

    Raises:
        ValueError: the state holds a PRNG key.
    """
    owners: dict[tuple[str, ...], ParameterSpec] = {}
    for path, spec in flatten(param_specs).items():
        owners[tuple(path.split("/"))] = spec
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), param_specs)
    probe_params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(_unique_sizes(spec.shape), spec.dtype), param_specs)
    state_leaves, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(optimizer.init, params))
    probe_shapes = {}
    for keypath, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, probe_params)):
        probe_shapes[keypath] = leaf.shape
    state_specs = []
    for keypath, leaf in state_leaves:
        name = tuple(key_name(key) for key in keypath)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"learner.optimizer: {'/'.join(name)} of its state is a PRNG key. Each layer has its own optimizer "
                "instance, and all of them would draw the same noise; expected a transformation without randomness"
            )
        owner = find_owner(name, owners)
        if owner is not None:
            axes = _find_axes(leaf.shape, probe_shapes.get(keypath, ()), owners[owner])
            state_specs.append(OptStateSpec(leaf.shape, leaf.dtype, axes, owner="/".join(owner)))
            continue
        # A leaf that belongs to no parameter is the number of updates if it is an integer scalar with optax's name for
        # that. Dtype and shape are not sufficient, because they also match counters that may differ between layers (the
        # number of times that a layer's gradient was not finite). A transformation with another name for its counter
        # keeps one number per layer, with equal results.
        is_integer_scalar = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)
        counts_updates = is_integer_scalar and name[-1:] == (_OPTAX_COUNT,)
        state_specs.append(OptStateSpec(leaf.shape, leaf.dtype, counts_updates=counts_updates))
    return jax.tree.unflatten(structure, state_specs)


def _unique_sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape in which each axis has a unique size.

    Sizes keep the order of the dimensions, ties in order of position, so that an optimizer that treats its largest
    dimensions differently chooses the same ones.
    """
    # Unique for tensors of up to 16 axes.
    return tuple(dim * 16 + axis for axis, dim in enumerate(shape))


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


def _find_axes(shape: tuple[int, ...], probe_shape: tuple[int, ...], owner: ParameterSpec) -> MeshAxes:
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
    axis_by_size = {size: axis for axis, size in enumerate(_unique_sizes(owner.shape))}
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
