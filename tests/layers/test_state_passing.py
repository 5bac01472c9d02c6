"""Recurrences over sharded positions: against one token at a time in float64, and on eight devices against one."""

import itertools
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.gated_delta_net import GatedDeltaNet
from plimsoll.framework.layers.gated_delta_rule import gated_delta_rule
from plimsoll.framework.layers.linear_attention import LinearAttention
from plimsoll.framework.layers.mamba2 import Mamba2
from plimsoll.framework.layers.state_passing import pass_states, receive_previous
from plimsoll.framework.layout import initialize
from tests.layers.test_gated_delta_rule import B, H, N, V, draw_inputs, run_recurrence

POSITIONS = PartitionSpec(None, "seq")
with_and_without_corrections = pytest.mark.parametrize("corrects", [True, False], ids=["corrections", "no corrections"])


def over_seq(run: Any, shards: int, num_arguments: int) -> Any:
    """Return `run` on the shards of arrays [B, S, ...] on the first devices."""
    mesh = Mesh(np.asarray(jax.devices()[:shards]), ("seq",))
    specs = (POSITIONS,) * num_arguments
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=POSITIONS, check_vma=False))


# --- exchanges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("width", [1, 3], ids=["factors", "matrices"])
@pytest.mark.parametrize("shards", range(2, 9))
def test_states_are_those_of_a_loop_over_devices(shards: int, width: int, reverse: bool) -> None:
    rng = np.random.default_rng(shards)
    # The axes are (any, device, rows of a matrix, columns).
    transitions = rng.normal(size=(2, shards, width, width))
    states = rng.normal(size=(2, shards, 3, 4))
    order = list(range(shards))[:: -1 if reverse else 1]
    expected = np.zeros_like(states)
    for previous, device in itertools.pairwise(order):
        transition = transitions[:, previous] * np.eye(3) if width == 1 else transitions[:, previous]
        expected[:, device] = transition @ expected[:, previous] + states[:, previous]
    with jax.enable_x64(True):
        found = over_seq(partial(pass_states, shards=shards, reverse=reverse), shards, 2)(transitions, states)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 9, 11])
def test_previous_positions_may_be_those_of_several_devices(count: int) -> None:
    x = np.arange(1.0, 17.0).reshape(2, 8)
    found = over_seq(partial(receive_previous, count=count, shards=4), 4, 1)(x)
    padded = np.pad(x, ((0, 0), (count, 0)))
    # A device has two positions.
    expected = np.concatenate([padded[:, 2 * device : 2 * device + count] for device in range(4)], axis=1)
    np.testing.assert_array_equal(found, expected)


# --- the recurrence ---------------------------------------------------------------------------------------------------


