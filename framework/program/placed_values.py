"""Places initial values: in the layer ranges of a stack, and in the memory that the layout specifies."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import StateLayout, TensorSpec, flatten, store_leaf
from plimsoll.framework.program.initializer import GroupedArrays, InitFunction, Paths
from plimsoll.framework.schedules.stack_layout import StackParts


class PlacedValues:
    """Builds parts of the initial state, inside jit.

    Args:
        make: function that initializes some parameters; see `StateInitializer.make_init_function`.
        layout: layout of the running state.
        parts: split of the stacks in the running state.
    """

    def __init__(self, make: InitFunction, layout: StateLayout, parts: StackParts):
        self._make = make
        self._parts = parts
        self._specs: dict[str, dict[str, TensorSpec]] = {name: flatten(tree) for name, tree in layout.specs.items()}

    def split_layers(self, path: str, num_layers: int | None) -> Iterator[range | None]:
        """Yield the runs of layers that each leaf of the state holds.

        Args:
            path: path of a parameter.
            num_layers: number of layers in its stack; None for a parameter that is initialized as a whole.
        """
        stack_parts = self._parts.list_parts(path.split("/", 1)[0])
        if num_layers is None:
            yield None
        elif not stack_parts:
            yield range(num_layers)
        else:
            for part in stack_parts:
                yield range(part.first, part.first + part.count)

    def values(self, key: jax.Array, paths: Paths, layers: range | None) -> GroupedArrays:
        """Return the state's arrays for some parameters, {group: {path in the state: array}}.

        Args:
            key: key of the initialization.
            paths: paths of the parameters.
            layers: a run of layers; None for parameters that are initialized as a whole.
        """
        if layers is None:
            return self._store(self._make(key, paths, None))
        make_layer = functools.partial(self._layer_values, key, paths, layers.start)
        return jax.lax.map(make_layer, jnp.arange(layers.start, layers.stop))

    def _layer_values(self, key: jax.Array, paths: Paths, first: int, layer: jax.Array) -> GroupedArrays:
        """Return the values of one layer, by the paths of the part that starts at layer `first`."""
        values_by_group = {}
        for group, values in self._make(key, paths, layer).items():
            values_by_group[group] = {self._parts.place(path, first)[0]: x for path, x in values.items()}
        return self._store(values_by_group)

    def _store(self, values_by_group: GroupedArrays) -> GroupedArrays:
        """Move the values to their memory.

        Drops gradients that the state does not hold because they stay on the device.
        """
        stored_values: GroupedArrays = {}
        for group, values in values_by_group.items():
            specs = self._specs[group]
            stored_values[group] = {path: store_leaf(specs[path], x) for path, x in values.items() if path in specs}
        return stored_values
