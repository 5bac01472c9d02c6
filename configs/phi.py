"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905), which use Llama's layers.

The shapes come from the published config.json files. Learning rates and batch sizes are ours, because the reports do
not state them. We have not run these sizes.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.framework.config import Config
from plimsoll.framework.families.decoders import llama_model


def phi3_mini() -> Config:
    """Phi-3-mini with 4k positions: 32 layers, 32 heads, width 3072, a window of 2047; 3.82B parameters.

    Published as microsoft/Phi-3-mini-4k-instruct.
    """
    model = llama_model(layers=32, heads=32, dim=3072, hidden=8192, vocab_size=32_064)
    model.stack.pattern[0].attention.window = 2047
    return large(model, seq_len=4096, batch=1024, peak=3e-4, steps=500_000)


def phi4() -> Config:
    """Phi-4: 40 layers, 40 heads, 10 KV heads, width 5120; 14.7B parameters (microsoft/phi-4)."""
    model = llama_model(layers=40, heads=40, kv_heads=10, dim=5120, hidden=17_920, vocab_size=100_352, theta=250_000.0)
    return large(model, seq_len=4096, batch=1024, peak=3e-4, steps=500_000)


CONFIGS = {"phi3-mini": phi3_mini, "phi4": phi4}
