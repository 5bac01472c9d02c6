"""A tiny model with latent attention: two dense layers, then MoE layers with expert groups."""

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.latent_attention import LatentAttention
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.stack import Stack
from tests.support import small


def attention(query_rank: int | None = 10) -> Config:
    """Return latent attention with 4 heads and distinct widths. Weights are large, so attention is far from uniform."""
    config = config_for(
        LatentAttention, num_heads=4, kv_rank=12, query_rank=query_rank, plain_dim=6, rotary_dim=4, value_dim=5
    )
    config.linear.init.stddev *= 10
    return config


def with_latents(model: Config, query_rank: int | None = 10) -> Config:
    """Change a model of `small`: latent attention in all layers, and two dense layers before the MoE layers."""
    block = small.block(model)
    block.attention = attention(query_rank)
    model.first = config_for(Stack, num_layers=2, pattern=[block.copy()])
    block.mlp = mixture(experts=8, top_k=2, hidden=24, balance=0.3)
    block.mlp.experts.init.stddev = 0.2
    block.mlp.router.init.stddev = 0.2
    block.mlp.router.groups = 4
    block.mlp.router.top_groups = 2
    block.mlp.shared = config_for(MLP, hidden=24, activation="silu", gated=True)
    return model
