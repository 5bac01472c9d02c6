"""Chooses the programs of a run that a thread compiles ahead. `framework.program.ahead` has the thread."""

from __future__ import annotations

import jax

from framework.program.program import Program


def begin_first_values(program: Program) -> None:
    """Has the thread compile the program that draws the first values."""
    if _compiles_ahead(program):
        program.execution.begin_first_values()


def begin_evaluation(program: Program) -> None:
    """Has the thread compile evaluation of the weights and, where there are any, of their averages."""
    if _compiles_ahead(program):
        program.execution.begin_evaluation()


def _compiles_ahead(program: Program) -> bool:
    # A GPU's compiler tries out kernels on the device, and would measure two programs at once. A TPU may have no memory
    # for evaluation, which is to show before there are steps to lose. Processes compile in the same order.
    return program.execution.platform == "cpu" and jax.process_count() == 1
