"""A forward pass and an evaluation by layer programs, which run stages and layers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, flatten
from plimsoll.framework.schedules.gradients import with_tied_weights
from plimsoll.framework.schedules.layerwise.functions import (
    EvaluationFunctions,
    Inputs,
    LayerFunctions,
    Weights,
)
from plimsoll.framework.schedules.layerwise.keeping import NOTHING, Keeping
from plimsoll.framework.schedules.layerwise.moves import Moves
from plimsoll.framework.schedules.layerwise.parts import Part
from plimsoll.framework.schedules.layerwise.programs import Programs
from plimsoll.framework.schedules.layerwise.update_functions import LossAndMetrics
from plimsoll.framework.schedules.step import Metrics
from plimsoll.framework.schedules.storage import FIRST, STACK
from plimsoll.framework.schedules.unit import Carry, UnitResiduals

Functions = TypeVar("Functions", bound=LayerFunctions)
# Residuals of a layer, or None when they are no longer needed.
Residuals = UnitResiduals | None


class LoadedUnit(NamedTuple):
    """The layer whose weights are on the device, and its weights; index -1 for none."""

    index: int
    weights: Weights


NO_UNIT = LoadedUnit(-1, {})


class Pass(Generic[Functions]):
    """A pass through stages and layers, one after the other.

    Python references keep arrays alive, so each reference is dropped as soon as it is not needed: `del` statements
    and fields that are reset are part of the memory plan.

    Args:
        functions: the computations.
        programs: the compiled programs that run them.
        numbers: 0, 1, ... on the devices.

    Attributes:
        keeps_inputs: whether a backward pass follows, which needs the inputs of the layers before the stack.
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
        # Buffers before the microbatch, and after it.
        self.buffers: Nested = {}
        self.new_buffers: Nested = {}
        self.loaded = NO_UNIT
        # The inputs of the layers before the stack, for their backward pass.
        self.first_inputs: list[Carry] = []

    def begin(self, buffers: Nested, inputs: Inputs) -> None:
        """Start a microbatch."""
        self.buffers = buffers
        self.new_buffers = copied(buffers)
        self.inputs = inputs

    def weights(self, part: Part) -> Weights:
        """Return the parameters that a stage (tied ones included) or a layer reads, in the memory that stores them."""
        weights = {}
        for group in ("parameter", "frozen"):
            # A tied parameter belongs to the embedding, which is either trained or frozen.
            homes = flatten({"embed": self.state[group].get("embed", {})})
            params = part.of(self.state[group])
            weights[group] = with_tied_weights(self.f.model.ties, part.stage, params, homes)
        return weights

    def stage_weights(self, stage: str) -> Weights:
        """Return the parameters that a stage reads, on the device."""
        part = Part(stage)
        return self.run.take(part.weights, self.weights(part))

    def unit_weights(self, index: int) -> Weights:
        """Return a layer's weights on the device, and drop those of the previous layer."""
        if self.loaded.index != index:
            # The old weights are dropped first; otherwise two layers' weights would be on the device during the
            # fetch.
            self.loaded = NO_UNIT
            part = Part.unit(index)
            self.loaded = LoadedUnit(index, self.run.take(part.weights, self.weights(part)))
        return self.loaded.weights

    def want_unit(self, index: int) -> None:
        """Request that the next program fetches a layer's weights."""
        if 0 <= index < self.f.num_units:
            part = Part.unit(index)
            self.run.want(part.weights, self.weights(part))

    def forward(self, keeping_of: Callable[[int], Keeping]) -> tuple[Carry, list[Residuals], dict[str, LossAndMetrics]]:
        """Run everything before the head.

        Returns:
            (output of the stack; residuals of each of its layers; loss and metrics by stage).
        """
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
        # Parameters that all layers share stay on the device for the whole pass.
        self.shared = self.stage_weights("shared")
        residuals_by_unit: list[Residuals] = []
        losses[STACK] = (None, {})
        for index in range(f.num_units):
            x, unit_residuals, unit_loss = self.unit_forward(index, x, keeping_of(index), index + 1)
            residuals_by_unit.append(unit_residuals)
            losses[STACK] = self._add_loss(losses[STACK], unit_loss)
        return x, residuals_by_unit, losses

    def _add_loss(self, earlier: LossAndMetrics, unit_loss: LossAndMetrics) -> LossAndMetrics:
        """Add a layer's loss and metrics to those of the layers before it."""
        # A layer may have neither a loss nor metrics.
        if not jax.tree.leaves(unit_loss):
            return earlier
        if not jax.tree.leaves(earlier):
            return unit_loss
        return self.run("add", added, earlier, unit_loss, out=self.f.specs.everywhere)

    def _first_forward(self, x: Carry) -> tuple[Carry, LossAndMetrics]:
        """Run the layers before the stack: (the stack's input; their loss and metrics)."""
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
            loss = self._add_loss(loss, unit_loss)
        return x, loss

    def unit_forward(
        self,
        index: int,
        x: Carry,
        keeping: Keeping,
        next_index: int,
    ) -> tuple[Carry, UnitResiduals, LossAndMetrics]:
        """Run one layer forward, and fetch the weights of the next one: (y, residuals, loss and metrics)."""
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
        # A group's second forward pass ("now") starts from the same buffers as the first, so its new buffers are
        # ignored.
        if buffers and keeping.what != "now":
            self.new_buffers[STACK][index] = buffers
        return y, residuals, unit_loss


class Evaluation(Pass[EvaluationFunctions]):
    """Evaluation of a batch."""

    keeps_inputs = False

    def __call__(
        self,
        weights: Weights,
        buffers: Nested,
        batch: Nested,
    ) -> Metrics:
        """Return sums over the batch."""
        f = self.f
        self.state = weights
        sums = None
        for number in range(f.learner.accumulate):
            self.begin(buffers, (batch, {}, self.numbers[number]))
            x, *_ = self.forward(lambda index: NOTHING)
            head_weights = self.stage_weights("head")
            head_buffers = Part("head").of(self.buffers)
            scores = self.run("score", f.score, head_weights, head_buffers, x, self.inputs, out=f.specs.everywhere)
            # Dropped, because the next microbatch needs their memory.
            del x, head_weights
            sums = scores if sums is None else self.run("add", added, sums, scores, out=f.specs.everywhere)
        assert sums is not None
        return sums


def copied(tree: Nested) -> Nested:
    """Copy the containers of a tree, down to the lists of a stack's parts, but not its arrays."""
    return {key: list(value) if isinstance(value, list) else value for key, value in tree.items()}


def added(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
