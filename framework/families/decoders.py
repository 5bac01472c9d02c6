"""Configs of decoder models: the shapes of GPT-2, Llama, DeepSeek and gpt-oss models, and mixtures of experts.

Each width is set once; layers inherit it from their parents.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layers.attention import Attention
from plimsoll.framework.layers.block import Block
from plimsoll.framework.layers.embedding import Embedding
from plimsoll.framework.layers.experts.experts import ClampedSwiGLU, Experts
from plimsoll.framework.layers.experts.moe import MoE
from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.latent_attention import LatentAttention
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import LayerNorm, RMSNorm
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.models.causal_lm import CausalLM


def gpt2_model(*, layers: int, heads: int, dim: int, vocab_size: int, positions: int, dropout: float = 0.0) -> Config:
    """Build GPT-2 (Radford et al. 2019): LayerNorm, learned positions, biases, tanh GELU, tied embeddings.

    Args:
        layers: number of layers.
        heads: number of heads.
        dim: width of the residual stream.
        vocab_size: number of token ids.
        positions: number of learned positions, the longest sequence.
        dropout: dropout rate on the embeddings and on each branch's output.
    """
    linear = config_for(Linear, bias=True)
    block = config_for(
        Block,
        norm=config_for(LayerNorm),
        attention=config_for(Attention, num_heads=heads, linear=linear),
        mlp=config_for(MLP, hidden=4 * dim, activation="gelu_tanh", linear=linear),
        dropout=dropout,
    )
    return config_for(
        CausalLM,
        dim=dim,
        vocab_size=vocab_size,
        embed=config_for(Embedding, max_positions=positions, dropout=dropout),
        stack=config_for(Stack, num_layers=layers, pattern=[block]),
        head=config_for(LMHead, norm=config_for(LayerNorm), tied=True),
    )


def llama_model(
    *,
    layers: int,
    heads: int,
    dim: int,
    hidden: int,
    vocab_size: int,
    kv_heads: int | None = None,
    theta: float = 10_000.0,
    eps: float = 1e-5,
    qkv_bias: bool = False,
    tied: bool = False,
    rope_scaling: Config | None = None,
) -> Config:
    """Build Llama (arXiv 2302.13971): RMSNorm, rotary positions, SwiGLU, no biases (Qwen2 has them in q, k, v).

    Args:
        layers: number of layers.
        heads: number of query heads.
        dim: width of the residual stream.
        hidden: inner width of the MLP.
        vocab_size: number of token ids.
        kv_heads: number of key/value heads; None for as many as query heads.
        theta: base of the rotary frequencies.
        eps: added to the mean square in the norms.
        qkv_bias: whether the projections to queries, keys and values have biases.
        tied: whether the head uses the embedding's table.
        rope_scaling: config of the rotary scaling; None for no scaling.
    """
    norm = config_for(RMSNorm, eps=eps)
    attention = config_for(
        Attention,
        num_heads=heads,
        num_kv_heads=kv_heads,
        linear=config_for(Linear, bias=qkv_bias),
        output_bias=False,
        rotary=config_for(Rotary, theta=theta, scaling=rope_scaling),
    )
    mlp = config_for(MLP, hidden=hidden, activation="silu", gated=True)
    block = config_for(Block, norm=norm, attention=attention, mlp=mlp)
    return config_for(
        CausalLM,
        dim=dim,
        vocab_size=vocab_size,
        stack=config_for(Stack, num_layers=layers, pattern=[block]),
        head=config_for(LMHead, norm=norm, tied=tied),
    )


def deepseek_model(
    *,
    layers: int,
    num_first: int,
    heads: int,
    dim: int,
    hidden: int,
    vocab_size: int,
    kv_rank: int,
    query_rank: int | None,
    experts: int,
    top_k: int,
    expert_hidden: int,
    shared_hidden: int,
    plain_dim: int = 128,
    rotary_dim: int = 64,
    value_dim: int = 128,
    theta: float = 10_000.0,
    rope_scaling: Config | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    activation: str = "silu",
    balance: float = 0.001,
) -> Config:
    """Build DeepSeek-V2 (arXiv 2405.04434): latent attention, and shared experts in addition to routed ones.

    The first `num_first` layers are dense, with an MLP of width `hidden`.

    Args:
        layers: number of layers, including the dense ones.
        num_first: number of dense layers.
        heads: number of heads.
        dim: width of the residual stream.
        hidden: inner width of a dense layer's MLP.
        vocab_size: number of token ids.
        kv_rank, query_rank, plain_dim, rotary_dim, value_dim: see `LatentAttention`.
        experts: number of routed experts.
        top_k: number of routed experts per token.
        expert_hidden: inner width of a routed expert.
        shared_hidden: inner width of the shared experts together.
        theta: base of the rotary frequencies.
        rope_scaling: config of the rotary scaling; None for no scaling.
        eps: added to the mean square in the norms.
        tied: whether the head uses the embedding's table.
        activation: activation of the MLPs and experts.
        balance: coefficient of the load-balancing loss.
    """
    norm = config_for(RMSNorm, eps=eps)
    attention = config_for(
        LatentAttention,
        num_heads=heads,
        kv_rank=kv_rank,
        query_rank=query_rank,
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=value_dim,
        rotary=config_for(Rotary, theta=theta, scaling=rope_scaling),
    )
    mlp = config_for(MLP, hidden=hidden, activation=activation, gated=True)
    dense = config_for(Block, norm=norm, attention=attention, mlp=mlp)
    sparse = dense.copy()
    sparse.mlp = mixture(
        experts=experts, top_k=top_k, hidden=expert_hidden, activation=activation, normalize=False, balance=balance
    )
    sparse.mlp.shared = config_for(MLP, hidden=shared_hidden, activation=activation, gated=True)
    model = config_for(
        CausalLM,
        dim=dim,
        vocab_size=vocab_size,
        stack=config_for(Stack, num_layers=layers, pattern=[sparse]),
        head=config_for(LMHead, norm=norm, tied=tied),
    )
    return with_dense_first(model, dense, num_first)


def with_dense_first(model: Config, dense: Config, num_first: int) -> Config:
    """Replace the first `num_first` layers of a model, whose layers are alike, by `dense`, and return the model."""
    num_layers = model.stack.num_layers
    if num_first >= num_layers:
        model.stack.pattern = [dense.copy()]
    elif num_first > 0:
        model.first = config_for(Stack, num_layers=num_first, pattern=[dense.copy()])
        model.stack.num_layers = num_layers - num_first
    return model


def mixture(
    *, experts: int, top_k: int, hidden: int, activation: str = "silu", normalize: bool = True, balance: float = 0.01
) -> Config:
    """Build a mixture of gated experts (Mixtral, arXiv 2401.04088), to replace a block's MLP.

    Args:
        experts: number of experts.
        top_k: number of experts per token.
        hidden: inner width of an expert.
        activation: activation of the gate.
        normalize: whether the shares of a token's experts sum to 1.
        balance: coefficient of the load-balancing loss.
    """
    return config_for(
        MoE,
        num_experts=experts,
        router=config_for(Router, top_k=top_k, normalize=normalize, balance=balance),
        experts=config_for(Experts, hidden=hidden, activation=activation),
    )


def gpt_oss_model(
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    vocab_size: int,
    theta: float,
    rope_scaling: Config | None,
    eps: float = 1e-5,
    bias: bool = True,
    alpha: float = 1.702,
    limit: float = 7.0,
    tied: bool = False,
) -> Config:
    """Build gpt-oss (arXiv 2508.10925) without its windows: sinks, biases, experts with clamped SwiGLU and biases.

    Args:
        layers: number of layers.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        head_dim: channels per head.
        dim: width of the residual stream.
        hidden: inner width of an expert.
        experts: number of experts.
        top_k: number of experts per token.
        vocab_size: number of token ids.
        theta: base of the rotary frequencies.
        rope_scaling: config of the rotary scaling; None for no scaling.
        eps: added to the mean square in the norms.
        bias: whether the projections of attention have biases.
        alpha, limit: see `ClampedSwiGLU`.
        tied: whether the head uses the embedding's table.
    """
    model = llama_model(
        layers=layers,
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        dim=dim,
        hidden=hidden,
        vocab_size=vocab_size,
        theta=theta,
        eps=eps,
        qkv_bias=bias,
        tied=tied,
        rope_scaling=rope_scaling,
    )
    block = model.stack.pattern[0]
    block.attention.output_bias = bias
    block.attention.sinks = True
    # Set only if it differs from the default, which is the width divided by the number of heads.
    if head_dim * heads != dim:
        block.attention.head_dim = head_dim
    block.mlp = mixture(experts=experts, top_k=top_k, hidden=hidden, normalize=False, balance=0.0)
    block.mlp.router.score = "softmax_chosen"
    block.mlp.router.logit_bias = True
    block.mlp.experts.bias = True
    block.mlp.experts.gating = config_for(ClampedSwiGLU, alpha=alpha, limit=limit)
    return model
