"""The measurements of tools.bench.gpu: each function takes a row and returns its figures, in its own process.

A row has a config's name, `sets` (overrides by dotted path, as text), and sizes.
"""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll import configs
from plimsoll.framework import layout
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.sources import StdlibSource
from plimsoll.framework.devices.accelerators import get_machine_memory_bytes, spec_for
from plimsoll.framework.devices.environment import set_memory_fraction
from plimsoll.framework.metrics.memory import memory_in_use
from plimsoll.framework.metrics.throughput import MetricsBuffer, Throughput
from plimsoll.framework.plan import memory_budget
from plimsoll.framework.plan.targets import resolve
from plimsoll.framework.program.program import Program
from plimsoll.framework.run import offload_self_test, user_errors
from plimsoll.framework.schedules.memory import Memory
from plimsoll.launch import cli
from tools.bench.contestants import Torch, missing
from tools.bench.sizes import SIZES, write_tokens

Row = dict[str, Any]
_MEDIUM = {"dim": 512, "heads": 8, "hidden": 1024, "layers": 8, "vocab": 4096, "seq": 512, "batch": 8}
_TINY = {"dim": 64, "heads": 2, "hidden": 128, "layers": 4, "vocab": 257, "seq": 32, "batch": 4}
_TORCH = {"layers": 2, "heads": 2, "dim": 64, "seq_len": 32, "batch": 4, "vocab": 257, "positions": 32}


def build_config(row: Row, shape: dict[str, int]) -> Config:
    """Return the row's config with its overrides, and with the given shape for the sizes that it contains."""
    config = configs.load(row["config"])
    block, positions = config.model.stack.pattern[0], ["model.embed.max_positions"]
    names = {"dim": ["model.dim"], "layers": ["model.stack.num_layers"], "batch": ["data.global_batch_size"]}
    names |= {"vocab": ["model.vocab_size", "data.tokenizer.vocab_size"]}
    names |= {"seq": ["data.seq_len", *(positions if config.model.embed.max_positions else [])]}
    for path, value in [(path, shape[name]) for name in names if name in shape for path in names[name]]:
        config.set_path(path, value)
    if "heads" in shape:
        block.attention.num_heads, block.mlp.hidden = shape["heads"], shape["hidden"]
        block.attention.num_kv_heads = block.attention.num_kv_heads and shape["heads"] // 2
    config.learner.rules = []
    return cli.apply_overrides(config, [*row["sets"].items()])


def exact(row: Row, dry: bool) -> Row:
    """Compare four steps under the row's schedule and placements with four steps that keep everything on the device."""
    config, offload_self_test.STEPS = build_config(row, _TINY if dry else _MEDIUM), 4
    config.learner.optimizer = config_for(
        optax.sgd, learning_rate=4.0, momentum=0.9
    )  # see framework.run.offload_self_test
    ours = Program(config.instantiate(), jax.devices()[:1])
    config.memory = config_for(Memory)
    bits = jnp.finfo(config.model.compute_dtype).bits
    with jax.default_matmul_precision("highest" if bits == 32 else "default"):
        errors = offload_self_test.compare(ours, Program(config.instantiate(), jax.devices()[:1]))
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    loss = max(error for name, error in errors.items() if name.startswith("loss"))
    offloaded = ours.layout.bytes_per_device(memory_kind="pinned_host")
    status = "agrees" if errors[worst] <= offload_self_test.TOLERANCE[bits] else "WRONG"
    return {"status": status, "off_by": errors[worst], "at": worst, "loss_off_by": loss, "host_bytes": offloaded}


def train(row: Row, dry: bool) -> Row:
    """Train on the standard library's sources: speed, model FLOPs utilization, peak, and the plan's peak."""
    config = build_config(row, _TINY if dry else {"seq": row["seq"], "batch": row["batch"]})
    if dry:
        config.model.param_dtype = config.model.compute_dtype = "float32"
        if config.memory.parameters != "device":
            config.memory.parameters = "pinned_host:1"
    program = Program(config.instantiate(), jax.devices()[:1])
    experiment, device, layouts = program.experiment, jax.devices()[0], program.layout
    need, limit, losses = memory_budget.measure_need(program), resolve("local").limit_bytes, list[float]()
    figures: Row = {"plan_bytes": need.peak, "limit_bytes": limit, "parameters": layouts.size("parameter")}
    if need.message or (limit or need.peak) < need.peak:
        return figures | {"status": "out of memory by the plan"}
    source, (batch, seq) = StdlibSource(), program.batch_specs["tokens"].shape
    text = "".join(part for file in source.files()[:300] for part in source.read(file))
    tokens, rng = np.frombuffer(text.encode(), np.uint8), np.random.default_rng(0)
    peak_flops = spec_for([device]).peak_flops(str(experiment.model.compute_dtype))
    steps, flops = 2 if dry else row["steps"], experiment.model.flops_per_token(seq)
    clock, buffer = Throughput(batch * seq, flops, peak_flops, window=max(1, steps - 3)), MetricsBuffer()
    state, weights = program.init(), np.ones((batch, seq), np.float32)
    for step in range(steps):
        windows = np.array([tokens[i : i + seq + 1] for i in rng.integers(0, len(tokens) - seq - 1, batch)], np.int32)
        data = program.put({"tokens": windows[:, :-1], "targets": windows[:, 1:], "weights": weights})
        state, metrics = program.step(state, data)
        buffer.put(step, {"loss": metrics["loss"]})
        losses += [found["loss"] for _, found in buffer.take()]  # one step late, like the trainer's loop
        clock.step()
    losses += [found["loss"] for _, found in buffer.take(0)]
    layouts.check(state)
    figures |= {name.removeprefix("train/"): value for name, value in clock.metrics().items()}
    peak, offloaded = memory_in_use([device]).device_peak_bytes, layouts.bytes_per_device(memory_kind="pinned_host")
    figures |= {"peak_bytes": peak, "host_bytes": offloaded, "losses": [losses[0], losses[-1]]}
    return figures | {"status": "ran" if losses[-1] < losses[0] else "LOSS DOES NOT FALL"}


