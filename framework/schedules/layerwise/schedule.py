"""The step as a few small programs for each kind of layer, called from Python one layer after the other.

Dispatch is asynchronous: Python runs ahead of the devices, and norm, finiteness and metrics are scalars that stay
there. The number of programs does not depend on the number of layers, so neither does the compile time. Each layer
has its own arrays (`framework.schedules.stack_parts`), and updated arrays are donated. The programs of the previous and
the next layer move a layer's offloaded arrays (`transfers.TransferQueue`). Nothing is sliced, so this also works on
GPUs, whose compiler cannot slice host memory.

Gradients wait, on the device or on the host, until their norm is known, and a second pass through the layers updates.
With `memory.gradients = none` each layer is updated immediately, as under `in_backward` and with its limits.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, TrainState
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.schedules import in_backward
from plimsoll.framework.schedules.layerwise.functions import EvaluationFunctions, LayerFunctions
from plimsoll.framework.schedules.layerwise.passes import Evaluation
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker, Programs
from plimsoll.framework.schedules.layerwise.step import LayerwiseStep
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.step import Metrics


def check(learner: Learner, memory: Memory) -> None:
    """Check that learner and memory settings work with layer programs.

    Args:
        learner: the learner to check.
        memory: the memory settings to check.

    Raises:
        ValueError: a setting needs more than layer programs support.
    """
    if memory.updates_at_once:
        in_backward.check(learner, "memory.gradients = none")
    if "offload" in memory.remat:
        raise ValueError(
            f"memory.remat = {memory.remat} with memory.update = layer_programs, which has no offload policies; "
            "expected another policy, for example memory.remat = full, with memory.activations = pinned_host, which "
            "offloads the residuals that the policy saves"
        )


class LayerPrograms:
    """The training step and the evaluation of a state whose stacks are in parts.

    Args:
        model, learner, layout, memory: the components of the step.
        jit: jax.jit with the compiler's options.
        compile: see `Programs`.
    """

    def __init__(
        self, model: CausalLM, learner: Learner, layout: StateLayout, memory: Memory, jit: Any, compile: Compile
    ):
        learner.measure_localities()
        self._functions = LayerFunctions(model, learner, layout, memory)
        self._scoring = EvaluationFunctions(model, learner, layout, memory)
        self.programs = Programs(jit, compile, layout)
        self._evaluation = Programs(jit, compile, layout)
        # Structure and memory kinds of the evaluated trees, whose programs are compiled.
        self._evaluated: set[Any] = set()
        number = TensorSpec((), "int32")
        count = max(*(stack.num_repeats for stack in model.stacks.values()), learner.accumulate)
        self._numbers: list[Any] = [number] * count
        # Created once: a transfer in each call would make it wait. A plan's devices are not attached, so a plan gets
        # specs.
        if {*layout.mesh.devices.flat} <= {*jax.devices()}:
            sharding = layout.sharding(number)
            self._numbers = [jax.device_put(np.int32(i), sharding) for i in range(count)]

    def dry_run(self, state: Any, batch: Any, compile: Compile | None = None) -> MemoryTracker:
        """Dry-run a step with the specs of state and batch, and compile its programs; return the memory it needs.

        Args:
            state, batch: specs of the training state and of a batch.
            compile: replaces the function that compiles programs, from now on; None keeps it.
        """
        self.programs.compile = compile or self.programs.compile

        def step(numbers: list[Any], *trees: Any) -> tuple[TrainState, Metrics]:
            return LayerwiseStep(self._functions, self.programs, numbers)(*trees)

        return self.programs.dry_run(step, self._numbers, state, batch)

    def __call__(self, state: TrainState, batch: Nested) -> tuple[TrainState, Metrics]:
        """Run one step; the old state is invalid afterwards."""
        return LayerwiseStep(self._functions, self.programs, self._numbers)(state, batch)

    def evaluate(self, weights: TrainState, buffers: Nested, batch: Nested, compile: Compile | None = None) -> Any:
        """Return sums over a batch, see `Program.evaluate`.

        Args:
            weights, buffers, batch: arrays, or specs for a dry run; of the state only the groups parameter and frozen.
            compile: compiles the programs of a dry run, whose memory is then returned instead of sums.
        """
        programs = self._evaluation
        functions = self._scoring

        def run(numbers: list[Any], *trees: Any) -> Metrics:
            return Evaluation(functions, programs, numbers)(*trees)

        trees = weights, buffers, batch
        leaves = jax.tree.leaves(trees)
        # Averaged weights (learner.ema) may be in another memory than the trained ones.
        kinds = tuple(x.sharding.memory_kind for x in leaves if not compile)
        key = jax.tree.structure(trees), kinds
        if compile is not None or key not in self._evaluated:
            programs.compile = compile or programs.compile
            tracker = programs.dry_run(run, self._numbers, *trees)
            self._evaluated.add(key)
            if compile is not None:
                return tracker
        return run(self._numbers, *trees)
