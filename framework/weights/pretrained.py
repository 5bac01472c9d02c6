"""Weights from a directory of Hugging Face's, into the layout's shardings and memory kinds, a layer's tensor at a time.

A `Family` maps configs and names of tensors in both directions; those that are known are in configs/families/.
Nothing of a directory is ever executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from framework.config import Config, component
from framework.layers.quantize import quantize
from framework.layout import Nested, ParameterSpec, TensorSpec, flatten, store_leaf
from framework.learner.units import with_unit
from framework.models.causal_lm import CausalLM
from framework.program.program import Program, State
from framework.schedules.layerwise.storage import part_path

LAYER = "{layer}"
_HEAD = "lm_head.weight"
_FLOATS = ("F32", "BF16", "F16", "F64")  # what weights may be stored as
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    """The tensor of a directory that one layer's parameter is, or is a part of.

    Args:
        name: of the tensor; `{layer}` stands for the layer's number.
        transpose: torch's Linear keeps [out, in], we keep [in, out].
        piece: (i, n): the i-th of n equal parts of the last axis, of a fused matrix.
    """

    name: str
    transpose: bool = False
    piece: tuple[int, int] = (0, 1)

    def of(self, layer: int) -> Source:
        """The same with the layer's number in its name."""
        return replace(self, name=self.name.replace(LAYER, str(layer)))

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Of the whole tensor, as it is in a file."""
        whole = (*ours[:-1], ours[-1] * self.piece[1])
        return whole[::-1] if self.transpose else whole

    def take(self, tensor: Any, ours: tuple[int, ...], index: Index) -> np.ndarray:
        """ours[index], of a tensor (or what reads slices of one) as it is in a file."""
        first = self.piece[0] * ours[-1]
        bounds = [part.indices(size)[:2] for part, size in zip(index, ours, strict=True)]
        bounds[-1] = (bounds[-1][0] + first, bounds[-1][1] + first)
        slices = tuple(slice(*pair) for pair in (bounds[::-1] if self.transpose else bounds))
        return tensor[slices].T if self.transpose else tensor[slices]


class Family:
    """Models of one kind. Configs are read from and written as config.json; tensors are found by name."""

    architectures: tuple[str, ...] = ()  # config.json's
    names: dict[str, Source] = {}  # by our path; that of a layer's parameter begins inside the layer
    ignored: str = r"rotary_emb\.inv_freq$"  # tensors that hold no weights

    def model(self, facts: dict[str, Any]) -> Config:
        """Our model's config. Raises ValueError for what we cannot compute."""
        raise NotImplementedError

    def facts(self, model: Config) -> dict[str, Any]:
        """The inverse: config.json of a model of ours, as far as there is one."""
        raise NotImplementedError

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """{path of a parameter: its tensors, one for each unit of the stack}. Raises ValueError where the family has no
        such parameter."""
        if model.stack.streams is not None:
            raise ValueError("published models have one residual stream; expected model.stack.streams = one")
        period, found = len(model.stack.unit.layers), {}
        for path in model.base_specs:
            block = re.fullmatch(r"stack/block(\d+)/(.+)", path)
            if (key := block[2] if block else path) not in self.names:
                raise ValueError(f"{type(self).__name__} models have no {path}; they have {', '.join(self.names)}")
            layers = [int(block[1]) + period * unit for unit in range(model.stack.num_units)] if block else [0]
            found[path] = [self.names[key].of(layer) for layer in layers]
        return found


