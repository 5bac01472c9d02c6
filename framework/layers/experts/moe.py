"""MoE: a router, its experts, and shared experts that process all tokens. In a block it replaces the MLP."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer, Out, check_axis
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layout import Nested


@component
class MoE(Layer):
    """A sparse mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): shared(x) + sum_k share_k expert_k(x).

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_experts: E, the number of experts.
        router: config of a `Router`.
        experts: config of `Experts`.
        shared: config of an `MLP` that processes all tokens (DeepSeekMoE, arXiv 2401.06066; for several shared
            experts, add up the hidden widths); none by default.
        shared_gate: config of a `Linear` to one number, whose sigmoid multiplies the result of `shared` (Qwen2-MoE,
            arXiv 2407.10671); none by default.
        output_init_scale: factor on the initial weight of each branch's last projection; set by the stack.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_experts: PositiveInt,
        router: Config = config_for(Router),
        experts: Config = config_for(Experts),
        shared: Config | None = None,
        shared_gate: Config | None = None,
        output_init_scale: float = 1.0,
    ):
        self.router: Router = router.instantiate(dim=dim, num_experts=num_experts)
        self.experts: Experts = experts.instantiate(
            dim=dim, num_experts=num_experts, top_k=self.router.top_k, output_init_scale=output_init_scale
        )
        self.shared: MLP | None = None
        if shared is not None:
            self.shared = shared.instantiate(dim=dim, output_init_scale=output_init_scale)
        self.shared_gate: Linear | None = None
        if shared_gate is not None:
            if shared is None:
                raise ValueError("shared_gate needs shared, whose result it multiplies")
            self.shared_gate = shared_gate.instantiate(inputs=dim, outputs=1)

    def children(self) -> dict[str, Layer]:
        """Return router and experts, and shared and shared_gate if there are any."""
        children: dict[str, Layer] = {"router": self.router, "experts": self.experts}
        if self.shared is not None:
            children["shared"] = self.shared
        if self.shared_gate is not None:
            children["shared_gate"] = self.shared_gate
        return children

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the `expert` axis does not divide the number of experts."""
        check_axis(mesh, "expert", "num_experts", self.experts.num_experts)

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Apply the mixture to x_BSD and return [B, S, D].

        The router's losses are returned as loss, and its load statistics as metrics.
        """
        with jax.named_scope("router"):
            routing = self.router(weights["router"], carry, ctx, layer_state.get("router", {}))
        with jax.named_scope("experts"):
            y_BSD, is_kept_BSK = self.experts(weights["experts"], carry, routing.choice, ctx)
        metrics = dict(routing.metrics)
        if ctx.training and is_kept_BSK is not None:
            assert ctx.num_targets is not None, "metrics are means over targets"
            # A token counts by the share of its choices that were dropped.
            dropped_BS = 1.0 - jnp.mean(is_kept_BSK, axis=-1, dtype=jnp.float32)
            weights_BS = ctx.batch["weights"]
            metrics["dropped"] = jnp.sum(dropped_BS * weights_BS) / ctx.num_targets
        new_state = {"router": routing.buffers} if routing.buffers else {}
        out = Out(loss=routing.loss, metrics=metrics, layer_state=new_state)
        if self.shared is not None:
            with jax.named_scope("shared"):
                shared_BSD, shared_out = self.shared.apply(weights["shared"], carry, ctx.fold("shared"), {})
            if self.shared_gate is not None:
                with jax.named_scope("shared_gate"):
                    gate_BS1 = self.shared_gate(weights["shared_gate"], carry, ctx)
                    shared_BSD = save_inputs(lambda y, gate: y * jax.nn.sigmoid(gate))(shared_BSD, gate_BS1)
            y_BSD = y_BSD + shared_BSD
            assert replace(shared_out, metrics={}) == Out(), "an MLP has neither losses nor buffers"
        return ctx.constrain_hidden(y_BSD), out
