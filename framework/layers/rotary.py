"""Rotary positions (Su et al. 2021, arXiv 2104.09864) with the frequency scaling of Llama 3.1.

This module uses the half-split convention of Hugging Face and GPT-NeoX: element i rotates with element i + R/2, where
the first R of a head's H elements rotate. Further scalings of the frequencies, YaRN and LongRoPE, are in
`rotary_scaling.py`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.config import Config, PositiveFloat, PositiveInt, component

# The number of bits of a position whose angle is computed as a product of the position and the frequency, see `Rotary`.
_LOW_BITS = 10


class Scaling:
    """Scaling of rotary frequencies to longer contexts.

    Attributes:
        amplitude: factor on cosines and sines.
        max_positions: the longest sequence that the frequencies support; None for any.
    """

    amplitude: float = 1.0
    max_positions: int | None = None

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scale angular frequencies [R/2] of base theta, in radians per position."""
        raise NotImplementedError


@component
class Llama3Scaling(Scaling):
    """Stretches the low frequencies so that a model trained at one context length can be used at a longer one.

    As in Llama 3.1's reference code: frequencies with a wavelength over `original_length / low_freq_factor` are
    divided by `factor`, those with a wavelength under `original_length / high_freq_factor` stay, and those between
    are interpolated.
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

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """See `Scaling.__call__`."""
        wavelengths = 2 * math.pi / frequencies
        rotations = self.length / wavelengths
        # 0 for the low frequencies, which are divided by the factor, and 1 for the high ones.
        smooth = np.clip((rotations - self.low) / (self.high - self.low), 0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@component
class LinearScaling(Scaling):
    """Divides all positions by `factor` (position interpolation, arXiv 2306.15595)."""

    def __init__(self, *, factor: PositiveFloat):
        self.factor = factor

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """See `Scaling.__call__`."""
        return frequencies / self.factor


@component
class Rotary:
    """Rotates pairs of elements of queries and keys by angles proportional to the position.

    Args:
        head_dim: H, channels per head.
        theta: base of the geometric series of frequencies.
        scaling: config of a frequency scaling, e.g. `config_for(Llama3Scaling)`; None for no scaling.
        rotary_dim: R, even: only the first R elements of each head rotate; None means all, so H is even.
    """

    def __init__(
        self,
        *,
        head_dim: PositiveInt,
        theta: PositiveFloat = 10_000.0,
        scaling: Config | None = None,
        rotary_dim: PositiveInt | None = None,
    ):
        if rotary_dim is None and head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
        self.rotary_dim = rotary_dim or head_dim
        if self.rotary_dim % 2 or self.rotary_dim > head_dim:
            raise ValueError(f"rotary_dim = {rotary_dim}; expected an even number up to head_dim = {head_dim}")
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        frequencies = theta**-exponents
        self.amplitude = 1.0
        self.max_positions: int | None = None
        # The frequencies stay in float64 until they are used: a late position multiplies their error.
        if scaling is not None:
            stretch: Scaling = scaling.instantiate()
            frequencies = stretch(frequencies, theta)
            self.amplitude = stretch.amplitude
            self.max_positions = stretch.max_positions
        self.frequencies = frequencies

    def check_length(self, seq_len: int) -> None:
        """Raise ValueError if sequences are longer than the frequencies support."""
        if self.max_positions is not None and seq_len > self.max_positions:
            raise ValueError(
                f"sequences of {seq_len} tokens exceed rotary.scaling.original_length = {self.max_positions}; "
                "set rotary.scaling.use = long, which selects the frequencies for longer sequences"
            )

    def __call__(self, positions_BS: jax.Array, *arrays_BSNH: jax.Array) -> tuple[jax.Array, ...]:
        """Rotate each [B, S, N, H] array by positions [B, S] or [1, S], and keep its dtype; angles are in float32.

        Raises:
            ValueError: the rows are longer than the frequencies support.
        """
        self.check_length(positions_BS.shape[1])
        dtype = jnp.promote_types(arrays_BSNH[0].dtype, jnp.float32)
        angles = self._compute_angles(positions_BS[:, :, None, None], dtype)
        cos = jnp.cos(angles)
        sin = jnp.sin(angles)
        if self.amplitude != 1:
            cos = cos * self.amplitude
            sin = sin * self.amplitude
        rotated_arrays = []
        for x_BSNH in arrays_BSNH:
            first_BSNR = x_BSNH
            rest = []
            if self.rotary_dim < x_BSNH.shape[-1]:
                first_BSNR, *rest = jnp.split(x_BSNH, [self.rotary_dim], axis=-1)
            a, b = jnp.split(first_BSNR.astype(dtype), 2, axis=-1)
            rotated_a = a * cos - b * sin
            rotated_b = b * cos + a * sin
            rotated_BSNR = jnp.concatenate([rotated_a, rotated_b], axis=-1).astype(x_BSNH.dtype)
            rotated_arrays.append(jnp.concatenate([rotated_BSNR, *rest], axis=-1) if rest else rotated_BSNR)
        return tuple(rotated_arrays)

    def _compute_angles(self, positions: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the angles of integer positions [..., 1], up to whole turns; [..., R/2]."""
        # bfloat16 cannot even distinguish neighboring positions beyond 256. A float32 angle of a million radians is
        # exact to 1/32, so the angles of multiples of 1024 are reduced to half a turn per 1024 positions beforehand, in
        # float64: then the error at a million positions is below 0.001.
        low = positions & ((1 << _LOW_BITS) - 1)
        high = positions >> _LOW_BITS
        per_high = np.remainder(self.frequencies * (1 << _LOW_BITS) + math.pi, 2 * math.pi) - math.pi
        return low.astype(dtype) * jnp.asarray(self.frequencies, dtype) + high.astype(dtype) * jnp.asarray(
            per_high, dtype
        )
