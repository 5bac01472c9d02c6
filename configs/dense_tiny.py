"""Toy versions of dense published models that a laptop's CPU trains in minutes: stdlib-tiny with their parts.

Each has the parts that its family adds to Llama, at the sizes of stdlib-tiny. Rates and batches are stdlib-tiny's.
"""

from __future__ import annotations

from plimsoll.configs.gemma import gemma_layers
from plimsoll.configs.olmo import norm_all_heads
from plimsoll.configs.tiny import stdlib_tiny
from plimsoll.framework.config import Config


def _tie(config: Config) -> None:
    """Tie the embedding table to the head, with the small initial values and small learning rate that tying needs."""
    config.model.head.tied = True
    config.model.embed.init.stddev = 0.05
    # The first rule is for an untied embedding, whose rows are rarely updated.
    config.learner.rules = config.learner.rules[1:]


def gemma3_tiny() -> Config:
    """stdlib-tiny in the style of Gemma 3 (arXiv 2503.19786), 1.3M parameters: local layers, post-norms, tied."""
    config = stdlib_tiny()
    _tie(config)
    # Gemma's files state both.
    attention = config.model.stack.pattern[0].attention
    attention.num_kv_heads = 2
    attention.head_dim = 64
    gemma_layers(config.model, window=64, local_layers=1, scaling=None)
    return config


def phi4_mini_tiny() -> Config:
    """stdlib-tiny in the style of Phi-4-mini, 1.3M parameters: three quarters of each head rotate, tied embeddings."""
    config = stdlib_tiny()
    _tie(config)
    config.model.stack.pattern[0].attention.rotary.rotary_dim = 48
    return config


def olmo2_tiny() -> Config:
    """stdlib-tiny in the style of OLMo 2 (arXiv 2501.00656), 1.8M parameters: post-norms, norms over all heads."""
    config = stdlib_tiny()
    norm_all_heads(config.model, eps=1e-5)
    block = config.model.stack.pattern[0]
    block.post_norm = block.norm
    block.norm = None
    return config


CONFIGS = {"gemma3-tiny": gemma3_tiny, "phi4-mini-tiny": phi4_mini_tiny, "olmo2-tiny": olmo2_tiny}
