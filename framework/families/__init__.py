"""Published models: one file per family maps config.json and tensor names to ours, and back.

To add a family, add a file to this folder, see docs/models.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config, ConfigError, config_for, get_target
from plimsoll.framework.families import scores
from plimsoll.framework.families.approximate import ApproximateDecoder, describe_shape, select_text_part
from plimsoll.framework.families.facts import UNREAD, ConfigFacts, float_dtype, refuse_unread
from plimsoll.framework.families.published import model_at
from plimsoll.framework.families.registry import FAMILIES
from plimsoll.framework.files import hub_models
from plimsoll.framework.files.hub_names import is_hub_url
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.weights.directory import Directory
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.pretrained import Pretrained


def read_config(path: str | Path) -> tuple[dict[str, object], Config]:
    """Read the config.json of a directory, or of a model on the Hub.

    Args:
        path: a directory, hf://ORG/NAME@COMMIT, or shape:ORG/NAME of the table of published models.

    Returns:
        (its JSON, the config of its family).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, requires running its own code, or has an unknown architecture.
    """
    known_model = model_at(path)
    if known_model is not None:
        return known_model.config, config_for(find_family(known_model.config))
    file = hub_models.folder(path) / "config.json"
    if not file.is_file():
        expected = "a directory as Hugging Face's save_pretrained writes it, or the Hub's ORG/NAME"
        raise FileNotFoundError(f"no file {file}: expected {expected}")
    facts = _read_json_object(file)
    adapter = file.with_name("adapter_config.json")
    if adapter.is_file():
        raise ValueError(
            f"{adapter}: an adapter next to a model, which transformers would load with it; "
            "merge it into the model, or pass a directory that has only the model"
        )
    try:
        facts = _select_language_model(facts)
        family = find_family(facts)
        if "auto_map" in facts and not family.has_custom_code:
            raise ValueError(
                "it requires its own code (auto_map), which is never executed; expected an architecture of transformers"
            )
        # transformers has these architectures too, and uses its own code for them.
        facts = {name: value for name, value in facts.items() if name != "auto_map"}
        refuse_unread(ConfigFacts(facts))
        return facts, config_for(family)
    except ValueError as error:
        # The errors of ConfigFacts name the file without its folder.
        message = str(error).removeprefix("config.json: ")
        raise ValueError(f"{file}: {message}") from None


def generation_facts(path: str | Path) -> dict[str, object]:
    """Read the generation_config.json of a directory; empty if there is none, as for a shape.

    Raises:
        ValueError: it is not a JSON object.
    """
    if model_at(path) is not None:
        return {}
    file = hub_models.folder(path) / "generation_config.json"
    if not file.is_file():
        return {}
    return _read_json_object(file)


def _read_json_object(file: Path) -> dict[str, object]:
    try:
        facts = parse_json(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{file}: expected a JSON object, given {type(facts).__name__}")
    return facts


def _select_language_model(facts: dict[str, object]) -> dict[str, object]:
    """Return the config.json of the language model of a model that reads images too; any other one unchanged.

    Raises:
        ValueError: the two parts contradict each other.
    """
    language_model = None
    for family in FAMILIES:
        for name, language_name in family.multimodal.items():
            if facts.get("architectures") == [name]:
                language_model = {"architectures": [language_name], "model_type": family.architectures[language_name]}
    if language_model is None:
        return facts
    text_part = ConfigFacts(facts).part("text_config")
    if text_part is None:
        raise ConfigFacts(facts).error("text_config", "the fields of the language model")
    expected_type = language_model["model_type"]
    if text_part.text("model_type", expected_type) != expected_type:
        raise text_part.error("model_type", repr(expected_type))
    # transformers reads only text_config, as long as it builds no more than the language model.
    if facts.get("tie_word_embeddings") is True and text_part.values.get("tie_word_embeddings") is not True:
        raise text_part.error("tie_word_embeddings", "the same as outside of text_config, true")
    # How the weights are stored is written outside.
    outside = {name: value for name, value in facts.items() if name in UNREAD and name != "text_config"}
    return {**outside, **text_part.values, **language_model}


def find_family(facts: dict[str, object]) -> type[ModelFamily]:
    """Return the family of a config.json, by its architectures.

    Raises:
        ValueError: the architecture is unknown, there are several, or model_type, by which transformers chooses,
            belongs to another one.
    """
    # A model that scores sequences belongs to the family of its language model.
    facts = scores.language_facts(facts)
    architectures = facts.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"architectures = {architectures!r}; expected a list of names")
    family_by_name: dict[str, type[ModelFamily]] = {}
    for family in FAMILIES:
        for name in family.architectures:
            family_by_name[name] = family
    supported = [name for name in architectures if name in family_by_name]
    if not supported:
        unsupported_names = ", ".join(architectures) or None
        known_names = [*family_by_name, *(name for family in FAMILIES for name in family.multimodal)]
        raise ValueError(f"unknown architecture {unsupported_names}; known: {', '.join(known_names)}")
    if len(architectures) > 1:
        raise ValueError(f"architectures = {architectures!r}; expected one")
    architecture = supported[0]
    family = family_by_name[architecture]
    expected_type = family.architectures[architecture]
    model_type = facts.get("model_type", expected_type)
    if model_type != expected_type:
        raise ValueError(f"model_type = {model_type!r}; expected {expected_type!r}, that of {architecture}")
    return family


def build_pretrained_configs(path: str | Path) -> tuple[Config, Config]:
    """Build the configs of a published model and of its weights.

    Args:
        path: see `read_config`.

    Returns:
        (config of the model, config of its `Pretrained` weights).

    Raises:
        FileNotFoundError, ValueError: see `load_model_config`.
    """
    facts, _ = read_config(path)
    model, family = load_model_config(path)
    generation = generation_facts(path)
    return model, config_for(Pretrained, path=str(path), family=family, facts=facts, generation=generation)


def build_shape_configs(path: str | Path) -> tuple[Config, Config]:
    """Like `build_pretrained_configs`, but of a model that we cannot train, describe the shape approximately.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: config.json is not JSON, or lacks a size that a plan needs.
    """
    try:
        return build_pretrained_configs(path)
    except ValueError as error:
        file = hub_models.folder(path) / "config.json"
        if not file.is_file():
            raise
        reason = str(error).removeprefix(f"{file}: ")
        facts = select_text_part(_read_json_object(file))
        family = config_for(ApproximateDecoder, reason=reason)
        try:
            model = family.instantiate().model(facts)
        except ValueError as no_shape:
            # The message of the other error lists all architectures.
            unknown = reason.partition("; known: ")[0]
            raise ValueError(f"{file}: {unknown}; for a plan of its shape, {no_shape}") from None
        model.param_dtype = model.compute_dtype = "bfloat16"
        facts = {name: value for name, value in facts.items() if name != "auto_map"}
        return model, config_for(Pretrained, path=str(path), family=family, facts=facts)


def is_approximate(config: Config) -> bool:
    """Return whether an experiment's model has the approximate shape of a published model that we cannot train."""
    pretrained = config.pretrained
    return pretrained is not None and pretrained.takes("family") and get_target(pretrained.family) is ApproximateDecoder


