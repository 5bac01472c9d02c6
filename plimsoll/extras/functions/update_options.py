"""Options of `eager`, `eager_weights` and `eager_scan` for an update, and the updater that is made from them."""

from __future__ import annotations

from typing import Any, Required, TypedDict

from plimsoll.extras.functions.rules import OptaxRule, RuleFunction, as_rule
from plimsoll.extras.functions.stream import as_streamed_optimizer
from plimsoll.extras.functions.streamed_updater import StreamedUpdater
from plimsoll.extras.functions.updater import Updater


class UpdateOptions(TypedDict, total=False):
    """Keyword arguments of an update.

    Attributes:
        name: name of the module in errors, profiles and plans.
        skip_nonfinite: whether a gradient with infinities or NaN leaves weights and state as they are; True by default.
        max_update_rms: the largest root mean square of a tensor's update, as in optax (Shazeer and Stern 2018,
            arXiv 1804.04235, section 6); by default None, for no limit.
        mixes: whether the rule may look at several tensors of the module together; False by default. Such a rule is
            refused otherwise, because it would be wrong if it should see all parameters of the model.
    """

    name: Required[str]
    skip_nonfinite: bool
    max_update_rms: float | None
    mixes: bool


def make_updater(
    optimizer_or_rule: Any | RuleFunction,
    *,
    name: str,
    skip_nonfinite: bool = True,
    max_update_rms: float | None = None,
    mixes: bool = False,
) -> Updater:
    """Make the updater for an optax transformation, a `stream` or a function.

    Args:
        optimizer_or_rule: see `eager`.
        name, skip_nonfinite, max_update_rms, mixes: see `UpdateOptions`.

    Raises:
        TypeError: `optimizer_or_rule` is none of the three.
        ValueError: see `as_rule`.
    """
    stream = as_streamed_optimizer(optimizer_or_rule)
    if stream is not None:
        inner_rule = OptaxRule(stream.planner.optimizer, max_update_rms)
        return StreamedUpdater(name, inner_rule, skip_nonfinite, mixes, stream)
    rule = as_rule(optimizer_or_rule, name, max_update_rms)
    return Updater(name, rule, skip_nonfinite, mixes)
