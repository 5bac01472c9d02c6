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
    def parse(field: str, text: str) -> Placement:
        """Parse "device", "pinned_host", "pinned_host:20" (layers) or "pinned_host:0.6" (a fraction of the layers).

        Raises:
            ValueError: the text is none of these; the error names the field.
        """
        memory_kind, _, number = text.partition(":")
        if text in (DEVICE, HOST):
            return Placement(text)
        if memory_kind == HOST and re.fullmatch(r"[1-9]\d*", number):
            return Placement(text, layers=int(number))
        if memory_kind == HOST and re.fullmatch(r"\d*\.\d+", number) and 0.0 < float(number) <= 1.0:
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
    def offloads_everything(self) -> bool:
        """Return whether the stages outside the stacks are in host memory too."""
        return self.text == HOST

    def num_offloaded(self, field: str, stack: Stack) -> int:
        """Return how many iterations of a stack's loop, from the first, are in host memory.

        Args:
            field: name of the config field, for the error message.
            stack: the stack; each iteration of its loop is one period of the layer pattern.

        Raises:
            ValueError: the stack has fewer layers than the number, or the number splits a period of the pattern.
        """
        if not self.is_partial:
            return stack.num_repeats if self.offloads_everything else 0
        if stack.is_first:
            # Layer counts refer to the main stack; the layers before it follow the main stack's first layer.
            return stack.num_repeats
        if self.fraction is not None:
            return round(self.fraction * stack.num_repeats)
        assert self.layers is not None
        return count_repeats(f"memory.{field} = {self.text}", self.layers, stack)


def count_repeats(setting: str, layers: int, stack: Stack) -> int:
    """Convert a number of layers to a number of repetitions of the layer pattern.

    Args:
        setting: the setting that contains the number, for the error message.
        layers: the number of layers.
        stack: the stack with these layers.

    Raises:
        ValueError: the stack has fewer layers, or the number splits a repetition of the pattern.
    """
    pattern_length = len(stack.pattern.layers)
    num_layers = stack.num_repeats * pattern_length
    if layers > num_layers:
        raise ValueError(f"{setting}: the stack has {num_layers} layers; expected at most {num_layers}")
    if layers % pattern_length:
        below = layers // pattern_length * pattern_length
        nearest = [number for number in (below, below + pattern_length) if number]
        raise ValueError(f"{setting}: the pattern has {pattern_length} layers, which stay together; nearest: {nearest}")
    return layers // pattern_length