def draw_rows(length: int, shards: int, documents: str) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
    """Return the inputs of the recurrence, without a first state, and the document of each token."""
    inputs, segments = draw_inputs(length, 0.3, documents == "random")
    starts = np.zeros((B, length), bool)
    if documents == "borders":
        # Documents of one or several whole shards.
        starts[0, :: length // shards] = True
        starts[1, length // 2] = True
    if documents == "next to borders":
        starts[0, length // 2 - 1] = starts[1, length // 2 + 1] = True
    segments = segments + np.cumsum(starts, axis=1).astype("int32")
    return inputs[:-1], None if documents == "one" else segments


CASES = {
    # length, shards, tokens of a chunk, chunks of a block
    "eight shards of two blocks": (256, 8, 8, 2),
    "shards that are no whole chunks": (88, 8, 4, 2),
    "one token a shard": (8, 8, 4, 8),
    "three shards": (96, 3, 16, 1),
    "two shards": (70, 2, 16, 2),
}


@with_and_without_corrections
@pytest.mark.parametrize("documents", ["one", "random", "borders", "next to borders"])
@pytest.mark.parametrize("name", CASES)
def test_shards_equal_one_token_at_a_time(name: str, documents: str, corrects: bool) -> None:
    """Outputs and gradients, where documents end at, before and behind the borders of shards, and span several."""
    length, shards, chunk, chunks_per_block = CASES[name]
    inputs, segments = draw_rows(length, shards, documents)
    ids = np.zeros((B, length), np.int32) if segments is None else segments
    weights = np.random.default_rng(0).normal(size=(B, length, N, V))

    def run_shard(segments: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        options = {"corrects": corrects, "chunk": chunk, "chunks_per_block": chunks_per_block}
        return gated_delta_rule(*arrays, segments_BS=segments, shards=shards, **options)[0]

    def sharded_loss(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        outputs = over_seq(run_shard, shards, 6)(segments, *inputs)
        return jnp.sum(outputs * weights), outputs

    def token_loss(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        tokens = [jnp.moveaxis(x, 1, 0) for x in (*inputs, jnp.asarray(ids))]
        query, key, value, log_decay, beta, ids_SB = tokens
        is_same = jnp.concatenate([ids_SB[:1] == ids_SB[:1], ids_SB[1:] == ids_SB[:-1]])

        def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            *arrays, is_same = token
            state = jnp.where(is_same[:, None, None, None], state, 0.0)
            one_token = [x[:, None] for x in arrays]
            outputs, state = run_recurrence((*one_token, state), np.zeros((B, 1)), jnp, corrects)
            return state, outputs[0]

        _, outputs = jax.lax.scan(step, jnp.zeros((B, N, H, V)), (query, key, value, log_decay, beta, is_same))
        outputs = jnp.moveaxis(outputs, 0, 1)
        return jnp.sum(outputs * weights), outputs

    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, inputs))
        found, outputs = jax.jit(jax.grad(sharded_loss, has_aux=True))(arrays)
        expected, expected_outputs = jax.jit(jax.grad(token_loss, has_aux=True))(arrays)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=0, atol=1e-12)
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-11)


@with_and_without_corrections
def test_bfloat16_shards_are_as_exact_as_one_device(corrects: bool) -> None:
    """Nothing is rounded more than the gradients of the outputs, which are bfloat16, too."""
    inputs, segments = draw_rows(512, 8, "borders")
    exact = tuple(np.asarray(jnp.asarray(x, "bfloat16"), np.float64) for x in inputs)
    weights = np.random.default_rng(0).normal(size=(B, 512, N, V))

    def compute_gradients(shards: int, dtype: str) -> list[np.ndarray]:
        def run(segments: Any, *arrays: jax.Array) -> jax.Array:
            options = {"corrects": corrects, "unit_eps": 1e-6, "chunk": 16}
            return gated_delta_rule(*arrays, segments_BS=segments, shards=shards, **options)[0]

        def loss(arrays: tuple[jax.Array, ...]) -> jax.Array:
            outputs = (over_seq(run, shards, 6) if shards > 1 else run)(segments, *arrays)
            return jnp.sum(outputs.astype(jnp.float64) * weights)

        # Rates are float32 in the layers.
        dtypes = [dtype, dtype, dtype, *(jnp.promote_types(dtype, "float32"),) * 2]
        arrays = tuple(jnp.asarray(x, kind) for x, kind in zip(exact, dtypes, strict=True))
        return [np.asarray(gradient, np.float64) for gradient in jax.jit(jax.grad(loss))(arrays)]

    with jax.enable_x64(True):
        expected = compute_gradients(1, "float64")
        alone = compute_gradients(1, "bfloat16")
        sharded = compute_gradients(8, "bfloat16")
    for gradient, one_device, wanted in zip(sharded, alone, expected, strict=True):
        assert np.linalg.norm(gradient - wanted) < 1.1 * np.linalg.norm(one_device - wanted)


# --- the layers -------------------------------------------------------------------------------------------------------

D = 16
LAYERS = {
    "gated_delta_net": config_for(GatedDeltaNet, num_heads=4, num_key_heads=2, key_dim=6, value_dim=5, chunk=8),
    "mamba2": config_for(Mamba2, num_heads=4, num_groups=2, state_dim=6, head_dim=5, chunk=8),
    "mamba2_one_group": config_for(Mamba2, num_heads=4, num_groups=1, state_dim=6, head_dim=5, chunk=8),
    # More taps than a device has positions.
    "wide convolution": config_for(GatedDeltaNet, num_heads=2, key_dim=4, value_dim=4, conv_width=14, chunk=8),
}
AXES = ("pipe", "data", "fsdp", "expert", "seq", "model")
MESHES = {"seq 8": (1, 1, 1, 1, 8, 1), "seq 4, model 2": (1, 1, 1, 1, 4, 2), "seq 2, fsdp 2": (1, 1, 2, 1, 2, 1)}


def make_mesh(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes), AXES)


def build(kind: str) -> tuple[LinearAttention, Any]:
    config = LAYERS[kind].copy()
    # Weights are large, so that gates, decays and step sizes vary.
    config.linear.init.stddev *= 10
    layer = config.instantiate(dim=D)
    return layer, initialize(layer.parameter_specs(), jax.random.key(0))


def compute_loss_and_gradients(layer: LinearAttention, params: Any, x: Any, segments: Any, mesh: Mesh | None) -> Any:
    batch = {} if segments is None else {"segments": jnp.asarray(segments)}
    weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        ctx = Context(batch, mesh=mesh)
        y, _ = layer.apply(layer.prepare(params, ctx), x, ctx, {})
        return jnp.sum(y * weights), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)


