"""The exchange of tokens between devices that share the experts, in float64, compared with one device."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.experts.expert_exchange import Slices, Transport, count_rounds, plan_round
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.experts.scores import ExpertChoice
from plimsoll.framework.plan import gpu_description, targets
from plimsoll.framework.plan.grouped_products import count_further_rounds
from plimsoll.framework.plan.hlo import Module, arrays

AXES = ("data", "fsdp", "expert", "seq", "model")
DIM, HIDDEN, BATCH = 8, 12, 8
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def make_mesh(sizes: dict[str, int], devices: Any = None) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: int(np.prod(shape))]).reshape(shape), AXES)


def make_experts(num_experts: int, top_k: int, **fields: Any) -> Experts:
    fields = {"hidden": HIDDEN, "exchange": "all_to_all", **fields}
    return config_for(Experts, **fields).instantiate(dim=DIM, num_experts=num_experts, top_k=top_k)


def choose(case: str, num_experts: int, top_k: int, length: int) -> np.ndarray:
    """Return the experts of each token, int32[B, S, K]."""
    rng = np.random.default_rng(3)
    experts = np.arange(num_experts)
    weights = np.ones(num_experts)
    if case == "uneven":
        weights = (1.0 + experts) ** 3
    if case == "empty experts":
        weights[::2] = 0.0
    if case == "one device":
        weights[top_k:] = 0.0
    weights /= weights.sum()
    rows = [rng.choice(num_experts, top_k, replace=False, p=weights) for _ in range(BATCH * length)]
    return np.stack(rows).reshape(BATCH, length, top_k).astype(np.int32)


# --- the plan of a round, by the definition of ragged_all_to_all ------------------------------------------------------


def move_by_definition(rows: list[np.ndarray], num_rows: int, leaving: list[Slices]) -> list[np.ndarray]:
    """Move rows of all devices as `jax.lax.ragged_all_to_all` is documented; -1 where no row arrives."""
    num_devices = len(rows)
    results = [np.full(num_rows, -1) for _ in rows]
    for source, slices in enumerate(leaving):
        per_device = slices.sizes.size // num_devices
        fields = zip(*(np.asarray(x) for x in (slices.starts, slices.sizes, slices.remote_starts)), strict=True)
        for index, (start, size, remote_start) in enumerate(fields):
            assert 0 <= start <= start + size <= rows[source].size
            assert 0 <= remote_start <= remote_start + size <= num_rows
            place = results[index // per_device][remote_start : remote_start + size]
            assert (place == -1).all(), "two slices write the same rows"
            place[:] = rows[source][start : start + size]
    return results


def exchange_sizes(leaving: list[Slices]) -> list[np.ndarray]:
    """Return for each device what an all-to-all of the sizes of the others gives."""
    num_devices = len(leaving)
    sizes = np.stack([np.asarray(slices.sizes).reshape(num_devices, -1) for slices in leaving])
    return list(sizes.swapaxes(0, 1).reshape(num_devices, -1))


@pytest.mark.parametrize("room", [1, 7, 40, 10_000])
@pytest.mark.parametrize("case", ["random", "one expert", "zero"])
def test_each_row_reaches_its_expert_once_and_returns(case: str, room: int):
    num_devices, num_local = 4, 3
    num_experts = num_devices * num_local
    counts = np.random.default_rng(room).integers(0, 5, size=(num_devices, num_experts))
    if case == "one expert":
        counts[:, np.arange(num_experts) != 5] = 0
    if case == "zero":
        counts[:] = 0
    # A row is the number of its expert, and its index.
    experts = [np.repeat(np.arange(num_experts), row) for row in counts]
    rows = [1000 * device + np.arange(own.size) for device, own in enumerate(experts)]
    by_row = {int(row): int(expert) for row, expert in zip(np.concatenate(rows), np.concatenate(experts), strict=True)}
    received: list[list[int]] = [[] for _ in rows]
    returned = [np.full(own.size, -1) for own in rows]
    num_rounds = int(count_rounds(jnp.asarray(counts), room))
    totals = counts.reshape(num_devices, num_devices, num_local).sum(axis=(0, 2))
    assert num_rounds == max(1, -(-totals.max() // room))
    for index in range(num_rounds):
        rounds = [plan_round(jnp.asarray(counts), device, index, room) for device in range(num_devices)]
        leaving = [round_.sent for round_ in rounds]
        back = [round_.received for round_ in rounds]
        for direction, opposite in ((leaving, back), (back, leaving)):
            for arriving, slices in zip(exchange_sizes(direction), opposite, strict=True):
                np.testing.assert_array_equal(arriving, slices.sizes)
        buffers = move_by_definition(rows, min(room, 100), leaving)
        for device, (buffer, round_) in enumerate(zip(buffers, rounds, strict=True)):
            count = int(round_.sizes_E.sum())
            assert (buffer[:count] >= 0).all(), "a hole between slices"
            assert (buffer[count:] == -1).all()
            local = [by_row[int(row)] - device * num_local for row in buffer[:count]]
            assert local == np.repeat(np.arange(num_local), round_.sizes_E).tolist()
            received[device] += buffer[:count].tolist()
        for own, results in zip(returned, _return_all(buffers, rows, back), strict=True):
            is_new = results >= 0
            assert (own[is_new] == -1).all(), "a row returned twice"
            own[is_new] = results[is_new]
    for own, expected in zip(returned, rows, strict=True):
        np.testing.assert_array_equal(own, expected)
    assert sorted(itertools.chain(*received)) == sorted(by_row)


def _return_all(buffers: list[np.ndarray], rows: list[np.ndarray], back: list[Slices]) -> list[np.ndarray]:
    longest = max(own.size for own in rows)
    results = move_by_definition(buffers, longest, back)
    return [result[: own.size] for result, own in zip(results, rows, strict=True)]


# --- layers on eight devices -----------------------------------------------------------------------------------------


def compute_value_and_grads(experts: Experts, mesh: Mesh | None, experts_BSK: np.ndarray) -> Any:
    """Return the layer's result, and the gradients of weights, tokens and shares."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=spec.shape) for name, spec in experts.param_specs().items()}
    x_BSD = rng.normal(size=(*experts_BSK.shape[:2], DIM))
    shares_BSK = rng.random(experts_BSK.shape)
    direction = rng.normal(size=x_BSD.shape)
    ctx = Context({}, mesh=mesh, compute_dtype=jnp.float64)

    def loss(weights: Any, x_BSD: jax.Array, shares_BSK: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_BSD, _ = experts(weights, x_BSD, ExpertChoice(jnp.asarray(experts_BSK), shares_BSK), ctx)
        return jnp.sum(y_BSD * direction), y_BSD

    (_, y_BSD), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(weights, x_BSD, shares_BSK)
    return jax.device_get((y_BSD, grads))


def check_equal(experts: Experts, sizes: dict[str, int], experts_BSK: np.ndarray) -> None:
    """Check that a mesh of these sizes computes what one device does."""
    found = compute_value_and_grads(experts, make_mesh(sizes), experts_BSK)
    expected = compute_value_and_grads(experts, None, experts_BSK)
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert np.abs(value).max() > 0.0
        np.testing.assert_allclose(other, value, err_msg=str(path), **TOLERANCE)


ALL_MESHES = [{"expert": 8}, {"expert": 4, "seq": 2}, {"expert": 2, "fsdp": 2, "model": 2}, {"expert": 2, "data": 4}]


@pytest.mark.usefixtures("float64")
@pytest.mark.once("uneven-0")
@pytest.mark.parametrize("mesh", range(len(ALL_MESHES)))
@pytest.mark.parametrize("case", ["even", "uneven", "empty experts", "one device"])
def test_values_and_gradients_equal_one_device(case: str, mesh: int):
    """On eight devices, 18 rows are an even share. A device receives up to 6, 23 or 144 at a time."""
    factors = {"even": (1.25, 0.3, 8.0, 1.25), "uneven": (0.3, 1.25, 1.25, 8.0)}
    factor = factors.get(case, (1.25, 8.0, 0.3, 0.3))[mesh]
    # Shares multiply results with biases, and hidden activations without.
    experts = make_experts(16, 3, bias=mesh % 2 == 0, buffer_factor=factor)
    check_equal(experts, ALL_MESHES[mesh], choose(case, 16, 3, 6))


@pytest.mark.usefixtures("float64")
@pytest.mark.pairs
@pytest.mark.parametrize("case", ["even", "one device"])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "length", "fields"),
    [
        (8, 2, 1, {}),  # one token per device
        (8, 3, 5, {}),  # more experts per token than on a device
        (8, 8, 3, {}),  # all experts
        (24, 1, 7, {"gated": False}),
        (16, 3, 6, {"implementation": "ragged"}),
    ],
)
def test_shapes_and_kernels(num_experts: int, top_k: int, length: int, fields: dict[str, Any], case: str):
    experts = make_experts(num_experts, top_k, **fields)
    check_equal(experts, {"expert": 8}, choose(case, num_experts, top_k, length))


