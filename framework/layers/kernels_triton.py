"""Attention on NVIDIA GPUs that cuDNN does not support: our flash attention in Pallas for Triton.

cuDNN's kernels are faster, but JAX's public interface to them cannot give their gradient the softmax's sums over all
keys, which a ring needs (see `ring_attention`), and has neither caps on logits nor sinks nor float32.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
from jax import Array

from plimsoll.framework.layers import ring_attention
from plimsoll.framework.layers.kernels_call import LENGTH_AXIS, AttentionCall, BlockMask, Ids, on_each_device

if TYPE_CHECKING:
    from plimsoll.framework.layers.flash_attention_gpu import Blocks, FlashOptions

KernelPass = Literal["forward", "backward_keys", "backward_queries"]
# How the names of the kernels start.
KERNEL_PREFIX = "flash_attention_"


def name_kernel(kernel_pass: KernelPass, mask: BlockMask) -> str:
    """Return the name of a kernel in programs and profiles, which also describes its mask."""
    suffix = ""
    if mask.window is not None:
        suffix = f"_window_{mask.window}"
    elif mask.offset is not None:
        suffix = "_causal"
    return f"{KERNEL_PREFIX}{kernel_pass}{suffix}"


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
    blocks: Blocks | None = None

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

        return FlashOptions(self.call.scale, self.call.softcap, mask, self.blocks, self.interpret)
