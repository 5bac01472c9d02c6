"""What a training step needs, without device and compiler: half a second instead of minutes.

The state is exact: it comes from the layout. The rest is found by tracing one device's share of the forward and
backward pass (`local_step`) and walking it with the fusions that XLA makes (`liveness`). No number is fitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh

from framework.devices.accelerators import AcceleratorSpec
from framework.layers.base import batch_specs
from framework.layout import OptStateSpec, StateLayout
from framework.models.causal_lm import CausalLM
from framework.optimizers.reach import Reach
from framework.plan.jaxprs import FlopCount, flops
from framework.plan.liveness import Rules, most_held, on_host
from framework.plan.local_step import trace
from framework.plan.naming import OF_LAYOUT
from framework.plan.report import KEYS
from framework.program.experiment import Experiment
from framework.schedules.pieces import BLOCK

# XLA's CPU compiler never computes these twice (InstructionFusion::IsExpensive).
_COSTLY = ("exp", "log", "logistic", "tanh", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "div")


class Estimate(NamedTuple):
    """Bytes of one device at the instant of the peak, by the keys of a report's breakdown, and of its host's memory;
    and the matrix products' FLOPs of one step on all devices, with what is recomputed."""

    breakdown: dict[str, int]
    host_breakdown: dict[str, int]
    flops: FlopCount

    @property
    def peak_bytes(self) -> int:
        """Of one device."""
        return sum(self.breakdown.values())

    @property
    def host_bytes(self) -> int:
        """In the host's memory, of one device."""
        return sum(self.host_breakdown.values())


def estimate(experiment: Experiment, sizes: dict[str, int], spec: AcceleratorSpec) -> Estimate:
    """What one step of `experiment` needs on each device of a mesh of these sizes (`experiment.mesh.resolve(n)`).

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards, or the batch.
    """
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    data, learner, memory = experiment.data, experiment.learner, experiment.memory
    experiment.model.check(mesh, data)
    if data.global_batch_size % (learner.accumulate * sizes["data"] * sizes["fsdp"]):
        experiment.check(mesh)  # says so; it takes too long to be asked each time
    layout = StateLayout(experiment.state_specs(), mesh)
    breakdown, host = dict.fromkeys(KEYS, 0), dict.fromkeys(KEYS, 0)
    for leaf in StateLayout(experiment.run_specs(), mesh):
        (breakdown if leaf.spec.memory_kind == "device" else host)[OF_LAYOUT[leaf.group]] += leaf.bytes_per_device
    for batch in batch_specs(data.arrays()).values():
        shard = layout.sharding(batch).shard_shape(batch.shape)
        breakdown["batch"] += math.prod(shard) * batch.dtype.itemsize
    traced = trace(experiment, sizes, spec.platform)
    backward = _backward(experiment, layout, sizes, spec.platform, traced)
    if (
        learner.accumulate > 1 and memory.gradients == "device"
    ):  # the sums of the microbatches' gradients, which are there all the time
        for leaf in layout:
            if leaf.group == "parameter":
                summed_in: Any = learner.gradient_dtype(leaf.spec)  # pyright: ignore[reportArgumentType]
                backward["gradients"] += leaf.bytes_per_device // leaf.spec.dtype.itemsize * summed_in.itemsize
    if spec.platform == "cpu":  # its compiler copies what the optimizer keeps before it updates that
        backward["activations"] += layout.bytes_per_device("optimizer", "device")
    if "offload" in memory.remat or memory.activations != "device":
        host["activations"] = _backward(experiment, layout, sizes, spec.platform, traced, host=True).total()
    units = {name: stack.num_units for name, stack in experiment.model.stacks.items()}
    if memory.update == "in_backward":  # a unit's gradients wait until all of it is updated
        backward["gradients"] += max(sum(_stacked(layout, [name]).values()) // count for name, count in units.items())
    if memory.update == "after_backward":
        update = _update(layout, spec, sum(breakdown.values()))
    else:
        update = _piece(layout, units, {learner.reach(group) for group in learner.groups})
    if memory.update in ("streamed", "layer_programs") and memory.gradients == "device":
        update["gradients"] = layout.bytes_per_device("parameter")
    for group, size in max(backward, update, key=Counter.total).items():
        breakdown[group] += size
    return Estimate(breakdown, host, _flops(experiment, sizes, traced))


def _flops(experiment: Experiment, sizes: dict[str, int], traced: ClosedJaxpr) -> FlopCount:
    """Of the forward and backward passes of all microbatches on all devices, not of an optimizer (Muon, GaLore)."""
    learner, memory = experiment.learner, experiment.memory
    microbatch = flops(traced)
    total = microbatch.flops * math.prod(sizes.values()) * learner.accumulate
    unkept = memory.update == "in_backward" or memory.gradients == "none"
    if learner.clip is not None and learner.clip_mode == "two_pass" and unkept:
        # The norm of all gradients is needed before the first update, and gradients do not stay: they are made twice.
        tokens = experiment.data.global_batch_size * experiment.data.seq_len
        total += total - round(experiment.model.forward_flops_per_token(experiment.data.seq_len) * tokens)
    return FlopCount(total, microbatch.uncounted_loops)


def _taken(experiment: Experiment) -> bool:
    """Whether gradients are taken away as the backward pass makes them."""
    return experiment.memory.update == "in_backward" or experiment.memory.gradients != "device"


def _stacked(layout: StateLayout, stacks: Collection[str]) -> dict[tuple[int, ...], int]:
    """{a device's share of the shape: bytes} of stacks' trainable parameters, those of a shape together."""
    found: Counter[tuple[int, ...]] = Counter()
    for leaf in layout:
        if leaf.group == "parameter" and leaf.path.split("/")[1] in stacks:
            found[layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)] += leaf.bytes_per_device
    return found


