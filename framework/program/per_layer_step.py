"""The backend of memory.update = layer_programs: a step runs many small programs, layer by layer.

The running state stores each layer of the stack as separate arrays. Checkpoints hold whole stacks, so layers are
stacked when saving and split again when restoring. `framework.schedules.layerwise` has the programs of a step and of an
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from plimsoll.framework.layout import GROUPS, Nested, StateLayout, TensorSpec, TrainState, flatten, merge, store_leaf
from plimsoll.framework.program.backend import StepBackend
from plimsoll.framework.program.compile_thread import CompileThread
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.initializer import GroupedArrays, Paths
from plimsoll.framework.program.rows import Batch, BatchRows
from plimsoll.framework.schedules.backward_state import Weights
from plimsoll.framework.schedules.layerwise import schedule
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker, Programs
from plimsoll.framework.schedules.layerwise.schedule import LayerPrograms
from plimsoll.framework.schedules.step import Metrics, evaluation_context
from plimsoll.framework.terminal.phases import phase


class PerLayerStep(StepBackend):
    """Runs a step as small programs that Python calls layer by layer (memory.update = layer_programs).

    Args:
        experiment, checkpoint_layout, rows, ahead, layout: see `StepBackend`; the thread has nothing to compile.

    Raises:
        ValueError: learner, memory or model require something that a per-layer step cannot provide.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoint_layout: StateLayout,
        rows: BatchRows,
        ahead: CompileThread,
        layout: StateLayout | None = None,
    ):
        schedule.check(experiment.learner, experiment.memory)
        super().__init__(experiment, checkpoint_layout, rows, ahead, layout)
        self._init_programs = Programs(self.jit, self.layout)

    # --- the state at step 0 ------------------------------------------------------------------------------------------

    def dry_run_init(self, compile: Compile, given_paths: Collection[str] = ()) -> MemoryTracker:
        """See `StepBackend`; parameters in `given_paths` are zeros."""
        words = TensorSpec((2,), "uint32")
        number = TensorSpec((), "int32")
        return self._init_programs.dry_run(compile, partial(self._init_params, given_paths), words, number)

    def init(self, seed: int | None, given_paths: Collection[str]) -> TrainState:
        """See `StepBackend`. The values equal those of `JitStep`, but each kind of leaf has its own program."""
        self.dry_run_init(self.compile_here, given_paths)
        seed = self.experiment.trainer.seed if seed is None else seed
        # Pass the keys to the devices as raw data: uint32[2] words each (threefry).
        keys = jax.random.split(jax.random.key(seed))
        key_words = np.asarray(jax.random.key_data(keys))
        host_arguments = (key_words[0], key_words[1], np.int32(0))
        words, run_words, number = jax.device_put(host_arguments, self.replicated)
        flat = self._init_params(given_paths, words, number)
        for name in ("buffer", "counter"):
            for path, spec in flatten(self.layout.specs[name]).items():
                sharding = self.layout.sharding(spec)
                flat[name][path] = jnp.zeros(spec.shape, spec.dtype, device=sharding)
        flat["counter"]["rng"] = run_words
        return self.initializer.to_state_tree(flat)

    def _init_params(self, given_paths: Collection[str], words: jax.Array, number: jax.Array) -> GroupedArrays:
        """Initialize everything derived from parameters, {group: {path: array}}.

        Args:
            given_paths: paths of parameters to fill with zeros.
            words: uint32[2], the raw data of the key.
            number: int32[], the index of the first layer: 0.
        """
        initializer = self.initializer
        init_params = partial(initializer.init_params, given_paths=given_paths)
        flat: GroupedArrays = {name: {} for name in GROUPS}
        for part in initializer.init_parts():
            paths = part.paths
            stacked = part.layer_ranges != [None]
            layer = jnp.int32(0) if stacked else None
            key = jax.random.key(0)
            abstract = jax.eval_shape(lambda k, i, p=paths: init_params(k, p, i), key, layer)
            for layers in part.layer_ranges:
                storage_specs: dict[str, dict[str, TensorSpec]] = {}
                paths_in_state = {}
                for name, values in abstract.items():
                    storage_specs[name] = {}
                    for path in values:
                        paths_in_state[path], spec = initializer.find_leaf(name, path, layers)
                        if spec is not None:
                            storage_specs[name][path] = spec
                memory_kinds = tuple(spec.memory_kind for spec in jax.tree.leaves(storage_specs))
                run = partial(_init_layer, init_params, paths, storage_specs, stacked)
                # The layer index is an argument on the device, so all layers whose leaves use the same kinds of
                # memory share one program.
                layer_values, number = self._init_programs(
                    (paths, memory_kinds, paths[0] in given_paths),
                    run,
                    words,
                    number,
                    donate=(1,),
                    out=(storage_specs, TensorSpec((), "int32")),
                )
                for name, values in layer_values.items():
                    flat[name] |= {paths_in_state[path]: x for path, x in values.items()}
            number = self._init_programs("zero", jnp.zeros_like, number, out=TensorSpec((), "int32"))
        return flat

    # --- the step and evaluation --------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> LayerPrograms:
        """The programs of a step and of an evaluation; `compile` compiles those of the step."""
        experiment = self.experiment
        return LayerPrograms(experiment.language_model, experiment.learner, self.layout, experiment.memory, self.jit)

    @cached_property
    def step_memory(self) -> MemoryTracker:
        """The memory that a step needs. Computing it compiles all programs of the step."""
        with phase("compiling the programs of the training step"):
            return self.layers.dry_run(self.layout.specs, self.rows.specs, self.compile_here)

    def compile(self) -> list[jax.stages.Compiled]:
        """See `StepBackend`."""
        return [call.run for call in self.step_memory.calls]

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """See `StepBackend`."""
        # Reading the cached property compiles the programs.
        self.step_memory  # noqa: B018
        return self.layers(state, batch)

    def evaluate(self, state: TrainState, batch: Batch, group: str) -> Metrics:
        """See `StepBackend`."""
        weights = Weights(frozen=state.frozen, trainable=state[group])
        return self.layers.evaluate(weights, state.buffer, batch, self.compile_here)

    def evaluation_sums(self) -> list[str]:
        """See `StepBackend`. Traces one function with whole stacks, which has the sums of the layer programs."""
        model = self.experiment.language_model
        layout = self.checkpoint_layout
        specs = layout.specs
        storage_specs = model.stage_specs(specs.parameter, specs.frozen)

        def evaluate(params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> Metrics:
            ctx = evaluation_context(batch, model, layout)
            _, out = model.loss(merge(params, frozen), ctx, buffers, storage_specs)
            return model.scores(out, batch)

        arguments = [specs.parameter, specs.frozen, specs.buffer, self.rows.evaluation_specs]
        return list(jax.eval_shape(evaluate, *map(layout.abstract, arguments)))

    # --- information about the programs -------------------------------------------------------------------------------

    def peak_bytes(self) -> int:
        """Return the peak over all programs of the step, from their dry run."""
        return self.step_memory.allocated

    def dry_run_step(self, compile: Compile) -> MemoryTracker:
        """See `StepBackend`."""
        return self.layers.dry_run(self.layout.specs, self.rows.specs, compile)

    def dry_run_evaluation(self, compile: Compile) -> MemoryTracker:
        """See `StepBackend`."""
        specs = self.layout.specs
        weights = Weights(frozen=specs.frozen, trainable=specs.parameter)
        return self.layers.dry_run_evaluation(weights, specs.buffer, self.rows.evaluation_specs, compile)

    def step_jaxprs(self, tracker: MemoryTracker | None = None) -> list[ClosedJaxpr]:
        """See `StepBackend`; the list is empty without a dry run."""
        return [call.jaxpr for call in tracker.calls] if tracker is not None else []


def _init_layer(
    init_params: Callable[..., GroupedArrays],
    paths: Paths,
    storage_specs: Nested,
    stacked: bool,
    words: jax.Array,
    number: jax.Array,
) -> tuple[GroupedArrays, jax.Array]:
    """Return (values of one layer in their memory, index of the next layer)."""
    key = jax.random.wrap_key_data(words)
    values = init_params(key, paths, number if stacked else None)

    placed_values = {}
    for name, specs in storage_specs.items():
        placed_values[name] = {
            path: store_leaf(spec, values[name][path].reshape(spec.shape)) for path, spec in specs.items()
        }
    return placed_values, number + 1
