"""Losses whose logits exist for one chunk of positions at a time, and log-probabilities of given tokens.

Logits cost 4 V bytes per token, often more than everything else together. `compute_chunked_loss` takes gradients in the
forward pass (the loss is a scalar, so its cotangent only scales them). Nothing is computed twice and no logits are
saved. The gradient of the hidden states is computed chunk by chunk, the gradient of the table for a group of chunks
at a time: a group saves the gradients of its logits in the compute dtype, so that the table's gradient is one
product, reduced over the devices once. `token_log_probs` recomputes the logits in the backward pass, because its
result may be the input of any function.

Products of 8-bit numbers round the hidden states and the table once, before the loop over chunks, and a group may save
8-bit gradients of its logits, see `framework.layers.logits_product`.
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

from plimsoll.framework.layers.base import BATCH_AXES, VOCAB_AXES, Context
from plimsoll.framework.layers.custom_gradients import zero_cotangent
from plimsoll.framework.layers.logits_product import Factor, Factors, LogitsProduct, split_key
from plimsoll.framework.layers.low_precision import Rounded
from plimsoll.framework.layout import PyTree

# The loss, an f32 scalar, and metrics by name.
LossAndMetrics = tuple[jax.Array, dict[str, jax.Array]]
# A tree of arrays [B, S, ...] with what the loss of a position reads, such as its target and weight.
Inputs = TypeVar("Inputs")
# Computes the loss of some positions from (product of their hidden states and the table [B, S', V], their inputs).
ComputeLoss = Callable[[jax.Array, Inputs], LossAndMetrics]
# The mesh axes that the table [V, D] declares. Sharding its gradient in the same way adds up the devices' partial sums.
_TABLE_AXES = (VOCAB_AXES, "fsdp")


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

    def split_hidden(self, hidden: Factor, ctx: Context) -> Factor:
        """Split hidden states like `split`; a scale of the whole array is repeated for each chunk."""
        if isinstance(hidden, Rounded) and hidden.scale.size == 1:
            scale = jnp.broadcast_to(hidden.scale, (self.count, *hidden.scale.shape))
            return Rounded(self.split(hidden.values, ctx), scale)
        return self.split(hidden, ctx)

    @staticmethod
    def join(chunks: jax.Array) -> jax.Array:
        """Inverse of `split`, for one array."""
        strided = jnp.moveaxis(chunks, 0, 2)
        return strided.reshape(strided.shape[0], -1, *strided.shape[3:])


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
class _LossResiduals:
    """Residuals of `compute_chunked_loss`: its gradients, up to the factor of the cotangent.

    Attributes:
        h_grad: gradient of the hidden states [B, S, D].
        table_grad: gradient of the table [V, D]; None if the table is frozen.
        inputs: the arguments without a gradient: `inputs` and `key` of `compute_chunked_loss`.
    """

    h_grad: jax.Array
    table_grad: jax.Array | None
    inputs: tuple[PyTree, jax.Array | None]


def compute_chunked_loss(
    compute_loss: ComputeLoss[Inputs],
    product: LogitsProduct,
    chunks: Chunks,
    ctx: Context,
    h_BSD: jax.Array,
    table_VD: jax.Array,
    inputs: Inputs,
    key: jax.Array | None = None,
) -> LossAndMetrics:
    """Sum `compute_loss(logits, inputs)` over chunks of positions, which are interleaved slices.

    Args:
        compute_loss: (product [B, S / chunks, V], inputs of these positions) -> (loss, metrics), such as `token_loss`.
        product: precision of the product.
        chunks: how to divide the positions.
        ctx: provides the mesh.
        h_BSD: normed hidden states.
        table_VD: the output table.
        inputs: a tree of arrays [B, S, ...], such as targets and weights; it gets no gradient.
        key: key for stochastic rounding of gradients; None rounds to the nearest number.
    """
    # custom_vjp keeps these functions after the trace, so they may hold the mesh but no traced arrays.
    chunked = _ChunkedLoss(compute_loss, product, chunks, Context(batch={}, mesh=ctx.mesh))

    def plain(h: jax.Array, table: jax.Array, inputs: Inputs, key: jax.Array | None) -> LossAndMetrics:
        return chunked.loss(product.prepare(h, table), inputs)

    def forward(
        h: CustomVJPPrimal, table: CustomVJPPrimal, inputs: PyTree, key: CustomVJPPrimal | None
    ) -> tuple[LossAndMetrics, _LossResiduals]:
        # With symbolic_zeros, arguments know whether they are differentiated. A frozen table is not.
        is_table_trained = table.perturbed
        values = jax.tree.map(lambda x: x.value, inputs)
        key_value = None if key is None else key.value
        factors = product.prepare(h.value, table.value)
        loss, h_grad, table_grad = chunked.loss_and_gradients(factors, values, key_value, with_table=is_table_trained)
        return loss, _LossResiduals(h_grad, table_grad, (values, key_value))

    def backward(saved: _LossResiduals, cotangent: LossAndMetrics) -> tuple[PyTree, ...]:
        # Metrics are not differentiated; the loss is a scalar, so its cotangent only scales.
        loss_ct = cotangent[0]
        grads = (saved.h_grad, saved.table_grad)
        h_grad, table_grad = jax.tree.map(lambda grad: (grad * loss_ct).astype(grad.dtype), grads)
        return h_grad, table_grad, *jax.tree.map(zero_cotangent, saved.inputs)

    total = jax.custom_vjp(plain)
    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(h_BSD, table_VD, inputs, key)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LogProbResiduals:
    """Residuals of `token_log_probs`: its arguments, [B, S, D], [V, D] and [B, S], the first two as they were saved.

    8-bit numbers are saved instead of the arrays, so that the table is rounded once.
    """

    factors: Factors
    targets_BS: jax.Array
    key: jax.Array | None
    is_table_trained: bool = field(metadata={"static": True})


def token_log_probs(
    product: LogitsProduct,
    chunks: Chunks,
    ctx: Context,
    h_BSD: jax.Array,
    table_VD: jax.Array,
    targets_BS: jax.Array,
    softcap: float | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Return the log-probability of each target, f32[B, S], in nats; differentiable in hidden states and table.

    The backward pass recomputes each chunk's logits, so nothing is saved in addition to the arguments.

    Args:
        product, chunks, ctx, h_BSD, table_VD: see `compute_chunked_loss`.
        targets_BS: int32, token ids.
        softcap: see LMHead.
        key: see `compute_chunked_loss`.
    """
    mesh_ctx = Context(batch={}, mesh=ctx.mesh)

    def chunk_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return _pick_target_logits(logits, targets) - jax.nn.logsumexp(logits, axis=-1)

    def compute(factors: Factors, targets: jax.Array) -> jax.Array:
        return _map_chunks(chunk_log_probs, product, chunks, mesh_ctx, factors, softcap, (targets,))

    @jax.custom_vjp
    def log_probs(h: jax.Array, table: jax.Array, targets: jax.Array, key: jax.Array | None) -> jax.Array:
        return compute(product.prepare(h, table), targets)

    def forward(
        h: CustomVJPPrimal, table: CustomVJPPrimal, targets: CustomVJPPrimal, key: CustomVJPPrimal | None
    ) -> tuple[jax.Array, _LogProbResiduals]:
        # With symbolic_zeros, arguments know whether they are differentiated. A frozen table is not.
        factors = product.prepare(h.value, table.value)
        key_value = None if key is None else key.value
        saved = _LogProbResiduals(product.save(factors), targets.value, key_value, is_table_trained=table.perturbed)
        return compute(factors, targets.value), saved

    def backward(saved: _LogProbResiduals, log_probs_ct: jax.Array) -> tuple[PyTree, ...]:
        # The loss is the sum of weight times negative log-probability. With these weights, its gradient is that of
        # the sum of cotangent times log-probability.
        inputs = (saved.targets_BS, -log_probs_ct)
        chunked = _ChunkedLoss(partial(token_loss, softcap=softcap, z_loss=0.0), product, chunks, mesh_ctx)
        _, h_grad, table_grad = chunked.loss_and_gradients(
            product.load(saved.factors), inputs, saved.key, with_table=saved.is_table_trained
        )
        return h_grad, table_grad, *jax.tree.map(zero_cotangent, (saved.targets_BS, saved.key))

    log_probs.defvjp(forward, backward, symbolic_zeros=True)
    return log_probs(h_BSD, table_VD, targets_BS, key)


