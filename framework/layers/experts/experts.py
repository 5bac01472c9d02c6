"""The experts: feed-forward layers of equal shape; each token is routed to a few of them.

Without a capacity, no choice is dropped. Rows of tokens are sorted by expert, and each group of rows is multiplied by
its expert's weights (Gale et al. 2022, arXiv 2211.15841). On a mesh whose `expert` axis shards the experts, tokens
travel to the devices of their experts and the results back, in rounds of bounded size (`expert_exchange`). Few tokens
are all-gathered along that axis instead; each device applies its own experts, and the outputs are reduce-scattered.
Both ways, every token reaches its experts regardless of the router's choices, in arrays of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from plimsoll.framework.config import Config, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.base import BATCH_AXES, Context, Kernels, Layer, add_shared, cast
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.experts import capacity as capacities
from plimsoll.framework.layers.experts.expert_exchange import (
    Transport,
    count_buffer_rows,
    count_rounds,
    plan_round,
    return_rows,
    send_rows,
    sum_rounds,
)
from plimsoll.framework.layers.experts.expert_storage import Dense, Multiply, StoredMatrix, dense_experts
from plimsoll.framework.layers.experts.grouped import (
    Chosen,
    Implementation,
    check_platform,
    choose_implementation,
    grouped_dot,
    multiply_stored,
    with_spare_rows,
)
from plimsoll.framework.layers.experts.groups import (
    Groups,
    add_biases,
    collect,
    dispatch,
    dispatch_choices,
    find_row_experts,
    group,
    sum_choices,
)
from plimsoll.framework.layers.experts.scores import ExpertChoice
from plimsoll.framework.layers.mlp import ACTIVATIONS
from plimsoll.framework.layout import Nested, ParameterSpec, find_weight_shards, fit_axes, get_current_mesh

# Multiplies rows by their experts' weights.
Dot = Callable[[jax.Array, jax.Array], jax.Array]
Exchange = Literal["auto", "all_to_all", "all_gather"]
# With at most this many rows in the worst case, the latency of collectives matters more than memory and bytes.
_FEW_ROWS = 4096


@component
class ClampedSwiGLU:
    """Computes (up + 1) * gate * sigmoid(alpha * gate), with gate and `up` clamped (gpt-oss, arXiv 2508.10925).

    Args:
        alpha: factor on the gate inside the sigmoid; 1.702 makes the product nearly GELU (arXiv 1606.08415).
        limit: the gate is clamped from above to this; `up` is clamped to [-limit, limit].
    """

    def __init__(self, *, alpha: PositiveFloat = 1.702, limit: PositiveFloat = 7.0):
        self.alpha = alpha
        self.limit = limit

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return [..., F], the shape of both inputs, in the gate's dtype."""
        # At the limit itself, the gradient passes in full, like that of torch's clamp; that of a minimum would be half.
        gate = jnp.where(gate > self.limit, self.limit, gate)
        up = jnp.where(jnp.abs(up) > self.limit, self.limit * jnp.sign(up), up)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@component
