"""Gemma 3, text alone (arXiv 2503.19786): five layers with a window for one that sees all tokens before.

The shape is of the published config.json. Learning rate and batch are ours (the report does not state them); no run of
this size was made here.
"""

from __future__ import annotations

from configs.parts import large, llama_model
from framework.config import Config, config_for
from framework.layers.norm import RMSNorm
from framework.layers.rotary import LinearScaling, Rotary

_WINDOW = 1024


def gemma_layers(model: Config, *, window: int, local_layers: int, scaling: Config | None) -> None:
    """Makes Gemma 3 of a Llama: norms of branches, queries and keys, and windows with rotary positions of their own.

    Args:
        model: a Llama with one kind of layers, changed in place.
        window: tokens that a local layer sees.
        local_layers: how many of these go before each global layer.
        scaling: of the rotary positions of global layers.
    """
    global_block = model.stack.pattern[0]
    norm = global_block.norm
    # Gemma stores the scales of its norms as differences from 1.
    norm.zero_centered = True
    model.head.norm.zero_centered = True
    global_block.post_norm = norm.copy()
    global_block.attention.qk_norm = config_for(RMSNorm, eps=norm.eps, zero_centered=True)
    global_block.mlp.activation = "gelu_tanh"
    local_block = global_block.copy()
    global_block.attention.rotary = config_for(Rotary, theta=1_000_000.0, scaling=scaling)
    local_block.attention.window = window
    local_block.attention.rotary = config_for(Rotary, theta=10_000.0)
    model.stack.pattern = [*(local_block.copy() for _ in range(local_layers)), global_block]
    # A table of tokens that is read and written: embeddings are made as large as the layers expect.
    model.embed.scale = model.dim**0.5


def gemma3_12b() -> Config:
    """Gemma 3 12B, its language model: 48 layers, 16 heads of 256, width 3840, tied; 11.8B parameters.

    Published as google/gemma-3-12b-pt. Of the sizes this one has layers in whole groups of six.
    """
    model = llama_model(
        layers=48,
        heads=16,
        kv_heads=8,
        dim=3840,
        hidden=15360,
        vocab_size=262_208,
        eps=1e-6,
        tied=True,
    )
    model.stack.pattern[0].attention.head_dim = 256
    gemma_layers(model, window=_WINDOW, local_layers=5, scaling=config_for(LinearScaling, factor=8.0))
    return large(model, seq_len=4096, batch=1024, peak=2e-4, steps=500_000)


CONFIGS = {
    "gemma3-12b": gemma3_12b,
}
