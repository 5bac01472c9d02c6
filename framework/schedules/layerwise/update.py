"""Stores the gradients of a step until their update, and updates stages and layers by layer programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Out
from plimsoll.framework.layout import (
    Nested,
    ParameterSpec,
    PyTree,
    StateLayout,
    TensorSpec,
    TrainState,
    flatten,
    unflatten,
)
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate, LayerUpdateFn
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.schedules.chunked_update import update_group
from plimsoll.framework.schedules.gradients import (
    GradStats,
    add_grad_stats,
    check_finite,
    shard_as_parameter,
    with_grad_stats,
)
from plimsoll.framework.schedules.layerwise.programs import TransferKey, TransferQueue
from plimsoll.framework.schedules.stack_layout import STACK
from plimsoll.framework.schedules.step import Metrics, finish

# --- the unit of an update -------------------------------------------------------------------------------------------

# The name that a transferred tree has among a program's arguments:
#     weights    parameters that a stage or layer reads, moved to the device for its computation
#     kept       residuals of a layer
#     gradient   gradients that wait for an update
#     home       parameters, moved to the device for their update
#     state      optimizer state and averages, moved to the device for their update
#     new        results of an update, moved to the memory in which they are stored
TransferRole = Literal["weights", "kept", "gradient", "home", "state", "new"]


@dataclass(frozen=True)
class UpdateUnit:
    """A stage, or one layer of a stack: the unit of an update.

    Attributes:
        stage: name of the stage.
        index: index of the layer, if the stage is the stack or the layers before it; else None.
    """

    stage: str
    index: int | None = None

    def select(self, tree: Nested) -> Nested:
        """Return this unit's part of a tree by stages, in which a stack is a list of layers; {} if it has none."""
        stage_tree = tree.get(self.stage, {})
        return stage_tree[self.index] if self.index is not None and stage_tree else stage_tree

    def put(self, tree: Nested, new: Nested) -> None:
        """Replace this unit's part of a tree by stages."""
        if self.index is None:
            tree[self.stage] = new
        else:
            tree[self.stage][self.index] = new

    def key(self, role: TransferRole) -> TransferKey:
        """Return the key of the transfer of one of this unit's trees."""
        if role == "weights" and self.stage != STACK:
            return TransferKey(self.stage, self.index)
        if role == "gradient" or self.stage != STACK:
            return TransferKey(f"{role} {self.stage}", self.index)
        return TransferKey(role, self.index)


# --- the functions that are compiled ---------------------------------------------------------------------------------


