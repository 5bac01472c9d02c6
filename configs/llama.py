"""Llama: the first models (arXiv 2302.13971), Llama 2 (arXiv 2307.09288), Llama 3 (arXiv 2407.21783).

The shapes come from the papers and the published config.json files; learning rates, warm-up and batches of four
million tokens come from the papers. Use these configs to pretrain from token files, and to plan. We have not run
these sizes.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.framework.config import Config
from plimsoll.framework.families.decoders import llama_model


def _llama(layers: int, heads: int, dim: int, hidden: int, peak: float) -> Config:
    model = llama_model(layers=layers, heads=heads, dim=dim, hidden=hidden, vocab_size=32000, eps=1e-6)
    return large(model, seq_len=2048, batch=2048, peak=peak, steps=350_000)


def llama_33b() -> Config:
    """LLaMA 33B (2023): 60 layers, 52 heads, width 6656; 32.5B parameters. 1.4T tokens, 4M tokens per step."""
    return _llama(60, 52, 6656, 17920, 1.5e-4)


def llama_65b() -> Config:
    """LLaMA 65B (2023): 80 layers, 64 heads, width 8192; 65.3B parameters. 1.4T tokens, 4M tokens per step."""
    return _llama(80, 64, 8192, 22016, 1.5e-4)


def _llama2(layers: int, heads: int, dim: int, hidden: int, peak: float, kv_heads: int | None = None) -> Config:
    model = llama_model(
        layers=layers, heads=heads, kv_heads=kv_heads, dim=dim, hidden=hidden, vocab_size=32000, eps=1e-5
    )
    return large(model, seq_len=4096, batch=1024, peak=peak, steps=500_000)


def llama2_7b() -> Config:
    """Llama 2 7B: 32 layers, 32 heads, width 4096; 6.74B parameters (meta-llama/Llama-2-7b). 2T tokens."""
    return _llama2(32, 32, 4096, 11008, 3e-4)


def llama2_13b() -> Config:
    """Llama 2 13B: 40 layers, 40 heads, width 5120; 13.0B parameters (meta-llama/Llama-2-13b). 2T tokens."""
    return _llama2(40, 40, 5120, 13824, 3e-4)


def llama2_70b() -> Config:
    """Llama 2 70B: 80 layers, 64 heads, 8 KV heads, width 8192; 69.0B parameters. 2T tokens."""
    return _llama2(80, 64, 8192, 28672, 1.5e-4, kv_heads=8)


def _llama3(layers: int, heads: int, dim: int, hidden: int, peak: float) -> Config:
    model = llama_model(
        layers=layers, heads=heads, kv_heads=8, dim=dim, hidden=hidden, vocab_size=128256, theta=500_000.0, eps=1e-5
    )
    return large(model, seq_len=8192, batch=512, peak=peak, steps=1_200_000, warmup=8000)


def llama3_8b() -> Config:
    """Llama 3 8B: 32 layers, 32 heads, 8 KV heads, width 4096; 8.03B parameters (Meta-Llama-3-8B)."""
    return _llama3(32, 32, 4096, 14336, 3e-4)


def llama3_70b() -> Config:
    """Llama 3 70B: 80 layers, 64 heads, 8 KV heads, width 8192; 70.6B parameters (Meta-Llama-3-70B)."""
    return _llama3(80, 64, 8192, 28672, 1.5e-4)


CONFIGS = {
    "llama-33b": llama_33b,
    "llama-65b": llama_65b,
    "llama2-7b": llama2_7b,
    "llama2-13b": llama2_13b,
    "llama2-70b": llama2_70b,
    "llama3-8b": llama3_8b,
    "llama3-70b": llama3_70b,
}
