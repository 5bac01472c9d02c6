"""A backward pass that goes a stage and a unit of the stack at a time, and hands on each gradient once it is made.

`jax.value_and_grad` returns all gradients together. Here the stack runs forward in a scan that keeps what the remat
policy keeps of each unit, and backward in a loop that gives each unit's gradient to a `visit` function, which may write
it away or update the unit. The loop's carry holds the parameters, as visits may change them.

What is kept are the leaves of `jax.vjp`'s result that are not its arguments: those (the unit's weights above all) are
put back in the backward loop, so no copies of them are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
Carry = Any  # the pytree of activations that flows from one stage or unit to the next
Cotangent = Any  # the gradient of the loss by a carry, in the structure of that carry
# (work, stage, gradients, index of the unit or None) -> work. Gradients are in the structure of the stage's trainable
# parameters, those of a unit without the leading axis. Called once for each unit and once for each other stage.
Visit = Callable[
    [
        Work,
        str,
        Nested,
        jax.Array | None,
    ],
    Work,
]


class Turns(NamedTuple):
    """Functions that a backward loop over a stack's units calls besides `visit`; they may add keys to the work.

    Where units are in groups (memory.remat = sqrt), the loop is each group's.

    Attributes:
      begin_loop: (work, stack, index of the first unit) -> work, called before the loop.
      begin_unit: (work, stack, index of the unit) -> work, called when a unit's turn begins; its visit has what this
        adds.
      end_loop: (work, stack) -> work, called after the loop.
    """

    begin_loop: Callable[[Work, str, jax.Array], Work] = lambda work, stack, index: work
    begin_unit: Callable[[Work, str, jax.Array], Work] = lambda work, stack, index: work
    end_loop: Callable[[Work, str], Work] = lambda work, stack: work


_NO_TURNS = Turns()


class Pull(Protocol):
    """The backward pass of `forward`."""

    def __call__(
        self,
        work: Work,
        visit: Visit,
        turns: Turns = ...,
    ) -> Work:
        """Returns the work as visits and turns left it."""
        ...


def forward(
    model: Chain,
    layout: StateLayout,
    memory: Memory,
    weights: Work,
    ctx: Context,
    buffers: Nested,
) -> tuple[jax.Array, Out, Pull]:
    """Computes the objective, and prepares the backward pass.

    Args:
        model: a chain of stages.
        layout: where the weights are.
        memory: where what is kept of each unit goes; the context's remat policy decides what that is.
        weights: the groups "parameter" and "frozen".
        ctx: the context of the batch.
        buffers: the model's buffers, by stage.

    Returns:
        (loss, Out, pull): `pull(work, visit, turns)` runs backward, head first, and returns the work as visits left it:
        the weights, and what visits need. A tied parameter is visited with its home stage, with the sum of its
        gradients.
    """
    stages = _Stages(model, layout, memory, weights, ctx, buffers)
    carry: Carry = None
    outs: dict[str, Out] = {}
    stage_pulls: dict[str, StagePull] = {}
    stack_pulls: dict[str, StackPull] = {}
    for name in model.stages:
        if name in model.stacks:
            stack = _Stack(stages, name, carry)
            carry, outs[name], stack_pulls[name] = stack.forward(carry)
        else:
            carry, outs[name], stage_pulls[name] = stages.stage(name, carry)
    out = Out.merge(outs)
    assert out.loss is not None
    # The last carry is the last stage's loss, where cotangents begin. Losses of the stack's units, which the
    # objective has too, join the backward pass at their units.
    return out.loss, out, _ChainPull(stages, carry, stage_pulls, stack_pulls)


class StageWeights(NamedTuple):
    """What a stage reads, tied parameters included: what is differentiated, and what is not."""

    trainable: Nested
    frozen: Nested


class StackGradients(NamedTuple):
    """What the backward pass over a stack, or a group of its units, hands on.

    Attributes:
      work: as visits left it.
      ct: the cotangent of the input.
      shared: the sum, over the units so far, of the gradients of the parameters that all units share.
    """

    work: Work
    ct: Cotangent
    shared: Nested


# cotangent of the stage's output -> its gradients, and the cotangent of its input.
StagePull = Callable[[Cotangent], tuple[Nested, Cotangent]]
StackPull = Callable[[Work, Cotangent, Visit, Turns], StackGradients]


class _Stages:
    """One pass through the model's stages: what all of them read, and the stages outside of stacks."""

    def __init__(
        self,
        model: Chain,
        layout: StateLayout,
        memory: Memory,
        weights: Work,
        ctx: Context,
        buffers: Nested,
    ):
        self.model = model
        self.ctx = ctx
        self.buffers = buffers
        self.activations = memory.activations
        self.params = weights["parameter"]
        self.frozen = weights["frozen"]
        self.mesh = layout.mesh
        self.specs = model.stage_specs(layout.specs["parameter"], layout.specs["frozen"])

    def inputs(self, name: str, carry: Carry) -> StageWeights:
        """Brings a stage's parameters, tied ones included, to the device once `carry` is there."""
        trainable = dict(self.params.get(name, {}))
        frozen = dict(self.frozen.get(name, {}))
        params_by_path = flatten(self.params)
        # A tie is trained or frozen as the parameter is that it reads.
        for reader, home in self.model.ties.items():
            stage, key = reader.split("/", 1)
            if stage != name:
                continue
            if home in params_by_path:
                trainable[key] = params_by_path[home]
            else:
                frozen[key] = flatten(self.frozen)[home]
        # The compiler would fetch host weights as early as it can. So each is read by an index that is
        # not known before `carry` is there.
        first, _ = jax.lax.optimization_barrier((jnp.int32(0), carry))
        fetched_trainable = self._fetched(name, trainable, first)
        fetched_frozen = self._fetched(name, frozen, first)
        return StageWeights(fetched_trainable, fetched_frozen)

    def _fetched(
        self,
        name: str,
        weights: Nested,
        first: jax.Array,
    ) -> Nested:
        """A stage's weights on the device; `first` is a zero that the compiler cannot see through."""
        device_leaves = {}
        for path, leaf in flatten(weights).items():
            spec = self.specs[name][path]
            if spec.memory_kind != "device":
                # As a stack of one, of which the first is taken: a plain copy would not depend on the index.
                leaf = fetch_leaf(spec, unit_at(leaf[None], first))
            device_leaves[path] = leaf
        return unflatten(device_leaves)

    def goes_to_host(self, x: jax.Array) -> bool:
        """Whether an activation that is kept of a unit goes to host memory: a large matrix that the remat policy did
        not move already."""
        # Random keys, whose dtypes are extended ones, are small.
        if self.activations == "device" or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return False
        host_spec = move_to_host(TensorSpec(x.shape, x.dtype), "pinned_host")
        is_large = host_spec.memory_kind == "pinned_host"
        return is_large and jax.typeof(x).memory_space != jax.memory.Space.Host

    def with_ties(
        self,
        name: str,
        grads: Nested,
        tie_grads: dict[str, jax.Array],
    ) -> Nested:
        """Settles a stage's gradients by tied parameters, which belong to the parameter's home stage.

        Args:
            name: the stage's.
            grads: the stage's gradients, those of ties included.
            tie_grads: the sums of ties' gradients, by the path of the home parameter. Changed: the stage's own ties are
                added, and what has its home in this stage is taken out.

        Returns:
            The gradients of the parameters that live in this stage, sharded as these are.
        """
        grad_by_path = flatten(grads)
        for reader, home in self.model.ties.items():
            stage, key = reader.split("/", 1)
            if stage == name and key in grad_by_path:
                grad = grad_by_path.pop(key)
                # Several stages may read one parameter.
                tie_grads[home] = tie_grads[home] + grad if home in tie_grads else grad
        # Stages run head first, and a home comes before its readers, so all ties of this stage are there.
        homes = [home for home in tie_grads if home.startswith(f"{name}/")]
        for home in homes:
            key = home.split("/", 1)[1]
            grad_by_path[key] = grad_by_path[key] + tie_grads.pop(home)
        return self.constrained(name, unflatten(grad_by_path))

    def stage(self, name: str, carry: Carry) -> tuple[Carry, Out, StagePull]:
        """Runs a stage outside of the stacks: (output, or the loss of the last stage; Out; backward pass)."""
        stage = self.model.stages[name]
        ctx = self.ctx
        buffers = self.buffers.get(name, {})
        trainable, frozen = self.inputs(name, carry)

        def run(params: Nested, carry: Carry) -> tuple[Carry, Out]:
            with jax.named_scope(name):
                weights = stage.prepare(merge(params, frozen), ctx)
                y, out = stage.apply(weights, carry, ctx.fold(name), buffers)
            return (out.loss if y is None else y), out

        y, pull, out = jax.vjp(run, trainable, carry, has_aux=True)
        return y, out, pull

    def constrained(self, name: str, grads: Nested) -> Nested:
        """Gradients sharded as their parameters are, which is where partial sums are added up."""
        specs = self.specs[name]

        def constrained(path: str, grad: jax.Array) -> jax.Array:
            axes = specs[path].mesh_axes
            # A unit's gradient has no leading axis of units, its stacked parameter's spec has one.
            num_leading = len(axes) - grad.ndim
            return self.ctx.constrain(grad, *axes[num_leading:])

        return unflatten({path: constrained(path, grad) for path, grad in flatten(grads).items()})


