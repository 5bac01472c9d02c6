"""One pass through a model's stages: the weights that a stage reads, stages outside of stacks, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from framework.layers.base import Context, Out
from framework.layout import Nested, StateLayout, fetch_leaf, flatten, merge, unflatten
from framework.learner.units import unit_at
from framework.models.chain import Chain, Places
from framework.schedules.gradients import TiedGradients, add_tied, sharded_as_parameter, split_tied, with_tied_weights
from framework.schedules.memory import Memory
from framework.schedules.unit import Carry, Cotangent, run_stage
from framework.schedules.visits import Work


class StageWeights(NamedTuple):
    """What a stage reads, tied parameters included: what is differentiated, and what is not."""

    trainable: Nested
    frozen: Nested


class StageGradients(NamedTuple):
    """What the backward pass of a stage hands on: its gradients, and the cotangent of its input."""

    grads: Nested
    ct: Cotangent


# cotangent of the stage's output -> StageGradients.
StagePull = Callable[[Cotangent], StageGradients]


class StageForward(NamedTuple):
    """What the forward pass of a stage hands on.

    Attributes:
      output: of the stage; the loss, of the last one.
      out: metrics and buffers.
      pull: its backward pass.
    """

    output: Carry
    out: Out
    pull: StagePull


@dataclass(frozen=True)
class StagePass:
    """One pass through a model's stages.

    Attributes:
      model: a chain of stages.
      mesh: of the layout.
      specs: of what each stage reads, by stage and path.
      offloads: whether what is kept of units goes to host memory, where no section says so.
      weights: the groups "parameter" and "frozen".
      ctx: the context of the batch.
      buffers: the model's, by stage.
    """

    model: Chain
    mesh: Mesh
    specs: Places
    offloads: bool
    weights: Work
    ctx: Context
    buffers: Nested

    @staticmethod
    def of(
        model: Chain,
        layout: StateLayout,
        memory: Memory,
        weights: Work,
        ctx: Context,
        buffers: Nested,
    ) -> StagePass:
        """The pass of a batch; arguments as those of `backward.forward`."""
        specs = model.stage_specs(layout.specs["parameter"], layout.specs["frozen"])
        return StagePass(model, layout.mesh, specs, memory.activations.hosts_everything, weights, ctx, buffers)

    def inputs(self, name: str, carry: Carry) -> StageWeights:
        """Brings a stage's parameters, tied ones included, to the device once `carry` is there."""
        stage_weights = {}
        for group in ("parameter", "frozen"):
            params = self.weights[group]
            stage_weights[group] = with_tied_weights(self.model.ties, name, params.get(name, {}), flatten(params))
        # The compiler would fetch host weights as early as it can. So each is read by an index that is
        # not known before `carry` is there.
        first, _ = jax.lax.optimization_barrier((jnp.int32(0), carry))
        trainable = self._fetched(name, stage_weights["parameter"], first)
        frozen = self._fetched(name, stage_weights["frozen"], first)
        return StageWeights(trainable, frozen)

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

    def forward(self, name: str, carry: Carry) -> StageForward:
        """Runs a stage outside of the stacks."""
        buffers = self.buffers.get(name, {})
        trainable, frozen = self.inputs(name, carry)

        def run(params: Nested, carry: Carry) -> tuple[Carry, Out]:
            return run_stage(self.model, name, merge(params, frozen), carry, self.ctx, buffers)

        y, pull, out = jax.vjp(run, trainable, carry, has_aux=True)
        return StageForward(y, out, lambda ct: StageGradients(*pull(ct)))

    def settled(
        self,
        name: str,
        grads: Nested,
        tie_grads: dict[str, jax.Array],
    ) -> TiedGradients:
        """Settles a stage's gradients by tied parameters, which belong to the parameter's home stage.

        Args:
            name: the stage's.
            grads: the stage's gradients, those of ties included.
            tie_grads: the sums of ties' gradients, by the path of the home parameter.

        Returns:
            The gradients of the parameters that live in this stage, sharded as these are, and the ties' that still wait
            for their home.
        """
        tied = split_tied(self.model.ties, name, grads, tie_grads)
        # Stages run head first, and a home comes before its readers, so all ties of this stage are there.
        tied = add_tied(name, tied)
        return tied._replace(grads=self.sharded(name, tied.grads))

    def sharded(self, name: str, grads: Nested) -> Nested:
        """Gradients of a stage, or of one unit of a stack, sharded as their parameters are."""
        specs = self.specs[name]
        sharded_grads = {}
        for path, grad in flatten(grads).items():
            sharded_grads[path] = sharded_as_parameter(grad, specs[path].mesh_axes, self.mesh)
        return unflatten(sharded_grads)
