"""Finds the largest size of a family that fits a machine, and smaller ones, each with the fastest settings that fit."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll.extras.autotune.autotune import TuningResult
from plimsoll.extras.autotune.settings import TunedSettings
from plimsoll.extras.largest.size_family import Size, SizeFamily, count_parameters
from plimsoll.framework.config import Config
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_count

# Search sizes up to this multiple of the known width.
_WIDEST = 8
# If a size fits by the estimate but not when compiled, shrink it by this factor, up to this many compilations.
_SMALLER = 0.97
_COMPILES = 4
# The largest size is accurate enough if one with this multiple of its parameters does not fit.
_CLOSE = 1.015
# After a size that fits, try one with this multiple of its parameters.
_GROWTH = 1.6
# Ratio of the parameters of neighboring points on a frontier.
_RATIO = 2.0
_MOST_POINTS = 6


class FrontierPoint(NamedTuple):
    """A size, with the fastest settings under which it fits.

    Attributes:
        size: number of heads and layers.
        parameters: number of parameters of the model.
        choice: the chosen settings.
        tokens_per_second: estimated throughput of all devices together; None if the rates of the device are not
            published.
    """

    size: Size
    parameters: int
    choice: TunedSettings
    tokens_per_second: float | None

    def to_json(self) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        return {
            "heads": self.size.heads,
            "layers": self.size.layers,
            "parameters": self.parameters,
            "tokens_per_second": self.tokens_per_second,
            "choice": self.choice.without_neighbors().to_json(),
        }


class Frontier(NamedTuple):
    """The sizes of a family that fit a machine.

    Attributes:
        name: the compared settings, the target and the allowed changes; "base config" if there are none.
        points: sizes that fit, smallest first; the last one is the largest that fits.
        failure: the reason why no size fits, in one line.
    """

    name: str
    points: Sequence[FrontierPoint]
    failure: str = ""


# (config of a size, True to use only the analytical estimate) -> the fastest settings that fit.
TuneFunction = Callable[[Config, bool], TuningResult]
# Config of a size -> the reason why no settings fit by the analytical estimate; "" if some do.
CheckFunction = Callable[[Config], str]


@dataclass
class FrontierSearch:
    """Search for the frontier of a family.

    Attributes:
        family: the sizes to search.
        tune: finds the settings for a size.
        check: checks whether a size fits, in less time than it takes to find the fastest settings.
        compiles: whether to confirm the largest size with the compiler instead of trusting the analytical estimate.
        log: callback that receives a message for each size that is tried.
    """

    family: SizeFamily
    tune: TuneFunction
    check: CheckFunction
    compiles: bool
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        members = self.family.members(_WIDEST)
        self._sizes = [member.size for member in members]
        self._parameters = [member.parameters for member in members]
        self._points: dict[int, FrontierPoint | None] = {}
        self._fits_by_index: dict[int, bool] = {}
        self._failure = ""

    def largest(self) -> FrontierPoint | None:
        """Return the largest size that fits; None if none was found."""
        index = self._estimate_largest()
        return None if index is None else self._confirm_largest(index)

    def run(self, name: str) -> Frontier:
        """Return the largest size that fits, and smaller ones.

        Args:
            name: name of the frontier in tables and plots.
        """
        point = self.largest()
        if point is None:
            return Frontier(name, [], self._failure)
        smaller = [self._get_point(index) for index in self._list_smaller(point.parameters)]
        return Frontier(name, [*(found for found in smaller if found is not None), point])

    def _estimate_largest(self) -> int | None:
        """Return the index of the largest size that fits by the estimate, or None.

        The search assumes that if a size does not fit, no larger size does.
        """
        if not self._fits(0):
            return None
        low, high = 0, len(self._sizes)
        # Try the known size first, which keeps the search short on small machines.
        middle = self._nearest(count_parameters(self.family.config))
        while high - low > 1 and self._is_coarse(low, high):
            if self._fits(middle):
                low = middle
            else:
                high = middle
            middle = self._pick_between(low, high)
        return low

    def _is_coarse(self, low: int, high: int) -> bool:
        """Return whether the largest size that fits is not accurate enough yet."""
        return high == len(self._sizes) or self._parameters[high] > _CLOSE * self._parameters[low]

    def _pick_between(self, low: int, high: int) -> int:
        """Return the index of a size between two.

        It is halfway in the logarithm of the parameters. As long as no upper bound is known, it is the size with
        `_GROWTH` times the parameters of the lower one.
        """
        if high == len(self._sizes):
            middle = self._nearest(_GROWTH * self._parameters[low])
        else:
            middle = self._nearest(math.sqrt(self._parameters[low] * self._parameters[high]))
        return min(max(middle, low + 1), max(high - 1, low + 1))

    def _confirm_largest(self, index: int) -> FrontierPoint | None:
        """Return the largest size that fits when compiled, searching downward from the estimated one.

        Return None if none fits within `_COMPILES` compilations.
        """
        if not self.compiles:
            return self._get_point(index)
        for _ in range(_COMPILES):
            point = self._try_size(index, estimate=False)
            if point is not None:
                return point
            smaller = self._nearest(_SMALLER * self._parameters[index])
            index = max(min(smaller, index - 1), 0)
        return None

    def _fits(self, index: int) -> bool:
        """Return whether any settings of a size fit by the analytical estimate."""
        if index not in self._fits_by_index:
            parameters = human_count(self._parameters[index])
            with phase(f"trying {parameters} parameters", patience=SHORT):
                failure = self.check(self.family.scale_config(self._sizes[index]))
            self._failure = failure or self._failure
            self._fits_by_index[index] = not failure
            self.log(f"{parameters}: {'does not fit' if failure else 'fits'}")
        return self._fits_by_index[index]

    def _get_point(self, index: int) -> FrontierPoint | None:
        """Return a size with its settings by the analytical estimate; None if it does not fit."""
        if index not in self._points:
            self._points[index] = self._try_size(index, estimate=True)
        return self._points[index]

    def _try_size(self, index: int, *, estimate: bool) -> FrontierPoint | None:
        size = self._sizes[index]
        config = self.family.scale_config(size)
        parameters = self._parameters[index]
        with phase(f"finding the fastest settings for {human_count(parameters)} parameters", patience=SHORT):
            result = self.tune(config, estimate)
        choice = result.choice
        if choice is None:
            self._failure = result.failure
        if choice is None:
            self.log(f"{human_count(parameters)}: does not fit when compiled")
            return None
        self.log(f"{human_count(parameters)}: fastest settings found")
        tokens = config.data.global_batch_size * config.data.seq_len
        rate = None if choice.seconds is None else tokens / choice.seconds
        return FrontierPoint(size, parameters, choice, rate)

    def _list_smaller(self, parameters: int) -> list[int]:
        """Return the indices of sizes that are smaller by powers of `_RATIO`, smallest first."""
        indices = []
        for power in range(1, _MOST_POINTS):
            index = self._nearest(parameters / _RATIO**power)
            if self._parameters[index] < parameters and index not in indices:
                indices.append(index)
        return sorted(indices)

    def _nearest(self, parameters: float) -> int:
        """Return the index of the largest size with at most `parameters` parameters; 0 if there is none."""
        return max(bisect.bisect_right(self._parameters, parameters) - 1, 0)
