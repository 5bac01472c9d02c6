"""YaRN (Peng et al. 2023, arXiv 2309.00071): rotary positions stretched to a longer context, as in transformers.

Frequencies that turn often within the original length stay, those that hardly turn are divided by `factor`, and those
between are interpolated. Cosines and sines are multiplied by the attention factor, so attention logits between
rotated elements are multiplied by its square.
"""

from __future__ import annotations

import math

import numpy as np

from plimsoll.framework.config import PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.rotary import Scaling

# Keeps the ramp finite if both of its ends are the same index, as in transformers.
_SHORTEST_RAMP = 0.001


def attention_scale(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 mscale ln(factor) + 1, the paper's factor on cosines and sines; 1 if nothing is stretched."""
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


@component
class YarnScaling(Scaling):
    """Computes the frequencies and attention factor of transformers' `_compute_yarn_parameters`.

    Args:
        factor: ratio of the extended context to `original_length`.
        original_length: number of positions that the model was pretrained with.
        beta_fast: frequencies that turn at least this often within `original_length` stay.
        beta_slow: frequencies that turn at most this often are divided by `factor`.
        attention_factor: factor on cosines and sines; None computes it from `factor` and the two fields below.
        mscale: with `mscale_all_dim`, the attention factor is `attention_scale(factor, mscale)` divided by
            `attention_scale(factor, mscale_all_dim)`. If either is None, it is `attention_scale(factor)`.
        mscale_all_dim: see `mscale`.
        truncate: whether the ends of the ramp between unchanged and divided frequencies are rounded to whole indices.
    """

    def __init__(
        self,
        *,
        factor: PositiveFloat,
        original_length: PositiveInt,
        beta_fast: PositiveFloat = 32.0,
        beta_slow: PositiveFloat = 1.0,
        attention_factor: PositiveFloat | None = None,
        mscale: PositiveFloat | None = None,
        mscale_all_dim: PositiveFloat | None = None,
        truncate: bool = True,
    ):
        self.factor = factor
        self.length = original_length
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        if attention_factor is not None:
            self.amplitude = attention_factor
        elif mscale is not None and mscale_all_dim is not None:
            self.amplitude = attention_scale(factor, mscale) / attention_scale(factor, mscale_all_dim)
        else:
            self.amplitude = attention_scale(factor)

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scale angular frequencies [R/2] of base theta, in radians per position.

        Raises:
            ValueError: theta is at most 1, so frequencies do not fall with the index.
        """
        if theta <= 1:
            raise ValueError(f"theta = {theta}; expected more than 1 with YarnScaling, which needs falling frequencies")
        count = len(frequencies)
        start, end = self._ramp_ends(2 * count, theta)
        if start == end:
            end += _SHORTEST_RAMP
        # 0 for the fast frequencies, which stay, and 1 for the slow ones, which are divided.
        ramp = np.clip((np.arange(count) - start) / (end - start), 0.0, 1.0)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def _ramp_ends(self, rotary_dim: int, theta: float) -> tuple[float, float]:
        """Return the indices of the frequencies at which the ramp starts and ends."""

        def find_index(rotations: float) -> float:
            """Return the fractional index of the frequency that turns this often within the original length."""
            return rotary_dim * math.log(self.length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        start = find_index(self.beta_fast)
        end = find_index(self.beta_slow)
        if self.truncate:
            start = math.floor(start)
            end = math.ceil(end)
        return max(start, 0), min(end, rotary_dim - 1)
