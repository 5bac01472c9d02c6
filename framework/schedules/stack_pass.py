"""A stack's forward and backward pass within one program: loops over its units, or over groups of them.

Going forward, a scan keeps what the remat policy keeps of each unit; going back, a loop gives each unit's gradient to
the visits, which may write it away or update the unit. The loop's carry holds the parameters, as visits may change
them.

What is kept are the leaves of `jax.vjp`'s result that are not its arguments: those (the unit's weights above all) are
put back in the backward loop, so no copies of them are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from framework.layers import remat, sums
from framework.layers.base import Context, Out
from framework.layers.stack import Stack
from framework.layout import Nested, merge
from framework.learner.units import unit_at
from framework.schedules.stage_pass import StagePass, StageWeights
from framework.schedules.unit import Carry, Cotangent, UnitFunctions
from framework.schedules.unit_pass import Flat, PlacedResiduals, UnitPass, moved, stacks_of
from framework.schedules.visits import Visits, Work


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


# (what the units after these handed on, visits) -> what these hand on.
UnitsPull = Callable[[StackGradients, Visits], StackGradients]
StackPull = Callable[[Work, Cotangent, Visits], StackGradients]


class StackForward(NamedTuple):
    """What the forward pass of a stack hands on: its output, its Out and its backward pass."""

    output: Carry
    out: Out
    pull: StackPull


class _Units(NamedTuple):
    """A group of units, or all of them, after their forward pass.

    Attributes:
      output: of the last unit.
      outs: the units' Outs, stacked.
      residuals: of the units, stacked.
    """

    output: Carry
    outs: Out
    residuals: PlacedResiduals


class _ForwardCarry(NamedTuple):
    """The carry of the forward loop: the next unit's input, and its hosted weights on their way to the device."""

    x: Carry
    fetched: Flat


class _BackwardCarry(NamedTuple):
    """The carry of the backward loop over units.

    Attributes:
      work: the weights, and what visits change.
      ct: the cotangent of the output of the unit whose turn comes next.
      shared_sums: the sum of the shared parameters' gradients so far.
      y: the output of the unit whose turn comes next, where units are inverted; else None.
      fetched: that unit's hosted weights, on their way to the device, by path.
    """

    work: Work
    ct: Cotangent
    shared_sums: Nested
    y: Carry
    fetched: Flat


