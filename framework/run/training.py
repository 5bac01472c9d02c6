"""One process's part of a run, from its config to its last picture. Imports everything that a run needs."""

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from plimsoll.framework.checkpoint import leftover_files
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.checkpoint.replicas import ReplicaMismatchError
from plimsoll.framework.devices.accelerators import accelerator_name
from plimsoll.framework.devices.allocator import keep_freed_memory
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layout import TrainState
from plimsoll.framework.metrics.image_grid import save_grid
from plimsoll.framework.metrics.plot import plot_experts, plot_losses, plot_objective
from plimsoll.framework.metrics.tracking_services import check_installed
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.plan import device_budget, host_budget
from plimsoll.framework.plan.device_budget import MemoryNeed
from plimsoll.framework.plan.start_table import build_start_table
from plimsoll.framework.processes import distributed
from plimsoll.framework.processes.health import Pulse
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.run_length import rate_notes, set_length
from plimsoll.framework.run import held_out_answers, offload_self_test, resuming
from plimsoll.framework.run.compile_ahead import begin_evaluation, begin_init
from plimsoll.framework.run.hooks import NonFiniteError, build_user_hooks
from plimsoll.framework.run.job import TUNING_FILE, Job, TuneResult
from plimsoll.framework.run.report import compression_lines, sample_images, sample_text
from plimsoll.framework.run.run import Run
from plimsoll.framework.run.trainer import LastStepNotSavedError, Trainer
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.progress import Progress
from plimsoll.framework.terminal.tables import human_bytes, render


