"""The sizes of a family: a config of one size, made larger or smaller by the family's own rule.

The rule is that of the published families themselves: width and depth grow together. So a size keeps the width of a
head, the heads of keys and values, the ratio of the MLP's width to the model's, and, as near as whole groups of heads
allow, the ratio of width to depth. A width is made deeper, a layer at a time, until it has as many parameters as the
next width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from framework.config import Config, ConfigError
from framework.models.causal_lm import CausalLM

# Heads come in groups of so many, which the usual numbers of devices divide.
_HEADS = 8
# MLPs have a width that is a multiple of this.
_HIDDEN = 256


class Size(NamedTuple):
    """A member of a family.

    Attributes:
        heads: of queries; their number says the width.
        layers: of the stack.
    """

    heads: int
    layers: int


class Member(NamedTuple):
    """A size, and the parameters of its model."""

    size: Size
    parameters: int


class _Depths(NamedTuple):
    """The models of one width.

    Attributes:
        heads: of queries.
        first: the number of layers that the family's rule gives this width.
        outside: parameters outside of the stack.
        of_layer: parameters of one layer.
    """

    heads: int
    first: int
    outside: int
    of_layer: int

    def parameters(self, layers: int) -> int:
        """Of the model with so many layers."""
        return self.outside + layers * self.of_layer


@dataclass(frozen=True)
class Family:
    """The sizes that a config leads to.

    Attributes:
        config: of the size that is known.
    """

    config: Config

    @staticmethod
    def of(config: Config) -> Family:
        """The family of a config. Raises ConfigError: it is not one of blocks that are all alike."""
        model = config.model
        has_stack = model.takes("stack") and model.takes("dim")
        pattern: Sequence[Any] = model.stack.pattern if has_stack else []
        if not pattern or not all(_is_block(layer) for layer in pattern):
            raise ConfigError("--largest is for language models whose layers are Blocks with attention and an MLP")
        heads = {layer.attention.num_heads for layer in pattern}
        if len(heads) > 1:
            raise ConfigError(f"--largest: the pattern's layers have {sorted(heads)} heads; expected one number")
        return Family(config)

    @property
    def _block(self) -> Config:
        return self.config.model.stack.pattern[0]

    @property
    def known(self) -> Size:
        """The size of the config itself."""
        return Size(self._block.attention.num_heads, self.config.model.stack.num_layers)

    @property
    def _step(self) -> int:
        """Widths grow by so many heads."""
        kv_heads: int | None = self._block.attention.num_kv_heads
        # Each head of keys and values serves as many heads of queries.
        if kv_heads is not None and kv_heads != self.known.heads:
            return kv_heads
        return min(_HEADS, self.known.heads)

    def members(self, most: int) -> list[Member]:
        """The sizes of up to `most` times the known width, the smallest first."""
        widths = range(self._step, most * self.known.heads + 1, self._step)
        depths = [self._depths_of(heads) for heads in widths]
        members = []
        for depth, next_depth in itertools.pairwise(depths):
            layers = depth.first
            while depth.parameters(layers) < next_depth.parameters(next_depth.first):
                members.append(Member(Size(depth.heads, layers), depth.parameters(layers)))
                layers += self._unit_layers
        return members

    def _depths_of(self, heads: int) -> _Depths:
        """What the depth of a width decides."""
        first = self._layers_of(heads)
        shallow = num_parameters(self.config_of(Size(heads, self._unit_layers)))
        deeper = num_parameters(self.config_of(Size(heads, 2 * self._unit_layers)))
        of_layer = (deeper - shallow) // self._unit_layers
        return _Depths(heads, first, shallow - self._unit_layers * of_layer, of_layer)

    @property
    def _unit_layers(self) -> int:
        return len(self.config.model.stack.pattern)

    def _layers_of(self, heads: int) -> int:
        """The depth that goes with a width."""
        known = self.known
        units = round(known.layers / self._unit_layers * heads / known.heads)
        return max(units, 1) * self._unit_layers

    def config_of(self, size: Size) -> Config:
        """The config of a size; that of the known size is the config itself."""
        scaled = self.config.copy()
        model = scaled.model
        ratio = size.heads / self.known.heads
        for name, layer in zip(model.stack.pattern, self.config.model.stack.pattern, strict=True):
            _scale_block(name, layer, size.heads, ratio)
        model.dim = round(self.config.model.dim * ratio)
        model.stack.num_layers = size.layers
        return scaled


def _scale_block(scaled: Config, known: Config, heads: int, ratio: float) -> None:
    """Gives a block so many heads, and a width that is `ratio` times the known one."""
    attention = known.attention
    if attention.num_kv_heads == attention.num_heads:
        scaled.attention.num_kv_heads = heads
    scaled.attention.num_heads = heads
    hidden = known.mlp.hidden * ratio
    scaled.mlp.hidden = known.mlp.hidden if ratio == 1.0 else max(round(hidden / _HIDDEN), 1) * _HIDDEN


def _is_block(layer: Config) -> bool:
    return layer.takes("attention") and layer.takes("mlp") and layer.attention.takes("num_heads")


def num_parameters(config: Config) -> int:
    """The number of parameters of a config's model, frozen ones too."""
    model = config.model.instantiate()
    assert isinstance(model, CausalLM)
    # What is stored in few bits has several leaves, so the layers are counted as published weights have them.
    return sum(spec.size for spec in model.base_specs.values())
