"""Stack: L units of layers, their parameters stacked on a leading axis and scanned.

A unit is one period of `pattern`, a list of layer configs, so unlike layers alternate freely. One `forward(fetch)`
serves every use: training, evaluation with averaged weights, sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from framework.config import Config, PositiveInt, component
from framework.layers import remat, sums
from framework.layers.base import Context, Layer, Out
from framework.layers.reversible import Reversible, TwoStream, filled, floats
from framework.layout import Nested, TensorSpec


class Unit(Reversible):
    """One period of the pattern: its layers in order, under the names block0, block1, ...; it can be run backwards if
    they can."""

    def __init__(self, layers: list[Any]):
        self.layers = {f"block{i}": layer for i, layer in enumerate(layers)}

    def children(self) -> dict[str, Layer]:
        """The layers of the period."""
        return dict(self.layers)

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Runs the layers one after the other."""
        outs = {}
        for name, layer in self.layers.items():
            carry, outs[name] = layer.apply(weights.get(name, {}), carry, ctx.fold(name), layer_state.get(name, {}))
        return carry, Out.merge(outs)

    def reverse(
        self, weights: Nested, carry: Any, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> tuple[Any, Nested, Any]:
        """The layers backwards, from the last to the first."""
        ct, loss_ct, grads = *cts, {}
        for name, layer in reversed(self.layers.items()):
            own, state = weights.get(name, {}), layer_state.get(name, {})
            carry, grad, ct = layer.reverse(own, carry, (ct, loss_ct), ctx.fold(name), state)
            grads |= {name: grad} if name in weights else {}
        return carry, grads, ct


@component
class Stack(Layer):
    """num_layers layers, following `pattern` over and over.

    Args:
        dim: D, given by the parent.
        num_layers: a multiple of the pattern's length.
        pattern: the layers' configs; one entry means that all layers are alike.
        shared: positions in the pattern, from 0, of layers whose parameters all units share: there is one copy, whose
            gradient is the sum over its uses (Zamba's attention block, arXiv 2405.16712).
        depth_scaled_init: divide the initial output projections by sqrt(2 * num_layers), as GPT-2 does.
        streams: "float32" or "fixed" adds the blocks' branches to two streams in turn instead of to one, so that the
            stack can be run backwards (memory.remat = invert), see `framework.layers.reversible.TwoStream`: another
            function of the same parameters. Blocks' branches only.
        unroll: how many units one iteration of the loop holds. 0 means all: no loop, compile time grows with depth, and
            on CPU, where a loop copies the weights that it slices, the step is about 10% faster. With any memory.remat
            but none there is a loop all the same: without one XLA recomputes all units at once, or merges that with the
            forward pass, and not a byte is saved (compiled for CPU and H200).
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
    ):
        if not pattern:
            raise ValueError("pattern needs at least one layer config")
        if num_layers % len(pattern):
            raise ValueError(
                f"num_layers = {num_layers} is no multiple of the pattern's {len(pattern)} layers; "
                f"nearest: {num_layers // len(pattern) * len(pattern) or len(pattern)}"
            )
        if not {*shared} < {*range(len(pattern))}:
            raise ValueError(
                f"shared = {shared}: expected positions of the pattern, 0 to {len(pattern) - 1}, and not all of them"
            )
        self.shared = {f"block{i}" for i in shared}
        self.num_units = num_layers // len(pattern)
        if not 0 <= unroll <= self.num_units:
            raise ValueError(f"unroll = {unroll} is not between 0 and the number of units, {self.num_units}")
        self.unroll = unroll or self.num_units
        scale = 1.0 / math.sqrt(2.0 * num_layers) if depth_scaled_init else 1.0
        layers = [_layer(config, i, dim=dim, output_init_scale=scale) for i, config in enumerate(pattern)]
        if streams != "one":
            for i, layer in enumerate(layers):
                if not layer.branches:
                    raise ValueError(f"streams = {streams}: pattern.{i} is {type(layer).__name__}; expected Block")
            layers = [TwoStream(layer, streams) for layer in layers]
        self.streams: TwoStream | None = layers[0] if isinstance(layers[0], TwoStream) else None
        self.unit = Unit(layers)

    def children(self) -> dict[str, Layer]:
        """None: the unit's specs are stacked instead."""
        return {}

    def parameter_specs(self) -> Nested:
        """The unit's own parameters, with a leading axis of num_units."""
        own = {name: specs for name, specs in self.unit.parameter_specs().items() if name not in self.shared}
        return jax.tree.map(lambda spec: spec.stacked(self.num_units), own)

    def shared_specs(self) -> Nested:
        """The parameters that all units share, by layer; they are passed beside the stack's, as `shared`."""
        return {name: specs for name, specs in self.unit.parameter_specs().items() if name in self.shared}

    def buffer_specs(self) -> Nested:
        """The unit's buffers with a leading axis of num_units."""

        def stacked(spec: TensorSpec) -> TensorSpec:
            return replace(spec, shape=(self.num_units, *spec.shape), mesh_axes=(None, *spec.mesh_axes))

        return jax.tree.map(stacked, self.unit.buffer_specs())

    def check_remat(self, policy: str) -> None:
        """Raises ValueError when the stack cannot do what the remat policy says."""
        remat.group_size(policy, self.num_units)
        for i, layer in enumerate(self.unit.layers.values() if policy == "invert" else ()):
            if not isinstance(layer, Reversible):
                raise ValueError(
                    f"memory.remat = invert: pattern.{i}, {type(layer).__name__}, cannot be run backwards; expected "
                    "streams = float32 or fixed beside the pattern of Blocks, or memory.remat = sqrt"
                )

    def is_unrolled(self, remat: str) -> bool:
        """Whether there is no loop under this remat policy."""
        return self.unroll == self.num_units and (remat == "none" or (self.num_units == 1 and remat != "invert"))

    def enter(self, x: Any) -> Any:
        """What flows through the units, of what comes into the stack."""
        return x if self.streams is None else self.streams.enter(x)

    def leave(self, carry: Any, ctx: Context) -> Any:
        """What comes out of the stack, of what flowed through the units."""
        return carry if self.streams is None else self.streams.leave(carry, ctx)

    def split(self, params: Nested) -> list[Nested]:
        """Stacked parameters as a list of the units' own.

        Outside of differentiation, this makes each unit's gradient an array of its own: differentiating the slices
        themselves would add each one into zeros of the whole stack.
        """
        return [jax.tree.map(lambda p, i=i: p[i], params) for i in range(self.num_units)]

    def forward(
        self,
        params: Nested | list[Nested],
        carry: Any,
        ctx: Context,
        layer_state: Nested,
        fetch: Callable[[Nested], Nested] = lambda unit_params: unit_params,
        shared: Nested | None = None,
    ) -> tuple[Any, Out]:
        """All units in turn; each prepares its weights when its turn comes.

        Args:
            params: stacked parameters, each [num_units, ...], or the list that `split` makes of them.
            carry: what flows through, x_BSD.
            ctx: the context; the unit's index is folded into its random stream.
            layer_state: stacked buffers.
            fetch: brings one unit's parameters, the shared ones among them, to where they are computed with.
            shared: as `shared_specs`.
        """

        carry = self.enter(carry)
        if ctx.training and ctx.remat == "invert":
            carry, outs = self._inverting(fetch, ctx, layer_state)(params, carry, shared or {})
            return self.leave(carry, ctx), self.combine(outs)
        unit, taps = self.unit_function(params, ctx, fetch), sums.taps(shared or {})

        def body(carry: Any, xs: tuple[jax.Array, Nested, Nested]) -> tuple[Any, Out]:
            index, unit_params, unit_state = xs
            return unit(carry, unit_params, sums.tapped(shared or {}, taps), unit_state, ctx.fold_index(index))

        if isinstance(params, list):
            results = []
            for index, unit_params in enumerate(params):
                unit_state = jax.tree.map(lambda s, i=index: s[i], layer_state)
                carry, out = body(carry, (jnp.asarray(index), unit_params, unit_state))
                results.append(out)
            outs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
        else:
            xs = (jnp.arange(self.num_units), params, layer_state)
            group = remat.group_size(ctx.remat, self.num_units) if ctx.training else None
            if group is None:
                unroll = self.unroll if self.is_unrolled(ctx.remat) else self._loop_unroll
                carry, outs = jax.lax.scan(body, carry, xs, unroll=unroll)
            else:
                xs = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), xs)
                carry, outs = jax.lax.scan(remat.wrap(partial(jax.lax.scan, body), "full", unrolled=False), carry, xs)
                outs = jax.tree.map(lambda x: x.reshape(self.num_units, *x.shape[2:]), outs)
        return self.leave(carry, ctx), self.combine(outs)

    def _inverting(self, fetch: Callable[[Nested], Nested], ctx: Context, layer_state: Nested) -> Callable[..., Any]:
        """(stacked parameters, carry, shared parameters) -> (carry, the units' Outs), differentiated by running the
        units backwards. Only what is differentiated is an argument."""
        indices = jnp.arange(self.num_units)

        def whole(params: Nested, carry: Any, shared: Nested) -> tuple[Any, Out]:
            unit = self.unit_function(params, ctx, fetch)

            def body(carry: Any, xs: tuple[jax.Array, Nested, Nested]) -> tuple[Any, Out]:
                index, own, state = xs
                return unit(carry, own, shared, state, ctx.fold_index(index))

            return jax.lax.scan(body, carry, (indices, params, layer_state), unroll=self._loop_unroll)

        def forward(*args: Any) -> Any:
            y, outs = whole(*args)
            return (y, outs), (args[0], y, args[2])

        def backward(kept: Any, cts: Any) -> Any:
            params, y, shared = kept

            def body(carry: Any, xs: Any) -> Any:
                y, ct, of_shared = carry
                index, own, state, loss_ct = xs

                def join(own_floats: Nested, shared_floats: Nested) -> Nested:
                    return fetch({**filled(own_floats, own), **filled(shared_floats, shared)})

                trained, ctx_i = (floats(own), floats(shared)), ctx.fold_index(index)
                y, (grads, more), ct = self.reverse_unit(y, trained, join, state, ctx_i, (ct, loss_ct))
                return (y, ct, sums.add(of_shared, more)), grads

            first = y, cts[0], sums.zeros(floats(shared))
            xs = (indices, params, layer_state, cts[1].loss)
            (_, ct, of_shared), grads = jax.lax.scan(body, first, xs, reverse=True, unroll=self._loop_unroll)
            return grads, ct, sums.rounded(of_shared, floats(shared))

        run = jax.custom_vjp(whole)
        run.defvjp(forward, backward)
        return run

    @property
    def _loop_unroll(self) -> int:
        return 1 if self.unroll == self.num_units else self.unroll

    def reverse_unit(
        self,
        carry: Any,
        trained: tuple[Nested, Nested],
        join: Callable[[Nested, Nested], Nested],
        state: Nested,
        ctx: Context,
        cts: tuple[Any, Any],
    ) -> tuple[Any, tuple[Nested, Nested], Any]:
        """One unit backwards: (its input, gradients of `trained`, the input's cotangent).

        Args:
            carry: the unit's output.
            trained: what is differentiated of its own parameters, and of those that all units share.
            join: makes all of the unit's parameters of these.
            state, ctx: the unit's.
            cts: the cotangents of the output and of the loss (None for none).
        """
        weights, pull = jax.vjp(lambda *trained: self.unit.prepare(join(*trained), ctx), *trained)
        carry, grads, ct = self.unit.reverse(weights, carry, cts, ctx, state)
        return carry, pull(grads), ct

    @staticmethod
    def combine(outs: Out) -> Out:
        """The stack's Out from its units', stacked: losses added, metrics averaged, buffers as they are."""
        loss = None if outs.loss is None else jnp.sum(outs.loss)
        metrics = {name: jnp.mean(values) for name, values in outs.metrics.items()}
        return Out(loss=loss, metrics=metrics, layer_state=outs.layer_state)

    def unit_function(
        self, params: Nested | list[Nested], ctx: Context, fetch: Callable[[Nested], Nested] = lambda params: params
    ) -> Callable[..., tuple[Any, Out]]:
        """The function of one unit, under the remat policy in training.

        It maps (carry, the unit's own parameters, those that all units share ({} for none), its buffers, its context)
        to (carry, Out).

        Args:
            params: all units' parameters, as `forward` takes them; their kind and dtypes decide.
            ctx: the stack's context.
            fetch: see `forward`.
        """

        def unit(carry: Any, own: Nested, shared: Nested, state: Nested, ctx: Context) -> tuple[Any, Out]:
            weights = self.unit.prepare(fetch({**own, **shared}), ctx)
            if weights_are_made:
                weights = remat.tag_weights(weights)
            return self.unit.apply(weights, carry, ctx, state)

        weights_are_made = _makes_weights(params, ctx)
        if ctx.training and ctx.remat != "invert" and (ctx.remat != "none" or weights_are_made):
            unit = remat.wrap(unit, ctx.remat, unrolled=isinstance(params, list))
        return unit

    def flops_per_token(self, seq_len: int) -> float:
        """All units."""
        return self.num_units * self.unit.flops_per_token(seq_len)


def _makes_weights(params: Any, ctx: Context) -> bool:
    """Whether `prepare` computes anything: a cast, or a gather over fsdp."""
    gathers = ctx.mesh is not None and ctx.mesh.shape.get("fsdp", 1) > 1
    return gathers or any(p.dtype != ctx.compute_dtype for p in jax.tree.leaves(params))


def _layer(config: Config, number: int, **given: Any) -> Layer:
    """A layer of the pattern, with what its constructor takes of what the stack gives."""
    layer = config.instantiate(**{name: value for name, value in given.items() if config.takes(name)})
    if not isinstance(layer, Layer):
        raise ValueError(f"pattern.{number}: expected a layer, given {type(layer).__name__}")
    return layer
