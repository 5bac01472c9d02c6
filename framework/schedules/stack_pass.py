"""Forward and backward pass of a stack within one program: loops over its layers, or over groups of layers.

A "layer" is one iteration of the loop: one period of the stack's pattern. The forward scan saves the residuals that
the remat policy selects. The backward loop passes each layer's gradients to the hooks, which may store them or update
the layer. The loop carry holds the parameters, because hooks may change them.

The residuals are the leaves of `jax.vjp`'s result that are not arguments of the layer. The arguments (above all the
layer's weights) are put back in the backward loop, so no copies of them are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.layers import remat, sums
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, merge
from plimsoll.framework.learner.units import unit_at
from plimsoll.framework.schedules.stage_pass import StagePass, StageWeights
from plimsoll.framework.schedules.unit import Carry, Cotangent, UnitFunctions
from plimsoll.framework.schedules.unit_pass import Flat, PlacedResiduals, UnitPass, moved, stacks_of
from plimsoll.framework.schedules.visits import Visits, Work


class StackGradients(NamedTuple):
    """The result of the backward pass over a stack, or over a group of its layers.

    Attributes:
        work: the backward state after the hooks.
        ct: the cotangent of the input.
        shared: sum, over the layers so far, of the gradients of the parameters that all layers share.
    """

    work: Work
    ct: Cotangent
    shared: Nested


# (result of the layers after these, hooks) -> result of these layers.
UnitsPull = Callable[[StackGradients, Visits], StackGradients]
StackPull = Callable[[Work, Cotangent, Visits], StackGradients]


class StackForward(NamedTuple):
    """The result of a stack's forward pass: its output, its `Out`, and its backward pass."""

    output: Carry
    out: Out
    pull: StackPull


class _Units(NamedTuple):
    """A group of layers, or all layers, after the forward pass.

    Attributes:
        output: output of the last layer.
        outs: the layers' `Out`s, stacked.
        residuals: the layers' residuals, stacked.
    """

    output: Carry
    outs: Out
    residuals: PlacedResiduals


class _ForwardCarry(NamedTuple):
    """The carry of the forward loop: the next layer's input, and its offloaded weights, which are being fetched."""

    x: Carry
    fetched: Flat


class _BackwardCarry(NamedTuple):
    """The carry of the backward loop over layers.

    Attributes:
        work: the weights, and the rest of the state that hooks change.
        ct: the cotangent of the output of the layer that runs next.
        shared_sums: sum of the shared parameters' gradients so far.
        y: output of the layer that runs next, where layers are inverted; else None.
        fetched: that layer's offloaded weights, which are being fetched, by path.
    """

    work: Work
    ct: Cotangent
    shared_sums: Nested
    y: Carry
    fetched: Flat


