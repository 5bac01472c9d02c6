"""The device mesh, with the axes pipe, data, fsdp, expert, seq and model, in that order.

The axis model varies fastest, so it gets the nearest devices. The axis pipe varies slowest: only the activations
between two stages of the pipeline cross it, so it is the first to span several islands.

Devices form islands, with a fast network inside and a slow one between them: TPU slices, and groups of GPUs that NVLink
joins (usually those of one host). JAX numbers both kinds as `slice_index`, regardless of the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from plimsoll.framework.config import PositiveInt, component, did_you_mean
from plimsoll.framework.devices.accelerators import Device
from plimsoll.framework.layout import nearest_divisors

AXES = ("pipe", "data", "fsdp", "expert", "seq", "model")


@component
class MeshShape:
    """Sizes of the mesh axes. One of them may be -1, which means all remaining devices.

    Args:
        data: number of replicas; parameters are copied, sequences are sharded (data parallelism).
        fsdp: parameters and sequences are sharded (fully sharded data parallelism, ZeRO-3).
        expert: experts of an MoE layer are sharded (expert parallelism).
        seq: positions of each sequence are sharded (context parallelism). Parameters are sharded over fsdp and seq
            together, where both divide them.
        model: heads and hidden units are sharded (tensor parallelism).
        pipe: layers of the stack are sharded, and the microbatches of learner.accumulate pass from stage to stage
            (pipeline parallelism), see `framework.schedules.pipeline`.
        pipe_chunks: number of chunks of consecutive layers in each stage. With 1, the schedule is 1F1B; with more, it
            is interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473): the pipeline fills and drains in as many
            times fewer layers, and each microbatch crosses the network as many times more often.
        across: number of islands along each axis, such as {"data": 2} (elsewhere called `dcn_mesh_shape`). By default
            the first axes are split between islands as far as possible, because the axes pipe, data and fsdp
            cause the least traffic on the slow network.
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
        pipe_chunks: PositiveInt = 1,
        across: dict[str, PositiveInt] = {},  # noqa: B006
    ):
        self.across = across
        # Keep the order of AXES, which is the order of the mesh's dimensions.
        given = {"pipe": pipe, "data": data, "fsdp": fsdp, "expert": expert, "seq": seq, "model": model}
        self.sizes: dict[str, int] = {axis: given[axis] for axis in AXES}
        if pipe_chunks > 1 and pipe == 1:
            raise ValueError(f"pipe_chunks = {pipe_chunks} with pipe = 1: expected pipe over 1, or pipe_chunks = 1")
        self.pipe_chunks = pipe_chunks
        for axis, size in self.sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"{axis}: expected -1 (all remaining devices) or at least 1, given {size}")
        for axis in across:
            if axis not in AXES:
                raise ValueError(f"across.{axis}: no such axis{did_you_mean(axis, AXES)}")
        num_inferred = sum(size == -1 for size in self.sizes.values())
        if num_inferred > 1:
            raise ValueError(f"expected at most one axis of -1, given {self.sizes}")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Return the sizes for a number of devices, with -1 filled in.

        Raises:
            ValueError: the product of the sizes is not `num_devices`.
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

    def split(self, sizes: dict[str, int], islands: int) -> dict[str, int]:
        """Return the number of islands along each axis, for the axes that span several islands.

        Args:
            sizes: sizes of the axes.
            islands: number of islands.

        Raises:
            ValueError: the product of `across` is not the number of islands, or `across` does not divide the axes.
        """
        splits: dict[str, int] = {}
        remaining_islands = islands
        # Split the first axes as far as possible: pipe, data and fsdp cause the least traffic.
        for axis, size in sizes.items():
            split = math.gcd(size, remaining_islands)
            remaining_islands //= split
            if split > 1:
                splits[axis] = split
        product = math.prod(self.across.values())
        if self.across and product != islands:
            advice = f"nearest: {splits}" if splits else "leave it out"
            setting = f"mesh.across = {self.across}: product {product}"
            raise ValueError(f"{setting} is not the number of slices (of GPUs: hosts), {islands}; {advice}")
        for axis, count in self.across.items():
            if sizes[axis] % count:
                setting = f"mesh.across.{axis} = {count}"
                nearest = nearest_divisors(sizes[axis], count)
                raise ValueError(f"{setting} does not divide mesh.{axis} = {sizes[axis]}; nearest: {nearest}")
        chosen_splits = {axis: split for axis, split in self.across.items() if split > 1}
        return chosen_splits or splits

    def build(self, devices: Sequence[Device]) -> Mesh:
        """Build the mesh over some devices, with neighboring devices along the last axes.

        Islands are split along the first axes, or as `across` specifies.

        Raises:
            ValueError: the product of the sizes is not the number of devices, or the islands do not fit the axes.
        """
        # jax's own function takes the torus of a TPU slice into account.
        from jax.experimental.mesh_utils import create_device_mesh

        sizes = self.resolve(len(devices))
        islands: dict[int, list[Device]] = {}
        for device in sorted(devices, key=island):
            islands.setdefault(island(device), []).append(device)
        counts = [len(island_devices) for island_devices in islands.values()]
        if len(set(counts)) > 1:
            raise ValueError(f"expected the same number of devices in each slice (TPU) or host (GPU), given {counts}")
        splits = self.split(sizes, len(islands))
        across = [splits.get(axis, 1) for axis in AXES]
        inside = [size // factor for size, factor in zip(sizes.values(), across, strict=True)]
        # Adjacent devices of an island's array are network neighbors.
        try:
            meshes = [create_device_mesh(inside, group) for group in islands.values()]
        except NotImplementedError:
            # For example data=2, fsdp=8 on 4x4 chips, where no axis is a whole dimension of the torus.
            meshes = [create_device_mesh(inside, group, allow_split_physical_axes=True) for group in islands.values()]
        # Dimensions: first the islands along each axis, then the devices of an island along each axis.
        device_array = np.stack(meshes).reshape(*across, *inside)
        # Each axis of the mesh combines its islands (outer) and the devices within an island (inner).
        dimensions: list[int] = []
        for axis in range(len(AXES)):
            dimensions += [axis, len(AXES) + axis]
        ordered = device_array.transpose(dimensions)
        return Mesh(ordered.reshape(*sizes.values()), AXES)


def island(device: Device) -> int:
    """Return the number of a device's island, from 0."""
    slice_index = getattr(device, "slice_index", None)
    if slice_index:
        return slice_index
    if device.platform != "gpu":
        return 0
    # For a GPU of an abstract topology, only the coordinates contain the island.
    coordinates = getattr(device, "coords", None) or [0]
    return coordinates[0] or 0


def mesh_text(sizes: Mapping[str, int], splits: Mapping[str, int], platform: str) -> str:
    """Describe a mesh: `data 2 (between slices)  fsdp 256`. The axis pipe is left out if it has size 1."""
    islands = "slices" if platform == "tpu" else "hosts"
    parts: list[str] = []
    for axis, size in sizes.items():
        if axis == "pipe" and size == 1:
            continue
        text = f"{axis} {size}"
        if axis in splits:
            count = splits[axis]
            relation = "between" if count == size else f"over {count}"
            text += f" ({relation} {islands})"
        parts.append(text)
    return "  ".join(parts)
