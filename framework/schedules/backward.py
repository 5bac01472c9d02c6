"""The backward pass a stage and a unit of the stack at a time: each gradient is handed on as soon as it is there.

`jax.value_and_grad` returns all gradients together. Here the stack runs forward in a scan that keeps what the remat
policy keeps of each unit, and backward in a loop that gives each unit's gradient to a `visit` function, which may write
it away or update the unit. The loop's carry holds the parameters, as visits may change them.

What is kept are the leaves of `jax.vjp`'s result that are not its arguments: those (the unit's weights above all) are
put back in the backward loop, so no copies of them are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from framework.layers import remat, sums
from framework.layers.base import Context, Out
from framework.layout import (
    MeshAxes,
    Nested,
    StateLayout,
    TensorSpec,
    fetch_leaf,
    flatten,
    merge,
    move_to_host,
    unflatten,
)
from framework.learner.units import unit_at
from framework.models.chain import Chain
from framework.schedules.memory import Memory

Work = dict[str, Any]  # "parameter", "frozen", and whatever visits change
# (work, stage, gradients, index of the unit or None) -> work. Gradients are in the structure of the stage's trainable
# parameters, those of a unit without the leading axis. Called once for each unit and once for each other stage.
Visit = Callable[[Work, str, Nested, jax.Array | None], Work]


class Turns(NamedTuple):
    """What else happens to the work in the loop over a stack's units, in whatever keys of the work it likes.

    Attributes:
      before: (work, stack, index of the first unit) -> work, before the loop.
      begin: (work, stack, index of the unit) -> work, when a unit's turn begins; its visit has what this adds.
      after: (work, stack) -> work, after the loop.
    Where units are in groups (memory.remat = sqrt), the loop is each group's.
    """

    before: Callable[[Work, str, jax.Array], Work] = lambda work, stack, index: work
    begin: Callable[[Work, str, jax.Array], Work] = lambda work, stack, index: work
    after: Callable[[Work, str], Work] = lambda work, stack: work


_NO_TURNS = Turns()


class Pull(Protocol):
    """The backward pass of `forward`."""

    def __call__(self, work: Work, visit: Visit, turns: Turns = ...) -> Work:
        """The work as visits and turns left it."""
        ...


def forward(
    model: Chain, layout: StateLayout, memory: Memory, weights: Work, ctx: Context, buffers: Nested
) -> tuple[jax.Array, Out, Pull]:
    """The objective, and the backward pass that is to be run.

    Args:
        model: a chain of stages.
        layout: where the weights are.
        memory: where what is kept of each unit goes; the context's remat policy decides what that is.
        weights: the groups "parameter" and "frozen".
        ctx: of the batch.
        buffers: the model's.

    Returns:
        (loss, Out, pull): `pull(work, visit, turns)` runs backward, head first, and returns the work as visits left it:
        the weights, and what visits need. A tied parameter is visited with its home stage, with the sum of its
        gradients.
    """
    run = _Stages(model, layout, memory, weights, ctx, buffers)
    x: Any = None
    outs, pulls = {}, {}
    for name in model.stages:
        x, outs[name], pulls[name] = run.stack(name, x) if name in model.stacks else run.stage(name, x)
    loss, out, first = x, Out.merge(outs), next(iter(model.stages))
    assert out.loss is not None

    def pull(work: Work, visit: Visit, turns: Turns = _NO_TURNS) -> Work:
        pending: dict[str, jax.Array] = {}
        ct: Any = jnp.ones_like(loss)
        for name in reversed(model.stages):
            if name in model.stacks:
                work, ct, shared = pulls[name](work, ct, visit, turns)
                if shared:
                    work = visit(work, "shared", run.constrained("shared", shared), None)
                continue
            grads, ct = pulls[name](ct)
            grads = run.own(name, grads, pending)
            if grads:
                work = visit(work, name, grads, None)
            if grads and name != first:
                # It is done before the loop begins: what the head's update holds is as large as its table.
                own, ct = jax.lax.optimization_barrier((work["parameter"][name], ct))
                work = {**work, "parameter": {**work["parameter"], name: own}}
        return work

    return out.loss, out, pull


# (work, cotangent of the stack's output, visit, turns) -> (work, cotangent of its input, shared parameters' gradients).
StackPull = Callable[[Work, Any, Visit, Turns], tuple[Work, Any, Nested]]


class _Stages:
    def __init__(self, model: Chain, layout: StateLayout, memory: Memory, weights: Work, ctx: Context, buffers: Nested):
        self.model, self.ctx, self.buffers, self.activations = model, ctx, buffers, memory.activations
        self.params, self.frozen = weights["parameter"], weights["frozen"]
        self.mesh = layout.mesh
        self.specs = model.stage_specs(layout.specs["parameter"], layout.specs["frozen"])

    def _inputs(self, name: str, carry: Any) -> tuple[Nested, Nested]:
        """A stage's trainable parameters, tied ones included, and its frozen ones; on the device.

        The compiler would fetch them as early as it can. So it does not know where they are before `carry` is there.
        """
        trainable, fixed = dict(self.params.get(name, {})), dict(self.frozen.get(name, {}))
        for reader, home in self.model.ties.items():
            stage, key = reader.split("/", 1)
            if stage == name:
                flat = flatten(self.params)
                (trainable if home in flat else fixed)[key] = (flat if home in flat else flatten(self.frozen))[home]
        first, _ = jax.lax.optimization_barrier((jnp.int32(0), carry))

        def fetched(path: str, x: jax.Array) -> jax.Array:
            spec = self.specs[name][path]
            return x if spec.memory_kind == "device" else fetch_leaf(spec, unit_at(x[None], first))

        own, rest = ({path: fetched(path, x) for path, x in flatten(tree).items()} for tree in (trainable, fixed))
        return unflatten(own), unflatten(rest)

    def _away(self, x: jax.Array) -> bool:
        """Whether this, kept of a unit, is to go to host memory: a large matrix, if the policy did not move it."""
        if self.activations == "device" or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return False
        there = move_to_host(TensorSpec(x.shape, x.dtype), "pinned_host").memory_kind == "pinned_host"
        return there and jax.typeof(x).memory_space != jax.memory.Space.Host

    def own(self, name: str, grads: Nested, pending: dict[str, jax.Array]) -> Nested:
        """A stage's gradients without those of ties, which wait in `pending` for their home, and with those that
        waited for it."""
        flat = flatten(grads)
        for reader, home in self.model.ties.items():
            stage, key = reader.split("/", 1)
            if stage == name and key in flat:
                grad = flat.pop(key)
                pending[home] = pending[home] + grad if home in pending else grad
        for home in [home for home in pending if home.startswith(f"{name}/")]:
            key = home.split("/", 1)[1]
            flat[key] = flat[key] + pending.pop(home)
        return self.constrained(name, unflatten(flat))

    def stage(self, name: str, carry: Any) -> tuple[Any, Out, Callable[[Any], tuple[Nested, Any]]]:
        """A stage outside of the stack: (output, or the loss of the last one; Out; pull-back)."""
        stage, ctx, state = self.model.stages[name], self.ctx, self.buffers.get(name, {})
        trainable, fixed = self._inputs(name, carry)

        def run(own: Nested, carry: Any) -> tuple[Any, Out]:
            with jax.named_scope(name):
                weights = stage.prepare(merge(own, fixed), ctx)
                y, out = stage.apply(weights, carry, ctx.fold(name), state)
            return (out.loss if y is None else y), out

        y, pull, out = jax.vjp(run, trainable, carry, has_aux=True)
        return y, out, pull

    def constrained(self, name: str, grads: Nested) -> Nested:
        """Gradients sharded as their parameters are, which is where partial sums are added up."""
        specs = self.specs[name]

        def constrained(path: str, grad: jax.Array) -> jax.Array:
            axes = specs[path].mesh_axes
            return self.ctx.constrain(grad, *axes[len(axes) - grad.ndim :])

        return unflatten({path: constrained(path, grad) for path, grad in flatten(grads).items()})

    def stack(self, name: str, x: Any) -> tuple[Any, Out, StackPull]:
        """A stack: (output, Out, pull-back, which visits the units and returns the shared parameters' gradients)."""
        stack, ctx = self.model.stacks[name], self.ctx.fold(name)
        state, invert = self.buffers.get(name, {}), ctx.remat == "invert"
        shared, fixed_shared = self._inputs("shared", x) if stack.shared else ({}, {})
        unit = stack.unit_function(merge(self.params.get(name, {}), self.frozen.get(name, {})), ctx)
        x, pull_enter = jax.vjp(stack.enter, x)

        size = remat.group_size(ctx.remat, stack.num_units) or stack.num_units
        all_at_once = size == stack.num_units
        # A unit's loss, what puts its pull-back together, and what of it is moved; known once a unit was traced.
        like: list[Any] = []

        def arguments(units: Nested, index: jax.Array) -> tuple[Any, Any, Any]:
            fixed = units["frozen"], fixed_shared
            return units["parameter"], shared, (fixed, unit_at(state, index), ctx.fold_index(index))

        def run(own: Any, shared: Any, x: Any, rest: Any) -> tuple[tuple[Any, Any], Out]:
            (fixed, fixed_shared), state, ctx = rest
            with jax.named_scope(name):
                y, out = unit(x, merge(own, fixed), merge(shared, fixed_shared), state, ctx)
            return (y, out.loss), out

        def coming(stacks: Nested, index: jax.Array) -> dict[str, jax.Array]:
            """What of a unit's parameters is in host memory, on its way to the device."""
            leaves = (leaf for group in stacks.values() for leaf in flatten(group).items())
            places = self.specs[name]
            return {p: fetch_leaf(places[p], unit_at(x, index)) for p, x in leaves if places[p].memory_kind != "device"}

        def as_stored(path: str, x: jax.Array) -> jax.Array:
            return _as_stored(x, self.specs[name][path].mesh_axes[1:], self.mesh)

        def turn(stacks: Nested, index: jax.Array, here: dict[str, jax.Array], carry: Any) -> tuple[Nested, Any]:
            """A unit's parameters when its turn comes, not before: (unit, carry)."""
            flat = {group: flatten(stack) for group, stack in stacks.items()}
            flat = {
                g: {p: here[p] if p in here else unit_at(x, index) for p, x in own.items()} for g, own in flat.items()
            }
            unit = {g: unflatten({p: as_stored(p, x) for p, x in own.items()}) for g, own in flat.items()}
            return jax.lax.optimization_barrier((unit, carry))

        def ahead(stacks: Nested, x: Any, index: jax.Array, here: Any) -> tuple[Any, tuple[Out, list[Any]]]:
            """One unit forward, and what its pull-back keeps."""
            unit, x = turn(stacks, index, here, x)
            own, shared, rest = arguments(unit, index)
            if invert:
                (y, loss), out = run(own, shared, x, rest)
                like[:] = [_shapes(loss), None, []]
                return y, (out, [])
            (y, loss), pull, out = jax.vjp(lambda *a: run(a[0], a[1], a[2], rest), own, shared, x, has_aux=True)
            kept, restore = split_pull(pull, (own, shared, rest))
            away = [all_at_once and self._away(leaf) for leaf in kept]
            like[:] = [_shapes(loss), restore, away]
            return y, (out, _moved(away, kept, jax.memory.Space.Host))

        def behind(unit: Nested, index: jax.Array, y: Any, kept: Any, ct: Any) -> tuple[Any, Nested, Nested, Any]:
            """One unit backward: (its input, if it is found from `y`, gradients, those of `shared`, cotangent)."""
            own, shared, rest = arguments(unit, index)
            loss, restore, away = like
            loss_ct = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), loss)
            if not invert:
                pull = restore(_moved(away, kept, jax.memory.Space.Device), (own, shared, rest))
                grads, more, ct = pull((ct, loss_ct))
                return y, grads, more, ct
            (fixed, fixed_shared), state, ctx = rest

            def join(own: Nested, shared: Nested) -> Nested:
                return {**merge(own, fixed), **merge(shared, fixed_shared)}

            with jax.named_scope(name):
                y, (grads, more), ct = stack.reverse_unit(y, (own, shared), join, state, ctx, (ct, loss_ct))
            return y, grads, more, ct

        def ahead_all(x: Any, stacks: Nested, first: Any, count: int) -> tuple[Any, Any]:
            def body(carry: Any, i: jax.Array) -> Any:
                x, here = carry
                following = coming(stacks, first + jnp.minimum(i + 1, count - 1))  # while this one is computed with
                y, outs = ahead(stacks, x, first + i, here)
                return (y, following), outs

            first, x = jax.lax.optimization_barrier((first, x))
            (x, _), outs = jax.lax.scan(body, (x, coming(stacks, first)), jnp.arange(count))
            return x, outs

        def back_all(
            work: Work, ct: Any, shared_grads: Nested, kept: Any, first: Any, count: int, visit: Visit, turns: Turns
        ) -> Any:
            """`kept`: of each unit; where units are inverted, the output of the last one."""

            def body(step: jax.Array, carry: Any) -> Any:
                work, ct, shared_grads, y, here = carry
                i = count - 1 - step
                following = coming(_stacks(work, name), first + jnp.maximum(i - 1, 0))
                work = turns.begin(work, name, first + i)
                unit, (ct, y) = turn(_stacks(work, name), first + i, here, (ct, y))
                own = None if invert else unit_at(kept, i)
                y, grads, more, ct = behind(unit, first + i, y, own, ct)
                shared_grads = sums.add(shared_grads, more)
                if grads:
                    work = visit(work, name, self.constrained(name, grads), first + i)
                return work, ct, shared_grads, y, following

            first, ct = jax.lax.optimization_barrier((first, ct))
            here = coming(_stacks(work, name), first + count - 1)
            y = kept if invert else None
            work = turns.before(work, name, first + count - 1)
            work, ct, shared_grads, _, _ = jax.lax.fori_loop(0, count, body, (work, ct, shared_grads, y, here))
            return turns.after(work, name), ct, shared_grads

        starts = jnp.arange(0, stack.num_units, size)
        stacks = _stacks({"parameter": self.params, "frozen": self.frozen}, name)
        if all_at_once:
            x, (outs, kept) = ahead_all(x, stacks, jnp.int32(0), size)
            kept = x if invert else kept
        else:  # only each group's input is kept; back in the group, its units run forward again
            away = jax.tree.map(self._away, x)

            def group(x: Any, first: jax.Array) -> Any:
                after, (outs, _) = ahead_all(x, stacks, first, size)
                return after, (outs, _moved(away, x, jax.memory.Space.Host))

            x, (outs, kept) = jax.lax.scan(group, x, starts)
            outs = jax.tree.map(lambda o: o.reshape(stack.num_units, *o.shape[2:]), outs)
        x, pull_leave = jax.vjp(lambda x: stack.leave(x, ctx), x)

        def pull(work: Work, ct: Any, visit: Visit, turns: Turns) -> tuple[Work, Any, Nested]:
            (ct,) = pull_leave(ct)
            work, ct, grads = back(work, ct, visit, turns)
            return work, *pull_enter(ct), grads

        def back(work: Work, ct: Any, visit: Visit, turns: Turns) -> tuple[Work, Any, Nested]:
            nothing = sums.zeros(shared)
            if all_at_once:
                return back_all(work, ct, nothing, kept, jnp.int32(0), size, visit, turns)

            def body(step: jax.Array, carry: Any) -> Any:
                work, ct, shared_grads = carry
                index = starts.size - 1 - step
                x, ct = jax.lax.optimization_barrier((_moved(away, unit_at(kept, index), jax.memory.Space.Device), ct))
                _, (_, inner) = ahead_all(x, _stacks(work, name), starts[index], size)
                return back_all(work, ct, shared_grads, inner, starts[index], size, visit, turns)

            return jax.lax.fori_loop(0, starts.size, body, (work, ct, nothing))

        return x, stack.combine(outs), pull


