"""Images side by side, as a PNG. Pillow is imported when one is written."""

import math
import os
from pathlib import Path

import numpy as np

_HEIGHT, _GAP = 32, 2  # pixels: what small images are magnified to, and what stands between them


def save_grid(images: np.ndarray, png_path: Path, *, levels: int, columns: int | None = None) -> Path:
    """Writes images, row by row, on dark gray; replaces `png_path` atomically, and returns it.

    Args:
      images: uint8 [N,H,W,C] of values 0 to levels - 1, with C = 1 (gray), 3 (RGB) or 4 (RGBA).
      columns: images in a row; as many as there are rows, if None.

    Raises:
      ValueError: another number of channels.
    """
    from PIL import Image

    count, height, width, channels = images.shape
    if channels not in (1, 3, 4):
        raise ValueError(f"images of {channels} channels make no PNG; expected 1, 3 or 4")
    columns = columns or math.ceil(math.sqrt(count))
    rows, scale = -(-count // columns), max(1, _HEIGHT // height)
    cell = (scale * height + _GAP, scale * width + _GAP)
    picture = np.full((rows * cell[0] + _GAP, columns * cell[1] + _GAP, channels), 64, np.uint8)
    shown = np.round(images * (255.0 / (levels - 1))).astype(np.uint8).repeat(scale, axis=1).repeat(scale, axis=2)
    for number, image in enumerate(shown):
        top, left = number // columns * cell[0] + _GAP, number % columns * cell[1] + _GAP
        picture[top : top + scale * height, left : left + scale * width] = image
    temporary = png_path.with_name(png_path.name + ".tmp")
    Image.fromarray(picture[..., 0] if channels == 1 else picture).save(temporary, format="PNG")
    os.replace(temporary, png_path)
    return png_path