@dataclass(frozen=True)
class _ChainPull:
    """The backward pass of `forward`.

    Attributes:
      stages: of the forward pass.
      loss: the last stage's.
      stage_pulls: by name, of the stages outside of stacks.
      stack_pulls: by name, of the stacks.
    """

    stages: _Stages
    loss: jax.Array
    stage_pulls: dict[str, StagePull]
    stack_pulls: dict[str, StackPull]

    def __call__(self, work: Work, visit: Visit, turns: Turns = _NO_TURNS) -> Work:
        """See `Pull`."""
        stages = self.stages
        first_stage = next(iter(stages.model.stages))
        tie_grads: dict[str, jax.Array] = {}
        ct: Cotangent = jnp.ones_like(self.loss)
        for name in reversed(stages.model.stages):
            if name in stages.model.stacks:
                work, ct, shared_grads = self.stack_pulls[name](work, ct, visit, turns)
                if shared_grads:
                    shared_grads = stages.constrained("shared", shared_grads)
                    work = visit(work, "shared", shared_grads, None)
                continue
            grads, ct = self.stage_pulls[name](ct)
            grads = stages.with_ties(name, grads, tie_grads)
            if not grads:
                continue
            work = visit(work, name, grads, None)
            if name != first_stage:
                # The visit ends before the stack's loop begins: what the head's update holds is as large
                # as its table.
                stage_params, ct = jax.lax.optimization_barrier((work["parameter"][name], ct))
                work = {**work, "parameter": {**work["parameter"], name: stage_params}}
        return work


