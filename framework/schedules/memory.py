"""The `memory` section of the config: where state is stored, when the update happens, and what is recomputed.

A field that selects the memory of a group of arrays is a `Placement`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from plimsoll.framework.config import component
from plimsoll.framework.layers import remat as remat_policies
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.schedules.traits import SCHEDULES, ScheduleName, ScheduleTraits

DEVICE = "device"
HOST = "pinned_host"
_EXPECTED = "expected device, pinned_host, pinned_host:LAYERS or pinned_host:FRACTION (of the stack's layers)"
# The value of memory.gradients with which no gradients are stored.
AT_ONCE = "none"


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


@component
class Memory:
    """Settings that trade time for memory; none of them changes the result.

    Placement fields take four kinds of values: "device"; "pinned_host", which offloads everything; "pinned_host:20",
    the first 20 layers of the stack; and "pinned_host:0.6", that fraction of its layers, rounded. With a number, the
    other layers, the embedding and the head stay on the device.

    Args:
        update: when the update happens, and in which chunks. "after_backward" is the plain schedule: the whole
            backward pass, then the whole update. "streamed" updates one chunk at a time, and only that chunk's
            optimizer state is on the device. "in_backward" updates each layer as soon as its gradient is ready, and
            then frees the gradient. "layer_programs" runs the step layer by layer, as a few small programs instead of
            one large one.
        gradients: where gradients are stored until the update. "pinned_host" writes each layer's gradients to host
            memory during the backward pass; needs update = "streamed" or "layer_programs". "none", only with
            "layer_programs", stores no gradients: each layer is updated immediately, with the limits of
            "in_backward".
        optimizer_state: where optimizer state (master weights and moments) is stored between steps. With
            "pinned_host", vectors, scalars and leaves under 1 MiB stay on the device.
        prefetch: how much offloaded state update = "in_backward" or "streamed" fetches at a time. "chunk": a tensor, or
            a part of one, once the layer's gradients are ready. "layer": all of a layer's state, while other layers
            compute, which hides the transfers; the state of two layers is on the device. With "in_backward" that is
            during the backward pass. With "streamed", which then needs gradients = "pinned_host", it is during the
            forward pass of the next step, which updates each layer before it runs. "speculative", only with "streamed"
            and gradients = "pinned_host": during the backward pass, before the norm of all gradients is known. The new
            state goes to a second copy in host memory; a step that turns out to clip or to be skipped updates the
            layers once more, from the old copy.
        parameters: where the weights are stored, frozen ones included. With "pinned_host" each layer's weights are
            fetched just before the layer runs. Not with update = "after_backward".
        experts: where the experts of mixture layers are stored: their weights and adapters, their optimizer state and,
            if update is "streamed" or "layer_programs", their gradients. With "device", the fields above place them
            like everything else; otherwise they are in host memory in addition to what those fields offload. They are
            fetched layer by layer. Not with update = "after_backward".
        activations: where the residuals that `remat` selects are stored until the backward pass; under full, these
            are the layers' inputs. Not "pinned_host" with update = "after_backward".
        accumulate_by: in which order the microbatches of learner.accumulate run. "microbatch": one after the other,
            through all layers. "layer": all of them through a layer before the next layer, so that its weights,
            gradients and optimizer state cross the link to the host once per step; the residuals of all microbatches
            are kept, where `activations` says (layered gradient accumulation, arXiv 2106.02679). Not with update =
            "after_backward"; with update = "in_backward" or gradients = "none", it is the only order that can
            accumulate.
        remat: what the backward pass recomputes: none, full, sqrt, sqrt:NUMBER, invert, dots, dots_no_batch, offload,
            save:NAME,NAME, offload:NAME,NAME, or save:NAME;offload:NAME; per layer as in full:20,dots:12; see
            framework.layers.remat.
        auto: autotune the other fields, together with mesh and learner.accumulate. `plimsoll train` chooses the
            fastest settings that fit the available devices before it compiles anything. Settings from the command
            line are not changed, nor are those that a config sets in addition to auto. `plimsoll plan --auto` shows
            the choice.
    """

    def __init__(
        self,
        *,
        update: ScheduleName = "after_backward",
        gradients: str = "device",
        optimizer_state: str = "device",
        prefetch: Literal["chunk", "layer", "speculative"] = "chunk",
        parameters: str = "device",
        experts: str = "device",
        activations: str = "device",
        accumulate_by: Literal["microbatch", "layer"] = "microbatch",
        remat: str = "none",
        auto: bool = False,
    ):
        self.update: str = update
        self.gradients = _parse_gradients(gradients, update)
        self.optimizer_state = Placement.parse("optimizer_state", optimizer_state)
        self.parameters = Placement.parse("parameters", parameters)
        self.experts = Placement.parse("experts", experts)
        self.activations = Placement.parse("activations", activations)
        self.prefetch: str = prefetch
        self.accumulate_by: str = accumulate_by
        self.remat = remat
        self.auto = auto
        _check(self)

    @property
    def traits(self) -> ScheduleTraits:
        """The properties of the schedule with these settings."""
        traits = SCHEDULES[self.update]
        return dataclasses.replace(traits, updates_in_backward=True) if self.updates_at_once else traits

    @property
    def delays_update(self) -> bool:
        """Return whether the next step updates the layers whose gradients are in host memory."""
        return self.prefetch == "layer" and SCHEDULES[self.update].delays_prefetched

    @property
    def speculates(self) -> bool:
        """Return whether layers are updated in the backward pass, before the norm of all gradients is known."""
        return self.prefetch == "speculative"

    @property
    def offloads_weights(self) -> bool:
        """Return whether any weights are in host memory."""
        return self.parameters.uses_host or self.experts.uses_host

    @property
    def offloads_state(self) -> bool:
        """Return whether any optimizer state is in host memory."""
        return self.optimizer_state.uses_host or self.experts.uses_host

    @property
    def offloads_expert_gradients(self) -> bool:
        """Return whether the gradients of offloaded experts are in host memory until the update."""
        stores_gradients = SCHEDULES[self.update].can_offload_gradients and not self.updates_at_once
        return self.experts.uses_host and stores_gradients

    @property
    def updates_at_once(self) -> bool:
        """Return whether layer programs update each layer as soon as its gradient is ready (gradients = none)."""
        return self.gradients.text == AT_ONCE


def _parse_gradients(text: str, update: str) -> Placement:
    """Parse the placement of gradients.

    Raises:
        ValueError: the schedule cannot store gradients there.
    """
    if text == AT_ONCE:
        if not SCHEDULES[update].is_many_programs:
            raise ValueError(f"memory.gradients = none needs memory.update = layer_programs, given {update}")
        return Placement(AT_ONCE)
    placement = Placement.parse("gradients", text)
    # after_backward has all gradients on the device, and in_backward frees each one after its layer's update: only
    # the other two schedules write them to buffers.
    if placement.uses_host and not SCHEDULES[update].can_offload_gradients:
        raise ValueError(f"memory.gradients = {text} needs memory.update = streamed or layer_programs, given {update}")
    return placement


def _check(memory: Memory) -> None:
    """Raise ValueError if settings do not work with each other, or the remat policies are invalid."""
    traits = SCHEDULES[memory.update]
    # Weights and residuals can be in host memory only with a layer-by-layer backward pass.
    for name in ("parameters", "experts", "activations"):
        placement: Placement = getattr(memory, name)
        if placement.uses_host and not traits.needs_stack:
            raise ValueError(
                f"memory.{name} = {placement.text} needs memory.update = streamed, in_backward or layer_programs: "
                "after_backward keeps everything on the device"
            )
    if memory.accumulate_by == "layer" and not traits.needs_stack:
        raise ValueError(
            "memory.accumulate_by = layer needs memory.update = streamed, in_backward or layer_programs, given "
            f"{memory.update}"
        )
    # Only state in host memory needs fetching, and only in_backward can fetch it layer by layer.
    # The gradients of each layer whose state is in host memory are needed once more if they are clipped.
    keeps_gradients = memory.gradients.text in (HOST, memory.optimizer_state.text)
    if memory.speculates and not (
        traits.can_speculate
        and memory.optimizer_state.uses_host
        and keeps_gradients
        and not memory.parameters.uses_host
    ):
        raise ValueError(
            "memory.prefetch = speculative needs memory.update = streamed, memory.optimizer_state = pinned_host, "
            "memory.gradients = pinned_host, for as many layers, and memory.parameters = device, given "
            f"{memory.update}, {memory.optimizer_state.text}, {memory.gradients.text} and {memory.parameters.text}"
        )
    if memory.prefetch == "layer" and not (traits.can_prefetch_layers and memory.offloads_state):
        raise ValueError(
            "memory.prefetch = layer needs memory.update = in_backward or streamed, and memory.optimizer_state = "
            f"pinned_host, given {memory.update} and {memory.optimizer_state.text}"
        )
    if memory.delays_update and (not memory.gradients.uses_host or memory.parameters.uses_host):
        raise ValueError(
            f"memory.prefetch = layer with memory.update = {memory.update} needs memory.gradients = pinned_host and "
            f"memory.parameters = device, given {memory.gradients.text} and {memory.parameters.text}: each layer is "
            "updated in the next step, before its forward pass"
        )
    if memory.experts.uses_host and (memory.speculates or memory.delays_update):
        raise ValueError(
            f"memory.experts = {memory.experts.text} with memory.prefetch = {memory.prefetch} and memory.update = "
            f"{memory.update}, which needs all weights on the device; expected memory.experts = device, or "
            "memory.prefetch = chunk"
        )
    # The error names the field, which the check of the policies does not know.
    try:
        spans = remat_policies.parse_policies(memory.remat)
    except ValueError as error:
        raise ValueError(f"remat: {error}") from None
    inverts = [span.policy == "invert" for span in spans]
    if any(inverts) and memory.activations.uses_host:
        raise ValueError(
            f"memory.activations = {memory.activations.text} with memory.remat = {memory.remat}: inverted layers save "
            "no residuals that could be offloaded; expected memory.activations = device"
        )
    if any(inverts) and not all(inverts) and traits.is_many_programs:
        raise ValueError(
            f"memory.remat = {memory.remat} with memory.update = layer_programs: it inverts all layers or none; "
            "expected memory.remat = invert for all layers, or another memory.update"
        )
