"""Pipeline parallelism: stages of layers on different devices, through which the microbatches of a step flow.

The layers of the stack are sharded over the mesh axis `pipe`, of P devices. All stages run in lockstep, one microbatch
each, and then pass their outputs on to the next stage and the cotangents of their inputs to the previous one. Such a
tick is one iteration of a loop in the step's program. Arrays have a leading axis of stages, sharded over `pipe`: a tick
is a `vmap` over the stages, and passing on is a rotation along this axis, which XLA turns into a collective permute. So
all other mesh axes work inside a stage as they do without a pipeline.

The schedule is 1F1B (Narayanan et al. 2021, arXiv 2104.04473): in a tick, each stage runs one microbatch forward and
another one backward. A microbatch goes through the stages, through the head, and immediately back. The first P - 1
ticks run only forward and the last P - 1 only backward, so M microbatches take the time of M + P - 1: nothing but the
usual bubble is lost. A stage saves only its input, for at most 2 P - 1 microbatches regardless of M. The backward pass
runs the stage forward once more, under the stack's remat policy.

With v = `mesh.pipe_chunks` over 1, the schedule is interleaved 1F1B of the same paper: stage p has the chunks of layers
p, P + p, 2 P + p, ..., and a tick runs one of them. P microbatches go through the first chunk of each stage, then the
same ones through the second, and so on. The bubble is P - 1 ticks of v M + P - 1, with ticks that are v times shorter.
A stage then saves at most 2 v P - 1 inputs.

The stages before and after the stack (embedding and head) run in the same ticks, on all devices: their tables are
sharded over `pipe` by vocabulary, see `layers.base.VOCAB_AXES`. The step has one update, from the sum of all gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import Nested, TrainState
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.pipeline_shape import STACK
from plimsoll.framework.schedules.pipeline_stages import ForwardState, GradientState, PipelineStep, add_outs


def accumulate_gradients(
    model: Chain, learner: Learner, state: TrainState, ctx: Context, *, chunks: int
) -> tuple[tuple[jax.Array, Out], Nested]:
    """Return ((loss, out), gradients of the trainable parameters), summed over the learner's microbatches.

    Args:
        model, learner: the model, and the learner.
        state: the training state before the step.
        ctx: the context of the global batch.
        chunks: mesh.pipe_chunks.
    """
    specs = jax.tree.map(lambda spec: replace(spec, dtype=learner.gradient_dtype(spec)), learner.specs)
    pipeline = PipelineStep(model, chunks, learner.accumulate, state.parameter, state.frozen, ctx, specs)
    shape = pipeline.shape

    def fill(forward: ForwardState, tick: jax.Array) -> tuple[ForwardState, None]:
        forward, _ = pipeline.forward(forward, tick)
        return forward, None

    def run(states: tuple[ForwardState, GradientState], tick: jax.Array) -> tuple[Any, None]:
        forward, gradients = states
        forward, y = pipeline.forward(forward, tick)
        head = pipeline.run_head(gradients.outer_grads, forward.outs, y, tick)
        gradients = replace(gradients, outer_grads=head.outer_grads)
        gradients = pipeline.backward(forward.saved, gradients, tick, head.ct)
        return (replace(forward, outs=head.outs), gradients), None

    ticks = jnp.arange(shape.num_ticks)
    begin, end = shape.first_backward_tick, shape.num_forward_ticks
    forward = pipeline.start(state.buffer, training=True)
    forward, _ = jax.lax.scan(fill, forward, ticks[:begin])
    (forward, gradients), _ = jax.lax.scan(run, (forward, pipeline.start_backward(forward)), ticks[begin:end])

    def drain(gradients: GradientState, tick: jax.Array) -> tuple[GradientState, None]:
        return pipeline.backward(forward.saved, gradients, tick, None), None

    if shape.first_backward_tick == 1:
        # XLA would unroll a loop of one iteration. Nothing then keeps it from allocating the residuals of this tick
        # before the previous loop, whose own residuals they would double. It cannot know that this branch is taken.
        is_taken = jax.lax.optimization_barrier(jnp.bool_(True))
        gradients = jax.lax.cond(is_taken, lambda: drain(gradients, jnp.int32(end))[0], lambda: gradients)
    else:
        gradients, _ = jax.lax.scan(drain, gradients, ticks[end:])
    grads = dict(gradients.outer_grads)
    if gradients.stack_grads:
        grads[STACK] = pipeline.join_layers(gradients.stack_grads)
    out = pipeline.finish(forward)
    assert out.loss is not None
    return (out.loss, out), grads


def evaluate(model: Chain, params: Nested, buffers: Nested, ctx: Context, *, chunks: int, num_microbatches: int) -> Out:
    """Return the loss and metrics of a batch, summed over its microbatches, without gradients.

    Args:
        model: the model.
        params: all parameters, on the device.
        buffers: the model's buffers.
        ctx: the context of the batch, of an evaluation.
        chunks: mesh.pipe_chunks.
        num_microbatches: number of microbatches.
    """
    pipeline = PipelineStep(model, chunks, num_microbatches, params, {}, ctx)

    def run(state: ForwardState, tick: jax.Array) -> tuple[ForwardState, None]:
        state, stages_y = pipeline.forward(state, tick)
        leaving = pipeline.leaving(tick)
        y = pipeline.take_last(stages_y)

        def run_after() -> dict[str, Out]:
            _, outs = pipeline.run_after(pipeline.outer_params, y, pipeline.microbatch_ctx(leaving.microbatch))
            return add_outs(state.outs, outs)

        outs = jax.lax.cond(leaving.valid, run_after, lambda: {name: state.outs[name] for name in pipeline.after})
        return replace(state, outs={**state.outs, **outs}), None

    ticks = jnp.arange(pipeline.shape.num_forward_ticks)
    state, _ = jax.lax.scan(run, pipeline.start(buffers, training=False), ticks)
    return pipeline.finish(state)
