"""Reads the safetensors files of a published directory. Nothing in it is ever executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from plimsoll.framework.files import hub_models
from plimsoll.framework.weights.mxfp4 import BLOCKS, SCALES, PackedTensor, find_packed_names


class Directory:
    """The safetensors files of a directory. Headers are read immediately, tensors on demand.

    A weight in MXFP4 has its own name here instead of those of its blocks and scales, and is read as bfloat16.

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

    def _open(self, shard: str) -> Any:
        """Open a safetensors file of the directory. Raise ValueError if it is damaged or outside of the directory."""
        # Opened again for each tensor: pages that were read through a mapping count as this process's memory as long as
        # the file is open.
        if not shard or Path(shard).name != shard:
            raise ValueError(f"{self.path}: the index names {shard!r}, which is not a file in the directory itself")
        try:
            return safe_open(self.path / shard, "np")
        except SafetensorError as error:
            raise ValueError(f"{self.path / shard}: damaged, or the download is incomplete: {error}") from None

    def tensor(self, name: str) -> Any:
        """Return a slice reader for a tensor, with `get_shape()`, `get_dtype()` and `[slices]`."""
        if name in self._packed:
            return PackedTensor(name, self._get_stored(f"{name}{BLOCKS}"), self._get_stored(f"{name}{SCALES}"))
        return self._get_stored(name)

    def _get_stored(self, name: str) -> Any:
        """Return the slice reader of a tensor as it is stored in a file."""
        return self._open(self._files[name]).get_slice(name)
