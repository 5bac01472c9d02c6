"""Loads weights from a Hugging Face directory into the layout's shardings and memory kinds, one layer at a time.

A `Family` maps configs and names of tensors in both directions; the families that are known are in configs/families/.
Nothing of a directory is ever executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from framework.config import Config, component
from framework.files import hub_models
from framework.layers.quantize import quantize
from framework.layout import (
    Nested,
    ParameterSpec,
    TensorSpec,
    flatten,
    store_leaf,
)
from framework.models.causal_lm import CausalLM
from framework.program.execution import Execution
from framework.program.program import Program
from framework.schedules.step import State
from framework.terminal.board import Phase
from framework.terminal.phases import SHORT, phase

# Stand for the layer's and the expert's number in the names of a family.
LAYER = "{layer}"
EXPERT = "{expert}"
_HEAD = "lm_head.weight"
# safetensors' names of the dtypes that weights may be stored in.
_FLOATS = ("F32", "BF16", "F16", "F64")
# At most so many lines of an error message about tensors; the others are counted.
_MAX_ROWS = 20
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    """The tensor of a directory that holds one layer's parameter, alone or with others; or one of each expert.

    Args:
        name: of the tensor; `{layer}` stands for the layer's number. With `{expert}` there is a tensor for each index
            of the parameter's first axis, and the other fields are about one expert's.
        transpose: torch's Linear keeps [out, in], we keep [in, out].
        piece: (i, n): the i-th of n equal parts of the last axis, of a fused matrix.
    """

    name: str
    transpose: bool = False
    piece: tuple[int, int] = (0, 1)

    def of(self, layer: int) -> Source:
        """This source with the layer's number in its name."""
        return replace(self, name=self.name.replace(LAYER, str(layer)))

    def parts(self, ours: tuple[int, ...]) -> list[SourcePart]:
        """The tensors of a parameter of shape `ours`, in the order of its experts; one where there are none."""
        if EXPERT not in self.name:
            return [SourcePart(self, ours)]
        names = [self.name.replace(EXPERT, str(expert)) for expert in range(ours[0])]
        return [SourcePart(replace(self, name=name), ours[1:]) for name in names]

    def read(
        self,
        tensor_of: Callable[[str], Any],
        ours: tuple[int, ...],
        index: Index,
    ) -> np.ndarray:
        """A slice of the parameter, of one tensor or of those of its experts; `tensor_of` gives a tensor by its name,
        the other arguments are as for `take`."""
        if EXPERT not in self.name:
            return self.take(tensor_of(self.name), ours, index)
        experts = self.parts(ours)[index[0]]
        return np.stack([part.source.take(tensor_of(part.source.name), part.ours, index[1:]) for part in experts])

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor in a file, for a parameter of shape `ours`."""
        joined = (*ours[:-1], ours[-1] * self.piece[1])
        return joined[::-1] if self.transpose else joined

    def take(
        self,
        tensor: Any,
        ours: tuple[int, ...],
        index: Index,
    ) -> np.ndarray:
        """A slice of the parameter, read from its tensor.

        Args:
            tensor: an array, or a reader of slices, as it is in a file.
            ours: the parameter's shape.
            index: the slice of the parameter, one `slice` for each axis.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(index, ours, strict=True)]
        # The piece is a range of the last axis of our orientation.
        offset = self.piece[0] * ours[-1]
        start, stop = bounds[-1]
        bounds[-1] = (start + offset, stop + offset)
        if self.transpose:
            bounds = bounds[::-1]
        slices = tuple(slice(start, stop) for start, stop in bounds)
        array = tensor[slices]
        return array.T if self.transpose else array


class SourcePart(NamedTuple):
    """A tensor, and the shape of what it holds of our parameter: all of it, or one expert's."""

    source: Source
    ours: tuple[int, ...]


class Family:
    """Models of one kind. Configs are read from and written as config.json; tensors are found by name."""

    # The values of `architectures` in config.json.
    architectures: tuple[str, ...] = ()
    # The sources by our path; that of a layer's parameter begins inside the layer.
    names: dict[str, Source] = {}
    # A pattern for tensors that hold no weights.
    ignored: str = r"rotary_emb\.inv_freq$"

    def model(self, facts: dict[str, Any]) -> Config:
        """Our model's config. Raises ValueError for a model that we cannot compute."""
        raise NotImplementedError

    def facts(self, model: Config) -> dict[str, Any]:
        """The inverse: config.json of a model of ours, as far as there is one."""
        raise NotImplementedError

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """{path of a parameter: its tensors, one for each unit of the stack}.

        Raises:
            ValueError: the family has no such parameter.
        """
        if model.stack.streams is not None:
            raise ValueError("published models have one residual stream; expected model.stack.streams = one")
        # A unit of the stack may be several layers, its blocks: block b of unit u is layer b + period * u.
        period = len(model.stack.unit.layers)
        sources = {}
        for path in model.base_specs:
            block = re.fullmatch(r"stack/block(\d+)/(.+)", path)
            if block:
                name = block[2]
                layers = [int(block[1]) + period * unit for unit in range(model.stack.num_units)]
            else:
                name = path
                layers = [0]
            if name not in self.names:
                raise ValueError(f"{type(self).__name__} models have no {path}; they have {', '.join(self.names)}")
            sources[path] = [self.names[name].of(layer) for layer in layers]
        return sources


