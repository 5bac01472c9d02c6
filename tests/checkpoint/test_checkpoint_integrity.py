"""Checksums: they match an independent reference, detect any flipped bit, and are the same on any mesh and memory."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from plimsoll.framework.checkpoint import integrity

M32 = (1 << 32) - 1
DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int16", "int8", "uint8", "bool", "float8_e4m3fn"]
DTYPES += ["int4", "complex64"]


def finalize(h, s, f):
    h = (h ^ (h >> s[0])) * f[0] & M32
    h = (h ^ (h >> s[1])) * f[1] & M32
    return h ^ (h >> s[2])


def reference(words_of_elements) -> str:
    """Compute the definition element by element in Python integers: [[word, ...], ...] -> hex."""
    a = b = 0
    for i, words in enumerate(words_of_elements):
        low, high = i & M32, i >> 32
        for k, word in enumerate(words):
            x = low * 0x9E3779B1 & M32 ^ high * 0x85EBCA77 & M32 ^ k * 0x27D4EB2F & M32
            y = (low ^ 0x6A09E667) * 0xC2B2AE3D + high * 0x165667B1 + k & M32
            a += finalize(word ^ x, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35))
            b += finalize(word + y & M32, (16, 15, 16), (0x7FEB352D, 0x846CA68B))
    return f"{a & M32:08x}{b & M32:08x}"


def words(x: np.ndarray) -> list[list[int]]:
    size = x.dtype.itemsize
    if x.dtype == ml_dtypes.int4:
        return [[w] for w in x.astype(np.float32).reshape(-1).view(np.uint32).tolist()]
    if size == 8:
        return np.ascontiguousarray(x).reshape(-1).view(np.uint32).reshape(-1, 2).tolist()
    return [
        [w] for w in np.ascontiguousarray(x).reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size]).tolist()
    ]


def sample(dtype: str, shape=(8, 6)) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 256, (*shape, 8), dtype=np.uint8)
    if dtype == "bool":
        return values[..., 0] > 127
    if dtype == "int4":
        return (values[..., 0] % 16).astype(np.int8).__sub__(8).astype(ml_dtypes.int4)
    if dtype == "complex64":
        return values.view(np.uint32).astype(np.float32).view(np.complex64)[..., 0]
    return np.ascontiguousarray(values.view(jnp.dtype(dtype))[..., 0])


def lower(leaves):
    return integrity._program.lower(*integrity.arguments(leaves))


def checksum(x) -> str:
    return integrity.checksums({"x": x})["x"]


@pytest.fixture(scope="module")
def meshes():
    return {shape: jax.make_mesh(shape, ("a", "b")) for shape in [(4, 2), (2, 4), (8, 1)]}


def test_every_dtype_equals_the_reference():
    """Any bits are allowed, NaNs included: the values take part in no arithmetic."""
    arrays = {dtype: jnp.asarray(sample(dtype)) for dtype in DTYPES}
    assert [str(x.dtype) for x in arrays.values()] == DTYPES
    assert integrity.checksums(arrays) == {dtype: reference(words(sample(dtype))) for dtype in DTYPES}


def test_wide_dtypes_equal_the_reference():
    with jax.enable_x64(True):
        arrays = {dtype: sample(dtype) for dtype in ("float64", "int64")}
        on_device = {dtype: jnp.asarray(x) for dtype, x in arrays.items()}
        assert integrity.checksums(on_device) == {dtype: reference(words(x)) for dtype, x in arrays.items()}


def test_shapes_equal_the_reference():
    shapes = [(), (1,), (0,), (0, 4), (3, 0, 2), (7,), (2, 3, 5), (1, 1, 1)]
    arrays = {str(s): np.asarray(sample("uint32", s)) for s in shapes}
    found = integrity.checksums({name: jnp.asarray(x) for name, x in arrays.items()})
    assert found == {name: reference(words(x)) for name, x in arrays.items()}
    assert list(found) == list(arrays)
    assert found["(0,)"] == "0" * 16
    assert integrity.checksums({}) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8"])
def test_each_single_bit_flip_changes_both_lanes(dtype):
    """Flips every bit, not a sample: the mix is a bijection of the word."""
    x = sample(dtype, (3, 2))
    raw = x.view(np.uint8).reshape(-1)
    bits = 1 if dtype == "bool" else 8
    flipped = np.stack([x] * (raw.size * bits))
    for i in range(len(flipped)):
        flipped[i].reshape(-1).view(np.uint8)[i // bits] ^= 1 << i % bits
    good = checksum(jnp.asarray(x))
    lanes = jax.jit(jax.vmap(lambda y: integrity._sum(y, 0, 0, False)))(jnp.asarray(flipped))
    for lane, text in zip(lanes, (good[:8], good[8:]), strict=True):
        assert len(lane) == raw.size * bits
        assert int(text, 16) not in np.asarray(lane).tolist()


def test_mixing_is_a_bijection_on_each_half_word():
    """2^16 neighboring words, in each half, map to as many distinct words in both lanes."""
    for shift in (0, 16):
        word = jnp.arange(1 << 16, dtype=jnp.uint32) << shift
        for lane in integrity._mix(word, jnp.uint32(123456789), jnp.uint32(0), 0):
            assert len(np.unique(np.asarray(lane))) == 1 << 16


def test_order_matters():
    x = jnp.arange(12.0).reshape(3, 4)
    good = checksum(x)
    assert checksum(x[::-1]) != good
    assert checksum(x.at[0, 0].set(x[0, 1]).at[0, 1].set(x[0, 0])) != good
    assert checksum(x.reshape(12)) == good, "row-major: a reshape changes nothing"


@pytest.mark.pairs
def test_same_on_any_mesh_and_memory_kind(meshes, monkeypatch):
    x = np.random.default_rng(1).standard_normal((16, 8, 24)).astype(np.float32)
    expected = reference(words(x))
    monkeypatch.setattr(integrity, "_CHUNK_BYTES", 1 << 10)
    shardings = {"one": SingleDeviceSharding(jax.devices()[3])}
    specs = [PartitionSpec(), PartitionSpec("a"), PartitionSpec(None, "b", "a"), PartitionSpec(("a", "b"))]
    for kind, shape in [("device", (4, 2)), ("device", (8, 1)), ("pinned_host", (4, 2)), ("unpinned_host", (2, 4))]:
        for spec in specs:
            shardings[f"{kind}{shape}{spec}"] = NamedSharding(meshes[shape], spec, memory_kind=kind)
    arrays = {name: jax.device_put(x, sharding) for name, sharding in shardings.items()}
    pieces = {name: integrity.count_chunks(array) for name, array in arrays.items()}
    assert pieces[f"pinned_host(4, 2){specs[0]}"] == 16
    assert pieces[f"pinned_host(4, 2){specs[1]}"] == 1
    by_mesh: dict = {}
    for name, array in arrays.items():
        by_mesh.setdefault(getattr(array.sharding, "mesh", None), {})[name] = array
    for group in by_mesh.values():
        assert integrity.checksums(group) == dict.fromkeys(group, expected)


def test_indices_beyond_32_bits(monkeypatch):
    """The arithmetic of a leaf with 2^34 elements, which is not created, matches Python's, carries included."""
    rng = np.random.default_rng(2)
    i = rng.integers(0, 1 << 32, 1000, dtype=np.uint64)
    for factor in [1, 0xFFFFFFFF, 1 << 32, (1 << 33) + 12345, 0xDEADBEEFCAFE]:
        low, high = integrity._multiply(jnp.asarray(i.astype(np.uint32)), factor)
        exact = [int(v) * factor & ((1 << 64) - 1) for v in i]
        assert (np.asarray(high).astype(np.uint64) << 32 | np.asarray(low)).tolist() == exact
    # A row of a long leaf may start at any 64-bit index, and its elements count on across the carry.
    x = sample("uint32", (64,))
    start = (5 << 32) - 32
    a, b = integrity._sum(jnp.asarray(x), np.uint32(start & M32), np.uint32(start >> 32), True)
    shifted = [finalize_pair(w, start + k) for k, w in enumerate(x.tolist())]
    assert (int(a), int(b)) == (sum(p[0] for p in shifted) & M32, sum(p[1] for p in shifted) & M32)


