"""Images: drawn by a model of images, and between images in its latent space.

The model has sample, encode, decode and quantize as framework.models.flow.Flow. May import: framework.program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from framework.layout import Nested
from framework.program import Program


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
        if not hasattr(self._model, "sample"):
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
