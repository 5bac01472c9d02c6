"""Throughput over the last steps, and a buffer of metrics that are fetched later.

Throughput is items (tokens, images) per second, steps per second, and model FLOPs utilization (MFU). MFU is defined as
in PaLM (arXiv 2204.02311, appendix B): the model FLOPs for the achieved tokens per second, divided by the peak of all
devices. Recomputation (gradient checkpointing) does not count as work.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


class Throughput:
    """Rates over the last `window` steps, excluding the first step, which compiles, and any paused time.

    Steps are dispatched ahead of the device. The rates are still correct, because the loop waits for the device when it
    fetches metrics.

    Args:
        tokens_per_step: targets counted in the loss per step, over all processes.
        flops_per_token: model FLOPs per token, forward and backward.
        peak_flops_total: peak FLOP/s of all devices together; None if unknown, in which case MFU is not reported.
        item: kind of item, such as "token" or "image". `tokens_per_step` and `flops_per_token` refer to it.
        window: number of steps.
        clock: returns seconds.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops_total: float | None,
        *,
        item: str = "token",
        window: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak_flops_total = peak_flops_total
        self._clock = clock
        self._rate = f"train/{item}s_per_second"
        # End times of the last steps, in seconds excluding pauses: one more entry than the steps between them.
        self._ends: deque[float] = deque(maxlen=window + 1)
        self._paused_seconds = 0.0

    def step(self) -> None:
        """Record the end of a step. The first call ends the compiling step and starts the measurement."""
        self._ends.append(self._clock() - self._paused_seconds)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time spent in a `with` block from the rates: `with throughput.pause(): evaluate()`."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def metrics(self) -> dict[str, float]:
        """Return the rates that are known so far.

        They are `train/steps_per_second`, `train/tokens_per_second` (named after the item) and `train/mfu` (0 to 1).
        """
        seconds = self._ends[-1] - self._ends[0] if self._ends else 0.0
        if seconds <= 0:
            return {}
        step_rate = (len(self._ends) - 1) / seconds
        item_rate = step_rate * self._tokens_per_step
        rates = {"train/steps_per_second": step_rate, self._rate: item_rate}
        if self._peak_flops_total is not None:
            flops_per_second = item_rate * self._flops_per_token
            rates["train/mfu"] = flops_per_second / self._peak_flops_total
        return rates


class MetricsBuffer:
    """Holds (step, metrics) on the device, in order, and returns them as Python numbers later.

    Fetching the loss of the step just dispatched would make Python wait for the device, and then the device wait for
    Python. With one `take` per step, the loop waits for the previous step while the newest one runs.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, Mapping[str, jax.Array]]] = deque()

    def put(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Add a step's metrics: scalar arrays, on the device or not. Never waits."""
        self._held.append((step, metrics))

    def take(self, keep: int = 1) -> list[tuple[int, dict[str, float]]]:
        """Fetch and return, in one transfer, all steps but the newest `keep`.

        With `keep=0`, it waits for the newest step.
        """
        import jax

        due_rows = [self._held.popleft() for _ in range(len(self._held) - keep)]
        # A single call starts all copies before it waits for the first.
        fetched = jax.device_get([metrics for _, metrics in due_rows])
        rows = []
        for (step, _), metrics in zip(due_rows, fetched, strict=True):
            numbers = {name: value.item() for name, value in metrics.items()}
            rows.append((step, numbers))
        return rows
