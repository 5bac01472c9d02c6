"""A layer with everything that the stack must carry besides activations: buffers, an auxiliary loss, metrics."""

import jax
import jax.numpy as jnp

from framework.layers.base import Context, Layer, Out
from framework.layout import Nested, ParameterSpec, TensorSpec


class Centering(Layer):
    """x - scale * m, where m is a running mean of x over batch and positions, kept in a buffer.

    Args:
        dim: D, given by the parent.
        rate: of the running mean.
        penalty: weight of the auxiliary loss, the sum of squares of what leaves, by counted target.
        output_init_scale: given by the stack; of no use here.
    """

    def __init__(self, *, dim: int, rate: float = 0.5, penalty: float = 1e-3, output_init_scale: float = 1.0):
        self.dim, self.rate, self.penalty = dim, rate, penalty

    def own_specs(self) -> dict[str, ParameterSpec]:
        """scale [D], ones."""
        return {
            "scale": ParameterSpec((self.dim,), "float32", initializer=jax.nn.initializers.ones, roles=("channel",))
        }

    def own_buffers(self) -> dict[str, TensorSpec]:
        """mean [D], and how often it was updated."""
        return {"mean": TensorSpec((self.dim,), "float32"), "count": TensorSpec((), "int32")}

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        """x_BSD -> x_BSD; the mean that is taken off is the one before this batch."""
        assert ctx.num_targets is not None
        seen = jax.lax.stop_gradient(jnp.mean(carry.astype(jnp.float32), axis=(0, 1)))
        mean, count = layer_state["mean"], layer_state["count"]
        y = carry - (weights["scale"] * mean).astype(carry.dtype)
        loss = self.penalty * jnp.sum(jnp.square(y.astype(jnp.float32))) / ctx.num_targets
        state = {"mean": mean + self.rate * (seen - mean), "count": count + 1}
        return y, Out(loss=loss, metrics={"penalty": loss}, layer_state=state)
