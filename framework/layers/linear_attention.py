"""Base class of linear attention: a head has a state of fixed size instead of the keys and values of earlier tokens.

Queries, keys and values pass a short causal convolution. A recurrence (gated_delta_rule) then reads and changes a state
per head. Time and memory grow linearly with the length of a row, and the cache for generation has the same size for
any length. `GatedDeltaNet` and `Mamba2` differ in their decay, their recurrence, and what follows it.

Along `seq`, each device has contiguous positions of each row, and receives what comes before them from other devices:
the last inputs of the convolutions, and the states.

Axis letters: N heads of values, K heads of queries and keys, H channels of a key, V channels of a value, E channels of
all heads together, W taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, Out, check_axis
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.gated_delta_rule import gated_delta_rule
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.state_passing import receive_previous
from plimsoll.framework.layout import Nested, ParameterSpec, nearest_divisors


class LinearAttention(Layer):
    """Linear attention of x_BSD. Subclasses compute the rates of the recurrence, and complete its outputs.

    Args:
        dim: D, the width of the residual stream.
        num_heads: N, the number of heads of values.
        num_key_heads: K, the number of heads of queries and keys; divides N.
        key_heads_field: name of the config's field for K, for messages.
        key_dim: H, channels of a query or key.
        value_dim: V, channels of a value.
        conv_width: W, the number of tokens that the convolution sees, the current one included.
        conv_bias: whether the convolution adds a bias.
        linear: config of the projections.
        output_init_scale: factor on the initial output weight.
        chunk: tokens of a chunk of the recurrence.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        num_key_heads: int,
        key_heads_field: str,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        conv_bias: bool,
        linear: Config,
        output_init_scale: float,
        chunk: int,
    ):
        if num_heads % num_key_heads:
            raise ValueError(
                f"{key_heads_field} = {num_key_heads} does not divide num_heads = {num_heads}; "
                f"nearest: {nearest_divisors(num_heads, num_key_heads)}"
            )
        self.num_heads = num_heads
        self.num_key_heads = num_key_heads
        self._key_heads_field = key_heads_field
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.conv_width = conv_width
        self.conv_bias = conv_bias
        self.chunk = chunk
        key_size = num_key_heads * key_dim
        value_size = num_heads * value_dim
        # Channels of the projections that pass a convolution.
        self.channels = {"query": key_size, "key": key_size, "value": value_size}
        # Heads are sharded over the model axis, so the sum over them in `output` is a single all-reduce. Queries and
        # keys that all heads share are whole on each of its devices.
        self._shares_keys = num_key_heads == 1
        key_axis = None if self._shares_keys else "model"
        self._conv_axes = {"query": key_axis, "key": key_axis, "value": "model"}
        in_options = {"inputs": dim, "roles": ("in", "heads")}
        key_options = {"outputs": key_size, "mesh_axes": ("fsdp", key_axis), "num_heads": num_key_heads, **in_options}
        value_options = {"outputs": value_size, "mesh_axes": ("fsdp", "model"), **in_options}
        self.query: Linear = linear.instantiate(**key_options)
        self.key: Linear = linear.instantiate(**key_options)
        self.value: Linear = linear.instantiate(**value_options)
        self.gate: Linear = linear.instantiate(**value_options)
        self.output: Linear = linear.instantiate(
            inputs=value_size,
            outputs=dim,
            mesh_axes=("model", "fsdp"),
            roles=("heads", "out"),
            init_scale=output_init_scale,
        )
        # For the subclasses' projections to one number per head and token.
        self._rate_options = {"outputs": num_heads, **in_options}

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of the convolutions, [W, E] and their biases [E]."""

        def initialize(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            # As torch.nn.Conv1d does, for W inputs of each output.
            bound = self.conv_width**-0.5
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        specs = {}
        for name, channels in self.channels.items():
            axis = self._conv_axes[name]
            specs[f"{name}_conv"] = ParameterSpec(
                (self.conv_width, channels), "float32", (None, axis), initializer=initialize, roles=("tap", "heads")
            )
            if self.conv_bias:
                specs[f"{name}_conv_bias"] = ParameterSpec(
                    (channels,), "float32", (axis,), initializer=initialize, roles=("heads",)
                )
        return specs

    def children(self) -> dict[str, Layer]:
        """Return the projections query, key, value, gate and output."""
        return {"query": self.query, "key": self.key, "value": self.value, "gate": self.gate, "output": self.output}

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model axis would split a head."""
        if self._shares_keys:
            check_axis(mesh, "model", "num_heads", self.num_heads)
        else:
            check_axis(mesh, "model", self._key_heads_field, self.num_key_heads)

    def localize(self, sizes: Mapping[str, int]) -> None:
        """See `Layer.localize`: the model axis divides the heads."""
        self.num_heads //= sizes["model"]
        if not self._shares_keys:
            self.num_key_heads //= sizes["model"]

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Apply linear attention to x_BSD and return [B, S, D].

        With ctx.cache, the cache for the tokens that follow is returned as layer_state: `state` [B, N, H, V], and the
        inputs of the convolutions for the last W - 1 tokens, [B, W - 1, E] each. If a layer_state is passed in, it is
        the cache of the tokens before x_BSD.
        """
        B, S, _ = carry.shape
        ctx = ctx.share_inputs()
        # In generation, tokens after a cache are of one document, and padding on the right follows them.
        segments_BS = None if layer_state else ctx.batch.get("segments")
        counts_BS = ctx.batch.get("segments") if layer_state else None
        # In generation, each device reads all positions.
        shards = 1 if ctx.cache or layer_state else ctx.seq_shards(B, S)
        cache: Nested = {}
        convolved = {}
        # A projection may have been replaced by one with an adapter.
        for name, layer in {"query": self.query, "key": self.key, "value": self.value}.items():
            with jax.named_scope(name):
                x_BSE = layer(weights[name], carry, ctx)
                x_BSE = ctx.constrain(x_BSE, BATCH_AXES, "seq", self._conv_axes[name])
                earlier_BTE = self._get_earlier(x_BSE, layer_state.get(f"{name}_inputs"))
                taps_WE, bias_E = weights[f"{name}_conv"], weights.get(f"{name}_conv_bias")
                if shards > 1:
                    axes_BSE = (BATCH_AXES, "seq", self._conv_axes[name])
                    in_axes = [axes_BSE, (None, axes_BSE[2]), axes_BSE[:2], axes_BSE[2:]]
                    convolve_shards = ctx.on_each_device(partial(_convolve_shard, shards), in_axes, axes_BSE)
                    y_BSE = convolve_shards(x_BSE, taps_WE, segments_BS, bias_E)
                else:
                    y_BSE = convolve(x_BSE, earlier_BTE, taps_WE, segments_BS, bias_E=bias_E)
                if ctx.cache:
                    if segments_BS is not None:
                        # The next tokens are of the last document: padding on the left is another one.
                        x_BSE = jnp.where((segments_BS == segments_BS[:, -1:])[..., None], x_BSE, 0)
                    cache[f"{name}_inputs"] = self._get_last_inputs(x_BSE, earlier_BTE, counts_BS)
            convolved[name] = checkpoint_name(y_BSE, name)
        with jax.named_scope("decay"):
            beta_BSN, log_decay_BSN = self._compute_rates(weights, carry, ctx)
            beta_BSN = ctx.constrain(beta_BSN, BATCH_AXES, "seq", "model")
            log_decay_BSN = ctx.constrain(log_decay_BSN, BATCH_AXES, "seq", "model")
        if counts_BS is not None:
            # Padding leaves the state as it is.
            is_token_BS1 = counts_BS[:, :, None] > 0
            beta_BSN = jnp.where(is_token_BS1, beta_BSN, 0.0)
            log_decay_BSN = jnp.where(is_token_BS1, log_decay_BSN, 0.0)
        query_BSKH = convolved["query"].reshape(B, S, self.num_key_heads, self.key_dim)
        key_BSKH = convolved["key"].reshape(B, S, self.num_key_heads, self.key_dim)
        value_BSNV = convolved["value"].reshape(B, S, self.num_heads, self.value_dim)

        def run_rule(
            segments_BS: jax.Array | None, state_BNHV: jax.Array | None, *arrays: jax.Array
        ) -> tuple[jax.Array, jax.Array | None]:
            options = {"platform": ctx.platform, "chunk": self.chunk, **self._get_rule_options()}
            return gated_delta_rule(*arrays, segments_BS=segments_BS, state_BNHV=state_BNHV, shards=shards, **options)

        with jax.named_scope("rule"):
            arrays = (query_BSKH, key_BSKH, value_BSNV, log_decay_BSN, beta_BSN)
            if shards > 1:
                axes_BSN = (BATCH_AXES, "seq", "model")
                axes_BSK = (BATCH_AXES, "seq", self._conv_axes["key"])
                in_axes = [axes_BSN[:2], axes_BSK, axes_BSK, axes_BSN, axes_BSN, axes_BSN]
                run_shards = ctx.on_each_device(lambda ids, *arrays: run_rule(ids, None, *arrays)[0], in_axes, axes_BSN)
                y_BSNV, state_BNHV = run_shards(segments_BS, *arrays), None
            else:
                y_BSNV, state_BNHV = run_rule(segments_BS, layer_state.get("state"), *arrays)
            y_BSNV = checkpoint_name(y_BSNV, "attention")
            if ctx.cache:
                cache["state"] = state_BNHV
        with jax.named_scope("gate"):
            gate_BSE = self.gate(weights["gate"], carry, ctx)
            gate_BSE = ctx.constrain(gate_BSE, BATCH_AXES, "seq", "model")
        with jax.named_scope("norm"):
            y_BSE = self._complete(weights, y_BSNV, value_BSNV, gate_BSE, ctx)
        with jax.named_scope("output"):
            y_BSD = checkpoint_name(self.output(weights["output"], y_BSE, ctx), "output")
        return ctx.constrain_hidden(y_BSD), Out(layer_state=cache)

    def _compute_rates(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Return the rate b of the recurrence, and the log of its decay, [B, S, N] each, in float32 or wider."""
        raise NotImplementedError(f"{type(self).__name__}._compute_rates")

    def _get_rule_options(self) -> dict[str, Any]:
        """Return the arguments of `gated_delta_rule` that distinguish the layer."""
        raise NotImplementedError(f"{type(self).__name__}._get_rule_options")

    def _complete(
        self, weights: Nested, y_BSNV: jax.Array, value_BSNV: jax.Array, gate_BSE: jax.Array, ctx: Context
    ) -> jax.Array:
        """Return the input of the output projection, [B, S, E].

        Args:
            weights: the layer's weights.
            y_BSNV: outputs of the recurrence.
            value_BSNV: its values.
            gate_BSE: the projection `gate`.
            ctx: the layer's context.
        """
        raise NotImplementedError(f"{type(self).__name__}._complete")

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
        # Queries with keys, [C, H], and the outputs.
        inside = 2.0 * self.num_key_heads * H * C + 2.0 * N * C * V
        # Reading and changing the state.
        with_state = 4.0 * N * H * V
        return super().flops_per_token(seq_len) + convolution + inside + with_state


