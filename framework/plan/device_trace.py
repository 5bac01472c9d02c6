"""Traces one device's share of a step's forward and backward pass to a jaxpr, without any device.

The experiment's own layers are traced under `shard_map` on an abstract mesh, so shapes, remat policies, loops and
custom layers are those of the real step, and every array has the size of one device's shard. The collectives that XLA's
partitioner would add are written out: weights are all-gathered where the layers prepare them, and table lookups
exchange token indices and table columns by all-to-all. Attention kernels are opaque, and so is the exchange of tokens
between experts, whose work is that of an even router.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive
from jax.sharding import AbstractMesh, PartitionSpec

from plimsoll.framework.layers import kernels_xla, lookup, ring_attention
from plimsoll.framework.layers.base import BATCH_AXES, LAYER_AXIS, Context, Out, batch_shards, batch_specs, cast
from plimsoll.framework.layers.embedding import Embedding
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.kernels_call import (
    SAVED_NAME,
    SPLASH_LANES,
    AttentionCall,
    BlockMask,
    ContextParallel,
    Ids,
)
from plimsoll.framework.layers.low_precision import round_and_restore
from plimsoll.framework.layers.stack import LayerPattern, Stack
from plimsoll.framework.layout import (
    MeshAxes,
    Nested,
    ParameterSpec,
    PyTree,
    StateLayout,
    TensorSpec,
    TrainState,
    WeightShards,
    find_weight_shards,
    fit_axes,
    flatten,
    merge,
)
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.plan.jaxpr_analysis import LOCAL_ATTENTION, LOCAL_EXCHANGE, LOCAL_GROUPED_PRODUCT
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.schedules.pipeline_shape import STACK

# Represents flash attention, forward or backward: it has operands and results, but no body.
ATTENTION_KERNEL = Primitive(LOCAL_ATTENTION)
ATTENTION_KERNEL.multiple_results = True
ATTENTION_KERNEL.def_abstract_eval(lambda *operands, results, seen_share: list(results))
# Represents products of rows with their experts' weights, forward or backward. Its FLOPs follow from the average number
# of rows, not from the capacity of the arrays.
GROUPED_PRODUCT = Primitive(LOCAL_GROUPED_PRODUCT)
GROUPED_PRODUCT.def_abstract_eval(lambda *operands, result, flops: result)
# Represents an exchange of rows along a mesh axis. The bytes that it receives follow from the average number of rows.
EXCHANGE = Primitive(LOCAL_EXCHANGE)
EXCHANGE.def_abstract_eval(lambda rows, *, result, received_bytes: result)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LocalContext(Context):
    """The context of one device of an abstract mesh, whose platform is given because the mesh has no devices."""

    device_platform: str = field(default="cpu", metadata={"static": True})

    @property
    def platform(self) -> str:
        return self.device_platform

    def constrain(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        # Inside shard_map, activations are already one device's shards.
        return x

    def gather(self, weight: jax.Array, mesh_axes: MeshAxes, *, as_fp8: bool = False) -> jax.Array:
        # A layer's weights are gathered when they are fetched.
        return weight

    def seq_shards(self, batch: int, length: int) -> int:
        # The sizes are those of one device's shard.
        return 1 if self.mesh is None else self.mesh.shape["seq"]

    def on_each_device(
        self, run: Callable[..., jax.Array], in_axes: Sequence[MeshAxes], out_axes: MeshAxes
    ) -> Callable[..., jax.Array]:
        return run


class TraceCache:
    """Traces like `trace`, and keeps the results for experiments that differ only in settings of `memory` and batch.

    A trace depends on few of these settings: the rows per device and microbatch, the mesh axes that shard weights and
    positions, the remat policy, whether the weights are offloaded, the numbers of layers in partial placements, and the
    precision of products.
    """

    def __init__(self) -> None:
        self._traces: dict[tuple[object, ...], ClosedJaxpr] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def __call__(
        self, split_experiment: SplitExperiment, sizes: dict[str, int], platform: str, *, pipe_chunks: int = 1
    ) -> ClosedJaxpr:
        """Return the trace of an experiment; see `trace`."""
        experiment = split_experiment.experiment
        memory = experiment.memory
        rows = experiment.data.global_batch_size // (experiment.learner.accumulate * batch_shards(sizes))
        # The data axis shards only the batch, which `rows` covers.
        shards = tuple(size for axis, size in sizes.items() if axis != "data")
        # A partial placement (the first N layers) splits the stack into layer ranges, which are traced one by one.
        placements = (memory.gradients, memory.optimizer_state, memory.activations)
        partial = tuple(placement.text for placement in placements if placement.is_partial)
        precision = tuple(experiment.model.precision.items())
        key = (
            *(rows, shards, pipe_chunks, memory.remat, memory.parameters.text, memory.experts.text),
            *(partial, precision),
        )
        if key not in self._traces:
            self._traces[key] = trace(split_experiment, sizes, platform, pipe_chunks=pipe_chunks)
        return self._traces[key]


def trace(
    split_experiment: SplitExperiment, sizes: dict[str, int], platform: str, *, pipe_chunks: int = 1
) -> ClosedJaxpr:
    """Trace the gradients of one microbatch on one device.

    All arguments and results are shards, except for the gradient of the head's table, if it is trained, which is
    unsharded. The real step sums that gradient into a shard; see `framework.layers.head`.

    Args:
        split_experiment: the experiment to train, with stacks split into layer ranges.
        sizes: {mesh axis: size} for all mesh axes.
        platform: tpu, gpu or cpu; selects the attention kernel as `implementation="auto"` does.
        pipe_chunks: number of chunks of a pipeline's stage, of which one is traced.
    """
    step = _DeviceStep(split_experiment, sizes, platform, pipe_chunks)
    experiment = split_experiment.experiment
    data = experiment.data
    microbatch_size = data.global_batch_size // experiment.learner.accumulate
    batch_arrays = experiment.batch_arrays()
    arrays = {name: ((microbatch_size, *shape[1:]), dtype) for name, (shape, dtype) in batch_arrays.items()}
    state = split_experiment.specs
    groups = [state.parameter, state.frozen, state.buffer]
    if pipe_chunks > 1:
        groups = [_select_chunk(group, pipe_chunks) for group in groups]
    arguments = (*groups, batch_specs(arrays))
    layout = StateLayout(TrainState(), step.mesh)
    axes = jax.tree.map(layout.partition, arguments)
    shapes = layout.abstract(arguments)
    # Results are declared as replicated so that each keeps its shape on one device.
    local = jax.shard_map(step.gradients, mesh=step.mesh, in_specs=axes, out_specs=PartitionSpec(), check_vma=False)
    closed = jax.make_jaxpr(local)(*shapes)
    (mapped,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map")
    inner = mapped.params["jaxpr"]
    # The body is an open jaxpr or a closed one, depending on the version of jax.
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def _select_chunk(specs: Nested, pipe_chunks: int) -> Nested:
    """Return specs of all stages, with those of the stack as if it had only one chunk of each stage's layers."""

    def select(spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=(spec.shape[0] // pipe_chunks, *spec.shape[1:]))

    return {name: jax.tree.map(select, group) if name == STACK else group for name, group in specs.items()}


class _DeviceStep:
    """The forward and backward pass of an experiment's model on one device of its mesh."""

    def __init__(self, split_experiment: SplitExperiment, sizes: dict[str, int], platform: str, pipe_chunks: int):
        self.experiment = split_experiment.experiment
        self.sizes = sizes
        self.platform = platform
        self.mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        # Copied because the number of heads changes: under shard_map a layer sees only the heads of its device.
        self.model = copy.deepcopy(split_experiment.model)
        # Layer ranges of one stack share the same layer object, which must be changed only once.
        patterns = {id(stack.pattern): stack.pattern for stack in self.model.stacks.values()}
        for pattern in patterns.values():
            for layer in pattern.walk():
                layer.localize(sizes)
            num_ranges = sum(stack.pattern is pattern for stack in self.model.stacks.values())
            _trace_equal_layers_once(pattern, num_ranges)
        if sizes[LAYER_AXIS] > 1:
            # A device has the layers of its stage of the pipeline.
            stack = self.model.stacks[STACK]
            self.model.stages[STACK] = stack.select_layers(stack.num_repeats // (sizes[LAYER_AXIS] * pipe_chunks))
        self.specs = self.model.parameter_specs()

    def gradients(self, params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> PyTree:
        """Return the gradients of one microbatch with respect to `params`."""
        model = self.model
        remat = self.experiment.memory.remat
        rows = jnp.arange(batch["weights"].shape[0])
        fields: dict[str, Any] = {
            "batch": batch,
            "num_targets": jnp.float32(1),
            "num_sequences": jnp.float32(1),
            "training": True,
        }
        fields |= {"rng": jax.random.key(0), "rows": rows, "compute_dtype": model.compute_dtype}
        ctx = _LocalContext(
            **fields,
            mesh=self.mesh,
            remat=remat,
            device_platform=self.platform,
            # Real kernels would ask for the devices of the mesh.
            kernels=_LocalKernels(self.platform, self.sizes["seq"]),
        )
        # Other heads, such as a score head, have no table whose gradient is summed chunk by chunk.
        if not isinstance(model, CausalLM) or not isinstance(model.head, LMHead):
            return self._compute_stage_grads(params, frozen, buffers, ctx)
        # The head gets no mesh, so that its chunks are those of this device's positions.
        head_ctx = functools.partial(_LocalContext, **fields, device_platform=self.platform)
        return self._compute_language_model_grads(model, params, frozen, buffers, ctx, head_ctx)

    def _compute_stage_grads(self, params: Nested, frozen: Nested, buffers: Nested, ctx: Context) -> PyTree:
        model = self.model

        def objective(params: Nested) -> jax.Array:
            weights = merge(params, model.unstack_layers(frozen, ctx.remat))
            carry = None
            total_loss = jnp.float32(0)
            for name in model.stages:
                carry, out = self._run_stage(name, weights, carry, ctx, buffers)
                if out.loss is not None:
                    total_loss = total_loss + out.loss
            return total_loss

        return model.stack_layers(jax.grad(objective)(model.unstack_layers(params, ctx.remat)))

    def _compute_language_model_grads(
        self,
        model: CausalLM,
        params: Nested,
        frozen: Nested,
        buffers: Nested,
        ctx: Context,
        make_head_ctx: Callable[[], Context],
    ) -> PyTree:
        table_path = "embed/token" if model.head.tied else "head/table"
        sharded_table = flatten(merge(params, frozen))[table_path]
        table = self._gather(model.language_head.table_spec(), sharded_table)

        def loss(params: Nested, table: jax.Array) -> jax.Array:
            weights = merge(params, model.unstack_layers(frozen, ctx.remat))
            carry: PyTree = None
            losses: list[jax.Array] = []
            for name in model.stages:
                if name != "head":
                    carry, out = self._run_stage(name, weights, carry, ctx, buffers)
                    losses += [] if out.loss is None else [out.loss]
            norm = jax.tree.map(lambda w: w.astype(model.compute_dtype), weights["head"]["norm"])
            head_ctx = make_head_ctx().fold("head")
            head_weights = {"norm": norm, "table": table}
            _, head_out = model.head.apply(head_weights, carry, head_ctx, buffers.get("head", {}))
            assert head_out.loss is not None
            return sum(losses, head_out.loss)

        # The table is a separate argument so that its gradient is that of the unsharded table.
        table_is_trained = table_path in flatten(self.experiment.learner.specs)
        argnums = (0, 1) if table_is_trained else (0,)
        grads, *table_grad = jax.grad(loss, argnums=argnums)(model.unstack_layers(params, ctx.remat), table)
        return model.stack_layers(grads), table_grad

    def _run_stage(self, name: str, params: Nested, carry: PyTree, ctx: Context, buffers: Nested) -> tuple[PyTree, Out]:
        """Return the result of a stage; its weights are gathered as the layers do it on a real mesh."""
        stage = self.model.stages[name]
        stage_buffers = buffers.get(name, {})
        if isinstance(stage, Stack):
            # Weights are gathered one layer at a time, without the layer axis.
            fetch = functools.partial(jax.tree.map, self._gather, stage.pattern.parameter_specs())
            return stage.forward(
                params[name], carry, stage.context(name, ctx), stage_buffers, fetch, params.get("shared")
            )
        if isinstance(stage, Embedding):
            # An embedding gathers only position tables that all sequences share.
            tables = jax.tree.map(_on_device, params[name])
            if stage.max_positions is not None and "positions" not in ctx.batch:
                position_spec = self.specs[name]["position"]
                tables |= {"position": self._gather(position_spec, tables["position"])}
            return stage.apply(tables, carry, ctx.fold(name), stage_buffers)
        weights = jax.tree.map(self._gather, self.specs.get(name, {}), params.get(name, {}))
        prepared = stage.prepare(weights, ctx)
        return stage.apply(prepared, carry, ctx.fold(name), stage_buffers)

    def _gather(self, spec: ParameterSpec, weight: jax.Array) -> jax.Array:
        """Return a weight on the device, in the compute dtype, all-gathered over WEIGHT_AXES."""
        weight = _on_device(weight)
        if not spec.quantized:
            # Cast first, so that the all-gather moves the smaller dtype.
            weight = weight.astype(self.model.compute_dtype)
        gather = _gather_as_fp8 if spec.gathered_as_fp8 else _gather
        stored_axes = fit_axes(spec.mesh_axes, spec.run_counts, self.sizes)
        for shards in find_weight_shards(stored_axes, self.sizes):
            weight = gather(weight, shards)
        return weight


def _gather(weight: jax.Array, shards: WeightShards) -> jax.Array:
    return jax.lax.all_gather(weight, shards.axes, axis=shards.dimension, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_as_fp8(weight: jax.Array, shards: WeightShards) -> jax.Array:
    """Gather the bits of 8-bit numbers. The maximum over the devices, one number, is left out."""
    return round_and_restore(weight, lambda bits: _gather(bits, shards))


def _scatter_gradient(shards: WeightShards, residuals: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(grad, shards.axes, scatter_dimension=shards.dimension, tiled=True),)


_gather_as_fp8.defvjp(lambda weight, shards: (_gather_as_fp8(weight, shards), None), _scatter_gradient)


def _trace_equal_layers_once(pattern: LayerPattern, num_ranges: int) -> None:
    """Let layers with equal configs share one function, which JAX traces and differentiates once.

    Tracing takes most of the time of an estimate, and a hybrid repeats its linear layers three times in a pattern.

    Args:
        pattern: the layers, whose `apply` is replaced.
        num_ranges: number of layer ranges that run the pattern.
    """
    remaining = dict(pattern.configs)
    while remaining:
        config = next(iter(remaining.values()))
        names = [name for name, other in remaining.items() if other == config]
        if len(names) * num_ranges > 1:
            shared = jax.jit(pattern.layers[names[0]].apply)
            for name in names:
                pattern.layers[name].apply = shared
        for name in names:
            del remaining[name]


def _on_device(weight: jax.Array) -> jax.Array:
    is_offloaded = jax.typeof(weight).memory_space == jax.memory.Space.Host
    return jax.device_put(weight, jax.memory.Space.Device) if is_offloaded else weight


class _LocalKernels:
    """Attention and table lookups on one device's shards.

    Args:
        platform: tpu, gpu or cpu.
        seq_shards: number of shards along the sequence.
    """

    def __init__(self, platform: str, seq_shards: int):
        self._platform = platform
        self._seq_shards = seq_shards

    def look_up(self, table_VD: jax.Array, indices_BS: jax.Array, ctx: Context, spec: TensorSpec) -> jax.Array:
        """Look up rows like `lookup.look_up`, on shards: tokens of all devices with other columns, own columns."""
        assert ctx.mesh is not None
        table_type = jax.typeof(table_VD)
        partition = lookup.TablePartition.make(spec, ctx.mesh.shape)
        # The axis of [B, S, D] along which the devices have other tokens.
        trades = [(name, 1 if name == "seq" else 0) for name in reversed(partition.column_axes)]

        @jax.custom_vjp
        def rows(table: jax.Array, indices: jax.Array) -> jax.Array:
            x = cast(jnp.take(table, indices, axis=0), ctx.compute_dtype)
            # Each device sends its columns of the other devices' tokens, and receives all columns of its own tokens.
            for name, axis in trades:
                x = jax.lax.all_to_all(x, name, split_axis=axis, concat_axis=2, tiled=True)
            return x

        def backward(indices: jax.Array, rows_grad: jax.Array) -> tuple[jax.Array, np.ndarray]:
            for name, axis in reversed(trades):
                rows_grad = jax.lax.all_to_all(rows_grad, name, split_axis=2, concat_axis=axis, tiled=True)
            table_gradient = functools.partial(lookup.table_gradient, shape=spec.shape, dtype=table_type.dtype)
            grad = lookup.shard_gradient(table_gradient, indices, rows_grad, partition=partition)
            # Integers have a gradient of dtype float0.
            return grad, np.zeros(indices.shape, jax.dtypes.float0)

        rows.defvjp(lambda table, indices: (rows(table, indices), indices), backward)
        for name, axis in trades:
            indices_BS = jax.lax.all_gather(indices_BS, name, axis=axis, tiled=True)
        return rows(table_VD, indices_BS)

    def grouped_dot(self, x_NI: jax.Array, weight_EIO: jax.Array, *, rows: int) -> jax.Array:
        """Multiply like `grouped.grouped_dot`, on shards."""
        return _make_grouped_product(rows)(x_NI, weight_EIO)

    def exchange_rows(self, rows_MD: jax.Array, num_rows: int, axis: str, *, even_rows: int) -> jax.Array:
        """Exchange rows like `expert_exchange.Transport.move`; the caller has its own gradient."""
        rows = jax.typeof(rows_MD)
        dim = rows.shape[1]
        devices = jax.lax.axis_size(axis)
        # The rows for a device's own experts do not travel.
        received_rows = even_rows * (devices - 1) // devices
        received_bytes = received_rows * dim * rows.dtype.itemsize
        return EXCHANGE.bind(rows_MD, result=rows.update(shape=(num_rows, dim)), received_bytes=received_bytes)

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
        context_parallel: ContextParallel,
        mesh: Any,
        **options: object,
    ) -> jax.Array:
        """Compute `dot_product_attention` on shards; "auto" does not check which packages are installed."""
        batch, length, heads, head_size = query_BSNH.shape
        if implementation == "auto":
            platform = self._platform
            has_splash = platform == "tpu" and length % 128 == 0 and head_size % 8 == 0
            # cuDNN or Triton; not so with a cap or sinks if keys are gathered over seq, which Triton does not support.
            has_flash = platform == "gpu" and query_BSNH.dtype.itemsize <= 4 and head_size <= 256
            implementation = "fused" if has_splash or has_flash else "xla"
        num_shards = self._seq_shards
        call = AttentionCall(
            batch=batch * math.prod(mesh.shape[axis] for axis in BATCH_AXES),
            length=length * num_shards,
            heads=heads * mesh.shape["model"],
            head_dim=head_size,
            kv_heads=key_BSKH.shape[2] * mesh.shape["model"],
            dtype=query_BSNH.dtype,
            has_segments=segments_BS is not None,
            window=window,
            softcap=softcap,
            mesh=mesh,
            platform=self._platform,
            scale=head_size**-0.5,
            value_dim=value_BSKH.shape[3],
            context_parallel=context_parallel,
        )
        arrays = (query_BSNH, key_BSKH, value_BSKH, segments_BS, sinks_N)
        multiple = SPLASH_LANES if implementation != "xla" and self._platform == "tpu" else 1
        if implementation != "cudnn" and ring_attention.uses_ring(call, multiple):
            kernel = kernels_xla.XlaKernel(call) if implementation == "xla" else _TracedKernel()
            return ring_attention.attend_on_device(call, kernel, *arrays)
        if implementation == "xla":
            return kernels_xla.attend(replace(call, batch=batch, length=length, mesh=None), *arrays)
        # The last device has the most work: its queries see all keys before them.
        mask = BlockMask(offset=(num_shards - 1) * length, window=window)
        attend = _make_flash_attention(num_shards, mask.seen_share(length, num_shards * length))
        # Sinks are only N numbers, so they are left out of the kernel's memory and work.
        return attend(query_BSNH, key_BSKH, value_BSKH)


@dataclass(frozen=True)
class _TracedKernel:
    """Flash attention to some of a row's keys, without a body; see `BlockKernel`."""

    def block_size(self, length: int) -> int:
        return math.gcd(length, 512)

    def forward(
        self, q_BNSH: jax.Array, k_BKTH: jax.Array, v_BKTV: jax.Array, ids: Ids | None, mask: BlockMask
    ) -> tuple[jax.Array, jax.Array]:
        out_type = jax.typeof(q_BNSH).update(shape=(*q_BNSH.shape[:-1], v_BKTV.shape[-1]))
        sums_type = jax.typeof(q_BNSH[..., 0]).update(dtype=jnp.dtype("float32"))
        seen_share = mask.seen_share(q_BNSH.shape[2], k_BKTH.shape[2])
        out, sums = ATTENTION_KERNEL.bind(q_BNSH, k_BKTH, v_BKTV, results=(out_type, sums_type), seen_share=seen_share)
        return out, sums

    def backward(
        self,
        q_BNSH: jax.Array,
        k_BKTH: jax.Array,
        v_BKTV: jax.Array,
        ids: Ids | None,
        mask: BlockMask,
        out_BNSV: jax.Array,
        log_sums_BNS: jax.Array,
        grad_BNSV: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        types = tuple(map(jax.typeof, (q_BNSH, k_BKTH, v_BKTV)))
        seen_share = mask.seen_share(q_BNSH.shape[2], k_BKTH.shape[2])
        operands = (q_BNSH, k_BKTH, v_BKTV, out_BNSV, log_sums_BNS, grad_BNSV)
        dq, dk, dv = ATTENTION_KERNEL.bind(*operands, results=types, seen_share=seen_share)
        return dq, dk, dv


def _make_flash_attention(seq_shards: int, seen_share: float) -> Callable[..., jax.Array]:
    """Return flash attention over `seq_shards` seq shards: queries are one shard, keys and values are all-gathered.

    For the backward pass it saves its operands (heads first), its result and a float32 row sum.
    """

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        if seq_shards > 1:
            k, v = (jax.lax.all_gather(x, "seq", axis=2, tiled=True) for x in (k, v))
        row_sums = jax.typeof(q[..., 0]).update(dtype=jnp.dtype("float32"))
        result = jax.typeof(q).update(shape=(*q.shape[:-1], v.shape[-1]))
        results = ATTENTION_KERNEL.bind(q, k, v, results=(result, row_sums), seen_share=seen_share)
        saved_results = [checkpoint_name(x, SAVED_NAME) for x in results]
        return saved_results[0].swapaxes(1, 2), (q, k, v, *saved_results)

    def backward(saved: tuple[jax.Array, ...], out_grad: jax.Array) -> tuple[jax.Array, ...]:
        grad_types = tuple(map(jax.typeof, saved[:3]))
        dq, dk, dv = ATTENTION_KERNEL.bind(*saved, out_grad.swapaxes(1, 2), results=grad_types, seen_share=seen_share)
        if seq_shards > 1:
            dk, dv = (jax.lax.psum_scatter(x, "seq", scatter_dimension=2, tiled=True) for x in (dk, dv))
        return tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend


def _make_grouped_product(rows: int) -> Callable[..., jax.Array]:
    """Return a grouped product of `rows` rows; each of its two gradients is another such product."""

    def bind_product(result: ShapedArray, x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        inputs, outputs = weight.shape[1:]
        return GROUPED_PRODUCT.bind(x, y, result=result, flops=2 * rows * inputs * outputs)

    def product(x_NI: jax.Array, weight_EIO: jax.Array) -> jax.Array:
        result = jax.typeof(x_NI[:, :1] + weight_EIO[:1, 0, :])
        return bind_product(result, x_NI, weight_EIO, weight_EIO)

    def backward(saved: tuple[jax.Array, jax.Array], grad_NO: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_NI, weight_EIO = saved
        x_grad = bind_product(jax.typeof(x_NI), grad_NO, weight_EIO, weight_EIO)
        weight_grad = bind_product(jax.typeof(weight_EIO), x_NI, grad_NO, weight_EIO)
        return x_grad, weight_grad

    grouped = jax.custom_vjp(product)
    grouped.defvjp(lambda x, weight: (product(x, weight), (x, weight)), backward)
    return grouped
