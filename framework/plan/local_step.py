"""One device's share of a step's forward and backward pass as a jaxpr, traced without any device.

The experiment's own layers are traced under `shard_map` on an abstract mesh, so shapes, remat policies, loops and
custom layers are those of the real step, and every array has the size of one device's shard. What XLA's partitioner
would add is written out: weights are gathered over fsdp where the layers prepare them, and what is looked up in tables
changes places with their columns. Attention kernels are opaque.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Primitive
from jax.sharding import AbstractMesh, PartitionSpec

from framework.layers import attention, embedding, kernels_xla, lookup
from framework.layers.base import Context, Out, batch_specs, cast
from framework.layers.embedding import Embedding
from framework.layers.kernels_call import SAVED_NAME, AttentionCall
from framework.layers.stack import Stack
from framework.layout import MeshAxes, Nested, ParameterSpec, StateLayout, flatten, merge
from framework.models.causal_lm import CausalLM
from framework.plan.jaxprs import LOCAL_ATTENTION
from framework.program.experiment import Experiment

KERNEL = Primitive(LOCAL_ATTENTION)  # flash attention, forward or backward: its operands and results, nothing else
KERNEL.multiple_results = True
KERNEL.def_abstract_eval(lambda *operands, results: list(results))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LocalContext(Context):
    """The context of one device of a mesh that is not there, and so cannot be asked for its platform."""

    device_platform: str = field(default="cpu", metadata={"static": True})

    @property
    def platform(self) -> str:
        return self.device_platform

    def constrain(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        return x  # inside shard_map activations are one device's already

    def gather(self, weight: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
        return weight  # a unit's weights are gathered when they are fetched


def trace(experiment: Experiment, sizes: dict[str, int], platform: str) -> ClosedJaxpr:
    """The gradients of one microbatch on one device: all arguments and results are shards, except for the gradient of
    the head's table, if it learns, which is whole and in reality summed into a shard, see `framework.layers.head`.

    Args:
        experiment: what to train. sizes: of all mesh axes.
        platform: tpu, gpu or cpu: decides the attention kernel as `implementation="auto"` does.
    """
    model, learner, data = copy.deepcopy(experiment.model), experiment.learner, experiment.data
    for layer in (layer for stack in model.stacks.values() for layer in stack.unit.walk()):
        if isinstance(layer, attention.Attention):
            layer.num_heads //= sizes["model"]
            layer.num_kv_heads //= sizes["model"]
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    specs = model.parameter_specs()

    def on_device(weight: jax.Array) -> jax.Array:
        hosted = jax.typeof(weight).memory_space == jax.memory.Space.Host
        return jax.device_put(weight, jax.memory.Space.Device) if hosted else weight

    def gather(spec: ParameterSpec, weight: jax.Array) -> jax.Array:
        weight = on_device(weight)
        weight = weight if spec.quantized else weight.astype(model.compute_dtype)
        for axis, names in enumerate(spec.mesh_axes):
            if sizes["fsdp"] > 1 and "fsdp" in ((names,) if isinstance(names, str) else names or ()):
                weight = jax.lax.all_gather(weight, "fsdp", axis=axis, tiled=True)
        return weight

    def run(name: str, params: Nested, carry: Any, ctx: Context, buffers: Nested) -> tuple[Any, Out]:
        stage, state = model.stages[name], buffers.get(name, {})
        if isinstance(stage, Stack):  # of which one unit's weights are gathered at a time; they have no axis of layers
            fetch = functools.partial(jax.tree.map, gather, stage.unit.parameter_specs())
            return stage.forward(params[name], carry, ctx.fold(name), state, fetch, params.get("shared"))
        if isinstance(stage, Embedding):  # which gathers nothing but positions that all sequences share
            tables = jax.tree.map(on_device, params[name])
            if stage.max_positions is not None and "positions" not in ctx.batch:
                tables |= {"position": gather(specs[name]["position"], tables["position"])}
            return stage.apply(tables, carry, ctx.fold(name), state)
        weights = jax.tree.map(gather, specs.get(name, {}), params.get(name, {}))
        return stage.apply(stage.prepare(weights, ctx), carry, ctx.fold(name), state)

    def gradients(params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> Any:
        rows = jnp.arange(batch["weights"].shape[0])
        fields: dict[str, Any] = {"batch": batch, "num_targets": jnp.float32(1), "training": True}
        fields |= {"rng": jax.random.key(0), "rows": rows, "compute_dtype": model.compute_dtype}
        ctx = _LocalContext(**fields, mesh=mesh, remat=experiment.memory.remat, device_platform=platform)
        if not isinstance(model, CausalLM):

            def objective(params: Nested) -> Any:
                everything, carry, total = merge(params, model.split_units(frozen, ctx.remat)), None, jnp.float32(0)
                for name in model.stages:
                    carry, out = run(name, everything, carry, ctx, buffers)
                    total = total if out.loss is None else total + out.loss
                return total

            return model.join_units(jax.grad(objective)(model.split_units(params, ctx.remat)))
        everything, language = merge(params, frozen), model
        home = "embed/token" if model.head.tied else "head/table"
        table = gather(model.head.table_spec(), flatten(everything)[home])

        def loss(params: Nested, table: jax.Array) -> jax.Array:
            everything = merge(params, model.split_units(frozen, ctx.remat))
            carry, _ = run("embed", everything, None, ctx, buffers)
            carry, out = run("stack", everything, carry, ctx, buffers)
            norm = jax.tree.map(lambda w: w.astype(model.compute_dtype), everything["head"]["norm"])
            head = Context(**fields).fold("head")  # no mesh: its chunks are those of this device's positions
            _, last = language.head.apply({"norm": norm, "table": table}, carry, head, buffers.get("head", {}))
            assert last.loss is not None
            return last.loss if out.loss is None else last.loss + out.loss

        argnums = (0, 1) if home in flatten(learner.specs) else (0,)
        grads, *table_grad = jax.grad(loss, argnums=argnums)(model.split_units(params, ctx.remat), table)
        return model.join_units(grads), table_grad

    size = data.global_batch_size // learner.accumulate
    batch = batch_specs({name: ((size, *shape[1:]), dtype) for name, (shape, dtype) in data.arrays().items()})
    state = experiment.state_specs()
    arguments = (state["parameter"], state["frozen"], state["buffer"], batch)
    axes = jax.tree.map(lambda spec: PartitionSpec(*spec.mesh_axes), arguments)
    shapes = StateLayout({}, mesh).abstract(arguments)
    local = jax.shard_map(gradients, mesh=mesh, in_specs=axes, out_specs=PartitionSpec(), check_vma=False)
    # A kernel would ask for the devices of the mesh.
    with (
        patch.object(attention, "dot_product_attention", _attention(platform, sizes["seq"])),
        patch.object(embedding, "look_up", _look_up),
    ):
        closed = jax.make_jaxpr(local)(*shapes)
    (mapped,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map")
    inner = mapped.params["jaxpr"]
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def _look_up(table: jax.Array, indices_BS: jax.Array, ctx: Context, vocab_axis: str | None) -> jax.Array:
    """`lookup.look_up` on shards: tokens of the whole fsdp group, columns of this device."""
    mesh, table_type = ctx.mesh, jax.typeof(table)
    assert mesh is not None
    shape = table.shape[0] * (1 if vocab_axis is None else mesh.shape[vocab_axis]), table.shape[1] * mesh.shape["fsdp"]

    @jax.custom_vjp
    def rows(table: jax.Array, indices: jax.Array) -> jax.Array:
        taken = cast(jnp.take(table, indices, axis=0), ctx.compute_dtype)
        return jax.lax.all_to_all(taken, "fsdp", split_axis=0, concat_axis=2, tiled=True)

    def backward(indices: jax.Array, rows_grad: jax.Array) -> Any:
        rows_grad = jax.lax.all_to_all(rows_grad, "fsdp", split_axis=2, concat_axis=0, tiled=True)
        summed = functools.partial(lookup.table_gradient, shape=shape, dtype=table_type.dtype)
        grad = lookup.shard_gradient(summed, indices, rows_grad, mesh=mesh, vocab_axis=vocab_axis)
        return grad, np.zeros(indices.shape, jax.dtypes.float0)

    rows.defvjp(lambda table, indices: (rows(table, indices), indices), backward)
    return rows(table, jax.lax.all_gather(indices_BS, "fsdp", tiled=True))


def _attention(platform: str, parts: int) -> Callable[..., jax.Array]:
    """`dot_product_attention` on shards: what "auto" chooses, without asking which packages are installed."""
    fused = _fused(parts)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: str, **options: Any) -> jax.Array:
        batch, length, heads, width = q.shape
        segments, window, softcap = (options[name] for name in ("segments_BS", "window", "softcap"))
        if implementation == "auto":
            splash = platform == "tpu" and length % 128 == 0 and width % 8 == 0
            cudnn = platform == "gpu" and q.dtype.itemsize == 2 and width % 8 == 0 and width <= 256 and softcap is None
            implementation = "fused" if splash or cudnn else "xla"
        if implementation != "xla":
            return fused(q, k, v)
        static = (q.dtype, segments is not None, window, softcap, None, platform)
        return kernels_xla.attend(AttentionCall(batch, length, heads, width, k.shape[2], *static), q, k, v, segments)

    return attend


def _fused(parts: int) -> Callable[..., jax.Array]:
    """Flash attention: it keeps its operands, heads first, its result and a float32 row sum; keys of all seq shards."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        if parts > 1:
            k, v = (jax.lax.all_gather(x, "seq", axis=2, tiled=True) for x in (k, v))
        row_sums = jax.typeof(q[..., 0]).update(dtype=jnp.dtype("float32"))
        kept = [checkpoint_name(x, SAVED_NAME) for x in KERNEL.bind(q, k, v, results=(jax.typeof(q), row_sums))]
        return kept[0].swapaxes(1, 2), (q, k, v, *kept)

    def backward(saved: Any, out_grad: jax.Array) -> Any:
        dq, dk, dv = KERNEL.bind(*saved, out_grad.swapaxes(1, 2), results=tuple(map(jax.typeof, saved[:3])))
        if parts > 1:
            dk, dv = (jax.lax.psum_scatter(x, "seq", scatter_dimension=2, tiled=True) for x in (dk, dv))
        return tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend
