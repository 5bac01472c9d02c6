"""Program: an experiment on a mesh, with the layout of its state and its compiled functions init, step and evaluate.

The training loop, custom loops and memory planning all use this object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers.base import LAYER_AXIS, Context
from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, TrainState, flatten, merge, move_to_host
from plimsoll.framework.program.backend import StepBackend
from plimsoll.framework.program.compile_thread import EVALUATION, CompileThread
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.per_layer_step import PerLayerStep
from plimsoll.framework.program.rows import Batch, BatchRows
from plimsoll.framework.schedules.step import Metrics, evaluation_context


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
        batch_rows: rows of batches on the mesh, and the specs and shardings of their arrays.
        training: whether the step will run.
        checkpoint_layout: layout of checkpoints, which are the same for every schedule.
        calibrates: whether the first batch determines initial values (Salimans and Kingma 2016, arXiv 1602.07868).
        ahead: thread that compiles programs before they are called.
        layout: layout of the running state, which may store each layer of a stack as separate arrays.
        replicated: the fully replicated sharding: every device holds a copy.
        jit: jax.jit with the compiler options.
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
        device = self.mesh.devices.flat[0]
        experiment.model.check_platform(device.platform, getattr(device, "compute_capability", None))
        experiment.compiler.check(self.mesh)
        self.training = training
        self.calibrates = training and experiment.model.calibrates
        if self.calibrates:
            for path, spec in flatten(experiment.model.parameter_specs()).items():
                if spec.dtype.itemsize < 4:
                    raise ValueError(
                        f"{path} is {spec.dtype}; parameters calibrated on the first batch must be float32 "
                        "(model.param_dtype)"
                    )
        specs = experiment.state_specs()
        self.checkpoint_layout = StateLayout(specs, self.mesh)
        self.batch_rows = BatchRows(experiment.data, experiment.batch_arrays, self.checkpoint_layout)
        self.ahead = CompileThread()
        kind = PerLayerStep if training and experiment.memory.traits.is_many_programs else JitStep
        # Without training, stacks are whole.
        layout = None if training else self.checkpoint_layout
        if offload_stack:
            layout = StateLayout(offload_stages(specs, {"first", "stack"}), self.mesh)
        if offload_weights:
            stages = {*experiment.model.stages, "shared"}
            layout = StateLayout(offload_stages(specs, stages), self.mesh)
        self.backend: StepBackend = kind(experiment, self.checkpoint_layout, self.batch_rows, self.ahead, layout)
        self.layout = self.backend.layout
        self.replicated = self.backend.replicated
        self.jit = self.backend.jit

    # --- batches ------------------------------------------------------------------------------------------------------

    @property
    def batch_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays in one global training batch, by name."""
        return self.batch_rows.specs

    @property
    def rows(self) -> np.ndarray:
        """int[R]: the rows of the global batch that this process's devices hold, in order."""
        return self.batch_rows.local

    def put(self, local: dict[str, np.ndarray]) -> Batch:
        """Turn this process's rows of a batch (host arrays [R, ...]) into global arrays [B, ...]."""
        return self.batch_rows.put(local)

    # --- state --------------------------------------------------------------------------------------------------------

    def init(self, seed: int | None = None, given: Collection[str] = ()) -> TrainState:
        """Return the state at step 0.

        Args:
            seed: seed of the initialization; the config's seed by default.
            given: paths of parameters to fill with zeros, because the caller overwrites them.
        """
        return self.backend.init(seed, given)

    def weights(self, state: TrainState, *, averaged: bool = False) -> Nested:
        """Return all parameters in the form that the model takes, without copying."""
        group = "ema" if averaged else "parameter"
        return merge(state[group], state.frozen)

    # --- training -----------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one training step; the old state is deleted.

        If the next step updates the layers (memory.update = streamed, memory.prefetch = layer), the new state still
        has their old weights: call `complete_update` before reading it.
        """
        if self.experiment.batch_transform is not None:
            # It may use the weights, for example to generate answers.
            state = self.complete_update(state)
        return self.backend.step(state, self.complete_batch(state, batch))

    def complete_update(self, state: TrainState) -> TrainState:
        """Apply the update that the last step left to the next one; the old state is deleted if there is one."""
        return self.backend.complete_update(state)

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
        if (EVALUATION, "parameter") in self.ahead:
            return
        num_rows = len(self.rows)
        batch = {}
        for name, spec in self.batch_rows.delivered_specs.items():
            batch[name] = np.zeros((num_rows, *spec.shape[1:]), spec.dtype)
        weight_kinds = [False, True] if state.ema else [False]
        for averaged in weight_kinds:
            metrics = self.evaluate(state, self.put(batch), averaged=averaged)
            jax.block_until_ready(metrics)

    # --- inspection of single programs --------------------------------------------------------------------------------

    @property
    def jit_step(self) -> JitStep:
        """The backend, whose step is one program. Raises ValueError if a step is many programs."""
        if not isinstance(self.backend, JitStep):
            raise ValueError(
                "memory.update = layer_programs runs a step as many programs; only a step that is one program has this"
            )
        return self.backend


def inference_program(
    experiment: Experiment, *, host_weights: bool, is_mesh_requested: bool, log: Callable[[str], None]
) -> Program:
    """Build the experiment's inference program on all devices. If the run's mesh does not fit, fsdp = -1 replaces it.

    Args:
        experiment: experiment with the model.
        host_weights: whether to offload the matrices of the stack to host memory.
        is_mesh_requested: whether the user requested this mesh explicitly, so that no other mesh may replace it.
        log: function that prints a message about a replaced mesh.

    Raises:
        ValueError: the model does not fit the mesh, or a requested mesh does not fit the devices.
    """
    mesh = experiment.mesh
    try:
        if mesh.sizes[LAYER_AXIS] != 1:
            raise ValueError(f"mesh.pipe = {mesh.sizes[LAYER_AXIS]}: only training runs in a pipeline")
        mesh.build(jax.devices())
    except ValueError as error:
        if is_mesh_requested:
            raise
        log(f"{error}; using mesh.fsdp = {jax.device_count()}")
        mesh = MeshShape(fsdp=-1)
    return Program(experiment, mesh=mesh, training=False, offload_stack=host_weights)


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
