"""Trainer: the loop. From a workdir and an experiment to a trained model, through kill and resume.

May import: everything in framework. Nothing under framework imports configs or launch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import jax

from framework import distributed, remains
from framework.accelerators import spec_for
from framework.checkpoint import Checkpointer, CheckpointSaveError
from framework.checkpoint_directory import CheckpointCorruptError
from framework.config import Config
from framework.data.order import BatchOrder
from framework.health import Pulse
from framework.hooks import Agree, Evaluate, Guard, Hook, Prediction, Profile, Report, RollBack, Save
from framework.interrupts import stop_signals
from framework.metrics.goodput import Goodput
from framework.metrics.jsonl import JsonlWriter
from framework.metrics.patient import PatientWriter
from framework.metrics.progress import Progress
from framework.metrics.throughput import MetricsBuffer, Throughput
from framework.metrics.writers import MultiWriter, TensorBoardWriter, WandbWriter, Writer
from framework.plan.guard import Need
from framework.program import Program, State
from framework.run_length import changed_length
from framework.workdir import Workdir, config_changes


class LastStepNotSavedError(RuntimeError):
    """The run is over, and its last checkpoint is not on disk."""


class Trainer:
    """One run in one workdir.

    Args:
        config: the resolved config; stored with every checkpoint.
        program: its experiment on the devices.
        workdir: where everything goes; claimed by the caller.
        progress: what the person sees.
        need: what the step was predicted to need; after the first steps it is shown beside what was measured.
        goodput: where the time of this process goes.
        pulse: its sign of life.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        workdir: Workdir,
        progress: Progress,
        need: Need,
        goodput: Goodput,
        pulse: Pulse,
    ):
        self.goodput, self.pulse = goodput, pulse
        self.config, self.program, self.workdir, self.progress = config, program, workdir, progress
        self.experiment = experiment = program.experiment
        self.options, self.data = experiment.trainer, experiment.data
        self.state: State = {}
        self.evaluation: dict[str, float] = {}
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
        self.hooks: list[Hook] = [Guard(), Report(), Evaluate(), Agree(), Save(), Profile(), Prediction(need)]
        self.ballot = distributed.Ballot(program.mesh)
        # What the processes have agreed on: the signal that ends the run, whether to save by the clock.
        self.agreed = {"stop": 0, "save": 0}
        self.stop: list[int] = []  # the signals that this process has got
        self._begun = False  # whether a step was trained, which a signal would lose
        self.save_is_due = False  # after the step that was dispatched last; the same in every process

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

    # --- state -------------------------------------------------------------------------------------------------------

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
            self._initialize()
            return 0
        for problem in self.checkpointer.problems():
            self.progress.print(f"checkpoint: {problem}")
        step = self._restore()
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

    def _initialize(self) -> None:
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

    def _restore(self) -> int:
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

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, step: int) -> int | None:
        """Trains from `step` to max_steps. Returns the signal that stopped it early, after saving; None at its end. A
        signal that one process gets stops all of them, after the same step.
        Raises LastStepNotSavedError; NonFiniteError: learner.nonfinite ended the run; ReplicaMismatchError."""
        self.progress.status("compiling")
        with self.goodput.during("compile"):
            self.program.compile()  # before the first batch is read
            distributed.barrier("compiled")
            if self.data.validation_names:
                # Before there are steps to lose: who interrupts a compiler need not wait for it.
                self.program.compile_evaluation(self.state)
        self.progress.status("")
        with stop_signals(lambda: self._begun) as self.stop:
            while True:
                try:
                    step = self._steps(step)
                    break
                except RollBack as request:
                    with self.goodput.during("restore"):
                        step = self._roll_back(*request.args)
            for hook in self.hooks:
                hook.at_end(self, step)
            if not self.saved(step):
                kept = self.checkpointer.steps()
                raise LastStepNotSavedError(f"the last step was not saved; checkpoints: {kept or 'none'}")
            return self.agreed["stop"] or distributed.greatest(next(iter(self.stop), 0)) or None

    @property
    def stopping(self) -> bool:
        """Whether a signal is to end this run, which is of one process: several have to agree first."""
        return jax.process_count() == 1 and bool(self.stop)

    def _roll_back(self, bad_step: int) -> int:
        """Goes back to the newest checkpoint, or to the start where there is none, for a course of the run in which
        the batch of `bad_step` never was. Returns the step that the run goes on from."""
        bad_batch = self.batch_order.batch_after(bad_step - 1)
        # The checkpoint may be older than the roll backs before this one: what they left out stays out.
        left_out = (*self.batch_order.left_out, bad_batch)
        self.saved(bad_step)  # a checkpoint that is being written counts
        if distributed.from_primary(bool(self.checkpointer.steps())):
            step = self._restore()
            self.batch_order = self.batch_order.without(*left_out)
        else:
            step = 0
            self.batch_order = self.batch_order.without(*left_out)
            self.goodput.go_back({})
            self.writer.resume(step)
            self._initialize()
        for hook in self.hooks:
            hook.on_roll_back(self, step)
        again = bad_step - 1 - step
        self.progress.print(
            f"rolled back to step {step}; batch {bad_batch} is left out, and the {again} batches before it come again"
        )
        return step

    def _steps(self, step: int) -> int:
        buffer = MetricsBuffer()
        batches = self.data.train_iterator(step, self.program.rows, self.batch_order)
        try:
            self.goodput.enter("step")
            while step < self.options.max_steps and not self.agreed["stop"]:
                step += 1
                for hook in self.hooks:
                    hook.before_step(self, step)
                with self.goodput.during("input"):
                    _, batch = next(batches)
                self._begun = True
                self.state, metrics = self.program.step(self.state, self.program.put(batch))
                votes = {"stop": self.stop[0] if self.stop else 0, "save": int(self._wishes_save())}
                if jax.process_count() == 1:
                    self.agreed = votes
                else:
                    metrics = {**metrics, **self.ballot.cast(votes, after=metrics["loss"])}
                buffer.put(step, metrics)
                # Waits for the step before this one, which bounds how far Python runs ahead of the device.
                self._metrics(buffer.take(keep=1))
                self.save_is_due = step % self.options.save_every == 0 or bool(self.agreed["save"])
                if self.save_is_due:
                    # It waits for this step anyway; if a kill leaves nothing but the checkpoint, its row is needed.
                    self._metrics(buffer.take(keep=0))
                for hook in self.hooks:
                    hook.after_step(self, step)
            self._metrics(buffer.take(keep=0))
        finally:
            batches.close()
            self.goodput.enter("evaluate")
        return step

    def _metrics(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in rows:
            self.agreed = {name: int(metrics.pop(name, vote)) for name, vote in self.agreed.items()}
            self.pulse.note(step=step, loss=metrics["loss"])
            for hook in self.hooks:
                hook.on_metrics(self, step, metrics)

    def _wishes_save(self) -> bool:
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


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs on disk, so that the next start does not compile again."""
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
