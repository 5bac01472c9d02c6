"""The tiles in which a TPU stores an array, where they are not the compiler's own choice."""

from __future__ import annotations

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from framework.layout.specs import TensorSpec

# Rows and columns of a tile, and how many rows share a word of 4 bytes.
_BYTE_TILES = ((8, 128), (4, 1))


def tiled(spec: TensorSpec, sharding: NamedSharding) -> Format | NamedSharding:
    """The sharding of a leaf of which programs take slices, with its tiles where they are not to be the default.

    XLA for TPU (libtpu 0.0.42) stores single bytes in tiles of 32 rows, but has arithmetic with float32 on tiles of 8.
    It changes the tiles of a stack in host memory before it takes one layer: all of the stack goes to the device and
    back, for each layer. So bytes on the host have tiles of 8 rows from the start.
    """
    is_byte_matrix = spec.dtype.itemsize == 1 and len(spec.shape) > 1
    platform = sharding.mesh.devices.flat[0].platform
    if spec.memory_kind != "pinned_host" or not is_byte_matrix or platform != "tpu":
        return sharding
    row_major = tuple(range(len(spec.shape)))
    return Format(Layout(row_major, _BYTE_TILES), sharding)


def with_tiles(array: jax.Array, place: Format | NamedSharding) -> jax.Array:
    """The array in the tiles of its place; the array that was given is gone where they are other ones."""
    if not isinstance(place, Format) or array.format.layout == place.layout:
        return array
    return jax.device_put(array, place, donate=True)
