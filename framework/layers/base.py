"""Base classes of all layers: `Layer`, the `Context` that is passed down, and the `Out` that is passed up.

A layer never holds an array. It declares ParameterSpecs, and the training code passes the parameters in. `prepare`
does the work that depends only on weights (cast to the compute dtype, all-gather of shards); `apply` is pure and has a
static structure. This split lets a schedule differentiate, move or rebuild weights separately from activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from plimsoll.framework.layers.low_precision import RoundedInputs, round_and_restore
from plimsoll.framework.layout import (
    MeshAxes,
    MeshAxis,
    Nested,
    ParameterSpec,
    PyTree,
    TensorSpec,
    axis_names,
    find_gathered_axes,
    fit_axes,
    fold_in_name,
    get_current_mesh,
    nearest_divisors,
)

# What flows between layers and stages: x_BSD in language models, a pair of such streams between reversible blocks, and
# None before the first stage and after the last.
Carry: TypeAlias = PyTree
# The mesh axes that shard the sequences of a batch. They include `expert`: without it, the devices along that axis
# would all compute the same non-expert layers.
BATCH_AXES = ("data", "fsdp", "expert")
# The mesh axis that shards the layers of a stack.
LAYER_AXIS = "pipe"
# The mesh axes that shard the vocabulary of the tables. They include `pipe`: without it, the devices along that axis
# would all compute the same logits, as only layers of the stack are different there.
VOCAB_AXES = ("pipe", "model")


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of shards of a batch's sequences on a mesh with axes of these sizes."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def batch_specs(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorSpec]:
    """Return the layout of a batch's arrays [B, ...], given as (shape, dtype): B over BATCH_AXES, S over seq."""

    specs: dict[str, TensorSpec] = {}
    for name, (shape, dtype) in arrays.items():
        inner_axes: list[str | None] = [None] * (len(shape) - 1)
        # Arrays of tokens have two axes, arrays of several values per token have three. Images have four axes, and
        # only B is sharded.
        if len(shape) in (2, 3):
            inner_axes[0] = "seq"
        specs[name] = TensorSpec(shape, dtype, (BATCH_AXES, *inner_axes))
    return specs