class UpdateFunctions:
    """The functions that process gradients.

    Args:
        model, learner, layout: the components of the step; the layout's stacks are in parts.
    """

    def __init__(self, model: CausalLM, learner: Learner, layout: StateLayout):
        self.learner = learner
        self.layout = layout
        self._num_repeats = {name: stack.num_repeats for name, stack in model.stacks.items()}
        self._parameter_specs: dict[str, dict[str, ParameterSpec]] = {}
        for stage, specs in model.parameter_specs().items():
            self._parameter_specs[stage] = flatten(jax.tree.map(layout.fit, specs))

    def add_gradients(self, stage: str, grads: Nested, grad_sums: Nested | None) -> Nested:
        """Add gradients to the sums of earlier microbatches, in their parameters' sharding and in the sums' dtype.

        Args:
            stage: name of the stage.
            grads: its gradients, or some of them.
            grad_sums: the sums of earlier microbatches; None in the first one.
        """
        grad_by_path = flatten(grads)
        sum_by_path = {} if grad_sums is None else flatten(grad_sums)
        for path, grad in grad_by_path.items():
            spec = self._parameter_specs[stage][path]
            grad = shard_as_parameter(grad, spec.mesh_axes, self.layout.mesh)
            if self.learner.accumulate > 1:
                grad = grad.astype(self.learner.gradient_dtype(spec))
            grad_by_path[path] = grad + sum_by_path[path] if path in sum_by_path else grad
        return unflatten(grad_by_path)

    def update_stats(self, grad_stats: GradStats | None, grads: Nested) -> GradStats | None:
        """Add these gradients to the statistics; None, which means that more microbatches follow, stays None."""
        if grad_stats is None or not grads:
            return grad_stats
        return add_grad_stats(grad_stats, check_finite(self.learner, grad_stats.ok, grads))

    def total(self, outs: dict[str, Out], earlier: Out | None) -> Out:
        """Add a microbatch's loss and metrics to those of earlier ones; a stack's metrics are means over its layers.

        Args:
            outs: loss and metrics of the microbatch, by stage; those of a stack are sums over its layers.
            earlier: the total of earlier microbatches; None in the first one.
        """
        means = {}
        # Losses of layers add up; the division turns the summed metrics into a mean, as in `Stack.combine`.
        for name, out in outs.items():
            metrics = out.metrics
            if name in self._num_repeats:
                metrics = {key: value / self._num_repeats[name] for key, value in metrics.items()}
            means[name] = Out(loss=out.loss, metrics=metrics)
        total = Out.merge(means)
        return total if earlier is None else jax.tree.map(jnp.add, earlier, total)

    def decide(self, loss: jax.Array, squares: jax.Array, counter: Nested) -> tuple[Decision, GradStats]:
        """Return the decision, and initial gradient statistics.

        Args:
            loss: f32 scalar, of the whole batch.
            squares: sum of the squares of all gradients, or zero if they are not known yet.
            counter: the state's counters.
        """
        decision = self.learner.decide(loss, jnp.sqrt(squares), counter)
        return decision, GradStats(ok=decision.ok, squares=jnp.zeros_like(squares), updated=jnp.int32(0))

    def update(self, stage: str, old: LayerUpdate, grads: Nested, decision: Decision) -> LayerUpdate:
        """Return new parameters, optimizer state and averages of one stage, or of one layer of the stack.

        Args:
            stage: name of the stage.
            old: the arrays that the new ones replace, on the device.
            grads: its gradients, on the device.
            decision: see `Learner.decide`.
        """
        stage_specs = self.update_specs(stage)

        def run(update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
            group = update.optimizer.group
            weights = self.learner.select({stage: stage_specs.weights}, group)
            entry = stage_specs.entry[group.label]
            average = self.learner.select({stage: stage_specs.average}, group) if stage_specs.average else {}
            # Gradients are on the device, as are the weights here.
            specs = LayerTrainState(weights, weights, entry, average)
            return update_group(update, self.layout.mesh, train_state, specs, decision)

        with jax.named_scope("update"):
            new = self.learner.update(
                {stage: old.weights}, {stage: grads}, {stage: old.entry}, {stage: old.average}, decision, run, stage
            )
        return LayerUpdate(new.weights[stage], new.entry[stage], new.average.get(stage, {}))

    def finish(
        self, counter: Nested, decision: Decision, total: Out, grad_stats: GradStats, *, at_once: bool
    ) -> tuple[Nested, Metrics]:
        """Return (new counters, metrics).

        Args:
            counter: the state's counters.
            decision: the step's decision.
            total: sums of losses and metrics.
            grad_stats: gradient statistics of the backward pass.
            at_once: whether the updates were part of the backward pass.
        """
        metrics = total.metrics
        if at_once:
            decision = with_grad_stats(decision, grad_stats)
            metrics = {**metrics, "updated_units": grad_stats.updated}
        assert total.loss is not None
        # This program only returns counters and metrics; other programs return parameters and buffers.
        state = TrainState(counter=counter)
        no_update = LayerUpdate({}, {}, {})
        new_state, metrics = finish(self.learner, state, no_update, decision, total.loss, Out(metrics=metrics))
        return new_state.counter, metrics

    # --- specs of their results --------------------------------------------------------------------------------------

    def gradient_specs(self, stage: str, grads: Nested) -> Nested:
        """Return the specs of some of a stage's gradients: those of their parameters."""
        spec_by_path = flatten(_device_specs(self.layout.specs.parameter, stage))
        return unflatten({path: spec_by_path[path] for path in flatten(grads)})

    def update_specs(self, stage: str) -> LayerUpdate:
        """Return the specs of the results of `update`."""
        specs = self.layout.specs
        return LayerUpdate(
            weights=_device_specs(specs.parameter, stage),
            entry=_device_specs(specs.optimizer, stage),
            average=_device_specs(specs.ema, stage),
        )


def _device_specs(group: Nested, stage: str) -> Nested:
    """Return the specs, on the device, of a stage's leaves in a group; for the stack, those of its first layer."""
    specs = group.get(stage, {})
    # All layers have the same specs except for the memory kind.
    part = specs[0] if isinstance(specs, list) else specs
    return jax.tree.map(lambda spec: replace(spec, memory_kind="device"), part)


def replicated_specs(tree: PyTree) -> PyTree:
    """Return the specs of scalars, which are replicated on all devices."""
    return jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), tree)


# --- stored gradients and updates ------------------------------------------------------------------------------------


