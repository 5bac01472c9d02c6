"""The file ladder.json of a ladder: its rungs with their losses, the fitted law, and predictions.

It contains neither times nor paths, so two ladders with the same losses have the same file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from plimsoll.extras.scaling.power_law import Interval, PowerLaw, PowerLawFit, Prediction, fit_power_law
from plimsoll.extras.scaling.rungs import LadderOptions, Rung
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.terminal.exit_codes import ExitCode

LADDER_FILE = "ladder.json"
_FORMAT = 1


@dataclass
class RungRecord:
    """A rung and its result.

    Attributes:
        name: name of its folder.
        heads, width, layers, parameters, non_embedding_parameters, tokens, steps, flops: see `Rung`.
        sha256: digest of its config.
        code: exit code of its run; None if it has not ended.
        loss: its loss after the last step; None if it has none.
    """

    name: str
    heads: int | None
    width: int
    layers: int
    parameters: int
    non_embedding_parameters: int
    tokens: int
    steps: int
    flops: float
    sha256: str
    code: int | None = None
    loss: float | None = None

    @classmethod
    def create(cls, rung: Rung) -> RungRecord:
        """Return the record of a rung that has not been trained."""
        values = {one.name: getattr(rung, one.name) for one in fields(cls) if one.name not in ("code", "loss")}
        return cls(**values)

    @property
    def has_ended(self) -> bool:
        """Whether another start would change nothing: it has its loss, or its loss is not finite."""
        return self.loss is not None or self.code == ExitCode.NONFINITE


@dataclass(frozen=True)
class Holdout:
    """A test of the extrapolation: a fit of all rungs but the largest, and its error there.

    Attributes:
        name: the largest rung.
        fit: the fit of the others.
        prediction: its prediction.
        loss: the measured loss.
    """

    name: str
    fit: PowerLawFit
    prediction: Prediction
    loss: float

    @property
    def error(self) -> float:
        """The relative error of the predicted loss."""
        return self.prediction.loss / self.loss - 1


@dataclass(frozen=True)
class Extrapolation:
    """The predicted loss of a run that was not trained.

    Attributes:
        name: its config, or its FLOPs as the user wrote them.
        parameters: number of parameters of the model; None if only its FLOPs are known.
        tokens: training tokens; None if only its FLOPs are known.
        prediction: the prediction.
    """

    name: str
    parameters: int | None
    tokens: int | None
    prediction: Prediction


@dataclass
class LadderRecord:
    """The content of ladder.json.

    Attributes:
        config: name of the base config.
        parametrization: "mup" or "usual" for widths of one config; None if each rung has a config of its own.
        tokens_per_parameter, steps: see `LadderOptions`.
        metric: the loss that is compared.
        rungs: the rungs, smallest first.
        fit: the law of all rungs that have a loss; None with fewer than two.
        holdout: the test at the largest rung, if requested.
        extrapolations: requested predictions.
    """

    config: str
    parametrization: str | None
    tokens_per_parameter: float | None
    steps: int | None
    metric: str
    rungs: list[RungRecord]
    fit: PowerLawFit | None = None
    holdout: Holdout | None = None
    extrapolations: list[Extrapolation] = field(default_factory=list)

    @classmethod
    def create(cls, config: str, metric: str, rungs: Sequence[Rung], options: LadderOptions) -> LadderRecord:
        """Return the record of a ladder that has not been trained."""
        return cls(
            config=config,
            parametrization=None if options.heads is None else options.parametrization,
            tokens_per_parameter=options.tokens_per_parameter,
            steps=options.steps,
            metric=metric,
            rungs=[RungRecord.create(rung) for rung in rungs],
        )

    def write(self, folder: Path) -> None:
        """Write the file, atomically."""
        content = asdict(self)
        if self.holdout is not None:
            content["holdout"]["error"] = self.holdout.error
        write_json(folder / LADDER_FILE, {"format": _FORMAT, **content})

    def resume(self, folder: Path) -> int:
        """Take over the results of an earlier start in the same folder; returns the number of rungs that have ended.

        Rungs may have been added.

        Raises:
            ValueError: the folder holds another ladder, or its file is damaged.
        """
        path = folder / LADDER_FILE
        if not path.is_file():
            return 0
        stored = read_record(path)
        hint = "choose another --workdir"
        for name in ("config", "parametrization", "tokens_per_parameter", "steps", "metric"):
            old, new = getattr(stored, name), getattr(self, name)
            if old != new:
                raise ValueError(f"{folder} holds a ladder with {name}={old}, this one has {name}={new}; {hint}")
        rung_by_name = {rung.name: rung for rung in self.rungs}
        for old in stored.rungs:
            rung = rung_by_name.get(old.name)
            if rung is None:
                raise ValueError(f"{folder} holds a ladder with the rung {old.name}, which this one lacks; {hint}")
            if rung.sha256 != old.sha256:
                raise ValueError(f"{folder} holds a ladder whose rung {old.name} has another config; {hint}")
            rung.code, rung.loss = old.code, old.loss
        return sum(rung.has_ended for rung in self.rungs)

    def fit_rungs(self, *, holdout: bool) -> None:
        """Fit the law of the rungs that have a loss.

        Args:
            holdout: also fit all but the largest, and predict its loss.

        Raises:
            ValueError: no law fits.
        """
        measured = [rung for rung in self.rungs if rung.loss is not None]
        self.fit = _fit(measured)
        self.holdout = None
        if not holdout:
            return
        if len(measured) < 3:
            raise ValueError(f"a holdout needs at least 3 rungs with a loss, and there are {len(measured)}")
        *others, largest = measured
        fit = _fit(others)
        assert largest.loss is not None
        self.holdout = Holdout(largest.name, fit, fit.predict(largest.flops), largest.loss)


def _fit(rungs: Sequence[RungRecord]) -> PowerLawFit:
    losses = [rung.loss for rung in rungs if rung.loss is not None]
    return fit_power_law([rung.flops for rung in rungs], losses)


def read_record(path: Path) -> LadderRecord:
    """Read a file ladder.json.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    try:
        content = dict(parse_json(path.read_bytes()))
        if content.pop("format") != _FORMAT:
            raise ValueError("another version")
        content["rungs"] = [RungRecord(**rung) for rung in content["rungs"]]
        content["fit"] = None if content["fit"] is None else _parse_fit(content["fit"])
        if content["holdout"] is not None:
            holdout = dict(content["holdout"])
            del holdout["error"]
            parts = {"fit": _parse_fit(holdout["fit"]), "prediction": _parse_prediction(holdout["prediction"])}
            content["holdout"] = Holdout(**{**holdout, **parts})
        content["extrapolations"] = [
            Extrapolation(**{**one, "prediction": _parse_prediction(one["prediction"])})
            for one in content["extrapolations"]
        ]
        record = LadderRecord(**content)
        _check_types(record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}; choose another --workdir") from None
    return record


def _check_types(record: LadderRecord) -> None:
    """Raise TypeError if a value that decides what is trained has another type."""
    for rung in record.rungs:
        for value, types in ((rung.code, (int,)), (rung.loss, (int, float)), (rung.name, (str,))):
            if not (value is None or isinstance(value, types)):
                raise TypeError(f"unexpected value {value!r}")


def _parse_fit(content: dict[str, Any]) -> PowerLawFit:
    intervals = {name: [Interval(**one) for one in ones] for name, ones in content["intervals"].items()}
    return PowerLawFit(**{**content, "law": PowerLaw(**content["law"]), "intervals": intervals})


def _parse_prediction(content: dict[str, Any]) -> Prediction:
    return Prediction(**{**content, "intervals": [Interval(**one) for one in content["intervals"]]})
