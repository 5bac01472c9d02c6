"""Checkpoints of any pytree: every kind of leaf bit for bit, resharding, kills, corrupted bytes, mismatched trees."""

import dataclasses
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import plimsoll as pl
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.checkpoint.directory import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointMissingError,
)
from tests.support.runs import ROOT

MESHES = {shape: jax.make_mesh(shape, ("data", "model")) for shape in [(4, 2), (2, 4), (8, 1)]}
VALUES = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)

DTYPES = ("int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64")


def sharding(mesh: tuple[int, int], *axes: Any, kind: str = "device") -> NamedSharding:
    return NamedSharding(MESHES[mesh], PartitionSpec(*axes), memory_kind=kind)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    weight: Any
    scale: Any
    name: str = dataclasses.field(metadata={"static": True}, default="model")


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal structures, classes of leaves, dtypes, shapes, shardings and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (keys, one), other in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other), keys
        if isinstance(one, jax.Array):
            assert one.dtype == other.dtype, keys
            assert one.sharding == other.sharding, keys
        if is_key(one):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if hasattr(one, "dtype"):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), keys
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), keys
        else:
            assert repr(one) == repr(other), keys


def trees() -> dict[str, Any]:
    """Return {kind: a tree of that kind}."""
    weight = jnp.asarray(VALUES)
    numbers = np.array([1 / 3, -0.0, np.nan, np.inf, 2.0**-1074])
    keys = jax.random.split(jax.random.key(0), 8)
    return {
        "dtypes": {name: (3 * weight).astype(name) for name in DTYPES},
        "flags": weight > 0,
        "small dtypes": {name: jnp.arange(-4, 4).astype(name) for name in ("int4", "float8_e4m3fn", "float8_e5m2")},
        "shapes": [jnp.float32(1.5), jnp.zeros((0, 3)), jnp.ones((1, 1, 1))],
        "optax": optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(1e-3))).init({"w": weight}),
        "masked": optax.masked(optax.sgd(1e-3, momentum=0.9), {"a": True, "b": False}).init({"a": weight, "b": weight}),
        "containers": Pair(Model(weight, jnp.float32(2.0)), {"none": None, "list": [weight, (weight,)], "empty": {}}),
        "keys": {
            "one": jax.random.key(1),
            "many": keys,
            "sharded": jax.device_put(keys, sharding((8, 1), "data")),
            "rbg": jax.random.key(2, impl="rbg"),
            "raw": jax.random.PRNGKey(3),
        },
        "numpy": {
            "float64": numbers,
            "scalar": np.float64(1 / 3),
            "int64": np.array([[-(2**62), 2**62 + 1]]),
            "zero dimensions": np.array(2**40),
            "complex128": numbers[:2] + 1j / 3,
            "no elements": np.zeros((0, 2), np.float64),
            "strided": np.arange(12.0).reshape(3, 4).T[::2],
            "float32": VALUES,
            "uint8": np.uint8(200),
            "bool": np.array([True, False]),
        },
        "python": {"i": 10**30, "f": 0.1, "inf": float("-inf"), "nan": float("nan"), "b": True, "s": 'a "b"\n\u00e9'},
        "functions": {"activation": jnp.tanh, "weight": weight},
        "memories": {
            "device": jax.device_put(weight, sharding((4, 2), "data", "model")),
            "pinned": jax.device_put(weight, sharding((4, 2), "model", "data", kind="pinned_host")),
            "other device": jax.device_put(weight, jax.devices()[5]),
        },
        # Arrays on several meshes over the same devices.
        "meshes": [jax.device_put(weight, sharding(mesh, "data", "model")) for mesh in MESHES],
        # Names with a special meaning in a run's checkpoints.
        "names": {"frozen": {"w": weight}, "ema": {"w": weight.astype(jnp.bfloat16)}, "a b/c": weight},
        "a leaf": weight,
        "a number": 3,
        "nothing": {},
    }


# The names are listed here because arrays made at import would stay on the device while other tests count live arrays.
KINDS = ("dtypes", "flags", "small dtypes", "shapes", "optax", "masked", "containers", "keys", "numpy", "python")
KINDS += ("functions", "memories", "meshes", "names", "a leaf", "a number", "nothing")


@pytest.mark.pairs
def test_every_leaf_type_has_a_name() -> None:
    assert tuple(trees()) == KINDS


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_type_restores_bit_for_bit(kind: str, tmp_path: Path) -> None:
    tree = trees()[kind]
    pl.save(tmp_path, 1, tree, {"kind": kind})
    restored, extra = pl.restore(tmp_path, tree)
    assert extra == {"kind": kind}
    assert_same(restored, tree)


