"""The rows of the global batch: which rows each process reads, and how they are transferred to the devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from plimsoll.framework.data.batches import Pipeline, Shapes
from plimsoll.framework.layers.base import batch_specs
from plimsoll.framework.layout import StateLayout, TensorSpec

Batch = dict[str, jax.Array]  # global arrays [B, ...] by name


class BatchRows:
    """The rows of a batch on the mesh of a layout.

    Args:
        data: pipeline that produces the batches.
        arrays: `Experiment.batch_arrays`, which returns the arrays of a batch as a step sees them.
        layout: layout with the mesh and the sharding of batch arrays over it.
    """

    def __init__(self, data: Pipeline, arrays: Callable[..., Shapes], layout: StateLayout):
        self._data = data
        self._arrays = arrays
        self._layout = layout

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays in one global batch as the training step sees it, by name."""
        return batch_specs(self._arrays())

    @property
    def evaluation_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays in one global evaluation batch, by name."""
        return batch_specs(self._arrays(evaluation=True))

    @property
    def delivered_specs(self) -> dict[str, TensorSpec]:
        """The specs of the arrays in one global evaluation batch as the data delivers it, before a batch transform."""
        return batch_specs(self._data.arrays(evaluation=True))

    @cached_property
    def sharding(self) -> dict[str, NamedSharding]:
        """The sharding of each array of a training or evaluation batch, before and after a batch transform."""
        specs = {**self.delivered_specs, **self.evaluation_specs}
        return {name: self._layout.sharding(spec) for name, spec in specs.items()}

    @cached_property
    def local(self) -> np.ndarray:
        """int[R]: the rows of the global batch that this process's devices hold, in order."""
        return self.rows_by_process[jax.process_index()]

    @cached_property
    def rows_by_process(self) -> dict[int, np.ndarray]:
        """`local` for every process that has devices of the mesh, by process index."""
        shape = self.specs["weights"].shape
        all_rows = np.arange(shape[0])
        rows_by_process = dict[int, list[np.ndarray]]()
        indices = self.sharding["weights"].devices_indices_map(shape)
        for device, index in indices.items():
            device_rows = all_rows[index[0]]
            rows_by_process.setdefault(device.process_index, []).append(device_rows)
        # Devices along mesh axes that do not split a batch hold the same rows, so a row may occur several times.
        unique_rows = {}
        for process, rows in sorted(rows_by_process.items()):
            unique_rows[process] = np.unique(np.concatenate(rows))
        return unique_rows

    def put(self, local: dict[str, np.ndarray]) -> Batch:
        """Turn this process's rows of a batch (host arrays [R, ...]) into global arrays [B, ...]."""
        size = self._data.global_batch_size
        shardings = {name: self.sharding[name] for name in local}
        if len(self.local) == size:
            return jax.device_put(local, shardings)

        def read_shard(array: np.ndarray, index: Any) -> np.ndarray:
            # The index counts rows of the global batch, but the host array holds only this process's rows.
            global_rows = np.arange(size)[index[0]]
            local_rows = np.searchsorted(self.local, global_rows)
            return array[(local_rows, *index[1:])]

        batch = {}
        for name, array in local.items():
            shape = (size, *array.shape[1:])
            batch[name] = jax.make_array_from_callback(shape, shardings[name], partial(read_shard, array))
        return batch
