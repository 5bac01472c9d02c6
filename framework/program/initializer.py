"""Initialization of the state: random by a seed, and calibrated on a first batch if the model requests it.

These functions are meant to be jitted. `framework.program.backend` jits them into the layout of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import (
    Nested,
    StateLayout,
    TensorSpec,
    TrainState,
    flatten,
    initialize,
    merge,
    store_leaf,
    unflatten,
)
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.state import unflatten_like
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.stack_layout import StackParts
from plimsoll.framework.schedules.step import training_context

Arrays = dict[str, jax.Array]  # by the path of a parameter
GroupedArrays = dict[str, Arrays]  # {group of the state: {path: array}}
Paths = tuple[str, ...]
# A function (key, paths, layer or None) -> the state's arrays for the parameters at these paths.
InitFunction = Callable[..., GroupedArrays]


@dataclass(frozen=True)
class InitPart:
    """Parameters that are initialized together.

    Attributes:
        paths: paths of the parameters.
        num_layers: number of layers, which are initialized one by one; None if an optimizer spans layers, or if the
            parameters are not in a stack.
    """

    paths: Paths
    num_layers: int | None


class StateInitializer:
    """Initializes the values of a state at step 0.

    Args:
        model: model whose parameters are initialized.
        learner: learner that creates the optimizer state and averages of the parameters.
        checkpoint_layout: layout with whole stacks.
        layout: layout of the running state, where a stack may be a list of layers.
    """

    def __init__(self, model: Chain, learner: Learner, checkpoint_layout: StateLayout, layout: StateLayout):
        self._model = model
        self._learner = learner
        self._checkpoint_layout = checkpoint_layout
        self._layout = layout

    @cached_property
    def groups(self) -> dict[str, dict[str, TensorSpec]]:
        """The specs of the state, with all layers of a stack in one array: {group: {path: spec}}."""
        return {name: flatten(tree) for name, tree in self._checkpoint_layout.specs.items()}

    def to_state_tree(self, flat: GroupedArrays) -> TrainState:
        """Arrange {group: {path: array}} as the tree of the running state."""
        return TrainState(**{name: unflatten_like(tree, flat[name]) for name, tree in self._layout.specs.items()})

    def build_arrays(self, precise: Arrays, *, single_layer: bool) -> GroupedArrays:
        """Return all state arrays for some parameters, {group: {path: array}}. For use inside jit.

        The arrays are cast to the dtypes of the layout but not yet moved to host memory.

        Args:
            precise: arrays by path, float32 or wider; those of one of `learner.init_parts`, or a frozen one.
            single_layer: whether they belong to one layer, without the leading axis.
        """
        groups = self.groups
        first_path = next(iter(precise))
        if first_path in groups["frozen"]:
            values_by_group = {"frozen": precise}
        else:
            values_by_group = self._learner.init_part(precise, single_layer=single_layer)
        if groups["gradient"] and "parameter" in values_by_group:
            params = values_by_group["parameter"]
            # Gradients that stay on the device are not part of the state.
            offloaded_params = {path: x for path, x in params.items() if path in groups["gradient"]}
            values_by_group["gradient"] = jax.tree.map(jnp.zeros_like, offloaded_params)
        cast_values = {}
        for group, values in values_by_group.items():
            specs = groups[group]
            cast_values[group] = {path: x.astype(specs[path].dtype) for path, x in values.items()}
        return cast_values

    def parts(self) -> Iterator[InitPart]:
        """Yield all parameters in initialization order."""
        specs = flatten(self._model.parameter_specs())
        learner = self._learner
        frozen_parts = [(path,) for path in self.groups["frozen"]]
        for paths in [*learner.init_parts(), *frozen_parts]:
            num_layers = specs[paths[0]].num_layers if learner.scope == "layer" else None
            yield InitPart(paths, num_layers)

    def make_init_function(self, given_paths: Collection[str]) -> InitFunction:
        """Return the function (key, paths, layer) -> the state's arrays for these parameters, not yet in host memory.

        Parameters in `given_paths` are zeros.
        """
        specs = {}
        for path, spec in flatten(self._model.parameter_specs()).items():
            # At least float32, so that a master copy holds the exact initial values before they are cast.
            if not spec.quantized:
                spec = replace(spec, dtype=jnp.promote_types(spec.dtype, "float32"))
            if path in given_paths:
                spec = replace(spec, initializer=jax.nn.initializers.zeros)
            specs[path] = spec

        def make(key: jax.Array, paths: Paths, layer: jax.Array | None = None) -> GroupedArrays:
            part_specs = unflatten({path: specs[path] for path in paths})
            precise = flatten(initialize(part_specs, key, layer))
            return self.build_arrays(precise, single_layer=layer is not None)

        return make

    def calibration(self) -> Callable[[TrainState, Nested, Nested, Nested], TrainState]:
        """Return the function (parameters and frozen weights, counters, buffers, batch) -> state.

        The state holds the weights that the model sets for this batch, with matching optimizer state and averages.
        """
        learner = self._learner
        layout = self._layout
        groups = self.groups
        model: Any = self._model

        def calibrate(weights: TrainState, counter: Nested, buffers: Nested, batch: Nested) -> TrainState:
            ctx = training_context(batch, counter, model, layout, "none")
            trainable = layout.fetch("parameter", weights.parameter)
            frozen = layout.fetch("frozen", weights.frozen)
            params = merge(trainable, frozen)
            calibrated_params = flatten(model.calibrate(params, ctx, buffers))
            params_by_group = {}
            for group in ("parameter", "frozen"):
                params_by_group[group] = {path: calibrated_params[path] for path in groups[group]}
            values_by_group = learner.init_part(params_by_group["parameter"]) | {"frozen": params_by_group["frozen"]}
            trees = {}
            for group, values in values_by_group.items():
                specs = groups[group]
                stored_values = {path: store_leaf(specs[path], x) for path, x in values.items()}
                trees[group] = unflatten_like(layout.specs[group], stored_values)
            return TrainState(**trees)

        return calibrate


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
        make_layer = partial(self._layer_values, key, paths, layers.start)
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


def check_calibration_dtypes(model: Chain) -> None:
    """Raise ValueError if a model that is calibrated on its first batch has a parameter narrower than 32 bits."""
    for path, spec in flatten(model.parameter_specs()).items():
        if spec.dtype.itemsize < 4:
            raise ValueError(
                f"{path} is {spec.dtype}; parameters calibrated on the first batch must be float32 (model.param_dtype)"
            )
