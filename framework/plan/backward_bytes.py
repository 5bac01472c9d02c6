"""Peak memory of the backward pass, from a trace of one device's share of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.layout import Leaf, StateLayout
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.plan.liveness import Rules, most_held, on_host
from plimsoll.framework.plan.sectioned import Sectioned

# XLA's CPU compiler never computes these twice (InstructionFusion::IsExpensive).
_COSTLY = ("exp", "log", "logistic", "tanh", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "div")
Shape = tuple[int, ...]


def stage_of(leaf: Leaf) -> str:
    """Return the stage that a leaf of the state belongs to."""
    return leaf.path.split("/")[1]


def shard_shape(layout: StateLayout, leaf: Leaf) -> Shape:
    """Return the shape of one device's shard of a leaf."""
    return layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)


def stacked_bytes(layout: StateLayout, stacks: Collection[str]) -> dict[Shape, int]:
    """Return {shard shape: bytes per device} of the stacks' trainable parameters, summed over leaves of one shape."""
    bytes_by_shape: Counter[Shape] = Counter()
    for leaf in layout:
        if leaf.group == "parameter" and stage_of(leaf) in stacks:
            bytes_by_shape[shard_shape(layout, leaf)] += leaf.bytes_per_device
    return bytes_by_shape


def backward_bytes(backward_pass: BackwardPass) -> Counter[str]:
    """Return the bytes by group that a device holds at the peak of the backward pass, excluding state and batch."""
    sectioned = backward_pass.sectioned
    layout = backward_pass.layout
    learner = sectioned.experiment.learner
    most = backward_pass.most_held(on_the_host=False)
    if learner.accumulate > 1:
        # The accumulated gradients of the microbatches are alive during the whole pass.
        for leaf in layout:
            if leaf.group == "parameter" and not sectioned.takes_gradients(stage_of(leaf)):
                sum_dtype: Any = learner.gradient_dtype(leaf.spec)  # pyright: ignore[reportArgumentType]
                num_elements = leaf.bytes_per_device // leaf.spec.dtype.itemsize
                most["gradients"] += num_elements * sum_dtype.itemsize
    if backward_pass.platform == "cpu":
        # The CPU compiler copies the optimizer state before it updates it.
        most["activations"] += layout.bytes_per_device("optimizer", "device")
    if sectioned.experiment.memory.update == "in_backward":
        # A layer's gradients stay alive until the whole layer is updated.
        unit_sizes = []
        for name, stack in sectioned.stacks.items():
            stack_bytes = sum(stacked_bytes(layout, [name]).values())
            unit_sizes.append(stack_bytes // stack.num_units)
        most["gradients"] += max(unit_sizes)
    return most


@dataclass
class BackwardPass:
    """The backward pass of one microbatch on one device; `traced` is the program that computes its gradients."""

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
        # Fraction of the gradient bytes that leaves the device, by gradient shape. It can be partial, because two layer
        # ranges with the same number of layers have the same shapes even if only one keeps its gradients on the device.
        self.taken_shares = {shape: taken_bytes.get(shape, 0) / size for shape, size in stack_bytes.items()}
        self.weight_shapes = {shard_shape(layout, leaf) for leaf in layout if leaf.group == "parameter"}
        # Loops over layers see the weights of one layer, without the layer axis.
        self.weight_shapes |= {shape[1:] for shape in stack_bytes}
        # Fraction of the saved activations that is offloaded, by the number of layers in the range.
        offloading = self.sectioned.offloading_stacks
        offloads_by_count: dict[int, list[bool]] = {}
        for name, stack in stacks.items():
            offloads_by_count.setdefault(stack.num_units, []).append(name in offloading)
        self.offloaded_shares = {count: sum(offloads) / len(offloads) for count, offloads in offloads_by_count.items()}

    def most_held(self, *, on_the_host: bool) -> Counter[str]:
        """Return the peak bytes by group of the pass, excluding state and batch.

        Gradients that leave the device as soon as they are computed are not counted.

        Args:
            on_the_host: count host memory instead of device memory.
        """
        sectioned = self.sectioned
        jaxpr = self.traced.jaxpr
        groups = ["gradients"] * len(jaxpr.outvars)
        # If only layers are in host memory, the gradients of the embedding and the head stay until the end.
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
        """Return a function that maps an abstract value to the bytes it occupies in host or device memory."""

        def nbytes(aval: Any) -> int:
            hosted_share = self._host_fraction(aval)
            share = hosted_share if on_the_host else 1.0 - hosted_share
            if on_the_host and aval.shape in self.weight_shapes:
                share = 0.0
            if not on_the_host:
                share *= 1.0 - self.taken_shares.get(aval.shape, 0.0)
            return round(share * self._count_padded_bytes(aval)) if share else 0

        return nbytes

    def _host_fraction(self, aval: Any) -> float:
        """Return the fraction of an array that is in host memory, such as of the stacked residuals of all layers."""
        if on_host(aval):
            return 1.0
        if len(aval.shape) <= 2 or aval.shape in self.taken_shares:
            return 0.0
        num_batch_shards = batch_shards(self.sizes) * self.sizes["seq"]
        itemsize = getattr(aval.dtype, "itemsize", 4)
        # Arrays below 1 MiB per layer, summed over all devices, are not offloaded.
        unit_bytes = math.prod(aval.shape[1:]) * num_batch_shards * itemsize
        return self.offloaded_shares.get(aval.shape[0], 0.0) if unit_bytes >= 1 << 20 else 0.0

    def _count_padded_bytes(self, aval: Any) -> int:
        *leading_dims, last_dim = (*aval.shape,) or (1,)
        itemsize = getattr(aval.dtype, "itemsize", 4)
        if self.platform == "tpu" and self._is_for_a_kernel(leading_dims, last_dim):
            # Kernels read and write [..., S, H] in that order, with H padded to whole registers of 128 lanes.
            last_dim = -(-last_dim // 128) * 128
        if self.platform == "cpu" and jnp.issubdtype(aval.dtype, jnp.floating):
            # The CPU computes half precision in float32 and converts whole stacks at once.
            itemsize = max(itemsize, 4)
        return math.prod(leading_dims) * last_dim * itemsize

    def _is_for_a_kernel(self, leading_dims: list[int], last_dim: int) -> bool:
        """Return whether the last two dimensions are positions (all, or one seq shard) and features per position."""
        if not isinstance(self.sectioned.model, CausalLM):
            return False
        seq_len = self.sectioned.experiment.data.seq_len
        lengths = (seq_len, seq_len // self.sizes["seq"])
        return len(leading_dims) >= 3 and leading_dims[-1] in lengths and last_dim > 1