class Directory:
    """The safetensors files of a directory. Headers are read at once, tensors when they are asked for.

    Raises:
        FileNotFoundError: no such directory, no safetensors files, or a shard of the index is missing.
        ValueError: a file is damaged, or the index does not agree with it.
    """

    def __init__(self, path: str | Path):
        self.path = hub_models.folder_with_weights(path)
        index = self.path / hub_models.INDEX
        single = self.path / hub_models.WEIGHTS
        if single.is_file():
            # As transformers: an index beside it is of shards that were there before.
            self.home: dict[str, str] = dict.fromkeys(self._open(single.name).keys(), single.name)
        elif index.is_file():
            try:
                self.home = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{index}: no index of shards: {error}") from None
        else:
            content: list[str] | str = "no such directory"
            if self.path.is_dir():
                content = sorted(file.name for file in self.path.glob("*"))
            raise FileNotFoundError(f"{self.path}: neither {single.name} nor {index.name}, but: {content}")
        for shard in sorted(set(self.home.values())):
            listed = {name for name, file in self.home.items() if file == shard}
            stored = set(self._open(shard).keys())
            wrong = sorted(listed ^ stored)
            if wrong:
                raise ValueError(f"{index}: disagrees with {shard} about {len(wrong)} tensors: {', '.join(wrong[:5])}")

    def _open(self, shard: str) -> Any:
        """A safetensors file of the directory. Raises ValueError where the name leads elsewhere, or it is damaged."""
        # Opened anew for each tensor: pages that were read through a mapping count as this process's memory while it is
        # open.
        if Path(shard).name != shard:
            raise ValueError(f"{self.path}: the index names {shard!r}, which is no file of the directory itself")
        try:
            return safe_open(self.path / shard, "np")
        except SafetensorError as error:
            raise ValueError(f"{self.path / shard}: damaged, perhaps not wholly downloaded: {error}") from None

    def tensor(self, name: str) -> Any:
        """A reader of slices of a tensor, which knows its shape: `get_shape()`, `[slices]`."""
        return self._open(self.home[name]).get_slice(name)


@component
class Pretrained:
    """The first weights of a run.

    Args:
        path: a directory with config.json and safetensors files, or hf://ORG/NAME@COMMIT, a model of the Hub.
        family: which maps names; of configs/families.
        facts: the directory's config.json, which an export begins with.
        generation: the directory's generation_config.json, which an export writes again; empty if there is none.
    """

    def __init__(
        self,
        *,
        path: str,
        family: Config,
        facts: dict[str, Any] = {},  # noqa: B006
        generation: dict[str, Any] = {},  # noqa: B006
    ):
        for name, published in (("facts", facts), ("generation", generation)):
            # An export would hand it on to whoever loads that.
            if "auto_map" in published:
                raise ValueError(f"{name}: auto_map names code of a directory, which is never executed")
        self.path = path
        self.facts = facts
        self.generation = generation
        self.family: Family = family.instantiate()

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """The sources of each parameter, checked against the headers of all files; no tensor is read.

        Raises:
            FileNotFoundError, ValueError: see `Directory`; or tensors are missing, unexpected, or of another shape.
        """
        return checked(Directory(self.path), self.family, model)

    def init(self, program: Program) -> State:
        """The state at step 0, with the directory's weights.

        Beside the state, one layer's tensor is in memory.

        Raises:
            FileNotFoundError, ValueError: see `places`.
        """
        with phase(f"reading the weights of {self.path}", patience=SHORT) as reading:
            return self._read(program, reading)

    def _read(self, program: Program, reading: Phase) -> State:
        """The state of `init`; tells the phase how far it is."""
        model = program.experiment.language_model
        learner = program.experiment.learner
        directory = Directory(self.path)
        places = self.places(model)
        state = program.init(given=places)
        state = {group: flatten(tree) for group, tree in state.items()}
        trained = flatten(program.checkpoint_layout.specs["parameter"])
        # Lists, not sets: all processes must run the same programs in the same order.
        frozen_parts = [(path,) for path in places if path not in trained]
        parts = [*learner.init_parts(), *frozen_parts]
        for number, paths in enumerate(parts):
            # Adapters are not in the directory: they keep their first values.
            if paths[0] not in places:
                continue
            # An optimizer of the whole model has its state for all layers at once.
            by_layer = model.base_specs[paths[0]].num_layers is not None and learner.scope == "unit"
            num_layers = len(places[paths[0]]) if by_layer else 1
            write = None
            for layer in range(num_layers):
                reading.percent((number + layer / num_layers) / len(parts))
                layer_sources = slice(layer, layer + 1) if by_layer else slice(None)
                values = {}
                for path in paths:
                    values[path] = _value(
                        directory,
                        program,
                        path,
                        places[path][layer_sources],
                        by_layer,
                    )
                # All layers of a stack have the same shapes, so the first one's programs write the others, too.
                write = write or _writer(program, values, by_layer)
                for group, leaves in write(state, values, layer).items():
                    state[group] |= leaves
        return program.execution.first_values.nested(state)


