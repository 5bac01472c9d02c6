"""The time of a step by its work alone, before any compiler has seen it: for `--estimate`, and to rank settings."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from framework.devices.accelerators import AcceleratorSpec
from framework.layers.base import batch_shards
from framework.layout import GROUPS, StateLayout
from framework.models.causal_lm import CausalLM
from framework.plan.calibration.rates import DeviceRates
from framework.plan.step_time.compiled_time import rates_of
from framework.plan.step_time.parts import StepTime
from framework.plan.step_time.rates import PCIE_REACHED
from framework.plan.step_time.traced import traced_work
from framework.program.companion import Passes
from framework.program.experiment import Experiment

# Of the peak, what products reach in compiled steps by the compiler's own cycles (`tools.bench.tpu_time`): 0.80 of v5e
# and 0.60 of v6e in Llama steps with attention; the others are taken to be as their like.
_PRODUCTS_REACHED = {"v6e": 0.6, "tpu7x": 0.6}
_PRODUCTS_REACHED_BY_OTHERS = 0.8
# Products hide most of what asynchronous collectives do; so much of their time shows all the same.
_LINKS_SHOWN = 0.1
# Of the published rate of a chip's links, what collectives reach that nothing runs beside: a mesh axis is rings along
# some of a slice's dimensions. By the final programs of Mixtral 8x7B and Qwen3-235B-A22B on v5p-256: 0.44 and 0.43.
_WAITED_LINKS_REACHED = 0.44
# What the backward pass can hide of the host link, as a part of the time of products: it is two thirds of them.
_HIDDEN_BY_BACKWARD = 0.6
# Of the time in which a unit's state comes or goes, what shows under memory.update = in_backward, where all of it is
# asked for at once and where it comes in pieces. By the cycles of the final programs of Llama 2 7B on v5e-16, with one
# and two sequences a chip: 0.38 and 0.32, and 1.59 and 1.56. In pieces both ways are used one after the other.
_SHOWN_WITH_PREFETCH = 0.35
_SHOWN_IN_PIECES = 1.58
_BASIS = "the closed form: products at a share of the peak, bytes at published rates; compile for the program's own"


class Work(NamedTuple):
    """The work of one device in a step.

    Attributes:
        flops: of matrix products.
        product_bytes: operands and results of products.
        update_bytes: that the update reads and writes on the device.
        received_bytes: from other devices.
        host_bytes: to or from the host for the update, each way.
        hidden_by: the part of the time of products that the link can be busy beside with these.
        least_shown: of their time, what shows however long products take.
        pass_host_bytes: to or from the host for the forward and backward passes, each way; products run beside these.
        waited_host_bytes: to and from the host while nothing else runs.
        waited_received_bytes: from other devices, of `received_bytes`, while nothing else runs.
    """

    flops: float
    product_bytes: float
    update_bytes: float
    received_bytes: float
    host_bytes: float
    hidden_by: float = 0.0
    least_shown: float = 0.0
    pass_host_bytes: float = 0.0
    waited_host_bytes: float = 0.0
    waited_received_bytes: float = 0.0

    @property
    def link_bytes(self) -> float:
        """Bytes whose time the link between device and host takes: what moves both ways at once counts once."""
        return self.host_bytes + self.pass_host_bytes + self.waited_host_bytes


def work_of(
    experiment: Experiment,
    sizes: dict[str, int],
    layout: StateLayout,
    traced: ClosedJaxpr,
    device_flops: float,
    hosted_activations: int,
) -> Work:
    """The work of a step.

    Args:
        experiment: what is trained.
        sizes: of the mesh's axes.
        layout: of the state while training.
        traced: the gradients of one microbatch on one device.
        device_flops: of a step on one device.
        hosted_activations: bytes of one microbatch that wait in one device's host memory.
    """
    microbatch = traced_work(traced)
    parameter_bytes = layout.bytes_per_device("parameter")
    received = experiment.learner.accumulate * microbatch.received_bytes
    received += _replica_bytes(layout, sizes)
    received += _tensor_parallel_bytes(experiment, sizes)
    hosted_bytes = layout.bytes_per_device(memory_kind="pinned_host")
    device_bytes = layout.bytes_per_device(memory_kind="device")
    passes = _pass_bytes(experiment, layout, hosted_activations)
    return Work(
        flops=device_flops,
        product_bytes=experiment.learner.accumulate * microbatch.product_bytes,
        # State and weights are read and written, gradients likewise.
        update_bytes=2.0 * (device_bytes + parameter_bytes + hosted_bytes),
        received_bytes=received if math.prod(sizes.values()) > 1 else 0,
        host_bytes=_update_host_bytes(experiment, layout),
        hidden_by=_hidden_by(experiment),
        least_shown=_least_shown(experiment),
        pass_host_bytes=passes.beside,
        waited_host_bytes=passes.waited,
        waited_received_bytes=experiment.learner.accumulate * _expert_bytes(layout, sizes),
    )


def completing_work(passes: Passes, num_devices: int) -> Work:
    """The work of one device while a companion completes the batch of a step.

    Args:
        passes: of the companion.
        num_devices: that share their FLOPs.
    """
    return Work(
        flops=passes.flops / num_devices,
        product_bytes=passes.read_bytes,
        update_bytes=0.0,
        received_bytes=0.0,
        host_bytes=0.0,
        # One program brings each layer between the one before it and its own products.
        waited_host_bytes=passes.moved_bytes,
    )


def _expert_bytes(layout: StateLayout, sizes: dict[str, int]) -> float:
    """Bytes that a device receives in a microbatch to put experts' weights together, and to add up their gradients.

    Their products are kernels, with which the TPU's compiler overlaps no collective. It gathers the weights for both
    passes, and makes the sum of the gradients one all-reduce on v5p, where each device needs its shard alone: of
    Mixtral 8x7B on 128 of them, by the final program, 87 GiB each of these four times.
    """
    shards = sizes["fsdp"]
    gathers = 2
    sums = 2
    received = 0.0
    for leaf in layout:
        axes = leaf.spec.mesh_axes
        if "expert" in axes and "fsdp" in axes and leaf.group in ("parameter", "frozen"):
            times = gathers + sums if leaf.group == "parameter" else gathers
            received += times * leaf.bytes_per_device * (shards - 1)
    return received


def _replica_bytes(layout: StateLayout, sizes: dict[str, int]) -> int:
    """Bytes that a device receives in a step because replicas add up their gradients.

    What is cut over other axes than `data` is cut already; along `expert` all but experts have replicas.
    """
    received = 0.0
    for leaf in layout:
        if leaf.group != "parameter":
            continue
        replicas = sizes["data"] * (1 if "expert" in leaf.spec.mesh_axes else sizes["expert"])
        received += 2 * leaf.bytes_per_device * (replicas - 1) / replicas
    return round(received)


def _tensor_parallel_bytes(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Bytes that a device receives in a step because heads and hidden units are cut over the axis `model`.

    The trace of one device leaves these out. Attention and MLP of each layer end in a sum over the axis, forward and
    backward, and once more forward where a layer is recomputed.
    """
    shards = sizes["model"]
    model = experiment.model
    if shards == 1 or not isinstance(model, CausalLM):
        return 0
    layers = sum(stack.num_units * len(stack.unit.layers) for stack in model.stacks.values())
    sums = 2 * layers * (2 if experiment.memory.remat in ("none", "dots") else 3)
    data = experiment.data
    positions = data.global_batch_size * data.seq_len // (batch_shards(sizes) * sizes["seq"])
    activation_bytes = positions * model.dim * jnp.dtype(model.compute_dtype).itemsize
    # In a ring a sum moves everything twice: parts are added up, and then passed on.
    return round(2 * (shards - 1) / shards * sums * activation_bytes)


