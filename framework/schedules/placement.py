"""What of a group of arrays lives in host memory: nothing, everything, or the first layers of the stack."""

from __future__ import annotations

import re
from dataclasses import dataclass

from framework.layers.stack import Stack

DEVICE = "device"
HOST = "pinned_host"
_EXPECTED = "expected device, pinned_host, pinned_host:LAYERS or pinned_host:FRACTION (of the stack's layers)"


@dataclass(frozen=True)
class Placement:
    """Where a group of arrays lives.

    Attributes:
      text: as a config says it.
      layers: the number of layers, from the first, that are in host memory.
      fraction: the same as a part of a stack's layers, over 0 and up to 1.

    With neither number, everything is in one place: the stages outside of stacks too, which with a number stay on the
    device.
    """

    text: str = DEVICE
    layers: int | None = None
    fraction: float | None = None

    @staticmethod
    def of(field: str, text: str) -> Placement:
        """Reads "device", "pinned_host", "pinned_host:20" (layers) or "pinned_host:0.6" (a fraction of them).

        Raises:
            ValueError: the text is none of these; the error names the field.
        """
        place, _, number = text.partition(":")
        if text in (DEVICE, HOST):
            return Placement(text)
        if place == HOST and re.fullmatch(r"[1-9]\d*", number):
            return Placement(text, layers=int(number))
        if place == HOST and re.fullmatch(r"\d*\.\d+", number) and 0.0 < float(number) <= 1.0:
            return Placement(text, fraction=float(number))
        raise ValueError(f"memory.{field}: {_EXPECTED}, given {text!r}")

    @property
    def uses_host(self) -> bool:
        """Whether anything is in host memory."""
        return self.text.startswith(HOST)

    @property
    def is_partial(self) -> bool:
        """Whether layers of stacks alone are in host memory."""
        return self.layers is not None or self.fraction is not None

    @property
    def hosts_everything(self) -> bool:
        """Whether the stages outside of stacks are in host memory too."""
        return self.text == HOST

    def hosted_units(self, field: str, stack: Stack) -> int:
        """The number of a stack's units, from the first, that are in host memory.

        Args:
            field: of the config, for the error.
            stack: whose units; a unit has one layer, or as many as the pattern.

        Raises:
            ValueError: the stack has fewer layers than the number says, or the number cuts a unit.
        """
        if not self.is_partial:
            return stack.num_units if self.hosts_everything else 0
        if stack.is_first:
            # Numbers are of the layers of the stack behind, with whose first layer this one goes.
            return stack.num_units
        if self.fraction is not None:
            return round(self.fraction * stack.num_units)
        assert self.layers is not None
        return units_of_layers(f"memory.{field} = {self.text}", self.layers, stack)


def units_of_layers(setting: str, layers: int, stack: Stack) -> int:
    """The number of units that have so many layers.

    Args:
        setting: that gives the number, for the error.
        layers: their number.
        stack: whose units.

    Raises:
        ValueError: the stack has fewer layers, or the number cuts a unit.
    """
    unit_layers = len(stack.unit.layers)
    num_layers = stack.num_units * unit_layers
    if layers > num_layers:
        raise ValueError(f"{setting}: the stack has {num_layers} layers; expected at most so many")
    if layers % unit_layers:
        below = layers // unit_layers * unit_layers
        nearest = [number for number in (below, below + unit_layers) if number]
        raise ValueError(f"{setting}: the pattern has {unit_layers} layers, which stay together; nearest: {nearest}")
    return layers // unit_layers
