"""Hooks: what happens between steps. They run in order: guard, report, evaluate, agree, save, profile, prediction, and
then the user's own (`config.trainer.hooks`).

A hook sees the run (`Run`) at a few moments: before and after a step is dispatched, when the metrics of an
earlier step arrive, and at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import jax

from framework.checkpoint import replicas
from framework.config import Config, ConfigError
from framework.inference.held_out import evaluated, share_of
from framework.metrics.memory import memory_in_use
from framework.models.chain import Chain
from framework.plan.guard import Need, compare
from framework.run.run import Run
from framework.terminal.phases import SHORT, phase

# Metrics of one step by name, as they are written to a row of metrics.jsonl.
Row = dict[str, float]
# What the line about an evaluation leaves out: they are in the row, and are no losses.
_NOT_LOSSES = ("tokens", "images", "nll")
# The first steps still have buffers of compilation and initialization.
_STEPS_BEFORE_MEASURING = 2


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite, and the config says that this ends the run."""


class RollBack(Exception):
    """Loss or gradients of a step, its only argument, were not finite: the config says to go back to a checkpoint."""


class Hook:
    """Does nothing, at every moment."""

    def at_start(self, run: Run, step: int) -> None:
        """The run begins, at step 0, or goes on from `step`; everything is compiled."""

    def before_step(self, run: Run, step: int) -> None:
        """Step `step` is about to be dispatched."""

    def after_step(self, run: Run, step: int) -> None:
        """Step `step` was dispatched; run.state is its result."""

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        """The metrics of `step` have arrived, one step late."""

    def on_roll_back(self, run: Run, step: int) -> None:
        """The run is at `step` again, an earlier one; what came after it is forgotten."""

    def at_end(self, run: Run, step: int) -> None:
        """The last step is done, or the run was asked to stop."""


def own_hooks(configs: list[Config]) -> list[Hook]:
    """The user's hooks. Raises ConfigError: one is no Hook."""
    hooks = [config.instantiate() for config in configs]
    for index, hook in enumerate(hooks):
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"expected a subclass of framework.run.hooks.Hook, given {type(hook).__name__}",
                path=f"trainer.hooks.{index}",
            )
    return hooks


class Guard(Hook):
    """Acts as learner.nonfinite says on steps that were not finite: they updated nothing, and the state counts them."""

    in_a_row = 0
    rollbacks = 0

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        self.in_a_row = self.in_a_row + 1 if metrics["skipped"] else 0
        if not metrics["skipped"]:
            return
        learner = run.experiment.learner
        policy = learner.nonfinite
        limit = learner.max_nonfinite
        num_updated = int(metrics.get("updated_units", 0))
        moved = _moved(run.experiment.model, num_updated)
        message = f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; {moved} updated"
        # A finite step that was skipped is a spike. The policy is for steps that are not finite: a
        # spike is only counted.
        is_spike = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        if is_spike:
            message = f"{message} (a spike: learner.spike = {learner.spike})"
        run.progress.print(message)
        if policy == "stop" and not is_spike:
            raise NonFiniteError(f"{message}; stopped (learner.nonfinite = stop)")
        if policy == "rollback" and not is_spike:
            self.rollbacks += 1
            if self.rollbacks > limit:
                raise NonFiniteError(f"{message}; stopped after {limit} rollbacks (learner.max_nonfinite)")
            raise RollBack(step)
        if self.in_a_row >= limit:
            count = self.in_a_row
            raise NonFiniteError(f"{message}; stopped after {count} such steps in a row (learner.max_nonfinite)")


def _moved(model: Chain, count: int) -> str:
    """Names the parts of the model that an update in the backward pass had changed before it met a gradient that is
    not finite: the last `count` units and stages. "nothing was" with any other schedule."""
    if not count:
        return "nothing was"
    if "head" not in model.stages:
        return f"the last {count} of the model's units and stages had been"
    if count == 1:
        return "the head had been"
    num_units = sum(stack.num_units for stack in model.stacks.values())
    last_unit = num_units - 1
    # The backward pass begins with the head, which counts as one.
    first_unit = max(num_units - count + 1, 0)
    return f"the head and units {last_unit} to {first_unit} of the stack had been"


class Report(Hook):
    """Writes and shows metrics every log_every steps, and at the last one."""

    # Whether a row was written.
    has_written = False

    def after_step(self, run: Run, step: int) -> None:
        run.throughput.step()

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        if step % run.options.log_every != 0 and step != run.options.max_steps:
            return
        row = {f"train/{name}": value for name, value in metrics.items()}
        speeds = run.throughput.metrics()
        memory = memory_in_use(run.program.mesh.local_devices)
        row |= speeds | memory.metrics()
        row["run/goodput"] = run.goodput.fraction()
        # tokens_per_second or images_per_second: the sign of life has it under that name, too.
        speed_name = f"{run.data.item}s_per_second"
        run.pulse.note(**{speed_name: row.get(f"train/{speed_name}")})
        # The first row loads the libraries that write it, which takes seconds.
        with nullcontext() if self.has_written else phase("writing the first metrics", patience=SHORT):
            run.writer.write(step, row)
        self.has_written = True
        run.progress.update(step, row)


