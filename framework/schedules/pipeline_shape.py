"""The schedule of a pipeline: which microbatch each stage runs in each tick, and which experiments it can run."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from plimsoll.framework.layers import remat
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import nearest_divisors
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.memory import Memory

# The stage of the model whose layers are sharded.
STACK = "stack"


@dataclass(frozen=True)
class StageWork:
    """The work of a stage in one direction of a tick; scalars, or arrays [P] with the work of each stage.

    Attributes:
        valid: bool, whether the stage has work. Otherwise the other fields are those of some valid work, whose results
            are discarded.
        microbatch: int32, index of the microbatch.
        chunk: int32, which of the stage's own chunks of layers runs, from 0.
        slot: int32, where the input is saved between the forward and the backward pass.
    """

    valid: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array


@dataclass(frozen=True)
class PipelineShape:
    """The sizes of a pipeline, and its schedule.

    Each stage runs the same list of work, v M chunks, stage p beginning p ticks after the first one. The backward pass
    has the mirrored list. It begins in the tick in which the first microbatch leaves the last chunk.

    Attributes:
        stages: P, the size of mesh.pipe.
        chunks: v, chunks of layers per stage.
        microbatches: M, microbatches per step.
    """

    stages: int
    chunks: int
    microbatches: int

    @property
    def first_backward_tick(self) -> int:
        """The tick in which the first microbatch reaches the head: ticks before it only run forward."""
        return self.chunks * self.stages - 1

    @property
    def num_forward_ticks(self) -> int:
        """The number of ticks up to the last one that runs forward: ticks after it only run backward."""
        return self.chunks * self.microbatches + self.stages - 1

    @property
    def num_ticks(self) -> int:
        """The number of ticks."""
        return self.num_forward_ticks + self.first_backward_tick

    @property
    def num_slots(self) -> int:
        """The number of inputs that a stage saves at the same time."""
        # The first stage's first input is read in the tick that writes the last slot.
        return min(2 * self.chunks * self.stages - 1, self.num_forward_ticks)

    @property
    def idle_factor(self) -> float:
        """The ratio of the ticks to those in which a stage has work, (v M + P - 1) / (v M)."""
        return self.num_forward_ticks / (self.chunks * self.microbatches)

    def forward_work(self, tick: jax.Array, stage: jax.Array | int) -> StageWork:
        """Return what a stage, or each of several, runs forward in a tick."""
        return self._work(tick - stage, stage, backward=False)

    def backward_work(self, tick: jax.Array, stage: jax.Array | int) -> StageWork:
        """Return what a stage, or each of several, runs backward in a tick: the last stage begins first."""
        return self._work(tick - self.first_backward_tick - (self.stages - 1 - stage), stage, backward=True)

    def _work(self, index: jax.Array, stage: jax.Array | int, *, backward: bool) -> StageWork:
        """Return the work at an index of a stage's list."""
        count = self.chunks * self.microbatches
        valid = (index >= 0) & (index < count)
        index = jnp.clip(index, 0, count - 1)
        # Groups of P microbatches go through all chunks. With a single chunk, the microbatch is the index.
        group, within = jnp.divmod(index, self.chunks * self.stages)
        chunk, member = jnp.divmod(within, self.stages)
        if backward:
            chunk = self.chunks - 1 - chunk
        forward_index = (group * self.chunks + chunk) * self.stages + member
        forward_tick = forward_index + stage
        return StageWork(valid, group * self.stages + member, chunk, forward_tick % self.num_slots)


def check_pipeline(model: Chain, learner: Learner, memory: Memory, stages: int, chunks: int) -> None:
    """Raise ValueError if an experiment cannot run in a pipeline.

    Args:
        model: the model, with whole stacks.
        learner, memory: those sections of the config.
        stages: size of mesh.pipe.
        chunks: mesh.pipe_chunks.
    """
    setting = f"mesh.pipe = {stages}"
    if memory.update != "after_backward":
        raise ValueError(
            f"{setting} with memory.update = {memory.update}: a pipeline has all gradients before the update; expected "
            "memory.update = after_backward, or mesh.pipe = 1"
        )
    if memory.optimizer_state.is_partial or not remat.is_uniform(memory.remat):
        field = "optimizer_state" if memory.optimizer_state.is_partial else "remat"
        value = memory.optimizer_state.text if memory.optimizer_state.is_partial else memory.remat
        raise ValueError(
            f"{setting} with memory.{field} = {value}: the stages of a pipeline are alike; expected the same setting "
            "for all layers"
        )
    if memory.remat == "invert":
        raise ValueError(f"{setting} with memory.remat = invert: expected another policy, such as full")
    if learner.scope == "model":
        raise ValueError(f"{setting} with learner.scope = model: expected learner.scope = layer, or mesh.pipe = 1")
    stack = model.stages.get(STACK)
    if not isinstance(stack, Stack):
        raise ValueError(f"{setting}: {type(model).__name__} has no stage {STACK!r} of layers; expected mesh.pipe = 1")
    if stack.shared:
        raise ValueError(
            f"{setting} with model.stack.shared: all stages would need these layers; expected mesh.pipe = 1"
        )
    if stack.num_repeats % (stages * chunks):
        unit = "layers" if len(stack.pattern.layers) == 1 else f"repeats of {len(stack.pattern.layers)} layers"
        name = "mesh.pipe" if chunks == 1 else "mesh.pipe * mesh.pipe_chunks"
        nearest = nearest_divisors(stack.num_repeats, stages * chunks)
        raise ValueError(
            f"{name} = {stages * chunks} does not divide the {stack.num_repeats} {unit} of model.stack; "
            f"nearest that do: {nearest}"
        )
    count = learner.accumulate
    if chunks > 1 and count % stages:
        nearest = [number for number in (count // stages * stages, -(-count // stages) * stages) if number]
        raise ValueError(
            f"mesh.pipe_chunks = {chunks}: {setting} does not divide learner.accumulate = {count}, and microbatches go "
            f"through the chunks in groups of that size; nearest learner.accumulate: {nearest}"
        )
    # The policy sqrt:NUMBER counts the layers of a chunk.
    stack.select_layers(stack.num_repeats // (stages * chunks)).check_remat(memory.remat)
    outside = [name for name in model.buffer_specs() if name != STACK]
    if outside:
        raise ValueError(f"{setting}: layers outside of model.stack have buffers ({', '.join(outside)}); expected none")
