"""The forward and backward pass of microbatches by layer programs: stages and layers one after the other, from Python.

A pass takes one microbatch, or several, which all run through a layer before the next layer is fetched (layered
gradient accumulation, arXiv 2106.02679): weights, gradients and optimizer state then move once for all of them.

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
from plimsoll.framework.schedules.layerwise.programs import Programs, TransferKey, TransferQueue
from plimsoll.framework.schedules.layerwise.save_policy import SAVE_NOTHING, SavePolicy, carry_specs
from plimsoll.framework.schedules.layerwise.update import Updates, UpdateUnit, replicated_specs
from plimsoll.framework.schedules.stack_layout import FIRST, STACK

# --- what a pass reads and carries -----------------------------------------------------------------------------------


@dataclass
class Microbatch:
    """A microbatch, from its forward to its backward pass.

    Attributes:
        inputs: the batch, the counters, and the index of the microbatch.
        number: index among the microbatches of the pass.
        buffers: the model's buffers before it.
        new_buffers: the buffers after it, in containers that belong to the microbatch.
        first_inputs: the inputs of the layers before the stack, for their backward pass.
        residuals: residuals of each layer of the stack. A backward pass that does not only measure replaces those it
            has used with None.
        ct: the cotangent of the stack's output.
        head_grads: the head's gradients until they are processed, in the last microbatch of a pass.
        tie_grads: gradients of tied weights, to be added to the embedding's, by path, in the last microbatch of a pass;
            a backward pass that does not only measure empties it.
    """

    inputs: Inputs
    number: int
    buffers: Nested
    new_buffers: Nested
    first_inputs: list[Carry] = field(default_factory=list)
    residuals: list[LayerResiduals | None] = field(default_factory=list)
    ct: Cotangent = None
    head_grads: Nested = field(default_factory=dict)
    tie_grads: dict[str, jax.Array] = field(default_factory=dict)

    def residual_key(self, index: int) -> TransferKey:
        """Return the key of the transfer of the residuals of a layer of the stack."""
        return replace(UpdateUnit(STACK, index).key("kept"), microbatch=self.number)

    def request_residuals(self, run: TransferQueue, index: int) -> None:
        """Request that the next program fetches the residuals of a layer of the stack."""
        run.request(self.residual_key(index), self.residuals[index])

    def split_buffers(self, unit: UpdateUnit, out: Out) -> Out:
        """Store the new buffers of a stage or layer; return its loss and metrics."""
        if out.layer_state:
            unit.put(self.new_buffers, out.layer_state)
        return replace(out, layer_state={})


@dataclass
class Activations:
    """The activations of a microbatch between two layers of the forward pass, and its loss and metrics so far.

    Attributes:
        x: the input of the layer that runs next; None while a program has taken it over.
        outs: loss and metrics by stage; those of a stack are sums over its layers so far.
    """

    x: Carry | None
    outs: dict[str, Out]

    def take(self) -> Carry:
        """Return the layer's input, and drop the reference to it."""
        x = self.x
        assert x is not None
        self.x = None
        return x


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

    def take_stage_weights(self, unit: UpdateUnit) -> Weights:
        """Return the weights of a stage, or of a layer before the stack, on the device."""
        return self.run.take(unit.key("weights"), self._get_weights(unit))

    def load_layer(self, index: int) -> None:
        """Move the weights of a layer of the stack to the device; they stay until another layer is loaded."""
        unit = UpdateUnit(STACK, index)
        if self._loaded is None or self._loaded.unit != unit:
            # The old weights are dropped first; otherwise two layers' weights would be on the device during the
            # fetch.
            self._loaded = None
            self._loaded = LoadedLayer(unit, self.run.take(unit.key("weights"), self._get_weights(unit)))

    def take_layer(self, index: int, buffers: Nested) -> Variables:
        """Return the variables of a layer of the stack, with its weights on the device.

        Args:
            index: index of the layer.
            buffers: the model's buffers, by stage.
        """
        self.load_layer(index)
        assert self._loaded is not None
        return Variables(self._loaded.weights, self._shared, self._loaded.unit.select(buffers))

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

    def forward(self, microbatches: Sequence[Microbatch]) -> list[Activations]:
        """Run microbatches through everything before the head."""
        f = self.functions
        embed = UpdateUnit("embed")
        weights = self.take_stage_weights(embed)
        if not f.num_first:
            self.request_layer(0)
        all_activations: list[Activations] = []
        for microbatch in microbatches:
            variables = Variables(weights, Weights(), embed.select(microbatch.buffers))
            result = self.run("embed forward", f.enter_embedding, variables, microbatch.inputs, out=f.forward_specs)
            out = microbatch.split_buffers(embed, result.out)
            all_activations.append(Activations(result.y, {"embed": out}))
            del variables, result
        del weights
        for index in range(f.num_first):
            self._run_first_layer(microbatches, index, all_activations)
        self._shared = self.take_stage_weights(UpdateUnit("shared"))
        for index in range(f.num_repeats):
            save_policy = f.residual_plan.forward_save_policy(index) if f.training else SAVE_NOTHING
            self.load_layer(index)
            self.request_layer(index + 1)
            for microbatch, activations in zip(microbatches, all_activations, strict=True):
                result = self.run_layer(microbatch, index, activations.take(), save_policy)
                activations.x = result.y
                microbatch.residuals.append(result.residuals)
                activations.outs[STACK] = self.add(activations.outs.get(STACK, Out()), result.out)
                del result
        return all_activations

    def _run_first_layer(
        self, microbatches: Sequence[Microbatch], index: int, all_activations: Sequence[Activations]
    ) -> None:
        """Run one of the layers before the stack on the activations of all microbatches."""
        f = self.functions
        unit = UpdateUnit(FIRST, index)
        weights = self.take_stage_weights(unit)
        is_last = index + 1 == f.num_first
        if is_last:
            self.request_layer(0)
        for microbatch, activations in zip(microbatches, all_activations, strict=True):
            x = activations.take()
            if f.training:
                microbatch.first_inputs.append(x)
            result = self.run(
                f"{FIRST} forward{', last' if is_last else ''}",
                partial(f.first_forward, is_last),
                Variables(weights, Weights(), unit.select(microbatch.buffers)),
                x,
                replace(microbatch.inputs, layer=self.numbers[index]),
                out=f.forward_specs,
            )
            del x
            activations.x = result.y
            out = microbatch.split_buffers(unit, result.out)
            activations.outs[FIRST] = self.add(activations.outs.get(FIRST, Out()), out)
            del result

    def run_layer(self, microbatch: Microbatch, index: int, x: Carry, save_policy: SavePolicy) -> ForwardResult:
        """Run one layer of the stack forward.

        Args:
            microbatch: see `forward`.
            index: index of the layer.
            x: the layer's input.
            save_policy: which residuals are saved, and where.
        """
        f = self.functions
        unit = UpdateUnit(STACK, index)
        variables = self.take_layer(index, microbatch.buffers)
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

    def run_head(
        self, updates: Updates, microbatches: Sequence[Microbatch], all_activations: Sequence[Activations]
    ) -> None:
        """Run the head forward and backward, from the stack's outputs."""
        f = self.functions
        unit = UpdateUnit("head")
        weights = self.take_stage_weights(unit)
        grads = updates.take_gradients(unit)
        tie_grads: Nested = {}
        for microbatch, activations in zip(microbatches, all_activations, strict=True):
            result: HeadResult = self.run(
                "head backward",
                f.head_step,
                Variables(weights, Weights(), unit.select(microbatch.buffers)),
                activations.take(),
                grads,
                microbatch.inputs,
                # Where layers are inverted, x is still needed as the last layer's output.
                donate=(2,) if f.residual_plan.inverts else (1, 2),
                out=f.head_specs,
            )
            microbatch.ct = result.ct
            grads = result.grads
            activations.outs["head"] = microbatch.split_buffers(unit, result.out)
            if result.tie_grads and len(microbatches) > 1:
                add = partial(f.updates.add_gradients, "embed")
                specs = partial(f.updates.gradient_specs, "embed")
                tie_grads = self.run("sum of ties", add, result.tie_grads, tie_grads or None, donate=(1,), out=specs)
            else:
                tie_grads = result.tie_grads
            del result
        assert grads is not None
        microbatches[-1].head_grads = grads
        microbatches[-1].tie_grads = tie_grads


