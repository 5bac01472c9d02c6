"""Layers with everything a stack carries besides activations: buffers, losses, metrics, RNG streams, shared weights."""

import jax
import jax.numpy as jnp

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layout import Nested, ParameterSpec, TensorSpec


class Centering(Layer):
    """x - scale * m, where m is a running mean of x over batch and positions, kept in a buffer.

    Args:
        dim: width D, set by the parent.
        rate: update rate of the running mean.
        penalty: weight of the auxiliary loss, the sum of squares of the output divided by the number of targets.
        output_init_scale: set by the stack; not used here.
    """

    def __init__(self, *, dim: int, rate: float = 0.5, penalty: float = 1e-3, output_init_scale: float = 1.0):
        self.dim, self.rate, self.penalty = dim, rate, penalty

    def param_specs(self) -> dict[str, ParameterSpec]:
        """scale [D], ones."""
        return {
            "scale": ParameterSpec((self.dim,), "float32", initializer=jax.nn.initializers.ones, roles=("channel",))
        }

    def layer_buffer_specs(self) -> dict[str, TensorSpec]:
        """mean [D], and count, the number of updates."""
        return {"mean": TensorSpec((self.dim,), "float32"), "count": TensorSpec((), "int32")}

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """x_BSD -> x_BSD; subtracts the mean from before this batch."""
        assert ctx.num_targets is not None
        seen = jax.lax.stop_gradient(jnp.mean(carry.astype(jnp.float32), axis=(0, 1)))
        mean, count = layer_state["mean"], layer_state["count"]
        y = carry - (weights["scale"] * mean).astype(carry.dtype)
        loss = self.penalty * jnp.sum(jnp.square(y.astype(jnp.float32))) / ctx.num_targets
        state = {"mean": mean + self.rate * (seen - mean), "count": count + 1}
        return y, Out(loss=loss, metrics={"penalty": loss}, layer_state=state)


class Recurrent(Layer):
    """x + the states of a GRU (Cho et al. 2014, arXiv 1406.1078) over positions, with dropout on the hidden state."""

    def __init__(self, *, dim: int, dropout: float = 0.1, output_init_scale: float = 1.0):
        self.dim, self.dropout = dim, dropout

    def param_specs(self) -> dict[str, ParameterSpec]:
        """input and hidden [D, 3D] (update, reset, candidate), bias [3D]."""
        normal, shape = jax.nn.initializers.normal(0.3), (self.dim, 3 * self.dim)
        matrix = ParameterSpec(shape, "float32", ("fsdp", "model"), initializer=normal, roles=("in", "out"))
        bias = ParameterSpec(shape[1:], "float32", ("model",), initializer=normal, roles=("out",))
        return {"input": matrix, "hidden": matrix, "bias": bias}

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """x_BSD -> x_BSD; each position has its own dropout mask."""

        def cell(h_BD: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            position, x_BE = xs
            (update, reset, new), (more, reset_h, new_h) = (
                jnp.split(gates, 3, axis=-1) for gates in (x_BE, h_BD @ weights["hidden"])
            )
            update, new = jax.nn.sigmoid(update + more), jnp.tanh(new + jax.nn.sigmoid(reset + reset_h) * new_h)
            h_BD = update * h_BD + (1.0 - update) * new
            h_BD = ctx.fold_index(position).dropout(h_BD, self.dropout, "hidden")
            return h_BD, h_BD

        x_SBE = jnp.moveaxis(carry @ weights["input"] + weights["bias"], 1, 0)
        _, h_SBD = jax.lax.scan(cell, jnp.zeros_like(carry[:, 0]), (jnp.arange(carry.shape[1]), x_SBE))
        return carry + jnp.moveaxis(h_SBD, 0, 1), Out()


class Twins(Layer):
    """x + two branches with the same child and separate masks, minus a running mean; also an auxiliary loss."""

    def __init__(self, *, dim: int, dropout: float = 0.1, output_init_scale: float = 1.0):
        self.dim, self.dropout = dim, dropout
        init = config_for(jax.nn.initializers.normal, stddev=0.2)
        self.child = Linear(inputs=dim, outputs=dim, bias=True, init=init, mesh_axes=("fsdp", "model"))

    def children(self) -> dict[str, Layer]:
        """Return the only child, which is called twice."""
        return {"child": self.child}

    def layer_buffer_specs(self) -> dict[str, TensorSpec]:
        """mean [D] in float64, the compute dtype of the exact comparisons."""
        return {"mean": TensorSpec((self.dim,), "float64")}

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """x_BSD -> x_BSD."""
        y = carry - layer_state["mean"]
        for name, x in (("left", carry), ("right", jnp.flip(carry, -1))):
            y = y + ctx.fold(name).dropout(jnp.tanh(self.child(weights["child"], x, ctx)), self.dropout, "branch")
        seen = jax.lax.stop_gradient(jnp.mean(y, axis=(0, 1)))
        loss = 1e-3 * jnp.sum(jnp.square(y)) / ctx.num_targets
        return y, Out(loss, {"penalty": loss}, {"mean": 0.5 * (layer_state["mean"] + seen)})
