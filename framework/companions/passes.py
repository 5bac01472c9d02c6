"""The forward passes of a model that completes batches, by arithmetic: for a plan without a compiler."""

from __future__ import annotations

from typing import Any

from framework.layout import Group, StateLayout
from framework.program.companion import Passes
from framework.program.experiment import Experiment
from framework.program.program import with_hosted_stages

_GROUPS: tuple[Group, ...] = ("parameter", "frozen", "buffer")


def forward_passes(run: Experiment, model: Experiment, mesh: Any, *, hosted: bool) -> Passes:
    """One forward pass over the batch of a step, in as many parts as the step has microbatches.

    Args:
        run: whose batches they are.
        model: has the model that reads them.
        mesh: of the devices.
        hosted: the model's weights live in host memory; each part of the batch brings them once.
    """
    specs = model.state_specs()
    if hosted:
        specs = with_hosted_stages(specs, {*model.model.stages, "shared"})
    layout = StateLayout(specs, mesh)
    hosted_bytes = sum(layout.bytes_per_device(group, "pinned_host") for group in _GROUPS)
    parts = run.learner.accumulate
    tokens = run.data.global_batch_size * run.data.seq_len
    return Passes(
        flops=model.model.forward_flops_per_token(run.data.seq_len) * tokens,
        read_bytes=parts * sum(layout.bytes_per_device(group) for group in _GROUPS),
        hosted_bytes=hosted_bytes,
        moved_bytes=parts * hosted_bytes,
    )


def sampling_passes(run: Experiment, mesh: Any, *, answer_tokens: int) -> Passes:
    """The sampling of an answer to each row's prompt by the run's own weights: they are read for each token.

    The cache of earlier tokens, which is read as well, is left out.

    Args:
        run: whose model answers.
        mesh: of the devices.
        answer_tokens: of the longest answer.
    """
    passes = forward_passes(run, run, mesh, hosted=False)
    parts = run.learner.accumulate
    return passes._replace(
        # The weights visit where the run's own are in host memory, and are part of its state there.
        hosted_bytes=0,
        read_bytes=passes.read_bytes // parts * answer_tokens,
        moved_bytes=passes.hosted_bytes * answer_tokens,
    )
