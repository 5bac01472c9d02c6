"""The rules of `model.precision`: which layers compute their products with 8-bit numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from plimsoll.framework.layers.base import Layer
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.low_precision import RECIPES, RecipeName


def apply_precision_rules(rules: Mapping[str, RecipeName], layers: Mapping[str, Layer]) -> None:
    """Set the recipes of the Linears below `layers`.

    Args:
        rules: {a regex, searched in the paths of layers: recipe}; the first one that matches decides.
        layers: layers by name.

    Raises:
        ValueError: a rule is no regex, matches no layer, or names the products of experts.
    """
    found = [site for name, layer in layers.items() for site in _iter_products(layer, name)]
    unused = dict(rules)
    for path, layer in found:
        for pattern, name in rules.items():
            if not _search(pattern, path):
                continue
            if isinstance(layer, Linear):
                layer.recipe = RECIPES[name]
                layer.path = path
                unused.pop(pattern, None)
            elif "experts" in pattern:
                raise ValueError(
                    f"model.precision[{pattern!r}] = {name!r} matches {path}; the products of experts have no 8-bit "
                    "form: choose other layers"
                )
            break
    if unused:
        linears = [path for path, layer in found if isinstance(layer, Linear)]
        raise ValueError(
            f"model.precision: {next(iter(unused))!r} decides for none of {len(linears)} layers: {linears[:8]}"
        )


def _iter_products(parent: Layer, path: str) -> Iterator[tuple[str, Linear | Experts]]:
    """Yield all layers of matrix products below a layer, by path."""
    for name, child in parent.children().items():
        child_path = f"{path}/{name}"
        if isinstance(child, (Linear, Experts)):
            yield child_path, child
        else:
            yield from _iter_products(child, child_path)


def _search(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise ValueError(f"model.precision: {pattern!r} is no regular expression: {error}") from error
