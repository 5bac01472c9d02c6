"""Meshes over TPU slices and tori, on topologies of the real compiler: which axes use the slow networks."""

import functools
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from jax.experimental import mesh_utils

from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.devices.accelerators import accelerator_name
from plimsoll.framework.devices.mesh import AXES, MeshShape, island, mesh_text
from plimsoll.framework.plan.targets import resolve, set_environment


@pytest.fixture
def build():
    """Return a function (target, sizes) -> the mesh's array of devices."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'plimsoll-train[plan-tpu]'")
    set_environment("v5e-16")
    return lambda name, **sizes: MeshShape(**sizes).build(resolve(name).devices()).devices


def lines(devices: np.ndarray, axis: str, attribute: str = "slice_index") -> np.ndarray:
    """Return [L, N]: the slices of the devices along an axis, for all positions along the other axes."""
    slices = np.vectorize(lambda device: getattr(device, attribute))(devices)
    return np.moveaxis(slices, AXES.index(axis), -1).reshape(-1, devices.shape[AXES.index(axis)])


@pytest.mark.parametrize(
    ("name", "sizes", "across"),  # across: number of slices that a line of devices along each axis spans
    [
        ("2xv5e-256", {}, {"fsdp": 2}),
        ("2xv5e-256", {"data": 2}, {"data": 2, "fsdp": 1}),
        ("2xv5e-256", {"pipe": 2}, {"pipe": 2, "data": 1, "fsdp": 1}),
        ("2xv5e-256", {"pipe": 4}, {"pipe": 2, "fsdp": 1}),
        ("2xv5e-256", {"data": 8, "model": 4}, {"data": 2, "fsdp": 1, "model": 1}),
        ("4xv5e-16", {"data": 2}, {"data": 2, "fsdp": 2}),  # 2 x 2: data takes as much as it can
        ("3xv5e-4", {"fsdp": 4, "model": 3}, {"fsdp": 1, "model": 3}),
        ("2xtpu7x-16", {"model": 2}, {"fsdp": 2, "model": 1}),
    ],
)
def test_the_first_axes_lie_across_slices(build, name, sizes, across):
    devices = build(name, **sizes)
    assert len({device.id for device in devices.flat}) == resolve(name).num_devices
    for axis in AXES:
        touched = {len(set(line)) for line in lines(devices, axis)}
        assert touched == {across.get(axis, 1)}, axis


@pytest.mark.parametrize(
    ("name", "sizes", "inside", "across"),
    [
        ("2xv5e-256", {}, (1, 1, 256, 1, 1, 1), (1, 1, 2, 1, 1, 1)),
        ("2xv5e-256", {"data": 8, "model": 4}, (1, 4, 16, 1, 1, 4), (1, 2, 1, 1, 1, 1)),
        ("4xv5e-16", {"data": 8, "fsdp": 8}, (1, 2, 8, 1, 1, 1), (1, 4, 1, 1, 1, 1)),
    ],
)
def test_device_order_matches_jax_for_slices(build, name, sizes, inside, across):
    order = functools.partial(mesh_utils.create_hybrid_device_mesh, inside, across, resolve(name).devices())
    try:
        expected = order()
    except NotImplementedError:
        expected = order(allow_split_physical_axes=True)
    ids = np.vectorize(lambda device: device.id)
    np.testing.assert_array_equal(ids(build(name, **sizes)), ids(expected))


def test_axis_may_split_a_torus_dimension(build):
    devices = build("v5e-16", data=2)  # fsdp=8 of 4x4 chips
    assert devices.shape == (1, 2, 8, 1, 1, 1)
    assert len({device.id for device in devices.flat}) == 16
    halves = [{device.coords[axis] // 2 for device in devices[0, 0].flat} for axis in (0, 1)]
    assert sorted(map(len, halves)) == [1, 2]  # each replica is one half of the torus and not scattered over all of it


# --- axes across slices, set in the config ----------------------------------------------------------------------------


def test_cross_slice_axes_can_be_configured(build):
    devices = build("2xv5e-16", data=2, fsdp=16, across={"fsdp": 2})
    assert {len(set(line)) for line in lines(devices, "data")} == {1}
    assert {len(set(line)) for line in lines(devices, "fsdp")} == {2}
    devices = build("4xv5e-4", data=4, model=4, across={"data": 2, "model": 2})
    assert {len(set(line)) for line in lines(devices, "data")} == {2}
    assert {len(set(line)) for line in lines(devices, "model")} == {2}


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "2xv5e-16",
            {"data": 2, "across": {"data": 4}},
            r"^mesh\.across = {'data': 4}: product 4 is not the number of slices \(of GPUs: hosts\), 2; "
            r"nearest: {'data': 2}$",
        ),
        ("2xv5e-16", {"across": {"data": 2}}, r"mesh\.across\.data = 2 does not divide mesh\.data = 1; nearest: \[1\]"),
        (
            "v5e-16",
            {"across": {"fsdp": 2}},
            r"product 2 is not the number of slices \(of GPUs: hosts\), 1; leave it out",
        ),
    ],
)
def test_mesh_size_mismatch_names_both_numbers(build, name, sizes, message):
    with pytest.raises(ValueError, match=message):
        build(name, **sizes)
    with pytest.raises(ValueError, match=message):  # the same error without devices
        MeshShape(**sizes).split(MeshShape(**sizes).resolve(resolve(name).num_devices), resolve(name).num_slices)


def test_unknown_axis_is_refused_immediately():
    with pytest.raises(ValueError, match=r"^across\.dta: no such axis; did you mean 'data'\?"):
        MeshShape(across={"dta": 2})
    config = config_for(MeshShape)
    with pytest.raises(ConfigError, match=r"across\.data: expected an integer > 0, given 0"):
        config.override("across.data", "0")
    config.override("across.data", "2")
    assert config.instantiate().across == {"data": 2}


# --- GPUs: hosts take the role of TPU slices --------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A device like those of `jax.devices()` in a real run with several processes."""

    id: int
    process_index: int
    slice_index: int  # one per host, by its boot id: the same for all processes on that host
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def gpus(processes: list[list[int]]) -> list[Any]:
    """Return the devices in JAX's order, two per process; processes[host] lists the processes of a host."""
    host = {process: index for index, own in enumerate(processes) for process in own}
    return [Gpu(2 * process + i, process, host[process]) for process in sorted(host) for i in range(2)]


