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
            update; "streamed" updates a unit of the stack at a time, with its optimizer state alone on the device.
        optimizer_state: "pinned_host" keeps optimizer state (master weights and moments) in host memory between steps;
            vectors, scalars and leaves under 1 MiB stay on the device.
        remat: what the backward pass recomputes: none, full, dots, dots_no_batch, or save:NAME,NAME.
    """

    def __init__(
        self,
        *,
        update: Literal["after_backward", "streamed"] = "after_backward",
        optimizer_state: MemoryKind = "device",
        remat: str = "none",
    ):
        self.update: str = update
        self.optimizer_state: MemoryKind = optimizer_state
        try:
            remat_policies.check(remat)
        except ValueError as error:
            raise ValueError(f"remat: {error}") from None
        self.remat = remat
