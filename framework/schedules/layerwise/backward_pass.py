"""Runs the backward pass by layer programs, from the head to the embedding, and stores or applies its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.schedules.gradients import GradStats
from plimsoll.framework.schedules.layer_computation import Carry, Cotangent
from plimsoll.framework.schedules.layerwise.functions import LayerFunctions
from plimsoll.framework.schedules.layerwise.passes import NO_LAYER, Pass, Residuals
from plimsoll.framework.schedules.layerwise.save_policy import LayerGroup
from plimsoll.framework.schedules.layerwise.update_functions import LossAndMetrics
from plimsoll.framework.schedules.layerwise.update_pass import UpdatePass
from plimsoll.framework.schedules.layerwise.update_units import UpdateUnit
from plimsoll.framework.schedules.stack_parts import FIRST, STACK


class Purpose(NamedTuple):
    """The purpose of a backward pass; by default it stores gradients for a later update.

    Attributes:
        decision: if given, each stage and layer is updated immediately, by this decision.
        measures: whether the pass only computes gradient statistics; a second backward pass then needs everything
            else again.
    """

    decision: Decision | None = None
    measures: bool = False


class BackwardStart(NamedTuple):
    """The inputs of a microbatch's backward pass.

    Attributes:
        residuals: residuals of each layer; a backward pass that does not only measure replaces those it has used with
            None.
        ct: the cotangent of the stack's output.
        tie_grads: gradients of tied weights, to be added to the embedding's, by path; a backward pass that does not
            only measure empties it.
    """

    residuals: list[Residuals]
    ct: Cotangent
    tie_grads: dict[str, jax.Array]


@dataclass
class BackwardCarry:
    """Values that a backward pass carries from layer to layer. Replacing a field after its use frees the arrays.

    Attributes:
        ct: the cotangent of the output of the layer that runs next.
        grad_stats: statistics of the gradients so far; None while more microbatches follow.
        before: where layers are inverted, the residuals of the layer that runs next.
        shared_sums: sum of the shared parameters' gradients so far.
    """

    ct: Cotangent
    grad_stats: GradStats | None
    before: Residuals
    shared_sums: Nested = field(default_factory=dict)


class LayerwiseBackward(Pass[LayerFunctions]):
    """The backward passes of one step; its `updates` store the gradients or update by them."""

    updates: UpdatePass
    head_grads: Nested  # until the head's gradients are processed

    def backward(self, start: BackwardStart, grad_stats: GradStats | None, purpose: Purpose) -> GradStats | None:
        """Run from the head to the embedding; return the gradient statistics.

        Args:
            start: results of the forward pass and of the head.
            grad_stats: see `BackwardCarry`.
            purpose: whether the gradients are stored, applied immediately, or only measured.
        """
        carry = BackwardCarry(start.ct, grad_stats, start.residuals[-1])
        self._process_head_grads(carry, purpose)
        if purpose.measures:
            # Copied: the first layer's program donates the cotangent, and the second backward pass needs it again.
            carry.ct = self.run("copy", _copy_arrays, carry.ct, out=self.f.specs.carry)
        for number in reversed(range(len(self.f.residual_plan.groups))):
            self._group_backward(number, start.residuals, carry, purpose)
        if carry.shared_sums:
            self._process_shared_grads(carry, purpose)
        for index in reversed(range(self.f.num_first)):
            self._first_backward(index, carry, purpose)
        self._leave_embedding(carry, start.tie_grads, purpose)
        return carry.grad_stats

    def _process_head_grads(self, carry: BackwardCarry, purpose: Purpose) -> None:
        """Process the head's gradients, which `head_step` has computed."""
        if self.head_grads:
            self._update_stats(carry, self.head_grads)
            self.process_grads(UpdateUnit("head"), self.head_grads, carry.grad_stats, purpose)
            self.head_grads = self.head_grads if purpose.measures else {}

    def _update_stats(self, carry: BackwardCarry, grads: Nested) -> None:
        """Add gradients to the statistics, with a separate program."""
        f = self.f
        if carry.grad_stats is not None:
            carry.grad_stats = self.run(
                "judge", f.updates.update_stats, carry.grad_stats, grads, out=f.specs.everywhere
            )

    def _group_backward(self, number: int, residuals: list[Residuals], carry: BackwardCarry, purpose: Purpose) -> None:
        """Run a group of layers backward; without memory.remat = sqrt a group is a single layer.

        Args:
            number: index of the group.
            residuals, carry, purpose: see `backward`.
        """
        residual_plan = self.f.residual_plan
        group = residual_plan.groups[number]
        first, size = group
        group_residuals = self._group_residuals(group, residuals, carry, purpose)
        if not purpose.measures:
            residuals[first] = None
        for index in range(first + size - 1, first - 1, -1):
            # During the last layer of this group, the residuals of the next group are fetched.
            if index == first and first and not residual_plan.inverts:
                self.request_residuals(residual_plan.groups[number - 1].first, residuals)
            layer_residuals = group_residuals.pop() if size > 1 or not purpose.measures else group_residuals[0]
            grads = self.layer_backward(index, layer_residuals, carry, purpose)
            del layer_residuals
            self.process_grads(UpdateUnit.layer(index), grads, carry.grad_stats, purpose)
            del grads

    def request_residuals(self, index: int, residuals: list[Residuals]) -> None:
        """Request that the next program fetches a layer's residuals."""
        self.run.request(UpdateUnit.layer(index).residuals, residuals[index])

    def _group_residuals(
        self, group: LayerGroup, residuals: list[Residuals], carry: BackwardCarry, purpose: Purpose
    ) -> list[Residuals]:
        """Return the residuals of each layer of a group; where layers are inverted, the layer's output."""
        if self.f.residual_plan.inverts:
            return [carry.before]
        if group.count == 1:
            return [residuals[group.first]]
        # The cotangent has the structure of the activations between layers, which residuals do not have.
        return self._run_group_again(group, residuals[group.first], jax.tree.structure(carry.ct), purpose.measures)

    def _run_group_again(
        self, group: LayerGroup, group_input: Residuals, carry_structure: Any, measures: bool
    ) -> list[Residuals]:
        """Run a group of layers forward from its input, and return the residuals for its backward pass."""
        # No other name may refer to the input: it has to be freed once the first layer has run.
        first = group.first
        x = jax.tree.unflatten(carry_structure, self.run.take(UpdateUnit.layer(first).residuals, group_input).leaves)
        end = first + group.count
        group_residuals: list[Residuals] = []
        if measures:
            # Copied: inputs are donated to the next layer's program, and the second backward pass needs this one
            # again.
            x = self.run("copy", _copy_arrays, x, out=self.f.specs.carry)
        for index in range(first, end):
            # The backward pass starts with the last layer, whose weights are already on the device.
            next_index = index + 1 if index + 1 < end else -1
            x, layer_residuals, _ = self.layer_forward(
                index, x, self.f.residual_plan.save_policy(index, "now"), next_index
            )
            group_residuals.append(layer_residuals)
        return group_residuals

    def process_grads(
        self, update_unit: UpdateUnit, grads: Nested, grad_stats: GradStats | None, purpose: Purpose
    ) -> None:
        """Update by gradients, or store them for a later update.

        Args:
            update_unit: the stage or layer.
            grads: its gradients, on the device; {} if it is completely frozen.
            grad_stats: statistics of the gradients so far, these included.
            purpose: see `backward`.
        """
        if not grads:
            return
        if purpose.decision is None:
            if not purpose.measures:
                self.updates.store_gradients(update_unit, grads)
            return
        assert grad_stats is not None
        params = None
        if update_unit.stage == STACK and self.loaded.index == update_unit.index:
            # The layer's weights are still on the device from its backward pass.
            params = self.loaded.weights["parameter"]
            self.loaded = NO_LAYER
        self.updates.update(update_unit, grads, replace(purpose.decision, ok=grad_stats["ok"]), params)

    # --- programs of the backward pass -------------------------------------------------------------------------------

    def head_step(self, x: Carry) -> tuple[Cotangent, dict[str, jax.Array], LossAndMetrics]:
        """Run the head forward and backward: (cotangent, gradients of tied weights, loss and metrics)."""
        f = self.f
        update_unit = UpdateUnit("head")
        weights = self.stage_weights("head")
        grad_sums = self.updates.earlier_gradients(update_unit)
        ct, grads, tie_grads, loss_and_metrics, buffers = self.run(
            "head backward",
            f.head_step,
            weights,
            update_unit.select(self.buffers),
            x,
            grad_sums,
            self.inputs,
            # Where layers are inverted, x is still needed as the last layer's output.
            donate=(3,) if f.residual_plan.inverts else (2, 3),
            out=lambda results: (
                f.specs.carry(results[0]),
                f.specs.gradients("head", results[1]),
                f.specs.gradients("embed", results[2]),
                *f.specs.everywhere(results[3:]),
            ),
        )
        if buffers:
            self.new_buffers["head"] = buffers
        self.head_grads = grads
        return ct, tie_grads, loss_and_metrics

    def layer_backward(self, index: int, layer_residuals: Residuals, carry: BackwardCarry, purpose: Purpose) -> Nested:
        """Run a layer backward, see `LayerFunctions.layer_backward`; return its gradients.

        Args:
            index: index of the layer.
            layer_residuals: the layer's residuals, in the memory in which they are stored.
            carry: the values that pass from layer to layer; updated in place.
            purpose: see `backward`.
        """
        f = self.f
        update_unit = UpdateUnit.layer(index)
        weights = self.layer_weights(index)
        layer_residuals = self.run.take(update_unit.residuals, layer_residuals)
        grad_sums = self.updates.earlier_gradients(update_unit)
        self._request_next(index, purpose)
        donate = (4, 5, 6)
        if purpose.measures:
            donate = (4, 5)
        elif f.residual_plan.inverts:
            donate = (3, 4, 5, 6)
        name = f"unit backward{f.residual_plan.label(index)}"
        carry.ct, grads, carry.shared_sums, carry.grad_stats, carry.before = self.run(
            f"{name}, measured" if purpose.measures else name,
            partial(f.layer_backward, f.residual_plan.policies[index]),
            weights,
            self.shared,
            update_unit.select(self.buffers),
            layer_residuals,
            carry.ct,
            carry.shared_sums,
            grad_sums,
            carry.grad_stats,
            self.inputs,
            self.numbers[index],
            donate=donate,
            out=self._backward_specs,
        )
        return grads

    def _backward_specs(self, results: Any) -> Any:
        """Return the specs of the results of `LayerFunctions.layer_backward`."""
        specs = self.f.specs
        return (
            specs.carry(results[0]),
            specs.gradients(STACK, results[1]),
            specs.gradients("shared", results[2]),
            specs.everywhere(results[3]),
            specs.carry(results[4]),
        )

    def _request_next(self, index: int, purpose: Purpose) -> None:
        """Request the arrays to fetch during a layer's backward program.

        These are the inputs of its update, and the weights and gradients of the next layer.
        """
        self.request_layer(index - 1)
        if purpose.decision is not None:
            self.updates.request_state(UpdateUnit.layer(index))
        if not purpose.measures:
            self.updates.request_gradients(UpdateUnit.layer(index - 1))

    def _process_shared_grads(self, carry: BackwardCarry, purpose: Purpose) -> None:
        """Process the gradients of the parameters that all layers share, which are now complete."""
        f = self.f
        update_unit = UpdateUnit("shared")
        grad_sums = self.updates.earlier_gradients(update_unit)
        # The result reuses the memory of the previous sum. Without one, it reuses that of the gradients, if they have
        # the same dtype.
        donate = (1,)
        if grad_sums is None:
            donate = (0,) if f.learner.accumulate == 1 else ()
        add = partial(f.updates.add_gradients, "shared")
        shardings = partial(f.specs.gradients, "shared")
        carry.shared_sums = self.run("sum", add, carry.shared_sums, grad_sums, donate=donate, out=shardings)
        self._update_stats(carry, carry.shared_sums)
        self.process_grads(update_unit, carry.shared_sums, carry.grad_stats, purpose)
        carry.shared_sums = {}

    def _first_backward(self, index: int, carry: BackwardCarry, purpose: Purpose) -> None:
        """Run one of the layers before the stack backward, and process its gradients."""
        f = self.f
        update_unit = UpdateUnit(FIRST, index)
        is_last = index + 1 == f.num_first
        name = f"{FIRST} backward{', last' if is_last else ''}"
        x = self.first_inputs[index] if purpose.measures else self.first_inputs.pop()
        carry.ct, grads, carry.grad_stats = self.run(
            f"{name}, measured" if purpose.measures else name,
            partial(f.first_backward, is_last),
            self.run.take(update_unit.weights, self.weights(update_unit)),
            update_unit.select(self.buffers),
            x,
            carry.ct,
            self.updates.earlier_gradients(update_unit),
            carry.grad_stats,
            self.inputs,
            self.numbers[index],
            donate=(3,) if purpose.measures else (3, 4),
            out=lambda results: (
                f.specs.carry(results[0]),
                f.specs.gradients(FIRST, results[1]),
                f.specs.everywhere(results[2]),
            ),
        )
        del x
        self.process_grads(update_unit, grads, carry.grad_stats, purpose)

    def _leave_embedding(self, carry: BackwardCarry, tie_grads: dict[str, jax.Array], purpose: Purpose) -> None:
        """Run the embedding backward, and process its gradients."""
        f = self.f
        update_unit = UpdateUnit("embed")
        weights = self.stage_weights("embed")
        grad_sums = self.updates.earlier_gradients(update_unit)
        if not weights["parameter"]:
            return
        grads, carry.grad_stats = self.run(
            "embed backward",
            f.leave_embedding,
            weights,
            update_unit.select(self.buffers),
            carry.ct,
            tie_grads,
            grad_sums,
            carry.grad_stats,
            self.inputs,
            donate=(4,),
            out=lambda results: (f.specs.gradients("embed", results[0]), f.specs.everywhere(results[1])),
        )
        del weights
        if not purpose.measures:
            # The caller's reference would keep these alive through all updates, and they are as large as the table.
            tie_grads.clear()
        self.process_grads(update_unit, grads, carry.grad_stats, purpose)


def _copy_arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