def _precise_leaves(program: Program, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Values of parameters in float32 or wider, as the leaves that the model has for them."""
    model = program.experiment.language_model
    paths = flatten(model.parameter_specs()).keys()
    leaves = {}
    for path, x in values.items():
        leaves[path] = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Weights that the model does not have under their own paths are stored in fewer bits, as several leaves.
    for path in sorted(leaves.keys() - paths):
        assert model.lora is not None
        assert model.lora.storage is not None
        parts = quantize(leaves.pop(path), model.lora.storage)
        for name, part in parts.items():
            leaves[f"{path}/{name}"] = part
    return leaves


def _stored_paths(execution: Execution, written_leaves: Nested, layer: int | None) -> dict[str, str]:
    """{path of a leaf that is written: its path in the state}.

    Args:
        execution: knows where the state has a layer's leaves.
        written_leaves: by group of the state and path.
        layer: the layer's index in the stack; None for leaves of all layers, or of no stack.
    """
    stored_paths = {}
    for leaves in written_leaves.values():
        for path in leaves:
            stored_paths[path] = path if layer is None else execution.parts.place(path, layer)[0]
    return stored_paths


def _writer(program: Program, like: dict[str, jax.Array], by_layer: bool) -> Callable[..., Any]:
    """The function (state, values of parameters, their layer) -> the state's new leaves, copies and averages too.

    Args:
        program: the program whose state is written.
        like: values of the same parameters, for their shapes and dtypes.
        by_layer: the values are one layer's.
    """

    execution = program.execution

    def made(values: dict[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
        leaves = _precise_leaves(program, values)
        made_values = execution.first_values.values_of(leaves, unit=by_layer)
        # Gradients stay the zeros that they are.
        return {group: leaves for group, leaves in made_values.items() if group != "gradient"}

    def put(places: Nested, old: Any, values: dict[str, jax.Array], layer: jax.Array) -> Any:
        new = jax.tree.map(store_leaf, places, made(values))
        if not by_layer:
            return new
        return execution.with_layer(old, new, layer)

    written_leaves = jax.eval_shape(made, like)
    # Compiled programs by the memory kinds of the leaves: a layer may lie on the host, another on the device.
    programs_by_kinds = dict[Any, Any]()
    specs = {group: flatten(tree) for group, tree in program.layout.specs.items()}

    def write(state: Any, values: dict[str, jax.Array], layer: int) -> Any:
        stored_paths = _stored_paths(execution, written_leaves, layer if by_layer else None)
        # All leaves of a layer have it at the same index.
        index = execution.parts.place(next(iter(values)), layer)[1] if by_layer else layer
        places = {}
        old = {}
        for group, leaves in written_leaves.items():
            places[group] = {path: specs[group][stored_paths[path]] for path in leaves}
            old[group] = {path: state[group][stored_paths[path]] for path in leaves}
        kinds = tuple(spec.memory_kind for spec in jax.tree.leaves(places))
        if kinds not in programs_by_kinds:
            shardings = program.layout.shardings(places)
            programs_by_kinds[kinds] = jax.jit(partial(put, places), donate_argnums=0, out_shardings=shardings)
        new = programs_by_kinds[kinds](old, values, jnp.int32(index))
        new_leaves = {}
        for group, leaves in new.items():
            new_leaves[group] = {stored_paths[path]: x for path, x in leaves.items()}
        return new_leaves

    return write


def checked(
    directory: Directory,
    family: Family,
    model: CausalLM,
) -> dict[str, list[Source]]:
    """`family.places(model)`, with the names that the directory has: some leave the model's own prefix out.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, or no floats; the message holds a table. Or the
            head has other weights than the embedding that config.json ties it to.
    """
    places = family.places(model)
    names = set()
    for path, sources in places.items():
        for source in sources:
            names |= {part.source.name for part in source.parts(layer_shape(model.base_specs[path]))}
    # A prefix is of the model without its head.
    names.discard(_HEAD)
    if not names & directory.home.keys():
        places = {path: [_without_prefix(source) for source in sources] for path, sources in places.items()}
    if model.ties:
        _check_tied(directory, places["embed/token"][0].name)
    rows = []
    used_names = set()
    for path, sources in places.items():
        for source in sources:
            for part in source.parts(layer_shape(model.base_specs[path])):
                name = part.source.name
                used_names.add(name)
                row = _error_row(directory, name, part.source.shape(part.ours))
                if row is not None:
                    rows.append(row)
    # A directory may hold the tied head a second time.
    ignored = f"{family.ignored}|^lm_head.weight$" if model.ties else family.ignored
    ignored_pattern = re.compile(ignored)
    for name in sorted(directory.home.keys() - used_names):
        if not ignored_pattern.search(name):
            rows.append(f"unexpected  {name}")
    if len(rows) > _MAX_ROWS:
        rows[_MAX_ROWS:] = [f"... and {len(rows) - _MAX_ROWS} more"]
    if rows:
        raise ValueError("\n  ".join([f"{directory.path}: its tensors are not those of its config.json:", *rows]))
    return places


def _without_prefix(source: Source) -> Source:
    """The source in a directory of the base model alone, whose names lack the model's prefix."""
    return replace(source, name=re.sub(r"^(model|transformer)\.", "", source.name))


def _error_row(
    directory: Directory,
    name: str,
    expected_shape: tuple[int, ...],
) -> str | None:
    """A line that says why a tensor cannot be loaded; None for one that can."""
    if name not in directory.home:
        return f"missing     {name} {list(expected_shape)}"
    shape = tuple(directory.tensor(name).get_shape())
    if shape != expected_shape:
        return f"shape       {name} {list(shape)}, expected {list(expected_shape)}"
    dtype = directory.tensor(name).get_dtype()
    if dtype not in _FLOATS:
        return f"dtype       {name} {dtype}, expected one of {', '.join(_FLOATS)}"
    return None


def _check_tied(directory: Directory, table: str) -> None:
    """Compares a directory's head with the embedding that config.json ties it to, where it holds both.

    With other weights, transformers would not tie it, whatever config.json says.

    Raises:
        ValueError: the two differ.
    """
    if not {_HEAD, table} <= directory.home.keys():
        return
    table_tensor = directory.tensor(table)
    head_tensor = directory.tensor(_HEAD)
    shape = list(table_tensor.get_shape())
    head_shape = list(head_tensor.get_shape())
    # A band of rows is in memory at a time: of each tensor 64 MiB, at four bytes an element.
    rows_at_once = max(1, (64 << 20) // (4 * shape[-1]))
    is_equal = shape == head_shape
    for row in range(0, shape[0], rows_at_once):
        if not is_equal:
            break
        band = slice(row, min(row + rows_at_once, shape[0]))
        is_equal = np.array_equal(table_tensor[band], head_tensor[band])
    if not is_equal:
        raise ValueError(
            f"{directory.path}: config.json says tie_word_embeddings = true, but {_HEAD} is another than {table}; set "
            "tie_word_embeddings to false for a head of its own, or remove the tensor"
        )


def layer_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """The shape of a parameter, without the axis of the layers that it may be stacked along."""
    return spec.shape if spec.num_layers is None else spec.shape[1:]


def _value(
    directory: Directory,
    program: Program,
    path: str,
    sources: list[Source],
    by_layer: bool,
) -> jax.Array:
    """A layer's array, or a whole stack, in the directory's dtype; each process reads what its devices hold.

    Args:
        directory: the directory.
        program: the program whose layout the array has.
        path: the parameter's path.
        sources: one for each layer of the array.
        by_layer: the array is one layer's, without the axis of the layers.
    """
    spec = program.experiment.language_model.base_specs[path]
    shape = layer_shape(spec)
    is_stacked = spec.num_layers is not None and not by_layer
    axes = spec.mesh_axes
    if spec.num_layers is not None and by_layer:
        axes = spec.mesh_axes[1:]

    def read_layer(source: Source, index: Index) -> np.ndarray:
        return np.ascontiguousarray(source.read(directory.tensor, shape, index))

    def read(index: Any) -> np.ndarray:
        if not is_stacked:
            return read_layer(sources[0], index)
        layers = [read_layer(source, index[1:]) for source in sources[index[0]]]
        return np.stack(layers)

    array_shape = (len(sources), *shape) if is_stacked else shape
    # The sharding does not depend on the dtype.
    sharding = program.layout.sharding(TensorSpec(array_shape, "float32", axes))
    return jax.make_array_from_callback(array_shape, sharding, read)
