"""Reads the safetensors files of a published directory, and checks their headers against the parameters of a model.

Nothing in the directory is ever executed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from plimsoll.framework.files import hub_models
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.weights import fp8
from plimsoll.framework.weights.family import SCORE, ModelFamily
from plimsoll.framework.weights.mxfp4 import BLOCKS, SCALES, PackedTensor, find_packed_names
from plimsoll.framework.weights.source import SliceReader, Source, layer_shape

_HEAD = "lm_head.weight"
# safetensors' names for the dtypes that stored weights may have.
_FLOATS = ("F32", "BF16", "F16", "F64")
# Maximum number of lines about tensors in an error message; the rest are only counted.
_MAX_ROWS = 20


class Directory:
    """The safetensors files of a directory. Headers are read immediately, tensors on demand.

    A weight in MXFP4 has its own name here instead of those of its blocks and scales, and is read as bfloat16; so is a
    weight in FP8 with scales.

    Raises:
        FileNotFoundError: no such directory, no safetensors files, or a shard of the index is missing.
        ValueError: a file is damaged, or the index does not agree with it.
    """

    def __init__(self, path: str | Path):
        self.path = hub_models.folder_with_weights(path)
        index = self.path / hub_models.INDEX
        single = self.path / hub_models.WEIGHTS
        if single.is_file():
            # As in transformers: an index next to a single file lists shards that were there before.
            self.home: dict[str, str] = dict.fromkeys(self._open(single.name).keys(), single.name)
        elif index.is_file():
            self.home = hub_models.weight_map(index)
        else:
            content: list[str] | str = "no such directory"
            if self.path.is_dir():
                content = sorted(file.name for file in self.path.glob("*"))
            raise FileNotFoundError(f"{self.path}: has neither {single.name} nor {index.name}, but: {content}")
        for shard in sorted(set(self.home.values())):
            listed = {name for name, file in self.home.items() if file == shard}
            stored = set(self._open(shard).keys())
            wrong = sorted(listed ^ stored)
            if wrong:
                raise ValueError(f"{index}: disagrees with {shard} about {len(wrong)} tensors: {', '.join(wrong[:5])}")
        # Keyed by the names in the files, while `home` has the names of weights.
        self._files = dict(self.home)
        self._packed = find_packed_names(self.path, list(self.home))
        for name in self._packed:
            self.home[name] = self.home.pop(f"{name}{BLOCKS}")
            del self.home[f"{name}{SCALES}"]
        self._scaled = fp8.find_block_scales(self.path, list(self.home))
        for name in self._scaled.names:
            del self.home[f"{name}{fp8.SCALES}"]

    def _open(self, shard: str) -> safe_open:
        """Open a safetensors file of the directory. Raise ValueError if it is damaged or outside of the directory."""
        # Opened again for each tensor: pages that were read through a mapping count as this process's memory as long as
        # the file is open.
        if not shard or Path(shard).name != shard:
            raise ValueError(f"{self.path}: the index names {shard!r}, which is not a file in the directory itself")
        try:
            return safe_open(self.path / shard, "np")
        except SafetensorError as error:
            raise ValueError(f"{self.path / shard}: damaged, or the download is incomplete: {error}") from None

    def tensor(self, name: str) -> SliceReader:
        """Return a tensor that can be read in slices."""
        if name in self._packed:
            return PackedTensor(name, self._get_stored(f"{name}{BLOCKS}"), self._get_stored(f"{name}{SCALES}"))
        if name in self._scaled.names:
            file = self.path / self._files[name]
            scales = self._get_stored(f"{name}{fp8.SCALES}")
            return fp8.ScaledTensor(name, file, self._get_stored(name), scales, self._scaled.block)
        return self._get_stored(name)

    def _get_stored(self, name: str) -> SliceReader:
        """Return a tensor as it is stored in a file."""
        return self._open(self._files[name]).get_slice(name)


def check_tensors(
    directory: Directory, family: ModelFamily, model: CausalLM, *, draws_head: bool = False
) -> dict[str, list[Source]]:
    """Return `family.places(model)` with the names in the directory, see `ModelFamily.match_names`.

    The directory may omit the model's own prefix.

    Args:
        directory: the directory to check.
        family: the family that maps tensor names.
        model: the model to load.
        draws_head: the directory has a language model without the model's score head, which is initialized randomly.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, or not floats; the message holds a table. Or the
            head differs from the embedding that config.json ties it to.
    """
    places = family.match_names(family.places(model), directory.home)
    if draws_head:
        places = {path: sources for path, sources in places.items() if path not in SCORE}
    names = set()
    for path, sources in places.items():
        for source in sources:
            names |= {part.source.name for part in source.parts(layer_shape(model.base_specs[path]))}
    # Only names within the base model have the prefix; the head's names do not count.
    names -= {_HEAD, *(source.name for source in SCORE.values())}
    if not names & directory.home.keys():
        # The directory has only the base model, whose tensor names lack the model's own prefix.
        for path, sources in places.items():
            places[path] = [replace(one, name=re.sub(r"^(model|transformer)\.", "", one.name)) for one in sources]
    if model.ties:
        _check_tied_head(directory, places["embed/token"][0].name)
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
    # A directory may hold a second copy of the tied head.
    ignored = f"{family.ignored}|^lm_head.weight$" if model.ties or draws_head else family.ignored
    ignored_pattern = re.compile(ignored)
    for name in sorted(directory.home.keys() - used_names):
        if not ignored_pattern.search(name):
            rows.append(f"unexpected  {name}")
    if len(rows) > _MAX_ROWS:
        rows[_MAX_ROWS:] = [f"... and {len(rows) - _MAX_ROWS} more"]
    if rows:
        raise ValueError("\n  ".join([f"{directory.path}: its tensors do not match its config.json:", *rows]))
    return places


def _error_row(directory: Directory, name: str, expected_shape: tuple[int, ...]) -> str | None:
    """Return a line that explains why a tensor cannot be loaded; None if it can be."""
    if name not in directory.home:
        return f"missing     {name} {list(expected_shape)}"
    shape = tuple(directory.tensor(name).get_shape())
    if shape != expected_shape:
        return f"shape       {name} {list(shape)}, expected {list(expected_shape)}"
    dtype = directory.tensor(name).get_dtype()
    if dtype not in _FLOATS:
        return f"dtype       {name} {dtype}, expected one of {', '.join(_FLOATS)}"
    return None


def _check_tied_head(directory: Directory, table: str) -> None:
    """Compare a directory's head with the embedding that config.json ties it to, if it holds both.

    If they differ, transformers would not tie them, regardless of config.json.

    Raises:
        ValueError: the two differ.
    """
    if not {_HEAD, table} <= directory.home.keys():
        return
    table_tensor = directory.tensor(table)
    head_tensor = directory.tensor(_HEAD)
    shape = list(table_tensor.get_shape())
    head_shape = list(head_tensor.get_shape())
    # Only a band of rows is in memory at a time: 64 MiB of each tensor, at four bytes per element.
    rows_at_once = max(1, (64 << 20) // (4 * shape[-1]))
    is_equal = shape == head_shape
    for row in range(0, shape[0], rows_at_once):
        if not is_equal:
            break
        band = slice(row, min(row + rows_at_once, shape[0]))
        is_equal = np.array_equal(table_tensor[(band,)], head_tensor[(band,)])
    if not is_equal:
        raise ValueError(
            f"{directory.path}: config.json has tie_word_embeddings = true, but {_HEAD} differs from {table}; set "
            "tie_word_embeddings to false for a separate head, or remove the tensor"
        )
