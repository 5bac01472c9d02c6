"""LongRoPE (Ding et al. 2024, arXiv 2402.13753): a factor for each rotary frequency, as Phi-3 and Phi-4-mini have it.

A model has two lists of factors. transformers takes the long one for all positions of a sequence that is longer than
the model was pretrained with, and the short one for others. Which one a run takes is a setting here, so that no
program depends on how long its sequences happen to be.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from framework.config import PositiveFloat, PositiveInt, component
from framework.layers.rotary import Scaling


@component
class LongRopeScaling(Scaling):
    """The frequencies and the attention factor of transformers' `_compute_longrope_parameters`.

    Args:
        short_factor: what each frequency is divided by, [R/2] numbers.
        long_factor: the same for long sequences.
        original_length: positions that the model was pretrained with, above 1.
        factor: how many times longer the context is.
        attention_factor: multiplies cosines and sines; None computes sqrt(1 + ln(factor) / ln(original_length)).
        use: "short" computes what transformers does for sequences of up to original_length tokens, and refuses longer
            ones; "long" what it does for longer ones, whatever the length.
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
        if use == "short":
            self.max_positions = original_length
        if attention_factor is not None:
            self.amplitude = attention_factor
        elif factor > 1:
            self.amplitude = math.sqrt(1 + math.log(factor) / math.log(original_length))

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """As Scaling.__call__.

        Raises:
            ValueError: there is not one factor for each frequency.
        """
        if self.factors.shape != frequencies.shape:
            raise ValueError(f"{self.name} has {self.factors.size} numbers; expected {frequencies.size}")
        return frequencies / self.factors
