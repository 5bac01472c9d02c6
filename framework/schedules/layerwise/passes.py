"""Stages and units one after the other: a forward pass and an evaluation by the programs of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

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
from framework.schedules.storage import STACK
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
    """

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
        """Runs embedding and stack: (what comes out of the stack; what is kept of each unit; loss and metrics of
        both)."""
        f = self.f
        run = self.run
        weights = self.stage_weights("embed")
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
        # Parameters that all units share stay on the device for the whole pass.
        self.shared = self.stage_weights("shared")
        residuals_by_unit: list[Residuals] = []
        stack_loss: LossAndMetrics | None = None
        for index in range(f.num_units):
            x, unit_residuals, unit_loss = self.unit_forward(index, x, keeping_of(index), index + 1)
            residuals_by_unit.append(unit_residuals)
            # A unit may have neither a loss nor metrics.
            if jax.tree.leaves(unit_loss):
                if stack_loss is None:
                    stack_loss = unit_loss
                else:
                    stack_loss = run("add", added, stack_loss, unit_loss, out=f.specs.everywhere)
        return x, residuals_by_unit, {"embed": embed_loss, STACK: stack_loss or (None, {})}

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
                f.specs.residuals(results[1], keeping),
                *f.specs.everywhere(results[2:]),
            ),
        )
        # A group's second forward pass ("now") sees the buffers as the first one found them.
        if buffers and keeping.what != "now":
            self.new_buffers[STACK][index] = buffers
        return y, residuals, unit_loss


class Evaluation(Pass[EvaluationFunctions]):
    """The loss of a batch."""

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
            head = self.stage_weights("head")
            arguments = head, Part("head").of(self.buffers), x, self.inputs
            scores = self.run("score", f.score, *arguments, out=f.specs.everywhere)
            sums = scores if sums is None else self.run("add", added, sums, scores, out=f.specs.everywhere)
        assert sums is not None
        return sums


def copied(tree: Nested) -> Nested:
    """New containers, down to the parts of a stack, of the same arrays."""
    return {key: list(value) if isinstance(value, list) else value for key, value in tree.items()}


def added(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
