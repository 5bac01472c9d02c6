"""Execution: how the state of a run lies in memory, and by which compiled programs it is made, trained and evaluated.

There are two: `framework.program.whole` jits the step as one program over stacked weights, and
`framework.program.layerwise` runs it layer by layer. `Program` chooses one, and nobody asks it which it is.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from framework.devices import executables
from framework.layout import Nested, StateLayout
from framework.program.ahead import Ahead
from framework.program.experiment import Experiment
from framework.program.first_values import FirstValues
from framework.program.rows import Batch, BatchRows
from framework.schedules.layerwise.programs import Compile, Compiled, Ledger
from framework.schedules.step import Metrics, State
from framework.schedules.storage import Parts


class Execution(ABC):
    """The compiled programs of a run, and the layout of the state that they take.

    Args:
        experiment: what to train.
        checkpoint_layout: the layout of checkpoints, which is the same for every execution: stacks are whole.
        rows: the batches on the mesh.
        ahead: the thread that compiles programs before they are called.
        layout: that of the running state, if its stacks are to be whole whatever `parts_of` says.

    Attributes:
      parts: in which the running state has its stacks.
      jit: jax.jit with the compiler's options.
      first_values: what the state holds at step 0.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoint_layout: StateLayout,
        rows: BatchRows,
        ahead: Ahead,
        layout: StateLayout | None = None,
    ):
        self.experiment = experiment
        self.mesh = checkpoint_layout.mesh
        self.checkpoint_layout = checkpoint_layout
        self.parts = Parts((), {})
        if layout is None:
            self.parts = self.parts_of(experiment)
            layout = StateLayout(self.parts.specs(checkpoint_layout.specs), self.mesh)
        self.layout = layout
        self.rows = rows
        self.ahead = ahead
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.compiler_options = experiment.compiler.options_for(self.mesh)
        jit_options = self.compiler_options or None
        self.jit: Any = functools.partial(jax.jit, compiler_options=jit_options)
        self.first_values = FirstValues(experiment.model, experiment.learner, checkpoint_layout, self.layout)

    @staticmethod
    @abstractmethod
    def parts_of(experiment: Experiment) -> Parts:
        """The parts in which a run holds its stacks.

        Raises:
            ValueError: the model has other stages than a step of this execution runs, or its stacks cannot be cut so.
        """

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices: tpu, gpu or cpu."""
        return self.mesh.devices.flat[0].platform

    def compile_here(self, lowered: Any, hosted: executables.HostBytes) -> Compiled:
        """Compiles a lowered program for the mesh, with the peak of one device in bytes."""
        run = executables.compiled(lowered, self.compiler_options)
        peak = executables.peak_bytes(run.memory_analysis(), self.platform, hosted)
        return Compiled(run, peak)

    # --- the state at step 0 ------------------------------------------------------------------------------------------

    @abstractmethod
    def init(self, seed: int | None, given_paths: Collection[str]) -> State:
        """The state at step 0, in the layout.

        Args:
            seed: of the initialization; the config's seed by default.
            given_paths: of parameters that are zeros, because the caller overwrites them.
        """

    def calibrated(self, state: State, batch: Batch) -> State:
        """The first state with the values that the model gives its parameters for this batch, the run's first.

        Optimizer state and averages are made to fit them. The state that was passed in is gone afterwards.
        """
        calibrate = self.first_values.calibration()
        weights = {group: state[group] for group in ("parameter", "frozen")}
        derived_groups = ("optimizer", "ema")
        # Optimizer state and averages are made anew from the weights, so the old ones go before the
        # new ones are made.
        for leaf in jax.tree.leaves([state[group] for group in derived_groups]):
            leaf.delete()
        result_specs = {group: self.layout.specs[group] for group in (*weights, *derived_groups)}
        run = self.jit(calibrate, out_shardings=self.layout.shardings(result_specs), donate_argnums=0)
        return {**state, **run(weights, state["counter"], state["buffer"], batch)}

    @abstractmethod
    def with_layer(self, old: Nested, new: Nested, index: jax.Array) -> Nested:
        """Inside jit: leaves of the running state once a layer's values were written; see `Parts.place`.

        Args:
            old: leaves [L, ...], or [1, ...] where a leaf holds one layer.
            new: the layer's values [...].
            index: int32[], the layer's index in these leaves.
        """

    # --- programs that a thread compiles ------------------------------------------------------------------------------

    @abstractmethod
    def begin_first_values(self) -> None:
        """Has a thread compile the program that draws the first values, where it is one program."""

    @abstractmethod
    def begin_evaluation(self) -> None:
        """Has a thread compile evaluation of the weights and of their averages, where each is one program."""

    @property
    @abstractmethod
    def evaluation_has_begun(self) -> bool:
        """Whether a thread was asked to compile evaluation."""

    # --- the step and evaluation --------------------------------------------------------------------------------------

    @abstractmethod
    def compile(self) -> None:
        """Compiles the training step, once."""

    @abstractmethod
    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """One training step; the old state is gone afterwards."""

    @abstractmethod
    def evaluate(self, state: State, batch: Batch, group: str) -> Metrics:
        """Sums over a batch with the weights of a group of the state, "parameter" or "ema"."""

    # --- what is told about the programs ------------------------------------------------------------------------------

    @abstractmethod
    def executables(self) -> list[Any]:
        """The compiled programs of a step on this mesh, in the order of their calls."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The device memory of one device during a step's worst instant, once it is compiled for this mesh."""

    @abstractmethod
    def rehearse_init(self, compile: Compile) -> Ledger:
        """Compiles the programs of `init` with `compile`, also for a machine that is not here, and adds them up."""

    @abstractmethod
    def rehearse_step(self, compile: Compile) -> Ledger:
        """The same of a training step."""

    @abstractmethod
    def rehearse_evaluation(self, compile: Compile) -> Ledger:
        """The same of the evaluation of a batch."""

    @abstractmethod
    def step_jaxprs(self, ledger: Ledger | None = None) -> list[ClosedJaxpr]:
        """What a step computes, one jaxpr for each call of a program.

        Args:
            ledger: of a rehearsed step. Without it, the list is empty where only a rehearsal makes the calls.
        """

    # --- what checkpoints hold ----------------------------------------------------------------------------------------

    def stored(self, state: State) -> State:
        """The part of a state that a checkpoint holds, with whole stacks; parts are joined in host memory."""
        saved_groups = {group: state[group] for group in self.checkpoint_layout.kept}
        return self.parts.joined(saved_groups, self.checkpoint_layout)

    @property
    def abstract_stored(self) -> Nested:
        """The abstract arrays that a checkpoint is read into. Stacks that are to be cut are read into host memory."""
        return self.checkpoint_layout.abstract(self.parts.before_cut(self.checkpoint_layout))

    def restored(self, stored: State) -> State:
        """The state that a checkpoint's arrays make. `stored` is gone afterwards."""
        state = self.parts.cut(stored, self.layout)
        return {**state, **self.scratch_jit()}

    @property
    def bytes_by_host(self) -> int:
        """Of one device's memory, the bytes that `restored` takes through host memory, to be cut there."""
        part_stages = {part.stage for part in self.parts.parts}
        total = 0
        for leaf in self.layout:
            if leaf.spec.memory_kind == "device" and leaf.path.split("/")[1] in part_stages:
                total += leaf.bytes_per_device
        return total

    def joined(self, state: State) -> State:
        """Weights, averages and buffers with whole stacks, for generation. The state is gone afterwards."""
        if not self.parts.parts:
            return state
        model_state = {group: state[group] for group in ("parameter", "frozen", "ema", "buffer")}
        joined_state = self.parts.joined(model_state, self.checkpoint_layout)
        # The parts and the optimizer's state go before the whole stacks come to the devices, which may not have room
        # for both. Leaves outside of stacks are the same arrays in the joined state, and stay.
        leaving: list[Any] = [state["optimizer"]]
        for tree in model_state.values():
            leaving += [part.of(tree) for part in self.parts.parts if part.stage in tree]
        for leaf in jax.tree.leaves(leaving):
            leaf.delete()
        specs = {group: self.checkpoint_layout.specs[group] for group in model_state}
        return jax.device_put(joined_state, self.checkpoint_layout.shardings(specs))

    @functools.cached_property
    def scratch_jit(self) -> Any:
        """The jitted function that makes the groups of the state that no checkpoint holds, as zeros."""
        specs = {name: tree for name, tree in self.layout.specs.items() if name not in self.layout.kept}
        zeros = lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)  # noqa: E731
        return jax.jit(zeros, out_shardings=self.layout.shardings(specs))
