"""Attention on TPU: JAX's splash kernel (block-sparse flash attention), sharded over a mesh.

Follows Dao 2023 (arXiv 2307.08691); the kernel is jax.experimental.pallas.ops.tpu.splash_attention.

Batch is sharded over data and fsdp, heads over model, queries over seq; keys and values travel around the devices of
seq (see `ring_attention`), or are gathered over it. Blocks that the causal mask or the window leaves empty are neither
loaded nor computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.layers import ring_attention
from plimsoll.framework.layers.kernels_call import (
    HEADS_AXIS,
    LENGTH_AXIS,
    SAVED_NAME,
    SPLASH_LANES,
    AttentionCall,
    BlockMask,
    Ids,
    on_each_device,
)


def why_not(call: AttentionCall) -> str | None:
    """Return why splash does not support this call and what would help, or None if it does."""
    length = call.length
    shards = call.shards(LENGTH_AXIS)
    sharding_problem = call.why_not_sharded()
    multiple = SPLASH_LANES * shards
    padded_length = -(-length // multiple) * multiple
    padded_for_ring = -(-length // (2 * multiple)) * 2 * multiple
    reasons = [
        (call.platform != "tpu", f"it runs on TPU, not on {call.platform}; use xla"),
        (
            call.dtype not in (jnp.bfloat16, jnp.float32),
            f"it takes bfloat16 or float32, not {call.dtype}; cast the inputs",
        ),
        (sharding_problem, f"{sharding_problem}; change the mesh"),
        (
            length % multiple or length % shards**2,
            f"it takes a multiple of {SPLASH_LANES} positions on each device, not {length} / {shards}; "
            f"pad to {padded_length}",
        ),
        (
            shards > 1 and call.context_parallel == "ring" and call.window is None and length % (2 * multiple),
            f"a ring takes a multiple of {2 * multiple} positions, not {length}; pad to {padded_for_ring}",
        ),
        (call.head_dim % 8, f"it takes a multiple of 8 channels per head, not {call.head_dim}; use xla"),
        (call.value_dim % 8, f"it takes a multiple of 8 channels per head of values, not {call.value_dim}; use xla"),
    ]
    return next((reason for holds, reason in reasons if holds), None)


def attend(
    call: AttentionCall,
    q_BSNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BS: Array | None,
    sinks_N: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Return softmax(scale * q k^T) v as [B, S, N, V].

    With `interpret`, the kernel's body runs on any platform, for tests.
    """
    # Imported here, because importing Pallas takes a tenth of a second, which every command would otherwise pay.
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    # The result is rounded once: in bf16, a scale that is not a power of two would otherwise be rounded before the
    # product as well.
    scaled_BSNH = q_BSNH.astype(jnp.float32) * call.scale
    q_BSNH = scaled_BSNH.astype(q_BSNH.dtype)
    if ring_attention.uses_ring(call, SPLASH_LANES):
        kernel = SplashKernel(call, interpret)
        return ring_attention.attend(call, kernel, q_BSNH, k_BSKH, v_BSKH, segments_BS, sinks_N)

    def local(
        q: Array,
        k: Array,
        v: Array,
        row_ids: Array | None,
        column_ids: Array | None,
        kernel_and_sinks: tuple[Any, Array | None],
    ) -> Array:
        kernel, sinks = kernel_and_sinks
        heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
        # The kernel reads key/value head n // G itself, so nothing is repeated in memory.
        segment_ids = None
        if row_ids is not None and column_ids is not None:
            segment_ids = SegmentIds(row_ids, column_ids)
        # The kernel handles one sequence. All sequences share the sinks; each head has its own.
        attend_sequences: Any = jax.vmap(
            lambda q, k, v, ids, sinks: kernel(q, k, v, ids, sinks=sinks), in_axes=(0, 0, 0, 0, None)
        )
        out_BNSH = attend_sequences(*heads_first, segment_ids, sinks)
        return out_BNSH.swapaxes(1, 2)

    kernel = _kernel(call, interpret)
    kernel_spec = None
    if call.mesh is not None:
        # The kernel holds tables of its blocks: arrays that are sharded over seq like the queries.
        sharding = NamedSharding(call.mesh, PartitionSpec(None, LENGTH_AXIS))
        kernel_spec = kernel.manual_sharding_spec(sharding)
    return on_each_device(
        call, local, q_BSNH, k_BSKH, v_BSKH, segments_BS, (kernel, sinks_N), (kernel_spec, PartitionSpec(HEADS_AXIS))
    )


