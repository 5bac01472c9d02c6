"""Typed access to a published model's config.json; a value that transformers would not accept is refused by name.

A misread field silently trains a different model. So no value is coerced, and fields are refused that change the
computation of transformers but that we do not read. `python -m tools.check_altered` compares with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# The default of a required field; None would not do, because null is a valid value.
REQUIRED = object()


class ConfigFacts:
    """The fields of a config.json.

    Methods return a field's value, or `default` if it is absent. If `null` is true, null is a valid value and
    returned as None. All methods raise ValueError with the field's name, its value and the expectation.

    Args:
        values: the JSON object.
        inside: "" for top-level fields of config.json, "rope_parameters." for fields of that nested object.
    """

    def __init__(self, values: Mapping[str, object], inside: str = ""):
        self.values = values
        self._inside = inside

    def __contains__(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(name) is not None

    def error(self, name: str, expected: str) -> ValueError:
        """Return the error for a field that is not as expected."""
        value = "absent"
        if name in self.values:
            value = repr(self.values[name])
        return ValueError(f"config.json: {self._inside}{name} = {value}; expected {expected}")

    def any(self, name: str, default: object = REQUIRED) -> Any:
        """Return a value of any type."""
        value = self.values.get(name, default)
        if value is REQUIRED:
            raise ValueError(f"config.json: no field '{self._inside}{name}', which this architecture needs")
        return value

    def size(self, name: str, default: object = REQUIRED, *, null: bool = False, least: int = 1) -> Any:
        """Return an integer that is at least `least`."""
        value = self.any(name, default)
        if value is None and null:
            return None
        # In Python, True is an integer.
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: object = REQUIRED, *, null: bool = False) -> Any:
        """Return a finite number above zero."""
        value = self.any(name, default)
        if value is None and null:
            return None
        expected = "a number above 0"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, expected)
        if not math.isfinite(value) or value <= 0:
            raise self.error(name, expected)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.any(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: object = REQUIRED) -> str:
        """Return a string."""
        value = self.any(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def part(self, name: str) -> ConfigFacts | None:
        """Return the fields of a nested object; None if it is absent, null or empty."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "an object or null")
        if not value:
            return None
        return ConfigFacts(value, f"{self._inside}{name}.")

    def size_by_names(self, *names: str) -> int:
        """Return a size that has several possible names, which must not contradict each other."""
        present_names = [name for name in names if name in self.values]
        # If none is present, the error names the first one.
        sizes = {name: self.size(name) for name in present_names or names[:1]}
        if len(set(sizes.values())) > 1:
            pairs = ", ".join(f"{name} = {size!r}" for name, size in sizes.items())
            raise ValueError(f"config.json: {pairs}; expected one value, because these names mean the same setting")
        return next(iter(sizes.values()))


# Fields that transformers reads for every family, with the values that do not change its computation, and the text of
# the expectation.
UNREAD: dict[str, tuple[tuple[object, ...], str]] = {
    "is_causal": ((True,), "true: attention sees earlier tokens only"),
    "use_bidirectional_attention": ((None, False), "false: attention sees earlier tokens only"),
    "per_layer_config": ((None, {}), "null: all layers have the same sizes"),
    "quantization_config": ((None,), "null: weights in float32, bfloat16 or float16"),
    "transformers_weights": ((None,), "null: weights are in model.safetensors or its shards"),
    "configuration_files": ((None, []), "nothing: config.json is the only one"),
    "text_config": ((None, {}), "null: a text-only model"),
}


def refuse_unread(facts: ConfigFacts) -> None:
    """Raise ValueError for a field that would make transformers compute something different."""
    for name, (harmless, expected) in UNREAD.items():
        value = facts.values.get(name, harmless[0])
        if name == "quantization_config" and value is not None:
            _refuse_unread_quantization(facts)
            continue
        if not any(_is_same(value, harmless_value) for harmless_value in harmless):
            raise facts.error(name, expected)


# Fields of a quantization_config by its method. The files show which weights are not quantized, so that list need not
# be read. `dequantize` only decides whether transformers turns the others into bfloat16, which we always do, and
# `activation_scheme` how inference computes products in FP8.
_QUANTIZATION_FIELDS = {
    "mxfp4": ("quant_method", "modules_to_not_convert", "dequantize"),
    "fp8": ("quant_method", "modules_to_not_convert", "dequantize", "activation_scheme", "fmt", "weight_block_size"),
}


def _refuse_unread_quantization(facts: ConfigFacts) -> None:
    """Raise ValueError for a quantization_config other than MXFP4's of gpt-oss, or that of FP8 with blocks."""
    quantization = facts.part("quantization_config") or ConfigFacts({})
    method = quantization.values.get("quant_method")
    expected = "mxfp4" if facts.values.get("model_type") == "gpt_oss" else "fp8"
    names = _QUANTIZATION_FIELDS[expected]
    if method != expected or any(name not in names for name in quantization.values):
        raise facts.error("quantization_config", f"null, or quant_method {expected} (fields {', '.join(names)})")
    if expected == "mxfp4":
        return
    block = quantization.any("weight_block_size", None)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in block):
        raise quantization.error("weight_block_size", "the number of rows and of columns that share a scale")
    if quantization.any("fmt", "e4m3") != "e4m3":
        raise quantization.error("fmt", "e4m3")
    if quantization.any("activation_scheme", "dynamic") != "dynamic":
        raise quantization.error("activation_scheme", "dynamic")


def _is_same(value: object, harmless_value: object) -> bool:
    """Compare by identity, and containers by equality."""
    # Equality would not suffice: 0 == False, but transformers treats 0 as "not causal" too.
    if value is harmless_value:
        return True
    return isinstance(harmless_value, dict | list) and value == harmless_value


def float_dtype(facts: ConfigFacts) -> str | None:
    """Return the dtype that a config.json names, None if it names none.

    As in transformers, that is `dtype`, or `torch_dtype` if `dtype` is absent.
    """
    name = "dtype" if "dtype" in facts else "torch_dtype"
    if name not in facts:
        return None
    dtype = facts.values[name]
    if dtype not in ("float64", "float32", "bfloat16", "float16"):
        raise facts.error(name, "float32, bfloat16 or float16")
    return dtype