def _convolve_shard(
    shards: int, x_BSE: jax.Array, taps_WE: jax.Array, segments_BS: jax.Array | None, bias_E: jax.Array | None
) -> jax.Array:
    """Apply `convolve` to one device's positions, inside `shard_map`; those before them are on the previous devices."""
    num_earlier = taps_WE.shape[0] - 1
    earlier_BTE = receive_previous(x_BSE, num_earlier, shards)
    earlier_segments_BT = None if segments_BS is None else receive_previous(segments_BS, num_earlier, shards)
    return convolve(x_BSE, earlier_BTE, taps_WE, segments_BS, earlier_segments_BT, bias_E)


def convolve(
    x_BSE: jax.Array,
    earlier_BTE: jax.Array,
    taps_WE: jax.Array,
    segments_BS: jax.Array | None,
    earlier_segments_BT: jax.Array | None = None,
    bias_E: jax.Array | None = None,
) -> jax.Array:
    """Apply a causal convolution to each channel separately, then SiLU, in x's dtype.

    Args:
        x_BSE: inputs.
        earlier_BTE: the inputs of the W - 1 tokens before them.
        taps_WE: weights; the last tap is that of the token itself.
        segments_BS: the document of each token; a tap that reaches into another document sees 0. None: one document.
        earlier_segments_BT: the documents of the W - 1 tokens before them; None: that of the first token.
        bias_E: added before SiLU; None for no bias.
    """
    W = taps_WE.shape[0]
    S = x_BSE.shape[1]
    if segments_BS is not None and earlier_segments_BT is None:
        earlier_segments_BT = jnp.broadcast_to(segments_BS[:, :1], (segments_BS.shape[0], W - 1))

    def compute(
        x_BSE: jax.Array,
        earlier_BTE: jax.Array,
        taps_WE: jax.Array,
        segments_BS: jax.Array | None,
        earlier_segments_BT: jax.Array | None,
        bias_E: jax.Array | None,
    ) -> jax.Array:
        inputs = jnp.concatenate([earlier_BTE, x_BSE], axis=1)
        documents = None
        if segments_BS is not None and earlier_segments_BT is not None:
            documents = jnp.concatenate([earlier_segments_BT, segments_BS], axis=1)
        wide = jnp.promote_types(x_BSE.dtype, jnp.float32)
        total = jnp.zeros(x_BSE.shape, wide)
        for tap in range(W):
            seen_BSE = jax.lax.slice_in_dim(inputs, tap, tap + S, axis=1)
            if documents is not None and tap < W - 1:
                before_BS = jax.lax.slice_in_dim(documents, tap, tap + S, axis=1)
                seen_BSE = jnp.where((before_BS == segments_BS)[..., None], seen_BSE, 0)
            total = total + seen_BSE.astype(wide) * taps_WE[tap].astype(wide)
        if bias_E is not None:
            total = total + bias_E.astype(wide)
        return jax.nn.silu(total).astype(x_BSE.dtype)

    return save_inputs(compute)(x_BSE, earlier_BTE, taps_WE, segments_BS, earlier_segments_BT, bias_E)
