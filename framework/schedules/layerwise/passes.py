"""The forward and backward pass of a microbatch by layer programs: stages and layers one after the other, from Python.

Python references keep arrays alive, so each reference is dropped as soon as it is not needed: `del` statements and
fields that are reset are part of the memory plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Out
from plimsoll.framework.layout import Nested, PyTree, flatten
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.schedules.backward_state import Weights
from plimsoll.framework.schedules.gradients import GradStats, with_tied_weights
from plimsoll.framework.schedules.layer_vjp import Carry, Cotangent, LayerResiduals
from plimsoll.framework.schedules.layerwise.layer_functions import (
    BackwardInputs,
    BackwardResult,
    ForwardResult,
    HeadResult,
    Inputs,
    LayerFunctions,
    Variables,
)
from plimsoll.framework.schedules.layerwise.programs import Programs, TransferQueue
from plimsoll.framework.schedules.layerwise.save_policy import SAVE_NOTHING, SavePolicy, carry_specs
from plimsoll.framework.schedules.layerwise.update import Updates, UpdateUnit, replicated_specs
from plimsoll.framework.schedules.stack_layout import FIRST, STACK

# --- what a pass reads and carries -----------------------------------------------------------------------------------


@dataclass
class Microbatch:
    """A microbatch, from its forward to its backward pass.

    Attributes:
        inputs: the batch, the counters, and the index of the microbatch.
        buffers: the model's buffers before it.
        new_buffers: the buffers after it, in containers that belong to the microbatch.
        first_inputs: the inputs of the layers before the stack, for their backward pass.
        residuals: residuals of each layer of the stack. A backward pass that does not only measure replaces those it
            has used with None.
        ct: the cotangent of the stack's output.
        head_grads: the head's gradients until they are processed.
        tie_grads: gradients of tied weights, to be added to the embedding's, by path; a backward pass that does not
            only measure empties it.
    """

    inputs: Inputs
    buffers: Nested
    new_buffers: Nested
    first_inputs: list[Carry] = field(default_factory=list)
    residuals: list[LayerResiduals | None] = field(default_factory=list)
    ct: Cotangent = None
    head_grads: Nested = field(default_factory=dict)
    tie_grads: dict[str, jax.Array] = field(default_factory=dict)

    def split_buffers(self, unit: UpdateUnit, out: Out) -> Out:
        """Store the new buffers of a stage or layer; return its loss and metrics."""
        if out.layer_state:
            unit.put(self.new_buffers, out.layer_state)
        return replace(out, layer_state={})


@dataclass(frozen=True)
class LoadedLayer:
    """A layer of the stack whose weights are on the device, and its weights."""

    unit: UpdateUnit
    weights: Weights


class Runner:
    """Runs the programs of one step or of one evaluation, and fetches the weights that they read.

    Args:
        functions: the computations.
        programs: the compiled programs that run them.
        numbers: 0, 1, ... on the devices.
        weights: all weights, by stage, in the memory that stores them.

    Attributes:
        run: runs a program.
    """

    def __init__(self, functions: LayerFunctions, programs: Programs, numbers: Sequence[jax.Array], weights: Weights):
        self.functions = functions
        self.run = TransferQueue(programs)
        self.numbers = numbers
        self._weights = weights
        # The layer of the stack whose weights are on the device, if there is one.
        self._loaded: LoadedLayer | None = None
        # The parameters that all layers share, which stay on the device for the whole pass.
        self._shared = Weights()

    def _get_weights(self, unit: UpdateUnit) -> Weights:
        """Return the parameters that a stage (tied ones included) or a layer reads, in the memory that stores them."""
        groups = []
        for tree in (self._weights.frozen, self._weights.trainable):
            # A tied parameter belongs to the embedding, which is either trained or frozen.
            homes = flatten({"embed": tree.get("embed", {})})
            groups.append(with_tied_weights(self.functions.model.ties, unit.stage, unit.select(tree), homes))
        return Weights(*groups)

    def take_variables(self, unit: UpdateUnit, buffers: Nested) -> Variables:
        """Return the variables of a stage or layer, with its weights on the device.

        A layer of the stack stays loaded until another one is taken.

        Args:
            unit: the stage or layer.
            buffers: the model's buffers, by stage.
        """
        if unit.stage != STACK:
            weights = self.run.take(unit.key("weights"), self._get_weights(unit))
            return Variables(weights, Weights(), unit.select(buffers))
        if self._loaded is None or self._loaded.unit != unit:
            # The old weights are dropped first; otherwise two layers' weights would be on the device during the
            # fetch.
            self._loaded = None
            self._loaded = LoadedLayer(unit, self.run.take(unit.key("weights"), self._get_weights(unit)))
        return Variables(self._loaded.weights, self._shared, unit.select(buffers))

    def unload(self, unit: UpdateUnit | None = None) -> Nested | None:
        """Drop the weights of the loaded layer; return the trainable ones, or None if there is no such layer.

        Args:
            unit: the only layer to drop; None drops any layer.
        """
        loaded = self._loaded
        if loaded is None or unit not in (None, loaded.unit):
            return None
        self._loaded = None
        return loaded.weights.trainable

    def request_layer(self, index: int) -> None:
        """Request that the next program fetches the weights of a layer of the stack, if it exists."""
        if 0 <= index < self.functions.num_repeats:
            unit = UpdateUnit(STACK, index)
            self.run.request(unit.key("weights"), self._get_weights(unit))

    def add(self, earlier: PyTree, later: PyTree) -> PyTree:
        """Add two trees of scalars leaf by leaf; a tree without leaves adds nothing."""
        if not jax.tree.leaves(later):
            return earlier
        if not jax.tree.leaves(earlier):
            return later
        return self.run("add", partial(jax.tree.map, jnp.add), earlier, later, out=replicated_specs)

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(self, microbatch: Microbatch) -> tuple[Carry, dict[str, Out]]:
        """Run everything before the head: (output of the stack, loss and metrics by stage)."""
        f = self.functions
        embed = UpdateUnit("embed")
        variables = self.take_variables(embed, microbatch.buffers)
        if not f.num_first:
            self.request_layer(0)
        result = self.run("embed forward", f.enter_embedding, variables, microbatch.inputs, out=f.forward_specs)
        del variables
        x = result.y
        outs = {"embed": microbatch.split_buffers(embed, result.out)}
        del result
        if f.num_first:
            x, outs[FIRST] = self._run_first_layers(microbatch, x)
        self._shared = self.take_variables(UpdateUnit("shared"), {}).weights
        outs[STACK] = Out()
        for index in range(f.num_repeats):
            save_policy = f.residual_plan.forward_save_policy(index) if f.training else SAVE_NOTHING
            result = self.run_layer(microbatch, index, x, save_policy, index + 1)
            x = result.y
            microbatch.residuals.append(result.residuals)
            outs[STACK] = self.add(outs[STACK], result.out)
        return x, outs

    def _run_first_layers(self, microbatch: Microbatch, x: Carry) -> tuple[Carry, Out]:
        """Run the layers before the stack: (the stack's input, the sum of their losses and metrics)."""
        f = self.functions
        total = Out()
        for index in range(f.num_first):
            unit = UpdateUnit(FIRST, index)
            is_last = index + 1 == f.num_first
            if is_last:
                self.request_layer(0)
            if f.training:
                microbatch.first_inputs.append(x)
            result = self.run(
                f"{FIRST} forward{', last' if is_last else ''}",
                partial(f.first_forward, is_last),
                self.take_variables(unit, microbatch.buffers),
                x,
                replace(microbatch.inputs, layer=self.numbers[index]),
                out=f.forward_specs,
            )
            x = result.y
            total = self.add(total, microbatch.split_buffers(unit, result.out))
        return x, total

    def run_layer(
        self, microbatch: Microbatch, index: int, x: Carry, save_policy: SavePolicy, next_index: int
    ) -> ForwardResult:
        """Run one layer of the stack forward, and fetch the weights of the next one.

        Args:
            microbatch: see `forward`.
            index: index of the layer.
            x: the layer's input.
            save_policy: which residuals are saved, and where.
            next_index: index of the layer that runs next; -1 if there is none.
        """
        f = self.functions
        unit = UpdateUnit(STACK, index)
        variables = self.take_variables(unit, microbatch.buffers)
        self.request_layer(next_index)
        result: ForwardResult = self.run(
            f"unit forward, keeps {save_policy.what}{save_policy.label}",
            partial(f.layer_forward, save_policy),
            variables,
            x,
            replace(microbatch.inputs, layer=self.numbers[index]),
            donate=(1,),
            out=partial(f.forward_specs, save_policy=save_policy),
        )
        # A group's second forward pass ("now") starts from the same buffers as the first, so its new buffers are
        # ignored.
        if save_policy.what == "now":
            return replace(result, out=Out())
        return replace(result, out=microbatch.split_buffers(unit, result.out))

    def run_head(self, updates: Updates, microbatch: Microbatch, x: Carry) -> Out:
        """Run the head forward and backward, from the stack's output `x`; return its loss and metrics."""
        f = self.functions
        unit = UpdateUnit("head")
        variables = self.take_variables(unit, microbatch.buffers)
        grad_sums = updates.take_gradients(unit)
        result: HeadResult = self.run(
            "head backward",
            f.head_step,
            variables,
            x,
            grad_sums,
            microbatch.inputs,
            # Where layers are inverted, x is still needed as the last layer's output.
            donate=(2,) if f.residual_plan.inverts else (1, 2),
            out=f.head_specs,
        )
        microbatch.ct = result.ct
        microbatch.head_grads = result.grads
        microbatch.tie_grads = result.tie_grads
        return microbatch.split_buffers(unit, result.out)


# --- backward --------------------------------------------------------------------------------------------------------


class BackwardPass:
    """The backward pass of a microbatch, from the head to the embedding.

    By default it stores the gradients for a later update.

    Args:
        runner: runs the programs.
        updates: stores the gradients or updates by them.
        microbatch: results of the forward pass and of the head.
        grad_stats: initial gradient statistics; None while more microbatches follow.
        decision: if given, each stage and layer is updated immediately, by this decision.
        measures: whether the pass only computes gradient statistics; a second backward pass then needs everything
            else again.
    """

    def __init__(
        self,
        runner: Runner,
        updates: Updates,
        microbatch: Microbatch,
        grad_stats: GradStats | None,
        decision: Decision | None = None,
        *,
        measures: bool = False,
    ):
        self._runner = runner
        self._run = runner.run
        self._functions = runner.functions
        self._updates = updates
        self._microbatch = microbatch
        self._decision = decision
        self._measures = measures
        # The following values pass from layer to layer. Replacing one after its use frees the arrays.
        self._grad_stats = grad_stats
        # The cotangent of the output of the layer that runs next.
        self._ct = microbatch.ct
        # Where layers are inverted, the residuals of the layer that runs next.
        self._previous = microbatch.residuals[-1]
        # Sum of the shared parameters' gradients so far.
        self._shared_sums: Nested = {}

    def run(self) -> GradStats | None:
        """Run from the head to the embedding; return the gradient statistics."""
        f = self._functions
        microbatch = self._microbatch
        # `run_head` has computed the head's gradients.
        if microbatch.head_grads:
            self._measure(microbatch.head_grads)
            self._process_grads(UpdateUnit("head"), microbatch.head_grads)
            if not self._measures:
                microbatch.head_grads = {}
        if self._measures:
            # Copied: the first layer's program donates the cotangent, and the second backward pass needs it again.
            self._ct = self._run("copy", partial(jax.tree.map, jnp.copy), self._ct, out=carry_specs)
        for number in reversed(range(len(f.residual_plan.groups))):
            self._run_group_backward(number)
        # The gradients of the parameters that all layers share are now complete.
        if self._shared_sums:
            grad_sums = self._updates.take_gradients(UpdateUnit("shared"))
            # The result reuses the memory of the previous sum. Without one, it reuses that of the gradients, if they
            # have the same dtype.
            donate = (1,)
            if grad_sums is None:
                donate = (0,) if f.learner.accumulate == 1 else ()
            add = partial(f.updates.add_gradients, "shared")
            specs = partial(f.updates.gradient_specs, "shared")
            self._shared_sums = self._run("sum", add, self._shared_sums, grad_sums, donate=donate, out=specs)
            self._measure(self._shared_sums)
            self._process_grads(UpdateUnit("shared"), self._shared_sums)
            self._shared_sums = {}
        for index in reversed(range(f.num_first)):
            self._run_first_layer_backward(index)
        self._run_embedding_backward()
        return self._grad_stats

    def _measure(self, grads: Nested) -> None:
        """Add gradients to the statistics, with a separate program."""
        if self._grad_stats is not None:
            update_stats = self._functions.updates.update_stats
            self._grad_stats = self._run("judge", update_stats, self._grad_stats, grads, out=replicated_specs)

    def _process_grads(self, unit: UpdateUnit, grads: Nested) -> None:
        """Update by gradients, or store them for a later update.

        Args:
            unit: the stage or layer.
            grads: its gradients, on the device, which the statistics include; {} if it is completely frozen.
        """
        if not grads:
            return
        if self._decision is None:
            if not self._measures:
                self._updates.store_gradients(unit, grads)
            return
        assert self._grad_stats is not None
        # A layer's weights are still on the device from its backward pass; its frozen weights are not needed.
        params = self._runner.unload(unit)
        self._updates.update(unit, grads, replace(self._decision, ok=self._grad_stats.ok), params)

    # --- layers of the stack -----------------------------------------------------------------------------------------

    def _run_group_backward(self, number: int) -> None:
        """Run a group of layers backward; without memory.remat = sqrt a group is a single layer."""
        residual_plan = self._functions.residual_plan
        residuals = self._microbatch.residuals
        group = residual_plan.groups[number]
        if residual_plan.inverts:
            group_residuals = [self._previous]
        elif len(group) == 1:
            group_residuals = [residuals[group[0]]]
        else:
            group_residuals = self._run_forward_again(group)
        if not self._measures:
            residuals[group[0]] = None
        for index in reversed(group):
            # During the last layer of this group, the residuals of the next group are fetched.
            if index == group[0] and index and not residual_plan.inverts:
                next_first = residual_plan.groups[number - 1][0]
                self._run.request(UpdateUnit(STACK, next_first).key("kept"), residuals[next_first])
            layer_residuals = group_residuals.pop()
            grads = self._run_layer_backward(index, layer_residuals)
            del layer_residuals
            self._process_grads(UpdateUnit(STACK, index), grads)
            del grads

    def _run_forward_again(self, group: range) -> list[LayerResiduals | None]:
        """Run a group of layers forward from its input, and return the residuals for its backward pass."""
        unit = UpdateUnit(STACK, group[0])
        group_input = self._run.take(unit.key("kept"), self._microbatch.residuals[group[0]])
        # The cotangent has the structure of the activations between layers, which residuals do not have.
        x = jax.tree.unflatten(jax.tree.structure(self._ct), group_input.leaves)
        # No other name may refer to the input: it has to be freed once the first layer has run.
        del group_input
        if self._measures:
            # Copied: inputs are donated to the next layer's program, and the second backward pass needs this one
            # again.
            x = self._run("copy", partial(jax.tree.map, jnp.copy), x, out=carry_specs)
        group_residuals: list[LayerResiduals | None] = []
        for index in group:
            # The backward pass starts with the last layer, whose weights are already on the device.
            next_index = index + 1 if index + 1 in group else -1
            save_policy = self._functions.residual_plan.save_policy(index, "now")
            result = self._runner.run_layer(self._microbatch, index, x, save_policy, next_index)
            x = result.y
            group_residuals.append(result.residuals)
        return group_residuals

    def _run_layer_backward(self, index: int, residuals: LayerResiduals | None) -> Nested:
        """Run a layer of the stack backward, and return its gradients.

        Args:
            index: index of the layer.
            residuals: the layer's residuals, in the memory in which they are stored.
        """
        f = self._functions
        unit = UpdateUnit(STACK, index)
        variables = self._runner.take_variables(unit, self._microbatch.buffers)
        residuals = self._run.take(unit.key("kept"), residuals)
        grad_sums = self._updates.take_gradients(unit)
        # During this program, the weights and gradients of the next layer and the inputs of this layer's update are
        # fetched.
        self._runner.request_layer(index - 1)
        if self._decision is not None:
            self._updates.request_state(unit)
        if not self._measures:
            self._updates.request_gradients(UpdateUnit(STACK, index - 1))
        name = f"unit backward{f.residual_plan.label(index)}"
        result: BackwardResult = self._run(
            f"{name}, measured" if self._measures else name,
            partial(f.layer_backward, f.residual_plan.policies[index]),
            variables,
            residuals,
            BackwardInputs(self._ct, self._shared_sums, grad_sums),
            self._grad_stats,
            replace(self._microbatch.inputs, layer=self._runner.numbers[index]),
            donate=(1, 2) if f.residual_plan.inverts and not self._measures else (2,),
            out=partial(f.backward_specs, STACK),
        )
        self._ct = result.ct
        self._shared_sums = result.shared_sums
        self._grad_stats = result.grad_stats
        self._previous = result.previous
        return result.grads

    # --- stages before the stack -------------------------------------------------------------------------------------

    def _run_first_layer_backward(self, index: int) -> None:
        """Run one of the layers before the stack backward, and process its gradients."""
        f = self._functions
        unit = UpdateUnit(FIRST, index)
        is_last = index + 1 == f.num_first
        name = f"{FIRST} backward{', last' if is_last else ''}"
        first_inputs = self._microbatch.first_inputs
        x = first_inputs[index] if self._measures else first_inputs.pop()
        result: BackwardResult = self._run(
            f"{name}, measured" if self._measures else name,
            partial(f.first_backward, is_last),
            self._runner.take_variables(unit, self._microbatch.buffers),
            x,
            BackwardInputs(self._ct, {}, self._updates.take_gradients(unit)),
            self._grad_stats,
            replace(self._microbatch.inputs, layer=self._runner.numbers[index]),
            donate=(2,),
            out=partial(f.backward_specs, FIRST),
        )
        del x
        self._ct = result.ct
        self._grad_stats = result.grad_stats
        self._process_grads(unit, result.grads)

    def _run_embedding_backward(self) -> None:
        """Run the embedding backward, and process its gradients."""
        f = self._functions
        unit = UpdateUnit("embed")
        variables = self._runner.take_variables(unit, self._microbatch.buffers)
        grad_sums = self._updates.take_gradients(unit)
        if not variables.weights.trainable:
            return
        result: BackwardResult = self._run(
            "embed backward",
            f.leave_embedding,
            variables,
            self._ct,
            self._microbatch.tie_grads,
            grad_sums,
            self._grad_stats,
            self._microbatch.inputs,
            donate=(3,),
            out=partial(f.backward_specs, "embed"),
        )
        del variables
        self._grad_stats = result.grad_stats
        if not self._measures:
            # Kept, these would stay alive through the update, and they are as large as the table.
            self._microbatch.tie_grads = {}
        self._process_grads(unit, result.grads)
