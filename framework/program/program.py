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
from framework.schedules.step import Metrics, State, evaluation_context, microbatches, training_context

SCHEDULES = {  # (memory.update, memory.gradients)
    ("after_backward", "device"): after_backward.build_step,
    ("streamed", "device"): streamed.build_step,
    ("streamed", "pinned_host"): streamed.build_step,
    ("in_backward", "device"): in_backward.build_step,
}


class Program:
    """What runs on the devices.

    Args:
        experiment: what to train.
        devices: where; all devices of all processes by default.
        training: whether the step is to run; otherwise only what concerns the model is checked.

    Raises:
        ValueError: experiment and devices do not fit each other.
    """

    def __init__(self, experiment: Experiment, devices: Sequence[Any] | None = None, *, training: bool = True):
        self.experiment = experiment
        self.mesh = experiment.mesh.build(jax.devices() if devices is None else devices)
        if training:
            experiment.check(self.mesh)
        else:
            experiment.model.check(self.mesh, experiment.data)
        experiment.compiler.check(self.mesh)
        # Whether a first batch decides first values (Salimans and Kingma 2016, arXiv 1602.07868).
        self.calibrates = training and experiment.model.calibrates
        for path, spec in flatten(experiment.model.parameter_specs()).items() if self.calibrates else ():
            if spec.dtype.itemsize < 4:
                raise ValueError(
                    f"{path} is {spec.dtype}; what a first batch decides is to be float32 (model.param_dtype)"
                )
        self.compiler_options = experiment.compiler.options_for(self.mesh)
        self.jit = functools.partial(jax.jit, compiler_options=self.compiler_options or None)
        # What checkpoints hold; and what the state is, where the stack may be in parts.
        self.layout = self.whole = StateLayout(experiment.state_specs(), self.mesh)
        self.in_parts = training and experiment.memory.update == "layer_programs"
        if self.in_parts:
            layer_programs.check(experiment.learner, experiment.memory)
            self.layout = StateLayout(experiment.run_specs(), self.mesh)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.ahead = Ahead()

    # --- batches -----------------------------------------------------------------------------------------------------

    @cached_property
    def batch_specs(self) -> dict[str, TensorSpec]:
        """The arrays of one global batch."""
        return batch_specs(self.experiment.data.arrays())

    @property
    def evaluation_specs(self) -> dict[str, TensorSpec]:
        """Those of a batch of evaluation."""
        return batch_specs(self.experiment.data.arrays(evaluation=True))

    @cached_property
    def batch_sharding(self) -> dict[str, NamedSharding]:
        """The sharding of each array of a batch."""
        return {name: self.layout.sharding(spec) for name, spec in self.evaluation_specs.items()}

    @cached_property
    def rows(self) -> np.ndarray:
        """int[R]: the rows of the global batch that this process's devices hold, in order."""
        return self.rows_of_processes[jax.process_index()]

    @cached_property
    def rows_of_processes(self) -> dict[int, np.ndarray]:
        """`rows` of every process that has devices of the mesh."""
        shape, found = self.batch_specs["weights"].shape, dict[int, list[np.ndarray]]()
        for device, index in self.batch_sharding["weights"].devices_indices_map(shape).items():
            found.setdefault(device.process_index, []).append(np.arange(shape[0])[index[0]])
        return {process: np.unique(np.concatenate(rows)) for process, rows in sorted(found.items())}

    def put(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows of a batch (host arrays [R, ...]) as global arrays [B, ...]."""
        size, shardings = self.experiment.data.global_batch_size, {name: self.batch_sharding[name] for name in local}
        if len(self.rows) == size:
            return jax.device_put(local, shardings)

        def shard(name: str, array: np.ndarray) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                rows = np.searchsorted(self.rows, np.arange(size)[index[0]])
                return array[(rows, *index[1:])]

            return jax.make_array_from_callback((size, *array.shape[1:]), shardings[name], piece)

        return {name: shard(name, array) for name, array in local.items()}

    # --- state -------------------------------------------------------------------------------------------------------

    def values_of(self, precise: dict[str, jax.Array], *, unit: bool) -> dict[str, dict[str, jax.Array]]:
        """Inside jit: all that the state holds of some parameters, {group: {path: array}}, cast as the layout says, and
        not moved yet.

        Args:
            precise: by path, float32 or wider; those of one of `learner.init_parts`, or a frozen one.
            unit: they are one layer's, without the leading axis.
        """
        groups = self._groups
        if next(iter(precise)) in groups["frozen"]:
            made = {"frozen": precise}
        else:
            made = self.experiment.learner.init_part(precise, unit=unit)
        if "gradient" in groups and "parameter" in made:
            made["gradient"] = jax.tree.map(jnp.zeros_like, made["parameter"])
        return {
            name: {path: x.astype(groups[name][path].dtype) for path, x in own.items()} for name, own in made.items()
        }

    @cached_property
    def _groups(self) -> dict[str, dict[str, TensorSpec]]:
        return {name: flatten(tree) for name, tree in self.whole.specs.items()}

    def nested(self, flat: dict[str, dict[str, jax.Array]]) -> State:
        """{group: {path: array}} as the state's own tree."""
        return {name: in_structure(tree, flat[name]) for name, tree in self.layout.specs.items()}

    def _init_order(self) -> Iterator[tuple[tuple[str, ...], int | None]]:
        """Paths of parameters that are made together, and for how many layers of a stack."""
        specs, learner = flatten(self.experiment.model.parameter_specs()), self.experiment.learner
        for paths in [*learner.init_parts(), *((path,) for path in self._groups["frozen"])]:
            yield paths, specs[paths[0]].num_layers if learner.scope == "unit" else None

    def _first_values(self, given: Collection[str]) -> Callable[..., dict[str, Any]]:
        """(key, paths, layer) -> what the state holds of these parameters, not moved; `given` ones are zeros."""
        specs = flatten(_uncast(self.experiment.model.parameter_specs()))
        specs = {p: replace(s, initializer=jax.nn.initializers.zeros) if p in given else s for p, s in specs.items()}

        def make(key: jax.Array, paths: tuple[str, ...], layer: jax.Array | None = None) -> dict[str, Any]:
            precise = flatten(initialize(unflatten({path: specs[path] for path in paths}), key, layer))
            return self.values_of(precise, unit=layer is not None)

        return make

    def init_function(self, seed: int, given: Collection[str] = ()) -> Callable[[], State]:
        """The function that makes the first state, straight into the layout when jitted with its shardings.

        A stack is made a layer at a time, and what lives on the host goes there at once: nothing is held twice.
        Parameters that are `given` are zeros: who gives them overwrites them.
        """
        groups, make = self._groups, self._first_values(given)

        def part(key: jax.Array, paths: tuple[str, ...], layer: jax.Array | None = None) -> dict[str, Any]:
            made = make(key, paths, layer)
            return {name: {p: store_leaf(groups[name][p], x) for p, x in own.items()} for name, own in made.items()}

        def init() -> State:
            key, run_key = jax.random.split(jax.random.key(seed))
            flat: dict[str, dict[str, Any]] = {name: {} for name in groups}
            made: dict[str, Any] = {}
            for paths, layers in self._init_order():
                # One after the other: many at once would be many float32 copies at once.
                key, made = jax.lax.optimization_barrier((key, made))
                for name, own in made.items():
                    flat[name] |= own
                one = functools.partial(part, key, paths)
                made = one() if layers is None else jax.lax.map(one, jnp.arange(layers))
            for name, own in made.items():
                flat[name] |= own
            for name in ("buffer", "counter"):
                flat[name] = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in groups[name].items()}
            flat["counter"]["rng"] = jax.random.key_data(run_key)
            return self.nested(flat)

        return init

    @cached_property
    def scratch_jit(self) -> Any:
        """The groups of the state that no checkpoint holds, as zeros."""
        specs = {name: tree for name, tree in self.layout.specs.items() if name not in self.layout.kept}
        zeros = lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)  # noqa: E731
        return jax.jit(zeros, out_shardings=self.layout.shardings(specs))

    def init_jit(self, seed: int | None = None, given: Collection[str] = ()) -> Any:
        """`init_function`, jitted with the layout's shardings; the config's seed by default."""
        seed = self.experiment.trainer.seed if seed is None else seed
        return self.jit(self.init_function(seed, given), out_shardings=self.layout.shardings())

    def init(self, seed: int | None = None, given: Collection[str] = ()) -> State:
        """The state at step 0."""
        if self.in_parts:
            return self._init_parts(self.experiment.trainer.seed if seed is None else seed, given)
        compiled = None if given or seed is not None else self.ahead.program(FIRST_VALUES)
        return compiled() if compiled is not None else self.init_jit(seed, given)()

    def calibrated(self, state: State, batch: dict[str, jax.Array]) -> State:
        """The first state with the values that the model gives its parameters for this batch, the run's first; with all
        that the state keeps of them. The given one is gone afterwards."""
        learner, layout, groups = self.experiment.learner, self.layout, self._groups
        model: Any = self.experiment.model

        def calibrate(weights: Nested, counter: Nested, buffers: Nested, batch: Nested) -> Nested:
            ctx = training_context(batch, counter, model, layout, "none")
            params = merge(layout.fetch("parameter", weights["parameter"]), layout.fetch("frozen", weights["frozen"]))
            found = flatten(model.calibrate(params, ctx, buffers))
            own = {group: {path: found[path] for path in groups[group]} for group in weights}
            made = learner.init_part(own["parameter"]) | {"frozen": own["frozen"]}
            return {
                group: in_structure(layout.specs[group], {p: store_leaf(groups[group][p], x) for p, x in flat.items()})
                for group, flat in made.items()
            }

        weights = {group: state[group] for group in ("parameter", "frozen")}
        made = {group: layout.specs[group] for group in (*weights, "optimizer", "ema")}
        for leaf in jax.tree.leaves([state[group] for group in made if group not in weights]):
            leaf.delete()
        run = self.jit(calibrate, out_shardings=layout.shardings(made), donate_argnums=0)
        return {**state, **run(weights, state["counter"], state["buffer"], batch)}

    @cached_property
    def _init_programs(self) -> Programs:
        return Programs(self.jit, self._compiled, self.layout)

    def rehearse_init(self, compile: Compile | None = None, given: Collection[str] = ()) -> Ledger:
        """Compiles what makes the first state of a stack in parts; what that needs."""
        self._init_programs.compile = compile or self._compiled
        words, number = TensorSpec((2,), "uint32"), TensorSpec((), "int32")
        return self._init_programs.rehearse(lambda *args: self._make_parts(given, *args), words, number)

    def _init_parts(self, seed: int, given: Collection[str]) -> State:
        """The same values for a stack in parts, by one program for each kind of leaf."""
        self.rehearse_init(given=given)
        words = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(seed))))
        words, run_words, number = jax.device_put((words[0], words[1], np.int32(0)), self.replicated)
        flat = self._make_parts(given, words, number)
        for name in ("buffer", "counter"):
            for path, spec in flatten(self.layout.specs[name]).items():
                flat[name][path] = jnp.zeros(spec.shape, spec.dtype, device=self.layout.sharding(spec))
        flat["counter"]["rng"] = run_words
        return self.nested(flat)

    def _make_parts(self, given: Collection[str], words: Any, number: Any) -> dict[str, dict[str, Any]]:
        """{group: {path: array}} of all that is made of parameters; `words` are a key's data, `number` is 0."""
        make, specs = self._first_values(given), {name: flatten(tree) for name, tree in self.layout.specs.items()}
        flat: dict[str, dict[str, Any]] = {name: {} for name in specs}
        for paths, layers in self._init_order():
            layer = None if layers is None else jnp.int32(0)
            abstract = jax.eval_shape(lambda k, i, p=paths: make(k, p, i), jax.random.key(0), layer)
            for index in range(layers or 1):

                def at(path: str, index: int | None = None if layers is None else index) -> str:
                    return path if index is None else parts.part_path(path, index)

                places = {name: {path: specs[name][at(path)] for path in own} for name, own in abstract.items()}
                kinds = tuple(spec.memory_kind for spec in jax.tree.leaves(places))
                run = functools.partial(_placed_values, make, paths, places, layers is not None)
                made, number = self._init_programs(
                    (paths, kinds, paths[0] in given),
                    run,
                    words,
                    number,
                    donate=(1,),
                    out=(places, TensorSpec((), "int32")),
                )
                for name, own in made.items():
                    flat[name] |= {at(path): x for path, x in own.items()}
            number = self._init_programs("zero", jnp.zeros_like, number, out=TensorSpec((), "int32"))
        return flat

    # --- training ----------------------------------------------------------------------------------------------------

    @cached_property
    def step_jit(self) -> Any:
        """The jitted training step: in and out shardings from the layout, the state donated."""
        experiment = self.experiment
        build = SCHEDULES[experiment.memory.update, experiment.memory.gradients]
        check_platform(experiment.memory.remat, self.mesh.devices.flat[0].platform)
        step = build(experiment.model, experiment.learner, self.layout, experiment.memory)
        return self.jit(
            step,
            in_shardings=(self.layout.shardings(), {name: self.batch_sharding[name] for name in self.batch_specs}),
            out_shardings=(self.layout.shardings(), self.replicated),
            donate_argnums=0,
        )

    @cached_property
    def traced_step(self) -> Any:
        """The step as jax traces it, before any state exists: has its jaxpr, and is lowered from here."""
        return self.step_jit.trace(self.layout.abstract(), self.layout.abstract(self.batch_specs))

    @cached_property
    def compiled_step(self) -> Any:
        """The step compiled ahead of time."""
        return executables.compiled(self.traced_step.lower(), self.compiler_options)

    @cached_property
    def layers(self) -> LayerPrograms:
        """The step of a stack in parts; its programs are compiled by `compile`."""
        experiment = self.experiment
        return LayerPrograms(
            experiment.language_model, experiment.learner, self.layout, experiment.memory, self.jit, self._compiled
        )

    def _compiled(self, lowered: Any, hosted: executables.HostBytes) -> Compiled:
        run = executables.compiled(lowered, self.compiler_options)
        platform = self.mesh.devices.flat[0].platform
        return Compiled(run, executables.peak_bytes(run.memory_analysis(), platform, hosted))

    @cached_property
    def layers_ledger(self) -> Ledger:
        """What a step of a stack in parts needs; all its programs are compiled then."""
        return self.layers.rehearse(self.layout.specs, self.batch_specs)

    def compile(self) -> None:
        """Compiles the step ahead of time."""
        self.layers_ledger if self.in_parts else self.compiled_step  # noqa: B018

    def step(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        """One training step; the old state is gone afterwards."""
        if not self.in_parts:
            return self.compiled_step(state, batch)
        self.compile()
        return self.layers(state, batch)

    # --- what checkpoints hold ---------------------------------------------------------------------------------------

    def stored(self, state: State) -> State:
        """What a checkpoint holds of a state; stacks in parts as whole ones, in host memory."""
        kept = {group: state[group] for group in self.layout.kept}
        return parts.joined(kept, self.whole) if self.in_parts else kept

    @property
    def abstract_stored(self) -> Nested:
        """What a checkpoint is read into."""
        return self.whole.abstract(parts.before_cut(self.whole) if self.in_parts else self.whole.kept)

    def restored(self, stored: State) -> State:
        """The state, of what was read, which is gone afterwards."""
        state = parts.cut(stored, self.layout) if self.in_parts else stored
        return {**state, **self.scratch_jit()}

    def in_one(self, state: State) -> State:
        """Weights, averages and buffers with whole stacks, for generation; the state is gone afterwards."""
        if not self.in_parts:
            return state
        kept = {group: state[group] for group in ("parameter", "frozen", "ema", "buffer")}
        whole = parts.joined(kept, self.whole)
        for leaf in jax.tree.leaves([kept[group].get(parts.STACK, {}) for group in kept] + [state["optimizer"]]):
            leaf.delete()
        specs = {group: self.whole.specs[group] for group in kept}
        return jax.device_put(whole, self.whole.shardings(specs))

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
        model, count = self.experiment.model, self.experiment.learner.accumulate
        places = model.stage_specs(self.layout.specs[group], self.layout.specs["frozen"])

        def sums(params: Nested, buffers: Nested, batch: Nested) -> Metrics:
            _, out = model.loss(params, self.evaluation_context(batch), buffers, places)
            return model.scores(out, batch)

        def evaluate(params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> Metrics:
            params = merge(params, frozen)
            if count == 1:
                return sums(params, buffers, batch)
            # A batch that is trained on in parts would not fit in one piece here either.
            parts = microbatches(batch, count, self.evaluation_context(batch))
            return jax.tree.map(jnp.sum, jax.lax.map(lambda part: sums(params, buffers, part), parts))

        return self.jit(evaluate, out_shardings=self.replicated)

    def evaluate(self, state: State, batch: dict[str, jax.Array], *, averaged: bool = False) -> Metrics:
        """Sums over a batch, those of the model's `scores`.

        Args:
            state: the training state; it stays.
            batch: global arrays.
            averaged: use the moving averages of the trainable parameters.
        """
        if self.in_parts:
            weights = {"parameter": state["ema" if averaged else "parameter"], "frozen": state["frozen"]}
            return self.layers.evaluate(weights, state["buffer"], batch)
        group = "ema" if averaged else "parameter"
        evaluate = self.ahead.program(evaluation_of(group))
        if evaluate is None:
            evaluate = self.evaluate_averages_jit if averaged else self.evaluate_jit
        return evaluate(state[group], state["frozen"], state["buffer"], batch)

    def compile_evaluation(self, state: State) -> None:
        """Has evaluation compiled, by a batch of nothing; where a thread does it, nobody waits for that yet."""
        if evaluation_of("parameter") in self.ahead:
            return
        specs = self.evaluation_specs
        rows = len(self.rows)
        batch = {name: np.zeros((rows, *spec.shape[1:]), spec.dtype) for name, spec in specs.items()}
        for averaged in [False, True] if state["ema"] else [False]:
            jax.block_until_ready(self.evaluate(state, self.put(batch), averaged=averaged))

    def weights(self, state: State, *, averaged: bool = False) -> Nested:
        """All parameters as the model takes them; no copies."""
        return merge(state["ema" if averaged else "parameter"], state["frozen"])


def _placed_values(make: Any, paths: Any, places: Nested, stacked: bool, words: jax.Array, number: jax.Array) -> Any:
    """(values of one layer where they belong, the number of the next layer)."""
    values = make(jax.random.wrap_key_data(words), paths, number if stacked else None)
    return jax.tree.map(lambda spec, x: store_leaf(spec, x.reshape(spec.shape)), places, values), number + 1


def _uncast(specs: Nested) -> Nested:
    """Parameters are drawn in float32 (or wider) and cast afterwards, so that a master copy holds what was drawn."""
    return jax.tree.map(lambda s: s if s.quantized else replace(s, dtype=jnp.promote_types(s.dtype, "float32")), specs)


def inference_program(experiment: Experiment, *, host_weights: bool, tell: Callable[[str], None]) -> Program:
    """The experiment on all devices, to be asked and not trained. A mesh that does not fit them becomes fsdp = -1.

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
        for tree in (specs[group] for group in ("parameter", "frozen", "ema") if "stack" in specs[group]):
            tree["stack"] = move_to_host(tree["stack"], "pinned_host", stacked=True, min_bytes=0)
        program.layout = StateLayout(specs, program.mesh)
    return program
