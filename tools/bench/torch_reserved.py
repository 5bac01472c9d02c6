"""Counts the bytes that PyTorch allocates and reserves in a QLoRA step: its own program on a model of its allocator.

    python -m tools.bench.torch_reserved --seq_len=1024,8192     # in an environment with '.[peers]'; a minute for each

`transformers` and `peft` run a Llama 2 7B with rank-8 adapters of all linear layers on fake tensors, which have shapes
and no data. Each storage goes through a model of the CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp): blocks
of 512 bytes, a pool of segments of 2 MiB for requests up to 1 MiB, segments of 20 MiB for those under 10 MiB, otherwise
of the size rounded up to 2 MiB; the best fit is split, and free neighbors are merged. Reserved bytes are those of all
segments. The weights are added as bitsandbytes stores them, in 4 bits with quantized scales; their dequantized copies,
which exist for one product at a time, are not counted.
"""

from __future__ import annotations

import argparse
import weakref
from dataclasses import dataclass, field
from typing import Any

_MIB = 1 << 20
# Bits of a weight in NF4, and of its share of the scales, with double quantization (arXiv 2305.14314, section 3).
_BITS = 4 + 0.127


@dataclass(eq=False)
class Block:
    """A part of a segment.

    Attributes:
        size: its bytes.
        number: order of allocation, which decides between equal fits.
        pool: "small" or "large".
        is_free: nothing is stored in it.
        previous, following: neighbors in the segment.
    """

    size: int
    number: int
    pool: str
    is_free: bool = True
    previous: Block | None = None
    following: Block | None = None


@dataclass
class CachingAllocator:
    """Allocates blocks of segments that are never returned.

    Attributes:
        reserved: bytes of all segments.
        allocated: bytes of the blocks in use.
        peak: the largest `allocated` so far.
        free: free blocks by pool.
    """

    reserved: int = 0
    allocated: int = 0
    peak: int = 0
    free: dict[str, list[Block]] = field(default_factory=lambda: {"small": [], "large": []})
    _number: int = 0

    def allocate(self, size: int) -> Block:
        """Return a block with room for `size` bytes."""
        size = max(512, _round_up(size, 512))
        pool = "small" if size <= _MIB else "large"
        fits = [block for block in self.free[pool] if block.size >= size]
        if fits:
            block = min(fits, key=lambda block: (block.size, block.number))
            self.free[pool].remove(block)
        else:
            segment = 2 * _MIB if pool == "small" else 20 * _MIB if size < 10 * _MIB else _round_up(size, 2 * _MIB)
            self._number += 1
            block = Block(segment, self._number, pool)
            self.reserved += segment
        rest = block.size - size
        if rest >= 512 if pool == "small" else rest > _MIB:
            self._number += 1
            other = Block(rest, self._number, pool, previous=block, following=block.following)
            if other.following is not None:
                other.following.previous = other
            block.following, block.size = other, size
            self.free[pool].append(other)
        block.is_free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with free neighbors."""
        self.allocated -= block.size
        block.is_free = True
        previous, following = block.previous, block.following
        if following is not None and following.is_free:
            self.free[block.pool].remove(following)
            _merge(block, following)
        if previous is not None and previous.is_free:
            self.free[block.pool].remove(previous)
            _merge(previous, block)
            block = previous
        self.free[block.pool].append(block)


def _merge(block: Block, following: Block) -> None:
    """Add the block after a block to it."""
    block.size += following.size
    block.following = following.following
    if block.following is not None:
        block.following.previous = block


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def simulate_step(seq_len: int, microbatches: int) -> tuple[float, float]:
    """Return (allocated, reserved) bytes of a step of Llama 2 7B with one row per microbatch."""
    # Imported here: they are not in the environment of the other tools.
    import peft
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    allocator = CachingAllocator()
    blocks: dict[int, Block | None] = {}

    def free(key: int) -> None:
        block = blocks.pop(key, None)
        if block is not None:
            allocator.release(block)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage._cdata not in blocks:
                    blocks[storage._cdata] = allocator.allocate(storage.nbytes())
                    weakref.finalize(storage, free, storage._cdata)
            return result

    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        intermediate_size=11008,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=seq_len,
        attn_implementation="sdpa",
        use_cache=False,
    )
    move = torch.nn.Module.to
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        model: Any = transformers.LlamaForCausalLM(config)
        # Adapters are in float32, as both LLaMA-Factory and PEFT have them.
        torch.set_default_dtype(torch.float32)
        model.enable_input_require_grads()
        linear = sum(layer.weight.numel() for name, layer in model.named_modules() if "proj" in name)
        others = sum(weight.numel() for weight in model.parameters()) - linear
        # Fake weights cannot be moved, and need not be.
        torch.nn.Module.to = lambda self, *args, **kwargs: self
        try:
            lora = peft.LoraConfig(r=8, target_modules="all-linear")
            model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
        finally:
            torch.nn.Module.to = move
        for module in list(model.modules()):
            for name, weight in list(module._parameters.items()):
                if weight is not None and weight.requires_grad:
                    module._parameters[name] = torch.nn.Parameter(torch.empty(weight.shape, dtype=torch.float32))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.train()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        ids = torch.zeros((1, seq_len), dtype=torch.long)
        for tensor in (*model.parameters(), *model.buffers()):
            blocks[tensor.untyped_storage()._cdata] = None
        with Recorder():
            for _ in range(microbatches):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            optimizer.step()
        weights = linear * _BITS / 8 + 2 * others + 4 * sum(weight.numel() for weight in trained)
    return weights + allocator.peak, weights + allocator.reserved


def main() -> None:
    """Print both numbers for each row length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq_len", default="1024,8192,32768", help="tokens of a row, separated by commas")
    parser.add_argument("--microbatches", type=int, default=3, help="microbatches of the step")
    args = parser.parse_args()
    print("tokens   allocated, GB   reserved, GB")
    for text in args.seq_len.split(","):
        allocated, reserved = simulate_step(int(text), args.microbatches)
        print(f"{int(text):6,}   {allocated / 1e9:13.2f}   {reserved / 1e9:12.2f}", flush=True)


if __name__ == "__main__":
    main()
