"""Throughput over the last steps, and a buffer of metrics that are fetched late.

Throughput is items (tokens, images) and steps per second, and model FLOPs utilization (MFU). MFU is
that of PaLM (arXiv 2204.02311, appendix B): the model FLOPs that the achieved tokens per second
need, over the peak of all devices; recomputation (gradient checkpointing) does not count as work.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Throughput:
    """Rates over the last `window` steps.

    The first step, which compiles, and time spent paused are left out.

    Steps are dispatched ahead of the device; the rates are true because the loop waits for the
    device when it fetches metrics.

    Args:
      tokens_per_step: targets counted in the loss per step, over all processes.
      flops_per_token: model FLOPs per token, forward and backward.
      peak_flops_total: peak FLOP/s of all devices together; None if not known, and then there is no
        MFU.
      item: the kind of item, where it is not a token; the two figures above are of items then.
      window: the number of steps.
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
        # Seconds of training at which each of the last steps ended: one more than there are steps
        # between them.
        self._ends: deque[float] = deque(maxlen=window + 1)
        self._paused_seconds = 0.0

    def step(self) -> None:
        """Notes the end of a step. The first call ends the compiling step and starts the clock."""
        self._ends.append(self._clock() - self._paused_seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time of the context: `with throughput.paused(): evaluate()`"""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def metrics(self) -> dict[str, float]:
        """Returns the rates that are known.

        They are `train/steps_per_second`, `train/tokens_per_second` (of its item) and `train/mfu`
        (0 to 1).
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
    """Holds (step, metrics) in order, on the device, and gives them back as Python numbers.

    Fetching the loss of the step just dispatched would make Python wait for the device and the
    device then wait for Python. With one `take` per step the loop waits for the previous step
    while the newest one runs.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, Mapping[str, Any]]] = deque()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics: scalar arrays, on the device or not. Never waits."""
        self._held.append((step, metrics))

    def take(self, keep: int = 1) -> list[tuple[int, dict[str, float]]]:
        """Fetches, in one transfer, and returns all steps but the newest `keep`.

        With a `keep` of 0 it waits for the newest step.
        """
        import jax

        due_rows = [self._held.popleft() for _ in range(len(self._held) - keep)]
        # One call for all: it starts every copy before it waits for the first.
        fetched = jax.device_get([metrics for _, metrics in due_rows])
        rows = []
        for (step, _), metrics in zip(due_rows, fetched, strict=True):
            numbers = {name: value.item() for name, value in metrics.items()}
            rows.append((step, numbers))
        return rows
