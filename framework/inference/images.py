"""Images: drawn by a model of images, or between images in its latent space; and side by side in a PNG, by Pillow.

The model has sample, encode, decode and quantize as framework.models.flow.Flow.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from framework.layout import Nested
from framework.program.program import Program

_HEIGHT, _GAP = 32, 2  # pixels: what small images are magnified to, and what stands between them


class Images:
    """What a trained model draws; each method is compiled for its numbers.

    Args:
        program: the experiment on its mesh.
        state: with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages.

    Raises:
        ValueError: the model draws no images.
    """

    def __init__(self, program: Program, state: Nested, *, averaged: bool = False):
        self._model: Any = program.experiment.model
        if not self._model.draws_images:
            raise ValueError(f"model is a {type(self._model).__name__}, which draws no images; expected a flow")
        self._params = jax.tree.map(
            lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")),
            program.weights(state, averaged=averaged),
        )
        self._jit = functools.partial(program.jit, out_shardings=program.replicated)

    def sample(self, num: int, temperature: float, seed: int) -> np.ndarray:
        """uint8 [num,H,W,C] from latents of that standard deviation."""
        draw = self._jit(lambda params, key, heat: self._model.sample(params, key, num, heat))
        return np.asarray(draw(self._params, jax.random.key(seed), jnp.float32(temperature)))

    def between(self, first: np.ndarray, last: np.ndarray, steps: int) -> np.ndarray:
        """From images uint8 [N,H,W,C] to as many others, in equal steps on a line in latent space: uint8
        [N * steps,H,W,C], the given ones at both ends."""

        def walk(params: Nested, first: jax.Array, last: jax.Array) -> jax.Array:
            ends = self._model.encode(params, first), self._model.encode(params, last)
            parts = jnp.linspace(0.0, 1.0, steps)
            mixed = jax.tree.map(lambda a, b: _mixed(a, b, parts), *ends)
            return self._model.quantize(self._model.decode(params, mixed))

        return np.asarray(self._jit(walk)(self._params, first, last))


def _mixed(a: jax.Array, b: jax.Array, parts: jax.Array) -> jax.Array:
    """[N, ...] twice and [T] -> [N * T, ...]: (1 - t) a + t b."""
    t = parts.reshape(1, -1, *(1,) * (a.ndim - 1))
    return ((1.0 - t) * a[:, None] + t * b[:, None]).reshape(-1, *a.shape[1:])


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
    try:
        Image.fromarray(picture[..., 0] if channels == 1 else picture).save(temporary, format="PNG")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, png_path)
    return png_path
