"""What the backward pass recomputes: `memory.remat`, the one place that knows the policies' names.

    none            every activation is kept, the weights' casts and gathers are not
    full            only each unit's input is kept
    dots            the results of matrix products are kept
    dots_no_batch   the same, but not of products with a batch dimension (attention scores)
    save:A,B        only the activations with these names: query, key, value, attention, mlp_gate, mlp_up

May import: JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

ACTIVATION_NAMES = ("query", "key", "value", "attention", "mlp_gate", "mlp_up")
POLICIES = ("none", "full", "dots", "dots_no_batch")
_WEIGHTS = "weights"


def check(remat: str) -> None:
    """Raises ValueError when `remat` is no policy."""
    if remat in POLICIES:
        return
    names = remat.removeprefix("save:").split(",") if remat.startswith("save:") else []
    unknown = [name for name in names if name not in ACTIVATION_NAMES]
    if not names or unknown:
        raise ValueError(
            f"expected {', '.join(POLICIES)} or save:NAME,NAME of {', '.join(ACTIVATION_NAMES)}; given {remat!r}"
        )


def wrap(unit: Callable[..., Any], remat: str, *, unrolled: bool) -> Callable[..., Any]:
    """`unit` under jax.checkpoint with the policy of that name. The unit names its prepared weights by `tag_weights`.

    Even "none" is a policy: what `prepare` makes of the weights (casts, gathers over fsdp) must not be kept for the
    backward pass, or fsdp would hold a whole gathered model there.

    Args:
        unit: any function.
        remat: what it keeps.
        unrolled: units stand one after the other, in no loop. XLA would then merge what the backward pass recomputes
            with what the forward pass computed, and so keep it, unless barriers stop it; in a loop they are not needed.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        policy = _all_but_weights
    elif remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_saveable
    elif remat == "dots_no_batch":
        policy = policies.dots_with_no_batch_dims_saveable
    else:
        policy = policies.save_only_these_names(*remat.removeprefix("save:").split(","))
    return jax.checkpoint(unit, policy=policy, prevent_cse=unrolled)


def _all_but_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Everything is kept but prepared weights: not what has their name, nor the casts and gathers before the name.

    Casts and constraints of activations are made again from what they are made of, which is kept.
    """
    if primitive.name == "name":
        return params["name"] != _WEIGHTS
    return primitive.name not in ("convert_element_type", "sharding_constraint", "all_gather")


def tag_weights(weights: Any) -> Any:
    """Names prepared weights, so that no policy keeps them."""
    return jax.tree.map(lambda w: checkpoint_name(w, _WEIGHTS), weights)


def group_size(remat: str, num_units: int) -> int | None:
    return None
