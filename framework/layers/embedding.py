"""The first stage of a language model: token embeddings, and learned positions if the model has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config, Fraction, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.base import VOCAB_AXES, Context, Layer, Out, add_shared
from plimsoll.framework.layers.lookup import look_up
from plimsoll.framework.layout import Nested, ParameterSpec


@component
class Embedding(Layer):
    """Embeds tokens as x_BSD.

    Args:
        vocab_size: V, the number of token embeddings; set by the model.
        dim: D, the width of the residual stream; set by the model.
        max_positions: number of learned positions; None for models without them (rotary).
        scale: factor on the token embeddings (Gemma: sqrt(D)); None for no scaling.
        dropout: dropout rate on the sum of embeddings, in training.
        init: config of the initializer of both tables.
    """

    def __init__(
        self,
        *,
        vocab_size: PositiveInt,
        dim: PositiveInt,
        max_positions: PositiveInt | None = None,
        scale: PositiveFloat | None = None,
        dropout: Fraction = 0.0,
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
    ):
        self.vocab_size = vocab_size
        self.dim = dim
        self.max_positions = max_positions
        self.scale = scale
        self.dropout = dropout
        self._init = init.instantiate()

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of token [V, D] and, if there are learned positions, position [max_positions, D]."""
        specs = {
            "token": ParameterSpec(
                (self.vocab_size, self.dim),
                "float32",
                (VOCAB_AXES, "fsdp"),
                initializer=self._init,
                roles=("vocab", "out"),
            )
        }
        if self.max_positions is not None:
            specs["position"] = ParameterSpec(
                (self.max_positions, self.dim),
                "float32",
                (None, "fsdp"),
                initializer=self._init,
                roles=("position", "out"),
            )
        return specs

    def check_length(self, seq_len: int) -> None:
        """Raise ValueError if sequences are longer than the number of positions."""
        if self.max_positions is not None and seq_len > self.max_positions:
            raise ValueError(f"data.seq_len = {seq_len} exceeds model.embed.max_positions = {self.max_positions}")

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Return the tables as they are stored, neither cast nor gathered."""
        # Casting and moving only the rows that are looked up is cheaper: they are fewer than the rows of the tables.
        return {name: params[name] for name in self.param_specs()}

    def apply(self, weights: Nested, carry: None, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """Look up ctx.batch["tokens"] int32[B, S]: x_BSD in the compute dtype."""
        tokens_BS = ctx.batch["tokens"]
        specs = self.param_specs()
        x_BSD = look_up(weights["token"], tokens_BS, ctx, specs["token"])
        if self.scale is not None:
            # The scale is rounded to the compute dtype, as transformers does for Gemma.
            x_BSD = x_BSD * jnp.asarray(self.scale, x_BSD.dtype)
        if self.max_positions is not None:
            positions_BS = ctx.batch.get("positions")
            if positions_BS is not None:
                x_BSD = x_BSD + look_up(weights["position"], positions_BS, ctx, specs["position"])
            else:
                # Every row has the positions 0, 1, ..., so this is a slice, whose gradient needs no scatter.
                table_SD = ctx.constrain(weights["position"][: x_BSD.shape[1]], None, None)
                x_BSD = add_shared(x_BSD, table_SD)
        x_BSD = ctx.dropout(x_BSD, self.dropout, "embedding")
        return ctx.constrain_hidden(x_BSD), Out()
