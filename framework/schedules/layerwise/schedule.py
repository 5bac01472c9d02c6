"""The step as a few small programs for each kind of layer, called from Python one layer after the other.

Dispatch is asynchronous: Python runs ahead of the devices, and norm, finiteness and metrics are scalars that stay
there. The number of programs does not depend on the number of layers, so neither does the compile time. Each layer
has its own arrays (`schedules.stack_layout`), and updated arrays are donated. The programs of the previous and
the next layer move a layer's offloaded arrays (`programs.TransferQueue`). Nothing is sliced, so this also works on
GPUs, whose compiler cannot slice host memory.

Gradients wait, on the device or on the host, until their norm is known, and a second pass through the layers updates.
With `memory.gradients = none` each layer is updated immediately, as under `in_backward` and with its limits.

Microbatches run one after the other through all layers, or with `memory.accumulate_by = layer`, all of them through a
layer before the next one is fetched.

`passes.py` runs the forward and backward pass, and `update.py` the updates. `layer_functions.py` has the functions that
are compiled, and `programs.py` compiles and calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layers.base import Out
from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, TrainState
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import select_updated
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.schedules import in_backward
from plimsoll.framework.schedules.backward_state import Weights
from plimsoll.framework.schedules.layerwise.layer_functions import Inputs, LayerFunctions, Variables
from plimsoll.framework.schedules.layerwise.passes import BackwardPass, Microbatch, Runner
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker, Programs
from plimsoll.framework.schedules.layerwise.update import Updates, UpdateUnit, replicated_specs
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
        # The microbatches that run through a layer together have its complete gradient.
        in_backward.check(learner, "memory.gradients = none", accumulates=memory.accumulate_by == "layer")
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
    """

    def __init__(
        self,
        model: CausalLM,
        learner: Learner,
        layout: StateLayout,
        memory: Memory,
        jit: Callable[..., jax.stages.Wrapped],
    ):
        learner.measure_localities()
        self.programs = Programs(jit, layout)
        self._functions = LayerFunctions(model, learner, layout, memory, training=True)
        self._evaluation_programs = Programs(jit, layout)
        self._evaluation_functions = LayerFunctions(model, learner, layout, memory, training=False)
        # Structure and memory kinds of the evaluated trees, whose programs are compiled.
        self._evaluated: set[Hashable] = set()
        number = TensorSpec((), "int32")
        count = max(*(stack.num_repeats for stack in model.stacks.values()), learner.accumulate)
        self._numbers: list[Any] = [number] * count
        # Created once: a transfer in each call would make it wait. A plan's devices are not attached, so a plan gets
        # specs.
        if {*layout.mesh.devices.flat} <= {*jax.devices()}:
            sharding = layout.sharding(number)
            self._numbers = [jax.device_put(np.int32(i), sharding) for i in range(count)]

    def dry_run(self, state: TrainState, batch: Nested, compile: Compile) -> MemoryTracker:
        """Dry-run a step with the specs of state and batch, and compile its programs; return the memory it needs.

        Args:
            state, batch: specs of the training state and of a batch.
            compile: compiles a program.
        """
        step = partial(_run_step, self._functions, self.programs)
        return self.programs.dry_run(compile, step, self._numbers, state, batch)

    def __call__(self, state: TrainState, batch: Nested) -> tuple[TrainState, Metrics]:
        """Run one step; the old state is invalid afterwards."""
        return _run_step(self._functions, self.programs, self._numbers, state, batch)

    def dry_run_evaluation(self, weights: Weights, buffers: Nested, batch: Nested, compile: Compile) -> MemoryTracker:
        """Dry-run the evaluation of a batch, and compile its programs; return the memory it needs.

        Args:
            weights, buffers, batch: arrays or specs, see `evaluate`.
            compile: compiles a program.
        """
        programs = self._evaluation_programs
        evaluate = partial(_evaluate, self._evaluation_functions, programs)
        return programs.dry_run(compile, evaluate, self._numbers, weights, buffers, batch)

    def evaluate(self, weights: Weights, buffers: Nested, batch: Nested, compile: Compile) -> Metrics:
        """Return sums over a batch, see `Program.evaluate`.

        Args:
            weights: all weights, by stage.
            buffers: the model's buffers, by stage.
            batch: arrays of the global batch.
            compile: compiles a program, at the first call.
        """
        leaves, treedef = jax.tree.flatten((weights, buffers, batch))
        # Averaged weights (learner.ema) may be in another memory than the trained ones.
        key = treedef, tuple(x.sharding.memory_kind for x in leaves)
        if key not in self._evaluated:
            self.dry_run_evaluation(weights, buffers, batch, compile)
            self._evaluated.add(key)
        return _evaluate(self._evaluation_functions, self._evaluation_programs, self._numbers, weights, buffers, batch)


# --- the step, with arrays, or in a dry run with abstract arrays -----------------------------------------------------


