"""Memory that a hand-written Llama 2 7B needs to train on one device with `pl.eager` and `pl.eager_scan`.

    python -m tools.bench.functions_bytes [sgd adalomo adamw streamed] [--target h200x1] [--tokens 2048]

The target's compiler compiles the step, at batch 1, with weights in bfloat16; nothing is run. Without --target, SGD,
AdaLomo and streamed AdamW are compiled for a v5e, and resident AdamW for a v5p. Moments are bfloat16 in `adamw`, and
float32 in host memory in `streamed`. The last line of each report shows the peak and its ratio to three totals: weights
and state on the device; these plus one layer's gradient and the inputs of all layers; and these plus the residuals that
one layer's VJP holds.
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
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import plimsoll as pl
from plimsoll.framework.optimizers.adalomo import adalomo
from plimsoll.framework.plan import targets
from tools.bench.plain_jax_llama import JaxLlama

LLAMA2_7B = JaxLlama(layers=32, dim=4096, heads=32, hidden=11008, vocab=32000, dtype=jnp.bfloat16)
MIB = 1 << 20
HOST = NamedSharding(AbstractMesh((1,), ("devices",)), PartitionSpec(), memory_kind="pinned_host")


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer so that it computes, and stores its state, in float32."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return optimizer.init(wide(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(init, update)


# For each name: the optimizer, and a target that its weights and state fit on.
SETTINGS: dict[str, tuple[Callable[[], optax.GradientTransformation], str]] = {
    "sgd": (lambda: optax.sgd(1e-2), "v5e-1"),
    "adalomo": (lambda: adalomo(learning_rate=1e-2), "v5e-1"),
    "adamw": (lambda: optax.adamw(1e-4), "v5p-8"),
    "streamed": (lambda: pl.stream(in_float32(optax.adamw(1e-4))), "v5e-1"),
}


@dataclass(frozen=True)
class TracedTraining:
    """A step to plan.

    Attributes:
        step: (trained, tokens) -> (loss, trained).
        trained: shapes of weights and state, some of them in host memory.
    """

    step: Callable[..., Any]
    trained: dict[str, Any]


def training(model: JaxLlama, optimizer: optax.GradientTransformation) -> TracedTraining:
    """Build a Llama whose parts are all updated in the backward pass."""
    table = pl.eager(lambda weights, tokens: weights[tokens], optimizer, name="table")
    stack = pl.eager_scan(jax.checkpoint(model.layer), optimizer, name="stack")
    head = pl.eager(model.head_loss, optimizer, name="head")

    def loss(trained: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = table(trained["table"], tokens[:-1])
        x, _ = stack(trained["stack"], x)
        return head(trained["head"], x, tokens[1:])

    trained = {
        "table": get_init_shapes(table.init, model.table_shape()),
        "stack": get_init_shapes(stack.init, model.stack_shapes()),
        "head": get_init_shapes(head.init, model.head_shapes()),
    }
    return TracedTraining(pl.value_and_update(loss), trained)


def get_init_shapes(init: Callable[..., Any], weights: Any) -> Any:
    """Return the shapes that `init` produces from weights, with a sharding on leaves that it offloads to the host."""
    program, shapes = jax.make_jaxpr(init, return_shape=True)(weights)
    leaves, structure = jax.tree.flatten(shapes)
    placed = []
    for leaf, result in zip(leaves, program.out_avals, strict=True):
        is_offloaded = getattr(result, "memory_space", None) == jax.memory.Space.Host
        placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=HOST if is_offloaded else None))
    return jax.tree.unflatten(structure, placed)


def num_bytes(tree: Any, kind: str = "device") -> int:
    """Return the bytes of the shapes on the device, or of those on the host."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        is_offloaded = leaf.sharding is not None
        if is_offloaded == (kind == "host"):
            total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total


def pull_back_bytes(model: JaxLlama, tokens: int) -> int:
    """Return the bytes that one layer's VJP holds in addition to its weights."""
    x = jax.ShapeDtypeStruct((tokens, model.dim), model.dtype)
    weights = model.layer_shapes()

    def pull_back(weights: Any, x: jax.Array) -> Any:
        return jax.vjp(lambda weights, x: model.layer(weights, x, None)[0], weights, x)[1]

    return num_bytes(jax.eval_shape(pull_back, weights, x)) - num_bytes(weights)


def report(name: str, target: str | None, num_tokens: int) -> None:
    """Print the figures of a setting."""
    optimizer, own_target = SETTINGS[name]
    target = target or own_target
    # Must run before JAX looks for devices.
    targets.set_environment(target)
    model = LLAMA2_7B
    made = training(model, optimizer())
    offloaded = num_bytes(made.trained, "host")
    if offloaded and targets.resolve(target).platform != "tpu":
        # JAX would trace the program as if everything were on the device.
        print(f"{name} on {target}: not planned: JAX supports host memory of a GPU only if the GPU is attached")
        return
    tokens = jax.ShapeDtypeStruct((num_tokens + 1,), jnp.int32)
    plan = pl.plan_function(
        made.step,
        (made.trained, tokens),
        target,
        donate=(0,),
        # Leaves on the device get no sharding: XLA would choose other layouts, which adds 346 MiB to AdamW's peak.
        out_shardings=(None, jax.tree.map(lambda leaf: leaf.sharding, made.trained)),
        name=name,
    )
    print(plan)
    state = num_bytes(made.trained)
    weights = num_bytes([eager_layer.encoded_weights for eager_layer in made.trained.values()])
    gradient = num_bytes(model.layer_shapes())
    inputs = model.layers * num_tokens * model.dim * 2
    held = pull_back_bytes(model, num_tokens)
    peak = plan.peak_bytes
    print(
        f"{name} on {target}: peak {peak / MIB:.0f} MiB ({peak / MIB / 1024:.2f} GiB); weights "
        f"{weights / MIB:.0f}, state {(state - weights) / MIB:.0f}, on the host {offloaded / MIB:.0f}, "
        f"a layer's gradient "
        f"{gradient / MIB:.0f}, inputs of layers {inputs / MIB:.0f}, held by a pull-back {held / MIB:.0f} MiB; peak / "
        f"(weights, state) {peak / state:.3f}, with gradient and inputs {peak / (state + gradient + inputs):.3f}, with "
        f"the pull-back {peak / (state + gradient + inputs + held):.3f}"
    )


def main() -> None:
    """Print the figures of the named settings."""
    parser = argparse.ArgumentParser(description="Bytes of a hand-written Llama 2 7B.")
    parser.add_argument(
        "names", nargs="*", default=list(SETTINGS), help=f"settings to plan; default: {', '.join(SETTINGS)}"
    )
    parser.add_argument(
        "--target", help="target with one device, such as v5e-1 or h200x1; default: the target of each setting"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per sequence")
    options = parser.parse_args()
    for name in options.names:
        report(name, options.target, options.tokens)


if __name__ == "__main__":
    main()
