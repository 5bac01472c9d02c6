"""Throughput: items (tokens, images) and steps per second, and model FLOPs utilization, over the last steps; and
metrics fetched late.

MFU as in PaLM (arXiv 2204.02311, appendix B): model FLOPs that the achieved tokens per second need, over the peak of
all devices; recomputation (remat) does not count as work.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Throughput:
    """Rates over the last `window` steps, leaving out the first step (it compiles) and time spent paused.

    Steps are dispatched ahead of the device; the rates are true because the loop waits for it when it fetches metrics.

    Args:
      tokens_per_step: targets counted in the loss per step, over all processes.
      flops_per_token: model FLOPs per token, forward and backward.
      item: what is counted, if no tokens; both arguments are of these then.
      peak_flops_total: peak FLOP/s of all devices together; None if not known, and then there is no MFU.
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
        self._flops_per_token, self._peak_flops_total = flops_per_token, peak_flops_total
        self._clock, self._rate = clock, f"train/{item}s_per_second"
        self._ends: deque[float] = deque(maxlen=window + 1)  # seconds of training at which each of the last steps ended
        self._paused_seconds = 0.0

    def step(self) -> None:
        """Call after each step. The first call ends the compiling step and starts the clock."""
        self._ends.append(self._clock() - self._paused_seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """`with throughput.paused(): evaluate()`"""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def metrics(self) -> dict[str, float]:
        """`train/steps_per_second`, `train/tokens_per_second` (of its item), `train/mfu` (0 to 1): those known."""
        seconds = self._ends[-1] - self._ends[0] if self._ends else 0.0
        if seconds <= 0:
            return {}
        rate = (len(self._ends) - 1) / seconds
        values = {"train/steps_per_second": rate, self._rate: rate * self._tokens_per_step}
        if self._peak_flops_total is not None:
            flops = values[self._rate] * self._flops_per_token
            values["train/mfu"] = flops / self._peak_flops_total
        return values


class MetricsBuffer:
    """Holds (step, metrics) in order, on the device, and gives them back as Python numbers.

    Fetching the loss of the step just dispatched would make Python wait for the device and the device then wait for
    Python. With one `take` per step the loop waits for the previous step while the newest one runs.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, Mapping[str, Any]]] = deque()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics: scalar arrays, on the device or not. Never waits."""
        self._held.append((step, metrics))

    def take(self, keep: int = 1) -> list[tuple[int, dict[str, float]]]:
        """Fetches, in one transfer, and hands back all steps but the newest `keep`. 0 waits for the newest."""
        import jax

        due = [self._held.popleft() for _ in range(len(self._held) - keep)]
        fetched = jax.device_get([metrics for _, metrics in due])
        return [
            (step, {name: value.item() for name, value in metrics.items()})
            for (step, _), metrics in zip(due, fetched, strict=True)
        ]
