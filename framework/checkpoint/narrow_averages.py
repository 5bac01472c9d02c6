"""Moving averages in bfloat16: earlier versions stored the averages in the dtype of the weights, not in float32."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.checkpoint.directory import LeafRecord
from plimsoll.framework.checkpoint.storage import AbstractArrays, Arrays
from plimsoll.framework.layout import SplitArray, SplitSpec


def narrow(specs: AbstractArrays, stored: Mapping[str, LeafRecord]) -> AbstractArrays:
    """Return the specs of a checkpoint's arrays, in bfloat16 for averages that it stores in bfloat16.

    Args:
        specs: specs of the arrays to restore, by path.
        stored: records of the arrays in the checkpoint, by path.
    """
    narrow_specs = dict(specs)
    for name, x in specs.items():
        is_average = name.startswith("ema/")
        in_bfloat16 = name in stored and stored[name].dtype == "bfloat16"
        if is_average and in_bfloat16 and x.dtype == jnp.float32:
            if isinstance(x, SplitSpec):
                narrow_specs[name] = x.astype(jnp.bfloat16)
            else:
                narrow_specs[name] = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)
    return narrow_specs


def widen(arrays: Arrays, specs: AbstractArrays) -> None:
    """Replace arrays that were read with the specs of `narrow` by arrays with the original specs."""
    for name, spec in specs.items():
        x = arrays[name]
        if x.dtype == spec.dtype:
            continue
        if isinstance(x, SplitArray):
            arrays[name] = SplitArray(tuple(_cast(part, spec.dtype) for part in x.parts))
        else:
            arrays[name] = _cast(x, spec.dtype)


def _cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    # In device memory, because arithmetic on host memory does not compile.
    on_device = jax.device_put(x, x.sharding.with_memory_kind("device"))
    return jax.device_put(on_device.astype(dtype), x.sharding)
