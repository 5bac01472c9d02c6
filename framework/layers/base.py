"""The base classes of all layers: `Layer`, the `Context` that is passed down, and the `Out` that is passed up.

A layer never holds an array. It declares ParameterSpecs, and training passes parameters in. `prepare` does the work
that concerns weights alone (cast to the compute dtype, gather over fsdp); `apply` is pure and has a static structure.
This division lets a schedule differentiate, move or rebuild weights apart from activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from framework.layout import MeshAxes, Nested, ParameterSpec, TensorSpec, fold_in_name, nearest_divisors

# The mesh axes that cut the sequences of a batch. Along `expert` too, or its devices would all compute the same of what
# is no expert.
BATCH_AXES = ("data", "fsdp", "expert")


def batch_shards(sizes: Mapping[str, int]) -> int:
    """The number of parts that the sequences of a batch are in, on a mesh with axes of these sizes."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def batch_specs(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorSpec]:
    """The layout of a batch's arrays [B, ...], given as (shape, dtype): B over BATCH_AXES, a token's S over seq."""

    def spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
        inner_axes: list[str | None]
        # Two axes are those of tokens, three those of several values for each token. An image's four have no mesh axis.
        if len(shape) in (2, 3):
            inner_axes = ["seq", *[None] * (len(shape) - 2)]
        else:
            inner_axes = [None] * (len(shape) - 1)
        return TensorSpec(shape, dtype, (BATCH_AXES, *inner_axes))

    return {name: spec(*array) for name, array in arrays.items()}


