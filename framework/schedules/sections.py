"""Where the stacks of a model are cut: wherever `config.memory` says another thing of the next layer."""

from __future__ import annotations

import itertools

from framework.layers import remat
from framework.layers.section import Section
from framework.layers.stack import Stack
from framework.models.chain import Chain
from framework.schedules.memory import Memory
from framework.schedules.placement import units_of_layers

# The fields of `Memory` that are placements.
PLACED_FIELDS = ("parameters", "gradients", "optimizer_state", "activations")


def policies(memory: Memory, stack: Stack) -> list[str]:
    """What the backward pass recomputes of each unit of a whole stack, from the first on.

    Raises:
        ValueError: memory.remat is of more layers, or of fewer, than the stack has, or its numbers cut a unit.
    """
    unit_policies: list[str] = []
    num_units = stack.num_units
    if stack.is_first:
        # Numbers are of the layers of the stack behind, with whose first layer this one goes.
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
    """The sections of all stacks in which every layer lives and is recomputed alike; [] where no stack needs them.

    Raises:
        ValueError: the placements or policies are of other numbers of layers than a stack has.
    """
    sections = []
    for name, stack in model.stacks.items():
        sections += _sections_of_stack(name, stack, memory)
    is_cut = not all(section.is_whole for section in sections)
    # A whole stack needs a section where numbers say what the context's policy, or the stages outside, do not.
    counts_layers = remat.spans(memory.remat) != [remat.Span(memory.remat, None)]
    return sections if is_cut or counts_layers or memory.activations.is_partial else []


def _sections_of_stack(name: str, stack: Stack, memory: Memory) -> list[Section]:
    """The sections of one stack, from the first unit on."""
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
