"""Late fetching: metrics stay on the device until nobody has to wait for them.

Fetching the loss of the step just dispatched would make Python wait for the device and the device then wait for Python.
With one `take` per step the loop waits for the previous step while the newest one runs.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any


class MetricsBuffer:
    """Holds (step, metrics) in order and gives them back as Python numbers."""

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
