"""What `config.memory` says: where state lives, when the update happens, what is recomputed.

May import: framework.layers.remat, framework.layout.
"""

from __future__ import annotations

from typing import Literal

from framework.layers import remat as remat_policies
from framework.layout import MemoryKind


class Memory:
    """The levers that trade time for memory; none of them changes the result.

    Args:
        update: when and in what pieces: "after_backward" is the plain schedule, the whole backward pass, then the whole
            update; "streamed" updates a piece at a time, with its optimizer state alone on the device; "in_backward"
            updates each unit as soon as the backward pass has its gradient, which then is gone.
        gradients: "pinned_host" writes each unit's gradients to host memory as the backward pass makes them; needs
            update = "streamed".
        optimizer_state: "pinned_host" keeps optimizer state (master weights and moments) in host memory between steps;
            vectors, scalars and leaves under 1 MiB stay on the device.
        remat: what the backward pass recomputes: none, full, sqrt, sqrt:NUMBER, dots, dots_no_batch, offload,
            save:NAME,NAME, offload:NAME,NAME, or save:NAME;offload:NAME; see framework.layers.remat.
    """

    def __init__(
        self,
        *,
        update: Literal["after_backward", "streamed", "in_backward"] = "after_backward",
        gradients: MemoryKind = "device",
        optimizer_state: MemoryKind = "device",
        remat: str = "none",
    ):
        if gradients != "device" and update != "streamed":
            raise ValueError(f"memory.gradients = {gradients} needs memory.update = streamed, given {update}")
        self.update: str = update
        self.gradients: MemoryKind = gradients
        self.optimizer_state: MemoryKind = optimizer_state
        try:
            remat_policies.check(remat)
        except ValueError as error:
            raise ValueError(f"remat: {error}") from None
        self.remat = remat
