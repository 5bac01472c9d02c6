"""The backward pass by the programs of layers, from the head to the embedding, and the visits of its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from framework.layout import Nested
from framework.learner.units import Decision
from framework.schedules.gradients import Tally
from framework.schedules.layerwise.functions import LayerFunctions
from framework.schedules.layerwise.keeping import UnitGroup
from framework.schedules.layerwise.parts import Part
from framework.schedules.layerwise.passes import NO_UNIT, Pass, Residuals
from framework.schedules.layerwise.update_functions import LossAndMetrics
from framework.schedules.layerwise.update_pass import UpdatePass
from framework.schedules.storage import FIRST, STACK
from framework.schedules.unit import Carry, Cotangent


class Purpose(NamedTuple):
    """What a backward pass is for; by default gradients wait for an update.

    Attributes:
      decision: each stage and unit is updated at once, by this decision.
      measures: nothing but the tally is changed: a second backward pass needs everything else again.
    """

    decision: Decision | None = None
    measures: bool = False


class BackwardStart(NamedTuple):
    """What a microbatch's backward pass starts from.

    Attributes:
      residuals: of each unit; a backward pass that does not measure puts None in place of what it has used.
      ct: the cotangent of what comes out of the stack.
      tie_grads: what ties add to the embedding's gradients, by path; a backward pass that does not measure empties it.
    """

    residuals: list[Residuals]
    ct: Cotangent
    tie_grads: dict[str, jax.Array]


@dataclass
class BackwardCarry:
    """What flows from unit to unit of a backward pass. Each field is replaced once it is used, which lets it go.

    Attributes:
      ct: the cotangent of the output of the unit whose turn comes next.
      tally: of the gradients so far; None while there are more microbatches to come.
      before: where units are inverted, the residuals of that unit.
      shared_sums: the sum of the shared parameters' gradients so far.
    """

    ct: Cotangent
    tally: Tally | None
    before: Residuals
    shared_sums: Nested = field(default_factory=dict)


class BackwardPass(Pass[LayerFunctions]):
    """The backward passes of one step, whose `updates` say what becomes of the gradients."""

    updates: UpdatePass
    head_grads: Nested  # until the head is visited

    def backward(
        self,
        start: BackwardStart,
        tally: Tally | None,
        purpose: Purpose,
    ) -> Tally | None:
        """Runs from the head to the embedding; returns the tally.

        Args:
            start: of the forward pass and the head.
            tally: see `BackwardCarry`.
            purpose: what becomes of the gradients.
        """
        carry = BackwardCarry(start.ct, tally, start.residuals[-1])
        self._visit_head(carry, purpose)
        if purpose.measures:
            # The cotangent is donated to the first unit's program, and needed once more.
            carry.ct = self.run("copy", _copies, carry.ct, out=self.f.specs.carry)
        for number in reversed(range(len(self.f.units.groups))):
            self._group_backward(number, start.residuals, carry, purpose)
        if carry.shared_sums:
            self._visit_shared(carry, purpose)
        for index in reversed(range(self.f.num_first)):
            self._first_backward(index, carry, purpose)
        self._leave_embedding(carry, start.tie_grads, purpose)
        return carry.tally

    def _visit_head(self, carry: BackwardCarry, purpose: Purpose) -> None:
        """Visits the head, whose gradients are there since its turn."""
        if self.head_grads:
            self._judge(carry, self.head_grads)
            self.visit(Part("head"), self.head_grads, carry.tally, purpose)
            self.head_grads = self.head_grads if purpose.measures else {}

    def _judge(self, carry: BackwardCarry, grads: Nested) -> None:
        """Adds gradients to the tally, by a program of its own."""
        f = self.f
        if carry.tally is not None:
            carry.tally = self.run("judge", f.updates.judged, carry.tally, grads, out=f.specs.everywhere)

    def _group_backward(
        self,
        number: int,
        residuals: list[Residuals],
        carry: BackwardCarry,
        purpose: Purpose,
    ) -> None:
        """Runs the group of units of that number backward; a group of one, without memory.remat = sqrt."""
        units = self.f.units
        group = units.groups[number]
        first, size = group
        group_residuals = self._group_residuals(group, residuals, carry, purpose)
        if not purpose.measures:
            residuals[first] = None
        for index in range(first + size - 1, first - 1, -1):
            # The last unit of this group is the time to ask for what was kept of the next one.
            if index == first and first and not units.inverts:
                self.want_residuals(units.groups[number - 1].first, residuals)
            unit_residuals = group_residuals.pop() if size > 1 or not purpose.measures else group_residuals[0]
            grads = self.unit_backward(index, unit_residuals, carry, purpose)
            del unit_residuals
            self.visit(Part.unit(index), grads, carry.tally, purpose)
            del grads

    def want_residuals(self, index: int, residuals: list[Residuals]) -> None:
        """Asks for what was kept of a unit to come with the next program."""
        self.run.want(Part.unit(index).residuals, residuals[index])

    def _group_residuals(
        self,
        group: UnitGroup,
        residuals: list[Residuals],
        carry: BackwardCarry,
        purpose: Purpose,
    ) -> list[Residuals]:
        """What is kept of each unit of a group; where units are inverted, the unit's output."""
        if self.f.units.inverts:
            return [carry.before]
        if group.count == 1:
            return [residuals[group.first]]
        # The cotangent has the structure of what flows between units, which residuals have not.
        return self._run_group_again(group, residuals[group.first], jax.tree.structure(carry.ct), purpose.measures)

    def _run_group_again(
        self,
        group: UnitGroup,
        group_input: Residuals,
        carry_structure: Any,
        measures: bool,
    ) -> list[Residuals]:
        """What the backward pass of a group of units needs, by a forward pass from its input."""
        # No other name may refer to the input: it is to be gone when the first unit has run.
        first = group.first
        x = jax.tree.unflatten(carry_structure, self.run.take(Part.unit(first).residuals, group_input).leaves)
        end = first + group.count
        group_residuals: list[Residuals] = []
        if measures:
            # Inputs are donated to the next unit's program, and this one is needed once more.
            x = self.run("copy", _copies, x, out=self.f.specs.carry)
        for index in range(first, end):
            # The backward pass begins with the last unit, whose weights are there.
            next_index = index + 1 if index + 1 < end else -1
            x, unit_residuals, _ = self.unit_forward(index, x, self.f.units.keeping(index, "now"), next_index)
            group_residuals.append(unit_residuals)
        return group_residuals

    def visit(
        self,
        part: Part,
        grads: Nested,
        tally: Tally | None,
        purpose: Purpose,
    ) -> None:
        """Updates by gradients, or lets them wait."""
        # What is frozen as a whole has none.
        if not grads:
            return
        if purpose.decision is None:
            if not purpose.measures:
                self.updates.keep(part, grads)
            return
        assert tally is not None
        params = None
        if part.stage == STACK and self.loaded.index == part.index:
            # The unit's weights are on the device since its backward pass.
            params = self.loaded.weights["parameter"]
            self.loaded = NO_UNIT
        self.updates.update(part, grads, purpose.decision._replace(ok=tally["ok"]), params)

    # --- programs of the backward pass -------------------------------------------------------------------------------

    def head_step(self, x: Carry) -> tuple[Cotangent, dict[str, jax.Array], LossAndMetrics]:
        """Runs the head, forward and backward: (cotangent, gradients of ties, loss and metrics)."""
        f = self.f
        part = Part("head")
        weights = self.stage_weights("head")
        grad_sums = self.updates.earlier_gradients(part)
        ct, grads, tie_grads, loss_and_metrics, buffers = self.run(
            "head backward",
            f.head_step,
            weights,
            part.of(self.buffers),
            x,
            grad_sums,
            self.inputs,
            # Where units are inverted, x is needed as the last unit's output.
            donate=(3,) if f.units.inverts else (2, 3),
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

    def unit_backward(
        self,
        index: int,
        unit_residuals: Residuals,
        carry: BackwardCarry,
        purpose: Purpose,
    ) -> Nested:
        """Runs a unit backward, see `LayerFunctions.unit_backward`; returns its gradients."""
        f = self.f
        part = Part.unit(index)
        weights = self.unit_weights(index)
        unit_residuals = self.run.take(part.residuals, unit_residuals)
        grad_sums = self.updates.earlier_gradients(part)
        self._want_beside(index, purpose)
        donate = (4, 5, 6)
        if purpose.measures:
            donate = (4, 5)
        elif f.units.inverts:
            donate = (3, 4, 5, 6)
        name = f"unit backward{f.units.label(index)}"
        carry.ct, grads, carry.shared_sums, carry.tally, carry.before = self.run(
            f"{name}, measured" if purpose.measures else name,
            partial(f.unit_backward, f.units.policies[index]),
            weights,
            self.shared,
            part.of(self.buffers),
            unit_residuals,
            carry.ct,
            carry.shared_sums,
            grad_sums,
            carry.tally,
            self.inputs,
            self.numbers[index],
            donate=donate,
            out=self._unit_specs,
        )
        return grads

    def _unit_specs(self, results: Any) -> Any:
        """The specs of what `LayerFunctions.unit_backward` returns."""
        specs = self.f.specs
        return (
            specs.carry(results[0]),
            specs.gradients(STACK, results[1]),
            specs.gradients("shared", results[2]),
            specs.everywhere(results[3]),
            specs.carry(results[4]),
        )

    def _want_beside(self, index: int, purpose: Purpose) -> None:
        """Asks for what comes to the device with a unit's backward program: what its update takes, and weights and
        gradients of the next unit."""
        self.want_unit(index - 1)
        if purpose.decision is not None:
            self.updates.want_state(Part.unit(index))
        if not purpose.measures:
            self.updates.want_gradients(Part.unit(index - 1))

    def _visit_shared(self, carry: BackwardCarry, purpose: Purpose) -> None:
        """Visits the parameters that all units share, whose gradients are complete."""
        f = self.f
        part = Part("shared")
        grad_sums = self.updates.earlier_gradients(part)
        # The result takes the place of the sum before it; without one, of the gradients, if these are of its dtype.
        donate = (1,)
        if grad_sums is None:
            donate = (0,) if f.learner.accumulate == 1 else ()
        add = partial(f.updates.added, "shared")
        shardings = partial(f.specs.gradients, "shared")
        carry.shared_sums = self.run("sum", add, carry.shared_sums, grad_sums, donate=donate, out=shardings)
        self._judge(carry, carry.shared_sums)
        self.visit(part, carry.shared_sums, carry.tally, purpose)
        carry.shared_sums = {}

    def _first_backward(self, index: int, carry: BackwardCarry, purpose: Purpose) -> None:
        """Runs a unit before the stack backward, and visits it."""
        f = self.f
        part = Part(FIRST, index)
        is_last = index + 1 == f.num_first
        name = f"{FIRST} backward{', last' if is_last else ''}"
        x = self.first_inputs[index] if purpose.measures else self.first_inputs.pop()
        carry.ct, grads, carry.tally = self.run(
            f"{name}, measured" if purpose.measures else name,
            partial(f.first_backward, is_last),
            self.run.take(part.weights, self.weights(part)),
            part.of(self.buffers),
            x,
            carry.ct,
            self.updates.earlier_gradients(part),
            carry.tally,
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
        self.visit(part, grads, carry.tally, purpose)

    def _leave_embedding(
        self,
        carry: BackwardCarry,
        tie_grads: dict[str, jax.Array],
        purpose: Purpose,
    ) -> None:
        """Runs the embedding backward, and visits it."""
        f = self.f
        part = Part("embed")
        weights = self.stage_weights("embed")
        grad_sums = self.updates.earlier_gradients(part)
        if not weights["parameter"]:
            return
        grads, carry.tally = self.run(
            "embed backward",
            f.leave_embedding,
            weights,
            part.of(self.buffers),
            carry.ct,
            tie_grads,
            grad_sums,
            carry.tally,
            self.inputs,
            donate=(4,),
            out=lambda results: (f.specs.gradients("embed", results[0]), f.specs.everywhere(results[1])),
        )
        del weights
        if not purpose.measures:
            # The caller's reference would keep these, as large as the table, alive through all updates.
            tie_grads.clear()
        self.visit(part, grads, carry.tally, purpose)


def _copies(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
