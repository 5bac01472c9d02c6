"""Names of our flash attention kernels for GPUs, and their work; does not import Pallas."""

from __future__ import annotations

from typing import Literal

from plimsoll.framework.layers.kernels_call import BlockMask

KernelPass = Literal["forward", "backward_keys", "backward_queries"]
# How the names of the kernels start.
KERNEL_PREFIX = "flash_attention_"
# (Products over the channels of keys, over those of values) of each pair of a query and a key: the logits, weighted
# values, and in the backward pass the logits again, the gradients of weights, and those of the kernel's results.
NUM_PRODUCTS: dict[KernelPass, tuple[int, int]] = {
    "forward": (1, 1),
    "backward_queries": (2, 1),
    "backward_keys": (2, 2),
}


def name_kernel(kernel_pass: KernelPass, mask: BlockMask) -> str:
    """Return the name of a kernel in programs and profiles, which also describes its mask."""
    suffix = ""
    if mask.window is not None:
        suffix = f"_window_{mask.window}"
    elif mask.offset is not None:
        suffix = "_causal"
    return f"{KERNEL_PREFIX}{kernel_pass}{suffix}"
