"""Hooks that run between training steps.

Order: guard, report, evaluate, keep best, stop, check replicas, save, profile, prediction, then the user's
(`config.trainer.hooks`). A hook gets the run (`Run`) at fixed points: before and after a step is dispatched, when the
metrics of an earlier step arrive, and at the end.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import jax

from plimsoll.framework.checkpoint import replicas
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.devices.allocator import release_freed_memory
from plimsoll.framework.inference.evaluation import describe_share, evaluate_set
from plimsoll.framework.metrics.memory import memory_in_use
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.plan.memory_budget import MemoryNeed, compare_with_measured
from plimsoll.framework.processes import distributed
from plimsoll.framework.run.best_metric import BestMetric, check_metric
from plimsoll.framework.run.run import Run
from plimsoll.framework.terminal.phases import SHORT, phase

# Metrics of one step by name, as written to a row of metrics.jsonl.
Row = dict[str, float]
# Omitted from the line about an evaluation: they are in the row but are not losses.
_NOT_LOSSES = ("tokens", "images", "nll")
# The first steps still have buffers of compilation and initialization.
_STEPS_BEFORE_MEASURING = 2


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite, and the config ends the run in that case."""


class RollBack(Exception):
    """Loss or gradients of a step, the only argument, were not finite, and the config requests a rollback."""


class Hook:
    """Base class of hooks; every method does nothing."""

    def at_start(self, run: Run, step: int) -> None:
        """Called when the run starts at step 0 or resumes from `step`; everything is compiled."""

    def before_step(self, run: Run, step: int) -> None:
        """Called before step `step` is dispatched."""

    def after_step(self, run: Run, step: int) -> None:
        """Called after step `step` was dispatched; run.state is its result."""

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        """Called when the metrics of `step` have arrived, one step late."""

    def on_roll_back(self, run: Run, step: int) -> None:
        """Called after a rollback to the earlier step `step`; everything after it is discarded."""

    def at_end(self, run: Run, step: int) -> None:
        """Called after the last step, or when the run was asked to stop."""


def build_user_hooks(configs: list[Config]) -> list[Hook]:
    """Build the user's hooks. Raises ConfigError if one is not a Hook."""
    hooks = [config.instantiate() for config in configs]
    for index, hook in enumerate(hooks):
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"expected a subclass of plimsoll.framework.run.hooks.Hook, given {type(hook).__name__}",
                path=f"trainer.hooks.{index}",
            )
    return hooks


class Guard(Hook):
    """Applies learner.nonfinite to steps that were not finite. Such steps update nothing, and the state counts them."""

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
        updated = _describe_updated(run.experiment.model, num_updated)
        message = f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; {updated} updated"
        # A finite step that was skipped is a spike. The policy covers only steps that are not finite, so a spike is
        # only counted.
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


def _describe_updated(model: Chain, count: int) -> str:
    """Name the parts of the model that were updated before a gradient was not finite.

    An update in the backward pass changes the last `count` layers and stages. Any other schedule changes nothing:
    "nothing was".
    """
    if not count:
        return "nothing was"
    if "head" not in model.stages:
        return f"the last {count} of the model's layers and stages were"
    if count == 1:
        return "the head was"
    num_repeats = sum(stack.num_repeats for stack in model.stacks.values())
    last_layer = num_repeats - 1
    # The backward pass starts with the head, which counts as one.
    first_layer = max(num_repeats - count + 1, 0)
    return f"the head and layers {last_layer} to {first_layer} of the stack were"


class Report(Hook):
    """Writes and shows metrics every log_every steps and at the last step."""

    # Whether a row was written.
    has_written = False

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        if step % run.options.log_every != 0 and step != run.options.max_steps:
            return
        row = {f"train/{name}": value for name, value in metrics.items()}
        speeds = run.throughput.metrics()
        memory = memory_in_use(run.program.mesh.local_devices)
        row |= speeds | memory.metrics()
        row["run/goodput"] = run.goodput.fraction()
        # tokens_per_second or images_per_second; the heartbeat reports it under the same name.
        speed_name = f"{run.data.item}s_per_second"
        run.pulse.note(**{speed_name: row.get(f"train/{speed_name}")}, **memory.metrics())
        # Writing the first row imports the libraries that write it, which takes seconds.
        with nullcontext() if self.has_written else phase("writing the first metrics", patience=SHORT):
            run.writer.write(step, row)
        self.has_written = True
        run.progress.update(step, row)


