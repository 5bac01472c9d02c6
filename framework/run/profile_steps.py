"""Traces a few training steps of a config, without a run: nothing is saved, and no workdir is needed."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData

from plimsoll.framework.config import Config
from plimsoll.framework.plan.memory_budget import explain_refusal, measure_need
from plimsoll.framework.plan.trace_summary import TraceSummary, find_traces, summarize_trace
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.small_data import fit_batch_to_data
from plimsoll.framework.terminal.exit_codes import DoesNotFitError
from plimsoll.framework.terminal.phases import SHORT, phase


@dataclass(frozen=True)
class StepProfile:
    """A trace of some steps.

    Attributes:
        trace: file of the trace.
        summary: its operations.
        step_seconds: wall-clock time of a step, mean over the traced ones, including its input.
        input_seconds: part of it that Python waited for the batch.
        tokens_per_second: tokens (or images) of the steps, per second.
    """

    trace: Path
    summary: TraceSummary
    step_seconds: float
    input_seconds: float
    tokens_per_second: float


def profile_steps(
    config: Config, experiment: Experiment, folder: Path, *, steps: int, warmup: int, limit: int | None
) -> StepProfile:
    """Compile a step, run it on the data of the config, and trace it on this process's devices.

    Args:
        config: config resolved for these devices.
        experiment: its experiment.
        folder: folder of the trace.
        steps: number of steps to trace.
        warmup: number of steps before that, whose buffers and caches are not typical.
        limit: bytes of device memory that the step may use; None for what there is.

    Raises:
        DoesNotFitError: the step does not fit into the memory of the devices.
        ValueError, OSError: the data cannot be used.
    """
    program = Program(experiment)
    with tempfile.TemporaryDirectory(prefix="plimsoll-profile-") as scratch:
        with phase("preparing data", patience=SHORT):
            experiment.data.allows_small_data = True
            experiment.data.setup(scratch)
        small_data_lines = fit_batch_to_data(config, experiment, program.mesh)
        if small_data_lines:
            print("\n".join(small_data_lines), file=sys.stderr)
            experiment = config.instantiate(data=experiment.data)
            program = Program(experiment)
        refusal = explain_refusal(config, program, measure_need(program), limit)
        if refusal:
            raise DoesNotFitError(refusal)
        transform = experiment.batch_transform
        if transform is not None:
            transform.open(program, Path(scratch), is_new_run=True, log=print)
        with phase("initializing the state", patience=SHORT):
            pretrained = experiment.pretrained
            state = program.init() if pretrained is None else pretrained.init(program)
        batches = experiment.data.train_iterator(0, program.rows)
        # Traces that are in the folder already.
        old_traces = set(find_traces(folder))
        options = jax.profiler.ProfileOptions()
        # Python's calls would fill the trace, and slow the steps.
        options.python_tracer_level = 0
        input_seconds = 0.0
        try:
            with phase("warming up", patience=SHORT):
                for _ in range(warmup):
                    _, batch = next(batches)
                    state, _ = program.step(state, program.put(batch))
                jax.block_until_ready(state)
            with phase("tracing", patience=SHORT), jax.profiler.trace(str(folder), profiler_options=options):
                start = time.perf_counter()
                for step in range(steps):
                    with jax.profiler.StepTraceAnnotation("train", step_num=warmup + step):
                        input_start = time.perf_counter()
                        _, batch = next(batches)
                        input_seconds += time.perf_counter() - input_start
                        state, _ = program.step(state, program.put(batch))
                jax.block_until_ready(state)
                seconds = time.perf_counter() - start
        finally:
            batches.close()
            program.ahead.close()
        with phase("reading the trace", patience=SHORT):
            (trace,) = set(find_traces(folder)) - old_traces
            texts = [text for compiled in program.backend.compile() if (text := compiled.as_text())]
            summary = summarize_trace(ProfileData.from_file(str(trace)), texts)
    num_items = steps * experiment.data.global_batch_size * experiment.data.seq_len
    return StepProfile(trace, summary, seconds / steps, input_seconds / steps, num_items / seconds)
