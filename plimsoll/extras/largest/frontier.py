"""Finds the largest member of a family that fits a machine, and smaller ones, each with the fastest settings that fit.

The members of a family are configs that need more and more memory: larger models (`SizeFamily`) or longer rows
(`LengthFamily`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from plimsoll.extras.autotune.autotune import TuningResult
from plimsoll.extras.autotune.settings import TunedSettings
from plimsoll.framework.config import Config
from plimsoll.framework.terminal.phases import SHORT, phase

Size = TypeVar("Size")
# If a member fits by the estimate but not when compiled, shrink it by this factor, up to this many compilations.
_SMALLER = 0.97
_COMPILES = 4
# The largest member is accurate enough if one with this multiple of its amount does not fit.
_CLOSE = 1.015
# After a member that fits, try one with this multiple of its amount.
_GROWTH = 1.6
# Ratio of the amounts of neighboring points on a frontier.
_RATIO = 2.0
_MOST_POINTS = 6


@dataclass(frozen=True)
class Member(Generic[Size]):
    """A member of a family.

    Attributes:
        size: what the family makes its config from.
        amount: what grows from member to member: the parameters of a model, or the tokens of a row.
    """

    size: Size
    amount: int


class Family(Protocol[Size]):
    """A family of configs.

    Attributes:
        title: title of the table of largest members.
        columns: columns of tables that describe a member; the first one is its amount.
    """

    title: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    @property
    def config(self) -> Config:
        """The known member."""
        ...

    def members(self) -> Sequence[Member[Size]]:
        """Return the members to search, the smallest first."""
        ...

    def scale_config(self, size: Size) -> Config:
        """Return the config of a member."""
        ...

    def measure(self, config: Config) -> int:
        """Return the amount of a config."""
        ...

    def describe(self, amount: int) -> str:
        """Return an amount with its unit."""
        ...

    def to_cells(self, member: Member[Size]) -> list[str]:
        """Return a member's cells in `columns`."""
        ...

    def to_json(self, member: Member[Size]) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        ...


class FrontierPoint(NamedTuple):
    """A member, with the fastest settings under which it fits.

    Attributes:
        member: the member.
        choice: the chosen settings.
        tokens_per_second: estimated throughput of all devices together; None if the rates of the device are not
            published.
    """

    member: Member[Any]
    choice: TunedSettings
    tokens_per_second: float | None

    def to_json(self, family: Family[Any]) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        return {
            **family.to_json(self.member),
            "tokens_per_second": self.tokens_per_second,
            "choice": self.choice.without_neighbors().to_json(),
        }


class Frontier(NamedTuple):
    """The members of a family that fit a machine.

    Attributes:
        name: the compared settings, the target and the allowed changes; "base config" if there are none.
        family: the family.
        points: members that fit, smallest first; the last one is the largest that fits.
        failure: the reason why no member fits, in one line.
    """

    name: str
    family: Family[Any]
    points: Sequence[FrontierPoint]
    failure: str = ""


# (config of a member, True to use only the analytical estimate) -> the fastest settings that fit.
TuneFunction = Callable[[Config, bool], TuningResult]
# Config of a member -> the reason why no settings fit by the analytical estimate; "" if some do.
CheckFunction = Callable[[Config], str]


