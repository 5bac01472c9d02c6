"""The last stage of a language model: final norm, logits, and the cross-entropy in chunks.

Logits cost 4 V bytes per token, often more than everything else together, so they exist for one chunk of positions at a
time. Gradients are taken in the forward pass (a scalar loss only scales them), so nothing is computed twice and no
logits are kept: those of hidden states chunk by chunk, that of the table a group of chunks at a time. A group keeps its
logits' gradients in the compute dtype, so that the table's is one product, reduced over the devices once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from framework.config import Config, NonNegativeFloat, PositiveFloat, PositiveInt, component, config_for
from framework.layers.base import BATCH_AXES, Context, Layer, Out, prepare_own
from framework.layers.norm import RMSNorm
from framework.layout import Nested, ParameterSpec

Loss = tuple[jax.Array, dict[str, jax.Array]]


class Chunks(NamedTuple):
    """How many chunks positions are cut into, and how many groups the chunks make; `groups` divides `count`."""

    count: int
    groups: int


@component
class LMHead(Layer):
    """x_BSD -> the loss of ctx.batch["targets"], or logits.

    Args:
        vocab_size: V, given by the model.
        dim: D, given by the model.
        norm: config of the final norm.
        tied: use the embedding's table instead of one's own.
        chunk_tokens: upper bound of tokens of one device whose logits exist at once; 0 means all.
        gradient_tokens: upper bound of tokens of one device whose logits' gradients are kept, in the compute dtype,
            until the table's gradient is taken of them together; at least a chunk's; 0 means all. Where there are more
            tokens, each such group's gradient is reduced over the devices and added to a float32 sum.
        z_loss: weight of mean(logsumexp^2) (PaLM, arXiv 2204.02311).
        softcap: logits become softcap * tanh(logits / softcap).
        init: initializer of an own table.
    """

    def __init__(
        self,
        *,
        vocab_size: PositiveInt,
        dim: PositiveInt,
        norm: Config = config_for(RMSNorm),
        tied: bool = False,
        chunk_tokens: int = 1024,
        gradient_tokens: int = 4096,
        z_loss: NonNegativeFloat = 0.0,
        softcap: PositiveFloat | None = None,
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
    ):
        for name, tokens in (("chunk_tokens", chunk_tokens), ("gradient_tokens", gradient_tokens)):
            if tokens < 0:
                raise ValueError(f"{name}: expected 0 (all at once) or more, given {tokens}")
        self.vocab_size, self.dim, self.tied = vocab_size, dim, tied
        self.chunk_tokens, self.gradient_tokens = chunk_tokens, gradient_tokens
        self.z_loss, self.softcap = z_loss, softcap
        self.norm = norm.instantiate(dim=dim)
        self._init = init.instantiate()

    def children(self) -> dict[str, Layer]:
        """The final norm."""
        return {"norm": self.norm}

    def table_spec(self) -> ParameterSpec:
        """The table that turns hidden states into logits, [V, D]."""
        return ParameterSpec(
            (self.vocab_size, self.dim), "float32", ("model", "fsdp"), initializer=self._init, roles=("vocab", "in")
        )

    def own_specs(self) -> dict[str, ParameterSpec]:
        """table [V, D]; none of its own when tied: the model declares the tie and passes the embedding's."""
        return {} if self.tied else {"table": self.table_spec()}

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """A tied table is prepared here as an own one would be."""
        table = prepare_own({"table": self.table_spec()}, params, ctx)
        return {**table, "norm": self.norm.prepare(params["norm"], ctx)}

    def logits(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """x_BSD -> float32 logits_BSV."""
        h_BSD = self.norm(weights["norm"], x_BSD, ctx)
        return _logits(_product(h_BSD, weights["table"]), self.softcap)

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[None, Out]:
        """The mean loss over counted targets: sum of weights * nll / ctx.num_targets, and z-loss."""
        assert ctx.num_targets is not None
        h_BSD = self.norm(weights["norm"], carry, ctx)
        loss_of = partial(token_loss, softcap=self.softcap, z_loss=self.z_loss)
        chunks = self.chunks(h_BSD.shape[0], h_BSD.shape[1], ctx)
        inputs = (ctx.batch["targets"], ctx.batch["weights"] / ctx.num_targets)
        loss, metrics = chunked_loss(loss_of, chunks, ctx, h_BSD, weights["table"], inputs)
        return None, Out(loss=loss, metrics=metrics)

    def chunks(self, batch: int, length: int, ctx: Context) -> Chunks:
        """How positions are cut: into the fewest chunks that divide a device's positions and keep its tokens per chunk
        under the bound, and these into the fewest groups that divide the chunks and keep theirs."""
        shards = {} if ctx.mesh is None else ctx.mesh.shape
        local_batch = max(1, batch // (shards.get("data", 1) * shards.get("fsdp", 1)))
        local_length = max(1, length // shards.get("seq", 1))
        tokens = local_batch * local_length

        def divisor(number: int, least: int) -> int:
            return next((n for n in range(min(least, number), number + 1) if number % n == 0), 1)

        count = 1 if self.chunk_tokens == 0 else divisor(local_length, -(-tokens // self.chunk_tokens))
        groups = 1 if self.gradient_tokens == 0 else divisor(count, -(-tokens // self.gradient_tokens))
        return Chunks(count, groups)

    def flops_per_token(self, seq_len: int) -> float:
        """2 V D."""
        return 2.0 * self.vocab_size * self.dim


def _product(h_BSD: jax.Array, table_VD: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(h_BSD.dtype, jnp.float32)
    return jnp.einsum("bsd,vd->bsv", h_BSD, table_VD, preferred_element_type=dtype)


def _logits(product_BSV: jax.Array, softcap: float | None) -> jax.Array:
    return product_BSV if softcap is None else softcap * jnp.tanh(product_BSV / softcap)


def token_loss(
    product_BSV: jax.Array, inputs: tuple[jax.Array, jax.Array], *, softcap: float | None, z_loss: float
) -> Loss:
    """Weighted cross-entropy of next tokens, and z-loss.

    Args:
        product_BSV: normed hidden states times the output table, f32 or wider: logits, but for the softcap.
        inputs: targets int32[B, S] and weights float32[B, S].
        softcap: see LMHead.
        z_loss: see LMHead.

    Returns:
        (f32 scalar, metrics): sums over tokens of weight times loss. "nll" leaves the z-loss out.
    """
    targets_BS, weights_BS = inputs
    logits_BSV = _logits(product_BSV, softcap)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    picked_BS = _picked(logits_BSV, targets_BS)
    nll = jnp.sum(weights_BS * (lse_BS - picked_BS))
    loss = nll if z_loss == 0.0 else nll + z_loss * jnp.sum(weights_BS * jnp.square(lse_BS))
    return loss, {"nll": nll}


@jax.custom_vjp
def _picked(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """The logits of the targets, [B, S], with a gradient that is elementwise.

    JAX's own gradient of a lookup is a scatter, which XLA keeps apart from the arithmetic before and behind it: the
    gradient of all logits would be written in float32, and read again, once more than it has to be.
    """
    return jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)[..., 0]


def _picked_forward(logits_BSV: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    ids_V = jnp.arange(logits_BSV.shape[-1], dtype=targets_BS.dtype)
    return _picked(logits_BSV, targets_BS), (ids_V, targets_BS)


def _picked_backward(saved: tuple[jax.Array, jax.Array], grad_BS: jax.Array) -> tuple[jax.Array, None]:
    ids_V, targets_BS = saved
    is_target_BSV = targets_BS[..., None] == ids_V
    return jnp.where(is_target_BSV, grad_BS[..., None], jnp.zeros((), grad_BS.dtype)), None


_picked.defvjp(_picked_forward, _picked_backward)


def chunked_loss(
    loss_of: Callable[..., Loss],
    chunks: Chunks,
    ctx: Context,
    h_BSD: jax.Array,
    table_VD: jax.Array,
    inputs: Any,
) -> Loss:
    """`loss_of(product of hidden states and table, inputs)` summed over interleaved slices of positions.

    Slices are strided (positions i, i + chunks, ...), so that each holds an equal part of every seq shard.
    """
    # custom_vjp keeps the functions below for longer than the trace: they may hold the mesh, but no traced array.
    run = _ChunkedLoss(loss_of, chunks, Context(batch={}, mesh=ctx.mesh))

    @jax.custom_vjp
    def total(h: jax.Array, table: jax.Array, inputs: Any) -> Loss:
        return run.loss(h, table, inputs)

    def forward(h: Any, table: Any, inputs: Any) -> tuple[Loss, Any]:
        is_table_trained = table.perturbed
        h, table, inputs = jax.tree.map(lambda x: x.value, (h, table, inputs))
        loss, h_grad, table_grad = run.loss_and_gradients(h, table, inputs, of_table=is_table_trained)
        return loss, (h_grad, table_grad, inputs)

    def backward(saved: Any, cotangent: Loss) -> tuple[jax.Array, jax.Array | None, Any]:
        # Metrics are not differentiated; the loss is a scalar, so its cotangent only scales.
        *grads, inputs = saved
        h_grad, table_grad = jax.tree.map(lambda grad: (grad * cotangent[0]).astype(grad.dtype), grads)
        return h_grad, table_grad, _no_grad(inputs)

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(h_BSD, table_VD, inputs)


class _ChunkedLoss:
    """The loss, and its gradients, a chunk of positions at a time; see `chunked_loss`."""

    def __init__(self, loss_of: Callable[..., Loss], chunks: Chunks, ctx: Context):
        self.loss_of, self.chunks, self.ctx = loss_of, chunks, ctx

    def loss(self, h: jax.Array, table: jax.Array, inputs: Any) -> Loss:
        """The loss alone."""

        def body(sums: Loss, chunk: Any) -> tuple[Loss, None]:
            return _add(sums, self.loss_of(_product(chunk[0], table), chunk[1])), None

        if self.chunks.count == 1:
            return self.loss_of(_product(h, table), inputs)
        return jax.lax.scan(body, self._zeros(h, table, inputs), self._split((h, inputs)))[0]

    def loss_and_gradients(
        self, h: jax.Array, table: jax.Array, inputs: Any, *, of_table: bool
    ) -> tuple[Loss, jax.Array, jax.Array | None]:
        """(loss, gradient of h, gradient of the table or None), each gradient in the dtype of what it is of."""
        count, groups = self.chunks if of_table else (self.chunks.count, 1)
        zeros = self._zeros(h, table, inputs)
        parts = self._split((h, inputs))
        if groups == 1:
            loss, h_grads, table_grad = self._group(zeros, parts, table, table.dtype if of_table else None)
            return loss, self._join(h_grads), table_grad
        # Summed in float32, and sharded: a loop's carry cannot hold partial sums, so each group's is reduced.
        sum_dtype = jnp.promote_types(table.dtype, jnp.float32)

        def body(sums: tuple[Loss, jax.Array], group: Any) -> tuple[tuple[Loss, jax.Array], jax.Array]:
            loss, h_grads, table_grad = self._group(sums[0], group, table, sum_dtype)
            assert table_grad is not None
            return (loss, self._as_table(sums[1] + table_grad)), h_grads

        start = zeros, self._as_table(jnp.zeros(table.shape, sum_dtype))
        grouped = jax.tree.map(lambda x: x.reshape(groups, count // groups, *x.shape[1:]), parts)
        (loss, table_sum), h_grads = jax.lax.scan(body, start, grouped)
        h_grads = h_grads.reshape(count, *h_grads.shape[2:])
        return loss, self._join(h_grads), table_sum.astype(table.dtype)

    def _group(self, loss: Loss, parts: Any, table: jax.Array, dtype: Any) -> tuple[Loss, jax.Array, jax.Array | None]:
        """A group's chunks, [chunks, B, S / chunks, ...]: the loss with theirs added, the gradients of their hidden
        states, and the table's in `dtype` (None: not asked for)."""

        def body(loss: Loss, chunk: Any) -> tuple[Loss, tuple[jax.Array, jax.Array | None]]:
            h, inputs = chunk
            more, product_grad = jax.value_and_grad(self.loss_of, has_aux=True)(_product(h, table), inputs)
            # In the compute dtype, as activations' gradients are everywhere.
            product_grad = product_grad.astype(h.dtype)
            h_grad = jnp.einsum("bsv,vd->bsd", product_grad, table)
            return _add(loss, more), (h_grad, None if dtype is None else product_grad)

        if parts[0].shape[0] == 1:
            loss, per_chunk = body(loss, jax.tree.map(lambda x: x[0], parts))
            h_grads, product_grads = jax.tree.map(lambda x: x[None], per_chunk)
        else:
            loss, (h_grads, product_grads) = jax.lax.scan(body, loss, parts)
        if product_grads is None:
            return loss, h_grads, None
        with jax.named_scope("gradient"):
            table_grad = jnp.einsum("cbsv,cbsd->vd", product_grads, parts[0], preferred_element_type=dtype)
            return loss, h_grads, self._as_table(table_grad)

    def _as_table(self, grad: jax.Array) -> jax.Array:
        """Sharded as the table is stored, which is where the devices' parts are added up."""
        return self.ctx.constrain(grad, "model", "fsdp")

    def _split(self, tree: Any) -> Any:
        """[B, S, ...] -> [chunks, B, S / chunks, ...]."""
        count = self.chunks.count

        def split(x: jax.Array) -> jax.Array:
            parts = jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // count, count, *x.shape[2:]), 2, 0)
            return self.ctx.constrain(parts, None, BATCH_AXES, "seq", *(None,) * (parts.ndim - 3))

        return jax.tree.map(split, tree)

    @staticmethod
    def _join(parts: jax.Array) -> jax.Array:
        x = jnp.moveaxis(parts, 0, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def _zeros(self, h: jax.Array, table: jax.Array, inputs: Any) -> Loss:
        def whole(h: jax.Array, table: jax.Array, inputs: Any) -> Loss:
            return self.loss_of(_product(h, table), inputs)

        shapes = jax.eval_shape(whole, h, table, inputs)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _no_grad(inputs: Any) -> Any:
    targets, weights = inputs
    return np.zeros(targets.shape, jax.dtypes.float0), jnp.zeros_like(weights)
