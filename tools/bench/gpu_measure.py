"""The measurements of tools.bench.gpu: each function takes a row and yields its figures, in its own process.

A function yields figures whenever it knows more, so that a row whose process is killed keeps those that it has.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
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
from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.devices.environment import set_memory_fraction
from plimsoll.framework.devices.host import get_machine_memory_bytes
from plimsoll.framework.layout.train_state import TrainState
from plimsoll.framework.metrics.throughput import MetricsBuffer, Throughput
from plimsoll.framework.plan import memory_budget
from plimsoll.framework.plan.targets import resolve
from plimsoll.framework.program.program import Program
from plimsoll.framework.run import offload_self_test, user_errors
from plimsoll.framework.schedules.memory import Memory
from plimsoll.launch import cli
from tools.bench.contestants import Torch, missing
from tools.bench.gpu_rows import Figures, Machine, Row
from tools.bench.sizes import SIZES, write_tokens

# Shapes of the `exact` rows, of dry runs, and of torch's dry run.
_MEDIUM = {"dim": 512, "heads": 8, "hidden": 1024, "layers": 8, "vocab": 4096, "seq": 512, "batch": 8}
_TINY = {"dim": 64, "heads": 2, "hidden": 128, "layers": 4, "vocab": 257, "seq": 32, "batch": 4}
_TORCH = {"layers": 2, "heads": 2, "dim": 64, "seq_len": 32, "batch": 4, "vocab": 257, "positions": 32}


def build_config(row: Row, shape: dict[str, int]) -> Config:
    """Return the row's config with its overrides, and with the given shape for the sizes that it contains."""
    config = configs.load(row.config)
    paths = {
        "dim": ["model.dim"],
        "layers": ["model.stack.num_layers"],
        "batch": ["data.global_batch_size"],
        "vocab": ["model.vocab_size", "data.tokenizer.vocab_size"],
        "seq": ["data.seq_len"],
    }
    if config.model.embed.max_positions:
        paths["seq"].append("model.embed.max_positions")
    for name in paths.keys() & shape.keys():
        for path in paths[name]:
            config.set_path(path, shape[name])
    if "heads" in shape:
        block = config.model.stack.pattern[0]
        block.attention.num_heads = shape["heads"]
        block.attention.num_kv_heads = block.attention.num_kv_heads and shape["heads"] // 2
        block.mlp.hidden = shape["hidden"]
    config.learner.rules = []
    return cli.apply_overrides(config, [*row.overrides.items()])


def compare_schedules(row: Row, dry: bool) -> Iterator[Figures]:
    """Compare four steps under the row's schedule and placements with four steps that keep everything on the device."""
    config = build_config(row, _TINY if dry else _MEDIUM)
    offload_self_test.STEPS = 4
    # Momentum is linear in the gradients; see framework.run.offload_self_test.
    config.learner.optimizer = config_for(optax.sgd, learning_rate=4.0, momentum=0.9)
    ours = Program(config.instantiate(), jax.devices()[:1])
    config.memory = config_for(Memory)
    plain = Program(config.instantiate(), jax.devices()[:1])
    bits = jnp.finfo(config.model.compute_dtype).bits
    with jax.default_matmul_precision("highest" if bits == 32 else "default"):
        errors = offload_self_test.compare(ours, plain)
    # NaN ranks above all numbers.
    worst_leaf = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    error = errors[worst_leaf]
    yield Figures(
        "agrees" if error <= offload_self_test.TOLERANCE[bits] else "WRONG",
        error=error,
        worst_leaf=worst_leaf,
        loss_error=max(error for name, error in errors.items() if name.startswith("loss")),
        host_bytes=ours.layout.bytes_per_device(memory_kind="pinned_host"),
    )