class UnitConstants(NamedTuple):
    """What one unit reads and is not differentiated by.

    Attributes:
      frozen: the unit's frozen parameters.
      frozen_shared: the frozen ones of the parameters that all units share.
      buffers: the unit's.
      ctx: the unit's.
    """

    frozen: Nested
    frozen_shared: Nested
    buffers: Nested
    ctx: Context


class UnitArguments(NamedTuple):
    """All that one unit is a function of, besides its input."""

    params: Nested  # the unit's trainable parameters
    shared: Nested  # the trainable ones of the parameters that all units share
    constants: UnitConstants


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnitResiduals:
    """What is kept of a unit, or of stacked units, for the backward pass; nothing, where units are inverted.

    The static fields were learnt when the unit was traced. As metadata of a pytree they leave the scan in which that
    happens together with the arrays.

    Args:
        leaves: what the unit's pull-back holds besides the unit's arguments.
        restore: puts the pull-back together again, see `split_pull`; None where units are inverted.
        hosted: for each leaf, whether it is in host memory.
        loss: the ShapeDtypeStruct of the unit's loss, or None.
    """

    leaves: list[jax.Array]
    restore: Callable[[list[jax.Array], UnitArguments], Any] | None = field(metadata={"static": True})
    hosted: tuple[bool, ...] = field(metadata={"static": True})
    loss: jax.ShapeDtypeStruct | None = field(metadata={"static": True})


