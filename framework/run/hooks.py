"""Hooks: what happens between steps. A short list, run in order: guard, report, evaluate, agree, save, profile, and the
user's own (`config.trainer.hooks`).

A hook sees the run (`Run`) at a few moments: before and after a step is dispatched, when the metrics of an
earlier step arrive, and at the end.
"""

from __future__ import annotations

import math
from collections import Counter

import jax

from framework.checkpoint import replicas
from framework.config import Config, ConfigError
from framework.metrics.memory import memory_in_use
from framework.metrics.throughput import MetricsBuffer
from framework.models.chain import Chain
from framework.plan.guard import Need, compare
from framework.run.run import Run

Row = dict[str, float]


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite, and the config says that this ends the run."""


class RollBack(Exception):
    """Loss or gradients of a step, its only argument, were not finite: the config says to go back to a checkpoint."""


class Hook:
    """Does nothing, at every moment."""

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

    in_a_row = rollbacks = 0

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        self.in_a_row = self.in_a_row + 1 if metrics["skipped"] else 0
        if not metrics["skipped"]:
            return
        policy, limit = run.experiment.learner.nonfinite, run.experiment.learner.max_nonfinite
        moved = _moved(run.experiment.model, int(metrics.get("updated_units", 0)))
        what = f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; {moved} updated"
        if spike := math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            what = f"{what} (a spike: learner.spike = {run.experiment.learner.spike})"
        run.progress.print(what)
        if policy == "stop" and not spike:
            raise NonFiniteError(f"{what}; stopped (learner.nonfinite = stop)")
        if policy == "rollback" and not spike:
            self.rollbacks += 1
            if self.rollbacks > limit:
                raise NonFiniteError(f"{what}; stopped after {limit} rollbacks (learner.max_nonfinite)")
            raise RollBack(step)
        if self.in_a_row >= limit:
            raise NonFiniteError(f"{what}; stopped after {self.in_a_row} such steps in a row (learner.max_nonfinite)")


def _moved(model: Chain, count: int) -> str:
    """What an update in the backward pass had changed when it met the first gradient that is not finite."""
    if not count:
        return "nothing was"
    if "head" not in model.stages:
        return f"the last {count} of the model's units and stages had been"
    if count == 1:
        return "the head had been"
    units = sum(stack.num_units for stack in model.stacks.values())
    return f"the head and units {units - 1} to {max(units - count + 1, 0)} of the stack had been"


class Report(Hook):
    """Writes and shows metrics every log_every steps, and at the last one."""

    def after_step(self, run: Run, step: int) -> None:
        run.throughput.step()

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        if step % run.options.log_every == 0 or step == run.options.max_steps:
            row = {f"train/{name}": value for name, value in metrics.items()}
            row |= run.throughput.metrics() | memory_in_use(run.program.mesh.local_devices).metrics()
            row["run/goodput"] = run.goodput.fraction()
            speed = f"{run.data.item}s_per_second"
            run.pulse.note(**{speed: row.get(f"train/{speed}")})
            run.writer.write(step, row)
            run.progress.update(step, row)


class Evaluate(Hook):
    """Evaluates every validation set every eval_every steps, on at most eval_batches batches, and on all at the end."""

    def after_step(self, run: Run, step: int) -> None:
        every = run.options.eval_every
        if every and step % every == 0 and step < run.options.max_steps:
            with run.throughput.paused(), run.goodput.during("evaluate"):
                self.evaluate(run, step, run.options.eval_batches)

    def at_end(self, run: Run, step: int) -> None:
        if step == run.options.max_steps:
            with run.goodput.during("evaluate"):
                self.evaluate(run, step, None)

    def evaluate(self, run: Run, step: int, limit: int | None) -> None:
        """Writes `eval/SET/loss`, of text `eval/SET/bits_per_byte` too, ...; `eval_ema/...` with averaged weights."""
        row: Row = {}
        for averaged in [False, True] if run.state["ema"] else [False]:
            for name in run.data.validation_names:
                prefix = f"{'eval_ema' if averaged else 'eval'}/{name}"
                run.progress.status(f"evaluating {name}")
                found = self.evaluate_set(run, name, limit, averaged)
                if run.stopping:
                    run.progress.print(f"step {step}: not evaluated, as the run is to stop")
                    return
                row |= {f"{prefix}/{key}": v for key, v in found.items()}
        run.progress.status("")
        if row:
            run.writer.write(step, row)
            run.evaluation = row
            losses = (
                f"{key} {value:.4f}" for key, value in row.items() if not key.endswith(("tokens", "images", "nll"))
            )
            run.progress.print(f"step {step}: " + ", ".join(losses))

    @staticmethod
    def evaluate_set(run: Run, name: str, limit: int | None, averaged: bool) -> Row:
        """One set: what the model makes of its sums over it, "loss" among them."""
        buffer = MetricsBuffer()
        totals: Counter[str] = Counter()
        with run.data.eval_batches(name, run.program.rows, limit) as batches:
            for number, batch in enumerate(batches):
                buffer.put(number, run.program.evaluate(run.state, run.program.put(batch), averaged=averaged))
                run.pulse.note()  # a batch is a move
                if run.stopping:
                    return {}
                for _, sums in buffer.take(keep=1):  # one behind: the device always has work, and memory is bounded
                    totals.update(sums)
        for _, sums in buffer.take(keep=0):
            totals.update(sums)
        return run.experiment.model.summary(dict(totals))


class Agree(Hook):
    """Compares replicas every health.replica_check_every steps, and before what they hold is saved."""

    checked: int | None = None

    def after_step(self, run: Run, step: int) -> None:
        every = run.experiment.health.replica_check_every
        if every and (step % every == 0 or run.save_is_due):
            self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        if step != self.checked and run.experiment.health.replica_check_every:
            with run.throughput.paused():
                replicas.check(run.state, step)
            self.checked = step

    def on_roll_back(self, run: Run, step: int) -> None:
        self.checked = None  # the same number is of another state now


class Save(Hook):
    """Saves a checkpoint every save_every steps, when save_every_minutes are over, and of the last step, finished or
    interrupted. What was restored and has not moved since is not written again."""

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
        self.last = None  # a step after this one is to be saved when the run comes to it again


class Prediction(Hook):
    """Shows what memory was predicted and what is measured, once buffers of compilation and initialization are gone."""

    def __init__(self, need: Need) -> None:
        self.need, self.steps = need, 0

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        self.steps += 1
        if self.steps == 2:
            run.progress.print(compare(self.need, memory_in_use(run.program.mesh.local_devices)))


class Profile(Hook):
    """Traces the chosen steps into WORKDIR/profile, for TensorBoard, XProf or Perfetto; a run that ends early leaves a
    whole trace too."""

    on = False

    def before_step(self, run: Run, step: int) -> None:
        if run.options.profile and step == run.options.profile[0]:
            jax.block_until_ready(run.state)
            jax.profiler.start_trace(str(run.workdir.path / "profile"))
            self.on = True

    def after_step(self, run: Run, step: int) -> None:
        if self.on and step >= run.options.profile[1]:
            self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        if self.on:
            jax.block_until_ready(run.state)  # so that the trace holds whole steps
            self.on = False
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:  # a full disk, say: no reason to end a run
                run.progress.print(f"the profile of steps {run.options.profile} was not written: {error}")
                return
            run.progress.print(f"profile of steps {run.options.profile}: {run.workdir.path / 'profile'}")

    def on_roll_back(self, run: Run, step: int) -> None:
        self.at_end(run, step)  # a trace that is open would meet the start of another when its steps come again
