"""Gradient checkpointing: the policies of `memory.remat`. Only this module knows their names.

A layer is one repeat of a stack's pattern, which is usually a single layer config.

none            save every activation, but not the casts and gathers of weights
full            save only each layer's input
sqrt, sqrt:G    save only the input of each group of G layers, by default about the square root of their number; the
                backward pass runs a group forward to save its layers' inputs, and each layer once more (arXiv
                1604.06174)
dots            save the results of matrix products
dots_no_batch   the same, except products with a batch dimension (attention scores)
save:A,B        save only the activations with these names: query, key, value, attention, output, mlp_gate, mlp_up,
                mlp_down. MaxText's "minimal" is all of them except attention
offload         save only each layer's input, in host memory
invert          save nothing but the stack's output: each layer's input is computed from its output, in reverse order.
                Needs layers that support it (framework.layers.reversible)
offload:A,B     save the activations with these names in host memory ("input" is the layer's input, which is otherwise
                saved on the device); to save others on the device: save:A;offload:B
POLICY:N,...    the policy of the first N layers, of the next ones, and so on; the last policy needs no number:
                full:20,dots:12; sqrt:4:20,save:query,mlp_up:12; full:20,dots
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from plimsoll.framework.layers.base import Carry
from plimsoll.framework.layout import PyTree, nearest_divisors

# The name of a layer's input. In a loop's body, naming the result would offload nothing (jax#23869).
INPUT = "input"
ACTIVATION_NAMES = ("query", "key", "value", "attention", "output", "mlp_gate", "mlp_up", "mlp_down")
POLICIES = ("none", "full", "sqrt", "dots", "dots_no_batch", "offload", "invert")
# The name of prepared weights, which no policy saves.
WEIGHTS = "weights"
T = TypeVar("T")


@dataclass(frozen=True)
class PolicyRange:
    """Consecutive layers with the same policy.

    Attributes:
        policy: one policy.
        layers: the number of layers; None for all remaining ones.
    """

    policy: str
    layers: int | None


def parse_policies(remat: str) -> list[PolicyRange]:
    """Parse a setting into the policies of consecutive layers; a single policy applies to all layers.

    Raises:
        ValueError: the setting is neither a policy nor a list of policies with numbers of layers.
    """
    if _is_policy(remat):
        return [PolicyRange(remat, None)]
    policy_ranges = []
    # Commas also separate the names within one policy, so words are collected until they form a policy and its number.
    pending = ""
    for word in remat.split(","):
        pending = f"{pending},{word}" if pending else word
        policy, _, number = pending.rpartition(":")
        if re.fullmatch("[1-9][0-9]*", number) and _is_policy(policy):
            policy_ranges.append(PolicyRange(policy, int(number)))
            pending = ""
    if policy_ranges and _is_policy(pending):
        policy_ranges.append(PolicyRange(pending, None))
        pending = ""
    if pending:
        raise ValueError(
            f"expected {', '.join(POLICIES)}, sqrt:NUMBER, save:NAME,NAME, offload:NAME,NAME or save:NAME;offload:NAME "
            f"of {INPUT}, {', '.join(ACTIVATION_NAMES)}; or such policies with their numbers of layers, as in "
            f"full:20,dots:12; given {remat!r}"
        )
    return policy_ranges


def is_uniform(remat: str) -> bool:
    """Return whether a setting is one policy for all layers."""
    return parse_policies(remat) == [PolicyRange(remat, None)]


def _is_policy(remat: str) -> bool:
    """Return whether `remat` is a single policy."""
    saved, offloaded = _names(remat)
    names = saved + offloaded
    valid_names = {INPUT, *ACTIVATION_NAMES}
    # A name may occur only once: its activation is either saved or offloaded.
    are_unique = len(set(names)) == len(names)
    is_list_of_names = bool(names) and are_unique and valid_names.issuperset(names)
    has_group_size = re.fullmatch("sqrt:[1-9][0-9]*", remat) is not None
    return remat in POLICIES or is_list_of_names or has_group_size


def check_platform(remat: str, platform: str) -> None:
    """Raise ValueError if the policy would give wrong gradients on this platform (tpu, gpu or cpu)."""
    offloads = any(_names(span.policy)[1] for span in parse_policies(remat))
    if platform == "gpu" and offloads:
        raise ValueError(
            f"memory.remat = {remat}: XLA's GPU compiler computes wrong gradients from what a loop offloads "
            "(openxla/xla#46231); on GPU, use sqrt, full or another policy without offload"
        )


def group_size(remat: str, num_repeats: int) -> int | None:
    """Return the number of layers in a group that saves only its input; each layer is then recomputed as under `full`.

    Return None for policies without groups, and if a group would be one layer or all of them: both are the same as
    `full`.

    Args:
        remat: the policy.
        num_repeats: number of repeats of the stack's pattern.

    Raises:
        ValueError: the size in sqrt:G does not divide the number of layers.
    """
    policy, _, suffix = remat.partition(":")
    if policy != "sqrt":
        return None
    if suffix:
        size = int(suffix)
    else:
        divisors = nearest_divisors(num_repeats, math.isqrt(num_repeats))
        size = min(divisors, key=lambda divisor: abs(divisor * divisor - num_repeats))
    if num_repeats % size:
        raise ValueError(
            f"memory.remat = {remat}: groups of {size} do not divide the {num_repeats} repeats of the stack's pattern; "
            f"nearest that do: {nearest_divisors(num_repeats, size)}"
        )
    return size if 1 < size < num_repeats else None


def wrap(run_layer: Callable[..., T], remat: str, *, unrolled: bool) -> Callable[..., T]:
    """Wrap `run_layer` in jax.checkpoint with this policy. It names its prepared weights with `tag`.

    Args:
        run_layer: any function; its first argument is its input.
        remat: the policy; under sqrt, the policy of a layer within its group.
        unrolled: whether the layers run one after the other, without a loop.
    """
    policies = jax.checkpoint_policies
    saved, offloaded = _names(remat)
    if remat == "none":
        # "none" needs a policy too: casts and gathered weights must not be saved for the backward pass, or with fsdp
        # each device would hold the whole gathered model.
        policy = _all_but_weights
    elif remat == "dots":
        policy = policies.dots_saveable
    elif remat == "dots_no_batch":
        policy = policies.dots_with_no_batch_dims_saveable
    elif saved or offloaded:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.nothing_saveable

    def run_with_tagged_input(carry: Carry, *layer_args: PyTree) -> T:
        return run_layer(tag(carry, INPUT), *layer_args)

    # Without a loop, XLA would merge what the backward pass recomputes with the forward pass, and so save it, unless
    # barriers prevent that (prevent_cse). A loop needs no barriers.
    function = run_with_tagged_input if INPUT in offloaded else run_layer
    return jax.checkpoint(function, policy=policy, prevent_cse=unrolled)


def _names(remat: str) -> tuple[list[str], list[str]]:
    """Return the names of activations that are saved on the device, and of those that are saved in host memory."""
    if remat == "offload":
        return [], [INPUT]
    match = re.fullmatch("(?:save:([^;]+))?(?:(?:^|;)offload:([^;]+))?", remat)
    if match is None:
        return [], []
    saved, offloaded = match.groups()
    saved_names = saved.split(",") if saved else []
    offloaded_names = offloaded.split(",") if offloaded else []
    return saved_names, offloaded_names


def _all_but_weights(primitive: Primitive, *avals: object, **params: object) -> bool:
    """Save everything except prepared weights: neither values with their name, nor casts and gathers before it."""
    if primitive.name == "name":
        return params["name"] != WEIGHTS
    # Casts and constraints of activations are recomputed from their operands, which are saved. A custom_vjp_call
    # occurs where nothing is differentiated: a frozen weight that is gathered.
    recomputed = ("convert_element_type", "sharding_constraint", "all_gather", "custom_vjp_call")
    return primitive.name not in recomputed


def tag(tree: T, name: str) -> T:
    """Name arrays for the policies: a layer's input INPUT, and prepared weights WEIGHTS."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
