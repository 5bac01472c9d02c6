"""The device mesh: axes data, fsdp, expert, seq, model, in that order (model varies fastest, so it gets the nearest
devices). May import: framework.layout, JAX.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from framework.layout import nearest_divisors

AXES = ("data", "fsdp", "expert", "seq", "model")


class MeshShape:
    """Sizes of the mesh axes; one of them may be -1 and takes what is left.

    Args:
        data: replicas; parameters are copied, sequences are split.
        fsdp: parameters and sequences are split (fully sharded data parallel, ZeRO-3).
        expert: experts of a mixture are split.
        seq: positions of each sequence are split.
        model: heads and hidden units are split (tensor parallel).
        pipe: reserved, 1.
    """

    def __init__(
        self,
        *,
        data: int = 1,
        fsdp: int = -1,
        expert: int = 1,
        seq: int = 1,
        model: int = 1,
        pipe: int = 1,
    ):
        self.sizes: dict[str, int] = dict(zip(AXES, (data, fsdp, expert, seq, model), strict=True))
        if pipe != 1:
            raise ValueError(f"pipe: expected 1 (pipeline parallelism is reserved), given {pipe}")
        for axis, size in self.sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"{axis}: expected -1 (what is left) or at least 1, given {size}")
        if sum(size == -1 for size in self.sizes.values()) > 1:
            raise ValueError(f"expected at most one axis of -1, given {self.sizes}")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """The sizes for a number of devices, -1 filled in.

        Raises:
            ValueError: they do not multiply to num_devices.
        """
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        given = {axis: size for axis, size in self.sizes.items() if size != 1}
        inferred = [axis for axis, size in self.sizes.items() if size == -1]
        if inferred and num_devices % fixed == 0:
            return {axis: num_devices // fixed if size == -1 else size for axis, size in self.sizes.items()}
        if not inferred and fixed == num_devices:
            return dict(self.sizes)
        relation = "does not divide" if inferred else "is not"
        raise ValueError(
            f"mesh {given}: product {fixed} {relation} the number of devices, {num_devices}; "
            f"nearest: {nearest_divisors(num_devices, fixed)}"
        )

    def build(self, devices: Sequence[Any]) -> Mesh:
        """The mesh over these devices, neighbours along the last axes. Slow networks lie across the first ones.

        Raises:
            ValueError: the sizes do not multiply to the number of devices.
        """
        sizes = self.resolve(len(devices))
        shape = tuple(sizes.values())
        if devices[0].platform == "tpu":
            from jax.experimental import mesh_utils  # knows the torus

            slices = len({getattr(device, "slice_index", 0) for device in devices})
            make = functools.partial(mesh_utils.create_device_mesh, shape, devices)
            if slices > 1:
                across = _across(sizes, slices)
                inside = [size // factor for size, factor in zip(shape, across, strict=True)]
                make = functools.partial(mesh_utils.create_hybrid_device_mesh, inside, across, devices)
            try:
                return Mesh(make(), AXES)
            except NotImplementedError:  # data=2, fsdp=8 on 4x4 chips: no whole dimension of the torus is an axis
                return Mesh(make(allow_split_physical_axes=True), AXES)
        return Mesh(np.asarray(devices).reshape(shape), AXES)


def _across(sizes: dict[str, int], slices: int) -> list[int]:
    """How often each axis is cut between TPU slices: the first axes as often as they can be, `slices` in all.

    The network between slices is slow; along data and fsdp the least has to go over it.
    """
    factors, left = [], slices
    for size in sizes.values():
        factors.append(math.gcd(size, left))
        left //= factors[-1]
    assert left == 1, "slices divide the product of the sizes, so every prime factor of theirs has found an axis"
    return factors
