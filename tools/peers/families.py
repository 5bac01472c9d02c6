"""Shapes that are compared with `transformers`; each is a config.json that both sides read.

The shapes are tiny but not degenerate: head counts differ, no two widths are equal if that could hide a mistake, and
both sides of every threshold of the rotary scaling are covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plimsoll.framework.config import Config
from plimsoll.framework.families import build_model_config, find_family
from plimsoll.framework.weights import family
from plimsoll.framework.weights.source import Source

LAYERS, VOCAB, SEQ_LEN, BATCH = 2, 96, 20, 2
GPT2_POSITIONS = 32


@dataclass(frozen=True)
class PeerFamily:
    """One shape.

    Args:
        name: name of the recorded file.
        facts: config.json, from which both transformers and we build the model.
        no_gradient: our parameters whose gradient is zero in exact arithmetic, so that only its size can be compared.
    """

    name: str
    facts: dict[str, Any]
    no_gradient: tuple[str, ...] = ()

    @property
    def mapping(self) -> family.ModelFamily:
        """The mapping of tensor names."""
        return find_family(self.facts)()

    @property
    def has_zero_centered_norms(self) -> bool:
        """True if the norms store the difference of their scale from 1."""
        norm = self.ours().head.norm
        return norm.takes("zero_centered") and norm.zero_centered

    def ours(self) -> Config:
        """Return our model's config, in float32."""
        return build_model_config(self.mapping, self.facts)

    @cached_property
    def places(self) -> dict[str, list[Source]]:
        """The sources of each of our parameters."""
        return self.mapping.places(self.ours().instantiate())


def _gpt2() -> PeerFamily:
    facts = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_positions": GPT2_POSITIONS,
        "n_embd": 32,
        "n_layer": LAYERS,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    # The key bias adds the same to all logits of a query, and softmax ignores that. (With rotation, it does matter.)
    return PeerFamily("gpt2", facts, no_gradient=("stack/block0/attention/key/bias",))


def _llama(
    name: str, architecture: str = "LlamaForCausalLM", no_gradient: tuple[str, ...] = (), **fields: Any
) -> PeerFamily:
    facts = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return PeerFamily(name, facts | fields, no_gradient)


# Wavelengths of the eight frequencies: 6.3 (kept), 20 and 63 (between the thresholds 16 and 64), 199 and up (slowed).
_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_QWEN: dict[str, Any] = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6}
FAMILIES: dict[str, PeerFamily] = {
    family.name: family
    for family in (
        _gpt2(),
        _llama("llama"),
        _llama("llama3-scaled", head_dim=16, intermediate_size=48, num_key_value_heads=1, rope_scaling=_SCALING),
        _llama("mistral", "MistralForCausalLM", sliding_window=7),
        _llama("qwen2-tied", "Qwen2ForCausalLM", tie_word_embeddings=True, **_QWEN),
        _llama("qwen2-untied", "Qwen2ForCausalLM", num_attention_heads=8, num_key_value_heads=4, **_QWEN),
        _llama("qwen3", "Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=True, **_QWEN),
        _llama(
            "gemma2",
            "Gemma2ForCausalLM",
            hidden_size=36,  # transformers always keeps its square root, which scales embeddings, in float32
            num_hidden_layers=4,
            intermediate_size=40,
            head_dim=8,
            sliding_window=7,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            hidden_activation="gelu_pytorch_tanh",
            pad_token_id=None,  # torch gives a padding token's input embedding no gradient
            tie_word_embeddings=True,
        ),
    )
}

_MIXTURES = (
    _llama(
        "mixtral",
        "MixtralForCausalLM",
        intermediate_size=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=7,
    ),
    _llama(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        head_dim=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        **_QWEN,
    ),
)
FAMILIES |= {family.name: family for family in _MIXTURES}
# Of the eight frequencies of a head, the first is kept, three are in between, and four are divided.
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 0.25}
_DENSE = (
    _llama("qwen3-yarn", "Qwen3ForCausalLM", head_dim=16, rope_scaling=_YARN),
    _llama("olmo2", "Olmo2ForCausalLM", pad_token_id=None),
    _llama(
        "olmoe",
        "OlmoeForCausalLM",
        intermediate_size=24,
        num_experts=5,
        num_experts_per_tok=3,
        clip_qkv=1.2,
        pad_token_id=None,
    ),
    _llama(
        "gemma3",
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        hidden_size=36,
        num_hidden_layers=4,
        intermediate_size=40,
        head_dim=8,
        sliding_window=7,
        sliding_window_pattern=2,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        query_pre_attn_scalar=10,
        hidden_activation="gelu_pytorch_tanh",
        pad_token_id=None,
        tie_word_embeddings=True,
    ),
    _llama("phi3", "Phi3ForCausalLM", sliding_window=7, pad_token_id=None),
    _llama(
        "phi4-mini",
        "Phi3ForCausalLM",
        model_type="phi3",
        partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.5, 2.5], "long_factor": [1.0, 4.0, 9.0]},
        original_max_position_embeddings=64,
        pad_token_id=None,
    ),
)
FAMILIES |= {family.name: family for family in _DENSE}

FAMILIES["gpt-oss"] = _llama(
    "gpt-oss",
    "GptOssForCausalLM",
    model_type="gpt_oss",
    head_dim=16,
    intermediate_size=24,
    num_local_experts=5,
    num_experts_per_tok=3,
    sliding_window=7,
    attention_bias=True,
    # Low enough to clamp many outputs of both projections.
    swiglu_limit=0.7,
    swiglu_alpha=1.5,
    rope_theta=150_000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
)


