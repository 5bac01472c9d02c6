"""The sizes of a model family: scales a config of one size up or down by the family's own rule.

The rule is that of published families: width and depth grow together. All sizes share the head dimension, the number of
key/value heads, the ratio of MLP width to model width and, as nearly as whole groups of heads allow, the ratio of width
to depth. A mixture keeps its number of experts, whose width grows. In linear attention the heads of values grow, and
queries and keys keep theirs. Each width is also made deeper, one repeat of the layer pattern at a time, until it has as
many parameters as the next width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from plimsoll.extras.largest.frontier import Member
from plimsoll.framework.config import Config, ConfigError, get_target
from plimsoll.framework.layers.linear_attention import LinearAttention
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.terminal.tables import human_count

# Search widths up to this multiple of the known one.
_WIDEST = 8
# Heads come in groups of this size, which is divisible by common numbers of devices.
_HEADS = 8
# Widths of models, and of MLPs and experts, are multiples of these, or of the largest power of two in the known width.
_DIM = 128
_HIDDEN = 256


class Size(NamedTuple):
    """The size of a family member.

    Attributes:
        heads: number of heads of the stack's attention, which determines the width. If some layers have linear
            attention and others have not, it is that of the others.
        layers: number of layers in the stack.
    """

    heads: int
    layers: int


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
    """The sizes that can be derived from a config; a `Family`.

    Attributes:
        config: config of the known size.
        widest: the largest width, as a multiple of the known one.
        tolerance: largest relative change of a width by rounding it to a convenient multiple; more takes a smaller
            multiple.
    """

    config: Config
    widest: int = _WIDEST
    tolerance: float = math.inf
    title: ClassVar[str] = "largest model that fits"
    columns: ClassVar[tuple[str, ...]] = ("parameters", "layers", "heads")

    @staticmethod
    def derive(config: Config, purpose: str = "--largest", tolerance: float = math.inf) -> SizeFamily:
        """Return the family of a config.

        Args:
            config: config of the known size.
            purpose: what needs the family, for errors.
            tolerance: largest relative change of a width by rounding.

        Raises:
            ConfigError: its layers are not Blocks with the same number of heads.
        """
        model = config.model
        has_stack = model.takes("stack") and model.takes("dim")
        pattern: Sequence[Any] = model.stack.pattern if has_stack else []
        if not pattern or not all(_is_block(layer) for layer in pattern):
            raise ConfigError(f"{purpose} requires a language model whose layers are Blocks with attention and an MLP")
        family = SizeFamily(config, tolerance=tolerance)
        heads = {attention.num_heads for attention in family._attentions}
        if len(heads) > 1:
            raise ConfigError(
                f"{purpose}: the pattern's layers have {sorted(heads)} heads; expected the same number in each"
            )
        return family

    @property
    def _attentions(self) -> list[Config]:
        """The attention layers whose heads determine the width: those without a state, if there are any."""
        attentions = [layer.attention for layer in self.config.model.stack.pattern]
        return [attention for attention in attentions if not _is_linear(attention)] or attentions

    @property
    def known(self) -> Size:
        """The size of the config itself."""
        return Size(self._attentions[0].num_heads, self.config.model.stack.num_layers)

    @property
    def _step(self) -> int:
        """The number of heads by which widths grow."""
        # The number of heads has to stay a multiple of the number of heads that keys and values share.
        counts = [_count_shared_heads(attention) for attention in self._attentions]
        return max(filter(None, counts), default=min(_HEADS, self.known.heads))

    def measure(self, config: Config) -> int:
        """Return the number of parameters of a config's model."""
        return count_parameters(config)

    def describe(self, amount: int) -> str:
        """Return a number of parameters with its unit."""
        return f"{human_count(amount)} parameters"

    def to_cells(self, member: Member[Size]) -> list[str]:
        """Return parameters, layers and heads."""
        return [human_count(member.amount), str(member.size.layers), str(member.size.heads)]

    def to_json(self, member: Member[Size]) -> dict[str, Any]:
        """Return heads, layers and parameters by name."""
        return {**member.size._asdict(), "parameters": member.amount}

    def members(self) -> list[Member[Size]]:
        """Return the sizes up to the largest width, smallest first."""
        widths = range(self._step, self.widest * self.known.heads + 1, self._step)
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
        known_heads = self.known.heads
        if size.heads != known_heads:
            for _, part in model.walk():
                if isinstance(part, Config):
                    _scale_layer(part, size.heads, known_heads, self.tolerance)
            channels, remainder = divmod(model.dim, known_heads)
            # Without a head dimension of their own, heads share the width.
            ratio = size.heads / known_heads
            model.dim = _scale(model.dim, _DIM, ratio, self.tolerance) if remainder else channels * size.heads
        model.stack.num_layers = size.layers
        return scaled


def _scale_layer(layer: Config, heads: int, known_heads: int, tolerance: float) -> None:
    """Change the heads of attention, and the width of an MLP or of experts, by heads / known_heads."""
    ratio = heads / known_heads
    if layer.takes("hidden"):
        layer.hidden = _scale(layer.hidden, _HIDDEN, ratio, tolerance)
    # Projections have a field of this name too, which attention sets.
    if not layer.takes("num_heads") or layer.num_heads is None:
        return
    step = _count_shared_heads(layer) or 1
    scaled_heads = heads if layer.num_heads == known_heads else max(round(layer.num_heads * ratio), 1)
    # Without grouped queries, the key/value heads grow along. With them, their number is the same in all sizes.
    if layer.takes("num_kv_heads") and layer.num_kv_heads == layer.num_heads:
        layer.num_kv_heads = scaled_heads
    layer.num_heads = max(round(scaled_heads / step), 1) * step


def _scale(width: int, step: int, ratio: float, tolerance: float) -> int:
    """Return the width times `ratio`, rounded to a multiple of `step`, or of the largest power of two in the width.

    Where that would change it by more than the relative `tolerance`, it is rounded to a multiple of a smaller power.
    """
    step = min(step, width & -width)
    exact = width * ratio
    while True:
        rounded = max(round(exact / step), 1) * step
        if step == 1 or abs(rounded / exact - 1) <= tolerance:
            return rounded
        step //= 2


def _count_shared_heads(attention: Config) -> int | None:
    """Return the number of heads of keys that several others share, the same in all sizes; None if each has its own."""
    for name in ("num_kv_heads", "num_key_heads", "num_groups"):
        count = attention[name] if attention.takes(name) else None
        if count is not None and count != attention.num_heads:
            return count
    return None


def _is_linear(attention: Config) -> bool:
    target = get_target(attention)
    return isinstance(target, type) and issubclass(target, LinearAttention)


def _is_block(layer: Config) -> bool:
    return layer.takes("attention") and layer.takes("mlp") and layer.attention.takes("num_heads")


def count_parameters(config: Config) -> int:
    """Return the number of parameters of a config's model, including frozen ones."""
    model = config.model.instantiate()
    assert isinstance(model, CausalLM)
    # A quantized weight is stored in several leaves, so count the weights as they are published.
    return sum(spec.size for spec in model.base_specs.values())