class Evaluate(Hook):
    """Evaluates every validation set every eval_every steps and at the end, on at most eval_batches batches each."""

    def at_start(self, run: Run, step: int) -> None:
        # The run that saved this step may have been interrupted while evaluating it.
        if step and run.evaluated_step != step:
            self.after_step(run, step)

    @staticmethod
    def is_due(run: Run, step: int) -> bool:
        """Return whether `after_step` evaluates this step."""
        every = run.options.eval_every
        return every is not None and step % every == 0 and step < run.options.max_steps

    def after_step(self, run: Run, step: int) -> None:
        if self.is_due(run, step):
            with run.throughput.pause(), run.goodput.during("evaluate"):
                self.evaluate(run, step)

    def at_end(self, run: Run, step: int) -> None:
        # A run killed between its last save and its end may have evaluated that step already.
        is_over = step == run.options.max_steps or run.stop_reason is not None
        if is_over and run.evaluated_step != step:
            with run.goodput.during("evaluate"):
                # Use the same batches as before, so that the last value continues the curve of the others. For the
                # whole set, use `plimsoll evaluate --validation` afterwards: on a large set it takes longer than many
                # runs.
                self.evaluate(run, step)

    def evaluate(self, run: Run, step: int) -> None:
        """Write `eval/SET/loss`, for text also `eval/SET/bits_per_byte`, ...; `eval_ema/...` for averaged weights."""
        # Memory that a small step on a CPU keeps would add to what the evaluation needs.
        release_freed_memory()
        try:
            self._evaluate(run, step)
        finally:
            release_freed_memory()

    def _evaluate(self, run: Run, step: int) -> None:
        row: Row = {}
        limit = run.options.eval_batches
        weight_kinds = [("eval", False)]
        if run.state.ema:
            weight_kinds.append(("eval_ema", True))

        def should_continue() -> bool:
            # Send a heartbeat, because an evaluation may take longer than the hang timeout.
            run.pulse.note()
            return not run.stopping

        for prefix, averaged in weight_kinds:
            for name in run.data.validation_names:
                summary = evaluate_set(
                    run.program, run.state, name, limit=limit, averaged=averaged, should_continue=should_continue
                )
                # Do not write a partial evaluation: its numbers would cover fewer batches.
                if summary is None:
                    run.progress.print(f"step {step}: evaluation skipped, because the run is stopping")
                    return
                for key, value in summary.items():
                    row[f"{prefix}/{name}/{key}"] = value
        if not row:
            return
        run.writer.write(step, row)
        run.evaluation = row
        run.evaluated_step = step
        figures = []
        for key, value in row.items():
            if not key.endswith(_NOT_LOSSES):
                # A perplexity needs fewer decimals for the same precision as its loss.
                digits = 2 if key.endswith("/perplexity") else 4
                figures.append(f"{key} {value:.{digits}f}")
        line = f"step {step}: " + ", ".join(figures)
        # For each validation set that was evaluated only in part, how much of it was.
        parts = []
        for name in run.data.validation_names:
            share = describe_share(run.program.experiment.data, name, limit)
            if share:
                parts.append(f"{name}: {share}")
        run.progress.print(f"{line} ({', '.join(parts)})" if parts else line)


class KeepBest(Hook):
    """Saves a checkpoint after an evaluation that improves trainer.keep_best."""

    def at_start(self, run: Run, step: int) -> None:
        # Count the evaluation of a last step that ended an earlier, shorter run. Its checkpoint exists.
        self.after_step(run, step)

    def after_step(self, run: Run, step: int) -> None:
        if run.best_metric is not None and run.evaluated_step == step:
            improves = run.best_metric.count(step, _metric(run, run.best_metric, "trainer.keep_best"))
            run.save_is_due = run.save_is_due or improves

    def at_end(self, run: Run, step: int) -> None:
        run.save_is_due = False
        self.after_step(run, step)


class Stop(Hook):
    """Applies trainer.stop to evaluations, and to the clock when the run starts."""

    def at_start(self, run: Run, step: int) -> None:
        # The rule may have ended an earlier start at this step.
        self.after_step(run, step)
        rules = run.options.stop
        # An evaluation before the first step may have taken a while.
        has_limit = rules.wall_seconds is not None and run.stop_reason is None
        if has_limit and distributed.broadcast_from_primary(run.wall_clock_is_over()):
            run.stop_reason = f"the run has taken {rules.wall_clock} (trainer.stop.wall_clock)"

    def after_step(self, run: Run, step: int) -> None:
        tracked = run.stop_metric
        if tracked is None or run.evaluated_step != step:
            return
        rules = run.options.stop
        value = _metric(run, tracked, "trainer.stop.metric")
        tracked.count(step, value)
        if rules.reaches_target(value):
            run.stop_reason = f"{tracked.metric} is {value:.6g} (trainer.stop.target = {rules.target:g})"
        elif rules.patience is not None and tracked.evaluations >= rules.patience:
            best = "it was never a number"
            if tracked.value is not None:
                best = f"best {tracked.value:.6g} at step {tracked.step}"
            run.stop_reason = (
                f"{tracked.metric} has not improved for {tracked.evaluations} evaluations ({best}; "
                f"trainer.stop.patience = {rules.patience})"
            )

    def at_end(self, run: Run, step: int) -> None:
        # The last step is the end in any case, but its evaluation counts if a longer run resumes from it.
        reason = run.stop_reason
        self.after_step(run, step)
        run.stop_reason = reason


