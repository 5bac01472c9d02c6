"""The sizes of a model family: scales a config of one size up or down by the family's own rule.

The rule is that of published families: width and depth grow together. All sizes share the head dimension, the number of
key/value heads, the ratio of MLP width to model width and, as nearly as whole groups of heads allow, the ratio of width
to depth. Each width is also made deeper, one repeat of the layer pattern at a time, until it has as many parameters
as the next width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.models.causal_lm import CausalLM

# Heads come in groups of this size, which is divisible by common numbers of devices.
_HEADS = 8
# The width of an MLP is a multiple of this.
_HIDDEN = 256


class Size(NamedTuple):
    """The size of a family member.

    Attributes:
        heads: number of query heads, which determines the width.
        layers: number of layers in the stack.
    """

    heads: int
    layers: int


class Member(NamedTuple):
    """A size, with the number of parameters of its model."""

    size: Size
    parameters: int


class _WidthModels(NamedTuple):
    """The models of one width.

    Attributes:
        heads: number of query heads.
        first: number of layers by the family's rule for this width.
        outside_stack: number of parameters outside the stack.
        per_layer: number of parameters in one layer.
    """

    heads: int
    first: int
    outside_stack: int
    per_layer: int

    def parameters(self, layers: int) -> int:
        """Return the number of parameters of the model with `layers` layers."""
        return self.outside_stack + layers * self.per_layer


@dataclass(frozen=True)
class SizeFamily:
    """The sizes that can be derived from a config.

    Attributes:
        config: config of the known size.
    """

    config: Config

    @staticmethod
    def derive(config: Config) -> SizeFamily:
        """Return the family of a config. Raises ConfigError if its layers are not Blocks with the same head count."""
        model = config.model
        has_stack = model.takes("stack") and model.takes("dim")
        pattern: Sequence[Any] = model.stack.pattern if has_stack else []
        if not pattern or not all(_is_block(layer) for layer in pattern):
            raise ConfigError("--largest requires a language model whose layers are Blocks with attention and an MLP")
        heads = {layer.attention.num_heads for layer in pattern}
        if len(heads) > 1:
            raise ConfigError(
                f"--largest: the pattern's layers have {sorted(heads)} heads; expected the same number in each"
            )
        return SizeFamily(config)

    @property
    def _block(self) -> Config:
        return self.config.model.stack.pattern[0]

    @property
    def known(self) -> Size:
        """The size of the config itself."""
        return Size(self._block.attention.num_heads, self.config.model.stack.num_layers)

    @property
    def _step(self) -> int:
        """The number of heads by which widths grow."""
        kv_heads: int | None = self._block.attention.num_kv_heads
        # The number of query heads has to stay a multiple of the number of key/value heads.
        if kv_heads is not None and kv_heads != self.known.heads:
            return kv_heads
        return min(_HEADS, self.known.heads)

    def members(self, most: int) -> list[Member]:
        """Return the sizes of up to `most` times the known width, smallest first.

        Args:
            most: largest width, as a multiple of the known one.
        """
        widths = range(self._step, most * self.known.heads + 1, self._step)
        depths = [self._depths_for_width(heads) for heads in widths]
        members = []
        for depth, next_depth in itertools.pairwise(depths):
            layers = depth.first
            while depth.parameters(layers) < next_depth.parameters(next_depth.first):
                members.append(Member(Size(depth.heads, layers), depth.parameters(layers)))
                layers += self._pattern_length
        return members

    def _depths_for_width(self, heads: int) -> _WidthModels:
        """Return the models of one width: the first depth, and the parameters by depth."""
        first = self._layers_for_width(heads)
        # All repeats of the pattern are equally large, so two depths determine the parameters at any depth.
        shallow = count_parameters(self.scale_config(Size(heads, self._pattern_length)))
        deeper = count_parameters(self.scale_config(Size(heads, 2 * self._pattern_length)))
        per_layer = (deeper - shallow) // self._pattern_length
        return _WidthModels(heads, first, shallow - self._pattern_length * per_layer, per_layer)

    @property
    def _pattern_length(self) -> int:
        return len(self.config.model.stack.pattern)

    def _layers_for_width(self, heads: int) -> int:
        """Return the depth that the family's rule gives a width."""
        known = self.known
        num_repeats = round(known.layers / self._pattern_length * heads / known.heads)
        return max(num_repeats, 1) * self._pattern_length

    def scale_config(self, size: Size) -> Config:
        """Return a config scaled to a size. The known size gives a copy of the config itself."""
        scaled = self.config.copy()
        model = scaled.model
        ratio = size.heads / self.known.heads
        for name, layer in zip(model.stack.pattern, self.config.model.stack.pattern, strict=True):
            _scale_block(name, layer, size.heads, ratio)
        model.dim = round(self.config.model.dim * ratio)
        model.stack.num_layers = size.layers
        return scaled


def _scale_block(scaled: Config, known: Config, heads: int, ratio: float) -> None:
    """Set a block's number of heads, and scale the width of its MLP to `ratio` times the known one."""
    attention = known.attention
    # Without grouped queries, the key/value heads grow along. With them, their number is the same in all sizes.
    if attention.num_kv_heads == attention.num_heads:
        scaled.attention.num_kv_heads = heads
    scaled.attention.num_heads = heads
    hidden = known.mlp.hidden * ratio
    scaled.mlp.hidden = known.mlp.hidden if ratio == 1.0 else max(round(hidden / _HIDDEN), 1) * _HIDDEN


def _is_block(layer: Config) -> bool:
    return layer.takes("attention") and layer.takes("mlp") and layer.attention.takes("num_heads")


def count_parameters(config: Config) -> int:
    """Return the number of parameters of a config's model, including frozen ones."""
    model = config.model.instantiate()
    assert isinstance(model, CausalLM)
    # A quantized weight is stored in several leaves, so count the weights as they are published.
    return sum(spec.size for spec in model.base_specs.values())
