"""Attention on TPU: the splash kernel (block-sparse flash attention) that comes with JAX, placed on a mesh.

Follows Dao 2023 (arXiv 2307.08691); the kernel is jax.experimental.pallas.ops.tpu.splash_attention. May import: JAX,
kernels_call.

Batch is spread over data and fsdp, heads over model, queries over seq; keys and values of all positions are gathered
over seq. Blocks that the causal mask or the window empties are neither loaded nor computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from framework.layers.kernels_call import HEADS_AXIS, LENGTH_AXIS, SAVED_NAME, AttentionCall, separate_padding

_LANES = 128  # of a TPU vector register; blocks of queries and keys are multiples of it


def why_not(call: AttentionCall) -> str | None:
    """Why splash cannot serve this call and what would help, or None if it can."""
    if call.platform != "tpu":
        return f"it runs on TPU, not on {call.platform}; use xla"
    if jnp.dtype(call.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"it takes bfloat16 or float32, not {jnp.dtype(call.dtype).name}; cast the inputs"
    misplaced = call.why_not_placed()
    if misplaced is not None:
        return f"{misplaced}; change the mesh"
    parts = call.shards(LENGTH_AXIS)
    if call.length % (_LANES * parts) or call.length % parts**2:
        return (
            f"it takes a multiple of {_LANES} positions on each device, not {call.length} / {parts}; "
            f"a length of {-(-call.length // (_LANES * parts)) * _LANES * parts} would do"
        )
    if call.key_length % _LANES:
        return f"it takes a multiple of {_LANES} keys, not {call.key_length}; pad to it"
    if call.head_dim % 8:
        return f"it takes a multiple of 8 channels a head, not {call.head_dim}; use xla"
    return None


def attend(
    call: AttentionCall,
    query_BSNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    segments_BS: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """softmax(scale * q k^T) v as [B, S, N, H].

    Args:
        interpret: run the kernel's body operation by operation, on any platform: for tests.
    """
    # Pallas takes a tenth of a second to import, which every command line would pay.
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    # Rounded once: in bf16 a scale that is no power of two would otherwise be rounded before the product as well.
    query_BSNH = (query_BSNH.astype(jnp.float32) * call.scale).astype(query_BSNH.dtype)
    ids_BS = None if segments_BS is None else separate_padding(segments_BS)
    kernel = _kernel(call, interpret)

    def local(kernel: Any, query: jax.Array, key: jax.Array, value: jax.Array, *ids: jax.Array) -> jax.Array:
        segment_ids = SegmentIds(*ids) if ids else None
        heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
        # Grouped queries: the kernel itself reads key/value head n // G, nothing is repeated in memory.
        out_BNSH = jax.vmap(kernel, in_axes=(0, 0, 0, 0 if ids else None))(*heads_first, segment_ids)
        return out_BNSH.swapaxes(1, 2)

    ids = () if ids_BS is None else (ids_BS, ids_BS)
    if not call.is_distributed:
        return local(kernel, query_BSNH, key_BTKH, value_BTKH, *ids)
    mesh, query_spec, key_spec = call.mesh, call.query_spec(), call.key_spec()
    assert mesh is not None
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, query_spec[1])))
    ids_specs = (PartitionSpec(*query_spec[:2]), PartitionSpec(*key_spec[:2])) if ids else ()
    placed = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(kernel_spec, query_spec, key_spec, key_spec, *ids_specs),
        out_specs=query_spec,
        check_vma=False,  # the kernel does not say over which mesh axes its outputs vary
    )
    return placed(kernel, query_BSNH, key_BTKH, value_BTKH, *ids)


def _kernel(call: AttentionCall, interpret: bool) -> Any:
    """The kernel for the heads of one device and, if queries are spread over seq, all their positions."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    parts = call.shards(LENGTH_AXIS)
    shape = (call.length, call.key_length)
    if call.window is not None:
        mask = splash.LocalMask(shape, window_size=(call.window - 1, 0), offset=0, shard_count=parts)
    elif call.causal:
        mask = splash.CausalMask(shape, shard_count=parts)
    else:
        mask = splash.FullMask(shape)
    block_q, block_kv = _block(call.length // parts), _block(call.key_length)
    # Separate kernels for dq and for dk, dv: the fused one keeps a copy of dq per block of keys (256 MiB more at
    # S = 8192, N = 8, H = 128, on v5e).
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * (call.heads // call.shards(HEADS_AXIS))),
        block_sizes=sizes,
        head_shards=1,  # all heads share the mask, so each device has the whole of it
        q_seq_shards=parts,
        attn_logits_soft_cap=call.softcap,
        residual_checkpoint_name=SAVED_NAME,
        interpret=interpret,
    )


def _block(length: int) -> int:
    """The largest multiple of 128 up to 512 that divides the length: 512 is what fits VMEM with 256 channels, too."""
    return next(size for size in (512, 384, 256, 128) if length % size == 0)
