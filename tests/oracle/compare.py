"""Runs a random experiment with the framework and with the reference, and finds the largest difference."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import numpy as np

from tests.oracle import subject, training64
from tests.oracle.experiments import RandomExperiment
from tests.oracle.parameters import first_values
from tests.support import exact

# Tolerance of a tensor after the last step, relative to the largest change of any of its elements.
# A learning rate from a schedule, or in a bound on updates, is a float32, whose half ulp is 6e-8.
TOLERANCES = {"float64": 5e-7, "float32": 1e-3, "mixed": 5e-2}
METRIC_TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "mixed": 2e-2}  # losses and norms, which are float32
# For each narrow precision, a relative change of weights like its rounding, and the precision that has to agree.
ROUNDING = {"float32": (1e-7, "float64"), "mixed": (2.0**-9, "float32")}
Outcome = Literal["agree", "refused", "unstable", "disagree"]


class Verdict(NamedTuple):
    """Result of a seed. `error` is the largest error, relative to its tolerance."""

    seed: int
    outcome: Outcome
    error: float
    detail: str
    seconds: float


@contextmanager
def enable_exact_numerics() -> Iterator[None]:
    """Enable float64 in all threads (also the checkpointer's), and offload and split even small tensors."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        with exact.enable_exact_numerics():
            yield
    finally:
        jax.config.update("jax_enable_x64", before)


def compare_seed(drawn: RandomExperiment) -> Verdict:
    """Run both sides. A ValueError before anything runs is a refusal; any other error is a disagreement.

    An experiment that disagrees is unstable if it agrees with less rounding, and if the reference too moves by more
    than the tolerance when its weights are rounded: some unit is at the kink of a ReLU, for example.
    """
    start = time.monotonic()

    def verdict(outcome: Outcome, error: float, detail: str) -> Verdict:
        return Verdict(drawn.seed, outcome, error, detail, time.monotonic() - start)

    try:
        with enable_exact_numerics():
            try:
                programs = [subject.build_program(drawn, phase) for phase in drawn.phases]
            except ValueError as error:
                return verdict("refused", 0.0, str(error))
            actual = subject.train(drawn, programs)
            expected = training64.train(drawn)
            errors = differences(drawn, actual, expected)
            worst = max(errors, key=lambda name: errors[name])
            if errors[worst] <= 1.0:
                return verdict("agree", errors[worst], worst)
            is_unstable = drawn.precision in ROUNDING and _amplifies_rounding(drawn, expected)
            return verdict("unstable" if is_unstable else "disagree", errors[worst], worst)
    except Exception:  # any other exception is a finding, and the next seed should still run
        return verdict("disagree", float("inf"), traceback.format_exc())


def _amplifies_rounding(drawn: RandomExperiment, expected: training64.Result) -> bool:
    perturbation, wider = ROUNDING[drawn.precision]
    perturbed = training64.train(drawn, perturbation)
    if max(differences(drawn, perturbed, expected).values()) <= 1.0:
        return False
    return compare_seed(replace(drawn, precision=wider)).outcome == "agree"


def differences(drawn: RandomExperiment, actual: training64.Result, expected: training64.Result) -> dict[str, float]:
    """Return {name: difference relative to its tolerance} for losses, norms, skipped steps and each tensor."""
    precision = drawn.precision
    errors = {"skipped steps": float("inf") if actual.skipped != expected.skipped else 0.0}
    for kind in ("losses", "norms"):
        for step, (a, b) in enumerate(zip(getattr(actual, kind), getattr(expected, kind), strict=True)):
            errors[f"{kind} of step {step}"] = _compare_numbers(a, b) / METRIC_TOLERANCES[precision]
    tolerance = TOLERANCES[precision]
    for kind in ("parameters", "averages"):
        found, wanted = getattr(actual, kind), getattr(expected, kind)
        if found.keys() != wanted.keys():
            errors[f"{kind}: {sorted(found.keys() ^ wanted.keys())[:3]}"] = float("inf")
            continue
        errors |= {
            f"{kind}: {name}": error / tolerance for name, error in _compare_tensors(drawn, found, wanted).items()
        }
    return errors


def _compare_tensors(
    drawn: RandomExperiment, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]
) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to the largest change of any of its elements.

    For a tensor that hardly changed, the scale is 1% of the largest change of all tensors.
    """
    first = first_values(drawn)

    def largest(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())

    moves = {name: largest(wanted[name], first[name]) for name in wanted}
    most = max(moves.values(), default=0.0)
    if not np.isfinite(most):
        return {"the reference is not finite": float("inf")}
    scales = {name: max(move, 1e-2 * most) or 1.0 for name, move in moves.items()}
    errors = {name: largest(found[name], wanted[name]) / scales[name] for name in wanted}
    return {name: error if np.isfinite(error) else float("inf") for name, error in errors.items()}


def _compare_numbers(a: float, b: float) -> float:
    if not np.isfinite(a) or not np.isfinite(b):
        return 0.0 if np.isfinite(a) == np.isfinite(b) else float("inf")
    return abs(a - b) / max(abs(b), 1e-3)


def drop_caches() -> None:
    """Drop the compiled programs, which the next seed cannot reuse."""
    jax.clear_caches()
