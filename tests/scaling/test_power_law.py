"""Fits of power laws: published laws are found again, scipy agrees, and intervals have their coverage."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from plimsoll.extras.scaling.power_law import PowerLaw, fit_power_law

# E, A, B, alpha, beta of loss(N, D) = E + A / N^alpha + B / D^beta.
HOFFMANN = (1.69, 406.4, 410.7, 0.34, 0.28)  # arXiv 2203.15556
BESIROGLU = (1.8172, 482.01, 2085.43, 0.3478, 0.3658)  # arXiv 2404.10102


def chinchilla(flops: np.ndarray, law: tuple[float, ...], tokens_per_parameter: float = 20.0) -> np.ndarray:
    """Return the losses of runs with C = 6 N D and a fixed D / N."""
    irreducible, a, b, alpha, beta = law
    parameters = np.sqrt(flops / (6 * tokens_per_parameter))
    return irreducible + a * parameters**-alpha + b * (tokens_per_parameter * parameters) ** -beta


def test_an_exact_law_is_found_again():
    flops = np.logspace(15, 18, 4)
    fit = fit_power_law(flops, 1.7 + 900 * flops**-0.155)
    assert fit.law.irreducible == pytest.approx(1.7, rel=1e-6)
    assert fit.law.scale == pytest.approx(900, rel=1e-5)
    assert fit.law.exponent == pytest.approx(0.155, rel=1e-6)
    assert fit.predict(1e21).loss == pytest.approx(1.7 + 900 * 1e21**-0.155, rel=1e-7)


@pytest.mark.parametrize(
    ("law", "accuracy", "error"), [(BESIROGLU, 0.01, 0.002), (HOFFMANN, 0.1, 0.015)], ids=["besiroglu", "hoffmann"]
)
def test_published_laws_are_extrapolated(law: tuple[float, ...], accuracy: float, error: float):
    """Two power laws with nearly equal exponents look like one: that of compute along a fixed ratio."""
    flops = np.logspace(18, 21, 6)
    fit = fit_power_law(flops, chinchilla(flops, law))
    assert fit.law.irreducible == pytest.approx(law[0], abs=accuracy)
    larger = np.array([1e23])
    assert fit.predict(1e23).loss == pytest.approx(chinchilla(larger, law)[0], rel=error)
    # alpha and beta of N and D are halved for C.
    assert min(law[3:]) / 2 <= fit.law.exponent <= max(law[3:]) / 2


@pytest.mark.parametrize("seed", range(3))
def test_scipy_finds_the_same_law(seed: int):
    flops = np.logspace(15, 20, 7)
    noise = np.random.default_rng(seed).normal(size=7)
    losses = (1.7 + 900 * flops**-0.155) * np.exp(0.002 * noise)

    def log_loss(x: np.ndarray, irreducible: float, log_scale: float, exponent: float) -> np.ndarray:
        return np.log(irreducible + np.exp(log_scale - exponent * x))

    x = np.log(flops)
    expected, covariance = optimize.curve_fit(log_loss, x, np.log(losses), p0=(1.5, 6.0, 0.15))
    fit = fit_power_law(flops, losses, huber_delta=math.inf)
    found = (fit.law.irreducible, math.log(fit.law.scale), fit.law.exponent)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    # Seven points with little noise: the profile is nearly the normal approximation.
    half_widths = stats.t.ppf(0.975, 4) * np.sqrt(np.diag(covariance))
    for name, value, half_width in zip(("E", "A", "alpha"), expected, half_widths, strict=True):
        interval = next(one for one in fit.intervals[name] if one.level == 0.95)
        assert interval.low is not None
        assert interval.high is not None
        low, high = (math.log(end) if name == "A" else end for end in (interval.low, interval.high))
        assert high - low == pytest.approx(2 * half_width, rel=0.25)
        assert low < value < high


def test_intervals_of_a_pure_power_law_are_those_of_a_line():
    """With E fixed at 0, the law is a line in logarithms, whose intervals are exact."""
    flops = np.logspace(15, 18, 5)
    losses = 300 * flops**-0.1 * np.exp(0.01 * np.random.default_rng(1).normal(size=5))
    fit = fit_power_law(flops, losses, irreducible=0.0, huber_delta=math.inf)
    x, y = np.log(flops), np.log(losses)
    line = stats.linregress(x, y)
    assert fit.law.exponent == pytest.approx(-line.slope, rel=1e-6)
    assert fit.law.scale == pytest.approx(math.exp(line.intercept), rel=1e-6)
    residual_std = math.sqrt(np.sum((y - line.intercept - line.slope * x) ** 2) / 3)
    assert fit.residual_std == pytest.approx(residual_std, rel=1e-6)
    at = math.log(1e20)
    spread = residual_std * math.sqrt(1 + 1 / 5 + (at - x.mean()) ** 2 / np.sum((x - x.mean()) ** 2))
    prediction = fit.predict(1e20)
    for interval in prediction.intervals:
        t = stats.t.ppf((1 + interval.level) / 2, 3)
        assert interval.low == pytest.approx(math.exp(line.intercept + line.slope * at - t * spread), rel=1e-4)
        assert interval.high == pytest.approx(math.exp(line.intercept + line.slope * at + t * spread), rel=1e-4)
        (alpha,) = [one for one in fit.intervals["alpha"] if one.level == interval.level]
        assert alpha.low == pytest.approx(-line.slope - t * line.stderr, rel=1e-4)
        assert alpha.high == pytest.approx(-line.slope + t * line.stderr, rel=1e-4)


def test_an_outlier_counts_less():
    flops = np.logspace(15, 20, 12)
    law = PowerLaw(1.7, 900.0, 0.155)
    losses = np.array([law.predict(float(c)) for c in flops])
    losses *= np.exp(0.001 * np.random.default_rng(0).normal(size=12))
    losses[5] *= 1.05
    robust = fit_power_law(flops, losses)
    quadratic = fit_power_law(flops, losses, huber_delta=math.inf)
    errors = [abs(fit.law.exponent - 0.155) for fit in (robust, quadratic)]
    assert errors[0] < 0.7 * errors[1]
    strict = fit_power_law(flops, losses, huber_delta=1e-3)
    assert abs(strict.law.exponent - 0.155) < 0.2 * errors[1]


@pytest.mark.parametrize("num_rungs", [2, 3])
def test_few_rungs_have_no_intervals(num_rungs: int):
    flops = np.logspace(15, 17, num_rungs)
    fit = fit_power_law(flops, 1.7 + 900 * flops**-0.155)
    assert fit.law.irreducible == 0
    assert fit.fixed_irreducible == 0
    assert not fit.intervals
    assert not fit.predict(1e18).intervals
    assert "E is fixed at 0, and there are no intervals" in fit.note


def test_an_irreducible_loss_of_zero_is_found():
    flops = np.logspace(15, 17, 5)
    losses = 300 * flops**-0.1 * np.exp(0.001 * np.random.default_rng(1).normal(size=5))
    fit = fit_power_law(flops, losses)
    assert fit.intervals["E"][0].low == 0
    assert fit.law.irreducible < 0.2 * losses.min()


@pytest.mark.parametrize(
    ("flops", "losses", "message"),
    [
        ([1e15], [3.0], "at least two runs"),
        ([1e15, 1e16], [3.0, math.nan], "finite FLOPs and losses > 0"),
        ([1e15, 1e15], [3.0, 2.0], "same training FLOPs"),
        ([1e15, 1e16, 1e17], [2.0, 2.5, 3.0], "do not fall with compute"),
    ],
)
def test_no_law_fits(flops: list[float], losses: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        fit_power_law(flops, losses)


@pytest.mark.pairs
@pytest.mark.parametrize("num_rungs", [4, 6])
def test_intervals_cover_the_truth_as_often_as_they_say(num_rungs: int):
    """The share of intervals that contain the truth is within three standard errors of the level, or above it.

    A lower bound of E at 0 makes intervals conservative.
    """
    generator = np.random.default_rng(0)
    flops = np.logspace(15, 18, num_rungs)
    law = PowerLaw(1.7, 900.0, 0.155)
    truth = np.array([law.predict(float(c)) for c in flops])
    target = 1e19
    trials, level = 40, 0.8
    hits = {"alpha": 0, "prediction": 0}
    for _ in range(trials):
        losses = truth * np.exp(0.003 * generator.normal(size=num_rungs))
        fit = fit_power_law(flops, losses, levels=(level,))
        (alpha,) = fit.intervals["alpha"]
        (predicted,) = fit.predict(target, (level,)).intervals
        measured = law.predict(target) * math.exp(0.003 * generator.normal())
        for name, interval, value in (("alpha", alpha, 0.155), ("prediction", predicted, measured)):
            assert interval.low is not None
            hits[name] += interval.low <= value <= (math.inf if interval.high is None else interval.high)
    error = 3 * math.sqrt(level * (1 - level) / trials)
    for name, count in hits.items():
        assert level - error <= count / trials <= min(level + error, 1.0), name