# --- backward --------------------------------------------------------------------------------------------------------


class BackwardPass:
    """The backward pass of one or more microbatches, from the head to the embedding.

    By default it stores the gradients for a later update.

    Args:
        runner: runs the programs.
        updates: stores the gradients or updates by them.
        microbatches: results of the forward pass and of the head.
        grad_stats: initial gradient statistics; None while more microbatches follow.
        decision: if given, each stage and layer is updated immediately, by this decision.
        measures: whether the pass only computes gradient statistics; a second backward pass then needs everything
            else again.
    """

    def __init__(
        self,
        runner: Runner,
        updates: Updates,
        microbatches: Sequence[Microbatch],
        grad_stats: GradStats | None,
        decision: Decision | None = None,
        *,
        measures: bool = False,
    ):
        self._runner = runner
        self._run = runner.run
        self._functions = runner.functions
        self._updates = updates
        self._microbatches = microbatches
        self._decision = decision
        self._measures = measures
        # The following values pass from layer to layer. Replacing one after its use frees the arrays.
        self._grad_stats = grad_stats
        # By microbatch: the cotangent of the output of the layer that runs next, and where layers are inverted, the
        # residuals of that layer.
        self._cts = [microbatch.ct for microbatch in microbatches]
        self._previous = [microbatch.residuals[-1] for microbatch in microbatches]
        # Sum of the shared parameters' gradients so far.
        self._shared_sums: Nested = {}

    def run(self) -> GradStats | None:
        """Run from the head to the embedding; return the gradient statistics."""
        f = self._functions
        last = self._microbatches[-1]
        # `run_head` has computed the head's gradients.
        if last.head_grads:
            self._measure(last.head_grads)
            self._process_grads(UpdateUnit("head"), last.head_grads)
            if not self._measures:
                last.head_grads = {}
        if self._measures:
            # Copied: the first layer's program donates the cotangent, and the second backward pass needs it again.
            copy = partial(jax.tree.map, jnp.copy)
            self._cts = [self._run("copy", copy, ct, out=carry_specs) for ct in self._cts]
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
        group = residual_plan.groups[number]
        if residual_plan.inverts:
            group_residuals = [[previous] for previous in self._previous]
        elif len(group) == 1:
            group_residuals = [[microbatch.residuals[group[0]]] for microbatch in self._microbatches]
        else:
            group_residuals = self._run_forward_again(group)
        if not self._measures:
            for microbatch in self._microbatches:
                microbatch.residuals[group[0]] = None
        for index in reversed(group):
            layer_residuals = [residuals.pop() for residuals in group_residuals]
            grads = self._run_layer_backward(index, layer_residuals, number)
            self._process_grads(UpdateUnit(STACK, index), grads)
            del grads

    def _run_forward_again(self, group: range) -> list[list[LayerResiduals | None]]:
        """Run a group of layers forward from its inputs; return residuals for its backward pass, by microbatch."""
        all_activations = []
        for microbatch, ct in zip(self._microbatches, self._cts, strict=True):
            group_input = self._run.take(microbatch.residual_key(group[0]), microbatch.residuals[group[0]])
            # The cotangent has the structure of the activations between layers, which residuals do not have.
            x = jax.tree.unflatten(jax.tree.structure(ct), group_input.leaves)
            # No other name may refer to the input: it has to be freed once the first layer has run.
            del group_input
            if self._measures:
                # Copied: inputs are donated to the next layer's program, and the second backward pass needs this one
                # again.
                x = self._run("copy", partial(jax.tree.map, jnp.copy), x, out=carry_specs)
            all_activations.append(Activations(x, {}))
            del x
        group_residuals: list[list[LayerResiduals | None]] = [[] for _ in self._microbatches]
        for index in group:
            self._runner.load_layer(index)
            # The backward pass starts with the last layer, whose weights are already on the device.
            if index + 1 in group:
                self._runner.request_layer(index + 1)
            save_policy = self._functions.residual_plan.save_policy(index, "now")
            for microbatch, activations in zip(self._microbatches, all_activations, strict=True):
                result = self._runner.run_layer(microbatch, index, activations.take(), save_policy)
                activations.x = result.y
                group_residuals[microbatch.number].append(result.residuals)
                del result
        return group_residuals

    def _run_layer_backward(self, index: int, residuals: list[LayerResiduals | None], group_number: int) -> Nested:
        """Run a layer of the stack backward, and return its gradients.

        Args:
            index: index of the layer.
            residuals: the layer's residuals by microbatch, in the memory in which they are stored; emptied.
            group_number: index of the layer's group.
        """
        f = self._functions
        unit = UpdateUnit(STACK, index)
        name = f"unit backward{f.residual_plan.label(index)}"
        last = self._microbatches[-1]
        grads: Nested | None = None
        for microbatch in self._microbatches:
            number = microbatch.number
            variables = self._runner.take_layer(index, microbatch.buffers)
            layer_residuals = self._run.take(microbatch.residual_key(index), residuals.pop(0))
            # During the first program, the weights of the next layer are fetched; during the last one, its gradients
            # and the inputs of this layer's update.
            if number == 0:
                grads = self._updates.take_gradients(unit)
                self._runner.request_layer(index - 1)
            if microbatch is last:
                if self._decision is not None:
                    self._updates.request_state(unit)
                if not self._measures:
                    self._updates.request_gradients(UpdateUnit(STACK, index - 1))
            self._request_residuals(index, number, group_number)
            result: BackwardResult = self._run(
                f"{name}, measured" if self._measures else name,
                partial(f.layer_backward, f.residual_plan.policies[index]),
                variables,
                layer_residuals,
                BackwardInputs(self._cts[number], self._shared_sums, grads),
                # Only the sum over all microbatches counts.
                self._grad_stats if microbatch is last else None,
                replace(microbatch.inputs, layer=self._runner.numbers[index]),
                donate=(1, 2) if f.residual_plan.inverts and not self._measures else (2,),
                out=partial(f.backward_specs, STACK),
            )
            del variables, layer_residuals
            self._cts[number] = result.ct
            self._shared_sums = result.shared_sums
            self._previous[number] = result.previous
            grads = result.grads
            if microbatch is last:
                self._grad_stats = result.grad_stats
            del result
        assert grads is not None
        return grads

    def _request_residuals(self, index: int, number: int, group_number: int) -> None:
        """Request the residuals of the program after this one, if they were saved in the forward pass.

        Args:
            index: index of the layer.
            number: index of the microbatch.
            group_number: index of the layer's group.
        """
        residual_plan = self._functions.residual_plan
        group = residual_plan.groups[group_number]
        if residual_plan.inverts:
            return
        if number + 1 < len(self._microbatches):
            # The residuals of longer groups were computed just now.
            if len(group) == 1:
                self._microbatches[number + 1].request_residuals(self._run, index)
        elif index == group[0] and index:
            self._microbatches[0].request_residuals(self._run, residual_plan.groups[group_number - 1][0])

    # --- stages before the stack -------------------------------------------------------------------------------------

    def _run_first_layer_backward(self, index: int) -> None:
        """Run one of the layers before the stack backward, and process its gradients."""
        f = self._functions
        unit = UpdateUnit(FIRST, index)
        is_last_layer = index + 1 == f.num_first
        name = f"{FIRST} backward{', last' if is_last_layer else ''}"
        weights = self._runner.take_stage_weights(unit)
        grads = self._updates.take_gradients(unit)
        last = self._microbatches[-1]
        for microbatch in self._microbatches:
            first_inputs = microbatch.first_inputs
            x = first_inputs[index] if self._measures else first_inputs.pop()
            result: BackwardResult = self._run(
                f"{name}, measured" if self._measures else name,
                partial(f.first_backward, is_last_layer),
                Variables(weights, Weights(), unit.select(microbatch.buffers)),
                x,
                BackwardInputs(self._cts[microbatch.number], {}, grads),
                self._grad_stats if microbatch is last else None,
                replace(microbatch.inputs, layer=self._runner.numbers[index]),
                donate=(2,),
                out=partial(f.backward_specs, FIRST),
            )
            del x
            self._cts[microbatch.number] = result.ct
            grads = result.grads
            if microbatch is last:
                self._grad_stats = result.grad_stats
            del result
        del weights
        assert grads is not None
        self._process_grads(unit, grads)

    def _run_embedding_backward(self) -> None:
        """Run the embedding backward, and process its gradients."""
        f = self._functions
        unit = UpdateUnit("embed")
        weights = self._runner.take_stage_weights(unit)
        grads = self._updates.take_gradients(unit)
        if not weights.trainable:
            return
        last = self._microbatches[-1]
        for microbatch in self._microbatches:
            result: BackwardResult = self._run(
                "embed backward",
                f.leave_embedding,
                Variables(weights, Weights(), unit.select(microbatch.buffers)),
                self._cts[microbatch.number],
                microbatch.tie_grads,
                grads,
                self._grad_stats if microbatch is last else None,
                microbatch.inputs,
                donate=(3,),
                out=partial(f.backward_specs, "embed"),
            )
            grads = result.grads
            if microbatch is last:
                self._grad_stats = result.grad_stats
            del result
        del weights
        if not self._measures:
            # Kept, these would stay alive through the update, and they are as large as the table.
            last.tie_grads = {}
        assert grads is not None
        self._process_grads(unit, grads)
