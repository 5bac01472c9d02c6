"""`plan`: what a run of a config needs on a machine that need not be there, as text, as a page, and as figures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

import jax

from framework.api.configs import request_of
from framework.api.plan_process import lacks_devices, planned_elsewhere
from framework.config import Config, ConfigError
from framework.devices.environment import prepare_jax, start_devices
from framework.plan import report, targets
from framework.plan.page import page
from framework.plan.planned import planned
from framework.plan.report import Report
from framework.terminal.phase_views import shown_on_terminal
from framework.terminal.tables import render

_PAGE_PIXELS = 900


class Plan:
    """What a run needs. `print` shows the tables of `plimsoll plan`; a notebook shows its page.

    Attributes:
        report: all figures, as `plimsoll plan --json` writes them.
    """

    def __init__(self, report: Report):
        self.report = report

    @property
    def fits(self) -> bool:
        """Whether the devices of the target have room for it."""
        return bool(self.report["fits"])

    @property
    def peak_bytes(self) -> int:
        """Bytes of memory of each device that the training step takes."""
        return self.report["device_allocated_bytes"]

    def __str__(self) -> str:
        return render(report.sections(self.report))

    def __repr__(self) -> str:
        return f"plan of {self.report['config']} on {self.report['target']}: {report.verdict(self.report)}"

    def _repr_html_(self) -> str:
        # A frame of its own, as the page brings a style for its whole document.
        document = escape(page([self.report]), quote=True)
        return f'<iframe srcdoc="{document}" width="100%" height="{_PAGE_PIXELS}" frameborder="0"></iframe>'


@shown_on_terminal()
def plan(
    config: Config | str | Path,
    target: str,
    *,
    estimate: bool = False,
    device_memory_gib: float | None = None,
    phases: bool = True,
    fresh: bool = False,
) -> Plan:
    """Tells what a run will need on a target: the target's compiler compiles its step, as in `plimsoll plan`.

    Args:
        config: from `load_config`, or what that takes.
        target: v5e-16, v5p-1024 (cores), 2xv5e-256, h200x8, 4090, cpu:8, local ...
        estimate: the closed form alone: seconds, and less exact.
        device_memory_gib: of each device, instead of what the target has; in GiB of 2^30 bytes.
        phases: initialization and evaluation too, and not the training step alone.
        fresh: compile again although nothing has changed.

    Raises:
        ConfigError, ValueError: there is no such target, its compiler is not installed, or the config does not go with
            it.
    """
    if device_memory_gib is not None and not device_memory_gib > 0:
        raise ConfigError(f"device_memory_gib={device_memory_gib}: expected more than 0")
    request = request_of(config, shape_is_enough=True)
    prepare_jax()
    machine = targets.resolve(target)
    limit = machine.limit_bytes if device_memory_gib is None else int(device_memory_gib * 2**30)
    resolved, rule_lines = request.resolve(machine.name)
    if not estimate and lacks_devices(machine):
        figures = planned_elsewhere(request.spec, resolved, target, limit, phases=phases, fresh=fresh)
        return Plan(figures | {"settings": [*request.settings, *rule_lines]})
    with of_target(target, starts=not estimate), uncached():
        figures = planned(
            request.spec,
            resolved,
            machine,
            limit,
            name="" if target == "local" else target,
            estimate=estimate,
            phases=phases,
            fresh=fresh,
        )
    return Plan(figures | {"settings": [*request.settings, *rule_lines]})


@contextmanager
def of_target(target: str, *, starts: bool) -> Iterator[None]:
    """Sets what the target's compiler reads from the environment; afterwards the program can train here as before.

    Args:
        target: as it was asked for.
        starts: whether a compiler is needed at all.
    """
    if not starts:
        yield
        return
    # The devices of this machine are found now, as JAX looks for them once, and the settings hide them.
    start_devices()
    variables = set(os.environ)
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    targets.environment(target)
    try:
        yield
    finally:
        for name in set(os.environ) - variables:
            del os.environ[name]
        jax.config.update("jax_platforms", platforms)


@contextmanager
def uncached() -> Iterator[None]:
    """Keeps JAX from taking programs from its cache: such a program comes without its buffers, which a report lists."""
    was_enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