def finalize_pair(word: int, index: int) -> tuple[int, int]:
    low, high = index & M32, index >> 32
    x = low * 0x9E3779B1 & M32 ^ high * 0x85EBCA77 & M32
    y = (low ^ 0x6A09E667) * 0xC2B2AE3D + high * 0x165667B1 & M32
    return (
        finalize(word ^ x, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)),
        finalize(word + y & M32, (16, 15, 16), (0x7FEB352D, 0x846CA68B)),
    )


def test_a_leaf_over_2_to_the_32_compiles_without_temporaries(meshes):
    """Compile only: 2^33 elements, sharded."""
    sharding = NamedSharding(meshes[4, 2], PartitionSpec("a", "b"))
    leaf = jax.ShapeDtypeStruct((1 << 17, 1 << 16), jnp.bfloat16, sharding=sharding)
    compiled = lower({"x": leaf}).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 16


def test_no_temporaries_and_no_gather(meshes):
    """Compile for leaves of up to 64 MiB on (4, 2): temporaries are scalars, and only scalars are communicated."""
    mesh = meshes[4, 2]
    specs = [PartitionSpec("a", None, "b"), PartitionSpec(None, ("a", "b")), PartitionSpec()]
    leaves = {
        f"{dtype}{spec}": jax.ShapeDtypeStruct((16, 1024, 1024), dtype, sharding=NamedSharding(mesh, spec))
        for dtype in (jnp.float32, jnp.bfloat16)
        for spec in specs
    }
    compiled = lower(leaves).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 16
    moved = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    assert moved, "the devices' sums are exchanged"
    assert all(dtype == "u32" and math.prod(map(int, shape.split(","))) <= 8 for dtype, shape in moved)


