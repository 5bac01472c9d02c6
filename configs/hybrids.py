"""Hybrids of linear and full attention (Gated DeltaNet, arXiv 2412.06464): a toy, and the shapes of published ones.

The shapes come from the table of published models. Learning rates and batch sizes are ours, because no report states
them. We have not run these sizes.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.configs.tiny import stdlib_tiny
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.published import find_published_model
from plimsoll.framework.families.qwen3_next import Qwen3Next, Qwen35
from plimsoll.framework.layers.gated_delta_net import GatedDeltaNet
from plimsoll.framework.layers.norm import RMSNorm


def qwen3_5_tiny() -> Config:
    """stdlib-tiny in the style of Qwen3.5, 1.9M parameters: three layers of Gated DeltaNet, one of gated attention."""
    config = stdlib_tiny()
    attention_block = config.model.stack.pattern[0]
    norm = config_for(RMSNorm, eps=1e-6, zero_centered=True)
    attention_block.norm = norm
    config.model.head.norm = norm.copy()
    linear_block = attention_block.copy()
    linear_block.attention = config_for(GatedDeltaNet, num_heads=2, key_dim=64, value_dim=64)
    attention_block.attention.qk_norm = norm.copy()
    attention_block.attention.output_gate = True
    attention_block.attention.rotary.rotary_dim = 16
    config.model.stack.pattern = [*(linear_block.copy() for _ in range(3)), attention_block]
    return config


def qwen3_6_27b() -> Config:
    """Qwen3.6 27B, its language model: 64 layers, 48 of Gated DeltaNet, width 5120; 26.9B parameters."""
    model = Qwen35().model(find_published_model("Qwen/Qwen3.6-27B").config)
    return large(model, seq_len=4096, batch=1024, peak=1.5e-4, steps=500_000)


def qwen3_6_35b_a3b() -> Config:
    """Qwen3.6 35B-A3B, its language model: 40 layers, 256 experts, 8 of them and a shared one active; 34.7B parameters.

    Thirty of the layers have Gated DeltaNet; width 2048.
    """
    model = Qwen35().model(find_published_model("Qwen/Qwen3.6-35B-A3B").config)
    return large(model, seq_len=4096, batch=1024, peak=2e-4, steps=500_000)


def qwen3_next_80b_a3b() -> Config:
    """Qwen3-Next 80B-A3B: 48 layers, 36 of Gated DeltaNet, 512 experts, 10 of them and a shared one active per token.

    Width 2048; 79.7B parameters. Published as Qwen/Qwen3-Next-80B-A3B-Instruct.
    """
    model = Qwen3Next().model(find_published_model("Qwen/Qwen3-Next-80B-A3B-Instruct").config)
    return large(model, seq_len=4096, batch=1024, peak=2e-4, steps=500_000)


CONFIGS = {
    "qwen3.5-tiny": qwen3_5_tiny,
    "qwen3.6-27b": qwen3_6_27b,
    "qwen3.6-35b-a3b": qwen3_6_35b_a3b,
    "qwen3-next-80b-a3b": qwen3_next_80b_a3b,
}
