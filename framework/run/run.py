"""Run: the state, checkpoints and metrics of one run, which starts or resumes in a workdir."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from plimsoll.framework.checkpoint import leftover_files
from plimsoll.framework.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from plimsoll.framework.config import Config
from plimsoll.framework.config.changes import config_changes
from plimsoll.framework.config.value_parsing import as_text
from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.data.stages import find_stage
from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.devices.allocator import release_freed_memory
from plimsoll.framework.files import durable
from plimsoll.framework.files.workdir import Workdir
from plimsoll.framework.layout import TrainState
from plimsoll.framework.metrics.goodput import Goodput
from plimsoll.framework.metrics.jsonl import JsonlWriter, read_metrics
from plimsoll.framework.metrics.retrying import RetryingWriter
from plimsoll.framework.metrics.throughput import Throughput
from plimsoll.framework.metrics.writers import MlflowWriter, MultiWriter, TensorBoardWriter, WandbWriter, Writer
from plimsoll.framework.processes import distributed
from plimsoll.framework.processes.health import Pulse
from plimsoll.framework.program import save_window
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.run_length import report_length_change
from plimsoll.framework.program.stages import StageProgram
from plimsoll.framework.run import resuming
from plimsoll.framework.run.best_metric import BestMetric
from plimsoll.framework.schedules.step import Metrics
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.progress import Progress
from plimsoll.framework.terminal.tables import human_bytes, human_duration

# Names that `Run.log` refuses: the columns of every row, and the groups of the run's own metrics.
_OWN_COLUMNS = ("step", "time", "tokens", "images", "epoch")
_OWN_PREFIXES = ("train/", "eval/", "eval_ema/", "run/", "memory/")


class Run:
    """One run in one workdir: its state, its checkpoints, and everything it reports. Hooks have access to it.

    Args:
        config: resolved config; stored with every checkpoint.
        programs: program of each stage of the data, see `build_stage_programs`; without stages, only one.
        workdir: output folder; claimed by the caller.
        progress: progress display for the user.
        goodput: accounting of this process's time.
        pulse: heartbeat of this process.

    Attributes:
        program: program of the stage that the run is in.
        running_state: training state, empty before `start`. The last step may have left its update to the next one,
            see `schedules.delayed_update`.
        evaluation: metrics of the last evaluation, by name.
        evaluated_step: step of that evaluation; None before the first one.
        signals: signals that asked this process to stop, in order of arrival.
        save_is_due: whether to save after the step that was dispatched last; the same in every process.
        stop_metric: the metric of trainer.stop; None if no rule reads one.
        best_metric: the metric of trainer.keep_best, with the step of the best checkpoint; None without it.
        stop_reason: reason why the run ends before its last step; None if it does not. The same in every process.
        stop_request, save_is_requested: what this process's hooks have asked for, see `stop` and `request_save`.
    """

    def __init__(
        self,
        config: Config,
        programs: Sequence[StageProgram],
        workdir: Workdir,
        progress: Progress,
        goodput: Goodput,
        pulse: Pulse,
    ):
        self.config = config
        self.programs = programs
        self.program: Program = programs[0].program
        self.workdir = workdir
        self.progress = progress
        self.goodput = goodput
        self.pulse = pulse
        # Its data is that of all stages; `program.experiment` has the data of the stage.
        self.experiment = experiment = self.program.experiment
        self.options = experiment.trainer
        self.data = experiment.data
        self.running_state: TrainState = TrainState()
        self._has_left_update = False
        self.evaluation: dict[str, float] = {}
        self.evaluated_step: int | None = None
        self.signals: list[int] = []
        self.save_is_due = False
        self.stop_metric: BestMetric | None = None
        if experiment.stop_metric is not None:
            rules = self.options.stop
            self.stop_metric = BestMetric(experiment.stop_metric, rules.mode, rules.min_improvement)
        self.best_metric: BestMetric | None = None
        if experiment.best_metric is not None:
            self.best_metric = BestMetric(experiment.best_metric, self.options.keep_best_mode)
        self.stop_reason: str | None = None
        self.stop_request: str | None = None
        self.save_is_requested = False
        # The JSON data stored with the checkpoint that was restored last.
        self._extra: dict[str, Any] = {}
        # Only a rollback leaves a batch out.
        self.batch_order = BatchOrder()
        self._saved_at = time.monotonic()
        self._reported_window = False
        # Both write to the workdir as soon as they exist, so `start` first checks that the run may resume there.
        self.checkpointer = Checkpointer(directory=workdir.checkpoints, read_only=True)
        self.writer: Writer = MultiWriter([])
        self.throughput = _build_throughput(self.program)
        pulse.note(max_steps=self.options.max_steps)

    def get_stage(self, step: int) -> StageProgram:
        """Return the stage that the step after `step` belongs to."""
        stages = self.data.stages
        return self.programs[find_stage(stages, self.batch_order.batch_after(step)) if stages else 0]

    def use_program(self, program: Program) -> bool:
        """Continue with the program of another stage. Returns whether it is another one."""
        if program is self.program:
            return False
        # The last step may have left its update to the next one, which has another program.
        self.state = self.state
        self.program = program
        self.throughput = _build_throughput(program)
        return True

    @property
    def state(self) -> TrainState:
        """The state after the last step, with its update applied. Collective after a step."""
        if self._has_left_update:
            self.state = self.program.complete_update(self.running_state)
        return self.running_state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.running_state = state
        self._has_left_update = False

    def take_step(self, batch: dict[str, np.ndarray]) -> Metrics:
        """Run one training step on this process's rows of a batch; returns its metrics."""
        self.running_state, metrics = self.program.step(self.running_state, self.program.put(batch))
        self._has_left_update = self.experiment.memory.delays_update
        return metrics

    @property
    def stopping(self) -> bool:
        """True if a signal should end this single-process run; several processes have to agree first."""
        return jax.process_count() == 1 and bool(self.signals)

    def stop(self, reason: str) -> None:
        """End the run after this step: it evaluates and saves, prints the reason, and exits with code 8.

        A hook calls it at any point. With several processes, any of them may call it, and all stop after the same step,
        one or two steps later. If it is called several times, the first reason counts.

        Raises:
            ValueError: the reason is not a line of text.
        """
        if not isinstance(reason, str) or not reason.strip() or len(reason.splitlines()) > 1:
            raise ValueError(f"run.stop: expected a reason in one line, given {reason!r}")
        self.stop_request = self.stop_request or reason.strip()

    def request_save(self) -> None:
        """Save a checkpoint after this step, in addition to those of the config; for hooks.

        With several processes, any of them may call it, and all save after the same step, one or two steps later.
        """
        self.save_is_requested = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step to metrics.jsonl, TensorBoard and the services, next to those of the run; for hooks.

        Every process may call it; process 0 writes.

        Args:
            step: step of the values.
            metrics: values by name, such as {"mine/largest_weight": 0.5}; scalars of numpy and jax are numbers too.

        Raises:
            ValueError: a name is one of the run's own, or a value is not a number.
        """
        row: dict[str, float] = {}
        for name, value in metrics.items():
            if name in _OWN_COLUMNS or name.startswith(_OWN_PREFIXES):
                raise ValueError(
                    f"run.log: {name!r} is a name of the run's own metrics; expected another, such as 'mine/{name}'"
                )
            if np.ndim(value) != 0 or not np.issubdtype(np.asarray(value).dtype, np.number):
                raise ValueError(f"run.log: expected a number as {name!r}, given {value!r}")
            row[name] = float(value)
        self.writer.write(step, row)

    def wall_clock_is_over(self) -> bool:
        """Return whether the run has taken as long as trainer.stop.wall_clock permits, by the clock of process 0."""
        limit = self.options.stop.wall_seconds
        return limit is not None and distributed.is_primary() and self.goodput.elapsed() >= limit

    def start(self, *, force: bool = False) -> int:
        """Fill the state from the newest valid checkpoint or by initialization; returns its step.

        `leftover_files.check` has already inspected the workdir. Errors are raised before anything is written there.

        Raises:
            CheckpointMismatchError: the newest checkpoint belongs to another model.
            ValueError: the newest checkpoint has different data, and `force` is not set; see `resuming`.
        """
        with self.goodput.during("restore"):
            resuming.check(self.checkpointer, self.program, self.config, force=force)
            self._open()
            if self.checkpointer.steps():
                return self._resume(force)
            self.goodput.go_back({})
            if distributed.is_primary():
                leftover_files.record_start(self.workdir.path)
            # Drop the rows of a run that was killed before its first checkpoint.
            if self.workdir.metrics.exists() and self.workdir.metrics.stat().st_size:
                self.writer.resume(0)
            self.initialize()
            return 0

    def _resume(self, force: bool) -> int:
        """Restore the newest valid checkpoint, report config changes since it was saved, and return its step."""
        for problem in self.checkpointer.problems():
            self.progress.print(f"checkpoint: {problem}")
        step = self.restore()
        for change in config_changes(self._extra["config"], self.config.to_dict()):
            self.progress.print(f"config changed since the checkpoint: {change}")
        for line in report_length_change(self._extra["config"], self.config):
            self.progress.print(line)
        for line in resuming.batch_lines(self._extra, step, self.data):
            self.progress.print(line)
        # Check again: the restored checkpoint may be older than the one checked before.
        difference = resuming.describe_data_change(self._extra, self.data, self.config, force=force)
        if difference:
            self.progress.print(f"{difference}; continuing because of --force")
        self.pulse.note(step=step)
        # Read the evaluation of this step from metrics.jsonl, if it is there.
        evaluation: dict[str, float] = {}
        if distributed.is_primary():
            for row in read_metrics(self.workdir.metrics):
                if row["step"] == step:
                    evaluation |= {
                        name: value for name, value in row.items() if name.startswith(("eval/", "eval_ema/"))
                    }
        # Only process 0 writes the file, and all processes must agree on whether this step was evaluated.
        evaluation = distributed.broadcast_from_primary(evaluation)
        names = self.data.validation_names
        if names and all(any(key.startswith(f"eval/{name}/") for key in evaluation) for name in names):
            self.evaluation = evaluation
            self.evaluated_step = step
        self.progress.print(f"resumed from step {step}")
        return step

    def _open(self) -> None:
        """Start writing to the workdir, which belongs to this run from here on.

        Raises:
            ValueError: a service that receives metrics refuses.
        """
        # They open first, so a service that refuses leaves the workdir unchanged.
        services: list[Writer] = []
        path = self.workdir.path
        log = self.progress.print
        # All processes have the same metrics, so only process 0 writes.
        is_primary = distributed.is_primary()
        project = self.options.wandb_project
        if is_primary and project is not None:
            services.append(WandbWriter(project, path.name, workdir=path, config=self.config.to_dict()))
        uri = self.options.mlflow_uri
        if is_primary and uri is not None:
            fields = {field: as_text(value) for field, value in self.config.walk() if field}
            mlflow = MlflowWriter(uri, path.name, workdir=path, config=fields)
            services.append(RetryingWriter(mlflow, "MLflow", log))
        self.checkpointer = Checkpointer(
            directory=self.workdir.checkpoints,
            keep=self.options.keep,
            keep_every=self.options.keep_every,
            # If the workdir is a URL, this uploads its other files, so that none is older than a checkpoint.
            before_commit=self.workdir.sync,
            # Not a method of the run: a cycle would keep the state until the next garbage collection.
            after_commit=partial(_record_commit, self.workdir),
            # A save through a window may take longer than health.hang_seconds.
            on_progress=self.pulse.note,
        )
        if is_primary:
            jsonl = JsonlWriter(self.workdir.metrics, self._stamp)
            # A full disk does not end a run: rows wait in memory until there is space.
            writers: list[Writer] = [RetryingWriter(jsonl, "metrics.jsonl", log)]
            if self.options.tensorboard:
                tensorboard = TensorBoardWriter(self.workdir.tensorboard)
                writers.append(RetryingWriter(tensorboard, "tensorboard", log))
            self.writer = MultiWriter([*writers, *services])
        self.workdir.keep()
        self.progress.write_log()

    def initialize(self) -> None:
        """Fill the state with initial values or pretrained weights."""
        # After a rollback to the start, free the old arrays before allocating new ones.
        self.state = TrainState()
        self._extra = {}
        # After a rollback, the run may be in a later stage.
        self.use_program(self.programs[0].program)
        self._restore_metrics()
        pretrained = self.experiment.pretrained
        if pretrained is not None:
            self.state = pretrained.init(self.program)
            return
        self.state = self.program.init()
        if self.program.calibrates:
            first_index = self.batch_order.batch_after(0)
            first_batch = self.data.train_batch(first_index, self.program.rows)
            with phase("calibrating the initial weights on the first batch", patience=SHORT):
                self.state = self.program.backend.calibrate_state(self.state, self.program.put(first_batch))
                jax.block_until_ready(self.state)

    def restore(self) -> int:
        """Fill the state from the newest valid checkpoint; returns its step."""
        # Free the old arrays first, so that there is never a second copy.
        self.state = TrainState()
        restored = self.checkpointer.restore_latest(self.program.backend.abstract_checkpoint)
        for problem in restored.problems:
            self.progress.print(f"checkpoint: {problem}")
        with phase("placing the restored state", patience=SHORT):
            self.state = self.program.backend.from_checkpoint(restored.state)
        self._extra = restored.extra
        self.program.layout.check(self.state)
        self.goodput.go_back(self._extra.get("goodput", {}))
        self.batch_order = resuming.order_after(self._extra, restored.step, self.data)
        self._restore_metrics()
        self.writer.resume(restored.step)
        # The buffers of the files that were read.
        release_freed_memory()
        return restored.step

    def _restore_metrics(self) -> None:
        """Continue the metrics of trainer.stop and trainer.keep_best from the checkpoint, or start them again."""
        for tracked, name in ((self.stop_metric, "stop"), (self.best_metric, "best")):
            if tracked is not None:
                tracked.restore(self._extra.get(name))

    def delete_state(self) -> None:
        """Free the arrays of the state, even if something else still refers to them."""
        for leaf in jax.tree.leaves(self.running_state):
            leaf.delete()
        self.state = TrainState()

    def save(self, step: int, *, replace_saved: bool = False) -> None:
        """Save the state. A full disk is reported, and the run continues.

        The save runs in the background, unless it goes through a window; see `save_window.py`.

        Args:
            step: step of the state.
            replace_saved: save again a step that is saved, because its checkpoint lacks what the run has learned since.
        """
        with self.goodput.during("save"), phase(f"saving step {step}", patience=SHORT):
            self._saved_at = time.monotonic()
            window_bytes = save_window.agree_on_window(self.program)
            reports_window = window_bytes is not None and not self._reported_window
            if reports_window:
                self._reported_window = True
                window = human_bytes(window_bytes)
                self.progress.print(
                    f"saves go through a window of {window} of host memory, and training waits for each"
                )
            extra = {
                "config": self.config.to_dict(),
                "data": resuming.position(self.batch_order, step, self.data),
                "seed": self.options.seed,
                "goodput": self.goodput.totals(),
            }
            if self.stop_metric is not None:
                extra["stop"] = self.stop_metric.to_json()
            if self.stop_reason is not None:
                extra["stop_reason"] = self.stop_reason
            if self.best_metric is not None:
                extra["best"] = self.best_metric.to_json()
                # While this checkpoint is written, the best one so far must stay.
                self.checkpointer.protect(self.best_metric.step)
            # The previous save may have failed in the background. Report that separately: `save` would raise its error
            # and then save nothing.
            with self._report_save_failures(step):
                self.checkpointer.wait()
            with self._report_save_failures(step):
                # Joined stacks would be in pinned memory, which a process with GPUs never returns; see `chunk_store`.
                join = window_bytes is None and self.program.backend.platform != "gpu"
                saved_state = self.program.backend.to_checkpoint(self.state, join=join)
                start = time.monotonic()
                self.checkpointer.save(step, saved_state, extra, window_bytes=window_bytes, replace_saved=replace_saved)
                if reports_window:
                    seconds = human_duration(time.monotonic() - start)
                    self.progress.print(f"the save of step {step} blocked training for {seconds}")

    @contextmanager
    def _report_save_failures(self, step: int) -> Iterator[None]:
        """Report a failed save instead of raising its error."""
        try:
            yield
        except CheckpointSaveError as error:
            saved_steps = self.checkpointer.steps()
            saved = f"Saved steps: {saved_steps or 'none'}"
            self.progress.print(f"NOT SAVED at step {step}: {error}. {saved}. Training continues.")

    def wait_until_saved(self, step: int) -> bool:
        """Wait for pending saves. Returns whether this step is on disk."""
        with self.goodput.during("save"), self._report_save_failures(step):
            self.checkpointer.wait()
        return step in self.checkpointer.steps()

    def timed_save_is_due(self) -> bool:
        """Return whether a save by the clock is due. Only the clock of process 0 counts."""
        minutes = self.options.save_every_minutes
        if minutes is None or not distributed.is_primary():
            return False
        seconds = time.monotonic() - self._saved_at
        if seconds < 60 * minutes:
            return False
        # One request is enough; `save` sets the time again.
        self._saved_at = time.monotonic()
        return True

    def close(self) -> None:
        """Finish pending writes. Raises the error of a failed background save."""
        try:
            self.checkpointer.close()
        finally:
            self.writer.close()
            # The writer refers to the run, and a cycle would keep the state until the next garbage collection.
            self.writer = MultiWriter([])

    def _stamp(self, step: int) -> dict[str, float]:
        """Return the columns of every row of metrics.jsonl.

        These are the time in seconds since 1970, the tokens or images trained on until this step, and the epoch,
        which counts batches that were left out as read.
        """
        num_batches = self.batch_order.batch_after(step)
        return {
            "time": round(time.time(), 3),
            f"{self.data.item}s": self.data.count_items(step, self.batch_order),
            # The origin accounts for batches of another size before a resume.
            "epoch": self.data.count_epochs(num_batches, self.batch_order.origin),
        }


def _build_throughput(program: Program) -> Throughput:
    """Return the measurement of tokens or images per second, and of model FLOPs relative to the peak (MFU)."""
    model = program.experiment.model
    data = program.experiment.data
    spec = spec_for(list(program.mesh.devices.flat))
    # The peak is not known for every accelerator; the run then shows no MFU.
    peak_per_device = spec.peak_flops(str(model.compute_dtype))
    peak = peak_per_device * program.mesh.size if peak_per_device else None
    tokens_per_step = data.global_batch_size * data.seq_len
    return Throughput(tokens_per_step, model.flops_per_token(data.seq_len), peak, item=data.item)


def _record_commit(workdir: Workdir, step: int) -> None:
    """Record the commit of a step, and flush the rows of metrics up to it to disk."""
    if workdir.metrics.exists():
        durable.sync(workdir.metrics)
    leftover_files.record_saved(workdir.path, step)
