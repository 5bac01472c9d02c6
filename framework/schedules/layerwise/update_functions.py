"""What the programs of layers compute of gradients: their sums over microbatches, the decision, the update, metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from framework.layers.base import Out
from framework.layout import Nested, StateLayout, flatten, unflatten
from framework.learner.learner import Learner
from framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update
from framework.models.causal_lm import CausalLM
from framework.schedules.gradients import Tally, counted, judge, sharded_as_parameter, with_tally
from framework.schedules.layerwise.result_specs import ResultSpecs
from framework.schedules.pieces import update_group
from framework.schedules.step import Metrics, finish

LossAndMetrics = tuple[jax.Array | None, Metrics]


class UpdateFunctions:
    """The functions of gradients.

    Args:
        model, learner, layout: whose step; the layout's stacks are in parts.
        specs: of what the programs return.
    """

    def __init__(
        self,
        model: CausalLM,
        learner: Learner,
        layout: StateLayout,
        specs: ResultSpecs,
    ):
        self.learner = learner
        self.layout = layout
        self.specs = specs
        self.num_units = {name: stack.num_units for name, stack in model.stacks.items()}
        self._parameter_specs = {name: flatten(specs) for name, specs in model.parameter_specs().items()}

    def added(
        self,
        stage: str,
        grads: Nested,
        grad_sums: Nested | None,
    ) -> Nested:
        """Gradients sharded as their parameters are and in the dtype that they are summed in, added to the sums of
        earlier microbatches."""
        grad_by_path = flatten(grads)
        sum_by_path = {} if grad_sums is None else flatten(grad_sums)
        for path, grad in grad_by_path.items():
            spec = self._parameter_specs[stage][path]
            grad = sharded_as_parameter(grad, spec.mesh_axes, self.layout.mesh)
            if self.learner.accumulate > 1:
                grad = grad.astype(self.learner.gradient_dtype(spec))
            grad_by_path[path] = grad + sum_by_path[path] if path in sum_by_path else grad
        return unflatten(grad_by_path)

    def judged(self, tally: Tally | None, grads: Nested) -> Tally | None:
        """The tally with these gradients. None: gradients are not complete yet, as more microbatches come."""
        if tally is None or not grads:
            return tally
        return counted(tally, judge(self.learner, tally["ok"], grads))

    def decide(
        self,
        loss: jax.Array,
        squares: jax.Array,
        counter: Nested,
    ) -> tuple[Decision, Tally]:
        """The decision, and a tally to begin with."""
        decision = self.learner.decide(loss, jnp.sqrt(squares), counter)
        return decision, Tally(ok=decision.ok, squares=jnp.zeros_like(squares), updated=jnp.int32(0))

    def update(
        self,
        stage: str,
        old: Update,
        grads: Nested,
        decision: Decision,
    ) -> Update:
        """New parameters, optimizer state and averages of one stage, or of one unit of the stack."""
        weight_specs = self.specs.part("parameter", stage)
        entry_specs = self.specs.part("optimizer", stage)
        average_specs = self.specs.part("ema", stage)

        def run(
            group: Group,
            update: UnitUpdate,
            bundle: Bundle,
            decision: Decision,
        ) -> Update:
            weights = self.learner.select({stage: weight_specs}, group)
            entry = entry_specs[group.label]
            average = self.learner.select({stage: average_specs}, group) if average_specs else {}
            # Gradients are on the device, as weights are here.
            specs = weights, weights, entry, average
            return update_group(self.learner, self.layout.mesh, group, bundle, specs, decision)

        old_params, old_optimizer, old_ema = old
        with jax.named_scope("update"):
            params, optimizer, ema = self.learner.update(
                {stage: old_params},
                {stage: grads},
                {stage: old_optimizer},
                {stage: old_ema},
                decision,
                run,
                stage,
            )
        return params[stage], optimizer[stage], ema.get(stage, {})

    def total(self, parts: dict[str, LossAndMetrics], earlier: Nested | None) -> Nested:
        """Loss and metrics of a microbatch, added to those of earlier ones. A stack's metrics are the mean over its
        units."""
        outs = {}
        # Losses of units add up; the division makes a mean of the summed metrics, as in `Stack.combine`.
        for name, (loss, metrics) in parts.items():
            if name in self.num_units:
                metrics = {key: value / self.num_units[name] for key, value in metrics.items()}
            outs[name] = Out(loss=loss, metrics=metrics)
        out = Out.merge(outs)
        total = {"loss": out.loss, "metrics": out.metrics}
        return total if earlier is None else jax.tree.map(jnp.add, earlier, total)

    def finish(
        self,
        counter: Nested,
        decision: Decision,
        total: Nested,
        tally: Tally,
        *,
        at_once: bool,
    ) -> tuple[Nested, Metrics]:
        """(new counters, metrics). `at_once`: updates went with the backward pass."""
        metrics = total["metrics"]
        if at_once:
            decision = with_tally(decision, tally)
            metrics = {**metrics, "updated_units": tally["updated"]}
        # Only counters and metrics are made here: parameters and buffers are settled by other programs.
        state = {"counter": counter, "buffer": {}}
        no_update = {}, {}, {}
        new_state, metrics = finish(self.learner, state, no_update, decision, total["loss"], Out(metrics=metrics))
        return new_state["counter"], metrics
