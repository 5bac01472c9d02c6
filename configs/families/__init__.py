"""Published models: one file per family maps config.json and the names of tensors to ours, and back.

To add one, see docs/models.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.families.gemma import Gemma2
from configs.families.gpt2 import GPT2
from configs.families.llama import Llama
from framework.config import Config, ConfigError, config_for
from framework.pretrained import Directory, Family

FAMILIES: list[type[Family]] = [Llama, Gemma2, GPT2]


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
    if "auto_map" in facts:
        raise ValueError(f"{file} asks for code of its own (auto_map); code of a directory is never executed")
    try:
        return facts, config_for(family_of(facts))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


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
    """By config.json's architectures. Raises ValueError for unknown ones."""
    wanted = facts.get("architectures") or []
    for family in FAMILIES:
        if set(wanted) & set(family.architectures):
            return family
    known = [name for family in FAMILIES for name in family.architectures]
    raise ValueError(f"unknown architecture {', '.join(wanted) or None}; known: {', '.join(known)}")


def model_of(path: str | Path) -> tuple[Config, Config]:
    """(our model's config, its family's) of a directory's config.json. Raises as `read`, and ValueError for a field
    that is missing or asks for what we cannot compute."""
    facts, family = read(path)
    try:
        model = family.instantiate().model(facts)
    except KeyError as error:
        raise ValueError(f"{path}/config.json: no field {error}, which {facts['architectures'][0]} needs") from None
    dtype = facts.get("dtype") or facts.get("torch_dtype")
    if dtype is None and list(Path(path).expanduser().glob("*.safetensors")):
        directory = Directory(path)
        dtype = {"F32": "float32"}.get(directory.tensor(next(iter(directory.home))).get_dtype())
    model.param_dtype = model.compute_dtype = "float32" if dtype == "float32" else "bfloat16"
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
