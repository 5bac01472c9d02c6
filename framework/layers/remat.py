"""Gradient checkpointing: `memory.remat` and its policies, whose names are known here alone.

none            every activation is kept, the weights' casts and gathers are not
full            only each unit's input is kept
sqrt, sqrt:G    only the input of each group of G units, about the square root of their number; the backward pass
                runs a group forward to keep its units' inputs, and each of these once more (arXiv 1604.06174)
dots            the results of matrix products are kept
dots_no_batch   the same, but not of products with a batch dimension (attention scores)
save:A,B        only the activations with these names: query, key, value, attention, output, mlp_gate, mlp_up, mlp_down.
                MaxText's "minimal" is all of them but attention
offload         only each unit's input is kept, in host memory
invert          nothing but the stack's output is kept: each unit's input is found from its output, backwards. Needs
                layers that can be run so (framework.layers.reversible)
offload:A,B     the activations with these names are kept in host memory ("input" is the unit's, which would else be
                on the device); with more names on the device: save:A;offload:B
POLICY:N,...    the policy of the first N layers, of the next ones, and so on; the last one needs no number:
                full:20,dots:12; sqrt:4:20,save:query,mlp_up:12; full:20,dots
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from framework.layout import nearest_divisors

# A unit's input. In a loop's body, naming the result would offload nothing (jax#23869).
INPUT = "input"
ACTIVATION_NAMES = ("query", "key", "value", "attention", "output", "mlp_gate", "mlp_up", "mlp_down")
POLICIES = ("none", "full", "sqrt", "dots", "dots_no_batch", "offload", "invert")
# The name of prepared weights, which no policy keeps.
_WEIGHTS = "weights"


class Span(NamedTuple):
    """Layers that follow each other and have the same policy.

    Attributes:
      policy: one policy.
      layers: their number; None for all that are left.
    """

    policy: str
    layers: int | None


def spans(remat: str) -> list[Span]:
    """What a setting says of the layers, from the first on; one policy alone is that of all layers.

    Raises:
        ValueError: it is no policy, and no list of policies with numbers of layers.
    """
    if _is_policy(remat):
        return [Span(remat, None)]
    listed_spans = []
    # Commas separate the names of one policy, too, so words are gathered until a policy and its number are there.
    gathered = ""
    for word in remat.split(","):
        gathered = f"{gathered},{word}" if gathered else word
        policy, _, number = gathered.rpartition(":")
        if re.fullmatch("[1-9][0-9]*", number) and _is_policy(policy):
            listed_spans.append(Span(policy, int(number)))
            gathered = ""
    if listed_spans and _is_policy(gathered):
        listed_spans.append(Span(gathered, None))
        gathered = ""
    if gathered:
        raise ValueError(
            f"expected {', '.join(POLICIES)}, sqrt:NUMBER, save:NAME,NAME, offload:NAME,NAME or save:NAME;offload:NAME "
            f"of {INPUT}, {', '.join(ACTIVATION_NAMES)}; or such policies with their numbers of layers, as in "
            f"full:20,dots:12; given {remat!r}"
        )
    return listed_spans


def _is_policy(remat: str) -> bool:
    """Whether `remat` is one policy."""
    saved, offloaded = _names(remat)
    names = saved + offloaded
    valid_names = {INPUT, *ACTIVATION_NAMES}
    # A name stands once: its activation is either saved or offloaded.
    are_unique = len(set(names)) == len(names)
    is_list_of_names = bool(names) and are_unique and valid_names.issuperset(names)
    has_group_size = re.fullmatch("sqrt:[1-9][0-9]*", remat) is not None
    return remat in POLICIES or is_list_of_names or has_group_size


def check_platform(remat: str, platform: str) -> None:
    """Raises ValueError when the policy would give wrong gradients on this platform (tpu, gpu or cpu)."""
    offloads = any(_names(span.policy)[1] for span in spans(remat))
    if platform == "gpu" and offloads:
        raise ValueError(
            f"memory.remat = {remat}: what a loop offloads is silently wrong in the gradients of XLA's GPU compiler "
            "(openxla/xla#46231); on GPU expected sqrt, full or another policy without offload"
        )


def group_size(remat: str, num_units: int) -> int | None:
    """The number of units in a group of which only the input is kept; each unit is then recomputed as under `full`.

    None for policies without groups, and where a group would be one unit or all of them: both are as `full`.

    Raises:
        ValueError: the size in sqrt:G does not divide the number of units.
    """
    policy, _, suffix = remat.partition(":")
    if policy != "sqrt":
        return None
    if suffix:
        size = int(suffix)
    else:
        divisors = nearest_divisors(num_units, math.isqrt(num_units))
        size = min(divisors, key=lambda divisor: abs(divisor * divisor - num_units))
    if num_units % size:
        raise ValueError(
            f"memory.remat = {remat}: groups of {size} do not divide the stack's {num_units} units; "
            f"nearest that do: {nearest_divisors(num_units, size)}"
        )
    return size if 1 < size < num_units else None


def wrap(unit: Callable[..., Any], remat: str, *, unrolled: bool) -> Callable[..., Any]:
    """`unit` under jax.checkpoint with the policy of that name. The unit names its prepared weights by `tag_weights`.

    Args:
        unit: any function; its first argument is its input.
        remat: the policy; under sqrt, that of a unit within its group.
        unrolled: units stand one after the other, in no loop.
    """
    policies = jax.checkpoint_policies
    saved, offloaded = _names(remat)
    if remat == "none":
        # A policy too: casts and gathered weights must not be kept for the backward pass, or fsdp
        # would hold a whole gathered model there.
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

    def named(carry: Any, *unit_args: Any) -> Any:
        return unit(_tag(carry, INPUT), *unit_args)

    # Without a loop XLA would merge what the backward pass recomputes with the forward pass, and so
    # keep it, unless barriers stop it (prevent_cse). In a loop they are not needed.
    function = named if INPUT in offloaded else unit
    return jax.checkpoint(function, policy=policy, prevent_cse=unrolled)


def _names(remat: str) -> tuple[list[str], list[str]]:
    """The names of activations that are kept on the device, and of those that are kept in host memory."""
    if remat == "offload":
        return [], [INPUT]
    match = re.fullmatch("(?:save:([^;]+))?(?:(?:^|;)offload:([^;]+))?", remat)
    if match is None:
        return [], []
    saved, offloaded = match.groups()
    saved_names = saved.split(",") if saved else []
    offloaded_names = offloaded.split(",") if offloaded else []
    return saved_names, offloaded_names


def _all_but_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keeps everything but prepared weights: neither values with their name, nor casts and gathers before the name."""
    if primitive.name == "name":
        return params["name"] != _WEIGHTS
    # Casts and constraints of activations are computed again from their operands, which are kept.
    # A custom_vjp_call stands where nothing is differentiated: a frozen weight that is gathered.
    recomputed = (
        "convert_element_type",
        "sharding_constraint",
        "all_gather",
        "custom_vjp_call",
    )
    return primitive.name not in recomputed


def tag_weights(weights: Any) -> Any:
    """Names prepared weights, so that no policy keeps them."""
    return _tag(weights, _WEIGHTS)


def _tag(tree: Any, name: str) -> Any:
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
