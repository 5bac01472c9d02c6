"""Throughput: tokens and steps per second, and model FLOPs utilization, over the last steps.

Imports only the standard library. MFU as in PaLM (arXiv 2204.02311, appendix B): model FLOPs that the achieved tokens
per second need, over the peak of all devices; recomputation (remat) does not count as work.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator


class Throughput:
    """Rates over the last `window` steps, leaving out the first step (it compiles) and time spent paused.

    Steps are dispatched ahead of the device, so one interval between two calls of `step` means little, and the rates
    become true once the loop waits for the device at all, which it does whenever it fetches metrics.

    Args:
      tokens_per_step: targets counted in the loss per step, over all processes.
      flops_per_token: model FLOPs per token, forward and backward; None if not known.
      peak_flops_total: peak FLOP/s of all devices together; None if not known, and then there is no MFU.
      window: number of steps to average over.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float | None = None,
        peak_flops_total: float | None = None,
        *,
        window: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if window < 1:
            raise ValueError(f"window: expected at least 1 step, got {window}")
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak_flops_total = peak_flops_total
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=window + 1)  # seconds of training at which each of the last steps ended
        self._paused_seconds = 0.0
        self._paused_at: float | None = None
        self._pauses = 0

    def step(self) -> None:
        """Call after each step. The first call ends the compiling step and starts the clock."""
        assert self._paused_at is None, "a step ended while paused"
        self._ends.append(self._clock() - self._paused_seconds)

    def pause(self) -> None:
        """Stops the clock (evaluation, save). May be nested; as many `resume` start it again."""
        self._pauses += 1
        if self._pauses == 1:
            self._paused_at = self._clock()

    def resume(self) -> None:
        assert self._paused_at is not None, "resume without pause"
        self._pauses -= 1
        if self._pauses == 0:
            self._paused_seconds += self._clock() - self._paused_at
            self._paused_at = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """`with throughput.paused(): evaluate()`"""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    @property
    def steps_per_second(self) -> float | None:
        """None before the second step, and if no time has passed."""
        seconds = self._ends[-1] - self._ends[0] if len(self._ends) > 1 else 0.0
        return (len(self._ends) - 1) / seconds if seconds > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        rate = self.steps_per_second
        return None if rate is None else rate * self._tokens_per_step

    @property
    def mfu(self) -> float | None:
        """Fraction of the peak, 0 to 1; None where the peak or the FLOPs are not known."""
        rate = self.tokens_per_second
        if rate is None or not self._flops_per_token or not self._peak_flops_total:
            return None
        return rate * self._flops_per_token / self._peak_flops_total

    def metrics(self) -> dict[str, float]:
        """`train/steps_per_second`, `train/tokens_per_second`, `train/mfu`: those that are known."""
        values = {
            "train/steps_per_second": self.steps_per_second,
            "train/tokens_per_second": self.tokens_per_second,
            "train/mfu": self.mfu,
        }
        return {name: value for name, value in values.items() if value is not None}
