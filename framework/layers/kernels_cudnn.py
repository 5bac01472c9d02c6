"""Attention on NVIDIA GPUs: cuDNN's flash attention through jax.nn.dot_product_attention, placed on a mesh.

Follows Dao 2023 (arXiv 2307.08691). May import: JAX, kernels_call.

Causal masks and windows are cuDNN's own and cost no memory. Through JAX's public interface cuDNN knows no segments, and
no mask for queries spread over seq: both go in as a bias, [B, 1, S / seq, T] in the inputs' dtype, and as much again
for its gradient; against XLA's logits, that saves a factor of N.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from framework.layers.kernels_call import LENGTH_AXIS, SAVED_NAME, AttentionCall, allowed_BST, separate_padding

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def why_not(call: AttentionCall) -> str | None:
    """Why cuDNN cannot serve this call and what would help, or None if it can."""
    if call.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {call.platform}; use xla"
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return f"JAX is installed without CUDA (none of {', '.join(_PLUGINS)}); install jax[cuda13] or use xla"
    if jnp.dtype(call.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"it takes bfloat16 or float16, not {jnp.dtype(call.dtype).name}; cast the inputs"
    if call.softcap is not None:
        return "it has no cap on logits; use xla or softcap=None"
    largest = _largest_head_dim()
    if call.head_dim % 8 or call.head_dim > largest:
        return f"it takes a multiple of 8 up to {largest} channels a head, not {call.head_dim}; use xla"
    if _mask_is_bias(call) and (call.length % 2 or call.key_length % 2):
        return f"with segments it takes an even number of positions, not {call.length}; pad by one"
    misplaced = call.why_not_placed()
    return None if misplaced is None else f"{misplaced}; change the mesh"


def attend(
    call: AttentionCall,
    query_BSNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    segments_BS: jax.Array | None,
) -> jax.Array:
    """softmax(scale * q k^T) v as [B, S, N, H]."""
    parts = call.shards(LENGTH_AXIS)
    ids = () if segments_BS is None else (separate_padding(segments_BS),) * 2

    def local(query: jax.Array, key: jax.Array, value: jax.Array, *ids: jax.Array) -> jax.Array:
        mask = None
        if _mask_is_bias(call):
            first = jax.lax.axis_index(LENGTH_AXIS) * query.shape[1] if parts > 1 else 0
            rows, columns = first + jnp.arange(query.shape[1]), jnp.arange(key.shape[1])
            mask_BST = allowed_BST(call, rows, columns, *(ids or (None, None)))
            assert mask_BST is not None
            mask = mask_BST[:, None]
        # cuDNN counts rows and columns from the corner of what it is given: right unless rows start later.
        own_mask = call.looks_back_only and parts == 1
        windowed = own_mask and call.window is not None and mask is None
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=call.scale,
            is_causal=own_mask,
            local_window_size=(call.window - 1, 0) if windowed and call.window is not None else None,
            implementation="cudnn",
        )

    if not call.is_distributed:
        out_BSNH = local(query_BSNH, key_BTKH, value_BTKH, *ids)
    else:
        # JAX partitions cuDNN's calls itself, but only when it finds query, key and value spread alike.
        mesh, query_spec, key_spec = call.mesh, call.query_spec(), call.key_spec()
        assert mesh is not None
        ids_specs = (PartitionSpec(*query_spec[:2]), PartitionSpec(*key_spec[:2])) if ids else ()
        out_BSNH = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(query_spec, key_spec, key_spec, *ids_specs),
            out_specs=query_spec,
            check_vma=False,  # cuDNN's primitive does not say over which mesh axes its outputs vary
        )(query_BSNH, key_BTKH, value_BTKH, *ids)
    return checkpoint_name(out_BSNH, SAVED_NAME)


def _mask_is_bias(call: AttentionCall) -> bool:
    """Whether the mask is more than the causal one or the window that cuDNN applies by itself."""
    return call.has_segments or (call.looks_back_only and call.shards(LENGTH_AXIS) > 1)


def _largest_head_dim() -> int:
    """256 channels from Hopper (compute capability 9.0) on, else 128.

    JAX looks at the GPU of this process, not at the mesh: a compile for GPUs that are not here is held to 128.
    """
    if jax.default_backend() != "gpu":
        return 128
    return 256 if float(getattr(jax.local_devices()[0], "compute_capability", 0.0)) >= 9.0 else 128
