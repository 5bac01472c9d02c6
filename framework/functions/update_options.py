"""What `eager`, `eager_weights` and `eager_scan` are told of an update, and the updater that is made of it."""

from __future__ import annotations

from typing import Any, Required, TypedDict

from framework.functions.rules import BareRule, OptaxRule, as_rule
from framework.functions.stream import stream_of
from framework.functions.streamed_updater import StreamedUpdater
from framework.functions.updater import Updater


class UpdateOptions(TypedDict, total=False):
    """Keyword arguments.

    name: of the piece, in errors, profiles and plans.
    skip_nonfinite: a gradient with infinities or NaN leaves weights and state as they are; True unless it is given.
    max_update_rms: the largest root mean square of a tensor's update, as optax has it (Shazeer and Stern 2018,
        arXiv 1804.04235, section 6); None, for no limit, unless it is given.
    mixes: the rule may look at several tensors of the piece together, which is refused otherwise: it would be wrong for
        a rule that should see all parameters of the model. False unless it is given.
    """

    name: Required[str]
    skip_nonfinite: bool
    max_update_rms: float | None
    mixes: bool


def updater_of(
    optimizer_or_rule: Any | BareRule,
    *,
    name: str,
    skip_nonfinite: bool = True,
    max_update_rms: float | None = None,
    mixes: bool = False,
) -> Updater:
    """The updater of an optax transformation, of a `stream` or of a function, with `UpdateOptions`.

    Raises:
        TypeError: it is none of them.
        ValueError: see `as_rule`.
    """
    stream = stream_of(optimizer_or_rule)
    if stream is not None:
        inner_rule = OptaxRule(stream.planner.optimizer, max_update_rms)
        return StreamedUpdater(name, inner_rule, skip_nonfinite, mixes, stream)
    rule = as_rule(optimizer_or_rule, name, max_update_rms)
    return Updater(name, rule, skip_nonfinite, mixes)