class Directory:
    """The safetensors files of a directory. Headers are read at once, tensors when they are asked for.

    Raises:
        FileNotFoundError: no such directory, no safetensors files, or a shard of the index is missing.
        ValueError: a file is damaged, or the index does not agree with it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if single.is_file():
            # As transformers: an index beside it is of shards that were there before.
            self.home: dict[str, str] = dict.fromkeys(self._open(single.name).keys(), single.name)
        elif index.is_file():
            try:
                self.home = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{index}: no index of shards: {error}") from None
        else:
            found = sorted(file.name for file in self.path.glob("*")) if self.path.is_dir() else "no such directory"
            raise FileNotFoundError(f"{self.path}: neither {single.name} nor {index.name}, but: {found}")
        for shard in sorted(set(self.home.values())):
            listed, held = {name for name, file in self.home.items() if file == shard}, set(self._open(shard).keys())
            if wrong := sorted(listed ^ held):
                raise ValueError(f"{index}: disagrees with {shard} about {len(wrong)} tensors: {', '.join(wrong[:5])}")

    def _open(self, shard: str) -> Any:
        # Anew for each tensor: pages that were read through a mapping count as this process's memory while it is open.
        if Path(shard).name != shard:
            raise ValueError(f"{self.path}: the index names {shard!r}, which is no file of the directory itself")
        try:
            return safe_open(self.path / shard, "np")
        except SafetensorError as error:
            raise ValueError(f"{self.path / shard}: damaged, perhaps not wholly downloaded: {error}") from None

    def tensor(self, name: str) -> Any:
        """What reads slices of a tensor, and knows its shape: `get_shape()`, `[slices]`."""
        return self._open(self.home[name]).get_slice(name)


@component
class Pretrained:
    """The first weights of a run.

    Args:
        path: a directory with config.json and safetensors files.
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
            if "auto_map" in published:  # an export would hand it on to whoever loads that
                raise ValueError(f"{name}: auto_map names code of a directory, which is never executed")
        self.path = path
        self.facts = facts
        self.generation = generation
        self.family: Family = family.instantiate()

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """Where each parameter is, after a look at all headers; no tensor is read.

        Raises:
            FileNotFoundError, ValueError: see `Directory`; or tensors are missing, unexpected, or of another shape.
        """
        return checked(Directory(self.path), self.family, model)

    def init(self, program: Program) -> State:
        """The state at step 0, with the directory's weights. Beside the state, one layer's tensor is in memory. Raises
        what `places` does."""
        model, learner = program.experiment.language_model, program.experiment.learner
        directory, places = Directory(self.path), self.places(model)
        state = program.init(given=places)
        state = {group: flatten(tree) for group, tree in state.items()}
        trained = flatten(program.whole.specs["parameter"])
        fixed = [path for path in places if path not in trained]  # in order: processes must run the same programs
        for paths in [*learner.init_parts(), *((path,) for path in fixed)]:
            if paths[0] not in places:  # adapters
                continue
            by_layer = model.base_specs[paths[0]].num_layers is not None and learner.scope == "unit"
            write = None
            for layer in range(len(places[paths[0]]) if by_layer else 1):
                chosen = slice(layer, layer + 1) if by_layer else slice(None)
                values = {path: _value(directory, program, path, places[path][chosen], by_layer) for path in paths}
                write = write or _writer(program, values, by_layer)
                for group, own in write(state, values, layer).items():
                    state[group] |= own
        return program.nested(state)