class Kernels(Protocol):
    """Operations that depend on the device type, to be replaced when tracing for devices that are not present."""

    def attention(
        self,
        query_BSNH: jax.Array,
        key_BSKH: jax.Array,
        value_BSKH: jax.Array,
        *,
        segments_BS: jax.Array | None,
        sinks_N: jax.Array | None,
        window: int | None,
        softcap: float | None,
        implementation: str,
        context_parallel: Literal["auto", "ring", "gather"],
        mesh: Any,
        **options: object,
    ) -> jax.Array:
        """See `framework.layers.attention_kernels.dot_product_attention`."""
        ...

    def look_up(self, table_VD: jax.Array, indices_BS: jax.Array, ctx: Context, spec: TensorSpec) -> jax.Array:
        """See `framework.layers.lookup.look_up`."""
        ...

    def grouped_dot(self, x_NI: jax.Array, weight_EIO: jax.Array, *, rows: int) -> jax.Array:
        """See `framework.layers.experts.grouped.grouped_dot`; `rows` is an estimate of the rows computed."""
        ...

    def exchange_rows(self, rows_MD: jax.Array, num_rows: int, axis: str, *, even_rows: int) -> jax.Array:
        """Return [num_rows, D], the rows that arrive if each device sends its rows to others along a mesh axis.

        See `framework.layers.experts.expert_exchange.Transport.move`; `even_rows` is an estimate of the rows sent.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Everything that a layer may know besides its weights and its input. Passed down unchanged, except for `rng`.

    Args:
        batch: the inputs: tokens, targets, weights, and positions and segments where documents are masked; in
            generation also first and slot, see framework.layers.attention_cache.
        rng: a typed key, folded in by name and by layer index on the way down; None when nothing is random.
        rows: int32[B], the index of each sequence in the global batch. Random draws are keyed by it, so a mask
            depends on neither sharding nor microbatching.
        num_targets: f32 scalar, the number of counted targets in the global batch; losses are divided by it.
        num_sequences: f32 scalar, the number of counted sequences in the global batch; None if the batch has no array
            `ends`, which counts them.
        counts: {name: f32 scalar}, further numbers of the global batch that an objective divides by, see
            `framework.layers.objective.Objective.counts`; {} outside of training, where sums are returned.
        training: whether dropout is on.
        cache: whether keys and values are returned as layer_state, for generation.
        mesh: the mesh of the sharding constraints; None means one device and no constraints.
        compute_dtype: dtype of weights and activations inside layers.
        remat: which activations the backward pass recomputes, see framework.layers.remat.
        kernels: operations that replace those for the mesh's devices; None means no replacement.
        rounded_inputs: inputs that were rounded for 8-bit products, see `share_inputs`; None shares none.
    """

    batch: dict[str, jax.Array]
    rng: jax.Array | None = None
    rows: jax.Array | None = None
    num_targets: jax.Array | None = None
    num_sequences: jax.Array | None = None
    counts: dict[str, jax.Array] = field(default_factory=dict)
    training: bool = field(default=False, metadata={"static": True})
    cache: bool = field(default=False, metadata={"static": True})
    mesh: Mesh | None = field(default=None, metadata={"static": True})
    compute_dtype: DTypeLike = field(default=jnp.float32, metadata={"static": True})
    remat: str = field(default="none", metadata={"static": True})
    kernels: Kernels | None = field(default=None, metadata={"static": True})
    rounded_inputs: RoundedInputs | None = field(default=None, metadata={"static": True})

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices, or of the default device, as JAX names it: cpu, tpu or gpu."""
        if self.mesh is None:
            return jax.default_backend()
        return self.mesh.devices.flat[0].platform

    def share_inputs(self) -> Context:
        """Return a context for one function: the Linears that get it and have the same input round it once."""
        return replace(self, rounded_inputs=RoundedInputs())

    def fold(self, name: str) -> Context:
        """Return the context of a child: its random stream depends on its name, not on its siblings."""
        if self.rng is None:
            return self
        child_rng = fold_in_name(self.rng, name)
        return replace(self, rng=child_rng)

    def fold_index(self, index: jax.Array) -> Context:
        """Return the context of one layer of a stack; `index` may be traced."""
        if self.rng is None:
            return self
        layer_rng = jax.random.fold_in(self.rng, index)
        return replace(self, rng=layer_rng)

    def dropout(self, x: jax.Array, rate: float, name: str) -> jax.Array:
        """Zero elements of x [B, ...] with probability `rate` in training, and divide the others by 1 - rate."""
        if rate == 0.0 or not self.training:
            return x
        assert self.rng is not None, "dropout needs a key"
        assert self.rows is not None, "dropout needs row indices"
        key = fold_in_name(self.rng, name)
        # The division is in float32: in bfloat16, 0.9 is 0.8984, which would scale everything by 0.2%.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        quotient = x.astype(wide) / jnp.asarray(1.0 - rate, wide)
        scaled = quotient.astype(x.dtype)
        # One key per global row, so that sharding and microbatching do not change the mask.
        mask = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(key, row), 1.0 - rate, x.shape[1:]))(
            self.rows
        )
        zero = jnp.zeros((), x.dtype)
        return jnp.where(mask, scaled, zero)

    def constrain(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        """Constrain the sharding of x: one mesh axis, tuple of axes, or None per dimension."""
        # On one device there is nothing to shard, and the program stays the same as without a mesh.
        if self.mesh is None or self.mesh.size == 1:
            return x
        return _constrain(x, self.mesh, axes)

    def constrain_weight(self, x: jax.Array, *axes: MeshAxis) -> jax.Array:
        """Constrain a weight, or its gradient, to the sharding in which a weight with these mesh axes is stored."""
        if self.mesh is None:
            return x
        return self.constrain(x, *fit_axes(axes, x.shape, self.mesh.shape))

    def gather(self, weight: jax.Array, mesh_axes: MeshAxes, *, as_fp8: bool = False) -> jax.Array:
        """All-gather a weight over the axes that it is stored in shards over; its gradient is reduce-scattered.

        Args:
            weight: the weight.
            mesh_axes: declared mesh axes of its dimensions.
            as_fp8: round the weight, and exchange 8-bit numbers; see `ParameterSpec.gathered_as_fp8`.
        """
        gathered_axes = drop_weight_axes(mesh_axes)
        if gathered_axes == mesh_axes or self.mesh is None or self.mesh.size == 1:
            return weight
        # The codes of a quantized weight are integers, which have no gradient to scatter.
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            return self.constrain(weight, *gathered_axes)
        stored_axes = fit_axes(mesh_axes, weight.shape, self.mesh.shape)
        gather = _gather_as_fp8 if as_fp8 else _gather
        return gather(weight, self.mesh, stored_axes, gathered_axes)

    def seq_shards(self, batch: int, length: int) -> int:
        """Return the number of devices that divide the positions of rows; 1 if [batch, length] has no equal shards."""
        if self.mesh is None or batch % batch_shards(self.mesh.shape) or length % self.mesh.shape["seq"]:
            return 1
        return self.mesh.shape["seq"]

    def on_each_device(
        self, run: Callable[..., jax.Array], in_axes: Sequence[MeshAxes], out_axes: MeshAxes
    ) -> Callable[..., jax.Array]:
        """Return `run` applied to each device's shards of its arguments, where it may exchange data over mesh axes.

        Args:
            run: the function.
            in_axes: the mesh axes of each argument; an argument may also be None.
            out_axes: the mesh axes of the result.
        """
        assert self.mesh is not None, "without a mesh, there is one device"
        in_specs = tuple(PartitionSpec(*axes) for axes in in_axes)
        return jax.shard_map(
            run,
            mesh=get_current_mesh(self.mesh),
            in_specs=in_specs,
            out_specs=PartitionSpec(*out_axes),
            check_vma=False,
        )

    def constrain_hidden(self, x_BSD: jax.Array) -> jax.Array:
        """Apply the sharding of activations between layers: batch over BATCH_AXES, positions over seq."""
        return self.constrain(x_BSD, BATCH_AXES, "seq", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Out:
    """Everything that a layer returns besides its output: there is no side channel, and the structure is static.

    Args:
        loss: f32 scalar to add to the objective, already divided by `ctx.num_targets`; None for no loss.
        metrics: f32 scalars by name, additive over microbatches.
        layer_state: new values of the layer's buffers, in the structure of its `buffer_specs()`; with ctx.cache also
            the cache that later tokens need.
    """

    loss: jax.Array | None = None
    metrics: dict[str, jax.Array] = field(default_factory=dict)
    layer_state: Nested = field(default_factory=dict)

    @staticmethod
    def merge(outs: Mapping[str, Out]) -> Out:
        """Return the Out of a parent: losses are added, metrics and states are stored under each child's name."""
        losses = [out.loss for out in outs.values() if out.loss is not None]
        # The sum starts with the first loss: adding it to 0 would be an extra operation.
        loss = sum(losses[1:], losses[0]) if losses else None
        metrics = {}
        layer_state = {}
        for name, out in outs.items():
            for key, value in out.metrics.items():
                metrics[f"{name}/{key}"] = value
            if out.layer_state:
                layer_state[name] = out.layer_state
        return Out(loss=loss, metrics=metrics, layer_state=layer_state)


