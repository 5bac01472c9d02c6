"""Published models: one file per family maps config.json and the names of tensors to ours, and back.

To add one, see docs/models.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.families.facts import Facts, float_dtype, refuse_unread
from configs.families.gemma import Gemma2
from configs.families.gpt2 import GPT2
from configs.families.llama import Llama
from framework.config import Config, ConfigError, config_for
from framework.weights.pretrained import Directory, Family

FAMILIES: list[type[Family]] = [Llama, Gemma2, GPT2]
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "GPT2LMHeadModel": "gpt2",
}


def read(path: str | Path) -> tuple[dict[str, Any], Config]:
    """(config.json of a directory, its family's config).

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON, wants code of its own to be run, or is of an unknown architecture.
    """
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}: expected a directory as Hugging Face's save_pretrained writes it")
    try:
        facts = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{file}: expected a JSON object, given {type(facts).__name__}")
    if "auto_map" in facts:
        raise ValueError(f"{file} asks for code of its own (auto_map); code of a directory is never executed")
    if (adapter := file.with_name("adapter_config.json")).is_file():
        raise ValueError(
            f"{adapter}: an adapter beside a model, which transformers would load with it; merge it into the model, or "
            "give the directory of the model alone"
        )
    try:
        family = family_of(facts)
        refuse_unread(Facts(facts))
        return facts, config_for(family)
    except ValueError as error:
        raise ValueError(f"{file}: {str(error).removeprefix('config.json: ')}") from None


def generation_facts(path: str | Path) -> dict[str, Any]:
    """generation_config.json of a directory, empty if there is none. Raises ValueError: it is no JSON object."""
    file = Path(path).expanduser() / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        facts = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{file}: expected a JSON object, given {type(facts).__name__}")
    return facts


def family_of(facts: dict[str, Any]) -> type[Family]:
    """By config.json's architectures. Raises ValueError for unknown ones, several, and where model_type, by which
    transformers chooses, is of another."""
    wanted = facts.get("architectures") or []
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise ValueError(f"architectures = {wanted!r}; expected a list of names")
    by_name = {name: family for family in FAMILIES for name in family.architectures}
    known = [name for name in wanted if name in by_name]
    if not known:
        raise ValueError(f"unknown architecture {', '.join(wanted) or None}; known: {', '.join(by_name)}")
    if len(wanted) > 1:
        raise ValueError(f"architectures = {wanted!r}; expected one")
    model_type = MODEL_TYPES[known[0]]
    if (given := facts.get("model_type", model_type)) != model_type:
        raise ValueError(f"model_type = {given!r}; expected {model_type!r}, that of {known[0]}")
    return by_name[known[0]]


def model_of(path: str | Path) -> tuple[Config, Config]:
    """(our model's config, its family's) of a directory's config.json. Raises as `read`, and ValueError for a field
    that is missing or asks for what we cannot compute."""
    facts, family = read(path)
    try:
        model = family.instantiate().model(facts)
        dtype = float_dtype(Facts(facts))
    except ValueError as error:
        raise ValueError(str(error).replace("config.json", f"{path}/config.json", 1)) from None
    if dtype is None and list(Path(path).expanduser().glob("*.safetensors")):
        directory = Directory(path)
        dtype = {"F32": "float32", "F64": "float32"}.get(directory.tensor(next(iter(directory.home))).get_dtype())
    is_wide = dtype in ("float32", "float64")
    model.param_dtype = model.compute_dtype = "float32" if is_wide else "bfloat16"
    return model, family


def of_model(model: Config, published: dict[str, Any] | None = None) -> tuple[dict[str, Any], Family]:
    """(config.json, family) of a model of ours.

    Args:
        model: resolved.
        published: the config.json that it came from, if it did: the answer, as long as it still describes the model.

    Raises:
        ValueError: no family has such models; says what is wrong with the nearest.
    """
    nearest: list[str] | None = None
    for kind in FAMILIES:
        family = kind()
        for given in (published, None) if published else (None,):
            try:
                facts = given or family.facts(model)
                wrong = _differences(model, family.model(facts))
            except (ConfigError, KeyError, ValueError) as error:  # not even the same layers
                wrong = [str(error)] * 100
            if not wrong:
                return facts, family
            nearest = wrong if nearest is None or len(wrong) < len(nearest) else nearest
    raise ValueError(f"no family of configs/families has models with {', '.join(dict.fromkeys(nearest or []))}")


_TRAINING = ("dropout", "unroll", "chunk_tokens", "z_loss", "implementation", "depth_scaled_init", "dtype")


def _differences(model: Config, other: Config) -> list[str]:
    """The fields that decide what a model computes, and differ."""

    def fields(config: Config) -> dict[str, Any]:
        leaves = {path: value for path, value in config.leaves() if not path.startswith("lora")}
        return {path: v for path, v in leaves.items() if not path.endswith(_TRAINING) and ".init" not in f".{path}"}

    ours, theirs = fields(model), fields(other)
    return [f"{path} = {ours.get(path)}" for path in ours | theirs if ours.get(path) != theirs.get(path)]
