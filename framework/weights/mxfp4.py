"""MXFP4, the format of gpt-oss's experts: 4-bit numbers, with one scale for each block of 32; read as bfloat16.

From the OCP Microscaling Formats specification, version 1.0: an element is e2m1 (a sign, two bits of exponent, one of
mantissa), and a scale is e8m0 (a power of two). In files, `NAME_blocks` holds two elements per byte, the lower four
bits first, and `NAME_scales` one byte per block. The result is exact: bfloat16 can represent all of these numbers.
"""

from __future__ import annotations

import functools
from pathlib import Path

import ml_dtypes
import numpy as np

from plimsoll.framework.weights.fp8 import read_quantization
from plimsoll.framework.weights.source import Index, SliceReader

BLOCKS = "_blocks"
SCALES = "_scales"
# Elements of a block, and their size in bytes.
BLOCK = 32
BLOCK_BYTES = BLOCK // 2
METHOD = "mxfp4"

# The value of each of the 16 codes; the highest bit is the sign.
_MAGNITUDES = np.asarray([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])


@functools.cache
def _pairs() -> np.ndarray:
    """Return uint32[65536]: the two bfloat16 numbers for each byte of codes, at the index 256 * scale + byte."""
    # Both the byte of two codes and the scale have 256 values.
    codes = np.arange(256)
    values = np.stack([_VALUES[codes & 15], _VALUES[codes >> 4]], axis=-1)
    # e8m0: 2^(code - 127); 255 is NaN.
    powers = np.where(codes == 255, np.nan, np.exp2(codes - 127.0)).astype(np.float32)
    # The largest elements at the largest scale overflow bfloat16, as they overflow float32.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = powers[:, None, None] * values
    return scaled.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode blocks of MXFP4 numbers.

    Args:
        blocks: codes, uint8[..., G, 16], two per byte.
        scales: e8m0 scales, uint8[..., G].

    Returns:
        bfloat16[..., G * 32].
    """
    # One lookup for two numbers: 600 million of them per second, while arithmetic on bfloat16 reaches 15 million.
    indices = scales[..., None].astype(np.uint16) << 8 | blocks
    # Ten times as fast as numpy.take.
    pairs = _pairs()[indices]
    return pairs.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


class PackedTensor:
    """Slice reader of a weight [E, I, O] that is stored as blocks [E, O, I / 32, 16] and scales [E, O, I / 32].

    Args:
        name: name of the weight, for errors.
        blocks, scales: slice readers of the two tensors, which know their shapes and dtypes.

    Raises:
        ValueError: the two tensors do not match.
    """

    def __init__(self, name: str, blocks: SliceReader, scales: SliceReader):
        block_shape = tuple(blocks.get_shape())
        scale_shape = tuple(scales.get_shape())
        is_bytes = blocks.get_dtype() == scales.get_dtype() == "U8"
        if not is_bytes or len(scale_shape) != 3 or block_shape != (*scale_shape, BLOCK_BYTES):
            raise ValueError(
                f"{name}: expected {BLOCKS} U8 [E, O, I / 32, {BLOCK_BYTES}] and {SCALES} U8 [E, O, I / 32], given "
                f"{blocks.get_dtype()} {list(block_shape)} and {scales.get_dtype()} {list(scale_shape)}"
            )
        self._blocks = blocks
        self._scales = scales
        self._num_blocks = scale_shape[2]
        self._shape = [scale_shape[0], self._num_blocks * BLOCK, scale_shape[1]]

    def get_shape(self) -> list[int]:
        """Return [E, I, O], as in safetensors."""
        return self._shape

    def get_dtype(self) -> str:
        """Return the dtype of the decoded numbers, under safetensors' name."""
        return "BF16"

    def __getitem__(self, index: Index, /) -> np.ndarray:
        """Return bfloat16[E, I, O] for a slice without steps; decodes only the blocks that the slice touches."""
        experts, inputs, outputs = index
        start, stop, step = inputs.indices(self._shape[1])
        assert step == 1, "weights are read without steps"
        first_block = start // BLOCK
        touched = slice(first_block, -(-stop // BLOCK))
        rows = (experts, outputs, touched)
        values_EOI = decode(self._blocks[(*rows, slice(0, BLOCK_BYTES))], self._scales[rows])
        offset = first_block * BLOCK
        return values_EOI[:, :, start - offset : stop - offset].swapaxes(1, 2)


def find_packed_names(folder: Path, stored: list[str]) -> set[str]:
    """Return the names of the weights that a directory stores as blocks and scales, according to its config.json.

    Args:
        folder: a directory, with or without a config.json.
        stored: names of all tensors in its files.

    Raises:
        ValueError: config.json does not agree with the files, or blocks lack their scales.
    """
    names = sorted(name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS))
    is_declared = read_quantization(folder / "config.json").get("quant_method") == METHOD
    if is_declared != bool(names):
        declared = (
            f"quantization_config.quant_method = {METHOD}" if is_declared else f"no quantization_config of {METHOD}"
        )
        found = f"tensors such as {names[0]}{BLOCKS}" if names else f"no tensor NAME{BLOCKS}"
        raise ValueError(f"{folder}: config.json has {declared}, but the files have {found}")
    for name in names:
        if f"{name}{SCALES}" not in stored:
            raise ValueError(f"{folder}: {name}{BLOCKS} has no matching {name}{SCALES}")
    return set(names)
