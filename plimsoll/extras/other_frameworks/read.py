"""Reads the files of another framework's run: detects the framework by their content, and returns a `ForeignRun`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from plimsoll.extras.other_frameworks import axolotl, huggingface, maxtext, megatron, sharding, torchtitan
from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError, ForeignRun
from plimsoll.extras.other_frameworks.shell_script import UNSET, Script, check_set, parse_flags, read_script

Format = Literal["JSON", "TOML", "YAML", "shell script"]
_SECTION = re.compile(r"^\s*\[\[?[\w.]+\]\]?\s*(#.*)?$", re.MULTILINE)
_WORD = re.compile(r"(\w+)=(.*)", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
# Flags of scripts whose variables must have values.
_NEEDED = (
    *("model_name_or_path", "model", "model_name", "zero_stage", "max_seq_len", "max_length", "deepspeed_config"),
    *("per_device_train_batch_size", "batch_size"),
)
# Values of a YAML file, with those that aliases repeat.
_LARGEST_YAML = 100_000
# Folders above a file in which the files that it names are looked for.
_PARENTS = 6


@dataclass
class ForeignFile:
    """A file of a run.

    Attributes:
        path: its location.
        format: how it is written.
        values: its settings by name.
        script: commands of a shell script.
    """

    path: Path
    format: Format
    values: dict[str, Any] = field(default_factory=dict)
    script: Script | None = None


def read_run(paths: Sequence[Path], words: Sequence[str] = (), devices: int | None = None) -> ForeignRun:
    """Read a run from its files, and from arguments that override them.

    Args:
        paths: files; of Hugging Face runs, a recipe and the DeepSpeed or accelerate file.
        words: arguments in the framework's own syntax, and NAME=VALUE, which sets a variable of a script or a setting
            of MaxText.
        devices: number of devices of the target; None takes the files'.

    Raises:
        ForeignConfigError: a file cannot be read, the framework is unknown, or a setting is missing or invalid.
    """
    flags, variables = _split_words(words)
    files = [load_file(path, variables) for path in paths]
    settings_files = [file for file in files if not _is_sharding(file)]
    shards = [file for file in files if _is_sharding(file)]
    if len(settings_files) > 1 and not all(maxtext.is_config(file.values) for file in settings_files):
        names = ", ".join(str(file.path) for file in settings_files)
        raise ForeignConfigError(f"{names}: each describes a run; expected one of them")
    file = settings_files[0] if settings_files else shards[0]
    name = str(file.path)
    if file.script is not None:
        return _read_script(file, flags, variables, shards, devices)
    values: dict[str, Any] = {}
    for one in settings_files:
        values |= one.values
    unused = {key: value for key, value in variables.items() if key not in values}
    if megatron_values := _find_megatron(values):
        _refuse_variables(unused, name)
        return megatron.read(megatron_values | flags, name, devices)
    if torchtitan.is_config(values):
        _refuse_variables(unused, name)
        return torchtitan.read(_flatten(values) | flags, name, devices)
    if axolotl.is_config(values):
        _refuse_variables(unused, name)
        divided = _find_sharding(file, values | flags, shards)
        return axolotl.read(values | flags, name, devices, divided)
    if not settings_files or huggingface.is_recipe(values):
        _refuse_variables(unused, name)
        divided = _find_sharding(file, values | flags, shards)
        prepared = _load_fsdp_config(file, _prepare_recipe(values, flags))
        return huggingface.read(prepared, name, devices, divided)
    if maxtext.is_config(values):
        return maxtext.read(_load_base(file, values, []) | flags | variables, name, devices)
    raise ForeignConfigError(
        f"{name}: {file.format} that is of no framework known here; read are Megatron-LM, NeMo, torchtitan, DeepSpeed, "
        f"Hugging Face (TRL, Trainer, accelerate), axolotl and MaxText. Its first names: {', '.join(list(values)[:6])}"
    )


def load_file(path: Path, variables: Mapping[str, str] | None = None) -> ForeignFile:
    """Parse a file by its content.

    Args:
        path: the file.
        variables: variables of a shell script, by name.

    Raises:
        ForeignConfigError: there is no such file, or it has no format that is known here.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ForeignConfigError(f"--from={path}: no such file") from None
    except IsADirectoryError:
        raise ForeignConfigError(f"--from={path}: a folder; expected the file of a run") from None
    except (UnicodeDecodeError, OSError) as error:
        raise ForeignConfigError(f"--from={path}: cannot be read as text: {error}") from None
    if not text.strip():
        raise ForeignConfigError(f"--from={path}: the file is empty")
    if text.lstrip().startswith("{"):
        return ForeignFile(path, "JSON", _check_object(_parse_json(text, path), path, "JSON"))
    if path.suffix == ".py":
        raise ForeignConfigError(
            f"--from={path}: Python, which is not executed; expected YAML, TOML, JSON or a shell script"
        )
    if text.startswith("#!") or path.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        return ForeignFile(path, "shell script", script=read_script(text, str(path), variables, path.resolve().parent))
    if path.suffix == ".toml" or (_SECTION.search(text) and "=" in text and path.suffix not in (".yaml", ".yml")):
        try:
            return ForeignFile(path, "TOML", tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ForeignConfigError(f"--from={path}: not valid TOML: {error}") from None
    if path.suffix not in (".yaml", ".yml") and re.search(r"(^|\s)--[a-z][\w-]+", text):
        return ForeignFile(path, "shell script", script=read_script(text, str(path), variables, path.resolve().parent))
    return ForeignFile(path, "YAML", _check_object(_parse_yaml(text, path), path, "YAML"))


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if path.suffix == ".jsonl":
            raise ForeignConfigError(
                f"--from={path}: rows of data; expected the config or script of a run in YAML, TOML, JSON or shell "
                "(--data takes data)"
            ) from None
        raise ForeignConfigError(f"--from={path}: not valid JSON: {error}") from None
    except RecursionError:
        raise ForeignConfigError(f"--from={path}: JSON that is nested too deeply") from None


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    # A ValueError comes from a date such as 2020-13-45.
    except (yaml.YAMLError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ForeignConfigError(f"--from={path}: not valid YAML: {message[:200]}") from None
    except RecursionError:
        raise ForeignConfigError(f"--from={path}: YAML that is nested too deeply") from None
    if len(documents) > 1:
        raise ForeignConfigError(f"--from={path}: {len(documents)} YAML documents; expected one")
    return documents[0] if documents else {}


class _Loader(yaml.SafeLoader):
    """YAML as data only; numbers such as 2e-5 are numbers, and values with unknown tags are None."""

    def construct_document(self, node: yaml.Node) -> Any:
        # References to references let a short file stand for more values than memory holds.
        if _count_nodes(node, {}) > _LARGEST_YAML:
            raise yaml.YAMLError(f"its aliases (*name) repeat values, in all more than {_LARGEST_YAML:,}")
        return super().construct_document(node)


def _count_nodes(node: Any, counts: dict[int, int]) -> int:
    """Return the number of values in a node, each counted as often as an alias repeats it; `counts` has known ones."""
    if not isinstance(node, yaml.CollectionNode):
        # A mapping has pairs of nodes.
        return sum(_count_nodes(part, counts) for part in node) if isinstance(node, tuple) else 1
    if id(node) not in counts:
        # Readers stop where a node contains itself.
        counts[id(node)] = 1
        counts[id(node)] = 1 + sum(_count_nodes(part, counts) for part in node.value)
    return counts[id(node)]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _check_object(content: Any, path: Path, kind: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ForeignConfigError(
            f"--from={path}: {kind} of a {type(content).__name__}; expected settings by name: YAML, TOML, JSON or a "
            "shell script"
        )
    return {str(name): value for name, value in content.items()}


def _split_words(words: Sequence[str]) -> tuple[dict[str, str | bool], dict[str, str]]:
    """Return (flags, variables) of the arguments after the files.

    Raises:
        ForeignConfigError: a word is neither a flag nor NAME=VALUE.
    """
    variables = {}
    rest: list[str] = []
    for index, word in enumerate(words):
        match = _WORD.fullmatch(word)
        # The value of the flag before it may contain an equals sign.
        if match is not None and not (index and words[index - 1].startswith("--") and "=" not in words[index - 1]):
            variables[match[1]] = match[2]
        else:
            rest.append(word)
    if rest and not rest[0].startswith("--"):
        raise ForeignConfigError(f"--from: {rest[0]!r} is neither a file, nor a flag, nor NAME=VALUE")
    return parse_flags(rest, "--from"), variables


def _refuse_variables(variables: Mapping[str, str], name: str) -> None:
    if variables:
        word = next(iter(variables))
        raise ForeignConfigError(f"{name}: {word}={variables[word]} sets no variable of this file; write --{word}=...")


def _is_sharding(file: ForeignFile) -> bool:
    """Return whether a file only describes how the state is divided."""
    values = file.values
    if huggingface.is_recipe(values) or axolotl.is_config(values):
        return False
    return sharding.is_deepspeed(values) or sharding.is_accelerate(values)


def _find_sharding(file: ForeignFile, values: Mapping[str, Any], shards: Sequence[ForeignFile]) -> sharding.Sharding:
    """Return how the state is divided: by the files that were given, or by the file that a recipe names."""
    found = sharding.Sharding()
    given = list(shards)
    named = values.get("deepspeed") or values.get("deepspeed_config")
    if isinstance(named, str) and not given:
        path = _find_file(file.path, named)
        if path is not None:
            given.append(load_file(path))
        elif "base_model" not in values:
            raise ForeignConfigError(f"{file.path}: deepspeed names {named}, which was not found; give that file too")
    elif isinstance(named, dict):
        given.append(ForeignFile(file.path, file.format, dict(named)))
    for one in given:
        if sharding.is_accelerate(one.values):
            read = sharding.read_accelerate(_without_named_file(one, given), str(one.path))
            # A DeepSpeed file next to it has the details.
            found = read if found.kind == "ddp" else replace(found, devices=read.devices or found.devices)
        else:
            read = sharding.read_deepspeed(one.values, str(one.path))
            found = replace(read, devices=found.devices)
    return found


def _without_named_file(file: ForeignFile, given: Sequence[ForeignFile]) -> dict[str, Any]:
    """Return accelerate's settings, without the name of a DeepSpeed file if that file was given."""
    section = dict(file.values.get("deepspeed_config") or {})
    if "deepspeed_config_file" in section and any(sharding.is_deepspeed(one.values) for one in given):
        del section["deepspeed_config_file"]
        return {**file.values, "deepspeed_config": section}
    return file.values


def _find_file(near: Path, name: str) -> Path | None:
    """Return a file that another file names, relative to the folders above that file; None if it is not there."""
    wanted = Path(name)
    if wanted.is_absolute():
        return wanted if wanted.is_file() else None
    for folder in list(near.resolve().parents)[:_PARENTS]:
        if (folder / wanted).is_file():
            return folder / wanted
    return None


def _find_megatron(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments in a YAML file; {} if there are none."""
    if isinstance(values.get("MODEL_ARGS"), dict):
        return {str(name).lstrip("-").replace("-", "_"): value for name, value in values["MODEL_ARGS"].items()}
    if megatron.is_arguments(values):
        return dict(values)
    model = values.get("model")
    if isinstance(model, dict) and megatron.is_arguments(model):
        return megatron.read_nemo(_resolve(values))
    return {}


def _resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with references such as ${model.hidden_size} replaced by the values that they name."""

    def find(path: str) -> Any:
        found: Any = values
        for name in path.lstrip(".").split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: resolve(part) for name, part in value.items()}
        match = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            # A relative reference is to the section around it; only those to the model are needed.
            found = find(match[1]) if find(match[1]) is not None else find(f"model.{match[1].lstrip('.')}")
            return value if found is None or isinstance(found, dict) else found
        return value

    return {name: resolve(value) for name, value in values.items()}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"section.field": value} of nested sections."""
    flat = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            flat |= _flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def _prepare_recipe(values: Mapping[str, Any], flags: Mapping[str, str | bool]) -> dict[str, Any]:
    """Return the settings of a recipe; those of DeepSpeed's file that the Trainer knows too have its names."""
    prepared = dict(values) if huggingface.is_recipe(values) else {}
    return {**prepared, **flags}


def _load_fsdp_config(file: ForeignFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe, with the content of `fsdp_config` if that is JSON or names a file.

    Raises:
        ForeignConfigError: the file was not found, or has no settings by name.
    """
    named = values.get("fsdp_config")
    # Without `fsdp`, the Trainer does not read it either.
    if not isinstance(named, str) or not huggingface.has_fsdp(values):
        return dict(values)
    if named.lstrip().startswith("{"):
        return {**values, "fsdp_config": _check_object(_parse_json(named, file.path), file.path, "JSON")}
    path = _find_file(file.path, named)
    if path is None:
        raise ForeignConfigError(
            f"{file.path}: fsdp_config names {named}, which was not found; expected a JSON or YAML file, relative to "
            "this file"
        )
    return {**values, "fsdp_config": load_file(path).values}


# --- shell scripts ---------------------------------------------------------------------------------------------------


def _read_script(
    file: ForeignFile,
    flags: Mapping[str, str | bool],
    variables: Mapping[str, str],
    shards: Sequence[ForeignFile],
    devices: int | None,
) -> ForeignRun:
    """Read the command of a script that trains.

    Raises:
        ForeignConfigError: there is none, or it has variables without values.
    """
    script = file.script
    assert script is not None
    name = str(file.path)
    candidates = [*script.commands, _collect_flags(script)]
    for words in candidates:
        found = parse_flags(words, name)
        if megatron.is_arguments(found) and megatron.is_training(found):
            return megatron.read({**_with_counts(found, script), **flags}, name, devices)
        settings = _read_maxtext_words(words)
        if _is_maxtext_command(words, settings):
            base = _load_base(file, {}, words)
            return maxtext.read({**base, **settings, **flags, **variables}, name, devices)
        if "base_model" in found:
            return axolotl.read({**found, **flags}, name, devices, _find_sharding(file, {**found, **flags}, shards))
        if "actor_model_name_or_path" in found:
            raise ForeignConfigError(f"{name}: a run that generates answers between its steps (PPO, GRPO) is not read")
        is_run = "model_name_or_path" in found
        is_run = is_run or (("model" in found or "model_name" in found) and _has_batch(found))
        if is_run:
            for setting, value in found.items():
                if isinstance(value, str) and setting in _NEEDED:
                    check_set(value, setting, name)
            merged = {key: value for key, value in {**found, **flags}.items() if UNSET not in str(value)}
            named = merged.get("deepspeed")
            if named is True or not isinstance(named, str):
                merged.pop("deepspeed", None)
            merged = _load_fsdp_config(file, merged)
            here = _find_here_document(file, merged)
            return huggingface.read(merged, name, devices, _find_sharding(file, merged, [*shards, *here]))
    unset = ", ".join(f"${variable}" for variable in list(script.unset)[:4])
    hint = f"; it reads {unset}, which it does not set: give NAME=VALUE after the file" if unset else ""
    raise ForeignConfigError(
        f"{name}: no command that trains a model of Megatron-LM, MaxText, Hugging Face or DeepSpeed{hint}"
    )


def _collect_flags(script: Script) -> list[str]:
    """Return the flags in all variables, for scripts that only set them for another script."""
    words: list[str] = []
    for value in script.variables.values():
        parts = value.split()
        if parts and parts[0].startswith("--"):
            words += parts
    return words


def _with_counts(found: dict[str, str | bool], script: Script) -> dict[str, Any]:
    """Add the number of processes that a script's variables state, if its launcher does not."""
    counted: dict[str, Any] = dict(found)
    names = {
        "nproc_per_node": ("GPUS_PER_NODE", "NPROC_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        "nnodes": ("NUM_NODES", "NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    }
    for flag, variables in names.items():
        for variable in variables:
            value = script.variables.get(variable, "")
            if flag not in counted and value.isdecimal():
                counted[flag] = value
        if UNSET in str(counted.get(flag, "")):
            del counted[flag]
    return counted


def _read_maxtext_words(words: Sequence[str]) -> dict[str, Any]:
    """Return {setting: value} of the words key=value of a MaxText command."""
    settings: dict[str, Any] = {}
    for word in words:
        match = re.fullmatch(r"([a-z]\w*)=(.*)", word, re.DOTALL)
        if match is not None:
            settings[match[1]] = match[2]
    return settings


def _is_maxtext_command(words: Sequence[str], settings: Mapping[str, Any]) -> bool:
    is_program = any(re.search(r"maxtext|\btrain(_compile)?\.py|base\.yml", word, re.IGNORECASE) for word in words)
    return is_program and any(word.endswith(".yml") for word in words) and bool(settings)


def _load_base(file: ForeignFile, values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of MaxText files that a file or command builds on, without base.yml, whose values we know."""
    names = [word for word in words if word.endswith(".yml")][:1]
    if isinstance(values.get("base_config"), str):
        names = [values["base_config"]]
    settings: dict[str, Any] = {}
    for name in names:
        plain = name.rpartition(UNSET)[2].lstrip("/")
        if plain.endswith("base.yml"):
            continue
        tails = [plain.split("/", index)[-1] for index in range(plain.count("/") + 1)]
        path = next((found for tail in tails if (found := _find_file(file.path, tail)) is not None), None)
        # Scripts for GPUs name a folder that has since been renamed.
        path = path or _find_file(file.path, f"../../models/{tails[-1]}")
        if path is None:
            raise ForeignConfigError(f"{file.path}: builds on {plain}, which was not found; give that file instead")
        other = load_file(path)
        settings |= _load_base(other, other.values, []) | other.values
    return settings | dict(values)


def _has_batch(found: Mapping[str, Any]) -> bool:
    own = ("batch_size", "per_device_train_batch_size", "micro_batch_size", "seq_length", "max_length")
    return any(name in found for name in own)


def _find_here_document(file: ForeignFile, values: Mapping[str, Any]) -> list[ForeignFile]:
    """Return the DeepSpeed JSON that a script writes itself, if it has one; variables become 1."""
    named = values.get("deepspeed_config") or values.get("deepspeed")
    if named is None or (isinstance(named, str) and _find_file(file.path, named) is not None):
        return []
    mode = Path(str(named)).stem
    for match in re.finditer(r"<<-?\s*['\"]?(\w+)['\"]?\n(.*?)\n\1", file.path.read_text("utf-8"), re.DOTALL):
        text = re.sub(r"\"?\$\{?\w+\}?\"?", "1", match[2])
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            continue
        if sharding.is_deepspeed(content):
            # Numbers that were variables are given elsewhere.
            content = {key: value for key, value in content.items() if not key.startswith("train_")}
            return [ForeignFile(Path(f"{file.path} ({mode})"), "JSON", content)]
    return []
