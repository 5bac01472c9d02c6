"""softmax(QK)V behind one function: plain XLA everywhere, splash on TPU, cuDNN on GPU. Pure, without parameters.

May import: JAX, kernels_call, kernels_xla, kernels_splash, kernels_cudnn (one file per implementation).

The rule of "auto": splash on TPU, cuDNN on GPU, each if it can serve the call; else xla. `chosen_implementation` says
which one that is before anything is computed, `why_not` says what kept a faster one away.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from framework.layers import kernels_cudnn, kernels_splash, kernels_xla
from framework.layers.kernels_call import AttentionCall, describe_call

Implementation = Literal["auto", "xla", "splash", "cudnn"]
_NAMES = ("auto", "xla", "splash", "cudnn")


def dot_product_attention(
    query_BSNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    *,
    segments_BS: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    causal: bool = True,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Attention of N query heads to K key/value heads; query head n uses key/value head n // (N / K).

    Args:
        query_BSNH: [B, S, N, H], floating.
        key_BTKH: [B, T, K, H], of the query's dtype; S = T unless causal is False, without window and segments.
        value_BTKH: as key.
        segments_BS: int32 [B, S]: positions attend only within their own segment. 0 is padding: it attends to itself
            alone, and nothing attends to it.
        window: position i attends to j in (i - window, i]; None means no limit.
        softcap: logits become softcap * tanh(logits / softcap), before masking; None means they stay.
        scale: of the logits, before the cap; None means H ** -0.5.
        causal: position i attends to j <= i only.
        implementation: "xla", "splash", "cudnn", or "auto" (see above).
        mesh: the devices that the arrays are spread over: batch over data and fsdp, positions over seq, heads over
            model. Its first device's platform is what "auto" goes by. None means one device.
        platform: "cpu", "tpu" or "gpu" in place of a mesh; None means JAX's default backend.

    Returns:
        [B, S, N, H] in the query's dtype, named "attention" for remat policies. Logits and softmax are f32 inside
        (f64 for f64 inputs).

    Raises:
        ValueError: arguments do not belong together, or the implementation asked for by name cannot serve them.
    """
    call = describe_call(
        query_BSNH,
        key_BTKH,
        value_BTKH,
        segments_BS=segments_BS,
        window=window,
        softcap=softcap,
        scale=scale,
        causal=causal,
        mesh=mesh,
        platform=platform,
    )
    kernels = {"xla": kernels_xla.attend, "splash": kernels_splash.attend, "cudnn": kernels_cudnn.attend}
    return kernels[_choose(call, implementation)](call, query_BSNH, key_BTKH, value_BTKH, segments_BS)


def chosen_implementation(
    query_BSNH: Any,
    key_BTKH: Any,
    *,
    segments_BS: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
    platform: str | None = None,
) -> str:
    """Which of "xla", "splash", "cudnn" `dot_product_attention` would run; arrays or ShapeDtypeStructs, else the same.

    Raises:
        ValueError: as `dot_product_attention`.
    """
    call = _describe(query_BSNH, key_BTKH, segments_BS, window, softcap, causal, mesh, platform)
    return _choose(call, implementation)


def why_not(
    implementation: Literal["xla", "splash", "cudnn"],
    query_BSNH: Any,
    key_BTKH: Any,
    *,
    segments_BS: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    mesh: Mesh | None = None,
    platform: str | None = None,
) -> str | None:
    """Why that implementation cannot serve such a call and what would help, in a line; None if it can."""
    return _why_not(
        implementation, _describe(query_BSNH, key_BTKH, segments_BS, window, softcap, causal, mesh, platform)
    )


def _describe(
    query: Any,
    key: Any,
    segments: Any,
    window: int | None,
    softcap: float | None,
    causal: bool,
    mesh: Mesh | None,
    platform: str | None,
) -> AttentionCall:
    return describe_call(
        query,
        key,
        key,
        segments_BS=segments,
        window=window,
        softcap=softcap,
        scale=None,
        causal=causal,
        mesh=mesh,
        platform=platform,
    )


def _choose(call: AttentionCall, implementation: str) -> str:
    if implementation == "auto":
        fastest = {"tpu": "splash", "gpu": "cudnn"}.get(call.platform, "xla")
        return fastest if _why_not(fastest, call) is None else "xla"
    reason = _why_not(implementation, call)
    if reason is not None:
        raise ValueError(f"implementation={implementation!r} cannot serve this call: {reason}")
    return implementation


def _why_not(implementation: str, call: AttentionCall) -> str | None:
    if implementation == "splash":
        return kernels_splash.why_not(call)
    if implementation == "cudnn":
        return kernels_cudnn.why_not(call)
    if implementation == "xla":
        return None
    nearest = difflib.get_close_matches(implementation, _NAMES, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"implementation: expected one of {', '.join(_NAMES)}; given {implementation!r}{hint}")
