"""Writes a model as a directory that transformers' `from_pretrained` loads, or its adapters as one that peft loads."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from framework.files import durable, hub_models
from framework.files.workdir import writing
from framework.layers.lora import merge_adapters
from framework.layers.score_head import ScoreHead
from framework.layout import Nested, flatten, unflatten
from framework.models.causal_lm import CausalLM
from framework.terminal import interrupts
from framework.terminal.phases import SHORT, phase
from framework.weights.family import Family
from framework.weights.source import Source, layer_shape

# The contents of files, by name.
Files = Mapping[str, bytes]


class _Part(NamedTuple):
    """A part of a tensor of a file: one layer's parameter.

    `path` is that of our parameter; `indices` are the layer's index in the stack, where the parameter is stacked, and
    the expert's, where each has a tensor of its own; `source` says where in the tensor it lies.
    """

    path: str
    indices: tuple[int, ...]
    source: Source


Parts = list[_Part]


def export_model(
    to: str | Path,
    model: CausalLM,
    params: Nested,
    family: Family,
    facts: dict[str, Any],
    *,
    beside: Files = {},  # noqa: B006
    shard_bytes: int = 4 << 30,
) -> None:
    """Writes config.json, and the weights in `model.param_dtype` with adapters merged into them.

    Args:
        to: a directory that is not there yet; it appears when all is written.
        model, params: a nested dict of arrays, all on this process's devices; one file's weights are copied at a time.
        family: see configs/families.
        facts: config.json; its `dtype` and `torch_dtype` become that of the tensors, and a `quantization_config` is
            left out.
        beside: what else goes into the directory, by name.
        shard_bytes: of a file at most, if it holds more than one tensor.

    Raises:
        FileExistsError: `to` is there.
        ValueError: the family has no place for one of the parameters.
    """
    tensors: dict[str, Parts] = {}
    for path, sources in family.places(model).items():
        spec = model.base_specs[path]
        for unit, source in enumerate(sources):
            units = (unit,) if spec.num_layers is not None else ()
            for expert, (part_source, ours) in enumerate(source.parts(layer_shape(spec))):
                experts = (expert,) if ours != layer_shape(spec) else ()
                part = _Part(path, units + experts, part_source)
                tensors.setdefault(part_source.name, []).append(part)
    shards = _shards(model, tensors, shard_bytes)
    with _appearing(to, beside) as folder:
        _write_weights(folder, model, flatten(params), tensors, shards)
        # transformers reads `dtype` from 4.56 on, `torch_dtype` before, and the former where both stand.
        dtype = str(model.param_dtype)
        # Weights that were read from fewer bits are written as floats.
        float_facts = {name: value for name, value in facts.items() if name != "quantization_config"}
        _write(
            folder / "config.json",
            {
                **float_facts,
                "dtype": dtype,
                "torch_dtype": dtype,
            },
        )


def _write_weights(
    folder: Path,
    model: CausalLM,
    flat_params: dict[str, jax.Array],
    tensors: dict[str, Parts],
    shards: list[list[str]],
) -> None:
    """Writes the files of the weights, and their index where there is more than one file.

    Args:
        folder: the directory.
        model: the model.
        flat_params: its parameters, by path.
        tensors: the parts of the tensors, by name.
        shards: the names of the tensors of each file.
    """
    num_files = len(shards)
    files = ["model.safetensors"]
    if num_files > 1:
        # These names are transformers' own.
        files = [f"model-{i:05d}-of-{num_files:05d}.safetensors" for i in range(1, num_files + 1)]
        file_by_tensor = {}
        for file, shard in zip(files, shards, strict=True):
            file_by_tensor |= dict.fromkeys(shard, file)
        _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": file_by_tensor})
    with phase("writing the weights", patience=SHORT) as writing_weights:
        for number, (file, shard) in enumerate(zip(files, shards, strict=True)):
            writing_weights.progress(number, num_files)
            # No variable holds the arrays, so that one file's are in memory at a time, not two files'.
            _write_tensors(
                folder / file,
                {name: _tensor(model, flat_params, tensors[name]) for name in shard},
            )


def _shards(
    model: CausalLM,
    tensors: dict[str, Parts],
    shard_bytes: int,
) -> list[list[str]]:
    """The names of the tensors of each file, in order; a file is closed before a tensor that would not fit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, parts in tensors.items():
        num_elements = 0
        for part in parts:
            num_elements += math.prod(model.base_specs[part.path].shape[len(part.indices) :])
        num_bytes = num_elements * model.param_dtype.itemsize
        # A tensor that is larger than a file may be has one of its own.
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def export_adapters(
    to: str | Path,
    model: CausalLM,
    params: Nested,
    family: Family,
    base: str,
    *,
    beside: Files = {},  # noqa: B006
) -> None:
    """Writes the adapters alone, as peft's LoRA (adapter_config.json, adapter_model.safetensors).

    Args:
        to, model, params, family, beside: as for `export_model`.
        base: the directory of the model that they belong to, or hf://ORG/NAME@COMMIT.

    Raises:
        FileExistsError: `to` is there.
        ValueError: the model has no adapters, or peft could not put them where they are.
    """
    if model.lora is None:
        raise ValueError("the model has no adapters (model.lora is none): export all of it")
    tensors = _adapter_tensors(model, flatten(params), family)
    # peft matches modules by the ends of their names: a tensor's name is base_model.model.MODULE.lora_A.weight.
    target_modules = {name.split(".", 2)[2].rsplit(".", 2)[0] for name in tensors}
    task_facts: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if isinstance(model.head, ScoreHead):
        # The score head learns whole, beside the adapters.
        task_facts = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        (score,) = family.places(model)["head/score"]
        tensors[f"base_model.model.{score.name}"] = np.asarray(flatten(params)["head/score"])
    facts = {
        "peft_type": "LORA",
        **task_facts,
        **hub_models.base_of_adapter(base),
        "r": model.lora.rank,
        "lora_alpha": model.lora.scale * model.lora.rank,
        "lora_dropout": model.lora.dropout,
        "target_modules": sorted(target_modules),
        "bias": "none",
        "inference_mode": True,
    }
    with _appearing(to, beside) as folder:
        _write_tensors(folder / "adapter_model.safetensors", tensors)
        _write(folder / "adapter_config.json", facts)