def test_host_leaf_is_hashed_in_chunks(meshes, monkeypatch):
    """A host leaf of 64 MiB passes through temporaries of one 1 MiB chunk, a few times over."""
    monkeypatch.setattr(integrity, "_CHUNK_BYTES", 1 << 20)
    sharding = NamedSharding(meshes[8, 1], PartitionSpec(None, "b"), memory_kind="pinned_host")
    leaf = jax.ShapeDtypeStruct((64, 512, 512), jnp.float32, sharding=sharding)
    compiled = lower({"x": leaf}).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20


def test_program_is_compiled_once():
    first, second = jnp.arange(9.0), jnp.arange(9.0) + 1
    good, before = checksum(first), integrity._program._cache_size()
    assert checksum(second) != good
    assert integrity._program._cache_size() == before


def test_typed_key_is_refused_by_name():
    with pytest.raises(TypeError, match=r"counter/rng: expected numbers or booleans, got key<fry>"):
        integrity.checksums({"counter/rng": jax.random.key(0)})


def test_tpu_program_holds_one_chunk_at_a_time(monkeypatch):
    """The real TPU compiler, without a TPU (`pip install libtpu`): a host leaf passes through HBM in chunks."""
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(4, 2), ("a", "b"))
    spec, shape = PartitionSpec(None, "a", "b"), (32, 4096, 11008)
    for kind, limit in (("device", 1 << 20), ("pinned_host", 160 << 20)):
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        leaves = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for name in "a"}
        memory = lower(leaves).compile().memory_analysis()
        size = math.prod(shape) * 4 // 8
        assert (memory.host_argument_size_in_bytes if kind == "pinned_host" else memory.argument_size_in_bytes) >= size
        assert memory.temp_size_in_bytes < limit
        print(f"{kind}: {size / 2**20:.0f} MiB of leaves, {memory.temp_size_in_bytes / 2**20:.2f} MiB of temporaries")