def link(row: Row, dry: bool) -> Row:
    """Measure GB/s between device and pinned host memory: by device_put, in a program, and both ways at once.

    Also measures the share of a transfer that matrix products hide.
    """
    size, n = (1 << 20 if dry else row["mib"] << 20), 256 if dry else 8192
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host")
    ours, theirs = (jax.device_put(jnp.ones(size // 4, jnp.float32), place) for place in (device, host))
    matrix, to, fro = jnp.full((n, n), 1 / n, jnp.bfloat16), jax.memory.Space.Device, jax.memory.Space.Host
    move = {"to device": lambda x, y: jax.device_put(y, to), "to host": lambda x, y: jax.device_put(x, fro)}
    places = {"to device": device, "to host": host}
    inside = {name: jax.jit(f, out_shardings=places[name]) for name, f in move.items()}
    both = jax.jit(lambda x, y: [f(x, y) for f in move.values()], out_shardings=[*places.values()])
    eager = {"to device": lambda: jax.device_put(theirs, device), "to host": lambda: jax.device_put(ours, host)}
    figures: Row = {}
    for name in places:
        figures[f"{name}, device_put GB/s"] = size / _seconds(eager[name]) / 1e9
        figures[f"{name}, in jit GB/s"] = size / _seconds(lambda name=name: inside[name](ours, theirs)) / 1e9
    figures["both at once GB/s"] = 2 * size / _seconds(lambda: both(ours, theirs)) / 1e9
    moving = _seconds(lambda: inside["to device"](ours, theirs))
    count = max(1, round(8 * moving / _seconds(lambda: _products(matrix, 8))))
    computing = _seconds(lambda: _products(matrix, count))
    together = _seconds(lambda: (_products(matrix, count), inside["to device"](ours, theirs)))
    in_one = jax.jit(lambda m, x, y: (_products(m, count), move["to device"](x, y)), out_shardings=device)
    for name, seconds in (("two programs", together), ("one program", _seconds(lambda: in_one(matrix, ours, theirs)))):
        figures[f"hidden, {name}"] = (computing + moving - seconds) / min(computing, moving)
    return figures | {"status": "ran", "compute_ms": 1e3 * computing, "transfer_ms": 1e3 * moving}


@jax.jit
def _products(matrix: jax.Array, count: jax.Array | int) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, x: x @ matrix, matrix)


def _seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of five calls, after one that compiles."""
    times = list[float]()
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def torch(row: Row, dry: bool) -> Row:
    """Train the same shape with transformers and torch.

    The model is compiled, with bf16 autocast, scaled_dot_product_attention and fused AdamW.
    """
    if problem := missing("compiled"):
        return {"status": "not available", "message": problem}
    import torch as pytorch

    if not dry and not pytorch.cuda.is_available():
        return {"status": "not available", "message": "torch is installed, and sees no CUDA device"}
    size, steps = replace(SIZES["gpt2-124m"], **(_TORCH if dry else row["size"])), 1 if dry else row["steps"]
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / "tokens.bin", size.vocab)
        contestant = Torch(size, Path(folder) / "tokens.bin", compiled=not dry, device="cpu" if dry else "cuda")
        contestant.run(steps)  # compiles
        start = time.perf_counter()
        contestant.run(steps)  # ends by waiting for its loss
    rate, peak = steps * size.tokens_per_step / (time.perf_counter() - start), pytorch.cuda.max_memory_allocated
    return {"status": "ran", "tokens_per_second": rate, "peak_bytes": 0 if dry else peak()}


def machine(row: Row, dry: bool) -> Row:
    """Describe the machine."""
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch")
    versions = {one.name: one.version for one in importlib.metadata.distributions() if one.name in names}
    facts = {"cores": os.cpu_count(), "host_memory_bytes": get_machine_memory_bytes(), "python": sys.version.split()[0]}
    facts["limit_bytes"] = resolve("local").limit_bytes
    return {"status": "ran", "device": jax.devices()[0].device_kind, **facts, "versions": versions}


KINDS = {"exact": exact, "train": train, "link": link, "torch": torch, "machine": machine}


def measure(row: Row, dry: bool, log: str, answer: Any) -> None:
    """Run the process of one row: send its figures, or why there are none; redirect its output to a file."""
    with open(log, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        if row["part"] == "exact":  # several rows run at the same time
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if dry:  # offload even tiny leaves
            layout.move_to_host.__kwdefaults__.update(min_bytes=256)  # pyright: ignore[reportOptionalMemberAccess]
        cli.prepare_jax()
        set_memory_fraction()
        result = KINDS[row["kind"]](row, dry)
    except Exception as error:
        traceback.print_exc()
        wrong, full = isinstance(error, offload_self_test.SelfTestError), "RESOURCE_EXHAUSTED" in str(error)
        status = "refused" if user_errors.is_user_error(error) else "out of memory" if full else "FAILED"
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        result = {"status": "WRONG" if wrong else status, "message": message}
    answer.send(result)
