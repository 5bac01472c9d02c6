"""Initialization of the state: random by a seed, and calibrated on a first batch if the model requests it.

These functions are meant to be jitted. `framework.program.backend` jits them into the layout of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, flatten, initialize, merge, store_leaf, unflatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.state import unflatten_like
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.step import State, training_context

Arrays = dict[str, jax.Array]  # by the path of a parameter
GroupedArrays = dict[str, Arrays]  # {group of the state: {path: array}}
Paths = tuple[str, ...]
# A function (key, paths, layer or None) -> the state's arrays for the parameters at these paths.
InitFunction = Callable[..., GroupedArrays]


class InitPart(NamedTuple):
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

    def to_state_tree(self, flat: GroupedArrays) -> State:
        """Arrange {group: {path: array}} as the tree of the running state."""
        return {name: unflatten_like(tree, flat[name]) for name, tree in self._layout.specs.items()}

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
        if "gradient" in groups and "parameter" in values_by_group:
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
        for path, spec in flatten(_uncast(self._model.parameter_specs())).items():
            if path in given_paths:
                spec = replace(spec, initializer=jax.nn.initializers.zeros)
            specs[path] = spec

        def make(key: jax.Array, paths: Paths, layer: jax.Array | None = None) -> GroupedArrays:
            part_specs = unflatten({path: specs[path] for path in paths})
            precise = flatten(initialize(part_specs, key, layer))
            return self.build_arrays(precise, single_layer=layer is not None)

        return make

    def calibration(self) -> Callable[[Nested, Nested, Nested, Nested], Nested]:
        """Return the function (weights by group, counters, buffers, batch) -> {group: tree}.

        The trees hold the weights that the model sets for this batch, with matching optimizer state and averages.
        """
        learner = self._learner
        layout = self._layout
        groups = self.groups
        model: Any = self._model

        def calibrate(weights: Nested, counter: Nested, buffers: Nested, batch: Nested) -> Nested:
            ctx = training_context(batch, counter, model, layout, "none")
            trainable = layout.fetch("parameter", weights["parameter"])
            frozen = layout.fetch("frozen", weights["frozen"])
            params = merge(trainable, frozen)
            calibrated_params = flatten(model.calibrate(params, ctx, buffers))
            params_by_group = {}
            for group in weights:
                params_by_group[group] = {path: calibrated_params[path] for path in groups[group]}
            values_by_group = learner.init_part(params_by_group["parameter"]) | {"frozen": params_by_group["frozen"]}
            trees = {}
            for group, values in values_by_group.items():
                specs = groups[group]
                stored_values = {path: store_leaf(specs[path], x) for path, x in values.items()}
                trees[group] = unflatten_like(layout.specs[group], stored_values)
            return trees

        return calibrate


def check_calibration_dtypes(model: Chain) -> None:
    """Raise ValueError if a model that is calibrated on its first batch has a parameter narrower than 32 bits."""
    for path, spec in flatten(model.parameter_specs()).items():
        if spec.dtype.itemsize < 4:
            raise ValueError(
                f"{path} is {spec.dtype}; parameters calibrated on the first batch must be float32 (model.param_dtype)"
            )


def _uncast(specs: Nested) -> Nested:
    """Widen dtypes to at least float32, so that a master copy holds the exact initial values before they are cast."""

    def uncast(spec: Any) -> Any:
        if spec.quantized:
            return spec
        return replace(spec, dtype=jnp.promote_types(spec.dtype, "float32"))

    return jax.tree.map(uncast, specs)
