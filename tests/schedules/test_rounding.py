"""Stochastic rounding of weights and moments draws the same noise under every schedule, placement and mesh."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.layout import flatten
from plimsoll.framework.program.per_layer_step import PerLayerStep
from plimsoll.framework.program.program import Program
from tests.support import exact
from tests.support.exact import ExactnessCase

STEPS = 5
CASES: list[Any] = [
    ExactnessCase(memory="in_backward"),
    ExactnessCase(memory="streamed", placement="state", mesh="eight"),
    ExactnessCase(memory="layers_at_once", placement="state", remat="full"),
    ExactnessCase(memory="streamed", placement="state", layers="unlike"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in [
            ExactnessCase(memory="after_backward", mesh="eight"),
            ExactnessCase(memory="in_backward", placement="all", mesh="eight"),
            ExactnessCase(memory="hosted_gradients", placement="all", remat="full"),
        ]
    ),
]


@cache
def weights(case: ExactnessCase, rounding: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the bfloat16 weights at the start and after STEPS steps, as float32.

    There is no master copy, and the moments are bfloat16 too.
    """
    program = case._replace(precision="bfloat16").program(
        master_dtype=None, moment_dtype="bfloat16", rounding=rounding, clip=None
    )
    options = {"xla_allow_excess_precision": False}
    if isinstance(program.backend, PerLayerStep):
        program.backend.jit = partial(jax.jit, compiler_options=options)
        program.backend.compile()
    else:
        program.backend.compiled_step = program.jit_step.traced_step.lower().compile(options)
    state: Any = program.init()
    first = float32_weights(program, state)
    for step in range(STEPS):
        state, metrics = program.step(state, exact.batch(program, step))
        assert np.isfinite(float(metrics["loss"]))
    program.layout.check(state)
    return first, float32_weights(program, program.backend.to_checkpoint(state))


def float32_weights(program: Program, state: Any) -> dict[str, np.ndarray]:
    """Return numpy copies of the parameters in float32."""
    return {p: np.asarray(x, np.float32) for p, x in flatten(state.parameter).items()}


@pytest.mark.once("stochastic-streamed-state-eight")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.memory}-{case.placement}-{case.mesh}")
@pytest.mark.parametrize("rounding", ["stochastic", pytest.param("kahan", marks=pytest.mark.slow)])
def test_the_same_weights_under_every_schedule(case: ExactnessCase, rounding: str):
    """All weights are equal except for a few in a thousand, whose gradients differ in the last bit and flip a draw.

    With different noise many weights would differ. The test also checks that stochastic rounding moves many large
    weights: for these a step is less than half of the distance to the neighboring value, so that rounding to nearest
    would never move them.
    """
    with exact.enable_exact_numerics():
        (first, expected), (_, found) = weights(ExactnessCase(), rounding), weights(case, rounding)
    together = lambda parts: np.concatenate([parts[path].ravel() for path in expected])  # noqa: E731
    first, expected, found = together(first), together(expected), together(found)
    assert np.mean(found != expected) < 5e-3
    is_large = np.abs(first) > 0.5
    assert np.sum(is_large) > 100
    assert np.mean((expected != first)[is_large]) > 0.2