def _update_host_bytes(experiment: Experiment, layout: StateLayout) -> float:
    """Bytes that come from the host for the update. No more go there, and both ways are used at once."""
    hosted = {group: layout.bytes_per_device(group, "pinned_host") for group in GROUPS}
    from_host = hosted["optimizer"] + hosted["ema"]
    # The update takes weights once more, unless it is part of the backward pass.
    memory = experiment.memory
    if memory.update != "in_backward" and not memory.updates_at_once:
        from_host += hosted["parameter"]
    return float(from_host)


class _PassBytes(NamedTuple):
    """Bytes that move for the forward and backward passes of a step.

    Attributes:
        beside: each way, while products run.
        waited: while nothing else runs.
    """

    beside: float
    waited: float


def _pass_bytes(experiment: Experiment, layout: StateLayout, hosted_activations: int) -> _PassBytes:
    """What weights, gradients and activations in host memory cost the passes.

    Programs of layers carry them beside the next layer's products. In the loops of one program the compiler moves them
    between one layer and the next: of a step of Llama 3 8B on 256 v5e, 6.6 s of 14.3 are waits for activations.
    """
    hosted = {group: layout.bytes_per_device(group, "pinned_host") for group in GROUPS}
    memory = experiment.memory
    keeps_no_gradients = memory.update == "in_backward" or memory.updates_at_once
    is_run_twice = experiment.learner.clip_mode == "two_pass" and keeps_no_gradients
    times = experiment.learner.accumulate * (2 if is_run_twice else 1)
    # For each microbatch weights come for its forward and for its backward pass. Activations go and come; gradients
    # go, and come to be added to, or for the update.
    weights = 2 * (hosted["parameter"] + hosted["frozen"])
    both_ways = hosted_activations + hosted["gradient"]
    if memory.update == "layer_programs":
        return _PassBytes(float(times * (weights + both_ways)), 0.0)
    return _PassBytes(0.0, float(times * (weights + 2 * both_ways)))


