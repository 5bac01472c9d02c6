"""What a training step needs, without device and compiler: half a second instead of minutes.

The state is exact: it comes from the layout. The rest is found by tracing one device's share of the forward and
backward pass (`local_step`) and walking it with the fusions that XLA makes (`liveness`). No number is fitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh

from framework.devices.accelerators import AcceleratorSpec
from framework.layers.base import batch_specs
from framework.layout import Leaf, OptStateSpec, StateLayout
from framework.models.causal_lm import CausalLM
from framework.optimizers.reach import Reach
from framework.plan.jaxprs import FlopCount, flops
from framework.plan.liveness import Rules, most_held, on_host
from framework.plan.local_step import trace
from framework.plan.naming import OF_LAYOUT
from framework.plan.report import KEYS
from framework.plan.step_time.closed_form import Work, work_of
from framework.program.experiment import Experiment
from framework.program.program import execution_type
from framework.schedules.division import BLOCK

# XLA's CPU compiler never computes these twice (InstructionFusion::IsExpensive).
_COSTLY = ("exp", "log", "logistic", "tanh", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "div")
_Shape = tuple[int, ...]


class Estimate(NamedTuple):
    """The memory and the work of one training step.

    Attributes:
        breakdown: bytes of one device at the instant of the peak, by the keys of a report's breakdown.
        host_breakdown: likewise bytes of one device that are in its host's memory.
        flops: the matrix products' FLOPs of one step on all devices, with what is recomputed.
        work: what one device computes and moves in a step.
    """

    breakdown: dict[str, int]
    host_breakdown: dict[str, int]
    flops: FlopCount
    work: Work

    @property
    def peak_bytes(self) -> int:
        """Bytes of one device's memory."""
        return sum(self.breakdown.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of one device that are in host memory."""
        return sum(self.host_breakdown.values())


def estimate(
    experiment: Experiment,
    sizes: dict[str, int],
    spec: AcceleratorSpec,
    trace_of: Callable[[Experiment, dict[str, int], str], ClosedJaxpr] = trace,
) -> Estimate:
    """Estimates what one step of `experiment` needs on each device of a mesh.

    Args:
        experiment: what to train.
        sizes: of the mesh's axes, `experiment.mesh.resolve(num_devices)`.
        spec: of the devices.
        trace_of: traces as `local_step.trace` does, or knows the trace already.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards, or the batch.
    """
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    _check(experiment, mesh, sizes)
    specs = experiment.state_specs()
    layout = StateLayout(specs, mesh)
    running_specs = execution_type(experiment.memory).running_specs(experiment, specs)
    breakdown = dict.fromkeys(KEYS, 0)
    host_breakdown = dict.fromkeys(KEYS, 0)
    running_layout = StateLayout(running_specs, mesh)
    for leaf in running_layout:
        is_on_device = leaf.spec.memory_kind == "device"
        leaf_breakdown = breakdown if is_on_device else host_breakdown
        leaf_breakdown[OF_LAYOUT[leaf.group]] += leaf.bytes_per_device
    for batch in batch_specs(experiment.data.arrays()).values():
        shard_shape = layout.sharding(batch).shard_shape(batch.shape)
        breakdown["batch"] += math.prod(shard_shape) * batch.dtype.itemsize

    backward_pass = _BackwardPass(
        experiment,
        layout,
        sizes,
        spec.platform,
        trace_of(experiment, sizes, spec.platform),
    )
    if "offload" in experiment.memory.remat or experiment.memory.activations != "device":
        host_breakdown["activations"] = backward_pass.most_held(on_the_host=True).total()
    backward = _backward(backward_pass)
    update = _update(experiment, layout, spec, sum(breakdown.values()))
    # The peak is in the backward pass or in the update, whichever holds more; one is over when the
    # other begins.
    for group, size in max(backward, update, key=Counter.total).items():
        breakdown[group] += size
    step_flops = _flops(experiment, sizes, backward_pass.traced)
    device_flops = step_flops.flops / math.prod(sizes.values())
    work = work_of(
        experiment,
        sizes,
        running_layout,
        backward_pass.traced,
        device_flops,
        host_breakdown["activations"],
    )
    return Estimate(breakdown, host_breakdown, step_flops, work)


def least_bytes(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Bytes that each device holds at the least, without a trace: state, and gradients that exist all at once.

    Args:
        experiment: what to train.
        sizes: of the mesh's axes.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards.
    """
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    specs = experiment.state_specs()
    running_specs = execution_type(experiment.memory).running_specs(experiment, specs)
    total = StateLayout(running_specs, mesh).bytes_per_device(memory_kind="device")
    if not _gradients_are_taken_away(experiment):
        # Stacks have all of their gradients before the first update; an embedding's may be gone by then.
        total += sum(_stacked(StateLayout(specs, mesh), experiment.model.stacks).values())
    return total


def _check(experiment: Experiment, mesh: Any, sizes: dict[str, int]) -> None:
    """Raises ValueError where model and batch do not divide over the mesh."""
    experiment.model.check(mesh, experiment.data)
    num_batch_shards = experiment.learner.accumulate * sizes["data"] * sizes["fsdp"]
    if experiment.data.global_batch_size % num_batch_shards:
        # This check says what is wrong. It takes too long to be done each time.
        experiment.check(mesh)


def _flops(experiment: Experiment, sizes: dict[str, int], traced: ClosedJaxpr) -> FlopCount:
    """FLOPs of the forward and backward passes of all microbatches on all devices.

    The products of optimizers such as Muon and GaLore are left out.
    """
    learner = experiment.learner
    data = experiment.data
    microbatch = flops(traced)
    num_devices = math.prod(sizes.values())
    total = microbatch.flops * num_devices * learner.accumulate
    if learner.clip is not None and learner.clip_mode == "two_pass" and _gradients_are_not_kept(experiment):
        # The norm of all gradients is needed before the first update, and gradients do not stay:
        # they are made twice.
        tokens = data.global_batch_size * data.seq_len
        total += total - round(experiment.model.forward_flops_per_token(data.seq_len) * tokens)
    return FlopCount(total, microbatch.uncounted_loops)


def _gradients_are_not_kept(experiment: Experiment) -> bool:
    return experiment.memory.update == "in_backward" or experiment.memory.gradients == "none"


def _gradients_are_taken_away(experiment: Experiment) -> bool:
    """Whether gradients leave device memory as the backward pass makes them."""
    return experiment.memory.update == "in_backward" or experiment.memory.gradients != "device"


def _shard_shape(layout: StateLayout, leaf: Leaf) -> _Shape:
    return layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)


