"""What a schedule hangs into a backward pass that goes unit by unit: visits of gradients, and turns of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from framework.layout import Nested

Work = dict[str, Any]  # "parameter", "frozen", and whatever visits change
# (work, stage, gradients, index of the unit or None) -> work. Gradients are in the structure of the stage's trainable
# parameters, those of a unit without the leading axis. Called once for each unit and once for each other stage.
Visit = Callable[
    [
        Work,
        str,
        Nested,
        jax.Array | None,
    ],
    Work,
]


class Turns(NamedTuple):
    """Functions that a backward loop over a stack's units calls besides `visit`; they may add keys to the work.

    Where units are in groups (memory.remat = sqrt), the loop is each group's.

    Attributes:
      begin_loop: (work, stack, index of the first unit) -> work, called before the loop.
      begin_unit: (work, stack, index of the unit) -> work, called when a unit's turn begins; its visit has what this
        adds.
      end_loop: (work, stack) -> work, called after the loop.
    """

    begin_loop: Callable[[Work, str, jax.Array], Work] = lambda work, stack, index: work
    begin_unit: Callable[[Work, str, jax.Array], Work] = lambda work, stack, index: work
    end_loop: Callable[[Work, str], Work] = lambda work, stack: work


class Visits(NamedTuple):
    """All that a schedule hangs into one backward pass."""

    visit: Visit
    turns: Turns = Turns()
