"""Error of running stacks of two streams backward: how exactly inputs are recovered, by streams, dtype and depth.

    python -m tools.drift [--layers=16,64,256]

Runs a Llama of width 64 on 2 x 64 tokens, with dropout. "usual": its initial weights. "large": weights three times as
large, and branches that do not shrink with depth, so that each layer amplifies the changes of earlier ones. Forward and
backward are two compiled scans of one program; the second one also computes gradients. Errors are the largest of an
element, relative to the largest element of the stack's input; 0 means bitwise equal.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layout import initialize


def there_and_back(model: Any, params: Any, ctx: Context) -> tuple[Any, Any, Any]:
    """Return (stack input, output of the last layer, recovered stack input), both streams each, on the host.

    `ctx` is a training context of the whole model.
    """
    stack = model.stack

    @jax.jit
    def run(params: Any) -> Any:
        first = stack.enter(model.run("embed", params, None, ctx, {})[0])
        inner, own, indices = ctx.fold("stack"), params["stack"], jnp.arange(stack.num_repeats)
        unit = stack.layer_function(own, inner)

        def ahead(carry: Any, xs: Any) -> Any:
            return unit(carry, xs[1], {}, {}, inner.fold_index(xs[0]))[0], None

        def back(carry: Any, xs: Any) -> Any:
            y, ct = carry
            join = lambda own, shared: own  # noqa: E731
            result = stack.reverse_layer(y, (xs[1], {}), join, {}, inner.fold_index(xs[0]), (ct, None))
            grads, _ = result.grads
            ct = jax.tree.map(lambda c: c / jnp.sqrt(jnp.mean(jnp.square(c)) + 1e-9), result.ct)
            return (result.carry, ct), grads

        y, _ = jax.lax.scan(ahead, first, (indices, own))
        ones = jax.tree.map(jnp.ones_like, y)
        (last, _), grads = jax.lax.scan(back, (y, ones), (indices, own), reverse=True)
        return (first, y, last), grads

    return jax.device_get(run(params)[0])


def error(streams: str, compute: str, layers: int, *, large: bool) -> tuple[float, float]:
    """Return (relative error of the recovered streams, largest element of the output streams)."""
    config = llama_model(layers=layers, heads=4, dim=64, hidden=96, vocab_size=128)
    config.stack.streams, config.compute_dtype, config.stack.unroll = streams, compute, 1
    config.stack.depth_scaled_init, config.stack.pattern[0].dropout = not large, 0.1
    model = config.instantiate()
    params = initialize(model.parameter_specs(), jax.random.key(0))
    scale = 3.0 if large else 1.0
    params["stack"] = jax.tree.map(lambda p: p * scale if p.ndim > 2 else p, params["stack"])
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 128)
    ctx = Context({"tokens": tokens}, jax.random.key(2), jnp.arange(2), training=True, compute_dtype=jnp.dtype(compute))
    first, y, last = there_and_back(model, params, ctx)
    worst = max(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(first, last, strict=True))
    return float(worst), float(max(np.abs(stream).max() for stream in y))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="16,64,256")
    depths = [int(text) for text in parser.parse_args().layers.split(",")]
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}")
    print("| weights | streams | compute | " + " | ".join(f"{depth} layers" for depth in depths) + " |")
    print("|---|---|---|" + "---|" * len(depths))
    for large in (False, True):
        for streams in ("fixed", "float32"):
            for compute in ("float32", "bfloat16"):
                found = [f"{error(streams, compute, depth, large=large)[0]:.1e}" for depth in depths]
                print(f"| {'large' if large else 'usual'} | {streams} | {compute} | {' | '.join(found)} |")


if __name__ == "__main__":
    main()