def _adapter_tensors(
    model: CausalLM,
    flat_params: dict[str, jax.Array],
    family: Family,
) -> dict[str, np.ndarray]:
    """The adapters under peft's names, transposed to torch's [out, in].

    Raises:
        ValueError: an adapted tensor holds several of our layers, or an adapter is of experts.
    """
    tensors = {}
    for path, sources in family.places(model).items():
        if f"{path}_lora_a" in flat_params:
            raise ValueError(
                f"{path} has an adapter for each expert, which cannot be exported alone: peft's target_parameters have "
                "one for gate and up together; export without --adapter, which merges"
            )
        parent = path.rsplit("/", 1)[0]
        if not path.endswith("/weight") or f"{parent}/lora_a" not in flat_params:
            continue
        for unit, source in enumerate(sources):
            if source.is_fused:
                raise ValueError(
                    f"{source.name} holds several of our layers, which peft cannot adapt one by one; merge"
                )
            module = source.name.removesuffix(".weight")
            for our_name, peft_name in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                array = np.asarray(flat_params[f"{parent}/{our_name}"][unit]).T
                tensors[f"base_model.model.{module}.{peft_name}.weight"] = np.ascontiguousarray(array)
    return tensors


def _tensor(
    model: CausalLM,
    flat_params: dict[str, jax.Array],
    parts: Parts,
) -> np.ndarray:
    """A tensor as it is in a file, joined from its parts."""
    ordered_parts = sorted(parts, key=lambda part: part.source.span or part.source.piece)
    pieces = [_layer(model, flat_params, part.path, part.indices) for part in ordered_parts]
    # All parts of a tensor lie in it in the same way.
    tensor = parts[0].source.join(pieces)
    return np.ascontiguousarray(tensor)


def _layer(
    model: CausalLM,
    flat_params: dict[str, jax.Array],
    path: str,
    indices: tuple[int, ...],
) -> np.ndarray:
    """One layer's parameter, or one expert's, in `model.param_dtype`, with its adapter merged into it.

    Args:
        model: the model.
        flat_params: its parameters, by path.
        path: the parameter's path.
        indices: of `_Part`.
    """
    parent, name = path.rsplit("/", 1)
    prefix = f"{parent}/"
    leaves = {key.removeprefix(prefix): x for key, x in flat_params.items() if key.startswith(prefix)}
    # A weight is merged with the adapter's leaves beside it; all else is as it is. A quantized weight is two leaves.
    adapter = "lora" if name == "weight" else f"{name}_lora"
    names = {name, f"{adapter}_a", f"{adapter}_b"}
    leaves = {key: x for key, x in leaves.items() if key.partition("/")[0] in names}
    if indices:
        leaves = {key: x[indices] for key, x in leaves.items()}
    merged = merge_adapters(model, unflatten(leaves))
    return np.asarray(merged[name].astype(model.param_dtype))


def _write(file: Path, facts: dict[str, Any]) -> None:
    """Writes a JSON file as transformers does, with an indent of two spaces."""
    with writing(file):
        file.write_text(json.dumps(facts, indent=2) + "\n")


def _write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file, with the permissions of the directory's other files.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:
        # The library tells of a full disk in words.
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(file)) from error
    # The library makes 0600, whatever the umask is. A file made here has the mode that the umask asks for.
    probe = file.with_name(f"{file.name}.mode")
    probe.touch()
    file.chmod(probe.stat().st_mode)
    probe.unlink()


@contextlib.contextmanager
def _appearing(to: str | Path, extra_files: Files) -> Iterator[Path]:
    """A directory that gets its name when the block has ended without an error.

    Args:
        to: the directory.
        extra_files: files that are written into it first.

    Raises:
        FileExistsError: the directory is there.
    """
    to = Path(to).expanduser()
    if to.exists():
        raise FileExistsError(f"{to} is there already; choose another --to, or remove it")
    # In the same parent, so that the rename stays within one file system. An interrupted export may have left it.
    folder = to.with_name(f".{to.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with interrupts.removed_at_end(folder):
            for name, data in extra_files.items():
                file = folder / name
                with writing(file):
                    file.write_bytes(data)
            yield folder
            durable.rename(folder, to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
