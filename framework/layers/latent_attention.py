"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come from a small latent.

Each position has a latent of R channels, from which every head computes its keys and values, and one rotary key that
all heads share. A cache for generation holds only these: R + P numbers per position, regardless of the number of
heads.

Axis letters in addition to those of `attention`: R channels of the latent, P rotary channels of a head, U channels of
a head without positions, H = U + P channels of a query or key, V channels of a value.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, DType, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.attention import KernelAttention
from plimsoll.framework.layers.attention_cache import attend_with_cache
from plimsoll.framework.layers.attention_kernels import Implementation
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, Out, check_axis
from plimsoll.framework.layers.kernels_call import ContextParallel, SplashBlocks
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.layout import Nested


@component
class LatentAttention(KernelAttention):
    """Causal self-attention of x_BSD, with keys and values from a latent.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_heads: N, the number of heads.
        kv_rank: R, channels of the latent of keys and values (kv_lora_rank of a config.json).
        query_rank: channels of the latent of queries (q_lora_rank); None for queries without a latent.
        plain_dim: U, channels of a head's query and key without positions (qk_nope_head_dim).
        rotary_dim: P, channels of a head's query and key that are rotated by the position (qk_rope_head_dim).
        value_dim: V, channels of a head's value (v_head_dim).
        linear: config of the projections (init); sizes and biases are filled in.
        bias: whether the projections from and to the residual stream have a bias, except the direct projection to
            queries (attention_bias); projections from latents to heads have none.
        output_init_scale: factor on the initial output weight; set by the stack.
        norm: config of the norm of each latent.
        rotary: config of the rotary positions of the P channels.
        interleaved: whether the two channels of a rotated pair are adjacent, as in published DeepSeek weights;
            otherwise they are P / 2 apart.
        scale: factor on the logits; None means H ** -0.5.
        implementation, splash, context_parallel, kernel_dtype: see `plimsoll.Attention`.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_heads: PositiveInt,
        kv_rank: PositiveInt,
        query_rank: PositiveInt | None = None,
        plain_dim: PositiveInt = 128,
        rotary_dim: PositiveInt = 64,
        value_dim: PositiveInt = 128,
        linear: Config = config_for(Linear),
        bias: bool = False,
        output_init_scale: float = 1.0,
        norm: Config = config_for(RMSNorm),
        rotary: Config = config_for(Rotary),
        interleaved: bool = True,
        scale: PositiveFloat | None = None,
        implementation: Implementation = "auto",
        splash: Config = config_for(SplashBlocks),
        context_parallel: ContextParallel = "auto",
        kernel_dtype: DType | None = None,
    ):
        self.num_heads = num_heads
        self.kv_rank = kv_rank
        self.plain_dim = plain_dim
        self.rotary_dim = rotary_dim
        self.key_dim = plain_dim + rotary_dim
        self.value_dim = value_dim
        self.interleaved = interleaved
        self.rotary: Rotary = rotary.instantiate(head_dim=rotary_dim)
        self.scale = self.key_dim**-0.5 if scale is None else scale
        self.implementation = implementation
        self.splash = splash.instantiate()
        self.context_parallel = context_parallel
        self.kernel_dtype = kernel_dtype
        # Latents are replicated over the model axis, because all heads read them; heads are sharded over it.
        from_stream = {"inputs": dim, "mesh_axes": ("fsdp", None), "bias": bias}
        to_heads = {"mesh_axes": ("fsdp", "model"), "roles": ("in", "heads"), "bias": False}
        query_heads = {"outputs": num_heads * self.key_dim, "num_heads": num_heads, **to_heads}
        # The projection of the queries: one matrix, or two with a norm between them.
        self.query: Linear | None = None
        self.query_down: Linear | None = None
        self.query_up: Linear | None = None
        self.query_norm: RMSNorm | None = None
        if query_rank is None:
            self.query = linear.instantiate(inputs=dim, **query_heads)
        else:
            self.query_down = linear.instantiate(outputs=query_rank, **from_stream)
            self.query_norm = norm.instantiate(dim=query_rank)
            self.query_up = linear.instantiate(inputs=query_rank, **query_heads)
        self.kv_down: Linear = linear.instantiate(outputs=kv_rank + rotary_dim, **from_stream)
        self.kv_norm: RMSNorm = norm.instantiate(dim=kv_rank)
        kv_size = num_heads * (plain_dim + value_dim)
        self.kv_up: Linear = linear.instantiate(inputs=kv_rank, outputs=kv_size, **to_heads)
        self.output: Linear = linear.instantiate(
            inputs=num_heads * value_dim,
            outputs=dim,
            mesh_axes=("model", "fsdp"),
            roles=("heads", "out"),
            bias=bias,
            init_scale=output_init_scale,
        )

    def children(self) -> dict[str, Layer]:
        """Return query, or query_down, query_norm and query_up; and kv_down, kv_norm, kv_up, output."""
        candidates = {
            "query": self.query,
            "query_down": self.query_down,
            "query_norm": self.query_norm,
            "query_up": self.query_up,
            "kv_down": self.kv_down,
            "kv_norm": self.kv_norm,
            "kv_up": self.kv_up,
            "output": self.output,
        }
        return {name: layer for name, layer in candidates.items() if layer is not None}

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model axis would split a head."""
        check_axis(mesh, "model", "num_heads", self.num_heads)

    def localize(self, sizes: Mapping[str, int]) -> None:
        """See `Layer.localize`: the model axis divides the heads."""
        self.num_heads //= sizes["model"]

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Apply attention to x_BSD and return [B, S, D].

        With ctx.cache, the latents and rotary keys are returned as layer_state, "latent" [B, S, 1, R + P]. If a
        layer_state is passed in, it is the cache of the tokens before x_BSD; see attention_cache.
        """
        batch, length, _ = carry.shape
        # Batches of packed documents carry positions, which restart at 0 with each document.
        positions_BS = ctx.batch.get("positions", jnp.arange(length)[None])
        ctx = ctx.share_inputs()
        query_BSNH = self._queries(weights, carry, positions_BS, ctx)
        # The latent, and the rotary key that all heads share.
        with jax.named_scope("kv_down"):
            both_BSC = self.kv_down(weights["kv_down"], carry, ctx)
            latent_BSR, key_BSP = jnp.split(both_BSC, [self.kv_rank], axis=-1)
            latent_BSR = self.kv_norm(weights["kv_norm"], latent_BSR, ctx)
            rotary_key_BS1P = self._rotate(positions_BS, key_BSP[:, :, None])
        cached_BS1C = jnp.concatenate([latent_BSR[:, :, None], rotary_key_BS1P], axis=-1) if ctx.cache else None
        if layer_state:
            assert cached_BS1C is not None, "a cache is read where it is written"
            y_BSNV = self._attend_to_cache(weights, query_BSNH, cached_BS1C, ctx, layer_state)
        else:
            with jax.named_scope("kv_up"):
                kv_BSE = self.kv_up(weights["kv_up"], latent_BSR, ctx)
                kv_BSNE = kv_BSE.reshape(batch, length, self.num_heads, -1)
                kv_BSNE = ctx.constrain(kv_BSNE, BATCH_AXES, "seq", "model", None)
                plain_BSNU, v_BSNV = jnp.split(kv_BSNE, [self.plain_dim], axis=-1)
                rotary_BSNP = jnp.broadcast_to(rotary_key_BS1P, (*plain_BSNU.shape[:3], self.rotary_dim))
                k_BSNH = jnp.concatenate([plain_BSNU, rotary_BSNP], axis=-1)
            k_BSNH = checkpoint_name(k_BSNH, "key")
            v_BSNV = checkpoint_name(v_BSNV, "value")
            y_BSNV = self.attend(query_BSNH, k_BSNH, v_BSNV, ctx)
        with jax.named_scope("output"):
            heads_BSE = y_BSNV.reshape(batch, length, -1)
            y_BSD = checkpoint_name(self.output(weights["output"], heads_BSE, ctx), "output")
        cache = {} if cached_BS1C is None else {"latent": cached_BS1C}
        return ctx.constrain_hidden(y_BSD), Out(layer_state=cache)

    def _queries(self, weights: Nested, x_BSD: jax.Array, positions_BS: jax.Array, ctx: Context) -> jax.Array:
        """Return queries [B, S, N, H]: projected, the last P channels rotated, and named for remat policies."""
        batch, length, _ = x_BSD.shape
        with jax.named_scope("query"):
            if self.query is not None:
                heads_BSE = self.query(weights["query"], x_BSD, ctx)
            else:
                assert self.query_down is not None
                assert self.query_norm is not None
                assert self.query_up is not None
                latent_BSQ = self.query_down(weights["query_down"], x_BSD, ctx)
                latent_BSQ = self.query_norm(weights["query_norm"], latent_BSQ, ctx)
                heads_BSE = self.query_up(weights["query_up"], latent_BSQ, ctx)
            q_BSNH = heads_BSE.reshape(batch, length, self.num_heads, self.key_dim)
            q_BSNH = ctx.constrain(q_BSNH, BATCH_AXES, "seq", "model", None)
            plain_BSNU, rotated_BSNP = jnp.split(q_BSNH, [self.plain_dim], axis=-1)
            rotated_BSNP = self._rotate(positions_BS, rotated_BSNP)
            q_BSNH = jnp.concatenate([plain_BSNU, rotated_BSNP], axis=-1)
        return checkpoint_name(q_BSNH, "query")

    def _rotate(self, positions_BS: jax.Array, x_BSNP: jax.Array) -> jax.Array:
        """Rotate the rotary channels of queries or keys; in the result, the members of each pair are P / 2 apart."""
        if self.interleaved:
            # The product of a query and a key does not depend on the order of channels, as long as both have the same
            # order.
            x_BSNP = jnp.concatenate([x_BSNP[..., 0::2], x_BSNP[..., 1::2]], axis=-1)
        (rotated_BSNP,) = self.rotary(positions_BS, x_BSNP)
        return rotated_BSNP

    def _attend_to_cache(
        self, weights: Nested, q_BSNH: jax.Array, new_BS1C: jax.Array, ctx: Context, layer_state: Nested
    ) -> jax.Array:
        """Return softmax(QK)V of the new tokens as [B, S, N, V], without computing earlier tokens' keys and values.

        Section 2.1.2 of the paper: q (W c) = (W^T q) c. Queries are mapped to the latent, which has one key for all
        heads, and the weighted sum of latents is mapped to values.
        """
        if type(self.kv_up) is Linear:
            up_RE = weights["kv_up"]["weight"]
        else:
            # With an adapter, or quantized, no such array exists: applying `kv_up` to the identity gives its rows.
            identity_1RR = jnp.eye(self.kv_rank, dtype=ctx.compute_dtype)[None]
            up_RE = self.kv_up(weights["kv_up"], identity_1RR, ctx)[0]
        up_RNE = up_RE.reshape(self.kv_rank, self.num_heads, -1)
        key_up_RNU, value_up_RNV = jnp.split(up_RNE, [self.plain_dim], axis=-1)
        plain_BSNU, rotated_BSNP = jnp.split(q_BSNH, [self.plain_dim], axis=-1)
        latent_q_BSNR = jnp.einsum("bsnu,rnu->bsnr", plain_BSNU, key_up_RNU)
        latents_BSNR = attend_with_cache(
            jnp.concatenate([latent_q_BSNR, rotated_BSNP], axis=-1),
            new_BS1C,
            new_BS1C[..., : self.kv_rank],
            {"key": layer_state["latent"], "value": layer_state["latent"][..., : self.kv_rank]},
            first_B=ctx.batch["first"],
            slot=ctx.batch["slot"],
            scale=self.scale,
        )
        return jnp.einsum("bsnr,rnv->bsnv", latents_BSNR, value_up_RNV)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the projections, and QK and AV over the whole context: 2 N (H + V) S."""
        # Counted as in PaLM (arXiv 2204.02311, appendix B): the causal mask is not deducted.
        projections = super().flops_per_token(seq_len)
        return projections + 2.0 * self.num_heads * (self.key_dim + self.value_dim) * seq_len