def _backward(
    experiment: Experiment,
    layout: StateLayout,
    sizes: dict[str, int],
    platform: str,
    traced: ClosedJaxpr,
    *,
    host: bool = False,
) -> Counter[str]:
    """The most that the gradients of one microbatch hold besides state and batch, on the device or in host memory.
    Gradients of the stack that are taken away are not counted."""
    model, taken = experiment.model, _taken(experiment)
    units, gradients = {stack.num_units for stack in model.stacks.values()}, _stacked(layout, model.stacks)
    weights = {layout.sharding(leaf.spec).shard_shape(leaf.spec.shape) for leaf in layout if leaf.group == "parameter"}
    weights |= {shape[1:] for shape in gradients}
    shards = sizes["data"] * sizes["fsdp"] * sizes["seq"]

    def away(aval: Any) -> bool:
        """Whether it is what was kept of all units, in host memory."""
        if on_host(aval):
            return True
        kept = (
            experiment.memory.activations != "device"
            and aval.shape
            and aval.shape[0] in units
            and aval.shape not in gradients
        )
        size = math.prod(aval.shape[1:]) * shards * getattr(aval.dtype, "itemsize", 4)
        return kept and len(aval.shape) > 2 and size >= 1 << 20

    table, lengths = (-1,), ()
    if isinstance(model, CausalLM):
        table, length = (model.vocab_size // sizes["model"], model.dim), experiment.data.seq_len
        lengths = (length, length // sizes["seq"])

    def nbytes(aval: Any) -> int:
        if away(aval) != host or aval.shape in (weights if host else gradients if taken else ()):
            return 0
        *rest, last = (*aval.shape,) or (1,)
        itemsize = getattr(aval.dtype, "itemsize", 4)
        if platform == "tpu" and len(rest) >= 3 and rest[-1] in lengths and last > 1:
            # What a kernel reads and writes is [..., S, H] in that order, in rows of whole registers of 128.
            last = -(-last // 128) * 128
        if platform == "cpu" and jnp.issubdtype(aval.dtype, jnp.floating):
            itemsize = max(itemsize, 4)  # half precision is computed in float32, and stacks are converted as a whole
        return math.prod(rest) * last * itemsize

    # The head sums the gradient of its table in shards over fsdp, chunk by chunk.
    rules = Rules(
        costly=_COSTLY if platform == "cpu" else (),
        late_reduction=platform == "tpu",
        early_zeros=platform != "tpu" and math.prod(sizes.values()) > 1,
        pads_products=platform == "gpu",
        adds_products=platform == "tpu",
        table=table,
        table_parts=sizes["fsdp"],
        nbytes=nbytes,
    )
    jaxpr = traced.jaxpr
    return most_held(jaxpr, rules, ["gradients"] * len(jaxpr.outvars), taken=taken)


def _update(layout: StateLayout, spec: AcceleratorSpec, resident: int) -> Counter[str]:
    """What the update holds besides the `resident` state: gradients, and what it moves to the device from the host.

    All of the host's state comes at once. Selecting between old and new values (a step that is not finite changes
    nothing) happens after both exist for the largest arrays, unless the device would be too small: then one at a time.
    GPUs read and write host memory where it is.
    """
    hosted = [leaf.bytes_per_device for leaf in layout if leaf.spec.memory_kind != "device"]
    if spec.platform == "gpu" or not hosted:
        return Counter()
    found = Counter(gradients=layout.bytes_per_device("parameter"), optimizer_state=sum(hosted))
    selected = sum(size for size in hosted if size == max(hosted))
    if spec.limit_bytes is not None:
        selected = max(0, min(selected, spec.limit_bytes - resident - sum(found.values())))
    return found + Counter(activations=selected)


def _piece(layout: StateLayout, units: dict[str, int], reaches: set[Reach]) -> Counter[str]:
    """What an update by pieces moves: what is hosted of two pieces on its way in, and of two on its way out."""
    tensors: Counter[str] = Counter()
    for leaf in layout:
        if leaf.group != "frozen" and leaf.spec.memory_kind != "device":
            _, stage, path = leaf.path.split("/", 2)
            part = leaf.bytes_per_device // units.get(stage, 1)
            owner = leaf.spec.owner if isinstance(leaf.spec, OptStateSpec) and leaf.group == "optimizer" else path
            tensors[f"{stage}/{owner}"] += min(part, 4 * BLOCK) if reaches <= {"element", "row"} else part
    largest = sum(tensors.values()) if reaches & {"unit"} else max(tensors.values(), default=0)
    return Counter(optimizer_state=4 * largest)
