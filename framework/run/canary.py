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
from framework.layers.remat import spans
from framework.layout import flatten
from framework.learner.rules import Rule
from framework.models.causal_lm import CausalLM
from framework.program.program import Program
from framework.schedules.memory import Memory
from framework.schedules.placement import HOST
from framework.schedules.sections import PLACED_FIELDS
from framework.schedules.storage import Parts

STEPS = 2
UNITS = 4
# By bits of the narrowest dtype. Rounding on CPUs makes up to 6e-6 and 2e-2, a gradient that is wrong about 1.
TOLERANCE = {32: 1e-3, 16: 1e-1}
# A leaf that hardly changes is measured by this part of the largest change of any leaf.
_MIN_CHANGE = 0.01
# Of an error that kept the canary from running.
_MAX_MESSAGE_CHARACTERS = 300


class CanaryError(ValueError):
    """What is offloaded is wrong, or is not offloaded, on these devices with this compiler."""


def check(config: Config, program: Program) -> str:
    """A line for people: how well both agreed, or why the canary could not run; "" if the run has nothing on the host.
    `config` is its config, resolved.

    Raises:
        CanaryError: they do not agree, or a leaf is not where the layout says.
    """
    start = time.monotonic()
    devices = list(program.mesh.devices.flat)
    if not _offloads(program):
        return ""
    dtypes = [config.model[name] for name in ("param_dtype", "compute_dtype")]
    # float64 has no tolerance of its own: it is held to that of float32.
    bits = min(32, *(jnp.finfo(dtype).bits for dtype in dtypes))
    # Else a float32 product is as precise as its kernel likes. Kernels for bfloat16 may know no other precision.
    precision = "highest" if bits == 32 else "default"
    try:
        small_config = shrunk(config, program)
        ours = Program(small_config.instantiate(), devices)
        small_config.memory = config_for(Memory)
        with jax.default_matmul_precision(precision):
            plain = Program(small_config.instantiate(), devices)
            errors = compare(ours, plain)
    except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        # Of several processes, the others would wait for this one in the next collective.
        if isinstance(error, CanaryError) or jax.process_count() > 1:
            raise
        message = " ".join(str(error).split())[:_MAX_MESSAGE_CHARACTERS]
        return f"canary: did not run, so offloading is not checked: {message}"
    # Not `error > TOLERANCE`, which is false of NaN.
    wrong_names = [name for name, error in errors.items() if not error <= TOLERANCE[bits]]
    candidates = wrong_names or errors

    def finite_error(name: str) -> Any:
        # NaN is worse than all numbers, and cannot be compared with them.
        return np.nan_to_num(errors[name], nan=math.inf)

    worst_name = max(candidates, key=finite_error)
    if wrong_names:
        raise CanaryError(
            f"canary: what config.memory offloads is computed wrong on these devices (as in openxla/xla#46231): "
            f"{worst_name} of a small model is off by {errors[worst_name]:.1e} (tolerance {TOLERANCE[bits]:g}) from "
            f"{STEPS} steps with all on the device, as are {len(wrong_names) - 1} more; keep it there "
            f"(health.canary=false trains all the same)"
        )
    seconds = time.monotonic() - start
    return f"canary: offloaded and resident agree to {errors[worst_name]:.0e} ({seconds:.1f} s)"


def _offloads(program: Program) -> bool:
    """Whether the run has part of its state or of its activations in host memory."""
    memory = program.experiment.memory
    hosted_bytes = program.layout.bytes_per_device(memory_kind="pinned_host")
    if hosted_bytes:
        return True
    return memory.activations.uses_host or "offload" in memory.remat


def shrunk(config: Config, program: Program) -> Config:
    """The run's config around a model of 4 units, as wide as leaves must be to be hosted (`layout.move_to_host`)."""
    small = config.copy()
    sizes = program.mesh.shape
    # The sizes of the sharded axes must divide the width; 256 makes leaves large enough to be hosted.
    width = math.lcm(256, sizes["model"], sizes["fsdp"])
    accumulate = min(program.experiment.learner.accumulate, 2)
    small.model = _small_model(config, width, sizes["model"])
    # There are no experts, so their axis goes to the data.
    small.mesh.data = sizes["data"] * sizes["expert"]
    small.mesh.expert = 1
    # The file of the tokens is never opened: `compare` makes its own batches.
    source = config_for(TokenMemmap, path="")
    tokenizer = config_for(NoTokenizer, vocab_size=8 * width)
    small.data = config_for(
        DataPipeline,
        source=source,
        tokenizer=tokenizer,
        seq_len=64 * sizes["seq"],
    )
    small.data.global_batch_size = accumulate * small.mesh.data * sizes["fsdp"]
    # Momentum is linear in gradients: see the top of the file.
    small.learner.optimizer = config_for(optax.sgd, learning_rate=4.0, momentum=0.9)
    small.learner.rules = []
    if program.layout.specs["frozen"]:
        small.learner.rules = [config_for(Rule, pattern="/mlp/", freeze=True)]
    small.learner.accumulate = accumulate
    small.pretrained = None
    # `invert` needs two streams: it runs each block backwards.
    small.model.stack.streams = "float32" if "invert" in config.memory.remat else "one"
    small.memory.remat = _small_remat(config.memory.remat)
    for field in PLACED_FIELDS:
        # Half of the units, so that there are some in either place.
        if getattr(program.experiment.memory, field).is_partial:
            small.memory[field] = f"{HOST}:{UNITS // 2}"
    return small