def _hidden_by(experiment: Experiment) -> float:
    """The part of the time of products beside which the update's bytes can move."""
    memory = experiment.memory
    if memory.update == "layer_programs":
        return 1.0
    return _HIDDEN_BY_BACKWARD if memory.update == "in_backward" and memory.prefetch == "unit" else 0.0


def _least_shown(experiment: Experiment) -> float:
    """Of the time in which the update's bytes move, what shows however long products take."""
    memory = experiment.memory
    if memory.update != "in_backward":
        return 0.0
    return _SHOWN_WITH_PREFETCH if memory.prefetch == "unit" else _SHOWN_IN_PIECES


def closed_form_time(work: Work, spec: AcceleratorSpec, num_devices: int, dtype: str) -> StepTime | None:
    """The time of a step; None where the rates of the device are not published.

    Args:
        work: of one device.
        spec: of the device.
        num_devices: of the target.
        dtype: of what products take.
    """
    if spec.platform == "tpu":
        return _on_tpu(work, spec)
    rates = rates_of(spec, os.cpu_count() or 1)
    if rates is None:
        return None
    time = _by_rates(work, rates, dtype, spec.platform)
    if spec.platform != "cpu":
        return time
    # The devices of a CPU share its cores.
    return StepTime(
        matrix_units=num_devices * time.matrix_units,
        memory=num_devices * time.memory,
        links=0.0,
        host_link=0.0,
        python=0.0,
        basis=time.basis,
    )


def _on_tpu(work: Work, spec: AcceleratorSpec) -> StepTime | None:
    if spec.peak_bf16_flops is None or spec.hbm_bytes_per_second is None:
        return None
    reached = _PRODUCTS_REACHED.get(spec.name, _PRODUCTS_REACHED_BY_OTHERS)
    host_link = None if spec.pcie_bytes_per_second is None else PCIE_REACHED * spec.pcie_bytes_per_second
    return _time(
        work,
        products=work.flops / (reached * spec.peak_bf16_flops),
        memory=(work.product_bytes + work.update_bytes) / spec.hbm_bytes_per_second,
        links=spec.ici_bytes_per_second,
        host_link=host_link,
        waits_for_links=True,
    )


def _by_rates(work: Work, rates: DeviceRates, dtype: str, platform: str) -> StepTime:
    is_half = dtype in ("bfloat16", "float16") and platform == "gpu"
    largest = 1e12
    product_rate = rates.curve("product bf16" if is_half else "product f32").rate(largest)
    memory_rate = rates.curve("memory").rate(largest)
    return _time(
        work,
        products=work.flops / product_rate,
        memory=(work.product_bytes + work.update_bytes) / memory_rate,
        links=rates.links,
        host_link=rates.host_link,
    )


def _time(
    work: Work,
    products: float,
    memory: float,
    links: float | None,
    host_link: float | None,
    waits_for_links: bool = False,
) -> StepTime:
    waited_bytes = work.waited_received_bytes if waits_for_links else 0.0
    link_seconds = max(0.0, work.received_bytes - waited_bytes) / links if links else 0.0
    waited_link_seconds = waited_bytes / (_WAITED_LINKS_REACHED * links) if links else 0.0
    host_seconds = work.host_bytes / host_link if host_link else 0.0
    pass_seconds = work.pass_host_bytes / host_link if host_link else 0.0
    waited_seconds = work.waited_host_bytes / host_link if host_link else 0.0
    return StepTime(
        matrix_units=products,
        memory=memory,
        links=waited_link_seconds + max(_LINKS_SHOWN * link_seconds, link_seconds - products),
        host_link=waited_seconds + _shown_host_seconds(work, host_seconds, pass_seconds, products),
        python=0.0,
        basis=_BASIS,
    )


def _shown_host_seconds(work: Work, update: float, passes: float, products: float) -> float:
    """The seconds that the host link keeps a step waiting.

    Args:
        work: of the step.
        update: seconds of what the update moves.
        passes: of what the forward and backward passes move.
        products: of the products, beside which the link can be busy.
    """
    shown_in_passes = max(0.0, passes - products)
    left_products = max(0.0, work.hidden_by * products - passes)
    return shown_in_passes + max(work.least_shown * update, update - left_products)
