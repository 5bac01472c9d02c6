"""OLMo 2 (arXiv 2501.00656) and OLMoE (arXiv 2409.02060), whose data and training are published too.

Learning rates, batch sizes and losses are theirs; weight decay and warm-up are those of all large configs here. We
have not run these sizes.
"""

from __future__ import annotations

from plimsoll.configs.parts import large
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import llama_model, mixture
from plimsoll.framework.layers.norm import RMSNorm


def norm_all_heads(model: Config, eps: float) -> None:
    """Normalize the queries and keys of a token over all heads together."""
    attention = model.stack.pattern[0].attention
    attention.qk_norm = config_for(RMSNorm, eps=eps)
    attention.qk_norm_over = "all"


def olmo2_7b() -> Config:
    """OLMo 2 7B: 32 layers, 32 heads, width 4096, norms on the outputs of branches; 7.30B parameters.

    Published as allenai/OLMo-2-1124-7B.
    """
    eps = 1e-6
    model = llama_model(layers=32, heads=32, dim=4096, hidden=11008, vocab_size=100352, theta=500_000.0, eps=eps)
    norm_all_heads(model, eps)
    block = model.stack.pattern[0]
    block.post_norm = block.norm
    block.norm = None
    return large(model, seq_len=4096, batch=1024, peak=3e-4, steps=928_000)


def olmoe_1b_7b() -> Config:
    """OLMoE 1B-7B: 16 layers of 64 experts, 8 active per token, width 2048; 6.92B parameters, 1.3B active.

    Published as allenai/OLMoE-1B-7B-0924.
    """
    eps = 1e-5
    hidden = 1024
    model = llama_model(layers=16, heads=16, dim=2048, hidden=hidden, vocab_size=50304, eps=eps)
    norm_all_heads(model, eps)
    block = model.stack.pattern[0]
    block.mlp = mixture(experts=64, top_k=8, hidden=hidden, normalize=False, balance=0.01)
    block.mlp.router.z = 0.001
    return large(model, seq_len=4096, batch=1024, peak=4e-4, steps=1_200_000)


CONFIGS = {"olmo2-7b": olmo2_7b, "olmoe-1b-7b": olmoe_1b_7b}
