"""Fields of config.json that change what transformers computes: they are read the same way, or refused by name.

`python -m tools.check_altered` found the behavior of transformers 5.23; these tests need neither it nor torch.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from plimsoll.framework import families
from plimsoll.framework.config import ConfigError
from plimsoll.framework.weights.directory import Directory, check_tensors
from tools.peers.alterations import ABSENT, DYNAMIC, LINEAR, LLAMA3, LONG, PLAIN, YARN, base_facts
from tools.peers.families import FAMILIES

LAYERS, FULL, SLIDING = 2, "full_attention", "sliding_attention"


def write(folder: Path, shape: str, **changes: Any) -> Path:
    """Write the config.json of a shape, with these fields changed."""
    facts = {key: value for key, value in {**base_facts(shape), **changes}.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def make_tensors(shape: str) -> dict[str, np.ndarray]:
    family = families.find_family(base_facts(shape))()
    model = family.model(base_facts(shape)).instantiate()
    rng, tensors = np.random.default_rng(0), {}
    for path, sources in family.places(model).items():
        spec = model.base_specs[path]
        layer_shape = spec.shape if spec.num_layers is None else spec.shape[1:]
        for source in sources:
            tensors[source.name] = 0.3 * rng.standard_normal(source.shape(layer_shape)).astype(np.float32)
    return tensors


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "two yarn": ("llama", {"rope_parameters": PLAIN, "rope_scaling": YARN}, "rope_scaling = .*the same as rope"),
    "two linear": ("qwen3", {"rope_parameters": PLAIN, "rope_scaling": LINEAR}, "rope_scaling = .*the same as rope"),
    "two factors": (
        "llama", {"rope_parameters": LINEAR, "rope_scaling": LINEAR | {"factor": 2.0}}, "rope_scaling = .*the same as",
    ),
    "yarn of a text": ("llama", {"rope_parameters": YARN | {"beta_fast": "2"}}, r"rope_parameters\.beta_fast = '2'"),
    "yarn of no length": (
        "llama", {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
        r"original_max_position_embeddings = 0; expected an integer of at least 1",
    ),
    "dynamic": ("gemma2", {"rope_scaling": DYNAMIC}, "rope_type default, linear, llama3 or yarn"),
    "partial, linear": (
        "llama", {"rope_scaling": LINEAR, "partial_rotary_factor": 0.99}, r"partial_rotary_factor = 0\.99; expected 1",
    ),
    "partial, inside": (
        "mistral", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}},
        r"rope_parameters\.partial_rotary_factor = 0\.5; expected 1",
    ),
    "partial": ("qwen2-untied", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    "losses of routers": ("mixtral", {"output_router_logits": True}, "output_router_logits = True; expected false"),
    "noise of routers": ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise = 0\.1; expected 0"),
    "two numbers of experts": ("mixtral", {"num_experts": 7}, "num_local_experts = 5.*expected one value"),
    "more experts of a token than there are": (
        "mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9; expected at most num_local_experts = 5",
    ),
    "of OLMoE": (
        "olmoe", {"num_experts_per_tok": 99}, "num_experts_per_tok = 99; expected at most num_experts = ",
    ),
    "of Qwen3": (
        "qwen3-moe", {"num_experts_per_tok": 99}, "num_experts_per_tok = 99; expected at most num_experts = ",
    ),
    "of gpt-oss": (
        "gpt-oss", {"num_experts_per_tok": 99}, "num_experts_per_tok = 99; expected at most num_local_experts = ",
    ),
    "of DeepSeek": (
        "deepseek-v2", {"num_experts_per_tok": 99}, "num_experts_per_tok = 99; expected at most n_routed_experts = ",
    ),
    "dense layers": ("qwen3-moe", {"mlp_only_layers": "1"}, "mlp_only_layers = '1'; expected a list of layer numbers"),
    "no head_dim": ("qwen3-moe", {"head_dim": None}, "head_dim = None; expected an integer"),
    "window of some": ("mixtral", {"layer_types": [FULL, FULL]}, "layer_types = .*expected sliding_attention in all"),
    "by layer": ("gemma2", {"rope_parameters": {FULL: PLAIN, SLIDING: LINEAR}}, "the same for all layers"),
    "window of OLMoE": ("olmoe", {"sliding_window": 4}, "sliding_window = 4; expected null"),
    "heads of OLMoE": ("olmoe", {"head_dim": 16}, "head_dim = 16; expected the width divided by the number of heads"),
    "clipped to nothing": ("olmoe", {"clip_qkv": 0}, "clip_qkv = 0; expected a number above 0"),
    "Gemma 3 flat": ("gemma3", {"rope_parameters": LINEAR, "rope_scaling": None}, "an object of full_attention and"),
    "Gemma 3 yarn": ("gemma3", {"rope_scaling": YARN}, "expected rope_type default or linear"),
    "Gemma 3 caps": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0; expected null"),
    "Gemma 3 pattern": ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0; expected an integer"),
    "Gemma 3 layers": ("gemma3", {"layer_types": [FULL]}, "layer_types = .*one for each of 4 layers"),
    "OLMo 3 flat": ("olmo3", {"rope_parameters": LINEAR, "rope_scaling": ABSENT}, "an object of full_attention and"),
    "OLMo 3 theta": ("olmo3", {"rope_theta": 1e4}, r"rope_theta = 10000\.0; expected 500000\.0, or a rope_theta"),
    "OLMo 3 truncate": (
        "olmo3", {"rope_scaling": YARN | {"truncate": False}},
        r"rope_parameters\.full_attention\.truncate = False; expected true",
    ),
    "SmolLM 3 layers": ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers = .*for each of 4 layers"),
    "SmolLM 3 flags": ("smollm3", {"no_rope_layers": [True] * 4}, "no_rope_layers = .*for each of 4 layers"),
    "SmolLM 3 interval": (
        "smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0; expected an",
    ),
    "SmolLM 3 windows": ("smollm3", {"use_sliding_window": False}, "use_sliding_window = False; expected true"),
    "Seed-OSS by layer": ("seed-oss", {"layer_types": [FULL, SLIDING]}, "layer_types = .*expected full_attention in"),
    "Phi-3 linear": ("phi3", {"rope_scaling": LINEAR}, "expected rope_type default or longrope"),
    "Phi-3 odd": ("phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4; expected an even number"),
    "Phi-3 factors": (
        "phi4-mini", {"rope_scaling": LONG}, r"rope_scaling\.short_factor = .*a list of 3 numbers above 0",
    ),
    "Phi-3 by layer": ("phi3", {"layer_types": [FULL, SLIDING]}, "layer_types = .*expected sliding_attention in all"),
    "no factor": ("llama", {"rope_scaling": {"rope_type": "linear"}}, r"no field 'rope_scaling\.factor'"),
    "a factor of 0": ("llama", {"rope_scaling": LINEAR | {"factor": 0}}, r"rope_scaling\.factor = 0; expected a"),
    "a text": ("llama", {"rope_scaling": "linear"}, "rope_scaling = 'linear'; expected an object or null"),
    "thresholds": ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, r"high_freq_factor = 0\.5; "),
    "no length": (
        "qwen3",
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}, "max_position_embeddings": ABSENT},
        "original_max_position_embeddings = None; expected an integer",
    ),
    "no length at all": (
        "qwen3",
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k[0] != "o"}, "max_position_embeddings": ABSENT},
        "no field 'max_position_embeddings'",
    ),
    "two lengths": (
        "llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
        "original_max_position_embeddings = 64; expected that of rope_parameters, 16",
    ),
    "not causal": ("llama", {"is_causal": False}, "is_causal = False; expected true"),
    "not causal, null": ("gpt2", {"is_causal": None}, "is_causal = None; expected true"),
    "both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    "sizes by layer": ("llama", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*expected null"),
    "other weights": ("llama", {"transformers_weights": "other.safetensors"}, "transformers_weights = 'other"),
    "other configs": ("llama", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files"),
    "another type": ("mistral", {"model_type": "llama"}, "model_type = 'llama'; expected 'mistral'"),
    "two architectures": (
        "llama", {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "architectures = .*expected one",
    ),
    "no list": ("llama", {"architectures": "LlamaForCausalLM"}, "architectures = .*expected a list"),
    "Mistral by layer": ("mistral", {"layer_types": [FULL, SLIDING]}, "layer_types = .*expected sliding_attention in"),
    "Llama by layer": ("llama", {"layer_types": [FULL, SLIDING]}, "layer_types = .*expected full_attention in"),
    "too few layers": ("gemma2", {"layer_types": [FULL, SLIDING]}, "layer_types = .*one for each of 4 layers"),
    "chunks": ("qwen3", {"layer_types": ["chunked_attention", FULL]}, "a list of full_attention and sliding_att"),
    "no window": ("qwen3", {"layer_types": [SLIDING, FULL]}, "sliding_window = absent; expected a number of tokens"),
    "by layer index": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    "two widths": ("gpt2", {"n_embd": 32, "hidden_size": 16}, "n_embd = 32, hidden_size = 16; expected one value"),
    "a flag as a text": ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'; expected true"),
    "a size as a float": ("llama", {"hidden_size": 32.0}, r"hidden_size = 32\.0; expected an integer of at least 1"),
    "no layers": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers = 0; expected an integer of at least 1"),
    "not a number": ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan; expected a number above 0"),
    "a list of names": ("llama", {"hidden_act": ["silu"]}, "hidden_act = .*expected a string"),
    "norms in float32": (
        "gpt-oss", {"dtype": "float16"}, "dtype = 'float16'; expected float32 or bfloat16: transformers would",
    ),
    "no limit": ("gpt-oss", {"swiglu_limit": 0.0}, r"swiglu_limit = 0\.0; expected a number above 0"),
    "a window of nothing": ("gpt-oss", {"sliding_window": None}, "sliding_window = None; expected a number of tokens"),
    "eight bits": ("llama", {"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'; expected float32, bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_features_are_refused_by_name(case, tmp_path):
    shape, changes, message = REFUSED[case]
    with pytest.raises((ValueError, ConfigError), match=f"{tmp_path}/config.json: .*{message}") as caught:
        families.load_model_config(write(tmp_path, shape, **changes))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("config.json: ") == 1


def test_config_that_is_not_an_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, given list"):
        families.load_model_config(tmp_path)


def windows(folder: Path) -> list[int | None]:
    model = families.load_model_config(folder)[0]
    pattern = [block.attention.window for block in model.stack.pattern]
    return pattern * (model.stack.num_layers // len(pattern))


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ("mistral", {"use_sliding_window": False}, [7, 7]),  # Mistral has no such field
        ("mistral", {"sliding_window": ABSENT}, [4096, 4096]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("llama", {"sliding_window": 7, "use_sliding_window": True}, [None, None]),  # neither has Llama
        ("qwen2-tied", {"sliding_window": 7}, [None, None]),
        ("qwen2-tied", {"use_sliding_window": True, "max_window_layers": 1}, [None, 4096]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, [7, 7]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING, FULL]}, [7, None]),
        ("gemma2", {"sliding_window": 5, "layer_types": [FULL] * 3 + [SLIDING]}, [None, None, None, 5]),
        ("olmo3", {}, [7, 7, 7, None]),
        ("smollm3", {"layer_types": ABSENT}, [None, 7, None, 7]),
        ("smollm3", {"layer_types": ABSENT, "use_sliding_window": False}, [None] * 4),
    ],
)
def test_windows_match_transformers(shape, changes, expected, tmp_path):
    assert windows(write(tmp_path, shape, **changes)) == expected


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ("olmo3", {"rope_scaling": LINEAR}, [(5e5, 1.0)] * 3 + [(5e5, 4.0)]),
        ("olmo3", {"rope_scaling": ABSENT, "rope_parameters": {FULL: PLAIN, SLIDING: LINEAR}},
         [(5e5, 4.0)] * 3 + [(1e4, 1.0)]),
        ("olmo3", {"rope_scaling": ABSENT, "rope_theta": 1e4, "layer_types": [FULL] * 4}, [(1e4, 1.0)]),
        ("smollm3", {"rope_scaling": LINEAR, "layer_types": ABSENT}, [(2e6, 4.0), None]),
        ("smollm3", {"rope_scaling": ABSENT, "rope_theta": ABSENT, "no_rope_layers": [1, 1, 1, 2]}, [(2e6, 1.0)] * 4),
        ("smollm3", {"rope_scaling": ABSENT, "no_rope_layers": ABSENT, "no_rope_layer_interval": 2,
                     "layer_types": [FULL] * 4}, [(2e6, 1.0), None]),
    ],
)  # fmt: skip
def test_rotary_positions_by_layer_match_transformers(shape, changes, expected, tmp_path):
    """Each layer of the pattern has (theta, factor of a linear scaling), or None without rotary positions."""
    model = families.load_model_config(write(tmp_path, shape, **changes))[0]
    rotaries = [block.attention.rotary for block in model.stack.pattern]
    stated = [one and (one.theta, one.scaling.factor if one.scaling else 1.0) for one in rotaries]
    assert stated == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": "float64"}, "float32"),
        ({"dtype": None, "torch_dtype": "float32"}, "float32"),
    ],
)
def test_dtype_goes_before_torch_dtype(fields, expected, tmp_path):
    model, _ = families.load_model_config(write(tmp_path, "llama", **fields))
    assert str(model.param_dtype) == str(model.compute_dtype) == expected


def test_alternative_size_name_is_read(tmp_path):
    write(tmp_path, "gpt2", n_embd=ABSENT, hidden_size=32, n_layer=ABSENT, num_hidden_layers=3)
    model, _ = families.load_model_config(tmp_path)
    assert (model.dim, model.stack.num_layers) == (32, 3)


def test_unscaled_attention_round_trips(tmp_path):
    model, _ = families.load_model_config(write(tmp_path, "gpt2", scale_attn_weights=False))
    assert model.stack.pattern[0].attention.scale == 1.0
    assert families.export_config(model)[0]["scale_attn_weights"] is False


# ---- files


def check_headers(folder: Path) -> None:
    """Check all tensor headers, as startup does."""
    model, family = families.load_model_config(folder)
    check_tensors(Directory(folder), family.instantiate(), model.instantiate())


def test_a_tied_head_is_the_embedding(tmp_path):
    tensors = make_tensors("qwen2-tied")
    table = tensors["model.embed_tokens.weight"]
    write(tmp_path, "qwen2-tied")
    save_file({**tensors, "lm_head.weight": table.copy()}, tmp_path / "model.safetensors")
    check_headers(tmp_path)
    other = table.copy()
    other[-1, -1] += 1e-3
    for head in (other, table[:-1].copy()):
        save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"tie_word_embeddings = true, but lm_head\.weight differs"):
            check_headers(tmp_path)


def test_a_head_has_no_prefix(tmp_path):
    """Other tensors may omit the prefix, such as `norm.weight` for `model.norm.weight`, but `weight` is not a head."""
    write(tmp_path, "llama")
    tensors = {name.removeprefix("model."): array for name, array in make_tensors("llama").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    check_headers(tmp_path)
    save_file({"weight": tensors.pop("lm_head.weight"), **tensors}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing +lm_head\.weight(.|\n)*unexpected +weight"):
        check_headers(tmp_path)


def test_a_single_file_goes_before_an_index(tmp_path):
    """As in transformers: saving a model again leaves the shards of the first save behind."""
    tensors = make_tensors("llama")
    write(tmp_path, "llama")
    save_file(tensors, tmp_path / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    save_file({name: 2 * array for name, array in tensors.items()}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    for file in (shard, "nowhere.safetensors"):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
        directory = Directory(tmp_path)
        for name, array in tensors.items():
            np.testing.assert_array_equal(directory.tensor(name)[:], array)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_non_float_weights_are_refused(dtype, tmp_path):
    write(tmp_path, "llama")
    save_file(
        {name: array.astype(dtype) for name, array in make_tensors("llama").items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"dtype +model\.embed_tokens\.weight .*expected one of F32, BF16, F16, F64"):
        check_headers(tmp_path)


def test_adapter_next_to_a_model_is_refused(tmp_path):
    write(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter next to a model"):
        families.load_model_config(tmp_path)


@pytest.mark.parametrize("shape", FAMILIES)
def test_fields_ignored_by_transformers_are_accepted(shape, tmp_path):
    harmless = {
        "_name_or_path": "x",
        "unsloth_fixed": True,
        "pretraining_tp": 2,
        "is_causal": True,
        "text_config": None,
    }
    harmless |= {
        "quantization_config": None,
        "rope_parameters": {},
        "rope_scaling": base_facts(shape).get("rope_scaling"),
    }
    plain, more = ({**base_facts(shape), **fields} for fields in ({}, harmless))
    (tmp_path / "config.json").write_text(json.dumps(more))
    model, _ = families.load_model_config(tmp_path)
    assert families.export_config(model, plain)[0] == plain


def write_multimodal(folder: Path, outside: dict[str, Any], **changes: Any) -> Path:
    """Write the config.json of a Qwen3.5 that reads images too, with fields of its language model changed."""
    facts = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    text = {name: value for name, value in {**base_facts("qwen3.5"), **changes}.items() if name != "architectures"}
    (folder / "config.json").write_text(json.dumps({**facts, "text_config": text, **outside}))
    return folder


def test_language_model_of_a_multimodal_model_is_read(tmp_path: Path):
    expected, _ = families.load_model_config(write(tmp_path, "qwen3.5"))
    read, _ = families.load_model_config(write_multimodal(tmp_path, {"tie_word_embeddings": False}))
    assert read == expected


@pytest.mark.parametrize(
    ("outside", "changes", "message"),
    [
        ({"text_config": None}, {}, "text_config = None; expected the fields of the language model"),
        ({"tie_word_embeddings": True}, {}, r"text_config\.tie_word_embeddings = False; expected the same as outside"),
        ({}, {"model_type": "qwen3_5_moe_text"}, r"text_config\.model_type = .*; expected 'qwen3_5_text'"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "quantization_config = .*awq.*; expected null"),
        ({}, {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ],
)
def test_refused_fields_of_a_multimodal_model(tmp_path: Path, outside, changes, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        families.load_model_config(write_multimodal(tmp_path, outside, **changes))