def _writer(program: Program, like: dict[str, jax.Array], by_layer: bool) -> Callable[..., Any]:
    """(state, values of parameters, their layer) -> what the state then holds of them: copies and averages too."""
    lora, paths = (
        program.experiment.language_model.lora,
        flatten(program.experiment.language_model.parameter_specs()).keys(),
    )

    def made(values: dict[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
        precise = {path: x.astype(jnp.promote_types(x.dtype, jnp.float32)) for path, x in values.items()}
        for path in sorted(precise.keys() - paths):  # stored in fewer bits
            assert lora is not None
            assert lora.storage is not None
            parts = quantize(precise.pop(path), lora.storage)
            precise |= {f"{path}/{name}": part for name, part in parts.items()}
        return program.values_of(precise, unit=by_layer)

    def put(places: Nested, old: Any, values: dict[str, jax.Array], layer: jax.Array) -> Any:
        new = jax.tree.map(store_leaf, places, made(values))
        if not by_layer:
            return new
        if program.in_parts:
            return jax.tree.map(lambda x: x[None], new)
        return with_unit(old, new, layer)

    written, runs = jax.eval_shape(made, like), dict[Any, Any]()
    specs = {group: flatten(tree) for group, tree in program.layout.specs.items()}

    def write(state: Any, values: dict[str, jax.Array], layer: int) -> Any:
        at = {p: part_path(p, layer) if by_layer and program.in_parts else p for own in written.values() for p in own}
        places = {group: {path: specs[group][at[path]] for path in own} for group, own in written.items()}
        kinds = tuple(spec.memory_kind for spec in jax.tree.leaves(places))
        if kinds not in runs:
            shardings = program.layout.shardings(places)
            runs[kinds] = jax.jit(partial(put, places), donate_argnums=0, out_shardings=shardings)
        old = {group: {path: state[group][at[path]] for path in own} for group, own in written.items()}
        new = runs[kinds](old, values, jnp.int32(layer))
        return {group: {at[path]: x for path, x in own.items()} for group, own in new.items()}

    return write


def checked(directory: Directory, family: Family, model: CausalLM) -> dict[str, list[Source]]:
    """`family.places(model)`, with the names that the directory has: some leave the model's own prefix out.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, or no floats; holds a table. Or the head has
            other weights than the embedding that config.json ties it to.
    """
    places = family.places(model)
    names = {source.name for sources in places.values() for source in sources} - {_HEAD}
    if not names & directory.home.keys():
        # A prefix is of the model without its head.
        cut = lambda source: replace(source, name=re.sub(r"^(model|transformer)\.", "", source.name))  # noqa: E731
        places = {path: [cut(source) for source in sources] for path, sources in places.items()}
    if model.ties:
        _check_tied(directory, places["embed/token"][0].name)
    rows, used = [], set()
    for path, sources in places.items():
        for source in sources:
            used.add(source.name)
            expected = source.shape(layer_shape(model.base_specs[path]))
            if source.name not in directory.home:
                rows.append(f"missing     {source.name} {list(expected)}")
            elif (shape := tuple(directory.tensor(source.name).get_shape())) != expected:
                rows.append(f"shape       {source.name} {list(shape)}, expected {list(expected)}")
            elif (dtype := directory.tensor(source.name).get_dtype()) not in _FLOATS:
                rows.append(f"dtype       {source.name} {dtype}, expected one of {', '.join(_FLOATS)}")
    skip = re.compile(f"{family.ignored}|^lm_head.weight$" if model.ties else family.ignored)
    rows += [f"unexpected  {name}" for name in sorted(directory.home.keys() - used) if not skip.search(name)]
    if rows:
        rows[20:] = [f"... and {len(rows) - 20} more"] if len(rows) > 20 else []
        raise ValueError("\n  ".join([f"{directory.path}: its tensors are not those of its config.json:", *rows]))
    return places


def _check_tied(directory: Directory, table: str) -> None:
    """Raises ValueError: the file has a head of its own. transformers would not tie it then, whatever config.json says.
    A band of rows is in memory at a time."""
    if not {_HEAD, table} <= directory.home.keys():
        return
    tensors = [directory.tensor(name) for name in (table, _HEAD)]
    shape, head_shape = (list(tensor.get_shape()) for tensor in tensors)
    rows_at_once = max(1, (64 << 20) // (4 * shape[-1]))
    bands = [slice(row, min(row + rows_at_once, shape[0])) for row in range(0, shape[0], rows_at_once)]
    if shape != head_shape or not all(np.array_equal(*(tensor[band] for tensor in tensors)) for band in bands):
        raise ValueError(
            f"{directory.path}: config.json says tie_word_embeddings = true, but {_HEAD} is another than {table}; set "
            "tie_word_embeddings to false for a head of its own, or remove the tensor"
        )


def layer_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Of a parameter, without the axis of the layers that it may be stacked along."""
    return spec.shape if spec.num_layers is None else spec.shape[1:]


def _value(directory: Directory, program: Program, path: str, sources: list[Source], by_layer: bool) -> jax.Array:
    """A layer's array, or a whole stack, in the directory's dtype; each process reads what its devices hold."""
    spec = program.experiment.language_model.base_specs[path]
    layer, stacked = layer_shape(spec), spec.num_layers is not None and not by_layer
    axes = spec.mesh_axes if stacked or spec.num_layers is None else spec.mesh_axes[1:]

    def read(index: Any) -> np.ndarray:
        one = lambda source, index: np.ascontiguousarray(source.take(directory.tensor(source.name), layer, index))  # noqa: E731
        return np.stack([one(s, index[1:]) for s in sources[index[0]]]) if stacked else one(sources[0], index)

    shape = (len(sources), *layer) if stacked else layer
    sharding = program.layout.sharding(TensorSpec(shape, "float32", axes))
    return jax.make_array_from_callback(shape, sharding, read)
