"""The offload self-test: before building the real model, a small one checks that offloading works on these devices.

Compilers have silently miscompiled host memory (openxla/xla#46231, GPU: gradients of what a scan offloads). So a
small transformer, always the same one, takes two steps with the run's schedule, placements, clipping, dtypes and
mesh, and two with the plain schedule and everything on the device. The results must agree, and offloaded leaves must
be in host memory, both as arrays and in the compiled step. The optimizer is momentum, which is linear in the
gradients: Adam's first steps would expose the signs of rounding errors.
"""

from __future__ import annotations

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TokenMemmap
from plimsoll.framework.data.tokenizers import NoTokenizer
from plimsoll.framework.layers.block import Block
from plimsoll.framework.layers.remat import parse_policies
from plimsoll.framework.layout import WEIGHT_AXES, TrainState, count_shards, flatten
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.memory import DEVICE, HOST, Memory
from plimsoll.framework.schedules.stack_layout import PLACED_FIELDS, StackParts

STEPS = 2
NUM_LAYERS = 4
# By bits of the narrowest dtype. Rounding on CPUs causes up to 6e-6 and 2e-2; a wrong gradient causes about 1.
TOLERANCE = {32: 1e-3, 16: 1e-1}
# The error of a leaf that hardly changes is relative to this fraction of the largest change of any leaf.
_MIN_CHANGE = 0.01
# Maximum length of the message of an error that kept the self-test from running.
_MAX_MESSAGE_CHARACTERS = 300


class SelfTestError(ValueError):
    """Offloaded values are computed wrong, or are not offloaded, on these devices with this compiler."""


