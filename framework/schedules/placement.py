"""Placements: which arrays of a group are offloaded (none, all, or the first N layers of the stack)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plimsoll.framework.layers.stack import Stack

DEVICE = "device"
HOST = "pinned_host"
_EXPECTED = "expected device, pinned_host, pinned_host:LAYERS or pinned_host:FRACTION (of the stack's layers)"


@dataclass(frozen=True)
class Placement:
    """The placement of a group of arrays in device or host memory.

    Without `layers` and `fraction`, everything is in one memory, including the stages outside the stacks. With
    either, those stages stay on the device.

    Attributes:
        text: the value in the config.
        layers: how many layers, from the first, are in host memory.
        fraction: the same as a fraction of the stack's layers, over 0 and up to 1.
    """

    text: str = DEVICE
    layers: int | None = None
    fraction: float | None = None

    @staticmethod
    def of(field: str, text: str) -> Placement:
        """Parse "device", "pinned_host", "pinned_host:20" (layers) or "pinned_host:0.6" (a fraction of the layers).

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
        """Return whether anything is in host memory."""
        return self.text.startswith(HOST)

    @property
    def is_partial(self) -> bool:
        """Return whether only some layers of the stacks are in host memory."""
        return self.layers is not None or self.fraction is not None

    @property
    def hosts_everything(self) -> bool:
        """Return whether the stages outside the stacks are in host memory too."""
        return self.text == HOST

    def hosted_units(self, field: str, stack: Stack) -> int:
        """Return how many of a stack's units, from the first, are in host memory.

        Args:
            field: name of the config field, for the error message.
            stack: the stack; each unit is one period of its layer pattern.

        Raises:
            ValueError: the stack has fewer layers than the number, or the number splits a unit.
        """
        if not self.is_partial:
            return stack.num_units if self.hosts_everything else 0
        if stack.is_first:
            # Layer counts refer to the main stack; the layers before it follow the main stack's first layer.
            return stack.num_units
        if self.fraction is not None:
            return round(self.fraction * stack.num_units)
        assert self.layers is not None
        return units_of_layers(f"memory.{field} = {self.text}", self.layers, stack)


def units_of_layers(setting: str, layers: int, stack: Stack) -> int:
    """Convert a number of layers to a number of units (periods of the layer pattern).

    Args:
        setting: the setting that contains the number, for the error message.
        layers: the number of layers.
        stack: the stack that has the units.

    Raises:
        ValueError: the stack has fewer layers, or the number splits a unit.
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
