"""Run: what one run has in its workdir and on the devices. It starts there, or goes on, and is saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import jax

from framework.checkpoint import remains
from framework.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from framework.checkpoint.directory import CheckpointCorruptError
from framework.config import Config
from framework.config.changes import config_changes
from framework.data.order import BatchOrder
from framework.devices.accelerators import spec_for
from framework.files.workdir import Workdir
from framework.metrics.goodput import Goodput
from framework.metrics.jsonl import JsonlWriter
from framework.metrics.patient import PatientWriter
from framework.metrics.throughput import Throughput
from framework.metrics.writers import MultiWriter, TensorBoardWriter, WandbWriter, Writer
from framework.processes import distributed
from framework.processes.health import Pulse
from framework.program.program import Program, State
from framework.program.run_length import changed_length
from framework.terminal.progress import Progress


class Run:
    """One run in one workdir: its state, its checkpoints, and all that is told of it. Hooks see it.

    Args:
        config: the resolved config; stored with every checkpoint.
        program: its experiment on the devices.
        workdir: where everything goes; claimed by the caller.
        progress: what the person sees.
        goodput: where the time of this process goes.
        pulse: its sign of life.

    Attributes:
        state: the training state; {} before `start`.
        evaluation: metrics of the last evaluation, by name.
        signals: those that ask this process to stop, in the order in which they came.
        save_is_due: after the step that was dispatched last; the same in every process.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        workdir: Workdir,
        progress: Progress,
        goodput: Goodput,
        pulse: Pulse,
    ):
        self.config = config
        self.program = program
        self.workdir = workdir
        self.progress = progress
        self.goodput = goodput
        self.pulse = pulse
        self.experiment = experiment = program.experiment
        self.options = experiment.trainer
        self.data = experiment.data
        self.state: State = {}
        self.evaluation: dict[str, float] = {}
        self.signals: list[int] = []
        self.save_is_due = False
        self.batch_order = BatchOrder()  # only a roll back leaves a batch out
        self._saved_at = time.monotonic()
        # Both write to the workdir as soon as they are made: not before `start` has found that the run may go on there.
        self.checkpointer = Checkpointer(directory=workdir.checkpoints, read_only=True)
        self.writer: Writer = MultiWriter([])
        peak = spec_for(list(program.mesh.devices.flat)).peak_flops(str(experiment.model.compute_dtype))
        self.throughput = Throughput(
            self.data.global_batch_size * self.data.seq_len,
            experiment.model.flops_per_token(self.data.seq_len),
            peak * program.mesh.size if peak else None,
            item=self.data.item,
        )
        pulse.note(max_steps=self.options.max_steps)

    @property
    def stopping(self) -> bool:
        """Whether a signal is to end this run, which is of one process: several have to agree first."""
        return jax.process_count() == 1 and bool(self.signals)

    def start(self, *, force: bool = False) -> int:
        """Fills the state, from the newest valid checkpoint or from initialization; returns its step.

        What the workdir holds was looked at by `remains.check`. Raises an error before anything is written there: the
        newest checkpoint is of another model, or, without `force`, of other data.
        """
        with self.goodput.during("restore"):
            return self._start(force)

    def _start(self, force: bool) -> int:
        newest = max(self.checkpointer.steps(), default=None)
        if newest is not None:
            with suppress(CheckpointCorruptError):  # then one before may do, which is looked at below
                self._refuse_other_data(self.checkpointer.compare(newest, self.program.abstract_stored).extra, force)
        self._open()
        if not self.checkpointer.steps():
            self.goodput.go_back({})
            if self.workdir.metrics.exists() and self.workdir.metrics.stat().st_size:
                self.writer.resume(0)
            self.initialize()
            return 0
        for problem in self.checkpointer.problems():
            self.progress.print(f"checkpoint: {problem}")
        step = self.restore()
        for change in config_changes(self._extra["config"], self.config.to_dict()):
            self.progress.print(f"config changed since the checkpoint: {change}")
        for line in changed_length(self._extra["config"], self.config):
            self.progress.print(line)
        if difference := self._refuse_other_data(self._extra, force):
            self.progress.print(f"{difference}; going on, as --force says")
        self.pulse.note(step=step)
        self.progress.print(f"resumed from step {step}")
        return step

    def _open(self) -> None:
        """From here on the workdir is this run's to write."""
        record = partial(remains.record_saved, self.workdir.path)
        options = {"keep": self.options.keep, "keep_every": self.options.keep_every}
        hooks = {"before_commit": self.workdir.sync, "after_commit": record}
        self.checkpointer = Checkpointer(directory=self.workdir.checkpoints, **options, **hooks)
        self.writer = self._writers()
        self.workdir.keep()
        self.progress.write_log()

    def _refuse_other_data(self, extra: dict[str, Any], force: bool) -> str | None:
        """How the data differ from those of a checkpoint; None: they do not. Raises ValueError: they do, and there is
        no `force`."""
        old, new = extra["data"]["fingerprint"], self.data.fingerprint()
        if old == new:
            return None
        message = f"the data differs from the checkpoint's (fingerprint {new[:12]}, was {old[:12]})"
        if not force:
            raise ValueError(f"{message}: batches would not continue where they stopped; --force goes on anyway")
        return message

    def initialize(self) -> None:
        """Fills the state as a run starts."""
        self.state = {}
        pretrained = self.experiment.pretrained
        if pretrained is not None:
            self.state = pretrained.init(self.program)
            return
        self.state = self.program.init()
        if self.program.calibrates:
            first = self.data.train_batch(self.batch_order.batch_after(0), self.program.rows)
            self.state = self.program.calibrated(self.state, self.program.put(first))

    def restore(self) -> int:
        """Fills the state from the newest valid checkpoint; returns its step."""
        self.state = {}  # the old arrays go before the new ones come: there is never a second copy
        restored = self.checkpointer.restore_latest(self.program.abstract_stored)
        for problem in restored.problems:
            self.progress.print(f"checkpoint: {problem}")
        self.state, self._extra = self.program.restored(restored.state), restored.extra
        self.program.layout.check(self.state)
        self.goodput.go_back(self._extra.get("goodput", {}))
        self.batch_order = BatchOrder.stored(self._extra["data"])
        self.writer.resume(restored.step)
        return restored.step

    def save(self, step: int) -> None:
        """Saves the state in the background. No room on the disk is reported, and the run goes on."""
        with self.goodput.during("save"):
            self._save(step)

    def _save(self, step: int) -> None:
        self.progress.status("saving")
        self._saved_at = time.monotonic()
        data = {"fingerprint": self.data.fingerprint(), "next": self.batch_order.batch_after(step)}
        data |= self.batch_order.to_json()
        extra = {"config": self.config.to_dict(), "data": data, "seed": self.options.seed}
        extra["goodput"] = self.goodput.totals()
        with self._failures_told(step):
            self.checkpointer.wait()  # the save before this one may have failed in the background
        with self._failures_told(step):
            self.checkpointer.save(step, self.program.stored(self.state), extra)
        self.progress.status("")

    @contextmanager
    def _failures_told(self, step: int) -> Iterator[None]:
        try:
            yield
        except CheckpointSaveError as error:
            kept = self.checkpointer.steps()
            self.progress.print(f"NOT SAVED at step {step}: {error}. Kept: {kept or 'none'}. Training goes on.")

    def saved(self, step: int) -> bool:
        """Waits for pending saves; whether this step is on disk."""
        with self.goodput.during("save"), self._failures_told(step):
            self.checkpointer.wait()
        return step in self.checkpointer.steps()

    def wishes_save(self) -> bool:
        """Whether this process wishes a save by the clock. Only the first one has a clock that counts."""
        minutes = self.options.save_every_minutes
        if minutes is None or not distributed.is_primary() or time.monotonic() - self._saved_at < 60 * minutes:
            return False
        self._saved_at = time.monotonic()  # one wish is enough; `save` sets it again
        return True

    def close(self) -> None:
        """Finishes pending writes; a failed background save is raised here."""
        try:
            self.checkpointer.close()
        finally:
            self.writer.close()

    def _writers(self) -> Writer:
        if not distributed.is_primary():
            return MultiWriter([])
        say = self.progress.print
        writers: list[Writer] = [
            PatientWriter(JsonlWriter(self.workdir.metrics), "metrics.jsonl", say),
            PatientWriter(TensorBoardWriter(self.workdir.tensorboard), "tensorboard", say),
        ]
        if (project := self.options.wandb_project) is not None:
            path = self.workdir.path
            writers.append(WandbWriter(project, path.name, workdir=path, config=self.config.to_dict()))
        return MultiWriter(writers)
