"""Stack: a repeated pattern of layers, with parameters stacked on a leading axis and a scan over the repeats.

`pattern` is a list of layer configs, so different layers may alternate. The loop, the schedules and the remat policies
treat one repeat of it as a layer, and so do the names and comments here: with the usual pattern of a single config, it
is one. One `forward(fetch)` serves every use: training, evaluation with averaged weights, and sampling.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config, PositiveInt, component
from plimsoll.framework.layers import grad_accumulation, remat
from plimsoll.framework.layers.base import LAYER_AXIS, Carry, Context, Layer, Out
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layers.reversible import Cotangents, ReversedLayer, Reversible, TwoStream
from plimsoll.framework.layout import WEIGHT_AXES, Nested, fill_none, floats

# Runs one layer: (carry, its own parameters, the parameters that all layers share ({} for none), its buffers, its
# context) -> (carry, Out).
LayerFunction = Callable[[Carry, Nested, Nested, Nested, Context], tuple[Carry, Out]]
# The body of a loop over layers: (carry, (index, the layer's parameters, its buffers)) -> (carry, Out).
LoopBody = Callable[[Carry, tuple[jax.Array, Nested, Nested]], tuple[Carry, Out]]
# Moves one layer's parameters to the device that computes.
Fetch = Callable[[Nested], Nested]


class LayerPattern(Reversible):
    """One repeat of a stack's pattern: its layers in order, with the names block0, block1, ...

    It is reversible if all of its layers are.

    Attributes:
        layers: the layers by name.
        configs: the config of each layer, by name. Layers with equal configs compute the same function.
    """

    def __init__(self, layers: list[Layer], configs: list[Config]):
        self.layers = {f"block{i}": layer for i, layer in enumerate(layers)}
        self.configs = dict(zip(self.layers, configs, strict=True))

    def children(self) -> dict[str, Layer]:
        """Return the layers by name."""
        return dict(self.layers)

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """Run the layers one after the other."""
        outs = {}
        for name, layer in self.layers.items():
            layer_weights = weights.get(name, {})
            layer_ctx = ctx.fold(name)
            buffers = layer_state.get(name, {})
            carry, outs[name] = layer.apply(layer_weights, carry, layer_ctx, buffers)
        return carry, Out.merge(outs)

    def reverse(
        self, weights: Nested, carry: Carry, cts: Cotangents, ctx: Context, layer_state: Nested
    ) -> ReversedLayer:
        """Run the layers in reverse, from the last to the first; see `Reversible.reverse`."""
        ct, loss_ct = cts
        grads = {}
        for name, layer in reversed(self.layers.items()):
            assert isinstance(layer, Reversible), "`Stack.check_remat` refuses others"
            layer_weights = weights.get(name, {})
            buffers = layer_state.get(name, {})
            # The losses of layers are summed, so every layer gets the cotangent of the sum.
            layer_cts = (ct, loss_ct)
            result = layer.reverse(layer_weights, carry, layer_cts, ctx.fold(name), buffers)
            carry = result.carry
            ct = result.ct
            # Gradients have the structure of the weights: a layer without weights has no entry.
            if name in weights:
                grads[name] = result.grads
        return ReversedLayer(carry, grads, ct)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _InvertibleResiduals:
    """Residuals of the forward pass under the remat policy `invert`.

    Attributes:
        params: the stacked parameters.
        output: the carry after the last layer; the backward pass computes the input from it.
        shared: the parameters that all layers share.
    """

    params: Nested
    output: Carry
    shared: Nested


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
        layers: list[Layer] = []
        for i, layer_config in enumerate(pattern):
            # A layer of a flow has no output_init_scale, for example.
            options = {"dim": dim, "output_init_scale": scale}
            layer = layer_config.instantiate(
                **{name: value for name, value in options.items() if layer_config.takes(name)}
            )
            if not isinstance(layer, Layer):
                raise ValueError(f"pattern.{i}: expected a layer, given {type(layer).__name__}")
            if streams != "one" and not layer.branches:
                raise ValueError(f"streams = {streams}: pattern.{i} is {type(layer).__name__}; expected Block")
            layers.append(layer if streams == "one" else TwoStream(layer, streams))
        self.streams: TwoStream | None = layers[0] if isinstance(layers[0], TwoStream) else None
        self.pattern = LayerPattern(layers, pattern)
        # The range of layers of the whole stack that this stack runs; None if it is the whole stack.
        self.layer_range: LayerRange | None = None

    def select_range(self, layer_range: LayerRange) -> Stack:
        """Return the stack for a range of its layers; see `framework.layers.layer_range`."""
        selected = copy.copy(self)
        selected.num_repeats = layer_range.count
        # If all layers are in one iteration of the loop, they stay in one.
        selected.unroll = layer_range.count if self.unroll == self.num_repeats else min(self.unroll, layer_range.count)
        selected.layer_range = layer_range
        return selected

    def select_layers(self, count: int) -> Stack:
        """Return the stack for `count` consecutive layers of this one, which start at the `first` of `run_layers`."""
        selected = copy.copy(self)
        selected.num_repeats = count
        selected.unroll = count if self.unroll == self.num_repeats else min(self.unroll, count)
        return selected

    @property
    def layer_axis(self) -> str | None:
        """The mesh axis that shards the layers."""
        # The layers before the main stack run with the embedding, on all devices along that axis.
        return None if self.is_first else LAYER_AXIS

    def policy(self, remat: str) -> str:
        """Return the remat policy: the layer range's if there is one, else `remat`, the context's."""
        if self.layer_range is not None:
            return self.layer_range.remat
        # Groups apply to the main stack. In the small stack before it, each layer is a group.
        return "full" if self.is_first and remat.startswith("sqrt") else remat

    def context(self, name: str, ctx: Context) -> Context:
        """Return the stack's context, derived from the model's; `name` is the stack's name as a stage.

        A layer range uses the random stream of the whole stack.
        """
        home = name if self.layer_range is None else self.layer_range.home
        return replace(ctx.fold(home), remat=self.policy(ctx.remat))

    def layer_context(self, ctx: Context, index: jax.Array) -> Context:
        """Return the context of the layer at `index` of this range, derived from the stack's."""
        if self.layer_range is not None and self.layer_range.first > 0:
            index = index + self.layer_range.first
        return ctx.fold_index(index)

    # The pattern is not among `children`, because its specs are stacked.
    def parameter_specs(self) -> Nested:
        """Return the specs of the parameters that each repeat has separately, with a leading axis of num_repeats."""
        pattern_specs = self.pattern.parameter_specs()
        layer_specs = {name: specs for name, specs in pattern_specs.items() if name not in self.shared}
        return jax.tree.map(lambda spec: spec.stacked(self.num_repeats, self.layer_axis), layer_specs)

    def shared_specs(self) -> Nested:
        """Return the specs of the parameters that all repeats share, by layer of the pattern.

        They are passed separately from the stack's parameters, as `shared`.
        """
        return {name: specs for name, specs in self.pattern.parameter_specs().items() if name in self.shared}

    def buffer_specs(self) -> Nested:
        """Return the specs of the pattern's buffers, with a leading axis of num_repeats."""
        return jax.tree.map(
            lambda spec: replace(
                spec, shape=(self.num_repeats, *spec.shape), mesh_axes=(self.layer_axis, *spec.mesh_axes)
            ),
            self.pattern.buffer_specs(),
        )

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

    def enter(self, x: Carry) -> Carry:
        """Create the carry of the layers from the input of the stack."""
        # The carry between layer ranges is the same as between layers.
        is_inner = self.layer_range is not None and self.layer_range.first > 0
        return x if self.streams is None or is_inner else self.streams.enter(x)

    def leave(self, carry: Carry, ctx: Context) -> Carry:
        """Create the output of the stack from the carry of the layers."""
        is_inner = self.layer_range is not None and self.layer_range.end < self.layer_range.total
        return carry if self.streams is None or is_inner else self.streams.leave(carry, ctx)

    def split(self, params: Nested) -> list[Nested]:
        """Split stacked parameters into a list with the parameters of each layer."""
        # Outside of the differentiated function, this makes each layer's gradient a separate array. The gradient of a
        # slice would be added into zeros of the size of the stack.
        return [jax.tree.map(lambda p, i=i: p[i], params) for i in range(self.num_repeats)]

    def forward(
        self,
        params: Nested | list[Nested],
        carry: Carry,
        ctx: Context,
        layer_state: Nested,
        fetch: Fetch = lambda layer_params: layer_params,
        shared: Nested | None = None,
    ) -> tuple[Carry, Out]:
        """Run all layers in order; each prepares its weights just before it runs.

        Args:
            params: stacked parameters, each [num_repeats, ...], or the list that `split` returns.
            carry: the input of the stack, x_BSD.
            ctx: the context; the layer's index is folded into its random stream.
            layer_state: stacked buffers.
            fetch: moves one layer's parameters, including the shared ones, to the device that computes.
            shared: the shared parameters, in the structure of `shared_specs`.
        """
        carry, outs = self.run_layers(params, self.enter(carry), ctx, layer_state, fetch, shared)
        return self.leave(carry, ctx), self.combine(outs)

    def run_layers(
        self,
        params: Nested | list[Nested],
        carry: Carry,
        ctx: Context,
        layer_state: Nested,
        fetch: Fetch = lambda layer_params: layer_params,
        shared: Nested | None = None,
        first: jax.Array | None = None,
    ) -> tuple[Carry, Out]:
        """Run all layers in order, from the carry of the layers to the carry of the layers; see `forward`.

        Args:
            first: index of the first layer in its stack, for `select_layers`; None means 0. Not with remat = invert.

        Returns:
            (carry, the layers' Outs, stacked).
        """
        shared = shared or {}
        if ctx.training and ctx.remat == "invert":
            assert isinstance(params, dict), "`is_unrolled` keeps the loop"
            return self._run_invertible(params, carry, shared, ctx, layer_state, fetch)
        # The gradient of a shared parameter is a sum over layers; taps compute this sum in float32.
        body = self._loop_body(params, ctx, fetch, shared, grad_accumulation.make_taps(shared))
        if isinstance(params, list):
            # Without a loop; the Outs are stacked as `jax.lax.scan` would return them.
            layer_outs = []
            for index, layer_params in enumerate(params):
                state = jax.tree.map(lambda s, i=index: s[i], layer_state)
                # The index is an array, as in a loop, so that folding it into a key is the same operation.
                carry, out = body(carry, (jnp.asarray(index), layer_params, state))
                layer_outs.append(out)
            return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layer_outs)
        indices = jnp.arange(self.num_repeats)
        # Not `indices + 0`, which would be an extra operation.
        xs = (indices if first is None else indices + first, params, layer_state)
        group = remat.group_size(ctx.remat, self.num_repeats) if ctx.training else None
        if group is None:
            unroll = self.unroll if self.is_unrolled(ctx.remat) else self._loop_unroll
            carry, outs = jax.lax.scan(body, carry, xs, unroll=unroll)
        else:
            # A loop over layers inside a loop over groups. Only a group's input is saved: the backward pass runs the
            # inner loop forward once more.
            grouped_xs = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), xs)
            run_group = remat.wrap(partial(jax.lax.scan, body), "full", unrolled=False)
            carry, outs = jax.lax.scan(run_group, carry, grouped_xs)
            outs = jax.tree.map(lambda x: x.reshape(self.num_repeats, *x.shape[2:]), outs)
        return carry, outs

    def _loop_body(
        self, params: Nested | list[Nested], ctx: Context, fetch: Fetch, shared: Nested, taps: Nested
    ) -> LoopBody:
        """Return the body of a loop over layers; for `taps` see `grad_accumulation`, and for the others `forward`."""
        run_layer = self.layer_function(params, ctx, fetch)

        def body(carry: Carry, xs: tuple[jax.Array, Nested, Nested]) -> tuple[Carry, Out]:
            index, layer_params, state = xs
            shared_params = grad_accumulation.attach_taps(shared, taps)
            return run_layer(carry, layer_params, shared_params, state, self.layer_context(ctx, index))

        return body

    def _run_invertible(
        self, params: Nested, carry: Carry, shared: Nested, ctx: Context, layer_state: Nested, fetch: Fetch
    ) -> tuple[Carry, Out]:
        """Run all layers, and save only the output: the backward pass runs the layers in reverse.

        It is differentiated with respect to `params`, `carry` and `shared`, and nothing else. For the arguments see
        `forward`; returns (carry, the layers' Outs, stacked).
        """
        indices = jnp.arange(self.num_repeats)

        def run_layers(params: Nested, carry: Carry, shared: Nested) -> tuple[Carry, Out]:
            body = self._loop_body(params, ctx, fetch, shared, taps={})
            xs = (indices, params, layer_state)
            return jax.lax.scan(body, carry, xs, unroll=self._loop_unroll)

        def run_and_save(
            params: Nested, carry: Carry, shared: Nested
        ) -> tuple[tuple[Carry, Out], _InvertibleResiduals]:
            output, outs = run_layers(params, carry, shared)
            return (output, outs), _InvertibleResiduals(params, output, shared)

        def reverse_layers(saved: _InvertibleResiduals, cts: tuple[Carry, Out]) -> tuple[Nested, Carry, Nested]:
            """Return the gradients of the stacked parameters, of the input, and of the shared parameters."""
            shared = saved.shared

            def reverse_one(
                carry: tuple[Carry, Carry, Nested], xs: tuple[jax.Array, Nested, Nested, jax.Array | None]
            ) -> tuple[tuple[Carry, Carry, Nested], Nested]:
                output, ct, shared_sum = carry
                index, layer_params, state, loss_ct = xs

                # Only floats are differentiated. Integers, such as codes of quantized weights, are filled in again.
                def join(layer_floats: Nested, shared_floats: Nested) -> Nested:
                    return fetch({**fill_none(layer_floats, layer_params), **fill_none(shared_floats, shared)})

                trained = (floats(layer_params), floats(shared))
                layer_ctx = self.layer_context(ctx, index)
                result = self.reverse_layer(output, trained, join, state, layer_ctx, (ct, loss_ct))
                layer_grads, shared_grads = result.grads
                return (result.carry, result.ct, grad_accumulation.add(shared_sum, shared_grads)), layer_grads

            output_ct, outs_ct = cts
            # The sum over layers is in float32: see `grad_accumulation`.
            start = (saved.output, output_ct, grad_accumulation.zeros(floats(shared)))
            xs = (indices, saved.params, layer_state, outs_ct.loss)
            end, grads = jax.lax.scan(reverse_one, start, xs, reverse=True, unroll=self._loop_unroll)
            _, input_ct, shared_sum = end
            shared_grads = jax.tree.map(lambda total, param: total.astype(param.dtype), shared_sum, floats(shared))
            return grads, input_ct, shared_grads

        run = jax.custom_vjp(run_layers)
        run.defvjp(run_and_save, reverse_layers)
        return run(params, carry, shared)

    @property
    def _loop_unroll(self) -> int:
        """The number of layers per iteration if a loop is required."""
        # With all layers in one iteration, there would be no loop.
        return 1 if self.unroll == self.num_repeats else self.unroll

    def reverse_layer(
        self,
        carry: Carry,
        trained: tuple[Nested, Nested],
        join: Callable[[Nested, Nested], Nested],
        state: Nested,
        ctx: Context,
        cts: Cotangents,
    ) -> ReversedLayer:
        """Run one layer in reverse; the gradients of the result are a pair, like `trained`.

        Args:
            carry: the layer's output.
            trained: the parameters to differentiate: those of this layer, and those that all layers share.
            join: combines these into all parameters of the layer.
            state, ctx: the layer's buffers and context.
            cts: the cotangents of the output and of the loss (None for no loss).
        """
        # The layer returns gradients of prepared weights; `pull` takes them through casts and gathers.
        weights, pull = jax.vjp(lambda *trained: self.pattern.prepare(join(*trained), ctx), *trained)
        result = self.pattern.reverse(weights, carry, cts, ctx, state)
        return replace(result, grads=pull(result.grads))

    @staticmethod
    def combine(outs: Out) -> Out:
        """Combine the stacked Outs of the layers: losses are added, metrics averaged, buffers unchanged."""
        loss = None if outs.loss is None else jnp.sum(outs.loss)
        metrics = {name: jnp.mean(values) for name, values in outs.metrics.items()}
        return Out(loss=loss, metrics=metrics, layer_state=outs.layer_state)

    def layer_function(
        self, params: Nested | list[Nested], ctx: Context, fetch: Fetch = lambda params: params
    ) -> LayerFunction:
        """Return the function of one layer, wrapped in the remat policy in training.

        Args:
            params: all layers' parameters, as passed to `forward`; only their structure and dtypes matter.
            ctx: the stack's context.
            fetch: see `forward`.
        """

        def run_layer(
            carry: Carry, layer_params: Nested, shared: Nested, state: Nested, ctx: Context
        ) -> tuple[Carry, Out]:
            weights = self.pattern.prepare(fetch({**layer_params, **shared}), ctx)
            if makes_weights:
                weights = remat.tag(weights, remat.WEIGHTS)
            return self.pattern.apply(weights, carry, ctx, state)

        # Without casts and gathers, prepared weights are the parameters themselves.
        gathers = ctx.mesh is not None and any(ctx.mesh.shape.get(axis, 1) > 1 for axis in WEIGHT_AXES)
        makes_weights = gathers or any(p.dtype != ctx.compute_dtype for p in jax.tree.leaves(params))
        # "none" needs a policy too, or casts and gathered weights would be saved for the backward pass.
        if ctx.training and ctx.remat != "invert" and (ctx.remat != "none" or makes_weights):
            run_layer = remat.wrap(run_layer, ctx.remat, unrolled=isinstance(params, list))
        return run_layer

    def flops_per_token(self, seq_len: int) -> float:
        """Count the operations of all layers."""
        return self.num_repeats * self.pattern.flops_per_token(seq_len)
