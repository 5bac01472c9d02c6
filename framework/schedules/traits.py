"""The schedules (`memory.update`), and the properties of each that other packages depend on.

No other module compares names of schedules: a new schedule is described here, and built in
`framework.program.jit_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["after_backward", "streamed", "in_backward", "layer_programs"]


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a schedule.

    Attributes:
        needs_stack: runs the backward pass layer by layer, which needs a model with a stack. In return, weights and
            residuals can be offloaded.
        updates_in_chunks: updates one chunk of a layer at a time, so that only the optimizer state of that chunk is on
            the device. Otherwise the whole state is updated at once.
        updates_in_backward: updates each layer as soon as its gradient is complete, and then frees the gradient.
            Therefore microbatches can only be summed layer by layer (memory.accumulate_by), and an exact clip by the
            global norm needs a second backward pass.
        can_offload_gradients: can write each layer's gradients to host memory during the backward pass.
        can_prefetch_layers: can fetch the offloaded state of a whole layer ahead of its update (memory.prefetch).
        delays_prefetched: updates a layer whose state is prefetched in the next step, before its forward pass. It needs
            all gradients in host memory until then.
        can_speculate: can update layers in the backward pass before the norm is known, into a second copy of their
            state (memory.prefetch).
        is_many_programs: the step is several compiled programs that Python calls, and none contains the whole model.
        slices_host_arrays: slices arrays in host memory within a program, which XLA's GPU compiler cannot do.
        hidden_fraction: upper bound on the transfer time that the schedule hides, as a fraction of the rest of the
            step; it orders the search for settings.
    """

    needs_stack: bool = True
    updates_in_chunks: bool = True
    updates_in_backward: bool = False
    can_offload_gradients: bool = False
    can_prefetch_layers: bool = False
    delays_prefetched: bool = False
    can_speculate: bool = False
    is_many_programs: bool = False
    slices_host_arrays: bool = True
    hidden_fraction: float = 0.0


SCHEDULES: dict[str, ScheduleTraits] = {
    "after_backward": ScheduleTraits(needs_stack=False, updates_in_chunks=False, slices_host_arrays=False),
    "streamed": ScheduleTraits(
        can_offload_gradients=True, can_prefetch_layers=True, delays_prefetched=True, can_speculate=True
    ),
    "in_backward": ScheduleTraits(updates_in_backward=True, can_prefetch_layers=True, hidden_fraction=0.6),
    "layer_programs": ScheduleTraits(
        can_offload_gradients=True, is_many_programs=True, slices_host_arrays=False, hidden_fraction=1.0
    ),
}


def find_offloading_schedule(platform: str) -> str:
    """Return the first schedule that can offload everything, gradients included, on a platform."""
    return next(
        name
        for name, traits in SCHEDULES.items()
        if traits.can_offload_gradients and not (platform == "gpu" and traits.slices_host_arrays)
    )
