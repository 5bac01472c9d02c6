"""One report, from where it is had soonest: the closed form, the cache of earlier plans, or the compiler."""

from __future__ import annotations

from framework.config import Config
from framework.plan import cache
from framework.plan import plan as planning
from framework.plan.plan import Made
from framework.plan.report import Report
from framework.plan.targets import Target


def planned(
    spec: str,
    config: Config,
    target: Target,
    limit: int | None,
    *,
    name: str,
    estimate: bool,
    phases: bool,
    fresh: bool,
    suggests: bool = True,
    made: Made | None = None,
) -> Report:
    """One report: from the cache, the closed form or the compiler.

    Args:
        spec: the name of the config.
        config: resolved for the target.
        target: to plan for.
        limit: device memory in bytes; None means unknown.
        name: what the target was asked for as; "" for the devices that are here, whose name says nothing.
        estimate: the closed form alone.
        phases: initialization and evaluation too.
        fresh: compile again although nothing has changed.
        suggests: look for settings that fit where this does not.
        made: the step of the config, where it was compiled just now.
    """
    about = {"target": name} if name else {}
    if estimate:
        return planning.quick(spec, config, target, limit, suggests=suggests) | about
    path = cache.path_of(config, name=spec, target=name or "local", limit=limit, phases=phases, suggests=suggests)
    cached_report = None
    # The name "local" does not say which devices this machine has.
    if not fresh and name and made is None:
        cached_report = cache.load(path)
    if cached_report is not None:
        return cached_report | about
    new_report = planning.plan(spec, config, target, limit, phases=phases, suggests=suggests, made=made)
    cache.store(path, new_report)
    return new_report | about
