"""What `config.memory` says: where state lives, when the update happens, what is recomputed."""

from __future__ import annotations

from typing import Literal

from framework.config import component
from framework.layers import remat as remat_policies
from framework.schedules.placement import Placement

# memory.gradients: no gradient is kept.
AT_ONCE = "none"


@component
class Memory:
    """The levers that trade time for memory; none of them changes the result.

    What may be in host memory takes four values: "device"; "pinned_host", everything; "pinned_host:20", the first 20
    layers of the stack; "pinned_host:0.6", that part of its layers, rounded. With a number, the other layers, the
    embedding and the head stay on the device.

    Args:
        update: when and in what pieces: "after_backward" is the plain schedule, the whole backward pass, then the whole
            update; "streamed" updates a piece at a time, with its optimizer state alone on the device; "in_backward"
            updates each unit as soon as the backward pass has its gradient, which then is gone; "layer_programs" runs
            the step as a few small programs, one layer after the other, instead of one large one.
        gradients: "pinned_host" writes each unit's gradients to host memory as the backward pass makes them; needs
            update = "streamed" or "layer_programs". "none", with the latter, keeps no gradient: each unit is updated at
            once, with the limits of "in_backward".
        optimizer_state: "pinned_host" keeps optimizer state (master weights and moments) in host memory between steps;
            vectors, scalars and leaves under 1 MiB stay on the device.
        prefetch: what of the state in host memory comes to the device at once under update = "in_backward". "piece": a
            tensor, or a part of one, when the unit's gradients are there. "unit": all of a unit's, asked for when the
            unit's backward pass begins and sent back while the next one's runs, so that the transfers have computation
            to hide behind. It costs the state of two units on the device.
        parameters: "pinned_host" keeps the weights there too, frozen ones included; a layer's come to the device when
            its turn comes. Not with update = "after_backward".
        activations: "pinned_host" keeps there what `remat` keeps of each unit for the backward pass: its input, under
            full. Not with update = "after_backward".
        remat: what the backward pass recomputes: none, full, sqrt, sqrt:NUMBER, invert, dots, dots_no_batch, offload,
            save:NAME,NAME, offload:NAME,NAME, or save:NAME;offload:NAME; by the layer full:20,dots:12; see
            framework.layers.remat.
        auto: `plimsoll train` chooses the other fields before it compiles anything, with mesh and learner.accumulate:
            the fastest that fit the devices at hand. What the command line sets is left alone, and so is what a config
            sets beside auto itself. `plimsoll plan --auto` shows the choice.
    """

    def __init__(
        self,
        *,
        update: Literal["after_backward", "streamed", "in_backward", "layer_programs"] = "after_backward",
        gradients: str = "device",
        optimizer_state: str = "device",
        prefetch: Literal["piece", "unit"] = "piece",
        parameters: str = "device",
        activations: str = "device",
        remat: str = "none",
        auto: bool = False,
    ):
        self.update: str = update
        self.gradients = _gradients(gradients, update)
        self.optimizer_state = Placement.of("optimizer_state", optimizer_state)
        self.parameters = Placement.of("parameters", parameters)
        self.activations = Placement.of("activations", activations)
        self.prefetch: str = prefetch
        self.remat = remat
        self.auto = auto
        _check_needs_own_backward("parameters", self.parameters, update)
        _check_needs_own_backward("activations", self.activations, update)
        _check_prefetch(prefetch, update, self.optimizer_state)
        _check_remat(remat, self.activations, update)

    @property
    def updates_at_once(self) -> bool:
        """Whether the programs of layers update each unit when its gradient is there (gradients = none)."""
        return self.gradients.text == AT_ONCE


def _gradients(text: str, update: str) -> Placement:
    """Where gradients live. Raises ValueError where the schedule has no place for them there."""
    if text == AT_ONCE:
        if update != "layer_programs":
            raise ValueError(f"memory.gradients = none needs memory.update = layer_programs, given {update}")
        return Placement(AT_ONCE)
    placement = Placement.of("gradients", text)
    # Under after_backward all gradients are on the device at once, and under in_backward each is gone once
    # its unit is updated: only the other two write them to buffers.
    if placement.uses_host and update not in ("streamed", "layer_programs"):
        raise ValueError(f"memory.gradients = {text} needs memory.update = streamed or layer_programs, given {update}")
    return placement


def _check_needs_own_backward(name: str, placement: Placement, update: str) -> None:
    """Raises ValueError for a field whose host memory needs a backward pass that goes unit by unit."""
    if placement.uses_host and update == "after_backward":
        raise ValueError(
            f"memory.{name} = {placement.text} needs memory.update = streamed, in_backward or layer_programs: "
            "after_backward has everything on the device at once"
        )


def _check_prefetch(prefetch: str, update: str, optimizer_state: Placement) -> None:
    # Only a state that is on the host has to come, and only in_backward takes it a unit at a time.
    if prefetch == "unit" and (update != "in_backward" or not optimizer_state.uses_host):
        raise ValueError(
            "memory.prefetch = unit needs memory.update = in_backward and memory.optimizer_state = pinned_host, "
            f"given {update} and {optimizer_state.text}"
        )


def _check_remat(remat: str, activations: Placement, update: str) -> None:
    # The error names the field, which the policies' own check does not know.
    try:
        spans = remat_policies.spans(remat)
    except ValueError as error:
        raise ValueError(f"remat: {error}") from None
    inverts = [span.policy == "invert" for span in spans]
    if any(inverts) and activations.uses_host:
        raise ValueError(
            f"memory.activations = {activations.text} with memory.remat = {remat}: nothing is kept of inverted units "
            "that could go there; expected device"
        )
    if any(inverts) and not all(inverts) and update == "layer_programs":
        raise ValueError(
            f"memory.remat = {remat} with memory.update = layer_programs: it inverts all layers or none; expected "
            "invert alone, or another memory.update"
        )
