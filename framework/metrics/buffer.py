"""Late fetching: metrics stay on the device until nobody has to wait for them.

Imports jax inside functions. Fetching the loss of the step just dispatched would make Python wait for the device and
the device then wait for Python. The buffer keeps the arrays of past steps, never fetches the newest, and fetches the
others in one transfer. With one fetch per step, the loop waits for the previous step while the newest one runs.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any


class MetricsBuffer:
    """Holds (step, metrics) in order and gives them back as Python numbers.

    Args:
      capacity: most steps held; one more fetches all but the newest, so memory is bounded whatever the caller does.
    """

    def __init__(self, capacity: int = 256):
        if capacity < 1:
            raise ValueError(f"capacity: expected at least 1 step, got {capacity}")
        self._capacity = capacity
        self._held: deque[tuple[int, dict[str, Any]]] = deque()
        self._fetched: deque[tuple[int, dict[str, float]]] = deque()

    def __len__(self) -> int:
        """Steps that were put and not yet handed back."""
        return len(self._held) + len(self._fetched)

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics: scalars, on the device or not. Waits only if the buffer is full.

        Raises:
          ValueError: a value that is not a scalar, or a step that is not after the last one.
        """
        for name, value in metrics.items():
            if getattr(value, "shape", ()) != ():
                raise ValueError(f"metric {name!r} of step {step}: expected a scalar, got shape {value.shape}")
        last = self._held[-1][0] if self._held else self._fetched[-1][0] if self._fetched else None
        if last is not None and step <= last:
            raise ValueError(f"metrics of step {step} were put after those of step {last}")
        self._held.append((step, dict(metrics)))
        if len(self._held) > self._capacity:
            self._fetch(keep=1)

    def take(self, keep: int = 1) -> list[tuple[int, dict[str, float]]]:
        """Fetches and hands back all steps but the newest `keep`, in order. 0 waits for the newest (at the end)."""
        self._fetch(keep)
        taken = list(self._fetched)
        self._fetched.clear()
        return taken

    def _fetch(self, keep: int) -> None:
        import jax

        due = [self._held.popleft() for _ in range(len(self._held) - keep)]
        for (step, _), values in zip(due, jax.device_get([metrics for _, metrics in due]), strict=True):
            self._fetched.append((step, {name: _number(value) for name, value in values.items()}))


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
