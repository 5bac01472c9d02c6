"""Initialization of the state: random by a seed, and calibrated on a first batch if the model requests it.

These functions are meant to be jitted. `JitStep.init_jit` jits `StateInitializer.init` into the layout of the state.
`PerLayerStep.init` jits `StateInitializer.init_params` once for each kind of leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import (
    GROUPS,
    Nested,
    ParameterSpec,
    StateLayout,
    TensorSpec,
    TrainState,
    flatten,
    initialize,
    merge,
    store_leaf,
    unflatten,
)
from plimsoll.framework.learner.group_optimizer import unflatten_like
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.stack_layout import StackParts
from plimsoll.framework.schedules.step import training_context

Arrays = dict[str, jax.Array]  # by the path of a parameter
GroupedArrays = dict[str, Arrays]  # {group of the state: {path: array}}
Paths = tuple[str, ...]


@dataclass(frozen=True)
class InitPart:
    """Parameters that are initialized together.

    Attributes:
        paths: paths of the parameters.
        layer_ranges: layers that each leaf of the state holds, in order; they are initialized one by one. [None] if
            all values are initialized together: an optimizer spans layers, or the parameters are not in a stack.
    """

    paths: Paths
    layer_ranges: list[range] | list[None]


class StateInitializer:
    """Initializes the values of a state at step 0.

    `init` goes through the parts of the model. `init_params` initializes a part's parameters by their specs,
    `build_arrays` adds their optimizer state and averages, and `_init_layer` moves all of them to their memory.

    Args:
        model: model whose parameters are initialized.
        learner: learner that creates the optimizer state and averages of the parameters.
        checkpoint_layout: layout with whole stacks.
        layout: layout of the running state, where a stack may be a list of layers.
        stack_parts: split of the stacks in the running state.

    Attributes:
        groups: specs of the state, with all layers of a stack in one array: {group: {path: spec}}.
    """

    def __init__(
        self,
        model: Chain,
        learner: Learner,
        checkpoint_layout: StateLayout,
        layout: StateLayout,
        stack_parts: StackParts,
    ):
        self._model = model
        self._parameter_specs: dict[str, ParameterSpec] = flatten(model.parameter_specs())
        self._learner = learner
        self._layout = layout
        self._stack_parts = stack_parts
        self._specs_in_state = {name: flatten(tree) for name, tree in layout.specs.items()}
        self.groups = {name: flatten(tree) for name, tree in checkpoint_layout.specs.items()}

    def init(self, seed: int, given_paths: Collection[str]) -> TrainState:
        """Return the state at step 0, each leaf in its memory. For use inside jit.

        A stack is initialized layer by layer, and offloaded leaves move to host memory immediately, so nothing is
        held twice.

        Args:
            seed: seed of the initialization.
            given_paths: paths of parameters to fill with zeros, because the caller overwrites them.
        """
        key, run_key = jax.random.split(jax.random.key(seed))
        flat: GroupedArrays = {name: {} for name in GROUPS}
        stored_values: GroupedArrays = {}
        for part in self.init_parts():
            for layers in part.layer_ranges:
                # The barrier makes each part wait for the previous one. Otherwise XLA may compute several at once,
                # with float32 copies of all of them alive at the same time.
                key, stored_values = jax.lax.optimization_barrier((key, stored_values))
                for name, values in stored_values.items():
                    flat[name] |= values
                init_layer = partial(self._init_layer, key, part.paths, given_paths, layers)
                if layers is None:
                    stored_values = init_layer(None)
                else:
                    stored_values = jax.lax.map(init_layer, jnp.arange(layers.start, layers.stop))
        for name, values in stored_values.items():
            flat[name] |= values
        for name in ("buffer", "counter", "pending"):
            for path, spec in self._specs_in_state[name].items():
                flat[name][path] = jnp.zeros(spec.shape, spec.dtype)
        flat["counter"]["rng"] = jax.random.key_data(run_key)
        return self.to_state_tree(flat)

    def init_parts(self) -> Iterator[InitPart]:
        """Yield all parameters in initialization order."""
        learner = self._learner
        frozen_parts = [(path,) for path in self.groups["frozen"]]
        for paths in [*learner.init_parts(), *frozen_parts]:
            num_layers = self._parameter_specs[paths[0]].num_layers
            if num_layers is None or learner.scope != "layer":
                yield InitPart(paths, [None])
                continue
            stack_parts = self._stack_parts.list_parts(paths[0].split("/", 1)[0])
            layer_ranges = [range(part.first, part.first + part.count) for part in stack_parts]
            yield InitPart(paths, layer_ranges or [range(num_layers)])

    def _init_layer(
        self, key: jax.Array, paths: Paths, given_paths: Collection[str], layers: range | None, layer: jax.Array | None
    ) -> GroupedArrays:
        """Return {group: {path in the state: array}} for some parameters, or a layer of them, each in its memory.

        Args:
            key, paths, given_paths, layer: see `init_params`.
            layers: layers of the leaves of the state that hold `layer`.
        """
        stored_values: GroupedArrays = {}
        for group, values in self.init_params(key, paths, layer, given_paths).items():
            stored_values[group] = {}
            for path, x in values.items():
                path_in_state, spec = self.find_leaf(group, path, layers)
                if spec is not None:
                    stored_values[group][path_in_state] = store_leaf(spec, x)
        return stored_values

    def init_params(
        self, key: jax.Array, paths: Paths, layer: jax.Array | None, given_paths: Collection[str]
    ) -> GroupedArrays:
        """Return the state's arrays for some parameters, not yet in host memory. For use inside jit.

        Args:
            key: key of the initialization.
            paths: paths of the parameters.
            layer: int32[], the only layer to initialize of stacked parameters; None initializes them as a whole.
            given_paths: paths of parameters that are zeros.
        """
        part_specs = {}
        for path in paths:
            spec = self._parameter_specs[path]
            # At least float32, so that a master copy holds the exact initial values before they are cast.
            if not spec.quantized:
                spec = replace(spec, dtype=jnp.promote_types(spec.dtype, "float32"))
            if path in given_paths:
                spec = replace(spec, initializer=jax.nn.initializers.zeros)
            part_specs[path] = spec
        precise = flatten(initialize(unflatten(part_specs), key, layer))
        return self.build_arrays(precise, single_layer=layer is not None)

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
        for group, source in (("spare", "optimizer"), ("spare_ema", "ema")):
            if groups[group] and source in values_by_group:
                offloaded = {path: x for path, x in values_by_group[source].items() if path in groups[group]}
                values_by_group[group] = jax.tree.map(jnp.zeros_like, offloaded)
        cast_values = {}
        for group, values in values_by_group.items():
            specs = groups[group]
            cast_values[group] = {path: x.astype(specs[path].dtype) for path, x in values.items()}
        return cast_values

    def find_leaf(self, group: str, path: str, layers: range | None) -> tuple[str, TensorSpec | None]:
        """Find the leaf of the running state that holds some layers of a leaf of whole stacks.

        Args:
            group: group of the state.
            path: path of the leaf of whole stacks.
            layers: the layers; see `InitPart.layer_ranges`.

        Returns:
            (path in the state, spec). The spec is None for gradients that stay on the device: they are not part of the
            state.
        """
        path_in_state = path if layers is None else self._stack_parts.place(path, layers.start)[0]
        return path_in_state, self._specs_in_state[group].get(path_in_state)

    def to_state_tree(self, flat: GroupedArrays) -> TrainState:
        """Arrange {group: {path: array}} as the tree of the running state."""
        return TrainState(**{name: unflatten_like(tree, flat[name]) for name, tree in self._layout.specs.items()})

    def calibrate(self, weights: TrainState, counter: Nested, buffers: Nested, batch: Nested) -> TrainState:
        """Return the weights that the model sets for a batch, with matching optimizer state and averages.

        For use inside jit.

        Args:
            weights: parameters and frozen weights.
            counter, buffers: these groups of the state.
            batch: the first batch of the run.
        """
        layout = self._layout
        model: Any = self._model
        ctx = training_context(batch, counter, model, layout, "none")
        trainable = layout.fetch("parameter", weights.parameter)
        frozen = layout.fetch("frozen", weights.frozen)
        params = merge(trainable, frozen)
        calibrated_params = flatten(model.calibrate(params, ctx, buffers))
        params_by_group = {}
        for group in ("parameter", "frozen"):
            params_by_group[group] = {path: calibrated_params[path] for path in self.groups[group]}
        values_by_group = self._learner.init_part(params_by_group["parameter"])
        values_by_group["frozen"] = params_by_group["frozen"]
        trees = {}
        for group, values in values_by_group.items():
            specs = self.groups[group]
            stored_values = {path: store_leaf(specs[path], x) for path, x in values.items()}
            trees[group] = unflatten_like(layout.specs[group], stored_values)
        return TrainState(**trees)
