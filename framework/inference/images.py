"""Samples images from an image model, interpolates in its latent space, and writes grids of images as PNG (Pillow).

The model has methods sample, encode, decode and quantize, like plimsoll.Flow.
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

from plimsoll.framework.layout import Nested
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import SHORT, phase

# In pixels: the height up to which small images are magnified, and the gap between images.
_HEIGHT = 32
_GAP = 2
_DARK_GRAY = 64


class ImageSampler:
    """Generates images with a trained model; each method is compiled for the number of images it is called with.

    Args:
        program: program of the experiment on its mesh.
        state: state with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages of the weights.

    Raises:
        ValueError: the model does not generate images.
    """

    def __init__(self, program: Program, state: Nested, *, averaged: bool = False):
        self._model: Any = program.experiment.model
        if not self._model.generates_images:
            raise ValueError(f"model is a {type(self._model).__name__}, which generates no images; expected a flow")
        weights = program.weights(state, averaged=averaged)
        # The methods of the model use all weights at once, so offloaded weights are copied to the device.
        self._params = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), weights)
        self._jit = functools.partial(program.jit, out_shardings=program.replicated)

    def sample(self, num: int, temperature: float, seed: int) -> np.ndarray:
        """Sample `num` images from latents with standard deviation `temperature`: uint8 [num, H, W, C]."""
        draw = self._jit(lambda params, key, heat: self._model.sample(params, key, num, heat))
        key = jax.random.key(seed)
        # An array, so that the program is not recompiled for each temperature.
        heat = jnp.float32(temperature)
        with phase(f"compiling and drawing {num} images", patience=SHORT):
            return np.asarray(draw(self._params, key, heat))

    def between(self, first: np.ndarray, last: np.ndarray, steps: int) -> np.ndarray:
        """Interpolate linearly between pairs of images in latent space.

        Args:
            first: uint8 [N, H, W, C], the images at the start of each line.
            last: uint8 [N, H, W, C], the images at the end of each line.
            steps: number of images on each line, including both ends.

        Returns:
            The images, uint8 [N * steps, H, W, C].
        """

        def walk(params: Nested, first: jax.Array, last: jax.Array) -> jax.Array:
            first_latents = self._model.encode(params, first)
            last_latents = self._model.encode(params, last)
            parts = jnp.linspace(0.0, 1.0, steps)
            latents = jax.tree.map(lambda a, b: _interpolate(a, b, parts), first_latents, last_latents)
            images = self._model.decode(params, latents)
            return self._model.quantize(images)

        jitted = self._jit(walk)
        with phase("compiling and drawing the interpolated images", patience=SHORT):
            return np.asarray(jitted(self._params, first, last))


def _interpolate(a: jax.Array, b: jax.Array, parts: jax.Array) -> jax.Array:
    """Interpolate linearly: (1 - t) a + t b as [N * T, ...], for a and b [N, ...] and t = parts [T]."""
    image_shape = a.shape[1:]
    # t is [1, T, 1, ..., 1], to broadcast over the images and their elements.
    ones = (1,) * len(image_shape)
    t = parts.reshape(1, -1, *ones)
    mixed = (1.0 - t) * a[:, None] + t * b[:, None]
    return mixed.reshape(-1, *image_shape)


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
