"""Analytical estimate of a training step's memory and work, in half a second and without a device or compiler.

The state is exact: it comes from the layout. The rest is estimated by tracing one device's share of the forward and
backward pass (`device_trace`) and walking it with the fusions that XLA makes (`liveness`). No number is fitted.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.devices.reserved_memory import get_limit_bytes
from plimsoll.framework.layers import grad_accumulation
from plimsoll.framework.layers.base import LAYER_AXIS, batch_shards, batch_specs
from plimsoll.framework.layers.lookup import TablePartition
from plimsoll.framework.layout import MemoryKind, OptStateSpec, ParameterSpec, StateLayout, StateLeaf, TensorSpec
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.plan.buffer_names import REPORT_GROUPS
from plimsoll.framework.plan.device_trace import trace
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, flops
from plimsoll.framework.plan.liveness import CompilerRules, find_peak_bytes, on_host
from plimsoll.framework.plan.plan_report import BREAKDOWN_KEYS
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.plan.step_time.estimated_time import StepWork, count_batch_transform_work, count_work
from plimsoll.framework.program.backend import get_stack_split
from plimsoll.framework.program.batch_transform import ForwardCost
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.schedules.chunked_update import BLOCK
from plimsoll.framework.schedules.pipeline_shape import STACK, PipelineShape

# XLA's CPU compiler never computes these twice (InstructionFusion::IsExpensive).
_EXPENSIVE_OPS = ("exp", "log", "logistic", "tanh", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "div")


@dataclass(frozen=True)
class Estimate:
    """The memory and the work of one training step.

    Attributes:
        breakdown: bytes of device memory per device at the peak, by the keys of a report's breakdown.
        host_breakdown: bytes of host memory per device, by the same keys.
        flops: matrix-product FLOPs of one step on all devices, including recomputation.
        work: what one device computes and moves in a step.
        completion: what one device computes and moves before the step, while an auxiliary model completes the batch.
        layout: layout of the running state.
    """

    breakdown: dict[str, int]
    host_breakdown: dict[str, int]
    flops: FlopCount
    work: StepWork
    completion: StepWork
    layout: StateLayout

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of device memory, per device."""
        return sum(self.breakdown.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, per device."""
        return sum(self.host_breakdown.values())


@dataclass(frozen=True)
class PassBytes:
    """What one device holds in the forward and backward pass of a microbatch, apart from state, batch and gradients.

    Attributes:
        activations: bytes at the peak of the pass of one chunk of layers: all layers, or those of a pipeline's chunk.
        residuals: bytes that the forward pass of a chunk leaves for the backward pass.
        others: bytes at the peak of a pass of all layers except their residuals: the loss, a layer's temporaries.
    """

    activations: int
    residuals: int
    others: int


def estimate(
    experiment: Experiment,
    sizes: dict[str, int],
    spec: AcceleratorSpec,
    trace_fn: Callable[..., ClosedJaxpr] = trace,
    *,
    num_slices: int = 1,
) -> Estimate:
    """Estimate what one step of `experiment` needs on each device of a mesh.

    Args:
        experiment: the experiment to train.
        sizes: {mesh axis: size}, from `experiment.mesh.resolve(num_devices)`.
        spec: the accelerator in use.
        trace_fn: function that traces like `device_trace.trace`, or returns a cached trace.
        num_slices: number of slices that the mesh spans; of GPUs, number of hosts.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards, or the batch.
    """
    mesh = _abstract_mesh(sizes)
    experiment.model.check(mesh, experiment.data)
    if experiment.data.global_batch_size % (experiment.learner.accumulate * batch_shards(sizes)):
        # This check gives the exact error message, but is too slow to run every time.
        experiment.check(mesh)
    if sizes[LAYER_AXIS] > 1:
        experiment.check_pipeline(sizes[LAYER_AXIS])
    split_experiment = SplitExperiment(experiment)
    layout = StateLayout(split_experiment.specs, mesh)
    running_layout = _get_running_layout(experiment, sizes)
    breakdown = _state_bytes(running_layout, "device")
    host_breakdown = _state_bytes(running_layout, "pinned_host")
    for batch in batch_specs(experiment.batch_arrays()).values():
        breakdown["batch"] += math.prod(_shard_shape(layout, batch)) * batch.dtype.itemsize

    traced = trace_fn(split_experiment, sizes, spec.platform)
    traced_chunk = traced
    if experiment.mesh.pipe_chunks > 1:
        # Only one chunk of a stage has residuals at a time.
        chunks = experiment.mesh.pipe_chunks
        traced_chunk = trace_fn(split_experiment, sizes, spec.platform, pipe_chunks=chunks)
    backward_pass = _TracedBackward(split_experiment, layout, sizes, spec.platform, traced_chunk)
    offloaded_activations = 0
    if "offload" in experiment.memory.remat or experiment.memory.activations.uses_host:
        offloaded_activations = backward_pass.find_peak_bytes(in_host_memory=True).total()
        # Microbatches that pass through the layers together have their residuals at the same time.
        host_breakdown["activations"] = experiment.microbatches_per_pass * offloaded_activations
    backward = _count_backward_bytes(backward_pass, offloaded_activations)
    update = _count_update_bytes(split_experiment, layout, spec, sum(breakdown.values()))
    # The peak is in the backward pass or in the update, whichever holds more: the backward pass is over when the update
    # begins.
    for group, size in max(backward, update, key=Counter.total).items():
        breakdown[group] += size
    step_flops = _flops(experiment, sizes, traced)
    splits = experiment.mesh.split(sizes, num_slices)
    work = count_work(experiment, sizes, running_layout, traced, step_flops, offloaded_activations, splits)
    batch_transform = experiment.batch_transform
    passes = ForwardCost() if batch_transform is None else batch_transform.passes(experiment, mesh)
    host_breakdown["other"] += passes.offloaded_bytes
    completion = count_batch_transform_work(passes, mesh.size)
    return Estimate(breakdown, host_breakdown, step_flops, work, completion, running_layout)


def estimate_pass(
    experiment: Experiment, sizes: dict[str, int], spec: AcceleratorSpec, *, input_shards: int = 1
) -> PassBytes:
    """Estimate the activations of a pass, whatever memory the gradients have.

    The peak of `estimate` is of activations and gradients together. If gradients have buffers of their own, which
    other frameworks keep during the whole pass, the peak of the activations counts.

    Args:
        experiment: the experiment to train.
        sizes: {mesh axis: size}.
        spec: the accelerator in use.
        input_shards: number of devices that share the activations whose last axis is the model's width, as in sequence
            parallelism along `mesh.model`. Our own program does not divide them.
    """
    split_experiment = SplitExperiment(experiment)
    parts = sizes[LAYER_AXIS] * experiment.mesh.pipe_chunks
    whole = _estimate_whole_pass(split_experiment, sizes | {LAYER_AXIS: 1}, spec, input_shards)
    residuals = whole.find_residual_bytes()
    peak = _sum_activations(whole)
    if parts == 1:
        return PassBytes(peak, residuals, max(0, peak - residuals))
    chunk = _estimate_whole_pass(split_experiment, sizes, spec, input_shards, experiment.mesh.pipe_chunks)
    return PassBytes(_sum_activations(chunk), residuals // parts, max(0, peak - residuals))


def _estimate_whole_pass(
    split_experiment: SplitExperiment, sizes: dict[str, int], spec: AcceleratorSpec, input_shards: int, chunks: int = 1
) -> _TracedBackward:
    """Return the backward pass of a microbatch on a mesh, or of a chunk of a stage on a mesh with a pipeline."""
    layout = StateLayout(split_experiment.specs, _abstract_mesh(sizes))
    options = {"pipe_chunks": chunks} if chunks > 1 else {}
    traced = trace(split_experiment, sizes, spec.platform, **options)
    return _TracedBackward(split_experiment, layout, sizes, spec.platform, traced, input_shards)


def _sum_activations(backward_pass: _TracedBackward) -> int:
    """Return the bytes at the peak of a pass that does not keep any gradient of a layer."""
    without_gradients = copy.copy(backward_pass)
    without_gradients.released_shares = dict.fromkeys(backward_pass.released_shares, 1.0)
    peak = without_gradients.find_peak_bytes(in_host_memory=False)
    return sum(size for group, size in peak.items() if group != "gradients")


def least_bytes(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Return a lower bound of the bytes that each device holds: the state and the gradients that all exist at once.

    It needs no trace.

    Args:
        experiment: the experiment to train.
        sizes: {mesh axis: size}.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards.
    """
    mesh = _abstract_mesh(sizes)
    running_layout = _get_running_layout(experiment, sizes)
    split_experiment = SplitExperiment(experiment)
    # Stacks have all of their gradients before the first update; an embedding's may be freed by then.
    layout = StateLayout(split_experiment.specs, mesh)
    buffered_leaves = [
        leaf
        for leaf in _list_stack_parameters(layout, split_experiment.stacks)
        if not _releases_gradient(split_experiment, leaf)
    ]
    gradient_bytes = sum(leaf.bytes_per_device for leaf in buffered_leaves)
    return running_layout.bytes_per_device(memory_kind="device") + gradient_bytes


def _abstract_mesh(sizes: dict[str, int]) -> Mesh:
    # An abstract mesh has no devices; only its shape is used.
    return cast(Mesh, AbstractMesh(tuple(sizes.values()), tuple(sizes)))


def _get_running_layout(experiment: Experiment, sizes: dict[str, int]) -> StateLayout:
    """Return the layout of the state as a run stores it, on a mesh of these sizes."""
    parts = get_stack_split(experiment)
    return StateLayout(parts.specs(experiment.state_specs()), _abstract_mesh(sizes))


def _state_bytes(layout: StateLayout, memory_kind: MemoryKind) -> dict[str, int]:
    """Return the bytes of one device's state in a kind of memory, by the keys of a report's breakdown."""
    breakdown = dict.fromkeys(BREAKDOWN_KEYS, 0)
    for leaf in layout:
        if leaf.spec.memory_kind == memory_kind:
            breakdown[REPORT_GROUPS[leaf.group]] += leaf.bytes_per_device
    return breakdown


def _flops(experiment: Experiment, sizes: dict[str, int], traced: ClosedJaxpr) -> FlopCount:
    """Return the FLOPs of the forward and backward passes of all microbatches on all devices.

    The matrix products of optimizers such as Muon and GaLore are not included.
    """
    learner = experiment.learner
    data = experiment.data
    num_devices = math.prod(sizes.values())
    step = flops(traced).scale(num_devices * learner.accumulate)
    total = step.flops
    if sizes[LAYER_AXIS] > 1:
        # Each tick runs all stages, whether or not they have work, and the backward pass runs its stage forward again.
        tokens = data.global_batch_size * data.seq_len
        stack_flops = experiment.model.stacks[STACK].flops_per_token(data.seq_len) * tokens
        outer_flops = experiment.model.flops_per_token(data.seq_len) * tokens - 3 * stack_flops
        shape = PipelineShape(sizes[LAYER_AXIS], experiment.mesh.pipe_chunks, learner.accumulate)
        total = round(outer_flops + shape.idle_factor * (total - outer_flops + stack_flops))
    if learner.clip is not None and learner.clip_mode == "two_pass" and experiment.memory.traits.updates_in_backward:
        # The first update needs the norm of all gradients, but each gradient is freed after its update, so the passes
        # run twice.
        tokens = data.global_batch_size * data.seq_len
        total += total - round(experiment.model.forward_flops_per_token(data.seq_len) * tokens)
    return replace(step, flops=total)


# --- the backward pass and the update --------------------------------------------------------------------------------


def _count_backward_bytes(backward_pass: _TracedBackward, offloaded_activations: int) -> Counter[str]:
    """Return the bytes by group that a device holds at the peak of the backward pass, excluding state and batch.

    Args:
        backward_pass: the backward pass of one microbatch.
        offloaded_activations: bytes of its residuals that are in host memory, per device.
    """
    split_experiment = backward_pass.split_experiment
    layout = backward_pass.layout
    learner = split_experiment.experiment.learner
    most = backward_pass.find_peak_bytes(in_host_memory=False)
    others = split_experiment.experiment.microbatches_per_pass - 1
    if others:
        # The other microbatches of the pass have their residuals, and the input or the cotangent of a layer.
        residuals = backward_pass.find_residual_bytes() - offloaded_activations
        most["activations"] += others * (residuals + backward_pass.count_boundary_bytes())
    stages = backward_pass.sizes[LAYER_AXIS]
    if stages > 1:
        shape = PipelineShape(stages, split_experiment.experiment.mesh.pipe_chunks, learner.accumulate)
        # The saved inputs, and what arrives from the neighboring stages.
        most["activations"] += (shape.num_slots + 2) * backward_pass.count_boundary_bytes()
        if shape.chunks > 1:
            # The weights in the order in which their layers run.
            most["parameters"] += sum(leaf.bytes_per_device for leaf in _list_stack_parameters(layout, [STACK]))
    if learner.accumulate > 1 or stages > 1:
        # The sums of the gradients are alive during the whole pass, next to the gradients of a microbatch. If all
        # microbatches of a layer run together, the sums take the place of these.
        for leaf in layout:
            if leaf.group == "parameter" and not _releases_gradient(split_experiment, leaf):
                assert isinstance(leaf.spec, ParameterSpec)
                sum_dtype = np.dtype(learner.gradient_dtype(leaf.spec))
                num_elements = leaf.bytes_per_device // leaf.spec.dtype.itemsize
                most["gradients"] += num_elements * sum_dtype.itemsize - (leaf.bytes_per_device if others else 0)
    if backward_pass.platform == "cpu":
        # The CPU compiler copies the optimizer state before it updates it.
        most["activations"] += layout.bytes_per_device("optimizer", "device")
    memory = split_experiment.experiment.memory
    if memory.delays_update or memory.speculates:
        # One layer's state leaves, and that of the next has arrived; before the forward pass also its gradients.
        moved_groups = ("optimizer", "ema", "gradient") if memory.delays_update else ("optimizer", "ema")
        staged_sizes: Counter[str] = Counter()
        for leaf in layout:
            stage = _stage(leaf)
            if leaf.group in moved_groups and leaf.spec.is_offloaded and stage in split_experiment.stacks:
                staged_sizes[stage] += leaf.bytes_per_device // split_experiment.stacks[stage].num_repeats
        most["optimizer_state"] += 2 * max(staged_sizes.values(), default=0)
    if memory.speculates and not any("/master/" in leaf.path for leaf in layout):
        # An update that has to be repeated reads the old weights.
        for leaf in layout:
            if leaf.group == "parameter" and _stage(leaf) in layout.specs.spare:
                most["parameters"] += leaf.bytes_per_device
    traits = memory.traits
    if traits.updates_in_backward and not traits.is_many_programs:
        # A layer's gradients stay alive until the whole layer is updated; so do the sums of its microbatches.
        layer_sizes: Counter[str] = Counter()
        for leaf in layout:
            stage = _stage(leaf)
            if leaf.group == "parameter" and stage in split_experiment.stacks:
                num_repeats = split_experiment.stacks[stage].num_repeats
                layer_sizes[stage] += leaf.bytes_per_device // num_repeats
                if others:
                    dtype = leaf.spec.dtype
                    sum_itemsize = grad_accumulation.sum_dtype(dtype).itemsize
                    layer_sizes[stage] += leaf.bytes_per_device // dtype.itemsize * sum_itemsize // num_repeats
        most["gradients"] += max(layer_sizes.values())
    return most


@dataclass
class _TracedBackward:
    """The backward pass of one microbatch on one device; `traced` is the program that computes its gradients.

    `input_shards` devices share the activations whose last axis is the model's width.
    """

    split_experiment: SplitExperiment
    layout: StateLayout
    sizes: dict[str, int]
    platform: str
    traced: ClosedJaxpr
    input_shards: int = 1

    def __post_init__(self) -> None:
        layout = self.layout
        stacks = self.split_experiment.stacks
        stack_leaves = _list_stack_parameters(layout, stacks)
        released_leaves = [leaf for leaf in stack_leaves if _releases_gradient(self.split_experiment, leaf)]
        stack_bytes = _count_bytes_by_shape(layout, stack_leaves)
        released_bytes = _count_bytes_by_shape(layout, released_leaves)
        # Fraction of the gradient bytes that leaves the device, by gradient shape. It can be partial, because two layer
        # ranges with the same number of layers have the same shapes even if only one keeps its gradients on the device.
        self.released_shares = {shape: released_bytes.get(shape, 0) / size for shape, size in stack_bytes.items()}
        self.weight_shapes = {_shard_shape(layout, leaf.spec) for leaf in layout if leaf.group == "parameter"}
        # Loops over layers see the weights of one layer, without the layer axis.
        self.weight_shapes |= {shape[1:] for shape in stack_bytes}
        # Fraction of the saved activations that is offloaded, by the number of layers in the range.
        offloading = self.split_experiment.offloading_stacks
        offloads_by_count: dict[int, list[bool]] = {}
        for name, stack in stacks.items():
            offloads_by_count.setdefault(stack.num_repeats, []).append(name in offloading)
        self.offloaded_shares = {count: sum(offloads) / len(offloads) for count, offloads in offloads_by_count.items()}

    def find_peak_bytes(self, *, in_host_memory: bool) -> Counter[str]:
        """Return the peak bytes by group of the pass, excluding state and batch.

        Gradients that leave the device as soon as they are computed are not counted.

        Args:
            in_host_memory: count host memory instead of device memory.
        """
        split_experiment = self.split_experiment
        model = split_experiment.model
        platform = self.platform
        table = (-1,)
        table_shards = 1
        if isinstance(model, CausalLM):
            partition = TablePartition.make(model.embed.param_specs()["token"], self.sizes)
            table = (partition.shard_shape[0], model.dim)
            table_shards = partition.num_column_shards
        rules = CompilerRules(
            costly=_EXPENSIVE_OPS if platform == "cpu" else (),
            late_reduction=platform == "tpu",
            early_zeros=platform != "tpu" and math.prod(self.sizes.values()) > 1,
            pads_products=platform == "gpu",
            adds_products=platform == "tpu",
            table=table,
            # The head sums the gradient of its table in shards, chunk by chunk.
            table_shards=table_shards,
            nbytes=functools.partial(self._count_bytes, in_host_memory=in_host_memory),
        )
        jaxpr = self.traced.jaxpr
        groups = ["gradients"] * len(jaxpr.outvars)
        # If only layers are in host memory, the gradients of the embedding and the head stay until the end.
        parameters = [leaf for leaf in self.layout if leaf.group == "parameter"]
        releases_all = all(_releases_gradient(split_experiment, leaf) for leaf in parameters)
        return find_peak_bytes(jaxpr, rules, groups, frees_outputs=releases_all)

    def find_residual_bytes(self) -> int:
        """Return the bytes of the residuals of all layers, per device, in whichever memory they are."""
        elsewhere = copy.copy(self)
        elsewhere.offloaded_shares = dict.fromkeys(self.offloaded_shares, 1.0)
        return elsewhere.find_peak_bytes(in_host_memory=True).total()

    def count_boundary_bytes(self) -> int:
        """Return the bytes of the activations between two layers, per device."""
        experiment = self.split_experiment.experiment
        data = experiment.data
        rows = data.global_batch_size // (experiment.learner.accumulate * batch_shards(self.sizes))
        tokens = rows * data.seq_len // self.sizes["seq"]
        model = experiment.language_model
        return tokens * model.dim * np.dtype(model.compute_dtype).itemsize

    def _count_bytes(self, aval: ShapedArray, *, in_host_memory: bool) -> int:
        """Return the bytes that an abstract value occupies in host or device memory."""
        share = self._host_fraction(aval)
        if in_host_memory:
            share = 0.0 if aval.shape in self.weight_shapes else share
        else:
            share = (1.0 - share) * (1.0 - self.released_shares.get(aval.shape, 0.0))
        if not share:
            return 0
        if self.input_shards > 1 and self._is_layer_input(aval):
            share /= self.input_shards
        *leading_dims, last_dim = (*aval.shape,) or (1,)
        itemsize = getattr(aval.dtype, "itemsize", 4)
        if self.platform == "tpu" and isinstance(self.split_experiment.model, CausalLM):
            seq_len = self.split_experiment.experiment.data.seq_len
            # The last two dimensions are positions (all, or one seq shard) and features per position.
            has_positions = len(leading_dims) >= 3 and leading_dims[-1] in (seq_len, seq_len // self.sizes["seq"])
            if has_positions and last_dim > 1:
                # Kernels read and write [..., S, H] in that order, with H padded to whole registers of 128 lanes.
                last_dim = -(-last_dim // 128) * 128
        if self.platform == "cpu" and jnp.issubdtype(aval.dtype, jnp.floating):
            # The CPU computes half precision in float32 and converts whole stacks at once.
            itemsize = max(itemsize, 4)
        return round(share * (math.prod(leading_dims) * last_dim * itemsize))

    def _is_layer_input(self, aval: ShapedArray) -> bool:
        """Return whether an array has a vector of the model's width for each position, for one layer or for several."""
        is_wide = len(aval.shape) >= 3 and aval.shape[-1] == self.split_experiment.experiment.language_model.dim
        return is_wide and aval.shape not in self.weight_shapes and aval.shape not in self.released_shares

    def _host_fraction(self, aval: ShapedArray) -> float:
        """Return the fraction of an array that is in host memory, such as of the stacked residuals of all layers."""
        if on_host(aval):
            return 1.0
        if len(aval.shape) <= 2 or aval.shape in self.released_shares:
            return 0.0
        num_batch_shards = batch_shards(self.sizes) * self.sizes["seq"]
        itemsize = getattr(aval.dtype, "itemsize", 4)
        # Arrays below 1 MiB per layer, summed over all devices, are not offloaded.
        layer_bytes = math.prod(aval.shape[1:]) * num_batch_shards * itemsize
        return self.offloaded_shares.get(aval.shape[0], 0.0) if layer_bytes >= 1 << 20 else 0.0


def _count_update_bytes(
    split_experiment: SplitExperiment, layout: StateLayout, spec: AcceleratorSpec, resident: int
) -> Counter[str]:
    """Return the bytes by group that a device holds during the update, in addition to the `resident` state and batch.

    Args:
        split_experiment: the experiment, with stacks split into layer ranges.
        layout: layout of its state.
        spec: the accelerator in use.
        resident: bytes of state and batch on the device.
    """
    traits = split_experiment.experiment.memory.traits
    if not traits.updates_in_chunks:
        update = _whole_update(layout, spec, resident)
    else:
        update = _chunked_update(layout, split_experiment)
    if traits.can_offload_gradients:
        for leaf in layout:
            if leaf.group == "parameter" and not _releases_gradient(split_experiment, leaf):
                update["gradients"] += leaf.bytes_per_device
    return update


def _whole_update(layout: StateLayout, spec: AcceleratorSpec, resident: int) -> Counter[str]:
    """Return the bytes that an update of the whole state holds in addition to `resident`: gradients and fetched state.

    All offloaded state is fetched together. A non-finite step changes nothing, so the update selects between old and
    new values. For the largest arrays this happens after both exist, unless the device is too small for that; then the
    arrays are handled one at a time.
    """
    offloaded_sizes = [leaf.bytes_per_device for leaf in layout if leaf.spec.is_offloaded]
    # GPUs read and write host memory directly.
    if spec.platform == "gpu" or not offloaded_sizes:
        return Counter()
    moved = Counter(gradients=layout.bytes_per_device("parameter"), optimizer_state=sum(offloaded_sizes))
    selected_bytes = sum(size for size in offloaded_sizes if size == max(offloaded_sizes))
    limit = get_limit_bytes(spec)
    if limit is not None:
        free_bytes = limit - resident - sum(moved.values())
        selected_bytes = selected_bytes if selected_bytes <= free_bytes else 0
    return moved + Counter(activations=selected_bytes)


def _chunked_update(layout: StateLayout, split_experiment: SplitExperiment) -> Counter[str]:
    """Return the bytes of a chunked update: the offloaded state of two chunks being fetched and two being written."""
    learner = split_experiment.experiment.learner
    # {"stage/path" of a parameter: update locality of its group's optimizer}.
    locality_by_tensor = {}
    for group in learner.groups:
        locality = learner.update_locality(group)
        locality_by_tensor |= {f"{group.path_prefix}{path}": locality for path in group.paths}
    stacks = split_experiment.stacks
    bytes_by_chunk: Counter[str] = Counter()
    for leaf in layout:
        if leaf.group == "frozen" or not leaf.spec.is_offloaded:
            continue
        _, stage, path = leaf.path.split("/", 2)
        # A tensor's optimizer state moves together with the tensor.
        owner = path
        if isinstance(leaf.spec, OptStateSpec) and leaf.group == "optimizer":
            owner = leaf.spec.owner
        tensor = f"{stage}/{owner}"
        # This may be a layer range; the learner knows only the whole stack.
        layer_range = stacks[stage].layer_range if stage in stacks else None
        home = stage if layer_range is None else layer_range.home
        update_locality = locality_by_tensor.get(f"{home}/{owner}", "layer")
        layer_bytes = leaf.bytes_per_device // (stacks[stage].num_repeats if stage in stacks else 1)
        # Elementwise and per-row updates run in blocks of BLOCK elements, which have at most 4 bytes each (float32).
        chunk_bytes = min(layer_bytes, 4 * BLOCK) if update_locality in ("element", "row") else layer_bytes
        # A layer whose tensors depend on each other is one chunk.
        bytes_by_chunk[stage if update_locality == "layer" else tensor] += chunk_bytes
    return Counter(optimizer_state=4 * max(bytes_by_chunk.values(), default=0))


def _stage(leaf: StateLeaf) -> str:
    """Return the stage that a leaf of the state belongs to."""
    return leaf.path.split("/")[1]


def _shard_shape(layout: StateLayout, spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of one device's shard of an array."""
    return layout.sharding(spec).shard_shape(spec.shape)


def _releases_gradient(split_experiment: SplitExperiment, parameter: StateLeaf) -> bool:
    """Return whether a parameter's gradient leaves the device at once, see `SplitExperiment.releases_gradient`."""
    _, stage, path = parameter.path.split("/", 2)
    return split_experiment.releases_gradient(stage, path)


def _list_stack_parameters(layout: StateLayout, stacks: Collection[str]) -> list[StateLeaf]:
    """Return the leaves of the stacks' trainable parameters."""
    return [leaf for leaf in layout if leaf.group == "parameter" and _stage(leaf) in stacks]


def _count_bytes_by_shape(layout: StateLayout, leaves: Iterable[StateLeaf]) -> dict[tuple[int, ...], int]:
    """Return {shard shape: bytes per device}, summed over leaves of one shape."""
    bytes_by_shape: Counter[tuple[int, ...]] = Counter()
    for leaf in leaves:
        bytes_by_shape[_shard_shape(layout, leaf.spec)] += leaf.bytes_per_device
    return bytes_by_shape
