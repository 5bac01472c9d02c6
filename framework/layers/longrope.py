"""LongRoPE (Ding et al. 2024, arXiv 2402.13753): one factor per rotary frequency, as in Phi-3 and Phi-4-mini.

A model has two lists of factors. transformers uses the long list for all positions of a sequence that is longer than
the pretraining length, and the short list for other sequences. Here a setting selects the list, so that a program
does not depend on the lengths of its sequences.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from plimsoll.framework.config import PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.rotary import Scaling


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
