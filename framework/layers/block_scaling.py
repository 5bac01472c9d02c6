"""Matrix products of 8-bit floats with a scale for each block of numbers: recipes `mxfp8` and `fp8_block`.

Numbers are e4m3, and scales powers of two: the smallest for which no number of a block exceeds 448. Blocks lie along
the axis that a product sums over, so each array is rounded once for each product that it is a factor of:

    y = x W: x and W along inputs      dx = g W^T: g and W along outputs      dW = x^T g: x and g along tokens

`mxfp8` is MXFP8 of the OCP Microscaling Formats (MX) specification 1.0: blocks of 32 numbers. Blackwell's tensor cores
compute these products (`jax.nn.scaled_matmul`).

`fp8_block` is the scaling of DeepSeek-V3 (arXiv 2412.19437, section 3.3): blocks of 128 numbers of x and g, and of
128 x 128 numbers of W, which are the same for y and dx. All else is that of `Float8BlockScaling` of Transformer Engine
2.x: e4m3 for cotangents too, scales that are powers of two, and both forms of x and g rounded from the numbers
themselves. (DeepSeek-V3 has other float32 scales, except for some activations, and converts x from one form to the
other.) GPUs compute these products with a kernel of ours, see `block_kernels_gpu`.

A CPU computes both in float32 from the rounded numbers. For the backward pass, x rounded along tokens is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from plimsoll.framework.layers.block_rounding import Blocks, round_blocks, round_square_blocks
from plimsoll.framework.layers.custom_gradients import dense_cotangent
from plimsoll.framework.layout import (
    WEIGHT_AXES,
    MeshAxes,
    MeshAxis,
    WeightShards,
    axis_names,
    count_shards,
    find_weight_shards,
    get_current_mesh,
)


@dataclass(frozen=True)
class BlockScaling:
    """The blocks of a recipe.

    Attributes:
        name: name of the recipe.
        size: number of numbers along the summed axis that share a scale.
        has_square_weights: whether a scale of a weight covers `size` vectors, too.
        in_shards: whether each device computes products of its shards, as our kernel does. Otherwise XLA partitions
            the products.
    """

    name: str
    size: int
    has_square_weights: bool
    in_shards: bool


MXFP8 = BlockScaling("mxfp8", 32, has_square_weights=False, in_shards=False)
FP8_BLOCK = BlockScaling("fp8_block", 128, has_square_weights=True, in_shards=True)


@dataclass(frozen=True)
class Partition:
    """The devices that share a product x [..., I] @ weight [I, O].

    Attributes:
        mesh: the devices.
        token_axes: mesh axes of x's dimensions before the last one.
        weight_axes: mesh axes of the weight as it is stored. The product has it gathered over WEIGHT_AXES.
    """

    mesh: Mesh
    token_axes: MeshAxes
    weight_axes: MeshAxes

    @property
    def tokens(self) -> tuple[str, ...]:
        """The mesh axes that tokens are divided over."""
        return tuple(name for axes in self.token_axes for name in axis_names(axes))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The mesh axes that inputs are divided over."""
        return _drop_axes(self.weight_axes[0], WEIGHT_AXES)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The mesh axes that outputs are divided over."""
        return _drop_axes(self.weight_axes[1], WEIGHT_AXES)

    def find_scatter(self) -> WeightShards | None:
        """Return the shards that the gradient of the weight is reduce-scattered to; None if there are none."""
        for shards in find_weight_shards(self.weight_axes, self.mesh.shape):
            is_divided_otherwise = bool(_drop_axes(self.weight_axes[shards.dimension], WEIGHT_AXES))
            if not is_divided_otherwise and set(shards.axes) <= set(self.tokens):
                return shards
        return None

    def local_tokens(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the share of a device of x's dimensions before the last one."""
        sizes = []
        for size, axes in zip(shape, self.token_axes, strict=True):
            sizes.append(size // count_shards(axes, self.mesh.shape))
        return tuple(sizes)


@dataclass(frozen=True)
class BlockOptions:
    """The static arguments of a product.

    Attributes:
        scaling: the blocks.
        platform: gpu or cpu.
        partition: the devices; None for one, or if XLA partitions the product.
        interpret: run GPU kernels as JAX operations, on any platform.
    """

    scaling: BlockScaling
    platform: str
    partition: Partition | None = None
    interpret: bool = False

    @property
    def uses_our_kernels(self) -> bool:
        """True on GPUs for blocks that XLA has no products for."""
        return self.platform == "gpu" and self.scaling == FP8_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInput:
    """An input of T tokens, rounded for the products that it is a factor of.

    Attributes:
        by_token: [T, I], for y.
        by_channel: [I, T], for the weight's gradient; None if blocks do not divide T, as in generation.
    """

    by_token: Blocks
    by_channel: Blocks | None


def round_input(x: jax.Array, options: BlockOptions) -> BlockInput:
    """Round an input [..., I] for its products. It has no gradient: that passes by x itself."""

    def run(x: jax.Array) -> BlockInput:
        x_TI = x.reshape(-1, x.shape[-1])
        if x_TI.shape[0] % options.scaling.size:
            return BlockInput(round_blocks(x_TI, options.scaling.size), None)
        return BlockInput(*_round_both(x_TI, options))

    specs = _Specs.make(options.partition)
    rounded = _on_each_device(run, options, (specs.x,), specs.rounded_x)(jax.lax.stop_gradient(x))
    by_channel = jax.tree.map(lambda bits: checkpoint_name(bits, "rounded"), rounded.by_channel)
    return BlockInput(rounded.by_token, by_channel)


def multiply_blocks(x: jax.Array, rounded: BlockInput, weight: jax.Array, options: BlockOptions) -> jax.Array:
    """Return x [..., I] @ weight [I, O] in x's dtype.

    Args:
        x: activations, which `rounded` replaces; it gets their gradient.
        rounded: the result of `round_input`.
        weight: weights.
        options: how the product is computed.
    """
    return _multiply(x, rounded, weight, options)


def _round_both(x_MK: jax.Array, options: BlockOptions) -> tuple[Blocks, Blocks]:
    """Round a matrix for the products that sum over its second axis, and its transpose for those over its first."""
    if options.uses_our_kernels:
        # Here and below: importing Pallas takes a tenth of a second, which every command would otherwise pay.
        from plimsoll.framework.layers.block_kernels_gpu import round_along_both_axes

        return round_along_both_axes(x_MK, options.interpret)
    return round_blocks(x_MK, options.scaling.size), round_blocks(x_MK.T, options.scaling.size)


def _round_weight(weight_IO: jax.Array, options: BlockOptions, transpose: bool) -> Blocks:
    """Round a weight for dx or, transposed, for y."""
    if options.uses_our_kernels:
        from plimsoll.framework.layers.block_kernels_gpu import round_square_tiles

        return round_square_tiles(weight_IO, transpose, options.interpret)
    factor = weight_IO.T if transpose else weight_IO
    rounding = round_square_blocks if options.scaling.has_square_weights else round_blocks
    return rounding(factor, options.scaling.size)


def _drop_axes(axes: MeshAxis, dropped: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in axis_names(axes) if name not in dropped)


@dataclass(frozen=True)
class _Specs:
    """The sharding of the arrays of a product.

    Attributes:
        x, y: activations.
        rounded_x: a BlockInput.
        weight: the gathered weight.
        weight_grad: its gradient.
    """

    x: PartitionSpec
    y: PartitionSpec
    rounded_x: BlockInput
    weight: PartitionSpec
    weight_grad: PartitionSpec

    @staticmethod
    def make(partition: Partition | None) -> _Specs:
        if partition is None:
            nothing = PartitionSpec()
            return _Specs(nothing, nothing, _block_specs(nothing, nothing), nothing, nothing)
        tokens, inputs, outputs = partition.tokens, partition.inputs, partition.outputs
        weight_grad = [inputs, outputs]
        scatter = partition.find_scatter()
        if scatter is not None:
            weight_grad[scatter.dimension] = scatter.axes
        return _Specs(
            x=PartitionSpec(*partition.token_axes, inputs),
            y=PartitionSpec(*partition.token_axes, outputs),
            rounded_x=_block_specs(PartitionSpec(tokens, inputs), PartitionSpec(inputs, tokens)),
            weight=PartitionSpec(inputs, outputs),
            weight_grad=PartitionSpec(*weight_grad),
        )


def _block_specs(by_token: PartitionSpec, by_channel: PartitionSpec) -> BlockInput:
    # One spec stands for the values and the scales of a matrix, whose axes are divided in the same way.
    specs: Any = (by_token, by_channel)
    return BlockInput(*specs)


def _on_each_device(
    run: Callable[..., Any], options: BlockOptions, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    if options.partition is None:
        return run
    # Kernels do not declare over which mesh axes their outputs vary.
    mesh = get_current_mesh(options.partition.mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _dot(left: Blocks, right: Blocks, dtype: DTypeLike, options: BlockOptions) -> jax.Array:
    """Return left [M, K] @ right [N, K]^T of one device."""
    factors = []
    for blocks in (left, right):
        values = jax.lax.bitcast_convert_type(blocks.values, jnp.float8_e4m3fn)
        scales = jax.lax.bitcast_convert_type(blocks.scales, jnp.float8_e8m0fnu)
        factors.append((values, scales))
    (left_values, left_scales), (right_values, right_scales) = factors
    if options.uses_our_kernels:
        from plimsoll.framework.layers import block_kernels_gpu

        return block_kernels_gpu.multiply_blocks(
            left_values,
            left_scales.astype(jnp.float32),
            right_values,
            right_scales.astype(jnp.float32),
            dtype,
            interpret=options.interpret,
        )
    if options.platform == "gpu":
        # Its operands have a batch axis.
        arrays = (array[None] for array in (left_values, right_values, left_scales, right_scales))
        return jax.nn.scaled_matmul(*arrays, preferred_element_type=dtype)[0]
    wide = []
    for values, scales in factors:
        for axis in (0, 1):
            scales = jnp.repeat(scales, values.shape[axis] // scales.shape[axis], axis=axis)
        wide.append(values.astype(jnp.float32) * scales.astype(jnp.float32))
    return jnp.einsum("mk,nk->mn", *wide).astype(dtype)


def _dot_over_channels(
    left: Blocks, right: Blocks, axes: tuple[str, ...], dtype: DTypeLike, options: BlockOptions
) -> jax.Array:
    """Compute `_dot`, summed over the devices that have the other channels, along `axes`."""
    partition = options.partition
    if partition is None or all(partition.mesh.shape[axis] == 1 for axis in axes):
        return _dot(left, right, dtype, options)
    return jax.lax.psum(_dot(left, right, jnp.float32, options), axes).astype(dtype)


def _sum_over_tokens(weight_grad: jax.Array, options: BlockOptions) -> jax.Array:
    """Sum the gradient of a weight over the devices that have other tokens, in its dtype, as for other recipes."""
    if options.partition is None:
        return weight_grad
    axes = options.partition.tokens
    scatter = options.partition.find_scatter()
    if scatter is not None:
        weight_grad = jax.lax.psum_scatter(weight_grad, scatter.axes, scatter_dimension=scatter.dimension, tiled=True)
        axes = _drop_axes(axes, scatter.axes)
    return jax.lax.psum(weight_grad, axes) if axes else weight_grad


def _plain(x: jax.Array, rounded: BlockInput, weight: jax.Array, options: BlockOptions) -> jax.Array:
    partition = options.partition
    leading = x.shape[:-1] if partition is None else partition.local_tokens(x.shape[:-1])
    input_axes = () if partition is None else partition.inputs

    def run(by_token: Blocks, weight: jax.Array) -> jax.Array:
        right = _round_weight(weight, options, transpose=True)
        y_TO = _dot_over_channels(by_token, right, input_axes, x.dtype, options)
        return y_TO.reshape(*leading, weight.shape[1])

    specs = _Specs.make(partition)
    return _on_each_device(run, options, (specs.rounded_x.by_token, specs.weight), specs.y)(rounded.by_token, weight)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """Residuals of the product: a frozen weight needs no input, an input without a gradient no weight."""

    x: Blocks | None
    weight: jax.Array | None


def _forward(
    x: CustomVJPPrimal, rounded: BlockInput, weight: CustomVJPPrimal, options: BlockOptions
) -> tuple[jax.Array, _Residuals]:
    # With symbolic_zeros, each array is replaced by its value and a flag that tells whether it is differentiated.
    values: BlockInput = jax.tree.map(lambda primal: primal.value, rounded)
    if weight.perturbed and values.by_channel is None:
        tokens = values.by_token.values.shape[0]
        where = ""
        if options.partition is not None:
            tokens = math.prod(options.partition.local_tokens(x.value.shape[:-1]))
            where = " on each device"
        raise ValueError(
            f"{options.scaling.name} needs a multiple of {options.scaling.size} tokens in a microbatch{where}, "
            f"given {tokens}"
        )
    y = _plain(x.value, values, weight.value, options)
    return y, _Residuals(
        x=values.by_channel if weight.perturbed else None, weight=weight.value if x.perturbed else None
    )


def _round_grad(
    grad_TO: jax.Array, residuals: _Residuals, options: BlockOptions
) -> tuple[Blocks | None, Blocks | None]:
    """Round a cotangent for the gradients of x and of the weight; None for one that is not needed."""
    if residuals.weight is not None and residuals.x is not None:
        return _round_both(grad_TO, options)
    size = options.scaling.size
    if residuals.weight is not None:
        return round_blocks(grad_TO, size), None
    return None, round_blocks(grad_TO.T, size)


def _backward(
    options: BlockOptions, residuals: _Residuals, y_grad: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, None, jax.Array | None]:
    output_axes = () if options.partition is None else options.partition.outputs

    def run(residuals: _Residuals, grad: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        by_token, by_channel = _round_grad(grad.reshape(-1, grad.shape[-1]), residuals, options)
        x_grad = None
        weight_grad = None
        if residuals.weight is not None and by_token is not None:
            right = _round_weight(residuals.weight, options, transpose=False)
            x_grad_TI = _dot_over_channels(by_token, right, output_axes, grad.dtype, options)
            x_grad = x_grad_TI.reshape(*grad.shape[:-1], -1)
        if residuals.x is not None and by_channel is not None:
            weight_grad = _sum_over_tokens(_dot(residuals.x, by_channel, grad.dtype, options), options)
        return x_grad, weight_grad

    specs = _Specs.make(options.partition)
    in_specs: Any = (_Residuals(specs.rounded_x.by_channel, specs.weight), specs.y)  # pyright: ignore[reportArgumentType]
    x_grad, weight_grad = _on_each_device(run, options, in_specs, (specs.x, specs.weight_grad))(
        residuals, dense_cotangent(y_grad)
    )
    return x_grad, None, weight_grad


_multiply = jax.custom_vjp(_plain, nondiff_argnums=(3,))
_multiply.defvjp(_forward, _backward, symbolic_zeros=True)
