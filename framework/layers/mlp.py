"""The feed-forward block: plain (GELU, ReLU^2) or gated (SwiGLU and related, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from plimsoll.framework.config import Config, PositiveInt, component, config_for
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, Out
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layout import Nested

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    # So et al. 2021, arXiv 2109.08668.
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


@component
class MLP(Layer):
    """Computes down(act(up(x))), or gated: down(act(gate(x)) * up(x)).

    Args:
        dim: D, the width of the residual stream; set by the parent.
        hidden: F, the inner width.
        activation: "gelu" is exact, "gelu_tanh" is the approximation that GPT-2 uses; "silu" with `gated` is SwiGLU.
        gated: whether there is a gate.
        linear: config of the projections (bias, init); their sizes are filled in.
        output_init_scale: factor on the initial `down` weight; set by the stack.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        hidden: PositiveInt,
        activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"] = "gelu_tanh",
        gated: bool = False,
        linear: Config = config_for(Linear),
        output_init_scale: float = 1.0,
    ):
        # F is sharded over the model axis and D over fsdp, in both directions.
        in_options = {"inputs": dim, "outputs": hidden, "mesh_axes": ("fsdp", "model"), "roles": ("in", "hidden")}
        out_options = {"inputs": hidden, "outputs": dim, "mesh_axes": ("model", "fsdp"), "roles": ("hidden", "out")}
        self.activation = ACTIVATIONS[activation]
        self.gate: Linear | None = linear.instantiate(**in_options) if gated else None
        self.up: Linear = linear.instantiate(**in_options)
        self.down: Linear = linear.instantiate(init_scale=output_init_scale, **out_options)

    def children(self) -> dict[str, Layer]:
        """Return up and down, and gate when gated."""
        gate: dict[str, Layer] = {} if self.gate is None else {"gate": self.gate}
        return {**gate, "up": self.up, "down": self.down}

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Apply the block to x_BSD and return [B, S, D]."""
        ctx = ctx.share_inputs()

        def hidden(layer: Linear, name: str) -> jax.Array:
            with jax.named_scope(name):
                h_BSF = layer(weights[name], carry, ctx)
                h_BSF = ctx.constrain(h_BSF, BATCH_AXES, "seq", "model")
            return checkpoint_name(h_BSF, f"mlp_{name}")

        up_BSF = hidden(self.up, "up")
        # The activation's intermediates would take more memory than its input, see `save_inputs`.
        if self.gate is None:
            h_BSF = save_inputs(self.activation)(up_BSF)
        else:
            gate_BSF = hidden(self.gate, "gate")
            h_BSF = save_inputs(lambda gate, up: self.activation(gate) * up)(gate_BSF, up_BSF)
        with jax.named_scope("down"):
            y_BSD = checkpoint_name(self.down(weights["down"], h_BSF, ctx), "mlp_down")
            return ctx.constrain_hidden(y_BSD), Out()
