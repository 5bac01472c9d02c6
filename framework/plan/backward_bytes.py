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
from plimsoll.framework.layout import StateLayout, StateLeaf
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.plan.liveness import CompilerRules, find_peak_bytes, on_host
from plimsoll.framework.plan.split_experiment import SplitExperiment

# XLA's CPU compiler never computes these twice (InstructionFusion::IsExpensive).
_EXPENSIVE_OPS = ("exp", "log", "logistic", "tanh", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "div")
Shape = tuple[int, ...]


def get_stage(leaf: StateLeaf) -> str:
    """Return the stage that a leaf of the state belongs to."""
    return leaf.path.split("/")[1]


def shard_shape(layout: StateLayout, leaf: StateLeaf) -> Shape:
    """Return the shape of one device's shard of a leaf.

    Args:
        layout: layout of the state.
        leaf: leaf of that layout.
    """
    return layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)


def count_stack_bytes(layout: StateLayout, stacks: Collection[str]) -> dict[Shape, int]:
    """Return {shard shape: bytes per device} of the stacks' trainable parameters, summed over leaves of one shape.

    Args:
        layout: layout of the state.
        stacks: stages of the stacks to count.
    """
    bytes_by_shape: Counter[Shape] = Counter()
    for leaf in layout:
        if leaf.group == "parameter" and get_stage(leaf) in stacks:
            bytes_by_shape[shard_shape(layout, leaf)] += leaf.bytes_per_device
    return bytes_by_shape


def backward_bytes(backward_pass: TracedBackward) -> Counter[str]:
    """Return the bytes by group that a device holds at the peak of the backward pass, excluding state and batch."""
    split_experiment = backward_pass.split_experiment
    layout = backward_pass.layout
    learner = split_experiment.experiment.learner
    most = backward_pass.find_peak_bytes(in_host_memory=False)
    if learner.accumulate > 1:
        # The accumulated gradients of the microbatches are alive during the whole pass.
        for leaf in layout:
            if leaf.group == "parameter" and not split_experiment.releases_gradients(get_stage(leaf)):
                sum_dtype: Any = learner.gradient_dtype(leaf.spec)  # pyright: ignore[reportArgumentType]
                num_elements = leaf.bytes_per_device // leaf.spec.dtype.itemsize
                most["gradients"] += num_elements * sum_dtype.itemsize
    if backward_pass.platform == "cpu":
        # The CPU compiler copies the optimizer state before it updates it.
        most["activations"] += layout.bytes_per_device("optimizer", "device")
    traits = split_experiment.experiment.memory.traits
    if traits.updates_in_backward and not traits.is_many_programs:
        # A layer's gradients stay alive until the whole layer is updated.
        layer_sizes = []
        for name, stack in split_experiment.stacks.items():
            stack_bytes = sum(count_stack_bytes(layout, [name]).values())
            layer_sizes.append(stack_bytes // stack.num_repeats)
        most["gradients"] += max(layer_sizes)
    return most


@dataclass
class TracedBackward:
    """The backward pass of one microbatch on one device; `traced` is the program that computes its gradients."""

    split_experiment: SplitExperiment
    layout: StateLayout
    sizes: dict[str, int]
    platform: str
    traced: ClosedJaxpr

    def __post_init__(self) -> None:
        layout = self.layout
        stacks = self.split_experiment.stacks
        stack_bytes = count_stack_bytes(layout, stacks)
        releasing_stacks = [name for name in stacks if self.split_experiment.releases_gradients(name)]
        released_bytes = count_stack_bytes(layout, releasing_stacks)
        # Fraction of the gradient bytes that leaves the device, by gradient shape. It can be partial, because two layer
        # ranges with the same number of layers have the same shapes even if only one keeps its gradients on the device.
        self.released_shares = {shape: released_bytes.get(shape, 0) / size for shape, size in stack_bytes.items()}
        self.weight_shapes = {shard_shape(layout, leaf) for leaf in layout if leaf.group == "parameter"}
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
        jaxpr = self.traced.jaxpr
        groups = ["gradients"] * len(jaxpr.outvars)
        # If only layers are in host memory, the gradients of the embedding and the head stay until the end.
        releases_all = all(split_experiment.releases_gradients(stage) for stage in split_experiment.specs.parameter)
        return find_peak_bytes(jaxpr, self._rules(in_host_memory), groups, frees_outputs=releases_all)

    def _rules(self, in_host_memory: bool) -> CompilerRules:
        model = self.split_experiment.model
        platform = self.platform
        table = (-1,)
        if isinstance(model, CausalLM):
            table = (model.vocab_size // self.sizes["model"], model.dim)
        # The head sums the gradient of its table in shards over fsdp, chunk by chunk.
        return CompilerRules(
            costly=_EXPENSIVE_OPS if platform == "cpu" else (),
            late_reduction=platform == "tpu",
            early_zeros=platform != "tpu" and math.prod(self.sizes.values()) > 1,
            pads_products=platform == "gpu",
            adds_products=platform == "tpu",
            table=table,
            table_shards=self.sizes["fsdp"],
            nbytes=self._byte_counter(in_host_memory),
        )

    def _byte_counter(self, in_host_memory: bool) -> Callable[[Any], int]:
        """Return a function that maps an abstract value to the bytes it occupies in host or device memory."""

        def nbytes(aval: Any) -> int:
            host_share = self._host_fraction(aval)
            share = host_share if in_host_memory else 1.0 - host_share
            if in_host_memory and aval.shape in self.weight_shapes:
                share = 0.0
            if not in_host_memory:
                share *= 1.0 - self.released_shares.get(aval.shape, 0.0)
            return round(share * self._count_padded_bytes(aval)) if share else 0

        return nbytes

    def _host_fraction(self, aval: Any) -> float:
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
        if not isinstance(self.split_experiment.model, CausalLM):
            return False
        seq_len = self.split_experiment.experiment.data.seq_len
        lengths = (seq_len, seq_len // self.sizes["seq"])
        return len(leading_dims) >= 3 and leading_dims[-1] in lengths and last_dim > 1
