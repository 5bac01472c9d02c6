"""What the backward pass holds at its fullest instant, by a trace of one device's share of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from framework.layers.base import batch_shards
from framework.layout import Leaf, StateLayout
from framework.models.causal_lm import CausalLM
from framework.plan.liveness import Rules, most_held, on_host
from framework.plan.sectioned import Sectioned

# XLA's CPU compiler never computes these twice (InstructionFusion::IsExpensive).
_COSTLY = ("exp", "log", "logistic", "tanh", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "div")
Shape = tuple[int, ...]


def stage_of(leaf: Leaf) -> str:
    """The stage of a leaf of the state."""
    return leaf.path.split("/")[1]


def shard_shape(layout: StateLayout, leaf: Leaf) -> Shape:
    """The shape of a device's share of a leaf."""
    return layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)


def stacked_bytes(layout: StateLayout, stacks: Collection[str]) -> dict[Shape, int]:
    """{a device's share of the shape: bytes} of the stacks' trainable parameters, those of a shape added up."""
    bytes_by_shape: Counter[Shape] = Counter()
    for leaf in layout:
        if leaf.group == "parameter" and stage_of(leaf) in stacks:
            bytes_by_shape[shard_shape(layout, leaf)] += leaf.bytes_per_device
    return bytes_by_shape


def backward_bytes(backward_pass: BackwardPass) -> Counter[str]:
    """Bytes that a device holds at the fullest instant of the backward pass, besides state and batch."""
    sectioned = backward_pass.sectioned
    layout = backward_pass.layout
    learner = sectioned.experiment.learner
    most = backward_pass.most_held(on_the_host=False)
    if learner.accumulate > 1:
        # The sums of the microbatches' gradients are there all the time.
        for leaf in layout:
            if leaf.group == "parameter" and not sectioned.takes_gradients(stage_of(leaf)):
                sum_dtype: Any = learner.gradient_dtype(leaf.spec)  # pyright: ignore[reportArgumentType]
                num_elements = leaf.bytes_per_device // leaf.spec.dtype.itemsize
                most["gradients"] += num_elements * sum_dtype.itemsize
    if backward_pass.platform == "cpu":
        # The CPU's compiler copies what the optimizer keeps before it updates that.
        most["activations"] += layout.bytes_per_device("optimizer", "device")
    if sectioned.experiment.memory.update == "in_backward":
        # A unit's gradients wait until all of it is updated.
        unit_sizes = []
        for name, stack in sectioned.stacks.items():
            stack_bytes = sum(stacked_bytes(layout, [name]).values())
            unit_sizes.append(stack_bytes // stack.num_units)
        most["gradients"] += max(unit_sizes)
    return most


@dataclass
class BackwardPass:
    """The gradients of one microbatch on one device; `traced` is their program."""

    sectioned: Sectioned
    layout: StateLayout
    sizes: dict[str, int]
    platform: str
    traced: ClosedJaxpr

    def __post_init__(self) -> None:
        layout = self.layout
        stacks = self.sectioned.stacks
        stack_bytes = stacked_bytes(layout, stacks)
        taking_stacks = [name for name in stacks if self.sectioned.takes_gradients(name)]
        taken_bytes = stacked_bytes(layout, taking_stacks)
        # By the shape of a stack's gradient, the part that leaves the device: two sections of as many units, of which
        # one keeps its gradients there, have the same shapes.
        self.taken_shares = {shape: taken_bytes.get(shape, 0) / size for shape, size in stack_bytes.items()}
        self.weight_shapes = {shard_shape(layout, leaf) for leaf in layout if leaf.group == "parameter"}
        # Loops over units see the weights of one unit, without the axis of layers.
        self.weight_shapes |= {shape[1:] for shape in stack_bytes}
        # Likewise, by the number of units, the part of what is kept of them that goes to the host.
        offloading = self.sectioned.offloading_stacks
        offloads_by_count: dict[int, list[bool]] = {}
        for name, stack in stacks.items():
            offloads_by_count.setdefault(stack.num_units, []).append(name in offloading)
        self.offloaded_shares = {count: sum(offloads) / len(offloads) for count, offloads in offloads_by_count.items()}

    def most_held(self, *, on_the_host: bool) -> Counter[str]:
        """The most that the pass holds besides state and batch, in host memory or else on the device.

        Gradients of the stacks that are taken away are not counted.
        """
        sectioned = self.sectioned
        jaxpr = self.traced.jaxpr
        groups = ["gradients"] * len(jaxpr.outvars)
        # With layers alone in host memory, the gradients of the embedding and the head stay until the end.
        takes_all = all(sectioned.takes_gradients(stage) for stage in sectioned.specs["parameter"])
        return most_held(
            jaxpr,
            self._rules(on_the_host),
            groups,
            taken=takes_all,
        )

    def _rules(self, on_the_host: bool) -> Rules:
        model = self.sectioned.model
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
            nbytes=self._byte_counter(on_the_host),
        )

    def _byte_counter(self, on_the_host: bool) -> Callable[[Any], int]:
        """The function that says how many bytes of the memory in question an abstract value takes up."""

        def nbytes(aval: Any) -> int:
            hosted_share = self._hosted_share(aval)
            share = hosted_share if on_the_host else 1.0 - hosted_share
            if on_the_host and aval.shape in self.weight_shapes:
                share = 0.0
            if not on_the_host:
                share *= 1.0 - self.taken_shares.get(aval.shape, 0.0)
            return round(share * self._padded_bytes(aval)) if share else 0

        return nbytes

    def _hosted_share(self, aval: Any) -> float:
        """The part of an array that is in host memory, such as of a stack of what all units keep for the backward
        pass."""
        if on_host(aval):
            return 1.0
        if len(aval.shape) <= 2 or aval.shape in self.taken_shares:
            return 0.0
        num_batch_shards = batch_shards(self.sizes) * self.sizes["seq"]
        itemsize = getattr(aval.dtype, "itemsize", 4)
        # Small arrays, of less than 1 MiB in one unit on all devices, stay on the device.
        unit_bytes = math.prod(aval.shape[1:]) * num_batch_shards * itemsize
        return self.offloaded_shares.get(aval.shape[0], 0.0) if unit_bytes >= 1 << 20 else 0.0

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
        if not isinstance(self.sectioned.model, CausalLM):
            return False
        seq_len = self.sectioned.experiment.data.seq_len
        lengths = (seq_len, seq_len // self.sizes["seq"])
        return len(leading_dims) >= 3 and leading_dims[-1] in lengths and last_dim > 1
