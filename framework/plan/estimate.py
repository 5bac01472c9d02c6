"""A closed form of what a training step needs: no device, no compiler, a second instead of minutes.

The state is exact (it comes from the layout); gradients, activations and temporaries are a model derived from shapes.
May import: framework.experiment, framework.layout, framework.accelerators, JAX.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh

from framework.accelerators import AcceleratorSpec
from framework.experiment import Experiment
from framework.layout import StateLayout

KEYS: tuple[str, ...] = (
    "parameters",
    "frozen",
    "buffers",
    "gradients",
    "optimizer_state",
    "ema",
    "batch",
    "activations",
    "other",
)
_GROUPS = {
    "parameter": "parameters",
    "frozen": "frozen",
    "buffer": "buffers",
    "optimizer": "optimizer_state",
    "ema": "ema",
    "counter": "other",
}


@dataclass(frozen=True)
class Estimate:
    """Bytes of one device at the instant of the peak, by the keys of a report's breakdown, and of its host's memory."""

    breakdown: dict[str, int]
    host_breakdown: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Of one device."""
        return sum(self.breakdown.values())

    @property
    def host_bytes(self) -> int:
        """In the host's memory, of one device."""
        return sum(self.host_breakdown.values())


def estimate(experiment: Experiment, sizes: dict[str, int], spec: AcceleratorSpec) -> Estimate:
    """What one step of `experiment` needs on each device of a mesh of these sizes (`experiment.mesh.resolve(n)`).

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards.
    """
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    layout = StateLayout(experiment.state_specs(), mesh)
    breakdown, host = dict.fromkeys(KEYS, 0), dict.fromkeys(KEYS, 0)
    for leaf in layout:
        (breakdown if leaf.spec.memory_kind == "device" else host)[_GROUPS[leaf.group]] += leaf.bytes_per_device
    accumulate = experiment.learner.accumulate
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    tokens //= sizes["data"] * sizes["fsdp"] * sizes["seq"]
    breakdown["batch"] = 4 * tokens * (5 if experiment.data.document_mask else 3)
    tokens //= accumulate
    for leaf in layout:
        if leaf.group == "parameter":
            master = experiment.learner.master_dtype if accumulate > 1 else None
            itemsize = leaf.spec.dtype.itemsize
            breakdown["gradients"] += leaf.bytes_per_device // itemsize * (master.itemsize if master else itemsize)
    model = experiment.model
    width, units = model.compute_dtype.itemsize, model.stack.num_units
    unit = sum(math.prod(leaf.shape) for leaf in _leaves(model.stack.unit.parameter_specs())) // sizes["model"]
    rows = sum(leaf.shape[-1] for leaf in _leaves(model.stack.unit.parameter_specs())) // sizes["model"]
    kept = model.dim if experiment.memory.remat == "full" else rows
    breakdown["activations"] = tokens * width * (units * kept + 2 * rows)
    gathered = 2 * unit * width if sizes["fsdp"] > 1 else 0
    breakdown["other"] += gathered + 2 * 4 * min(tokens, model.head.chunk_tokens or tokens) * model.vocab_size
    return Estimate(breakdown, host)


def _leaves(specs: Any) -> list[Any]:
    return [leaf for value in specs.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]