class Kernels(Protocol):
    """Operations that differ by the devices that a layer runs on, for a trace of devices that are not there."""

    def attention(
        self,
        query_BSNH: jax.Array,
        key_BSKH: jax.Array,
        value_BSKH: jax.Array,
        **options: Any,
    ) -> jax.Array:
        """As `framework.layers.attention_kernels.dot_product_attention`."""
        ...

    def look_up(
        self,
        table_VD: jax.Array,
        indices_BS: jax.Array,
        ctx: Context,
        vocab_axis: str | None,
    ) -> jax.Array:
        """As `framework.layers.lookup.look_up`."""
        ...

    def grouped_dot(
        self,
        x_NI: jax.Array,
        weight_EIO: jax.Array,
        *,
        rows: int,
    ) -> jax.Array:
        """As `framework.layers.experts.grouped.grouped_dot`, of which `rows` rows are computed, as an estimate."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Everything that a layer may know besides its weights and its input. It is passed down unchanged, but for `rng`.

    Args:
        batch: the inputs: tokens, targets, weights, and positions and segments where documents are masked; in
            generation first and slot, see framework.layers.attention_cache.
        rng: a typed key, folded in by name and by layer index on the way down; None when nothing is random.
        rows: int32[B], each sequence's index in the global batch. Random draws are keyed by it, so that a mask depends
            on neither sharding nor microbatching.
        num_targets: f32 scalar, number of counted targets in the global batch: what losses are divided by.
        num_sequences: f32 scalar, number of counted sequences in the global batch; None where the batch has no array
            `ends`, which counts them.
        counts: {name: f32 scalar}, further numbers of the global batch that an objective divides by, see
            `framework.layers.objective.Objective.counts`; {} outside of training, where sums leave.
        training: whether dropout is on.
        cache: whether keys and values leave as layer_state, for generation.
        mesh: where constraints are placed; None means one device and no constraints.
        compute_dtype: the dtype of weights and activations inside layers.
        remat: what the backward pass recomputes, see framework.layers.remat.
        kernels: operations that take the place of those for the mesh's devices; None means those.
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
    compute_dtype: Any = field(default=jnp.float32, metadata={"static": True})
    remat: str = field(default="none", metadata={"static": True})
    kernels: Kernels | None = field(default=None, metadata={"static": True})

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices, or of the default device, as JAX names it: cpu, tpu or gpu."""
        if self.mesh is None:
            return jax.default_backend()
        return self.mesh.devices.flat[0].platform

    def fold(self, name: str) -> Context:
        """The context of a child: its random stream depends on its name, not on its siblings."""
        if self.rng is None:
            return self
        child_rng = fold_in_name(self.rng, name)
        return replace(self, rng=child_rng)

    def fold_index(self, index: jax.Array) -> Context:
        """The context of one layer of a stack; `index` may be traced."""
        if self.rng is None:
            return self
        layer_rng = jax.random.fold_in(self.rng, index)
        return replace(self, rng=layer_rng)

    def dropout(self, x: jax.Array, rate: float, name: str) -> jax.Array:
        """In training, zeroes elements of x [B, ...] with probability `rate`, and divides the others by 1 - rate."""
        if rate == 0.0 or not self.training:
            return x
        assert self.rng is not None, "dropout needs a key"
        assert self.rows is not None, "dropout needs row indices"
        key = fold_in_name(self.rng, name)

        # A key for each global row: sharding and microbatching leave the mask unchanged.
        def keep_row(row: jax.Array) -> jax.Array:
            row_key = jax.random.fold_in(key, row)
            return jax.random.bernoulli(row_key, 1.0 - rate, x.shape[1:])

        # Divided in float32: 0.9 is 0.8984 in bfloat16, which would scale everything by 0.2%.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        quotient = x.astype(wide) / jnp.asarray(1.0 - rate, wide)
        scaled = quotient.astype(x.dtype)
        mask = jax.vmap(keep_row)(self.rows)
        zero = jnp.zeros((), x.dtype)
        return jnp.where(mask, scaled, zero)

    def constrain(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        """Tells the partitioner how x is laid out: one mesh axis, tuple or None per dimension."""
        # On one device there is nothing to lay out, and the program stays that of no mesh at all.
        if self.mesh is None or self.mesh.size == 1:
            return x
        return _placed(x, self.mesh, axes)

    def gather(self, weight: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
        """Gathers a weight that is stored by these mesh axes over fsdp; its gradient is scattered over fsdp again."""
        gathered_axes = tuple(_without_fsdp(axis) for axis in mesh_axes)
        if gathered_axes == mesh_axes or self.mesh is None or self.mesh.size == 1:
            return weight
        # The codes of a quantized weight are integers, which have no gradient to be scattered.
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            return self.constrain(weight, *gathered_axes)
        return _gathered(weight, self.mesh, mesh_axes, gathered_axes)

    def constrain_hidden(self, x_BSD: jax.Array) -> jax.Array:
        """The layout of activations between layers: batch over BATCH_AXES, positions over seq."""
        return self.constrain(x_BSD, BATCH_AXES, "seq", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Out:
    """Everything that leaves a layer besides its output: there is no side channel, and the structure is static.

    Args:
        loss: f32 scalar to be added to the objective, already divided by `ctx.num_targets`; None means none.
        metrics: f32 scalars by name, additive over microbatches.
        layer_state: new values of the layer's buffers, in the structure of its `buffer_specs()`; with ctx.cache also
            what later tokens need of these.
    """

    loss: jax.Array | None = None
    metrics: dict[str, jax.Array] = field(default_factory=dict)
    layer_state: Nested = field(default_factory=dict)

    @staticmethod
    def merge(outs: Mapping[str, Out]) -> Out:
        """The Out of a parent: losses added, metrics and states under each child's name."""
        losses = [out.loss for out in outs.values() if out.loss is not None]
        # The sum starts with the first loss: adding it to 0 would be one more operation.
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
    """The base of all layers. Subclasses override `children` and `own_specs`, and compute in `apply` or `__call__`."""

    def children(self) -> dict[str, Layer]:
        """Sub-layers by name; a parameter's path is made of these names."""
        return {}

    @property
    def branches(self) -> dict[str, list[str]]:
        """{branch: names of the children that it uses} of what a block adds to the residual stream, in order.

        {} for any other layer. A layer that has branches also has `branch`, see `framework.layers.block.Block`.
        """
        return {}

    def walk(self) -> Iterator[Layer]:
        """This layer and all below it."""
        yield self
        for child in self.children().values():
            yield from child.walk()

    def check_platform(self, platform: str) -> None:
        """Raises ValueError: this layer itself asks for a kernel of another platform (tpu, gpu or cpu) than this."""

    def own_specs(self) -> dict[str, ParameterSpec]:
        """The parameters that this layer itself uses."""
        return {}

    def own_buffers(self) -> dict[str, TensorSpec]:
        """State that no gradient trains (a running mean, say), zero at first, passed to `apply` as layer_state."""
        return {}

    @property
    def depends_on_microbatches(self) -> bool:
        """Whether another learner.accumulate is another training, beyond rounding. `memory.auto` then leaves it alone.

        So it is where a microbatch sees state that the one before it has left.
        """
        return bool(self.own_buffers())

    def parameter_specs(self) -> Nested:
        """Nested dict of ParameterSpec: own parameters, and each child's under its name."""
        layer_specs = self.own_specs()
        child_specs = {name: child.parameter_specs() for name, child in self.children().items()}
        return _nest(layer_specs, child_specs)

    def buffer_specs(self) -> Nested:
        """Nested dict of TensorSpec, in the structure of `Out.layer_state`."""
        layer_specs = self.own_buffers()
        child_specs = {name: child.buffer_specs() for name, child in self.children().items()}
        return _nest(layer_specs, child_specs)

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Parameters in the form that `apply` needs: in the compute dtype, gathered over fsdp."""
        weights = prepare_own(self.own_specs(), params, ctx)
        for name, child in self.children().items():
            # Children without parameters have no entry in the tree, see `_nest`.
            if name in params:
                with jax.named_scope(name):
                    weights[name] = child.prepare(params[name], ctx)
        return weights

    def apply(
        self,
        weights: Nested,
        carry: Any,
        ctx: Context,
        layer_state: Nested,
    ) -> tuple[Any, Out]:
        """Computes. `carry` is what flows between layers and stages, one pytree (for language models x_BSD)."""
        raise NotImplementedError(f"{type(self).__name__}.apply")

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one forward pass per token (matrix products only; a multiply-add counts 2)."""
        # A layer without children counts 0, unless it overrides this: a norm has no matrix product.
        return sum(child.flops_per_token(seq_len) for child in self.children().values())


def _nest(layer_specs: Mapping[str, Any], child_specs: dict[str, Nested]) -> Nested:
    """One level of a nested dict of specs; children without any spec are left out."""
    clash = layer_specs.keys() & child_specs.keys()
    assert not clash, f"a parameter and a child are both called {clash}"
    nested = {**layer_specs}
    for name, specs in child_specs.items():
        if specs:
            nested[name] = specs
    return nested


def prepare_own(specs: Nested, params: Nested, ctx: Context) -> Nested:
    """A layer's own parameters, cast to the compute dtype (quantized ones stay as they are) and gathered."""
    weights = {}
    for name, spec in specs.items():
        # A quantized weight is a dict of codes and scales, so both sides are trees.
        weights[name] = jax.tree.map(partial(_prepare, ctx=ctx), spec, params[name])
    return weights


def _prepare(spec: ParameterSpec, param: jax.Array, ctx: Context) -> jax.Array:
    # The cast comes before the gather, so that narrow weights travel between devices.
    weight = param if spec.quantized else cast(param, ctx.compute_dtype)
    return ctx.gather(weight, spec.mesh_axes)


def _placed(x: jax.Array, mesh: Mesh, axes: MeshAxes) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(x, sharding)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(
    weight: jax.Array,
    mesh: Mesh,
    stored_axes: MeshAxes,
    gathered_axes: MeshAxes,
) -> jax.Array:
    """A weight gathered over fsdp, whose gradient is scattered as the weight is stored."""
    # The transpose of a sharding constraint alone is the same constraint. It asks for the whole
    # gradient on every device, which is an all-reduce; the slice that the update takes of it comes
    # too late for XLA to make a reduce-scatter of both.
    return _placed(weight, mesh, gathered_axes)


def _gathered_forward(
    weight: jax.Array, mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes
) -> tuple[jax.Array, None]:
    return _placed(weight, mesh, gathered_axes), None


def _gathered_backward(
    mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    # The cotangent gets the axes of the stored weight, not those of the gathered one.
    weight_grad = _placed(grad, mesh, stored_axes)
    return (weight_grad,)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def check_axis(mesh: Mesh | AbstractMesh, axis: str, name: str, count: int) -> None:
    """Raises ValueError: a mesh axis does not divide a count of the model, which goes by `name` in messages."""
    parts = mesh.shape[axis]
    if count % parts:
        raise ValueError(
            f"mesh.{axis} = {parts} does not divide {name} = {count}; nearest that do: {nearest_divisors(count, parts)}"
        )


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts x to another dtype, rounding at this place of the program."""
    source = jnp.finfo(x.dtype)
    target = jnp.finfo(dtype)
    if target.bits < source.bits and target.nexp == source.nexp:
        # The same rounding, in an operation that XLA leaves where it is. XLA would move a cast
        # above a slice of a stack, and from there out of the loop, so that the whole stack is cast
        # at once.
        x = jax.lax.reduce_precision(x, target.nexp, target.nmant)
    return x.astype(dtype)


def add_shared(x: jax.Array, term: jax.Array) -> jax.Array:
    """x + term in x's dtype, where the term has fewer axes: a bias, say."""
    # The gradient of the term is a sum over the axes that it lacks, usually all tokens. The sum is
    # taken in the dtype of this addition, which is therefore float32 at least.
    result_dtype = jnp.promote_types(x.dtype, term.dtype)
    wide = jnp.promote_types(result_dtype, jnp.float32)
    total = x.astype(wide) + term.astype(wide)
    return total.astype(x.dtype)


def _without_fsdp(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """The mesh axes of one dimension without fsdp: a name, a tuple of two or more names, or None."""
    if isinstance(axes, str):
        axes = (axes,)
    names = tuple(name for name in axes or () if name != "fsdp")
    if len(names) == 1:
        return names[0]
    return names or None
