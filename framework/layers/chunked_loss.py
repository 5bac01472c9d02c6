"""Losses whose logits exist for one chunk of positions at a time, and log-probabilities of given tokens.

Logits cost 4 V bytes per token, often more than everything else together. `compute_chunked_loss` takes gradients in the
forward pass (the loss is a scalar, so its cotangent only scales them). Nothing is computed twice and no logits are
saved. The gradient of the hidden states is computed chunk by chunk, the gradient of the table for a group of chunks
at a time: a group saves the gradients of its logits in the compute dtype, so that the table's gradient is one
product, reduced over the devices once. `token_log_probs` recomputes the logits in the backward pass, because its
result may be the input of any function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal

from plimsoll.framework.layers.base import BATCH_AXES, Context
from plimsoll.framework.layers.custom_gradients import zero_cotangent
from plimsoll.framework.layout import PyTree

# The loss, an f32 scalar, and metrics by name.
LossAndMetrics = tuple[jax.Array, dict[str, jax.Array]]
# A tree of arrays [B, S, ...] with what the loss of a position reads, such as its target and weight.
Inputs = TypeVar("Inputs")
# Computes the loss of some positions from (product of their hidden states and the table [B, S', V], their inputs).
ComputeLoss = Callable[[jax.Array, Inputs], LossAndMetrics]
# The mesh axes of the table [V, D]. Sharding its gradient in the same way adds up the devices' partial sums.
_TABLE_AXES = ("model", "fsdp")


@dataclass(frozen=True)
class Chunks:
    """Division of the positions of a batch into chunks.

    Attributes:
        count: the number of chunks of positions.
        groups: the number of groups of chunks; divides `count`.
    """

    count: int
    groups: int

    def split(self, tree: PyTree, ctx: Context) -> PyTree:
        """Split arrays [B, S, ...] into [chunks, B, S / chunks, ...]."""

        # A chunk holds the positions i, i + chunks, ...: an equal share of every seq shard.
        def split_array(x: jax.Array) -> jax.Array:
            batch, length, *inner = x.shape
            strided = x.reshape(batch, length // self.count, self.count, *inner)
            chunks = jnp.moveaxis(strided, 2, 0)
            inner_axes = (None,) * len(inner)
            return ctx.constrain(chunks, None, BATCH_AXES, "seq", *inner_axes)

        return jax.tree.map(split_array, tree)

    @staticmethod
    def join(chunks: jax.Array) -> jax.Array:
        """Inverse of `split`, for one array."""
        strided = jnp.moveaxis(chunks, 0, 2)
        return strided.reshape(strided.shape[0], -1, *strided.shape[3:])


def logits_product(h_BSD: jax.Array, table_VD: jax.Array) -> jax.Array:
    # The sum is in float32: bfloat16 has too few digits for a softmax over the vocabulary.
    dtype = jnp.promote_types(h_BSD.dtype, jnp.float32)
    return jnp.einsum("bsd,vd->bsv", h_BSD, table_VD, preferred_element_type=dtype)


def apply_softcap(product_BSV: jax.Array, softcap: float | None) -> jax.Array:
    if softcap is None:
        return product_BSV
    return softcap * jnp.tanh(product_BSV / softcap)


def token_loss(
    product_BSV: jax.Array, inputs: tuple[jax.Array, jax.Array], *, softcap: float | None, z_loss: float
) -> LossAndMetrics:
    """Compute the weighted cross-entropy of the next tokens, and the z-loss.

    Args:
        product_BSV: normed hidden states times the output table, f32 or wider: the logits before the softcap.
        inputs: targets int32[B, S] and weights float32[B, S].
        softcap: see LMHead.
        z_loss: see LMHead.

    Returns:
        (f32 scalar, metrics): sums over tokens of weight times loss. The metric "nll" excludes the z-loss.
    """
    targets_BS, weights_BS = inputs
    logits_BSV = apply_softcap(product_BSV, softcap)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    picked_BS = _pick_target_logits(logits_BSV, targets_BS)
    nll = jnp.sum(weights_BS * (lse_BS - picked_BS))
    if z_loss == 0.0:
        return nll, {"nll": nll}
    penalty = jnp.sum(weights_BS * jnp.square(lse_BS))
    return nll + z_loss * penalty, {"nll": nll}


@jax.custom_vjp
def _pick_target_logits(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Return the logits of the targets, [B, S], with an elementwise gradient."""
    # JAX's own gradient of a lookup is a scatter, which XLA does not fuse with the arithmetic around it: the gradient
    # of all logits would be written to memory in float32, and read again, one extra time.
    logits_BS1 = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)
    return logits_BS1[..., 0]


