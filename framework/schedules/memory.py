"""The `memory` section of the config: where state is stored, when the update happens, and what is recomputed."""

from __future__ import annotations

import dataclasses
from typing import Literal

from plimsoll.framework.config import component
from plimsoll.framework.layers import remat as remat_policies
from plimsoll.framework.schedules.placement import Placement
from plimsoll.framework.schedules.traits import SCHEDULES, ScheduleName, ScheduleTraits

# The value of memory.gradients with which no gradients are stored.
AT_ONCE = "none"


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
        prefetch: how much offloaded state update = "in_backward" fetches at a time. "chunk": a tensor, or a part of
            one, once the layer's gradients are ready. "layer": all of a layer's state. The fetch starts with the
            layer's backward pass, and the new state is written back during the next layer's backward pass, so that
            computation hides the transfers. This keeps the state of two layers on the device.
        parameters: where the weights are stored, frozen ones included. With "pinned_host" each layer's weights are
            fetched just before the layer runs. Not with update = "after_backward".
        activations: where the residuals that `remat` selects are stored until the backward pass; under full, these
            are the layers' inputs. Not "pinned_host" with update = "after_backward".
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
        prefetch: Literal["chunk", "layer"] = "chunk",
        parameters: str = "device",
        activations: str = "device",
        remat: str = "none",
        auto: bool = False,
    ):
        self.update: str = update
        self.gradients = _parse_gradients(gradients, update)
        self.optimizer_state = Placement.parse("optimizer_state", optimizer_state)
        self.parameters = Placement.parse("parameters", parameters)
        self.activations = Placement.parse("activations", activations)
        self.prefetch: str = prefetch
        self.remat = remat
        self.auto = auto
        _check_needs_own_backward("parameters", self.parameters, update)
        _check_needs_own_backward("activations", self.activations, update)
        _check_prefetch(prefetch, update, self.optimizer_state)
        _check_remat(remat, self.activations, update)

    @property
    def traits(self) -> ScheduleTraits:
        """The properties of the schedule with these settings."""
        traits = SCHEDULES[self.update]
        return dataclasses.replace(traits, updates_in_backward=True) if self.updates_at_once else traits

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


def _check_needs_own_backward(name: str, placement: Placement, update: str) -> None:
    """Raise ValueError if a field uses host memory without the layer-by-layer backward pass that this needs."""
    if placement.uses_host and not SCHEDULES[update].needs_stack:
        raise ValueError(
            f"memory.{name} = {placement.text} needs memory.update = streamed, in_backward or layer_programs: "
            "after_backward keeps everything on the device"
        )


def _check_prefetch(prefetch: str, update: str, optimizer_state: Placement) -> None:
    """Raise ValueError if whole layers are to be prefetched without state that this could fetch."""
    # Only state in host memory needs fetching, and only in_backward can fetch it layer by layer.
    if prefetch == "layer" and not (SCHEDULES[update].can_prefetch_layers and optimizer_state.uses_host):
        raise ValueError(
            "memory.prefetch = layer needs memory.update = in_backward and memory.optimizer_state = pinned_host, "
            f"given {update} and {optimizer_state.text}"
        )


def _check_remat(remat: str, activations: Placement, update: str) -> None:
    """Raise ValueError if the remat policies are invalid, or do not work with the other memory settings."""
    # The error names the field, which the check of the policies does not know.
    try:
        spans = remat_policies.parse_policies(remat)
    except ValueError as error:
        raise ValueError(f"remat: {error}") from None
    inverts = [span.policy == "invert" for span in spans]
    if any(inverts) and activations.uses_host:
        raise ValueError(
            f"memory.activations = {activations.text} with memory.remat = {remat}: inverted layers save no residuals "
            "that could be offloaded; expected memory.activations = device"
        )
    if any(inverts) and not all(inverts) and SCHEDULES[update].is_many_programs:
        raise ValueError(
            f"memory.remat = {remat} with memory.update = layer_programs: it inverts all layers or none; expected "
            "memory.remat = invert for all layers, or another memory.update"
        )
