"""Rotary frequencies stretched to a longer context, as in transformers: YaRN and LongRoPE.

YaRN (Peng et al. 2023, arXiv 2309.00071): frequencies that turn often within the original length stay, those that
hardly turn are divided by `factor`, and those between are interpolated. Cosines and sines are multiplied by the
attention factor, so attention logits between rotated elements are multiplied by its square.

LongRoPE (Ding et al. 2024, arXiv 2402.13753) has one factor per rotary frequency, as in Phi-3 and Phi-4-mini. A model
has two lists of factors. transformers uses the long list for all positions of a sequence that is longer than the
pretraining length, and the short list for other sequences. Here a setting selects the list, so that a program does not
depend on the lengths of its sequences.
"""

from __future__ import annotations

import math
from typing import Literal

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
        # The ramp ends at the (fractional) indices of the frequencies that turn this often within the original length.
        ends = []
        for rotations in (self.beta_fast, self.beta_slow):
            ratio = self.length / (rotations * 2 * math.pi)
            ends.append(2 * count * math.log(ratio) / (2 * math.log(theta)))
        start, end = ends
        if self.truncate:
            start = math.floor(start)
            end = math.ceil(end)
        start = max(start, 0)
        end = min(end, 2 * count - 1)
        if start == end:
            end += _SHORTEST_RAMP
        # 0 for the fast frequencies, which stay, and 1 for the slow ones, which are divided.
        ramp = np.clip((np.arange(count) - start) / (end - start), 0.0, 1.0)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)


@component
class LongRopeScaling(Scaling):
    """Computes the frequencies and attention factor of transformers' `_compute_longrope_parameters`.

    Args:
        short_factor: divisor of each frequency, [R/2] numbers, for sequences of up to original_length tokens.
        long_factor: divisor of each frequency, [R/2] numbers, for longer sequences.
        original_length: number of positions that the model was pretrained with, above 1.
        factor: ratio of the extended context to the original one.
        attention_factor: factor on cosines and sines; None computes sqrt(1 + ln(factor) / ln(original_length)), or 1
            if `factor` is at most 1.
        use: "short" computes what transformers does for sequences of up to original_length tokens, and rejects longer
            ones; "long" computes what it does for longer ones, regardless of the length.
    """

    def __init__(
        self,
        *,
        short_factor: list[float],
        long_factor: list[float],
        original_length: PositiveInt,
        factor: PositiveFloat,
        attention_factor: PositiveFloat | None = None,
        use: Literal["short", "long"] = "short",
    ):
        self.factors = np.asarray(short_factor if use == "short" else long_factor, np.float64)
        if not (self.factors > 0).all():
            raise ValueError(f"{use}_factor = {self.factors.tolist()}; expected numbers above 0")
        if original_length < 2:
            raise ValueError(f"original_length = {original_length}; expected at least 2")
        self.name = f"{use}_factor"
        # For longer sequences, transformers would use the long factors.
        if use == "short":
            self.max_positions = original_length
        if attention_factor is not None:
            self.amplitude = attention_factor
        elif factor > 1:
            self.amplitude = math.sqrt(1 + math.log(factor) / math.log(original_length))

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Divide each frequency by its factor; see `Scaling.__call__`.

        Raises:
            ValueError: the number of factors differs from the number of frequencies.
        """
        if self.factors.shape != frequencies.shape:
            raise ValueError(f"{self.name} has {self.factors.size} numbers; expected {frequencies.size}")
        return frequencies / self.factors
