"""config.json of a published model, read by type: whatever is not what transformers would take is refused by name.

Reading one wrongly trains another model without a word, so nothing is coerced, and fields that change what transformers
computes and that we do not read are refused. `python -m tools.check_altered` compares with transformers.
"""

from __future__ import annotations

import math
from typing import Any

REQUIRED: Any = object()


class Facts:
    """The fields of a config.json.

    Args:
        values: the JSON object.
        inside: "" for config.json's own, "rope_parameters." for those of the object that it has there.

    Methods return a field's value, or `default` if it is absent; null is a value (None) where `null` says so. All raise
    ValueError, with the field's name, its value and what was expected.
    """

    def __init__(self, values: dict[str, Any], inside: str = ""):
        self.values = values
        self._inside = inside

    def __contains__(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self.values.get(name) is not None

    def error(self, name: str, expected: str) -> ValueError:
        """That the field is not what was expected."""
        given = "absent" if name not in self.values else repr(self.values[name])
        return ValueError(f"config.json: {self._inside}{name} = {given}; expected {expected}")

    def any(self, name: str, default: Any = REQUIRED) -> Any:
        """Of any type."""
        value = self.values.get(name, default)
        if value is REQUIRED:
            raise ValueError(f"config.json: no field '{self._inside}{name}', which this architecture needs")
        return value

    def size(self, name: str, default: Any = REQUIRED, *, null: bool = False, least: int = 1) -> Any:
        """An integer, not below `least`."""
        value = self.any(name, default)
        if value is None and null:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: Any = REQUIRED, *, null: bool = False) -> Any:
        """A finite number above zero."""
        value = self.any(name, default)
        if value is None and null:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.any(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """A string."""
        value = self.any(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def part(self, name: str) -> Facts | None:
        """An object inside; None where it is absent, null or empty."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "an object or null")
        return Facts(value, f"{self._inside}{name}.") if value else None

    def size_by_names(self, *names: str) -> int:
        """A size that goes by several names, which may not contradict each other."""
        given = [name for name in names if name in self.values]
        sizes = {name: self.size(name) for name in given or names[:1]}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"config.json: {_pairs(sizes)}; expected one value, as these are names of the same")
        return next(iter(sizes.values()))


# Fields that transformers reads whatever the family is, with the values that leave its computation as it is.
_NOT_READ: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((True,), "true: attention sees earlier tokens only"),
    "use_bidirectional_attention": ((None, False), "false: attention sees earlier tokens only"),
    "per_layer_config": ((None, {}), "null: all layers have the same sizes"),
    "quantization_config": ((None,), "null: weights in float32, bfloat16 or float16"),
    "transformers_weights": ((None,), "null: weights are in model.safetensors or its shards"),
    "configuration_files": ((None, []), "nothing: config.json is the only one"),
    "text_config": ((None, {}), "null: a model of text alone"),
}


def refuse_unread(facts: Facts) -> None:
    """Raises ValueError for a field that would make transformers compute what we do not."""
    for name, (harmless, expected) in _NOT_READ.items():
        # By `is` or equality of containers: 0 == False, but transformers takes 0 for "not causal" too.
        value = facts.values.get(name, harmless[0])
        if not any(value is one or (isinstance(one, dict | list) and value == one) for one in harmless):
            raise facts.error(name, expected)


def float_dtype(facts: Facts) -> str | None:
    """The dtype that a config.json names, as transformers decides: `dtype`, and where that is absent `torch_dtype`.
    None where neither stands."""
    name = "dtype" if "dtype" in facts else "torch_dtype"
    if name not in facts:
        return None
    dtype = facts.values[name]
    if dtype not in ("float64", "float32", "bfloat16", "float16"):
        raise facts.error(name, "float32, bfloat16 or float16")
    return dtype


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in values.items())
