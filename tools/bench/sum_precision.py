"""Error of long sums in bfloat16 compute: the table of docs/benchmarks/long_sums.md.

    python -m tools.bench.sum_precision                # 65,536 tokens, on this machine's first device
    python -m tools.bench.sum_precision --tokens=8192

Each row is one kind of sum in a training step, computed by the framework's own layer or learner. The figure is the norm
of the sum's error divided by the norm of the same sum in float64. Layers are differentiated one at a time, with the
same bfloat16 inputs, weights and cotangents on both sides, so that rounding of activations between layers does not
count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layers.embedding import Embedding
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.lora import LoRA, LoRALinear
from plimsoll.framework.layers.norm import LayerNorm, RMSNorm
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, ParameterSpec, flatten, unflatten
from plimsoll.framework.learner.learner import Learner

LENGTH, DIM, VOCAB = 256, 64, 512
COMMON = 3  # the token that makes up a tenth of all tokens
USES = 512  # uses of a shared layer, and number of microbatches
Row = tuple[str, float]
Apply = Callable[[Layer, Nested, Any, Context], Any]


class AddShift(Layer):
    """x + w: the smallest layer that a stack can share."""

    def __init__(self, *, dim: int):
        self.dim = dim

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the spec of shift [dim]."""
        return {"shift": ParameterSpec((self.dim,), "float32", roles=("channel",))}

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Add the shift to x."""
        return carry + weights["shift"], Out()


def relative_error(found: Any, exact: Any) -> float:
    """Return the norm of the difference divided by the norm of the exact value."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def gradients(layer: Layer, apply: Apply, stored: Any, x: Any, batch: Nested, dtype: Any) -> tuple[Any, Nested]:
    """Return (value, {path: gradient}) of one layer whose floats are computed in `dtype`.

    A scalar value is a loss; otherwise the output's cotangent is random, with a nonzero mean.
    """
    ctx = Context(batch=batch, num_targets=jnp.float32(batch["tokens"].size), training=True, compute_dtype=dtype)

    @jax.jit
    def run(stored: Nested, x: Any) -> Any:
        weights = {path: w for path, w in flatten(stored).items() if jnp.issubdtype(w.dtype, jnp.floating)}
        codes = {path: w for path, w in flatten(stored).items() if path not in weights}

        def value(weights: Nested) -> Any:
            return apply(layer, layer.prepare(unflatten(weights | codes), ctx), x, ctx)

        y, pull = jax.vjp(value, weights)
        if y.ndim == 0:
            return y, pull(jnp.ones_like(y))[0]
        noise = jax.random.normal(jax.random.key(7), y.shape, jnp.float32)
        return y, pull((0.5 + noise).astype(jnp.bfloat16).astype(y.dtype))[0]

    return run(stored, x)


def layer_rows(name: str, layer: Layer, apply: Apply, batch: Nested, x: Any, dtype: str) -> Iterator[Row]:
    """Yield a row for the gradient of each of a layer's parameters, which are stored in `dtype`."""
    specs, rng = flatten(layer.parameter_specs()), np.random.default_rng(1)

    def draw(spec: ParameterSpec) -> jax.Array:
        if not jnp.issubdtype(spec.dtype, jnp.floating):
            return jnp.asarray(rng.integers(-100, 100, spec.shape), spec.dtype)
        rounded = jnp.asarray(0.5 + rng.normal(size=spec.shape), jnp.bfloat16)  # the same on both sides
        return rounded.astype(spec.dtype if spec.keeps_dtype else dtype)

    stored = {path: draw(spec) for path, spec in specs.items()}
    value, found = gradients(layer, apply, unflatten(stored), x, batch, jnp.bfloat16)
    with jax.enable_x64(True):
        wide = {path: w.astype("float64") if jnp.issubdtype(w.dtype, jnp.floating) else w for path, w in stored.items()}
        x64 = None if x is None else x.astype("float64")
        exact_value, exact = jax.device_get(gradients(layer, apply, unflatten(wide), x64, batch, jnp.float64))
    if value.ndim == 0:
        yield f"{name}, mean loss", relative_error(value, exact_value)
    for path in found:
        if path.endswith("scales") or "/codes" in path:
            continue
        label = f"{name} {path}".strip()
        yield label, relative_error(found[path], exact[path])
        if path == "token":
            yield (
                f"{label}, the row of a token that is a tenth",
                relative_error(found[path][COMMON], exact[path][COMMON]),
            )


def call_layer(layer: Any, weights: Nested, x: Any, ctx: Context) -> Any:
    """Call a layer on its input."""
    return layer(weights, x, ctx)


def apply_layer(layer: Layer, weights: Nested, x: Any, ctx: Context) -> Any:
    """Apply a stage; return its output, or the loss if it is the last stage."""
    y, out = layer.apply(weights, x, ctx, {})
    return out.loss if y is None else y


