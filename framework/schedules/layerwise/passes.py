"""Stages and units one after the other: a forward pass and an evaluation by the programs of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from framework.layout import Nested, flatten
from framework.schedules.gradients import with_tied_weights
from framework.schedules.layerwise.functions import (
    EvaluationFunctions,
    Inputs,
    LayerFunctions,
    Weights,
)
from framework.schedules.layerwise.keeping import NOTHING, Keeping
from framework.schedules.layerwise.moves import Moves
from framework.schedules.layerwise.parts import Part
from framework.schedules.layerwise.programs import Programs
from framework.schedules.layerwise.update_functions import LossAndMetrics
from framework.schedules.step import Metrics
from framework.schedules.storage import FIRST, STACK
from framework.schedules.unit import Carry, UnitResiduals

Functions = TypeVar("Functions", bound=LayerFunctions)
# What is kept of a unit for its backward pass, or None once nothing needs that any more.
Residuals = UnitResiduals | None


class LoadedUnit(NamedTuple):
    """The unit whose weights are on the device, and those; index -1 for none."""

    index: int
    weights: Weights


NO_UNIT = LoadedUnit(-1, {})


class Pass(Generic[Functions]):
    """A pass through stages and units, one after the other.

    Arrays are alive as long as Python refers to them, so what is not needed is deleted at once: `del` and fields that
    are set to nothing are part of the memory plan.

    Args:
        functions: what is computed. programs: that compute it. numbers: 0, 1, ... on the devices.

    Attributes:
        keeps_inputs: whether a backward pass follows, which needs the inputs of the units before the stack.
    """

    keeps_inputs: ClassVar[bool] = True

    def __init__(
        self,
        functions: Functions,
        programs: Programs,
        numbers: list[Any],
    ):
        self.f = functions
        self.numbers = numbers
        self.run = Moves(programs)
        self.state: Nested = {}
        # Buffers as the microbatch found them, and as it leaves them.
        self.buffers: Nested = {}
        self.new_buffers: Nested = {}
        self.loaded = NO_UNIT
        # The inputs of the units before the stack, for their backward pass.
        self.first_inputs: list[Carry] = []

    def begin(self, buffers: Nested, inputs: Inputs) -> None:
        """Begins a microbatch."""
        self.buffers = buffers
        self.new_buffers = copied(buffers)
        self.inputs = inputs

    def weights(self, part: Part) -> Weights:
        """The parameters that a stage, tied ones included, or a unit reads; where they live."""
        weights = {}
        for group in ("parameter", "frozen"):
            # A tie's parameter lives in the embedding, which is either trained or frozen.
            homes = flatten({"embed": self.state[group].get("embed", {})})
            params = part.of(self.state[group])
            weights[group] = with_tied_weights(self.f.model.ties, part.stage, params, homes)
        return weights

    def stage_weights(self, stage: str) -> Weights:
        """The parameters that a stage reads, on the device."""
        part = Part(stage)
        return self.run.take(part.weights, self.weights(part))

    def unit_weights(self, index: int) -> Weights:
        """A unit's weights on the device; those of the unit before are let go."""
        if self.loaded.index != index:
            # The old weights go first: two units' would be on the device while these come.
            self.loaded = NO_UNIT
            part = Part.unit(index)
            self.loaded = LoadedUnit(index, self.run.take(part.weights, self.weights(part)))
        return self.loaded.weights

    def want_unit(self, index: int) -> None:
        """Asks for a unit's weights to come with the next program."""
        if 0 <= index < self.f.num_units:
            part = Part.unit(index)
            self.run.want(part.weights, self.weights(part))

    def forward(self, keeping_of: Callable[[int], Keeping]) -> tuple[Carry, list[Residuals], dict[str, LossAndMetrics]]:
        """Runs all before the head: (what comes out of the stack; what is kept of each of its units; loss and metrics
        by stage)."""
        f = self.f
        run = self.run
        weights = self.stage_weights("embed")
        if not f.num_first:
            self.want_unit(0)
        x, embed_loss, buffers = run(
            "embed forward",
            f.enter_embedding,
            weights,
            Part("embed").of(self.buffers),
            self.inputs,
            out=lambda results: (f.specs.carry(results[0]), *f.specs.everywhere(results[1:])),
        )
        del weights
        if buffers:
            self.new_buffers["embed"] = buffers
        losses: dict[str, LossAndMetrics] = {"embed": embed_loss}
        if f.num_first:
            x, losses[FIRST] = self._first_forward(x)
        # Parameters that all units share stay on the device for the whole pass.
        self.shared = self.stage_weights("shared")
        residuals_by_unit: list[Residuals] = []
        losses[STACK] = (None, {})
        for index in range(f.num_units):
            x, unit_residuals, unit_loss = self.unit_forward(index, x, keeping_of(index), index + 1)
            residuals_by_unit.append(unit_residuals)
            losses[STACK] = self._added_loss(losses[STACK], unit_loss)
        return x, residuals_by_unit, losses

    def _added_loss(self, earlier: LossAndMetrics, unit_loss: LossAndMetrics) -> LossAndMetrics:
        """The loss and metrics of the units so far."""
        # A unit may have neither a loss nor metrics.
        if not jax.tree.leaves(unit_loss):
            return earlier
        if not jax.tree.leaves(earlier):
            return unit_loss
        return self.run("add", added, earlier, unit_loss, out=self.f.specs.everywhere)

    def _first_forward(self, x: Carry) -> tuple[Carry, LossAndMetrics]:
        """Runs the units before the stack: (what the stack takes; their loss and metrics)."""
        f = self.f
        loss: LossAndMetrics = (None, {})
        self.first_inputs = []
        for index in range(f.num_first):
            part = Part(FIRST, index)
            is_last = index + 1 == f.num_first
            if is_last:
                self.want_unit(0)
            if self.keeps_inputs:
                self.first_inputs.append(x)
            x, unit_loss, buffers = self.run(
                f"{FIRST} forward{', last' if is_last else ''}",
                partial(f.first_forward, is_last),
                self.run.take(part.weights, self.weights(part)),
                part.of(self.buffers),
                x,
                self.inputs,
                self.numbers[index],
                out=lambda results: (f.specs.carry(results[0]), *f.specs.everywhere(results[1:])),
            )
            if buffers:
                self.new_buffers[FIRST][index] = buffers
            loss = self._added_loss(loss, unit_loss)
        return x, loss

    def unit_forward(
        self,
        index: int,
        x: Carry,
        keeping: Keeping,
        next_index: int,
    ) -> tuple[Carry, UnitResiduals, LossAndMetrics]:
        """Runs one unit forward, and brings the weights of the next one to the device: (y, what is kept, loss and
        metrics)."""
        f = self.f
        weights = self.unit_weights(index)
        self.want_unit(next_index)
        y, residuals, unit_loss, buffers = self.run(
            keeping.program,
            partial(f.unit_forward, keeping),
            weights,
            self.shared,
            Part.unit(index).of(self.buffers),
            x,
            self.inputs,
            self.numbers[index],
            donate=(3,),
            out=lambda results: (
                f.specs.carry(results[0]),
                f.specs.residuals(results[1], keeping, results[0]),
                *f.specs.everywhere(results[2:]),
            ),
        )
        # A group's second forward pass ("now") sees the buffers as the first one found them.
        if buffers and keeping.what != "now":
            self.new_buffers[STACK][index] = buffers
        return y, residuals, unit_loss


class Evaluation(Pass[EvaluationFunctions]):
    """The loss of a batch."""

    keeps_inputs = False

    def __call__(
        self,
        weights: Weights,
        buffers: Nested,
        batch: Nested,
    ) -> Metrics:
        """Sums over the batch."""
        f = self.f
        self.state = weights
        sums = None
        for number in range(f.learner.accumulate):
            self.begin(buffers, (batch, {}, self.numbers[number]))
            x, *_ = self.forward(lambda index: NOTHING)
            head_weights = self.stage_weights("head")
            head_buffers = Part("head").of(self.buffers)
            scores = self.run("score", f.score, head_weights, head_buffers, x, self.inputs, out=f.specs.everywhere)
            # The next microbatch needs their room.
            del x, head_weights
            sums = scores if sums is None else self.run("add", added, sums, scores, out=f.specs.everywhere)
        assert sums is not None
        return sums


def copied(tree: Nested) -> Nested:
    """New containers, down to the parts of a stack, of the same arrays."""
    return {key: list(value) if isinstance(value, list) else value for key, value in tree.items()}


def added(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
