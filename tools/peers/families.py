"""The shapes that are compared with `transformers`: each as a transformers config and as ours, made by `configs.parts`.

Tiny, but nothing is degenerate: head counts differ, no two widths are alike where a mistake could hide, and both sides
of every threshold of the rotary scaling are in reach. May import: framework, configs, names; neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.parts import gpt2_model, llama_model
from framework.config import Config, config_for
from framework.layers.rotary import Llama3Scaling
from tools.peers.names import Source, gpt2_sources, llama_sources

LAYERS, VOCAB, SEQ_LEN, BATCH = 2, 96, 20, 2
GPT2_POSITIONS = 32


@dataclass(frozen=True)
class Family:
    """One shape.

    Args:
        name: of the family and of its recorded file.
        model_type: transformers' name of the architecture.
        theirs: fields of the transformers config; JSON data.
        ours: makes our model config, float32.
        sources: where each of our parameters comes from.
        no_gradient: our parameters whose gradient is zero in exact arithmetic, so that only its size can be compared.
    """

    name: str
    model_type: str
    theirs: dict[str, Any]
    ours: Callable[[], Config]
    sources: dict[str, Source]
    no_gradient: tuple[str, ...] = ()


def _gpt2() -> Family:
    dim, heads = 32, 4
    return Family(
        name="gpt2",
        model_type="gpt2",
        theirs={
            "vocab_size": VOCAB,
            "n_positions": GPT2_POSITIONS,
            "n_embd": dim,
            "n_layer": LAYERS,
            "n_head": heads,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        ours=lambda: gpt2_model(layers=LAYERS, heads=heads, dim=dim, vocab_size=VOCAB, positions=GPT2_POSITIONS),
        sources=gpt2_sources(),
        # It adds the same to all logits of a query, which softmax does not see. (Rotation makes it matter elsewhere.)
        no_gradient=("stack/block0/attention/key/bias",),
    )


def _llama(
    name: str,
    model_type: str,
    *,
    dim: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    hidden: int = 80,
    theta: float = 10_000.0,
    eps: float,
    tied: bool = False,
    scaling: dict[str, Any] | None = None,
) -> Family:
    theirs = {
        "vocab_size": VOCAB,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if head_dim is not None:
        theirs["head_dim"] = head_dim
    if scaling is not None:
        theirs["rope_scaling"] = scaling
    qkv_bias = model_type == "qwen2"

    def ours() -> Config:
        model = llama_model(
            layers=LAYERS,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            hidden=hidden,
            vocab_size=VOCAB,
            theta=theta,
            eps=eps,
            qkv_bias=qkv_bias,
            tied=tied,
            rope_scaling=None if scaling is None else llama3_scaling(scaling),
        )
        model.stack.pattern[0].attention.head_dim = head_dim
        return model

    return Family(name, model_type, theirs, ours, llama_sources(tied=tied, qkv_bias=qkv_bias))


def llama3_scaling(theirs: dict[str, Any]) -> Config:
    """Our config of transformers' `rope_scaling` of type "llama3"."""
    return config_for(
        Llama3Scaling,
        factor=theirs["factor"],
        low_freq_factor=theirs["low_freq_factor"],
        high_freq_factor=theirs["high_freq_factor"],
        original_length=theirs["original_max_position_embeddings"],
    )


# Wavelengths of the eight frequencies: 6.3 (kept), 20 and 63 (between the thresholds 16 and 64), 199 and up (slowed).
_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _gpt2(),
        _llama("llama", "llama", eps=1e-5),
        _llama("llama3-scaled", "llama", head_dim=16, hidden=48, kv_heads=1, eps=1e-5, scaling=_SCALING),
        _llama("qwen2-tied", "qwen2", theta=1_000_000.0, eps=1e-6, tied=True),
        _llama("qwen2-untied", "qwen2", heads=8, kv_heads=4, theta=1_000_000.0, eps=1e-6),
    )
}

# Rotary tables are compared at the shapes of published models: {name: (head_dim, theta, rope_scaling)}.
ROTARY: dict[str, tuple[int, float, dict[str, Any] | None]] = {
    "plain": (64, 10_000.0, None),
    "llama-3.1-8b": (128, 500_000.0, {**_SCALING, "original_max_position_embeddings": 8192}),
    "llama-3.2-1b": (64, 500_000.0, {**_SCALING, "factor": 32.0, "original_max_position_embeddings": 8192}),
}
ROTARY_POSITIONS = (0, 1, 2, 17, 255, 4095, 8191, 8192, 32_767, 99_999)
