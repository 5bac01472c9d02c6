"""Time of a program on a GPU: a roofline of each kernel at the rates that this kind of device reaches.

The rates are those that `plimsoll calibrate` measured on such a GPU, or fractions of the published peaks.
"""

from __future__ import annotations

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.plan.hlo.collectives import collectives
from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.step_time.device_rates import DeviceRates, WorkKind
from plimsoll.framework.plan.step_time.gpu_kernels import GpuKernel, GpuRates, iter_kernels
from plimsoll.framework.plan.step_time.schedule_simulation import AsyncCollective, InstructionCost, simulate
from plimsoll.framework.plan.step_time.tpu_time import PRODUCTS, ProgramTime
from plimsoll.framework.plan.step_time.work_categories import TRANSFERS

# Fused attention is slower than a plain matrix product: FlashAttention-3 reports 740 of 989 TFLOP/s in the forward pass
# and less in the backward pass (arXiv 2407.08608). cuDNN's attention is similar.
_ATTENTION_EFFICIENCY = 0.7
_HALF_TYPES = ("bf16", "f16")


def gpu_time(module: Module, spec: AcceleratorSpec, rates: DeviceRates) -> ProgramTime:
    """Return the time of one run of a program that was compiled for a GPU.

    Args:
        module: the program.
        spec: the GPU.
        rates: rates that it reaches, measured or assumed.

    Raises:
        ValueError: the peaks of this GPU are not published.
    """
    costs = {}
    products = 0.0
    spans = []
    received = {}
    for collective in collectives(module):
        if collective.mode == "async":
            spans.append(AsyncCollective(collective.scheduled.name, collective.last.name, collective.bytes_received))
        else:
            received[collective.scheduled.name] = collective.bytes_received
    for kernel in iter_kernels(module, GpuRates.look_up(spec)):
        name = kernel.instruction.name
        seconds = _seconds(kernel, rates)
        costs[name] = InstructionCost(seconds, received.get(name, 0.0))
        if kernel.category in PRODUCTS:
            products += kernel.runs * seconds
    timeline = simulate(
        module,
        costs,
        spans,
        # A single GPU has no links and needs none.
        received_per_second=rates.links or float("inf"),
        host_per_second=rates.host_link or float("inf"),
    )
    return ProgramTime(
        products=products,
        others=timeline.compute - products,
        links=timeline.collectives + timeline.collective_waits,
        host_waits=timeline.waits,
        host_seconds=max(timeline.moved.values()) / rates.host_link if rates.host_link else 0.0,
    )


def _seconds(kernel: GpuKernel, rates: DeviceRates) -> float:
    """Return the seconds of one run of a kernel."""
    if kernel.category in TRANSFERS:
        return 0.0
    seconds = rates.curve("memory").seconds(kernel.hbm_bytes)
    if kernel.flops:
        kind: WorkKind = "product bf16" if kernel.dtype in _HALF_TYPES else "product f32"
        product_seconds = rates.curve(kind).seconds(kernel.flops)
        if kernel.category == "attention":
            product_seconds /= _ATTENTION_EFFICIENCY
        seconds = max(seconds, product_seconds)
    return seconds
