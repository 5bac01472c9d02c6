"""Hybrids of Mamba-2 (arXiv 2405.21060) and attention: a toy, and a published shape.

The shape comes from the table of published models. Learning rates and batch sizes are ours, because no report states
them. We have not run this size.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.configs.tiny import stdlib_tiny
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.granite_hybrid import GraniteHybrid
from plimsoll.framework.families.published import find_published_model
from plimsoll.framework.layers.mamba2 import Mamba2


def mamba2_tiny() -> Config:
    """stdlib-tiny in the style of Granite 4.0-H, 2.0M parameters: three layers of Mamba-2, one of attention.

    Attention has no rotary positions.
    """
    config = stdlib_tiny()
    attention_block = config.model.stack.pattern[0]
    state_space_block = attention_block.copy()
    state_space_block.attention = config_for(Mamba2, num_heads=4, head_dim=64, state_dim=64)
    attention_block.attention.rotary = None
    config.model.stack.pattern = [*(state_space_block.copy() for _ in range(3)), attention_block]
    return config


def granite_4_0_h_350m() -> Config:
    """Granite 4.0-H 350M, 340M parameters: 32 layers, 28 of Mamba-2 and 4 of attention, width 768."""
    model = GraniteHybrid().model(find_published_model("ibm-granite/granite-4.0-h-350m").config)
    return large(model, seq_len=4096, batch=512, peak=6e-4, steps=500_000)


CONFIGS = {"mamba2-tiny": mamba2_tiny, "granite-4.0-h-350m": granite_4_0_h_350m}
