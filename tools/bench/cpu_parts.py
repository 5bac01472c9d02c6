"""Time of each component of a step on its own, in JAX and in torch, at the shapes of one size.

    python -m tools.bench.cpu_parts [--size=6x384] [--rounds=3] [--cores=N] [--xla_flags="--xla_..."]

Frameworks take turns, with one process per framework and round. Each component is timed many times, and the shortest
time of all rounds counts, because other work on the machine only ever adds time. With --cores=1 processor time is
measured, which other work hardly affects. Times are in float32 and include the forward and backward pass, except for
the square product and AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.bench.cpu_peers import ENVIRONMENT, markdown
from tools.bench.sizes import SIZES, Size
from tools.bench.workers import ROOT

Part = Callable[[], object]
SECONDS = 0.5  # per part and round
SQUARE = 1536


def counts(size: Size) -> dict[str, int]:
    """Return how often each component runs in a step; 0 for components that are only for comparison."""
    L = size.layers
    return {
        "square product": 0,
        "linear D x 4D": 3 * L,  # qkv (3D wide, counted as three quarters), up, down, output (a quarter)
        "attention": L,
        "GELU": L,
        "LayerNorm": 2 * L + 1,
        "head and cross-entropy": 1,
        "AdamW": 1,
    }


def arrays(size: Size) -> dict[str, np.ndarray]:
    """Return the inputs of the components."""
    rng = np.random.default_rng(0)
    T, D, V, N = size.tokens_per_step, size.dim, size.vocab, size.heads

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return {
        "square": normal(SQUARE, SQUARE),
        "x": normal(T, D),
        "w": normal(D, 4 * D),
        "y": normal(T, 4 * D),
        "heads": normal(size.batch, N, size.seq_len, D // N),
        "table": normal(V, D),
        "targets": rng.integers(0, V, T).astype(np.int32),
        "params": normal(size.num_parameters),
    }


def jax_parts(size: Size) -> dict[str, Part]:
    """Return each component as a jitted function of preallocated arrays."""
    import jax
    import jax.numpy as jnp
    import optax

    a: dict[str, Any] = {name: jnp.asarray(value) for name, value in arrays(size).items()}

    def part(function: Callable[..., Any], *names: str) -> Part:
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*(a[name] for name in names)))

    def both(function: Callable[..., Any]) -> Callable[..., Any]:
        """Run forward and backward, with the output as the cotangent."""

        def run(*inputs: Any) -> Any:
            out, pull = jax.vjp(function, *inputs)
            return out, pull(out)

        return run

    def attend(q: jax.Array) -> jax.Array:
        S, H = q.shape[-2:]
        scores = jnp.einsum("bnsh,bnth->bnst", q, q) / np.sqrt(H)
        scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e30)
        return jnp.einsum("bnst,bnth->bnsh", jax.nn.softmax(scores, axis=-1), q)

    def norm(x: jax.Array) -> jax.Array:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)

    def head(x: jax.Array, table: jax.Array, targets: jax.Array) -> Any:
        def loss(x: jax.Array, table: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(x @ table.T, targets).mean()

        return jax.value_and_grad(loss, (0, 1))(x, table)

    optimizer = optax.adamw(1e-3, weight_decay=0.1)
    state = [a["params"], optimizer.init(a["params"])]

    def update(params: Any, opt: Any, grads: Any) -> Any:
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    compiled_update = jax.jit(update, donate_argnums=(0, 1))
    grads = a["params"] + 1.0

    def adamw() -> None:
        state[:] = compiled_update(*state, grads)
        jax.block_until_ready(state)

    return {
        "square product": part(jnp.matmul, "square", "square"),
        "linear D x 4D": part(both(jnp.matmul), "x", "w"),
        "attention": part(both(attend), "heads"),
        "GELU": part(both(lambda y: jax.nn.gelu(y, approximate=True)), "y"),
        "LayerNorm": part(both(norm), "x"),
        "head and cross-entropy": part(head, "x", "table", "targets"),
        "AdamW": adamw,
    }


def torch_parts(size: Size) -> dict[str, Part]:
    """Return each component as eager torch runs it."""
    import torch
    import torch.nn.functional as F

    a = {name: torch.from_numpy(value) for name, value in arrays(size).items()}
    leaf = {name: a[name].clone().requires_grad_() for name in ("x", "w", "y", "heads", "table")}
    targets = a["targets"].long()

    def both(function: Callable[..., Any], *names: str) -> Part:
        def run() -> None:
            out = function(*(leaf[name] for name in names))
            out.backward(out.detach())
            for name in names:
                leaf[name].grad = None

        return run

    def loss(x: Any, table: Any) -> Any:
        return F.cross_entropy(x @ table.T, targets)

    params = torch.nn.Parameter(a["params"].clone())
    params.grad = a["params"] + 1.0
    optimizer = torch.optim.AdamW([params], lr=1e-3, weight_decay=0.1, fused=True)
    return {
        "square product": lambda: a["square"] @ a["square"],
        "linear D x 4D": both(torch.matmul, "x", "w"),
        "attention": both(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), "heads"),
        "GELU": both(lambda y: F.gelu(y, approximate="tanh"), "y"),
        "LayerNorm": both(lambda x: F.layer_norm(x, x.shape[-1:]), "x"),
        "head and cross-entropy": both(loss, "x", "table"),
        "AdamW": optimizer.step,
    }


def shortest(part: Part, clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest call; calls repeat for SECONDS and at least three times."""
    part()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < SECONDS:
        start = clock()
        part()
        times.append(clock() - start)
    return min(times)


