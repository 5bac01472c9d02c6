"""The update goes through the model a piece at a time: only one piece's optimizer state (and the next one's, on its
way) is on the device.

The backward pass is that of after_backward, so all gradients are there when their norm is known: clipping and skipping
are exact. May import: framework.layout, framework.learner, framework.schedules.
"""

from __future__ import annotations

from framework.layout import Nested, StateLayout
from framework.learner import Learner
from framework.models.causal_lm import CausalLM
from framework.schedules import after_backward
from framework.schedules.pieces import update_group
from framework.schedules.step import State, Step
from framework.units import Bundle, Decision, Group, UnitUpdate, Update


def update_streamed(learner: Learner, layout: StateLayout, state: State, grads: Nested, decision: Decision) -> Update:
    """As `update_whole`, with the same results. Gradients are where the layout has them (else on the device)."""
    specs = layout.specs
    where = specs.get("gradient", specs["parameter"])

    def run(group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision) -> Update:
        own = bundle_specs(layout, learner, group, learner.select(where, group))
        return update_group(learner, layout.mesh, group, bundle, own, decision)

    return learner.update(state["parameter"], grads, state["optimizer"], state["ema"], decision, run)


def bundle_specs(layout: StateLayout, learner: Learner, group: Group, gradients: Nested) -> Bundle:
    """The specs of a group's weights, gradients (as given), optimizer state and averages."""
    specs = layout.specs
    average = learner.select(specs["ema"], group) if specs["ema"] else {}
    return learner.select(specs["parameter"], group), gradients, specs["optimizer"][group.stage][group.label], average


def check(layout: StateLayout, platform: str) -> None:
    """Raises ValueError when state is on the host of GPUs: their compiler cannot slice it inside a program."""
    hosted = any(leaf.spec.memory_kind != "device" for leaf in layout)
    if hosted and platform == "gpu":
        raise ValueError(
            "memory.update = streamed with memory.optimizer_state = pinned_host: XLA's GPU compiler cannot slice host "
            "memory inside a program; on GPU expected memory.update = after_backward"
        )


def build_step(model: CausalLM, learner: Learner, layout: StateLayout, *, remat: str) -> Step:
    """The training step; see `after_backward.build_step`, and `check` for what is raised."""
    check(layout, layout.mesh.devices.flat[0].platform)
    return after_backward.build_step(model, learner, layout, remat=remat, update=update_streamed)