class Layer:
    """Base class of all layers. Subclasses override `children` and `param_specs`; `apply` or `__call__` computes."""

    def children(self) -> dict[str, Layer]:
        """Return the sub-layers by name; a parameter's path is made of these names."""
        return {}

    @property
    def branches(self) -> dict[str, list[str]]:
        """The branches that a block adds to the residual stream, in order: {branch: names of the children it uses}.

        {} for any other layer. A layer with branches overrides `branch` too.
        """
        return {}

    def walk(self) -> Iterator[Layer]:
        """Yield this layer and all layers below it."""
        yield self
        for child in self.children().values():
            yield from child.walk()

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the layer cannot be divided over the axes of a mesh; only their sizes matter."""

    def localize(self, sizes: Mapping[str, int]) -> None:
        """Reduce the layer in place to its share on one device, as it is inside `shard_map`.

        A plan traces this layer with one device's shards of its parameters. Layers that store a number which a mesh
        axis divides, such as the number of heads, override this.

        Args:
            sizes: {mesh axis: size} for all mesh axes.
        """

    def check_platform(self, platform: str) -> None:
        """Raise ValueError if this layer itself requests a kernel for another platform (tpu, gpu or cpu)."""

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of the parameters that this layer itself uses."""
        return {}

    def layer_buffer_specs(self) -> dict[str, TensorSpec]:
        """Return the specs of state without gradients, e.g. a running mean.

        It is initially zero, and passed to `apply` as layer_state.
        """
        return {}

    @property
    def depends_on_microbatches(self) -> bool:
        """True if learner.accumulate affects training beyond rounding. `memory.auto` then leaves it unchanged.

        This is the case if a microbatch sees state that the previous one left behind.
        """
        return bool(self.layer_buffer_specs())

    def parameter_specs(self) -> Nested:
        """Return a nested dict of ParameterSpec: this layer's own parameters, and each child's under its name."""
        layer_specs = self.param_specs()
        child_specs = {name: child.parameter_specs() for name, child in self.children().items()}
        return _nest(layer_specs, child_specs)

    def buffer_specs(self) -> Nested:
        """Return a nested dict of TensorSpec, in the structure of `Out.layer_state`."""
        layer_specs = self.layer_buffer_specs()
        child_specs = {name: child.buffer_specs() for name, child in self.children().items()}
        return _nest(layer_specs, child_specs)

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Return the parameters in the form that `apply` needs: in the compute dtype, gathered over WEIGHT_AXES."""
        weights = prepare_params(self.param_specs(), params, ctx)
        for name, child in self.children().items():
            # Children without parameters have no entry in the tree, see `_nest`.
            if name in params:
                with jax.named_scope(name):
                    weights[name] = child.prepare(params[name], ctx)
        return weights

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """Run the layer: map its input carry to its output carry."""
        raise NotImplementedError(f"{type(self).__name__}.apply")

    def branch(
        self, name: str, weights: Nested, x_BSD: jax.Array, ctx: Context, layer_state: Nested
    ) -> tuple[jax.Array, Out]:
        """Return the output of one of `branches`, in the compute dtype, to be added to x_BSD.

        Args:
            name: name of the branch.
            weights: the layer's weights; those of the children that the branch uses are enough.
            x_BSD: the residual stream.
            ctx: the layer's context.
            layer_state: the layer's buffers.
        """
        raise NotImplementedError(f"{type(self).__name__}.branch")

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward pass's floating-point operations per token: matrix products; a multiply-add counts 2."""
        # A layer without children counts 0 unless it overrides this: a norm, for example, has no matrix product.
        return sum(child.flops_per_token(seq_len) for child in self.children().values())


