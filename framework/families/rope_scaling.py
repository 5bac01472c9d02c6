"""Scaling of rotary positions in config.json, as transformers 5.23 reads it: lengths, partial heads, YaRN, LongRoPE.

`llama.rope` chooses between them by rope_type.
"""

from __future__ import annotations

import math

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.layers.rotary_scaling import LongRopeScaling, YarnScaling

_LENGTH = "original_max_position_embeddings"
_PART = "partial_rotary_factor"


def original_length(facts: ConfigFacts, scaling: ConfigFacts) -> int:
    """Return the number of positions before extension; max_position_embeddings by default.

    Args:
        facts: all fields of config.json.
        scaling: its object for rotary positions.

    Raises:
        ValueError: the length is given twice, with different values.
    """
    if _LENGTH in scaling.values:
        length = scaling.size(_LENGTH)
    elif _LENGTH in facts.values:
        length = facts.size(_LENGTH)
    else:
        length = facts.size("max_position_embeddings")
    # The field may also be outside of the object, and transformers uses that one.
    if facts.any(_LENGTH, length) != length:
        raise facts.error(_LENGTH, f"that of rope_parameters, {length}")
    return length


def rotary_dim(facts: ConfigFacts, head_dim: int, default_part: float = 1.0) -> int | None:
    """Return how many elements of each head rotate, None for all, in a family with `partial_rotary_factor`.

    Args:
        facts: fields of config.json.
        head_dim: elements of a head.
        default_part: the factor if config.json has none.

    Raises:
        ValueError: the factor is given twice with different values, or its part of a head is not an even number.
    """
    scaling = facts.part("rope_parameters") or facts.part("rope_scaling")
    source = facts if scaling is None or _PART not in scaling.values else scaling
    # In transformers, null is not the default of the family: all elements rotate.
    factor = source.number(_PART, default_part, null=True) or 1.0
    if facts.any(_PART, factor) not in (factor, None):
        raise facts.error(_PART, f"that of rope_parameters, {factor}")
    # Rounded down, as in transformers.
    num_rotated = int(head_dim * factor)
    if num_rotated == head_dim:
        return None
    if num_rotated < 2 or num_rotated % 2 or num_rotated > head_dim:
        raise source.error(_PART, f"an even number of the {head_dim} elements of a head, given {num_rotated}")
    return num_rotated


def rotary_part(num_rotated: int, head_dim: int) -> float:
    """Return the `partial_rotary_factor` with which `num_rotated` elements of a head rotate."""
    factor = num_rotated / head_dim
    # The quotient may be rounded below the exact fraction, and its product is then rounded down.
    return factor if int(head_dim * factor) == num_rotated else math.nextafter(factor, 1.0)


def yarn_scaling(facts: ConfigFacts, scaling: ConfigFacts) -> Config:
    """Return the scaling of rope_type yarn.

    Args:
        facts: all fields of config.json.
        scaling: its object for rotary positions.

    Raises:
        ValueError: a field is not a number above 0. A 0 counts as absent where transformers uses its default for it.
    """
    length = original_length(facts, scaling)
    factor = scaling.number("factor", null=True)
    if factor is None:
        factor = facts.size("max_position_embeddings") / length
    return config_for(
        YarnScaling,
        factor=factor,
        original_length=length,
        beta_fast=_number_or_none(scaling, "beta_fast") or 32.0,
        beta_slow=_number_or_none(scaling, "beta_slow") or 1.0,
        attention_factor=scaling.number("attention_factor", None, null=True),
        mscale=_number_or_none(scaling, "mscale"),
        mscale_all_dim=_number_or_none(scaling, "mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
    )


def yarn_facts(scaling: Config) -> dict[str, object]:
    """Return the object of config.json for rotary positions, the inverse of `yarn_scaling`."""
    fields = dict(scaling.leaves())
    length = fields.pop("original_length")
    stated = {name: value for name, value in fields.items() if value is not None}
    return {"rope_type": "yarn", **stated, _LENGTH: length}


def longrope_scaling(facts: ConfigFacts, scaling: ConfigFacts, *, length: int, num_frequencies: int) -> Config:
    """Return the scaling of rope_type longrope, for sequences of up to `length` tokens.

    Args:
        facts: all fields of config.json.
        scaling: its object for rotary positions.
        length: number of positions before extension.
        num_frequencies: number of pairs of elements of a head that rotate.

    Raises:
        ValueError: a field is not a number above 0, or the number of factors differs from the number of frequencies.
    """
    factors = {name: _factors(scaling, name, num_frequencies) for name in ("short_factor", "long_factor")}
    factor = scaling.number("factor", None, null=True)
    if factor is None:
        factor = facts.size("max_position_embeddings", 4096) / length
    return config_for(
        LongRopeScaling,
        **factors,
        original_length=length,
        factor=factor,
        attention_factor=scaling.number("attention_factor", None, null=True),
    )


def longrope_facts(scaling: Config) -> dict[str, object]:
    """Return the object of config.json for rotary positions, the inverse of `longrope_scaling`."""
    stated = {"rope_type": "longrope", "factor": scaling.factor}
    for name in ("short_factor", "long_factor"):
        stated[name] = list(scaling[name])
    if scaling.attention_factor is not None:
        stated["attention_factor"] = scaling.attention_factor
    return stated


def _factors(scaling: ConfigFacts, name: str, count: int) -> list[float]:
    """Return a list of `count` numbers above 0."""
    expected = f"a list of {count} numbers above 0, one for each rotated pair of elements"
    factors = scaling.any(name)
    if not isinstance(factors, list) or len(factors) != count:
        raise scaling.error(name, expected)
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise scaling.error(name, expected)
    return [float(factor) for factor in factors]


def _number_or_none(scaling: ConfigFacts, name: str) -> float | None:
    """Return a number above 0; None if the field is absent, null or 0, which transformers treats as not stated."""
    value = scaling.any(name, None)
    if value == 0 and not isinstance(value, bool):
        return None
    return scaling.number(name, None, null=True)
