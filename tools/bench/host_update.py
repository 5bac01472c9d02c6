"""Compare two updates with optimizer state in host memory: moving the state, or computing there with `compute_on`.

    python -m tools.bench.host_update [--target=v5e-1]

Updates a few f32 matrices with AdamW in three ways: with the state on the device; with the state on the host, moved for
the update; and with the state on the host, updated by its processor, which gradients and weights are sent to. With a
target the programs are compiled for it with no device attached; without one they run on this machine's CPU, in turns.
Prints a markdown table.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.compute_on import compute_on
from jax.sharding import SingleDeviceSharding

from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.layout import ParameterSpec
from plimsoll.framework.optimizers.offload import offload_optimizer
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.compilation import compile_for
from plimsoll.framework.terminal.tables import human_bytes
from tools.bench.ratios import ratio

ADAMW = optax.adamw(1e-3, weight_decay=0.1)
HOSTED = offload_optimizer(ADAMW)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
WAYS = ["state on the device", "state moved for the update", "update on the host"]


def build_step(way: str, specs: Any) -> Any:
    """Return (weights, state, gradients) -> (weights, state) for one of the ways. `specs` describes the state."""
    put = lambda tree, space: jax.tree.map(lambda x: jax.device_put(x, space), tree)  # noqa: E731

    def on_the_host(grads: Any, state: Any, params: Any) -> Any:
        with compute_on("device_host"):
            updates, state = ADAMW.update(*(put(tree, HOST) for tree in (grads, state, params)))
        back = lambda x, spec: jax.device_put(x, DEVICE) if not spec.is_offloaded else x  # noqa: E731
        return put(updates, DEVICE), jax.tree.map(back, state, specs)

    update = dict(zip(WAYS, (ADAMW.update, HOSTED.update, on_the_host), strict=True))[way]

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def main() -> None:
    """Compile the three ways, run them if possible, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("target", "cpu:1"), ("matrices", 8), ("dim", 1024), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    targets.set_environment(args.target)
    target = targets.resolve(args.target)
    device, matrix = target.devices()[0], ParameterSpec((args.dim, args.dim), "float32", roles=("in", "out"))
    params = dict.fromkeys([f"w{i}" for i in range(args.matrices)], matrix)
    compiled, rows, states = {}, {}, {}
    for way in WAYS:
        specs = offload_optimizer(ADAMW, offload_dst="device" if way == WAYS[0] else "pinned_host").partition(params)
        trees = params, specs, params
        shardings = jax.tree.map(lambda spec: SingleDeviceSharding(device, memory_kind=spec.memory_kind), trees)
        abstract = jax.tree.map(
            lambda s, leaf_sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=leaf_sharding), trees, shardings
        )
        lowered = jax.jit(build_step(way, specs), donate_argnums=(0, 1), out_shardings=shardings[:2]).lower(*abstract)
        offloaded = sum(spec.num_bytes for spec in jax.tree.leaves(specs) if spec.is_offloaded)
        bytes_, compiled[way] = compile_for(lowered, target.platform, HostBytes.in_place(offloaded)), lowered.compile()
        calls = str(compiled[way].as_text().count('custom_call_target="HostExecute"'))
        rows[way] = [*map(human_bytes, (offloaded, bytes_.peak, bytes_.temp)), calls]
        if target.platform == "cpu":
            states[way] = jax.device_put(jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), trees), shardings)
    seconds = {way: [] for way in WAYS}
    for _ in range(args.rounds + 1):
        for way, (weights, state, grads) in states.items():
            start = time.perf_counter()
            states[way] = (*jax.block_until_ready(compiled[way](weights, state, grads)), grads)
            seconds[way].append(time.perf_counter() - start)
    print("| | on the host | device peak | temporaries | host calls | step time |\n|---|---|---|---|---|---|")
    for way in WAYS:
        taken = ratio(seconds[way][1:], seconds[WAYS[0]][1:]) if states else "-"
        print(f"| {' | '.join([way, *rows[way]])} | {taken} |")


if __name__ == "__main__":
    main()