class UnitsForward(NamedTuple):
    """What some units hand on after their forward pass.

    Attributes:
      output: of the last unit.
      outs: the units' Outs, stacked.
      residuals: of the units, stacked.
    """

    output: Carry
    outs: Out
    residuals: UnitResiduals


class UnitBackward(NamedTuple):
    """What one unit hands on after its backward pass.

    Attributes:
      x: its input, where units are inverted; else None.
      grads: of its trainable parameters.
      shared_grads: of the trainable parameters that all units share.
      ct: the cotangent of its input.
    """

    x: Carry
    grads: Nested
    shared_grads: Nested
    ct: Cotangent


class _LoopCarry(NamedTuple):
    """The carry of the backward loop over units.

    Attributes:
      work: the weights, and what visits and turns change.
      ct: the cotangent of the output of the unit whose turn comes next.
      shared_sums: the sum of the shared parameters' gradients so far.
      y: the output of the unit whose turn comes next, where units are inverted; else None.
      fetched: that unit's hosted weights, on their way to the device, by path.
    """

    work: Work
    ct: Cotangent
    shared_sums: Nested
    y: Carry
    fetched: dict[str, jax.Array]


class _Stack:
    """One stack's forward and backward pass, a unit at a time.

    Args:
        stages: the pass through the model that this is a part of.
        name: the stack's, as a stage.
        carry: what the stage before hands on; shared parameters are fetched after it.
    """

    def __init__(
        self,
        stages: _Stages,
        name: str,
        carry: Carry,
    ):
        self.stages = stages
        self.name = name
        self.stack = stages.model.stacks[name]
        self.ctx = stages.ctx.fold(name)
        self.buffers = stages.buffers.get(name, {})
        self.inverts = self.ctx.remat == "invert"
        # What all units share is fetched once, before the loop: each unit needs all of it.
        self.shared = StageWeights({}, {})
        if self.stack.shared:
            self.shared = stages.inputs("shared", carry)
        weights = merge(stages.params.get(name, {}), stages.frozen.get(name, {}))
        self.unit = self.stack.unit_function(weights, self.ctx)
        num_units = self.stack.num_units
        # Without groups, all units are one group.
        self.group_size = remat.group_size(self.ctx.remat, num_units) or num_units
        self.in_groups = self.group_size < num_units

    # --- the stack ---------------------------------------------------------------------------------------------------

    def forward(self, carry: Carry) -> tuple[Carry, Out, StackPull]:
        """Runs the stack: (output, Out, backward pass)."""
        x, pull_enter = jax.vjp(self.stack.enter, carry)
        # Without groups nothing reads the starts, and the compiler drops them.
        group_starts = jnp.arange(0, self.stack.num_units, self.group_size)
        weights = {"parameter": self.stages.params, "frozen": self.stages.frozen}
        stacks = _stacks(weights, self.name)
        if self.in_groups:
            x, outs, pull_units = self._groups_forward(x, stacks, group_starts)
        else:
            x, outs, residuals = self._units_forward(x, stacks, jnp.int32(0))
            pull_units = partial(self._all_units_backward, x if self.inverts else None, residuals)
        x, pull_leave = jax.vjp(lambda x: self.stack.leave(x, self.ctx), x)

        def pull(
            work: Work,
            ct: Cotangent,
            visit: Visit,
            turns: Turns,
        ) -> StackGradients:
            (ct,) = pull_leave(ct)
            # In float32 at least: in bfloat16 each addition would lose up to 1/512 of the sum.
            shared_sums = sums.zeros(self.shared.trainable)
            gradients = StackGradients(work, ct, shared_sums)
            gradients = pull_units(gradients, visit, turns)
            (ct,) = pull_enter(gradients.ct)
            return gradients._replace(ct=ct)

        return x, self.stack.combine(outs), pull

    def _all_units_backward(
        self,
        output: Carry,
        residuals: UnitResiduals,
        gradients: StackGradients,
        visit: Visit,
        turns: Turns,
    ) -> StackGradients:
        """The backward pass of a stack without groups; see `_units_backward`."""
        return self._units_backward(gradients, output, residuals, jnp.int32(0), visit, turns)

    def _groups_forward(
        self,
        x: Carry,
        stacks: Nested,
        group_starts: jax.Array,
    ) -> tuple[Carry, Out, Callable[[StackGradients, Visit, Turns], StackGradients]]:
        """Runs the stack group by group and keeps each group's input alone: (output, stacked Outs, backward pass).

        Back in a group, its units run forward again.
        """
        hosted = jax.tree.map(self.stages.goes_to_host, x)

        def group(x: Carry, first: jax.Array) -> tuple[Carry, tuple[Out, Carry]]:
            units = self._units_forward(x, stacks, first)
            return units.output, (units.outs, _moved(hosted, x, jax.memory.Space.Host))

        x, (outs, group_inputs) = jax.lax.scan(group, x, group_starts)
        # The scan over groups stacks the units' results as [groups, units of a group, ...].
        num_units = self.stack.num_units
        outs = jax.tree.map(lambda leaf: leaf.reshape(num_units, *leaf.shape[2:]), outs)

        def pull(gradients: StackGradients, visit: Visit, turns: Turns) -> StackGradients:
            def body(step: jax.Array, gradients: StackGradients) -> StackGradients:
                work, ct, shared_sums = gradients
                index = group_starts.size - 1 - step
                x = _moved(hosted, unit_at(group_inputs, index), jax.memory.Space.Device)
                x, ct = jax.lax.optimization_barrier((x, ct))
                # The weights of the loop's carry: visits have not changed those of this group yet, and the
                # forward pass's stacks would have to be kept beside these.
                units = self._units_forward(x, _stacks(work, self.name), group_starts[index])
                gradients = StackGradients(work, ct, shared_sums)
                return self._units_backward(gradients, None, units.residuals, group_starts[index], visit, turns)

            return jax.lax.fori_loop(0, group_starts.size, body, gradients)

        return x, outs, pull

    # --- the units of a group, or all of them ------------------------------------------------------------------------

    def _units_forward(
        self,
        x: Carry,
        stacks: Nested,
        first: jax.Array,
    ) -> UnitsForward:
        """Runs a group's units.

        Args:
            x: the input of the first one.
            stacks: "parameter" and "frozen" of all units, stacked.
            first: the index of the first one.
        """
        last_step = self.group_size - 1

        def body(carry: tuple[Carry, dict[str, jax.Array]], i: jax.Array) -> Any:
            x, fetched = carry
            # The next unit's hosted weights come to the device while this one is computed with. The last
            # unit's are asked for once more, as each turn of a loop does the same.
            next_fetched = self._fetched(stacks, first + jnp.minimum(i + 1, last_step))
            y, out, residuals = self._unit_forward(stacks, x, first + i, fetched)
            return (y, next_fetched), (out, residuals)

        first, x = jax.lax.optimization_barrier((first, x))
        carry = x, self._fetched(stacks, first)
        (x, _), (outs, residuals) = jax.lax.scan(body, carry, jnp.arange(self.group_size))
        return UnitsForward(x, outs, residuals)

    def _units_backward(
        self,
        gradients: StackGradients,
        output: Carry,
        residuals: UnitResiduals,
        first: jax.Array,
        visit: Visit,
        turns: Turns,
    ) -> StackGradients:
        """Runs a group's units backward, and visits each.

        Args:
            gradients: as the units after these left them.
            output: of the last unit, where units are inverted; else None.
            residuals: of the units, stacked.
            first: the index of the first unit.
            visit, turns: called for each unit.
        """
        name = self.name

        def body(step: jax.Array, carry: _LoopCarry) -> _LoopCarry:
            work, ct, shared_sums, y, fetched = carry
            i = self.group_size - 1 - step
            # Hosted weights of the unit below come while this one is computed with, as in the forward pass.
            next_fetched = self._fetched(_stacks(work, name), first + jnp.maximum(i - 1, 0))
            # A turn may write to the stacks that this unit's weights are taken from.
            work = turns.begin_unit(work, name, first + i)
            unit, (ct, y) = self._unit_weights(_stacks(work, name), first + i, fetched, (ct, y))
            if self.inverts:
                done = self._unit_inverted(unit, first + i, y, residuals, ct)
            else:
                done = self._unit_backward(unit, unit_at(residuals, i), first + i, ct)
            shared_sums = sums.add(shared_sums, done.shared_grads)
            # A stack that is frozen as a whole has no gradients.
            if done.grads:
                grads = self.stages.constrained(name, done.grads)
                work = visit(work, name, grads, first + i)
            return _LoopCarry(work, done.ct, shared_sums, done.x, next_fetched)

        work, ct, shared_sums = gradients
        first, ct = jax.lax.optimization_barrier((first, ct))
        fetched = self._fetched(_stacks(work, name), first + self.group_size - 1)
        work = turns.begin_loop(work, name, first + self.group_size - 1)
        carry = _LoopCarry(work, ct, shared_sums, output, fetched)
        carry = jax.lax.fori_loop(0, self.group_size, body, carry)
        work = turns.end_loop(carry.work, name)
        return StackGradients(work, carry.ct, carry.shared_sums)

    # --- one unit ----------------------------------------------------------------------------------------------------

    def _fetched(self, stacks: Nested, index: jax.Array) -> dict[str, jax.Array]:
        """A unit's parameters that live in host memory, on their way to the device, by path."""
        specs = self.stages.specs[self.name]
        unit_leaves = {}
        for stack in stacks.values():
            for path, leaf in flatten(stack).items():
                if specs[path].memory_kind != "device":
                    unit_leaves[path] = fetch_leaf(specs[path], unit_at(leaf, index))
        return unit_leaves

    def _unit_weights(
        self,
        stacks: Nested,
        index: jax.Array,
        fetched: dict[str, jax.Array],
        carry: Any,
    ) -> tuple[Nested, Any]:
        """Takes a unit's parameters when its turn comes, not before: (unit, carry).

        Args:
            stacks: "parameter" and "frozen" of all units, stacked.
            index: the unit's.
            fetched: its parameters of `_fetched`.
            carry: what is there when its turn comes.
        """
        # Hosted leaves have come during the turn before; the others are slices of their stacks.
        leaves_by_group = {}
        for group, stack in stacks.items():
            leaves_by_group[group] = {
                path: fetched[path] if path in fetched else unit_at(leaf, index)
                for path, leaf in flatten(stack).items()
            }
        specs = self.stages.specs[self.name]
        unit = {}
        for group, leaves in leaves_by_group.items():
            # The first of a stacked spec's axes is that of the units.
            row_major_leaves = {
                path: _as_stored(leaf, specs[path].mesh_axes[1:], self.stages.mesh) for path, leaf in leaves.items()
            }
            unit[group] = unflatten(row_major_leaves)
        return jax.lax.optimization_barrier((unit, carry))

    def _arguments(self, unit: Nested, index: jax.Array) -> UnitArguments:
        """What the unit at `index` is a function of, given its parameters ("parameter" and "frozen")."""
        buffers = unit_at(self.buffers, index)
        # Its random stream depends on its index alone, so that dropout is the same forward and backward.
        ctx = self.ctx.fold_index(index)
        constants = UnitConstants(unit["frozen"], self.shared.frozen, buffers, ctx)
        return UnitArguments(unit["parameter"], self.shared.trainable, constants)

    def _run(
        self,
        params: Nested,
        shared: Nested,
        x: Carry,
        constants: UnitConstants,
    ) -> tuple[tuple[Carry, jax.Array | None], Out]:
        """The unit's function: ((output, loss), Out)."""
        weights = merge(params, constants.frozen)
        shared_weights = merge(shared, constants.frozen_shared)
        with jax.named_scope(self.name):
            y, out = self.unit(x, weights, shared_weights, constants.buffers, constants.ctx)
        return (y, out.loss), out

    def _unit_forward(
        self,
        stacks: Nested,
        x: Carry,
        index: jax.Array,
        fetched: dict[str, jax.Array],
    ) -> tuple[Carry, Out, UnitResiduals]:
        """Runs one unit: (output, Out, what is kept of it)."""
        unit, x = self._unit_weights(stacks, index, fetched, x)
        arguments = self._arguments(unit, index)
        if self.inverts:
            (y, loss), out = self._run(arguments.params, arguments.shared, x, arguments.constants)
            return y, out, UnitResiduals([], None, (), _shapes(loss))

        def run(params: Nested, shared: Nested, x: Carry) -> tuple[tuple[Carry, jax.Array | None], Out]:
            return self._run(params, shared, x, arguments.constants)

        (y, loss), pull, out = jax.vjp(run, arguments.params, arguments.shared, x, has_aux=True)
        leaves, restore = split_pull(pull, arguments)
        # What is kept within a group is needed at once, by the group's own backward pass.
        moves = not self.in_groups
        hosted = [moves and self.stages.goes_to_host(leaf) for leaf in leaves]
        leaves = _moved(hosted, leaves, jax.memory.Space.Host)
        return y, out, UnitResiduals(leaves, restore, tuple(hosted), _shapes(loss))

    def _unit_backward(
        self,
        unit: Nested,
        residuals: UnitResiduals,
        index: jax.Array,
        ct: Cotangent,
    ) -> UnitBackward:
        """Runs one unit backward, from what was kept of it."""
        assert residuals.restore is not None
        arguments = self._arguments(unit, index)
        # A unit's loss is a term of the objective.
        loss_ct = _ones(residuals.loss)
        leaves = _moved(list(residuals.hosted), residuals.leaves, jax.memory.Space.Device)
        pull = residuals.restore(leaves, arguments)
        grads, shared_grads, ct = pull((ct, loss_ct))
        return UnitBackward(None, grads, shared_grads, ct)

    def _unit_inverted(
        self,
        unit: Nested,
        index: jax.Array,
        y: Carry,
        residuals: UnitResiduals,
        ct: Cotangent,
    ) -> UnitBackward:
        """Runs one unit backward, from its output `y`: its input is computed on the way."""
        params, shared, constants = self._arguments(unit, index)
        loss_ct = _ones(residuals.loss)

        def join(params: Nested, shared: Nested) -> Nested:
            weights = merge(params, constants.frozen)
            shared_weights = merge(shared, constants.frozen_shared)
            return {**weights, **shared_weights}

        with jax.named_scope(self.name):
            x, (grads, shared_grads), ct = self.stack.reverse_unit(
                y, (params, shared), join, constants.buffers, constants.ctx, (ct, loss_ct)
            )
        return UnitBackward(x, grads, shared_grads, ct)