def _metric(run: Run, tracked: BestMetric, path: str) -> float:
    """Return the value of a metric in the last evaluation. Raises ConfigError if it has none."""
    kind, name, _ = tracked.metric.split("/", 2)
    prefix = f"{kind}/{name}/"
    names = [key.removeprefix(prefix) for key in run.evaluation if key.startswith(prefix)]
    check_metric(tracked.metric, names, path)
    return run.evaluation[tracked.metric]


class CheckReplicas(Hook):
    """Compares replicas every health.replica_check_every steps, and before each save."""

    # The step whose replicas were compared last.
    checked: int | None = None

    def after_step(self, run: Run, step: int) -> None:
        every = run.experiment.health.replica_check_every
        if every and (step % every == 0 or run.save_is_due):
            self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        # The last step may have been checked already, before it was saved.
        if step == self.checked or not run.experiment.health.replica_check_every:
            return
        with run.throughput.pause():
            replicas.check(run.state, step)
        self.checked = step

    def on_roll_back(self, run: Run, step: int) -> None:
        # From here on, the same step number stands for another state.
        self.checked = None


class Save(Hook):
    """Saves a checkpoint every save_every steps, every save_every_minutes, and at the last step or an interruption.

    A restored state that has not changed since is not written again.
    """

    # The step saved last, and whether a step was trained since the start.
    last: int | None = None
    has_moved = False

    def after_step(self, run: Run, step: int) -> None:
        self.has_moved = True
        if run.save_is_due and step != self.last:
            with run.throughput.pause():
                self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        is_saved = step == self.last or (not self.has_moved and step in run.checkpointer.steps())
        if not is_saved:
            run.save(step)
            self.last = step
        elif run.best_metric is not None and run.save_is_due and run.best_metric.step == step:
            # The evaluation at the end came after the save of this step, whose checkpoint names another best step.
            run.save(step, replace_saved=True)

    def on_roll_back(self, run: Run, step: int) -> None:
        # A step after this one must be saved when the run reaches it again.
        self.last = None


class Prediction(Hook):
    """Shows predicted and measured memory once the buffers of compilation and initialization are freed."""

    def __init__(self, need: MemoryNeed) -> None:
        self.need = need
        self.steps = 0

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        self.steps += 1
        if self.steps == _STEPS_BEFORE_MEASURING:
            memory = memory_in_use(run.program.mesh.local_devices)
            run.progress.print(compare_with_measured(self.need, memory))


class Profile(Hook):
    """Traces the chosen steps into WORKDIR/profile, for TensorBoard, XProf or Perfetto.

    A run that ends early leaves a complete trace too.
    """

    # Whether a trace is being taken.
    on = False

    def before_step(self, run: Run, step: int) -> None:
        if run.options.profile and step == run.options.profile[0]:
            # Wait for the previous steps, so that the trace contains none of them.
            jax.block_until_ready(run.running_state)
            folder = run.workdir.path / "profile"
            jax.profiler.start_trace(str(folder))
            self.on = True

    def after_step(self, run: Run, step: int) -> None:
        if self.on and step >= run.options.profile[1]:
            self.at_end(run, step)

    def at_end(self, run: Run, step: int) -> None:
        if not self.on:
            return
        # The last of the chosen steps may still be running, and the trace must contain all of it.
        jax.block_until_ready(run.running_state)
        self.on = False
        steps = run.options.profile
        try:
            jax.profiler.stop_trace()
        # A failed trace, for example because of a full disk, is no reason to end a run.
        except (OSError, RuntimeError) as error:
            run.progress.print(f"the profile of steps {steps} was not written: {error}")
            return
        run.progress.print(f"profile of steps {steps}: {run.workdir.path / 'profile'}")

    def on_roll_back(self, run: Run, step: int) -> None:
        # An open trace would collide with a new one when its steps run again.
        self.at_end(run, step)
