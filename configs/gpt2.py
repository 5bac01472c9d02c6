"""GPT-2 (Radford et al. 2019), with the shapes of the four published checkpoints.

Batches have half a million tokens, and learning rates are those of table 2.1 of the GPT-3 paper (arXiv 2005.14165)
for these sizes, as in nanoGPT. According to nanoGPT's log for 124M on OpenWebText, expect a validation loss of about
2.85 after 600,000 steps of 491,520 tokens, in four days on eight A100. We have not measured this.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.framework.config import Config
from plimsoll.framework.families.decoders import gpt2_model


def _gpt2(layers: int, heads: int, dim: int, peak: float) -> Config:
    model = gpt2_model(layers=layers, heads=heads, dim=dim, vocab_size=50257, positions=1024)
    return large(model, seq_len=1024, batch=480, peak=peak, steps=600_000)


def gpt2_124m() -> Config:
    """GPT-2 small: 12 layers, 12 heads, width 768; 124.4M parameters (huggingface.co/openai-community/gpt2)."""
    return _gpt2(12, 12, 768, 6e-4)


def gpt2_350m() -> Config:
    """GPT-2 medium: 24 layers, 16 heads, width 1024; 354.8M parameters (openai-community/gpt2-medium)."""
    return _gpt2(24, 16, 1024, 3e-4)


def gpt2_774m() -> Config:
    """GPT-2 large: 36 layers, 20 heads, width 1280; 774.0M parameters (openai-community/gpt2-large)."""
    return _gpt2(36, 20, 1280, 2.5e-4)


def gpt2_1_5b() -> Config:
    """GPT-2 XL: 48 layers, 25 heads, width 1600; 1.56B parameters (openai-community/gpt2-xl)."""
    return _gpt2(48, 25, 1600, 2e-4)


CONFIGS = {"gpt2-124m": gpt2_124m, "gpt2-350m": gpt2_350m, "gpt2-774m": gpt2_774m, "gpt2-1.5b": gpt2_1_5b}
