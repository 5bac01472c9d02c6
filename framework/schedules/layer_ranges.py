"""Splits a stack into ranges of layers that share the same memory settings."""

from __future__ import annotations

import itertools

from plimsoll.framework.layers import remat
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.placement import count_repeats

# The fields of `Memory` that are placements.
PLACED_FIELDS = ("parameters", "gradients", "optimizer_state", "activations")


def policies(memory: Memory, stack: Stack) -> list[str]:
    """Return the remat policy of each layer of a whole stack, in order.

    Raises:
        ValueError: memory.remat covers more or fewer layers than the stack has, or its numbers split a repetition of
            the layer pattern.
    """
    layer_policies: list[str] = []
    num_repeats = stack.num_repeats
    if stack.is_first:
        # Layer counts refer to the main stack; the layers before it follow the main stack's first layer.
        return [stack.policy(remat.parse_policies(memory.remat)[0].policy)] * num_repeats
    setting = f"memory.remat = {memory.remat}"
    for span in remat.parse_policies(memory.remat):
        rest = num_repeats - len(layer_policies)
        count = rest if span.layers is None else count_repeats(setting, span.layers, stack)
        if not 0 < count <= rest:
            num_layers = num_repeats * len(stack.pattern.layers)
            raise ValueError(f"{setting}: the stack has only {num_layers} layers; reduce the layer counts")
        layer_policies += [span.policy] * count
    if len(layer_policies) < num_repeats:
        missing_layers = (num_repeats - len(layer_policies)) * len(stack.pattern.layers)
        raise ValueError(f"{setting}: no policy covers the last {missing_layers} layers; add one for them")
    return layer_policies


def split_stacks(model: Chain, memory: Memory) -> list[LayerRange]:
    """Split all stacks into ranges of layers with the same placements and remat policy.

    Args:
        model: the model with whole stacks.
        memory: the placements, and the remat policies.

    Returns:
        The ranges of all stacks, in order; [] if no stack needs a range of its own.

    Raises:
        ValueError: the placements or policies name other numbers of layers than a stack has.
    """
    layer_ranges = []
    for name, stack in model.stacks.items():
        layer_ranges += _split_stack(name, stack, memory)
    is_cut = not all(layer_range.is_whole for layer_range in layer_ranges)
    # An unsplit stack also needs a range if its settings come from layer counts: neither the context's policy nor the
    # stages outside the stack have them.
    counts_layers = remat.parse_policies(memory.remat) != [remat.PolicyRange(memory.remat, None)]
    return layer_ranges if is_cut or counts_layers or memory.activations.is_partial else []


def _split_stack(name: str, stack: Stack, memory: Memory) -> list[LayerRange]:
    """Return the layer ranges of one stack, in order."""
    layer_policies = policies(memory, stack)
    placements = {field: getattr(memory, field) for field in PLACED_FIELDS}
    num_offloaded = {field: placement.num_offloaded(field, stack) for field, placement in placements.items()}
    cuts = {0, stack.num_repeats, *num_offloaded.values()}
    for index in range(1, stack.num_repeats):
        if layer_policies[index] != layer_policies[index - 1]:
            cuts.add(index)
    ends = sorted(cuts)
    layer_ranges = []
    for first, end in itertools.pairwise(ends):
        layer_range = LayerRange(
            home=name,
            first=first,
            count=end - first,
            total=stack.num_repeats,
            remat=layer_policies[first],
            offloads=end <= num_offloaded["activations"],
        )
        layer_ranges.append(layer_range)
    return layer_ranges
