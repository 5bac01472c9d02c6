"""Meshes over TPU slices and tori, on topologies of the real compiler: where slow networks end up."""

import numpy as np
import pytest

from framework.mesh import AXES, MeshShape
from framework.plan.targets import environment, resolve


@pytest.fixture
def build():
    """(target, sizes) -> the array of its devices."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'plimsoll-train[plan-tpu]'")
    environment("v5e-16")
    return lambda name, **sizes: MeshShape(**sizes).build(resolve(name).devices()).devices


def lines(devices: np.ndarray, axis: str) -> np.ndarray:
    """[L, N]: the slices of the devices along an axis, for all positions along the others."""
    slices = np.vectorize(lambda device: device.slice_index)(devices)
    return np.moveaxis(slices, AXES.index(axis), -1).reshape(-1, devices.shape[AXES.index(axis)])


@pytest.mark.parametrize(
    ("name", "sizes", "across"),  # across: how many slices a line of devices along each axis touches
    [
        ("2xv5e-256", {}, {"fsdp": 2}),
        ("2xv5e-256", {"data": 2}, {"data": 2, "fsdp": 1}),
        ("2xv5e-256", {"data": 8, "model": 4}, {"data": 2, "fsdp": 1, "model": 1}),
        ("4xv5e-16", {"data": 2}, {"data": 2, "fsdp": 2}),  # 2 x 2: data takes what it can
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


def test_an_axis_may_be_a_part_of_a_dimension_of_the_torus(build):
    devices = build("v5e-16", data=2)  # fsdp=8 of 4x4 chips
    assert devices.shape == (2, 8, 1, 1, 1)
    assert len({device.id for device in devices.flat}) == 16
    halves = [{device.coords[axis] // 2 for device in devices[0].flat} for axis in (0, 1)]
    assert sorted(map(len, halves)) == [1, 2]  # a replica is a half of the chips, not scattered over all of them