def _pick_forward(logits_BSV: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    ids_V = jnp.arange(logits_BSV.shape[-1], dtype=targets_BS.dtype)
    # The ids are saved instead of the logits, which the gradient does not depend on.
    return _pick_target_logits(logits_BSV, targets_BS), (ids_V, targets_BS)


def _pick_backward(saved: tuple[jax.Array, jax.Array], grad_BS: jax.Array) -> tuple[jax.Array, None]:
    ids_V, targets_BS = saved
    is_target_BSV = targets_BS[..., None] == ids_V
    grad_BS1 = grad_BS[..., None]
    zero = jnp.zeros((), grad_BS.dtype)
    logits_grad_BSV = jnp.where(is_target_BSV, grad_BS1, zero)
    return logits_grad_BSV, None


_pick_target_logits.defvjp(_pick_forward, _pick_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LossResiduals(Generic[Inputs]):
    """Residuals of `compute_chunked_loss`: its gradients, up to the factor of the cotangent.

    Attributes:
        h_grad: gradient of the hidden states [B, S, D].
        table_grad: gradient of the table [V, D]; None if the table is frozen.
        inputs: see `compute_chunked_loss`.
    """

    h_grad: jax.Array
    table_grad: jax.Array | None
    inputs: Inputs


def compute_chunked_loss(
    compute_loss: ComputeLoss[Inputs],
    chunks: Chunks,
    ctx: Context,
    h_BSD: jax.Array,
    table_VD: jax.Array,
    inputs: Inputs,
) -> LossAndMetrics:
    """Sum `compute_loss(product, inputs)` over chunks of positions, which are interleaved slices.

    Args:
        compute_loss: (product [B, S / chunks, V], inputs of these positions) -> (loss, metrics), such as `token_loss`.
        chunks: how to divide the positions.
        ctx: provides the mesh.
        h_BSD: normed hidden states.
        table_VD: the output table.
        inputs: a tree of arrays [B, S, ...], such as targets and weights; it gets no gradient.
    """
    # custom_vjp keeps these functions after the trace, so they may hold the mesh but no traced arrays.
    chunked = _ChunkedLoss(compute_loss, chunks, Context(batch={}, mesh=ctx.mesh))

    def forward(h: CustomVJPPrimal, table: CustomVJPPrimal, inputs: PyTree) -> tuple[LossAndMetrics, _LossResiduals]:
        # With symbolic_zeros, arguments know whether they are differentiated. A frozen table is not.
        is_table_trained = table.perturbed
        values = jax.tree.map(lambda x: x.value, inputs)
        loss, h_grad, table_grad = chunked.loss_and_gradients(h.value, table.value, values, with_table=is_table_trained)
        return loss, _LossResiduals(h_grad, table_grad, values)

    def backward(saved: _LossResiduals[Inputs], cotangent: LossAndMetrics) -> tuple[PyTree, ...]:
        # Metrics are not differentiated; the loss is a scalar, so its cotangent only scales.
        loss_ct = cotangent[0]
        grads = (saved.h_grad, saved.table_grad)
        h_grad, table_grad = jax.tree.map(lambda grad: (grad * loss_ct).astype(grad.dtype), grads)
        return h_grad, table_grad, jax.tree.map(zero_cotangent, saved.inputs)

    total = jax.custom_vjp(chunked.loss)
    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(h_BSD, table_VD, inputs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LogProbResiduals:
    """Residuals of `token_log_probs`: its arguments [B, S, D], [V, D] and [B, S]."""

    h_BSD: jax.Array
    table_VD: jax.Array
    targets_BS: jax.Array
    is_table_trained: bool = field(metadata={"static": True})


def token_log_probs(
    chunks: Chunks,
    ctx: Context,
    h_BSD: jax.Array,
    table_VD: jax.Array,
    targets_BS: jax.Array,
    softcap: float | None = None,
) -> jax.Array:
    """Return the log-probability of each target, f32[B, S], in nats; differentiable in hidden states and table.

    The backward pass recomputes each chunk's logits, so nothing is saved in addition to the arguments.

    Args:
        chunks, ctx, h_BSD, table_VD: see `compute_chunked_loss`.
        targets_BS: int32, token ids.
        softcap: see LMHead.
    """
    mesh_ctx = Context(batch={}, mesh=ctx.mesh)

    def chunk_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return _pick_target_logits(logits, targets) - jax.nn.logsumexp(logits, axis=-1)

    @jax.custom_vjp
    def log_probs(h: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
        return by_position(chunk_log_probs, chunks, mesh_ctx, h, table, softcap, (targets,))

    def forward(
        h: CustomVJPPrimal, table: CustomVJPPrimal, targets: CustomVJPPrimal
    ) -> tuple[jax.Array, _LogProbResiduals]:
        # With symbolic_zeros, arguments know whether they are differentiated. A frozen table is not.
        saved = _LogProbResiduals(h.value, table.value, targets.value, is_table_trained=table.perturbed)
        return log_probs(saved.h_BSD, saved.table_VD, saved.targets_BS), saved

    def backward(saved: _LogProbResiduals, log_probs_ct: jax.Array) -> tuple[PyTree, ...]:
        # The loss is the sum of weight times negative log-probability. With these weights, its gradient is that of
        # the sum of cotangent times log-probability.
        inputs = (saved.targets_BS, -log_probs_ct)
        chunked = _ChunkedLoss(partial(token_loss, softcap=softcap, z_loss=0.0), chunks, mesh_ctx)
        _, h_grad, table_grad = chunked.loss_and_gradients(
            saved.h_BSD, saved.table_VD, inputs, with_table=saved.is_table_trained
        )
        return h_grad, table_grad, zero_cotangent(saved.targets_BS)

    log_probs.defvjp(forward, backward, symbolic_zeros=True)
    return log_probs(h_BSD, table_VD, targets_BS)


def by_position(
    compute_values: Callable[..., PyTree],
    chunks: Chunks,
    ctx: Context,
    h_BSD: jax.Array,
    table_VD: jax.Array,
    softcap: float | None = None,
    inputs: tuple[jax.Array, ...] = (),
) -> PyTree:
    """Return `compute_values(logits, *inputs)` for each position, a tree of arrays [B, S, ...]; not differentiable.

    Args:
        compute_values: maps the logits of some positions, [B, S', V], and their inputs to a tree of arrays
            [B, S', ...].
        chunks, ctx, h_BSD, table_VD: see `compute_chunked_loss`.
        softcap: see LMHead.
        inputs: arrays [B, S, ...].
    """
    if chunks.count == 1:
        return compute_values(apply_softcap(logits_product(h_BSD, table_VD), softcap), *inputs)
    chunk_stack = jax.lax.map(
        lambda chunk: compute_values(apply_softcap(logits_product(chunk[0], table_VD), softcap), *chunk[1]),
        chunks.split((h_BSD, inputs), ctx),
    )
    return jax.tree.map(chunks.join, chunk_stack)


@dataclass(frozen=True, eq=False)
class _ChunkedLoss(Generic[Inputs]):
    """The loss and its gradients, one chunk of positions at a time.

    Attributes:
        compute_loss, chunks: see `compute_chunked_loss`.
        ctx: has only the mesh.
    """

    compute_loss: ComputeLoss[Inputs]
    chunks: Chunks
    ctx: Context

    def loss(self, h: jax.Array, table: jax.Array, inputs: Inputs) -> LossAndMetrics:
        """Return the loss without gradients."""
        if self.chunks.count == 1:
            return self.compute_loss(logits_product(h, table), inputs)

        def add_chunk(sums: LossAndMetrics, chunk: tuple[jax.Array, Inputs]) -> tuple[LossAndMetrics, None]:
            chunk_h, chunk_inputs = chunk
            loss = self.compute_loss(logits_product(chunk_h, table), chunk_inputs)
            return jax.tree.map(jnp.add, sums, loss), None

        zeros = self._zeros(h, table, inputs)
        sums, _ = jax.lax.scan(add_chunk, zeros, self.chunks.split((h, inputs), self.ctx))
        return sums

    def loss_and_gradients(
        self, h: jax.Array, table: jax.Array, inputs: Inputs, *, with_table: bool
    ) -> tuple[LossAndMetrics, jax.Array, jax.Array | None]:
        """Return (loss, gradient of h, gradient of the table or None), each gradient in the dtype of its array."""
        count = self.chunks.count
        # Only the table's gradient needs groups. Without it, one group of all chunks is enough.
        groups = self.chunks.groups if with_table else 1
        zeros = self._zeros(h, table, inputs)
        chunks = self.chunks.split((h, inputs), self.ctx)
        if groups == 1:
            grad_dtype = table.dtype if with_table else None
            loss, h_grads, table_grad = self._add_group(zeros, chunks, table, grad_dtype)
            return loss, self.chunks.join(h_grads), table_grad
        # The sum is in float32. A loop cannot carry partial sums, so each group's gradient is reduced over the devices.
        sum_dtype = jnp.promote_types(table.dtype, jnp.float32)

        def add_group(
            sums: tuple[LossAndMetrics, jax.Array], group: tuple[jax.Array, Inputs]
        ) -> tuple[tuple[LossAndMetrics, jax.Array], jax.Array]:
            loss_sum, table_sum = sums
            loss, h_grads, table_grad = self._add_group(loss_sum, group, table, sum_dtype)
            assert table_grad is not None
            return (loss, self.ctx.constrain(table_sum + table_grad, *_TABLE_AXES)), h_grads

        table_zeros = self.ctx.constrain(jnp.zeros(table.shape, sum_dtype), *_TABLE_AXES)
        grouped = jax.tree.map(lambda x: x.reshape(groups, count // groups, *x.shape[1:]), chunks)
        (loss, table_sum), h_grads = jax.lax.scan(add_group, (zeros, table_zeros), grouped)
        # The loop stacks groups of chunks, [groups, count / groups, ...].
        h_grads = h_grads.reshape(count, *h_grads.shape[2:])
        return loss, self.chunks.join(h_grads), table_sum.astype(table.dtype)

    def _add_group(
        self, loss: LossAndMetrics, chunks: tuple[jax.Array, Inputs], table: jax.Array, dtype: np.dtype | None
    ) -> tuple[LossAndMetrics, jax.Array, jax.Array | None]:
        """Add the loss of a group of chunks [chunks, B, S / chunks, ...] to `loss`, and compute their gradients.

        Returns:
            (sum of losses, gradients of the chunks' hidden states, gradient of the table in `dtype`, or None if
            `dtype` is None).
        """

        def add_chunk(
            loss: LossAndMetrics, chunk: tuple[jax.Array, Inputs]
        ) -> tuple[LossAndMetrics, tuple[jax.Array, jax.Array | None]]:
            h, inputs = chunk
            product = logits_product(h, table)
            loss_and_grad = jax.value_and_grad(self.compute_loss, has_aux=True)
            chunk_loss, product_grad = loss_and_grad(product, inputs)
            # In the compute dtype, like the gradients of all activations.
            product_grad = product_grad.astype(h.dtype)
            h_grad = jnp.einsum("bsv,vd->bsd", product_grad, table)
            table_factor = None if dtype is None else product_grad
            return jax.tree.map(jnp.add, loss, chunk_loss), (h_grad, table_factor)

        hidden, _ = chunks
        if hidden.shape[0] == 1:
            only_chunk = jax.tree.map(lambda x: x[0], chunks)
            loss, chunk_grads = add_chunk(loss, only_chunk)
            h_grads, product_grads = jax.tree.map(lambda x: x[None], chunk_grads)
        else:
            loss, (h_grads, product_grads) = jax.lax.scan(add_chunk, loss, chunks)
        if product_grads is None:
            return loss, h_grads, None
        # One product for the whole group needs only one all-reduce of the sum over devices.
        with jax.named_scope("gradient"):
            table_grad = jnp.einsum("cbsv,cbsd->vd", product_grads, hidden, preferred_element_type=dtype)
            return loss, h_grads, self.ctx.constrain(table_grad, *_TABLE_AXES)

    def _zeros(self, h: jax.Array, table: jax.Array, inputs: Inputs) -> LossAndMetrics:
        """Return zeros with the same structure as the result of `compute_loss`."""
        # Only shapes are evaluated; none of this enters the program.
        shapes = jax.eval_shape(
            lambda h, table, inputs: self.compute_loss(logits_product(h, table), inputs), h, table, inputs
        )
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
