"""The computations of layer programs that follow the backward pass: gradient sums, decision, update and metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Out
from plimsoll.framework.layout import Nested, StateLayout, flatten, unflatten
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
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
from plimsoll.framework.schedules.layerwise.result_specs import ResultSpecs
from plimsoll.framework.schedules.step import Metrics, finish

LossAndMetrics = tuple[jax.Array | None, Metrics]


class UpdateFunctions:
    """The functions that process gradients.

    Args:
        model, learner, layout: the components of the step; the layout's stacks are in parts.
        specs: specs of the programs' results.
    """

    def __init__(self, model: CausalLM, learner: Learner, layout: StateLayout, specs: ResultSpecs):
        self.learner = learner
        self.layout = layout
        self.specs = specs
        self.num_repeats = {name: stack.num_repeats for name, stack in model.stacks.items()}
        self._parameter_specs = {name: flatten(specs) for name, specs in model.parameter_specs().items()}

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
        return add_grad_stats(grad_stats, check_finite(self.learner, grad_stats["ok"], grads))

    def decide(self, loss: jax.Array, squares: jax.Array, counter: Nested) -> tuple[Decision, GradStats]:
        """Return the decision, and initial gradient statistics.

        Args:
            loss: f32 scalar, of the whole batch.
            squares: sum of the squares of all gradients, or zero if they are not known yet.
            counter: the state's counters.
        """
        decision = self.learner.decide(loss, jnp.sqrt(squares), counter)
        return decision, GradStats(ok=decision.ok, squares=jnp.zeros_like(squares), updated=jnp.int32(0))

    def update(
        self, stage: str, old: tuple[Nested, Nested, Nested], grads: Nested, decision: Decision
    ) -> tuple[Nested, Nested, Nested]:
        """Return new parameters, optimizer state and averages of one stage, or of one layer of the stack.

        Args:
            stage: name of the stage.
            old: its parameters, optimizer state and averages, on the device.
            grads: its gradients, on the device.
            decision: see `Learner.decide`.
        """
        weight_specs = self.specs.part("parameter", stage)
        entry_specs = self.specs.part("optimizer", stage)
        average_specs = self.specs.part("ema", stage)

        def run(
            group: ParamGroup, update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision
        ) -> LayerUpdate:
            weights = self.learner.select({stage: weight_specs}, group)
            entry = entry_specs[group.label]
            average = self.learner.select({stage: average_specs}, group) if average_specs else {}
            # Gradients are on the device, as are the weights here.
            specs = LayerTrainState(weights, weights, entry, average)
            return update_group(self.learner, self.layout.mesh, group, train_state, specs, decision)

        old_params, old_optimizer, old_ema = old
        with jax.named_scope("update"):
            new = self.learner.update(
                {stage: old_params}, {stage: grads}, {stage: old_optimizer}, {stage: old_ema}, decision, run, stage
            )
        return new.weights[stage], new.entry[stage], new.average.get(stage, {})

    def total(self, parts: dict[str, LossAndMetrics], earlier: Nested | None) -> Nested:
        """Add a microbatch's loss and metrics to those of earlier ones; a stack's metrics are means over its layers.

        Args:
            parts: loss and metrics of the microbatch, by stage; those of a stack are sums over its layers.
            earlier: the total of earlier microbatches; None in the first one.
        """
        outs = {}
        # Losses of layers add up; the division turns the summed metrics into a mean, as in `Stack.combine`.
        for name, (loss, metrics) in parts.items():
            if name in self.num_repeats:
                metrics = {key: value / self.num_repeats[name] for key, value in metrics.items()}
            outs[name] = Out(loss=loss, metrics=metrics)
        out = Out.merge(outs)
        total = {"loss": out.loss, "metrics": out.metrics}
        return total if earlier is None else jax.tree.map(jnp.add, earlier, total)

    def finish(
        self, counter: Nested, decision: Decision, total: Nested, grad_stats: GradStats, *, at_once: bool
    ) -> tuple[Nested, Metrics]:
        """Return (new counters, metrics).

        Args:
            counter: the state's counters.
            decision: the step's decision.
            total: sums of losses and metrics.
            grad_stats: gradient statistics of the backward pass.
            at_once: whether the updates were part of the backward pass.
        """
        metrics = total["metrics"]
        if at_once:
            decision = with_grad_stats(decision, grad_stats)
            metrics = {**metrics, "updated_units": grad_stats["updated"]}
        # This program only returns counters and metrics; other programs return parameters and buffers.
        state = {"counter": counter, "buffer": {}}
        no_update = LayerUpdate({}, {}, {})
        new_state, metrics = finish(self.learner, state, no_update, decision, total["loss"], Out(metrics=metrics))
        return new_state["counter"], metrics
