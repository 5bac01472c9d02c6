"""Self-attention: multi-head (Vaswani et al. 2017) and grouped-query (Ainslie et al. 2023, arXiv 2305.13245).

This module has the projections. `attention_kernels.dot_product_attention` computes softmax(QK)V on all platforms.
Queries, keys and values are separate matrices: that is as fast as a fused matrix (faster on CPU), can be sharded over
heads, and is the form that matrix optimizers and published checkpoints expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, DType, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.attention_cache import attend_with_cache
from plimsoll.framework.layers.attention_kernels import Implementation, check_platform, dot_product_attention
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, Out, check_axis
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.kernels_call import ContextParallel, SplashBlocks
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.norm import LayerNorm, RMSNorm
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.layout import Nested, ParameterSpec, nearest_divisors

# Queries [B, S, N, H], keys and values [B, S, K, H].
Heads = tuple[jax.Array, jax.Array, jax.Array]


class KernelAttention(Layer):
    """Base class of attention layers, which compute softmax(QK)V in the kernel of the platform.

    Attributes:
        window, softcap, scale, implementation, splash, context_parallel, kernel_dtype: see `Attention`.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float
    implementation: Implementation
    splash: SplashBlocks
    context_parallel: ContextParallel
    kernel_dtype: DType | None

    def check_platform(self, platform: str) -> None:
        """See `Layer.check_platform`."""
        check_platform(self.implementation, platform)

    def check_length(self, seq_len: int, seq_shards: int) -> None:
        """Raise ValueError if rows of this length cannot be divided into the chunks of a requested ring.

        Args:
            seq_len: number of positions in a row.
            seq_shards: number of devices that share it.
        """
        has_window = self.window is not None and self.window < seq_len
        if self.context_parallel == "ring" and not has_window and seq_len % (2 * seq_shards):
            raise ValueError(
                f"attention.context_parallel = 'ring' with mesh.seq = {seq_shards} takes a data.seq_len that is a "
                f"multiple of {2 * seq_shards}, given {seq_len}"
            )

    def attend(
        self, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, ctx: Context, sinks_N: jax.Array | None = None
    ) -> jax.Array:
        """Return softmax(QK)V as [B, S, N, V], in the query's dtype."""
        attend = dot_product_attention if ctx.kernels is None else ctx.kernels.attention
        kernel_dtype = self.kernel_dtype or q_BSNH.dtype
        # The kernels name their result "attention", so that remat policies can save it.
        y_BSNV = attend(
            q_BSNH.astype(kernel_dtype),
            k_BSKH.astype(kernel_dtype),
            v_BSKV.astype(kernel_dtype),
            segments_BS=ctx.batch.get("segments"),
            sinks_N=sinks_N,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            implementation=self.implementation,
            mesh=ctx.mesh,
            splash=self.splash,
            context_parallel=self.context_parallel,
        )
        return y_BSNV.astype(q_BSNH.dtype)


