"""Exports a model as a directory for transformers' `from_pretrained`, or its adapters as a directory for peft."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.files import durable, hub_models
from plimsoll.framework.files.workdir import writing
from plimsoll.framework.layers.lora import merge_adapters
from plimsoll.framework.layers.score_head import ScoreHead
from plimsoll.framework.layout import Nested, flatten, unflatten
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source, layer_shape

# File contents by name.
Files = Mapping[str, bytes]
# Names of dtypes in safetensors files.
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Upper bound for a tensor's entry in a header, without its name.
_ENTRY_BYTES = 256


@dataclass(frozen=True)
class _TensorPart:
    """The part of a stored tensor that holds one layer's parameter.

    Attributes:
        path: path of our parameter.
        indices: index of the layer in the stack if the parameter is stacked, then index of the expert if each expert
            has its own tensor.
        source: location of the parameter in the tensor.
    """

    path: str
    indices: tuple[int, ...]
    source: Source


TensorParts = list[_TensorPart]


def export_model(
    to: str | Path,
    model: CausalLM,
    params: Nested,
    family: ModelFamily,
    facts: Mapping[str, object],
    *,
    extra_files: Files = {},  # noqa: B006
    shard_bytes: int = 4 << 30,
) -> None:
    """Write config.json, and the weights in `model.param_dtype` with adapters merged into them.

    Args:
        to: a directory that must not exist yet; it appears once everything is written.
        model, params: the model and its parameters, a nested dict of arrays, all on this process's devices; one
            tensor is copied at a time.
        family: the family of the model, see framework/families.
        facts: contents of config.json. Its `dtype` and `torch_dtype` are set to that of the tensors, and any
            `quantization_config` is left out.
        extra_files: other files to write into the directory, by name.
        shard_bytes: maximum size of a file that holds more than one tensor.

    Raises:
        FileExistsError: `to` exists.
        ValueError: the family has no place for one of the parameters.
    """
    tensors: dict[str, TensorParts] = {}
    for path, sources in family.places(model).items():
        spec = model.base_specs[path]
        for layer_index, source in enumerate(sources):
            layer_indices = (layer_index,) if spec.num_layers is not None else ()
            for expert, source_part in enumerate(source.parts(layer_shape(spec))):
                experts = (expert,) if source_part.ours != layer_shape(spec) else ()
                part = _TensorPart(path, layer_indices + experts, source_part.source)
                tensors.setdefault(source_part.source.name, []).append(part)
    with _create_atomically(to, extra_files) as folder:
        _write_weights(folder, model, flatten(params), tensors, shard_bytes)
        # transformers reads `dtype` from 4.56 on, and `torch_dtype` before; if both are set, it reads `dtype`.
        dtype = str(model.param_dtype)
        # Weights that were read from a quantized format are written as floats.
        float_facts = {name: value for name, value in facts.items() if name != "quantization_config"}
        _write(folder / "config.json", {**float_facts, "dtype": dtype, "torch_dtype": dtype})


def _write_weights(
    folder: Path, model: CausalLM, flat_params: dict[str, jax.Array], tensors: dict[str, TensorParts], shard_bytes: int
) -> None:
    """Write the weight files, and their index if there is more than one file.

    Args:
        folder: directory to write to.
        model: the model.
        flat_params: the model's parameters, by path.
        tensors: parts of the tensors, by name.
        shard_bytes: maximum size of a file that holds more than one tensor.
    """
    # The names of the tensors in each file. A new file starts before a tensor that would not fit.
    shards: list[list[str]] = [[]]
    size = 0
    for name, parts in tensors.items():
        num_elements = 0
        for part in parts:
            num_elements += math.prod(model.base_specs[part.path].shape[len(part.indices) :])
        # All parts of a tensor have the same dtype.
        num_bytes = num_elements * _stored_dtype(model, parts[0].path).itemsize
        # A tensor larger than the limit gets its own file.
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    num_files = len(shards)
    files = ["model.safetensors"]
    if num_files > 1:
        # These names follow transformers' convention.
        files = [f"model-{i:05d}-of-{num_files:05d}.safetensors" for i in range(1, num_files + 1)]
        file_by_tensor = {}
        for file, shard in zip(files, shards, strict=True):
            file_by_tensor |= dict.fromkeys(shard, file)
        _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": file_by_tensor})
    with phase("writing the weights", patience=SHORT) as writing_weights:
        for number, (file, shard) in enumerate(zip(files, shards, strict=True)):
            writing_weights.progress(number, num_files)
            functions = {name: partial(_join_tensor, model, flat_params, tensors[name]) for name in shard}
            _write_tensors(folder / file, functions)


def export_adapters(
    to: str | Path,
    model: CausalLM,
    params: Nested,
    family: ModelFamily,
    base: str,
    *,
    extra_files: Files = {},  # noqa: B006
) -> None:
    """Write only the adapters, as peft's LoRA (adapter_config.json, adapter_model.safetensors).

    Args:
        to, model, params, family, extra_files: see `export_model`.
        base: directory of the model that they belong to, or hf://ORG/NAME@COMMIT.

    Raises:
        FileExistsError: `to` exists.
        ValueError: the model has no adapters, or peft has no equivalent for their location.
    """
    if model.lora is None:
        raise ValueError("the model has no adapters (model.lora is none); export the whole model")
    tensors = _adapter_tensors(model, flatten(params), family)
    # peft matches modules by the end of their names: a tensor's name is base_model.model.MODULE.lora_A.weight.
    target_modules = {name.split(".", 2)[2].rsplit(".", 2)[0] for name in tensors}
    task_facts: dict[str, object] = {"task_type": "CAUSAL_LM"}
    if isinstance(model.head, ScoreHead):
        # The score head is trained as a whole, in addition to the adapters.
        task_facts = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        (score,) = family.places(model)["head/score"]
        tensors[f"base_model.model.{score.name}"] = np.asarray(flatten(params)["head/score"])
    facts = {
        "peft_type": "LORA",
        **task_facts,
        **hub_models.get_adapter_base(base),
        "r": model.lora.rank,
        "lora_alpha": model.lora.scale * model.lora.rank,
        "lora_dropout": model.lora.dropout,
        "target_modules": sorted(target_modules),
        "bias": "none",
        "inference_mode": True,
    }
    with _create_atomically(to, extra_files) as folder:
        _write_tensors(folder / "adapter_model.safetensors", {name: lambda x=x: x for name, x in tensors.items()})
        _write(folder / "adapter_config.json", facts)


def _adapter_tensors(model: CausalLM, flat_params: dict[str, jax.Array], family: ModelFamily) -> dict[str, np.ndarray]:
    """Return the adapters under peft's names, transposed to torch's [out, in].

    Raises:
        ValueError: an adapted tensor holds several of our layers, or an adapter belongs to experts.
    """
    tensors = {}
    for path, sources in family.places(model).items():
        if f"{path}_lora_a" in flat_params:
            raise ValueError(
                f"{path} has an adapter for each expert, which peft cannot represent: its target_parameters have one "
                "for gate and up together; export without --adapter, which merges the adapters into the weights"
            )
        parent = path.rsplit("/", 1)[0]
        if not path.endswith("/weight") or f"{parent}/lora_a" not in flat_params:
            continue
        for layer_index, source in enumerate(sources):
            if source.is_fused:
                raise ValueError(
                    f"{source.name} holds several of our layers, which peft cannot adapt separately; export without "
                    "--adapter"
                )
            module = source.name.removesuffix(".weight")
            for our_name, peft_name in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                array = np.asarray(flat_params[f"{parent}/{our_name}"][layer_index]).T
                tensors[f"base_model.model.{module}.{peft_name}.weight"] = np.ascontiguousarray(array)
    return tensors


def _join_tensor(model: CausalLM, flat_params: dict[str, jax.Array], parts: TensorParts) -> np.ndarray:
    """Return a tensor as it is stored in a file, joined from its parts."""
    # The parts were collected in the order of our parameters, which need not be their order in the tensor.
    ordered_parts = sorted(parts, key=lambda part: part.source.span or part.source.fused_part)
    arrays = [_get_layer(model, flat_params, part.path, part.indices) for part in ordered_parts]
    # All parts of a tensor have the same orientation and interleaving.
    tensor = parts[0].source.join(arrays)
    return np.ascontiguousarray(tensor)


def _get_layer(model: CausalLM, flat_params: dict[str, jax.Array], path: str, indices: tuple[int, ...]) -> np.ndarray:
    """Return one layer's parameter, or one expert's, in the dtype of the files, with its adapter merged.

    Args:
        model: the model.
        flat_params: the model's parameters, by path.
        path: path of the parameter.
        indices: see `_TensorPart`.
    """
    parent, name = path.rsplit("/", 1)
    prefix = f"{parent}/"
    leaves = {key.removeprefix(prefix): x for key, x in flat_params.items() if key.startswith(prefix)}
    # A weight is merged with the adapter's leaves; other parameters stay unchanged. A quantized weight is two leaves.
    adapter = "lora" if name == "weight" else f"{name}_lora"
    names = {name, f"{adapter}_a", f"{adapter}_b"}
    leaves = {key: x for key, x in leaves.items() if key.partition("/")[0] in names}
    parts = {key: _fetch_part(x, indices) for key, x in leaves.items()}
    if f"{adapter}_a" in parts:
        # On one device, the product of an adapter has the same bits wherever its matrices were.
        parts = jax.device_put(parts, jax.local_devices()[0])
    merged = merge_adapters(model, unflatten(parts))
    return np.asarray(merged[name].astype(_stored_dtype(model, path)))


def _stored_dtype(model: CausalLM, path: str) -> np.dtype:
    """Return the dtype of a parameter in the files: `model.param_dtype`, but that of a constant if it has its own."""
    spec = model.base_specs[path]
    return np.dtype(spec.dtype) if spec.keeps_dtype and not spec.trainable else model.param_dtype


def _fetch_part(x: jax.Array | np.ndarray, indices: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Return x[indices], or all of x without indices, as an operand of computation on the device."""
    if isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host":
        if next(iter(x.devices())).platform != "tpu":
            # A view of the array is copied: XLA's GPU compiler cannot slice host memory.
            return jnp.asarray(np.asarray(x)[indices])
        if not indices:
            return jax.device_put(x, jax.memory.Space.Device)
        first, *indices_within = indices
        return _fetch_layer(x, first)[tuple(indices_within)]
    return x[indices] if indices else x


