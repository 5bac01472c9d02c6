"""The time of a step by its work alone, before any compiler has seen it: for `--estimate`, and to rank settings."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from framework.devices.accelerators import AcceleratorSpec
from framework.layout import GROUPS, StateLayout
from framework.models.causal_lm import CausalLM
from framework.plan.calibration.rates import DeviceRates
from framework.plan.step_time.compiled_time import rates_of
from framework.plan.step_time.parts import StepTime
from framework.plan.step_time.rates import PCIE_REACHED
from framework.plan.step_time.traced import traced_work
from framework.program.experiment import Experiment

# Of the peak, what products reach in compiled steps by the compiler's own cycles (`tools.bench.tpu_time`): 0.80 of v5e
# and 0.60 of v6e in Llama steps with attention; the others are taken to be as their like.
_PRODUCTS_REACHED = {"v6e": 0.6, "tpu7x": 0.6}
_PRODUCTS_REACHED_BY_OTHERS = 0.8
# Products hide most of what asynchronous collectives do; so much of their time shows all the same.
_LINKS_SHOWN = 0.1
# What the backward pass can hide of the host link, as a part of the time of products: it is two thirds of them.
_HIDDEN_BY_BACKWARD = 0.6
_BASIS = "the closed form: products at a share of the peak, bytes at published rates; compile for the program's own"


class Work(NamedTuple):
    """The work of one device in a step.

    Attributes:
        flops: of matrix products.
        product_bytes: operands and results of products.
        update_bytes: that the update reads and writes on the device.
        received_bytes: from other devices.
        host_bytes: to or from the host, each way.
        hidden_by: the part of the time of products that the host link can be busy beside.
    """

    flops: float
    product_bytes: float
    update_bytes: float
    received_bytes: float
    host_bytes: float
    hidden_by: float


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
    data = sizes["data"]
    # Replicas add up their gradients; what is cut over other axes is cut already.
    received += round(2 * parameter_bytes * (data - 1) / data)
    received += _tensor_parallel_bytes(experiment, sizes)
    hosted_bytes = layout.bytes_per_device(memory_kind="pinned_host")
    device_bytes = layout.bytes_per_device(memory_kind="device")
    return Work(
        flops=device_flops,
        product_bytes=experiment.learner.accumulate * microbatch.product_bytes,
        # State and weights are read and written, gradients likewise.
        update_bytes=2.0 * (device_bytes + parameter_bytes + hosted_bytes),
        received_bytes=received if math.prod(sizes.values()) > 1 else 0,
        host_bytes=_from_host(experiment, layout, hosted_activations),
        hidden_by=_hidden_by(experiment),
    )


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
    positions = data.global_batch_size * data.seq_len // (sizes["data"] * sizes["fsdp"] * sizes["seq"])
    activation_bytes = positions * model.dim * jnp.dtype(model.compute_dtype).itemsize
    # In a ring a sum moves everything twice: parts are added up, and then passed on.
    return round(2 * (shards - 1) / shards * sums * activation_bytes)


def _from_host(experiment: Experiment, layout: StateLayout, hosted_activations: int) -> float:
    """Bytes that come from the host in a step. No more go there, and both ways are used at once."""
    accumulate = experiment.learner.accumulate
    hosted = {group: layout.bytes_per_device(group, "pinned_host") for group in GROUPS}
    # For each microbatch weights come for its forward and for its backward pass, and sums of gradients to be added to.
    from_host = 2 * accumulate * (hosted["parameter"] + hosted["frozen"])
    from_host += accumulate * (hosted_activations + hosted["gradient"])
    # The update takes weights once more, unless it is part of the backward pass.
    memory = experiment.memory
    if memory.update != "in_backward" and not memory.updates_at_once:
        from_host += hosted["parameter"]
    return float(from_host + hosted["optimizer"] + hosted["ema"])


def _hidden_by(experiment: Experiment) -> float:
    memory = experiment.memory
    if memory.update == "layer_programs":
        return 1.0
    return _HIDDEN_BY_BACKWARD if memory.update == "in_backward" else 0.0


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


def _time(work: Work, products: float, memory: float, links: float | None, host_link: float | None) -> StepTime:
    link_seconds = work.received_bytes / links if links else 0.0
    host_seconds = work.host_bytes / host_link if host_link else 0.0
    return StepTime(
        matrix_units=products,
        memory=memory,
        links=max(_LINKS_SHOWN * link_seconds, link_seconds - products),
        host_link=max(0.0, host_seconds - work.hidden_by * products),
        python=0.0,
        basis=_BASIS,
    )
