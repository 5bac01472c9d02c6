"""Causal softmax(QK)V in one function: plain XLA everywhere, splash on TPU, cuDNN and Triton on GPU. No parameters."""

from __future__ import annotations

from typing import Literal

import jax
from jax.sharding import Mesh

from plimsoll.framework.config.names import did_you_mean
from plimsoll.framework.layers import kernels_cudnn, kernels_splash, kernels_triton, kernels_xla, ring_attention
from plimsoll.framework.layers.kernels_call import AttentionCall, ContextParallel, SplashBlocks, describe_call

Implementation = Literal["auto", "xla", "splash", "cudnn", "triton"]
# Each of these modules has `why_not(call)` and `attend(call, q, k, v, segments, sinks)`.
_KERNELS = {"xla": kernels_xla, "splash": kernels_splash, "cudnn": kernels_cudnn, "triton": kernels_triton}
_ONLY_PLATFORM = {"splash": "tpu", "cudnn": "gpu", "triton": "gpu"}


def dot_product_attention(
    query_BSNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    *,
    segments_BS: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
    splash: SplashBlocks = SplashBlocks(),
    sinks_N: jax.Array | None = None,
    context_parallel: ContextParallel = "auto",
) -> jax.Array:
    """Compute attention of N query heads to K key/value heads; query head n uses key/value head n // (N / K).

    Args:
        query_BSNH: [B, S, N, H], floating point.
        key_BSKH: [B, S, K, H], in the query's dtype. Position i attends to j <= i.
        value_BSKH: [B, S, K, V], in the query's dtype; V equals H except in latent attention.
        segments_BS: int32 [B, S]: positions attend only within their own segment. 0 is padding: it attends only to
            itself, and nothing attends to it.
        window: position i attends to j in (i - window, i]; None means no limit.
        softcap: cap the logits before masking: softcap * tanh(logits / softcap); None means no cap.
        scale: factor on the logits, applied before the cap; None means H ** -0.5.
        implementation: "xla", "splash", "cudnn", "triton", or "auto": splash on TPU and, on GPU, triton for a ring and
            for windows over seq; else cudnn if it supports the call; else triton; and xla for all other calls.
        mesh: the mesh that the arrays are sharded over, with the axes data, fsdp, expert, seq and model: batch over
            data, fsdp and expert, positions over seq, heads over model. "auto" uses the mesh's platform. None means
            JAX's default device.
        splash: block sizes of the splash kernel.
        sinks_N: [N], floating point: one logit per query head that joins the denominator of its softmax and has no
            value; it is neither scaled nor capped. None for no sinks.
        context_parallel: how devices along seq see each other's keys: "ring" sends them around, "gather" gathers them,
            and "auto" is a ring for windows and for rows of at least 2048 positions per device; see `ring_attention`.
            cudnn gathers them.

    Returns:
        [B, S, N, V] in the query's dtype, named "attention" for the remat policies. Logits and softmax are computed
        in f32 (f64 for f64 inputs).

    Raises:
        ValueError: the arrays' shapes or dtypes do not match, or the requested implementation does not support the
            call.
    """
    call = describe_call(
        query_BSNH, key_BSKH, value_BSKH, segments_BS, window, softcap, mesh, scale, splash, sinks_N, context_parallel
    )
    kernel = _KERNELS[choose_implementation(call, implementation)]
    # Every kernel names its result "attention", so the same remat policy works on all platforms.
    return kernel.attend(call, query_BSNH, key_BSKH, value_BSKH, segments_BS, sinks_N)


def check_platform(implementation: str, platform: str) -> None:
    """Raise ValueError if the implementation is a kernel for another platform than this one (tpu, gpu or cpu)."""
    only_platform = _ONLY_PLATFORM.get(implementation, platform)
    if only_platform != platform:
        raise ValueError(
            f"attention.implementation = {implementation!r} is for {only_platform}, not {platform}; try auto"
        )


def choose_implementation(call: AttentionCall, implementation: str = "auto") -> str:
    """Choose the kernel, such as "xla". Raise ValueError like `dot_product_attention`."""
    if implementation == "auto":
        # XLA supports every call, so "auto" always finds one.
        return next(name for name in _list_fastest(call) if _KERNELS[name].why_not(call) is None)
    if implementation not in _KERNELS:
        hint = did_you_mean(implementation, ["auto", *_KERNELS])
        raise ValueError(f"implementation = {implementation!r}: no such kernel{hint}")
    if reason := _KERNELS[implementation].why_not(call):
        raise ValueError(f"implementation={implementation!r} does not support this call: {reason}")
    return implementation


def _list_fastest(call: AttentionCall) -> tuple[str, ...]:
    """Return the kernels for a platform, fastest first."""
    if call.platform == "tpu":
        return "splash", "xla"
    if call.platform == "gpu":
        # cuDNN's kernel is faster, but it would gather the keys, and its mask takes memory per query and key.
        return ("triton", "cudnn", "xla") if ring_attention.uses_ring(call, multiple=1) else ("cudnn", "triton", "xla")
    return ("xla",)