@pytest.mark.parametrize("processes", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [0, 2]]])
@pytest.mark.parametrize(
    ("sizes", "across"),
    [
        ({"data": 2}, {"data": 2}),
        ({}, {"fsdp": 2}),
        ({"data": 2, "model": 2}, {"data": 2}),
        ({"model": 4}, {"fsdp": 2}),
    ],
)
def test_the_last_axes_stay_within_a_host(processes, sizes, across):
    """This also holds if a scheduler assigns processes to the hosts round-robin."""
    devices = MeshShape(**sizes).build(gpus(processes)).devices
    assert len(set(devices.flat)) == 8
    for axis in AXES:
        assert {len(set(line)) for line in lines(devices, axis)} == {across.get(axis, 1)}, axis


def test_hosts_with_unequal_sizes_are_refused():
    with pytest.raises(ValueError, match=r"expected the same number of devices in each slice .*, given \[4, 2\]"):
        MeshShape().build([*gpus([[0, 1], [2]])])


def test_compile_topology_has_the_hosts_in_a_real_run():
    pytest.importorskip("jax_cuda12_plugin", reason="no CUDA plugin of JAX: pip install 'plimsoll-train[plan-gpu]'")
    set_environment("h200x16")
    mesh = MeshShape(data=2).build(resolve("h200x16").devices())
    assert {len(set(line)) for line in lines(mesh.devices, "data", "process_index")} == {2}
    assert {len(set(line)) for line in lines(mesh.devices, "fsdp", "process_index")} == {1}
    assert {island(device) for device in mesh.devices.flat} == {0, 1}
    assert accelerator_name(list(mesh.devices.flat)) == "h200x16"


@pytest.mark.pairs
def test_processes_on_one_machine_share_a_host():
    """Without a TPU, a slice in JAX is a machine, identified by its boot id, and not a process."""
    code = (
        "import sys, jax; from plimsoll.framework.devices.mesh import *; jax.config.update('jax_num_cpu_devices', 2); "
        "jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2])); "
        "print(sorted({(d.process_index, d.slice_index, island(d)) for d in jax.devices()}))"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    runs = [
        subprocess.Popen([sys.executable, "-c", code, address, str(i)], env=kept, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    assert [run.communicate(timeout=120)[0].strip() for run in runs] == ["[(0, 0, 0), (1, 0, 0)]"] * 2


# --- as text ----------------------------------------------------------------------------------------------------------


def test_cross_slice_axes_are_reported():
    sizes = {"data": 2, "fsdp": 256, "model": 1}
    assert mesh_text(sizes, {"data": 2}, "tpu") == "data 2 (between slices)  fsdp 256  model 1"
    assert mesh_text(sizes, {"data": 2, "fsdp": 4}, "gpu") == "data 2 (between hosts)  fsdp 256 (over 4 hosts)  model 1"
    assert mesh_text(sizes, {}, "cpu") == "data 2  fsdp 256  model 1"
