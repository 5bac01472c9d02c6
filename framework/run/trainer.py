"""Trainer: the training loop. Dispatches steps, calls the hooks between them, stops, and rolls back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

import jax

from plimsoll.framework.checkpoint.replicas import ReplicaMismatchError
from plimsoll.framework.metrics.throughput import MetricsBuffer
from plimsoll.framework.plan.memory_budget import MemoryNeed
from plimsoll.framework.processes import distributed
from plimsoll.framework.run.hooks import (
    CheckReplicas,
    Evaluate,
    Guard,
    Hook,
    KeepBest,
    NonFiniteError,
    Prediction,
    Profile,
    Report,
    RollBack,
    Save,
    Stop,
)
from plimsoll.framework.run.run import Run
from plimsoll.framework.terminal.interrupts import stop_signals
from plimsoll.framework.terminal.phases import SHORT, phase


class LastStepNotSavedError(RuntimeError):
    """The run is over, but its last checkpoint is not on disk."""


class Trainer:
    """The training loop of one run.

    Args:
        run: run to train; it holds the state.
        need: predicted memory of the step; after the first steps it is shown next to the measured memory.
        hooks: the user's own hooks; they are called after the built-in hooks.
    """

    def __init__(self, run: Run, need: MemoryNeed, hooks: Sequence[Hook] = ()):
        self.run = run
        # The order matters: Guard ends the run or rolls it back before anything from a bad step is written, and
        # CheckReplicas detects replicas that differ before Save writes them. KeepBest and Stop read the evaluation, and
        # Save stores what they have counted.
        self.hooks: list[Hook] = [
            Guard(),
            Report(),
            Evaluate(),
            KeepBest(),
            Stop(),
            CheckReplicas(),
            Save(),
            Profile(),
            Prediction(need),
            *hooks,
        ]
        self.ballot = distributed.Ballot(run.program.mesh)
        # Values that the processes have agreed on: the signal that ends the run, whether to save by the clock or for a
        # hook, whether the time of trainer.stop is over, and whether a hook has stopped the run.
        self.agreed = {"stop": 0, "save": 0, "clock": 0, "end": 0}
        # Whether a step was trained that a signal would lose.
        self._begun = False
        # The step number of the run's state, and the metrics not yet passed to the hooks.
        self._step = 0
        self._buffer = MetricsBuffer()

    def train(self, step: int) -> int | None:
        """Train from `step` to max_steps.

        A signal that one process receives stops all processes after the same step, and so does a hook's `run.stop`. An
        error of the user's code (a hook, a reward, a data source) ends the run after a save. With several processes
        there is no such save: each would have to take part in it, and another process may not have hit the error.

        Returns:
            The signal that stopped training early, after saving; None at the end of the run.

        Raises:
            LastStepNotSavedError: the checkpoint of the last step is not on disk.
            NonFiniteError: loss or gradients were not finite, and learner.nonfinite ended the run.
            ReplicaMismatchError: copies of the state differ.
        """
        run = self.run
        run.use_program(run.get_stage(step).program)
        with run.goodput.during("compile"):
            # Compile before the first batch is read; no process continues until all have compiled.
            run.program.backend.compile()
            distributed.barrier("compiled")
            if run.data.validation_names:
                # Compile now, while there are no steps to lose if the user interrupts the compiler.
                with phase("compiling the evaluation", patience=SHORT):
                    run.program.compile_evaluation(run.state)
        with stop_signals(lambda: self._begun) as run.signals:
            first_step = self._step = step
            try:
                for hook in self.hooks:
                    hook.at_start(run, step)
                while True:
                    try:
                        step = self._run_steps(step)
                        break
                    except RollBack as request:
                        with run.goodput.during("restore"):
                            step = self._roll_back(*request.args)
            except (NonFiniteError, ReplicaMismatchError, jax.errors.JaxRuntimeError):
                raise
            except Exception:
                if jax.process_count() == 1:
                    self._save_after_error(first_step)
                raise
            if run.stop_reason is not None:
                run.progress.print(f"step {step}: stopped early: {run.stop_reason}")
            for hook in self.hooks:
                hook.at_end(run, step)
            with phase("waiting for the last checkpoint to be written", patience=SHORT):
                is_saved = run.wait_until_saved(step)
            if not is_saved:
                saved_steps = run.checkpointer.steps()
                raise LastStepNotSavedError(f"the last step was not saved; checkpoints: {saved_steps or 'none'}")
            if self.agreed["stop"]:
                return self.agreed["stop"]
            # A signal may arrive after the last vote, because evaluating and saving take a while.
            last_signal = distributed.reduce_max(next(iter(run.signals), 0))
            return last_signal or None

    def _save_after_error(self, first_step: int) -> None:
        """Save the state after the last step, if a step was taken and the state is intact."""
        run = self.run
        is_whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(run.running_state))
        if self._step == first_step or not is_whole:
            return
        # The hook itself may have raised the error.
        with suppress(Exception):
            self._metrics(self._buffer.take(keep=0))
        if self._step not in run.checkpointer.steps():
            run.save(self._step)
        if run.wait_until_saved(self._step):
            run.progress.print(f"step {self._step} was saved; fix the error below, then run the same command to resume")

    def _roll_back(self, bad_step: int) -> int:
        """Go back to the newest checkpoint, or to the start if there is none, and leave out the batch of `bad_step`.

        Returns:
            The step that the run continues from.
        """
        run = self.run
        bad_batch = run.batch_order.batch_after(bad_step - 1)
        # The checkpoint may be older than earlier rollbacks: the batches they left out stay left out.
        left_out = (*run.batch_order.left_out, bad_batch)
        # Wait for a checkpoint that is being written, so that it counts.
        run.wait_until_saved(bad_step)
        # All processes must take the same branch, even if they see different directory contents.
        if distributed.broadcast_from_primary(bool(run.checkpointer.steps())):
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
            f"and the {num_repeated} batches before it are repeated"
        )
        return step

    def _run_steps(self, step: int) -> int:
        """Train from `step` until max_steps or a stop; returns the last step. Raises RollBack if a hook requests it."""
        run = self.run
        first_report = min(step - step % run.options.log_every + run.options.log_every, run.options.max_steps)
        # A rollback may have gone back to an earlier stage.
        run.use_program(run.get_stage(step).program)
        # The first line about a step may take minutes, and ends this phase. Later lines come at a known pace.
        with ExitStack() as until_reported:
            first_steps = until_reported.enter_context(phase("training the first steps", patience=1.0))
            buffer = self._buffer = MetricsBuffer()
            batches = run.data.train_iterator(step, run.program.rows, run.batch_order)
            border = run.data.find_border(step, run.batch_order)
            try:
                run.goodput.enter("step")
                while step < run.options.max_steps and not self.agreed["stop"] and run.stop_reason is None:
                    if step == border:
                        # The next batch may have another shape, and this process other rows of it.
                        batches.close()
                        self._metrics(buffer.take(keep=0))
                        self._enter_stage(step)
                        batches = run.data.train_iterator(step, run.program.rows, run.batch_order)
                        border = run.data.find_border(step, run.batch_order)
                    step += 1
                    if step <= first_report:
                        first_steps.detail = f"step {step} of {first_report}"
                    for hook in self.hooks:
                        hook.before_step(run, step)
                    with run.goodput.during("input"):
                        _, batch = next(batches)
                    self._begun = True
                    metrics = run.take_step(batch)
                    self._step = step
                    buffer.put(step, self._with_votes(metrics))
                    # The line comes one step late.
                    if step > first_report:
                        until_reported.close()
                    # Wait for the previous step, which bounds how far Python runs ahead of the device.
                    self._metrics(buffer.take(keep=1))
                    self._take_votes()
                    run.save_is_due = step % run.options.save_every == 0 or bool(self.agreed["save"])
                    if run.save_is_due or (run.best_metric is not None and Evaluate.is_due(run, step)):
                        # Saving waits for this step anyway. If only the checkpoint survives a kill, its row of metrics
                        # is needed.
                        self._metrics(buffer.take(keep=0))
                    run.throughput.step()
                    for hook in self.hooks:
                        hook.after_step(run, step)
                    if jax.process_count() == 1:
                        self._serve_hooks(buffer, step)
                    if run.stopping:
                        # Do not train one more step: an evaluation that the signal interrupted belongs to this one.
                        self.agreed["stop"] = next(iter(run.signals))
                until_reported.close()
                self._metrics(buffer.take(keep=0))
            finally:
                batches.close()
                run.goodput.enter("evaluate")
        return step

    def _enter_stage(self, step: int) -> None:
        """Continue with the stage that starts after `step`. Collective if its batches have another shape."""
        run = self.run
        stage_program = run.get_stage(step)
        run.progress.print(f"step {step}: {stage_program.label} begins")
        if not run.use_program(stage_program.program):
            return
        with run.goodput.during("compile"):
            # The step is compiled already; see `_check_memory`.
            run.program.backend.compile()
            distributed.barrier("compiled a stage")
            if run.data.validation_names:
                with phase("compiling the evaluation", patience=SHORT):
                    run.program.compile_evaluation(run.state)

    def _with_votes(self, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Add this process's votes on stopping and saving to the metrics of the step.

        With several processes the result arrives with the metrics, one step late, so that all processes learn it
        after the same step.
        """
        run = self.run
        votes = {
            "stop": next(iter(run.signals), 0),
            "save": int(run.timed_save_is_due() or run.save_is_requested),
            "clock": int(run.wall_clock_is_over()),
            "end": int(run.stop_request is not None),
        }
        run.save_is_requested = False
        if jax.process_count() == 1:
            self.agreed = votes
            return metrics
        cast_votes = self.ballot.cast(votes, after=metrics["loss"])
        return {**metrics, **cast_votes}

    def _take_votes(self) -> None:
        """Set the reason why the run ends if the processes have agreed that it does. Collective in that case."""
        run = self.run
        if run.stop_reason is not None:
            return
        if self.agreed["end"]:
            run.stop_reason = distributed.broadcast_first(run.stop_request)
        elif self.agreed["clock"]:
            run.stop_reason = f"the run has taken {run.options.stop.wall_clock} (trainer.stop.wall_clock)"

    def _serve_hooks(self, buffer: MetricsBuffer, step: int) -> None:
        """Save and stop after this step if a hook of this single process has asked for it."""
        run = self.run
        if run.stop_request is not None and run.stop_reason is None:
            run.stop_reason = run.stop_request
        if not run.save_is_requested:
            return
        run.save_is_requested = False
        self._metrics(buffer.take(keep=0))
        run.save_is_due = True
        for hook in self.hooks:
            if isinstance(hook, CheckReplicas | Save):
                hook.after_step(run, step)

    def _metrics(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        """Remove the votes from the metrics that have arrived, and pass the rest to the hooks."""
        for step, metrics in rows:
            for name, vote in self.agreed.items():
                self.agreed[name] = int(metrics.pop(name, vote))
            self.run.pulse.note(step=step, loss=metrics["loss"])
            for hook in self.hooks:
                hook.on_metrics(self.run, step, metrics)
