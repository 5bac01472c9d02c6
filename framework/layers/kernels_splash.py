"""Attention on TPU: the splash kernel (block-sparse flash attention) that comes with JAX, placed on a mesh.

Follows Dao 2023 (arXiv 2307.08691); the kernel is jax.experimental.pallas.ops.tpu.splash_attention.

Batch is spread over data and fsdp, heads over model, queries over seq; keys and values of all positions are gathered
over seq. Blocks that the causal mask or the window empties are neither loaded nor computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from framework.layers.kernels_call import (
    HEADS_AXIS,
    LENGTH_AXIS,
    SAVED_NAME,
    SPLASH_LANES,
    AttentionCall,
    on_each_device,
)


def why_not(call: AttentionCall) -> str | None:
    """Why splash cannot serve this call and what would help, or None if it can."""
    misplaced, parts, length = call.why_not_placed(), call.shards(LENGTH_AXIS), call.length
    multiple = SPLASH_LANES * parts
    reasons = [
        (call.platform != "tpu", f"it runs on TPU, not on {call.platform}; use xla"),
        (
            call.dtype not in (jnp.bfloat16, jnp.float32),
            f"it takes bfloat16 or float32, not {call.dtype}; cast the inputs",
        ),
        (misplaced, f"{misplaced}; change the mesh"),
        (
            length % multiple or length % parts**2,
            f"it takes a multiple of {SPLASH_LANES} positions on each device, not {length} / {parts}; "
            f"a length of {-(-length // multiple) * multiple} would do",
        ),
        (call.head_dim % 8, f"it takes a multiple of 8 channels a head, not {call.head_dim}; use xla"),
    ]
    return next((reason for holds, reason in reasons if holds), None)


def attend(
    call: AttentionCall, q_BSNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BS: Array | None, interpret: bool = False
) -> Array:
    """softmax(scale * q k^T) v as [B, S, N, H]. `interpret` runs the kernel's body on any platform: for tests."""
    # Pallas takes a tenth of a second to import, which every command line would pay.
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    # Rounded once: in bf16 a scale that is no power of two would otherwise be rounded before the product as well.
    q_BSNH = (q_BSNH.astype(jnp.float32) * call.scale).astype(q_BSNH.dtype)

    def local(q: Array, k: Array, v: Array, row_ids: Array | None, column_ids: Array | None, kernel: Any) -> Array:
        heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
        # Grouped queries: the kernel itself reads key/value head n // G, nothing is repeated in memory.
        segment_ids = None if row_ids is None or column_ids is None else SegmentIds(row_ids, column_ids)
        return jax.vmap(kernel)(*heads_first, segment_ids).swapaxes(1, 2)

    kernel = _kernel(call, interpret)
    kernel_spec = None
    if call.mesh is not None:
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(call.mesh, PartitionSpec(None, LENGTH_AXIS)))
    return on_each_device(call, local, q_BSNH, k_BSKH, v_BSKH, segments_BS, kernel, kernel_spec)


def _kernel(call: AttentionCall, interpret: bool) -> Any:
    """The kernel for the heads of one device and, if queries are spread over seq, all their positions."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    parts = call.shards(LENGTH_AXIS)
    shape = (call.length, call.length)
    mask = splash.CausalMask(shape, shard_count=parts)
    if call.window is not None:
        mask = splash.LocalMask(shape, window_size=(call.window - 1, 0), offset=0, shard_count=parts)
    block_q = _block(call.length // parts, call.splash.block_q)
    block_kv = _block(call.length, call.splash.block_kv)
    # The kernel for the queries' gradient alone has no blocks where one kernel computes all gradients.
    backward = ("_dkv",) if call.splash.fused_backward else ("_dkv", "_dq")
    sizes: dict[str, Any] = {f"block_q{kernel}": block_q for kernel in ("", *backward)}
    sizes |= {f"block_kv{kernel}": block_kv for kernel in ("", "_compute", "_dkv_compute", *backward)}
    sizes["use_fused_bwd_kernel"] = call.splash.fused_backward
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * (call.heads // call.shards(HEADS_AXIS))),
        block_sizes=splash.BlockSizes(**sizes),
        head_shards=1,  # all heads share the mask, so each device has the whole of it
        q_seq_shards=parts,
        attn_logits_soft_cap=call.softcap,
        residual_checkpoint_name=SAVED_NAME,
        interpret=interpret,
    )


def _block(length: int, bound: int) -> int:
    """The largest multiple of 128 up to the bound that divides the length, which is one itself."""
    return next(size for size in range(bound, 0, -SPLASH_LANES) if length % size == 0)