def _moved(away: Any, tree: Any, space: Any) -> Any:
    return jax.tree.map(lambda away, x: jax.device_put(x, space) if away else x, away, tree)


def _stacks(work: Work, name: str) -> Nested:
    return {group: work[group].get(name, {}) for group in ("parameter", "frozen")}


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _as_stored(x: jax.Array, axes: MeshAxes, mesh: Mesh) -> jax.Array:
    """One unit's weight laid out as stacks are: row-major. TPU likes some weights transposed, and would turn a whole
    stack around before the loop that reads it; so it turns one unit's, which the barrier keeps apart. Stacks of narrow
    matrices TPU stores otherwise itself, so as not to fill up tiles of 128.

    Args:
        x: the weight, without the stack's leading axis.
        axes: the mesh axes of its dimensions.
        mesh: of the layout.
    """
    if x.ndim < 2 or x.shape[-1] % 128:
        return x

    def row_major(shard: jax.Array) -> jax.Array:
        return with_layout_constraint(shard, Layout(tuple(range(shard.ndim))))

    if mesh.size == 1 or not any(axes):
        return row_major(x)
    # Of each device's shard: the partitioner cannot split the constraint, and would gather the whole weight for it.
    spec = PartitionSpec(*axes)
    return jax.shard_map(row_major, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def split_pull(pull: Any, arguments: Any) -> tuple[list[Any], Callable[[list[Any], Any], Any]]:
    """What a pull-back holds besides its arguments, and the function that puts both together again.

    Args:
        pull: from jax.vjp; a pytree whose leaves are what it keeps.
        arguments: any tree; the same arrays, not equal ones, are found in `pull`.
    """
    leaves, treedef = jax.tree.flatten(pull)
    position = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(arguments))}
    sources = [position.get(id(leaf)) for leaf in leaves]

    def restore(kept: list[Any], arguments: Any) -> Any:
        own, rest = jax.tree.leaves(arguments), iter(kept)
        return jax.tree.unflatten(treedef, [next(rest) if source is None else own[source] for source in sources])

    return [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None], restore
