"""The last stage of a language model: final norm, logits, and the cross-entropy in chunks.

Logits cost 4 V bytes per token, often more than everything else together, so they exist for one chunk of positions at a
time. The gradient with respect to hidden states and table is taken chunk by chunk in the forward pass (a scalar loss
only scales it), so nothing is computed twice and no logits are kept.
May import: framework.config, framework.layout, other layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from framework.config import Config, NonNegativeFloat, PositiveFloat, PositiveInt, component, config_for
from framework.layers.base import BATCH_AXES, Context, Layer, Out, prepare_own
from framework.layers.norm import RMSNorm
from framework.layout import Nested, ParameterSpec

Loss = tuple[jax.Array, dict[str, jax.Array]]


@component
class LMHead(Layer):
    """x_BSD -> the loss of ctx.batch["targets"], or logits.

    Args:
        vocab_size: V, given by the model.
        dim: D, given by the model.
        norm: config of the final norm.
        tied: use the embedding's table instead of one's own.
        chunk_tokens: upper bound of tokens of one device whose logits exist at once; 0 means all.
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
        z_loss: NonNegativeFloat = 0.0,
        softcap: PositiveFloat | None = None,
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
    ):
        if chunk_tokens < 0:
            raise ValueError(f"chunk_tokens: expected 0 (all at once) or more, given {chunk_tokens}")
        self.vocab_size, self.dim, self.tied = vocab_size, dim, tied
        self.chunk_tokens, self.z_loss, self.softcap = chunk_tokens, z_loss, softcap
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
        return _logits(h_BSD, weights["table"], self.softcap)

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[None, Out]:
        """The mean loss over counted targets: sum of weights * nll / ctx.num_targets, and z-loss."""
        assert ctx.num_targets is not None
        h_BSD = self.norm(weights["norm"], carry, ctx)
        loss_of = partial(token_loss, softcap=self.softcap, z_loss=self.z_loss)
        chunks = self.num_chunks(h_BSD.shape[0], h_BSD.shape[1], ctx)
        inputs = (ctx.batch["targets"], ctx.batch["weights"] / ctx.num_targets)
        loss, metrics = chunked_loss(loss_of, chunks, ctx, h_BSD, weights["table"], inputs)
        return None, Out(loss=loss, metrics=metrics)

    def num_chunks(self, batch: int, length: int, ctx: Context) -> int:
        """The fewest chunks that divide a device's positions and keep its tokens per chunk under the bound."""
        shards = {} if ctx.mesh is None else ctx.mesh.shape
        local_batch = max(1, batch // (shards.get("data", 1) * shards.get("fsdp", 1)))
        local_length = max(1, length // shards.get("seq", 1))
        if self.chunk_tokens == 0:
            return 1
        wish = -(-local_batch * local_length // self.chunk_tokens)
        return next((n for n in range(min(wish, local_length), local_length + 1) if local_length % n == 0), 1)

    def flops_per_token(self, seq_len: int) -> float:
        """2 V D."""
        return 2.0 * self.vocab_size * self.dim


def _logits(h_BSD: jax.Array, table_VD: jax.Array, softcap: float | None) -> jax.Array:
    dtype = jnp.promote_types(h_BSD.dtype, jnp.float32)
    logits = jnp.einsum("bsd,vd->bsv", h_BSD, table_VD, preferred_element_type=dtype)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def token_loss(
    h_BSD: jax.Array,
    table_VD: jax.Array,
    inputs: tuple[jax.Array, jax.Array],
    *,
    softcap: float | None,
    z_loss: float,
) -> Loss:
    """Weighted cross-entropy of next tokens, and z-loss.

    Args:
        h_BSD: normed hidden states.
        table_VD: the output table.
        inputs: targets int32[B, S] and weights float32[B, S].
        softcap: see LMHead.
        z_loss: see LMHead.

    Returns:
        (f32 scalar, metrics): sums over tokens of weight times loss. "nll" leaves the z-loss out.
    """
    targets_BS, weights_BS = inputs
    logits_BSV = _logits(h_BSD, table_VD, softcap)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    picked_BS = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)[..., 0]
    nll = jnp.sum(weights_BS * (lse_BS - picked_BS))
    loss = nll if z_loss == 0.0 else nll + z_loss * jnp.sum(weights_BS * jnp.square(lse_BS))
    return loss, {"nll": nll}


def chunked_loss(
    loss_of: Callable[..., Loss],
    chunks: int,
    ctx: Context,
    h_BSD: jax.Array,
    table_VD: jax.Array,
    inputs: Any,
) -> Loss:
    """`loss_of(h, table, inputs)` summed over `chunks` interleaved slices of positions.

    Slices are strided (positions i, i + chunks, ...), so that each holds an equal part of every seq shard.
    """
    # custom_vjp keeps the functions below for longer than the trace: they may hold the mesh, but no traced array.
    ctx = Context(batch={}, mesh=ctx.mesh)

    def split(x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0], x.shape[1] // chunks, chunks, *x.shape[2:])
        parts = jnp.moveaxis(parts, 2, 0)
        return ctx.constrain(parts, None, BATCH_AXES, "seq", *(None,) * (parts.ndim - 3))

    def join(parts: jax.Array) -> jax.Array:
        x = jnp.moveaxis(parts, 0, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def scanned(body: Callable[..., Any], carry: Any, h: jax.Array, inputs: Any) -> Any:
        if chunks == 1:
            return body(carry, (h, inputs))
        return jax.lax.scan(body, carry, (split(h), jax.tree.map(split, inputs)))

    def zeros(table: jax.Array, h: jax.Array, inputs: Any) -> Loss:
        shapes = jax.eval_shape(loss_of, h, table, inputs)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(a: Any, b: Any) -> Any:
        return jax.tree.map(jnp.add, a, b)

    @jax.custom_vjp
    def total(h: jax.Array, table: jax.Array, inputs: Any) -> Loss:
        def body(carry: Loss, xs: Any) -> tuple[Loss, None]:
            return add(carry, loss_of(xs[0], table, xs[1])), None

        return scanned(body, zeros(table, h, inputs), h, inputs)[0]

    def forward(h: Any, table: Any, inputs: Any) -> tuple[Loss, Any]:
        argnums = (0, 1) if table.perturbed else (0,)  # a frozen table: a list of no gradients
        h, table, inputs = jax.tree.map(lambda x: x.value, (h, table, inputs))

        def body(carry: tuple[Loss, list[jax.Array]], xs: Any) -> tuple[tuple[Loss, list[jax.Array]], jax.Array]:
            loss_sum, sums = carry
            loss, (h_grad, *grads) = jax.value_and_grad(loss_of, argnums, has_aux=True)(xs[0], table, xs[1])
            with jax.named_scope("gradient"):
                sums = [ctx.constrain(old + grad, "model", "fsdp") for old, grad in zip(sums, grads, strict=True)]
            return (add(loss_sum, loss), sums), h_grad

        # Summed in float32, and sharded: a loop carry cannot hold partial sums, so each chunk is reduced anyway.
        start = [jnp.zeros(table.shape, jnp.promote_types(table.dtype, jnp.float32))] * (len(argnums) - 1)
        carry = (zeros(table, h, inputs), [ctx.constrain(x, "model", "fsdp") for x in start])
        (loss, sums), h_grad = scanned(body, carry, h, inputs)
        return loss, (h_grad if chunks == 1 else join(h_grad), [x.astype(table.dtype) for x in sums], inputs)

    def backward(saved: Any, cotangent: Loss) -> tuple[jax.Array, jax.Array | None, Any]:
        # Metrics are not differentiated; the loss is a scalar, so its cotangent only scales.
        *grads, inputs = saved
        h_grad, table_grad = jax.tree.map(lambda grad: (grad * cotangent[0]).astype(grad.dtype), grads)
        return h_grad, table_grad[0] if table_grad else None, _no_grad(inputs)

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(h_BSD, table_VD, inputs)


def _no_grad(inputs: Any) -> Any:
    targets, weights = inputs
    return np.zeros(targets.shape, jax.dtypes.float0), jnp.zeros_like(weights)