def all_layers(tokens: int, dtype: str) -> Iterator[Row]:
    """Yield the rows of the gradients of every kind of layer."""
    rng, shape = np.random.default_rng(0), (tokens // LENGTH, LENGTH)
    ids = np.where(rng.random(shape) < 0.1, COMMON, rng.integers(0, VOCAB, shape)).astype(np.int32)
    batch = {"tokens": jnp.asarray(ids), "targets": jnp.asarray(np.roll(ids, 1)), "weights": jnp.ones(shape)}
    documents = batch | {"positions": jnp.asarray(np.arange(LENGTH)[None] % rng.integers(8, 64, (shape[0], 1)))}
    x = jnp.asarray(0.5 + rng.normal(size=(*shape, DIM)), jnp.bfloat16)
    heads = x.reshape(*shape, 4, DIM // 4)
    sizes: dict[str, Any] = {"inputs": DIM, "outputs": DIM}
    table: dict[str, Any] = {"vocab_size": VOCAB, "dim": DIM}
    yield from layer_rows("embedding", Embedding(**table, max_positions=LENGTH), apply_layer, batch, None, dtype)
    under_masks = layer_rows("", Embedding(**table, max_positions=LENGTH), apply_layer, documents, None, dtype)
    yield from (("embedding position, document masks", error) for name, error in under_masks if name == "position")
    yield from layer_rows("RMSNorm", RMSNorm(dim=DIM), call_layer, batch, x, dtype)
    yield from layer_rows("LayerNorm", LayerNorm(dim=DIM), call_layer, batch, x, dtype)
    yield from layer_rows("norm of queries", RMSNorm(dim=DIM // 4), call_layer, batch, heads, dtype)
    yield from layer_rows("Linear", Linear(**sizes, bias=True), call_layer, batch, x, dtype)
    for base in (None, "int8", "nf4"):
        adapted = LoRALinear(Linear(**sizes), LoRA(rank=4, base=base), "linear")
        rows = layer_rows(f"LoRA on {base or dtype}", adapted, call_layer, batch, x, dtype)
        yield from (row for row in rows if "lora" in row[0])
    yield from layer_rows("head", LMHead(**table), apply_layer, batch, x, dtype)


def measure_shared_layer(dtype: str) -> Row:
    """Return the row of the gradient of a layer that is shared throughout a stack."""
    stack = Stack(dim=DIM, num_layers=2 * USES, pattern=[config_for(AddShift), config_for(AddShift)], shared=[1])
    own = {"block0": {"shift": jnp.zeros((USES, DIM), dtype)}}
    shared = {"block1": {"shift": jnp.zeros(DIM, dtype)}}
    ct = jnp.asarray(0.5 + np.random.default_rng(0).normal(size=(1, 1, DIM)), jnp.bfloat16)
    ctx = Context(batch={}, training=True, compute_dtype=jnp.bfloat16)

    @jax.jit
    def grad(shared: Nested, ct: jax.Array) -> Nested:
        return jax.vjp(lambda s: stack.forward(own, jnp.zeros_like(ct), ctx, {}, shared=s)[0], shared)[1](ct)[0]

    found = grad(shared, ct)["block1"]["shift"]
    return f"a layer that {USES} units share", relative_error(found, USES * np.asarray(ct, np.float64)[0, 0])


def learner_rows(dtype: str) -> Iterator[Row]:
    """Yield rows for the learner's sums: over microbatches, over elements (norm), and over updates (averages)."""
    spec = ParameterSpec((DIM,), dtype, roles=("channel",))
    settings: Any = {"optimizer": config_for(optax.sgd, learning_rate=0.0), "clip": None, "ema": 0.999}
    learner = Learner(specs={"head": {"scale": spec}}, accumulate=USES, **settings)
    rng = np.random.default_rng(0)
    terms = jnp.asarray(0.5 + rng.normal(size=(USES, DIM)), dtype)
    sums = jnp.zeros(DIM, learner.gradient_dtype(spec))
    sums = jax.jit(lambda sums: jax.lax.scan(lambda s, g: (s + g.astype(s.dtype), None), sums, terms)[0])(sums)
    yield f"{USES} microbatches", relative_error(sums, np.asarray(terms, np.float64).sum(0))
    many = jnp.asarray(rng.normal(size=1 << 22), dtype)
    norm = jax.jit(learner.norm)({"scale": many})
    yield "norm of 4,194,304 gradients", relative_error(norm, np.linalg.norm(np.asarray(many, np.float64)))

    goal = jnp.asarray(rng.normal(size=DIM), dtype)  # constant weights, and an average that starts elsewhere
    first = learner.init({"head": {"scale": goal.astype(jnp.float32)}})
    average = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), learner.ema_specs())
    counter = {"step": jnp.int32(1), "skipped": jnp.int32(0), "grad_norm": jnp.float32(1)}
    decision = learner.decide(jnp.float32(1), jnp.float32(1), counter)
    nothing = jax.tree.map(jnp.zeros_like, first.weights)

    def update(average: Nested, _: None) -> tuple[Nested, None]:
        return learner.update(first.weights, nothing, first.entry, average, decision).average, None

    found = jax.jit(lambda average: jax.lax.scan(update, average, None, length=1000)[0])(average)
    exact = np.asarray(goal, np.float64) * (1 - 0.999**1000)
    yield "averages, decay 0.999, 1,000 updates", relative_error(found["head"]["scale"], exact)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 16, help=f"number of tokens; a multiple of {LENGTH}")
    tokens = parser.parse_args().tokens
    if tokens <= 0 or tokens % LENGTH:
        parser.error(f"--tokens: expected a multiple of {LENGTH}, given {tokens}")
    columns = []
    for dtype in ("bfloat16", "float32"):
        columns.append(dict([*all_layers(tokens, dtype), measure_shared_layer(dtype), *learner_rows(dtype)]))
    print(f"{tokens:,} tokens on {jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print("| sum | bfloat16 parameters | float32 parameters |\n|---|---|---|")
    names = [(left, right) for left, right in zip(*columns, strict=True)]
    for left, right in names:
        print(f"| {left.replace('bfloat16', 'the weight')} | {columns[0][left]:.1e} | {columns[1][right]:.1e} |")


if __name__ == "__main__":
    main()
