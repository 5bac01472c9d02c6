"""What every layer is made of: `Layer`, the `Context` that is passed down, and the `Out` that is passed up.

A layer never holds an array. It declares ParameterSpecs; training passes parameters in. `prepare` does what concerns
weights alone (cast to the compute dtype, gather over fsdp), `apply` is pure and has a static structure. The split lets
a schedule differentiate, move or rebuild weights apart from activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.layout import MeshAxes, Nested, ParameterSpec, TensorSpec, fold_in_name

BATCH_AXES = ("data", "fsdp")


def batch_specs(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorSpec]:
    """The layout of a batch's arrays (shape, dtype), [B, ...]: over data and fsdp, and those [B, S] over seq too."""

    def spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
        return TensorSpec(shape, dtype, (BATCH_AXES, *(["seq"] if len(shape) == 2 else [None] * (len(shape) - 1))))

    return {name: spec(*array) for name, array in arrays.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What a layer may know besides its weights and its input.

    Args:
        batch: the inputs: tokens, targets, weights, and positions and segments where documents are masked; in
            generation first and slot, see framework.layers.attention_cache.
        rng: a typed key, folded in by name and by layer index on the way down; None when nothing is random.
        rows: int32[B], each sequence's index in the global batch. Random draws are keyed by it, so that a mask depends
            on neither sharding nor microbatching.
        num_targets: f32 scalar, number of counted targets in the global batch: what losses are divided by.
        training: whether dropout is on.
        cache: whether keys and values leave as layer_state, for generation.
        mesh: where constraints are placed; None means one device and no constraints.
        compute_dtype: the dtype of weights and activations inside layers.
        remat: what the backward pass recomputes, see framework.layers.remat.
    """

    batch: dict[str, jax.Array]
    rng: jax.Array | None = None
    rows: jax.Array | None = None
    num_targets: jax.Array | None = None
    training: bool = field(default=False, metadata={"static": True})
    cache: bool = field(default=False, metadata={"static": True})
    mesh: Mesh | None = field(default=None, metadata={"static": True})
    compute_dtype: Any = field(default=jnp.float32, metadata={"static": True})
    remat: str = field(default="none", metadata={"static": True})

    @property
    def platform(self) -> str:
        """cpu, tpu or gpu, as JAX names it: of the mesh's devices, or of the default one."""
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform

    def fold(self, name: str) -> Context:
        """The context of a child: its random stream depends on its name, not on its siblings."""
        return self if self.rng is None else replace(self, rng=fold_in_name(self.rng, name))

    def fold_index(self, index: jax.Array) -> Context:
        """The context of one layer of a stack; `index` may be traced."""
        return self if self.rng is None else replace(self, rng=jax.random.fold_in(self.rng, index))

    def dropout(self, x: jax.Array, rate: float, name: str) -> jax.Array:
        """Zeroes elements of x [B, ...] with probability `rate` and scales the rest by 1 / (1 - rate); in training."""
        if rate == 0.0 or not self.training:
            return x
        assert self.rng is not None, "dropout needs a key"
        assert self.rows is not None, "dropout needs row indices"
        key = fold_in_name(self.rng, name)
        keep = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(key, row), 1.0 - rate, x.shape[1:]))
        # Divided in float32: 0.9 is 0.8984 in bfloat16, which would scale everything by 0.2%.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scaled = (x.astype(wide) / jnp.asarray(1.0 - rate, wide)).astype(x.dtype)
        return jnp.where(keep(self.rows), scaled, jnp.zeros((), x.dtype))

    def constrain(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        """Tells the partitioner how x is laid out: one mesh axis, tuple or None per dimension."""
        if self.mesh is None or self.mesh.size == 1:
            return x
        return _placed(x, self.mesh, axes)

    def gather(self, weight: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
        """A weight that is stored by these mesh axes, whole over fsdp; its gradient is scattered over fsdp again."""
        gathered_axes = tuple(_without_fsdp(axis) for axis in mesh_axes)
        if gathered_axes == mesh_axes or self.mesh is None or self.mesh.size == 1:
            return weight
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            return self.constrain(weight, *gathered_axes)
        return _gathered(weight, self.mesh, mesh_axes, gathered_axes)

    def constrain_hidden(self, x_BSD: jax.Array) -> jax.Array:
        """The layout of activations between layers: batch over data and fsdp, positions over seq."""
        return self.constrain(x_BSD, BATCH_AXES, "seq", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Out:
    """What leaves a layer besides its output; never through a side channel, and of static structure.

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
        return Out(
            loss=sum(losses[1:], losses[0]) if losses else None,
            metrics={f"{name}/{key}": value for name, out in outs.items() for key, value in out.metrics.items()},
            layer_state={name: out.layer_state for name, out in outs.items() if out.layer_state},
        )


class Layer:
    """The base of all layers. Subclasses override `children` and `own_specs`, and compute in `apply` or `__call__`."""

    def children(self) -> dict[str, Layer]:
        """Sub-layers by name; a parameter's path is made of these names."""
        return {}

    @property
    def branches(self) -> dict[str, list[str]]:
        """{name: the children that it uses} of what a block adds to the residual stream, in order; {} for any other
        layer. Where there are some, the layer also has `branch`, see `framework.layers.block.Block`."""
        return {}

    def walk(self) -> Iterator[Layer]:
        """This layer and all below it."""
        yield self
        for child in self.children().values():
            yield from child.walk()

    def own_specs(self) -> dict[str, ParameterSpec]:
        """The parameters that this layer itself uses."""
        return {}

    def own_buffers(self) -> dict[str, TensorSpec]:
        """State that no gradient trains (a running mean, say), zero at first, passed to `apply` as layer_state."""
        return {}

    def parameter_specs(self) -> Nested:
        """Nested dict of ParameterSpec: own parameters, and each child's under its name."""
        return _nest(self.own_specs(), {name: child.parameter_specs() for name, child in self.children().items()})

    def buffer_specs(self) -> Nested:
        """Nested dict of TensorSpec, in the structure of `Out.layer_state`."""
        return _nest(self.own_buffers(), {name: child.buffer_specs() for name, child in self.children().items()})

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Parameters as `apply` wants them: in the compute dtype, gathered over fsdp."""
        weights = prepare_own(self.own_specs(), params, ctx)
        for name, child in self.children().items():
            if name in params:
                with jax.named_scope(name):
                    weights[name] = child.prepare(params[name], ctx)
        return weights

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Computes. `carry` is what flows between layers and stages, one pytree (for language models x_BSD)."""
        raise NotImplementedError(f"{type(self).__name__}.apply")

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one forward pass per token (matrix products only; a multiply-add counts 2)."""
        return sum(child.flops_per_token(seq_len) for child in self.children().values())


def _nest(own: Mapping[str, Any], children: dict[str, Nested]) -> Nested:
    clash = own.keys() & children.keys()
    assert not clash, f"a parameter and a child are both called {clash}"
    return {**own, **{name: specs for name, specs in children.items() if specs}}


def prepare_own(specs: Nested, params: Nested, ctx: Context) -> Nested:
    """A layer's own parameters, cast (quantized ones as they are) and gathered."""
    return {name: jax.tree.map(lambda s, p: _prepare(s, p, ctx), spec, params[name]) for name, spec in specs.items()}


def _prepare(spec: ParameterSpec, param: jax.Array, ctx: Context) -> jax.Array:
    weight = param if spec.quantized else cast(param, ctx.compute_dtype)
    return ctx.gather(weight, spec.mesh_axes)


def _placed(x: jax.Array, mesh: Mesh, axes: MeshAxes) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(weight: jax.Array, mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes) -> jax.Array:
    """A weight gathered over fsdp, whose gradient is scattered as the weight is stored.

    The transpose of a sharding constraint alone is the same constraint: it asks for the whole gradient on every device,
    which is an all-reduce. The slice that the update takes of it comes too late for XLA to make both a reduce-scatter.
    """
    return _placed(weight, mesh, gathered_axes)


def _gathered_forward(
    weight: jax.Array, mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes
) -> tuple[jax.Array, None]:
    return _placed(weight, mesh, gathered_axes), None


def _gathered_backward(
    mesh: Mesh, stored_axes: MeshAxes, gathered_axes: MeshAxes, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (_placed(grad, mesh, stored_axes),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """x in another dtype, rounded where it stands in the program."""
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if narrow.bits < wide.bits and narrow.nexp == wide.nexp:
        # The same rounding, in an operation that XLA leaves where it is: it would move a cast above a slice of a stack,
        # and from there out of the loop, so that the whole stack is cast at once.
        x = jax.lax.reduce_precision(x, narrow.nexp, narrow.nmant)
    return x.astype(dtype)


def add_shared(x: jax.Array, term: jax.Array) -> jax.Array:
    """x + term in x's dtype, where the term has fewer axes: a bias, say.

    The gradient of the term is a sum over the axes that it lacks, all tokens as a rule. It is taken in the dtype of
    this addition, so that is float32 at least.
    """
    wide = jnp.promote_types(jnp.promote_types(x.dtype, term.dtype), jnp.float32)
    return (x.astype(wide) + term.astype(wide)).astype(x.dtype)


def _without_fsdp(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    names = tuple(name for name in ((axes,) if isinstance(axes, str) else axes or ()) if name != "fsdp")
    return names[0] if len(names) == 1 else names or None
