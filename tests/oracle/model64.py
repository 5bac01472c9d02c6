"""The reference's language model, from the published formulas, in plain JAX: no layer of the framework is imported.

Parameters are a flat dictionary with the names of tests.oracle.parameters. All layers are unrolled: the only scan is
over the tokens of linear attention, and there are no row blocks or chunks.

Axis letters: B sequences, S positions (T of keys), N heads, H channels of a head, D width, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracle.delta64 import delta_net
from tests.oracle.experiments import Attention, Layer, LinearAttention, LoRA, Mixture, Model, Norm, StateSpace
from tests.oracle.mlp64 import mixture, mlp
from tests.oracle.ssm64 import state_space

Parameters = dict[str, jax.Array]


def prepare_batch(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that `loss` reads.

    These are tokens, targets, each target's share, positions, the attention mask, the weights of targets, and their sum
    (at least 1). A share is weight / sum of weights in float32; `framework.layers.base.Context` documents this dtype
    for both.
    """
    tokens, weights = batch["tokens"], batch["weights"]
    total = np.maximum(np.sum(weights, dtype=np.float32), np.float32(1.0))
    return {
        "tokens": tokens,
        "targets": batch["targets"],
        "share": (weights / total).astype(np.float64),
        "weights": weights.astype(np.float64),
        "total": total.astype(np.float64),
        "positions": batch.get("positions", np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)),
        "visible": np.broadcast_to(_visible(batch), (*tokens.shape, tokens.shape[1])),
    }


