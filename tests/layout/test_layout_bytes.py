"""Byte counts, compared to numbers counted by hand and to the bytes that the devices really hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from plimsoll.framework.devices.mesh import AXES
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layout import (
    OptStateSpec,
    ParameterSpec,
    StateLayout,
    TensorSpec,
    TrainState,
    flatten,
    move_to_host,
    unflatten,
)
from plimsoll.framework.program.program import Program
from tests.support import small


def mesh(**sizes: int) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), AXES)


def parameter(*shape: int, axes: tuple = (), dtype: str = "float32", **fields) -> ParameterSpec:
    return ParameterSpec(shape, dtype, axes, roles=("axis",) * len(shape), **fields)


def specs() -> TrainState:
    return TrainState(
        parameter={
            "matrix": parameter(16, 8, axes=("fsdp", "model")),
            "half": parameter(6, 8, axes=(None, ("fsdp", "model")), dtype="bfloat16"),
        },
        frozen={"vector": parameter(24, axes=("fsdp",), dtype="bfloat16")},
        optimizer={
            "mu": {"matrix": OptStateSpec((16, 8), "float32", ("fsdp", "model"), "pinned_host", owner="matrix")},
            "nu": {"matrix": OptStateSpec((16, 8), "bfloat16", ("fsdp", "model"), owner="matrix")},
            "rows": OptStateSpec((16,), "float32", ("fsdp",), "pinned_host", owner="matrix"),
            "count": OptStateSpec((), "int32"),
        },
        counter={"rng": TensorSpec((2,), "uint32")},
    )


# Bytes per device, counted by hand, for fsdp = 4, model = 2.
BY_HAND = {
    ("parameter", "device"): 16 * 8 * 4 // 8 + 6 * 8 * 2 // 8,
    ("frozen", "device"): 24 * 2 // 4,
    ("optimizer", "pinned_host"): 16 * 8 * 4 // 8 + 16 * 4 // 4,
    ("optimizer", "device"): 16 * 8 * 2 // 8 + 4,
    ("counter", "device"): 2 * 4,
}


def test_bytes_by_group_and_memory_kind_match_manual_counts():
    layout = StateLayout(specs(), mesh(fsdp=4, model=2))
    for (group, kind), expected in BY_HAND.items():
        assert layout.bytes_per_device(group, kind) == expected, (group, kind)
    assert layout.bytes_per_device("parameter", "pinned_host") == 0
    assert layout.bytes_per_device("ema") == 0
    assert layout.bytes_per_device("optimizer") == 64 + 16 + 32 + 4
    assert layout.bytes_per_device(memory_kind="pinned_host") == 64 + 16
    assert layout.bytes_per_device() == sum(BY_HAND.values())
    assert layout.size("parameter") == 16 * 8 + 6 * 8
    assert specs()["parameter"]["half"].num_bytes == 6 * 8 * 2


def test_bytes_match_the_device_buffers():
    layout = StateLayout(specs(), mesh(fsdp=4, model=2))
    state = jax.jit(
        lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), layout.specs),
        out_shardings=layout.shardings(),
    )()
    layout.check(state)
    for leaf in layout:
        shards = flatten(state)[leaf.path].addressable_shards
        assert len(shards) == 8
        assert {shard.data.nbytes for shard in shards} == {leaf.bytes_per_device}, leaf.path
        assert {shard.data.sharding.memory_kind for shard in shards} == {leaf.spec.memory_kind}, leaf.path
    assert layout.abstract()["parameter"]["matrix"].sharding == state.parameter["matrix"].sharding
    assert layout.abstract()["optimizer"]["rows"].sharding.memory_kind == "pinned_host"


def test_language_model_state_matches_a_manual_count():
    """A GPT-2 of width 32 with AdamW and averaged weights, all in float32, on one device."""
    layout = small.program(small.experiment(ema=0.9)).layout
    V, P, D, L = small.VOCAB, 32, 32, 2
    attention, mlp, norms = 4 * (D * D + D), D * 4 * D + 4 * D + 4 * D * D + D, 2 * 2 * D
    parameters = V * D + P * D + L * (attention + mlp + norms) + 2 * D
    assert layout.size("parameter") == parameters
    assert layout.bytes_per_device("parameter") == 4 * parameters
    assert layout.bytes_per_device("ema") == 4 * parameters
    # Two moments per parameter; one counter for the embedding, one for the head, and one for each layer.
    assert layout.bytes_per_device("optimizer") == 8 * parameters + 4 * (1 + 1 + L)
    assert layout.bytes_per_device("counter") == 4 + 4 + 4 + 8
    assert layout.bytes_per_device("frozen") == layout.bytes_per_device("buffer") == 0


def test_a_language_models_shards_on_a_mesh():
    model = small.gpt2(param_dtype="bfloat16")
    program = small.program(small.experiment(model, mesh={"fsdp": 4, "model": 2}, master_dtype="float32"))
    leaves = {leaf.path: leaf for leaf in program.layout}
    token = leaves["parameter/embed/token"]
    assert token.spec.mesh_axes == (("pipe", "model"), "fsdp")
    assert token.bytes_per_device == small.VOCAB * 32 * 2 // 8
    up = leaves["parameter/stack/block0/mlp/up/weight"]
    assert (up.spec.shape, up.spec.mesh_axes) == ((2, 32, 128), ("pipe", "fsdp", "model"))
    assert up.bytes_per_device == 2 * 32 * 128 * 2 // 8
    assert leaves["parameter/stack/block0/mlp/up/bias"].bytes_per_device == 2 * 128 * 2 // 2
    assert leaves["parameter/head/norm/scale"].bytes_per_device == 32 * 2
    # The master copy and the moments are sharded like their parameter, at twice the bytes.
    owned = [leaf for path, leaf in leaves.items() if path.endswith("mlp/up/weight") and leaf.group == "optimizer"]
    assert len(owned) == 3
    assert {leaf.spec.mesh_axes for leaf in owned} == {("pipe", "fsdp", "model")}
    assert {leaf.bytes_per_device for leaf in owned} == {2 * up.bytes_per_device}


def test_only_large_matrices_move_to_the_host():
    tree = {
        "matrix": OptStateSpec((512, 512), "float32"),
        "just_under": OptStateSpec((512, 511), "float32"),
        "vector": OptStateSpec((1 << 20,), "float32"),
        "stacked_vector": OptStateSpec((1, 1 << 20), "float32"),
        "stacked_matrix": OptStateSpec((4, 256, 256), "float32"),
        "count": OptStateSpec((), "int32"),
    }
    moved = move_to_host(tree, "pinned_host")
    assert {path for path, spec in moved.items() if spec.memory_kind == "pinned_host"} == {"matrix", "stacked_matrix"}
    assert move_to_host(tree, "pinned_host", min_bytes=0)["just_under"].memory_kind == "pinned_host"
    assert move_to_host(tree, "device") == tree


def test_paths_and_trees():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert unflatten(flatten(tree)) == tree
    assert list(flatten({"x": (1, [2])})) == ["x/0", "x/1/0"]


@pytest.mark.parametrize(
    ("sizes", "devices", "message"),
    [
        ({"fsdp": 3}, 8, r"'fsdp': 3.*product 3 is not the number of devices, 8; nearest: \[2, 4\]"),
        ({"data": 3, "fsdp": -1}, 8, r"product 3 does not divide the number of devices, 8; nearest: \[2, 4\]"),
        ({"fsdp": 16}, 8, r"product 16 is not the number of devices, 8; nearest: \[8\]"),
        ({"fsdp": 1}, 8, r"product 1 is not the number of devices, 8; nearest: \[1, 2\]"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_names_both_numbers(sizes, devices, message):
    config = small.experiment(mesh=sizes)
    with pytest.raises(ValueError, match=message):
        Program(config.instantiate(), jax.devices()[:devices])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: small.experiment(batch=12, mesh={"fsdp": 8}),
            r"mesh\.data \* mesh\.fsdp = 8 does not divide the 12 .* nearest global_batch_size: \[8, 16\]",
        ),
        (
            lambda: small.experiment(batch=24, mesh={"fsdp": 8}, accumulate=2),
            r"= 8 does not divide the 12 sequences of a microbatch .*= 24.* nearest global_batch_size: \[16, 32\]",
        ),
        (
            lambda: small.experiment(batch=8, accumulate=3),
            r"learner\.accumulate = 3 does not divide data\.global_batch_size = 8; nearest: \[2, 4\]",
        ),
        (
            lambda: small.experiment(mesh={"model": 8}),
            r"mesh\.model = 8 does not divide num_kv_heads = 4; nearest that do: \[4\]",
        ),
        (
            lambda: small.experiment(small.llama(), mesh={"model": 4, "data": 2}),
            r"mesh\.model = 4 does not divide num_kv_heads = 2; nearest that do: \[2\]",
        ),
        (
            lambda: small.experiment(seq_len=12, mesh={"seq": 8}),
            r"mesh\.seq = 8 does not divide data\.seq_len = 12; nearest that do: \[6, 12\]",
        ),
        (
            lambda: small.experiment(small.gpt2(dim=36), mesh={"fsdp": 8}),
            r"mesh\.fsdp = 8 does not divide out = 36 of parameter/embed/position; nearest that do: \[6, 9\]",
        ),
        (
            lambda: small.experiment(small.gpt2(vocab_size=65), mesh={"model": 2, "data": 4}),
            r"mesh\.model = 2 does not divide vocab = 65 of parameter/embed/token; nearest that do: \[1, 5\]",
        ),
        (
            lambda: small.experiment(mesh={"expert": 2, "data": 4}),
            r"mesh\.expert = 2, but the model has no experts; expected 1",
        ),
        (lambda: small.experiment(seq_len=64), r"data\.seq_len = 64 exceeds model\.embed\.max_positions = 32"),
    ],
    ids=["batch", "microbatch", "accumulate", "heads", "kv heads", "seq", "width", "vocab", "expert", "positions"],
)
def test_indivisible_size_suggests_the_nearest_valid_one(config, message):
    experiment = config().instantiate()
    with pytest.raises(ValueError, match=message):
        Program(experiment, jax.devices())


def shard_axes(spec: TensorSpec, **sizes: int) -> tuple:
    """Return the mesh axes over which the layout of a mesh shards one array."""
    return StateLayout(TrainState(parameter={"weight": spec}), mesh(**sizes)).specs.parameter["weight"].mesh_axes


def test_weights_are_sharded_over_seq_where_it_divides_them():
    weight = parameter(16, 8, axes=("fsdp", "model"))
    assert shard_axes(weight, fsdp=2, seq=4) == (("fsdp", "seq"), "model")
    assert shard_axes(weight, seq=8) == (("fsdp", "seq"), "model")
    assert shard_axes(weight, data=2, seq=2, model=2) == (("fsdp", "seq"), "model")
    assert shard_axes(weight, fsdp=8) == ("fsdp", "model")
    # Two devices divide 12, eight do not.
    assert shard_axes(parameter(12, axes=("fsdp",)), fsdp=2, seq=4) == ("fsdp",)
    assert shard_axes(parameter(12, axes=("fsdp",)), seq=8) == ("fsdp",)
    # Four runs of four elements cannot be divided among eight devices.
    assert shard_axes(parameter(16, axes=("fsdp",), indivisible=(4,)), fsdp=2, seq=4) == ("fsdp",)
    assert shard_axes(parameter(32, axes=("fsdp",), indivisible=(4,)), fsdp=2, seq=4) == (("fsdp", "seq"),)
    # An array names each axis once; the axes of a batch stay.
    assert shard_axes(parameter(16, 8, axes=("fsdp", "seq")), fsdp=2, seq=4) == ("fsdp", "seq")
    batch = parameter(16, 8, axes=(("data", "fsdp", "expert"), None))
    assert shard_axes(batch, fsdp=2, seq=4) == batch.mesh_axes
    with pytest.raises(ValueError, match=r"mesh\.fsdp = 4 does not divide axis = 6 of parameter/weight; nearest"):
        shard_axes(parameter(6, axes=("fsdp",)), fsdp=4, seq=2)


def test_weights_are_sharded_over_expert_unless_experts_are():
    weight = parameter(16, 8, axes=("fsdp", "model"))
    assert shard_axes(weight, fsdp=2, expert=4) == (("fsdp", "expert"), "model")
    assert shard_axes(weight, fsdp=2, seq=2, expert=2) == (("fsdp", "seq", "expert"), "model")
    # Four devices divide 12, eight do not.
    assert shard_axes(parameter(12, axes=("fsdp",)), fsdp=2, seq=2, expert=2) == (("fsdp", "seq"),)
    assert shard_axes(parameter(6, axes=("fsdp",)), fsdp=2, seq=4) == ("fsdp",)
    experts = parameter(4, 16, 8, axes=("expert", "fsdp", "model"))
    assert shard_axes(experts, fsdp=2, expert=4) == ("expert", "fsdp", "model")
    assert shard_axes(experts, fsdp=2, seq=2, expert=2) == ("expert", ("fsdp", "seq"), "model")


def test_optimizer_state_is_sharded_over_seq_where_it_divides_it():
    """Scales of blocks may have fewer rows than their weight, and then fewer shards."""
    layout = StateLayout(TrainState(), mesh(fsdp=2, seq=4))
    rows = {count: layout.fit(OptStateSpec((count, 8), "float32", ("fsdp", None), owner="w")) for count in (16, 6, 3)}
    assert {count: spec.mesh_axes for count, spec in rows.items()} == {
        16: (("fsdp", "seq"), None),
        6: ("fsdp", None),
        3: (None, None),
    }
    assert {count: layout.fit(spec) for count, spec in rows.items()} == rows


@pytest.mark.once("dense")
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_a_device_holds_its_share_of_the_state_on_every_mesh(model):
    """Eight devices that share rows or experts hold as many bytes each as eight devices that share neither."""

    def build(sizes: dict[str, int]) -> Program:
        config = small.gpt2() if model == "dense" else small.llama()
        if model == "experts":
            small.block(config).mlp = mixture(experts=4, top_k=2, hidden=16)
        return small.program(small.experiment(config, mesh=sizes, ema=0.9))

    expected = build({"fsdp": 8})
    expected_bytes = {leaf.path: leaf.bytes_per_device for leaf in expected.layout}
    meshes = [{"fsdp": 1, "seq": 8}, {"fsdp": 2, "seq": 4}]
    if model == "experts":
        meshes.append({"fsdp": 2, "expert": 4})
    for sizes in meshes:
        program = build(sizes)
        assert {leaf.path: leaf.bytes_per_device for leaf in program.layout} == expected_bytes
        held = dict.fromkeys(jax.devices(), 0)
        for array in jax.tree.leaves(program.init()):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {expected.layout.bytes_per_device()}
    # Four devices hold twice as much as eight, apart from what is not sharded.
    half = build({"data": 2, "fsdp": 1, "seq": 4}).layout.bytes_per_device("parameter")
    assert half > 1.8 * expected.layout.bytes_per_device("parameter")


def test_indivisible_optimizer_blocks_are_replicated():
    """The [8, 48] parameter divides along both axes; its [8, 3] scales, of blocks of 16, divide only along the rows."""
    scale, eight = OptStateSpec((8, 3), "float32", ("fsdp", "model"), owner="weight"), mesh(fsdp=4, model=2)
    weight = parameter(8, 48, axes=("fsdp", "model"))
    layout = StateLayout(TrainState(parameter={"weight": weight}, optimizer={"weight": scale}), eight)
    assert layout.specs.optimizer["weight"].mesh_axes == ("fsdp", None)
    assert layout.bytes_per_device("optimizer") == 8 * 3 * 4 // 4
    with pytest.raises(ValueError, match=r"mesh.model = 2 does not divide axis = 3 of parameter/weight"):
        StateLayout(TrainState(parameter={"weight": parameter(8, 3, axes=("fsdp", "model"))}), eight)
