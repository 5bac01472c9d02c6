"""Writes grids of images as PNG (Pillow)."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

# In pixels: the height up to which small images are magnified, and the gap between images.
_HEIGHT = 32
_GAP = 2
_DARK_GRAY = 64


def save_grid(images: np.ndarray, png_path: Path, *, levels: int, columns: int | None = None) -> Path:
    """Write a grid of images, row by row, on a dark gray background; replaces `png_path` atomically and returns it.

    Args:
        images: uint8 [N, H, W, C] with values 0 to levels - 1 and C = 1 (gray), 3 (RGB) or 4 (RGBA).
        png_path: file to write.
        levels: number of distinct values of a channel.
        columns: number of images per row; None makes the grid as square as possible.

    Raises:
        ValueError: the number of channels is not supported.
    """
    from PIL import Image

    count, height, width, channels = images.shape
    if channels not in (1, 3, 4):
        raise ValueError(f"images with {channels} channels cannot be written as PNG; expected 1, 3 or 4")
    columns = columns or math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    # An integer, so that each pixel becomes a square of equal pixels.
    scale = max(1, _HEIGHT // height)
    cell_height = scale * height + _GAP
    cell_width = scale * width + _GAP
    picture_shape = (rows * cell_height + _GAP, columns * cell_width + _GAP, channels)
    picture = np.full(picture_shape, _DARK_GRAY, np.uint8)
    shades = np.round(images * (255.0 / (levels - 1)))
    magnified = shades.astype(np.uint8)
    magnified = magnified.repeat(scale, axis=1)
    magnified = magnified.repeat(scale, axis=2)
    for number, image in enumerate(magnified):
        row, column = divmod(number, columns)
        top = row * cell_height + _GAP
        left = column * cell_width + _GAP
        bottom = top + scale * height
        right = left + scale * width
        picture[top:bottom, left:right] = image
    # Pillow expects single-channel images without a channel axis.
    pixels = picture[..., 0] if channels == 1 else picture
    temporary = png_path.with_name(png_path.name + ".tmp")
    try:
        Image.fromarray(pixels).save(temporary, format="PNG")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, png_path)
    return png_path