class Evaluate(Hook):
    """Evaluates every validation set every eval_every steps and at the end, on at most eval_batches batches each."""

    def at_start(self, run: Run, step: int) -> None:
        # The run that saved this step may have been interrupted while it evaluated it.
        if step and run.evaluated_step != step:
            self.after_step(run, step)

    def after_step(self, run: Run, step: int) -> None:
        every = run.options.eval_every
        if every and step % every == 0 and step < run.options.max_steps:
            with run.throughput.paused(), run.goodput.during("evaluate"):
                self.evaluate(run, step)

    def at_end(self, run: Run, step: int) -> None:
        # A run that was killed after its last save and before its end may have evaluated that step already.
        if step == run.options.max_steps and run.evaluated_step != step:
            with run.goodput.during("evaluate"):
                # On the same batches as before, so that the last figure goes on the curve of the others. Whoever wants
                # the whole set may have it afterwards (`plimsoll evaluate --validation`): on a large set it takes
                # longer than many a run.
                self.evaluate(run, step)

    def evaluate(self, run: Run, step: int) -> None:
        """Writes `eval/SET/loss`, of text `eval/SET/bits_per_byte` too, ...; `eval_ema/...` with averaged weights."""
        row: Row = {}
        limit = run.options.eval_batches
        weight_kinds = [("eval", False)]
        if run.state["ema"]:
            weight_kinds.append(("eval_ema", True))

        def goes_on() -> bool:
            # A sign of life, as an evaluation may take longer than a hang is waited for.
            run.pulse.note()
            return not run.stopping

        for prefix, averaged in weight_kinds:
            for name in run.data.validation_names:
                summary = evaluated(run.program, run.state, name, limit=limit, averaged=averaged, goes_on=goes_on)
                # Part of an evaluation is not written: its numbers would be of fewer batches.
                if summary is None:
                    run.progress.print(f"step {step}: not evaluated, as the run is to stop")
                    return
                for key, value in summary.items():
                    row[f"{prefix}/{name}/{key}"] = value
        if not row:
            return
        run.writer.write(step, row)
        run.evaluation = row
        run.evaluated_step = step
        parts = []
        for name in run.data.validation_names:
            share = share_of(run.data, name, limit)
            if share:
                parts.append(f"{name}: {share}")
        run.progress.print(evaluation_line(step, row, parts))


def evaluation_line(step: int, row: Row, parts: Sequence[str] = ()) -> str:
    """What a person sees of an evaluation, on a line that stays.

    Args:
        step: the steps that were trained.
        row: the metrics of the evaluation.
        parts: of each validation set that was not evaluated as a whole, how much of it was.
    """
    figures = []
    for key, value in row.items():
        if not key.endswith(_NOT_LOSSES):
            # A perplexity is as exact as its loss with fewer digits behind the point.
            digits = 2 if key.endswith("/perplexity") else 4
            figures.append(f"{key} {value:.{digits}f}")
    line = f"step {step}: " + ", ".join(figures)
    return f"{line} ({', '.join(parts)})" if parts else line


class Agree(Hook):
    """Compares replicas every health.replica_check_every steps, and before what they hold is saved."""

    # The step whose replicas were compared last.
    checked: int | None = None

    def after_step(self, run: Run, step: int) -> None:
        every = run.experiment.health.replica_check_every
        if every and (step % every == 0 or run.save_is_due):
            self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        # The last step may have been checked already, as one that is saved.
        if step == self.checked or not run.experiment.health.replica_check_every:
            return
        with run.throughput.paused():
            replicas.check(run.state, step)
        self.checked = step

    def on_roll_back(self, run: Run, step: int) -> None:
        # The same step number is of another state from here on.
        self.checked = None


class Save(Hook):
    """Saves a checkpoint every save_every steps, when save_every_minutes are over, and of the last step, finished or
    interrupted. What was restored and has not moved since is not written again."""

    # The step that was saved last, and whether a step was trained since the start.
    last: int | None = None
    has_moved = False

    def after_step(self, run: Run, step: int) -> None:
        self.has_moved = True
        if run.save_is_due:
            with run.throughput.paused():
                self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        if not self.has_moved and step in run.checkpointer.steps():
            return
        if step != self.last:
            run.save(step)
            self.last = step

    def on_roll_back(self, run: Run, step: int) -> None:
        # A step after this one is to be saved when the run comes to it again.
        self.last = None


class Prediction(Hook):
    """Shows what memory was predicted and what is measured, once buffers of compilation and initialization are gone."""

    def __init__(self, need: Need) -> None:
        self.need = need
        self.steps = 0

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        self.steps += 1
        if self.steps == _STEPS_BEFORE_MEASURING:
            memory = memory_in_use(run.program.mesh.local_devices)
            run.progress.print(compare(self.need, memory))


class Profile(Hook):
    """Traces the chosen steps into WORKDIR/profile, for TensorBoard, XProf or Perfetto; a run that ends early leaves a
    whole trace too."""

    # Whether a trace is being taken.
    on = False

    def before_step(self, run: Run, step: int) -> None:
        if run.options.profile and step == run.options.profile[0]:
            # Waits for the steps before this one, so that the trace holds none of them.
            jax.block_until_ready(run.state)
            folder = run.workdir.path / "profile"
            jax.profiler.start_trace(str(folder))
            self.on = True

    def after_step(self, run: Run, step: int) -> None:
        if self.on and step >= run.options.profile[1]:
            self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        if not self.on:
            return
        # The last of the chosen steps may still be running: the trace is to hold all of it.
        jax.block_until_ready(run.state)
        self.on = False
        steps = run.options.profile
        try:
            jax.profiler.stop_trace()
        # A full disk, for one, is no reason to end a run.
        except (OSError, RuntimeError) as error:
            run.progress.print(f"the profile of steps {steps} was not written: {error}")
            return
        run.progress.print(f"profile of steps {steps}: {run.workdir.path / 'profile'}")

    def on_roll_back(self, run: Run, step: int) -> None:
        # A trace that is open would meet the start of another when its steps come again.
        self.at_end(run, step)