def _stacked(layout: StateLayout, stacks: Collection[str]) -> dict[_Shape, int]:
    """{a device's share of the shape: bytes} of the stacks' trainable parameters, those of a shape added up."""
    bytes_by_shape: Counter[_Shape] = Counter()
    for leaf in layout:
        if leaf.group == "parameter" and leaf.path.split("/")[1] in stacks:
            bytes_by_shape[_shard_shape(layout, leaf)] += leaf.bytes_per_device
    return bytes_by_shape


# --- the backward pass -----------------------------------------------------------------------------------------------


def _backward(backward_pass: _BackwardPass) -> Counter[str]:
    """Bytes that a device holds at the fullest instant of the backward pass, besides state and batch."""
    experiment = backward_pass.experiment
    layout = backward_pass.layout
    learner = experiment.learner
    memory = experiment.memory
    most = backward_pass.most_held(on_the_host=False)
    if learner.accumulate > 1 and memory.gradients == "device":
        # The sums of the microbatches' gradients are there all the time.
        for leaf in layout:
            if leaf.group == "parameter":
                sum_dtype: Any = learner.gradient_dtype(leaf.spec)  # pyright: ignore[reportArgumentType]
                num_elements = leaf.bytes_per_device // leaf.spec.dtype.itemsize
                most["gradients"] += num_elements * sum_dtype.itemsize
    if backward_pass.platform == "cpu":
        # The CPU's compiler copies what the optimizer keeps before it updates that.
        most["activations"] += layout.bytes_per_device("optimizer", "device")
    if memory.update == "in_backward":
        # A unit's gradients wait until all of it is updated.
        unit_sizes = []
        for name, stack in experiment.model.stacks.items():
            stack_bytes = sum(_stacked(layout, [name]).values())
            unit_sizes.append(stack_bytes // stack.num_units)
        most["gradients"] += max(unit_sizes)
    return most


@dataclass
class _BackwardPass:
    """The gradients of one microbatch on one device; `traced` is their program."""

    experiment: Experiment
    layout: StateLayout
    sizes: dict[str, int]
    platform: str
    traced: ClosedJaxpr

    def __post_init__(self) -> None:
        model = self.experiment.model
        layout = self.layout
        self.gradient_shapes = _stacked(layout, model.stacks)
        self.weight_shapes = {_shard_shape(layout, leaf) for leaf in layout if leaf.group == "parameter"}
        # Loops over units see the weights of one unit, without the axis of layers.
        self.weight_shapes |= {shape[1:] for shape in self.gradient_shapes}
        self.unit_counts = {stack.num_units for stack in model.stacks.values()}

    def most_held(self, *, on_the_host: bool) -> Counter[str]:
        """The most that the pass holds besides state and batch, in host memory or else on the device.

        Gradients of the stacks that are taken away are not counted.
        """
        gradients_taken = _gradients_are_taken_away(self.experiment)
        jaxpr = self.traced.jaxpr
        groups = ["gradients"] * len(jaxpr.outvars)
        return most_held(
            jaxpr,
            self._rules(on_the_host, gradients_taken),
            groups,
            taken=gradients_taken,
        )

    def _rules(self, on_the_host: bool, gradients_taken: bool) -> Rules:
        model = self.experiment.model
        platform = self.platform
        table = (-1,)
        if isinstance(model, CausalLM):
            table = (model.vocab_size // self.sizes["model"], model.dim)
        # The head sums the gradient of its table in shards over fsdp, chunk by chunk.
        return Rules(
            costly=_COSTLY if platform == "cpu" else (),
            late_reduction=platform == "tpu",
            early_zeros=platform != "tpu" and math.prod(self.sizes.values()) > 1,
            pads_products=platform == "gpu",
            adds_products=platform == "tpu",
            table=table,
            table_parts=self.sizes["fsdp"],
            nbytes=self._byte_counter(on_the_host, gradients_taken),
        )

    def _byte_counter(self, on_the_host: bool, gradients_taken: bool) -> Callable[[Any], int]:
        """The function that says how many bytes of the memory in question an abstract value takes up."""
        uncounted_shapes: Collection[_Shape] = ()
        if on_the_host:
            uncounted_shapes = self.weight_shapes
        elif gradients_taken:
            uncounted_shapes = self.gradient_shapes

        def nbytes(aval: Any) -> int:
            if self._is_on_host(aval) != on_the_host or aval.shape in uncounted_shapes:
                return 0
            return self._padded_bytes(aval)

        return nbytes

    def _is_on_host(self, aval: Any) -> bool:
        """Whether an array is in host memory, such as a stack of what all units keep for the backward pass."""
        if on_host(aval):
            return True
        is_kept_by_units = (
            self.experiment.memory.activations != "device"
            and aval.shape
            and aval.shape[0] in self.unit_counts
            and aval.shape not in self.gradient_shapes
        )
        num_batch_shards = self.sizes["data"] * self.sizes["fsdp"] * self.sizes["seq"]
        itemsize = getattr(aval.dtype, "itemsize", 4)
        # Small arrays, of less than 1 MiB in one unit on all devices, stay on the device.
        unit_bytes = math.prod(aval.shape[1:]) * num_batch_shards * itemsize
        return is_kept_by_units and len(aval.shape) > 2 and unit_bytes >= 1 << 20

    def _padded_bytes(self, aval: Any) -> int:
        *leading_dims, last_dim = (*aval.shape,) or (1,)
        itemsize = getattr(aval.dtype, "itemsize", 4)
        if self.platform == "tpu" and self._is_for_a_kernel(leading_dims, last_dim):
            # What a kernel reads and writes is [..., S, H] in that order, in rows of whole
            # registers of 128.
            last_dim = -(-last_dim // 128) * 128
        if self.platform == "cpu" and jnp.issubdtype(aval.dtype, jnp.floating):
            # Half precision is computed in float32, and stacks are converted as a whole.
            itemsize = max(itemsize, 4)
        return math.prod(leading_dims) * last_dim * itemsize

    def _is_for_a_kernel(self, leading_dims: list[int], last_dim: int) -> bool:
        """Whether the last dimensions are positions, of all or of one seq shard, and something of each position."""
        if not isinstance(self.experiment.model, CausalLM):
            return False
        seq_len = self.experiment.data.seq_len
        lengths = (seq_len, seq_len // self.sizes["seq"])
        return len(leading_dims) >= 3 and leading_dims[-1] in lengths and last_dim > 1


# --- the update ------------------------------------------------------------------------------------------------------


def _update(
    experiment: Experiment,
    layout: StateLayout,
    spec: AcceleratorSpec,
    resident: int,
) -> Counter[str]:
    """Bytes that a device holds in the update, besides the `resident` state and batch."""
    learner = experiment.learner
    memory = experiment.memory
    if memory.update == "after_backward":
        update = _whole_update(layout, spec, resident)
    else:
        reaches: set[Reach] = {learner.reach(group) for group in learner.groups}
        unit_counts = {name: stack.num_units for name, stack in experiment.model.stacks.items()}
        update = _piece(layout, unit_counts, reaches)
    if memory.update in ("streamed", "layer_programs") and memory.gradients == "device":
        update["gradients"] = layout.bytes_per_device("parameter")
    return update


def _whole_update(layout: StateLayout, spec: AcceleratorSpec, resident: int) -> Counter[str]:
    """What an update of everything at once holds besides the `resident` state: gradients, and what comes from the host.

    All of the host's state comes at once. Selecting between old and new values (a step that is not finite changes
    nothing) happens after both exist for the largest arrays, unless the device would be too small: then one at a time.
    """
    hosted_sizes = [leaf.bytes_per_device for leaf in layout if leaf.spec.memory_kind != "device"]
    # GPUs read and write host memory where it is.
    if spec.platform == "gpu" or not hosted_sizes:
        return Counter()
    moved = Counter(gradients=layout.bytes_per_device("parameter"), optimizer_state=sum(hosted_sizes))
    selected_bytes = sum(size for size in hosted_sizes if size == max(hosted_sizes))
    if spec.limit_bytes is not None:
        free_bytes = spec.limit_bytes - resident - sum(moved.values())
        selected_bytes = selected_bytes if selected_bytes <= free_bytes else 0
    return moved + Counter(activations=selected_bytes)


def _piece(layout: StateLayout, unit_counts: dict[str, int], reaches: set[Reach]) -> Counter[str]:
    """What an update by pieces moves: what is hosted of two pieces on its way in, and of two on its way out."""
    updates_blocks = reaches <= {"element", "row"}
    bytes_by_tensor: Counter[str] = Counter()
    for leaf in layout:
        if leaf.group == "frozen" or leaf.spec.memory_kind == "device":
            continue
        _, stage, path = leaf.path.split("/", 2)
        # The optimizer's state of a tensor is moved together with the tensor.
        owner = path
        if isinstance(leaf.spec, OptStateSpec) and leaf.group == "optimizer":
            owner = leaf.spec.owner
        unit_bytes = leaf.bytes_per_device // unit_counts.get(stage, 1)
        # Elements and rows are updated in blocks of so many elements, which are float32 (4 bytes)
        # at most.
        piece_bytes = min(unit_bytes, 4 * BLOCK) if updates_blocks else unit_bytes
        bytes_by_tensor[f"{stage}/{owner}"] += piece_bytes
    if reaches & {"unit"}:
        largest = sum(bytes_by_tensor.values())
    else:
        largest = max(bytes_by_tensor.values(), default=0)
    return Counter(optimizer_state=4 * largest)
