"""Analytical estimate of a training step's memory and work, in half a second and without a device or compiler.

The state is exact: it comes from the layout. The rest is estimated by tracing one device's share of the forward and
backward pass (`device_trace`) and walking it with the fusions that XLA makes (`liveness`). No number is fitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.layers.base import batch_shards, batch_specs
from plimsoll.framework.layout import MemoryKind, StateLayout
from plimsoll.framework.plan.backward_bytes import TracedBackward, backward_bytes, count_stack_bytes
from plimsoll.framework.plan.buffer_names import REPORT_GROUPS
from plimsoll.framework.plan.device_trace import trace
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, flops
from plimsoll.framework.plan.plan_report import BREAKDOWN_KEYS
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.plan.step_time.estimated_time import StepWork, count_batch_transform_work, count_work
from plimsoll.framework.plan.update_bytes import update_bytes
from plimsoll.framework.program.batch_transform import ForwardCost
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import choose_backend


@dataclass(frozen=True)
class Estimate:
    """The memory and the work of one training step.

    Attributes:
        breakdown: bytes of device memory per device at the peak, by the keys of a report's breakdown.
        host_breakdown: bytes of host memory per device, by the same keys.
        flops: matrix-product FLOPs of one step on all devices, including recomputation.
        work: what one device computes and moves in a step.
        completion: what one device computes and moves before the step, while an auxiliary model completes the batch.
    """

    breakdown: dict[str, int]
    host_breakdown: dict[str, int]
    flops: FlopCount
    work: StepWork
    completion: StepWork

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of device memory, per device."""
        return sum(self.breakdown.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, per device."""
        return sum(self.host_breakdown.values())


def estimate(
    experiment: Experiment,
    sizes: dict[str, int],
    spec: AcceleratorSpec,
    trace_fn: Callable[[SplitExperiment, dict[str, int], str], ClosedJaxpr] = trace,
) -> Estimate:
    """Estimate what one step of `experiment` needs on each device of a mesh.

    Args:
        experiment: the experiment to train.
        sizes: {mesh axis: size}, from `experiment.mesh.resolve(num_devices)`.
        spec: the accelerator in use.
        trace_fn: function that traces like `device_trace.trace`, or returns a cached trace.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards, or the batch.
    """
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    _check(experiment, mesh, sizes)
    split_experiment = SplitExperiment(experiment)
    layout = StateLayout(split_experiment.specs, mesh)
    running_layout = _running_layout(experiment, mesh)
    breakdown = _state_bytes(running_layout, "device")
    host_breakdown = _state_bytes(running_layout, "pinned_host")
    for batch in batch_specs(experiment.batch_arrays()).values():
        shard_shape = layout.sharding(batch).shard_shape(batch.shape)
        breakdown["batch"] += math.prod(shard_shape) * batch.dtype.itemsize

    backward_pass = TracedBackward(
        split_experiment, layout, sizes, spec.platform, trace_fn(split_experiment, sizes, spec.platform)
    )
    if "offload" in experiment.memory.remat or experiment.memory.activations.uses_host:
        host_breakdown["activations"] = backward_pass.find_peak_bytes(in_host_memory=True).total()
    backward = backward_bytes(backward_pass)
    update = update_bytes(split_experiment, layout, spec, sum(breakdown.values()))
    # The peak is in the backward pass or in the update, whichever holds more: the backward pass is over when the update
    # begins.
    for group, size in max(backward, update, key=Counter.total).items():
        breakdown[group] += size
    step_flops = _flops(experiment, sizes, backward_pass.traced)
    device_flops = step_flops.flops / math.prod(sizes.values())
    work = count_work(
        experiment, sizes, running_layout, backward_pass.traced, device_flops, host_breakdown["activations"]
    )
    passes = (
        ForwardCost() if experiment.batch_transform is None else experiment.batch_transform.passes(experiment, mesh)
    )
    host_breakdown["other"] += passes.offloaded_bytes
    return Estimate(breakdown, host_breakdown, step_flops, work, count_batch_transform_work(passes, mesh.size))


def _running_layout(experiment: Experiment, mesh: Any) -> StateLayout:
    """Return the layout of the state as a run stores it."""
    parts = choose_backend(experiment.memory).get_stack_split(experiment)
    return StateLayout(parts.specs(experiment.state_specs()), mesh)


def _state_bytes(layout: StateLayout, memory_kind: MemoryKind) -> dict[str, int]:
    """Return the bytes of one device's state in a kind of memory, by the keys of a report's breakdown."""
    breakdown = dict.fromkeys(BREAKDOWN_KEYS, 0)
    for leaf in layout:
        if leaf.spec.memory_kind == memory_kind:
            breakdown[REPORT_GROUPS[leaf.group]] += leaf.bytes_per_device
    return breakdown


def least_bytes(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Return a lower bound of the bytes that each device holds: the state and the gradients that all exist at once.

    It needs no trace.

    Args:
        experiment: the experiment to train.
        sizes: {mesh axis: size}.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards.
    """
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    running_layout = _running_layout(experiment, mesh)
    split_experiment = SplitExperiment(experiment)
    # Stacks have all of their gradients before the first update; an embedding's may be freed by then.
    buffered_stacks = [name for name in split_experiment.stacks if not split_experiment.releases_gradients(name)]
    gradients = count_stack_bytes(StateLayout(split_experiment.specs, mesh), buffered_stacks)
    return running_layout.bytes_per_device(memory_kind="device") + sum(gradients.values())


def _check(experiment: Experiment, mesh: Any, sizes: dict[str, int]) -> None:
    """Raise ValueError if the model or the batch cannot be divided over the mesh."""
    experiment.model.check(mesh, experiment.data)
    num_batch_shards = experiment.learner.accumulate * batch_shards(sizes)
    if experiment.data.global_batch_size % num_batch_shards:
        # This check gives the exact error message, but is too slow to run every time.
        experiment.check(mesh)


def _flops(experiment: Experiment, sizes: dict[str, int], traced: ClosedJaxpr) -> FlopCount:
    """Return the FLOPs of the forward and backward passes of all microbatches on all devices.

    The matrix products of optimizers such as Muon and GaLore are not included.
    """
    learner = experiment.learner
    data = experiment.data
    microbatch = flops(traced)
    num_devices = math.prod(sizes.values())
    total = microbatch.flops * num_devices * learner.accumulate
    if learner.clip is not None and learner.clip_mode == "two_pass" and experiment.memory.traits.updates_in_backward:
        # The first update needs the norm of all gradients, but each gradient is freed after its update, so the passes
        # run twice.
        tokens = data.global_batch_size * data.seq_len
        total += total - round(experiment.model.forward_flops_per_token(data.seq_len) * tokens)
    return FlopCount(total, microbatch.uncounted_loops)