def time_parts(framework: str, size: Size, cores: int) -> dict[str, float]:
    """Return the seconds of each component, measured in this process on the given number of cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # both frameworks read it at startup
    parts = jax_parts(size) if framework == "jax" else torch_parts(size)
    # On one core, processor time equals the time on an idle machine; on several it would also count threads that wait.
    clock = time.process_time if cores == 1 else time.perf_counter
    return {name: shortest(part, clock) for name, part in parts.items()}


def measure(framework: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each component, measured in a separate process."""
    environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": args.xla_flags}
    flags = [f"--size={args.size}", f"--cores={args.cores}", f"--only={framework}"]
    command = [sys.executable, "-m", "tools.bench.cpu_parts", *flags]
    return json.loads(subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def rows(size: Size, jax_s: dict[str, float], torch_s: dict[str, float]) -> list[list[str]]:
    """Return the table: milliseconds of each component, per call and per step."""
    lines = [["part", "per step", "JAX ms", "torch ms", "JAX / torch", "JAX ms per step", "torch ms per step"]]
    totals = [0.0, 0.0]
    for part, count in counts(size).items():
        each = [1e3 * jax_s[part], 1e3 * torch_s[part]]
        totals = [total + count * ms for total, ms in zip(totals, each, strict=True)]
        cells = [f"{each[0]:.2f}", f"{each[1]:.2f}", f"{each[0] / each[1]:.2f}"]
        lines.append([part, str(count), *cells, *(f"{count * ms:.1f}" for ms in each)])
    lines.append(["sum", "", "", "", f"{totals[0] / totals[1]:.2f}", *(f"{total:.1f}" for total in totals)])
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="6x384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--xla_flags", default="")
    parser.add_argument(
        "--only", choices=["jax", "torch"], help="time one framework and print JSON; used for the processes of a round"
    )
    args = parser.parse_args()
    size = SIZES[args.size]
    if args.only is not None:
        print(json.dumps(time_parts(args.only, size, args.cores)))
        return
    results: dict[str, list[dict[str, float]]] = {"jax": [], "torch": []}
    for _ in range(args.rounds):
        for framework, measured in results.items():
            measured.append(measure(framework, args))
    jax_s, torch_s = ({part: min(one[part] for one in all_) for part in all_[0]} for all_ in results.values())
    print(markdown(rows(size, jax_s, torch_s)))


if __name__ == "__main__":
    main()