def _kernel(call: AttentionCall, interpret: bool) -> Any:
    """Return the kernel for the heads of one device and, if queries are sharded over seq, for all their positions."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shards = call.shards(LENGTH_AXIS)
    shape = (call.length, call.length)
    mask = splash.CausalMask(shape, shard_count=shards)
    if call.window is not None:
        window = (call.window - 1, 0)
        mask = splash.LocalMask(shape, window_size=window, offset=0, shard_count=shards)
    num_heads = call.heads // call.shards(HEADS_AXIS)
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * num_heads),
        block_sizes=_choose_block_sizes(call, call.length // shards, call.length),
        # All heads share the mask, so each device has all of it.
        head_shards=1,
        q_seq_shards=shards,
        attn_logits_soft_cap=call.softcap,
        residual_checkpoint_name=SAVED_NAME,
        interpret=interpret,
    )


def _choose_block_sizes(call: AttentionCall, num_queries: int, num_keys: int) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block_q = _block(num_queries, call.splash.block_q)
    block_kv = _block(num_keys, call.splash.block_kv)
    # If one kernel computes all gradients, there are no separate blocks for the queries' gradient.
    backward = ("_dkv",) if call.splash.fused_backward else ("_dkv", "_dq")
    sizes: dict[str, Any] = {}
    for suffix in ("", *backward):
        sizes[f"block_q{suffix}"] = block_q
    for suffix in ("", "_compute", "_dkv_compute", *backward):
        sizes[f"block_kv{suffix}"] = block_kv
    return splash.BlockSizes(**sizes, use_fused_bwd_kernel=call.splash.fused_backward)


def _block(length: int, bound: int) -> int:
    """Return the largest multiple of 128 up to the bound that divides the length, itself a multiple of 128."""
    return next(size for size in range(bound, 0, -SPLASH_LANES) if length % size == 0)


@dataclass(frozen=True)
class SplashKernel:
    """Attention to some of a row's keys; see `BlockKernel`. Queries are already scaled.

    Args:
        call: the attention call, with global sizes.
        interpret: run the kernel's body on any platform, for tests.
    """

    call: AttentionCall
    interpret: bool = False

    def block_size(self, length: int) -> int:
        """See `BlockKernel`."""
        return _block(length, self.call.splash.block_kv)

    def forward(
        self, q_BNSH: Array, k_BKTH: Array, v_BKTV: Array, ids: Ids | None, mask: BlockMask
    ) -> tuple[Array, Array]:
        """See `BlockKernel`."""
        kernel = self._make(q_BNSH, k_BKTH, mask)
        attend_sequences: Any = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids))
        out_BNSV, (log_sums_BNS,) = attend_sequences(q_BNSH, k_BKTH, v_BKTV, _segment_ids(ids))
        return out_BNSV, log_sums_BNS

    def backward(
        self,
        q_BNSH: Array,
        k_BKTH: Array,
        v_BKTV: Array,
        ids: Ids | None,
        mask: BlockMask,
        out_BNSV: Array,
        log_sums_BNS: Array,
        grad_BNSV: Array,
    ) -> tuple[Array, Array, Array]:
        """See `BlockKernel`."""
        # The kernel's public gradient assumes that its keys are all keys. This function takes the sums over all keys.
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import _splash_attention_bwd

        kernel = self._make(q_BNSH, k_BKTH, mask)

        def differentiate(q: Array, k: Array, v: Array, ids: Any, out: Array, log_sums: Array, grad: Array) -> Any:
            residuals = (q, k, v, ids, None, out, log_sums, kernel.dq_mask_info, kernel.dkv_mask_info)
            return _splash_attention_bwd(**kernel.kwargs, res=residuals, do=grad)[3:6]

        return jax.vmap(differentiate)(q_BNSH, k_BKTH, v_BKTV, _segment_ids(ids), out_BNSV, log_sums_BNS, grad_BNSV)

    def _make(self, q_BNSH: Array, k_BKTH: Array, mask: BlockMask) -> Any:
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        shape = (q_BNSH.shape[2], k_BKTH.shape[2])
        block_mask: Any = splash.FullMask(shape)
        if mask.window is not None:
            block_mask = splash.LocalMask(shape, window_size=(mask.window - 1, 0), offset=mask.offset or 0)
        elif mask.offset is not None:
            block_mask = splash.CausalMask(shape, offset=mask.offset)
        return splash.make_splash_mha_single_device(
            splash.MultiHeadMask([block_mask] * q_BNSH.shape[1]),
            block_sizes=_choose_block_sizes(self.call, *shape),
            save_residuals=True,
            attn_logits_soft_cap=self.call.softcap,
            interpret=self.interpret,
        )


def _segment_ids(ids: Ids | None) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    return None if ids is None else SegmentIds(ids.queries, ids.keys)