def check(config: Config, program: Program) -> str:
    """Run the offload self-test.

    Args:
        config: resolved config of the run.
        program: program of the run.

    Returns:
        A line for the user: how well both agree, or why the test could not run; "" if the run offloads nothing.

    Raises:
        SelfTestError: the results do not agree, or a leaf is not where the layout places it.
    """
    start = time.monotonic()
    devices = list(program.mesh.devices.flat)
    memory = program.experiment.memory
    # Whether a part of the state, or of the activations, is kept in host memory.
    offloads_state = program.layout.bytes_per_device(memory_kind="pinned_host") > 0
    if not (offloads_state or memory.activations.uses_host or "offload" in memory.remat):
        return ""
    dtypes = [config.model[name] for name in ("param_dtype", "compute_dtype")]
    # float64 has no tolerance of its own; use the tolerance of float32.
    bits = min(32, *(jnp.finfo(dtype).bits for dtype in dtypes))
    # By default the precision of a float32 product depends on its kernel. bfloat16 kernels may support no other
    # precision.
    precision = "highest" if bits == 32 else "default"
    try:
        small_config = shrink_config(config, program)
        ours = Program(small_config.instantiate(), devices)
        small_config.memory = config_for(Memory)
        with jax.default_matmul_precision(precision):
            plain = Program(small_config.instantiate(), devices)
            errors = compare(ours, plain)
    except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        # With several processes, the others would wait for this one in the next collective.
        if isinstance(error, SelfTestError) or jax.process_count() > 1:
            raise
        message = " ".join(str(error).split())[:_MAX_MESSAGE_CHARACTERS]
        return f"offload self-test: did not run, so offloading is not checked: {message}"
    # Not `error > TOLERANCE`, which is false for NaN.
    wrong_names = [name for name, error in errors.items() if not error <= TOLERANCE[bits]]
    # NaN ranks above all numbers; it cannot be compared with them.
    worst_name = max(wrong_names or errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    if wrong_names:
        raise SelfTestError(
            f"offload self-test: offloaded values are computed wrong on these devices (as in openxla/xla#46231): "
            f"{worst_name} of a small model differs by {errors[worst_name]:.1e} (tolerance {TOLERANCE[bits]:g}) from "
            f"{STEPS} steps with everything on the device, as do {len(wrong_names) - 1} more; keep them on the device "
            f"(health.offload_self_test=false trains anyway)"
        )
    seconds = time.monotonic() - start
    return f"offload self-test: offloaded and resident agree to {errors[worst_name]:.0e} ({seconds:.1f} s)"


def shrink_config(config: Config, program: Program) -> Config:
    """Return the run's config with a model of 4 layers, as wide as offloading requires (`layout.move_to_host`)."""
    small = config.copy()
    sizes = program.mesh.shape
    # The sizes of the sharded axes must divide the width; 256 makes leaves large enough to be offloaded.
    width = math.lcm(256, sizes["model"], count_shards(WEIGHT_AXES, sizes))
    accumulate = min(program.experiment.learner.accumulate, 2)
    # The run's dtypes, and heads that the mesh axis divides.
    block = config_for(Block)
    block.attention.num_heads = math.lcm(4, sizes["model"])
    block.attention.head_dim = 64
    block.mlp.hidden = 2 * width
    small.model = config_for(CausalLM, dim=width, vocab_size=8 * width)
    small.model.param_dtype = config.model.param_dtype
    small.model.compute_dtype = config.model.compute_dtype
    small.model.stack.num_layers = NUM_LAYERS
    small.model.stack.pattern = [block]
    # The small model has no experts and few layers, so their mesh axes become data axes.
    small.mesh.data = sizes["data"] * sizes["expert"] * sizes["pipe"]
    small.mesh.expert = 1
    small.mesh.pipe = 1
    small.mesh.pipe_chunks = 1
    # The token file is never opened: `compare` makes its own batches.
    source = config_for(TokenMemmap, path="")
    tokenizer = config_for(NoTokenizer, vocab_size=8 * width)
    small.data = config_for(DataPipeline, source=source, tokenizer=tokenizer, seq_len=64 * sizes["seq"])
    small.data.global_batch_size = accumulate * small.mesh.data * sizes["fsdp"]
    # Momentum is linear in the gradients; see the module docstring.
    small.learner.optimizer = config_for(optax.sgd, learning_rate=4.0, momentum=0.9)
    small.learner.rules = []
    if program.layout.specs.frozen:
        small.learner.rules = [config_for(Rule, pattern="/mlp/", freeze=True)]
    small.learner.accumulate = accumulate
    small.pretrained = None
    # `invert` needs two streams, because it runs each block backwards.
    small.model.stack.streams = "float32" if "invert" in config.memory.remat else "one"
    small.memory.remat = _small_remat(config.memory.remat)
    for field in PLACED_FIELDS:
        # Offload half of the layers, so that both kinds of memory are in use.
        if getattr(program.experiment.memory, field).is_partial:
            small.memory[field] = f"{HOST}:{NUM_LAYERS // 2}"
    _offload_like_experts(small, program.experiment.memory)
    return small


def _offload_like_experts(small: Config, memory: Memory) -> None:
    """Offload of a model without experts what `memory.experts` offloads of experts."""
    if not memory.experts.uses_host:
        return
    placement = small.memory.experts
    small.memory.experts = DEVICE
    fields = ["parameters", "optimizer_state"]
    if memory.offloads_expert_gradients:
        fields.append("gradients")
    for field in fields:
        if not getattr(memory, field).uses_host:
            small.memory[field] = placement


def _small_remat(remat: str) -> str:
    """Return a remat string for a model of NUM_LAYERS layers that uses the policies of the larger one."""
    policies = []
    for span in parse_policies(remat):
        # sqrt:G has a group size G that may not divide the number of layers.
        policy = "sqrt" if "sqrt" in span.policy else span.policy
        if policy not in policies:
            policies.append(policy)
    if len(policies) == 1:
        return policies[0]
    # At most one policy per layer fits.
    first_policies = policies[: NUM_LAYERS - 1]
    layer_policies = [f"{policy}:1" for policy in first_policies]
    return ",".join([*layer_policies, policies[-1]])


def compare(ours: Program, plain: Program) -> dict[str, float]:
    """Compare both programs after the same steps.

    Returns:
        The difference by name, relative to how far the plain program moved.

    Raises:
        SelfTestError: a leaf is not in the memory that the layout specifies.
    """
    state = ours.init()
    # Make two copies, because the steps donate one of them.
    parts = ours.backend.parts
    resident = _copy_to_plain(plain, state, parts)
    first = _copy_to_plain(plain, state, parts)
    errors: dict[str, float] = {}
    shape = (len(ours.rows), ours.experiment.data.seq_len)
    vocab_size = ours.experiment.language_model.vocab_size
    weights = np.ones(shape, np.float32)
    for step in range(STEPS):
        # Random tokens [B, S] of this process's rows; the same numbers in every run.
        tokens = np.random.default_rng(step).integers(0, vocab_size, shape, np.int32)
        batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}
        state, metrics = ours.step(state, ours.put(batch))
        resident, expected = plain.step(resident, plain.put(batch))
        for name in ("loss", "grad_norm"):
            ratio = metrics[name] / expected[name]
            errors[f"{name} of step {step}"] = abs(ratio - 1.0).item()
    try:
        _check_memory_kinds(ours, state)
    except ValueError as error:
        raise SelfTestError(f"offload self-test: not offloaded on these devices: {error}") from None
    differences = jax.jit(_differences, out_shardings=plain.replicated)
    state = ours.complete_update(state)
    leaf_errors = differences(_copy_to_plain(plain, state, parts), resident, first)
    for path, error in leaf_errors.items():
        errors[path] = error.item()
    return errors


