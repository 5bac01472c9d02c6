"""What the programs of `memory.update = layer_programs` compute: each a pure function of one stage or one unit.

All arrays are on the device here. A unit's arrays have a leading axis of one, as they are parts of a stack.
"""

from __future__ import annotations

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
from framework.schedules.backward import split_pull
from framework.schedules.memory import Memory
from framework.schedules.pieces import update_group
from framework.schedules.step import evaluation_context, finish, microbatches, training_context

Weights = dict[str, Nested]  # "parameter" and "frozen", of one stage or of one unit
Inputs = tuple[Nested, Nested, jax.Array]  # batch, counters, number of the microbatch
Part = tuple[jax.Array | None, dict[str, jax.Array]]  # loss and metrics


class LayerFunctions:
    """The functions; what a unit's pull-back is made of passes from `ahead` to `back` when they are traced.

    Args:
        model, learner, layout, memory: whose step; the layout's stacks are in parts.
    """

    def __init__(self, model: CausalLM, learner: Learner, layout: StateLayout, memory: Memory):
        self.model, self.learner, self.layout, self.memory = model, learner, layout, memory
        self.num_units = model.stack.num_units
        self.group_size = group_size(memory.remat, self.num_units) or 1
        self.inverts = memory.remat == "invert"
        self._specs = {name: flatten(specs) for name, specs in model.parameter_specs().items()}
        self._restore: Any = None
        self._unit_loss: Any = None

    def context(self, inputs: Inputs) -> Context:
        """Of a microbatch."""
        batch, counter, number = inputs
        ctx = training_context(batch, counter, self.model, self.layout, self.memory.remat)
        if (count := self.learner.accumulate) == 1:
            return ctx
        rows_batch, rows = unit_at(microbatches((ctx.batch, ctx.rows), count, ctx), number)
        return replace(ctx, batch=rows_batch, rows=rows)

    # --- stages outside of the stack ---------------------------------------------------------------------------------

    def stage(self, name: str, weights: Weights, carry: Any, state: Nested, ctx: Context) -> tuple[Any, Out]:
        """A stage's output (the loss, of the last one) and its Out."""
        stage = self.model.stages[name]
        with jax.named_scope(name):
            prepared = stage.prepare(merge(weights["parameter"], weights["frozen"]), ctx)
            y, out = stage.apply(prepared, carry, ctx.fold(name), state)
        return (out.loss if y is None else y), out

    def enter(self, weights: Weights, state: Nested, inputs: Inputs) -> tuple[Any, Part, Nested]:
        """The embedding: what flows through the stack; its loss and metrics; its buffers."""
        y, out = self.stage("embed", weights, None, state, self.context(inputs))
        return self.model.stack.enter(y), (out.loss, out.metrics), out.layer_state

    def turn(
        self, weights: Weights, state: Nested, x: Any, before: Nested | None, inputs: Inputs
    ) -> tuple[Any, Nested, dict[str, jax.Array], Part, Nested]:
        """The head, forward and backward: (cotangent of x, its gradients, what ties add to the embedding's by path,
        loss and metrics, buffers)."""

        ctx = self.context(inputs)

        def run(own: Nested, x: Any) -> tuple[jax.Array, Out]:
            return self.stage("head", {**weights, "parameter": own}, self.model.stack.leave(x, ctx), state, ctx)

        loss, pull, out = jax.vjp(run, weights["parameter"], x, has_aux=True)
        grads, ct = pull(jnp.ones_like(loss))
        flat, waiting = flatten(grads), {}
        for reader, home in self.model.ties.items():
            if (key := reader.removeprefix("head/")) in flat:
                waiting[home.removeprefix("embed/")] = flat.pop(key)
        return ct, self.added("head", unflatten(flat), before), waiting, (loss, out.metrics), out.layer_state

    def leave(
        self,
        weights: Weights,
        state: Nested,
        ct: Any,
        waiting: dict[str, jax.Array],
        before: Nested | None,
        tally: Nested | None,
        inputs: Inputs,
    ) -> tuple[Nested, Nested | None]:
        """The gradients of the embedding, and the tally; `waiting`: see `turn`."""

        def run(own: Nested) -> Any:
            x = self.stage("embed", {**weights, "parameter": own}, None, state, self.context(inputs))[0]
            return self.model.stack.enter(x)

        flat = flatten(jax.vjp(run, weights["parameter"])[1](ct)[0])
        grads = unflatten({path: grad + waiting[path] if path in waiting else grad for path, grad in flat.items()})
        grads = self.added("embed", grads, before)
        return grads, self.judged(tally, grads)

    # --- units -------------------------------------------------------------------------------------------------------

    def _unit(self, weights: Weights, shared: Weights, state: Nested, inputs: Inputs, index: jax.Array) -> Any:
        """A unit's function of (its trainable parameters, the shared ones, x), and these arguments but x."""
        own, fixed, state = (jax.tree.map(lambda x: x[0], t) for t in (weights["parameter"], weights["frozen"], state))
        ctx = self.context(inputs).fold("stack")
        unit = self.model.stack.unit_function(merge(own, fixed), ctx)
        ctx = ctx.fold_index(index)

        def run(own: Nested, more: Nested, x: Any) -> tuple[tuple[Any, Any], Out]:
            with jax.named_scope("stack"):
                y, out = unit(x, merge(own, fixed), merge(more, shared["frozen"]), state, ctx)
            return (y, out.loss), out

        return run, (own, shared["parameter"], (fixed, shared["frozen"], state, ctx))

    def ahead(
        self, keeps: str, weights: Weights, shared: Weights, state: Nested, x: Any, inputs: Inputs, index: jax.Array
    ) -> tuple[Any, Any, Part, Nested]:
        """A unit forward: (y, what is kept, loss and metrics, buffers). `keeps`: "all" that its backward pass needs,
        the same for "now", which is not worth a move to the host, the "input" or "nothing"."""
        run, arguments = self._unit(weights, shared, state, inputs, index)
        if keeps in ("all", "now"):
            (y, loss), pull, out = jax.vjp(run, *arguments[:2], x, has_aux=True)
            kept, self._restore = split_pull(pull, arguments)
            self._unit_loss = shapes(loss)
        else:
            (y, loss), out = run(*arguments[:2], x)
            kept = [x] if keeps == "input" else []
            self._unit_loss = shapes(loss)
        kept = [jax.device_put(x, jax.memory.Space.Host) if self.away(x, keeps) else x for x in jax.tree.leaves(kept)]
        return y, kept, (loss, out.metrics), jax.tree.map(lambda s: s[None], out.layer_state)

    def away(self, x: Any, keeps: str) -> bool:
        """Whether this, kept of a unit, goes to host memory: a large matrix."""
        if self.memory.activations == "device" or keeps == "now" or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return False
        return move_to_host(TensorSpec(x.shape, x.dtype), "pinned_host").memory_kind != "device"

    def back(
        self,
        weights: Weights,
        shared: Weights,
        state: Nested,
        kept: list[Any],
        ct: Any,
        sums: Nested,
        before: Nested | None,
        tally: Nested | None,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Any, Nested, Nested, Nested | None, list[Any]]:
        """A unit backward: (cotangent, its gradients, those of the shared parameters added to `sums`, the tally, and
        what is kept of the unit before, where that is found). `kept`: what `ahead` kept of it, or its output."""
        _, arguments = self._unit(weights, shared, state, inputs, index)
        loss_ct, found = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), self._unit_loss), []
        if self.inverts:
            (fixed, _, state, ctx), y = arguments[2], jax.tree.unflatten(jax.tree.structure(ct), kept)

            def join(own: Nested, more: Nested) -> Nested:
                return {**merge(own, fixed), **merge(more, shared["frozen"])}

            with jax.named_scope("stack"):
                reverse = self.model.stack.reverse_unit
                y, (grads, more), ct = reverse(y, arguments[:2], join, state, ctx, (ct, loss_ct))
            found = jax.tree.leaves(y)
        else:
            grads, more, ct = self._restore(kept, arguments)((ct, loss_ct))
        more = sums_of_uses.add(sums or sums_of_uses.zeros(more), more)
        grads = self.added("stack", jax.tree.map(lambda g: g[None], grads), before)
        return ct, grads, more, self.judged(tally, grads), found

    # --- gradients, decisions, updates -------------------------------------------------------------------------------

    def added(self, stage: str, grads: Nested, before: Nested | None) -> Nested:
        """Gradients sharded as their parameters are and in the dtype that they are summed in, with what was before."""
        flat, old = flatten(grads), {} if before is None else flatten(before)
        for path, grad in flat.items():
            spec = self._specs[stage][path]
            if self.layout.mesh.size > 1:
                like = TensorSpec(grad.shape, grad.dtype, spec.mesh_axes)
                grad = jax.lax.with_sharding_constraint(grad, self.layout.sharding(like))
            if self.learner.accumulate > 1:
                grad = grad.astype(self.learner.gradient_dtype(spec))
            flat[path] = grad + old[path] if path in old else grad
        return unflatten(flat)

    def judged(self, tally: Nested | None, grads: Nested) -> Nested | None:
        """The sum of squares so far; whether all was finite; how many were. None: gradients are not complete yet."""
        if tally is None or not grads:
            return tally
        squares = jnp.square(self.learner.norm(grads))
        ok = tally["ok"] & jnp.isfinite(squares)
        return {"squares": tally["squares"] + squares, "ok": ok, "updated": tally["updated"] + ok}

    def decide(self, loss: jax.Array, squares: jax.Array, counter: Nested) -> tuple[Decision, Nested]:
        """The decision, and a tally to begin with."""
        decision = self.learner.decide(loss, jnp.sqrt(squares), counter)
        return decision, {"squares": jnp.zeros_like(squares), "ok": decision.ok, "updated": jnp.int32(0)}

    def update(self, stage: str, old: Update, grads: Nested, decision: Decision) -> Update:
        """New parameters, optimizer state and averages of one stage, or of one unit of the stack."""
        specs = [self.part_specs(group, stage) for group in ("parameter", "optimizer", "ema")]

        def run(group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision) -> Update:
            weights = self.learner.select({stage: specs[0]}, group)
            average = self.learner.select({stage: specs[2]}, group) if specs[2] else {}
            own = weights, weights, specs[1][group.label], average
            return update_group(self.learner, self.layout.mesh, group, bundle, own, decision)

        with jax.named_scope("update"):
            params, optimizer, ema = ({stage: tree} for tree in old)
            new = self.learner.update(params, {stage: grads}, optimizer, ema, decision, run, stage)
        return new[0][stage], new[1][stage], new[2].get(stage, {})

    def part_specs(self, group: str, stage: str) -> Nested:
        """The specs of a stage's leaves in a group, of the first unit for the stack, as they are on the device."""
        specs = self.layout.specs[group].get(stage, {})
        one = specs[0] if isinstance(specs, list) else specs
        return jax.tree.map(lambda spec: replace(spec, memory_kind="device"), one)

    def total(self, parts: dict[str, Part], before: Nested | None) -> Nested:
        """Loss and metrics of a microbatch, added to those before. The stack's metrics are the mean over its units."""
        units = self.model.stack.num_units
        outs = {
            name: Out(loss=loss, metrics={k: v / units if name == "stack" else v for k, v in metrics.items()})
            for name, (loss, metrics) in parts.items()
        }
        out = Out.merge(outs)
        found = {"loss": out.loss, "metrics": out.metrics}
        return found if before is None else jax.tree.map(jnp.add, before, found)

    def finish(self, counter: Nested, decision: Decision, total: Nested, tally: Nested, *, at_once: bool) -> Any:
        """(new counters, metrics). `at_once`: updates went with the backward pass."""
        metrics = total["metrics"]
        if at_once:
            decision = decision._replace(norm=jnp.sqrt(tally["squares"]), ok=tally["ok"])
            metrics = {**metrics, "updated_units": tally["updated"]}
        state = {"counter": counter, "buffer": {}}
        new, metrics = finish(self.learner, state, ({}, {}, {}), decision, total["loss"], Out(metrics=metrics))
        return new["counter"], metrics

    # --- where results are -------------------------------------------------------------------------------------------

    def carry_specs(self, tree: Any, kind: MemoryKind = "device") -> Any:
        """Of what flows between units: rows over data and fsdp, positions over seq."""

        def one(x: Any) -> Any:
            axes = (BATCH_AXES, "seq", *(None,) * (x.ndim - 2)) if x.ndim > 2 else (BATCH_AXES,) * (x.ndim > 0)
            return TensorSpec(x.shape, x.dtype, axes, kind)

        return jax.tree.map(one, tree)

    def kept_specs(self, kept: list[Any], keeps: str) -> list[Any]:
        """Of what is kept of a unit: as inputs, where the policy keeps nothing else; else as the compiler likes."""
        kinds: list[MemoryKind] = ["pinned_host" if self.away(x, keeps) else "device" for x in kept]
        if self.memory.remat != "full" and not self.memory.remat.startswith("sqrt"):
            return kinds
        # What has no rows is a constant of the unit (rotary frequencies), which all devices have.
        return [
            self.carry_specs(x, kind) if x.ndim > 2 else TensorSpec(x.shape, x.dtype, memory_kind=kind)
            for x, kind in zip(kept, kinds, strict=True)
        ]

    def everywhere(self, tree: Any) -> Any:
        """Of scalars."""
        return jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), tree)

    def gradient_specs(self, stage: str, grads: Nested) -> Any:
        """Of some of a stage's gradients, as of its parameters."""
        own = flatten(self.part_specs("parameter", stage))
        return unflatten({path: own[path] for path in flatten(grads)})


class EvaluationFunctions(LayerFunctions):
    """The same stages and units without training, and the sums of a batch."""

    def context(self, inputs: Inputs) -> Context:
        """Of a microbatch: no dropout, sums instead of means."""
        batch, _, number = inputs
        ctx = evaluation_context(batch, self.model, self.layout)
        count = self.learner.accumulate
        return ctx if count == 1 else replace(ctx, batch=unit_at(microbatches(batch, count, ctx), number))

    def score(self, weights: Weights, state: Nested, x: Any, inputs: Inputs) -> dict[str, jax.Array]:
        """See `Chain.scores`."""
        ctx = self.context(inputs)
        out = self.stage("head", weights, self.model.stack.leave(x, ctx), state, ctx)[1]
        return self.model.scores(Out.merge({"head": out}), ctx.batch)


def shapes(tree: Any) -> Any:
    """The ShapeDtypeStructs of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
