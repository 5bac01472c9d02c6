"""Linear: y = x W + b, with the product in the form that XLA computes fast on each type of device."""

from __future__ import annotations

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, PositiveInt, component, config_for
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, add_shared, batch_shards
from plimsoll.framework.layers.block_scaling import Partition
from plimsoll.framework.layers.custom_gradients import dense_cotangent
from plimsoll.framework.layers.low_precision import Recipe, multiply
from plimsoll.framework.layers.scale_history import HISTORY, history_spec
from plimsoll.framework.layout import WEIGHT_AXES, MeshAxes, ParameterSpec, axis_names, fit_axes, fold_in_name


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
        # Set by `model.precision`: the recipe of the product, and the path that names the noise of its rounding.
        self.recipe: Recipe | None = None
        self.path = ""

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of weight [inputs, outputs], bias [outputs] and, with delayed scaling, the history."""

        def initializer(key, shape, dtype):
            return self._scale * self._init(key, shape, dtype)

        weight = ParameterSpec(
            (self.inputs, self.outputs),
            "float32",
            self.mesh_axes,
            initializer=initializer,
            roles=self.roles,
            num_heads=self.num_heads,
            gathered_as_fp8=self.recipe is not None and self.recipe.is_idempotent,
        )
        specs = {"weight": weight}
        if self.bias:
            specs["bias"] = ParameterSpec((self.outputs,), "float32", self.mesh_axes[1:], roles=self.roles[1:])
        if self.recipe is not None and self.recipe.delayed:
            specs[HISTORY] = history_spec()
        return specs

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the mesh splits a block of numbers that share a scale."""
        if self.recipe is None or self.recipe.blocks is None:
            return
        blocks = self.recipe.blocks
        # Rows and positions become one axis of tokens, which XLA can only shard by rows.
        if mesh.shape["seq"] > 1 and not blocks.in_shards:
            raise ValueError(f"mesh.seq = {mesh.shape['seq']}: expected 1 with model.precision = {blocks.name}")
        for axes, size in zip(self.mesh_axes, (self.inputs, self.outputs), strict=True):
            for name in axis_names(axes):
                # A device has the whole weight along these axes before it is rounded.
                is_split = not (blocks.in_shards and name in WEIGHT_AXES)
                if is_split and size // mesh.shape[name] % blocks.size:
                    raise ValueError(
                        f"mesh.{name} = {mesh.shape[name]} splits the blocks of {blocks.size} numbers of {self.path}, "
                        f"which has an axis of {size} (model.precision = {blocks.name})"
                    )

    def __call__(self, weights: dict[str, jax.Array], x: jax.Array, ctx: Context) -> jax.Array:
        """Map x [..., inputs] to [..., outputs], in x's dtype."""
        if self.recipe is None:
            y = project(x, weights["weight"], ctx)
        else:
            key = None
            if self.recipe.stochastic and ctx.rng is not None:
                key = fold_in_name(ctx.rng, self.path)
            y = multiply(
                x,
                weights["weight"],
                key,
                self.recipe,
                ctx.platform,
                ctx.rounded_inputs,
                history=weights.get(HISTORY),
                partition=self._divide(x, ctx),
            )
        return add_shared(y, weights["bias"]) if self.bias else y

    def _divide(self, x: jax.Array, ctx: Context) -> Partition | None:
        """Return the devices that share the product; None if there is only one, or XLA partitions it."""
        mesh = ctx.mesh
        is_divided = self.recipe is not None and self.recipe.blocks is not None and self.recipe.blocks.in_shards
        # With other kernels, this is a trace of one device's share.
        if not is_divided or mesh is None or mesh.size == 1 or ctx.kernels is not None:
            return None
        # The rows of a generation may be fewer than the devices, and its single token cannot be sharded over seq: these
        # devices compute the same.
        axes: list[str | tuple[str, ...] | None] = [None] * (x.ndim - 1)
        if x.shape[0] % batch_shards(mesh.shape) == 0:
            axes[0] = BATCH_AXES
        if x.ndim > 2 and x.shape[1] % mesh.shape["seq"] == 0:
            axes[1] = "seq"
        weight_axes = fit_axes(self.mesh_axes, (self.inputs, self.outputs), mesh.shape)
        return Partition(mesh, tuple(axes), weight_axes)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the matrix product: 2 * inputs * outputs."""
        return 2.0 * self.inputs * self.outputs


def project(x: jax.Array, weight: jax.Array, ctx: Context) -> jax.Array:
    """Return x [..., inputs] @ weight [inputs, outputs], in x's dtype.

    On a single CPU device, the gradient of the weight is one product of matrices [tokens, inputs] and [tokens,
    outputs], in the layout in which the weight is stored. JAX's own rule computes the transposed gradient and
    transposes the result. XLA for CPU then transposes the input or the cotangent instead, element by element,
    recomputes everything that produced it, and multiplies in an order for which Eigen takes up to three times as
    long.
    """
    # With tokens on several devices, they are not one axis of a matrix.
    on_one_cpu = ctx.platform == "cpu" and (ctx.mesh is None or ctx.mesh.size == 1)
    # A vector has no token axis, and products of mixed dtypes are left to JAX's type promotion.
    if on_one_cpu and x.dtype == weight.dtype and x.ndim > 1:
        return _project(x, weight)
    return x @ weight


@jax.custom_vjp
def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def _project_forward(
    x: CustomVJPPrimal, weight: CustomVJPPrimal
) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
    """Return the product, and the inputs that the gradients need: a frozen weight, for example, needs no x."""
    # With symbolic_zeros, each argument has a flag that tells whether it is differentiated.
    weight_residual = weight.value if x.perturbed else None
    x_residual = x.value if weight.perturbed else None
    return x.value @ weight.value, (x_residual, weight_residual)


def _project_backward(
    residuals: tuple[jax.Array | None, jax.Array | None], y_grad: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, jax.Array | None]:
    x, weight = residuals
    grad = dense_cotangent(y_grad)
    x_grad = None
    weight_grad = None
    if weight is not None:
        over_outputs = (((grad.ndim - 1,), (1,)), ((), ()))
        x_grad = jax.lax.dot_general(grad, weight, over_outputs)
    if x is not None:
        x_TD = x.reshape(-1, x.shape[-1])
        grad_TF = grad.reshape(-1, grad.shape[-1])
        over_tokens = (((0,), (0,)), ((), ()))
        # The wider factor comes second: Eigen is slow at packing the first one transposed.
        if x_TD.shape[1] > grad_TF.shape[1]:
            weight_grad = jax.lax.dot_general(grad_TF, x_TD, over_tokens).T
        else:
            weight_grad = jax.lax.dot_general(x_TD, grad_TF, over_tokens)
    return x_grad, weight_grad


_project.defvjp(_project_forward, _project_backward, symbolic_zeros=True)
