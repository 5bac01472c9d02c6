"""What the backward pass recomputes: `memory.remat`, the one place that knows the policies' names.

none            every activation is kept, the weights' casts and gathers are not
full            only each unit's input is kept
sqrt, sqrt:G    only the input of each group of G units, about the square root of their number; the backward pass
                runs a group forward to keep its units' inputs, and each of these once more (arXiv 1604.06174)
dots            the results of matrix products are kept
dots_no_batch   the same, but not of products with a batch dimension (attention scores)
save:A,B        only the activations with these names: query, key, value, attention, mlp_gate, mlp_up
offload         only each unit's input is kept, in host memory
invert          nothing but the stack's output is kept: each unit's input is found from its output, backwards. Needs
                layers that can be run so (framework.layers.reversible)
offload:A,B     the activations with these names are kept in host memory ("input" is the unit's, which would else be
                on the device); with others on the device: save:A;offload:B
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from framework.layout import nearest_divisors

INPUT = "input"  # a unit's. Of the names in a loop's body, that of its result would offload nothing (jax#23869)
ACTIVATION_NAMES = ("query", "key", "value", "attention", "mlp_gate", "mlp_up")
POLICIES = ("none", "full", "sqrt", "dots", "dots_no_batch", "offload", "invert")
_WEIGHTS = "weights"


def check(remat: str) -> None:
    """Raises ValueError when `remat` is no policy."""
    saved, offloaded = _names(remat)
    names = saved + offloaded
    known = names and len(set(names)) == len(names) and {INPUT, *ACTIVATION_NAMES}.issuperset(names)
    if remat not in POLICIES and not known and not re.fullmatch("sqrt:[1-9][0-9]*", remat):
        raise ValueError(
            f"expected {', '.join(POLICIES)}, sqrt:NUMBER, save:NAME,NAME, offload:NAME,NAME or save:NAME;offload:NAME "
            f"of {INPUT}, {', '.join(ACTIVATION_NAMES)}; given {remat!r}"
        )


def check_platform(remat: str, platform: str) -> None:
    """Raises ValueError when the policy computes something else on this platform (tpu, gpu or cpu)."""
    if platform == "gpu" and _names(remat)[1]:
        raise ValueError(
            f"memory.remat = {remat}: what a loop offloads is silently wrong in the gradients of XLA's GPU compiler "
            "(openxla/xla#46231); on GPU expected sqrt, full or another policy without offload"
        )


def group_size(remat: str, num_units: int) -> int | None:
    """How many units of a stack make a group, of which only the input is kept; each unit is then recomputed as `full`.

    None for policies without groups, and where a group would be one unit or all of them: both are as `full`.

    Raises:
        ValueError: the size in sqrt:G does not divide the number of units.
    """
    policy, _, given = remat.partition(":")
    if policy != "sqrt":
        return None
    size = int(given or min(nearest_divisors(num_units, math.isqrt(num_units)), key=lambda d: abs(d * d - num_units)))
    if num_units % size:
        raise ValueError(
            f"memory.remat = {remat}: groups of {size} do not divide the stack's {num_units} units; "
            f"nearest that do: {nearest_divisors(num_units, size)}"
        )
    return size if 1 < size < num_units else None


def wrap(unit: Callable[..., Any], remat: str, *, unrolled: bool) -> Callable[..., Any]:
    """`unit` under jax.checkpoint with the policy of that name. The unit names its prepared weights by `tag_weights`.

    Even "none" is a policy: what `prepare` makes of the weights (casts, gathers over fsdp) must not be kept for the
    backward pass, or fsdp would hold a whole gathered model there.

    Args:
        unit: any function; its first argument is its input.
        remat: what it keeps; under sqrt, as a unit within its group.
        unrolled: units stand one after the other, in no loop. XLA would then merge what the backward pass recomputes
            with what the forward pass computed, and so keep it, unless barriers stop it; in a loop they are not needed.
    """
    policies = jax.checkpoint_policies
    saved, offloaded = _names(remat)
    if remat == "none":
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

    def named(carry: Any, *rest: Any) -> Any:
        return unit(_tag(carry, INPUT), *rest)

    return jax.checkpoint(named if INPUT in offloaded else unit, policy=policy, prevent_cse=unrolled)


def _names(remat: str) -> tuple[list[str], list[str]]:
    """The names of what is kept on the device, and of what is kept in host memory."""
    if remat == "offload":
        return [], [INPUT]
    found = re.fullmatch("(?:save:([^;]+))?(?:(?:^|;)offload:([^;]+))?", remat)
    saved, offloaded = (names.split(",") if names else [] for names in (found.groups() if found else ("", "")))
    return saved, offloaded


def _all_but_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Everything is kept but prepared weights: not what has their name, nor the casts and gathers before the name.

    Casts and constraints of activations are made again from what they are made of, which is kept. A custom_vjp_call
    stands where nothing is differentiated: a frozen weight that is gathered.
    """
    if primitive.name == "name":
        return params["name"] != _WEIGHTS
    return primitive.name not in ("convert_element_type", "sharding_constraint", "all_gather", "custom_vjp_call")


def tag_weights(weights: Any) -> Any:
    """Names prepared weights, so that no policy keeps them."""
    return _tag(weights, _WEIGHTS)


def _tag(tree: Any, name: str) -> Any:
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
