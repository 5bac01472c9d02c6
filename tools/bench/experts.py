"""Time of a mixture of experts relative to an MLP with as many active multiply-adds, forward and backward.

    python -m tools.bench.experts [--tokens=2048] [--dim=512] [--hidden=1408] [--experts=8] [--top_k=2] [--rounds=10]

Each expert is hidden / top_k wide. For each implementation of the grouped products, prints the median over rounds in
milliseconds and the ratio to the MLP; the layers take turns in each round. One device, float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.config import config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layers.mlp import MLP

BATCH = 8


def build_step(layer: Any, ctx: Context) -> Callable[..., Any]:
    """Return a jitted function (weights, x_BSD) -> gradients of a sum of the layer's output and loss."""

    def total(weights: Any, x_BSD: jax.Array) -> jax.Array:
        y_BSD, out = layer.apply(layer.prepare(weights, ctx), x_BSD, ctx, {})
        loss = jnp.float32(0.0) if out.loss is None else out.loss
        return jnp.sum(jnp.square(y_BSD)) + loss

    return jax.jit(jax.grad(total, argnums=(0, 1)))


def layers(args: argparse.Namespace) -> dict[str, Layer]:
    """Return the MLP, and the mixture with each implementation."""
    dense = config_for(MLP, hidden=args.hidden, activation="silu", gated=True)
    found: dict[str, Layer] = {"mlp": dense.instantiate(dim=args.dim)}
    for implementation in ("blocks", "ragged"):
        moe = mixture(experts=args.experts, top_k=args.top_k, hidden=args.hidden // args.top_k)
        moe.experts.implementation = implementation
        found[implementation] = moe.instantiate(dim=args.dim)
    return found


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Return {layer: median milliseconds}."""
    length = args.tokens // BATCH
    batch = {"weights": jnp.ones((BATCH, length))}
    ctx = Context(batch, jax.random.key(0), rows=jnp.arange(BATCH), num_targets=jnp.float32(args.tokens), training=True)
    rng = np.random.default_rng(0)
    x_BSD = jnp.asarray(rng.normal(size=(BATCH, length, args.dim)), jnp.float32)
    calls = {}
    for name, layer in layers(args).items():
        specs = layer.parameter_specs()
        weights = jax.tree.map(lambda spec: jnp.asarray(0.02 * rng.normal(size=spec.shape), jnp.float32), specs)
        step = build_step(layer, ctx)
        calls[name] = (step, weights)
        jax.block_until_ready(step(weights, x_BSD))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, (step, weights) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(step(weights, x_BSD))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Time of a mixture of experts relative to an MLP with as many active multiply-adds."
    )
    defaults = {"tokens": 2048, "dim": 512, "hidden": 1408, "experts": 8, "top_k": 2, "rounds": 10}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    medians = measure(parser.parse_args())
    for name, milliseconds in medians.items():
        print(f"{name:8} {milliseconds:9.1f} ms  {milliseconds / medians['mlp']:5.2f}")


if __name__ == "__main__":
    main()
