"""Configs: the constructor's signature is the schema. See docs/configs.md for the rules."""

from plimsoll.framework.config.changes import diff
from plimsoll.framework.config.components import component
from plimsoll.framework.config.config import Config, config_for, get_schema, get_target, reference
from plimsoll.framework.config.names import ConfigError, FieldError, FieldTypeError, did_you_mean, join
from plimsoll.framework.config.ranges import (
    DType,
    FiniteNonNegative,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
)
from plimsoll.framework.config.schema import ABSENT, REQUIRED

__all__ = [
    "ABSENT",
    "REQUIRED",
    "Config",
    "ConfigError",
    "DType",
    "FieldError",
    "FieldTypeError",
    "FiniteNonNegative",
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Probability",
    "Seed",
    "component",
    "config_for",
    "did_you_mean",
    "diff",
    "get_schema",
    "get_target",
    "join",
    "reference",
]