def train(row: Row, dry: bool) -> Iterator[Figures]:
    """Train on the standard library's sources: speed, model FLOPs utilization, peak, and the plan's peak."""
    config = build_config(row, _TINY if dry else {"seq": row.seq, "batch": row.batch})
    if dry:
        config.model.param_dtype = config.model.compute_dtype = "float32"
        if config.memory.parameters != "device":
            config.memory.parameters = "pinned_host:1"
    device = jax.devices()[0]
    program = Program(config.instantiate(), [device])
    _log("compiling")
    need = memory_budget.measure_need(program)
    figures = Figures(
        plan_bytes=need.peak,
        limit_bytes=resolve("local").limit_bytes,
        host_bytes=program.layout.bytes_per_device(memory_kind="pinned_host"),
        parameters=program.layout.size("parameter"),
    )
    if need.message or need.peak > (figures.limit_bytes or need.peak):
        yield replace(figures, status="out of memory by the plan", message=need.message[:300])
        return
    yield figures
    batch_size, seq = program.batch_specs["tokens"].shape
    batch = _read_batch(batch_size, seq)
    model = program.experiment.model
    steps = 2 if dry else row.steps
    peak_flops = spec_for([device]).peak_flops(str(model.compute_dtype))
    throughput = Throughput(batch_size * seq, model.flops_per_token(seq), peak_flops, window=max(1, steps - 3))
    buffer = MetricsBuffer()
    losses: list[float] = []
    _log("initializing")
    state = program.init()
    jax.block_until_ready(state)
    _log("training")
    for step in range(steps):
        state, metrics = program.step(state, program.put(batch))
        buffer.put(step, {"loss": metrics["loss"]})
        # One step late, like the trainer's loop, so that the device does not wait for Python.
        losses += [row["loss"] for _, row in buffer.take()]
        throughput.step()
        rates = throughput.metrics()
        # None on a CPU. `memory_in_use` also looks at every array, which may wait for the device.
        statistics = device.memory_stats() or {}
        figures = replace(
            figures,
            tokens_per_second=rates.get("train/tokens_per_second"),
            mfu=rates.get("train/mfu"),
            peak_bytes=statistics.get("peak_bytes_in_use"),
            losses=[*losses],
        )
        _log(f"step {step + 1} of {steps}")
        yield figures
    losses += [row["loss"] for _, row in buffer.take(0)]
    program.layout.check(state)
    if row.trace:
        figures = replace(figures, losses=losses)
        yield figures
        _trace_step(program, state, batch, Path(row.trace))
        figures = replace(figures, transfers=measure_overlap(Path(row.trace)))
    yield replace(figures, status="ran" if losses[-1] < losses[0] else "LOSS DOES NOT FALL", losses=losses)


