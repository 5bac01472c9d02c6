"""The update goes through the stack a unit at a time: only one unit's optimizer state (and the next one's, on its way)
is on the device.

The backward pass is that of after_backward, so all gradients are there when their norm is known: clipping and skipping
are exact. May import: framework.layout, framework.learner, framework.schedules.after_backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from framework.layout import Nested, StateLayout, fetch_leaf, store_leaf
from framework.learner import Bundle, Decision, Group, Learner, UnitUpdate
from framework.models.causal_lm import CausalLM
from framework.schedules import after_backward
from framework.schedules.after_backward import State, Step, Update


def update_streamed(learner: Learner, layout: StateLayout, state: State, grads: Nested, decision: Decision) -> Update:
    """As `update_whole`, with the same results: a loop over the units instead of a map."""
    specs = layout.specs["optimizer"]

    def run(group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision) -> Update:
        own = specs[group.stage][group.label]
        fetch, store = partial(jax.tree.map, fetch_leaf, own), partial(jax.tree.map, store_leaf, own)
        weights, grads, entry, average = bundle
        if group.length is None:
            weights, entry, average = update(weights, grads, fetch(entry), average, decision)
            return weights, store(entry), average
        return _stream(group.length, update, bundle, decision, fetch, store)

    return learner.update(state["parameter"], grads, state["optimizer"], state["ema"], decision, run)


def _stream(length: int, update: UnitUpdate, bundle: Bundle, decision: Decision, fetch: Any, store: Any) -> Update:
    """Weights and state are the loop's carry and are updated in place: a loop that only read a stack might hold a
    relaid copy of all of it. A unit's state is fetched while the one before it is updated."""
    weights, grads, entry, average = bundle

    def take(tree: Nested, i: jax.Array) -> Nested:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)

    def put(tree: Nested, unit: Nested, i: jax.Array) -> Nested:
        return jax.tree.map(lambda x, u: jax.lax.dynamic_update_index_in_dim(x, u, i, 0), tree, unit)

    def body(i: jax.Array, carry: Any) -> Any:
        (weights, entry, average), here = carry
        coming = fetch(take(entry, jnp.minimum(i + 1, length - 1)))
        new_weights, new_entry, new_average = update(take(weights, i), take(grads, i), here, take(average, i), decision)
        done = put(weights, new_weights, i), put(entry, store(new_entry), i), put(average, new_average, i)
        return done, coming

    start = (weights, entry, average), fetch(take(entry, jnp.int32(0)))
    return jax.lax.fori_loop(0, length, body, start)[0]


def check(layout: StateLayout, platform: str) -> None:
    """Raises ValueError when a stack's state is on the host of GPUs: their compiler cannot slice it in a loop."""
    hosted = any(leaf.spec.memory_kind != "device" and leaf.path.startswith("optimizer/stack/") for leaf in layout)
    if hosted and platform == "gpu":
        raise ValueError(
            "memory.update = streamed with memory.optimizer_state = pinned_host: XLA's GPU compiler cannot slice host "
            "memory inside a program; on GPU expected memory.update = after_backward"
        )


def build_step(model: CausalLM, learner: Learner, layout: StateLayout, *, remat: str) -> Step:
    """The training step; see `after_backward.build_step`, and `check` for what is raised."""
    check(layout, layout.mesh.devices.flat[0].platform)
    return after_backward.build_step(model, learner, layout, remat=remat, update=update_streamed)