def test_values_come_from_the_checkpoint_and_not_from_like(tmp_path: Path) -> None:
    """Restoring into a tree with other values takes only functions from that tree."""
    tree = {"x": jnp.ones(3), "n": np.float64(0.1), "i": 7, "s": "a", "key": jax.random.key(1), "f": jnp.tanh}
    pl.save(tmp_path, 1, tree)
    like = {"x": jnp.zeros(3), "n": np.float64(0.2), "i": 8, "s": "b", "key": jax.random.key(2), "f": jnp.sin}
    restored, _ = pl.restore(tmp_path, like)
    assert_same(restored, {**tree, "f": jnp.sin})


def test_equinox_module_is_restored(tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    pl.save(tmp_path, 1, model)
    restored, _ = pl.restore(tmp_path, eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(1)))
    assert eqx.tree_equal(restored, model)
    assert not eqx.tree_equal(restored, eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(1)))


def abstract(tree: Any, place: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("mesh", MESHES)
def test_arrays_are_restored_into_the_shardings_in_like(mesh: tuple[int, int], kind: str, tmp_path: Path) -> None:
    saved_at = sharding((4, 2), "data", "model")
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {
        "w": jax.device_put(VALUES, saved_at),
        "mu": jax.device_put(VALUES, saved_at.with_memory_kind("pinned_host")),
    }
    pl.save(tmp_path, 1, {**tree, "key": jax.device_put(keys, sharding((4, 2), "data"))})
    place = sharding(mesh, "model", "data", kind=kind)
    key_place = sharding(mesh, "data")
    like = {**abstract(tree, place), "key": jax.ShapeDtypeStruct((8,), keys.dtype, sharding=key_place)}
    restored, _ = pl.restore(tmp_path, like)
    whole = jax.device_put(VALUES, place)
    assert_same(restored, {"w": whole, "mu": whole, "key": jax.device_put(keys, key_place)})
    assert restored["w"].sharding.memory_kind == kind


def test_unsharded_leaves_go_to_the_first_device(tmp_path: Path) -> None:
    tree = {"w": jax.device_put(VALUES, sharding((4, 2), "data")), "key": jax.random.key(0)}
    pl.save(tmp_path, 1, tree)
    restored, _ = pl.restore(tmp_path, abstract(tree, None))
    first = SingleDeviceSharding(jax.devices()[0])
    assert_same(restored, jax.device_put(tree, first))
    # The result of eval_shape has the sharding, but without devices.
    with pytest.raises(
        ValueError, match=r"w: expected a sharding over a jax\.sharding\.Mesh, got one over an abstract mesh"
    ):
        pl.restore(tmp_path, jax.eval_shape(lambda: tree))


@pytest.mark.pairs
def test_steps(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert pl.steps(directory) == []
    for step in (30, 10, 20):
        pl.save(directory, step, {"x": jnp.float32(step)}, {"n": step})
    assert pl.steps(directory) == [10, 20, 30]
    like = {"x": jnp.float32(0)}
    assert pl.restore(directory, like)[1] == {"n": 30}
    tree, extra = pl.restore(directory, like, step=10)
    assert (float(tree["x"]), extra) == (10.0, {"n": 10})
    pl.save(directory, 40, like, keep=2)
    assert pl.steps(directory) == [30, 40]
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7: .*committed steps: \[30, 40\]"):
        pl.restore(directory, like, step=7)
    with pytest.raises(CheckpointMissingError, match=r"there is no complete checkpoint in .*none"):
        pl.restore(tmp_path / "none", like)


def test_step_is_replaced_only_on_request(tmp_path: Path) -> None:
    like = {"x": jnp.float32(0)}
    pl.save(tmp_path, 1, {"x": jnp.float32(1)})
    with pytest.raises(FileExistsError, match=r"step 1 already exists in .*; pass overwrite=True to replace it"):
        pl.save(tmp_path, 1, {"x": jnp.float32(2)})
    assert float(pl.restore(tmp_path, like)[0]["x"]) == 1.0
    pl.save(tmp_path, 1, {"x": jnp.float32(2)}, overwrite=True)
    assert float(pl.restore(tmp_path, like)[0]["x"]) == 2.0
    # The state that a kill during a replacement leaves.
    (tmp_path / "00000001").rename(tmp_path / "00000001.replaced")
    with pytest.raises(CheckpointMissingError, match=r"steps \[1\] were being replaced; the next save"):
        pl.restore(tmp_path, like)
    pl.save(tmp_path, 2, like)
    assert pl.steps(tmp_path) == [1, 2]


def test_extra_is_json(tmp_path: Path) -> None:
    tree = {"x": jnp.zeros(2), "n": 3}
    pl.save(tmp_path, 1, tree, {"a": [1, 2.5, None, True], "b": {"c": "d"}})
    assert pl.restore(tmp_path, tree)[1] == {"a": [1, 2.5, None, True], "b": {"c": "d"}}
    for wrong in ({"x": float("nan")}, {"x": object()}, {"$leaves": {}}):
        with pytest.raises((TypeError, ValueError)):
            pl.save(tmp_path, 2, tree, wrong)
    assert os.listdir(tmp_path) == ["00000001"]


def test_unsupported_leaves_are_named(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Unregistered:
        x: int

    with pytest.raises(TypeError, match=r"^a/b: expected an array.*got Unregistered; register your own classes"):
        pl.save(tmp_path, 1, {"a": {"b": Unregistered(1)}})
    with pytest.raises(TypeError, match=r"^the tree itself is being traced"):
        jax.jit(lambda x: pl.save(tmp_path, 1, x))(jnp.ones(2))
    with pytest.raises(ValueError, match="two leaves of the tree have the same path"):
        pl.save(tmp_path, 1, {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)})
    assert os.listdir(tmp_path) == []


# --- one format ------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_format_is_shared_with_the_checkpointer(tmp_path: Path) -> None:
    """Both can read each other's checkpoints."""
    tree = {"w": jax.device_put(VALUES, sharding((4, 2), "data")), "n": jnp.int32(3)}
    pl.save(tmp_path, 1, tree, {"a": 1})
    with Checkpointer(directory=tmp_path) as checkpointer:
        restored = checkpointer.restore(1, tree)
        assert restored.extra == {"a": 1}
        assert_same(restored.state, tree)
        checkpointer.save(2, tree, {"a": 2})
    restored_tree, extra = pl.restore(tmp_path, tree)
    assert extra == {"a": 2}
    assert_same(restored_tree, tree)


def test_frozen_parameters_need_the_checkpointer(tmp_path: Path) -> None:
    state = {"frozen": {"w": jnp.ones(2)}, "parameter": {"w": jnp.ones(2)}}
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
    with pytest.raises(CheckpointMismatchError, match=r"frozen parameters.*Checkpointer\.restore"):
        pl.restore(tmp_path, state)


# --- other trees -----------------------------------------------------------------------------------------------------


def test_mismatched_tree_is_refused_with_the_nearest_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "block": {"weights": jnp.ones((2, 3)), "bias": jnp.ones(3)},
        "n": 1,
        "key": jax.random.key(0),
        "x": np.ones(2),
    }
    pl.save(tmp_path, 1, tree)
    like = {
        "block": {"weight": jnp.ones((2, 3)), "bias": jnp.ones(4)},
        "n": 1.0,
        "key": jax.random.key(0, impl="rbg"),
        "x": jnp.ones(2),
    }

    def refuse_read(*_: Any) -> Any:
        raise AssertionError("arrays are read")

    monkeypatch.setattr("plimsoll.framework.checkpoint.chunk_store.read", refuse_read)
    with pytest.raises(CheckpointMismatchError) as error:
        pl.restore(tmp_path, like)
    lines = str(error.value).splitlines()
    assert lines[0].endswith(
        "has different leaves than `like`: 1 missing, 1 extra, 1 reshaped, 3 other dtype of 5 leaves"
    )
    assert [line.split() for line in lines[2:-1]] == [
        ["block/bias", "reshaped", "float32[3]", "float32[4]"],
        ["block/weight", "missing", "-", "float32[2,3]"],
        ["block/weights", "extra", "float32[2,3]", "-"],
        ["key", "other", "dtype", "key:threefry2x32[]", "key:rbg[]"],
        ["n", "other", "dtype", "Python:int[]", "Python:float[]"],
        ["x", "other", "dtype", "numpy:float64[2]", "float32[2]"],
    ]
    assert lines[-1].strip() == "block/weight: the nearest in the checkpoint is block/weights"
    # Restoring the right tree does call this reader.
    with pytest.raises(AssertionError, match="arrays are read"):
        pl.restore(tmp_path, tree)


# --- damage ----------------------------------------------------------------------------------------------------------


def flip_a_bit(step_directory: Path) -> None:
    """Flip a bit in the file that holds the bytes of the arrays."""
    files = [path for path in step_directory.glob("state-*/**/*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    assert len(content) == 64 * 128 * 4
    content[random.Random(0).randrange(len(content))] ^= 1
    largest.write_bytes(content)


@pytest.mark.pairs
def test_bit_flip_error_names_the_leaf(tmp_path: Path) -> None:
    """Also, no other step is restored silently instead."""
    tree = {"small": jnp.ones(3), "model": {"large": jnp.arange(64.0 * 128).reshape(64, 128)}, "n": 5}
    for step in (1, 2):
        pl.save(tmp_path, step, tree)
    flip_a_bit(tmp_path / "00000002")
    named = r"1 of 2 arrays differ from what was saved: model/large; earlier steps: \[1\]"
    with pytest.raises(CheckpointCorruptError, match=named):
        pl.restore(tmp_path, tree)
    restored, _ = pl.restore(tmp_path, tree, step=1)
    assert_same(restored, tree)


def test_a_changed_scalar_is_noticed(tmp_path: Path) -> None:
    """Python numbers are stored in the manifest, which has a digest."""
    tree = {"n": 5, "x": jnp.ones(2)}
    pl.save(tmp_path, 1, tree)
    manifest = tmp_path / "00000001" / "manifest" / "data.json"
    manifest.write_text(manifest.read_text().replace('"value": "5"', '"value": "6"'))
    assert '"value": "6"' in manifest.read_text()
    with pytest.raises(CheckpointCorruptError, match="its digest does not match"):
        pl.restore(tmp_path, tree)


SAVER = """
import faulthandler, sys
# A process that hangs ends with the stacks of its threads; the test then reads the end of its output.
faulthandler.dump_traceback_later(300, exit=True)
import jax.numpy as jnp
import plimsoll as pl
directory = sys.argv[1]
step = 0
while True:
    step += 1
    print("saving", step, flush=True)
    pl.save(directory, step, {"w": jnp.full((512, 1024), step, jnp.float32), "n": step})
    print("saved", step, flush=True)
"""


@pytest.mark.pairs
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kill_during_a_save_keeps_earlier_steps(seed: int, tmp_path: Path) -> None:
    """Send SIGKILL at a different time in each save; for seed 0 while a partly written step is on disk."""
    command = [sys.executable, "-c", SAVER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert job.stdout is not None
        committed = 0
        while committed < 2:
            word, number = job.stdout.readline().split()
            committed = int(number) if word == "saved" else committed
        assert job.stdout.readline() == "saving 3\n"
        if seed == 0:
            while not (tmp_path / "00000003.writing").exists():
                assert not (tmp_path / "00000003").exists(), "the save was over before it was seen"
                # If the process has died, waiting would never end.
                assert job.poll() is None
        else:
            time.sleep(random.Random(seed).random() * 0.05)
    finally:
        job.kill()
        job.communicate()
    complete_steps = pl.steps(tmp_path)
    assert complete_steps[:2] == [1, 2]
    like = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32), "n": 0}
    for step in complete_steps:
        restored, _ = pl.restore(tmp_path, like, step)
        assert restored["n"] == step
        assert (np.asarray(restored["w"]) == step).all()
    # The next save removes what the kill left.
    newest = complete_steps[-1] + 1
    pl.save(tmp_path, newest, {"w": jnp.zeros(1)})
    assert sorted(os.listdir(tmp_path)) == [f"{step:08d}" for step in [*complete_steps, newest]]


# --- imports ---------------------------------------------------------------------------------------------------------


SLOW = ("orbax", "tensorstore", "grain", "tokenizers", "pyarrow", "matplotlib", "rich")


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("names", "late"),
    [
        (("save", "restore", "steps"), SLOW),
        (
            ("reversible_scan", "additive_coupling", "reconstruction_error"),
            (*SLOW, "ml_collections", "plimsoll.framework.checkpoint"),
        ),
    ],
    ids=["checkpoints", "reversible"],
)
def test_importing_them_is_cheap(names: tuple[str, ...], late: tuple[str, ...]) -> None:
    """Orbax and other slow packages are not imported before something is saved."""
    wanted = ", ".join(f"pl.{name}" for name in names)
    code = f"import sys, plimsoll as pl; {wanted}; print([name for name in {late} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
