"""A training step by the programs of layers: forward, backward, and the update."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from framework.layout import Nested
from framework.learner.units import Decision, Update, chosen
from framework.schedules.gradients import Tally
from framework.schedules.layerwise.functions import LayerFunctions
from framework.schedules.layerwise.passes import Pass, Residuals, copied, part
from framework.schedules.layerwise.storage import STACK
from framework.schedules.layerwise.update_functions import LossAndMetrics
from framework.schedules.step import Metrics, State
from framework.schedules.unit import Carry, Cotangent

Place = tuple[str, int | None]  # a stage, and the index of the unit where that is the stack


class Purpose(NamedTuple):
    """What a backward pass is for; by default gradients wait for an update.

    Attributes:
      decision: each stage and unit is updated at once, by this decision.
      measures: nothing but the tally is changed: a second backward pass needs everything else again.
    """

    decision: Decision | None = None
    measures: bool = False


class Step(Pass[LayerFunctions]):
    """One step on its way."""

    def __call__(self, state: State, batch: Nested) -> tuple[State, Metrics]:
        """Runs the whole step."""
        f = self.f
        run = self.run
        # The parts of stacks are replaced one by one below, in lists of the step's own. The caller's
        # dict would keep the old parts alive.
        self.state = {group: copied(tree) for group, tree in state.items()}
        del state
        self.at_once = f.memory.gradients == "none"
        # Gradients of stages and units that wait for their update, by the key of `_gradient_key`, and
        # which of them are on their way to the host.
        self.gradients: dict[str, Nested] = {}
        self.on_their_way: set[str] = set()
        self.updated: list[Place] = []
        total: Any = None
        buffers = self.state["buffer"]
        for number in range(f.learner.accumulate):
            self.begin(buffers, (batch, self.state["counter"], self.numbers[number]))
            x, residuals_by_unit, parts = self.forward(self._keeps)
            # Of units that are inverted only the last one's output is kept.
            if f.inverts:
                assert residuals_by_unit[-1] is not None
                residuals_by_unit[-1] = residuals_by_unit[-1].with_leaves(jax.tree.leaves(x))
            last_group = f.num_units - f.group_size
            run.want(f"kept {last_group}", residuals_by_unit[last_group])
            ct, tie_grads, parts["head"] = self.turn(x)
            del x
            buffers = self.new_buffers
            total = run("total", f.updates.total, parts, total, out=f.specs.everywhere)
            # The last microbatch's backward pass is below: its gradients complete the sum.
            if number + 1 < f.learner.accumulate:
                self.backward(residuals_by_unit, ct, tie_grads, None, Purpose())
        # A program makes it: a transfer from Python would make the step wait.
        zero = run("zero", jnp.zeros_like, total["loss"], out=f.specs.everywhere)
        if self.at_once and f.learner.clip_mode == "two_pass":
            _, tally = self.decide(total, zero)
            tally = self.backward(residuals_by_unit, ct, tie_grads, tally, Purpose(measures=True))
            assert tally is not None
            zero = tally["squares"]
        decision, tally = self.decide(total, zero)
        purpose = Purpose(decision) if self.at_once else Purpose()
        tally = self.backward(residuals_by_unit, ct, tie_grads, tally, purpose)
        assert tally is not None
        if not self.at_once:
            decision, _ = self.decide(total, tally["squares"])
            self.update_all(decision)
        return self.finished(decision, total, tally)

    def _keeps(self, index: int) -> str:
        """What the forward pass keeps of a unit, see `LayerFunctions.ahead`."""
        f = self.f
        if f.inverts:
            return "nothing"
        if f.group_size == 1:
            return "all"
        # Of a group only the input of its first unit is kept.
        return "nothing" if index % f.group_size else "input"

    def decide(self, total: Nested, squares: jax.Array) -> tuple[Decision, Tally]:
        """(the decision, a tally to begin with)."""
        f = self.f
        counter = self.state["counter"]
        return self.run("decide", f.updates.decide, total["loss"], squares, counter, out=f.specs.everywhere)

    # --- backward ----------------------------------------------------------------------------------------------------

    def turn(self, x: Carry) -> tuple[Cotangent, dict[str, jax.Array], LossAndMetrics]:
        """Runs the head, forward and backward: (cotangent, gradients of ties, loss and metrics)."""
        f = self.f
        weights = self.run.take("head", self.weights("head"))
        grad_sums = self._earlier_gradients("head")
        ct, grads, tie_grads, loss_and_metrics, buffers = self.run(
            "turn",
            f.turn,
            weights,
            part(self.buffers, "head"),
            x,
            grad_sums,
            self.inputs,
            # Where units are inverted, x is needed as the last unit's output.
            donate=(3,) if f.inverts else (2, 3),
            out=lambda results: (
                f.specs.carry(results[0]),
                f.specs.gradients("head", results[1]),
                f.specs.gradients("embed", results[2]),
                *f.specs.everywhere(results[3:]),
            ),
        )
        if buffers:
            self.new_buffers["head"] = buffers
        self.head = grads
        return ct, tie_grads, loss_and_metrics

    def backward(
        self,
        residuals_by_unit: list[Residuals],
        ct: Cotangent,
        tie_grads: dict[str, jax.Array],
        tally: Tally | None,
        purpose: Purpose,
    ) -> Tally | None:
        """Runs from the head to the embedding; returns the tally.

        Args:
            residuals_by_unit, ct, tie_grads: of the forward pass and the head.
            tally: see `LayerFunctions.judged`; None while there are more microbatches to come.
            purpose: what becomes of the gradients.
        """
        f = self.f
        run = self.run
        size = f.group_size
        tally = self._visit_head(tally, purpose)
        if purpose.measures:
            # The cotangent is donated to the first unit's program, and needed once more.
            ct = run("copy", _copies, ct, out=f.specs.carry)
        shared_sums: Nested = {}
        # The output of the unit whose turn it is, where that is found from the one after it.
        output = residuals_by_unit[-1]
        for first in range(f.num_units - size, -1, -size):
            group_residuals = self._group_residuals(first, residuals_by_unit, output, purpose)
            if not purpose.measures:
                residuals_by_unit[first] = None
            for index in range(first + size - 1, first - 1, -1):
                # The last unit of this group is the time to ask for what was kept of the next one.
                if index == first and first and not f.inverts:
                    run.want(f"kept {first - size}", residuals_by_unit[first - size])
                unit_residuals = group_residuals.pop() if size > 1 or not purpose.measures else group_residuals[0]
                ct, grads, shared_sums, tally, output = self.back(
                    index, unit_residuals, ct, shared_sums, tally, purpose
                )
                del unit_residuals
                self.visit(STACK, index, grads, tally, purpose)
                del grads
        if shared_sums:
            grad_sums = self._earlier_gradients("shared")
            donate = self._donated_sum(grad_sums)
            shardings = partial(f.specs.gradients, "shared")
            shared_sums = run(
                "sum", partial(f.updates.added, "shared"), shared_sums, grad_sums, donate=donate, out=shardings
            )
            if tally is not None:
                tally = run("judge", f.updates.judged, tally, shared_sums, out=f.specs.everywhere)
            self.visit("shared", None, shared_sums, tally, purpose)
            del shared_sums
        return self.left(ct, tie_grads, tally, purpose)

    def _visit_head(self, tally: Tally | None, purpose: Purpose) -> Tally | None:
        """Visits the head, whose gradients are there since its turn; returns the tally."""
        if self.head:
            if tally is not None:
                tally = self.run("judge", self.f.updates.judged, tally, self.head, out=self.f.specs.everywhere)
            self.visit("head", None, self.head, tally, purpose)
            self.head = self.head if purpose.measures else {}
        return tally

    def _group_residuals(
        self,
        first: int,
        residuals_by_unit: list[Residuals],
        output: Residuals,
        purpose: Purpose,
    ) -> list[Residuals]:
        """What is kept of each unit of a group; where units are inverted, the unit's output."""
        if self.f.inverts:
            return [output]
        if self.f.group_size == 1:
            return [residuals_by_unit[first]]
        return self.again(first, residuals_by_unit[first], purpose.measures)

    def _donated_sum(self, grad_sums: Nested | None) -> tuple[int, ...]:
        """Which argument of "sum" the result takes the place of: the sum before it; without one, the gradients, if
        these are of its dtype."""
        if grad_sums is not None:
            return (1,)
        return (0,) if self.f.learner.accumulate == 1 else ()

    def again(
        self,
        first: int,
        group_input: Residuals,
        measures: bool,
    ) -> list[Residuals]:
        """What the backward pass of a group of units needs, by a forward pass from its input."""
        (x,) = self.run.take(f"kept {first}", group_input).leaves
        end = first + self.f.group_size
        group_residuals: list[Residuals] = []
        if measures:
            # Inputs are donated to the next unit's program, and this one is needed once more.
            x = self.run("copy", _copies, x, out=self.f.specs.carry)
        for index in range(first, end):
            # The backward pass begins with the last unit, whose weights are there.
            next_index = index + 1 if index + 1 < end else -1
            x, unit_residuals, _ = self.ahead(index, x, "now", next_index)
            group_residuals.append(unit_residuals)
        return group_residuals

    def back(
        self,
        index: int,
        unit_residuals: Residuals,
        ct: Cotangent,
        shared_sums: Nested,
        tally: Tally | None,
        purpose: Purpose,
    ) -> tuple[Cotangent, Nested, Nested, Tally | None, Residuals]:
        """Runs a unit backward: see `LayerFunctions.back`."""
        f = self.f
        run = self.run
        measures = purpose.measures
        weights = self.unit(index)
        unit_residuals = run.take(f"kept {index}", unit_residuals)
        grad_sums = self._earlier_gradients(STACK, index)
        self._want_beside(index, purpose)
        donate = (4, 5, 6)
        if measures:
            donate = (4, 5)
        elif f.inverts:
            donate = (3, 4, 5, 6)
        return run(
            "back measured" if measures else "back",
            f.back,
            weights,
            self.shared,
            part(self.buffers, STACK, index),
            unit_residuals,
            ct,
            shared_sums,
            grad_sums,
            tally,
            self.inputs,
            self.numbers[index],
            donate=donate,
            out=lambda results: (
                f.specs.carry(results[0]),
                f.specs.gradients(STACK, results[1]),
                f.specs.gradients("shared", results[2]),
                f.specs.everywhere(results[3]),
                f.specs.carry(results[4]),
            ),
        )

    def _want_beside(self, index: int, purpose: Purpose) -> None:
        """Asks for what comes to the device with a unit's backward program: what its update takes, and weights and
        gradients of the next unit."""
        self.want_unit(index - 1)
        if purpose.decision is not None:
            self.run.want(f"state {index}", self.stored_state(STACK, index))
        next_key = _gradient_key(STACK, index - 1)
        if next_key in self.gradients and not purpose.measures:
            self.run.want(next_key, self.placed(next_key))

    def left(
        self,
        ct: Cotangent,
        tie_grads: dict[str, jax.Array],
        tally: Tally | None,
        purpose: Purpose,
    ) -> Tally | None:
        """Runs the embedding backward; returns the tally."""
        f = self.f
        weights = self.run.take("embed", self.weights("embed"))
        grad_sums = self._earlier_gradients("embed")
        if not weights["parameter"]:
            return tally
        grads, tally = self.run(
            "leave",
            f.leave,
            weights,
            part(self.buffers, "embed"),
            ct,
            tie_grads,
            grad_sums,
            tally,
            self.inputs,
            donate=(4,),
            out=lambda results: (f.specs.gradients("embed", results[0]), f.specs.everywhere(results[1])),
        )
        del weights
        self.visit("embed", None, grads, tally, purpose)
        return tally

    # --- gradients and updates ---------------------------------------------------------------------------------------

    def visit(
        self,
        stage: str,
        index: int | None,
        grads: Nested,
        tally: Tally | None,
        purpose: Purpose,
    ) -> None:
        """Updates by gradients, or lets them wait, on the host if there is a place for them."""
        if purpose.decision is not None:
            assert tally is not None
            self.update(stage, index, grads, purpose.decision._replace(ok=tally["ok"]))
        elif grads and not purpose.measures:
            key = _gradient_key(stage, index)
            if "gradient" in self.state:
                place = self.gradients.get(key) or part(self.state["gradient"], stage, index)
                self.run.put(key, grads, place)
                self.on_their_way.add(key)
                grads = place
            self.gradients[key] = grads

    def placed(self, key: str) -> Nested:
        """Gradients that wait; where they live."""
        if key in self.on_their_way:
            self.on_their_way.remove(key)
            self.gradients[key] = self.run.placed(key, self.gradients[key])
        return self.gradients[key]

    def _earlier_gradients(self, stage: str, index: int | None = None) -> Nested | None:
        """The gradients of earlier microbatches, on the device; None for none."""
        key = _gradient_key(stage, index)
        if key not in self.gradients:
            return None
        return self.run.take(key, self.placed(key))

    def stored_state(self, stage: str, index: int | None) -> tuple[Nested, Nested]:
        """Optimizer state and averages of a stage, or of a unit; where they live."""
        optimizer = part(self.state["optimizer"], stage, index)
        ema = part(self.state["ema"], stage, index)
        return optimizer, ema

    def update(
        self,
        stage: str,
        index: int | None,
        grads: Nested,
        decision: Decision,
    ) -> None:
        """Updates a stage, or a unit of the stack, by its gradients, which are on the device."""
        if not grads:
            return
        if index is not None:
            decision = decision._replace(layer=self.numbers[index])
        f = self.f
        run = self.run
        key = _place_key(stage, index)
        stored_params = part(self.state["parameter"], stage, index)
        stored_state = self.stored_state(stage, index)
        if index is not None and self.last[0] == index:
            # The unit's weights are on the device since its backward pass.
            params = self.last[1]["parameter"]
            self.last = -1, {}
        else:
            params = run.take(f"home {key}", stored_params)
        new = run(
            f"update {stage}",
            partial(f.updates.update, stage),
            (params, *run.take(f"state {key}", stored_state)),
            grads,
            decision,
            donate=(0,),
            out=self._update_specs(stage),
        )
        run.put(f"new {key}", new, (stored_params, *stored_state))
        self.updated.append((stage, index))
        if index is None:
            # A table's state is as large as that of several layers: nothing is to stand beside it.
            del new
            run.flush()

    def _update_specs(self, stage: str) -> Update:
        """The specs of what an update of a stage, or of a unit, returns."""
        f = self.f
        return f.specs.part("parameter", stage), f.specs.part("optimizer", stage), f.specs.part("ema", stage)

    def update_all(self, decision: Decision) -> None:
        """The second pass of a step that waits for its norm. What the next update takes comes during this one."""
        self.last = -1, {}
        keys = list(self.gradients)
        for number, key in enumerate(keys):
            stage, index = _place_of(key)
            grads = self.run.take(key, self.placed(key))
            stored_grads = self.gradients.pop(key)
            # Hosted buffers are part of the state; gradients on the device end here.
            if index is None and "gradient" in self.state:
                self.state["gradient"][stage] = stored_grads
            elif "gradient" in self.state:
                self.state["gradient"][stage][index] = stored_grads
            del stored_grads
            if index is not None and number + 1 < len(keys):
                self.want_update(keys[number + 1])
            self.update(stage, index, grads, decision)
            del grads

    def want_update(self, key: str) -> None:
        """Asks for all that an update takes to come with the next program."""
        stage, index = _place_of(key)
        place_key = _place_key(stage, index)
        self.run.want(key, self.placed(key))
        self.run.want(f"home {place_key}", part(self.state["parameter"], stage, index))
        self.run.want(f"state {place_key}", self.stored_state(stage, index))

    def finished(
        self,
        decision: Decision,
        total: Nested,
        tally: Tally,
    ) -> tuple[State, Metrics]:
        """The new state and the metrics."""
        f = self.f
        run = self.run
        finish = partial(f.updates.finish, at_once=self.at_once)
        ok = tally["ok"] if self.at_once else decision.ok
        counter, metrics = run(
            "finish",
            finish,
            self.state["counter"],
            decision,
            total,
            tally,
            out=f.specs.everywhere,
        )
        for stage, index in self.updated:
            self._settle_update(stage, index)
        for stage, new_buffers in self.new_buffers.items():
            settle = partial(run, f"buffer {stage}", chosen, ok, out=f.specs.everywhere)
            old_buffers = self.state["buffer"][stage]
            if isinstance(new_buffers, list):
                self.state["buffer"][stage] = list(map(settle, new_buffers, old_buffers))
            else:
                self.state["buffer"][stage] = settle(new_buffers, old_buffers)
        return {**self.state, "counter": counter}, metrics

    def _settle_update(self, stage: str, index: int | None) -> None:
        """Puts what was updated into the state, where it lives."""
        groups = ("parameter", "optimizer", "ema")
        key = _place_key(stage, index)
        old = tuple(part(self.state[group], stage, index) for group in groups)
        new = self.run.placed(f"new {key}", old)
        for group, tree in zip(groups, new, strict=True):
            if tree and index is None:
                self.state[group][stage] = tree
            elif tree:
                self.state[group][stage][index] = tree


def _gradient_key(stage: str, index: int | None) -> str:
    return f"gradient {stage}" if index is None else f"gradient {stage} {index}"


def _place_of(gradient_key: str) -> Place:
    """The inverse of `_gradient_key`."""
    _, stage, *numbers = gradient_key.split(" ")
    return stage, int(numbers[0]) if numbers else None


def _place_key(stage: str, index: int | None) -> str:
    return stage if index is None else str(index)


def _copies(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
