"""Fits a scaling law to the losses of a ladder of models: loss(C) = E + A * C^-alpha, for C training FLOPs.

The form is that of Hoffmann et al. (2022, arXiv 2203.15556), along one path of sizes and tokens; with E = 0 it is that
of Kaplan et al. (2020, arXiv 2001.08361). As in their third approach, the fit minimizes the Huber loss of the residuals
of log(loss), from several starts.

A ladder has few rungs, so a bootstrap would resample almost nothing. Intervals come from the profile of the objective
instead, with the F distribution for the few degrees of freedom: an interval contains every value that the other
parameters can accommodate. They assume that log(loss) has independent noise of one size at all rungs, and that the law
continues; besides that they are honest with four rungs, and therefore wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

# With fewer rungs there is no interval: three parameters leave no residuals.
MIN_RUNGS_FOR_INTERVALS = 4
LEVELS = (0.8, 0.95)
# Residuals up to this multiple of their standard deviation count quadratically (Huber 1964: 95% efficiency for a normal
# distribution).
_HUBER_TUNING = 1.345
# Mean squares of residuals below this are rounding errors of the losses.
_EXACT = 1e-20
# E below this share of the lowest loss may be 0.
_SMALL_IRREDUCIBLE = 0.05
# Logarithms above this one overflow.
_MAX_LOG = 700.0
# Exponents above this one are not distinguished.
_MAX_EXPONENT = 10.0


@dataclass(frozen=True)
class PowerLaw:
    """The law loss(C) = irreducible + scale * C^-exponent.

    Attributes:
        irreducible: E, the loss that no amount of compute removes, in nats per token.
        scale: A.
        exponent: alpha.
    """

    irreducible: float
    scale: float
    exponent: float

    def predict(self, flops: float) -> float:
        """Return the loss after a number of training FLOPs."""
        # In logarithms, because a scale of 1e40 times 1e-40 is an ordinary loss.
        return self.irreducible + math.exp(math.log(self.scale) - self.exponent * math.log(flops))


@dataclass(frozen=True)
class Interval:
    """A confidence interval, or a prediction interval.

    Attributes:
        level: probability that it contains the value, such as 0.95.
        low, high: its ends; None where the data gives no bound.
    """

    level: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Prediction:
    """The predicted loss of a run.

    Attributes:
        flops: its training FLOPs.
        loss: the predicted loss.
        intervals: prediction intervals for the loss of one run, by level; empty if the data gives none.
    """

    flops: float
    loss: float
    intervals: list[Interval]


@dataclass(frozen=True)
class PowerLawFit:
    """A power law fitted to losses.

    Attributes:
        law: the law.
        num_rungs: number of losses.
        fixed_irreducible: the value at which E was fixed; None if it was fitted.
        residual_std: standard deviation of the residuals of log(loss); None without degrees of freedom.
        intervals: confidence intervals of "E", "A" and "alpha", by name; empty if the data gives none.
        note: why a parameter was fixed, or why there are no intervals; "" if neither.
        flops, losses: the data.
        huber_delta: size of a residual from which it counts linearly; None if all count quadratically.
    """

    law: PowerLaw
    num_rungs: int
    fixed_irreducible: float | None
    residual_std: float | None
    intervals: dict[str, list[Interval]]
    note: str
    flops: list[float]
    losses: list[float]
    huber_delta: float | None

    def predict(self, flops: float, levels: Sequence[float] = LEVELS) -> Prediction:
        """Predict the loss of a run, with intervals that include the noise of one run.

        An interval contains every loss that, as a further rung, would agree with the others.

        Args:
            flops: training FLOPs of the run.
            levels: levels of the intervals.
        """
        loss = self.law.predict(flops)
        if not self.intervals:
            return Prediction(flops, loss, [])
        delta = math.inf if self.huber_delta is None else self.huber_delta
        problem = _Problem(self.flops, self.losses, delta, self.fixed_irreducible)
        return Prediction(flops, loss, [problem.find_prediction_interval(flops, level) for level in levels])


def fit_power_law(
    flops: Sequence[float],
    losses: Sequence[float],
    *,
    irreducible: float | None = None,
    huber_delta: float | None = None,
    levels: Sequence[float] = LEVELS,
) -> PowerLawFit:
    """Fit loss(C) = E + A * C^-alpha.

    Args:
        flops: training FLOPs of each run.
        losses: their losses.
        irreducible: E, if it is known; None fits it, or fixes it at 0 with fewer than four runs.
        huber_delta: residual of log(loss) from which it counts linearly. None: 1.345 times their standard deviation.
            Hoffmann et al. use 1e-3, for hundreds of runs.
        levels: levels of the confidence intervals.

    Raises:
        ValueError: there are fewer than two runs, values are not finite and positive, or losses do not fall.
    """
    _check(flops, losses, irreducible)
    num_rungs = len(flops)
    fixed = irreducible
    note = ""
    if irreducible is None and num_rungs < MIN_RUNGS_FOR_INTERVALS:
        fixed = 0.0
        note = (
            f"{num_rungs} rungs do not determine three parameters: E is fixed at 0, and there are no intervals; "
            f"train at least {MIN_RUNGS_FOR_INTERVALS} rungs"
        )
    num_parameters = 3 if fixed is None else 2
    freedom = num_rungs - num_parameters
    problem = _Problem(flops, losses, math.inf, fixed)
    if huber_delta is None and freedom > 0:
        huber_delta = _HUBER_TUNING * math.sqrt(2 * problem.best.cost / freedom)
    # Residuals that are rounding errors need no robust loss.
    if huber_delta and huber_delta**2 > _EXACT:
        problem = _Problem(flops, losses, huber_delta, fixed)
    intervals: dict[str, list[Interval]] = {}
    if not note and freedom > 0:
        names = ["E", "A", "alpha"] if fixed is None else ["A", "alpha"]
        intervals = {name: [problem.find_interval(name, level) for level in levels] for name in names}
    elif not note:
        note = f"{num_rungs} rungs determine {num_parameters} parameters exactly: there are no intervals"
    return PowerLawFit(
        law=problem.best.to_law(problem.center),
        num_rungs=num_rungs,
        fixed_irreducible=fixed,
        residual_std=math.sqrt(2 * problem.best.cost / freedom) if freedom > 0 else None,
        intervals=intervals,
        note=note,
        flops=list(flops),
        losses=list(losses),
        huber_delta=None if math.isinf(problem.delta) else problem.delta,
    )


def _check(flops: Sequence[float], losses: Sequence[float], irreducible: float | None) -> None:
    """Raise ValueError if no law can be fitted."""
    if len(flops) != len(losses) or len(flops) < 2:
        raise ValueError(f"expected the FLOPs and losses of at least two runs, given {len(flops)} and {len(losses)}")
    for value in (*flops, *losses):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a scaling law needs finite FLOPs and losses > 0, given {value}")
    if len(set(flops)) < len(flops):
        raise ValueError("two runs have the same training FLOPs; expected different ones")
    if irreducible is not None and not 0 <= irreducible < min(losses):
        raise ValueError(
            f"irreducible={irreducible}: expected at least 0, and less than the lowest loss, {min(losses):.4g}"
        )
    slope = np.polyfit(np.log(flops), np.log(losses), 1)[0]
    if slope >= 0:
        raise ValueError(
            "the losses do not fall with compute, so no power law fits them; check the learning rate of the larger runs"
        )


@dataclass(frozen=True)
class _Point:
    """Values of the three parameters, and their objective.

    Attributes:
        irreducible: E.
        log_scale: log of the reducible loss at the center of the data.
        exponent: alpha.
        cost: half the sum of squared residuals, or of their Huber losses.
    """

    irreducible: float
    log_scale: float
    exponent: float
    cost: float

    def to_law(self, center: float) -> PowerLaw:
        """Return the law, for a center that is the logarithm of FLOPs."""
        return PowerLaw(self.irreducible, math.exp(self.log_scale + self.exponent * center), self.exponent)


@dataclass
class _Problem:
    """The objective of a fit, and its profiles.

    Attributes:
        flops, losses: the data.
        delta: size of a residual of log(loss) from which it counts linearly.
        fixed: fixed value of E; None to fit it.
        center: mean of log(flops), where the scale is measured, so that it hardly depends on the exponent.
        best: the minimum.
    """

    flops: Sequence[float]
    losses: Sequence[float]
    delta: float
    fixed: float | None
    center: float = field(init=False)
    best: _Point = field(init=False)

    def __post_init__(self) -> None:
        logs = np.log(np.asarray(self.flops, np.float64))
        self.center = float(np.mean(logs))
        self._x = logs - self.center
        self._y = np.log(np.asarray(self.losses, np.float64))
        self.best = self._minimize(list(self._iter_starts()), fixed=self.fixed)

    @property
    def _freedom(self) -> int:
        return len(self._x) - (3 if self.fixed is None else 2)

    def find_interval(self, name: str, level: float) -> Interval:
        """Return the confidence interval of a parameter: "E", "A" or "alpha"."""
        if name == "E":
            value = self.best.irreducible
            low, high = self._find_ends(self._profile_irreducible, value, level, 0.0, 2.0 * max(self.losses))
        elif name == "alpha":
            value = self.best.exponent
            low, high = self._find_ends(self._profile_exponent, value, level, 0.0, _MAX_EXPONENT)
        else:
            value = self.best.log_scale + self.best.exponent * self.center
            low, high = self._find_ends(self._profile_scale, value, level, -math.inf, math.inf)
            low = 0.0 if low is None else math.exp(low)
            high = None if high is None or high > _MAX_LOG else math.exp(high)
        return Interval(level, low, high)

    def find_prediction_interval(self, flops: float, level: float) -> Interval:
        """Return the losses of a further run that agree with the others."""
        x = math.log(flops) - self.center
        expected = math.log(self._predict(self.best, np.array([x]))[0])

        def profile(y: float, start: _Point) -> _Point:
            return self._minimize([start], fixed=self.fixed, extra=(x, y))

        low, high = self._find_ends(profile, expected, level, -math.inf, math.inf)
        return Interval(level, *(None if end is None else math.exp(end) for end in (low, high)))

    def _find_ends(
        self, profile: Callable[[float, _Point], _Point], value: float, level: float, lowest: float, highest: float
    ) -> tuple[float | None, float | None]:
        """Return the values below and above the estimate at which a profile reaches the threshold of a level.

        Args:
            profile: returns the minimum over all other parameters; its second argument is a start.
            value: the estimate.
            level: level of the interval.
            lowest, highest: limits of the value. A lower limit of 0 is itself an end; other limits mean no bound.
        """
        from scipy.optimize import root_scalar
        from scipy.stats import f as f_distribution

        if self.best.cost < _EXACT:
            return value, value
        variance = 2 * self.best.cost / self._freedom
        threshold = self.best.cost + 0.5 * variance * f_distribution.ppf(level, 1, self._freedom)
        ends: list[float | None] = []
        for sign, limit in ((-1, lowest), (1, highest)):
            step = 1e-3 * max(abs(value), 1e-2)
            inner, start = value, self.best
            end: float | None = None
            for _ in range(40):
                outer = inner + sign * step
                is_last = (outer - limit) * sign >= 0
                if is_last:
                    outer = limit
                point = profile(outer, start)
                if point.cost > threshold:
                    warm = start
                    solved = root_scalar(
                        lambda at, warm=warm: profile(at, warm).cost - threshold,
                        bracket=(inner, outer),
                        method="brentq",
                        rtol=1e-6,
                        xtol=1e-8,
                    )
                    end = float(solved.root)
                    break
                if is_last or abs(outer) > _MAX_LOG:
                    # Neither parameter is negative, so 0 is a bound of its own.
                    end = 0.0 if limit == 0 else None
                    break
                inner, start = outer, point
                step *= 3
            ends.append(end)
        return ends[0], ends[1]

    def _profile_irreducible(self, value: float, start: _Point) -> _Point:
        return self._minimize([start], fixed=value)

    def _profile_exponent(self, value: float, start: _Point) -> _Point:
        return self._minimize([start], fixed=self.fixed, exponent=value)

    def _profile_scale(self, value: float, start: _Point) -> _Point:
        # Scale and exponent go together: the start keeps the reducible loss at the center.
        exponent = max((value - start.log_scale) / self.center, 1e-6)
        moved = _Point(start.irreducible, start.log_scale, exponent, math.inf)
        return self._minimize([moved], fixed=self.fixed, log_scale_at_1=value)

    def _iter_starts(self) -> Iterator[_Point]:
        """Yield starts of the minimization: exact lines through log(loss - E) for several E."""
        lowest = min(self.losses)
        shares = [0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 0.995]
        values = [share * lowest for share in shares] if self.fixed is None else [self.fixed]
        for value in values:
            slope, offset = np.polyfit(self._x, np.log(np.exp(self._y) - value), 1)
            yield _Point(value, float(offset), max(-float(slope), 1e-3), math.inf)

    def _minimize(
        self,
        starts: Sequence[_Point],
        *,
        fixed: float | None,
        exponent: float | None = None,
        log_scale_at_1: float | None = None,
        extra: tuple[float, float] | None = None,
    ) -> _Point:
        """Return the minimum over the parameters that are not fixed.

        Args:
            starts: points to start from.
            fixed: fixed value of E; None for a free one, which is at least 0.
            exponent: fixed value of alpha; None for a free one.
            log_scale_at_1: fixed log of the scale A, that is at 1 FLOP; None for a free one.
            extra: (x, y) of a further run.
        """
        best: _Point | None = None
        for start in starts:
            point = self._descend(start, fixed, exponent, log_scale_at_1, extra)
            if fixed is None and point.irreducible < _SMALL_IRREDUCIBLE * min(self.losses):
                # E = 0 is the end of the range of its logarithm, which a solver does not reach.
                at_zero = self._descend(point, 0.0, exponent, log_scale_at_1, extra)
                # A tiny E is a 0 that the solver did not reach.
                point = at_zero if at_zero.cost <= point.cost * (1 + 1e-9) else point
            if best is None or point.cost < best.cost:
                best = point
        assert best is not None
        return best

    def _descend(
        self,
        start: _Point,
        fixed: float | None,
        exponent: float | None,
        log_scale_at_1: float | None,
        extra: tuple[float, float] | None,
    ) -> _Point:
        """Return the minimum that is reached from one start; see `_minimize`."""
        from scipy.optimize import least_squares

        x, y = self._x, self._y
        if extra is not None:
            x, y = np.append(x, extra[0]), np.append(y, extra[1])
        free = []
        if fixed is None:
            # A logarithm keeps E positive.
            free.append(math.log(max(start.irreducible, 1e-6 * min(self.losses))))
        if exponent is None:
            free.append(math.log(max(start.exponent, 1e-6)))
        if log_scale_at_1 is None:
            free.append(start.log_scale)

        def make_point(values: Sequence[float], cost: float = math.inf) -> _Point:
            remaining = [min(float(value), _MAX_LOG) for value in values]
            irreducible = math.exp(remaining.pop(0)) if fixed is None else fixed
            alpha = math.exp(remaining.pop(0)) if exponent is None else exponent
            log_scale = remaining.pop(0) if log_scale_at_1 is None else log_scale_at_1 - alpha * self.center
            return _Point(irreducible, log_scale, alpha, cost)

        def find_residuals(values: Sequence[float]) -> np.ndarray:
            return self._to_huber(y - np.log(self._predict(make_point(values), x)))

        def find_jacobian(values: Sequence[float]) -> np.ndarray:
            point = make_point(values)
            predicted = self._predict(point, x)
            reducible = predicted - point.irreducible
            columns = []
            if fixed is None:
                columns.append(np.full_like(x, point.irreducible))
            if exponent is None:
                # A scale that is fixed at 1 FLOP changes at the center.
                distance = x if log_scale_at_1 is None else x + self.center
                columns.append(-point.exponent * distance * reducible)
            if log_scale_at_1 is None:
                columns.append(reducible)
            residuals = y - np.log(predicted)
            slope = np.ones_like(x)
            is_linear = np.abs(residuals) > self.delta
            slope[is_linear] = self.delta / np.abs(self._to_huber(residuals[is_linear]))
            return -np.stack(columns, axis=1) / predicted[:, None] * slope[:, None]

        found: Sequence[float] = free
        if free:
            solved = least_squares(
                find_residuals,
                free,
                find_jacobian,  # pyright: ignore[reportArgumentType]
                method="lm",
                xtol=1e-12,
                ftol=1e-12,
                gtol=1e-12,
            )
            found = solved.x
        return make_point(found, 0.5 * float(np.sum(find_residuals(found) ** 2)))

    def _predict(self, point: _Point, x: np.ndarray) -> np.ndarray:
        reducible = np.exp(np.clip(point.log_scale - point.exponent * x, -_MAX_LOG, _MAX_LOG))
        return np.maximum(point.irreducible + reducible, 1e-300)

    def _to_huber(self, residuals: np.ndarray) -> np.ndarray:
        """Return numbers whose squares are twice the Huber losses, so that a solver for squares minimizes these."""
        if math.isinf(self.delta):
            return residuals
        sizes = np.abs(residuals)
        linear = np.sqrt(np.maximum(2 * self.delta * sizes - self.delta**2, 0.0))
        return np.where(sizes > self.delta, np.sign(residuals) * linear, residuals)