def by_position(
    compute_values: Callable[..., PyTree],
    product: LogitsProduct,
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
        product, chunks, ctx, h_BSD, table_VD: see `compute_chunked_loss`.
        softcap: see LMHead.
        inputs: arrays [B, S, ...].
    """
    factors = product.prepare(h_BSD, table_VD)
    return _map_chunks(compute_values, product, chunks, ctx, factors, softcap, inputs)


def _map_chunks(
    compute_values: Callable[..., PyTree],
    product: LogitsProduct,
    chunks: Chunks,
    ctx: Context,
    factors: Factors,
    softcap: float | None,
    inputs: tuple[jax.Array, ...],
) -> PyTree:
    """See `by_position`; `factors` are rounded."""

    def compute(chunk: tuple[Factor, tuple[jax.Array, ...]]) -> PyTree:
        hidden, chunk_inputs = chunk
        logits = apply_softcap(product.multiply(hidden, factors.table), softcap)
        return compute_values(logits, *chunk_inputs)

    if chunks.count == 1:
        return compute((factors.hidden, inputs))
    split = (chunks.split_hidden(factors.hidden, ctx), chunks.split(inputs, ctx))
    return jax.tree.map(chunks.join, jax.lax.map(compute, split))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ChunkStack:
    """The arrays of one chunk, or of several with a leading axis of chunks.

    Attributes:
        hidden: hidden states [B, S / chunks, D].
        inputs: see `compute_chunked_loss`.
        keys: key for stochastic rounding; None rounds to the nearest number.
    """

    hidden: Factor
    inputs: PyTree
    keys: jax.Array | None

    @property
    def count(self) -> int:
        """The number of stacked chunks."""
        hidden = self.hidden
        values = hidden.values if isinstance(hidden, Rounded) else hidden
        return values.shape[0]


@dataclass(frozen=True, eq=False)
class _ChunkedLoss(Generic[Inputs]):
    """The loss and its gradients, one chunk of positions at a time.

    Attributes:
        compute_loss, product, chunks: see `compute_chunked_loss`.
        ctx: has only the mesh.
    """

    compute_loss: ComputeLoss[Inputs]
    product: LogitsProduct
    chunks: Chunks
    ctx: Context

    def loss(self, factors: Factors, inputs: Inputs) -> LossAndMetrics:
        """Return the loss without gradients."""
        table = factors.table
        if self.chunks.count == 1:
            return self.compute_loss(self.product.multiply(factors.hidden, table), inputs)

        def add_chunk(sums: LossAndMetrics, chunk: tuple[Factor, Inputs]) -> tuple[LossAndMetrics, None]:
            hidden, chunk_inputs = chunk
            loss = self.compute_loss(self.product.multiply(hidden, table), chunk_inputs)
            return jax.tree.map(jnp.add, sums, loss), None

        split = (self.chunks.split_hidden(factors.hidden, self.ctx), self.chunks.split(inputs, self.ctx))
        sums, _ = jax.lax.scan(add_chunk, self._zeros(factors, inputs), split)
        return sums

    def loss_and_gradients(
        self, factors: Factors, inputs: Inputs, key: jax.Array | None, *, with_table: bool
    ) -> tuple[LossAndMetrics, jax.Array, jax.Array | None]:
        """Return (loss, gradient of h, gradient of the table or None), each gradient in the dtype of its array."""
        count = self.chunks.count
        # Only the table's gradient needs groups. Without it, one group of all chunks is enough.
        groups = self.chunks.groups if with_table else 1
        zeros = self._zeros(factors, inputs)
        h_key, table_key = split_key(key)
        chunks = _ChunkStack(
            hidden=self.chunks.split_hidden(factors.hidden, self.ctx),
            inputs=self.chunks.split(inputs, self.ctx),
            # A key for each chunk, so that their noise differs.
            keys=None if h_key is None else jax.random.split(h_key, count),
        )
        grad_table = self.product.arrange_table(factors.table)
        add_to_loss = partial(self._add_group, factors=factors, grad_table=grad_table)
        if groups == 1:
            grad_dtype = factors.table_dtype if with_table else None
            loss, h_grads, table_grad = add_to_loss(zeros, chunks, dtype=grad_dtype, key=table_key)
            return loss, self.chunks.join(h_grads), table_grad
        # The sum is in float32. A loop cannot carry partial sums, so each group's gradient is reduced over the devices.
        sum_dtype = jnp.promote_types(factors.table_dtype, jnp.float32)
        table_keys = None if table_key is None else jax.random.split(table_key, groups)

        def add_group(
            sums: tuple[LossAndMetrics, jax.Array], group: tuple[_ChunkStack, jax.Array | None]
        ) -> tuple[tuple[LossAndMetrics, jax.Array], jax.Array]:
            loss_sum, table_sum = sums
            group_chunks, group_key = group
            loss, h_grads, table_grad = add_to_loss(loss_sum, group_chunks, dtype=sum_dtype, key=group_key)
            assert table_grad is not None
            return (loss, self.ctx.constrain_weight(table_sum + table_grad, *_TABLE_AXES)), h_grads

        table_zeros = self.ctx.constrain_weight(jnp.zeros(factors.table_shape, sum_dtype), *_TABLE_AXES)
        grouped = jax.tree.map(lambda x: x.reshape(groups, count // groups, *x.shape[1:]), chunks)
        (loss, table_sum), h_grads = jax.lax.scan(add_group, (zeros, table_zeros), (grouped, table_keys))
        # The loop stacks groups of chunks, [groups, count / groups, ...].
        h_grads = h_grads.reshape(count, *h_grads.shape[2:])
        return loss, self.chunks.join(h_grads), table_sum.astype(factors.table_dtype)

    def _add_group(
        self,
        loss: LossAndMetrics,
        chunks: _ChunkStack,
        *,
        factors: Factors,
        grad_table: Factor,
        dtype: np.dtype | None,
        key: jax.Array | None,
    ) -> tuple[LossAndMetrics, jax.Array, jax.Array | None]:
        """Add the loss of a group of chunks [chunks, B, S / chunks, ...] to `loss`, and compute their gradients.

        Args:
            loss: the sum to add to.
            chunks: the chunks of the group.
            factors: the factors of all chunks.
            grad_table: the table for the gradient of hidden states, see `LogitsProduct.arrange_table`.
            dtype: dtype of the table's gradient; None computes none.
            key: key for stochastic rounding.

        Returns:
            (sum of losses, gradients of the chunks' hidden states, gradient of the table in `dtype`, or None if
            `dtype` is None).
        """

        def add_chunk(
            loss: LossAndMetrics, chunk: _ChunkStack
        ) -> tuple[LossAndMetrics, tuple[jax.Array, Factor | None]]:
            logits = self.product.multiply(chunk.hidden, factors.table)
            loss_and_grad = jax.value_and_grad(self.compute_loss, has_aux=True)
            chunk_loss, logits_grad = loss_and_grad(logits, chunk.inputs)
            h_grad, table_factor = self.product.compute_hidden_grad(
                logits_grad, grad_table, factors.hidden_dtype, chunk.keys
            )
            sums = jax.tree.map(jnp.add, loss, chunk_loss)
            return sums, (h_grad, None if dtype is None else table_factor)

        if chunks.count == 1:
            only_chunk = jax.tree.map(lambda x: x[0], chunks)
            loss, chunk_grads = add_chunk(loss, only_chunk)
            h_grads, table_factors = jax.tree.map(lambda x: x[None], chunk_grads)
        else:
            loss, (h_grads, table_factors) = jax.lax.scan(add_chunk, loss, chunks)
        if dtype is None or table_factors is None:
            return loss, h_grads, None
        # One product for the whole group needs only one all-reduce of the sum over devices.
        with jax.named_scope("gradient"):
            table_grad = self.product.compute_table_grad(table_factors, chunks.hidden, dtype, key)
            return loss, h_grads, self.ctx.constrain_weight(table_grad, *_TABLE_AXES)

    def _zeros(self, factors: Factors, inputs: Inputs) -> LossAndMetrics:
        """Return zeros with the same structure as the result of `compute_loss`."""
        # Only shapes are evaluated; none of this enters the program.
        shapes = jax.eval_shape(
            lambda factors, inputs: self.compute_loss(self.product.multiply(factors.hidden, factors.table), inputs),
            factors,
            inputs,
        )
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
