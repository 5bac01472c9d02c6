"""Stack: a repeated pattern of layers, with parameters stacked on a leading axis and a scan over the repeats.

`pattern` is a list of layer configs, so different layers may alternate. The loop, the schedules and the remat policies
treat one repeat of it as a layer, and so do the names and comments here: with the usual pattern of a single config, it
is one. One `forward(fetch)` serves every use: training, evaluation with averaged weights, and sampling.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config, PositiveInt, component
from plimsoll.framework.layers import grad_accumulation, remat
from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layers.layer_pattern import LayerPattern
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layers.reversible import Reversible, TwoStream
from plimsoll.framework.layout import Nested, TensorSpec, fill_none, floats

# The body of a loop: (carry, (index, layer's parameters, layer's buffers)) -> (carry, Out).
Body = Callable[[Any, tuple[jax.Array, Nested, Nested]], tuple[Any, Out]]


@component
class Stack(Layer):
    """A stack of num_layers layers that repeat `pattern`.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_layers: number of layers, a multiple of the pattern's length.
        pattern: configs of the layers; with a single entry, all layers are alike.
        shared: positions in the pattern, from 0, of layers whose parameters all repeats share: there is one copy, and
            its gradient is the sum over its uses (Zamba's attention block, arXiv 2405.16712).
        depth_scaled_init: divide the initial output projections by sqrt(2 * num_layers), as GPT-2 does.
        streams: "float32" or "fixed" adds the blocks' branches to two streams alternately instead of to one, which
            makes the stack reversible (memory.remat = invert), see `framework.layers.reversible.TwoStream`. This is a
            different function of the same parameters. All layers need branches, as `Block` has.
        depth: number of layers of the whole model, set by the parent if there are other stacks; None means num_layers.
        is_first: whether the stack precedes another one whose first layer determines where its arrays are stored, see
            `CausalLM`; set by the parent.
        unroll: number of repeats per iteration of the loop. 0 means all: there is no loop and compile time grows with
            depth. On CPU, where a loop copies the weights that it slices, the step is then about 10% faster. With any
            memory.remat except none, there is a loop anyway: without one, XLA recomputes all layers at the same time,
            or merges the recomputation with the forward pass, and saves no memory (compiled for CPU and H200).
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_layers: PositiveInt,
        pattern: list[Config],
        shared: list[int] = [],  # noqa: B006  (a config's default is copied)
        depth_scaled_init: bool = True,
        streams: Literal["one", "float32", "fixed"] = "one",
        unroll: int = 1,
        depth: PositiveInt | None = None,
        is_first: bool = False,
    ):
        if not pattern:
            raise ValueError("pattern needs at least one layer config")
        if num_layers % len(pattern):
            raise ValueError(
                f"num_layers = {num_layers} is not a multiple of the pattern's {len(pattern)} layers; "
                f"nearest: {num_layers // len(pattern) * len(pattern) or len(pattern)}"
            )
        # A proper subset: if all layers were shared, there would be no parameters to scan over.
        if not {*shared} < {*range(len(pattern))}:
            raise ValueError(
                f"shared = {shared}: expected positions of the pattern, 0 to {len(pattern) - 1}, and not all of them"
            )
        self.shared = {f"block{i}" for i in shared}
        self.num_repeats = num_layers // len(pattern)
        if not 0 <= unroll <= self.num_repeats:
            raise ValueError(f"unroll = {unroll} is not between 0 and {self.num_repeats}, the number of repeats")
        self.unroll = unroll or self.num_repeats
        # Every layer adds to the residual stream, so without this factor its variance would grow with depth.
        scale = 1.0 / math.sqrt(2.0 * (depth or num_layers)) if depth_scaled_init else 1.0
        self.is_first = is_first
        layers = [_layer(config, i, dim=dim, output_init_scale=scale) for i, config in enumerate(pattern)]
        if streams != "one":
            layers = _two_streams(layers, streams)
        self.streams: TwoStream | None = layers[0] if isinstance(layers[0], TwoStream) else None
        self.pattern = LayerPattern(layers)
        self._layer_range: LayerRange | None = None

    def select_range(self, layer_range: LayerRange) -> Stack:
        """Return the stack for a range of its layers; see `framework.layers.layer_range`."""
        selected = copy.copy(self)
        selected.num_repeats = layer_range.count
        # If all layers are in one iteration of the loop, they stay in one.
        selected.unroll = layer_range.count if self.unroll == self.num_repeats else min(self.unroll, layer_range.count)
        selected._layer_range = layer_range
        return selected

    @property
    def layer_range(self) -> LayerRange | None:
        """The range of layers of the whole stack that this stack runs; None if it is the whole stack."""
        return self._layer_range

    @property
    def _first_layer(self) -> int:
        """The index of the first layer in the whole stack."""
        return 0 if self._layer_range is None else self._layer_range.first

    def policy(self, remat: str) -> str:
        """Return the remat policy: the layer range's if there is one, else `remat`, the context's."""
        if self._layer_range is not None:
            return self._layer_range.remat
        # Groups apply to the main stack. In the small stack before it, each layer is a group.
        return "full" if self.is_first and remat.startswith("sqrt") else remat

    def context(self, name: str, ctx: Context) -> Context:
        """Return the stack's context, derived from the model's; `name` is the stack's name as a stage.

        A layer range uses the random stream of the whole stack.
        """
        home = name if self._layer_range is None else self._layer_range.home
        return replace(ctx.fold(home), remat=self.policy(ctx.remat))

    def layer_context(self, ctx: Context, index: jax.Array) -> Context:
        """Return the context of the layer at `index` of this range, derived from the stack's."""
        if self._first_layer:
            index = index + self._first_layer
        return ctx.fold_index(index)

    def children(self) -> dict[str, Layer]:
        """Return {}: the specs of the pattern are stacked instead."""
        return {}

    def parameter_specs(self) -> Nested:
        """Return the specs of the parameters that each repeat has separately, with a leading axis of num_repeats."""
        layer_specs = {}
        for name, specs in self.pattern.parameter_specs().items():
            if name not in self.shared:
                layer_specs[name] = specs
        return jax.tree.map(lambda spec: spec.stacked(self.num_repeats), layer_specs)

    def shared_specs(self) -> Nested:
        """Return the specs of the parameters that all repeats share, by layer of the pattern.

        They are passed separately from the stack's parameters, as `shared`.
        """
        shared_specs = {}
        for name, specs in self.pattern.parameter_specs().items():
            if name in self.shared:
                shared_specs[name] = specs
        return shared_specs

    def buffer_specs(self) -> Nested:
        """Return the specs of the pattern's buffers, with a leading axis of num_repeats."""

        def stacked(spec: TensorSpec) -> TensorSpec:
            shape = (self.num_repeats, *spec.shape)
            mesh_axes = (None, *spec.mesh_axes)
            return replace(spec, shape=shape, mesh_axes=mesh_axes)

        return jax.tree.map(stacked, self.pattern.buffer_specs())

    def check_remat(self, policy: str) -> None:
        """Raise ValueError if the stack does not support the remat policy, a single one for all layers."""
        # Called for its check of sqrt:G; it returns None for policies without groups.
        remat.group_size(policy, self.num_repeats)
        if policy != "invert":
            return
        for i, layer in enumerate(self.pattern.layers.values()):
            if not isinstance(layer, Reversible):
                raise ValueError(
                    f"memory.remat = invert: pattern.{i}, {type(layer).__name__}, is not reversible; set streams = "
                    "float32 or fixed in a stack of Blocks, or memory.remat = sqrt"
                )

    def is_unrolled(self, remat: str) -> bool:
        """Return whether there is no loop under this remat policy of the context."""
        remat = self.policy(remat)
        if self.unroll != self.num_repeats:
            return False
        # Without a loop, XLA would merge the recomputation with the forward pass, and save nothing.
        return remat == "none" or (self.num_repeats == 1 and remat != "invert")

    def enter(self, x: Any) -> Any:
        """Create the carry of the layers from the input of the stack."""
        # The carry between layer ranges is the same as between layers.
        is_inner = self._first_layer > 0
        return x if self.streams is None or is_inner else self.streams.enter(x)

    def leave(self, carry: Any, ctx: Context) -> Any:
        """Create the output of the stack from the carry of the layers."""
        is_inner = self._layer_range is not None and self._layer_range.end < self._layer_range.total
        return carry if self.streams is None or is_inner else self.streams.leave(carry, ctx)

    def split(self, params: Nested) -> list[Nested]:
        """Split stacked parameters into a list with the parameters of each layer."""
        # Outside of the differentiated function, this makes each layer's gradient a separate array. The gradient of a
        # slice would be added into zeros of the size of the stack.
        return [jax.tree.map(lambda p, i=i: p[i], params) for i in range(self.num_repeats)]

    def forward(
        self,
        params: Nested | list[Nested],
        carry: Any,
        ctx: Context,
        layer_state: Nested,
        fetch: Callable[[Nested], Nested] = lambda layer_params: layer_params,
        shared: Nested | None = None,
    ) -> tuple[Any, Out]:
        """Run all layers in order; each prepares its weights just before it runs.

        Args:
            params: stacked parameters, each [num_repeats, ...], or the list that `split` returns.
            carry: the input of the stack, x_BSD.
            ctx: the context; the layer's index is folded into its random stream.
            layer_state: stacked buffers.
            fetch: moves one layer's parameters, including the shared ones, to the device that computes.
            shared: the shared parameters, in the structure of `shared_specs`.
        """
        carry = self.enter(carry)
        if ctx.training and ctx.remat == "invert":
            run = self._make_invertible(fetch, ctx, layer_state)
            carry, outs = run(params, carry, shared or {})
            return self.leave(carry, ctx), self.combine(outs)
        run_layer = self.layer_function(params, ctx, fetch)
        # The gradient of a shared parameter is a sum over layers; taps compute this sum in float32.
        taps = grad_accumulation.make_taps(shared or {})

        def body(carry: Any, xs: tuple[jax.Array, Nested, Nested]) -> tuple[Any, Out]:
            index, layer_params, state = xs
            shared_params = grad_accumulation.attach_taps(shared or {}, taps)
            return run_layer(carry, layer_params, shared_params, state, self.layer_context(ctx, index))

        if isinstance(params, list):
            carry, outs = _unroll_layers(body, params, carry, layer_state)
        else:
            carry, outs = self._run_loop(body, params, carry, ctx, layer_state)
        return self.leave(carry, ctx), self.combine(outs)

    def _run_loop(self, body: Body, params: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Scan the layers and return (carry, the layers' Outs, stacked).

        With groups, a loop over layers runs inside a loop over groups.
        """
        xs = (jnp.arange(self.num_repeats), params, layer_state)
        group = remat.group_size(ctx.remat, self.num_repeats) if ctx.training else None
        if group is None:
            unroll = self.unroll if self.is_unrolled(ctx.remat) else self._loop_unroll
            return jax.lax.scan(body, carry, xs, unroll=unroll)
        grouped_xs = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), xs)
        # Only a group's input is saved: the backward pass runs the inner loop forward once more.
        run_group = remat.wrap(partial(jax.lax.scan, body), "full", unrolled=False)
        carry, outs = jax.lax.scan(run_group, carry, grouped_xs)
        outs = jax.tree.map(lambda x: x.reshape(self.num_repeats, *x.shape[2:]), outs)
        return carry, outs

    def _make_invertible(
        self, fetch: Callable[[Nested], Nested], ctx: Context, layer_state: Nested
    ) -> Callable[..., Any]:
        """Return a function (stacked parameters, carry, shared parameters) -> (carry, the layers' Outs).

        Its backward pass runs the layers in reverse. It is differentiated with respect to all of its arguments, and
        nothing else.
        """
        indices = jnp.arange(self.num_repeats)

        def run_all(params: Nested, carry: Any, shared: Nested) -> tuple[Any, Out]:
            run_layer = self.layer_function(params, ctx, fetch)

            def body(carry: Any, xs: tuple[jax.Array, Nested, Nested]) -> tuple[Any, Out]:
                index, layer_params, state = xs
                return run_layer(carry, layer_params, shared, state, self.layer_context(ctx, index))

            xs = (indices, params, layer_state)
            return jax.lax.scan(body, carry, xs, unroll=self._loop_unroll)

        def forward(*args: Any) -> Any:
            params, _, shared = args
            y, outs = run_all(*args)
            # The output is saved instead of the input, which the backward pass computes from it.
            return (y, outs), (params, y, shared)

        def backward(residuals: Any, cts: Any) -> Any:
            params, y, shared = residuals
            ct_y, ct_outs = cts
            xs = (indices, params, layer_state, ct_outs.loss)
            return self._reverse_layers(y, ct_y, shared, xs, fetch, ctx)

        run = jax.custom_vjp(run_all)
        run.defvjp(forward, backward)
        return run

    def _reverse_layers(
        self,
        y: Any,
        ct: Any,
        shared: Nested,
        xs: tuple[jax.Array, Nested, Nested, jax.Array | None],
        fetch: Callable[[Nested], Nested],
        ctx: Context,
    ) -> tuple[Nested, Any, Nested]:
        """Run all layers in reverse.

        Return (gradients of the stacked parameters, cotangent of the input, gradients of `shared`).

        Args:
            y: the output of the last layer.
            ct: the cotangent of y.
            shared: the parameters that all layers share.
            xs: (index, parameters, buffers, cotangent of the loss) of the layers, stacked.
            fetch: see `forward`.
            ctx: the stack's context.
        """

        def body(carry: Any, xs: Any) -> Any:
            y, ct, shared_sum = carry
            index, layer_params, state, loss_ct = xs

            # Only floats are differentiated. Integers, such as codes of quantized weights, are filled in again.
            def join(layer_floats: Nested, shared_floats: Nested) -> Nested:
                return fetch({**fill_none(layer_floats, layer_params), **fill_none(shared_floats, shared)})

            trained = (floats(layer_params), floats(shared))
            layer_ctx = self.layer_context(ctx, index)
            y, grads, ct = self.reverse_layer(y, trained, join, state, layer_ctx, (ct, loss_ct))
            layer_grads, shared_grads = grads
            return (y, ct, grad_accumulation.add(shared_sum, shared_grads)), layer_grads

        # The sum over layers is in float32: see `grad_accumulation`.
        start = (y, ct, grad_accumulation.zeros(floats(shared)))
        end, grads = jax.lax.scan(body, start, xs, reverse=True, unroll=self._loop_unroll)
        _, ct, shared_sum = end
        return grads, ct, grad_accumulation.cast_sums(shared_sum, floats(shared))

    @property
    def _loop_unroll(self) -> int:
        """The number of layers per iteration if a loop is required."""
        # With all layers in one iteration, there would be no loop.
        return 1 if self.unroll == self.num_repeats else self.unroll

    def reverse_layer(
        self,
        carry: Any,
        trained: tuple[Nested, Nested],
        join: Callable[[Nested, Nested], Nested],
        state: Nested,
        ctx: Context,
        cts: tuple[Any, Any],
    ) -> tuple[Any, tuple[Nested, Nested], Any]:
        """Run one layer in reverse and return (its input, gradients of `trained`, cotangent of the input).

        Args:
            carry: the layer's output.
            trained: the parameters to differentiate: those of this layer, and those that all layers share.
            join: combines these into all parameters of the layer.
            state, ctx: the layer's buffers and context.
            cts: the cotangents of the output and of the loss (None for no loss).
        """

        def prepare_joined(*trained: Nested) -> Nested:
            return self.pattern.prepare(join(*trained), ctx)

        # The layer returns gradients of prepared weights; `pull` takes them through casts and gathers.
        weights, pull = jax.vjp(prepare_joined, *trained)
        carry, grads, ct = self.pattern.reverse(weights, carry, cts, ctx, state)
        return carry, pull(grads), ct

    @staticmethod
    def combine(outs: Out) -> Out:
        """Combine the stacked Outs of the layers: losses are added, metrics averaged, buffers unchanged."""
        loss = None if outs.loss is None else jnp.sum(outs.loss)
        metrics = {name: jnp.mean(values) for name, values in outs.metrics.items()}
        return Out(loss=loss, metrics=metrics, layer_state=outs.layer_state)

    def layer_function(
        self, params: Nested | list[Nested], ctx: Context, fetch: Callable[[Nested], Nested] = lambda params: params
    ) -> Callable[..., tuple[Any, Out]]:
        """Return the function of one layer, wrapped in the remat policy in training.

        It maps (carry, the layer's own parameters, the parameters that all layers share ({} for none), its buffers, its
        context) to (carry, Out).

        Args:
            params: all layers' parameters, as passed to `forward`; only their structure and dtypes matter.
            ctx: the stack's context.
            fetch: see `forward`.
        """

        def run_layer(carry: Any, layer_params: Nested, shared: Nested, state: Nested, ctx: Context) -> tuple[Any, Out]:
            weights = self.pattern.prepare(fetch({**layer_params, **shared}), ctx)
            if makes_weights:
                weights = remat.tag_weights(weights)
            return self.pattern.apply(weights, carry, ctx, state)

        # Without casts and gathers over fsdp, prepared weights are the parameters themselves.
        gathers = ctx.mesh is not None and ctx.mesh.shape.get("fsdp", 1) > 1
        makes_weights = gathers or any(p.dtype != ctx.compute_dtype for p in jax.tree.leaves(params))
        # "none" needs a policy too, or casts and gathered weights would be saved for the backward pass.
        if ctx.training and ctx.remat != "invert" and (ctx.remat != "none" or makes_weights):
            run_layer = remat.wrap(run_layer, ctx.remat, unrolled=isinstance(params, list))
        return run_layer

    def flops_per_token(self, seq_len: int) -> float:
        """Count the operations of all layers."""
        return self.num_repeats * self.pattern.flops_per_token(seq_len)


def _unroll_layers(body: Body, params: list[Nested], carry: Any, layer_state: Nested) -> tuple[Any, Out]:
    """Run the layers without a loop: (carry, the layers' Outs, stacked as `jax.lax.scan` would return them)."""
    layer_outs = []
    for index, layer_params in enumerate(params):
        state = jax.tree.map(lambda s, i=index: s[i], layer_state)
        # The index is an array, as in a loop, so that folding it into a key is the same operation.
        xs = (jnp.asarray(index), layer_params, state)
        carry, out = body(carry, xs)
        layer_outs.append(out)
    outs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layer_outs)
    return carry, outs


def _two_streams(layers: list[Any], streams: Literal["float32", "fixed"]) -> list[TwoStream]:
    """Make each layer reversible with two streams. Raise ValueError for a layer without branches."""
    for i, layer in enumerate(layers):
        if not layer.branches:
            raise ValueError(f"streams = {streams}: pattern.{i} is {type(layer).__name__}; expected Block")
    return [TwoStream(layer, streams) for layer in layers]


def _layer(config: Config, number: int, **options: Any) -> Layer:
    """Create a layer of the pattern, with those options of the stack that its constructor accepts."""
    accepted = {}
    for name, value in options.items():
        # A layer of a flow has no output_init_scale, for example.
        if config.takes(name):
            accepted[name] = value
    layer = config.instantiate(**accepted)
    if not isinstance(layer, Layer):
        raise ValueError(f"pattern.{number}: expected a layer, given {type(layer).__name__}")
    return layer
