"""Gets one report from the fastest source: the analytical estimate, the plan cache, or the compiler."""

from __future__ import annotations

from plimsoll.framework.config import Config
from plimsoll.framework.plan import build_report as planning
from plimsoll.framework.plan import cache
from plimsoll.framework.plan.build_report import CompiledTrainStep
from plimsoll.framework.plan.report_tables import Report
from plimsoll.framework.plan.targets import Target


def get_report(
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
    compiled_step: CompiledTrainStep | None = None,
) -> Report:
    """Return one report, from the cache, the analytical estimate or the compiler.

    Args:
        spec: name of the config.
        config: config resolved for the target.
        target: the machine to plan for.
        limit: device memory in bytes; None means unknown.
        name: name by which the user requested the target; "" for the devices of this machine, for which no cached
            report is used because their name does not identify them.
        estimate: only compute the analytical estimate.
        phases: compile initialization and evaluation too.
        fresh: compile again even if nothing has changed.
        suggests: look for settings that fit if the config does not.
        compiled_step: the compiled step of the config, if there is one already.
    """
    about = {"target": name} if name else {}
    if estimate:
        return planning.estimate_report(spec, config, target, limit, suggests=suggests) | about
    path = cache.cache_path(config, name=spec, target=name or "local", limit=limit, phases=phases, suggests=suggests)
    cached_report = None
    # The name "local" does not identify the devices of this machine, so its reports are not read back.
    if not fresh and name and compiled_step is None:
        cached_report = cache.load(path)
    if cached_report is not None:
        return cached_report | about
    new_report = planning.compile_report(
        spec, config, target, limit, phases=phases, suggests=suggests, compiled_step=compiled_step
    )
    cache.store(path, new_report)
    return new_report | about
