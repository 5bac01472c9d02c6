"""A stage-by-stage and layer-by-layer backward pass that passes each gradient to a hook as soon as it is computed.

`jax.value_and_grad` returns all gradients together. Here stages run forward one after the other, stacks in a loop
(`schedules/stack_pass.py`), and then backward, head first. Each gradient goes to an `on_grads` hook.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from plimsoll.framework.layers import grad_accumulation
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import Nested, StateLayout
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.backward_hooks import BackwardHooks, BackwardState, GradientHook, LayerHooks
from plimsoll.framework.schedules.layer_computation import Carry, Cotangent
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.stack_pass import StackPass, StackPull
from plimsoll.framework.schedules.stage_pass import StagePass, StagePull

_NO_LAYER_HOOKS = LayerHooks()


class Pull(Protocol):
    """The backward pass that `forward` returns."""

    def __call__(
        self, backward_state: BackwardState, on_grads: GradientHook, layer_hooks: LayerHooks = ...
    ) -> BackwardState:
        """Run backward, head first, and return the backward state after all hooks.

        Args:
            backward_state: the weights, and everything else that the hooks need.
            on_grads: the hook that receives the gradients.
            layer_hooks: further hooks of the loops over layers.
        """
        ...


class ChainForward(NamedTuple):
    """The result of the forward pass.

    Attributes:
        loss: the objective without the losses of layers, f32 scalar.
        out: everything else that the model returns.
        pull: `pull(backward_state, on_grads, layer_hooks)` runs backward, head first, and returns the backward state
            after all hooks. The gradient of a tied parameter is passed to the hook together with its home stage's, as
            the sum over all stages that read it.
    """

    loss: jax.Array
    out: Out
    pull: Pull


def forward(
    model: Chain, layout: StateLayout, memory: Memory, weights: BackwardState, ctx: Context, buffers: Nested
) -> ChainForward:
    """Compute the objective, and prepare the backward pass.

    Args:
        model: a chain of stages.
        layout: placement and sharding of the weights.
        memory: where residuals of an unsplit stack go; a range of layers has its own setting. The remat policy
            decides which residuals are saved.
        weights: the groups "parameter" and "frozen".
        ctx: the context of the batch.
        buffers: the model's buffers, by stage.
    """
    stages = StagePass.build(model, layout, memory, weights, ctx, buffers)
    carry: Carry = None
    outs: dict[str, Out] = {}
    stage_pulls: dict[str, StagePull] = {}
    stack_pulls: dict[str, StackPull] = {}
    for name in model.stages:
        if name in model.stacks:
            stack = StackPass.build(stages, name, carry)
            carry, outs[name], stack_pulls[name] = stack.forward(carry)
        else:
            carry, outs[name], stage_pulls[name] = stages.forward(name, carry)
    out = model.merge_outs(outs)
    assert out.loss is not None
    # The last carry is the last stage's loss, where cotangents start. The objective also has the losses of the
    # stack's layers, which join the backward pass at their layers.
    return ChainForward(out.loss, out, _ChainPull(stages, carry, stage_pulls, stack_pulls))


@dataclass(frozen=True)
class _ChainPull:
    """The backward pass of `forward`.

    Attributes:
        stages: the forward pass through the stages.
        loss: loss of the last stage.
        stage_pulls: by name, the backward passes of the stages outside the stacks.
        stack_pulls: by name, the backward passes of the stacks.
    """

    stages: StagePass
    loss: jax.Array
    stage_pulls: dict[str, StagePull]
    stack_pulls: dict[str, StackPull]

    def __call__(
        self, backward_state: BackwardState, on_grads: GradientHook, layer_hooks: LayerHooks = _NO_LAYER_HOOKS
    ) -> BackwardState:
        """Run the backward pass; see `Pull`."""
        stages = self.stages
        first_stage = next(iter(stages.model.stages))
        first_stack = next(iter(stages.model.stacks), None)
        tie_grads: dict[str, jax.Array] = {}
        shared_sums: Nested = {}
        ct: Cotangent = jnp.ones_like(self.loss)
        for name in reversed(stages.model.stages):
            if name in stages.model.stacks:
                backward_state, ct, stack_sums = self.stack_pulls[name](
                    backward_state, ct, BackwardHooks(on_grads, layer_hooks)
                )
                # Layer ranges of one stack share these parameters, so their update waits for the first range.
                shared_sums = grad_accumulation.add(shared_sums, stack_sums) if shared_sums else stack_sums
                if shared_sums and name == first_stack:
                    shared_grads = stages.shard_gradients("shared", shared_sums)
                    backward_state = on_grads(backward_state, "shared", shared_grads, None)
                continue
            stage_grads, ct = self.stage_pulls[name](ct)
            grads, tie_grads = stages.resolve_ties(name, stage_grads, tie_grads)
            if not grads:
                continue
            backward_state = on_grads(backward_state, name, grads, None)
            if name != first_stage:
                # The barrier makes the hook finish before the stack's loop starts: the head's update holds as much
                # memory as its table.
                stage_params, ct = jax.lax.optimization_barrier((backward_state["parameter"][name], ct))
                backward_state = {**backward_state, "parameter": {**backward_state["parameter"], name: stage_params}}
        return backward_state