class Experts(Layer):
    """E feed-forward layers and the sum of a token's results, weighted by their shares.

    A layer is down(act(gate(x)) * up(x)) or down(act(up(x))).

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_experts: E, the number of experts; set by the parent.
        top_k: K, the number of experts per token; set by the parent.
        hidden: F, the inner width of each expert.
        activation, gated: see `plimsoll.MLP`.
        gating: config of how the gate and `up` are combined, e.g. `config_for(ClampedSwiGLU)`; None means act(gate) *
            up. It has its own activation, so `activation` stays "silu".
        bias: whether each expert's projections have biases, initially zero.
        capacity: capacity factor: an expert has this times K * n / E slots in a sequence of n tokens, rounded up.
            Choices above the capacity are dropped: first choices come before second ones, earlier tokens before later
            ones. Padding takes no slot. None means a slot for every choice.
        exchange: how tokens reach their experts on a mesh whose `expert` axis shards them, without a capacity.
            "all_to_all" sends each choice only to the device of its expert; "all_gather" sends all tokens to all
            devices of the axis, which reserve memory for the worst case; "auto" means "all_gather" if that memory is
            at most 4,096 rows, as in generation, and "all_to_all" otherwise.
        buffer_factor: with "all_to_all", a device receives up to this multiple of its even share of rows at a time. If
            the router sends it more, they are computed in further rounds; no choice is dropped.
        implementation: kernel of the products without a capacity, see `framework.layers.experts.grouped`.
        init: config of the initializer of each expert's weights.
        output_init_scale: factor on the initial `down` weights; set by the stack.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_experts: PositiveInt,
        top_k: PositiveInt,
        hidden: PositiveInt,
        activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"] = "silu",
        gated: bool = True,
        gating: Config | None = None,
        bias: bool = False,
        capacity: PositiveFloat | None = None,
        exchange: Exchange = "auto",
        buffer_factor: PositiveFloat = 1.25,
        implementation: Implementation = "auto",
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
        output_init_scale: float = 1.0,
    ):
        if gating is not None and (activation != "silu" or not gated):
            raise ValueError(
                "experts.gating has its own gate and activation; expected gated = True and activation = "
                f"'silu', given {gated} and {activation!r}"
            )
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden = hidden
        self.activation = ACTIVATIONS[activation]
        activate = ACTIVATIONS[activation]
        self.gating: Callable[[jax.Array, jax.Array], jax.Array] = lambda gate, up: activate(gate) * up
        if gating is not None:
            self.gating = gating.instantiate()
        self.names = ("gate", "up", "down") if gated else ("up", "down")
        self.bias = bias
        self.capacity = capacity
        self.exchange: Exchange = exchange
        self.buffer_factor = buffer_factor
        self.implementation: Implementation = implementation
        self._init = init.instantiate()
        self._output_scale = output_init_scale
        # By name, the matrices whose storage `model.lora` changes; see `framework.layers.lora`.
        self.stored: dict[str, StoredMatrix] = {}

    def check_platform(self, platform: str) -> None:
        """See `Layer.check_platform`. With a capacity, no grouped product is computed, so any implementation works."""
        if self.capacity is None:
            check_platform(self.implementation, platform)

    def param_specs(self) -> Nested:
        """Return the specs of gate and up [E, D, F], and down [E, F, D].

        With biases, also gate_bias and up_bias [E, F], and down_bias [E, D]; with `model.lora`, those of
        `StoredMatrix.specs`.
        """

        def initializer(scale: float, key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
            keys = jax.random.split(key, shape[0])
            # Expert by expert: the variance of most initializers depends on the shape of a matrix.
            return scale * jax.vmap(lambda key: self._init(key, shape[1:], dtype))(keys)

        specs: Nested = {}
        for name in self.names:
            is_down = name == "down"
            shape = (self.hidden, self.dim) if is_down else (self.dim, self.hidden)
            axes = ("model", "fsdp") if is_down else ("fsdp", "model")
            roles = ("hidden", "out") if is_down else ("in", "hidden")
            weight = ParameterSpec(
                (self.num_experts, *shape),
                "float32",
                ("expert", *axes),
                initializer=partial(initializer, self._output_scale if is_down else 1.0),
                roles=("expert", *roles),
            )
            specs |= self.stored[name].specs(name, weight) if name in self.stored else {name: weight}
            if self.bias:
                bias_shape = (self.num_experts, shape[1])
                bias_axes = ("expert", axes[1])
                bias_roles = ("expert", roles[1])
                specs[f"{name}_bias"] = ParameterSpec(bias_shape, "float32", bias_axes, roles=bias_roles)
        return specs

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Cast the weights to the compute dtype.

        Without a capacity, `_on_device` gathers them where they are used: the transpose of that gather sums their
        gradients into the shards that the update uses.
        """
        if self.capacity is not None or ctx.kernels is not None:
            return super().prepare(params, ctx)

        return jax.tree.map(
            lambda spec, param: param if spec.quantized else cast(param, ctx.compute_dtype), self.param_specs(), params
        )

    def __call__(
        self, weights: Nested, x_BSD: jax.Array, choice: ExpertChoice, ctx: Context
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return (the weighted sum of the chosen experts' results, which choices were kept).

        The first is [B, S, D], the second bool [B, S, K], or None if all choices were kept.
        """
        if self.capacity is not None:
            return self._with_capacity(weights, x_BSD, choice, ctx)
        mesh = ctx.mesh
        if ctx.kernels is not None:
            # This is a trace of one device's share: the arrays are that device's, and the weights are gathered.
            return self._on_device(weights, x_BSD, choice, ctx, gathers=False), None
        if mesh is None or mesh.size == 1:
            return self._run_local_experts(weights, x_BSD, choice, ctx, first_expert=0, shards=1), None
        # A single token, as in generation, cannot be sharded over seq: these devices compute the same.
        length_axis = "seq" if x_BSD.shape[1] % mesh.shape["seq"] == 0 else None
        token_spec = PartitionSpec(BATCH_AXES, length_axis, None)
        weight_specs = jax.tree.map(
            lambda spec: PartitionSpec(*fit_axes(spec.mesh_axes, spec.run_counts, mesh.shape)), self.param_specs()
        )
        on_device = jax.shard_map(
            partial(self._on_device, ctx=ctx, gathers=True),
            mesh=get_current_mesh(mesh),
            in_specs=(weight_specs, token_spec, token_spec),
            out_specs=token_spec,
            check_vma=False,
        )
        return on_device(weights, x_BSD, choice), None

    def _on_device(
        self, weights: Nested, x_BSD: jax.Array, choice: ExpertChoice, ctx: Context, gathers: bool
    ) -> jax.Array:
        """Process one device's tokens with its shard of the weights, inside shard_map.

        With `gathers`, the weights are first all-gathered over WEIGHT_AXES.
        """
        assert ctx.mesh is not None
        sizes = ctx.mesh.shape
        if gathers:

            def gather(spec: ParameterSpec, weight: jax.Array) -> jax.Array:
                for shards in find_weight_shards(fit_axes(spec.mesh_axes, spec.run_counts, sizes), sizes):
                    weight = jax.lax.all_gather(weight, shards.axes, axis=shards.dimension, tiled=True)
                return weight

            weights = jax.tree.map(gather, self.param_specs(), weights)
        if self.bias and sizes["model"] > 1:
            # Each device of the model axis has a partial sum over F, so only one of them may add the bias.
            is_first = jax.lax.axis_index("model") == 0
            weights = {**weights, "down_bias": jnp.where(is_first, weights["down_bias"], 0)}
        shards = sizes["expert"]
        uses_all_to_all = self.uses_all_to_all(x_BSD.shape[0] * x_BSD.shape[1], shards)
        first_expert: jax.Array | int = 0
        if uses_all_to_all:
            y_BSD = self._exchange_tokens(weights, x_BSD, choice, ctx)
        else:
            if shards > 1:
                tokens = (x_BSD, choice)
                x_BSD, choice = jax.tree.map(lambda x: jax.lax.all_gather(x, "expert", axis=0, tiled=True), tokens)
                first_expert = jax.lax.axis_index("expert") * _num_experts(weights)
            y_BSD = self._run_local_experts(weights, x_BSD, choice, ctx, first_expert, shards)
        if sizes["model"] > 1:
            y_BSD = jax.lax.psum(y_BSD, "model")
        if shards > 1 and not uses_all_to_all:
            y_BSD = jax.lax.psum_scatter(y_BSD, "expert", scatter_dimension=0, tiled=True)
        return y_BSD

    def uses_all_to_all(self, num_tokens: int, shards: int) -> bool:
        """Return whether tokens travel only to the devices of their experts; see the argument `exchange`.

        Args:
            num_tokens: number of tokens of a device.
            shards: number of devices that share the experts.
        """
        if shards == 1 or self.capacity is not None:
            return False
        if self.exchange != "auto":
            return self.exchange == "all_to_all"
        return self._count_worst_rows(num_tokens, shards) > _FEW_ROWS

    def _count_worst_rows(self, num_tokens: int, shards: int) -> int:
        """Return the number of rows of a device if all tokens of all devices choose as many of its experts as possible.

        A token chooses an expert at most once.
        """
        return shards * num_tokens * min(self.top_k, self.num_experts // shards)

    def _exchange_tokens(self, weights: Nested, x_BSD: jax.Array, choice: ExpertChoice, ctx: Context) -> jax.Array:
        """Return the weighted sum of the experts' results for this device's tokens, [B, S, D], inside shard_map."""
        assert ctx.mesh is not None
        shards = ctx.mesh.shape["expert"]
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        num_tokens = x_TD.shape[0]
        num_choices = num_tokens * self.top_k
        worst_rows = self._count_worst_rows(num_tokens, shards)
        room = count_buffer_rows(num_choices, self.buffer_factor, worst_rows)
        implementation = choose_implementation(self.implementation, ctx.platform, x_TD.dtype)
        num_rows = with_spare_rows(room, implementation)
        transport = Transport(
            is_ragged=ctx.platform in ("tpu", "gpu"),
            mesh_axes=tuple(ctx.mesh.axis_names),
            kernels=ctx.kernels,
            even_rows=num_choices,
        )
        # An estimate traces a single round, with all rows of an even router.
        even_rows = num_choices if ctx.kernels is not None else min(num_choices, room)
        groups = group(choice.experts_BSK.reshape(num_tokens, self.top_k), self.num_experts, num_choices)
        counts_PG = jax.lax.all_gather(groups.sizes_E, "expert")
        routing = _Routing(groups, counts_PG, jax.lax.axis_index("expert"))

        def run_round(
            arguments: tuple[Nested, jax.Array, jax.Array], routing: _Routing, index: jax.Array | int
        ) -> jax.Array:
            weights, x_TD, shares_TK = arguments
            round_ = plan_round(routing.counts_PG, routing.device, index, room)
            groups = routing.groups
            x_ND = send_rows(transport, dispatch(x_TD, groups), round_, num_rows)
            shares_N1 = send_rows(transport, dispatch_choices(shares_TK, groups), round_, num_rows)
            y_ND = self._run_rows(weights, x_ND, round_.sizes_E, ctx.kernels, implementation, even_rows, shares_N1)
            return sum_choices(return_rows(transport, y_ND, round_, num_choices), groups)

        arguments = (weights, x_TD, choice.shares_BSK.reshape(num_tokens, self.top_k))
        if room == worst_rows or ctx.kernels is not None:
            y_TD = run_round(arguments, routing, 0)
        else:
            num_rounds = transport.agree_on_most(count_rounds(counts_PG, room))
            y_TD = sum_rounds(run_round, arguments, routing, num_rounds, even_rounds=-(-num_choices // room))
        return y_TD.reshape(x_BSD.shape)

    def _run_local_experts(
        self,
        weights: Nested,
        x_BSD: jax.Array,
        choice: ExpertChoice,
        ctx: Context,
        first_expert: jax.Array | int,
        shards: int,
    ) -> jax.Array:
        """Return the sum of the local experts' results for their tokens, [B, S, D].

        The local experts start at index `first_expert`.

        Args:
            shards: the number of devices that share the choices; the estimate of work is divided by it.
        """
        implementation = choose_implementation(self.implementation, ctx.platform, x_BSD.dtype)
        num_experts = _num_experts(weights)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        top_k = choice.experts_BSK.shape[-1]
        experts_TK = choice.experts_BSK.reshape(-1, top_k) - first_expert
        # A token chooses an expert at most once, so it has no more rows than there are local experts.
        num_rows = with_spare_rows(x_TD.shape[0] * min(top_k, num_experts), implementation)
        groups = group(experts_TK, num_experts, num_rows)
        x_ND = dispatch(x_TD, groups)
        even_rows = x_TD.shape[0] * top_k // shards
        y_ND = self._run_rows(weights, x_ND, groups.sizes_E, ctx.kernels, implementation, even_rows)
        y_TKD = collect(y_ND, groups)
        y_TD = _combine_outputs(y_TKD, choice.shares_BSK.reshape(-1, top_k))
        return y_TD.reshape(x_BSD.shape)

    def _run_rows(
        self,
        weights: Nested,
        x_ND: jax.Array,
        sizes_E: jax.Array,
        kernels: Kernels | None,
        implementation: Chosen,
        even_rows: int,
        shares_N1: jax.Array | None = None,
    ) -> jax.Array:
        """Return the results of rows that are sorted by expert, [N, D].

        Args:
            weights: weights of the local experts.
            x_ND: rows, including the spare ones of `with_spare_rows`.
            sizes_E: int32, the number of rows of each local expert.
            kernels: see `Context.kernels`.
            implementation: kernel of the products.
            even_rows: number of rows that an even router would fill.
            shares_N1: the share of each row, which multiplies its result; None multiplies by nothing.
        """
        dot: Dot = partial(grouped_dot, sizes_E=sizes_E, implementation=implementation, even_rows=even_rows)
        multiply: Multiply = partial(multiply_stored, implementation=implementation, even_rows=even_rows)
        if kernels is not None:
            dot = partial(kernels.grouped_dot, rows=even_rows)
            multiply = partial(_multiply_for_estimate, dot)
        experts_N = find_row_experts(sizes_E, x_ND.shape[0]) if self.bias else None

        def project(name: str, rows_NI: jax.Array) -> jax.Array:
            if name in self.stored:
                y_NO = self.stored[name].product(rows_NI, weights, name, dot, multiply, sizes_E)
            else:
                y_NO = dot(rows_NI, weights[name])
            if experts_N is None:
                return y_NO
            return add_biases(y_NO, weights[f"{name}_bias"], experts_N)

        if self.bias and shares_N1 is not None:
            # The share multiplies the bias too.
            y_ND = project("down", self._compute_hidden(project, x_ND))
            y_ND = save_inputs(_scale_rows)(y_ND, shares_N1)
        else:
            # The gradients of the shares then need hidden activations, but no results, so a backward pass that computes
            # the layer again leaves out the product with `down` and the way back of its results.
            y_ND = project("down", self._compute_hidden(project, x_ND, shares_N1))
        return checkpoint_name(y_ND, "mlp_down")

    def _compute_hidden(
        self, project: Callable[[str, jax.Array], jax.Array], x: jax.Array, shares: jax.Array | None = None
    ) -> jax.Array:
        """Return the inner activations.

        Args:
            project: project(name, x) is the projection with that name.
            x: inputs [..., D].
            shares: factors [..., 1] on the inner activations; None multiplies by nothing.
        """
        up = checkpoint_name(project("up", x), "mlp_up")
        function = self.activation
        operands = (up,)
        if "gate" in self.names:
            gate = checkpoint_name(project("gate", x), "mlp_gate")
            function = self.gating
            operands = (gate, up)
        if shares is None:
            return save_inputs(function)(*operands)

        # One function, so that the activations are not saved without the factors too.
        def scale(shares: jax.Array, *operands: jax.Array) -> jax.Array:
            return _scale_rows(function(*operands), shares)

        return save_inputs(scale, apart=True)(shares, *operands)

    def _with_capacity(
        self, weights: Nested, x_BSD: jax.Array, choice: ExpertChoice, ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        assert self.capacity is not None
        is_token_BS = capacities.find_tokens(ctx.batch)
        slots = capacities.assign_slots(choice.experts_BSK, self.num_experts, self.capacity, is_token_BS)
        x_BECD = capacities.dispatch(x_BSD, slots)
        # From here on, experts are sharded instead of sequences: the partitioner inserts an all-to-all.
        slot_axes = (tuple(axis for axis in BATCH_AXES if axis != "expert"), "expert", None)
        x_BECD = ctx.constrain(x_BECD, *slot_axes, None)
        dot: Dot = partial(jnp.einsum, "beci,eio->beco")

        def project(name: str, x_BECI: jax.Array) -> jax.Array:
            if name in self.stored:
                y_BECO = self.stored[name].product(x_BECI, weights, name, dot, capacities.multiply_stored, None)
            else:
                y_BECO = dot(x_BECI, weights[name])
            if not self.bias:
                return y_BECO
            return add_shared(y_BECO, weights[f"{name}_bias"][:, None])

        h_BECF = ctx.constrain(self._compute_hidden(project, x_BECD), *slot_axes, "model")
        y_BECD = ctx.constrain(project("down", h_BECF), *slot_axes, None)
        y_BECD = checkpoint_name(y_BECD, "mlp_down")
        y_BSKD = capacities.collect(ctx.constrain(y_BECD, BATCH_AXES, None, None, None), slots)
        return _combine_outputs(y_BSKD, choice.shares_BSK), slots.is_kept_BSK

    def flops_per_token(self, seq_len: int) -> float:
        """Count the K experts of a token, not all: 2 * K * (2 or 3) * D * F, and their adapters."""
        ranks = sum(stored.rank or 0 for stored in self.stored.values())
        adapters = ranks * (self.dim + self.hidden)
        return 2.0 * self.top_k * (len(self.names) * self.dim * self.hidden + adapters)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Routing:
    """The choices of all devices along the `expert` axis.

    Attributes:
        groups: this device's choices, sorted by expert of all devices.
        counts_PG: int32, the number of choices of each device for each expert.
        device: int32, the index of this device.
    """

    groups: Groups
    counts_PG: jax.Array
    device: jax.Array


def _num_experts(weights: Nested) -> int:
    """Return the number of local experts."""
    return jax.tree.leaves(weights["up"])[0].shape[0]


def _multiply_for_estimate(
    dot: Dot, x: jax.Array, weights: Nested, dense: Dense, transpose: bool, sizes: jax.Array | None
) -> jax.Array:
    """Compute `multiply_stored` with the product of an estimate."""
    weight_EIO = dense_experts(dense, weights, x)
    return dot(x, weight_EIO.mT if transpose else weight_EIO)


def _scale_rows(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Return x [..., D] times factors [..., 1], in x's dtype; only the product is rounded."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * factors.astype(wide)).astype(x.dtype)


def _combine_outputs(y_TKD: jax.Array, shares_TK: jax.Array) -> jax.Array:
    """Sum over K, weighted by shares, in float32 or wider: [..., D] in y's dtype."""
    wide = jnp.promote_types(y_TKD.dtype, jnp.float32)
    # Not a matrix product: XLA would compute one with a single row for each token.
    total = jnp.sum(y_TKD.astype(wide) * shares_TK.astype(wide)[..., None], axis=-2)
    return total.astype(y_TKD.dtype)
