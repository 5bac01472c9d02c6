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


def wrap(unit: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`unit` under jax.checkpoint with the policy of that name. The unit names its prepared weights by `tag_weights`.

    Even "none" is a policy: what `prepare` makes of the weights (casts, gathers over fsdp) must not be kept for the
    backward pass, or fsdp would hold a whole gathered model there.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        policy = policies.save_anything_except_these_names(_WEIGHTS)
    elif remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_saveable
    elif remat == "dots_no_batch":
        policy = policies.dots_with_no_batch_dims_saveable
    else:
        policy = policies.save_only_these_names(*remat.removeprefix("save:").split(","))
    # Inside a scan the barriers that stop common-subexpression elimination are not needed, and cost fusions.
    return jax.checkpoint(unit, policy=policy, prevent_cse=False)


def tag_weights(weights: Any) -> Any:
    """Names prepared weights, so that no policy keeps them."""
    return jax.tree.map(lambda w: checkpoint_name(w, _WEIGHTS), weights)
