"""Toy versions of published mixtures of experts that a laptop's CPU trains in minutes: moe-tiny with their parts.

Each has the parts that its family adds to Mixtral, at the sizes of stdlib-tiny. Rates and batches are moe-tiny's.
"""

from __future__ import annotations

from plimsoll.configs.mixtures import moe_tiny
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.experts.experts import ClampedSwiGLU
from plimsoll.framework.layers.latent_attention import LatentAttention
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.layers.stack import Stack


def qwen3_moe_tiny() -> Config:
    """moe-tiny with the query and key norms of Qwen3-MoE (arXiv 2505.09388): 3.4M parameters."""
    config = moe_tiny()
    config.model.stack.pattern[0].attention.qk_norm = config_for(RMSNorm, eps=1e-6)
    return config


def olmoe_tiny() -> Config:
    """moe-tiny in the style of OLMoE (arXiv 2409.02060), 3.5M parameters: 16 narrow experts, 4 active per token.

    The weights of a token's experts do not sum to one, and queries and keys are normalized over all heads.
    """
    config = moe_tiny()
    block = config.model.stack.pattern[0]
    block.attention.qk_norm = config_for(RMSNorm, eps=1e-5)
    block.attention.qk_norm_over = "all"
    block.mlp = mixture(experts=16, top_k=4, hidden=88, normalize=False)
    return config


def gpt_oss_tiny() -> Config:
    """moe-tiny like gpt-oss (arXiv 2508.10925), 3.4M parameters: sinks, biases, clamped SwiGLU, alternating windows."""
    config = moe_tiny()
    local_block = config.model.stack.pattern[0]
    local_block.attention.sinks = True
    local_block.attention.linear.bias = True
    local_block.mlp.router.score = "softmax_chosen"
    local_block.mlp.router.normalize = False
    local_block.mlp.router.logit_bias = True
    local_block.mlp.experts.bias = True
    local_block.mlp.experts.gating = config_for(ClampedSwiGLU)
    full_block = local_block.copy()
    local_block.attention.window = 64
    config.model.stack.pattern = [local_block, full_block]
    return config


def deepseek_tiny() -> Config:
    """moe-tiny in the style of DeepSeek-V2 (arXiv 2405.04434), 3.2M parameters: latent attention, shared experts."""
    config = moe_tiny()
    sparse_block = config.model.stack.pattern[0]
    sparse_block.attention = config_for(
        LatentAttention, num_heads=2, kv_rank=32, plain_dim=32, rotary_dim=32, value_dim=64, rotary=config_for(Rotary)
    )
    sparse_block.mlp = mixture(experts=16, top_k=2, hidden=88, normalize=False)
    sparse_block.mlp.shared = config_for(MLP, hidden=176, activation="silu", gated=True)
    dense_block = sparse_block.copy()
    dense_block.mlp = config_for(MLP, hidden=344, activation="silu", gated=True)
    config.model.first = config_for(Stack, num_layers=1, pattern=[dense_block], unroll=0)
    config.model.stack.num_layers = 3
    return config


CONFIGS = {
    "qwen3-moe-tiny": qwen3_moe_tiny,
    "olmoe-tiny": olmoe_tiny,
    "gpt-oss-tiny": gpt_oss_tiny,
    "deepseek-tiny": deepseek_tiny,
}
