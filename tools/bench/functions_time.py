"""Time of a step with `pl.eager`, `pl.eager_scan`, `pl.stream` and `pl.with_lora`, against `jax.grad` and optax.

    python -m tools.bench.functions_time [--layers 12] [--dim 512] [--tokens 256] [--rounds 15]

The model is a hand-written Llama in float32 that fits in device memory as a whole. Every contestant is a jitted step
with donated weights and state. The contestants take turns of one step in one process, in forward and then reverse
order, so that a slowdown of the machine affects all of them. The ratio compares each step with the plain step of the
same round: median, and a 95% interval of the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import plimsoll as pl
from tools.bench.plain_jax_llama import JaxLlama
from tools.bench.ratios import ratio
from tools.bench.workers import rotate

RANK = 16


@dataclass
class TimedVariant:
    """A training step.

    Attributes:
      reference: name of the plain step to compare with; a plain step names itself.
      step: jitted (state, tokens) -> (loss, state), with the state donated.
      state: trained arrays and their optimizer state.
    """

    reference: str
    step: Callable[..., Any]
    state: Any

    def seconds(self, tokens: jax.Array) -> float:
        """Take one step and return its wall-clock time in seconds."""
        begin = time.perf_counter()
        loss, self.state = self.step(self.state, tokens)
        jax.block_until_ready((loss, self.state))
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Race:
    """A model and its optimizer, shared by all contestants.

    Attributes:
      model: sizes of the model.
      optimizer: optimizer of all contestants.
    """

    model: JaxLlama
    optimizer: optax.GradientTransformation

    def weights(self, *, is_listed: bool = False) -> dict[str, Any]:
        """Return {"table", "stack", "head"}; the stack is [layers, ...], or a list of layers if `is_listed`."""
        model = self.model
        layers = [init_params(model.layer_shapes(), seed) for seed in range(model.layers)]
        stack = layers if is_listed else jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return {
            "table": init_params(model.table_shape(), 100),
            "stack": stack,
            "head": init_params(model.head_shapes(), 101),
        }

    # --- jax.grad and optax ------------------------------------------------------------------------------------------

    def plain(self, name: str, weights: Any, loss: Callable[..., jax.Array], optimizer: Any = None) -> TimedVariant:
        """Build a step of `jax.value_and_grad` with optax, or with another optimizer."""
        transformation = optimizer or self.optimizer

        def step(state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
            params, moments = state
            value, gradient = jax.value_and_grad(loss)(params, tokens)
            updates, moments = transformation.update(gradient, moments, params)
            return value, (optax.apply_updates(params, updates), moments)

        return TimedVariant(name, jit_step(step), (weights, transformation.init(weights)))

    def scan_loss(self, weights: Any, tokens: jax.Array) -> jax.Array:
        """Return the loss of a scan over layers in `jax.checkpoint`."""
        layer = jax.checkpoint(self.model.layer)
        x, _ = jax.lax.scan(lambda x, w: layer(w, x, None), weights["table"][tokens[:-1]], weights["stack"])
        return self.model.head_loss(weights["head"], x, tokens[1:])

    def list_loss(self, weights: Any, tokens: jax.Array) -> jax.Array:
        """Return the loss of a list of layers in `jax.checkpoint`."""
        x = weights["table"][tokens[:-1]]
        for layer_weights in weights["stack"]:
            x, _ = jax.checkpoint(self.model.layer)(layer_weights, x, None)
        return self.model.head_loss(weights["head"], x, tokens[1:])

    # --- the functions -----------------------------------------------------------------------------------------------

    def eager_scan(self, optimizer: Any) -> TimedVariant:
        """Build a step that updates everything in the backward pass, the layers with `eager_scan`."""
        weights = self.weights()
        table = pl.eager(lambda rows, tokens: rows[tokens], optimizer, name="table")
        stack = pl.eager_scan(jax.checkpoint(self.model.layer), optimizer, name="stack")
        head = pl.eager(self.model.head_loss, optimizer, name="head")

        def loss(trained: Any, tokens: jax.Array) -> jax.Array:
            x, _ = stack(trained["stack"], table(trained["table"], tokens[:-1]))
            return head(trained["head"], x, tokens[1:])

        eager_layers = {"table": table, "stack": stack, "head": head}
        trained = {name: eager_layer.init(weights[name]) for name, eager_layer in eager_layers.items()}
        return TimedVariant("scan", jit_step(pl.value_and_update(loss)), trained)

    def eager(self, differentiate: Callable[..., Any]) -> TimedVariant:
        """Build a step that updates everything in the backward pass, with one `eager` function per layer."""
        weights = self.weights(is_listed=True)
        table = pl.eager(lambda rows, tokens: rows[tokens], self.optimizer, name="table")
        head = pl.eager(self.model.head_loss, self.optimizer, name="head")
        layer = jax.checkpoint(self.model.layer)
        layers = [pl.eager(layer, self.optimizer, name=f"layer{number}") for number in range(self.model.layers)]

        def loss(trained: Any, tokens: jax.Array) -> jax.Array:
            x = table(trained["table"], tokens[:-1])
            for one, layer_trained in zip(layers, trained["stack"], strict=True):
                x, _ = one(layer_trained, x, None)
            return head(trained["head"], x, tokens[1:])

        trained = {
            "table": table.init(weights["table"]),
            "stack": [one.init(w) for one, w in zip(layers, weights["stack"], strict=True)],
            "head": head.init(weights["head"]),
        }
        return TimedVariant("list", jit_step(differentiate(loss)), trained)

    def lora(self, name: str) -> TimedVariant:
        """Build a step that trains adapters of all the stack's matrices, by `with_lora` or by hand inside the layer."""
        weights = self.weights()
        adapters: Any = pl.lora_init(jax.random.key(0), weights, "stack/(q|k|v|out|gate|up|down)", rank=RANK)

        def by_hand(adapters: Any, tokens: jax.Array, weights: Any) -> jax.Array:
            stack = {
                key: (w, adapters[f"stack/{key}"]) if f"stack/{key}" in adapters else w
                for key, w in weights["stack"].items()
            }
            layer = jax.checkpoint(lambda w, x: self.model.layer(with_products(w), x, None))
            x, _ = jax.lax.scan(lambda x, w: layer(w, x), weights["table"][tokens[:-1]], stack)
            return self.model.head_loss(weights["head"], x, tokens[1:])

        def by_function(adapters: Any, tokens: jax.Array, weights: Any) -> jax.Array:
            return pl.with_lora(self.scan_loss)(weights, adapters, tokens)

        loss = by_hand if name == "lora by hand" else by_function

        def step(state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
            adapters, moments, frozen = state
            value, gradient = jax.value_and_grad(loss)(adapters, tokens, frozen)
            updates, moments = self.optimizer.update(gradient, moments, adapters)
            return value, (optax.apply_updates(adapters, updates), moments, frozen)

        state = (adapters, self.optimizer.init(adapters), weights)
        return TimedVariant("lora by hand", jit_step(step), state)


class _LowRank:
    """A matrix and its adapter, multiplied as a user would: x @ W + scale (x @ A) @ B."""

    def __init__(self, matrix: jax.Array, adapter: pl.Adapter):
        self._matrix = matrix
        self._adapter = adapter

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self._matrix + self._adapter.scale * ((x @ self._adapter.a) @ self._adapter.b)


def with_products(weights: Any) -> Any:
    """Wrap a layer's adapted weights in `_LowRank`."""
    return {name: _LowRank(*w) if isinstance(w, tuple) else w for name, w in weights.items()}


def jit_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Jit the step with a donated state."""
    return jax.jit(step, donate_argnums=0)


def init_params(shapes: Any, seed: int) -> Any:
    """Draw weights of these shapes: matrices with a variance that preserves activation scale, vectors of ones."""

    def draw(shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, shape.dtype)
        return jax.random.normal(key, shape.shape, shape.dtype) * shape.shape[-2] ** -0.5

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(structure, [draw(*pair) for pair in zip(leaves, keys, strict=True)])


def makers(race: Race) -> dict[str, Callable[[], TimedVariant]]:
    """Return a function for each contestant's name that builds it."""
    return {
        "list": lambda: race.plain("list", race.weights(is_listed=True), race.list_loss),
        "eager, value_and_update": lambda: race.eager(pl.value_and_update),
        "eager, jax.value_and_grad": lambda: race.eager(jax.value_and_grad),
        "scan": lambda: race.plain("scan", race.weights(), race.scan_loss),
        "eager_scan": lambda: race.eager_scan(race.optimizer),
        "stream": lambda: race.plain("scan", race.weights(), race.scan_loss, pl.stream(race.optimizer)),
        "stream in eager_scan": lambda: race.eager_scan(pl.stream(race.optimizer)),
        "lora by hand": lambda: race.lora("lora by hand"),
        "with_lora": lambda: race.lora("with_lora"),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("dim", 512), ("tokens", 256), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="*", help="time only these contestants and their references")
    options = parser.parse_args()
    hidden = options.dim * 8 // 3 // 64 * 64
    model = JaxLlama(options.layers, options.dim, options.dim // 64, hidden, 4096, jnp.float32)
    tokens = jax.random.randint(jax.random.key(1), (options.tokens + 1,), 0, model.vocab)
    makers_of_all = makers(Race(model, optax.adamw(1e-3)))
    racing = {name: makers_of_all[name]() for name in options.only or makers_of_all}
    for contestant in racing.values():
        # The first step compiles. The second compiles again if the first one moved the state to a device.
        for _ in range(2):
            contestant.seconds(tokens)
    times: dict[str, list[float]] = {name: [] for name in racing}
    for names in rotate(list(racing), options.rounds):
        for name in names:
            times[name].append(racing[name].seconds(tokens))
    print("| step | median ms | / plain | interval |\n|---|---|---|---|")
    for name, contestant in racing.items():
        of_plain = ratio(times[name], times[contestant.reference])
        low, high = of_plain.interval
        median = 1e3 * statistics.median(times[name])
        print(f"| {name} | {median:.0f} | {of_plain.median:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
