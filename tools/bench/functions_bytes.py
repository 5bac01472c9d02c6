"""What a hand-written Llama 2 7B needs on one chip when it is trained by `pl.eager` and `pl.eager_scan`.

    python -m tools.bench.functions_bytes [sgd adalomo adamw] [--tokens 2048]

The target's compiler compiles the step, at batch 1, in bfloat16; nothing is run. SGD and AdaLomo are compiled for a
v5e, AdamW, whose moments are bfloat16 as well, for a v5p. The last line of each report has the peak and its ratio to
weights and state, to these with one layer's gradient and the inputs of all layers, and to these with what one layer's
pull-back holds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import framework as pl
from framework.optimizers.adalomo import adalomo

LAYERS, DIM, HEADS, HIDDEN, VOCAB = 32, 4096, 32, 11008, 32000
MIB = 1 << 20
# By name: the optimizer, and the target that its weights and state fit.
SETTINGS: dict[str, tuple[Callable[[], optax.GradientTransformation], str]] = {
    "sgd": (lambda: optax.sgd(1e-2), "v5e-1"),
    "adalomo": (lambda: adalomo(learning_rate=1e-2), "v5e-1"),
    "adamw": (lambda: optax.adamw(1e-4), "v5p-8"),
}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return (wide * root).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [tokens, heads, size]."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[0])[:, None] * rates)[:, None, :]
    left, right = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def layer(weights: Any, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    """One layer: [tokens, dim] -> the same."""
    tokens = x.shape[0]
    normed = norm(x, weights["norm1"])
    queries, keys, values = ((normed @ weights[name]).reshape(tokens, HEADS, -1) for name in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
    x = x + mixed.reshape(tokens, DIM) @ weights["out"]
    normed = norm(x, weights["norm2"])
    return x + (jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])) @ weights["down"], None


def layer_shapes() -> dict[str, Any]:
    """The weights of one layer."""
    shapes = dict.fromkeys(("q", "k", "v", "out"), (DIM, DIM))
    shapes |= {"gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM), "norm1": (DIM,), "norm2": (DIM,)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


def head_loss(weights: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross-entropy."""
    logits = norm(x, weights["norm"]) @ weights["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


@dataclass(frozen=True)
class Training:
    """A step to be planned.

    Attributes:
      step: (trained, tokens) -> (loss, trained).
      trained: shapes of weights and state.
    """

    step: Callable[..., Any]
    trained: dict[str, Any]


def training(optimizer: optax.GradientTransformation) -> Training:
    """Llama 2 7B whose pieces are all updated in the backward pass."""
    table = pl.eager(lambda weights, tokens: weights[tokens], optimizer, name="table")
    stack = pl.eager_scan(jax.checkpoint(layer), optimizer, name="stack")
    head = pl.eager(head_loss, optimizer, name="head")

    def loss(trained: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = table(trained["table"], tokens[:-1])
        x, _ = stack(trained["stack"], x)
        return head(trained["head"], x, tokens[1:])

    def stacked(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((LAYERS, *leaf.shape), leaf.dtype)

    table_shape = jax.ShapeDtypeStruct((VOCAB, DIM), jnp.bfloat16)
    head_shapes = {
        "norm": jax.ShapeDtypeStruct((DIM,), jnp.bfloat16),
        "head": jax.ShapeDtypeStruct((DIM, VOCAB), jnp.bfloat16),
    }
    trained = {
        "table": jax.eval_shape(table.init, table_shape),
        "stack": jax.eval_shape(stack.init, jax.tree.map(stacked, layer_shapes())),
        "head": jax.eval_shape(head.init, head_shapes),
    }
    return Training(pl.value_and_update(loss), trained)


def num_bytes(tree: Any) -> int:
    """The bytes of arrays or their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def pull_back_bytes(tokens: int) -> int:
    """What the pull-back of one layer holds besides its weights."""
    x = jax.ShapeDtypeStruct((tokens, DIM), jnp.bfloat16)
    weights = layer_shapes()

    def pull_back(weights: Any, x: jax.Array) -> Any:
        return jax.vjp(lambda weights, x: layer(weights, x, None)[0], weights, x)[1]

    return num_bytes(jax.eval_shape(pull_back, weights, x)) - num_bytes(weights)


def report(name: str, num_tokens: int) -> None:
    """Prints the figures of a setting."""
    optimizer, target = SETTINGS[name]
    made = training(optimizer())
    tokens = jax.ShapeDtypeStruct((num_tokens + 1,), jnp.int32)
    plan = pl.plan_function(made.step, (made.trained, tokens), target, donate=(0,), name=name)
    print(plan)
    state = num_bytes(made.trained)
    weights = num_bytes([piece.encoded_weights for piece in made.trained.values()])
    gradient = num_bytes(layer_shapes())
    inputs = LAYERS * num_tokens * DIM * 2
    held = pull_back_bytes(num_tokens)
    print(
        f"{name} on {target}: peak {plan.peak_bytes / MIB:.0f} MiB; weights {weights / MIB:.0f}, state "
        f"{(state - weights) / MIB:.0f}, a layer's gradient {gradient / MIB:.0f}, inputs of layers {inputs / MIB:.0f}, "
        f"held by a pull-back {held / MIB:.0f} MiB; peak / (weights, state) {plan.peak_bytes / state:.3f}, with "
        f"gradient and inputs {plan.peak_bytes / (state + gradient + inputs):.3f}, with the pull-back "
        f"{plan.peak_bytes / (state + gradient + inputs + held):.3f}"
    )


def main() -> None:
    """Prints the figures of the settings that are named."""
    parser = argparse.ArgumentParser(description="Bytes of a hand-written Llama 2 7B.")
    parser.add_argument("names", nargs="*", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    for name in options.names:
        report(name, options.tokens)


if __name__ == "__main__":
    main()
