"""The base class of backends: the layout of a run's state, and the programs that initialize, train and evaluate it.

There are two backends. `framework.program.jit_step` jits the step as one program over stacked weights, and
`framework.program.per_layer_step` runs it layer by layer. `Program` chooses one, and other code does not depend on
which.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.devices import executables
from plimsoll.framework.layout import UNSAVED_GROUPS, StateLayout, TrainState
from plimsoll.framework.program.compile_thread import CompileThread
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.initializer import StateInitializer
from plimsoll.framework.program.rows import Batch, BatchRows
from plimsoll.framework.schedules.layerwise.programs import Compile, LayerProgram, MemoryTracker
from plimsoll.framework.schedules.stack_layout import FIRST, STACK, StackParts, split_stacks
from plimsoll.framework.schedules.step import Metrics


class StepBackend(ABC):
    """The compiled programs of a run, and the layout of the state that they take.

    Args:
        experiment: experiment to train.
        checkpoint_layout: layout of checkpoints, which has whole stacks and is the same for every backend.
        rows: batches on the mesh.
        ahead: thread that compiles programs before they are called.
        layout: layout of the running state, if its stacks must be whole regardless of `get_stack_split`.

    Attributes:
        platform: platform of the mesh's devices: tpu, gpu or cpu.
        parts: split of the stacks in the running state.
        jit: jax.jit with the compiler options.
        initializer: initialization of the state at step 0.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoint_layout: StateLayout,
        rows: BatchRows,
        ahead: CompileThread,
        layout: StateLayout | None = None,
    ):
        self.experiment = experiment
        self.mesh = checkpoint_layout.mesh
        self.platform: str = self.mesh.devices.flat[0].platform
        self.checkpoint_layout = checkpoint_layout
        self.parts = StackParts((), {})
        if layout is None:
            self.parts = get_stack_split(experiment)
            layout = checkpoint_layout
        if self.parts.parts:
            layout = StateLayout(self.parts.specs(checkpoint_layout.specs), self.mesh)
        self.layout = layout
        self.rows = rows
        self.ahead = ahead
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.compiler_options = experiment.compiler.options_for(
            self.mesh, prefetches_state=experiment.memory.speculates
        )
        jit_options = self.compiler_options or None
        self.jit: Any = functools.partial(jax.jit, compiler_options=jit_options)
        self.initializer = StateInitializer(
            experiment.model, experiment.learner, checkpoint_layout, self.layout, self.parts
        )

    def compile_here(self, lowered: jax.stages.Lowered, offloaded: executables.HostBytes) -> LayerProgram:
        """Compile a lowered program for the mesh; return it with the peak memory of one device in bytes.

        Args:
            lowered: the program.
            offloaded: bytes of its arguments and results in host memory.
        """
        run = executables.compile_or_load(lowered, self.compiler_options)
        peak = executables.peak_bytes(run.memory_analysis(), self.platform, offloaded)
        return LayerProgram(run, peak)

    # --- the state at step 0 ------------------------------------------------------------------------------------------

    @abstractmethod
    def init(self, seed: int | None, given_paths: Collection[str]) -> TrainState:
        """Return the state at step 0, in the layout.

        Args:
            seed: seed of the initialization; the config's seed by default.
            given_paths: paths of parameters to fill with zeros, because the caller overwrites them.
        """

    def calibrate_state(self, state: TrainState, batch: Batch) -> TrainState:
        """Return the initial state with the parameter values that the model derives from the run's first batch.

        Optimizer state and averages are recreated to match. The state that was passed in is deleted.
        """
        weights = state.select(("parameter", "frozen"))
        # Optimizer state and averages are recreated from the weights, so free the old ones first.
        for leaf in jax.tree.leaves(state.select(("optimizer", "ema"))):
            leaf.delete()
        result_specs = self.layout.specs.select(("parameter", "frozen", "optimizer", "ema"))
        run = self.jit(self.initializer.calibrate, out_shardings=self.layout.shardings(result_specs), donate_argnums=0)
        calibrated = run(weights, state.counter, state.buffer, batch)
        kept = {group: state[group] for group in ("counter", "buffer", *UNSAVED_GROUPS)}
        return replace(calibrated, **kept)

    # --- the step and evaluation --------------------------------------------------------------------------------------

    @abstractmethod
    def compile(self) -> list[jax.stages.Compiled]:
        """Compile the training step, once; return its programs on this mesh, in call order."""

    @abstractmethod
    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one training step; the old state is deleted."""

    def complete_update(self, state: TrainState) -> TrainState:
        """Apply the update that the last step left to the next one; the old state is deleted if there is one."""
        return state

    @abstractmethod
    def evaluate(self, state: TrainState, batch: Batch, group: str) -> Metrics:
        """Return sums over a batch.

        Args:
            state: the training state; it is not modified.
            batch: the batch as an evaluation sees it, on the devices.
            group: the group of the state with the weights: "parameter" or "ema" (averages).
        """

    @abstractmethod
    def evaluation_sums(self) -> list[str]:
        """Return the names of the sums that an evaluation returns, by tracing it; nothing is compiled."""

    # --- information about the programs -------------------------------------------------------------------------------

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the peak device memory of one device during a step, once it is compiled for this mesh."""

    @abstractmethod
    def dry_run_init(self, compile: Compile) -> MemoryTracker:
        """Compile the programs of `init` with `compile`, also for an absent machine, and total their memory."""

    @abstractmethod
    def dry_run_step(self, compile: Compile) -> MemoryTracker:
        """Do the same for a training step."""

    @abstractmethod
    def dry_run_evaluation(self, compile: Compile) -> MemoryTracker:
        """Do the same for the evaluation of a batch."""

    @abstractmethod
    def step_jaxprs(self, tracker: MemoryTracker | None = None) -> list[ClosedJaxpr]:
        """Return the jaxprs of a step, one for each program call.

        Args:
            tracker: result of a step's dry run. Without it, the list is empty if only a dry run makes the calls.
        """

    # --- checkpoint contents ------------------------------------------------------------------------------------------

    def to_checkpoint(self, state: TrainState, *, join: bool = True) -> TrainState:
        """Return the part of a state that checkpoints hold.

        Args:
            state: the state, which is not changed.
            join: whether to join split stacks into whole ones, which are copies in host memory; otherwise their leaves
                are `SplitArray`s.
        """
        state = state.without_unsaved()
        if not self.parts.parts:
            return state
        return self.parts.join_stacks(state, self.checkpoint_layout, copy=join)

    @property
    def abstract_checkpoint(self) -> TrainState:
        """The abstract arrays that a checkpoint is read into; `SplitSpec`s for the leaves of split stacks."""
        if not self.parts.parts:
            return self.checkpoint_layout.abstract(self.checkpoint_layout.checkpoint_specs)
        state = self.layout.abstract().without_unsaved()
        return self.parts.join_stacks(state, self.checkpoint_layout, copy=False)

    def from_checkpoint(self, stored: TrainState) -> TrainState:
        """Build the state from a checkpoint's arrays. `stored` is deleted."""
        state = self.parts.split_state(stored, self.layout) if self.parts.parts else stored
        specs = self.layout.specs.select(UNSAVED_GROUPS)
        zeros = lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)  # noqa: E731
        unsaved = jax.jit(zeros, out_shardings=self.layout.shardings(specs))()
        return replace(state, **{group: unsaved[group] for group in UNSAVED_GROUPS})

    def join_stacks(self, state: TrainState) -> TrainState:
        """Return weights, averages and buffers with whole stacks, for generation. The state is deleted."""
        if not self.parts.parts:
            return state
        model_state = state.select(("parameter", "frozen", "ema", "buffer"))
        # The host may not have room for the optimizer state next to the joined stacks.
        for leaf in jax.tree.leaves(state.optimizer):
            leaf.delete()
        joined_state = self.parts.join_stacks(model_state, self.checkpoint_layout)
        # Free the split stacks before the whole stacks are put on the devices, which may not have room for both. Leaves
        # outside of stacks are the same arrays in the joined state, so they stay.
        leaving = []
        for _, tree in model_state.items():
            leaving += [part.select(tree) for part in self.parts.parts if part.stage in tree]
        for leaf in jax.tree.leaves(leaving):
            leaf.delete()
        specs = self.checkpoint_layout.specs.select(("parameter", "frozen", "ema", "buffer"))
        return jax.device_put(joined_state, self.checkpoint_layout.shardings(specs))


def get_stack_split(experiment: Experiment) -> StackParts:
    """Return how a run splits its stacks: into single layers for a `PerLayerStep`, else into ranges of layers.

    Raises:
        ValueError: the model has stages that cannot run layer by layer, or its stacks cannot be split this way.
    """
    model = experiment.model
    memory = experiment.memory
    if not memory.traits.is_many_programs:
        return StackParts.from_layer_ranges(model, memory, split_stacks(model, memory))
    stages = list(model.stages)
    if [stage for stage in stages if stage != FIRST] != ["embed", STACK, "head"]:
        raise ValueError(
            f"memory.update = layer_programs runs embed, {STACK} and head; the model has "
            f"{', '.join(stages)}; expected memory.update = in_backward, streamed or after_backward"
        )
    return StackParts.one_per_layer(model, memory)
