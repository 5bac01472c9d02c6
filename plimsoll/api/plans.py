"""`plan`: computes the needs of a run on a machine that need not be present, as text, as a page, and as figures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path

import jax

from plimsoll.api.configs import create_request
from plimsoll.api.plan_process import lacks_devices, plan_in_subprocess
from plimsoll.extras.plan_page import page
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.devices.environment import prepare_jax, start_devices
from plimsoll.framework.families import is_approximate
from plimsoll.framework.plan import report_tables, targets
from plimsoll.framework.plan.build_report import get_report
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.program.stages import with_largest_stage
from plimsoll.framework.terminal.phase_views import show_phases_on_terminal
from plimsoll.framework.terminal.tables import render

_PAGE_PIXELS = 900


class Plan:
    """The plan of a run. `print` shows the tables of `plimsoll plan`; a notebook shows its page.

    Attributes:
        report: all figures, as `plimsoll plan --json` writes them.
    """

    def __init__(self, report: PlanReport):
        self._report = report
        self.report = report.to_json()

    @property
    def fits(self) -> bool:
        """True if the run fits into the devices of the target."""
        return self._report.fits

    @property
    def peak_bytes(self) -> int:
        """The memory that the training step needs on each device, in bytes."""
        return self._report.device_allocated_bytes

    def __str__(self) -> str:
        return render(report_tables.sections(self._report))

    def __repr__(self) -> str:
        return f"plan of {self._report.config} on {self._report.target}: {report_tables.verdict(self._report)}"

    def _repr_html_(self) -> str:
        # A separate frame, because the style of the page applies to its whole document.
        document = escape(page([self._report]), quote=True)
        return f'<iframe srcdoc="{document}" width="100%" height="{_PAGE_PIXELS}" frameborder="0"></iframe>'


@show_phases_on_terminal()
def plan(
    config: Config | str | Path,
    target: str,
    *,
    estimate: bool = False,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    phases: bool = True,
    fresh: bool = False,
) -> Plan:
    """Plan a run for a target by compiling its step with the target's compiler, like `plimsoll plan`.

    Args:
        config: config from `load_config`, or a spec that `load_config` accepts. Of several stages of its data, the one
            with the most tokens per step is planned.
        target: v5e-16, v5p-1024 (cores), 2xv5e-256, h200x8, 4090, cpu:8, local ...
        estimate: use only the analytical estimate, which takes seconds but is less exact.
        device_memory_gib: memory of each device in GiB (2^30 bytes), instead of the target's own.
        host_memory_gib: memory of each host in GiB, instead of the target's own.
        phases: also plan initialization and evaluation, not only the training step.
        fresh: compile again even if nothing has changed.

    Raises:
        ConfigError, ValueError: the target does not exist, its compiler is not installed, or the config does not fit
            the target.
    """
    for name, size in (("device_memory_gib", device_memory_gib), ("host_memory_gib", host_memory_gib)):
        if size is not None and not size > 0:
            raise ConfigError(f"{name}={size}: expected more than 0")
    request = create_request(config, shape_only=True)
    # Without our layers there is no program to compile.
    estimate = estimate or is_approximate(request.config)
    prepare_jax()
    machine = targets.resolve(target)
    if host_memory_gib is not None:
        machine = replace(machine, host_bytes=int(host_memory_gib * 2**30))
    resolved, rule_lines = request.resolve(machine.name)
    resolved = with_largest_stage(resolved)
    if device_memory_gib is None:
        limit = machine.get_config_limit_bytes(resolved)
    else:
        limit = int(device_memory_gib * 2**30)
    if not estimate and lacks_devices(machine):
        figures = plan_in_subprocess(
            request.spec, resolved, target, limit, machine.host_bytes, phases=phases, fresh=fresh
        )
        return Plan(replace(figures, settings=[*request.settings, *rule_lines]))
    with use_target_environment(target, starts=not estimate), disable_compilation_cache():
        figures = get_report(
            request.spec,
            resolved,
            machine,
            limit,
            name="" if target == "local" else target,
            estimate=estimate,
            phases=phases,
            fresh=fresh,
        )
    return Plan(replace(figures, settings=[*request.settings, *rule_lines]))


@contextmanager
def use_target_environment(target: str, *, starts: bool) -> Iterator[None]:
    """Set the environment of the target's compiler in a context; afterwards the program can train here as before.

    Args:
        target: name of the target, as given by the caller.
        starts: the compiler is needed; if False, nothing is changed.
    """
    if not starts:
        yield
        return
    # Start the devices of this machine now: JAX looks for them only once, and the settings below hide them.
    start_devices()
    variables = set(os.environ)
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    targets.set_environment(target)
    try:
        yield
    finally:
        for name in set(os.environ) - variables:
            del os.environ[name]
        jax.config.update("jax_platforms", platforms)


@contextmanager
def disable_compilation_cache() -> Iterator[None]:
    """Disable JAX's compilation cache: cached programs come without their buffers, which the report lists."""
    was_enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
