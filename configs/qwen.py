"""Qwen2.5 (arXiv 2412.15115): Llama-like, with biases in the query, key and value projections.

The shapes come from the published config.json files. Learning rate and batch size are ours, because the report does
not state them. We have not run these sizes.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.framework.config import Config
from plimsoll.framework.families.decoders import llama_model


def _qwen(
    layers: int, heads: int, kv_heads: int, dim: int, hidden: int, vocab_size: int, peak: float, tied: bool = False
) -> Config:
    model = llama_model(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        hidden=hidden,
        vocab_size=vocab_size,
        theta=1_000_000.0,
        eps=1e-6,
        qkv_bias=True,
        tied=tied,
    )
    return large(model, seq_len=4096, batch=1024, peak=peak, steps=500_000)


def qwen2_5_0_5b() -> Config:
    """Qwen2.5 0.5B: 24 layers, 14 heads, 2 KV heads, width 896, tied; 494M parameters (Qwen/Qwen2.5-0.5B)."""
    return _qwen(24, 14, 2, 896, 4864, 151936, 6e-4, tied=True)


def qwen2_5_7b() -> Config:
    """Qwen2.5 7B: 28 layers, 28 heads, 4 KV heads, width 3584; 7.62B parameters (Qwen/Qwen2.5-7B)."""
    return _qwen(28, 28, 4, 3584, 18944, 152064, 3e-4)


def qwen2_5_32b() -> Config:
    """Qwen2.5 32B: 64 layers, 40 heads, 8 KV heads, width 5120; 32.8B parameters (Qwen/Qwen2.5-32B)."""
    return _qwen(64, 40, 8, 5120, 27648, 152064, 1.5e-4)


CONFIGS = {"qwen2.5-0.5b": qwen2_5_0_5b, "qwen2.5-7b": qwen2_5_7b, "qwen2.5-32b": qwen2_5_32b}
