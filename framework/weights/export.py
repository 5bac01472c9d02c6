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
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from framework.files.workdir import writing
from framework.layers.lora import merge_adapters
from framework.layout import Nested, flatten, unflatten
from framework.models.causal_lm import CausalLM
from framework.terminal import interrupts
from framework.weights.pretrained import Family, Source, layer_shape

Files = Mapping[str, bytes]
Parts = list[tuple[str, int | None, Source]]  # a tensor's: our path, the unit of the stack, where it is


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
        facts: config.json; its `dtype` and `torch_dtype` become that of the tensors.
        beside: what else goes into the directory, by name.
        shard_bytes: of a file at most, if it holds more than one tensor.

    Raises:
        FileExistsError: `to` is there.
        ValueError: the family has no place for one of the parameters.
    """
    tensors: dict[str, Parts] = {}
    for path, sources in family.places(model).items():
        stacked = model.base_specs[path].num_layers is not None
        for unit, source in enumerate(sources):
            tensors.setdefault(source.name, []).append((path, unit if stacked else None, source))
    shards, size = [[]], 0
    for name, parts in tensors.items():
        num_bytes = (
            sum(math.prod(layer_shape(model.base_specs[path])) for path, *_ in parts) * model.param_dtype.itemsize
        )
        if shards[-1] and size + num_bytes > shard_bytes:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += num_bytes
    count, flat = len(shards), flatten(params)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    with _appearing(to, beside) as folder:
        if count > 1:
            home = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
            _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": home})
        for file, shard in zip(files if count > 1 else ["model.safetensors"], shards, strict=True):
            _write_tensors(folder / file, {name: _tensor(model, flat, tensors[name]) for name in shard})
        # transformers reads `dtype` from 4.56 on, `torch_dtype` before, and the former where both stand.
        dtype = str(model.param_dtype)
        _write(folder / "config.json", {**facts, "dtype": dtype, "torch_dtype": dtype})


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
        base: the directory of the model that they belong to.

    Raises:
        FileExistsError: `to` is there.
        ValueError: the model has no adapters, or peft could not put them where they are.
    """
    if model.lora is None:
        raise ValueError("the model has no adapters (model.lora is none): export all of it")
    tensors, flat = {}, flatten(params)
    for path, sources in family.places(model).items():
        parent = path.rsplit("/", 1)[0]
        if not path.endswith("/weight") or f"{parent}/lora_a" not in flat:
            continue
        for unit, source in enumerate(sources):
            if source.piece != (0, 1):
                raise ValueError(
                    f"{source.name} holds several of our layers, which peft cannot adapt one by one; merge"
                )
            module = source.name.removesuffix(".weight")
            for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                array = np.asarray(flat[f"{parent}/{ours}"][unit]).T
                tensors[f"base_model.model.{module}.{theirs}.weight"] = np.ascontiguousarray(array)
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": model.lora.scale * model.lora.rank,
        "lora_dropout": model.lora.dropout,
        "target_modules": sorted({name.split(".", 2)[2].rsplit(".", 2)[0] for name in tensors}),
        "bias": "none",
        "inference_mode": True,
    }
    with _appearing(to, beside) as folder:
        _write_tensors(folder / "adapter_model.safetensors", tensors)
        _write(folder / "adapter_config.json", facts)


def _tensor(model: CausalLM, flat: dict[str, jax.Array], parts: Parts) -> np.ndarray:
    """A tensor as it is in a file, of its parts."""
    pieces = [_layer(model, flat, path, unit) for path, unit, _ in sorted(parts, key=lambda part: part[2].piece)]
    whole = np.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]
    return np.ascontiguousarray(whole.T if parts[0][2].transpose else whole)


def _layer(model: CausalLM, flat: dict[str, jax.Array], path: str, unit: int | None) -> np.ndarray:
    parent, name = path.rsplit("/", 1)
    own = {key.removeprefix(f"{parent}/"): x for key, x in flat.items() if key.startswith(f"{parent}/")}
    if name != "weight" or "lora_a" not in own:
        own = {name: own[name]}
    own = merge_adapters(model, unflatten({key: x if unit is None else x[unit] for key, x in own.items()}))
    return np.asarray(own[name].astype(model.param_dtype))


def _write(file: Path, facts: dict[str, Any]) -> None:
    with writing(file):
        file.write_text(json.dumps(facts, indent=2) + "\n")


def _write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file that whoever may read the directory's other files may read. Raises OSError: it cannot be
    written."""
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:  # the library tells of a full disk in words
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
    probe = file.with_name(f"{file.name}.mode")
    probe.touch()
    file.chmod(probe.stat().st_mode)  # The library makes 0600, whatever the umask is.
    probe.unlink()


@contextlib.contextmanager
def _appearing(to: str | Path, beside: Files) -> Iterator[Path]:
    """A directory that has its name once it is whole, with the files `beside`."""
    to = Path(to).expanduser()
    if to.exists():
        raise FileExistsError(f"{to} is there already; choose another --to, or remove it")
    folder = to.with_name(f".{to.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with interrupts.removed_at_end(folder):
            for name, data in beside.items():
                with writing(folder / name):
                    (folder / name).write_bytes(data)
            yield folder
            folder.rename(to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