def describe_approximation(config: Config) -> list[str]:
    """Return the lines that a plan prints about an approximate shape; none for any other experiment."""
    if not is_approximate(config):
        return []
    return describe_shape(config.pretrained.facts, config.pretrained.family.reason)


def load_model_config(path: str | Path) -> tuple[Config, Config]:
    """Build our config of the model in a directory.

    Args:
        path: see `read_config`.

    Returns:
        (the model's config, its family's config).

    Raises:
        FileNotFoundError: as from `read_config`.
        ValueError: as from `read_config`, or a field is missing or requires something that we cannot compute.
    """
    facts, family = read_config(path)
    try:
        model = build_model_config(family.instantiate(), facts)
        dtype = float_dtype(ConfigFacts(facts))
    except ValueError as error:
        raise ValueError(str(error).replace("config.json", f"{path}/config.json", 1)) from None
    # Without a dtype in config.json, use the dtype of the first tensor.
    stored_dtype = _read_first_dtype(path) if dtype is None else None
    if stored_dtype is not None:
        dtype = {"F32": "float32", "F64": "float32", "F16": "float16"}.get(stored_dtype)
    if dtype == "float16" and not family.instantiate().takes_float16:
        given = f"{path}: tensors in float16" if stored_dtype else f"{path}/config.json: dtype = 'float16'"
        raise ValueError(f"{given}; expected float32 or bfloat16: transformers would keep norms in float32")
    # Files in float64 are trained in float32. Those in float16 are trained in bfloat16, whose range makes loss
    # scaling unnecessary.
    is_wide = dtype in ("float32", "float64")
    model.param_dtype = model.compute_dtype = "float32" if is_wide else "bfloat16"
    return model, family


