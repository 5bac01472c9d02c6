"""Program: an experiment on a mesh. The layout, and the compiled functions: init, step, evaluate.

The trainer's loop, a person's own loop, and whoever wants to know what a step needs all use the same object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from framework.devices import executables
from framework.devices.mesh import MeshShape
from framework.layers.base import Context, batch_specs
from framework.layers.remat import check_platform
from framework.layout import (
    Nested,
    StateLayout,
    TensorSpec,
    flatten,
    initialize,
    merge,
    move_to_host,
    store_leaf,
    unflatten,
)
from framework.learner.units import in_structure
from framework.program.ahead import FIRST_VALUES, Ahead, evaluation_of
from framework.program.experiment import Experiment
from framework.schedules import after_backward, in_backward, streamed
from framework.schedules.layerwise import schedule as layer_programs
from framework.schedules.layerwise import storage as parts
from framework.schedules.layerwise.programs import Compile, Compiled, Ledger, Programs
from framework.schedules.layerwise.schedule import LayerPrograms
from framework.schedules.step import (
    Metrics,
    State,
    evaluation_context,
    microbatches,
    training_context,
)

Arrays = dict[str, jax.Array]  # by the name of a batch's array, or by the path of a parameter
GroupedArrays = dict[str, Arrays]  # {group of the state: {path: array}}
Paths = tuple[str, ...]

# The builder of the training step, by (memory.update, memory.gradients). `layer_programs` is
# missing on purpose: its step is several compiled programs that Python calls, not one function
# (see `Program.layers`).
SCHEDULES = {
    ("after_backward", "device"): after_backward.build_step,
    ("streamed", "device"): streamed.build_step,
    ("streamed", "pinned_host"): streamed.build_step,
    ("in_backward", "device"): in_backward.build_step,
}


class Program:
    """An experiment on a device mesh: the layout of its state, and its compiled functions.

    Args:
        experiment: what to train.
        devices: the devices of the mesh; all devices of all processes by default.
        training: whether the step is to run; otherwise only what concerns the model is checked.

    Raises:
        ValueError: experiment and devices do not fit each other.
    """

    def __init__(
        self,
        experiment: Experiment,
        devices: Sequence[Any] | None = None,
        *,
        training: bool = True,
    ):
        self.experiment = experiment
        if devices is None:
            devices = jax.devices()
        self.mesh = experiment.mesh.build(devices)
        if training:
            experiment.check(self.mesh)
        else:
            experiment.model.check(self.mesh, experiment.data)
        experiment.compiler.check(self.mesh)
        # Whether a first batch decides first values (Salimans and Kingma 2016, arXiv 1602.07868).
        self.calibrates = training and experiment.model.calibrates
        if self.calibrates:
            self._check_calibrated_dtypes()
        self.compiler_options = experiment.compiler.options_for(self.mesh)
        jit_options = self.compiler_options or None
        self.jit = functools.partial(jax.jit, compiler_options=jit_options)
        # `whole` is the layout of checkpoints, which are the same for every schedule. `layout` is
        # that of the state in memory, where `memory.update = layer_programs` holds each layer of
        # the stack as arrays of its own.
        self.whole = StateLayout(experiment.state_specs(), self.mesh)
        self.layout = self.whole
        self.in_parts = training and experiment.memory.update == "layer_programs"
        if self.in_parts:
            layer_programs.check(experiment.learner, experiment.memory)
            self.layout = StateLayout(experiment.run_specs(), self.mesh)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.ahead = Ahead()

    def _check_calibrated_dtypes(self) -> None:
        """Raises ValueError: a parameter is narrower than 32 bits, in a model whose first batch decides values."""
        for path, spec in flatten(self.experiment.model.parameter_specs()).items():
            if spec.dtype.itemsize < 4:
                raise ValueError(
                    f"{path} is {spec.dtype}; what a first batch decides is to be float32 (model.param_dtype)"
                )

    # --- batches -----------------------------------------------------------------------------------------------------

    @cached_property
    def batch_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays of one global training batch, by name."""
        return batch_specs(self.experiment.data.arrays())

    @property
    def evaluation_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays of one global evaluation batch, by name."""
        return batch_specs(self.experiment.data.arrays(evaluation=True))

    @cached_property
    def batch_sharding(self) -> dict[str, NamedSharding]:
        """The sharding of each array of a batch, for training and evaluation."""
        return {name: self.layout.sharding(spec) for name, spec in self.evaluation_specs.items()}

    @cached_property
    def rows(self) -> np.ndarray:
        """int[R]: the rows of the global batch that this process's devices hold, in order."""
        return self.rows_of_processes[jax.process_index()]

    @cached_property
    def rows_of_processes(self) -> dict[int, np.ndarray]:
        """`rows` of every process that has devices of the mesh, by process index."""
        shape = self.batch_specs["weights"].shape
        all_rows = np.arange(shape[0])
        rows_by_process = dict[int, list[np.ndarray]]()
        indices = self.batch_sharding["weights"].devices_indices_map(shape)
        for device, index in indices.items():
            device_rows = all_rows[index[0]]
            rows_by_process.setdefault(device.process_index, []).append(device_rows)
        # Devices along the axes that do not split a batch hold the same rows, so a row may come up
        # several times.
        unique_rows = {}
        for process, rows in sorted(rows_by_process.items()):
            unique_rows[process] = np.unique(np.concatenate(rows))
        return unique_rows

    def put(self, local: dict[str, np.ndarray]) -> Arrays:
        """This process's rows of a batch (host arrays [R, ...]) as global arrays [B, ...]."""
        size = self.experiment.data.global_batch_size
        shardings = {name: self.batch_sharding[name] for name in local}
        if len(self.rows) == size:
            return jax.device_put(local, shardings)

        def shard(name: str, array: np.ndarray) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                # The index counts rows of the global batch, the host array has only those of this
                # process.
                global_rows = np.arange(size)[index[0]]
                local_rows = np.searchsorted(self.rows, global_rows)
                return array[(local_rows, *index[1:])]

            global_shape = (size, *array.shape[1:])
            return jax.make_array_from_callback(global_shape, shardings[name], piece)

        return {name: shard(name, array) for name, array in local.items()}

    # --- state -------------------------------------------------------------------------------------------------------

    def values_of(self, precise: Arrays, *, unit: bool) -> GroupedArrays:
        """Inside jit: all that the state holds of some parameters, {group: {path: array}}. The arrays are cast as the
        layout says, and are not moved to host memory yet.

        Args:
            precise: by path, float32 or wider; those of one of `learner.init_parts`, or a frozen one.
            unit: they are one layer's, without the leading axis.
        """
        groups = self._groups
        first_path = next(iter(precise))
        if first_path in groups["frozen"]:
            values_by_group = {"frozen": precise}
        else:
            values_by_group = self.experiment.learner.init_part(precise, unit=unit)
        if "gradient" in groups and "parameter" in values_by_group:
            values_by_group["gradient"] = jax.tree.map(jnp.zeros_like, values_by_group["parameter"])
        cast_values = {}
        for group, values in values_by_group.items():
            specs = groups[group]
            cast_values[group] = {path: x.astype(specs[path].dtype) for path, x in values.items()}
        return cast_values

    @cached_property
    def _groups(self) -> dict[str, dict[str, TensorSpec]]:
        """{group: {path: spec}} of the state with whole stacks."""
        return {name: flatten(tree) for name, tree in self.whole.specs.items()}

    def nested(self, flat: GroupedArrays) -> State:
        """{group: {path: array}} as the state's own tree."""
        return {name: in_structure(tree, flat[name]) for name, tree in self.layout.specs.items()}

    def _init_order(self) -> Iterator[tuple[Paths, int | None]]:
        """(paths of parameters that are made together, the number of layers that they are made for one by one). The
        number is None where an optimizer spans layers, or where the parameters are of no stack."""
        specs = flatten(self.experiment.model.parameter_specs())
        learner = self.experiment.learner
        frozen_parts = [(path,) for path in self._groups["frozen"]]
        for paths in [*learner.init_parts(), *frozen_parts]:
            yield paths, specs[paths[0]].num_layers if learner.scope == "unit" else None

    def _first_values(self, given_paths: Collection[str]) -> Callable[..., GroupedArrays]:
        """The function (key, paths, layer) -> what the state holds of these parameters, not moved to host memory yet.
        Parameters among `given_paths` are zeros."""
        specs = {}
        for path, spec in flatten(_uncast(self.experiment.model.parameter_specs())).items():
            if path in given_paths:
                spec = replace(spec, initializer=jax.nn.initializers.zeros)
            specs[path] = spec

        def make(key: jax.Array, paths: Paths, layer: jax.Array | None = None) -> GroupedArrays:
            part_specs = unflatten({path: specs[path] for path in paths})
            precise = flatten(initialize(part_specs, key, layer))
            return self.values_of(precise, unit=layer is not None)

        return make

    def init_function(self, seed: int, given_paths: Collection[str] = ()) -> Callable[[], State]:
        """The function that makes the first state, straight into the layout when jitted with its shardings.

        A stack is made a layer at a time, and what lives on the host goes there at once: nothing is held twice.
        Parameters among `given_paths` are zeros: the caller overwrites them.
        """
        groups = self._groups
        make = self._first_values(given_paths)

        def part(key: jax.Array, paths: Paths, layer: jax.Array | None = None) -> GroupedArrays:
            stored_values = {}
            for name, values in make(key, paths, layer).items():
                specs = groups[name]
                stored_values[name] = {path: store_leaf(specs[path], x) for path, x in values.items()}
            return stored_values

        def init() -> State:
            key, run_key = jax.random.split(jax.random.key(seed))
            flat: GroupedArrays = {name: {} for name in groups}
            part_values: GroupedArrays = {}
            for paths, num_layers in self._init_order():
                # The barrier makes each part wait for the previous one. Otherwise XLA may make
                # several at once, with float32 copies of all of them alive together.
                key, part_values = jax.lax.optimization_barrier((key, part_values))
                for name, values in part_values.items():
                    flat[name] |= values
                make_part = functools.partial(part, key, paths)
                if num_layers is None:
                    part_values = make_part()
                else:
                    part_values = jax.lax.map(make_part, jnp.arange(num_layers))
            for name, values in part_values.items():
                flat[name] |= values
            for name in ("buffer", "counter"):
                for path, spec in groups[name].items():
                    flat[name][path] = jnp.zeros(spec.shape, spec.dtype)
            flat["counter"]["rng"] = jax.random.key_data(run_key)
            return self.nested(flat)

        return init

    @cached_property
    def scratch_jit(self) -> Any:
        """The jitted function that makes the groups of the state that no checkpoint holds, as zeros."""
        specs = {name: tree for name, tree in self.layout.specs.items() if name not in self.layout.kept}
        zeros = lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)  # noqa: E731
        return jax.jit(zeros, out_shardings=self.layout.shardings(specs))

    def init_jit(self, seed: int | None = None, given_paths: Collection[str] = ()) -> Any:
        """`init_function`, jitted with the layout's shardings; the config's seed by default."""
        seed = self.experiment.trainer.seed if seed is None else seed
        return self.jit(self.init_function(seed, given_paths), out_shardings=self.layout.shardings())

    def init(self, seed: int | None = None, given: Collection[str] = ()) -> State:
        """The state at step 0.

        Args:
            seed: of the initialization; the config's seed by default.
            given: paths of parameters that are zeros, because the caller overwrites them.
        """
        if self.in_parts:
            init_seed = self.experiment.trainer.seed if seed is None else seed
            return self._init_parts(init_seed, given)
        compiled = None
        # The thread compiles the first values of the config's seed, with every parameter drawn.
        if not given and seed is None:
            compiled = self.ahead.program(FIRST_VALUES)
        if compiled is None:
            compiled = self.init_jit(seed, given)
        return compiled()

    def calibrated(self, state: State, batch: Arrays) -> State:
        """The first state with the values that the model gives its parameters for this batch, the run's first, and with
        optimizer state and averages that fit them. The state that was passed in is gone afterwards."""
        learner = self.experiment.learner
        layout = self.layout
        groups = self._groups
        model: Any = self.experiment.model

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
                trees[group] = in_structure(layout.specs[group], stored_values)
            return trees

        weights = {group: state[group] for group in ("parameter", "frozen")}
        derived_groups = ("optimizer", "ema")
        # Optimizer state and averages are made anew from the weights, so the old ones go before the
        # new ones are made.
        for leaf in jax.tree.leaves([state[group] for group in derived_groups]):
            leaf.delete()
        result_specs = {group: layout.specs[group] for group in (*weights, *derived_groups)}
        run = self.jit(calibrate, out_shardings=layout.shardings(result_specs), donate_argnums=0)
        return {**state, **run(weights, state["counter"], state["buffer"], batch)}

    @cached_property
    def _init_programs(self) -> Programs:
        return Programs(self.jit, self._compiled, self.layout)

    def rehearse_init(self, compile: Compile | None = None, given_paths: Collection[str] = ()) -> Ledger:
        """Compiles the programs that make the first state of a stack in parts, and counts the memory that they need.

        Args:
            compile: compiles in place of this program's compiler, for a machine that is not here.
            given_paths: of parameters that are zeros, because the caller overwrites them.
        """
        self._init_programs.compile = compile or self._compiled
        words = TensorSpec((2,), "uint32")
        number = TensorSpec((), "int32")
        return self._init_programs.rehearse(lambda *args: self._make_parts(given_paths, *args), words, number)

    def _init_parts(self, seed: int, given_paths: Collection[str]) -> State:
        """The state at step 0 of a stack in parts: the same values, by one program for each kind of leaf."""
        self.rehearse_init(given_paths=given_paths)
        # The keys go to the devices as their data: uint32[2] words each (threefry).
        keys = jax.random.split(jax.random.key(seed))
        key_words = np.asarray(jax.random.key_data(keys))
        host_arguments = (key_words[0], key_words[1], np.int32(0))
        words, run_words, number = jax.device_put(host_arguments, self.replicated)
        flat = self._make_parts(given_paths, words, number)
        for name in ("buffer", "counter"):
            for path, spec in flatten(self.layout.specs[name]).items():
                sharding = self.layout.sharding(spec)
                flat[name][path] = jnp.zeros(spec.shape, spec.dtype, device=sharding)
        flat["counter"]["rng"] = run_words
        return self.nested(flat)

    def _make_parts(self, given_paths: Collection[str], words: Any, number: Any) -> GroupedArrays:
        """{group: {path: array}} of all that is made of parameters.

        Args:
            given_paths: of parameters that are zeros.
            words: uint32[2], the data of the key.
            number: int32[], the number of the first layer: 0.
        """
        make = self._first_values(given_paths)
        specs = {name: flatten(tree) for name, tree in self.layout.specs.items()}
        flat: GroupedArrays = {name: {} for name in specs}
        for paths, num_layers in self._init_order():
            stacked = num_layers is not None
            layer = jnp.int32(0) if stacked else None
            key = jax.random.key(0)
            abstract = jax.eval_shape(lambda k, i, p=paths: make(k, p, i), key, layer)
            for index in range(num_layers or 1):
                layer_index = index if stacked else None
                places = {}
                for name, values in abstract.items():
                    places[name] = {path: specs[name][_path_in_state(path, layer_index)] for path in values}
                kinds = tuple(spec.memory_kind for spec in jax.tree.leaves(places))
                run = functools.partial(_placed_values, make, paths, places, stacked)
                # The number of the layer is an argument on the device, so all layers whose leaves
                # are in the same kind of memory share one program.
                layer_values, number = self._init_programs(
                    (paths, kinds, paths[0] in given_paths),
                    run,
                    words,
                    number,
                    donate=(1,),
                    out=(places, TensorSpec((), "int32")),
                )
                for name, values in layer_values.items():
                    flat[name] |= {_path_in_state(path, layer_index): x for path, x in values.items()}
            number = self._init_programs("zero", jnp.zeros_like, number, out=TensorSpec((), "int32"))
        return flat

    # --- training ----------------------------------------------------------------------------------------------------

    @cached_property
    def step_jit(self) -> Any:
        """The jitted training step: in and out shardings from the layout, the state donated."""
        experiment = self.experiment
        memory = experiment.memory
        build = SCHEDULES[memory.update, memory.gradients]
        platform = self.mesh.devices.flat[0].platform
        check_platform(memory.remat, platform)
        step = build(experiment.model, experiment.learner, self.layout, memory)
        # `batch_sharding` also has the arrays that only evaluation reads, which are no arguments of
        # the step.
        batch_sharding = {name: self.batch_sharding[name] for name in self.batch_specs}
        return self.jit(
            step,
            in_shardings=(self.layout.shardings(), batch_sharding),
            out_shardings=(self.layout.shardings(), self.replicated),
            donate_argnums=0,
        )

    @cached_property
    def traced_step(self) -> Any:
        """The step as jax traces it, before any state exists: has its jaxpr, and is lowered from here."""
        state = self.layout.abstract()
        batch = self.layout.abstract(self.batch_specs)
        return self.step_jit.trace(state, batch)

    @cached_property
    def compiled_step(self) -> Any:
        """The step compiled ahead of time."""
        lowered = self.traced_step.lower()
        return executables.compiled(lowered, self.compiler_options)

    @cached_property
    def layers(self) -> LayerPrograms:
        """The step of a stack in parts; its programs are compiled by `compile`."""
        experiment = self.experiment
        return LayerPrograms(
            experiment.language_model,
            experiment.learner,
            self.layout,
            experiment.memory,
            self.jit,
            self._compiled,
        )

    def _compiled(self, lowered: Any, hosted: executables.HostBytes) -> Compiled:
        """A lowered program compiled for the mesh, with its peak in bytes of one device."""
        run = executables.compiled(lowered, self.compiler_options)
        platform = self.mesh.devices.flat[0].platform
        peak = executables.peak_bytes(run.memory_analysis(), platform, hosted)
        return Compiled(run, peak)

    @cached_property
    def layers_ledger(self) -> Ledger:
        """The memory that a step of a stack in parts needs. Counting it compiles all programs of the step."""
        return self.layers.rehearse(self.layout.specs, self.batch_specs)

    def compile(self) -> None:
        """Compiles the step ahead of time."""
        # Both are cached properties that compile when they are first read.
        if self.in_parts:
            self.layers_ledger  # noqa: B018
        else:
            self.compiled_step  # noqa: B018

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics]:
        """One training step; the old state is gone afterwards."""
        if not self.in_parts:
            return self.compiled_step(state, batch)
        self.compile()
        return self.layers(state, batch)

    # --- what checkpoints hold ---------------------------------------------------------------------------------------

    def stored(self, state: State) -> State:
        """The part of a state that a checkpoint holds; stacks in parts are joined to whole ones, in host memory."""
        saved_groups = {group: state[group] for group in self.layout.kept}
        if not self.in_parts:
            return saved_groups
        return parts.joined(saved_groups, self.whole)

    @property
    def abstract_stored(self) -> Nested:
        """The abstract arrays that a checkpoint is read into."""
        # Stacks that are to be cut into parts are read into host memory.
        specs = parts.before_cut(self.whole) if self.in_parts else self.whole.kept
        return self.whole.abstract(specs)

    def restored(self, stored: State) -> State:
        """The state that a checkpoint's arrays make. `stored` is gone afterwards."""
        state = parts.cut(stored, self.layout) if self.in_parts else stored
        return {**state, **self.scratch_jit()}

    def in_one(self, state: State) -> State:
        """Weights, averages and buffers with whole stacks, for generation; the state is gone afterwards."""
        if not self.in_parts:
            return state
        model_state = {group: state[group] for group in ("parameter", "frozen", "ema", "buffer")}
        joined_state = parts.joined(model_state, self.whole)
        # The parts and the optimizer's state go before the whole stacks come to the devices, which
        # may not have room for both. Leaves outside of stacks are the same arrays in the joined
        # state, and stay.
        layer_parts = [groups.get(parts.STACK, {}) for groups in model_state.values()]
        for leaf in jax.tree.leaves(layer_parts + [state["optimizer"]]):
            leaf.delete()
        specs = {group: self.whole.specs[group] for group in model_state}
        return jax.device_put(joined_state, self.whole.shardings(specs))

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluation_context(self, batch: Nested) -> Context:
        """The context of everything that is no training: no dropout, sums instead of means."""
        return evaluation_context(batch, self.experiment.model, self.layout)

    @cached_property
    def evaluate_jit(self) -> Any:
        """The jitted evaluation of a batch: (parameters, frozen, buffers, batch) -> sums."""
        return self._evaluation("parameter")

    @cached_property
    def evaluate_averages_jit(self) -> Any:
        """The same with the averages of the trainable parameters."""
        return self._evaluation("ema")

    def _evaluation(self, group: str) -> Any:
        """The jitted evaluation with the weights of a group of the state, "parameter" or "ema"."""
        model = self.experiment.model
        num_microbatches = self.experiment.learner.accumulate
        places = model.stage_specs(self.layout.specs[group], self.layout.specs["frozen"])

        def sums(params: Nested, buffers: Nested, batch: Nested) -> Metrics:
            _, out = model.loss(params, self.evaluation_context(batch), buffers, places)
            return model.scores(out, batch)

        def evaluate(params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> Metrics:
            params = merge(params, frozen)
            if num_microbatches == 1:
                return sums(params, buffers, batch)
            # A batch that is trained on in parts would not fit in one piece here either.
            stacked_batches = microbatches(batch, num_microbatches, self.evaluation_context(batch))
            stacked_sums = jax.lax.map(lambda part: sums(params, buffers, part), stacked_batches)
            return jax.tree.map(jnp.sum, stacked_sums)

        return self.jit(evaluate, out_shardings=self.replicated)

    def evaluate(
        self,
        state: State,
        batch: Arrays,
        *,
        averaged: bool = False,
    ) -> Metrics:
        """Sums over a batch, those of the model's `scores`.

        Args:
            state: the training state; it stays.
            batch: global arrays [B, ...].
            averaged: use the moving averages of the trainable parameters.
        """
        group = "ema" if averaged else "parameter"
        if self.in_parts:
            weights = {"parameter": state[group], "frozen": state["frozen"]}
            return self.layers.evaluate(weights, state["buffer"], batch)
        evaluate = self.ahead.program(evaluation_of(group))
        if evaluate is None:
            evaluate = self.evaluate_averages_jit if averaged else self.evaluate_jit
        return evaluate(state[group], state["frozen"], state["buffer"], batch)

    def compile_evaluation(self, state: State) -> None:
        """Compiles the evaluation by evaluating a batch of zeros. Does nothing where a thread compiles it already."""
        if evaluation_of("parameter") in self.ahead:
            return
        num_rows = len(self.rows)
        batch = {}
        for name, spec in self.evaluation_specs.items():
            batch[name] = np.zeros((num_rows, *spec.shape[1:]), spec.dtype)
        weight_kinds = [False, True] if state["ema"] else [False]
        for averaged in weight_kinds:
            metrics = self.evaluate(state, self.put(batch), averaged=averaged)
            jax.block_until_ready(metrics)

    def weights(self, state: State, *, averaged: bool = False) -> Nested:
        """All parameters as the model takes them; no copies."""
        group = "ema" if averaged else "parameter"
        return merge(state[group], state["frozen"])


def _placed_values(
    make: Any,
    paths: Paths,
    places: Nested,
    stacked: bool,
    words: jax.Array,
    number: jax.Array,
) -> Any:
    """(values of one layer where they belong, the number of the next layer)."""
    key = jax.random.wrap_key_data(words)
    values = make(key, paths, number if stacked else None)

    def place(spec: TensorSpec, x: jax.Array) -> jax.Array:
        return store_leaf(spec, x.reshape(spec.shape))

    placed_values = jax.tree.map(place, places, values)
    return placed_values, number + 1


def _path_in_state(path: str, layer: int | None) -> str:
    """The path of a parameter's array in a state in parts; `layer` is None for a parameter of no stack."""
    if layer is None:
        return path
    return parts.part_path(path, layer)


def _uncast(specs: Nested) -> Nested:
    """Parameters are drawn in float32 (or wider) and cast afterwards, so that a master copy holds what was drawn."""

    def uncast(spec: Any) -> Any:
        if spec.quantized:
            return spec
        return replace(spec, dtype=jnp.promote_types(spec.dtype, "float32"))

    return jax.tree.map(uncast, specs)


def inference_program(
    experiment: Experiment,
    *,
    host_weights: bool,
    tell: Callable[[str], None],
) -> Program:
    """The experiment's program on all devices, for inference. A mesh that does not fit them becomes fsdp = -1.

    Args:
        experiment: its mesh may be replaced.
        host_weights: the stack's matrices are to live in host memory.
        tell: gets a message about another mesh.

    Raises:
        ValueError: the model does not fit the mesh.
    """
    try:
        experiment.mesh.build(jax.devices())
    except ValueError as error:
        tell(f"{error}; using mesh.fsdp = {jax.device_count()}")
        experiment.mesh = MeshShape(fsdp=-1)
    program = Program(experiment, training=False)
    if host_weights:
        specs = {group: dict(tree) for group, tree in program.layout.specs.items()}
        for group in ("parameter", "frozen", "ema"):
            tree = specs[group]
            if "stack" in tree:
                # Small matrices move too: the flag promises a stack in host memory.
                tree["stack"] = move_to_host(tree["stack"], "pinned_host", stacked=True, min_bytes=0)
        program.layout = StateLayout(specs, program.mesh)
    return program
