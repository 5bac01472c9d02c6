"""The small nets inside couplings: convolutions, or attention over the positions.

They need no inverse. Their last layer starts at zero, so that a coupling starts as the identity (Glow, arXiv
1807.03039).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config, Fraction, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layout import Nested, ParameterSpec, nearest_divisors


@component
class Conv(Layer):
    """A convolution with "same" padding and a bias.

    Args:
        inputs, outputs: numbers of channels.
        kernel: side length of the kernel.
        zero: whether the weight starts at zero; otherwise it is initialized as in He et al. 2015 (arXiv 1502.01852).
    """

    def __init__(self, *, inputs: PositiveInt, outputs: PositiveInt, kernel: PositiveInt = 3, zero: bool = False):
        self.shape = (kernel, kernel, inputs, outputs)
        self.init = jax.nn.initializers.zeros if zero else jax.nn.initializers.he_normal()

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of weight [K, K, inputs, outputs] and bias [outputs]."""
        roles = ("kernel", "kernel", "in", "out")
        return {
            "weight": ParameterSpec(self.shape, "float32", initializer=self.init, roles=roles),
            "bias": ParameterSpec(self.shape[3:], "float32", roles=("out",)),
        }

    def __call__(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """Map [B, H, W, inputs] to [B, H, W, outputs]."""
        return convolve(weights["weight"], x_BHWC) + weights["bias"]

    def flops_per_token(self, seq_len: int) -> float:
        """Count 2 K^2 inputs outputs operations per position."""
        kernel, _, inputs, outputs = self.shape
        return 2.0 * kernel**2 * inputs * outputs


def convolve(weight: jax.Array, x_BHWC: jax.Array) -> jax.Array:
    """Convolve x_BHWC with weight [K, K, C, D]: [B, H, W, D], with zero padding around x.

    This is one matrix product: of the concatenated channels of all neighbors, or, if D is less than C, with the
    results for all neighbors concatenated.
    """
    # In the loop over a stack, XLA for CPU runs its convolutions ten times slower than outside.
    size, _, inputs, outputs = weight.shape
    _, height, width, _ = x_BHWC.shape
    # "Same" padding of an even kernel has one more zero at the end.
    margin = ((size - 1) // 2, size // 2)
    corners = [(i, j) for i in range(size) for j in range(size)]

    def shift_windows(x: jax.Array) -> list[jax.Array]:
        padded = jnp.pad(x, ((0, 0), margin, margin, (0, 0)))
        return [padded[:, i : i + height, j : j + width] for i, j in corners]

    if inputs <= outputs:
        neighbors = jnp.concatenate(shift_windows(x_BHWC), axis=-1)
        return neighbors @ weight.reshape(-1, outputs)
    columns = weight.transpose(2, 0, 1, 3).reshape(inputs, -1)
    products = x_BHWC @ columns
    # Takes a window of the products for each kernel position; only that position's columns are used.
    slices = (y[..., n * outputs : (n + 1) * outputs] for n, y in enumerate(shift_windows(products)))
    return sum(slices)  # type: ignore


def with_coordinates(x_BHWC: jax.Array) -> jax.Array:
    """Add two channels to x: row and column, from -1 to 1 (Liu et al. 2018, arXiv 1807.03247)."""
    batch, height, width, _ = x_BHWC.shape
    rows = jnp.linspace(-1, 1, height)
    columns = jnp.linspace(-1, 1, width)
    grid = jnp.meshgrid(rows, columns, indexing="ij")
    grid_HW2 = jnp.stack(grid, axis=-1).astype(x_BHWC.dtype)
    coordinates = jnp.broadcast_to(grid_HW2, (batch, height, width, 2))
    return jnp.concatenate([x_BHWC, coordinates], axis=-1)


@component
class ConvNet(Layer):
    """Convolution, 1x1 convolution, convolution, with GELU in between, as in Glow.

    Args:
        inputs, outputs: numbers of channels; set by the coupling.
        hidden: number of inner channels.
        kernel: side length of the first and the last kernel.
        dropout: dropout rate on the hidden channels, in training.
    """

    def __init__(
        self,
        *,
        inputs: PositiveInt,
        outputs: PositiveInt,
        hidden: PositiveInt = 64,
        kernel: PositiveInt = 3,
        dropout: Fraction = 0.0,
    ):
        self.dropout = dropout
        # Two more inputs for the coordinates.
        self.first = Conv(inputs=inputs + 2, outputs=hidden, kernel=kernel)
        self.middle = Conv(inputs=hidden, outputs=hidden, kernel=1)
        self.last = Conv(inputs=hidden, outputs=outputs, kernel=kernel, zero=True)

    def children(self) -> dict[str, Layer]:
        """Return the three convolutions."""
        return {"first": self.first, "middle": self.middle, "last": self.last}

    def __call__(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """Map [B, H, W, inputs] to [B, H, W, outputs]."""
        net_input = with_coordinates(x_BHWC)
        h = jax.nn.gelu(self.first(weights["first"], net_input, ctx))
        h = jax.nn.gelu(self.middle(weights["middle"], h, ctx))
        h = ctx.dropout(h, self.dropout, "hidden")
        return self.last(weights["last"], h, ctx)


@component
class AttentionNet(Layer):
    """A transformer block over all positions, without a mask.

    Args:
        inputs, outputs: numbers of channels; set by the coupling.
        hidden: width of the block.
        num_heads: number of heads; divides hidden.
        mlp: config of the block's second branch.
        dropout: dropout rate on each branch's output, in training.
    """

    def __init__(
        self,
        *,
        inputs: PositiveInt,
        outputs: PositiveInt,
        hidden: PositiveInt = 64,
        num_heads: PositiveInt = 4,
        mlp: Config = config_for(MLP, hidden=128),
        dropout: Fraction = 0.0,
    ):
        if hidden % num_heads:
            raise ValueError(
                f"num_heads = {num_heads} does not divide hidden = {hidden}; "
                f"nearest: {nearest_divisors(hidden, num_heads)}"
            )
        self.num_heads = num_heads
        self.hidden = hidden
        self.dropout = dropout
        lecun = config_for(jax.nn.initializers.lecun_normal)
        zeros = config_for(jax.nn.initializers.constant, value=0.0)
        self.layers: dict[str, Any] = {
            "first": Linear(inputs=inputs + 2, outputs=hidden, bias=True, init=lecun),
            "attention_norm": RMSNorm(dim=hidden),
            "query": Linear(inputs=hidden, outputs=hidden, init=lecun),
            "key": Linear(inputs=hidden, outputs=hidden, init=lecun),
            "value": Linear(inputs=hidden, outputs=hidden, init=lecun),
            "output": Linear(inputs=hidden, outputs=hidden, init=lecun),
            "mlp_norm": RMSNorm(dim=hidden),
            "mlp": mlp.instantiate(dim=hidden),
            "last_norm": RMSNorm(dim=hidden),
            "last": Linear(inputs=hidden, outputs=outputs, bias=True, init=zeros),
        }

    def children(self) -> dict[str, Layer]:
        """Return the embedding (first), the block, and the last projection."""
        return self.layers

    def __call__(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """Map [B, H, W, inputs] to [B, H, W, outputs]."""

        def run(name: str, x: jax.Array) -> jax.Array:
            return self.layers[name](weights[name], x, ctx)

        batch, height, width, _ = x_BHWC.shape
        positions = height * width
        x_BSD = with_coordinates(x_BHWC).reshape(batch, positions, -1)
        h_BSD = run("first", x_BSD)
        normed_BSD = run("attention_norm", h_BSD)
        q = run("query", normed_BSD).reshape(batch, positions, self.num_heads, -1)
        k = run("key", normed_BSD).reshape(batch, positions, self.num_heads, -1)
        v = run("value", normed_BSD).reshape(batch, positions, self.num_heads, -1)
        # Images are small, so all logits can exist at once and no kernel is needed.
        logits_BNST = jnp.einsum("bsnh,btnh->bnst", q, k) * q.shape[-1] ** -0.5
        mix_BNST = jax.nn.softmax(logits_BNST, axis=-1)
        mixed_values = jnp.einsum("bnst,btnh->bsnh", mix_BNST, v).reshape(h_BSD.shape)
        attended = run("output", mixed_values)
        h_BSD = h_BSD + ctx.dropout(attended, self.dropout, "attention")
        mlp_input = run("mlp_norm", h_BSD)
        mlp_output, _ = self.layers["mlp"].apply(weights["mlp"], mlp_input, ctx, {})
        h_BSD = h_BSD + ctx.dropout(mlp_output, self.dropout, "mlp")
        y_BSD = run("last", run("last_norm", h_BSD))
        return y_BSD.reshape(batch, height, width, -1)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the projections, and 4 * hidden operations per attended position."""
        return super().flops_per_token(seq_len) + 4.0 * self.hidden * seq_len