@component
class Attention(KernelAttention):
    """Causal self-attention of x_BSD.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_heads: N, the number of query heads.
        num_kv_heads: K, the number of key/value heads; divides N. None means K = N.
        head_dim: H, channels per head; None means D / N.
        linear: config of the projections (bias, init); their sizes are filled in.
        output_bias: whether the output projection has a bias; None means the same as the other projections.
        output_init_scale: factor on the initial output weight; set by the stack.
        rotary: config of the rotary positions; None for models with learned positions.
        qk_norm: config of a norm that is applied to queries and keys before the rotation; None for no norm.
        qk_norm_over: normalize each "head" separately, or "all" heads of a token together.
        clip_qkv: clip the elements of queries, keys and values to [-clip_qkv, clip_qkv], after the norms.
        window: attend only to the last `window` positions.
        softcap: cap the logits: softcap * tanh(logits / softcap).
        scale: factor on the logits; None means H ** -0.5.
        sinks: whether each query head has a learned logit that joins the denominator of its softmax but has no value,
            so that a head can attend to nothing (gpt-oss, arXiv 2508.10925; Xiao et al. 2023, arXiv 2309.17453).
        output_gate: whether the result of each channel is multiplied by the sigmoid of a projection of x_BSD, before
            the output projection (Qiu et al. 2025, arXiv 2505.06708).
        implementation: the kernel. "auto" chooses splash on TPU, cuDNN or Triton on GPU and XLA elsewhere.
        splash: config of the block sizes of the TPU kernel.
        context_parallel: how devices of mesh.seq see each other's keys: "ring" sends keys around while others are in
            use, "gather" gathers all keys on each device. "auto" is a ring if a device has 2048 positions or more;
            with a window, each device receives only the keys before its own.
        kernel_dtype: dtype of queries, keys and values in the kernel, and of its result; None means
            model.compute_dtype. Some frameworks compute attention in float32, which takes twice the bytes of
            bfloat16.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_heads: PositiveInt,
        num_kv_heads: PositiveInt | None = None,
        head_dim: PositiveInt | None = None,
        linear: Config = config_for(Linear),
        output_bias: bool | None = None,
        output_init_scale: float = 1.0,
        rotary: Config | None = None,
        qk_norm: Config | None = None,
        qk_norm_over: Literal["head", "all"] = "head",
        clip_qkv: PositiveFloat | None = None,
        window: PositiveInt | None = None,
        softcap: PositiveFloat | None = None,
        scale: PositiveFloat | None = None,
        sinks: bool = False,
        output_gate: bool = False,
        implementation: Implementation = "auto",
        splash: Config = config_for(SplashBlocks),
        context_parallel: ContextParallel = "auto",
        kernel_dtype: DType | None = None,
    ):
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        if head_dim is None and dim % num_heads:
            raise ValueError(
                f"num_heads = {num_heads} does not divide dim = {dim}; nearest: {nearest_divisors(dim, num_heads)}"
            )
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {num_heads}; "
                f"nearest: {nearest_divisors(num_heads, self.num_kv_heads)}"
            )
        self.head_dim = head_dim or dim // num_heads
        self.window = window
        self.softcap = softcap
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.sinks = sinks
        self.implementation = implementation
        self.splash = splash.instantiate()
        self.context_parallel = context_parallel
        self.kernel_dtype = kernel_dtype
        query_size = num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        # Heads are sharded over the model axis, so the sum over them in `output` is a single all-reduce.
        in_options = {"inputs": dim, "mesh_axes": ("fsdp", "model"), "roles": ("in", "heads")}
        out_options = {"outputs": dim, "mesh_axes": ("model", "fsdp"), "roles": ("heads", "out")}
        if output_bias is not None:
            out_options["bias"] = output_bias
        self.query = linear.instantiate(outputs=query_size, num_heads=num_heads, **in_options)
        self.key = linear.instantiate(outputs=kv_size, num_heads=self.num_kv_heads, **in_options)
        self.value = linear.instantiate(outputs=kv_size, **in_options)
        self.gate: Linear | None = linear.instantiate(outputs=query_size, **in_options) if output_gate else None
        self.output = linear.instantiate(inputs=query_size, init_scale=output_init_scale, **out_options)
        self.rotary: Rotary | None = None if rotary is None else rotary.instantiate(head_dim=self.head_dim)
        self.clip_qkv = clip_qkv
        self.norms_all_heads = qk_norm_over == "all"
        query_width, key_width = (query_size, kv_size) if self.norms_all_heads else (self.head_dim, self.head_dim)
        self.query_norm = None if qk_norm is None else qk_norm.instantiate(dim=query_width)
        self.key_norm = None if qk_norm is None else qk_norm.instantiate(dim=key_width)

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the spec of `sinks` [N], sharded like the heads; {} without sinks."""
        if not self.sinks:
            return {}
        init = jax.nn.initializers.normal(0.02)
        return {"sinks": ParameterSpec((self.num_heads,), "float32", ("model",), initializer=init, roles=("heads",))}

    def children(self) -> dict[str, Layer]:
        """Return query, key, value and output, and gate, query_norm and key_norm if there are any."""
        layers = {"query": self.query, "key": self.key, "value": self.value, "output": self.output}
        if self.gate is not None:
            layers["gate"] = self.gate
        if self.query_norm is not None and self.key_norm is not None:
            layers["query_norm"] = self.query_norm
            layers["key_norm"] = self.key_norm
        return layers

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model axis would split a head."""
        check_axis(mesh, "model", "num_kv_heads", self.num_kv_heads)

    def localize(self, sizes: Mapping[str, int]) -> None:
        """See `Layer.localize`: the model axis divides the heads."""
        self.num_heads //= sizes["model"]
        self.num_kv_heads //= sizes["model"]

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Apply attention to x_BSD and return [B, S, D].

        With ctx.cache, the keys and values are returned as layer_state, [B, S, K, H] each. If a layer_state is passed
        in, it is the cache of the tokens before x_BSD; see attention_cache.
        """
        batch, length, _ = carry.shape
        ctx = ctx.share_inputs()
        q_BSNH, k_BSKH, v_BSKH = self._queries_keys_values(weights, carry, ctx)
        sinks_N = weights.get("sinks")
        if layer_state:
            y_BSNH = attend_with_cache(
                q_BSNH,
                k_BSKH,
                v_BSKH,
                layer_state,
                first_B=ctx.batch["first"],
                slot=ctx.batch["slot"],
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                sinks_N=sinks_N,
            )
        else:
            y_BSNH = self.attend(q_BSNH, k_BSKH, v_BSKH, ctx, sinks_N)
        heads_BSE = y_BSNH.reshape(batch, length, -1)
        if self.gate is not None:
            with jax.named_scope("gate"):
                gate_BSE = ctx.constrain(self.gate(weights["gate"], carry, ctx), BATCH_AXES, "seq", "model")
                heads_BSE = save_inputs(lambda y, gate: y * jax.nn.sigmoid(gate))(heads_BSE, gate_BSE)
        with jax.named_scope("output"):
            y_BSD = checkpoint_name(self.output(weights["output"], heads_BSE, ctx), "output")
        # Keys are cached after the rotation: their positions never change.
        cache = {"key": k_BSKH, "value": v_BSKH} if ctx.cache else {}
        return ctx.constrain_hidden(y_BSD), Out(layer_state=cache)

    def _queries_keys_values(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> Heads:
        """Return q [B, S, N, H], k and v [B, S, K, H]: projected, normed, rotated, and named for remat policies."""
        batch, length, _ = x_BSD.shape

        def heads(layer: Linear, name: str, count: int) -> jax.Array:
            with jax.named_scope(name):
                y = layer(weights[name], x_BSD, ctx)
                y = y.reshape(batch, length, count, self.head_dim)
            return ctx.constrain(y, BATCH_AXES, "seq", "model", None)

        q_BSNH = heads(self.query, "query", self.num_heads)
        k_BSKH = heads(self.key, "key", self.num_kv_heads)
        v_BSKH = heads(self.value, "value", self.num_kv_heads)
        # The norms come before the rotation, as in Qwen3.
        if self.query_norm is not None and self.key_norm is not None:
            q_BSNH = self._apply_norm(self.query_norm, weights["query_norm"], q_BSNH, ctx)
            k_BSKH = self._apply_norm(self.key_norm, weights["key_norm"], k_BSKH, ctx)
        if self.clip_qkv is not None:
            q_BSNH = jnp.clip(q_BSNH, -self.clip_qkv, self.clip_qkv)
            k_BSKH = jnp.clip(k_BSKH, -self.clip_qkv, self.clip_qkv)
            v_BSKH = jnp.clip(v_BSKH, -self.clip_qkv, self.clip_qkv)
        if self.rotary is not None:
            # Batches of packed documents carry positions, which restart at 0 with each document.
            row_positions_1S = jnp.arange(length)[None]
            positions_BS = ctx.batch.get("positions", row_positions_1S)
            q_BSNH, k_BSKH = self.rotary(positions_BS, q_BSNH, k_BSKH)
        q_BSNH = checkpoint_name(q_BSNH, "query")
        k_BSKH = checkpoint_name(k_BSKH, "key")
        v_BSKH = checkpoint_name(v_BSKH, "value")
        return q_BSNH, k_BSKH, v_BSKH

    def _apply_norm(self, norm: RMSNorm | LayerNorm, weights: Nested, x_BSNH: jax.Array, ctx: Context) -> jax.Array:
        """Return queries or keys [B, S, N, H] after their norm, over H or over N and H together."""
        if not self.norms_all_heads:
            return norm(weights, x_BSNH, ctx)
        batch, length, _, _ = x_BSNH.shape
        x_BSE = x_BSNH.reshape(batch, length, -1)
        return norm(weights, x_BSE, ctx).reshape(x_BSNH.shape)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the projections, and QK and AV over the whole context: 4 N H S."""
        # Counted as in PaLM (arXiv 2204.02311, appendix B): the causal mask is not deducted.
        context = min(seq_len, self.window or seq_len)
        projections = super().flops_per_token(seq_len)
        return projections + 4.0 * self.num_heads * self.head_dim * context
