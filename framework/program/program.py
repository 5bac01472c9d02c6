"""Program: an experiment on a mesh, with the layout of its state and its compiled functions init, step and evaluate.

The training loop, custom loops and memory planning all use this object.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, TrainState, merge, move_to_host
from plimsoll.framework.program.backend import StepBackend
from plimsoll.framework.program.compile_thread import CompileThread
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.initializer import check_calibration_dtypes
from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.per_layer_step import PerLayerStep
from plimsoll.framework.program.rows import Batch, BatchRows
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.step import Metrics, evaluation_context


def choose_backend(memory: Memory) -> type[StepBackend]:
    """Return the backend that runs a step with these memory settings."""
    return PerLayerStep if memory.traits.is_many_programs else JitStep


class Program:
    """An experiment on a device mesh: the layout of its state, and its compiled functions.

    Args:
        experiment: experiment to train.
        devices: devices of the mesh; all devices of all processes by default.
        mesh: arrangement of the devices; the experiment's by default.
        training: whether the step will run; otherwise only the model is checked.
        offload_stack: offload the stack's matrices regardless of memory.parameters; for inference.
        offload_weights: offload all matrices; for an auxiliary model next to the trained one.

    Raises:
        ValueError: experiment and devices do not fit each other.

    Attributes:
        backend: backend with the memory layout of the state and the compiled functions.
        devices: devices of the mesh, in the given order.
        training: whether the step will run.
        checkpoint_layout: layout of checkpoints, which are the same for every schedule.
        calibrates: whether the first batch determines initial values (Salimans and Kingma 2016, arXiv 1602.07868).
        ahead: thread that compiles programs before they are called.
    """

    def __init__(
        self,
        experiment: Experiment,
        devices: Sequence[Any] | None = None,
        *,
        mesh: MeshShape | None = None,
        training: bool = True,
        offload_stack: bool = False,
        offload_weights: bool = False,
    ):
        self.experiment = experiment
        self.devices: Sequence[Any] = jax.devices() if devices is None else devices
        self.mesh = (mesh or experiment.mesh).build(self.devices)
        if training:
            experiment.check(self.mesh)
        else:
            experiment.model.check(self.mesh, experiment.data)
        experiment.model.check_platform(self.mesh.devices.flat[0].platform)
        experiment.compiler.check(self.mesh)
        self.training = training
        self.calibrates = training and experiment.model.calibrates
        if self.calibrates:
            check_calibration_dtypes(experiment.model)
        specs = experiment.state_specs()
        self.checkpoint_layout = StateLayout(specs, self.mesh)
        self._rows = BatchRows(experiment.data, experiment.batch_arrays, self.checkpoint_layout)
        self.ahead = CompileThread()
        kind = choose_backend(experiment.memory) if training else JitStep
        # Without training, stacks are whole.
        layout = None if training else self.checkpoint_layout
        if offload_stack:
            layout = StateLayout(offload_stages(specs, {"first", "stack"}), self.mesh)
        if offload_weights:
            stages = {*experiment.model.stages, "shared"}
            layout = StateLayout(offload_stages(specs, stages), self.mesh)
        self.backend: StepBackend = kind(experiment, self.checkpoint_layout, self._rows, self.ahead, layout)

    @property
    def layout(self) -> StateLayout:
        """The layout of the running state, which may store each layer of a stack as separate arrays."""
        return self.backend.layout

    @property
    def jit(self) -> Any:
        """jax.jit with the compiler options."""
        return self.backend.jit

    @property
    def replicated(self) -> NamedSharding:
        """The fully replicated sharding: every device holds a copy."""
        return self.backend.replicated

    # --- batches ------------------------------------------------------------------------------------------------------

    @property
    def batch_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays in one global training batch, by name."""
        return self._rows.specs

    @property
    def delivered_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays in one global evaluation batch as the data delivers it, before a batch transform."""
        return self._rows.delivered_specs

    @property
    def evaluation_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays in one global evaluation batch, by name."""
        return self._rows.evaluation_specs

    @property
    def batch_sharding(self) -> dict[str, NamedSharding]:
        """The sharding of each array of a batch, for training and evaluation."""
        return self._rows.sharding

    @property
    def rows(self) -> np.ndarray:
        """int[R]: the rows of the global batch that this process's devices hold, in order."""
        return self._rows.local

    @property
    def rows_by_process(self) -> dict[int, np.ndarray]:
        """`rows` of every process that has devices of the mesh, by process index."""
        return self._rows.rows_by_process

    def put(self, local: dict[str, np.ndarray]) -> Batch:
        """Turn this process's rows of a batch (host arrays [R, ...]) into global arrays [B, ...]."""
        return self._rows.put(local)

    # --- state --------------------------------------------------------------------------------------------------------

    def init(self, seed: int | None = None, given: Collection[str] = ()) -> TrainState:
        """Return the state at step 0.

        Args:
            seed: seed of the initialization; the config's seed by default.
            given: paths of parameters to fill with zeros, because the caller overwrites them.
        """
        return self.backend.init(seed, given)

    def calibrate_state(self, state: TrainState, batch: Batch) -> TrainState:
        """Return the initial state with the parameter values that the model derives from the run's first batch.

        Optimizer state and averages are recreated to match. The state that was passed in is deleted.
        """
        return self.backend.calibrate_state(state, batch)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Return the part of a state that a checkpoint holds, with whole stacks."""
        return self.backend.to_checkpoint(state)

    @property
    def abstract_checkpoint(self) -> TrainState:
        """The abstract arrays that a checkpoint is read into."""
        return self.backend.abstract_checkpoint

    def from_checkpoint(self, stored: TrainState) -> TrainState:
        """Build the state from a checkpoint's arrays. `stored` is deleted."""
        return self.backend.from_checkpoint(stored)

    def join_stacks(self, state: TrainState) -> TrainState:
        """Return weights, averages and buffers with whole stacks, for generation; the state is deleted."""
        return self.backend.join_stacks(state)

    def weights(self, state: TrainState, *, averaged: bool = False) -> Nested:
        """Return all parameters in the form that the model takes, without copying."""
        group = "ema" if averaged else "parameter"
        return merge(state[group], state.frozen)

    # --- training -----------------------------------------------------------------------------------------------------

    def compile(self) -> None:
        """Compile the step ahead of time."""
        self.backend.compile()

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one training step; the old state is deleted."""
        return self.backend.step(state, self.complete_batch(state, batch))

    def complete_batch(self, state: TrainState, batch: Batch, *, group: str = "parameter") -> Batch:
        """Return the batch as a step sees it, with the arrays of the experiment's batch transform.

        Args:
            state, batch, group: see `BatchTransform.complete_batch`.

        Raises:
            ValueError: the batch transform is not open.
        """
        transform = self.experiment.batch_transform
        if transform is None:
            return batch
        if not transform.is_open(self):
            raise ValueError(
                f"experiment.batch_transform ({type(transform).__name__}) is not open: before the first step or "
                "evaluation, call experiment.batch_transform.open(program, workdir, is_new_run=..., log=print)"
            )
        return transform.complete_batch(self, state, batch, group=group)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_context(self, batch: Nested) -> Context:
        """Return the context for everything except training: no dropout, sums instead of means."""
        return evaluation_context(batch, self.experiment.model, self.layout)

    def evaluate(self, state: TrainState, batch: Batch, *, averaged: bool = False) -> Metrics:
        """Return sums over a batch, as defined by the model's `scores`.

        Args:
            state: training state; it is not modified.
            batch: global arrays [B, ...].
            averaged: whether to use the moving averages of the trainable parameters.
        """
        group = "ema" if averaged else "parameter"
        return self.backend.evaluate(state, self.complete_batch(state, batch, group=group), group)

    def compile_evaluation(self, state: TrainState) -> None:
        """Compile the evaluation by evaluating a batch of zeros. Does nothing if a thread is already compiling it."""
        if self.backend.evaluation_was_requested:
            return
        num_rows = len(self.rows)
        batch = {}
        for name, spec in self._rows.delivered_specs.items():
            batch[name] = np.zeros((num_rows, *spec.shape[1:]), spec.dtype)
        weight_kinds = [False, True] if state.ema else [False]
        for averaged in weight_kinds:
            metrics = self.evaluate(state, self.put(batch), averaged=averaged)
            jax.block_until_ready(metrics)

    # --- inspection of single programs --------------------------------------------------------------------------------

    @property
    def _jit_step(self) -> JitStep:
        if not isinstance(self.backend, JitStep):
            raise ValueError(
                "memory.update = layer_programs runs a step as many programs; only a step that is one program has this"
            )
        return self.backend

    @property
    def step_jit(self) -> Any:
        """`JitStep.step_jit`. This and the following properties raise ValueError if a step is many programs."""
        return self._jit_step.step_jit

    @property
    def traced_step(self) -> Any:
        """`JitStep.traced_step`."""
        return self._jit_step.traced_step

    @property
    def compiled_step(self) -> Any:
        """`JitStep.compiled_step`."""
        return self._jit_step.compiled_step

    @property
    def evaluate_jit(self) -> Any:
        """`JitStep.evaluate_jit`."""
        return self._jit_step.evaluate_jit

    def init_jit(self, seed: int | None = None) -> Any:
        """`JitStep.init_jit`."""
        return self._jit_step.init_jit(seed)


def offload_stages(specs: TrainState, stages: set[str]) -> TrainState:
    """Return the specs of a state with the matrices of these stages in host memory."""
    offloaded_groups = {}
    for group in ("parameter", "frozen", "ema"):
        tree = dict(specs[group])
        for stage in stages & tree.keys():
            stacked = stage in ("first", "stack")
            # Small matrices move too, because the flag promises a stack in host memory.
            tree[stage] = move_to_host(tree[stage], "pinned_host", stacked=stacked, min_bytes=0)
        offloaded_groups[group] = tree
    return replace(specs, **offloaded_groups)