def loss(model: Model, params: Parameters, batch: dict[str, Any], microbatches: int = 1) -> jax.Array:
    """Return the sum over targets of share * (cross-entropy + z_loss * logsumexp^2), plus the losses of routers.

    `batch` is the result of `prepare_batch`. Routers are balanced in each of the `microbatches` separately.
    """
    penalties: list[jax.Array] = []
    logits_BSV = _logits(model, params, {**batch, "microbatches": microbatches}, penalties)
    log_sum_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    target_BS = jnp.take_along_axis(logits_BSV, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum(batch["share"] * (log_sum_BS - target_BS + model.z_loss * log_sum_BS**2)) + sum(penalties)


def _logits(model: Model, params: Parameters, batch: dict[str, Any], penalties: list[jax.Array]) -> jax.Array:
    """Return the logits [B, S, V], and append the losses of routers to `penalties`."""
    positions_BS = batch["positions"]
    x_BSD = params["embed/token"][batch["tokens"]] * (1.0 if model.embed_scale is None else model.embed_scale)
    if model.positions is not None:
        x_BSD = x_BSD + params["embed/position"][positions_BS]
    branches: list[Callable[[jax.Array], jax.Array]] = []  # those of all layers, in order
    for repeat in range(model.repeats):
        for index, layer in enumerate(model.layers):
            home = f"shared/block{index}" if index in model.shared else f"stack/{repeat}/block{index}"
            branches += _branches(model, layer, params, home, f"stack/block{index}", batch, penalties)
    x_BSD = _residual(branches, x_BSD) if model.streams == "one" else _two_streams(branches, x_BSD, model.streams)
    h_BSD = _norm(model.head_norm, params, "head/norm", x_BSD)
    logits_BSV = h_BSD @ params["embed/token" if model.tied else "head/table"].T
    return _cap(logits_BSV / (model.logit_divisor or 1.0), model.head_softcap)


def _residual(branches: list[Callable[[jax.Array], jax.Array]], x_BSD: jax.Array) -> jax.Array:
    for branch in branches:
        x_BSD = x_BSD + branch(x_BSD)
    return x_BSD


def _two_streams(branches: list[Callable[[jax.Array], jax.Array]], x_BSD: jax.Array, kind: str) -> jax.Array:
    """Apply x1 += F(x2), x2 += G(x1), and so on (arXiv 1707.04585), and return the mean of both streams."""
    round_off = _round if kind == "fixed" else lambda x: x
    first = second = round_off(x_BSD)
    for attention, feed_forward in zip(branches[::2], branches[1::2], strict=True):
        first = first + round_off(attention(second))
        second = second + round_off(feed_forward(first))
    return 0.5 * (first + second)


def _round(x: jax.Array) -> jax.Array:
    """Round x to multiples of 2^-12, with the gradient of the identity."""
    nearest = jax.lax.stop_gradient(jnp.round(x * 4096.0) / 4096.0)
    return nearest + (x - jax.lax.stop_gradient(x))


def _visible(batch: dict[str, Any]) -> np.ndarray:
    """Return the attention mask, bool [B, S, T] (or [1, S, T] without documents).

    A position attends to itself and to earlier positions of its document; padding only to itself.
    """
    length = batch["tokens"].shape[1]
    past_ST = np.tril(np.ones((length, length), bool))
    if "segments" not in batch:
        return past_ST[None]
    rows, columns = batch["segments"][:, :, None], batch["segments"][:, None, :]
    return (past_ST & (rows == columns) & (rows > 0)) | np.eye(length, dtype=bool)


def _branches(
    model: Model,
    layer: Layer,
    params: Parameters,
    home: str,
    target: str,
    batch: dict[str, Any],
    penalties: list[jax.Array],
) -> list[Callable[[jax.Array], jax.Array]]:
    """Return a layer's branches, attention and MLP: functions from the residual stream to what is added to it."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        return _linear(model.lora, params, f"{home}/{name}", f"{target}/{name}", x)

    def attention_linear(name: str, x: jax.Array) -> jax.Array:
        return linear(f"attention/{name}", x)

    def mlp_linear(name: str, x: jax.Array) -> jax.Array:
        return linear(f"mlp/{name}", x)

    def complete(name: str, y_BSD: jax.Array) -> jax.Array:
        if layer.post_norm is not None:
            y_BSD = _norm(layer.post_norm, params, f"{home}/{name}_post_norm", y_BSD)
        return y_BSD * (layer.branch_scale or 1.0)

    def attend(x_BSD: jax.Array) -> jax.Array:
        h_BSD = _norm(layer.norm, params, f"{home}/attention_norm", x_BSD)
        below = f"{home}/attention"
        if isinstance(layer.attention, LinearAttention):
            y_BSD = delta_net(layer.attention, params, below, attention_linear, h_BSD, batch["visible"])
        elif isinstance(layer.attention, StateSpace):
            y_BSD = state_space(layer.attention, params, below, attention_linear, h_BSD, batch["visible"])
        else:
            y_BSD = _attention(layer.attention, params, home, linear, h_BSD, batch["positions"], batch["visible"])
        return complete("attention", y_BSD)

    def feed_forward(x_BSD: jax.Array) -> jax.Array:
        h_BSD = _norm(layer.norm, params, f"{home}/mlp_norm", x_BSD)
        if isinstance(layer.mlp, Mixture):
            below = f"{home}/mlp", f"{target}/mlp"
            y_BSD, penalty = mixture(layer.mlp, model.lora, params, *below, mlp_linear, h_BSD, batch)
            penalties.append(penalty)
        else:
            y_BSD = mlp(layer.mlp, mlp_linear, h_BSD)
        return complete("mlp", y_BSD)

    return [attend, feed_forward]


def _linear(lora: LoRA | None, params: Parameters, home: str, target: str, x: jax.Array) -> jax.Array:
    """Return x W + b, plus (alpha / rank) x A B with an adapter (arXiv 2106.09685)."""
    bias = params.get(f"{home}/bias", 0.0)
    if lora is None or not re.search(lora.targets, target):
        return x @ params[f"{home}/weight"] + bias
    if lora.base == "int8":
        codes, scales = params[f"{home}/weight/codes"], params[f"{home}/weight/scales"]
        weight = (codes.astype(jnp.float32) / 127 * scales).astype(x.dtype)  # in float32, as documented
    else:
        weight = params[f"{home}/weight"]
    y = x @ weight + bias
    return y + (lora.alpha / lora.rank) * (x @ params[f"{home}/lora_a"]) @ params[f"{home}/lora_b"]


def _norm(norm: Norm, params: Parameters, home: str, x: jax.Array) -> jax.Array:
    """Apply RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last axis."""
    scale = params[f"{home}/scale"]
    if norm.kind == "rms":
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + norm.eps) * (scale + norm.zero_centered)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + norm.eps) * scale
    return x + params[f"{home}/bias"] if norm.bias else x


def _cap(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


def _attention(
    attention: Attention,
    params: Parameters,
    home: str,
    linear: Callable[[str, jax.Array], jax.Array],
    x_BSD: jax.Array,
    positions_BS: jax.Array,
    mask_BST: jax.Array,
) -> jax.Array:
    """Softmax attention; head n uses the keys of group n // (heads / kv_heads).

    An output gate multiplies the heads' results, channel by channel (arXiv 2505.06708).
    """
    batch, length, _ = x_BSD.shape
    channels = attention.head_dim
    queries, keys, values = (
        linear(f"attention/{name}", x_BSD).reshape(batch, length, -1, channels) for name in ("query", "key", "value")
    )
    if attention.qk_norm is not None:
        queries = _norm(attention.qk_norm, params, f"{home}/attention/query_norm", queries)
        keys = _norm(attention.qk_norm, params, f"{home}/attention/key_norm", keys)
    if attention.rope_theta is not None:
        angles = positions_BS[:, :, None] * _frequencies(attention)
        queries, keys = (_rotate(x, angles[:, :, None]) for x in (queries, keys))
    if attention.window is not None:
        distance_ST = np.arange(length)[:, None] - np.arange(length)[None, :]
        mask_BST = mask_BST & (distance_ST < attention.window)
    scale = 1.0 / math.sqrt(channels) if attention.scale is None else attention.scale
    group_N = np.arange(attention.heads) // (attention.heads // attention.kv_heads)
    logits_BNST = jnp.einsum("bsnh,btnh->bnst", queries, keys[:, :, group_N]) * scale
    logits_BNST = jnp.where(mask_BST[:, None], _cap(logits_BNST, attention.softcap), -jnp.inf)
    y_BSNH = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(logits_BNST, axis=-1), values[:, :, group_N])
    heads_BSE = y_BSNH.reshape(batch, length, -1)
    if attention.output_gate:
        heads_BSE = heads_BSE / (1.0 + jnp.exp(-linear("attention/gate", x_BSD)))
    return linear("attention/output", heads_BSE)


def _frequencies(attention: Attention) -> np.ndarray:
    """Return radians per position for each pair of channels (arXiv 2104.09864), with linear or Llama 3.1 scaling."""
    assert attention.rope_theta is not None
    rotated = attention.rotary_dim or attention.head_dim
    frequencies = 1.0 / attention.rope_theta ** (np.arange(0, rotated, 2) / rotated)
    if attention.rope_scaling is None:
        return frequencies
    kind, given = attention.rope_scaling
    if kind == "linear":
        return frequencies / given["factor"]
    scaled = []
    for frequency in frequencies:  # as in Meta's code
        wavelength, length = 2 * math.pi / frequency, given["original_length"]
        if wavelength < length / given["high_freq_factor"]:
            scaled.append(frequency)
        elif wavelength > length / given["low_freq_factor"]:
            scaled.append(frequency / given["factor"])
        else:
            smooth = (length / wavelength - given["low_freq_factor"]) / (
                given["high_freq_factor"] - given["low_freq_factor"]
            )
            scaled.append((1 - smooth) * frequency / given["factor"] + smooth * frequency)
    return np.array(scaled)


def _rotate(x_BSNH: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate channels i and i + R/2, as a complex number, by angle i of R/2; the first R channels rotate."""
    half = angles.shape[-1]
    turned = (x_BSNH[..., :half] + 1j * x_BSNH[..., half : 2 * half]) * jnp.exp(1j * angles)
    return jnp.concatenate([turned.real, turned.imag, x_BSNH[..., 2 * half :]], axis=-1)
