"""Gated DeltaNet: linear attention with a state of fixed size (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Queries, keys and values pass a short causal convolution. The gated delta rule then reads and corrects a state per head,
instead of attending to all earlier tokens, and a gated norm completes the layer. Time and memory grow linearly with the
length of a row, and the cache for generation has the same size for any length.

Axis letters: N heads of values, K heads of queries and keys, H channels of a key, V channels of a value, E channels of
all heads together, W taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, Out, check_axis
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.gated_delta_rule import CHUNK, gated_delta_rule
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layout import Nested, ParameterSpec, nearest_divisors

# The mesh axes that shard the heads. Along `seq`, each device has all positions of some heads during the recurrence.
_HEAD_AXES = ("model", "seq")
# Under the root of the norm of queries and keys.
_UNIT_EPS = 1e-6


@component
class GatedDeltaNet(Layer):
    """Linear attention of x_BSD by the gated delta rule.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_heads: N, the number of heads of values.
        num_key_heads: K, the number of heads of queries and keys; divides N. None means K = N.
        key_dim: H, channels of a query or key.
        value_dim: V, channels of a value.
        conv_width: W, the number of tokens that the convolution sees, the current one included.
        linear: config of the projections (bias, init); their sizes are filled in.
        norm_eps: added under the root of the norm of the heads' outputs.
        output_init_scale: factor on the initial output weight; set by the stack.
        chunk: tokens of a chunk of the recurrence; changes time and memory, not the result.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_heads: PositiveInt,
        num_key_heads: PositiveInt | None = None,
        key_dim: PositiveInt = 128,
        value_dim: PositiveInt = 128,
        conv_width: PositiveInt = 4,
        linear: Config = config_for(Linear),
        norm_eps: PositiveFloat = 1e-6,
        output_init_scale: float = 1.0,
        chunk: PositiveInt = CHUNK,
    ):
        self.num_heads = num_heads
        self.num_key_heads = num_key_heads or num_heads
        if num_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads = {num_key_heads} does not divide num_heads = {num_heads}; "
                f"nearest: {nearest_divisors(num_heads, self.num_key_heads)}"
            )
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.conv_width = conv_width
        self.chunk = chunk
        # Heads are sharded over the model axis, so the sum over them in `output` is a single all-reduce.
        in_options = {"inputs": dim, "mesh_axes": ("fsdp", "model"), "roles": ("in", "heads")}
        key_size = self.num_key_heads * key_dim
        value_size = num_heads * value_dim
        # Channels of the projections that pass a convolution.
        self.channels = {"query": key_size, "key": key_size, "value": value_size}
        self.query: Linear = linear.instantiate(outputs=key_size, num_heads=self.num_key_heads, **in_options)
        self.key: Linear = linear.instantiate(outputs=key_size, num_heads=self.num_key_heads, **in_options)
        self.value: Linear = linear.instantiate(outputs=value_size, **in_options)
        self.gate: Linear = linear.instantiate(outputs=value_size, **in_options)
        # One number per head and token: too few for matrix optimizers and for shards over fsdp.
        per_head = {"inputs": dim, "outputs": num_heads, "mesh_axes": (None, "model"), "roles": ("in", "heads")}
        self.beta: Linear = linear.instantiate(**per_head)
        self.decay: Linear = linear.instantiate(**per_head)
        self.norm = RMSNorm(dim=value_dim, eps=norm_eps)
        self.output: Linear = linear.instantiate(
            inputs=value_size,
            outputs=dim,
            mesh_axes=("model", "fsdp"),
            roles=("heads", "out"),
            init_scale=output_init_scale,
        )

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of the convolutions [W, E], and of log_rate and decay_bias [N].

        The decay of a token is exp(-exp(log_rate) * softplus(decay + decay_bias)).
        """

        def initialize_taps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            # As torch.nn.Conv1d does, for W inputs of each output.
            bound = self.conv_width**-0.5
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        def initialize_rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))

        specs = {}
        for name, channels in self.channels.items():
            specs[f"{name}_conv"] = ParameterSpec(
                (self.conv_width, channels),
                "float32",
                (None, "model"),
                initializer=initialize_taps,
                roles=("tap", "heads"),
            )
        specs["log_rate"] = ParameterSpec(
            (self.num_heads,), "float32", ("model",), initializer=initialize_rates, roles=("heads",)
        )
        specs["decay_bias"] = ParameterSpec(
            (self.num_heads,), "float32", ("model",), initializer=jax.nn.initializers.ones, roles=("heads",)
        )
        return specs

    def children(self) -> dict[str, Layer]:
        """Return the projections query, key, value, gate, beta, decay and output, and the norm."""
        return {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "gate": self.gate,
            "beta": self.beta,
            "decay": self.decay,
            "norm": self.norm,
            "output": self.output,
        }

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the axes model and seq, which both divide the heads, would split a head."""
        check_axis(mesh, "model", "num_key_heads", self.num_key_heads)
        check_axis(mesh, "seq", "num_key_heads / mesh.model", self.num_key_heads // mesh.shape["model"])

    def localize(self, sizes: Mapping[str, int]) -> None:
        """See `Layer.localize`: the model axis divides the heads."""
        self.num_heads //= sizes["model"]
        self.num_key_heads //= sizes["model"]

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Apply linear attention to x_BSD and return [B, S, D].

        With ctx.cache, the cache for the tokens that follow is returned as layer_state: `state` [B, N, H, V], and the
        inputs of the convolutions for the last W - 1 tokens, [B, W - 1, E] each. If a layer_state is passed in, it is
        the cache of the tokens before x_BSD.
        """
        B, S, _ = carry.shape
        # In generation, tokens after a cache are of one document, and padding on the right follows them.
        segments_BS = None if layer_state else ctx.batch.get("segments")
        counts_BS = ctx.batch.get("segments") if layer_state else None
        cache: Nested = {}
        convolved = {}
        # A projection may have been replaced by one with an adapter.
        for name, layer in {"query": self.query, "key": self.key, "value": self.value}.items():
            with jax.named_scope(name):
                x_BSE = layer(weights[name], carry, ctx)
                x_BSE = ctx.constrain(x_BSE, BATCH_AXES, None, _HEAD_AXES)
                earlier_BTE = self._get_earlier(x_BSE, layer_state.get(f"{name}_inputs"))
                y_BSE = convolve(x_BSE, earlier_BTE, weights[f"{name}_conv"], segments_BS)
                if ctx.cache:
                    if segments_BS is not None:
                        # The next tokens are of the last document: padding on the left is another one.
                        x_BSE = jnp.where((segments_BS == segments_BS[:, -1:])[..., None], x_BSE, 0)
                    cache[f"{name}_inputs"] = self._get_last_inputs(x_BSE, earlier_BTE, counts_BS)
            convolved[name] = checkpoint_name(y_BSE, name)
        with jax.named_scope("decay"):
            beta_BSN, log_decay_BSN = self._compute_rates(weights, carry, ctx)
        if counts_BS is not None:
            # Padding leaves the state as it is.
            is_token_BS1 = counts_BS[:, :, None] > 0
            beta_BSN = jnp.where(is_token_BS1, beta_BSN, 0.0)
            log_decay_BSN = jnp.where(is_token_BS1, log_decay_BSN, 0.0)
        with jax.named_scope("rule"):
            y_BSNV, state_BNHV = gated_delta_rule(
                convolved["query"].reshape(B, S, self.num_key_heads, self.key_dim),
                convolved["key"].reshape(B, S, self.num_key_heads, self.key_dim),
                convolved["value"].reshape(B, S, self.num_heads, self.value_dim),
                log_decay_BSN,
                beta_BSN,
                segments_BS=segments_BS,
                state_BNHV=layer_state.get("state"),
                query_scale=self.key_dim**-0.5,
                unit_eps=_UNIT_EPS,
                platform=ctx.platform,
                chunk=self.chunk,
            )
            y_BSNV = checkpoint_name(y_BSNV, "attention")
            if ctx.cache:
                cache["state"] = state_BNHV
        with jax.named_scope("gate"):
            gate_BSE = self.gate(weights["gate"], carry, ctx)
            gate_BSE = ctx.constrain(gate_BSE, BATCH_AXES, None, _HEAD_AXES)
        with jax.named_scope("norm"):
            y_BSNV = self.norm(weights["norm"], y_BSNV, ctx)
            y_BSE = save_inputs(_apply_gate)(y_BSNV.reshape(B, S, -1), gate_BSE)
        with jax.named_scope("output"):
            y_BSD = checkpoint_name(self.output(weights["output"], y_BSE, ctx), "output")
        return ctx.constrain_hidden(y_BSD), Out(layer_state=cache)

    def _compute_rates(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Return the rate of the correction, and the log of the decay, [B, S, N] each, in float32 or wider."""
        wide = jnp.promote_types(ctx.compute_dtype, jnp.float32)
        beta_BSN = self.beta(weights["beta"], x_BSD, ctx).astype(wide)
        decay_BSN = self.decay(weights["decay"], x_BSD, ctx).astype(wide)
        rate_N = jnp.exp(weights["log_rate"].astype(wide))
        log_decay_BSN = -rate_N * jax.nn.softplus(decay_BSN + weights["decay_bias"].astype(wide))
        beta_BSN = ctx.constrain(jax.nn.sigmoid(beta_BSN), BATCH_AXES, None, _HEAD_AXES)
        return beta_BSN, ctx.constrain(log_decay_BSN, BATCH_AXES, None, _HEAD_AXES)

    def _get_earlier(self, x_BSE: jax.Array, cached_BTE: jax.Array | None) -> jax.Array:
        """Return the inputs of a convolution for the W - 1 tokens before x_BSE: cached ones, or zeros."""
        if cached_BTE is not None:
            return cached_BTE.astype(x_BSE.dtype)
        B, _, E = x_BSE.shape
        return jnp.zeros((B, self.conv_width - 1, E), x_BSE.dtype)

    def _get_last_inputs(self, x_BSE: jax.Array, earlier_BTE: jax.Array, counts_BS: jax.Array | None) -> jax.Array:
        """Return the inputs of a convolution for the last W - 1 tokens, without padding on the right.

        Args:
            x_BSE: inputs for the new tokens.
            earlier_BTE: inputs for the tokens before them.
            counts_BS: 1 for tokens and 0 for padding, the same in all rows; None if there is no padding.
        """
        inputs = jnp.concatenate([earlier_BTE, x_BSE], axis=1)
        count = x_BSE.shape[1] if counts_BS is None else jnp.sum(counts_BS[0])
        return jax.lax.dynamic_slice_in_dim(inputs, count, self.conv_width - 1, axis=1)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the projections, the convolutions, and the products of a chunk with its state and with itself."""
        N, H, V, C = self.num_heads, self.key_dim, self.value_dim, min(self.chunk, seq_len)
        convolution = 2.0 * self.conv_width * sum(self.channels.values())
        # Keys with keys and queries with keys, [C, H] each; the triangular system for V + H columns; the corrections
        # and the outputs.
        inside = 4.0 * self.num_key_heads * H * C + N * C * (V + H) + 2.0 * N * C * V
        with_state = 6.0 * N * H * V
        return super().flops_per_token(seq_len) + convolution + inside + with_state


def convolve(x_BSE: jax.Array, earlier_BTE: jax.Array, taps_WE: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
    """Apply a causal convolution to each channel separately, then SiLU, in x's dtype.

    Args:
        x_BSE: inputs.
        earlier_BTE: the inputs of the W - 1 tokens before them.
        taps_WE: weights; the last tap is that of the token itself.
        segments_BS: the document of each token; a tap that reaches into another document sees 0. None: one document.
    """
    W = taps_WE.shape[0]
    S = x_BSE.shape[1]

    def compute(x_BSE: jax.Array, earlier_BTE: jax.Array, taps_WE: jax.Array, *segments: jax.Array) -> jax.Array:
        inputs = jnp.concatenate([earlier_BTE, x_BSE], axis=1)
        wide = jnp.promote_types(x_BSE.dtype, jnp.float32)
        total = jnp.zeros(x_BSE.shape, wide)
        for tap in range(W):
            seen_BSE = jax.lax.slice_in_dim(inputs, tap, tap + S, axis=1)
            distance = W - 1 - tap
            if segments and distance:
                (segments_BS,) = segments
                before_BS = jnp.pad(segments_BS, ((0, 0), (distance, 0)), mode="edge")[:, :S]
                seen_BSE = jnp.where((before_BS == segments_BS)[..., None], seen_BSE, 0)
            total = total + seen_BSE.astype(wide) * taps_WE[tap].astype(wide)
        return jax.nn.silu(total).astype(x_BSE.dtype)

    segments = [] if segments_BS is None else [segments_BS]
    return save_inputs(compute)(x_BSE, earlier_BTE, taps_WE, *segments)


def _apply_gate(y_BSE: jax.Array, gate_BSE: jax.Array) -> jax.Array:
    """Return y * silu(gate), computed in float32 or wider, in y's dtype."""
    wide = jnp.promote_types(y_BSE.dtype, jnp.float32)
    return (y_BSE.astype(wide) * jax.nn.silu(gate_BSE.astype(wide))).astype(y_BSE.dtype)
