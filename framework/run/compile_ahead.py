"""Chooses which programs of a run a background thread compiles ahead; see `framework.program.compile_thread`."""

from __future__ import annotations

import jax

from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.program import Program


def begin_init(program: Program) -> None:
    """Start compiling the program that initializes the weights."""
    backend = program.backend
    if isinstance(backend, JitStep) and _compiles_ahead(backend):
        backend.begin_init()


def begin_evaluation(program: Program) -> None:
    """Start compiling the evaluation of the weights and, if there are any, of their averages."""
    backend = program.backend
    if isinstance(backend, JitStep) and _compiles_ahead(backend):
        backend.begin_evaluation()


def _compiles_ahead(backend: JitStep) -> bool:
    # A GPU's compiler benchmarks kernels on the device, so two programs would disturb each other's timings. A TPU may
    # lack the memory for evaluation, which must show before there are steps to lose. Several processes must compile
    # in the same order.
    return backend.platform == "cpu" and jax.process_count() == 1
