"""Analytical estimates of the forward passes of an auxiliary model, for a plan without a compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll.framework.layout import Group, StateLayout
from plimsoll.framework.program.batch_transform import ForwardCost
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import offload_stages

_GROUPS: tuple[Group, ...] = ("parameter", "frozen", "buffer")


def estimate_forward(run: Experiment, model: Experiment, mesh: Any, *, offloaded: bool) -> ForwardCost:
    """Estimate one forward pass over the batch of a step, split into the step's number of microbatches.

    Args:
        run: experiment whose batches are processed.
        model: experiment with the model that processes them.
        mesh: device mesh.
        offloaded: the model's weights are offloaded; each microbatch copies them to the device once.
    """
    specs = model.state_specs()
    if offloaded:
        specs = offload_stages(specs, {*model.model.stages, "shared"})
    layout = StateLayout(specs, mesh)
    offloaded_bytes = sum(layout.bytes_per_device(group, "pinned_host") for group in _GROUPS)
    parts = run.learner.accumulate
    tokens = run.data.global_batch_size * run.data.seq_len
    return ForwardCost(
        flops=model.model.forward_flops_per_token(run.data.seq_len) * tokens,
        read_bytes=parts * sum(layout.bytes_per_device(group) for group in _GROUPS),
        offloaded_bytes=offloaded_bytes,
        moved_bytes=parts * offloaded_bytes,
    )


def estimate_sampling(run: Experiment, mesh: Any, *, answer_tokens: int) -> ForwardCost:
    """Estimate sampling an answer to each row's prompt with the run's own weights, which are read once per token.

    Reads of the KV cache are not counted.

    Args:
        run: experiment whose model answers.
        mesh: device mesh.
        answer_tokens: number of tokens of the longest answer.
    """
    passes = estimate_forward(run, run, mesh, offloaded=False)
    parts = run.learner.accumulate
    return replace(
        passes,
        # Offloaded weights are copied in for each token, but in host memory they are part of the run's own state.
        offloaded_bytes=0,
        read_bytes=passes.read_bytes // parts * answer_tokens,
        moved_bytes=passes.offloaded_bytes * answer_tokens,
    )
