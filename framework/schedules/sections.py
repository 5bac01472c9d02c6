"""Splits a stack into ranges of layers that share the same memory settings."""

from __future__ import annotations

import itertools

from plimsoll.framework.layers import remat
from plimsoll.framework.layers.section import Section
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.placement import units_of_layers

# The fields of `Memory` that are placements.
PLACED_FIELDS = ("parameters", "gradients", "optimizer_state", "activations")


def policies(memory: Memory, stack: Stack) -> list[str]:
    """Return the remat policy of each layer of a whole stack, in order.

    Raises:
        ValueError: memory.remat covers more or fewer layers than the stack has, or its numbers split a repetition of
            the layer pattern.
    """
    unit_policies: list[str] = []
    num_units = stack.num_units
    if stack.is_first:
        # Layer counts refer to the main stack; the layers before it follow the main stack's first layer.
        return [stack.policy(remat.spans(memory.remat)[0].policy)] * num_units
    setting = f"memory.remat = {memory.remat}"
    for span in remat.spans(memory.remat):
        rest = num_units - len(unit_policies)
        count = rest if span.layers is None else units_of_layers(setting, span.layers, stack)
        if not 0 < count <= rest:
            raise ValueError(f"{setting}: it is of more layers than the {num_units * len(stack.unit.layers)} there are")
        unit_policies += [span.policy] * count
    if len(unit_policies) < num_units:
        missing_layers = (num_units - len(unit_policies)) * len(stack.unit.layers)
        raise ValueError(f"{setting}: it says nothing of the last {missing_layers} layers")
    return unit_policies


def sections_of(model: Chain, memory: Memory) -> list[Section]:
    """Split all stacks into ranges of layers with the same placements and remat policy.

    Return [] if no stack needs a range of its own.

    Raises:
        ValueError: the placements or policies name other numbers of layers than a stack has.
    """
    sections = []
    for name, stack in model.stacks.items():
        sections += _make_layer_ranges(name, stack, memory)
    is_cut = not all(section.is_whole for section in sections)
    # An unsplit stack also needs a range if its settings come from layer counts: neither the context's policy nor the
    # stages outside the stack have them.
    counts_layers = remat.spans(memory.remat) != [remat.Span(memory.remat, None)]
    return sections if is_cut or counts_layers or memory.activations.is_partial else []


def _make_layer_ranges(name: str, stack: Stack, memory: Memory) -> list[Section]:
    """Return the layer ranges of one stack, in order."""
    unit_policies = policies(memory, stack)
    placements = {field: getattr(memory, field) for field in PLACED_FIELDS}
    hosted_units = {field: placement.hosted_units(field, stack) for field, placement in placements.items()}
    cuts = {0, stack.num_units, *hosted_units.values()}
    for index in range(1, stack.num_units):
        if unit_policies[index] != unit_policies[index - 1]:
            cuts.add(index)
    ends = sorted(cuts)
    sections = []
    for first, end in itertools.pairwise(ends):
        section = Section(
            home=name,
            first=first,
            count=end - first,
            total=stack.num_units,
            remat=unit_policies[first],
            offloads=end <= hosted_units["activations"],
        )
        sections.append(section)
    return sections