@dataclass
class FrontierSearch:
    """Search for the frontier of a family.

    Attributes:
        family: the members to search.
        tune: finds the settings for a member.
        check: checks whether a member fits, in less time than it takes to find the fastest settings.
        compiles: whether to confirm the largest member with the compiler instead of trusting the analytical estimate.
        log: callback that receives a message for each member that is tried.
    """

    family: Family[Any]
    tune: TuneFunction
    check: CheckFunction
    compiles: bool
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._members = self.family.members()
        self._amounts = [member.amount for member in self._members]
        self._points: dict[int, FrontierPoint | None] = {}
        self._fits_by_index: dict[int, bool] = {}
        self._failure = ""

    def largest(self) -> FrontierPoint | None:
        """Return the largest member that fits; None if none was found."""
        index = self._estimate_largest()
        return None if index is None else self._confirm_largest(index)

    def run(self, name: str) -> Frontier:
        """Return the largest member that fits, and smaller ones.

        Args:
            name: name of the frontier in tables and plots.
        """
        point = self.largest()
        if point is None:
            return Frontier(name, self.family, [], self._failure)
        smaller = [self._get_point(index) for index in self._list_smaller(point.member.amount)]
        return Frontier(name, self.family, [*(found for found in smaller if found is not None), point])

    def _estimate_largest(self) -> int | None:
        """Return the index of the largest member that fits by the estimate, or None.

        The search assumes that if a member does not fit, no larger one does.
        """
        if not self._fits(0):
            return None
        low, high = 0, len(self._members)
        # Try the known member first, which keeps the search short on small machines.
        middle = self._nearest(self.family.measure(self.family.config))
        while high - low > 1 and self._is_coarse(low, high):
            if self._fits(middle):
                low = middle
            else:
                high = middle
            middle = self._pick_between(low, high)
        return low

    def _is_coarse(self, low: int, high: int) -> bool:
        """Return whether the largest member that fits is not accurate enough yet."""
        return high == len(self._members) or self._amounts[high] > _CLOSE * self._amounts[low]

    def _pick_between(self, low: int, high: int) -> int:
        """Return the index of a member between two.

        It is halfway in the logarithm of the amount. As long as no upper bound is known, it is the member with
        `_GROWTH` times the amount of the lower one.
        """
        if high == len(self._members):
            middle = self._nearest(_GROWTH * self._amounts[low])
        else:
            middle = self._nearest(math.sqrt(self._amounts[low] * self._amounts[high]))
        return min(max(middle, low + 1), max(high - 1, low + 1))

    def _confirm_largest(self, index: int) -> FrontierPoint | None:
        """Return the largest member that fits when compiled, searching downward from the estimated one.

        Return None if none fits within `_COMPILES` compilations.
        """
        if not self.compiles:
            return self._get_point(index)
        for _ in range(_COMPILES):
            point = self._try_member(index, estimate=False)
            if point is not None:
                return point
            smaller = self._nearest(_SMALLER * self._amounts[index])
            index = max(min(smaller, index - 1), 0)
        return None

    def _fits(self, index: int) -> bool:
        """Return whether any settings of a member fit by the analytical estimate."""
        if index not in self._fits_by_index:
            described = self.family.describe(self._amounts[index])
            with phase(f"trying {described}", patience=SHORT):
                failure = self.check(self.family.scale_config(self._members[index].size))
            self._failure = failure or self._failure
            self._fits_by_index[index] = not failure
            self.log(f"{described}: {'does not fit' if failure else 'fits'}")
        return self._fits_by_index[index]

    def _get_point(self, index: int) -> FrontierPoint | None:
        """Return a member with its settings by the analytical estimate; None if it does not fit."""
        if index not in self._points:
            self._points[index] = self._try_member(index, estimate=True)
        return self._points[index]

    def _try_member(self, index: int, *, estimate: bool) -> FrontierPoint | None:
        member = self._members[index]
        config = self.family.scale_config(member.size)
        described = self.family.describe(member.amount)
        with phase(f"finding the fastest settings for {described}", patience=SHORT):
            result = self.tune(config, estimate)
        choice = result.choice
        if choice is None:
            self._failure = result.failure
            self.log(f"{described}: does not fit when compiled")
            return None
        self.log(f"{described}: fastest settings found")
        tokens = config.data.global_batch_size * config.data.seq_len
        rate = None if choice.seconds is None else tokens / choice.seconds
        return FrontierPoint(member, choice, rate)

    def _list_smaller(self, amount: int) -> list[int]:
        """Return the indices of members that are smaller by powers of `_RATIO`, smallest first."""
        indices = []
        for power in range(1, _MOST_POINTS):
            index = self._nearest(amount / _RATIO**power)
            if self._amounts[index] < amount and index not in indices:
                indices.append(index)
        return sorted(indices)

    def _nearest(self, amount: float) -> int:
        """Return the index of the largest member with at most this amount; 0 if there is none."""
        return max(bisect.bisect_right(self._amounts, amount) - 1, 0)
