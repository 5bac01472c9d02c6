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
        # In the order of AXES, which is the order of the mesh's dimensions.
        self.sizes: dict[str, int] = {
            "data": data,
            "fsdp": fsdp,
            "expert": expert,
            "seq": seq,
            "model": model,
        }
        if pipe != 1:
            raise ValueError(f"pipe: expected 1 (pipeline parallelism is reserved), given {pipe}")
        for axis, size in self.sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"{axis}: expected -1 (what is left) or at least 1, given {size}")
        for axis in across:
            if axis not in AXES:
                raise ValueError(f"across.{axis}: no such axis{did_you_mean(axis, AXES)}")
        num_inferred = sum(size == -1 for size in self.sizes.values())
        if num_inferred > 1:
            raise ValueError(f"expected at most one axis of -1, given {self.sizes}")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """The sizes for a number of devices, -1 filled in.

        Raises:
            ValueError: they do not multiply to num_devices.
        """
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        has_inferred = -1 in self.sizes.values()
        if has_inferred and num_devices % fixed == 0:
            sizes = dict(self.sizes)
            for axis, size in self.sizes.items():
                if size == -1:
                    sizes[axis] = num_devices // fixed
            return sizes
        if not has_inferred and fixed == num_devices:
            return dict(self.sizes)
        chosen_sizes = {axis: size for axis, size in self.sizes.items() if size != 1}
        relation = "does not divide" if has_inferred else "is not"
        raise ValueError(
            f"mesh {chosen_sizes}: product {fixed} {relation} the number of devices, {num_devices}; "
            f"nearest: {nearest_divisors(num_devices, fixed)}"
        )

    def cut(self, sizes: dict[str, int], islands: int) -> dict[str, int]:
        """How often each axis is cut between so many islands; only the axes that are cut.

        Raises:
            ValueError: `across` does not multiply to the number of islands, or does not divide the axes.
        """
        cuts: dict[str, int] = {}
        remaining_islands = islands
        # The first axes are cut as often as they can be: over data and fsdp the least has to go.
        for axis, size in sizes.items():
            cut = math.gcd(size, remaining_islands)
            remaining_islands //= cut
            if cut > 1:
                cuts[axis] = cut
        product = math.prod(self.across.values())
        if self.across and product != islands:
            advice = f"nearest: {cuts}" if cuts else "leave it out"
            setting = f"mesh.across = {self.across}: product {product}"
            raise ValueError(f"{setting} is not the number of slices (of GPUs: hosts), {islands}; {advice}")
        for axis, count in self.across.items():
            if sizes[axis] % count:
                setting = f"mesh.across.{axis} = {count}"
                nearest = nearest_divisors(sizes[axis], count)
                raise ValueError(f"{setting} does not divide mesh.{axis} = {sizes[axis]}; nearest: {nearest}")
        chosen_cuts = {axis: cut for axis, cut in self.across.items() if cut > 1}
        return chosen_cuts or cuts

    def build(self, devices: Sequence[Any]) -> Mesh:
        """The mesh over these devices, neighbours along the last axes. Slow networks lie across the first ones, or
        where `across` says.

        Raises:
            ValueError: the sizes do not multiply to the number of devices, or do not fit.
        """
        sizes = self.resolve(len(devices))
        islands = _devices_by_island(devices)
        cuts = self.cut(sizes, len(islands))
        across = [cuts.get(axis, 1) for axis in AXES]
        inside = [size // factor for size, factor in zip(sizes.values(), across, strict=True)]
        meshes = _island_meshes(list(islands.values()), inside)
        # Dimensions: the islands along each axis, and then the devices of an island along each axis.
        device_array = np.stack(meshes).reshape(*across, *inside)
        # Each axis of the mesh is its islands, and within an island its devices.
        dimensions: list[int] = []
        for axis in range(len(AXES)):
            dimensions += [axis, len(AXES) + axis]
        ordered = device_array.transpose(dimensions)
        return Mesh(ordered.reshape(*sizes.values()), AXES)


def _devices_by_island(devices: Sequence[Any]) -> dict[int, list[Any]]:
    """The devices of each island, by its number. Raises ValueError: islands have different numbers of devices."""
    islands: dict[int, list[Any]] = {}
    for device in sorted(devices, key=island):
        islands.setdefault(island(device), []).append(device)
    counts = [len(island_devices) for island_devices in islands.values()]
    if len(set(counts)) > 1:
        raise ValueError(f"expected as many devices in each slice (TPU) or host (GPU), given {counts}")
    return islands


def _island_meshes(islands: list[list[Any]], shape: list[int]) -> list[np.ndarray]:
    """The devices of each island in an array of this shape, so that neighbours in it are neighbours in the network."""
    # jax's own function knows the torus of a TPU slice.
    from jax.experimental.mesh_utils import create_device_mesh

    try:
        return [create_device_mesh(shape, island_devices) for island_devices in islands]
    except NotImplementedError:
        # As for data=2, fsdp=8 on 4x4 chips: there no whole dimension of the torus is an axis.
        return [create_device_mesh(shape, island_devices, allow_split_physical_axes=True) for island_devices in islands]


def island(device: Any) -> int:
    """The island of a device, from 0."""
    slice_index = getattr(device, "slice_index", None)
    if slice_index:
        return slice_index
    if device.platform != "gpu":
        return 0
    # A GPU of a topology that is not of this machine has its island in its coordinates alone.
    coordinates = getattr(device, "coords", None) or [0]
    return coordinates[0] or 0


def mesh_text(
    sizes: Mapping[str, int],
    cuts: Mapping[str, int],
    platform: str,
) -> str:
    """`data 2 (between slices)  fsdp 256`."""
    islands = "slices" if platform == "tpu" else "hosts"
    parts: list[str] = []
    for axis, size in sizes.items():
        text = f"{axis} {size}"
        if axis in cuts:
            count = cuts[axis]
            relation = "between" if count == size else f"over {count}"
            text += f" ({relation} {islands})"
        parts.append(text)
    return "  ".join(parts)