def _check_memory_kinds(program: Program, state: TrainState) -> None:
    """Raise ValueError if a leaf or an argument of the compiled step is not in the memory of the layout."""
    program.layout.check(state)
    offloaded_bytes = 0
    # Count only the groups that are updated: a GPU's compiler reports no other argument as host memory.
    for group in ("parameter", "optimizer"):
        offloaded_bytes += program.layout.bytes_per_device(group, "pinned_host")
    taken_bytes = 0
    for executable in program.backend.compile():
        stats = executable.memory_analysis()
        assert stats is not None
        taken_bytes += stats.host_argument_size_in_bytes
    # A CPU's compiler counts no argument as host memory.
    if taken_bytes < offloaded_bytes and jax.default_backend() != "cpu":
        raise ValueError(
            f"the compiled step takes {taken_bytes} bytes from host memory; the layout has {offloaded_bytes}"
        )


def _copy_to_plain(plain: Program, state: TrainState, parts: StackParts) -> TrainState:
    """Copy a state, of any placement and with split stacks, into the layout of the plain program."""

    def copy_state(state: TrainState) -> TrainState:
        on_device = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), state)
        # Without the copy, jit may return its argument's buffer, which a step would then donate.
        return parts.join_in_jit(jax.tree.map(jnp.copy, on_device))

    jitted = jax.jit(copy_state, out_shardings=plain.layout.shardings())
    # The plain program has no gradients in host memory.
    return jitted(state.without_unsaved())


def _differences(ours: TrainState, plain: TrainState, first: TrainState) -> dict[str, jax.Array]:
    """Return the error per leaf: the norm of the difference minus rounding, over the norm of the leaf's change.

    The change counts as at least 1% of the largest change of any leaf.
    """
    groups = ("parameter", "optimizer", "ema")
    our_leaves = flatten(ours.select(groups))
    plain_leaves = flatten(plain.select(groups))
    first_leaves = flatten(first.select(groups))
    changes: dict[str, jax.Array] = {}
    for path, x in plain_leaves.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            changes[path] = _difference_norm(x, first_leaves[path])
    min_change = _MIN_CHANGE * jnp.max(jnp.stack([*changes.values()]))
    excess: dict[str, jax.Array] = {}
    for path in changes:
        x = plain_leaves[path]
        distance = _difference_norm(our_leaves[path], x)
        # Both programs may round a value of this leaf differently, by at most this fraction of its norm.
        rounding = jnp.finfo(x.dtype).eps * _difference_norm(x)
        excess[path] = jnp.maximum(distance - rounding, 0.0)
    relative: dict[str, jax.Array] = {}
    for path, change in changes.items():
        relative[path] = excess[path] / jnp.maximum(change, min_change)
    return relative


def _difference_norm(x: jax.Array, y: jax.Array | float = 0.0) -> jax.Array:
    """Return the norm of x - y in float32."""
    difference = x.astype("float32") - y
    return jnp.linalg.norm(difference.ravel())