def _nest(layer_specs: Mapping[str, TensorSpec | Nested], child_specs: dict[str, Nested]) -> Nested:
    """Return one level of a nested dict of specs; children without any spec are left out."""
    clash = layer_specs.keys() & child_specs.keys()
    assert not clash, f"a parameter and a child are both called {clash}"
    nested: Nested = {**layer_specs}
    for name, specs in child_specs.items():
        if specs:
            nested[name] = specs
    return nested


def prepare_params(specs: Nested, params: Nested, ctx: Context) -> Nested:
    """Cast a layer's own parameters to the compute dtype, except quantized ones and histories, and gather them."""

    def prepare(spec: ParameterSpec, param: jax.Array) -> jax.Array:
        # The cast comes before the gather, so that the narrower dtype travels between devices.
        weight = param if spec.quantized or spec.is_history else cast(param, ctx.compute_dtype)
        return ctx.gather(weight, spec.mesh_axes, as_fp8=spec.gathered_as_fp8)

    # A quantized weight is a dict of codes and scales, so the spec and the parameter may both be trees.
    return {name: jax.tree.map(prepare, spec, params[name]) for name, spec in specs.items()}


def drop_weight_axes(mesh_axes: MeshAxes) -> MeshAxes:
    """Return the mesh axes of a weight that is gathered over WEIGHT_AXES."""
    kept_axes: list[MeshAxis] = []
    for axes in mesh_axes:
        dropped = find_gathered_axes(axes)
        names = tuple(name for name in axis_names(axes) if name not in dropped)
        # A dimension has a name, a tuple of two or more names, or None.
        kept_axes.append(names[0] if len(names) == 1 else names or None)
    return tuple(kept_axes)


