"""Gemma 3, text only (arXiv 2503.19786): five layers with a window for each layer that sees all earlier tokens.

The shape comes from the published config.json. Learning rate and batch size are ours, because the report does not
state them. We have not run this size.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layers.rotary import LinearScaling, Rotary

_WINDOW = 1024


def gemma_layers(model: Config, *, window: int, local_layers: int, scaling: Config | None) -> None:
    """Turn a Llama into Gemma 3: branch, query and key norms, and windowed layers with their own rotary positions.

    Args:
        model: a Llama whose layers are all alike; changed in place.
        window: number of tokens that a local layer sees.
        local_layers: number of local layers before each global layer.
        scaling: scaling of the rotary positions in global layers.
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
    # The embedding table is tied to the head, so embeddings are scaled up to the size that the layers expect.
    model.embed.scale = model.dim**0.5


def gemma3_12b() -> Config:
    """Gemma 3 12B, its language model: 48 layers, 16 heads of 256, width 3840, tied; 11.8B parameters.

    Published as google/gemma-3-12b-pt. Among the published sizes, this one has layers in complete groups of six.
    """
    model = llama_model(
        layers=48, heads=16, kv_heads=8, dim=3840, hidden=15360, vocab_size=262_208, eps=1e-6, tied=True
    )
    model.stack.pattern[0].attention.head_dim = 256
    gemma_layers(model, window=_WINDOW, local_layers=5, scaling=config_for(LinearScaling, factor=8.0))
    return large(model, seq_len=4096, batch=1024, peak=2e-4, steps=500_000)


CONFIGS = {"gemma3-12b": gemma3_12b}
