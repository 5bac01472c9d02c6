"""What the programs of `memory.update = layer_programs` compute: each a pure function of one stage or one unit.

All arrays are on the device here. A unit's arrays have a leading axis of one, as they are parts of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.layers import sums as sums_of_uses
from framework.layers.base import BATCH_AXES, Context, Out
from framework.layers.remat import group_size
from framework.layout import MemoryKind, Nested, StateLayout, TensorSpec, flatten, merge, move_to_host, unflatten
from framework.learner.learner import Learner
from framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update, unit_at
from framework.models.causal_lm import CausalLM
from framework.schedules.backward import Carry, Cotangent, UnitArguments, UnitConstants, split_pull
from framework.schedules.memory import Memory
from framework.schedules.pieces import update_group
from framework.schedules.step import Metrics, evaluation_context, finish, microbatches, training_context

Weights = dict[str, Nested]  # "parameter" and "frozen", of one stage or of one unit
Inputs = tuple[Nested, Nested, jax.Array]  # batch, counters, number of the microbatch
LossAndMetrics = tuple[jax.Array | None, Metrics]
Tally = dict[str, jax.Array]  # "squares", "ok" and "updated" of the gradients so far, see `LayerFunctions.judged`
UnitRun = Callable[[Nested, Nested, Carry], tuple[tuple[Carry, jax.Array | None], Out]]


class LayerFunctions:
    """The functions; what a unit's pull-back is made of passes from `ahead` to `back` when they are traced.

    Args:
        model, learner, layout, memory: whose step; the layout's stacks are in parts.
    """

    def __init__(
        self,
        model: CausalLM,
        learner: Learner,
        layout: StateLayout,
        memory: Memory,
    ):
        self.model = model
        self.learner = learner
        self.layout = layout
        self.memory = memory
        self.num_units = model.stack.num_units
        self.group_size = group_size(memory.remat, self.num_units) or 1
        self.inverts = memory.remat == "invert"
        self._specs = {name: flatten(specs) for name, specs in model.parameter_specs().items()}
        # Both are set while `ahead` is traced and read while `back` is, which comes later: a program's
        # results are arrays alone. What puts a unit's pull-back together, see `split_pull`; the
        # ShapeDtypeStruct of its loss, or None.
        self._restore: Callable[[list[jax.Array], UnitArguments], Any] | None = None
        self._unit_loss: jax.ShapeDtypeStruct | None = None

    def context(self, inputs: Inputs) -> Context:
        """The context of a microbatch."""
        batch, counter, number = inputs
        ctx = training_context(batch, counter, self.model, self.layout, self.memory.remat)
        count = self.learner.accumulate
        if count == 1:
            return ctx
        parts = microbatches((ctx.batch, ctx.rows), count, ctx)
        micro_batch, rows = unit_at(parts, number)
        return replace(ctx, batch=micro_batch, rows=rows)

    # --- stages outside of the stack ---------------------------------------------------------------------------------

    def stage(
        self,
        name: str,
        weights: Weights,
        carry: Carry,
        buffers: Nested,
        ctx: Context,
    ) -> tuple[Carry, Out]:
        """Runs a stage: its output (the loss, of the last one) and its Out."""
        stage = self.model.stages[name]
        with jax.named_scope(name):
            params = merge(weights["parameter"], weights["frozen"])
            prepared = stage.prepare(params, ctx)
            y, out = stage.apply(prepared, carry, ctx.fold(name), buffers)
        return (out.loss if y is None else y), out

    def enter(
        self,
        weights: Weights,
        buffers: Nested,
        inputs: Inputs,
    ) -> tuple[Carry, LossAndMetrics, Nested]:
        """Runs the embedding: (what flows through the stack; its loss and metrics; its buffers)."""
        ctx = self.context(inputs)
        y, out = self.stage("embed", weights, None, buffers, ctx)
        x = self.model.stack.enter(y)
        return x, (out.loss, out.metrics), out.layer_state

    def turn(
        self,
        weights: Weights,
        buffers: Nested,
        x: Carry,
        grad_sums: Nested | None,
        inputs: Inputs,
    ) -> tuple[Cotangent, Nested, dict[str, jax.Array], LossAndMetrics, Nested]:
        """Runs the head, forward and backward.

        Args:
            weights: the head's, tied ones included.
            buffers: the head's.
            x: what comes out of the stack.
            grad_sums: the head's gradients of earlier microbatches; None for none.
            inputs: of the microbatch.

        Returns:
            (cotangent of x; its gradients; what ties add to the embedding's gradients, by path; loss and metrics;
            buffers).
        """
        ctx = self.context(inputs)

        def run(params: Nested, x: Carry) -> tuple[jax.Array, Out]:
            stage_weights = {**weights, "parameter": params}
            return self.stage("head", stage_weights, self.model.stack.leave(x, ctx), buffers, ctx)

        loss, pull, out = jax.vjp(run, weights["parameter"], x, has_aux=True)
        grads, ct = pull(jnp.ones_like(loss))
        # A tied parameter lives in the embedding, whose turn comes last: its gradient waits until then.
        grad_by_path = flatten(grads)
        tie_grads = {}
        for reader, home in self.model.ties.items():
            key = reader.removeprefix("head/")
            if key in grad_by_path:
                home_path = home.removeprefix("embed/")
                tie_grads[home_path] = grad_by_path.pop(key)
        grads = self.added("head", unflatten(grad_by_path), grad_sums)
        return ct, grads, tie_grads, (loss, out.metrics), out.layer_state

    def leave(
        self,
        weights: Weights,
        buffers: Nested,
        ct: Cotangent,
        tie_grads: dict[str, jax.Array],
        grad_sums: Nested | None,
        tally: Tally | None,
        inputs: Inputs,
    ) -> tuple[Nested, Tally | None]:
        """Runs the embedding backward: (its gradients, the tally); `tie_grads`: see `turn`."""

        def run(params: Nested) -> Carry:
            stage_weights = {**weights, "parameter": params}
            y, _ = self.stage("embed", stage_weights, None, buffers, self.context(inputs))
            return self.model.stack.enter(y)

        # The embedding runs forward once more, so that nothing is kept of it meanwhile.
        _, pull = jax.vjp(run, weights["parameter"])
        (grads,) = pull(ct)
        grad_by_path = flatten(grads)
        for path, grad in grad_by_path.items():
            grad_by_path[path] = grad + tie_grads[path] if path in tie_grads else grad
        grads = self.added("embed", unflatten(grad_by_path), grad_sums)
        return grads, self.judged(tally, grads)

    # --- units -------------------------------------------------------------------------------------------------------

    def _unit(
        self,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[UnitRun, UnitArguments]:
        """A unit's function of (its trainable parameters, the shared ones, x), and what it is a function of but x."""
        params = _without_axis(weights["parameter"])
        frozen = _without_axis(weights["frozen"])
        unit_buffers = _without_axis(buffers)
        stack_ctx = self.context(inputs).fold("stack")
        unit = self.model.stack.unit_function(merge(params, frozen), stack_ctx)
        ctx = stack_ctx.fold_index(index)

        def run(params: Nested, shared_params: Nested, x: Carry) -> tuple[tuple[Carry, jax.Array | None], Out]:
            with jax.named_scope("stack"):
                unit_weights = merge(params, frozen)
                shared_weights = merge(shared_params, shared["frozen"])
                y, out = unit(x, unit_weights, shared_weights, unit_buffers, ctx)
            return (y, out.loss), out

        constants = UnitConstants(frozen, shared["frozen"], unit_buffers, ctx)
        return run, UnitArguments(params, shared["parameter"], constants)

    def ahead(
        self,
        keeps: str,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        x: Carry,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Carry, list[jax.Array], LossAndMetrics, Nested]:
        """Runs a unit: (y, what is kept, loss and metrics, buffers).

        Args:
            keeps: "all" that its backward pass needs, the same for "now", which is not worth a move to the host, the
                "input" or "nothing".
            weights, shared, buffers: the unit's, and the parameters that all units share.
            x: its input.
            inputs: of the microbatch.
            index: the unit's.
        """
        run, arguments = self._unit(weights, shared, buffers, inputs, index)
        params, shared_params, _ = arguments
        if keeps in ("all", "now"):
            (y, loss), pull, out = jax.vjp(run, params, shared_params, x, has_aux=True)
            kept_leaves, self._restore = split_pull(pull, arguments)
        else:
            (y, loss), out = run(params, shared_params, x)
            kept_leaves = jax.tree.leaves(x) if keeps == "input" else []
        self._unit_loss = shapes(loss)
        moved_leaves = []
        for leaf in kept_leaves:
            if self.away(leaf, keeps):
                leaf = jax.device_put(leaf, jax.memory.Space.Host)
            moved_leaves.append(leaf)
        new_buffers = _with_axis(out.layer_state)
        return y, moved_leaves, (out.loss, out.metrics), new_buffers

    def away(self, x: Any, keeps: str) -> bool:
        """Whether an activation that is kept of a unit goes to host memory: a large matrix."""
        # Random keys, whose dtypes are extended ones, are small.
        if self.memory.activations == "device" or keeps == "now" or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return False
        return move_to_host(TensorSpec(x.shape, x.dtype), "pinned_host").memory_kind != "device"

    def back(
        self,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        kept_leaves: list[jax.Array],
        ct: Cotangent,
        shared_sums: Nested,
        grad_sums: Nested | None,
        tally: Tally | None,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Cotangent, Nested, Nested, Tally | None, list[jax.Array]]:
        """Runs a unit backward.

        Args:
            weights, shared, buffers: the unit's, and the parameters that all units share.
            kept_leaves: what `ahead` kept of it; where units are inverted, its output.
            ct: the cotangent of its output.
            shared_sums: of the shared parameters' gradients; {} to begin with.
            grad_sums: its gradients of earlier microbatches; None for none.
            tally: see `judged`.
            inputs: of the microbatch.
            index: the unit's.

        Returns:
            (cotangent of its input; its gradients; `shared_sums` with its part; the tally; its input, where units are
            inverted, which is the output of the unit before it).
        """
        _, arguments = self._unit(weights, shared, buffers, inputs, index)
        # A unit's loss is a term of the objective.
        loss_ct = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), self._unit_loss)
        input_leaves: list[jax.Array] = []
        if self.inverts:
            y = jax.tree.unflatten(jax.tree.structure(ct), kept_leaves)
            x, grads, shared_grads, ct = self._inverted(arguments, y, ct, loss_ct)
            input_leaves = jax.tree.leaves(x)
        else:
            assert self._restore is not None
            pull = self._restore(kept_leaves, arguments)
            grads, shared_grads, ct = pull((ct, loss_ct))
        shared_sums = sums_of_uses.add(shared_sums or sums_of_uses.zeros(shared_grads), shared_grads)
        grads = self.added("stack", _with_axis(grads), grad_sums)
        return ct, grads, shared_sums, self.judged(tally, grads), input_leaves

    def _inverted(
        self,
        arguments: UnitArguments,
        y: Carry,
        ct: Cotangent,
        loss_ct: jax.Array | None,
    ) -> tuple[Carry, Nested, Nested, Cotangent]:
        """Runs a unit backward from its output `y`: (its input, gradients, those of the shared parameters, cotangent
        of its input)."""
        params, shared_params, constants = arguments

        def join(params: Nested, shared_params: Nested) -> Nested:
            unit_weights = merge(params, constants.frozen)
            shared_weights = merge(shared_params, constants.frozen_shared)
            return {**unit_weights, **shared_weights}

        with jax.named_scope("stack"):
            x, (grads, shared_grads), ct = self.model.stack.reverse_unit(
                y,
                (params, shared_params),
                join,
                constants.buffers,
                constants.ctx,
                (ct, loss_ct),
            )
        return x, grads, shared_grads, ct

    # --- gradients, decisions, updates -------------------------------------------------------------------------------

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
            spec = self._specs[stage][path]
            # Partial sums of devices are added up where the parameter's shards are.
            if self.layout.mesh.size > 1:
                grad_spec = TensorSpec(grad.shape, grad.dtype, spec.mesh_axes)
                grad = jax.lax.with_sharding_constraint(grad, self.layout.sharding(grad_spec))
            if self.learner.accumulate > 1:
                grad = grad.astype(self.learner.gradient_dtype(spec))
            grad_by_path[path] = grad + sum_by_path[path] if path in sum_by_path else grad
        return unflatten(grad_by_path)

    def judged(self, tally: Tally | None, grads: Nested) -> Tally | None:
        """The tally with these gradients: the sum of squares so far; whether all was finite; how many were.

        None: gradients are not complete yet, as more microbatches come.
        """
        if tally is None or not grads:
            return tally
        squares = jnp.square(self.learner.norm(grads))
        ok = tally["ok"] & jnp.isfinite(squares)
        return {
            "squares": tally["squares"] + squares,
            "ok": ok,
            "updated": tally["updated"] + ok,
        }

    def decide(
        self,
        loss: jax.Array,
        squares: jax.Array,
        counter: Nested,
    ) -> tuple[Decision, Tally]:
        """The decision, and a tally to begin with."""
        decision = self.learner.decide(loss, jnp.sqrt(squares), counter)
        tally = {
            "squares": jnp.zeros_like(squares),
            "ok": decision.ok,
            "updated": jnp.int32(0),
        }
        return decision, tally

    def update(
        self,
        stage: str,
        old: Update,
        grads: Nested,
        decision: Decision,
    ) -> Update:
        """New parameters, optimizer state and averages of one stage, or of one unit of the stack."""
        weight_specs = self.part_specs("parameter", stage)
        entry_specs = self.part_specs("optimizer", stage)
        average_specs = self.part_specs("ema", stage)

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

    def part_specs(self, group: str, stage: str) -> Nested:
        """The specs of a stage's leaves in a group, of the first unit for the stack, as they are on the device."""
        specs = self.layout.specs[group].get(stage, {})
        # All units are alike but for where they live.
        part = specs[0] if isinstance(specs, list) else specs
        return jax.tree.map(lambda spec: replace(spec, memory_kind="device"), part)

    def total(self, parts: dict[str, LossAndMetrics], earlier: Nested | None) -> Nested:
        """Loss and metrics of a microbatch, added to those of earlier ones. The stack's metrics are the mean over its
        units."""
        num_units = self.model.stack.num_units
        outs = {}
        # Losses of units add up; the division makes a mean of the summed metrics, as in `Stack.combine`.
        for name, (loss, metrics) in parts.items():
            if name == "stack":
                metrics = {key: value / num_units for key, value in metrics.items()}
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
            decision = decision._replace(norm=jnp.sqrt(tally["squares"]), ok=tally["ok"])
            metrics = {**metrics, "updated_units": tally["updated"]}
        # Only counters and metrics are made here: parameters and buffers are settled by other programs.
        state = {"counter": counter, "buffer": {}}
        no_update = {}, {}, {}
        new_state, metrics = finish(self.learner, state, no_update, decision, total["loss"], Out(metrics=metrics))
        return new_state["counter"], metrics

    # --- where results are -------------------------------------------------------------------------------------------

    def carry_specs(self, tree: Any, kind: MemoryKind = "device") -> Any:
        """The specs of what flows between units: rows over data and fsdp, positions over seq."""

        def spec(x: Any) -> TensorSpec:
            if x.ndim > 2:
                feature_axes = (None,) * (x.ndim - 2)
                return TensorSpec(x.shape, x.dtype, (BATCH_AXES, "seq", *feature_axes), kind)
            axes = (BATCH_AXES,) * (x.ndim > 0)
            return TensorSpec(x.shape, x.dtype, axes, kind)

        return jax.tree.map(spec, tree)

    def kept_specs(self, kept_leaves: list[Any], keeps: str) -> list[Any]:
        """The specs of what is kept of a unit: as inputs, where the policy keeps nothing else; else as the compiler
        likes."""
        kinds: list[MemoryKind] = ["pinned_host" if self.away(x, keeps) else "device" for x in kept_leaves]
        # With other policies the leaves are whatever a pull-back holds, of which nobody knows the axes.
        if self.memory.remat != "full" and not self.memory.remat.startswith("sqrt"):
            return kinds
        specs = []
        for x, kind in zip(kept_leaves, kinds, strict=True):
            if x.ndim > 2:
                specs.append(self.carry_specs(x, kind))
            else:
                # What has no rows is a constant of the unit (rotary frequencies), which all devices have.
                specs.append(TensorSpec(x.shape, x.dtype, memory_kind=kind))
        return specs

    def everywhere(self, tree: Any) -> Any:
        """The specs of scalars, which all devices have."""
        return jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), tree)

    def gradient_specs(self, stage: str, grads: Nested) -> Nested:
        """The specs of some of a stage's gradients: those of their parameters."""
        spec_by_path = flatten(self.part_specs("parameter", stage))
        return unflatten({path: spec_by_path[path] for path in flatten(grads)})