def _small_remat(remat: str) -> str:
    """The recomputation of a model of UNITS layers, with the policies of a larger one."""
    policies = []
    for span in spans(remat):
        # sqrt:G has a group size G, which need not divide the units.
        policy = "sqrt" if "sqrt" in span.policy else span.policy
        if policy not in policies:
            policies.append(policy)
    if len(policies) == 1:
        return policies[0]
    # More than there are units have no place.
    first_policies = policies[: UNITS - 1]
    counted = [f"{policy}:1" for policy in first_policies]
    return ",".join([*counted, policies[-1]])


def _small_model(config: Config, width: int, model_size: int) -> Config:
    """A transformer of UNITS blocks, in the dtypes of the run's model, whose heads `model_size` devices can share."""
    block = config_for(Block)
    block.attention.num_heads = math.lcm(4, model_size)
    block.attention.head_dim = 64
    block.mlp.hidden = 2 * width
    model = config_for(CausalLM, dim=width, vocab_size=8 * width)
    model.param_dtype = config.model.param_dtype
    model.compute_dtype = config.model.compute_dtype
    model.stack.num_layers = UNITS
    model.stack.pattern = [block]
    return model


def compare(ours: Program, plain: Program) -> dict[str, float]:
    """{name: difference after the same steps, relative to how far the plain one moved}.

    Raises:
        CanaryError: a leaf is not in the memory that the layout says.
    """
    state = ours.init()
    # Two copies, as the steps donate one of them.
    parts = ours.execution.parts
    resident = _copies(plain, state, parts)
    first = _copies(plain, state, parts)
    errors: dict[str, float] = {}
    for step in range(STEPS):
        batch = _batch(ours, step)
        state, metrics = ours.step(state, ours.put(batch))
        resident, expected = plain.step(resident, plain.put(batch))
        for name in ("loss", "grad_norm"):
            ratio = metrics[name] / expected[name]
            errors[f"{name} of step {step}"] = abs(ratio - 1.0).item()
    try:
        _check_places(ours, state)
    except ValueError as error:
        raise CanaryError(f"canary: not offloaded on these devices: {error}") from None
    differences = jax.jit(_differences, out_shardings=plain.replicated)
    leaf_errors = differences(_copies(plain, state, parts), resident, first)
    for path, error in leaf_errors.items():
        errors[path] = error.item()
    return errors


def _batch(program: Program, step: int) -> dict[str, np.ndarray]:
    """Random tokens [B, S] of this process's rows; the same numbers in every run."""
    shape = (len(program.rows), program.experiment.data.seq_len)
    vocab_size = program.experiment.language_model.vocab_size
    generator = np.random.default_rng(step)
    tokens = generator.integers(0, vocab_size, shape, np.int32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "weights": np.ones(shape, np.float32),
    }


def _check_places(program: Program, state: Any) -> None:
    """Raises ValueError: a leaf, or an argument of the compiled step, is not in the memory that the layout says."""
    program.layout.check(state)
    hosted_bytes = 0
    # Only the groups that are updated: a GPU's compiler reports no other argument as the host's.
    for group in ("parameter", "optimizer"):
        hosted_bytes += program.layout.bytes_per_device(group, "pinned_host")
    taken_bytes = 0
    for executable in program.execution.executables():
        taken_bytes += executable.memory_analysis().host_argument_size_in_bytes
    # A CPU's compiler counts no argument as the host's.
    if taken_bytes < hosted_bytes and jax.default_backend() != "cpu":
        raise ValueError(f"the compiled step takes {taken_bytes} bytes from the host, the layout says {hosted_bytes}")


def _copies(plain: Program, state: Any, parts: Parts) -> Any:
    """A state, of whatever placement and with stacks in parts, as copies in the layout of the plain program."""

    def device_copy(x: jax.Array) -> jax.Array:
        on_device = jax.device_put(x, jax.memory.Space.Device)
        # Without the copy jit may hand back the buffer of its argument, which a step then donates.
        return jnp.copy(on_device)

    def copied(state: Any) -> Any:
        return parts.concatenated(jax.tree.map(device_copy, state))

    groups = {name: state[name] for name in plain.layout.specs}
    jitted = jax.jit(copied, out_shardings=plain.layout.shardings())
    return jitted(groups)


def _differences(ours: Any, plain: Any, first: Any) -> dict[str, jax.Array]:
    """By leaf: the norm of the difference, less the leaf's rounding, over that of its change (1% of the largest's)."""
    groups = ("parameter", "optimizer", "ema")
    our_leaves = flatten({name: ours[name] for name in groups})
    plain_leaves = flatten({name: plain[name] for name in groups})
    first_leaves = flatten({name: first[name] for name in groups})
    changes: dict[str, jax.Array] = {}
    for path, x in plain_leaves.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            changes[path] = _distance(x, first_leaves[path])
    min_change = _MIN_CHANGE * jnp.max(jnp.stack([*changes.values()]))
    excess: dict[str, jax.Array] = {}
    for path in changes:
        x = plain_leaves[path]
        distance = _distance(our_leaves[path], x)
        # Both may round a value of this leaf differently, by at most this much of its norm.
        rounding = jnp.finfo(x.dtype).eps * _distance(x)
        excess[path] = jnp.maximum(distance - rounding, 0.0)
    relative: dict[str, jax.Array] = {}
    for path, change in changes.items():
        relative[path] = excess[path] / jnp.maximum(change, min_change)
    return relative


def _distance(x: jax.Array, y: Any = 0.0) -> jax.Array:
    """The norm of x - y, in float32."""
    difference = x.astype("float32") - y
    return jnp.linalg.norm(difference.ravel())