def _trace_step(program: Program, state: TrainState, batch: dict[str, np.ndarray], path: Path) -> None:
    """Write the profile of one step to a file, without Python's calls, which would fill it."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(program.step(state, program.put(batch)))
        (profile,) = Path(folder).rglob("*.xplane.pb")
        shutil.copyfile(profile, path)


def measure_overlap(path: Path) -> dict[str, float]:
    """Return the seconds of a profiled step on a GPU, in which it computes and copies, and how many of them overlap.

    Args:
        path: a profile, see `_trace_step`.
    """
    spans: dict[str, list[tuple[float, float]]] = {"computing": [], "to device": [], "to host": []}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                kind = {"MemcpyH2D": "to device", "MemcpyD2H": "to host"}.get(event.name, "computing")
                spans[kind].append((1e-9 * event.start_ns, 1e-9 * (event.start_ns + event.duration_ns)))
    copying = spans["to device"] + spans["to host"]
    seconds = {f"{kind} s": _measure_union(spans[kind]) for kind in spans}
    seconds["copying, either way s"] = _measure_union(copying)
    seconds["busy s"] = _measure_union(copying + spans["computing"])
    hidden = seconds["computing s"] + seconds["copying, either way s"] - seconds["busy s"]
    seconds["copying while computing s"] = hidden
    return seconds


def _measure_union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    end = -math.inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _log(phase: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {phase}", flush=True)


def _read_batch(batch_size: int, seq: int) -> dict[str, np.ndarray]:
    """Return random windows of the standard library's sources.

    Every step trains on this batch, so that a loss that does not fall within a few steps is an error.
    """
    source = StdlibSource()
    text = "".join(part for file in source.files()[:300] for part in source.read(file))
    tokens = np.frombuffer(text.encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(tokens) - seq - 1, batch_size)
    windows = np.array([tokens[start : start + seq + 1] for start in starts], np.int32)
    weights = np.ones((batch_size, seq), np.float32)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:], "weights": weights}


def measure_link(row: Row, dry: bool) -> Iterator[Figures]:
    """Measure GB/s between device and pinned host memory: by device_put, in a program, and both ways at once.

    Also measures the share of a transfer that matrix products hide.
    """
    size = 1 << 20 if dry else row.mib << 20
    width = 256 if dry else 8192
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host")
    on_device = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
    on_host = jax.device_put(jnp.ones(size // 4, jnp.float32), host)
    matrix = jnp.full((width, width), 1 / width, jnp.bfloat16)

    def load(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Device)

    def store(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host)

    load_jit = jax.jit(load, out_shardings=device)
    store_jit = jax.jit(store, out_shardings=host)
    both_jit = jax.jit(lambda x, y: (load(x), store(y)), out_shardings=(device, host))
    transfers: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {
        "to device, device_put": lambda: jax.device_put(on_host, device),
        "to device, in jit": lambda: load_jit(on_host),
        "to host, device_put": lambda: jax.device_put(on_device, host),
        "to host, in jit": lambda: store_jit(on_device),
    }
    for name, call in calls.items():
        transfers[f"{name} GB/s"] = size / _measure_seconds(call) / 1e9
        yield Figures(transfers={**transfers})
    transfers["both at once GB/s"] = 2 * size / _measure_seconds(lambda: both_jit(on_host, on_device)) / 1e9
    yield Figures(transfers={**transfers})
    moving = _measure_seconds(lambda: load_jit(on_host))
    # As many products as take as long as the transfer.
    count = max(1, round(8 * moving / _measure_seconds(lambda: _multiply(matrix, 8))))
    computing = _measure_seconds(lambda: _multiply(matrix, count))
    one_program = jax.jit(lambda m, x: (_multiply(m, count), load(x)), out_shardings=device)
    together = {
        "hidden, two programs": lambda: (_multiply(matrix, count), load_jit(on_host)),
        "hidden, one program": lambda: one_program(matrix, on_host),
    }
    for name, call in together.items():
        transfers[name] = (computing + moving - _measure_seconds(call)) / min(computing, moving)
    yield Figures("ran", transfers=transfers)


@jax.jit
def _multiply(matrix: jax.Array, count: jax.Array | int) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, x: x @ matrix, matrix)


def _measure_seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of five calls, after one that compiles."""
    times: list[float] = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def train_with_torch(row: Row, dry: bool) -> Iterator[Figures]:
    """Train the same shape with transformers and torch.

    The model is compiled, with bf16 autocast, scaled_dot_product_attention and fused AdamW.
    """
    if problem := missing("compiled"):
        yield Figures("not available", problem)
        return
    import torch

    if not dry and not torch.cuda.is_available():
        yield Figures("not available", "torch finds no CUDA device")
        return
    size = replace(SIZES["gpt2-124m"], **(_TORCH if dry else row.shape))
    steps = 1 if dry else row.steps
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.bin"
        write_tokens(tokens, size.vocab)
        contestant = Torch(size, tokens, compiled=not dry, device="cpu" if dry else "cuda")
        # The first steps compile. Each call ends by waiting for its loss.
        contestant.run(steps)
        start = time.perf_counter()
        contestant.run(steps)
        seconds = time.perf_counter() - start
    rate = steps * size.tokens_per_step / seconds
    yield Figures("ran", tokens_per_second=rate, peak_bytes=None if dry else torch.cuda.max_memory_allocated())


def describe_machine(row: Row, dry: bool) -> Iterator[Figures]:
    """Describe the machine."""
    device = jax.devices()[0]
    if device.platform == "cpu" and not dry:
        raise ValueError("JAX finds no GPU")
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "transformers")
    facts = Machine(
        device=device.device_kind,
        limit_bytes=resolve("local").limit_bytes,
        cores=os.cpu_count() or 1,
        host_memory_bytes=get_machine_memory_bytes(),
        python=sys.version.split()[0],
        versions={one.name: one.version for one in importlib.metadata.distributions() if one.name in names},
    )
    yield Figures("ran", machine=facts)


KINDS: dict[str, Callable[[Row, bool], Iterator[Figures]]] = {
    "exact": compare_schedules,
    "train": train,
    "link": measure_link,
    "torch": train_with_torch,
    "machine": describe_machine,
}


def measure(row: Row, dry: bool, connection: Connection) -> None:
    """Measure a row, and send its figures whenever they change; the last ones have a status other than RUNNING."""
    figures = Figures()
    try:
        # Several of these rows run at the same time.
        if row.part == "exact":
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            # Without timing candidates for each product, rows compile faster and do not disturb each other.
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
        # Offload even tiny leaves.
        if dry:
            layout.move_to_host.__kwdefaults__.update(min_bytes=256)  # pyright: ignore[reportOptionalMemberAccess]
        cli.prepare_jax()
        set_memory_fraction()
        for figures in KINDS[row.kind](row, dry):
            connection.send(figures)
    except Exception as error:
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        connection.send(replace(figures, status=_classify(error), message=message))


def _classify(error: Exception) -> str:
    """Return the status of a row that raised an error."""
    if isinstance(error, offload_self_test.SelfTestError):
        return "WRONG"
    if user_errors.is_user_error(error):
        return "refused"
    if "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    return "FAILED"