class Updates:
    """Stores one step's gradients and applies its updates.

    Python references keep arrays alive, so each reference is dropped as soon as it is not needed: `del` statements and
    entries that are removed are part of the memory plan.

    Args:
        functions: the computations.
        run: runs their programs.
        numbers: 0, 1, ... on the devices.
        state: the step's state, in containers that belong to the step.
    """

    def __init__(self, functions: UpdateFunctions, run: TransferQueue, numbers: Sequence[jax.Array], state: TrainState):
        self._functions = functions
        self._run = run
        self._numbers = numbers
        self._state = state
        # Gradients that wait for their update, and the update units whose gradients are being moved to the host.
        self._gradients: dict[UpdateUnit, Nested] = {}
        self._leaving: set[UpdateUnit] = set()
        self._updated: list[UpdateUnit] = []

    def store_gradients(self, unit: UpdateUnit, grads: Nested) -> None:
        """Store gradients until their update, on the host if there are buffers for them."""
        host_buffers = flatten(unit.select(self._state.gradient))
        if host_buffers:
            # Only the experts of a layer may have buffers; its other gradients stay on the device.
            stored_gradients = self._gradients.get(unit) or unflatten({**flatten(grads), **host_buffers})
            self._run.put(unit.key("gradient"), grads, stored_gradients)
            self._leaving.add(unit)
            grads = stored_gradients
        self._gradients[unit] = grads

    def _get_stored_gradients(self, unit: UpdateUnit) -> Nested:
        """Return stored gradients, in the memory in which they are stored."""
        if unit in self._leaving:
            self._leaving.remove(unit)
            self._gradients[unit] = self._run.get_stored(unit.key("gradient"), self._gradients[unit])
        return self._gradients[unit]

    def request_gradients(self, unit: UpdateUnit) -> None:
        """Request that the next program fetches stored gradients, if there are any."""
        if unit in self._gradients:
            self._run.request(unit.key("gradient"), self._get_stored_gradients(unit))

    def take_gradients(self, unit: UpdateUnit) -> Nested | None:
        """Return the gradients of earlier microbatches, on the device; None if there are none."""
        if unit not in self._gradients:
            return None
        return self._run.take(unit.key("gradient"), self._get_stored_gradients(unit))

    def request_state(self, unit: UpdateUnit) -> None:
        """Request that the next program fetches optimizer state and averages."""
        self._run.request(unit.key("state"), (unit.select(self._state.optimizer), unit.select(self._state.ema)))

    def update(self, unit: UpdateUnit, grads: Nested, decision: Decision, params: Nested | None = None) -> None:
        """Update a stage, or a layer of the stack, by its gradients.

        Args:
            unit: the stage or layer.
            grads: its gradients, on the device.
            decision: see `Learner.decide`.
            params: its trainable parameters, if they are already on the device.
        """
        if unit.index is not None:
            decision = replace(decision, layer=self._numbers[unit.index])
        run = self._run
        stored = LayerUpdate(
            weights=unit.select(self._state.parameter),
            entry=unit.select(self._state.optimizer),
            average=unit.select(self._state.ema),
        )
        weights = run.take(unit.key("home"), stored.weights) if params is None else params
        entry, average = run.take(unit.key("state"), (stored.entry, stored.average))
        old = LayerUpdate(weights, entry, average)
        # Only `old` keeps them alive, until the program takes them over.
        del weights, entry, average
        new = run(
            f"update {unit.stage}",
            partial(self._functions.update, unit.stage),
            old,
            grads,
            decision,
            donate=(0,),
            out=self._functions.update_specs(unit.stage),
        )
        del old
        run.put(unit.key("new"), new, stored)
        self._updated.append(unit)
        if unit.index is None:
            # The state of a table is as large as that of several layers: it is moved right away, so that nothing else
            # is on the device in addition to it.
            del new
            run.flush()

    def update_all(self, decision: Decision) -> None:
        """Update by all stored gradients; the inputs of the next update are fetched during the current one."""
        units = list(self._gradients)
        for number, unit in enumerate(units):
            grads = self._run.take(unit.key("gradient"), self._get_stored_gradients(unit))
            stored_grads = flatten(self._gradients.pop(unit))
            # Buffers in host memory are part of the state; gradients on the device are dropped here.
            host_buffers = flatten(unit.select(self._state.gradient))
            if host_buffers:
                unit.put(self._state.gradient, unflatten({path: stored_grads[path] for path in host_buffers}))
            del stored_grads, host_buffers
            if unit.index is not None and number + 1 < len(units):
                next_unit = units[number + 1]
                self.request_gradients(next_unit)
                self._run.request(next_unit.key("home"), next_unit.select(self._state.parameter))
                self.request_state(next_unit)
            self.update(unit, grads, decision)
            del grads

    def finalize(self) -> None:
        """Put the updated arrays into the state, in the memory in which they are stored."""
        state = self._state
        for unit in self._updated:
            old = LayerUpdate(unit.select(state.parameter), unit.select(state.optimizer), unit.select(state.ema))
            new = self._run.get_stored(unit.key("new"), old)
            for group, tree in ((state.parameter, new.weights), (state.optimizer, new.entry), (state.ema, new.average)):
                if tree:
                    unit.put(group, tree)