def _constrain(x: jax.Array, mesh: Mesh, axes: MeshAxes) -> jax.Array:
    sharding = NamedSharding(get_current_mesh(mesh), PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(x, sharding)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(weight: jax.Array, mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes) -> jax.Array:
    """Gather a weight over WEIGHT_AXES; its gradient is scattered to the stored sharding."""
    # The transpose of a plain sharding constraint is the same constraint. It would require the whole gradient on
    # every device, which is an all-reduce; the slice that the update takes comes too late for XLA to turn both into a
    # reduce-scatter.
    return _constrain(weight, mesh, gathered_axes)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_as_fp8(weight: jax.Array, mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes) -> jax.Array:
    """Like `_gather`, but round the weight, and gather the 8-bit numbers."""
    return round_and_restore(weight, lambda bits: _constrain(bits, mesh, gathered_axes))


def _scatter_gradient(
    mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes, residuals: None, grad: jax.Array
) -> tuple[jax.Array]:
    # The cotangent gets the sharding of the stored weight, not that of the gathered one.
    return (_constrain(grad, mesh, stored_axes),)


_gather.defvjp(lambda *arguments: (_gather(*arguments), None), _scatter_gradient)
_gather_as_fp8.defvjp(lambda *arguments: (_gather_as_fp8(*arguments), None), _scatter_gradient)


def check_axis(mesh: Mesh | AbstractMesh, axis: str, name: str, count: int) -> None:
    """Raise ValueError if a mesh axis does not divide a count of the model.

    Args:
        mesh: the mesh.
        axis: name of its axis.
        name: name of the count, for the message.
        count: number that the axis has to divide.
    """
    parts = mesh.shape[axis]
    if count % parts:
        raise ValueError(
            f"mesh.{axis} = {parts} does not divide {name} = {count}; nearest that do: {nearest_divisors(count, parts)}"
        )


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast x to another dtype, rounding at this point of the program."""
    source = jnp.finfo(x.dtype)
    target = jnp.finfo(dtype)
    if target.bits < source.bits and target.nexp == source.nexp:
        # This rounds in the same way, but XLA does not move it. XLA would move a plain cast above a slice of a stack,
        # and from there out of the loop, so that the whole stack is cast at once.
        x = jax.lax.reduce_precision(x, target.nexp, target.nmant)
    return x.astype(dtype)


def scale(x: jax.Array, factor: float) -> jax.Array:
    """Return factor * x in x's dtype, where only the product is rounded, and not the factor."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * factor).astype(x.dtype)


def add_shared(x: jax.Array, term: jax.Array) -> jax.Array:
    """Return x + term in x's dtype, where the term has fewer axes, as a bias has."""
    # The gradient of the term is a sum over the axes that it lacks, usually all tokens. The sum is taken in the dtype
    # of this addition, so the addition is in float32 or wider.
    result_dtype = jnp.promote_types(x.dtype, term.dtype)
    wide = jnp.promote_types(result_dtype, jnp.float32)
    total = x.astype(wide) + term.astype(wide)
    return total.astype(x.dtype)
