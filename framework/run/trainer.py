"""Trainer: the training loop. It dispatches steps, calls the hooks between them, stops and rolls back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

import jax

from framework.checkpoint.replicas import ReplicaMismatchError
from framework.metrics.throughput import MetricsBuffer
from framework.plan.guard import Need
from framework.processes import distributed
from framework.run.hooks import (
    Agree,
    Evaluate,
    Guard,
    Hook,
    NonFiniteError,
    Prediction,
    Profile,
    Report,
    RollBack,
    Save,
)
from framework.run.run import Run
from framework.terminal.interrupts import stop_signals
from framework.terminal.phases import SHORT, phase


class LastStepNotSavedError(RuntimeError):
    """The run is over, and its last checkpoint is not on disk."""


class Trainer:
    """The loop of one run.

    Args:
        run: has its state.
        need: what the step was predicted to need; after the first steps it is shown beside what was measured.
        hooks: the user's own; they are asked after those that every run has.
    """

    def __init__(self, run: Run, need: Need, hooks: Sequence[Hook] = ()):
        self.run = run
        # The order counts: Guard ends the run or rolls it back before anything is written of a bad
        # step, and Agree finds replicas that differ before Save writes them.
        self.hooks: list[Hook] = [
            Guard(),
            Report(),
            Evaluate(),
            Agree(),
            Save(),
            Profile(),
            Prediction(need),
            *hooks,
        ]
        self.ballot = distributed.Ballot(run.program.mesh)
        # What the processes have agreed on: the signal that ends the run, whether to save by the clock.
        self.agreed = {"stop": 0, "save": 0}
        # Whether a step was trained, which a signal would lose.
        self._begun = False
        # The step that `run.state` is of, and the metrics that have not been handed to the hooks.
        self._step = 0
        self._buffer = MetricsBuffer()

    def train(self, step: int) -> int | None:
        """Trains from `step` to max_steps. Returns the signal that stopped it early, after saving; None at its end. A
        signal that one process gets stops all of them, after the same step.

        An error of the user's code (a hook, a reward, a source of data) ends the run after a save. Of several processes
        each would have to take part in that, and another one may not have met the error: there nothing is saved.

        Raises:
            LastStepNotSavedError: the checkpoint of the last step is not on disk.
            NonFiniteError: loss or gradients were not finite, and learner.nonfinite ended the run.
            ReplicaMismatchError: copies of the state differ.
        """
        run = self.run
        self._compile()
        with stop_signals(lambda: self._begun) as run.signals:
            self._step = step
            try:
                for hook in self.hooks:
                    hook.at_start(run, step)
                step = self._train_through_roll_backs(step)
            except (NonFiniteError, ReplicaMismatchError, jax.errors.JaxRuntimeError):
                raise
            except Exception:
                if jax.process_count() == 1:
                    self._save_after_error(step)
                raise
            for hook in self.hooks:
                hook.at_end(run, step)
            with phase("waiting for the last checkpoint to be written", patience=SHORT):
                is_saved = run.saved(step)
            if not is_saved:
                saved_steps = run.checkpointer.steps()
                raise LastStepNotSavedError(f"the last step was not saved; checkpoints: {saved_steps or 'none'}")
            if self.agreed["stop"]:
                return self.agreed["stop"]
            # A signal may have come after the last vote: evaluating and saving take a while.
            last_signal = distributed.greatest(next(iter(run.signals), 0))
            return last_signal or None

    def _save_after_error(self, first_step: int) -> None:
        """Saves the state as it was after the last step, if a step was taken and the state is whole."""
        run = self.run
        is_whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(run.state))
        if self._step == first_step or not is_whole:
            return
        # A hook may be what has failed.
        with suppress(Exception):
            self._metrics(self._buffer.take(keep=0))
        if self._step not in run.checkpointer.steps():
            run.save(self._step)
        if run.saved(self._step):
            run.progress.print(
                f"step {self._step} was saved; once the error below is repaired, the same command goes on"
            )

    def _compile(self) -> None:
        run = self.run
        with run.goodput.during("compile"):
            # Before the first batch is read, and in all processes before any of them goes on.
            run.program.compile()
            distributed.barrier("compiled")
            if run.data.validation_names:
                # Before there are steps to lose: who interrupts a compiler need not wait for it.
                with phase("compiling the evaluation", patience=SHORT):
                    run.program.compile_evaluation(run.state)

    def _train_through_roll_backs(self, step: int) -> int:
        """Trains until max_steps or a stop, from an earlier step again after each roll back; returns the last step."""
        while True:
            try:
                return self._steps(step)
            except RollBack as request:
                with self.run.goodput.during("restore"):
                    step = self._roll_back(*request.args)

    def _roll_back(self, bad_step: int) -> int:
        """Goes back to the newest checkpoint, or to the start where there is none, for a course of the run in which
        the batch of `bad_step` never was. Returns the step that the run goes on from."""
        run = self.run
        bad_batch = run.batch_order.batch_after(bad_step - 1)
        # The checkpoint may be older than the roll backs before this one: what they left out stays out.
        left_out = (*run.batch_order.left_out, bad_batch)
        # A checkpoint that is being written counts.
        run.saved(bad_step)
        # The processes must take the same branch, whatever each sees of the directory.
        if distributed.from_primary(bool(run.checkpointer.steps())):
            step = run.restore()
            run.batch_order = run.batch_order.without(*left_out)
        else:
            step = 0
            run.batch_order = run.batch_order.without(*left_out)
            run.goodput.go_back({})
            run.writer.resume(step)
            run.initialize()
        for hook in self.hooks:
            hook.on_roll_back(run, step)
        num_repeated = bad_step - 1 - step
        run.progress.print(
            f"rolled back to step {step}; batch {bad_batch} is left out, "
            f"and the {num_repeated} batches before it come again"
        )
        return step

    def _steps(self, step: int) -> int:
        """Trains from `step` until max_steps or a stop; returns the last step. Raises RollBack: a hook asks for it."""
        with ExitStack() as until_reported:
            return self._reported_steps(step, until_reported)

    def _reported_steps(self, step: int, until_reported: ExitStack) -> int:
        """`_steps`; what is open in `until_reported` ends with the first line about a step."""
        run = self.run
        # Later lines come at a pace that is known by then; the first one may take minutes.
        first_steps = until_reported.enter_context(phase("training the first steps", patience=1.0))
        first_report = min(step - step % run.options.log_every + run.options.log_every, run.options.max_steps)
        buffer = self._buffer = MetricsBuffer()
        batches = run.data.train_iterator(step, run.program.rows, run.batch_order)
        try:
            run.goodput.enter("step")
            while step < run.options.max_steps and not self.agreed["stop"]:
                step += 1
                if step <= first_report:
                    first_steps.detail = f"step {step} of {first_report}"
                for hook in self.hooks:
                    hook.before_step(run, step)
                with run.goodput.during("input"):
                    _, batch = next(batches)
                self._begun = True
                run.state, metrics = run.program.step(run.state, run.program.put(batch))
                self._step = step
                buffer.put(step, self._with_votes(metrics))
                # The line comes a step late.
                if step > first_report:
                    until_reported.close()
                # Waits for the step before this one, which bounds how far Python runs ahead of the device.
                self._metrics(buffer.take(keep=1))
                run.save_is_due = step % run.options.save_every == 0 or bool(self.agreed["save"])
                if run.save_is_due:
                    # It waits for this step anyway; if a kill leaves nothing but the checkpoint, its row is needed.
                    self._metrics(buffer.take(keep=0))
                for hook in self.hooks:
                    hook.after_step(run, step)
                if run.stopping:
                    # Not after one more step: an evaluation that the signal has interrupted is of this one.
                    self.agreed["stop"] = next(iter(run.signals))
            until_reported.close()
            self._metrics(buffer.take(keep=0))
        finally:
            batches.close()
            run.goodput.enter("evaluate")
        return step

    def _with_votes(self, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Casts this process's votes on stopping and saving. Of several processes the result comes with the metrics of
        the step, one step late, so that all of them learn it after the same step."""
        run = self.run
        votes = {
            "stop": next(iter(run.signals), 0),
            "save": int(run.wishes_save()),
        }
        if jax.process_count() == 1:
            self.agreed = votes
            return metrics
        cast_votes = self.ballot.cast(votes, after=metrics["loss"])
        return {**metrics, **cast_votes}

    def _metrics(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        """Takes the votes out of metrics that have arrived, and hands the rest to the hooks."""
        for step, metrics in rows:
            for name, vote in self.agreed.items():
                self.agreed[name] = int(metrics.pop(name, vote))
            self.run.pulse.note(step=step, loss=metrics["loss"])
            for hook in self.hooks:
                hook.on_metrics(self.run, step, metrics)
