"""The backend for schedules whose step is one program over stacked weights; so are initialization and evaluation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from plimsoll.framework.devices.executables import HostBytes, compile_or_load, peak_bytes
from plimsoll.framework.layers.base import LAYER_AXIS
from plimsoll.framework.layers.remat import check_platform
from plimsoll.framework.layout import Nested, StateLayout, TrainState, fetch_leaf, merge
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.program.backend import StepBackend
from plimsoll.framework.program.compile_thread import EVALUATION, INIT, CompileThread
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.rows import Batch, BatchRows
from plimsoll.framework.schedules import after_backward, in_backward, pipeline, streamed
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker
from plimsoll.framework.schedules.speculative_update import exchange_spares
from plimsoll.framework.schedules.stack_layout import split_stacks
from plimsoll.framework.schedules.step import Metrics, evaluation_context, microbatches
from plimsoll.framework.terminal.phases import SHORT, phase

# The function that builds the training step, by memory.update. `layer_programs` is missing on purpose: its step is
# several compiled programs that Python calls, not one function (see `framework.program.per_layer_step`).
STEP_BUILDERS = {
    "after_backward": after_backward.build_step,
    "streamed": streamed.build_step,
    "in_backward": in_backward.build_step,
}


@dataclass(frozen=True)
class RunningModel:
    """The model and learner that the programs of a run use."""

    model: Chain
    learner: Learner


class JitStep(StepBackend):
    """Compiles one program each for initialization, for the step, and for the evaluation of a batch.

    Args:
        experiment, checkpoint_layout, rows, ahead, layout: see `StepBackend`.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoint_layout: StateLayout,
        rows: BatchRows,
        ahead: CompileThread,
        layout: StateLayout | None = None,
    ):
        super().__init__(experiment, checkpoint_layout, rows, ahead, layout)
        # The jitted evaluations by group of the weights.
        self._evaluations: dict[str, jax.stages.Wrapped] = {}

    @cached_property
    def running(self) -> RunningModel:
        """The model and learner that the programs use, with layer ranges in place of split stacks."""
        experiment = self.experiment
        if not self.parts.parts:
            return RunningModel(experiment.model, experiment.learner)
        layer_ranges = split_stacks(experiment.model, experiment.memory)
        return RunningModel(
            experiment.model.split_into_ranges(layer_ranges), experiment.learner.split_into_ranges(layer_ranges)
        )

    @property
    def has_pipeline(self) -> bool:
        """True if the layers of the stack are sharded over the mesh axis `pipe`."""
        return self.mesh.shape[LAYER_AXIS] > 1

    # --- the state at step 0 ------------------------------------------------------------------------------------------

    def init_jit(self, seed: int | None = None, given_paths: Collection[str] = ()) -> jax.stages.Wrapped:
        """Return the jitted `StateInitializer.init`, which initializes the state directly into the layout.

        Args:
            seed: seed of the initialization; the config's by default.
            given_paths: paths of parameters to fill with zeros, because the caller overwrites them.
        """
        seed = self.experiment.trainer.seed if seed is None else seed
        init = partial(self.initializer.init, seed, given_paths)
        return self.jit(init, out_shardings=self.layout.shardings())

    def init(self, seed: int | None, given_paths: Collection[str]) -> TrainState:
        """See `StepBackend`."""
        init = None
        # The thread compiles initialization only for the config's seed and with no parameters given.
        if not given_paths and seed is None:
            init = self.ahead.program((INIT,))
        with phase("initializing the state", patience=SHORT):
            if init is None:
                init = self.init_jit(seed, given_paths)
            return init()

    # --- programs that a thread compiles ------------------------------------------------------------------------------

    def begin_init(self) -> None:
        """Start compiling the initialization in the thread."""
        self.ahead.begin((INIT,), lambda: self.init_jit().lower().compile())

    def begin_evaluation(self) -> None:
        """Start compiling the evaluation of the weights and of their averages in the thread."""
        groups = ["parameter"]
        if self.layout.specs.ema:
            groups.append("ema")
        for group in groups:
            self.ahead.begin((EVALUATION, group), lambda group=group: self._lower_evaluation(group).compile())

    # --- the step -----------------------------------------------------------------------------------------------------

    @cached_property
    def step_jit(self) -> jax.stages.Wrapped:
        """The jitted training step: in and out shardings come from the layout, and the state is donated."""
        experiment = self.experiment
        memory = experiment.memory
        build = STEP_BUILDERS[memory.update]
        check_platform(memory.remat, self.platform)
        running = self.running
        options = {"pipe_chunks": experiment.mesh.pipe_chunks} if self.has_pipeline else {}
        step = build(running.model, running.learner, self.layout, memory, **options)
        # `rows.sharding` also contains the arrays that only evaluation reads, which are not arguments of the step.
        batch_sharding = {name: self.rows.sharding[name] for name in self.rows.specs}
        return self.jit(
            step,
            in_shardings=(self.layout.shardings(), batch_sharding),
            out_shardings=(self.layout.shardings(), self.replicated),
            donate_argnums=0,
        )

    @cached_property
    def traced_step(self) -> jax.stages.Traced:
        """The traced step, before any state exists. It has the jaxpr and can be lowered."""
        state = self.layout.abstract()
        batch = self.layout.abstract(self.rows.specs)
        return self.step_jit.trace(state, batch)

    @cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """The step, compiled ahead of time."""
        with phase("tracing the training step", patience=SHORT):
            lowered = self.traced_step.lower()
        return compile_or_load(lowered, self.compiler_options, what="the training step")

    def compile(self) -> list[jax.stages.Compiled]:
        """See `StepBackend`."""
        return [self.compiled_step]

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """See `StepBackend`."""
        state, metrics = self.compiled_step(state, batch)
        return exchange_spares(state), metrics

    @cached_property
    def _compiled_completion(self) -> jax.stages.Compiled:
        """The program of `complete_update`, with a donated state."""
        running = self.running
        complete = partial(streamed.complete_update, running.model, running.learner, self.layout)
        complete = partial(complete, self.experiment.memory)
        shardings = self.layout.shardings()
        jitted = self.jit(complete, in_shardings=(shardings,), out_shardings=shardings, donate_argnums=0)
        lowered = jitted.lower(self.layout.abstract())
        return compile_or_load(lowered, self.compiler_options, what="the update between steps")

    def complete_update(self, state: TrainState) -> TrainState:
        """See `StepBackend`."""
        return self._compiled_completion(state) if self.experiment.memory.delays_update else state

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_jit(self, group: str) -> jax.stages.Wrapped:
        """Return the jitted evaluation of a batch: (parameters, frozen, buffers, batch) -> sums.

        Args:
            group: group of the state with the parameters: "parameter" or "ema" (averages).
        """
        if group in self._evaluations:
            return self._evaluations[group]
        model = self.running.model
        layout = self.layout
        num_microbatches = self.experiment.learner.accumulate
        # The functions below do not refer to `self`, which holds them: nothing else would free the cycle.
        pipe_chunks = self.experiment.mesh.pipe_chunks if self.has_pipeline else None
        storage_specs = model.stage_specs(layout.specs[group], layout.specs.frozen)

        def sums(params: Nested, buffers: Nested, batch: Nested) -> Metrics:
            _, out = model.loss(params, evaluation_context(batch, model, layout), buffers, storage_specs)
            return model.scores(out, batch)

        def evaluate(params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> Metrics:
            params = merge(params, frozen)
            if pipe_chunks is not None:
                specs = merge(layout.specs[group], layout.specs.frozen)
                ctx = evaluation_context(batch, model, layout)
                out = pipeline.evaluate(
                    model,
                    jax.tree.map(fetch_leaf, specs, params),
                    buffers,
                    ctx,
                    chunks=pipe_chunks,
                    num_microbatches=num_microbatches,
                )
                return model.scores(out, batch)
            if num_microbatches == 1:
                return sums(params, buffers, batch)
            # A batch that trains in microbatches would not fit as a whole here either.
            ctx = evaluation_context(batch, model, layout)
            stacked_batches = microbatches(batch, num_microbatches, ctx)
            stacked_sums = jax.lax.map(lambda part: sums(params, buffers, part), stacked_batches)
            return jax.tree.map(jnp.sum, stacked_sums)

        self._evaluations[group] = self.jit(evaluate, out_shardings=self.replicated)
        return self._evaluations[group]

    def _lower_evaluation(self, group: str) -> jax.stages.Lowered:
        """Lower the evaluation of the weights in `group` from specs only, before any arrays exist."""
        return self.evaluation_jit(group).lower(*self._evaluation_arguments(group))

    def _evaluation_arguments(self, group: str) -> list[Nested]:
        layout = self.layout
        weights = [layout.abstract(layout.specs[name]) for name in (group, "frozen", "buffer")]
        return [*weights, layout.abstract(self.rows.evaluation_specs)]

    def evaluation_sums(self) -> list[str]:
        """See `StepBackend`."""
        return list(jax.eval_shape(self.evaluation_jit("parameter"), *self._evaluation_arguments("parameter")))

    def evaluate(self, state: TrainState, batch: Batch, group: str) -> Metrics:
        """See `StepBackend`."""
        evaluation = self.ahead.program((EVALUATION, group))
        if evaluation is None:
            evaluation = self.evaluation_jit(group)
        return evaluation(state[group], state.frozen, state.buffer, batch)

    # --- information about the programs -------------------------------------------------------------------------------

    def peak_bytes(self) -> int:
        """See `StepBackend`."""
        stats = self.compiled_step.memory_analysis()
        return peak_bytes(
            stats, self.platform, HostBytes.in_place(self.layout.bytes_per_device(memory_kind="pinned_host"))
        )

    def dry_run_init(self, compile: Compile) -> MemoryTracker:
        """See `StepBackend`."""
        offloaded = HostBytes(results=self.layout.bytes_per_device(memory_kind="pinned_host"))
        return _dry_run_program(self.init_jit().lower(), offloaded, compile)

    def dry_run_step(self, compile: Compile) -> MemoryTracker:
        """See `StepBackend`."""
        offloaded = self.layout.bytes_per_device(memory_kind="pinned_host")
        tracker = _dry_run_program(self.traced_step.lower(), HostBytes.in_place(offloaded), compile)
        step = tracker.calls[0]
        tracker.host_peak = offloaded + step.host_temp
        # Each offloaded leaf is transferred in and out, even if the program's text does not name its memory space
        # (CPU, GPU). Of two copies, one is transferred in and the other one out.
        spares = self.layout.bytes_per_device("spare") + self.layout.bytes_per_device("spare_ema")
        tracker.moved = max(step.moved, 2 * (offloaded - spares))
        return tracker

    def dry_run_evaluation(self, compile: Compile) -> MemoryTracker:
        """See `StepBackend`."""
        layout = self.layout
        offloaded = sum(layout.bytes_per_device(group, "pinned_host") for group in ("parameter", "frozen"))
        return _dry_run_program(self._lower_evaluation("parameter"), HostBytes(arguments=offloaded), compile)

    def step_jaxprs(self, tracker: MemoryTracker | None = None) -> list[ClosedJaxpr]:
        """Return the jaxpr of the step, which needs no dry run."""
        return [self.traced_step.jaxpr]


def _dry_run_program(lowered: jax.stages.Lowered, offloaded: HostBytes, compile: Compile) -> MemoryTracker:
    """Return the memory totals of one program that is called once."""
    program = compile(lowered, offloaded)
    tracker = MemoryTracker()
    tracker.count(program, program.peak)
    return tracker
