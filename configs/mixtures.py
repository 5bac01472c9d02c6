"""Mixtures of experts: one that a laptop's CPU trains in minutes, and the shapes of published ones.

The shapes of the large ones and their balance loss coefficients come from the published config.json files. Learning
rates and batch sizes are ours, except for DeepSeek's, because the other reports do not state them. We have not run
these sizes.
"""

from __future__ import annotations

from plimsoll.configs.parts import large, no_decay
from plimsoll.configs.tiny import stdlib_tiny
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import deepseek_model, gpt_oss_model, llama_model, mixture
from plimsoll.framework.families.deepseek_v3 import DeepseekV3
from plimsoll.framework.families.glm4_moe import Glm4MoE
from plimsoll.framework.families.published import find_published_model
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layers.rotary_scaling import YarnScaling
from plimsoll.framework.optimizers import matrices


def moe_tiny() -> Config:
    """stdlib-tiny with 8 experts per layer, 2 active per token: 3.4M parameters, 1.8M active.

    The two experts of a token are together as wide as stdlib-tiny's MLP. Trains in minutes on 2 CPU cores.
    """
    config = stdlib_tiny()
    block = config.model.stack.pattern[0]
    block.mlp = mixture(experts=8, top_k=2, hidden=172)
    block.mlp.router.expert_metrics = True
    # Our Muon updates the matrix of each expert separately; optax's applies only to single matrices.
    schedule = config.learner.optimizer.learning_rate
    config.learner.optimizer = config_for(matrices.muon, learning_rate=schedule, weight_decay=0.01, consistent_rms=None)
    # Small differences decide the router's choice, so it learns as slowly as is usual with AdamW.
    router_rule = config.learner.rules[-1].copy()
    router_rule.pattern = "router"
    router_rule.optimizer.learning_rate.peak_value = 0.003
    config.learner.rules = [router_rule, *config.learner.rules]
    return config


def mixtral_8x7b() -> Config:
    """Mixtral 8x7B: 32 layers of 8 experts, 2 active per token, width 4096; 46.7B parameters, 12.9B active.

    Published as mistralai/Mixtral-8x7B-v0.1 (arXiv 2401.04088).
    """
    model = llama_model(
        layers=32, heads=32, kv_heads=8, dim=4096, hidden=14336, vocab_size=32000, theta=1_000_000.0, eps=1e-5
    )
    model.stack.pattern[0].mlp = mixture(experts=8, top_k=2, hidden=14336, balance=0.02)
    return large(model, seq_len=4096, batch=1024, peak=2e-4, steps=500_000)


def qwen3_30b_a3b() -> Config:
    """Qwen3 30B-A3B: 48 layers of 128 experts, 8 active per token, width 2048; 30.5B parameters, 3.3B active.

    Published as Qwen/Qwen3-30B-A3B (arXiv 2505.09388).
    """
    eps = 1e-6
    model = llama_model(
        layers=48, heads=32, kv_heads=4, dim=2048, hidden=6144, vocab_size=151936, theta=1_000_000.0, eps=eps
    )
    block = model.stack.pattern[0]
    block.attention.head_dim = 128
    block.attention.qk_norm = config_for(RMSNorm, eps=eps)
    block.mlp = mixture(experts=128, top_k=8, hidden=768, balance=0.001)
    return large(model, seq_len=4096, batch=1024, peak=3e-4, steps=500_000)


def gpt_oss_20b() -> Config:
    """gpt-oss 20b: 24 layers of 32 experts, 4 active per token, width 2880; 20.9B parameters, 3.6B active.

    Published as openai/gpt-oss-20b (arXiv 2508.10925), which stores its experts in MXFP4; here they train in
    bfloat16. Every second layer, starting with the first, attends to 128 tokens. The balance loss coefficient is
    ours.
    """
    scaling = config_for(YarnScaling, factor=32.0, original_length=4096, truncate=False)
    model = gpt_oss_model(
        layers=24,
        heads=64,
        kv_heads=8,
        head_dim=64,
        dim=2880,
        hidden=2880,
        experts=32,
        top_k=4,
        vocab_size=201_088,
        theta=150_000.0,
        rope_scaling=scaling,
    )
    local_block = model.stack.pattern[0]
    local_block.mlp.router.balance = 0.001
    full_block = local_block.copy()
    local_block.attention.window = 128
    model.stack.pattern = [local_block, full_block]
    config = large(model, seq_len=4096, batch=1024, peak=3e-4, steps=500_000)
    config.learner.rules = [no_decay("norm|bias|sinks")]
    return config


def deepseek_v2_lite() -> Config:
    """DeepSeek-V2-Lite: a dense layer, then 26 of 64 experts, 6 active per token, plus 2 shared; 15.7B parameters.

    Latent attention of rank 512, width 2048. Published as deepseek-ai/DeepSeek-V2-Lite (arXiv 2405.04434, appendix
    B). This is the pretraining shape: with 4096 positions, before YaRN extended them to 32,768.
    """
    model = deepseek_model(
        layers=27,
        num_first=1,
        heads=16,
        dim=2048,
        hidden=10944,
        vocab_size=102400,
        kv_rank=512,
        query_rank=None,
        experts=64,
        top_k=6,
        expert_hidden=1408,
        shared_hidden=2816,
    )
    return large(model, seq_len=4096, batch=4608, peak=4.2e-4, steps=302_000)


def deepseek_v3() -> Config:
    """DeepSeek-V3: 3 dense layers, then 58 of 256 experts, 8 active per token, plus a shared one; 671B parameters.

    Latent attention of rank 512, width 7168. Published as deepseek-ai/DeepSeek-V3 (arXiv 2412.19437). The biases of its
    routers, which are trained in pretraining, are constant: set `model.stack.pattern.0.mlp.router.selection_bias` to
    False and `.bias_rate` to 0.001 to train them.
    """
    model = DeepseekV3().model(find_published_model("deepseek-ai/DeepSeek-V3").config)
    return large(model, seq_len=4096, batch=15360, peak=2.2e-4, steps=230_000)


def glm_4_5_air() -> Config:
    """GLM-4.5-Air: a dense layer, then 45 of 128 experts, 8 active per token, plus a shared one; 106.9B parameters.

    Width 4096, 96 heads, 8 KV heads. Published as zai-org/GLM-4.5-Air (arXiv 2508.06471).
    """
    model = Glm4MoE().model(find_published_model("zai-org/GLM-4.5-Air").config)
    return large(model, seq_len=4096, batch=4096, peak=2e-4, steps=500_000)


CONFIGS = {
    "moe-tiny": moe_tiny,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "gpt-oss-20b": gpt_oss_20b,
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v3": deepseek_v3,
    "glm-4.5-air": glm_4_5_air,
}
