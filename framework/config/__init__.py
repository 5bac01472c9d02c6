"""Configs: the constructor's signature is the schema. docs/configs.md has the rules."""

from framework.config.components import component
from framework.config.config import (
    Config,
    DType,
    FiniteNonNegative,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    config_for,
    diff,
    reference,
    schema_of,
    target_of,
)
from framework.config.names import ConfigError, FieldError, FieldTypeError, did_you_mean, join
from framework.config.schema import ABSENT, REQUIRED

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
    "join",
    "reference",
    "schema_of",
    "target_of",
]
