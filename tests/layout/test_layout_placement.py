"""Placement: re-tagging specs, checking a state against the layout, and offloaded optimizer state."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.devices.mesh import AXES
from plimsoll.framework.layout import OptStateSpec, ParameterSpec, StateLayout, TrainState, copy_partition, flatten
from plimsoll.framework.program.program import Program
from tests.support import small


def kinds(tree) -> dict[str, str]:
    return {path: spec.memory_kind for path, spec in flatten(tree).items()}


def test_copy_partition_tags_matches_and_is_idempotent():
    specs = {
        "mu": {"embed": OptStateSpec((4, 2), "float32"), "head": OptStateSpec((4, 2), "float32", ("model", None))},
        "nu": {"embed": OptStateSpec((4, 2), "float32")},
        "count": OptStateSpec((), "int32"),
    }
    once = copy_partition(specs, pattern="^mu/", memory_kind="pinned_host")
    assert [path for path, kind in kinds(once).items() if kind == "pinned_host"] == ["mu/embed", "mu/head"]
    twice = copy_partition(once, pattern="nu/embed$", memory_kind="pinned_host")
    back = copy_partition(twice, pattern="mu/head", memory_kind="device")
    assert [path for path, kind in kinds(back).items() if kind == "pinned_host"] == ["mu/embed", "nu/embed"]
    # Nothing else changes, and the original specs are unmodified.
    assert once["mu"]["head"] == replace(specs["mu"]["head"], memory_kind="pinned_host")
    assert set(kinds(specs).values()) == {"device"}


def test_copy_partition_works_on_optax_states_and_parameters():
    program = small.program(small.experiment())
    tagged = copy_partition(program.layout.specs.optimizer, pattern=r"/mu/.*weight", memory_kind="pinned_host")
    moved = [path for path, kind in kinds(tagged).items() if kind == "pinned_host"]
    assert len(moved) == 6
    assert all("/mu/" in path and path.endswith("weight") for path in moved)
    tagged = copy_partition(tagged, pattern="mlp|/nu/.*scale", memory_kind="pinned_host")
    tagged = copy_partition(tagged, pattern="down", memory_kind="device")  # the last match wins
    again = {path for path, kind in kinds(tagged).items() if kind == "pinned_host"}
    assert "head/default/state/0/nu/norm/scale" in again
    assert [path for path in moved if path not in again] == [path for path in moved if "down" in path] != []
    specs = copy_partition(program.layout.specs.parameter, pattern="weight|token", memory_kind="pinned_host")
    specs = copy_partition(specs, pattern="weight", memory_kind="device")
    assert {path for path, kind in kinds(specs).items() if kind == "pinned_host"} == {"embed/token"}
    assert isinstance(specs["embed"]["token"], ParameterSpec)
    assert specs["embed"]["token"].initializer is program.layout.specs.parameter["embed"]["token"].initializer


def test_copy_partition_without_a_match_is_an_error():
    specs = {"mu": {"embed": OptStateSpec((4, 2), "float32")}}
    with pytest.raises(ValueError, match=r"copy_partition: pattern 'nothing' matches none of 1 paths.*mu/embed"):
        copy_partition(specs, pattern="nothing", memory_kind="pinned_host")


# --- StateLayout.check -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> StateLayout:
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 1, 4, 1, 1, 2), AXES)
    return StateLayout(
        TrainState(
            parameter={"w": ParameterSpec((8, 4), "float32", ("fsdp", "model"), roles=("in", "out"))},
            optimizer={"mu": {"w": OptStateSpec((8, 4), "float32", ("fsdp", "model"), "pinned_host", owner="w")}},
        ),
        mesh,
    )


def make_state(table: StateLayout, path: str, value: np.ndarray, axes: tuple, kind: str) -> TrainState:
    """Return a state as the table specifies, except for one leaf."""
    good = np.zeros((8, 4), np.float32)
    state = jax.device_put(TrainState(parameter={"w": good}, optimizer={"mu": {"w": good}}), table.shardings())
    array = jax.device_put(value, NamedSharding(table.mesh, PartitionSpec(*axes), memory_kind=kind))
    return replace(state, optimizer={"mu": {"w": array}}) if "mu" in path else replace(state, parameter={"w": array})


GOOD = ("fsdp", "model")


def test_check_accepts_the_state_it_describes(table):
    table.check(make_state(table, "parameter/w", np.zeros((8, 4), np.float32), GOOD, "device"))
    # A sharding written in a different way is still the same sharding.
    spec = PartitionSpec(("fsdp",), ("model",))
    array = jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(table.mesh, spec))
    state = make_state(table, "parameter/w", np.zeros((8, 4), np.float32), GOOD, "device")
    table.check(replace(state, parameter={"w": array}))


@pytest.mark.parametrize(
    ("path", "dtype", "shape", "axes", "kind", "message"),
    [
        ("parameter/w", "float32", (8, 4), GOOD, "pinned_host", "is in pinned_host; the layout says device"),
        ("optimizer/mu/w", "float32", (8, 4), GOOD, "device", "is in device; the layout says pinned_host"),
        ("parameter/w", "bfloat16", (8, 4), GOOD, "device", r"is bfloat16\(8, 4\); the layout says float32"),
        ("parameter/w", "float32", (8, 8), GOOD, "device", r"is float32\(8, 8\); the layout says float32\(8, 4\)"),
        ("parameter/w", "float32", (8, 4), (None, None), "device", "is sharded"),
        ("parameter/w", "float32", (8, 4), ("fsdp", None), "device", "is sharded"),
        ("optimizer/mu/w", "float32", (8, 4), ("model", "fsdp"), "pinned_host", "is sharded"),
    ],
)
def test_check_names_the_misplaced_leaf(table, path, dtype, shape, axes, kind, message):
    state = make_state(table, path, np.zeros(shape, jnp.dtype(dtype)), axes, kind)
    with pytest.raises(ValueError, match=f"{path} {message}"):
        table.check(state)


def test_check_names_leaves_that_are_missing_or_too_many(table):
    state = make_state(table, "parameter/w", np.zeros((8, 4), np.float32), GOOD, "device")
    with pytest.raises(ValueError, match=r"differ in leaves: \['optimizer/mu/w'\]"):
        table.check(TrainState(parameter=state.parameter))
    with pytest.raises(ValueError, match=r"differ in leaves: \['ema/w'\]"):
        table.check(replace(state, ema={"w": state.parameter["w"]}))


# --- host memory -----------------------------------------------------------------------------------------------------


def large(kind: str) -> Program:
    """Return a model sharded over eight devices, with matrices above 1 MiB, the minimum size for offloading."""
    model = small.gpt2(dim=64, stack__num_layers=4, stack__pattern=[small.block(small.gpt2())])
    small.block(model).mlp.hidden = 1024
    mesh = {"data": 2, "fsdp": 2, "model": 2}
    memory = {"optimizer_state": kind}
    return small.program(small.experiment(model, mesh=mesh, memory=memory, master_dtype="float32"))


@pytest.fixture(scope="module")
def offloaded_program() -> Program:
    return large("pinned_host")


@pytest.mark.pairs
def test_offloaded_state_is_on_the_host_and_equals_the_device(offloaded_program):
    on_device = large("device")
    first = offloaded_program.init()
    offloaded_program.layout.check(first)
    state, metrics = small.run(offloaded_program, 3, first)
    expected, expected_metrics = small.run(on_device, 3)
    offloaded_program.layout.check(state)
    on_device.layout.check(expected)
    on_host = {path for path, leaf in flatten(state).items() if leaf.sharding.memory_kind == "pinned_host"}
    assert on_host == {
        f"optimizer/stack/default/state/0/{moment}/block0/mlp/{name}/weight"
        for moment in ("mu", "nu")
        for name in ("up", "down")
    }
    assert metrics == expected_metrics
    small.assert_same_bits(state, expected)
    assert offloaded_program.layout.bytes_per_device("optimizer", "pinned_host") == 4 * 4 * 64 * 1024 * 4 // 4
    assert on_device.layout.bytes_per_device(memory_kind="pinned_host") == 0


@pytest.mark.pairs
def test_arithmetic_on_a_host_leaf_does_not_compile_without_fetch(offloaded_program, monkeypatch):
    """`fetch` is necessary because the compiler does not move host arrays by itself."""
    group = offloaded_program.layout.specs.optimizer
    abstract = offloaded_program.layout.abstract(group)

    def double(tree):
        return jax.tree.map(lambda x: x + jnp.ones(x.shape, x.dtype), offloaded_program.layout.fetch("optimizer", tree))

    jax.jit(double).lower(abstract)
    monkeypatch.setattr(StateLayout, "fetch", lambda self, group, tree: tree)
    with pytest.raises((TypeError, ValueError), match="memory"):
        jax.jit(lambda tree: double(tree)).lower(abstract)  # a new function, because jit caches the trace of the first
    again = large("pinned_host")
    with pytest.raises((TypeError, ValueError), match="memory"):
        again.jit_step.step_jit.lower(again.layout.abstract(), again.layout.abstract(again.batch_specs))


def test_fetch_and_store_move_only_offloaded_leaves(table):
    group = table.specs["optimizer"]
    x = jax.device_put({"mu": {"w": np.ones((8, 4), np.float32)}}, table.shardings(group))

    def space(tree):
        return jax.typeof(tree["mu"]["w"]).memory_space

    def through(tree):
        fetched = table.fetch("optimizer", tree)
        stored = table.store("optimizer", jax.tree.map(lambda a: a + 1, fetched))
        assert (space(tree), space(fetched), space(stored)) == (host, jax.memory.Space.Device, host)
        return stored

    host = jax.memory.Space.Host
    out = jax.jit(through, out_shardings=table.shardings(group))(x)
    assert out["mu"]["w"].sharding.memory_kind == "pinned_host"
    assert np.all(np.asarray(out["mu"]["w"]) == 2)
    parameter = {"w": jnp.ones((8, 4))}
    assert table.fetch("parameter", parameter)["w"] is parameter["w"]
    assert table.store("parameter", parameter)["w"] is parameter["w"]
