"""Directories of published models with one alteration: a field of config.json, two that interact, or a file.

A test checks for each one that transformers and we compute the same, or that we refuse it with a reason
(tools.check_altered).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tools.peers.families import FAMILIES
from tools.peers.recording import Tensors

ABSENT = object()
SEQ_LEN = 40  # exceeds windows and `max_position_embeddings`, so that both have an effect
Facts = dict[str, Any]


@dataclass(frozen=True)
class Alteration:
    """One directory.

    Args:
        shape: shape in tools.peers.families that the directory is made from.
        name: description of the alteration.
        facts: contents of its config.json.
        damage: function that alters the directory after it is written.
    """

    shape: str
    name: str
    facts: Any
    damage: Callable[[Path, Tensors], None] | None = None

    def write(self, folder: Path, tensors: Tensors) -> None:
        """Write the directory with these weights."""
        (folder / "config.json").write_text(json.dumps(self.facts))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        if self.damage is not None:
            self.damage(folder, tensors)


def base_facts(shape: str) -> Facts:
    """Return the config.json of a shape. A sequence of SEQ_LEN exceeds its positions unless they are learned."""
    facts = copy.deepcopy(FAMILIES[shape].facts)
    positions = {"n_positions": 48} if shape == "gpt2" else {"max_position_embeddings": 32}
    return facts | positions


def alterations(shape: str, fields: Facts) -> Iterator[Alteration]:
    """Yield all alterations of a shape. `fields` are the family's fields in transformers, with their values."""
    base = base_facts(shape)

    def alter(name: str, **changes: Any) -> Alteration:
        facts = {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}
        return Alteration(shape, name, facts)

    yield alter("nothing")
    for field in sorted({*fields, *base}):
        now = base.get(field, fields.get(field))
        values = [ABSENT, *_near(now), *SPECIAL.get(field, [])]
        for value in _distinct(values, base.get(field, ABSENT)):
            yield alter(f"{field} = {_text(value)}", **{field: value})
    for field, values in FOREIGN.items():
        if field not in fields:
            for value in _distinct(values, base.get(field, ABSENT)):
                yield alter(f"{field} = {_text(value)}", **{field: value})
    for changes in PAIRS if shape != "gpt2" else GPT2_PAIRS:
        yield alter(", ".join(f"{key} = {_text(value)}" for key, value in changes.items()), **changes)
    for name, damage in FILES.items():
        yield Alteration(shape, name, base, damage)