def _moved(moves: Any, tree: Any, space: Any) -> Any:
    """The tree with those leaves in that memory space that `moves`, a tree of bools, says."""
    return jax.tree.map(lambda move, leaf: jax.device_put(leaf, space) if move else leaf, moves, tree)


def _stacks(work: Work, name: str) -> Nested:
    """A stack's parameters, by group; {} for a group that has none."""
    return {group: work[group].get(name, {}) for group in ("parameter", "frozen")}


def _shapes(tree: Any) -> Any:
    """The ShapeDtypeStructs of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _ones(shapes: Any) -> Any:
    """The cotangent of a loss of these shapes; None stays None."""
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)


def _as_stored(x: jax.Array, axes: MeshAxes, mesh: Mesh) -> jax.Array:
    """Lays one unit's weight out as stacks are: row-major. TPU likes some weights transposed, and would turn a whole
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
    """Splits a pull-back into what it holds besides its arguments, and a function that puts both together again.

    Args:
        pull: from jax.vjp; a pytree whose leaves are what it keeps.
        arguments: any tree; the same arrays, not equal ones, are found in `pull`.

    Returns:
        (residuals, restore): `restore(residuals, arguments)` is the pull-back.
    """
    leaves, treedef = jax.tree.flatten(pull)
    argument_leaves = jax.tree.leaves(arguments)
    # jax.vjp keeps an argument as it is, so it is the same object among the pull-back's leaves.
    position = {id(leaf): i for i, leaf in enumerate(argument_leaves)}
    sources = [position.get(id(leaf)) for leaf in leaves]

    def restore(residuals: list[Any], arguments: Any) -> Any:
        argument_leaves = jax.tree.leaves(arguments)
        next_residual = iter(residuals)
        pull_leaves = []
        for source in sources:
            leaf = next(next_residual) if source is None else argument_leaves[source]
            pull_leaves.append(leaf)
        return jax.tree.unflatten(treedef, pull_leaves)

    residuals = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
    return residuals, restore