@pytest.mark.parametrize(
    ("kind", "mesh", "documents"),
    [
        ("gated_delta_net", "seq 8", True),
        ("gated_delta_net", "seq 4, model 2", True),
        ("mamba2", "seq 4, model 2", True),
        ("mamba2", "seq 2, fsdp 2", False),
        ("mamba2_one_group", "seq 4, model 2", True),
        ("mamba2_one_group", "seq 8", False),
        ("wide convolution", "seq 8", True),
    ],
)
def test_a_layer_on_several_devices_equals_one(kind: str, mesh: str, documents: bool) -> None:
    """Convolutions included: documents begin at many positions, and at the borders of shards."""
    layer, params = build(kind)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 48, D)).astype(np.float32)
    segments = None
    if documents:
        starts = rng.random((4, 48)) < [[0.3], [0.05], [0.0], [0.0]]
        starts[2, 24] = starts[3, ::6] = True
        segments = np.cumsum(starts, axis=1).astype(np.int32)
    expected = compute_loss_and_gradients(layer, params, x, segments, None)
    found = compute_loss_and_gradients(layer, params, x, segments, make_mesh(MESHES[mesh]))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5 * max(np.abs(theirs).max(), 1.0))


def compile_layer(kind: str, shards: int, length: int) -> Any:
    """Compile the gradients of a layer, whose rows [1, length, D] are sharded over seq."""
    layer, params = build(kind)
    mesh = make_mesh((1, 1, 1, 1, shards, 1))
    shapes = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, PartitionSpec())), params
    )
    x = jax.ShapeDtypeStruct((1, length, D), jnp.float32, sharding=NamedSharding(mesh, POSITIONS))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        ctx = Context({}, mesh=mesh)
        return jnp.sum(layer.apply(layer.prepare(params, ctx), x, ctx, {})[0] ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(shapes, x).compile()


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2_one_group"])
def test_only_states_and_the_ends_of_shards_travel(kind: str) -> None:
    program = compile_layer(kind, 8, 1016).as_text()
    assert "collective-permute" in program
    assert "all-to-all" not in program
    assert "all-gather" not in program
    # No array has all positions, and none that travels has a device's positions.
    program = re.sub(r"metadata=\{[^}]*\}|//.*", "", program)
    assert not re.search(r"[\[,]1016[\],]", program)
    assert re.search(r"[\[,]127[\],]", program)
    permutes = [line for line in program.splitlines() if "collective-permute(" in line or "permute-start(" in line]
    assert permutes
    assert not any(re.search(r"[\[,]127[\],]", line) for line in permutes)


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2_one_group"])
def test_memory_does_not_grow_with_the_number_of_devices(kind: str) -> None:
    few, many = (compile_layer(kind, shards, 2048 * shards).memory_analysis().temp_size_in_bytes for shards in (3, 8))
    assert many == pytest.approx(few, rel=0.02)
