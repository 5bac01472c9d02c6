"""The canary: before the real model exists, a small one says whether what is offloaded stays right on these devices.

Compilers have been wrong about host memory without a word (openxla/xla#46231, GPU: gradients of what a scan offloads).
So a small transformer, always the same, takes two steps by the run's schedule, placements, clipping, dtypes and mesh,
and by the plain schedule with all on the device. They must agree, and host leaves must be on the host, as arrays and in
the compiled step. Its optimizer is momentum, linear in gradients: Adam's first steps would show the signs of rounding.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from framework.config import Config, config_for
from framework.data.pipeline import DataPipeline
from framework.data.sources import TokenMemmap
from framework.data.tokenizers import NoTokenizer
from framework.layers.block import Block
from framework.layout import flatten
from framework.learner.rules import Rule
from framework.models.causal_lm import CausalLM
from framework.program.program import Program
from framework.schedules.memory import Memory

STEPS, UNITS = 2, 4
TOLERANCE = {32: 1e-3, 16: 1e-1}  # by bits. Rounding on CPUs: up to 6e-6 and 2e-2; a gradient that is wrong: about 1


class CanaryError(ValueError):
    """What is offloaded is wrong, or is not offloaded, on these devices with this compiler."""


def check(config: Config, program: Program) -> str:
    """A line for people: how well both agreed, or why the canary could not run; "" if the run has nothing on the host.
    `config` is its config, resolved. Raises CanaryError: they do not agree, or a leaf is not where the layout says."""
    start, devices, memory = time.monotonic(), list(program.mesh.devices.flat), program.experiment.memory
    hosted = program.layout.bytes_per_device(memory_kind="pinned_host")
    if not hosted and memory.activations == "device" and "offload" not in memory.remat:
        return ""
    bits = min(32, *(jnp.finfo(config.model[name]).bits for name in ("param_dtype", "compute_dtype")))
    try:
        small = shrunk(config, program)
        ours = Program(small.instantiate(), devices)
        small.memory = config_for(Memory)
        # Else a float32 product is as precise as its kernel likes. Kernels for bfloat16 may know no other precision.
        with jax.default_matmul_precision("highest" if bits == 32 else "default"):
            errors = compare(ours, Program(small.instantiate(), devices))
    except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, CanaryError) or jax.process_count() > 1:  # the other processes would wait for this one
            raise
        return f"canary: did not run, so offloading is not checked: {' '.join(str(error).split())[:300]}"
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE[bits]]
    worst = max(wrong or errors, key=lambda name: np.nan_to_num(errors[name], nan=math.inf))
    if wrong:
        raise CanaryError(
            f"canary: what config.memory offloads is computed wrong on these devices (as in openxla/xla#46231): {worst}"
            f" of a small model is off by {errors[worst]:.1e} (tolerance {TOLERANCE[bits]:g}) from {STEPS} steps with "
            f"all on the device, as are {len(wrong) - 1} more; keep it there (health.canary=false trains all the same)"
        )
    return f"canary: offloaded and resident agree to {errors[worst]:.0e} ({time.monotonic() - start:.1f} s)"


def shrunk(config: Config, program: Program) -> Config:
    """The run's config around a model of 4 units, as wide as leaves must be to be hosted (`layout.move_to_host`)."""
    small, sizes = config.copy(), program.mesh.shape
    width, parts = math.lcm(256, sizes["model"], sizes["fsdp"]), min(program.experiment.learner.accumulate, 2)
    block, small.model = config_for(Block), config_for(CausalLM, dim=width, vocab_size=8 * width)
    small.model.param_dtype, small.model.compute_dtype = config.model.param_dtype, config.model.compute_dtype
    block.attention.num_heads, block.attention.head_dim, block.mlp.hidden = math.lcm(4, sizes["model"]), 64, 2 * width
    small.model.stack.num_layers, small.model.stack.pattern = UNITS, [block]
    small.mesh.data, small.mesh.expert = sizes["data"] * sizes["expert"], 1  # there are no experts
    source, tokenizer = config_for(TokenMemmap, path=""), config_for(NoTokenizer, vocab_size=8 * width)  # never opened
    small.data = config_for(DataPipeline, source=source, tokenizer=tokenizer, seq_len=64 * sizes["seq"])
    small.data.global_batch_size = parts * small.mesh.data * sizes["fsdp"]
    small.learner.optimizer = config_for(optax.sgd, learning_rate=4.0, momentum=0.9)
    small.learner.rules = [config_for(Rule, pattern="/mlp/", freeze=True)] * bool(program.layout.specs["frozen"])
    small.learner.accumulate, small.pretrained = parts, None
    small.model.stack.streams = "float32" if config.memory.remat == "invert" else "one"
    small.memory.remat = "sqrt" if "sqrt" in config.memory.remat else config.memory.remat
    small.memory.hosted_layers = config.memory.hosted_layers and min(config.memory.hosted_layers, UNITS // 2)
    return small


def compare(ours: Program, plain: Program) -> dict[str, float]:
    """{name: difference after the same steps, relative to how far the plain one moved}. Raises CanaryError: a place."""
    state, errors, shape = ours.init(), dict[str, float](), (len(ours.rows), ours.experiment.data.seq_len)
    resident, first = _copies(plain, state), _copies(plain, state)
    for step in range(STEPS):
        tokens = np.random.default_rng(step).integers(0, ours.experiment.language_model.vocab_size, shape, np.int32)
        batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": np.ones(shape, np.float32)}
        state, found = ours.step(state, ours.put(batch))
        resident, expected = plain.step(resident, plain.put(batch))
        errors |= {f"{x} of step {step}": abs(found[x] / expected[x] - 1.0).item() for x in ("loss", "grad_norm")}
    try:
        ours.layout.check(state)
        hosted = sum(ours.layout.bytes_per_device(group, "pinned_host") for group in ("parameter", "optimizer"))
        programs = [call.run for call in ours.layers_ledger.calls] if ours.in_parts else [ours.compiled_step]
        taken = sum(x.memory_analysis().host_argument_size_in_bytes for x in programs)  # GPU: of what is updated
        if taken < hosted and jax.default_backend() != "cpu":  # whose compiler says nothing
            raise ValueError(f"the compiled step takes {taken} bytes from the host, the layout says {hosted}")
    except ValueError as error:
        raise CanaryError(f"canary: not offloaded on these devices: {error}") from None
    found = jax.jit(_differences, out_shardings=plain.replicated)(_copies(plain, state), resident, first)
    return errors | {path: error.item() for path, error in found.items()}


def _copies(plain: Program, state: Any) -> Any:
    """A state, of whatever placement and storage, as copies in the layout of the plain program."""

    def copied(state: Any) -> Any:
        state = jax.tree.map(lambda x: jnp.copy(jax.device_put(x, jax.memory.Space.Device)), state)
        for stages in state.values():
            if isinstance(parts := stages.get("stack"), list):
                stages["stack"] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        return state

    return jax.jit(copied, out_shardings=plain.layout.shardings())({x: state[x] for x in plain.layout.specs})


def _differences(ours: Any, plain: Any, first: Any) -> dict[str, jax.Array]:
    """By leaf: the norm of the difference, less the leaf's rounding, over that of its change (1% of the largest's)."""
    a, b, c = (flatten({x: tree[x] for x in ("parameter", "optimizer", "ema")}) for tree in (ours, plain, first))
    norm = lambda x, y=0.0: jnp.linalg.norm((x.astype("float32") - y).ravel())  # noqa: E731
    changes = {path: norm(b[path], c[path]) for path in b if jnp.issubdtype(b[path].dtype, jnp.floating)}
    least = 0.01 * jnp.max(jnp.stack([*changes.values()]))
    excess = {x: jnp.maximum(norm(a[x], b[x]) - jnp.finfo(b[x].dtype).eps * norm(b[x]), 0.0) for x in changes}
    return {path: excess[path] / jnp.maximum(change, least) for path, change in changes.items()}