def emulate_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """Compute `jax.lax.ragged_all_to_all`, which XLA for CPU does not have, by all-gathers."""
    num_devices = jax.lax.axis_size(axis_name)
    device = jax.lax.axis_index(axis_name)
    sent = (operand, input_offsets, send_sizes, output_offsets)
    operands, *others = (jax.lax.all_gather(x, axis_name) for x in sent)
    starts, sizes, places = (x.reshape(num_devices, num_devices, -1)[:, device] for x in others)
    rows = jnp.arange(output.shape[0])
    arrived = jnp.zeros(starts.shape, jnp.int32)
    for source, index in np.ndindex(*starts.shape):
        shifts = rows - places[source, index]
        is_written = (shifts >= 0) & (shifts < sizes[source, index])
        arrived = arrived.at[source, index].set(jnp.sum(is_written, dtype=jnp.int32))
        written = jnp.take(operands[source], starts[source, index] + shifts, axis=0, mode="clip")
        output = jnp.where(is_written[:, None], written, output)
    # A slice that does not arrive in full, or is not expected, breaks the contract.
    is_expected = jnp.all(arrived.reshape(-1) == recv_sizes)
    return jnp.where(is_expected, output, jnp.nan)


@pytest.mark.usefixtures("float64")
@pytest.mark.first(1)
@pytest.mark.parametrize("case", ["uneven", "one device"])
def test_arguments_of_ragged_all_to_all(case: str, monkeypatch: pytest.MonkeyPatch):
    """The code for TPU and GPU, with an emulated collective."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> jax.Array:
        calls.append(args)
        return emulate_ragged_all_to_all(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", call)
    move = Transport.move

    def move_ragged(transport: Transport, *args: Any) -> jax.Array:
        return move(Transport(is_ragged=True, mesh_axes=transport.mesh_axes), *args)

    monkeypatch.setattr(Transport, "move", move_ragged)
    check_equal(make_experts(8, 3, buffer_factor=0.6), {"expert": 4, "data": 2}, choose(case, 8, 3, 4))
    assert calls


@pytest.mark.usefixtures("float64")
def test_frozen_weights_get_no_gradient():
    """Only the tokens are differentiated, as under LoRA: the result is the same, and no weight gradient is computed."""
    experts = make_experts(8, 2, buffer_factor=0.5, implementation="ragged")
    mesh = make_mesh({"expert": 8})
    experts_BSK = choose("uneven", 8, 2, 2)
    weights = {name: np.ones(spec.shape) for name, spec in experts.param_specs().items()}
    shares_BSK = jnp.ones(experts_BSK.shape)
    x_BSD = np.random.default_rng(0).normal(size=(*experts_BSK.shape[:2], DIM))

    def loss(mesh: Mesh | None, x_BSD: jax.Array) -> jax.Array:
        ctx = Context({}, mesh=mesh, compute_dtype=jnp.float64)
        return jnp.sum(experts(weights, x_BSD, ExpertChoice(jnp.asarray(experts_BSK), shares_BSK), ctx)[0])

    grad = jax.grad(lambda x_BSD: loss(mesh, x_BSD))
    np.testing.assert_allclose(jax.jit(grad)(x_BSD), jax.grad(lambda x_BSD: loss(None, x_BSD))(x_BSD), **TOLERANCE)
    text = str(jax.make_jaxpr(grad)(x_BSD))
    # Up, gate and down: forward in the first round and the loop, backward, and both again in the backward loop.
    assert text.count("ragged_dot_general[") == 3 * (2 + 1 + 2)


def saved_shapes(policy: Any) -> list[tuple[int, ...]]:
    experts = make_experts(8, 2)
    mesh = make_mesh({"expert": 8})
    weights = {name: jnp.ones(spec.shape) for name, spec in experts.param_specs().items()}
    choice = ExpertChoice(jnp.asarray(choose("even", 8, 2, 32)), jnp.ones((BATCH, 32, 2)))
    x_BSD = jnp.ones((BATCH, 32, DIM))

    def apply(x_BSD: jax.Array) -> jax.Array:
        return experts(weights, x_BSD, choice, Context({}, mesh=mesh))[0]

    _, pull = jax.eval_shape(lambda x_BSD: jax.vjp(jax.checkpoint(apply, policy=policy), x_BSD), x_BSD)
    return [leaf.shape for leaf in jax.tree.leaves(pull)]


@pytest.mark.pairs
def test_remat_policies_find_the_names_of_the_first_round():
    policies = jax.checkpoint_policies
    rows = 8 * (80 + 16)
    assert (rows, HIDDEN) not in saved_shapes(policies.nothing_saveable)
    assert saved_shapes(policies.save_only_these_names("mlp_up")).count((rows, HIDDEN)) == 1
    assert saved_shapes(policies.save_only_these_names("mlp_up", "mlp_gate")).count((rows, HIDDEN)) == 2


def test_few_tokens_are_gathered():
    auto = make_experts(8, 2, exchange="auto")
    # On four devices with two experts each, a token may have two rows on a device.
    assert not auto.uses_all_to_all(512, shards=4)
    assert auto.uses_all_to_all(513, shards=4)
    assert not auto.uses_all_to_all(10**6, shards=1)
    assert make_experts(8, 2).uses_all_to_all(1, shards=2)
    assert not make_experts(8, 2, exchange="all_gather").uses_all_to_all(10**6, shards=2)
    assert not make_experts(8, 2, capacity=1.0).uses_all_to_all(10**6, shards=2)


# --- memory ----------------------------------------------------------------------------------------------------------


def compile_step(mesh: Mesh, length: int, **fields: Any) -> Any:
    """Compile forward and backward pass of experts with many rows, of which each device has 2 * length."""
    experts = config_for(Experts, hidden=256, **fields).instantiate(dim=128, num_experts=16, top_k=2)
    specs = experts.param_specs()
    dtype = jnp.bfloat16 if mesh.devices.flat[0].platform == "tpu" else jnp.float32

    def shape(shape: tuple[int, ...], axes: tuple[Any, ...], dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    weights = {name: shape(spec.shape, spec.mesh_axes) for name, spec in specs.items()}
    tokens = shape((8, length, 128), (("data", "fsdp", "expert"),))
    shares = shape((8, length, 2), (("data", "fsdp", "expert"),), jnp.float32)
    choices = shape((8, length, 2), (("data", "fsdp", "expert"),), jnp.int32)

    def loss(weights: Any, x_BSD: jax.Array, shares_BSK: jax.Array, experts_BSK: jax.Array) -> jax.Array:
        ctx = Context({}, mesh=mesh, compute_dtype=dtype)
        return jnp.sum(experts(weights, x_BSD, ExpertChoice(experts_BSK, shares_BSK), ctx)[0].astype(jnp.float32))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(weights, tokens, shares, choices).compile()


@pytest.mark.pairs
def test_memory_is_that_of_the_buffer():
    """The worst case is 8 * 2 * 512 rows; the buffers have 1.25 * 2 * 512."""
    mesh = make_mesh({"expert": 8})
    gathered = compile_step(mesh, 512, exchange="all_gather").memory_analysis().temp_size_in_bytes
    exchanged = compile_step(mesh, 512, exchange="all_to_all")
    # The loop over further rounds needs up to two more arrays of each kind.
    assert exchanged.memory_analysis().temp_size_in_bytes < 0.45 * gathered
    most = max(array.dims[0] for array in arrays(exchanged.as_text()) if len(array.dims) == 2)
    assert most == 1.25 * 2 * 512 + 16


@pytest.mark.pairs
@pytest.mark.parametrize("target", ["v5p-16", "h100x8"])
def test_compilers_exchange_rows_in_bounded_arrays(target: str):
    """On 8 devices, no array has the 8 * 2 * 2048 rows of the worst case, and an even router needs no loop."""
    is_tpu = target == "v5p-16"
    if is_tpu:
        pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    elif gpu_description.installed_cuda() is None:
        pytest.skip("JAX's CUDA plugin is not installed")
    targets.set_environment(target)
    mesh = make_mesh({"expert": 8}, targets.resolve(target).devices())
    text = compile_step(mesh, 2048, exchange="all_to_all").as_text()
    rows = [array.dims[0] for array in arrays(text) if len(array.dims) in (2, 3)]
    # The GPU's kernels need spare rows.
    assert max(rows) == 1.25 * 2 * 2048 + (0 if is_tpu else 64)
    module = Module(text)
    # Some of the GPU's are asynchronous.
    opcodes = ("ragged-all-to-all", "ragged-all-to-all-start")
    exchanges = [instruction for instruction in module.instructions.values() if instruction.opcode in opcodes]
    # Tokens and shares there, and results back; the backward loop computes a round again, except for its results.
    assert len(exchanges) == 2 * 3 + 3 + (2 + 3)
    rounds = [count_further_rounds(loop.op_name) for loop in module.loops.values()]
    assert [trips for trips in rounds if trips is not None] == [0, 0]
    assert sum(module.runs(exchange.computation) for exchange in exchanges) == 2 * 3
    assert not module.unknown_loops
