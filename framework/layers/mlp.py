"""The feed-forward block: plain (GELU, ReLU^2) or gated (SwiGLU and related, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, NonNegativeInt, PositiveInt, component, config_for
from plimsoll.framework.layers import grad_accumulation
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, Out, batch_shards
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
        chunk_tokens: maximum number of tokens per device whose hidden units exist at once; 0 means all. If there are
            more tokens, the block runs for a part of each row at a time, and the backward pass computes the hidden
            units of each part again, whatever memory.remat saves. For long rows ("TiledMLP", arXiv 2506.13996).
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
        chunk_tokens: NonNegativeInt = 0,
    ):
        # F is sharded over the model axis and D over fsdp, in both directions.
        in_options = {"inputs": dim, "outputs": hidden, "mesh_axes": ("fsdp", "model"), "roles": ("in", "hidden")}
        out_options = {"inputs": hidden, "outputs": dim, "mesh_axes": ("model", "fsdp"), "roles": ("hidden", "out")}
        self.activation = ACTIVATIONS[activation]
        self.chunk_tokens = chunk_tokens
        self.gate: Linear | None = linear.instantiate(**in_options) if gated else None
        self.up: Linear = linear.instantiate(**in_options)
        self.down: Linear = linear.instantiate(init_scale=output_init_scale, **out_options)

    def children(self) -> dict[str, Layer]:
        """Return up and down, and gate when gated."""
        gate: dict[str, Layer] = {} if self.gate is None else {"gate": self.gate}
        return {**gate, "up": self.up, "down": self.down}

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the projections cannot run for a part of the tokens at a time."""
        for projection in (self.up, self.down):
            # The next scale of an array is that of its largest element, not a sum over parts.
            if self.chunk_tokens and projection.recipe is not None and projection.recipe.delayed:
                raise ValueError(
                    f"chunk_tokens = {self.chunk_tokens} of an MLP: expected 0 with model.precision = fp8_delayed, "
                    "which rounds all tokens with one scale"
                )

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Apply the block to x_BSD and return [B, S, D]."""
        batch, length, dim = carry.shape
        # In the trace of one device's share, the arrays are that device's.
        sizes = {} if ctx.mesh is None or ctx.kernels is not None else ctx.mesh.shape
        seq_shards = sizes.get("seq", 1)
        count = self._count_chunks(max(1, batch // batch_shards(sizes)) if sizes else batch, length // seq_shards)
        if count == 1:
            return self._run(weights, carry, ctx), Out()
        # A chunk has an equal share of the positions of each device along seq.
        parts = carry.reshape(batch, seq_shards, count, -1, dim)
        chunks = jnp.moveaxis(parts, 2, 0).reshape(count, batch, -1, dim)
        chunks = ctx.constrain(chunks, None, BATCH_AXES, "seq", None)
        taps = grad_accumulation.make_taps(weights)

        @partial(jax.checkpoint, prevent_cse=False)
        def run_chunk(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            index, x_BSD = xs
            return None, self._run(grad_accumulation.attach_taps(weights, taps), x_BSD, ctx.fold_index(index))

        _, outputs = jax.lax.scan(run_chunk, None, (jnp.arange(count), chunks))
        parts = jnp.moveaxis(outputs.reshape(count, batch, seq_shards, -1, dim), 0, 2)
        return ctx.constrain_hidden(parts.reshape(carry.shape)), Out()

    def _count_chunks(self, batch: int, length: int) -> int:
        """Return the number of chunks of a device's positions: the smallest divisor that is large enough.

        Args:
            batch, length: number of rows of a device, and of positions of each.
        """
        if self.chunk_tokens == 0 or length == 0:
            return 1
        min_chunks = min(-(-batch * length // self.chunk_tokens), length)
        return next(count for count in range(max(1, min_chunks), length + 1) if length % count == 0)

    def _run(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """Return the block's result for some positions."""
        ctx = ctx.share_inputs()

        def hidden(layer: Linear, name: str) -> jax.Array:
            with jax.named_scope(name):
                h_BSF = layer(weights[name], x_BSD, ctx)
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
            return ctx.constrain_hidden(y_BSD)