class Training:
    """One process's part of a run.

    The job's experiment is trained unless the config changes after the experiment was built. An accelerator rule may
    change it, and so may `_prepare`, because the steps per epoch are known only when the data is ready. Then the
    experiment is built again from the changed config.
    """

    saved_step: int | None  # step of the newest checkpoint; set by `_prepare`
    is_new_run: bool  # whether the workdir holds no checkpoint; set by `_prepare`
    need: MemoryNeed  # memory that the step needs; set by `_plan`
    run: Run  # set when training starts

    def __init__(self, job: Job, pulse: Pulse):
        config, self.rule_lines = job.request.resolve(accelerator_name(jax.devices()))
        self.job = job
        self.workdir = job.workdir
        self.pulse = pulse
        self.tuning: TuneResult | None = None
        if config.memory.auto:
            self.tuning = job.tune_memory(job, config)
            config = self.tuning.config
        self.config = config
        lines = [*self.rule_lines, *(self.tuning.lines if self.tuning else [])]
        self.experiment: Experiment = job.rebuild_experiment(config, lines)
        self.hooks = build_user_hooks(self.options.hooks)
        self.program = Program(self.experiment)
        if jax.default_backend() == "cpu":
            # Each step on CPU allocates the same temporary buffers; see `framework.devices.allocator`.
            keep_freed_memory()
        self.primary = distributed.is_primary()
        # Only process 0 writes to the terminal and to the log.
        self.progress = Progress(
            self.options.known_steps or 0,
            log_every=self.options.log_every,
            stream=None if self.primary else open("/dev/null", "w"),  # noqa: SIM115
            log_path=self.workdir.log if self.primary else None,
            log_waits=True,
            item=self.experiment.data.item,
        )

    def execute(self) -> int:
        """Run everything from the start table to the last picture; returns the exit code."""
        with self.progress:
            self._print_lines(self.job.request.notes)
            self._print_lines(self.rule_lines)
            if self.tuning:
                self._print_lines(self.tuning.lines)
            self._prepare()
            code = self._plan()
            if code is None:
                code = self._train()
            if code is None:
                self._finish()
                code = 0
        return code

    @property
    def options(self) -> TrainerOptions:
        """The trainer's options in the current experiment."""
        return self.experiment.trainer

    def _print_lines(self, lines: list[str]) -> None:
        """Print lines above the progress bar and into the log."""
        for line in lines:
            self.progress.print(line)

    def _prepare(self) -> None:
        """Inspect the workdir, prepare the data, and determine the length of the run."""
        check_installed(self.options.wandb_project, self.options.mlflow_uri)
        notes = leftover_files.check(self.workdir, self.job.resume, self.config.to_dict())
        self._print_lines(notes)
        saved_steps = Checkpointer(directory=self.workdir.checkpoints, read_only=True).steps()
        self.saved_step = max(saved_steps, default=None)
        self.is_new_run = not saved_steps
        pretrained = self.experiment.pretrained
        if pretrained is not None and self.is_new_run:
            # Report a bad weights directory before anything is compiled.
            pretrained.places(self.experiment.language_model)
        self._prepare_data()
        checkpointer = Checkpointer(directory=self.workdir.checkpoints, read_only=True)
        kept_lines = resuming.keep_counters(checkpointer, self.config)
        if kept_lines:
            self._print_lines(kept_lines)
            self.experiment = self.config.instantiate(data=self.experiment.data)
            self.program = Program(self.experiment)
        # Check this before anything is compiled.
        order = resuming.check(checkpointer, self.program, self.config, force=self.job.force)
        max_epochs = self.options.max_epochs
        if max_epochs is not None:
            epoch_steps = self.experiment.data.epoch_steps(max_epochs, order.origin)
            self._print_lines(set_length(self.config, epoch_steps))
            if self.config.trainer.max_steps != self.options.known_steps:
                # Pass the prepared data on: it does not depend on the length.
                self.experiment = self.config.instantiate(data=self.experiment.data)
                self.program = Program(self.experiment)
            self.progress.set_total(self.options.max_steps)
        self._print_lines(rate_notes(self.config.learner, self.options.max_steps))
        if self.experiment.batch_transform is not None:
            self.experiment.batch_transform.check_files(self.program, self.workdir.path, is_new_run=self.is_new_run)

    def _prepare_data(self) -> None:
        """Prepare the data: process 0 tokenizes, and the others wait for its files."""
        barrier = partial(distributed.barrier, "data")
        sync_processes = partial(self.workdir.sync_processes, barrier, is_primary=self.primary)
        with self.job.goodput.during("data"), phase("preparing data", patience=SHORT):
            self.experiment.data.setup(self.workdir.path, is_primary=self.primary, barrier=sync_processes)

    def _describe_start(self) -> str:
        """Describe the step that the run starts at and the source of its weights."""
        if self.saved_step is not None:
            return f"step {self.saved_step:,}, resumed from {self.workdir.checkpoints}"
        if self.experiment.pretrained is not None:
            return "step 0 (published weights)"
        return "step 0 (fresh initialization)"

    def _plan(self) -> int | None:
        """Compile the step and compare its memory with the devices' memory.

        Returns:
            The exit code if the run ends here; None if it continues.
        """
        job = self.job
        goodput = job.goodput
        report = build_start_table(job.request.spec, self.program, starts_at=self._describe_start())
        self.progress.print(render(report))
        warnings = self.experiment.data.warnings()
        if self.experiment.pretrained is not None:
            warnings = [*warnings, *self.experiment.pretrained.warnings(self.experiment.data.seq_len)]
        self._print_lines([f"warning: {warning}" for warning in warnings])
        host_budget.check_host(self.program)
        goodput.enter("compile")
        # Weights from a checkpoint or from files are not initialized randomly, and a dry run initializes none.
        if self.is_new_run and self.experiment.pretrained is None and not job.dry_run:
            begin_init(self.program)
        if self.experiment.health.offload_self_test:
            with phase("checking offloading on a small model", patience=SHORT):
                line = offload_self_test.check(self.config, self.program)
            if line:
                self.progress.print(line)
        self.need = device_budget.measure_need(self.program)
        refusal = device_budget.explain_refusal(self.config, self.program, self.need, job.limit)
        # One process may compile what another finds in its cache, so the processes can arrive here minutes apart.
        distributed.barrier("planned")
        goodput.enter("start")
        if not distributed.is_true_on_all(refusal is None):
            message = refusal or "another process of this run has less memory than the training step needs"
            self.progress.print(message)
            if not job.force or self.need.message:
                job.failure = MemoryError(message)
                self.program.ahead.close()
                return ExitCode.TOO_BIG
        if job.dry_run:
            peak = human_bytes(self.need.peak)
            self.progress.print(f"dry run: the step compiles, and its peak is {peak} per device. Nothing was trained.")
            return ExitCode.DONE
        return None

    def _train(self) -> int | None:
        """Train to the last step. Returns the exit code of a run that ends before it, else None."""
        goodput = self.job.goodput
        force = self.job.force
        if self.experiment.data.validation_names:
            begin_evaluation(self.program)
        self.run = Run(self.config, self.program, self.workdir, self.progress, goodput, self.pulse)
        waits = True
        try:
            if self.experiment.batch_transform is not None:
                # Open it before the state exists: an auxiliary model may need the memory.
                self.experiment.batch_transform.open(
                    self.program, self.workdir.path, is_new_run=self.is_new_run, log=self.progress.print
                )
            with phase("opening the run", patience=SHORT):
                step = self.run.start(force=force)
            if self.primary:
                # Written after `start` has accepted the workdir, so that a refused start leaves its files unchanged.
                write_json(self.workdir.config, self.config.to_dict())
                if self.tuning:
                    write_json(self.workdir.path / TUNING_FILE, self.tuning.record)
            stopped = Trainer(self.run, self.need, self.hooks).train(step)
        except (NonFiniteError, ReplicaMismatchError, LastStepNotSavedError) as error:
            self.progress.print(f"error: {error}")
            self.job.failure = error
            codes = {NonFiniteError: ExitCode.NONFINITE, ReplicaMismatchError: ExitCode.REPLICAS}
            return codes.get(type(error), ExitCode.FAILED)
        except jax.errors.JaxRuntimeError:
            # Wait for pending saves, but not for a save that another process has abandoned.
            waits = jax.process_count() == 1
            raise
        finally:
            self.program.ahead.close()
            if waits:
                self.run.close()
            self.progress.print(goodput.line())
        if stopped is None:
            return None
        self.progress.print(f"stopped by {signal.Signals(stopped).name}; run the same command to resume")
        # Shell convention: 128 plus the signal number.
        return 128 + stopped

    def _finish(self) -> None:
        """Draw the pictures, and print the samples and lines that end a run."""
        with phase("drawing a sample", patience=1.0):
            text, images, table = self._sample()
        if self.primary:
            self._draw(images)
            if table:
                self.progress.print(_picture("answers", partial(held_out_answers.write_table, self.workdir, table)))
        self._print_lines(held_out_answers.table_lines(table))
        if text is not None:
            self.progress.print(f"sample, continuing {self.options.sample_prompt!r}:\n{text}")
        limit = self.options.eval_batches
        self._print_lines(compression_lines(self.experiment.data, self.run.evaluation, limit, self.workdir.path))
        steps = self.run.checkpointer.steps()
        self.progress.print(f"checkpoint: {self.workdir.checkpoints} (steps {steps})")

    def _sample(self) -> tuple[str | None, Any, held_out_answers.AnswerTable]:
        """Sample (text, images, answers) from the trained model; None or [] for what it does not produce.

        Every process takes part. The state is deleted afterwards, which frees its memory for another training in this
        process.
        """
        state = self.run.state
        self.run.state = TrainState()
        state = self.program.join_stacks(state)
        text = sample_text(self.program, state)
        images = sample_images(self.program, state)
        table = held_out_answers.answer_table(self.program, state)
        return text, images, table

    def _draw(self, images: Any) -> None:
        """Write pictures of the logged metrics and of sampled images, and print their paths."""
        path = self.workdir.path
        data = self.experiment.data
        spec = self.job.request.spec
        model = self.experiment.model
        objective = model.head.objective if isinstance(model, CausalLM) else None
        unit = data.loss_unit if objective is None else objective.unit
        curves = partial(plot_losses, self.workdir.metrics, path / "loss.png", spec, unit)
        with phase("plotting the losses", patience=SHORT):
            line = _picture("loss curves", curves)
        self.progress.print(line)
        if objective is not None:
            reports = partial(plot_objective, self.workdir.metrics, path / "objective.png", spec)
            with phase("plotting the metrics of the objective", patience=SHORT):
                line = _picture("objective", reports)
            self.progress.print(line)
        if _reports_experts(model):
            loads = partial(plot_experts, self.workdir.metrics, path / "experts.png", spec)
            with phase("plotting the load of each expert", patience=SHORT):
                line = _picture("experts", loads)
            self.progress.print(line)
        if images is not None:
            levels = getattr(data, "levels", 256)
            grid = partial(save_grid, images, path / "samples.png", levels=levels)
            self.progress.print(_picture("samples", grid))


def _reports_experts(model: Chain) -> bool:
    """Return whether any router of the model reports the load of each expert."""
    layers = [layer for stack in model.stacks.values() for layer in stack.pattern.walk()]
    return any(isinstance(layer, Router) and layer.expert_metrics for layer in layers)


def _picture(name: str, draw: Callable[[], object]) -> str:
    """Draw a picture and return the line about it. A full disk only loses the picture; the run continues."""
    try:
        return f"{name}: {draw()}"
    except OSError as error:
        return f"{name}: not written: {error.strerror or error}"
