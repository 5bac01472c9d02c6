"""The largest size of a family that fits a machine, and smaller ones, each with the fastest settings that fit."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from framework.config import Config
from framework.plan.auto.answer import Answer
from framework.plan.auto.choice import Choice
from framework.plan.largest.family import Family, Size, num_parameters
from framework.terminal.phases import SHORT, phase
from framework.terminal.tables import human_count

# Sizes are looked for up to so many times the known width.
_WIDEST = 8
# A size that the closed form took to fit, and the compiler not, is made smaller by this part so often.
_SMALLER = 0.97
_COMPILES = 4
# The largest size is known well enough where one of so many times its parameters does not fit.
_CLOSE = 1.015
# The next size that is tried has so many times the parameters of one that fits.
_GROWTH = 1.6
# Parameters of neighboring points of a frontier: each has so many times those of the one before.
_RATIO = 2.0
_MOST_POINTS = 6


class Point(NamedTuple):
    """A size, and the fastest settings under which it fits.

    Attributes:
        size: heads and layers.
        parameters: of the model.
        choice: of the settings.
        tokens_per_second: on all devices, by the closed form; None where rates are not published.
    """

    size: Size
    parameters: int
    choice: Choice
    tokens_per_second: float | None

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "heads": self.size.heads,
            "layers": self.size.layers,
            "parameters": self.parameters,
            "tokens_per_second": self.tokens_per_second,
            "choice": self.choice.without_neighbors().to_json(),
        }


class Frontier(NamedTuple):
    """What a machine carries of a family.

    Attributes:
        name: what of the training is changed: "as it is", or names and settings.
        points: the smallest size first; the last one is the largest that fits.
        failure: why there are none, in one line.
    """

    name: str
    points: Sequence[Point]
    failure: str = ""


# (config of a size, whether the closed form alone answers) -> the fastest settings that fit.
Ask = Callable[[Config, bool], Answer]


@dataclass
class Search:
    """Looks for the frontier of a family.

    Attributes:
        family: of what.
        ask: for the settings of a size.
        compiles: whether the compiler confirms the largest size; otherwise the closed form has the last word.
        tell: hears of each size that is tried.
    """

    family: Family
    ask: Ask
    compiles: bool
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        members = self.family.members(_WIDEST)
        self._sizes = [member.size for member in members]
        self._parameters = [member.parameters for member in members]
        self._points: dict[int, Point | None] = {}
        self._failure = ""

    def largest(self) -> Point | None:
        """The largest size that fits; None where not even the smallest does."""
        number = self._largest_by_closed_form()
        return None if number is None else self._confirmed(number)

    def run(self, name: str) -> Frontier:
        """The largest size that fits, and smaller ones."""
        point = self.largest()
        if point is None:
            return Frontier(name, [], self._failure)
        smaller = [self._point(number) for number in self._numbers_below(point.parameters)]
        return Frontier(name, [*(found for found in smaller if found is not None), point])

    def _largest_by_closed_form(self) -> int | None:
        """The number of the largest size that fits: whatever is larger than one that does not, does not either."""
        if self._point(0) is None:
            return None
        low, high = 0, len(self._sizes)
        # The known size is the first that is tried, so that a look at small machines is short.
        middle = self._nearest(num_parameters(self.family.config))
        while high - low > 1 and self._is_coarse(low, high):
            if self._point(middle) is None:
                high = middle
            else:
                low = middle
            middle = self._between(low, high)
        return low

    def _is_coarse(self, low: int, high: int) -> bool:
        """Whether the largest size that fits is not known well enough yet."""
        return high == len(self._sizes) or self._parameters[high] > _CLOSE * self._parameters[low]

    def _between(self, low: int, high: int) -> int:
        """The number of a size between two, halfway by the logarithm of the parameters; a few times the lower one's,
        while no upper one is known."""
        if high == len(self._sizes):
            middle = self._nearest(_GROWTH * self._parameters[low])
        else:
            middle = self._nearest(math.sqrt(self._parameters[low] * self._parameters[high]))
        return min(max(middle, low + 1), max(high - 1, low + 1))

    def _confirmed(self, number: int) -> Point | None:
        """The largest size that fits by the compiler, from that of the closed form downwards."""
        if not self.compiles:
            return self._point(number)
        for _ in range(_COMPILES):
            point = self._asked(number, estimate=False)
            if point is not None:
                return point
            smaller = self._nearest(_SMALLER * self._parameters[number])
            number = max(min(smaller, number - 1), 0)
        return None

    def _point(self, number: int) -> Point | None:
        """A size with its settings by the closed form; None where it does not fit."""
        if number not in self._points:
            self._points[number] = self._asked(number, estimate=True)
        return self._points[number]

    def _asked(self, number: int, *, estimate: bool) -> Point | None:
        size = self._sizes[number]
        config = self.family.config_of(size)
        parameters = self._parameters[number]
        with phase(f"trying {human_count(parameters)} parameters", patience=SHORT):
            answer = self.ask(config, estimate)
        choice = answer.choice
        if choice is None:
            self._failure = answer.failure
        self.tell(f"{human_count(parameters)}: {'does not fit' if choice is None else 'fits'}")
        if choice is None:
            return None
        tokens = config.data.global_batch_size * config.data.seq_len
        rate = None if choice.seconds is None else tokens / choice.seconds
        return Point(size, parameters, choice, rate)

    def _numbers_below(self, parameters: int) -> list[int]:
        """The numbers of sizes that are smaller by powers of a ratio, the smallest first."""
        numbers = []
        for power in range(1, _MOST_POINTS):
            number = self._nearest(parameters / _RATIO**power)
            if self._parameters[number] < parameters and number not in numbers:
                numbers.append(number)
        return sorted(numbers)

    def _nearest(self, parameters: float) -> int:
        """The number of the largest size of at most so many parameters; 0 if there is none."""
        return max(bisect.bisect_right(self._parameters, parameters) - 1, 0)
