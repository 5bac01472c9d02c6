"""Attention on NVIDIA GPUs: cuDNN's flash attention through jax.nn.dot_product_attention, sharded over a mesh.

Follows Dao 2023 (arXiv 2307.08691).

cuDNN applies causal masks and windows itself, which costs no memory. Through JAX's public interface, cuDNN supports
neither segments nor a mask for queries sharded over seq, whose keys are gathered: `kernels_triton` has the ring. Both
are passed as a bias, [B, 1, S / seq, T] in the inputs' dtype, and its gradient takes the same amount again; compared to
XLA's logits, that saves a factor of N.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from plimsoll.framework.layers.kernels_call import LENGTH_AXIS, SAVED_NAME, AttentionCall, make_mask_BST, on_each_device

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def why_not(call: AttentionCall) -> str | None:
    """Return why cuDNN does not support this call and what would help, or None if it does."""
    # 256 channels are supported from Hopper on. JAX looks at the GPU of this process, not at the mesh, so a compile
    # for GPUs that are not present is limited to 128.
    device = jax.local_devices()[0] if jax.default_backend() == "gpu" else None
    capability = float(getattr(device, "compute_capability", 0.0))
    max_channels = 256 if capability >= 9.0 else 128
    no_cuda = why_no_cuda()
    sharding_problem = call.why_not_sharded()
    reasons = [
        (call.platform != "gpu", f"it runs on NVIDIA GPUs, not on {call.platform}; use xla"),
        (no_cuda, no_cuda),
        (
            call.dtype not in (jnp.bfloat16, jnp.float16),
            f"it takes bfloat16 or float16, not {call.dtype}; cast the inputs",
        ),
        (call.softcap is not None, "it has no cap on logits; use triton or softcap=None"),
        (call.has_sinks, "through JAX's public interface it has no sinks; use triton or sinks=False"),
        (
            call.head_dim % 8 or call.head_dim > max_channels,
            f"it takes a multiple of 8 up to {max_channels} channels per head, not {call.head_dim}; use triton",
        ),
        (
            call.value_dim > call.head_dim,
            f"it takes at most {call.head_dim} channels per head of values, as in keys, not {call.value_dim}; "
            "use triton",
        ),
        (
            _mask_is_bias(call) and call.length % 2,
            f"with segments it takes an even number of positions, not {call.length}; pad by one",
        ),
        (sharding_problem, f"{sharding_problem}; change the mesh"),
        (
            call.context_parallel == "ring" and call.shards(LENGTH_AXIS) > 1,
            "through JAX's public interface its gradients cannot be given the sums over all keys, which "
            "context_parallel='ring' needs; use triton",
        ),
    ]
    # The first reason is the one to fix first: no length helps on the wrong platform.
    return next((reason for holds, reason in reasons if holds), None)


def why_no_cuda() -> str | None:
    """Return why JAX cannot compile for NVIDIA GPUs and what would help, or None if it can."""
    # find_spec does not import the plugins: importing them would load CUDA.
    if any(map(importlib.util.find_spec, _PLUGINS)):
        return None
    return f"JAX is installed without CUDA (none of {', '.join(_PLUGINS)}); install jax[cuda13] or use xla"


def attend(
    call: AttentionCall,
    q_BSNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BS: Array | None,
    sinks_N: Array | None = None,
) -> Array:
    """Return softmax(scale * q k^T) v as [B, S, N, V]."""
    assert sinks_N is None, "`why_not` refuses sinks"
    shards = call.shards(LENGTH_AXIS)

    def local(q: Array, k: Array, v: Array, row_ids: Array | None, column_ids: Array | None, _: None) -> Array:
        mask = None
        window = None
        if _mask_is_bias(call):
            first_row = jax.lax.axis_index(LENGTH_AXIS) * q.shape[1] if shards > 1 else 0
            rows = first_row + jnp.arange(q.shape[1])
            columns = jnp.arange(k.shape[1])
            mask_BST = make_mask_BST(call.window, rows, columns, row_ids, column_ids)
            mask = mask_BST[:, None]
        elif call.window is not None:
            window = (call.window - 1, 0)
        # cuDNN numbers rows from the first one of its array, which is wrong on devices whose queries start later.
        is_causal = shards == 1
        return jax.nn.dot_product_attention(
            q, k, v, implementation="cudnn", mask=mask, scale=call.scale, local_window_size=window, is_causal=is_causal
        )

    # JAX partitions cuDNN's calls itself, but only if query, key and value have the same sharding.
    missing = call.head_dim - call.value_dim
    if missing:
        # JAX's interface expects the channels of keys. Zero channels give zero outputs.
        v_BSKH = jnp.pad(v_BSKH, [(0, 0), (0, 0), (0, 0), (0, missing)])
    out_BSNH = on_each_device(call, local, q_BSNH, k_BSKH, v_BSKH, segments_BS)
    if missing:
        out_BSNH = out_BSNH[..., : call.value_dim]
    return checkpoint_name(out_BSNH, SAVED_NAME)


def _mask_is_bias(call: AttentionCall) -> bool:
    """Return whether the mask is more than the causal mask or the window that cuDNN applies itself."""
    return call.has_segments or call.shards(LENGTH_AXIS) > 1