@dataclass(frozen=True)
class StackPass:
    """Layer-by-layer forward and backward pass of one stack.

    Attributes:
        stages: the pass through the model that contains this one.
        name: the stack's stage name.
        stack: the stack.
        ctx: the stack's context.
        units: the pass of any one of its layers.
        group_size: number of layers per group; without groups, all layers form one group.
    """

    stages: StagePass
    name: str
    stack: Stack
    ctx: Context
    units: UnitPass
    group_size: int

    @staticmethod
    def of(stages: StagePass, name: str, carry: Carry) -> StackPass:
        """Create the pass of a stack, and fetch shared parameters when `carry`, the previous stage's output, is
        ready."""
        stack = stages.model.stacks[name]
        ctx = stack.context(name, stages.ctx)
        # Shared parameters are fetched once, before the loop: every layer needs all of them.
        shared = stages.inputs("shared", carry) if stack.shared else StageWeights({}, {})
        stacks = stacks_of(stages.weights, name)
        function = stack.unit_function(merge(stacks["parameter"], stacks["frozen"]), ctx)
        # Without groups, all layers form one group.
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
        """Run the stack on the output of the previous stage."""
        x, pull_enter = jax.vjp(self.stack.enter, carry)
        # Without groups nothing reads `group_starts`, and the compiler drops it.
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
            # At least float32: in bfloat16 each addition would lose up to 1/512 of the sum.
            shared_sums = sums.zeros(self.units.shared.trainable)
            gradients = pull_units(StackGradients(work, ct, shared_sums), visits)
            (ct,) = pull_enter(gradients.ct)
            return gradients._replace(ct=ct)

        return StackForward(x, self.stack.combine(outs), pull)

    # --- groups of layers --------------------------------------------------------------------------------------------

    def _groups_forward(
        self,
        x: Carry,
        stacks: Nested,
        group_starts: jax.Array,
    ) -> tuple[Carry, Out, UnitsPull]:
        """Run the stack group by group, saving only each group's input: (output, stacked Outs, backward pass)."""
        hosted = jax.tree.map(self.units.goes_to_host, x)

        def group(x: Carry, first: jax.Array) -> tuple[Carry, tuple[Out, Carry]]:
            units = self._units_forward(x, stacks, first)
            return units.output, (units.outs, moved(hosted, x, jax.memory.Space.Host))

        x, (outs, group_inputs) = jax.lax.scan(group, x, group_starts)
        # The scan over groups stacks the layers' results as [groups, layers per group, ...].
        num_units = self.stack.num_units
        outs = jax.tree.map(lambda leaf: leaf.reshape(num_units, *leaf.shape[2:]), outs)

        def fetch_input(index: jax.Array) -> Carry:
            return moved(hosted, unit_at(group_inputs, index), jax.memory.Space.Device)

        return x, outs, partial(self._groups_backward, group_starts, fetch_input)

    def _groups_backward(
        self,
        group_starts: jax.Array,
        fetch_input: Callable[[jax.Array], Carry],
        gradients: StackGradients,
        visits: Visits,
    ) -> StackGradients:
        """Run the stack backward group by group; each group first runs its layers forward again.

        Args:
            group_starts: index of each group's first layer.
            fetch_input: returns the input of the group with the given number, on the device.
            gradients, visits: see `UnitsPull`.
        """

        def body(step: jax.Array, gradients: StackGradients) -> StackGradients:
            index = group_starts.size - 1 - step
            x = fetch_input(index)
            x, ct = jax.lax.optimization_barrier((x, gradients.ct))
            # Weights come from the loop carry: hooks have not changed this group's weights yet, and using the forward
            # pass's stacks would keep a second copy of them alive.
            stacks = stacks_of(gradients.work, self.name)
            units = self._units_forward(x, stacks, group_starts[index])
            return self._units_backward(units, group_starts[index], gradients._replace(ct=ct), visits)

        return jax.lax.fori_loop(0, group_starts.size, body, gradients)

    # --- the layers of a group, or all of them -----------------------------------------------------------------------

    def _units_forward(
        self,
        x: Carry,
        stacks: Nested,
        first: jax.Array,
    ) -> _Units:
        """Run a group's layers forward.

        Args:
            x: input of the first layer.
            stacks: "parameter" and "frozen" of all layers, stacked.
            first: index of the first layer.
        """
        last_step = self.group_size - 1

        def body(carry: _ForwardCarry, i: jax.Array) -> tuple[_ForwardCarry, tuple[Out, PlacedResiduals]]:
            # The next layer's offloaded weights are fetched while this layer computes. The last layer's weights are
            # fetched a second time, as every iteration of a loop does the same.
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
        """Run a group's layers backward, and call the hooks for each.

        Args:
            units: the group's forward pass.
            first: index of the first layer.
            gradients: result of the layers after these.
            visits: hooks that are called for each layer.
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
        """Run one iteration of the loop of `_units_backward`; step 0 is the last layer."""
        name = self.name
        work = carry.work
        i = self.group_size - 1 - step
        # Offloaded weights of the layer below are fetched while this layer computes, as in the forward pass.
        next_fetched = self.units.prefetch(stacks_of(work, name), first + jnp.maximum(i - 1, 0))
        # The hook runs first: it may write to the stacks from which this layer's weights are sliced.
        work = visits.turns.begin_unit(work, name, first + i)
        ready = (carry.ct, carry.y)
        unit_params, (ct, y) = self.units.take_weights(stacks_of(work, name), first + i, carry.fetched, ready)
        result = self.units.backward(unit_params, unit_at(residuals, i), first + i, y, ct)
        shared_sums = sums.add(carry.shared_sums, result.shared_grads)
        # A completely frozen stack has no gradients.
        if result.grads:
            grads = self.stages.sharded(name, result.grads)
            work = visits.visit(work, name, grads, first + i)
        return _BackwardCarry(work, result.ct, shared_sums, result.x, next_fetched)
