"""FP8 weights with a scale for each block of a matrix, as DeepSeek-V3 is published (arXiv 2412.19437, section 3.3).

In the files, `NAME` is [O, I] in e4m3 and `NAME_scale_inv` [ceil(O / R), ceil(I / C)] in float32, for blocks of R rows
and C columns (`quantization_config.weight_block_size` of config.json). The products are rounded to bfloat16.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.weights.source import Index, SliceReader

SCALES = "_scale_inv"
METHOD = "fp8"
# safetensors' name of the dtype.
DTYPE = "F8_E4M3"


@dataclass(frozen=True)
class BlockScales:
    """The weights that a directory stores in FP8.

    Attributes:
        names: names of the weights that have scales.
        block: (R, C), rows and columns of a block.
    """

    names: frozenset[str]
    block: tuple[int, int]


class ScaledTensor:
    """Slice reader of a weight [O, I] that is stored in FP8 with a scale for each block.

    Args:
        name: name of the weight.
        file: the safetensors file that holds it.
        codes: slice reader of the weight, for its shape and dtype.
        scales: slice reader of its scales.
        block: (R, C), rows and columns of a block.

    Raises:
        ValueError: the weight is not a matrix in FP8, or its scales have another shape or dtype.
    """

    def __init__(self, name: str, file: Path, codes: SliceReader, scales: SliceReader, block: tuple[int, int]):
        self._name = name
        self._file = file
        self._shape = codes.get_shape()
        self._scales = scales
        self._block = block
        grid = [math.ceil(size / part) for size, part in zip(self._shape, block, strict=False)]
        is_matrix = codes.get_dtype() == DTYPE and len(self._shape) == 2
        if not is_matrix or scales.get_dtype() != "F32" or scales.get_shape() != grid:
            raise ValueError(
                f"{name}: expected {DTYPE} [O, I] and {SCALES} F32 {grid}, given {codes.get_dtype()} {self._shape} and "
                f"{scales.get_dtype()} {scales.get_shape()}"
            )

    def get_shape(self) -> list[int]:
        """Return [O, I]."""
        return self._shape

    def get_dtype(self) -> str:
        """Return the dtype of the scaled numbers, under safetensors' name."""
        return "BF16"

    def __getitem__(self, index: Index, /) -> np.ndarray:
        """Return bfloat16[O, I] for a slice without steps."""
        # safetensors cannot return this dtype as a numpy array, so the bytes are found by the file's header.
        with open(self._file, "rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            entry = json.loads(opened.read(header_bytes))[self._name]
        offset = 8 + header_bytes + entry["data_offsets"][0]
        codes_OI = np.memmap(self._file, ml_dtypes.float8_e4m3fn, "r", offset, tuple(self._shape))
        values_OI = np.asarray(codes_OI[index], np.float32)
        # A slice may begin and end within blocks.
        ranges = [range(*part.indices(size)) for part, size in zip(index, self._shape, strict=True)]
        for part in ranges:
            assert part.step == 1, "weights are read without steps"
        rows, columns = [
            np.arange(part.start, part.stop) // size for part, size in zip(ranges, self._block, strict=True)
        ]
        if not rows.size or not columns.size:
            return values_OI.astype(ml_dtypes.bfloat16)
        grid = self._scales[(slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))]
        values_OI *= grid[rows - rows[0]][:, columns - columns[0]]
        return values_OI.astype(ml_dtypes.bfloat16)


def find_block_scales(folder: Path, stored: list[str]) -> BlockScales:
    """Return which weights a directory stores in FP8, according to its config.json.

    Args:
        folder: a directory, with or without a config.json.
        stored: names of all tensors in its files.

    Raises:
        ValueError: config.json does not agree with the files.
    """
    names = frozenset(name.removesuffix(SCALES) for name in stored if name.endswith(SCALES))
    quantization = read_quantization(folder / "config.json")
    is_declared = quantization.get("quant_method") == METHOD
    if is_declared != bool(names):
        declared = f"quantization_config.quant_method = {METHOD}" if is_declared else "no quantization_config of fp8"
        found = f"tensors such as {min(names)}{SCALES}" if names else f"no tensor NAME{SCALES}"
        raise ValueError(f"{folder}: config.json has {declared}, but the files have {found}")
    unmatched = sorted(names - set(stored))
    if unmatched:
        raise ValueError(f"{folder}: {unmatched[0]}{SCALES} has no matching {unmatched[0]}")
    rows, columns = quantization["weight_block_size"] if is_declared else (1, 1)
    return BlockScales(names, (rows, columns))


def read_quantization(file: Path) -> dict[str, Any]:
    """Return `quantization_config` of a config.json; {} if there is none or the file is not a valid config."""
    if not file.is_file():
        return {}
    try:
        facts = parse_json(file.read_text())
    except ValueError:
        # The code that reads the config reports this error.
        return {}
    quantization = facts.get("quantization_config") if isinstance(facts, dict) else None
    return quantization if isinstance(quantization, dict) else {}