def build_model_config(family: ModelFamily, facts: dict[str, object]) -> Config:
    """Return the config of the model that a config.json describes, including models that score sequences.

    Args:
        family: the model's family.
        facts: its config.json.

    Raises:
        ValueError: as from `ModelFamily.model`, or the labels cannot be read.
    """
    model = family.model(scores.language_facts(facts))
    if not scores.is_scored(facts):
        return model
    return scores.with_score_head(model, len(scores.label_names(facts)))


def _read_first_dtype(path: str | Path) -> str | None:
    """Return safetensors' name of the first tensor's dtype; None for a directory without weights."""
    if model_at(path) is not None:
        return None
    if hub_models.has_weights(path):
        directory = Directory(path)
        first_name = next(iter(directory.home))
        return directory.tensor(first_name).get_dtype()
    if is_hub_url(str(path)):
        return hub_models.first_dtype(str(path))
    return None


def export_config(model: Config, published: dict[str, object] | None = None) -> tuple[dict[str, Any], ModelFamily]:
    """Find the config.json and the family of one of our models.

    Args:
        model: the model's resolved config.
        published: config.json that the model came from, if any. It is returned if it still describes the model.

    Returns:
        (config.json, family).

    Raises:
        ValueError: no family has such models. The message lists the differences from the nearest family.
    """
    fewest_differences: list[str] | None = None
    is_scored = scores.has_score_head(model)
    language_model = scores.with_language_head(model) if is_scored else model
    # Try the published file first, in all families: it may hold fields that we do not write, and fused tensors, where
    # another family stores the same model in different files.
    candidates = (published, None) if published else (None,)
    facts: dict[str, object] = {}
    for candidate in candidates:
        for family_class in FAMILIES:
            family = family_class()
            try:
                facts = candidate or family.facts(language_model)
                if is_scored:
                    facts = scores.add_score_head_facts(facts, model.head.num_labels)
                differences = _find_differences(model, build_model_config(family, facts))
            # The model does not even have the same layers, which counts as more than any number of differences.
            except (ConfigError, KeyError, ValueError) as error:
                differences = [str(error)] * 100
            if not differences:
                return facts, family
            if fewest_differences is None or len(differences) < len(fewest_differences):
                fewest_differences = differences
    # The dict removes duplicates and keeps the order.
    distinct_differences = dict.fromkeys(fewest_differences or [])
    raise ValueError(f"no family of framework/families has models with {', '.join(distinct_differences)}")


# Endings of fields that change training, or how a result is computed, but not the result.
_TRAINING = (
    "dropout",
    "unroll",
    "chunk_tokens",
    "z_loss",
    "implementation",
    "depth_scaled_init",
    "dtype",
    "router.balance",
    "router.balance_over",
    "router.expert_metrics",
    "router.jitter",
    "router.z",
    # A config.json has both factor lists of longrope.
    "rotary.scaling.use",
)
# The beginnings of such fields: the loss of a head, 8-bit products, and adapters, which have a file of their own or are
# merged into the weights.
_TRAINING_SECTIONS = ("head.objective", "precision", "lora")


def _find_differences(model: Config, described: Config) -> list[str]:
    """Return the fields that determine a model's computation and differ from those of a described model."""
    model_fields = _select_computing_fields(model)
    described_fields = _select_computing_fields(described)
    differences = []
    for path in model_fields | described_fields:
        if model_fields.get(path) != described_fields.get(path):
            differences.append(f"{path} = {model_fields.get(path)}")
    return differences


def _select_computing_fields(config: Config) -> dict[str, object]:
    """Return {path: value} of the fields that determine a model's computation."""
    fields = {}
    for path, value in config.leaves():
        is_training = path.startswith(_TRAINING_SECTIONS) or path.endswith(_TRAINING) or ".init" in f".{path}"
        if not is_training:
            fields[path] = value
    return fields