def _run_step(
    functions: LayerFunctions, programs: Programs, numbers: list[Any], state: TrainState, batch: Nested
) -> tuple[TrainState, Metrics]:
    """Run a training step: microbatches forward and backward, the decision, and the update.

    Args:
        functions, programs: the computations, and the compiled programs that run them.
        numbers: 0, 1, ... on the devices.
        state: the training state, which is invalid afterwards.
        batch: arrays of the global batch.
    """
    # The parts of stacks are replaced one by one below, in lists that belong to the step. The caller's state would
    # keep the old parts alive.
    state = TrainState(**{group: copy_containers(tree) for group, tree in state.items()})
    counter = state.counter
    updates_at_once = functions.memory.updates_at_once
    weights = Weights(frozen=state.frozen, trainable=state.parameter)
    runner = Runner(functions, programs, numbers, weights)
    run = runner.run
    updates = Updates(functions.updates, run, numbers, state)
    decide = partial(run, "decide", functions.updates.decide, out=replicated_specs)

    microbatches, total = _run_microbatches(runner, updates, state, batch)
    # Created by a program, because a transfer from Python would make the step wait.
    squares = run("zero", jnp.zeros_like, total.loss, out=replicated_specs)
    if updates_at_once and functions.learner.clip_mode == "two_pass":
        _, grad_stats = decide(total.loss, squares, counter)
        grad_stats = BackwardPass(runner, updates, microbatches, grad_stats, measures=True).run()
        assert grad_stats is not None
        squares = grad_stats.squares
    decision, grad_stats = decide(total.loss, squares, counter)
    immediate = decision if updates_at_once else None
    grad_stats = BackwardPass(runner, updates, microbatches, grad_stats, immediate).run()
    assert grad_stats is not None
    if not updates_at_once:
        decision, _ = decide(total.loss, grad_stats.squares, counter)
        runner.unload()
        updates.update_all(decision)

    finish = partial(functions.updates.finish, at_once=updates_at_once)
    new_counter, metrics = run("finish", finish, counter, decision, total, grad_stats, out=replicated_specs)
    updates.finalize()
    ok = grad_stats.ok if updates_at_once else decision.ok
    for stage, new_buffers in microbatches[-1].new_buffers.items():
        select = partial(run, f"buffer {stage}", select_updated, ok, out=replicated_specs)
        old_buffers = state.buffer[stage]
        if isinstance(new_buffers, list):
            state.buffer[stage] = list(map(select, new_buffers, old_buffers))
        else:
            state.buffer[stage] = select(new_buffers, old_buffers)
    return replace(state, counter=new_counter), metrics


def _run_microbatches(
    runner: Runner, updates: Updates, state: TrainState, batch: Nested
) -> tuple[list[Microbatch], Out]:
    """Run all microbatches forward, and all but those of the last pass backward.

    The gradients of the last pass complete the sum, so it runs backward together with the decision.

    Returns:
        (the microbatches of the last pass, the sum of losses and metrics).
    """
    f = runner.functions
    total: Out | None = None
    microbatches: list[Microbatch] = []
    count = f.learner.accumulate
    per_pass = count if f.memory.accumulate_by == "layer" else 1
    for first in range(0, count, per_pass):
        if microbatches:
            BackwardPass(runner, updates, microbatches, None).run()
        buffers = microbatches[-1].new_buffers if microbatches else state.buffer
        microbatches = []
        for number in range(per_pass):
            inputs = Inputs(batch, state.counter, runner.numbers[first + number])
            # A layer's new buffers are in the same container when the next microbatch reads them.
            microbatches.append(Microbatch(inputs, number, buffers, copy_containers(buffers)))
            buffers = microbatches[-1].new_buffers
        all_activations = runner.forward(microbatches)
        for microbatch, activations in zip(microbatches, all_activations, strict=True):
            # Where layers are inverted, only the last layer's output is saved.
            if f.residual_plan.inverts:
                output = microbatch.residuals[-1]
                assert output is not None
                microbatch.residuals[-1] = output.with_leaves(jax.tree.leaves(activations.x))
        last_group = f.residual_plan.groups[-1][0]
        microbatches[0].request_residuals(runner.run, last_group)
        runner.run_head(updates, microbatches, all_activations)
        for activations in all_activations:
            total = runner.run("total", f.updates.total, activations.outs, total, out=replicated_specs)
    assert total is not None
    return microbatches, total


def copy_containers(tree: Nested) -> Nested:
    """Copy the containers of a tree, down to the lists of a stack's parts, but not its arrays."""
    return {key: list(value) if isinstance(value, list) else value for key, value in tree.items()}


# --- the evaluation --------------------------------------------------------------------------------------------------


def _evaluate(
    functions: LayerFunctions, programs: Programs, numbers: list[Any], weights: Weights, buffers: Nested, batch: Nested
) -> Metrics:
    """Return sums over a batch; see `_run_step` and `LayerPrograms.evaluate`."""
    runner = Runner(functions, programs, numbers, weights)
    head = UpdateUnit("head")
    sums: Metrics = {}
    for number in range(functions.learner.accumulate):
        microbatch = Microbatch(Inputs(batch, {}, numbers[number]), 0, buffers, copy_containers(buffers))
        (activations,) = runner.forward([microbatch])
        variables = Variables(runner.take_stage_weights(head), Weights(), head.select(microbatch.buffers))
        scores = runner.run(
            "score", functions.score, variables, activations.take(), microbatch.inputs, out=replicated_specs
        )
        # Dropped, because the next microbatch needs its memory.
        del variables
        sums = runner.add(sums, scores)
    return sums
