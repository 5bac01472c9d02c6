"""One pass through a model's stages: the weights that a stage reads, stages outside the stacks, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import Nested, StateLayout, fetch_leaf, flatten, merge, unflatten
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.models.chain import Chain, StageSpecs
from plimsoll.framework.schedules.backward_hooks import BackwardState
from plimsoll.framework.schedules.gradients import (
    TiedGradients,
    add_tied,
    shard_as_parameter,
    split_tied,
    with_tied_weights,
)
from plimsoll.framework.schedules.layer_computation import Carry, Cotangent, run_stage
from plimsoll.framework.schedules.memory import Memory


class StageWeights(NamedTuple):
    """The weights that a stage reads, tied ones included, split into differentiated and frozen ones."""

    trainable: Nested
    frozen: Nested


class StageGradients(NamedTuple):
    """The result of a stage's backward pass: its gradients, and the cotangent of its input."""

    grads: Nested
    ct: Cotangent


# cotangent of the stage's output -> StageGradients.
StagePull = Callable[[Cotangent], StageGradients]


class StageForward(NamedTuple):
    """The result of a stage's forward pass.

    Attributes:
        output: output of the stage; for the last stage, the loss.
        out: metrics and buffers.
        pull: the stage's backward pass.
    """

    output: Carry
    out: Out
    pull: StagePull


@dataclass(frozen=True)
class StagePass:
    """One pass through a model's stages.

    Attributes:
        model: a chain of stages.
        mesh: the device mesh of the layout.
        specs: specs of the parameters that each stage reads, by stage and path.
        offloads: whether residuals of layers go to host memory, for stacks that are not split into ranges.
        weights: the groups "parameter" and "frozen".
        ctx: the context of the batch.
        buffers: the model's buffers, by stage.
    """

    model: Chain
    mesh: Mesh
    specs: StageSpecs
    offloads: bool
    weights: BackwardState
    ctx: Context
    buffers: Nested

    @staticmethod
    def build(
        model: Chain, layout: StateLayout, memory: Memory, weights: BackwardState, ctx: Context, buffers: Nested
    ) -> StagePass:
        """Create the pass of a batch; the arguments are those of `backward.forward`."""
        specs = model.stage_specs(layout.specs["parameter"], layout.specs["frozen"])
        return StagePass(model, layout.mesh, specs, memory.activations.offloads_everything, weights, ctx, buffers)

    def inputs(self, name: str, carry: Carry) -> StageWeights:
        """Fetch a stage's parameters, tied ones included, to the device once `carry` is ready."""
        stage_weights = {}
        for group in ("parameter", "frozen"):
            params = self.weights[group]
            stage_weights[group] = with_tied_weights(self.model.ties, name, params.get(name, {}), flatten(params))
        # The compiler would fetch offloaded weights as early as possible. So each is read at an index that is not
        # known before `carry` is ready.
        first, _ = jax.lax.optimization_barrier((jnp.int32(0), carry))
        trainable = self._fetch_weights(name, stage_weights["parameter"], first)
        frozen = self._fetch_weights(name, stage_weights["frozen"], first)
        return StageWeights(trainable, frozen)

    def _fetch_weights(self, name: str, weights: Nested, first: jax.Array) -> Nested:
        """Return a stage's weights on the device; `first` is a zero that the compiler cannot constant-fold."""
        device_leaves = {}
        for path, leaf in flatten(weights).items():
            spec = self.specs[name][path]
            if spec.memory_kind != "device":
                # Viewed as a stack of one and indexed: a plain copy would not depend on the index.
                leaf = fetch_leaf(spec, slice_layer(leaf[None], first))
            device_leaves[path] = leaf
        return unflatten(device_leaves)

    def forward(self, name: str, carry: Carry) -> StageForward:
        """Run a stage outside the stacks."""
        buffers = self.buffers.get(name, {})
        trainable, frozen = self.inputs(name, carry)

        def run(params: Nested, carry: Carry) -> tuple[Carry, Out]:
            return run_stage(self.model, name, merge(params, frozen), carry, self.ctx, buffers)

        y, pull, out = jax.vjp(run, trainable, carry, has_aux=True)
        return StageForward(y, out, lambda ct: StageGradients(*pull(ct)))

    def resolve_ties(self, name: str, grads: Nested, tie_grads: dict[str, jax.Array]) -> TiedGradients:
        """Assign gradients of tied weights to their home stage.

        Args:
            name: name of the stage.
            grads: the stage's gradients, including those of tied weights.
            tie_grads: sums of the gradients of tied weights, by the path of the home parameter.

        Returns:
            The gradients of the parameters that belong to this stage, sharded like them, and the gradients of tied
            weights whose home stage is still to come.
        """
        tied = split_tied(self.model.ties, name, grads, tie_grads)
        # The backward pass runs head first, and a home stage precedes its readers, so all gradients for this stage
        # are complete.
        tied = add_tied(name, tied)
        return tied._replace(grads=self.shard_gradients(name, tied.grads))

    def shard_gradients(self, name: str, grads: Nested) -> Nested:
        """Constrain gradients of a stage, or of one layer of a stack, to the shardings of their parameters."""
        specs = self.specs[name]
        sharded_grads = {}
        for path, grad in flatten(grads).items():
            sharded_grads[path] = shard_as_parameter(grad, specs[path].mesh_axes, self.mesh)
        return unflatten(sharded_grads)
