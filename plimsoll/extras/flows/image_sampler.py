"""Samples images from an image model, and interpolates in its latent space.

The model has methods sample, encode, decode and quantize, like plimsoll.Flow.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layout import Nested, TrainState
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import SHORT, phase


class ImageSampler:
    """Generates images with a trained model; each method is compiled for the number of images it is called with.

    Args:
        program: program of the experiment on its mesh.
        state: state with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages of the weights.

    Raises:
        ValueError: the model does not generate images.
    """

    def __init__(self, program: Program, state: TrainState, *, averaged: bool = False):
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
