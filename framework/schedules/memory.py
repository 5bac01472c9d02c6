"""What `config.memory` says: where state lives, when the update happens, what is recomputed."""

from __future__ import annotations

from typing import Literal

from framework.config import PositiveInt, component
from framework.layers import remat as remat_policies
from framework.layout import MemoryKind


@component
class Memory:
    """The levers that trade time for memory; none of them changes the result.

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
        hosted_layers: how many of the stack's units `parameters` concerns, counted from the first, where only part
            must go; the embedding, the head and the other units stay on the device. None means everything. Needs
            update = "layer_programs".
        activations: "pinned_host" keeps there what `remat` keeps of each unit for the backward pass: its input, under
            full. Not with update = "after_backward".
        remat: what the backward pass recomputes: none, full, sqrt, sqrt:NUMBER, invert, dots, dots_no_batch, offload,
            save:NAME,NAME, offload:NAME,NAME, or save:NAME;offload:NAME; see framework.layers.remat.
        auto: `plimsoll train` chooses the other fields before it compiles anything, with mesh and learner.accumulate:
            the fastest that fit the devices at hand. What the command line sets is left alone, and so is what a config
            sets beside auto itself. `plimsoll plan --auto` shows the choice.
    """

    def __init__(
        self,
        *,
        update: Literal["after_backward", "streamed", "in_backward", "layer_programs"] = "after_backward",
        gradients: Literal["device", "pinned_host", "none"] = "device",
        optimizer_state: MemoryKind = "device",
        prefetch: Literal["piece", "unit"] = "piece",
        parameters: MemoryKind = "device",
        hosted_layers: PositiveInt | None = None,
        activations: MemoryKind = "device",
        remat: str = "none",
        auto: bool = False,
    ):
        _check_gradients(gradients, update)
        _check_needs_own_backward("parameters", parameters, update)
        _check_needs_own_backward("activations", activations, update)
        _check_prefetch(prefetch, update, optimizer_state)
        _check_hosted_layers(hosted_layers, parameters, update)
        self.update: str = update
        self.gradients: str = gradients
        self.optimizer_state: MemoryKind = optimizer_state
        self.prefetch: str = prefetch
        self.parameters: MemoryKind = parameters
        self.hosted_layers = hosted_layers
        self.activations: MemoryKind = activations
        _check_remat(remat, activations)
        self.remat = remat
        self.auto = auto


def _check_gradients(gradients: str, update: str) -> None:
    # Under after_backward all gradients are on the device at once, and under in_backward each is gone once
    # its unit is updated: only the other two write them to buffers.
    if gradients == "pinned_host" and update not in ("streamed", "layer_programs"):
        raise ValueError(
            f"memory.gradients = pinned_host needs memory.update = streamed or layer_programs, given {update}"
        )
    if gradients == "none" and update != "layer_programs":
        raise ValueError(f"memory.gradients = none needs memory.update = layer_programs, given {update}")


def _check_needs_own_backward(name: str, kind: MemoryKind, update: str) -> None:
    """Raises ValueError for a field whose host memory needs a backward pass that goes unit by unit."""
    if kind != "device" and update == "after_backward":
        raise ValueError(
            f"memory.{name} = {kind} needs memory.update = streamed, in_backward or layer_programs: "
            "after_backward has everything on the device at once"
        )


def _check_prefetch(prefetch: str, update: str, optimizer_state: MemoryKind) -> None:
    # Only a state that is on the host has to come, and only in_backward takes it a unit at a time.
    if prefetch == "unit" and (update != "in_backward" or optimizer_state == "device"):
        raise ValueError(
            "memory.prefetch = unit needs memory.update = in_backward and memory.optimizer_state = pinned_host, "
            f"given {update} and {optimizer_state}"
        )


def _check_hosted_layers(hosted_layers: int | None, parameters: MemoryKind, update: str) -> None:
    # Only layer_programs has a stack as arrays of single layers, of which each may live elsewhere.
    if hosted_layers is not None and (parameters == "device" or update != "layer_programs"):
        raise ValueError(
            f"memory.hosted_layers = {hosted_layers} needs memory.parameters = pinned_host and memory.update = "
            f"layer_programs, given {parameters} and {update}: elsewhere a stack lives in one place"
        )


def _check_remat(remat: str, activations: MemoryKind) -> None:
    # The error names the field, which the policies' own check does not know.
    try:
        remat_policies.check(remat)
    except ValueError as error:
        raise ValueError(f"remat: {error}") from None
    if remat == "invert" and activations != "device":
        raise ValueError(
            f"memory.activations = {activations} with memory.remat = invert: nothing is kept of the units that "
            "could go there; expected device"
        )
