"""Hooks: what happens between steps. A short list, run in order: guard, report, evaluate, save, profile.

A hook sees the run through `Trainer` and a few moments: before and after a step is dispatched, when the metrics of an
earlier step arrive, and at the end. May import: everything in framework but trainer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax

from framework.metrics.memory import memory_in_use
from framework.metrics.throughput import Throughput
from framework.plan.guard import Need, compare

if TYPE_CHECKING:
    from framework.trainer import Trainer

Row = dict[str, float]


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite, and the config says that this ends the run."""


class RollBack(Exception):
    """Loss or gradients of `step` were not finite, and the config says to go back to the last checkpoint."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


class Hook:
    """Does nothing, at every moment."""

    def before_step(self, run: Trainer, step: int) -> None:
        """Step `step` is about to be dispatched."""

    def after_step(self, run: Trainer, step: int) -> None:
        """Step `step` was dispatched; run.state is its result."""

    def on_metrics(self, run: Trainer, step: int, metrics: Row) -> None:
        """The metrics of `step` have arrived, one step late."""

    def at_end(self, run: Trainer, step: int) -> None:
        """The last step is done, or the run was asked to stop."""


class Guard(Hook):
    """Acts on steps that were not finite: they updated nothing, and were counted in the state."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.rollbacks = 0

    def on_metrics(self, run: Trainer, step: int, metrics: Row) -> None:
        """Counts, and stops or rolls back as learner.nonfinite says."""
        if not metrics["skipped"]:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        policy, limit = run.experiment.learner.nonfinite, run.experiment.learner.max_nonfinite
        moved = _moved(run, int(metrics.get("updated_units", 0)))
        what = f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; {moved} updated"
        run.progress.print(what)
        if policy == "stop":
            raise NonFiniteError(f"{what}; stopped (learner.nonfinite = stop)")
        if policy == "rollback":
            self.rollbacks += 1
            if self.rollbacks > limit:
                raise NonFiniteError(f"{what}; stopped after {limit} rollbacks (learner.max_nonfinite)")
            raise RollBack(step)
        if self.in_a_row >= limit:
            raise NonFiniteError(f"{what}; stopped after {self.in_a_row} such steps in a row (learner.max_nonfinite)")


def _moved(run: Trainer, count: int) -> str:
    """What an update in the backward pass had changed when it met the first gradient that is not finite."""
    units = run.experiment.model.stack.num_units
    if count == 0:
        return "nothing was"
    last = f"units {units - 1} to {max(units - count + 1, 0)} of the stack" if count > 1 else ""
    return " and ".join(part for part in ("the head", last) if part) + " had been"


