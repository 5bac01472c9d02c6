"""The rules of `model.precision`: which layers compute their products with 8-bit numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from plimsoll.framework.layers.base import Layer
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.low_precision import RECIPES, RecipeName
from plimsoll.framework.layers.score_head import ScoreHead

# The recipes of the output head, whose table is rounded once for all chunks of positions.
HEAD_RECIPES: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_row", "int8_row")
FIRST_CAPABILITY_WITH_FP8 = 8.9
FIRST_CAPABILITY_WITH_MXFP8 = 10.0


def apply_precision_rules(rules: Mapping[str, RecipeName], layers: Mapping[str, Layer]) -> None:
    """Set the recipes of the Linears in `layers`, and of the output head.

    Args:
        rules: {a regex, searched in the paths of layers: recipe}; the first one that matches decides.
        layers: layers by name. The path of a language model's head is its name, "head".

    Raises:
        ValueError: a rule is no regex, matches no layer, names products that have no 8-bit form, or divides a layer
            into blocks that it does not have.
    """
    found = [site for name, layer in layers.items() for site in _iter_products(layer, name)]
    unused = dict(rules)
    for path, layer in found:
        for pattern, name in rules.items():
            if not _search(pattern, path):
                continue
            rule = f"model.precision[{pattern!r}] = {name!r}"
            if isinstance(layer, Linear):
                blocks = RECIPES[name].blocks
                if blocks is not None and (layer.inputs % blocks.size or layer.outputs % blocks.size):
                    raise ValueError(
                        f"{rule}: {path} has {layer.inputs} inputs and {layer.outputs} outputs; expected multiples of "
                        f"{blocks.size}"
                    )
                layer.recipe = RECIPES[name]
                layer.path = path
                unused.pop(pattern, None)
            elif isinstance(layer, LMHead):
                if name not in HEAD_RECIPES:
                    raise ValueError(
                        f"{rule} matches {path}; expected one of {', '.join(HEAD_RECIPES)} for the output head, or a "
                        'rule that does not match it, such as "stack/"'
                    )
                layer.recipe = RECIPES[name]
                layer.path = path
                unused.pop(pattern, None)
            elif isinstance(layer, ScoreHead):
                if "head" in pattern:
                    raise ValueError(
                        f"{rule} matches {path}, a ScoreHead; the product of a score head has no 8-bit form: choose "
                        "other layers"
                    )
            elif "experts" in pattern:
                raise ValueError(
                    f"{rule} matches {path}; the products of experts have no 8-bit form: choose other layers"
                )
            break
    if unused:
        choices = [path for path, layer in found if isinstance(layer, (Linear, LMHead))]
        raise ValueError(
            f"model.precision: {next(iter(unused))!r} decides for none of {len(choices)} layers: {choices[:8]}"
        )


def check_formats(rules: Mapping[str, RecipeName], platform: str, capability: str | None) -> None:
    """Raise ValueError if a rule needs a format that the device has not.

    Args:
        rules: recipes by regex.
        platform: tpu, gpu or cpu.
        capability: compute capability of a GPU, such as "8.9"; None if unknown.
    """
    blocks = [name for name in rules.values() if RECIPES[name].blocks is not None]
    if blocks and platform == "tpu":
        raise ValueError(f"model.precision has {blocks[0]}, which TPUs do not compute; expected another recipe")
    has_mxfp8 = capability is None or float(capability) >= FIRST_CAPABILITY_WITH_MXFP8
    if "mxfp8" in rules.values() and platform == "gpu" and not has_mxfp8:
        raise ValueError(
            f"model.precision has mxfp8, which needs compute capability {FIRST_CAPABILITY_WITH_MXFP8} "
            f"(Blackwell) and this GPU has {capability}; expected another recipe"
        )
    floats = [name for name in rules.values() if RECIPES[name].forward != "int8"]
    if platform == "gpu" and floats and capability is not None and float(capability) < FIRST_CAPABILITY_WITH_FP8:
        raise ValueError(
            f"model.precision has {floats[0]}, but 8-bit floats need compute capability {FIRST_CAPABILITY_WITH_FP8} "
            f"(Ada, Hopper or newer) and this GPU has {capability}; expected int8_row, or no rule"
        )


def _iter_products(layer: Layer, path: str) -> Iterator[tuple[str, Linear | Experts | LMHead | ScoreHead]]:
    """Yield a layer and all layers below it that compute matrix products, by path."""
    if isinstance(layer, (Linear, Experts, LMHead, ScoreHead)):
        yield path, layer
        return
    for name, child in layer.children().items():
        yield from _iter_products(child, f"{path}/{name}")


def _search(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise ValueError(f"model.precision: {pattern!r} is no regular expression: {error}") from error
