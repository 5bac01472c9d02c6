"""Analytical estimate of a step's time from its work, without compiling: for `--estimate`, and to rank settings."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.layout import GROUPS, StateLayout, axis_names, count_shards, find_weight_shards
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.plan.jaxpr_analysis import (
    LOCAL_ATTENTION,
    LOCAL_EXCHANGE,
    LOCAL_GROUPED_PRODUCT,
    SCALED_PRODUCTS,
    FlopCount,
    inner_jaxprs,
)
from plimsoll.framework.plan.step_time.device_rates import load_rates
from plimsoll.framework.plan.step_time.layer_transfers import ProgramTransfers, count_layer_transfers
from plimsoll.framework.plan.step_time.time_breakdown import StepTime
from plimsoll.framework.plan.step_time.tpu_operations import PCIE_EFFICIENCY
from plimsoll.framework.program.batch_transform import ForwardCost
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.schedules.pipeline_shape import PipelineShape

# Fraction of the peak that matrix products reach in compiled steps, by the compiler's own cycles
# (`tools.bench.tpu_time`): 0.80 on v5e and 0.60 on v6e in Llama steps with attention. On tpu7x, the published rate of
# Llama 3.1 70B on 64 chips is impossible below 0.67, and equals the estimate at 0.71. Two rates of 256 chips were not
# used for it, with rows of 8,192 and 131,072 tokens: the estimates are 1.00 and 0.97 times these
# (docs/benchmarks/public_record.md). v4 and v5p are assumed to match v5e.
_PRODUCT_EFFICIENCY = {"v6e": 0.6, "tpu7x": 0.71}
_DEFAULT_PRODUCT_EFFICIENCY = 0.8
# Matrix products hide most of the asynchronous collectives; this fraction of their time stays exposed.
_EXPOSED_LINK_SHARE = 0.1
# Fraction of the published rate of a chip's links that synchronous collectives reach. It is below 1 because a mesh axis
# forms rings along only some of a slice's dimensions. Values from the final programs of Mixtral 8x7B and
# Qwen3-235B-A22B on v5p-256: 0.44 and 0.43.
_SYNC_LINK_EFFICIENCY = 0.44
# Host-link time that the backward pass can hide, as a fraction of the time of matrix products; the backward pass has
# two thirds of these.
_HIDEABLE_BY_BACKWARD = 0.6
# The same for the forward pass, under full remat. Llama 2 7B on v5e-16 with delayed updates waits 320 ms for transfers
# of 491 ms each way, by the cycles of the final program.
_HIDEABLE_BY_FORWARD = 0.25
# Assumed share of the steps that clip, where a speculative update has to be repeated.
_CLIPPED_SHARE = 0.1
# Exposed fraction of the time to move a layer's state one way under memory.update = in_backward: with the whole layer
# prefetched, and with chunked updates. Values from the cycles of the final programs of Llama 2 7B on v5e-16, with one
# and two sequences per chip: 0.38 and 0.32 with prefetch, 1.59 and 1.56 in chunks. In chunks, the two directions are
# used one after the other, so the fraction exceeds 1.
_EXPOSED_WITH_PREFETCH = 0.35
_EXPOSED_IN_CHUNKS = 1.58
# Exposed fraction of the time to move offloaded weights and activations in the loops over layers, which start a layer
# ahead. Llama 2 7B on v5e-16 with 2 x 4096 tokens a chip and everything offloaded waits 0.05 of 0.32 s for them, under
# in_backward and under streamed.
_EXPOSED_IN_LOOPS = 0.16
# The most host-link time that these loops can hide, together with the update, as a fraction of the time of matrix
# products: as much as `_HIDEABLE_BY_BACKWARD` in the backward pass, and the same share of the forward pass.
_HIDEABLE_IN_LOOPS = 0.9
# Forward, forward again and backward, compared with forward and backward, if a backward pass takes twice as long.
_FORWARD_TWICE = 4 / 3
# For these, the bytes that a device receives are the difference between the sizes of results and operands.
_GATHERS = ("all_gather", "reduce_scatter", "psum_scatter")
# For these, the bytes that a device receives are this factor times the operands, in a ring of many devices.
_RECEIVED = {"psum": 2, "psum_invariant": 2, "all_to_all": 1, "ppermute": 1}
_PRODUCTS = (
    *("dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call"),
    *(LOCAL_ATTENTION, LOCAL_GROUPED_PRODUCT, *SCALED_PRODUCTS),
)
_BASIS = "estimate: products at a fraction of the peak, bytes at published rates; compile for a more exact time"


@dataclass(frozen=True)
class StepWork:
    """The work of one device in a step.

    Attributes:
        flops: FLOPs of matrix products.
        mask_excess: FLOPs to add to the time of attention kernels, see `FlopCount`.
        fp8_flops, int8_flops: the part of `flops` in products of 8-bit floats, and of 8-bit integers.
        product_bytes: bytes of the operands and results of matrix products.
        update_bytes: bytes that the update reads and writes in device memory.
        received_bytes: bytes received from other devices.
        host_bytes: bytes moved between device and host for the update, in each direction.
        hideable_share: fraction of the time of matrix products during which the host link can move `host_bytes`.
        min_exposed_share: fraction of the time to move `host_bytes` that stays exposed however long products take.
        layer_transfers: transfers of layer programs, which have no `host_bytes` and no `exposed_host_bytes`.
        exposed_host_bytes: bytes moved to and from the host while nothing else runs.
        loop_bytes: bytes moved to and from the host while other layers run.
        exposed_received_bytes: the part of `received_bytes` that arrives while nothing else runs.
        slice_bytes: the part of `received_bytes` that comes from other slices. It also travels within the slice.
        exposed_slice_bytes: the part of `slice_bytes` that arrives while nothing else runs.
    """

    flops: float
    product_bytes: float
    update_bytes: float
    received_bytes: float
    host_bytes: float
    hideable_share: float = 0.0
    min_exposed_share: float = 0.0
    layer_transfers: tuple[ProgramTransfers, ...] = ()
    exposed_host_bytes: float = 0.0
    loop_bytes: float = 0.0
    exposed_received_bytes: float = 0.0
    slice_bytes: float = 0.0
    exposed_slice_bytes: float = 0.0
    mask_excess: float = 0.0
    fp8_flops: float = 0.0
    int8_flops: float = 0.0

    @property
    def link_bytes(self) -> float:
        """Bytes that determine the time of the host link: bytes that move both ways at the same time count once."""
        layer_bytes = sum(transfers.link_bytes for transfers in self.layer_transfers)
        return self.host_bytes + layer_bytes + self.exposed_host_bytes + self.loop_bytes


def count_work(
    experiment: Experiment,
    sizes: dict[str, int],
    layout: StateLayout,
    traced: ClosedJaxpr,
    step_flops: FlopCount,
    offloaded_activations: int,
    splits: Mapping[str, int],
) -> StepWork:
    """Return the work of one device in a step.

    Args:
        experiment: the experiment to train.
        sizes: {mesh axis: size}.
        layout: layout of the state during training.
        traced: traced gradients of one microbatch on one device.
        step_flops: FLOPs of a step on all devices.
        offloaded_activations: bytes of one microbatch's offloaded activations, per device.
        splits: {mesh axis: number of slices along it}, of axes that span several; see `MeshShape.split`.
    """
    memory = experiment.memory
    traits = memory.traits
    accumulate = experiment.learner.accumulate
    num_devices = math.prod(sizes.values())
    device_flops = step_flops.flops / num_devices
    network = _SliceNetwork(sizes, splits)
    microbatch = count_traced_work(traced, network)
    parameter_bytes = layout.bytes_per_device("parameter")
    # In a pipeline, every tick moves the weights of a stage, and runs the stage forward twice.
    runs = accumulate * (_FORWARD_TWICE * get_pipeline_shape(experiment, sizes).idle_factor if sizes["pipe"] > 1 else 1)
    pipeline_bytes = _pipeline_bytes(experiment, sizes)
    received = runs * microbatch.received_bytes
    received += pipeline_bytes
    received += _replica_bytes(layout, sizes)
    tensor_parallel_bytes = _tensor_parallel_bytes(experiment, sizes)
    received += tensor_parallel_bytes
    slice_bytes = runs * microbatch.slice_bytes
    slice_bytes += _replica_slice_bytes(layout, network)
    slice_bytes += network.count_share(("model",)) * tensor_parallel_bytes
    # All stages wait for the slowest exchange of a tick, which is between slices.
    exposed_slice_bytes = pipeline_bytes if "pipe" in splits else 0
    device_bytes = layout.bytes_per_device(memory_kind="device")
    offloaded = {group: layout.bytes_per_device(group, "pinned_host") for group in GROUPS}

    host_bytes = 0
    hideable_share = 0.0
    min_exposed_share = 0.0
    exposed_host_bytes = 0.0
    loop_bytes = 0.0
    layer_transfers: tuple[ProgramTransfers, ...] = ()
    if traits.is_many_programs:
        layer_transfers = count_layer_transfers(experiment, layout, num_devices, device_flops, offloaded_activations)
    else:
        # The update fetches offloaded state, and weights too unless it is part of the backward pass. It writes back no
        # more than that, and both directions are used at the same time.
        host_bytes = offloaded["optimizer"] + offloaded["ema"]
        if not traits.updates_in_backward:
            host_bytes += offloaded["parameter"]
        hideable_share = _HIDEABLE_BY_BACKWARD if memory.prefetch == "layer" else 0.0
        if traits.updates_in_backward:
            min_exposed_share = _EXPOSED_WITH_PREFETCH if memory.prefetch == "layer" else _EXPOSED_IN_CHUNKS
        exposed_both_ways = 0.0
        if memory.speculates:
            # Gradients leave in the backward pass, together with the state. In a step that clips, they come back with
            # the state, and nothing hides that.
            host_bytes += offloaded["gradient"]
            hideable_share = _HIDEABLE_BY_BACKWARD
            if experiment.learner.clipping.needs_all_gradients:
                exposed_both_ways = _CLIPPED_SHARE * host_bytes
        elif memory.delays_update:
            # Gradients leave in the backward pass and come back together with the state, in the next forward pass.
            host_bytes += offloaded["gradient"]
            hideable_share = _HIDEABLE_BY_FORWARD
        else:
            # Gradients go to the host and come back to be accumulated or for the update.
            exposed_both_ways = float(offloaded["gradient"])
        is_run_twice = experiment.learner.clip_mode == "two_pass" and traits.updates_in_backward
        passes = accumulate // experiment.microbatches_per_pass * (2 if is_run_twice else 1)
        exposed_host_bytes = passes * 2 * exposed_both_ways
        # Each pass fetches the weights for its forward and its backward pass: one for each microbatch, or one for all
        # of them. Activations of each microbatch go to the host and come back.
        weights = 2 * (offloaded["parameter"] + offloaded["frozen"])
        activations = 2 * experiment.microbatches_per_pass * offloaded_activations
        loop_bytes = float(passes * (weights + activations))
    return StepWork(
        flops=device_flops,
        product_bytes=runs * microbatch.product_bytes,
        # The update reads and writes state and weights, and gradients, which have the size of the weights.
        update_bytes=2.0 * (device_bytes + parameter_bytes + layout.bytes_per_device(memory_kind="pinned_host")),
        received_bytes=received if num_devices > 1 else 0,
        host_bytes=float(host_bytes),
        hideable_share=hideable_share,
        min_exposed_share=min_exposed_share,
        layer_transfers=layer_transfers,
        exposed_host_bytes=exposed_host_bytes,
        loop_bytes=loop_bytes,
        exposed_received_bytes=accumulate * (_expert_bytes(layout, sizes) + microbatch.exposed_received_bytes),
        slice_bytes=slice_bytes + exposed_slice_bytes,
        exposed_slice_bytes=exposed_slice_bytes,
        mask_excess=step_flops.mask_excess / num_devices,
        fp8_flops=step_flops.fp8 / num_devices,
        int8_flops=step_flops.int8 / num_devices,
    )


def count_batch_transform_work(passes: ForwardCost, num_devices: int) -> StepWork:
    """Return the work of one device while an auxiliary model completes the batch of a step.

    Args:
        passes: forward passes of the auxiliary model.
        num_devices: number of devices that share their FLOPs.
    """
    return StepWork(
        flops=passes.flops / num_devices,
        product_bytes=passes.read_bytes,
        update_bytes=0.0,
        received_bytes=0.0,
        host_bytes=0.0,
        # The passes are one program, which fetches a layer after the previous layer's products, without overlap.
        exposed_host_bytes=passes.moved_bytes,
    )


def _expert_bytes(layout: StateLayout, sizes: dict[str, int]) -> float:
    """Return the bytes that a device receives per microbatch to gather experts' weights and to sum their gradients.

    The experts' products are kernels, and the TPU compiler does not overlap collectives with kernels. It gathers the
    weights for both passes. On v5p it sums the gradients with an all-reduce, although each device needs only its shard,
    so the sum counts twice. In the final program of Mixtral 8x7B on 128 v5p, each of these four is 87 GiB.
    """
    gathers = 2
    sums = 2
    received = 0.0
    for leaf in layout:
        if "expert" not in leaf.spec.mesh_axes or leaf.group not in ("parameter", "frozen"):
            continue
        times = gathers + sums if leaf.group == "parameter" else gathers
        for shards in find_weight_shards(leaf.spec.mesh_axes, sizes):
            received += times * leaf.bytes_per_device * (count_shards(shards.axes, sizes) - 1)
    return received


def _replica_bytes(layout: StateLayout, sizes: dict[str, int]) -> int:
    """Return the bytes that a device receives in a step to sum gradients over replicas.

    Replicas have different tokens: they are along `data`, and along `expert` and `seq` if these axes do not shard the
    weight.
    """
    received = 0.0
    for leaf in layout:
        if leaf.group != "parameter":
            continue
        sharded_axes = {name for axes in leaf.spec.mesh_axes for name in axis_names(axes)}
        replicas = math.prod(sizes[axis] for axis in ("data", "expert", "seq") if axis not in sharded_axes)
        received += 2 * leaf.bytes_per_device * (replicas - 1) / replicas
    return round(received)


def _replica_slice_bytes(layout: StateLayout, network: _SliceNetwork) -> float:
    """Return the bytes of `_replica_bytes` that come from other slices: a chip's share of each other slice's sums."""
    received = 0.0
    for leaf in layout:
        if leaf.group != "parameter":
            continue
        axes = ["data"]
        if "expert" not in leaf.spec.mesh_axes:
            axes.append("expert")
        if "fsdp" in leaf.spec.mesh_axes:
            axes.append("seq")
        replicas = math.prod(network.sizes[axis] for axis in axes)
        received += network.count_share(axes) * 2 * leaf.bytes_per_device * (replicas - 1) / replicas
    return received


@dataclass(frozen=True)
class _SliceNetwork:
    """The mesh axes that cross the network between slices.

    Attributes:
        sizes: {mesh axis: size}.
        splits: {mesh axis: number of slices along it}, of axes that span several.
    """

    sizes: Mapping[str, int]
    splits: Mapping[str, int]

    def count_share(self, axes: Sequence[str]) -> float:
        """Return the share of a gather's, a scatter's or a sum's received bytes that comes from other slices.

        Each chip of a slice gets its share of every other slice's part from there, and the chips of the slice then
        exchange these shares. This is how the TPU compiler splits such collectives.
        """
        num_slices = math.prod(self.splits.get(axis, 1) for axis in axes)
        if num_slices == 1:
            return 0.0
        return (num_slices - 1) / (math.prod(self.sizes[axis] for axis in axes) - 1)

    def count_exchange_share(self, axes: Sequence[str]) -> float:
        """Return the share of an all-to-all's received bytes that comes from other slices: that of the peers there."""
        num_slices = math.prod(self.splits.get(axis, 1) for axis in axes)
        if num_slices == 1:
            return 0.0
        num_devices = math.prod(self.sizes[axis] for axis in axes)
        return (num_devices - num_devices / num_slices) / (num_devices - 1)