class Report(Hook):
    """Writes and shows metrics."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput

    def after_step(self, run: Trainer, step: int) -> None:
        """Counts the step for the rates."""
        self.throughput.step()

    def on_metrics(self, run: Trainer, step: int, metrics: Row) -> None:
        """Every log_every steps, and at the last one."""
        if step % run.options.log_every and step != run.options.max_steps:
            return
        row = {f"train/{name}": value for name, value in metrics.items()}
        row |= self.throughput.metrics() | memory_in_use(run.program.mesh.local_devices).metrics()
        run.writer.write(step, row)
        run.progress.update(step, row)


class Evaluate(Hook):
    """Evaluates every validation set: its mean loss, and bits per byte where the tokens stand for text."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput

    def after_step(self, run: Trainer, step: int) -> None:
        """Every eval_every steps, on at most eval_batches batches."""
        every = run.options.eval_every
        if every and step % every == 0 and step < run.options.max_steps:
            with self.throughput.paused():
                self.evaluate(run, step, run.options.eval_batches)

    def at_end(self, run: Trainer, step: int) -> None:
        """On all batches, if the run has come to its end."""
        if step == run.options.max_steps:
            self.evaluate(run, step, None)

    def evaluate(self, run: Trainer, step: int, limit: int | None) -> None:
        """Writes `eval/SET/loss` and `eval/SET/bits_per_byte`; `eval_ema/...` with averaged weights."""
        row: Row = {}
        for averaged in [False, True] if run.state["ema"] else [False]:
            for name in run.data.validation_names:
                prefix = f"{'eval_ema' if averaged else 'eval'}/{name}"
                run.progress.status(f"evaluating {name}")
                row |= {f"{prefix}/{key}": v for key, v in self.evaluate_set(run, name, limit, averaged).items()}
        run.progress.status("")
        if row:
            run.writer.write(step, row)
            run.evaluation = row
            losses = (f"{key} {value:.4f}" for key, value in row.items() if not key.endswith("tokens"))
            run.progress.print(f"step {step}: " + ", ".join(losses))

    @staticmethod
    def evaluate_set(run: Trainer, name: str, limit: int | None, averaged: bool) -> Row:
        """One set: {"loss": nats per token, "tokens": ..., "bits_per_byte": ...}."""
        tokenizer = run.data.tokenizer
        totals: dict[str, float] = {"nll": 0.0, "tokens": 0.0}
        pending: list[Any] = []

        def drain(keep: int) -> None:
            done = [pending.pop(0) for _ in range(len(pending) - keep)]
            for sums in jax.device_get(done):
                for key, value in sums.items():
                    totals[key] = totals.get(key, 0.0) + float(value)

        with run.data.eval_batches(name, run.program.rows, limit) as batches:
            for batch in batches:
                arrays: dict[str, Any] = dict(batch)
                if tokenizer.has_text:
                    arrays["bytes"] = tokenizer.byte_lengths[arrays["targets"]] * arrays["weights"]
                pending.append(run.program.evaluate(run.state, run.program.put(arrays), averaged=averaged))
                drain(keep=1)  # one batch behind: the device always has work, and memory is bounded
        drain(keep=0)
        row = {"loss": totals["nll"] / max(totals["tokens"], 1.0), "tokens": totals["tokens"]}
        if totals.get("bytes"):
            row["bits_per_byte"] = totals["nll"] / math.log(2) / totals["bytes"]
        return row


class Save(Hook):
    """Saves checkpoints, and goes on without one when there is no room for it."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self.last: int | None = None

    def after_step(self, run: Trainer, step: int) -> None:
        """Every save_every steps."""
        if step % run.options.save_every == 0:
            with self.throughput.paused():
                self.save(run, step)

    def at_end(self, run: Trainer, step: int) -> None:
        """The last step, finished or interrupted."""
        self.save(run, step)

    def save(self, run: Trainer, step: int) -> None:
        """Hands the state to the checkpointer, which writes it while training goes on."""
        if step != self.last:
            run.progress.status("saving")
            run.save(step)
            run.progress.status("")
            self.last = step


class Prediction(Hook):
    """Shows, after the second step, what memory was predicted and what is measured."""

    def __init__(self, need: Need) -> None:
        self.need, self.steps = need, 0

    def on_metrics(self, run: Trainer, step: int, metrics: Row) -> None:
        """The second step has ended when its metrics are here: buffers of compilation and initialization are gone."""
        self.steps += 1
        if self.steps == 2:
            run.progress.print(compare(self.need, memory_in_use(run.program.mesh.local_devices)))


class Profile(Hook):
    """Traces the chosen steps into WORKDIR/profile, to be opened in TensorBoard, XProf or Perfetto."""

    def __init__(self) -> None:
        self.on = False

    def before_step(self, run: Trainer, step: int) -> None:
        """Starts before the first chosen step."""
        if run.options.profile and step == run.options.profile[0]:
            jax.block_until_ready(run.state)
            jax.profiler.start_trace(str(run.workdir.path / "profile"))
            self.on = True

    def after_step(self, run: Trainer, step: int) -> None:
        """Stops after the last chosen step."""
        if self.on and step >= run.options.profile[1]:
            self.stop(run)

    def at_end(self, run: Trainer, step: int) -> None:
        """A run that ends early still leaves a whole trace."""
        if self.on:
            self.stop(run)

    def stop(self, run: Trainer) -> None:
        """Waits for the device, so that the trace holds whole steps."""
        jax.block_until_ready(run.state)
        jax.profiler.stop_trace()
        self.on = False
        run.progress.print(f"profile of steps {run.options.profile}: {run.workdir.path / 'profile'}")
