"""Type hints for fields: numbers in a range, and dtype names."""

import math
from typing import Annotated, Literal

import annotated_types as at

PositiveInt = Annotated[int, at.Gt(0)]
NonNegativeInt = Annotated[int, at.Ge(0)]
PositiveFloat = Annotated[float, at.Gt(0)]
NonNegativeFloat = Annotated[float, at.Ge(0)]
Fraction = Annotated[float, at.Interval(ge=0, lt=1)]
Probability = Annotated[float, at.Interval(ge=0, le=1)]
FiniteNonNegative = Annotated[float, at.Interval(ge=0, lt=math.inf)]
# jax.random.key uses 32 bits of a seed and silently drops higher bits.
Seed = Annotated[int, at.Interval(ge=0, lt=2**32)]
DType = Literal["float32", "bfloat16", "float16", "float64"]