@jax.jit
def _fetch_layer(stack: jax.Array, index: jax.Array) -> jax.Array:
    """Return a layer of a stack in host memory on the device."""
    return jax.device_put(slice_layer(stack, index), jax.memory.Space.Device)


def _write(file: Path, facts: Mapping[str, object]) -> None:
    """Write a JSON file as transformers does, with an indent of two spaces."""
    with writing(file):
        file.write_text(json.dumps(facts, indent=2) + "\n")


def _write_tensors(file: Path, tensors: Mapping[str, Callable[[], np.ndarray]]) -> None:
    """Write a safetensors file, with one tensor in memory at a time; the library's `save_file` takes all at once.

    The format (https://github.com/huggingface/safetensors#format): the size of the header, 8 bytes, little-endian; the
    header, JSON, padded with spaces; the bytes of the tensors.

    Args:
        file: file to write.
        tensors: a function that returns the tensor, by name.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    # The header is written last, because the shapes are known last; this is room for it.
    header_bytes = 1024 + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in tensors)
    header_bytes += -header_bytes % 8
    end = 0
    with writing(file), file.open("wb") as stream:
        stream.seek(8 + header_bytes)
        for name, make in tensors.items():
            tensor = make()
            start = end
            end += tensor.nbytes
            header[name] = {"dtype": _DTYPES[str(tensor.dtype)], "shape": tensor.shape, "data_offsets": (start, end)}
            stream.write(tensor.reshape(-1).view(np.uint8).data)
            # Not while the next one is made.
            del tensor
        stream.seek(0)
        stream.write(struct.pack("<Q", header_bytes))
        stream.write(json.dumps(header).encode().ljust(header_bytes))


@contextlib.contextmanager
def _create_atomically(to: str | Path, extra_files: Files) -> Iterator[Path]:
    """Yield a temporary directory that gets its final name if the block ends without an error.

    Args:
        to: final path of the directory.
        extra_files: files to write into it first.

    Raises:
        FileExistsError: the directory exists.
    """
    to = Path(to).expanduser()
    if to.exists():
        raise FileExistsError(f"{to} already exists; choose another --to, or remove it")
    # In the same parent, so that the rename stays within one file system. An interrupted export may have left one.
    folder = to.with_name(f".{to.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    with writing(to):
        folder.mkdir(parents=True)
    try:
        with interrupts.remove_on_signal(folder):
            for name, data in extra_files.items():
                file = folder / name
                with writing(file):
                    file.write_bytes(data)
            yield folder
            durable.rename(folder, to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
