"""A backward pass that goes a stage and a unit of the stack at a time, and hands on each gradient once it is made.

`jax.value_and_grad` returns all gradients together. Here stages run forward one after the other, stacks in a loop
(`schedules/stack_pass.py`), and backward head first; each gradient goes to a `visit` function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from framework.layers import sums
from framework.layers.base import Context, Out
from framework.layout import Nested, StateLayout
from framework.models.chain import Chain
from framework.schedules.memory import Memory
from framework.schedules.stack_pass import StackPass, StackPull
from framework.schedules.stage_pass import StagePass, StagePull
from framework.schedules.unit import Carry, Cotangent
from framework.schedules.visits import Turns, Visit, Visits, Work

_NO_TURNS = Turns()


class Pull(Protocol):
    """The backward pass of `forward`."""

    def __call__(
        self,
        work: Work,
        visit: Visit,
        turns: Turns = ...,
    ) -> Work:
        """Returns the work as visits and turns left it."""
        ...


class Forward(NamedTuple):
    """What the forward pass hands on.

    Attributes:
      loss: the objective without the losses of units, f32 scalar.
      out: everything else that leaves the model.
      pull: `pull(work, visit, turns)` runs backward, head first, and returns the work as visits left it: the weights,
        and what visits need. A tied parameter is visited with its home stage, with the sum of its gradients.
    """

    loss: jax.Array
    out: Out
    pull: Pull


def forward(
    model: Chain,
    layout: StateLayout,
    memory: Memory,
    weights: Work,
    ctx: Context,
    buffers: Nested,
) -> Forward:
    """Computes the objective, and prepares the backward pass.

    Args:
        model: a chain of stages.
        layout: where the weights are.
        memory: where what is kept of each unit of a whole stack goes; a section of a stack says that itself. The remat
            policy decides what is kept.
        weights: the groups "parameter" and "frozen".
        ctx: the context of the batch.
        buffers: the model's buffers, by stage.
    """
    stages = StagePass.of(model, layout, memory, weights, ctx, buffers)
    carry: Carry = None
    outs: dict[str, Out] = {}
    stage_pulls: dict[str, StagePull] = {}
    stack_pulls: dict[str, StackPull] = {}
    for name in model.stages:
        if name in model.stacks:
            stack = StackPass.of(stages, name, carry)
            carry, outs[name], stack_pulls[name] = stack.forward(carry)
        else:
            carry, outs[name], stage_pulls[name] = stages.forward(name, carry)
    out = model.merged(outs)
    assert out.loss is not None
    # The last carry is the last stage's loss, where cotangents begin. Losses of the stack's units, which the
    # objective has too, join the backward pass at their units.
    return Forward(out.loss, out, _ChainPull(stages, carry, stage_pulls, stack_pulls))


@dataclass(frozen=True)
class _ChainPull:
    """The backward pass of `forward`.

    Attributes:
      stages: of the forward pass.
      loss: the last stage's.
      stage_pulls: by name, of the stages outside of stacks.
      stack_pulls: by name, of the stacks.
    """

    stages: StagePass
    loss: jax.Array
    stage_pulls: dict[str, StagePull]
    stack_pulls: dict[str, StackPull]

    def __call__(self, work: Work, visit: Visit, turns: Turns = _NO_TURNS) -> Work:
        """See `Pull`."""
        stages = self.stages
        first_stage = next(iter(stages.model.stages))
        first_stack = next(iter(stages.model.stacks), None)
        tie_grads: dict[str, jax.Array] = {}
        shared_sums: Nested = {}
        ct: Cotangent = jnp.ones_like(self.loss)
        for name in reversed(stages.model.stages):
            if name in stages.model.stacks:
                work, ct, stack_sums = self.stack_pulls[name](work, ct, Visits(visit, turns))
                # Sections of a stack share the same parameters, whose update waits for the first section.
                shared_sums = sums.add(shared_sums, stack_sums) if shared_sums else stack_sums
                if shared_sums and name == first_stack:
                    shared_grads = stages.sharded("shared", shared_sums)
                    work = visit(work, "shared", shared_grads, None)
                continue
            stage_grads, ct = self.stage_pulls[name](ct)
            grads, tie_grads = stages.settled(name, stage_grads, tie_grads)
            if not grads:
                continue
            work = visit(work, name, grads, None)
            if name != first_stage:
                # The visit ends before the stack's loop begins: what the head's update holds is as large
                # as its table.
                stage_params, ct = jax.lax.optimization_barrier((work["parameter"][name], ct))
                work = {**work, "parameter": {**work["parameter"], name: stage_params}}
        return work
