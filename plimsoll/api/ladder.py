"""`Ladder`: trains a config at several sizes, fits a scaling law to the losses, and predicts larger runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plimsoll.api.configs import ConfigRequest, create_request, load_config, log
from plimsoll.api.ladder_process import MemoryLimits, PlannedRungs, RungPlan, plan_rungs, train_rung
from plimsoll.extras.scaling.ladder_record import Extrapolation, Holdout, LadderRecord
from plimsoll.extras.scaling.ladder_tables import LADDER_PICTURE, make_notes, make_tables, plot_ladder
from plimsoll.extras.scaling.power_law import PowerLawFit
from plimsoll.extras.scaling.rungs import (
    DEFAULT_TOKENS_PER_PARAMETER,
    TRAIN_LOSS,
    LadderOptions,
    Parametrization,
    Rung,
    build_rung,
    build_rungs,
    choose_metric,
)
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.metrics.jsonl import read_metrics
from plimsoll.framework.run.request import RunError
from plimsoll.framework.terminal.exit_codes import STOPPED, DoesNotFitError, ExitCode, describe_exit_code
from plimsoll.framework.terminal.phase_views import show_phases_on_terminal
from plimsoll.framework.terminal.phases import phase
from plimsoll.framework.terminal.tables import TableSection, human_bytes, human_count, human_duration, render


@dataclass(frozen=True)
class LadderPlan:
    """The prices of a ladder's rungs on a target, by the analytical estimate. `print` shows them as a table.

    Attributes:
        target: name of the target.
        rungs: the rungs, smallest first.
        plans: what each needs.
    """

    target: str
    rungs: list[Rung]
    plans: list[RungPlan]

    @property
    def fits(self) -> bool:
        """True if every rung fits."""
        return all(plan.fits for plan in self.plans)

    @property
    def seconds(self) -> float | None:
        """The time of all training steps; None if the speed of the target is unknown."""
        times = [plan.seconds for plan in self.plans]
        return None if None in times else sum(filter(None, times))

    @property
    def misfits(self) -> list[str]:
        """A line for each rung that does not fit."""
        return [f"{rung.name}: {plan.verdict}" for rung, plan in self._pairs if not plan.fits]

    @property
    def _pairs(self) -> list[tuple[Rung, RungPlan]]:
        return list(zip(self.rungs, self.plans, strict=True))

    def __str__(self) -> str:
        rows = [["rung", "width", "layers", "parameters", "tokens", "steps", "FLOPs", "memory", "time", "fits"]]
        for rung, plan in self._pairs:
            time = _format_time(plan.seconds)
            counts = [str(rung.width), str(rung.layers), human_count(rung.parameters), human_count(rung.tokens)]
            numbers = [f"{rung.steps:,}", f"{rung.flops:.3g}", human_bytes(plan.peak_bytes), time]
            rows.append([rung.name, *counts, *numbers, "yes" if plan.fits else "NO"])
        target = "this machine" if self.target == "local" else self.target
        flops = sum(rung.flops for rung in self.rungs)
        rows.append(["sum", "", "", "", "", "", f"{flops:.3g}", "", _format_time(self.seconds), ""])
        return render([TableSection(f"plan of the rungs on {target} (estimate)", rows, numbers=True)]).rstrip()


class Ladder:
    """A config at several sizes: planned, trained, fitted and extrapolated.

        ladder = pl.Ladder("nanogpt-cpu", heads=[2, 4, 6, 8])
        print(ladder.plan("h100"))
        ladder.train("runs/ladder")  # the same call continues after a kill
        print(ladder.fit(), ladder.extrapolate(1e18))

    Args:
        base: config whose learning rate and initialization suit its own width; or the name of one. Or a list with the
            config of each rung.
        heads: widths of the rungs, in heads of attention; required with one config.
        tokens_per_parameter: training tokens for each parameter, embeddings included; the default is 20.
        steps: number of steps of every rung, instead of `tokens_per_parameter`.
        parametrization: "mup" widens the base by muP (`pl.widen`), "usual" only changes sizes.
        max_epochs: how often a rung may read the training data.
        metric: loss to compare, as in metrics.jsonl; the default is that of the only validation set.

    Raises:
        ConfigError: a size is not possible, or the options do not go together.
    """

    def __init__(
        self,
        base: Config | str | Path | Sequence[Config],
        heads: Sequence[int] | None = None,
        *,
        tokens_per_parameter: float | None = None,
        steps: int | None = None,
        parametrization: Parametrization = "mup",
        max_epochs: float = 1.0,
        metric: str | None = None,
    ):
        if tokens_per_parameter is None and steps is None:
            tokens_per_parameter = DEFAULT_TOKENS_PER_PARAMETER
        is_single = isinstance(base, (Config, str, Path))
        if is_single != (heads is not None):
            raise ConfigError("a ladder has one config and the heads of its rungs, or a list of configs without heads")
        widths = None if heads is None else tuple(heads)
        options = LadderOptions(widths, tokens_per_parameter, steps, parametrization, max_epochs, metric)
        configs: list[Config | str | Path] = [base] if isinstance(base, (Config, str, Path)) else [*base]
        if len(configs if widths is None else widths) < 2:
            raise ConfigError("a ladder has at least two rungs, and a law with an irreducible loss needs four")
        self._requests: list[ConfigRequest] = [create_request(config) for config in configs]
        self._options = options
        # All mistakes in sizes show here. A machine's rules may change the batch, so `plan` builds the rungs again.
        self.rungs = build_rungs([request.config for request in self._requests], options)
        self._record: LadderRecord | None = None

    @property
    def record(self) -> LadderRecord:
        """The rungs with their losses, the fit and predictions, as in ladder.json. Raises ValueError before `train`."""
        if self._record is None:
            raise ValueError("this ladder has no losses yet; call train(workdir) first")
        return self._record

    @show_phases_on_terminal()
    def plan(
        self, target: str = "local", *, device_memory_gib: float | None = None, host_memory_gib: float | None = None
    ) -> LadderPlan:
        """Plan all rungs for a target; nothing is trained.

        Args:
            target: name of the target, as for `pl.plan`.
            device_memory_gib, host_memory_gib: as for `pl.plan`.

        Raises:
            ConfigError: the target does not exist, or a rung does not suit it.
        """
        limits = _check_limits(device_memory_gib, host_memory_gib)
        planned = plan_rungs(self._requests, self._options, target, limits)
        return self._take_plan(target, planned)

    @show_phases_on_terminal()
    def train(
        self,
        workdir: str | os.PathLike[str],
        *,
        force: bool = False,
        device_memory_gib: float | None = None,
        host_memory_gib: float | None = None,
    ) -> LadderRecord:
        """Train the rungs on this machine, one after another, each in a process and a folder of its own; then fit.

        Before the first one starts, a plan checks that all of them fit and that the data suffices. The same call
        continues after a kill: rungs that have ended are skipped, and the one that was killed resumes. ladder.json has
        the results; `write` adds predictions and the picture.

        Args:
            workdir: a local folder.
            force: train even if a rung does not fit; the data must suffice in any case.
            device_memory_gib, host_memory_gib: as for `pl.train`.

        Raises:
            DoesNotFitError: a rung does not fit; nothing was started.
            ConfigError, ValueError: a config is invalid, the folder holds another ladder, or there is too little data.
            RunError: a rung failed; the others were trained.
            KeyboardInterrupt: Ctrl-C was pressed; the training progress is saved.
        """
        if "://" in os.fspath(workdir):
            raise ConfigError(f"workdir={os.fspath(workdir)}: expected a local folder")
        limits = _check_limits(device_memory_gib, host_memory_gib)
        folder = Path(workdir).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"workdir={os.fspath(workdir)}: a file; expected a folder")
        # Every run stores its config.
        if (folder / "config.json").exists():
            raise ConfigError(
                f"workdir={os.fspath(workdir)}: holds a run that is no ladder; expected a new folder, or a ladder"
            )
        choose_metric(self._requests[0].config, self._options)
        # Refuse the folder of another ladder early; rules of the machine may change the rungs before the second check.
        if not any(request.config.accelerator_rules for request in self._requests):
            record = self._create_record(self.rungs)
            if record.resume(folder) == len(record.rungs):
                print(f"all {len(record.rungs)} rungs have ended")
                return self._finish(record, folder)
        self._plan_training(folder, limits, force=force)
        record = self._create_record(self.rungs)
        num_ended = record.resume(folder)
        if num_ended:
            print(f"{num_ended} of {len(record.rungs)} rungs have ended and are skipped")
        folder.mkdir(parents=True, exist_ok=True)
        record.write(folder)
        self._train_rungs(record, folder, limits, force=force)
        return self._finish(record, folder)

    def read(self, workdir: str | os.PathLike[str]) -> LadderRecord:
        """Read the losses of a ladder that was trained before, without training.

        Raises:
            ValueError: the folder holds another ladder, or none.
        """
        record = self._create_record(self.rungs)
        if record.resume(Path(workdir).expanduser()) == 0:
            raise ValueError(f"{os.fspath(workdir)} holds no ladder with losses")
        record.fit_rungs(holdout=False)
        self._record = record
        return record

    def fit(self) -> PowerLawFit:
        """Return the law loss(C) = E + A * C^-alpha of the rungs that have a loss.

        Raises:
            ValueError: nothing was trained, fewer than two rungs have a loss, or losses do not fall.
        """
        self.record.fit_rungs(holdout=self.record.holdout is not None)
        fit = self.record.fit
        assert fit is not None
        return fit

    def hold_out(self) -> Holdout:
        """Fit all rungs but the largest, and compare the prediction for it with its loss.

        Raises:
            ValueError: fewer than three rungs have a loss.
        """
        self.record.fit_rungs(holdout=True)
        holdout = self.record.holdout
        assert holdout is not None
        return holdout

    def extrapolate(self, to: float | Config | str | Path) -> Extrapolation:
        """Predict the loss of a larger run, with intervals.

        Args:
            to: training FLOPs; or a config, which is given the ladder's number of tokens per parameter, or of steps.
        """
        if isinstance(to, (int, float)):
            if not to > 0:
                raise ConfigError(f"extrapolate={to}: expected FLOPs > 0")
            result = Extrapolation(f"{to:.3g} FLOPs", None, None, self.fit().predict(float(to)))
        else:
            name, rung = self._build_larger(to)
            result = Extrapolation(name, rung.parameters, rung.tokens, self.fit().predict(rung.flops))
        self.record.extrapolations = [one for one in self.record.extrapolations if one.name != result.name]
        self.record.extrapolations.append(result)
        return result

    def check_extrapolation(self, to: float | Config | str | Path) -> None:
        """Raise ConfigError now if `extrapolate` would raise it after training."""
        if isinstance(to, (Config, str, Path)):
            self._build_larger(to)

    def write(self, workdir: str | os.PathLike[str]) -> Path:
        """Write ladder.json and ladder.png with the fit and the extrapolations; returns the path of the picture."""
        folder = Path(workdir).expanduser()
        self.record.write(folder)
        with phase("plotting the ladder"):
            return plot_ladder(self.record, folder / LADDER_PICTURE)

    def __str__(self) -> str:
        if self._record is None:
            return f"ladder of {self._requests[0].spec}: {', '.join(rung.name for rung in self.rungs)}"
        return "\n".join([render(make_tables(self._record)).rstrip(), *make_notes(self._record)])

    def _create_record(self, rungs: Sequence[Rung]) -> LadderRecord:
        metric = choose_metric(self._requests[0].config, self._options)
        return LadderRecord.create(self._requests[0].spec, metric, rungs, self._options)

    def _take_plan(self, target: str, planned: PlannedRungs) -> LadderPlan:
        for line in planned.rule_lines:
            log(line)
        self.rungs = planned.rungs
        return LadderPlan(target, planned.rungs, planned.plans)

    def _check_data(self, data_tokens: int | None) -> None:
        """Raise ConfigError if a rung would read its data too often."""
        largest = max(self.rungs, key=lambda rung: rung.tokens)
        if data_tokens is None or largest.tokens <= self._options.max_epochs * data_tokens:
            return
        epochs = largest.tokens / data_tokens
        raise ConfigError(
            f"{largest.name} needs {human_count(largest.tokens)} tokens, but the data has {human_count(data_tokens)}, "
            f"which it would read {epochs:.2f} times; add data, reduce tokens_per_parameter or steps, or set "
            f"max_epochs={-(-largest.tokens // data_tokens)}"
        )

    def _plan_training(self, folder: Path, limits: MemoryLimits, *, force: bool) -> None:
        """Plan the rungs on this machine and count the data; raises as `train` if nothing may start."""
        has_folder = folder.exists()
        planned = plan_rungs(self._requests, self._options, "local", limits, folder, force=force)
        plan = self._take_plan("local", planned)
        print(plan)
        for line in plan.misfits:
            print(line)
        if plan.misfits and not force:
            raise DoesNotFitError(f"{len(plan.misfits)} of {len(plan.rungs)} rungs do not fit; nothing was started")
        try:
            self._create_record(self.rungs).resume(folder)
            self._check_data(planned.data_tokens)
        except ValueError:
            # Only the data has been written.
            if not has_folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _finish(self, record: LadderRecord, folder: Path) -> LadderRecord:
        """Fit the law and write the results. Raises RunError if a rung has no loss."""
        self._record = record
        if sum(rung.loss is not None for rung in record.rungs) >= 2:
            try:
                record.fit_rungs(holdout=False)
            except ValueError as error:
                # The losses are results even if no law fits them.
                print(f"no fit: {error}", file=sys.stderr)
        record.write(folder)
        failed = [rung for rung in record.rungs if rung.loss is None]
        if failed:
            # A run may have ended in time, by trainer.stop or a hook, before its last step.
            early = "ended before its last step"
            reasons = [describe_exit_code(rung.code) if rung.code else early for rung in failed]
            names = ", ".join(f"{rung.name} ({reason})" for rung, reason in zip(failed, reasons, strict=True))
            raise RunError(f"{len(failed)} of {len(record.rungs)} rungs have no loss: {names}", ExitCode.FAILED)
        return record

    def _train_rungs(self, record: LadderRecord, folder: Path, limits: MemoryLimits, *, force: bool) -> None:
        """Train the rungs that have not ended. A signal ends the ladder."""
        for index, (rung, result) in enumerate(zip(self.rungs, record.rungs, strict=True)):
            if result.has_ended:
                continue
            print(f"rung {index + 1} of {len(self.rungs)}: {rung.name}, {rung.steps:,} steps", flush=True)
            rung.config.data.cache_dir = rung.config.data.cache_dir or str(folder.absolute() / "data")
            workdir = folder / rung.name
            tokenizer = folder / "tokenizer.json"
            if tokenizer.is_file() and not (workdir / "tokenizer.json").exists():
                # Training it again for each rung would give the same one.
                workdir.mkdir(exist_ok=True)
                shutil.copy(tokenizer, workdir)
            code = train_rung(record.config, rung, workdir, limits, force=force)
            if code == ExitCode.INTERRUPTED:
                raise KeyboardInterrupt(f"the progress is saved in {folder}; the same command continues")
            if code in STOPPED:
                raise SystemExit(code)
            result.code = code
            if code == ExitCode.DONE:
                result.loss = _read_loss(workdir, rung.steps, record.metric)
            record.write(folder)

    def _build_larger(self, to: Config | str | Path) -> tuple[str, Rung]:
        config = load_config(to, shape_only=True) if isinstance(to, (str, Path)) else to
        name = str(to) if isinstance(to, (str, Path)) else create_request(config).spec
        # Its own data is not read, so its validation sets do not matter.
        options = LadderOptions(None, self._options.tokens_per_parameter, self._options.steps, metric=TRAIN_LOSS)
        return name, build_rung(name, config, options)


def _format_time(seconds: float | None) -> str:
    """Format the time of a run: 0.3 -> "300 ms", 7200 -> "2.0 h", 5e6 -> "58 days"."""
    if seconds is None:
        return "unknown"
    if seconds < 3600:
        return human_duration(seconds)
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.0f} days"


def _check_limits(device_memory_gib: float | None, host_memory_gib: float | None) -> MemoryLimits:
    for name, size in (("device_memory_gib", device_memory_gib), ("host_memory_gib", host_memory_gib)):
        if size is not None and not size > 0:
            raise ConfigError(f"{name}={size}: expected more than 0")
    return MemoryLimits(device_memory_gib, host_memory_gib)


def _read_loss(workdir: Path, steps: int, metric: str) -> float | None:
    """Return a metric after the last step; None if there is none."""
    values = [
        row[metric]
        for row in read_metrics(workdir / "metrics.jsonl")
        if row["step"] == steps and isinstance(row.get(metric), (int, float))
    ]
    # After a resumption there may be several rows of a step, and the last one counts.
    return float(values[-1]) if values else None