class EvaluationFunctions(LayerFunctions):
    """The same stages and units without training, and the sums of a batch."""

    def context(self, inputs: Inputs) -> Context:
        """The context of a microbatch: no dropout, sums instead of means."""
        batch, _, number = inputs
        ctx = evaluation_context(batch, self.model, self.layout)
        count = self.learner.accumulate
        if count == 1:
            return ctx
        parts = microbatches(batch, count, ctx)
        return replace(ctx, batch=unit_at(parts, number))

    def score(
        self,
        weights: Weights,
        buffers: Nested,
        x: Carry,
        inputs: Inputs,
    ) -> dict[str, jax.Array]:
        """The sums over a microbatch; see `Chain.scores`."""
        ctx = self.context(inputs)
        head_input = self.model.stack.leave(x, ctx)
        _, out = self.stage("head", weights, head_input, buffers, ctx)
        return self.model.scores(Out.merge({"head": out}), ctx.batch)


def shapes(tree: Any) -> Any:
    """The ShapeDtypeStructs of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _without_axis(tree: Nested) -> Nested:
    """A unit's arrays [1, ...] as [...]."""
    return jax.tree.map(lambda x: x[0], tree)


def _with_axis(tree: Nested) -> Nested:
    """A unit's arrays [...] as [1, ...], as the stack in parts has them."""
    return jax.tree.map(lambda x: x[None], tree)
