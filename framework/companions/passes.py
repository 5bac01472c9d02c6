"""Analytical estimates of the forward passes of an auxiliary model, for a plan without a compiler."""

from __future__ import annotations

from typing import Any

from plimsoll.framework.layout import Group, StateLayout
from plimsoll.framework.program.companion import Passes
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import with_hosted_stages

_GROUPS: tuple[Group, ...] = ("parameter", "frozen", "buffer")


def forward_passes(run: Experiment, model: Experiment, mesh: Any, *, hosted: bool) -> Passes:
    """Estimate one forward pass over the batch of a step, split into the step's number of microbatches.

    Args:
        run: experiment whose batches are processed.
        model: experiment with the model that processes them.
        mesh: device mesh.
        hosted: the model's weights are offloaded; each microbatch copies them to the device once.
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
    """Estimate sampling an answer to each row's prompt with the run's own weights, which are read once per token.

    Reads of the KV cache are not counted.

    Args:
        run: experiment whose model answers.
        mesh: device mesh.
        answer_tokens: number of tokens of the longest answer.
    """
    passes = forward_passes(run, run, mesh, hosted=False)
    parts = run.learner.accumulate
    return passes._replace(
        # Offloaded weights are copied in for each token, but in host memory they are part of the run's own state.
        hosted_bytes=0,
        read_bytes=passes.read_bytes // parts * answer_tokens,
        moved_bytes=passes.hosted_bytes * answer_tokens,
    )