def _deepseek(name: str, version: int = 2, no_gradient: tuple[str, ...] = (), **fields: Any) -> PeerFamily:
    facts = {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 28,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": None,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return PeerFamily(name, facts | fields, no_gradient)


_SIGMOID: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# The bias of the choice is not trained.
_NO_GRADIENT = ("stack/block0/mlp/router/selection_bias",)
_DEEPSEEK = (
    _deepseek("deepseek-v2"),
    _deepseek(
        "deepseek-v2-groups",
        num_hidden_layers=3,
        first_k_dense_replace=2,
        q_lora_rank=14,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        rope_scaling={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    _deepseek(
        "deepseek-v3",
        version=3,
        no_gradient=_NO_GRADIENT,
        num_key_value_heads=4,
        q_lora_rank=14,
        rope_scaling={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        **_SIGMOID,
    ),
    _llama(
        "glm4-moe",
        "Glm4MoeForCausalLM",
        model_type="glm4_moe",
        no_gradient=_NO_GRADIENT,
        num_hidden_layers=3,
        head_dim=12,
        intermediate_size=28,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=8,
        routed_scaling_factor=1.5,
        **_SIGMOID,
    ),
)
FAMILIES |= {family.name: family for family in _DEEPSEEK}

# Head counts and widths differ; the second of the three layers attends.
_HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "rope_theta": 1_000_000.0,
    # Outputs of linear attention may be close to zero, and a small eps would amplify their rounding errors.
    "rms_norm_eps": 0.1,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 10,
}
_HYBRIDS = (
    _llama(
        "qwen3-next",
        "Qwen3NextForCausalLM",
        model_type="qwen3_next",
        intermediate_size=24,
        mlp_only_layers=[2],
        **_HYBRID,
        **_EXPERTS,
    ),
    _llama("qwen3.5", "Qwen3_5ForCausalLM", model_type="qwen3_5_text", intermediate_size=24, **_HYBRID),
    _llama(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        intermediate_size=24,
        mlp_only_layers=[1],
        **_EXPERTS,
    ),
    _llama("qwen3.5-moe", "Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text", **_HYBRID, **_EXPERTS),
)
FAMILIES |= {family.name: family for family in _HYBRIDS}

_MIXED = (
    # The fourth layer has no window, and the scaling, of whose four frequencies the first is kept, the second is in
    # between, and two are divided.
    _llama(
        "olmo3",
        "Olmo3ForCausalLM",
        num_hidden_layers=4,
        intermediate_size=24,
        sliding_window=7,
        rope_theta=500_000.0,
        rope_scaling=_YARN,
        pad_token_id=None,
    ),
    # Layers with and without rotary positions, each with and without a window.
    _llama(
        "smollm3",
        "SmolLM3ForCausalLM",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size=24,
        no_rope_layers=[1, 0, 1, 0],
        layer_types=["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=7,
        rope_theta=2_000_000.0,
        rope_scaling=_YARN,
        tie_word_embeddings=True,
        pad_token_id=None,
    ),
    _llama(
        "seed-oss",
        "SeedOssForCausalLM",
        model_type="seed_oss",
        head_dim=16,
        intermediate_size=48,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=True,
        attention_dropout=0.0,
        residual_dropout=0.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        pad_token_id=None,
    ),
)
FAMILIES |= {family.name: family for family in _MIXED}

# Sizes and head counts differ. The second of the three layers attends.
_GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "intermediate_size": 12,
    "shared_intermediate_size": 20,
    "layer_types": ["mamba", "attention", "mamba"],
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.25,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    # A small eps would amplify the rounding errors of outputs that are close to zero.
    "rms_norm_eps": 0.1,
    "pad_token_id": None,
}
_STATE_SPACE = (
    _llama(
        "granite-hybrid",
        "GraniteMoeHybridForCausalLM",
        position_embedding_type="nope",
        num_local_experts=3,
        num_experts_per_tok=2,
        logits_scaling=0.6,
        mamba_n_groups=1,
        tie_word_embeddings=True,
        **_GRANITE,
    ),
    _llama(
        "granite-hybrid-dense",
        "GraniteMoeHybridForCausalLM",
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        logits_scaling=1.5,
        mamba_n_groups=4,
        attention_bias=True,
        **_GRANITE,
    ),
)
FAMILIES |= {family.name: family for family in _STATE_SPACE}

_LONG_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
# Rotary tables are compared at the shapes of published models: {name: (head_dim, theta, rope_scaling)}.
ROTARY: dict[str, tuple[int, float, dict[str, Any] | None]] = {
    "plain": (64, 10_000.0, None),
    "llama-3.1-8b": (128, 500_000.0, {**_SCALING, "original_max_position_embeddings": 8192}),
    "llama-3.2-1b": (64, 500_000.0, {**_SCALING, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "qwen3-8b-yarn": (128, 1_000_000.0, _LONG_YARN),
    "untruncated": (64, 150_000.0, {**_LONG_YARN, "original_max_position_embeddings": 4096, "truncate": False}),
    "mscale": (64, 10_000.0, {**_LONG_YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}),
}
ROTARY_POSITIONS = (0, 1, 2, 17, 255, 4095, 8191, 8192, 32_767, 99_999)
