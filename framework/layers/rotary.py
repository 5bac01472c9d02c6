"""Rotary positions (Su et al. 2021, arXiv 2104.09864) with the frequency scaling of Llama 3.1.

The halves convention of Hugging Face and GPT-NeoX: element i turns with element i + H/2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from framework.config import Config, PositiveFloat, PositiveInt, component


@component
class Llama3Scaling:
    """Stretches the low frequencies so that a model trained at one context length can be used at a longer one.

    As in Llama 3.1's reference code: wavelengths over `original_length / low_freq_factor` are slowed by `factor`, those
    under `original_length / high_freq_factor` stay, and the ones between are interpolated.
    """

    def __init__(
        self,
        *,
        factor: PositiveFloat = 8.0,
        low_freq_factor: PositiveFloat = 1.0,
        high_freq_factor: PositiveFloat = 4.0,
        original_length: PositiveInt = 8192,
    ):
        self.factor = factor
        self.low = low_freq_factor
        self.high = high_freq_factor
        self.length = original_length

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Angular frequencies [H/2], radians per position -> the scaled ones."""
        wavelengths = 2 * math.pi / frequencies
        turns = self.length / wavelengths
        # 0 for the low frequencies, which are divided by the factor, and 1 for the high ones.
        smooth = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@component
class LinearScaling:
    """All positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    def __init__(self, *, factor: PositiveFloat):
        self.factor = factor

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Angular frequencies [H/2], radians per position -> the scaled ones."""
        return frequencies / self.factor


@component
class Rotary:
    """Turns pairs of elements of queries and keys by angles proportional to the position.

    Args:
        head_dim: H, even.
        theta: base of the geometric series of frequencies.
        scaling: e.g. `config_for(Llama3Scaling)`; None keeps the frequencies.
    """

    def __init__(
        self,
        *,
        head_dim: PositiveInt,
        theta: PositiveFloat = 10_000.0,
        scaling: Config | None = None,
    ):
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        frequencies = theta**-exponents
        # In float64 until they are used: a late position multiplies their error.
        if scaling is not None:
            frequencies = scaling.instantiate()(frequencies)
        self.frequencies = frequencies

    def __call__(self, positions_BS: jax.Array, *arrays_BSNH: jax.Array) -> tuple[jax.Array, ...]:
        """Turns each [B, S, N, H] array by positions [B, S] or [1, S], and keeps its dtype; angles are in float32."""
        dtype = jnp.promote_types(arrays_BSNH[0].dtype, jnp.float32)
        # bfloat16 could not even tell neighboring positions beyond 256 apart.
        positions_BS11 = positions_BS[:, :, None, None].astype(dtype)
        angles = positions_BS11 * jnp.asarray(self.frequencies, dtype)
        cos = jnp.cos(angles)
        sin = jnp.sin(angles)

        def turn(x: jax.Array) -> jax.Array:
            a, b = jnp.split(x.astype(dtype), 2, axis=-1)
            turned_a = a * cos - b * sin
            turned_b = b * cos + a * sin
            return jnp.concatenate([turned_a, turned_b], axis=-1).astype(x.dtype)

        return tuple(turn(x) for x in arrays_BSNH)