def _near(value: Any) -> list[Any]:
    """Return other values for a field: neighbors, extremes, other types."""
    if isinstance(value, bool):
        return [not value, None, int(not value), str(value).lower()]
    if isinstance(value, int):
        return [0, -1, value // 2, 2 * value, value + 1, float(value), str(value), None]
    if isinstance(value, float):
        return [0.0, -value, value / 2, 2 * value, 10 * value + 0.1, str(value), None, True]
    if isinstance(value, str):
        return ["", "nonsense", 3, None, [value]]
    if isinstance(value, list):
        return [[], value[:1], value + value[:1], value[::-1], "nonsense", None]
    if isinstance(value, dict):
        return [{}, None, "nonsense", 1]
    return [True, False, 1, 0.5, "nonsense", [], {}]


def _distinct(values: list[Any], now: Any) -> Iterator[Any]:
    seen = {_text(now)}
    for value in values:
        if _text(value) not in seen:
            seen.add(_text(value))
            yield value


def _text(value: Any) -> str:
    return "absent" if value is ABSENT else json.dumps(value)


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
SCALINGS: list[Any] = [PLAIN, LINEAR, YARN, DYNAMIC, LONG, LLAMA3, {**LLAMA3, "rope_theta": 500.0}]
SCALINGS += [{**LINEAR, "rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}]
SCALINGS += [{"type": "linear", "factor": 4.0}, {**LINEAR, "type": "yarn"}, {"type": "dynamic", **LINEAR}]
SCALINGS += [{**LINEAR, "factor": factor} for factor in (0, -2.0, 0.5, 1.0, 2, "4", None, True)]
SCALINGS += [{**LLAMA3, "low_freq_factor": 4.0}, {**LLAMA3, "high_freq_factor": 0.5}, {**LLAMA3, "factor": -1.0}]
SCALINGS += [{k: v for k, v in LLAMA3.items() if k != name} for name in LLAMA3]
SCALINGS += [{**LLAMA3, "original_max_position_embeddings": length} for length in (0, -1, 8.0, 4, None, 64)]
SCALINGS += [{**scaling, "partial_rotary_factor": 0.5} for scaling in (PLAIN, LINEAR, LLAMA3, YARN)]
SCALINGS += [{**scaling, "partial_rotary_factor": 0.99} for scaling in (PLAIN, LINEAR, LLAMA3)]
SCALINGS += [{"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"rope_type": None}]
SCALINGS += [{"full_attention": LINEAR, "sliding_attention": PLAIN}, {"full_attention": PLAIN}, {"rope_type": "mrope"}]
SCALINGS += [{**LINEAR, "attention_factor": 2.0}, {**PLAIN, "factor": 4.0}, {**PLAIN, "rope_theta": None}, "linear"]
SCALINGS += [{**PLAIN, "rope_theta": "1e4"}, {**PLAIN, "mrope_section": [2, 1, 1]}, [LINEAR], {"factor": 4.0}]
SCALINGS += [{**PLAIN, "rope_theta": 0}, {**PLAIN, "rope_theta": -10.0}, {**PLAIN, "rope_theta": 100}]
# Long enough that frequencies lie at both ends of YaRN's ramp and in between.
WIDE_YARN = {**YARN, "original_max_position_embeddings": 256}
for field, values in {
    "beta_fast": (0, 2, 0.5, None, -1.0, "2"),
    "beta_slow": (0, 2, 0.25, None, -1.0, "2"),
    "mscale": (0.7, 0, -1),
    "mscale_all_dim": (0.7, 0, -1),
    "attention_factor": (0.7, 2, 0, -1, None),
    "truncate": (False, None, 0),
    "factor": (None, 1.0, 0.5, 0, "4"),
    "rope_theta": (500.0, 1.0, 0.5),
    "original_max_position_embeddings": (0, 8.0, 16, None, 2),
}.items():
    SCALINGS += [{**WIDE_YARN, field: value} for value in values]
SCALINGS += [{**WIDE_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, {**WIDE_YARN, "mscale": 0, "mscale_all_dim": 0.5}]
SCALINGS += [{k: v for k, v in WIDE_YARN.items() if k != name} for name in WIDE_YARN]

WINDOWS = [None, 0, -1, 1, 3, 7, 39, 40, 1000, "7", 7.0, True]
KINDS = {"sliding": "sliding_attention", "full": "full_attention", "chunked": "chunked_attention"}
LAYER_TYPES = [[KINDS[name] for name in names] for names in (
    ("full", "full"), ("sliding", "sliding"), ("sliding", "full"), ("full", "sliding"), ("chunked", "full"), ("full",),
    ("full", "sliding", "full", "sliding"), ("sliding",) * 4, ("full",) * 4, ("full",) * 3,
)]  # fmt: skip
ACTIVATIONS = ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "gelu_10", "relu"]
ACTIVATIONS += ["relu2", "relu6", "quick_gelu", "tanh", "sigmoid", "linear", "mish", "leaky_relu", "gelu_accurate"]
DTYPES = ["float32", "bfloat16", "float16", "float64", "torch.float32", "int8", "float8_e4m3fn", "auto", "nonsense"]
ARCHITECTURES = [
    *([name] for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")),
    ["Gemma2ForCausalLM"], ["GPT2LMHeadModel"], ["GemmaForCausalLM"], ["LlamaForSequenceClassification"],
    ["LlamaModel"],
    ["LlamaForCausalLM", "Qwen3ForCausalLM"], ["GPT2DoubleHeadsModel"], "LlamaForCausalLM", [3],
]  # fmt: skip
# More values for fields that the family has.
SPECIAL: dict[str, list[Any]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation_function": ACTIVATIONS,
    "dtype": DTYPES,
    "torch_dtype": DTYPES,
    "rope_parameters": SCALINGS,
    "sliding_window": WINDOWS,
    "layer_types": LAYER_TYPES,
    "max_window_layers": [0, 1, 2, 3, -1, None],
    "architectures": ARCHITECTURES,
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "phi3", "ministral"],
    "head_dim": [4, 8, 16, 7, 1],
    "num_key_value_heads": [1, 2, 3, 4, 8],
    "num_attention_heads": [1, 2, 3, 4, 8],
    "query_pre_attn_scalar": [1, 8, 10.5],
    "pad_token_id": [95, 96, 200, -1, -100],
    "quantization_config": [{"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}],
    "is_encoder_decoder": [True],
    "eos_token_id": [[1, 2], [], -1, 10_000],
    "mlp_only_layers": [[0], [1], [0, 1], [1, 1], [-1], [7], [0.0], [True], ["0"], 0],
    "decoder_sparse_step": [1, 2, 3],
    "num_experts_per_tok": [1, 2, 5, 6],
    "no_rope_layers": [
        [0, 1, 0, 1], [1] * 4, [0] * 4, [2, -1, 0, 1], [1, 0, 1, 0, 7], [1, 0, 1], [True, False, True, False],
        [1.0, 0.0, 1.0, 0.0], [None] * 4, 1,
    ],
    "no_rope_layer_interval": [1, 2, 3],
}  # fmt: skip
# Fields of other families, or of older versions, which a directory may contain nevertheless.
FOREIGN: dict[str, list[Any]] = {
    "rope_scaling": [None, {}, *SCALINGS],
    "rope_parameters": SCALINGS[:8],
    "rope_theta": [1.0, 100, 100.0, 1e6, 0, -10.0, "10000", None, True, ABSENT],
    "partial_rotary_factor": [0.5, 0.25, 1.0, 0.99, 0, None, "0.5", 1],
    "rotary_pct": [0.25, 1.0],
    "rotary_dim": [4],
    "original_max_position_embeddings": [8, 16, 4096, None],
    "max_position_embeddings": [16, 48, 64],
    "torch_dtype": DTYPES,
    "is_causal": [False, True, None, 0],
    "use_bidirectional_attention": [True, False, None],
    "is_decoder": [True, False],
    "add_cross_attention": [True],
    "tie_encoder_decoder": [True],
    "cross_attention_hidden_size": [8],
    "pruned_heads": [{"0": [0]}],
    "per_layer_config": [{"0": {"intermediate_size": 40}}, {"1": {"sliding_window": 3}}, {}, None],
    "quantization_config": [{"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, None],
    "transformers_weights": ["other.safetensors", "model.safetensors", None],
    "configuration_files": [["config.4.0.0.json"], []],
    "text_config": [{"hidden_size": 32}, {}, None],
    "auto_map": [{"AutoModel": "x.Y"}, None],
    "attn_implementation": ["sdpa", "eager", "flash_attention_2"],
    "_attn_implementation": ["sdpa"],
    "sliding_window": WINDOWS,
    "use_sliding_window": [True, False, None, 0, 1, "true"],
    "max_window_layers": [0, 1, 2, 3, -1],
    "layer_types": LAYER_TYPES,
    "sliding_window_pattern": [2, 6],
    "attention_chunk_size": [4],
    "window_size": [3],
    "head_dim": [8, 4, 16, None, 0, -8, 8.0, "8"],
    "attention_bias": [True, False, None, 1],
    "qkv_bias": [True, False],
    "mlp_bias": [True, False, None],
    "use_qkv_bias": [True],
    "bias": [True],
    "use_qk_norm": [True],
    "qk_layernorm": [True],
    "query_key_norm": [True],
    "attn_logit_softcapping": [2.0, None],
    "final_logit_softcapping": [3.0, None],
    "query_pre_attn_scalar": [3],
    "attention_multiplier": [2.0],
    "embedding_multiplier": [2.0],
    "residual_multiplier": [0.5],
    "logits_scaling": [2.0],
    "logit_scale": [0.5],
    "scale_emb": [12],
    "scale_depth": [1.4],
    "clip_qkv": [0.1],
    "no_rope_layers": [[0, 1], [1, 0]],
    "no_rope_layer_interval": [2],
    "use_parallel_residual": [True],
    "parallel_attn": [True],
    "num_experts": [4],
    "num_local_experts": [4],
    "hidden_act": ACTIVATIONS[:4],
    "hidden_activation": ACTIVATIONS[:4],
    "activation_function": ACTIVATIONS[:4],
    "rms_norm_eps": [0.1],
    "layer_norm_eps": [0.1],
    "layer_norm_epsilon": [0.1],
    "norm_eps": [0.1],
    "hidden_size": [16, 48],
    "n_embd": [16],
    "num_hidden_layers": [1, 3],
    "n_layer": [1],
    "num_layers": [1],
    "num_attention_heads": [2, 8],
    "n_head": [2],
    "n_inner": [40],
    "n_ctx": [8],
    "n_positions": [8],
    "intermediate_size": [40],
    "ffn_dim": [40],
    "scale_attn_weights": [False],
    "scale_attn_by_inverse_layer_idx": [True],
    "reorder_and_upcast_attn": [True],
    "initializer_range": [1.0],
    "attention_dropout": [0.5],
    "hidden_dropout": [0.5],
    "dropout": [0.5],
    "pretraining_tp": [2],
    "tie_embeddings": [True],
    "mup": [True],
    "gradient_checkpointing": [True],
    "_name_or_path": ["elsewhere"],
    "unsloth_fixed": [True],
    "transformers_version": ["4.30.0", "99.0.0", 3],
    "num_labels": [3],
    "eos_token_id": [[1, 2]],
}
# One object of rotary positions for each kind of layer.
NESTED: list[Facts] = [
    {"full_attention": full, "sliding_attention": sliding}
    for full, sliding in (
        (YARN, PLAIN),
        (PLAIN, YARN),
        (LLAMA3, LINEAR),
        ({k: v for k, v in WIDE_YARN.items() if k[0] != "o"}, {"rope_theta": 500.0}),
        ({**WIDE_YARN, "factor": None, "rope_theta": 500.0}, {"rope_type": "default"}),
        ({**YARN, "partial_rotary_factor": 0.5}, PLAIN),
        (LONG, PLAIN),
        (None, PLAIN),
        (PLAIN, None),
        ({}, {}),
        ({"type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2.0}),
        ("linear", PLAIN),
    )
]
NESTED += [{"full_attention": LINEAR}, {"sliding_attention": LINEAR}, {**NESTED[0], "other_attention": PLAIN}]
PAIRS: list[Facts] = [
    *({"rope_parameters": nested, "rope_scaling": ABSENT} for nested in NESTED),
    *({"rope_parameters": nested, "rope_scaling": ABSENT, "rope_theta": 500.0} for nested in NESTED[:5]),
    *({"rope_parameters": nested, "rope_scaling": LINEAR} for nested in NESTED[:3]),
    {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": NESTED[3], "rope_scaling": ABSENT, "original_max_position_embeddings": 16},
    {"rope_scaling": YARN, "original_max_position_embeddings": 16},
    *(
        {"no_rope_layers": ABSENT, "no_rope_layer_interval": interval, "layer_types": ABSENT, **more}
        for interval in (0, -2, 1, 2, 3, None)
        for more in ({}, {"use_sliding_window": False}, {"sliding_window": None})
    ),
    *(
        {"rope_parameters": ours, "rope_scaling": other}
        for ours in (PLAIN, LINEAR, LLAMA3)
        for other in (LINEAR, YARN, DYNAMIC, LLAMA3, PLAIN, {"rope_type": "linear", "factor": 2.0}, {}, None)
    ),
    *({"partial_rotary_factor": part, "rope_scaling": s} for part in (0.5, 0.99, 1.0) for s in (LINEAR, LLAMA3, YARN)),
    *({"partial_rotary_factor": part, "rope_parameters": s} for part in (0.5, 1.0) for s in (PLAIN, LINEAR, LLAMA3)),
    *({"rope_theta": 500.0, "rope_scaling": scaling} for scaling in SCALINGS[:8]),
    *({"rope_theta": 500.0, "rope_parameters": scaling} for scaling in SCALINGS[:8]),
    *({"rope_theta": ABSENT, "rope_scaling": scaling} for scaling in SCALINGS[:6]),
    *({"rope_theta": ABSENT, "rope_parameters": scaling} for scaling in SCALINGS[:6]),
    *({"original_max_position_embeddings": n, "rope_scaling": LLAMA3} for n in (8, 16, 64, None)),
    {"original_max_position_embeddings": 8, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
    {"max_position_embeddings": ABSENT, "rope_scaling": {k: v for k, v in LLAMA3.items() if "original" not in k}},
    *(
        {"use_sliding_window": use, "sliding_window": window, **more}
        for use in (True, False)
        for window in (7, None, ABSENT)
        for more in (
            {},
            {"max_window_layers": 1},
            {"max_window_layers": 0},
            {"max_window_layers": -1},
            {"max_window_layers": ABSENT},
            {"layer_types": LAYER_TYPES[1]},
            {"layer_types": LAYER_TYPES[2]},
            {"layer_types": LAYER_TYPES[6]},
            {"layer_types": None, "max_window_layers": 1},
        )
    ),
    *({"dtype": one, "torch_dtype": other} for one in DTYPES[:4] for other in DTYPES[:4]),
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": ABSENT},
    {"num_attention_heads": 4, "num_key_value_heads": ABSENT},
    {"tie_word_embeddings": True, "attention_bias": True},
    {"attention_bias": True, "mlp_bias": True},
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
    {"architectures": ["LlamaForCausalLM"], "model_type": ABSENT},
    {"architectures": ABSENT, "model_type": "llama"},
]
GPT2_PAIRS: list[Facts] = [
    *({"dtype": one, "torch_dtype": other} for one in DTYPES[:4] for other in DTYPES[:4]),
    {"n_embd": ABSENT, "hidden_size": 32},
    {"n_layer": ABSENT, "num_hidden_layers": 2},
    {"n_head": ABSENT, "num_attention_heads": 4},
    {"n_head": ABSENT, "num_attention_heads": 2},
    {"n_positions": ABSENT, "max_position_embeddings": 48},
    {"n_head": 2, "num_attention_heads": 4},
    {"n_layer": 2, "num_hidden_layers": 1},
    {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    {"scale_attn_weights": False, "reorder_and_upcast_attn": True},
    {"rope_theta": 500.0, "rope_scaling": LINEAR},
    {"rope_theta": 500.0, "rope_parameters": LINEAR},
]


# ---- files


def _save(folder: Path, tensors: Tensors, file: str = "model.safetensors") -> None:
    save_file(tensors, folder / file, {"format": "pt"})


def _index(folder: Path, home: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))


def _with(change: Callable[[Tensors], Tensors]) -> Callable[[Path, Tensors], None]:
    return lambda folder, tensors: _save(folder, change(dict(tensors)))


def _table(tensors: Tensors) -> str:
    return next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))


def _without_prefix(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")


def _other(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.roll(array, 1, axis=0))


def _stale_shards(folder: Path, tensors: Tensors) -> None:
    """Write shards that are complete but differ: a model was saved again without removing the old shards."""
    _save(folder, {name: _other(array) for name, array in tensors.items()}, "model-00001-of-00001.safetensors")
    _index(folder, dict.fromkeys(tensors, "model-00001-of-00001.safetensors"))


def _shards(folder: Path, tensors: Tensors, *, lose: int = 0, more: bool = False) -> None:
    (folder / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    home = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: array for name, array in tensors.items() if home[name] == file}
        if more and file == files[0]:
            part |= {name: _other(array) for name, array in tensors.items() if home[name] == files[1]}
        _save(folder, part, file)
    _index(folder, dict(list(home.items())[lose:]))


def _make_index(file: str) -> Callable[[Path, Tensors], None]:
    return lambda folder, tensors: _index(folder, dict.fromkeys(tensors, file))


def _adapter(folder: Path, tensors: Tensors) -> None:
    """Write a peft adapter next to a whole model; transformers loads both."""
    facts = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _as(dtype: Any) -> Callable[[Path, Tensors], None]:
    return _with(lambda tensors: {name: array.astype(dtype) for name, array in tensors.items()})


FILES: dict[str, Callable[[Path, Tensors], None]] = {
    "shards": _shards,
    "a stale index and its shards next to a single file": _stale_shards,
    "an index of a missing file next to a single file": _make_index("nowhere.safetensors"),
    "an index of the single file": _make_index("model.safetensors"),
    "an index that leaves a tensor out": lambda folder, tensors: _shards(folder, tensors, lose=1),
    "a shard with tensors of another": lambda folder, tensors: _shards(folder, tensors, more=True),
    "the head's table is that of the embedding": _with(lambda t: {**t, "lm_head.weight": t[_table(t)].copy()}),
    "the head's table is another": _with(lambda t: {**t, "lm_head.weight": _other(t[_table(t)])}),
    "the head's table is the only one": _with(lambda t: {"lm_head.weight": t.pop(_table(t)), **t}),
    "an unused bias": _with(lambda t: {**t, "lm_head.bias": np.ones(96, np.float32)}),
    "an additional tensor": _with(lambda t: {**t, "model.layers.0.self_attn.more.weight": np.ones((4, 4), np.float32)}),
    "frequencies": _with(lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}),
    "the first tensor is missing": _with(lambda t: dict(list(t.items())[1:])),
    "the last tensor is missing": _with(lambda t: dict(list(t.items())[:-1])),
    "all are transposed": _with(lambda t: {name: np.ascontiguousarray(array.T) for name, array in t.items()}),
    "names without the first word": _with(lambda t: {name.split(".", 1)[1]: array for name, array in t.items()}),
    "names without the prefix": _with(lambda t: {_without_prefix(name): array for name, array in t.items()}),
    "names with an additional prefix": _with(lambda t: {f"base.{name}": array for name, array in t.items()}),
    "an adapter next to the model": _adapter,
    "float16": _as(np.float16),
    "bfloat16": _as(ml_dtypes.bfloat16),
    "float64": _as(np.float64),
    "int8": _as(np.int8),
    "uint8": _as(np.uint8),
    "an empty file": lambda folder, tensors: _empty(folder / "model.safetensors"),
    "no file": lambda folder, tensors: (folder / "model.safetensors").unlink(),
}
