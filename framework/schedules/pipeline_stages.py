"""The computation of one tick of a pipeline: all stages at once, forward and backward, and what surrounds the stack.

Arrays have a leading axis of stages, sharded over the mesh axis pipe: see `framework.schedules.pipeline`.

A tick is a `vmap` over that axis with `spmd_axis_name`, which adds it to the layers' sharding constraints and to their
`shard_map`s. A `shard_map` over pipe around the layers would need nested ones. The pipeline differentiates by itself
what a tick runs backward (`jax.vjp` inside the `vmap`), because differentiating the loops would save all microbatches.

Ticks that only run forward, that run both ways, and that only run backward have loops of their own: in one loop, every
tick would take as long as both passes. All devices run the same program, so work that is not valid is computed and
masked: zeros go in, and `where` comes after, so no NaN of a stage without work reaches a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from plimsoll.framework.layers import grad_accumulation
from plimsoll.framework.layers.base import BATCH_AXES, LAYER_AXIS, Carry, Context, Out
from plimsoll.framework.layout import Nested, PyTree, TensorSpec, merge
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.pipeline_shape import STACK, PipelineShape, StageWork
from plimsoll.framework.schedules.step import microbatches

T = TypeVar("T")

# --- arrays with an axis of stages -----------------------------------------------------------------------------------


def mask(valid: jax.Array, tree: T) -> T:
    """Return the arrays [P, ...] with zeros where `valid` [P] is false."""
    return select_stages(valid, tree, jax.tree.map(jnp.zeros_like, tree))


def select_stages(valid: jax.Array, chosen: T, other: T) -> T:
    """Return `chosen` [P, ...] where `valid` [P] is true, else `other` [P, ...] or [1, ...]."""

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(valid.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(select, chosen, other)


def take_stage(tree: T, is_stage: jax.Array) -> T:
    """Return the arrays of the one stage for which `is_stage` [P] is true, without the axis of stages.

    Each device along pipe gets a copy. If no stage is selected, the result is zero.
    """
    # A sum of one number and zeros is exact in any dtype. `jnp.sum` would sum, and communicate, in float32.
    return jax.tree.map(lambda x: jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,)), mask(is_stage, tree))


def rotate(tree: T, shift: int) -> T:
    """Move the arrays [P, ...] to the next stage (shift = 1) or to the previous one (-1), around the ring."""
    return jax.tree.map(lambda x: jnp.roll(x, shift, axis=0), tree)


def take_each(tree: T, index: jax.Array, axis: int) -> T:
    """Return for each stage one element of arrays [P, ...] along another axis: [P, ...] without that axis.

    Args:
        tree: arrays with stages on axis 0; or on axis 1, if `axis` is 0.
        index: int32[P], index of each stage's element.
        axis: axis of the elements, 0 or 1.
    """

    def take(x: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)

    take_all = jax.vmap(take, in_axes=(1 - axis, 0), spmd_axis_name=LAYER_AXIS)
    return jax.tree.map(lambda x: take_all(x, index), tree)


def put_each(tree: T, index: jax.Array, elements: T) -> T:
    """Inverse of `take_each` with axis = 1: return [P, n, ...] with one element of each stage replaced."""

    def put(x: jax.Array, index: jax.Array, element: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, element, index, 0)

    put_all = jax.vmap(put, spmd_axis_name=LAYER_AXIS)
    return jax.tree.map(lambda x, element: put_all(x, index, element), tree, elements)


@dataclass(frozen=True)
class ChunkPlace:
    """A place for a chunk of layers: the number of a chunk of a stage."""

    stage: int
    number: int


@dataclass(frozen=True)
class ChunkMove:
    """The move of a chunk of layers from one place to another."""

    source: ChunkPlace
    target: ChunkPlace


def exchange_chunks(tree: T, mesh: Mesh, *, to_stages: bool) -> T:
    """Move chunks of layers between the order in which they are stored and the order in which they run.

    The layout shards the layer axis evenly, so device s stores the chunks s v, s v + 1, ... of all P v. Stage p runs
    the chunks p, P + p, 2 P + p, ... Each step thus moves the weights once and the gradients once, in v rounds. In
    return the state is in the order of the layers for everything but the pipeline.

    Args:
        tree: arrays [P, v, ...], sharded over pipe.
        mesh: the mesh.
        to_stages: whether to move from the stored order to the order of the stages; otherwise back.
    """
    stages = mesh.shape[LAYER_AXIS]
    chunks = jax.tree.leaves(tree)[0].shape[1]
    # In a round, each device sends one chunk and receives one. Numbering the chunks around, and one further after each
    # least common multiple, gives different rounds to the chunks that a device stores, and to those that it runs.
    num_before_shift = math.lcm(stages, chunks)
    rounds: list[list[ChunkMove]] = [[] for _ in range(chunks)]
    for chunk in range(stages * chunks):
        stored = ChunkPlace(chunk // chunks, chunk % chunks)
        running = ChunkPlace(chunk % stages, chunk // stages)
        move = ChunkMove(stored, running) if to_stages else ChunkMove(running, stored)
        rounds[(chunk + chunk // num_before_shift) % chunks].append(move)

    # By stage and round, the number of the chunk that it sends, and of the one that it receives. They are arrays,
    # because XLA does not support `jax.lax.axis_index` where other axes are not manual.
    sent, received = np.zeros((2, stages, chunks), np.int32)
    for number, moves in enumerate(rounds):
        for move in moves:
            sent[move.source.stage, number] = move.source.number
            received[move.target.stage, number] = move.target.number

    def exchange(x: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
        result = jnp.zeros_like(x)
        for number, moves in enumerate(rounds):
            chunk = jax.lax.dynamic_index_in_dim(x, sent[0, number], 1)
            chunk = jax.lax.ppermute(chunk, LAYER_AXIS, [(move.source.stage, move.target.stage) for move in moves])
            result = jax.lax.dynamic_update_slice_in_dim(result, chunk, received[0, number], 1)
        return result

    spec = PartitionSpec(LAYER_AXIS)
    exchange_all = jax.shard_map(
        exchange, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={LAYER_AXIS}, check_vma=False
    )
    return jax.tree.map(lambda x: exchange_all(x, jnp.asarray(sent), jnp.asarray(received)), tree)


def add_outs(sums: dict[str, Out], outs: dict[str, Out]) -> dict[str, Out]:
    """Return the sums of losses and metrics of these stages, without buffers."""
    return {name: jax.tree.map(jnp.add, sums[name], replace(out, layer_state={})) for name, out in outs.items()}


def when(predicate: jax.Array, compute: Callable[[], T]) -> T:
    """Return the result of a computation, or zeros if the predicate is false; then nothing is computed."""
    result = jax.eval_shape(compute)
    return jax.lax.cond(predicate, compute, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result))


# --- a tick ----------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardState:
    """The part of the loops' carry that runs forward.

    Attributes:
        x: [P, B, ...], inputs that arrived from the previous stage.
        buffers: [P, v, layers of a chunk, ...], buffers of the stack.
        outs: sums of losses and metrics so far, by stage of the model.
        saved: [slots, P, ...], pairs of a chunk's input and the buffers that it found, for the backward pass; None in
            an evaluation.
    """

    x: Carry
    buffers: Nested
    outs: dict[str, Out]
    saved: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientState:
    """The part of the loops' carry that runs backward.

    Attributes:
        ct: [P, B, ...], cotangents that arrived from the next stage.
        stack_grads: [P, v, layers of a chunk, ...], sums of the gradients of the stack.
        outer_grads: sums of the gradients of all other parameters.
    """

    ct: Carry
    stack_grads: Nested
    outer_grads: Nested


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkInputs:
    """Inputs of one chunk of layers that are not differentiated; in a tick, with a leading axis of stages.

    Attributes:
        frozen: frozen parameters [layers of a chunk, ...].
        buffers: buffers [layers of a chunk, ...].
        batch, rows: the microbatch, and the indices of its rows in the global batch.
        first: int32 scalar, index of the chunk's first layer in the stack.
    """

    frozen: Nested
    buffers: Nested
    batch: Nested
    rows: jax.Array | None
    first: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadTick:
    """The result of the stages after the stack for one microbatch.

    Attributes:
        ct: cotangent of the stack's output.
        outer_grads: sums of gradients that include those of this microbatch.
        outs: sums of losses and metrics that include those of this microbatch.
    """

    ct: Carry
    outer_grads: Nested
    outs: dict[str, Out]


class PipelineStep:
    """The computation of a tick, for one step or one evaluation.

    Args:
        model: the model, which `check_pipeline` accepts.
        chunks: mesh.pipe_chunks.
        num_microbatches: number of microbatches.
        params: trainable parameters, on the device.
        frozen: frozen parameters, on the device.
        ctx: the context of the global batch.
        gradient_specs: specs of the gradient sums, see `Learner.gradient_specs`; {} in an evaluation.
    """

    def __init__(
        self,
        model: Chain,
        chunks: int,
        num_microbatches: int,
        params: Nested,
        frozen: Nested,
        ctx: Context,
        gradient_specs: Nested | None = None,
    ):
        assert ctx.mesh is not None
        self.model = model
        self.mesh: Mesh = ctx.mesh
        self.shape = PipelineShape(ctx.mesh.shape[LAYER_AXIS], chunks, num_microbatches)
        self.stages = jnp.arange(self.shape.stages)
        names = list(model.stages)
        position = names.index(STACK)
        self.before = names[:position]
        self.after = names[position + 1 :]
        self.whole_stack = model.stacks[STACK]
        self.chunk_layers = self.whole_stack.num_repeats // (self.shape.stages * chunks)
        self.stack = self.whole_stack.select_layers(self.chunk_layers)
        self.outer_params = {name: tree for name, tree in params.items() if name != STACK}
        self.outer_frozen = {name: tree for name, tree in frozen.items() if name != STACK}
        self.stack_params = self.split_layers(params.get(STACK, {}))
        self.stack_frozen = self.split_layers(frozen.get(STACK, {}))
        specs = dict(gradient_specs or {})
        self.stack_specs: Nested = specs.pop(STACK, {})
        self.outer_specs: Nested = specs
        self.ctx = ctx
        # Arrays [M, B / M, ...].
        self.batch, self.rows = microbatches((ctx.batch, ctx.rows), num_microbatches, ctx)

    # --- layers and microbatches --------------------------------------------------------------------------------------

    def split_layers(self, tree: Nested) -> Nested:
        """Turn arrays [L, ...] of the stack into [P, v, L / (P v), ...]: the chunks that each stage runs."""
        shape = (self.shape.stages, self.shape.chunks, self.chunk_layers)
        tree = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)
        return exchange_chunks(tree, self.mesh, to_stages=True) if tree and self.shape.chunks > 1 else tree

    def join_layers(self, tree: Nested) -> Nested:
        """Inverse of `split_layers`."""
        if tree and self.shape.chunks > 1:
            tree = exchange_chunks(tree, self.mesh, to_stages=False)
        return jax.tree.map(lambda x: x.reshape(self.whole_stack.num_repeats, *x.shape[3:]), tree)

    def take_chunks(self, tree: Nested, work: StageWork) -> Nested:
        """Return the arrays of the chunk that each stage runs: [P, layers of a chunk, ...]."""
        if self.shape.chunks == 1:
            return jax.tree.map(lambda x: x[:, 0], tree)
        return take_each(tree, work.chunk, 1)

    def put_chunks(self, tree: Nested, work: StageWork, chunk_tree: Nested) -> Nested:
        """Return the arrays of all chunks with those of the chunk that each stage runs replaced."""
        if self.shape.chunks == 1:
            return jax.tree.map(lambda x: x[:, None], chunk_tree)
        return put_each(tree, work.chunk, chunk_tree)

    def microbatch_ctx(self, index: jax.Array) -> Context:
        """Return the context of one microbatch."""
        batch, rows = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), (self.batch, self.rows)
        )
        return replace(self.ctx, batch=batch, rows=rows)

    def chunk_inputs(self, work: StageWork, buffers: Nested) -> ChunkInputs:
        """Return the inputs of the chunk that each stage runs; `buffers` are those of the chunks."""

        def take_rows(x: jax.Array) -> jax.Array:
            rows = jnp.take(x, work.microbatch, axis=0, mode="clip")
            return self.ctx.constrain(rows, LAYER_AXIS, BATCH_AXES, *(None,) * (rows.ndim - 2))

        return ChunkInputs(
            frozen=self.take_chunks(self.stack_frozen, work),
            buffers=buffers,
            batch=jax.tree.map(take_rows, self.batch),
            rows=jax.tree.map(take_rows, self.rows),
            first=(work.chunk * self.shape.stages + self.stages) * self.chunk_layers,
        )

    # --- the model ----------------------------------------------------------------------------------------------------

    def map_stages(self, compute: Callable[..., T], *arguments: PyTree) -> T:
        """Run `compute(ctx, *arguments)` for each stage, on arrays without the axis of stages: results [P, ...].

        Only the axis pipe is manual, so XLA partitions the layers over the other axes as without a pipeline. A `vmap`
        would give each product an axis of stages, of size 1 on a device, and the TPU compiler then sums the gradients
        of weights by all-reduces: it finds reduce-scatters only along the first axis.

        Args:
            compute: its `ctx` is the context of the step, without a batch.
            arguments: arrays [P, ...].
        """

        def run(ctx: Context, *stage_arguments: PyTree) -> T:
            result = compute(ctx, *jax.tree.map(lambda x: x[0], stage_arguments))
            return jax.tree.map(lambda x: x[None], result)

        specs = (PartitionSpec(), *(PartitionSpec(LAYER_AXIS),) * len(arguments))
        mapped = jax.shard_map(
            run, mesh=self.mesh, in_specs=specs, out_specs=specs[-1], axis_names={LAYER_AXIS}, check_vma=False
        )
        return mapped(replace(self.ctx, batch={}, rows=None), *arguments)

    def run_chunk(
        self, ctx: Context, params: Nested, x: Carry, inputs: ChunkInputs
    ) -> tuple[tuple[Carry, jax.Array | None], Out]:
        """Run one chunk of layers: ((its output, its loss), its share of the stack's metrics and its buffers)."""
        ctx = replace(ctx, batch=inputs.batch, rows=inputs.rows)
        stack_ctx = self.whole_stack.context(STACK, ctx)
        weights = merge(params, inputs.frozen)
        with jax.named_scope(STACK):
            y, outs = self.stack.run_layers(weights, x, stack_ctx, inputs.buffers, first=inputs.first)
        loss = None if outs.loss is None else jnp.sum(outs.loss)
        # A stack's metrics are means over its layers.
        share = 1.0 / self.whole_stack.num_repeats
        metrics = {name: jnp.sum(values) * share for name, values in outs.metrics.items()}
        return (y, loss), Out(metrics=metrics, layer_state=outs.layer_state)

    def run_chunks(self, x: Carry, work: StageWork, buffers: Nested) -> tuple[Carry, Out]:
        """Run the chunk of each stage on x [P, B, ...]: (outputs [P, B, ...], Out [P, ...])."""
        params = self.take_chunks(self.stack_params, work)
        (y, loss), out = self.map_stages(self.run_chunk, params, x, self.chunk_inputs(work, buffers))
        return self.constrain_carry(y), replace(out, loss=loss)

    def pull_chunks(self, x: Carry, work: StageWork, buffers: Nested, ct: Carry) -> tuple[Nested, Carry]:
        """Run the chunk of each stage forward again, and then backward.

        Args:
            x: [P, B, ...], the inputs that were saved.
            work: the work of each stage.
            buffers: the buffers that were saved.
            ct: [P, B, ...], cotangents of the outputs; zero where a stage has no work.

        Returns:
            (gradients of the chunks' parameters, in their dtypes, cotangents of x).
        """

        def pull(
            ctx: Context, params: Nested, x: Carry, inputs: ChunkInputs, ct: Carry, valid: jax.Array
        ) -> tuple[Nested, Carry]:
            (_, loss), pull_back, _ = jax.vjp(
                lambda params, x: self.run_chunk(ctx, params, x, inputs), params, x, has_aux=True
            )
            # A layer's loss is a term of the objective.
            loss_ct = None if loss is None else valid.astype(loss.dtype)
            return pull_back((ct, loss_ct))

        params = self.take_chunks(self.stack_params, work)
        inputs = self.chunk_inputs(work, buffers)
        grads, x_ct = self.map_stages(pull, params, x, inputs, ct, work.valid)
        return grads, self.constrain_carry(x_ct)

    def run_before(self, params: Nested, ctx: Context) -> tuple[tuple[Carry, jax.Array | None], dict[str, Out]]:
        """Run the stages before the stack on one microbatch: ((the carry of the stack's layers, loss), Outs)."""
        carry: Carry = None
        outs = {}
        weights = merge(params, self.outer_frozen)
        for name in self.before:
            carry, outs[name] = self.model.run(name, weights, carry, ctx, {})
        return (self.whole_stack.enter(carry), Out.merge(outs).loss), outs

    def run_after(self, params: Nested, carry: Carry, ctx: Context) -> tuple[jax.Array, dict[str, Out]]:
        """Run the stages after the stack on one microbatch: (loss, Outs)."""
        carry = self.whole_stack.leave(carry, self.whole_stack.context(STACK, ctx))
        outs = {}
        weights = merge(params, self.outer_frozen)
        for name in self.after:
            carry, outs[name] = self.model.run(name, weights, carry, ctx, {})
        loss = Out.merge(outs).loss
        assert loss is not None, "the last stage returns the loss"
        return loss, outs

    # --- shardings and sums of gradients ------------------------------------------------------------------------------

    def constrain_carry(self, x: Carry) -> Carry:
        """Shard arrays [P, B, S, ...]: stages over pipe, and the rest like activations between layers."""

        def constrain(x: jax.Array) -> jax.Array:
            return self.ctx.constrain(x, LAYER_AXIS, BATCH_AXES, "seq", *(None,) * (x.ndim - 3))

        return jax.tree.map(constrain, x)

    def shard_stack_grads(self, grads: Nested) -> Nested:
        """Shard gradients [P, v, layers of a chunk, ...] like their parameters, where devices' sums are added up."""

        def shard(spec: TensorSpec, x: jax.Array) -> jax.Array:
            return self.ctx.constrain(x, LAYER_AXIS, None, None, *spec.mesh_axes[1:])

        return jax.tree.map(shard, self.stack_specs, grads)

    def shard_outer_grads(self, grads: Nested) -> Nested:
        """Do the same for gradients of parameters outside of the stack."""
        return jax.tree.map(lambda spec, x: self.ctx.constrain(x, *spec.mesh_axes), self.outer_specs, grads)

    def add_stack_grads(self, sums: Nested, work: StageWork, grads: Nested) -> Nested:
        """Add gradients [P, layers of a chunk, ...] of the chunks that the stages ran."""
        with jax.named_scope("gradient"):
            total = grad_accumulation.add(self.take_chunks(sums, work), grads)
            return self.shard_stack_grads(self.put_chunks(sums, work, total))

    def add_outer_grads(self, sums: Nested, grads: Nested) -> Nested:
        """Add gradients of parameters outside of the stack."""
        with jax.named_scope("gradient"):
            return self.shard_outer_grads(grad_accumulation.add(sums, grads))

    # --- ticks --------------------------------------------------------------------------------------------------------

    def start(self, buffers: Nested, *, training: bool) -> ForwardState:
        """Return the state before the first tick.

        Args:
            buffers: the model's buffers.
            training: whether to save inputs for a backward pass.
        """
        ctx = self.microbatch_ctx(jnp.int32(0))
        (x, _), before_outs = jax.eval_shape(self.run_before, self.outer_params, ctx)
        _, after_outs = jax.eval_shape(self.run_after, self.outer_params, x, ctx)
        stages_x = jax.tree.map(lambda leaf: jnp.zeros((self.shape.stages, *leaf.shape), leaf.dtype), x)
        stages_x = self.constrain_carry(stages_x)
        split_buffers = self.split_layers(buffers.get(STACK, {}))
        work = self.shape.forward_work(jnp.int32(0), self.stages)
        inputs = (stages_x, self.take_chunks(split_buffers, work))
        _, stack_out = jax.eval_shape(lambda x, buffers: self.run_chunks(x, work, buffers), *inputs)
        stack_out = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack_out)
        outs = {}
        for name, out in {**before_outs, STACK: stack_out, **after_outs}.items():
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), replace(out, layer_state={}))
            outs[name] = zeros
        saved = None
        if training:
            saved = jax.tree.map(lambda x: jnp.zeros((self.shape.num_slots, *x.shape), x.dtype), inputs)
        return ForwardState(stages_x, split_buffers, outs, saved)

    def start_backward(self, state: ForwardState) -> GradientState:
        """Return the state before the first tick that runs backward: zeros."""

        def zeros(spec: TensorSpec, x: jax.Array) -> jax.Array:
            return jnp.zeros(x.shape, spec.dtype)

        stack_grads = jax.tree.map(zeros, self.stack_specs, self.stack_params)
        outer_grads = jax.tree.map(zeros, self.outer_specs, self.outer_params)
        ct = jax.tree.map(jnp.zeros_like, state.x)
        return GradientState(ct, self.shard_stack_grads(stack_grads), self.shard_outer_grads(outer_grads))

    def finish(self, state: ForwardState) -> Out:
        """Return the model's Out from the sums after the last tick."""
        stack_out = replace(state.outs[STACK], layer_state=self.join_layers(state.buffers))
        outs = {**state.outs, STACK: stack_out}
        # In the order of the stages, in which losses are added.
        return self.model.merge_outs({name: outs[name] for name in self.model.stages})

    def forward(self, state: ForwardState, tick: jax.Array) -> tuple[ForwardState, Carry]:
        """Run all stages forward, and pass on their outputs: (state, the outputs [P, B, ...])."""
        work = self.shape.forward_work(tick, self.stages)
        first = self.shape.forward_work(tick, 0)
        enters = first.valid & (first.chunk == 0)
        ctx = self.microbatch_ctx(first.microbatch)
        (entering, _), outs = when(enters, lambda: self.run_before(self.outer_params, ctx))
        outs = {**state.outs, **add_outs(state.outs, outs)}
        is_entry = (self.stages == 0) & (work.chunk == 0)
        x = select_stages(is_entry, jax.tree.map(lambda x: x[None], entering), state.x)
        x = self.constrain_carry(x)
        buffers = self.take_chunks(state.buffers, work)
        y, out = self.run_chunks(x, work, buffers)
        all_buffers = state.buffers
        # In an evaluation, each microbatch finds the same buffers.
        if self.ctx.training:
            all_buffers = self.put_chunks(all_buffers, work, select_stages(work.valid, out.layer_state, buffers))
        out = jax.tree.map(lambda values: jnp.sum(values, axis=0), mask(work.valid, replace(out, layer_state={})))
        outs |= add_outs(outs, {STACK: out})
        saved = state.saved
        if saved is not None:
            slot = tick % self.shape.num_slots
            saved = jax.tree.map(
                lambda slots, x: jax.lax.dynamic_update_index_in_dim(slots, x, slot, 0), saved, (x, buffers)
            )
        return ForwardState(rotate(y, 1), all_buffers, outs, saved), y

    def leaving(self, tick: jax.Array) -> StageWork:
        """Return the work of the last stage, which is valid only if its microbatch leaves the stack in this tick."""
        last = self.shape.forward_work(tick, self.shape.stages - 1)
        return replace(last, valid=last.valid & (last.chunk == self.shape.chunks - 1))

    def take_last(self, y: Carry) -> Carry:
        """Return the last stage's output, on all devices along pipe."""
        return jax.tree.map(self.ctx.constrain_hidden, take_stage(y, self.stages == self.shape.stages - 1))

    def backward(self, saved: PyTree, state: GradientState, tick: jax.Array, head_ct: Carry) -> GradientState:
        """Run all stages backward, and pass on the cotangents of their inputs.

        Args:
            saved: the inputs that the forward pass saved.
            state: the state.
            tick: int32 scalar.
            head_ct: cotangent of the last stage's output, of the microbatch that leaves in this tick; None in a tick
                without one.
        """
        work = self.shape.backward_work(tick, self.stages)
        x, buffers = take_each(saved, work.slot, 0)
        ct = state.ct
        if head_ct is not None:
            is_exit = (self.stages == self.shape.stages - 1) & (work.chunk == self.shape.chunks - 1)
            ct = select_stages(is_exit, jax.tree.map(lambda x: x[None], head_ct), ct)
        grads, x_ct = self.pull_chunks(self.constrain_carry(x), work, buffers, mask(work.valid, ct))
        stack_grads = self.add_stack_grads(state.stack_grads, work, mask(work.valid, grads))
        x_ct = mask(work.valid, x_ct)
        # The first stage's first chunk passes its cotangent on to the stages before the stack.
        first = self.shape.backward_work(tick, 0)
        enters = first.valid & (first.chunk == 0)
        entering_ct = jax.tree.map(self.ctx.constrain_hidden, take_stage(x_ct, self.stages == 0))

        def pull_before() -> Nested:
            ctx = self.microbatch_ctx(first.microbatch)
            (_, loss), pull, _ = jax.vjp(lambda params: self.run_before(params, ctx), self.outer_params, has_aux=True)
            (grads,) = pull((entering_ct, None if loss is None else jnp.ones_like(loss)))
            return self.add_outer_grads(state.outer_grads, grads)

        outer_grads = jax.lax.cond(enters, pull_before, lambda: state.outer_grads)
        return GradientState(rotate(x_ct, -1), stack_grads, outer_grads)

    def run_head(self, outer_grads: Nested, outs: dict[str, Out], stages_y: Carry, tick: jax.Array) -> HeadTick:
        """Run the stages after the stack forward and backward, for the microbatch that leaves the stack in this tick.

        Args:
            outer_grads: sums of gradients so far.
            outs: sums of losses and metrics so far.
            stages_y: [P, B, ...], outputs of the stages in this tick.
            tick: int32 scalar.
        """
        y = self.take_last(stages_y)
        leaving = self.leaving(tick)
        ctx = self.microbatch_ctx(leaving.microbatch)

        def run() -> HeadTick:
            loss, pull, new_outs = jax.vjp(
                lambda params, y: self.run_after(params, y, ctx), self.outer_params, y, has_aux=True
            )
            grads, ct = pull(jnp.ones_like(loss))
            return HeadTick(ct, self.add_outer_grads(outer_grads, grads), {**outs, **add_outs(outs, new_outs)})

        if self.shape.chunks == 1:
            # One microbatch leaves in each tick that runs both forward and backward.
            return run()
        no_ct = jax.tree.map(jnp.zeros_like, y)
        return jax.lax.cond(leaving.valid, run, lambda: HeadTick(no_ct, outer_grads, outs))
