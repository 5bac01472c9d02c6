"""Linear: y = x W + b."""

from __future__ import annotations

import jax

from plimsoll.framework.config import Config, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer, add_shared
from plimsoll.framework.layers.products import project
from plimsoll.framework.layout import MeshAxes, ParameterSpec


@component
class Linear(Layer):
    """Applies an affine map to the last axis.

    Args:
        inputs: size of the input's last axis.
        outputs: size of the output's last axis.
        bias: whether to add a bias.
        init: config of the initializer of the weight; biases start at zero.
        init_scale: factor on the initial weight (residual branches of deep stacks need less than 1).
        mesh_axes: mesh axes of the weight's (input, output) dimensions.
        roles: roles of these two dimensions.
        num_heads: number of heads, for projections to queries and keys; set by the parent.
    """

    def __init__(
        self,
        *,
        inputs: PositiveInt,
        outputs: PositiveInt,
        bias: bool = False,
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
        init_scale: float = 1.0,
        mesh_axes: tuple[str | None, str | None] = (None, None),
        roles: tuple[str, str] = ("in", "out"),
        num_heads: PositiveInt | None = None,
    ):
        self.inputs = inputs
        self.outputs = outputs
        self.bias = bias
        self.mesh_axes: MeshAxes = tuple(mesh_axes)
        self.roles = tuple(roles)
        self.num_heads = num_heads
        self._init = init.instantiate()
        self._scale = init_scale

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of weight [inputs, outputs] and bias [outputs]."""

        def initializer(key, shape, dtype):
            return self._scale * self._init(key, shape, dtype)

        weight = ParameterSpec(
            (self.inputs, self.outputs),
            "float32",
            self.mesh_axes,
            initializer=initializer,
            roles=self.roles,
            num_heads=self.num_heads,
        )
        if not self.bias:
            return {"weight": weight}
        bias = ParameterSpec((self.outputs,), "float32", self.mesh_axes[1:], roles=self.roles[1:])
        return {"weight": weight, "bias": bias}

    def __call__(self, weights: dict[str, jax.Array], x: jax.Array, ctx: Context) -> jax.Array:
        """Map x [..., inputs] to [..., outputs], in x's dtype."""
        y = project(x, weights["weight"], ctx)
        return add_shared(y, weights["bias"]) if self.bias else y

    def flops_per_token(self, seq_len: int) -> float:
        """Count the matrix product: 2 * inputs * outputs."""
        return 2.0 * self.inputs * self.outputs
