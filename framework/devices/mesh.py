"""The device mesh: axes data, fsdp, expert, seq, model, in that order (model varies fastest, so it gets the nearest
devices).

Devices come in islands with a fast network inside and a slow one between them: TPU slices, and GPUs that NVLink joins
(mostly: of one host). JAX numbers both as `slice_index`, whatever the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from framework.config import PositiveInt, component, did_you_mean
from framework.layout import nearest_divisors

AXES = ("data", "fsdp", "expert", "seq", "model")


@component
class MeshShape:
    """Sizes of the mesh axes; one of them may be -1 and takes what is left.

    Args:
        data: replicas; parameters are copied, sequences are split.
        fsdp: parameters and sequences are split (fully sharded data parallel, ZeRO-3).
        expert: experts of a mixture are split.
        seq: positions of each sequence are split.
        model: heads and hidden units are split (tensor parallel).
        pipe: reserved, 1.
        across: how often each axis is cut between islands, {"data": 2} (elsewhere `dcn_mesh_shape`). Without it the
            first axes are, as often as they can be: along data and fsdp the least has to go over the slow network.
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
        across: dict[str, PositiveInt] = {},  # noqa: B006
    ):
        self.across = across
        self.sizes: dict[str, int] = dict(zip(AXES, (data, fsdp, expert, seq, model), strict=True))
        if pipe != 1:
            raise ValueError(f"pipe: expected 1 (pipeline parallelism is reserved), given {pipe}")
        for axis, size in self.sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"{axis}: expected -1 (what is left) or at least 1, given {size}")
        for axis in across:
            if axis not in AXES:
                raise ValueError(f"across.{axis}: no such axis{did_you_mean(axis, AXES)}")
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

    def cut(self, sizes: dict[str, int], islands: int) -> dict[str, int]:
        """How often each axis is cut between so many islands; only those that are. Raises ValueError: not as said."""
        cuts, left = dict[str, int](), islands
        for axis, size in sizes.items():
            cuts[axis] = math.gcd(size, left)
            left //= cuts[axis]
        cuts = {axis: cut for axis, cut in cuts.items() if cut > 1}
        if self.across and (product := math.prod(self.across.values())) != islands:
            nearest = f"{islands}; " + (f"nearest: {cuts}" if cuts else "leave it out")
            given = f"mesh.across = {self.across}: product {product}"
            raise ValueError(f"{given} is not the number of slices (of GPUs: hosts), {nearest}")
        for axis, count in self.across.items():
            if sizes[axis] % count:
                given, nearest = f"mesh.across.{axis} = {count}", nearest_divisors(sizes[axis], count)
                raise ValueError(f"{given} does not divide mesh.{axis} = {sizes[axis]}; nearest: {nearest}")
        return {axis: cut for axis, cut in self.across.items() if cut > 1} or cuts

    def build(self, devices: Sequence[Any]) -> Mesh:
        """The mesh over these devices, neighbours along the last axes. Slow networks lie across the first ones, or
        where `across` says. Raises ValueError: the sizes do not multiply to the number of devices, or do not fit."""
        from jax.experimental.mesh_utils import create_device_mesh  # knows the torus

        sizes, islands = self.resolve(len(devices)), dict[int, list[Any]]()
        for device in sorted(devices, key=island):
            islands.setdefault(island(device), []).append(device)
        if len(set(map(len, islands.values()))) > 1:
            counts = [*map(len, islands.values())]
            raise ValueError(f"expected as many devices in each slice (TPU) or host (GPU), given {counts}")
        cuts = self.cut(sizes, len(islands))
        across = [cuts.get(axis, 1) for axis in AXES]
        inside = [size // factor for size, factor in zip(sizes.values(), across, strict=True)]
        try:
            parts = [create_device_mesh(inside, own) for own in islands.values()]
        except NotImplementedError:  # data=2, fsdp=8 on 4x4 chips: no whole dimension of the torus is an axis
            parts = [create_device_mesh(inside, own, allow_split_physical_axes=True) for own in islands.values()]
        both = np.stack(parts).reshape(*across, *inside)
        pairs = [dim for axis in range(len(AXES)) for dim in (axis, len(AXES) + axis)]  # an axis: across, then inside
        return Mesh(both.transpose(pairs).reshape(*sizes.values()), AXES)


def island(device: Any) -> int:
    """The island of a device, from 0. A GPU of a topology that is not here has it in its coordinates alone."""
    of_gpu = device.platform == "gpu" and (getattr(device, "coords", None) or [0])[0]
    return getattr(device, "slice_index", None) or of_gpu or 0


def mesh_text(sizes: Mapping[str, int], cuts: Mapping[str, int], platform: str) -> str:
    """`data 2 (between slices)  fsdp 256`."""
    islands = "slices" if platform == "tpu" else "hosts"
    where = {axis: f" ({'between' if n == sizes[axis] else f'over {n}'} {islands})" for axis, n in cuts.items()}
    return "  ".join(f"{axis} {size}{where.get(axis, '')}" for axis, size in sizes.items())
