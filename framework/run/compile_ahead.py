"""Chooses the programs of a run that a thread compiles ahead. `framework.program.ahead` has the thread."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from framework.program.ahead import FIRST_VALUES, evaluation_of
from framework.program.program import Program


def begin_first_values(program: Program) -> None:
    """Has the thread compile the program that draws the first values."""
    if _compiles_ahead(program):
        program.ahead.begin(FIRST_VALUES, lambda: program.init_jit().lower().compile())


def begin_evaluation(program: Program) -> None:
    """Has the thread compile evaluation of the weights and, where there are any, of their averages."""
    if not _compiles_ahead(program):
        return
    groups = ["parameter"]
    if program.layout.specs["ema"]:
        groups.append("ema")
    for group in groups:
        compile_group = partial(_compile_evaluation, program, group)
        program.ahead.begin(evaluation_of(group), compile_group)


def _compiles_ahead(program: Program) -> bool:
    # A GPU's compiler tries out kernels on the device, and would measure two programs at once. A TPU may have no memory
    # for evaluation, which is to show before there are steps to lose. Processes compile in the same order.
    platform = program.mesh.devices.flat[0].platform
    return platform == "cpu" and not program.in_parts and jax.process_count() == 1


def _compile_evaluation(program: Program, group: str) -> Any:
    """The compiled evaluation of the weights in `group`, from specs alone: there are no arrays yet."""
    jitted = program.evaluate_averages_jit if group == "ema" else program.evaluate_jit
    layout = program.layout
    weights = [layout.abstract(layout.specs[name]) for name in (group, "frozen", "buffer")]
    return jitted.lower(*weights, layout.abstract(program.evaluation_specs)).compile()
