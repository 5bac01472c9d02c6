"""Attention on NVIDIA GPUs that cuDNN does not support: our flash attention in Pallas for Triton.

cuDNN's kernels are faster, but JAX's public interface to them cannot give their gradient the softmax's sums over all
keys, which a ring needs (see `ring_attention`), and has neither caps on logits nor sinks nor float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from plimsoll.framework.layers import kernels_cudnn, ring_attention
from plimsoll.framework.layers.kernels_call import (
    HEADS_AXIS,
    LENGTH_AXIS,
    AttentionCall,
    BlockMask,
    Ids,
    on_each_device,
)

if TYPE_CHECKING:
    from plimsoll.framework.layers.flash_attention_gpu import FlashBlocks, FlashOptions

# The shared memory that a program may use on Ada, and on GeForce and RTX cards in general.
_LEAST_SHARED_BYTES = 99 * 2**10
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MAX_CHANNELS = 256
# Tensor cores multiply bfloat16 since Ampere.
_LEAST_CAPABILITY = 8.0


def why_not(call: AttentionCall) -> str | None:
    """Return why the kernels do not support this call and what would help, or None if they do."""
    no_cuda = kernels_cudnn.why_no_cuda()
    sharding_problem = call.why_not_sharded()
    device = _find_device(call)
    capability = float(getattr(device, "compute_capability", _LEAST_CAPABILITY)) if call.platform == "gpu" else 0.0
    channels = max(call.head_dim, call.value_dim)
    is_gathered = call.shards(LENGTH_AXIS) > 1 and not ring_attention.uses_ring(call, multiple=1)
    reasons = [
        (call.platform != "gpu", f"it runs on NVIDIA GPUs, not on {call.platform}; use xla"),
        (no_cuda, no_cuda),
        (
            capability < _LEAST_CAPABILITY,
            f"it takes GPUs from Ampere on (compute capability {_LEAST_CAPABILITY}), not {capability}; use xla",
        ),
        (
            call.dtype not in _DTYPES,
            f"it takes bfloat16, float16 or float32, not {call.dtype}; cast the inputs or use xla",
        ),
        (channels > _MAX_CHANNELS, f"it takes up to {_MAX_CHANNELS} channels per head, not {channels}; use xla"),
        (sharding_problem, f"{sharding_problem}; change the mesh"),
        (is_gathered, "it does not gather keys over mesh.seq; use context_parallel='ring', or cudnn or xla"),
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

    With `interpret`, the kernels run as JAX operations on any platform, for tests.
    """
    kernel = TritonKernel(call, interpret)
    if call.shards(LENGTH_AXIS) > 1:
        return ring_attention.attend(call, kernel, q_BSNH, k_BSKH, v_BSKH, segments_BS, sinks_N)
    window = None if call.window is None or call.window >= call.length else call.window
    mask = BlockMask(offset=0, window=window)

    def local(
        q: Array, k: Array, v: Array, row_ids: Array | None, column_ids: Array | None, sinks: Array | None
    ) -> Array:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        ids = None if row_ids is None or column_ids is None else Ids(row_ids, column_ids)
        out: Array = ring_attention.attend_keys(kernel, mask, q, k, v, ids, sinks)
        return out.swapaxes(1, 2)

    return on_each_device(
        call, local, q_BSNH, k_BSKH, v_BSKH, segments_BS, extra=sinks_N, extra_spec=PartitionSpec(HEADS_AXIS)
    )


@dataclass(frozen=True)
class TritonKernel:
    """Attention to some of a row's keys; see `BlockKernel`.

    Args:
        call: the attention call, with global sizes.
        interpret: run the kernels as JAX operations, on any platform.
        blocks: block sizes of all kernels, or None to choose them by the number of channels.
    """

    call: AttentionCall
    interpret: bool = False
    blocks: FlashBlocks | None = None

    def block_size(self, length: int) -> int:
        """See `BlockKernel`. It takes any number of keys, but blocks of these need no mask."""
        return 64 if length % 64 == 0 else 1

    def forward(
        self, q_BNSH: Array, k_BKTH: Array, v_BKTV: Array, ids: Ids | None, mask: BlockMask
    ) -> tuple[Array, Array]:
        """See `BlockKernel`."""
        from plimsoll.framework.layers import flash_attention_gpu

        return flash_attention_gpu.attend(self._options(mask), q_BNSH, k_BKTH, v_BKTV, ids)

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
        from plimsoll.framework.layers import flash_attention_gpu

        arrays = (q_BNSH, k_BKTH, v_BKTV, ids, out_BNSV, log_sums_BNS, grad_BNSV)
        return flash_attention_gpu.differentiate(self._options(mask), *arrays)

    def _options(self, mask: BlockMask) -> FlashOptions:
        # Imported here, because importing Pallas takes a tenth of a second, which every command would otherwise pay.
        from plimsoll.framework.layers.flash_attention_gpu import FlashOptions

        call = self.call
        # The devices of a plan have this attribute too.
        shared_bytes = getattr(_find_device(call), "shared_memory_per_block_optin", _LEAST_SHARED_BYTES)
        return FlashOptions(call.scale, call.softcap, mask, shared_bytes, self.blocks, self.interpret)


def _find_device(call: AttentionCall) -> Any:
    """Return one of the devices that a call runs on."""
    return jax.local_devices()[0] if call.mesh is None else call.mesh.devices.flat[0]
