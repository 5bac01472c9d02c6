"""Runs the forward pass and the evaluation by layer programs: stages and layers one after the other, from Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, TrainState, flatten
from plimsoll.framework.schedules.gradients import with_tied_weights
from plimsoll.framework.schedules.layer_computation import Carry, LayerResiduals
from plimsoll.framework.schedules.layerwise.functions import EvaluationFunctions, Inputs, LayerFunctions, Weights
from plimsoll.framework.schedules.layerwise.programs import Programs
from plimsoll.framework.schedules.layerwise.save_policy import SAVE_NOTHING, SavePolicy
from plimsoll.framework.schedules.layerwise.transfers import TransferQueue
from plimsoll.framework.schedules.layerwise.update_functions import LossAndMetrics
from plimsoll.framework.schedules.layerwise.update_units import UpdateUnit
from plimsoll.framework.schedules.stack_parts import FIRST, STACK
from plimsoll.framework.schedules.step import Metrics

Functions = TypeVar("Functions", bound=LayerFunctions)
# Residuals of a layer, or None when they are no longer needed.
Residuals = LayerResiduals | None


class LoadedLayer(NamedTuple):
    """The layer whose weights are on the device, and its weights; index -1 for none."""

    index: int
    weights: Weights


NO_LAYER = LoadedLayer(-1, {})


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

    def __init__(self, functions: Functions, programs: Programs, numbers: list[Any]):
        self.f = functions
        self.numbers = numbers
        self.run = TransferQueue(programs)
        self.state = TrainState()
        # Buffers before the microbatch, and after it.
        self.buffers: Nested = {}
        self.new_buffers: Nested = {}
        self.loaded = NO_LAYER
        # The inputs of the layers before the stack, for their backward pass.
        self.first_inputs: list[Carry] = []

    def begin(self, buffers: Nested, inputs: Inputs) -> None:
        """Start a microbatch.

        Args:
            buffers: the model's buffers before it.
            inputs: the batch, the counters, and the index of the microbatch.
        """
        self.buffers = buffers
        self.new_buffers = copy_containers(buffers)
        self.inputs = inputs

    def weights(self, update_unit: UpdateUnit) -> Weights:
        """Return the parameters that a stage (tied ones included) or a layer reads, in the memory that stores them."""
        weights = {}
        for group in ("parameter", "frozen"):
            # A tied parameter belongs to the embedding, which is either trained or frozen.
            homes = flatten({"embed": self.state[group].get("embed", {})})
            params = update_unit.select(self.state[group])
            weights[group] = with_tied_weights(self.f.model.ties, update_unit.stage, params, homes)
        return weights

    def stage_weights(self, stage: str) -> Weights:
        """Return the parameters that a stage reads, on the device."""
        update_unit = UpdateUnit(stage)
        return self.run.take(update_unit.weights, self.weights(update_unit))

    def layer_weights(self, index: int) -> Weights:
        """Return a layer's weights on the device, and drop those of the previous layer."""
        if self.loaded.index != index:
            # The old weights are dropped first; otherwise two layers' weights would be on the device during the
            # fetch.
            self.loaded = NO_LAYER
            update_unit = UpdateUnit.layer(index)
            self.loaded = LoadedLayer(index, self.run.take(update_unit.weights, self.weights(update_unit)))
        return self.loaded.weights

    def request_layer(self, index: int) -> None:
        """Request that the next program fetches a layer's weights."""
        if 0 <= index < self.f.num_repeats:
            update_unit = UpdateUnit.layer(index)
            self.run.request(update_unit.weights, self.weights(update_unit))

    def forward(
        self, get_save_policy: Callable[[int], SavePolicy]
    ) -> tuple[Carry, list[Residuals], dict[str, LossAndMetrics]]:
        """Run everything before the head.

        Returns:
            (output of the stack; residuals of each of its layers; loss and metrics by stage).
        """
        f = self.f
        run = self.run
        weights = self.stage_weights("embed")
        if not f.num_first:
            self.request_layer(0)
        x, embed_loss, buffers = run(
            "embed forward",
            f.enter_embedding,
            weights,
            UpdateUnit("embed").select(self.buffers),
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
        residuals_by_layer: list[Residuals] = []
        losses[STACK] = (None, {})
        for index in range(f.num_repeats):
            x, layer_residuals, layer_loss = self.layer_forward(index, x, get_save_policy(index), index + 1)
            residuals_by_layer.append(layer_residuals)
            losses[STACK] = self._add_loss(losses[STACK], layer_loss)
        return x, residuals_by_layer, losses

    def _add_loss(self, earlier: LossAndMetrics, layer_loss: LossAndMetrics) -> LossAndMetrics:
        """Add a layer's loss and metrics to those of the layers before it."""
        # A layer may have neither a loss nor metrics.
        if not jax.tree.leaves(layer_loss):
            return earlier
        if not jax.tree.leaves(earlier):
            return layer_loss
        return self.run("add", add_trees, earlier, layer_loss, out=self.f.specs.everywhere)

    def _first_forward(self, x: Carry) -> tuple[Carry, LossAndMetrics]:
        """Run the layers before the stack: (the stack's input; their loss and metrics)."""
        f = self.f
        loss: LossAndMetrics = (None, {})
        self.first_inputs = []
        for index in range(f.num_first):
            update_unit = UpdateUnit(FIRST, index)
            is_last = index + 1 == f.num_first
            if is_last:
                self.request_layer(0)
            if self.keeps_inputs:
                self.first_inputs.append(x)
            x, layer_loss, buffers = self.run(
                f"{FIRST} forward{', last' if is_last else ''}",
                partial(f.first_forward, is_last),
                self.run.take(update_unit.weights, self.weights(update_unit)),
                update_unit.select(self.buffers),
                x,
                self.inputs,
                self.numbers[index],
                out=lambda results: (f.specs.carry(results[0]), *f.specs.everywhere(results[1:])),
            )
            if buffers:
                self.new_buffers[FIRST][index] = buffers
            loss = self._add_loss(loss, layer_loss)
        return x, loss

    def layer_forward(
        self, index: int, x: Carry, save_policy: SavePolicy, next_index: int
    ) -> tuple[Carry, LayerResiduals, LossAndMetrics]:
        """Run one layer forward, and fetch the weights of the next one: (y, residuals, loss and metrics).

        Args:
            index: index of the layer.
            x: the layer's input.
            save_policy: which residuals are saved, and where.
            next_index: index of the layer that runs next; -1 if there is none.
        """
        f = self.f
        weights = self.layer_weights(index)
        self.request_layer(next_index)
        y, residuals, layer_loss, buffers = self.run(
            save_policy.program,
            partial(f.layer_forward, save_policy),
            weights,
            self.shared,
            UpdateUnit.layer(index).select(self.buffers),
            x,
            self.inputs,
            self.numbers[index],
            donate=(3,),
            out=lambda results: (
                f.specs.carry(results[0]),
                f.specs.residuals(results[1], save_policy, results[0]),
                *f.specs.everywhere(results[2:]),
            ),
        )
        # A group's second forward pass ("now") starts from the same buffers as the first, so its new buffers are
        # ignored.
        if buffers and save_policy.what != "now":
            self.new_buffers[STACK][index] = buffers
        return y, residuals, layer_loss


class Evaluation(Pass[EvaluationFunctions]):
    """Evaluation of a batch."""

    keeps_inputs = False

    def __call__(self, weights: TrainState, buffers: Nested, batch: Nested) -> Metrics:
        """Return sums over the batch.

        Args:
            weights: a state with the groups parameter and frozen.
            buffers: the model's buffers, by stage.
            batch: arrays of the global batch.
        """
        f = self.f
        self.state = weights
        sums = None
        for number in range(f.learner.accumulate):
            self.begin(buffers, (batch, {}, self.numbers[number]))
            x, *_ = self.forward(lambda index: SAVE_NOTHING)
            head_weights = self.stage_weights("head")
            head_buffers = UpdateUnit("head").select(self.buffers)
            scores = self.run("score", f.score, head_weights, head_buffers, x, self.inputs, out=f.specs.everywhere)
            # Dropped, because the next microbatch needs their memory.
            del x, head_weights
            sums = scores if sums is None else self.run("add", add_trees, sums, scores, out=f.specs.everywhere)
        assert sums is not None
        return sums


def copy_containers(tree: Nested) -> Nested:
    """Copy the containers of a tree, down to the lists of a stack's parts, but not its arrays."""
    return {key: list(value) if isinstance(value, list) else value for key, value in tree.items()}


def add_trees(a: Any, b: Any) -> Any:
    """Add two trees leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)