@dataclass(frozen=True)
class StackPass:
    """One stack's forward and backward pass, a unit at a time.

    Attributes:
      stages: the pass through the model that this is a part of.
      name: the stack's, as a stage.
      stack: the stack.
      ctx: the stack's context.
      units: any one of its units.
      group_size: the units of a group; without groups, all units are one group.
    """

    stages: StagePass
    name: str
    stack: Stack
    ctx: Context
    units: UnitPass
    group_size: int

    @staticmethod
    def of(stages: StagePass, name: str, carry: Carry) -> StackPass:
        """The pass of a stack; shared parameters are fetched once `carry`, of the stage before, is there."""
        stack = stages.model.stacks[name]
        ctx = stack.context(name, stages.ctx)
        # What all units share is fetched once, before the loop: each unit needs all of it.
        shared = stages.inputs("shared", carry) if stack.shared else StageWeights({}, {})
        stacks = stacks_of(stages.weights, name)
        function = stack.unit_function(merge(stacks["parameter"], stacks["frozen"]), ctx)
        # Without groups, all units are one group.
        group_size = remat.group_size(ctx.remat, stack.num_units) or stack.num_units
        units = UnitPass(
            unit=UnitFunctions(name, stack, function),
            ctx=ctx,
            buffers=stages.buffers.get(name, {}),
            shared=shared,
            specs=stages.specs[name],
            mesh=stages.mesh,
            offloads=stages.offloads if stack.section is None else stack.section.offloads,
            in_groups=group_size < stack.num_units,
        )
        return StackPass(stages, name, stack, ctx, units, group_size)

    # --- the stack ---------------------------------------------------------------------------------------------------

    def forward(self, carry: Carry) -> StackForward:
        """Runs the stack on the output of the stage before."""
        x, pull_enter = jax.vjp(self.stack.enter, carry)
        # Without groups nothing reads the starts, and the compiler drops them.
        group_starts = jnp.arange(0, self.stack.num_units, self.group_size)
        stacks = stacks_of(self.stages.weights, self.name)
        if self.units.in_groups:
            x, outs, pull_units = self._groups_forward(x, stacks, group_starts)
        else:
            units = self._units_forward(x, stacks, jnp.int32(0))
            x = units.output
            outs = units.outs
            pull_units = partial(self._units_backward, units, jnp.int32(0))
        x, pull_leave = jax.vjp(lambda x: self.stack.leave(x, self.ctx), x)

        def pull(work: Work, ct: Cotangent, visits: Visits) -> StackGradients:
            (ct,) = pull_leave(ct)
            # In float32 at least: in bfloat16 each addition would lose up to 1/512 of the sum.
            shared_sums = sums.zeros(self.units.shared.trainable)
            gradients = pull_units(StackGradients(work, ct, shared_sums), visits)
            (ct,) = pull_enter(gradients.ct)
            return gradients._replace(ct=ct)

        return StackForward(x, self.stack.combine(outs), pull)

    # --- groups of units ---------------------------------------------------------------------------------------------

    def _groups_forward(
        self,
        x: Carry,
        stacks: Nested,
        group_starts: jax.Array,
    ) -> tuple[Carry, Out, UnitsPull]:
        """Runs the stack group by group and keeps each group's input alone: (output, stacked Outs, backward pass)."""
        hosted = jax.tree.map(self.units.goes_to_host, x)

        def group(x: Carry, first: jax.Array) -> tuple[Carry, tuple[Out, Carry]]:
            units = self._units_forward(x, stacks, first)
            return units.output, (units.outs, moved(hosted, x, jax.memory.Space.Host))

        x, (outs, group_inputs) = jax.lax.scan(group, x, group_starts)
        # The scan over groups stacks the units' results as [groups, units of a group, ...].
        num_units = self.stack.num_units
        outs = jax.tree.map(lambda leaf: leaf.reshape(num_units, *leaf.shape[2:]), outs)

        def input_of(index: jax.Array) -> Carry:
            return moved(hosted, unit_at(group_inputs, index), jax.memory.Space.Device)

        return x, outs, partial(self._groups_backward, group_starts, input_of)

    def _groups_backward(
        self,
        group_starts: jax.Array,
        input_of: Callable[[jax.Array], Carry],
        gradients: StackGradients,
        visits: Visits,
    ) -> StackGradients:
        """Runs the stack backward group by group; in a group, its units run forward again.

        Args:
            group_starts: the index of each group's first unit.
            input_of: the input of the group of that number, on the device.
            gradients, visits: see `UnitsPull`.
        """

        def body(step: jax.Array, gradients: StackGradients) -> StackGradients:
            index = group_starts.size - 1 - step
            x = input_of(index)
            x, ct = jax.lax.optimization_barrier((x, gradients.ct))
            # The weights of the loop's carry: visits have not changed those of this group yet, and the
            # forward pass's stacks would have to be kept beside these.
            stacks = stacks_of(gradients.work, self.name)
            units = self._units_forward(x, stacks, group_starts[index])
            return self._units_backward(units, group_starts[index], gradients._replace(ct=ct), visits)

        return jax.lax.fori_loop(0, group_starts.size, body, gradients)

    # --- the units of a group, or all of them ------------------------------------------------------------------------

    def _units_forward(
        self,
        x: Carry,
        stacks: Nested,
        first: jax.Array,
    ) -> _Units:
        """Runs a group's units.

        Args:
            x: the input of the first one.
            stacks: "parameter" and "frozen" of all units, stacked.
            first: the index of the first one.
        """
        last_step = self.group_size - 1

        def body(carry: _ForwardCarry, i: jax.Array) -> tuple[_ForwardCarry, tuple[Out, PlacedResiduals]]:
            # The next unit's hosted weights come to the device while this one is computed with. The last
            # unit's are asked for once more, as each turn of a loop does the same.
            next_fetched = self.units.prefetch(stacks, first + jnp.minimum(i + 1, last_step))
            index = first + i
            unit_params, x = self.units.take_weights(stacks, index, carry.fetched, carry.x)
            y, out, residuals = self.units.forward(unit_params, index, x)
            return _ForwardCarry(y, next_fetched), (out, residuals)

        first, x = jax.lax.optimization_barrier((first, x))
        carry = _ForwardCarry(x, self.units.prefetch(stacks, first))
        carry, (outs, residuals) = jax.lax.scan(body, carry, jnp.arange(self.group_size))
        return _Units(carry.x, outs, residuals)

    def _units_backward(
        self,
        units: _Units,
        first: jax.Array,
        gradients: StackGradients,
        visits: Visits,
    ) -> StackGradients:
        """Runs a group's units backward, and visits each.

        Args:
            units: of the forward pass.
            first: the index of the first unit.
            gradients: as the units after these left them.
            visits: called for each unit.
        """
        name = self.name
        work, ct, shared_sums = gradients
        first, ct = jax.lax.optimization_barrier((first, ct))
        fetched = self.units.prefetch(stacks_of(work, name), first + self.group_size - 1)
        work = visits.turns.begin_loop(work, name, first + self.group_size - 1)
        output = units.output if self.units.inverts else None
        carry = _BackwardCarry(work, ct, shared_sums, output, fetched)
        body = partial(self._backward_turn, first, units.residuals, visits)
        carry = jax.lax.fori_loop(0, self.group_size, body, carry)
        work = visits.turns.end_loop(carry.work, name)
        return StackGradients(work, carry.ct, carry.shared_sums)

    def _backward_turn(
        self,
        first: jax.Array,
        residuals: PlacedResiduals,
        visits: Visits,
        step: jax.Array,
        carry: _BackwardCarry,
    ) -> _BackwardCarry:
        """The turn of one unit in the loop of `_units_backward`; the last unit's is step 0."""
        name = self.name
        work = carry.work
        i = self.group_size - 1 - step
        # Hosted weights of the unit below come while this one is computed with, as in the forward pass.
        next_fetched = self.units.prefetch(stacks_of(work, name), first + jnp.maximum(i - 1, 0))
        # A turn may write to the stacks that this unit's weights are taken from.
        work = visits.turns.begin_unit(work, name, first + i)
        ready = (carry.ct, carry.y)
        unit_params, (ct, y) = self.units.take_weights(stacks_of(work, name), first + i, carry.fetched, ready)
        result = self.units.backward(unit_params, unit_at(residuals, i), first + i, y, ct)
        shared_sums = sums.add(carry.shared_sums, result.shared_grads)
        # A stack that is frozen as a whole has no gradients.
        if result.grads:
            grads = self.stages.sharded(name, result.grads)
            work = visits.visit(work, name, grads, first + i)
        return _BackwardCarry(work, result.ct, shared_sums, result.x, next_fetched)