_ONE_SLICE = _SliceNetwork({}, {})


def get_pipeline_shape(experiment: Experiment, sizes: dict[str, int]) -> PipelineShape:
    """Return the sizes of a step's pipeline, on a mesh of these sizes."""
    return PipelineShape(sizes["pipe"], experiment.mesh.pipe_chunks, experiment.learner.accumulate)


def _pipeline_bytes(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Return the bytes that a device receives in a step because layers are sharded over axis `pipe`.

    Each tick moves activations to the next stage and cotangents to the previous one. All-reduces along the axis pass
    the output of the embedding and of the last stage to all devices, and sum up the cotangents of both.
    """
    stages = sizes["pipe"]
    if stages == 1:
        return 0
    shape = get_pipeline_shape(experiment, sizes)
    data = experiment.data
    model = experiment.language_model
    rows = data.global_batch_size // (experiment.learner.accumulate * batch_shards(sizes))
    activation_bytes = rows * data.seq_len // sizes["seq"] * model.dim * jnp.dtype(model.compute_dtype).itemsize
    moves = 2 * shape.num_forward_ticks
    sums = 4 * 2 * (stages - 1) / stages * shape.microbatches
    return round((moves + sums) * activation_bytes)


def _tensor_parallel_bytes(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Return the bytes that a device receives in a step because heads and hidden units are sharded over axis `model`.

    The trace of one device does not include these. Attention and MLP of each layer end in an all-reduce over the axis,
    in the forward and the backward pass, and once more if the layer is recomputed.
    """
    shards = sizes["model"]
    model = experiment.model
    if shards == 1 or not isinstance(model, CausalLM):
        return 0
    layers = sum(stack.num_repeats * len(stack.pattern.layers) for stack in model.stacks.values())
    sums = 2 * layers * (2 if experiment.memory.remat in ("none", "dots") else 3)
    data = experiment.data
    positions = data.global_batch_size * data.seq_len // (batch_shards(sizes) * sizes["seq"])
    activation_bytes = positions * model.dim * jnp.dtype(model.compute_dtype).itemsize
    # A ring all-reduce moves everything twice: first a reduce-scatter, then an all-gather.
    return round(2 * (shards - 1) / shards * sums * activation_bytes)


def estimate_time(work: StepWork, spec: AcceleratorSpec, num_devices: int, dtype: str) -> StepTime | None:
    """Return the analytical estimate of a step's time; None if the rates of the device are not known.

    Args:
        work: work of one device.
        spec: the accelerator in use.
        num_devices: number of devices of the target.
        dtype: dtype of the operands of matrix products.
    """
    moved_bytes = work.product_bytes + work.update_bytes
    waited_bytes = 0.0
    if spec.platform == "tpu":
        if spec.peak_bf16_flops is None or spec.hbm_bytes_per_second is None:
            return None
        reached = _PRODUCT_EFFICIENCY.get(spec.name, _DEFAULT_PRODUCT_EFFICIENCY)
        products = _weigh_flops(work, spec) / (reached * spec.peak_bf16_flops)
        memory_rate = spec.hbm_bytes_per_second
        links = spec.ici_bytes_per_second
        host_link = None if spec.pcie_bytes_per_second is None else PCIE_EFFICIENCY * spec.pcie_bytes_per_second
        waited_bytes = work.exposed_received_bytes
    else:
        rates = load_rates(spec, os.cpu_count() or 1)
        if rates is None:
            return None
        is_half = dtype in ("bfloat16", "float16") and spec.platform == "gpu"
        largest = 1e12
        products = _weigh_flops(work, spec) / rates.curve("product bf16" if is_half else "product f32").rate(largest)
        memory_rate = rates.curve("memory").rate(largest)
        links = rates.links
        host_link = rates.host_link
    memory = moved_bytes / memory_rate
    if spec.platform == "cpu":
        # The devices of a CPU share its cores. Its links and its host are its own memory.
        return StepTime(
            matrix_units=num_devices * products,
            memory=num_devices * memory,
            links=0.0,
            host_link=0.0,
            python=0.0,
            basis=_BASIS,
        )
    dcn = spec.dcn_bytes_per_second
    slice_seconds = (work.slice_bytes - work.exposed_slice_bytes) / dcn if dcn else 0.0
    waited_slice_seconds = work.exposed_slice_bytes / dcn if dcn else 0.0
    link_seconds = max(0.0, work.received_bytes - waited_bytes) / links if links else 0.0
    waited_link_seconds = waited_bytes / (_SYNC_LINK_EFFICIENCY * links) if links else 0.0

    update_seconds = work.host_bytes / host_link if host_link else 0.0
    waited_seconds = work.exposed_host_bytes / host_link if host_link else 0.0
    exposed_update = max(work.min_exposed_share * update_seconds, update_seconds - work.hideable_share * products)
    loop_seconds = work.loop_bytes / host_link if host_link else 0.0
    hideable_seconds = max(0.0, _HIDEABLE_IN_LOOPS * products - (update_seconds - exposed_update))
    exposed_loops = max(_EXPOSED_IN_LOOPS * loop_seconds, loop_seconds - hideable_seconds)
    # What reads and writes the operands of matrix products runs in the same programs as these.
    compute_seconds = products + work.product_bytes / memory_rate
    exposed_layers = 0.0
    if host_link:
        for transfers in work.layer_transfers:
            exposed_layers += transfers.count_exposed_seconds(host_link, compute_seconds)
    return StepTime(
        matrix_units=products,
        memory=memory,
        links=waited_link_seconds + max(_EXPOSED_LINK_SHARE * link_seconds, link_seconds - products),
        other_slices=waited_slice_seconds + max(_EXPOSED_LINK_SHARE * slice_seconds, slice_seconds - products),
        host_link=waited_seconds + exposed_loops + (exposed_update + exposed_layers),
        python=0.0,
        basis=_BASIS,
    )


def _weigh_flops(work: StepWork, spec: AcceleratorSpec) -> float:
    """Return the FLOPs of bfloat16 products that take as long as the products of a step, by the published peaks."""
    weighed = work.flops + work.mask_excess
    for num_flops, peak in ((work.fp8_flops, spec.peak_flops("fp8")), (work.int8_flops, spec.peak_flops("int8"))):
        if peak is not None and spec.peak_bf16_flops is not None:
            weighed -= num_flops * (1 - spec.peak_bf16_flops / peak)
    return weighed


@dataclass(frozen=True)
class TracedWork:
    """Bytes that a program moves on one device.

    Attributes:
        product_bytes: bytes of the operands and results of matrix products, attention and Pallas kernels, and of
            rounding to 8 bits. XLA fuses most other work into the producers or consumers of these arrays.
        received_bytes: bytes received from other devices.
        exposed_received_bytes: the part of `received_bytes` that arrives while nothing else runs, because the next
            products need it.
        slice_bytes: the part of `received_bytes` that comes from other slices.
    """

    product_bytes: int = 0
    received_bytes: int = 0
    exposed_received_bytes: int = 0
    slice_bytes: float = 0.0


def count_traced_work(jaxpr: ClosedJaxpr | Jaxpr, network: _SliceNetwork = _ONE_SLICE) -> TracedWork:
    """Return the work of a program on one device; loops count by trip count, and only the largest branch counts.

    Args:
        jaxpr: the program.
        network: the mesh axes that cross the network between slices.
    """
    program = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    product_bytes = 0
    received_bytes = 0
    exposed_received_bytes = 0
    slice_bytes = 0.0
    for equation in program.eqns:
        name = equation.primitive.name
        taken_bytes = sum(map(_num_bytes, equation.invars))
        made_bytes = sum(map(_num_bytes, equation.outvars))
        if name in _PRODUCTS:
            product_bytes += taken_bytes + made_bytes
        elif name == "convert_element_type" and made_bytes < taken_bytes and _is_8_bit(equation.outvars[0]):
            # The array, in 16 bits, is read for its largest magnitude and again to be rounded.
            product_bytes += 2 * 2 * made_bytes + made_bytes
        elif name in _GATHERS:
            received_bytes += abs(made_bytes - taken_bytes)
            slice_bytes += network.count_share(_get_axes(equation.params)) * abs(made_bytes - taken_bytes)
        elif name in _RECEIVED:
            received_bytes += _RECEIVED[name] * taken_bytes
            axes = _get_axes(equation.params)
            # All devices wait for the slowest step of a ring.
            share = float(any(axis in network.splits for axis in axes))
            if name == "all_to_all":
                share = network.count_exchange_share(axes)
            elif name != "ppermute":
                share = network.count_share(axes)
            slice_bytes += share * _RECEIVED[name] * taken_bytes
        elif name == LOCAL_EXCHANGE:
            # Rows are gathered for the exchange, and read from its result.
            product_bytes += taken_bytes + made_bytes
            received_bytes += equation.params["received_bytes"]
            exposed_received_bytes += equation.params["received_bytes"]
            slice_bytes += network.count_exchange_share(("expert",)) * equation.params["received_bytes"]
        elif inner := [count_traced_work(inner_jaxpr, network) for inner_jaxpr in inner_jaxprs(equation.params)]:
            if name == "cond":
                inner = [max(inner, key=lambda work: (work.product_bytes, work.received_bytes))]
            runs = equation.params["length"] if name == "scan" else 1
            product_bytes += runs * sum(work.product_bytes for work in inner)
            received_bytes += runs * sum(work.received_bytes for work in inner)
            exposed_received_bytes += runs * sum(work.exposed_received_bytes for work in inner)
            slice_bytes += runs * sum(work.slice_bytes for work in inner)
    return TracedWork(product_bytes, received_bytes, exposed_received_bytes, slice_bytes)


def _get_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes of a collective, by its parameters in a jaxpr."""
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def _is_8_bit(variable: Var) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and dtype.kind != "b" and dtype.itemsize == 1


def _num_bytes(variable: Var | Literal) -> int:
    aval = variable.aval
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0
    return math.prod(shape) * getattr(getattr(aval, "dtype", None), "itemsize", 4)
