"""Peak memory of the optimizer update in addition to the state: gradients, and arrays fetched from the host."""

from __future__ import annotations

from collections import Counter

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.layout import OptStateSpec, StateLayout
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.update_locality import UpdateLocality
from plimsoll.framework.plan.backward_bytes import get_stage
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.schedules.chunked_update import BLOCK


def update_bytes(
    split_experiment: SplitExperiment, layout: StateLayout, spec: AcceleratorSpec, resident: int
) -> Counter[str]:
    """Return the bytes by group that a device holds during the update, in addition to the `resident` state and batch.

    Args:
        split_experiment: the experiment, with stacks split into layer ranges.
        layout: layout of its state.
        spec: the accelerator in use.
        resident: bytes of state and batch on the device.
    """
    traits = split_experiment.experiment.memory.traits
    if not traits.updates_in_chunks:
        update = _whole_update(layout, spec, resident)
    else:
        update = _chunked_update(layout, split_experiment)
    if traits.can_offload_gradients:
        for leaf in layout:
            if leaf.group == "parameter" and not split_experiment.releases_gradients(get_stage(leaf)):
                update["gradients"] += leaf.bytes_per_device
    return update


def _whole_update(layout: StateLayout, spec: AcceleratorSpec, resident: int) -> Counter[str]:
    """Return the bytes that an update of the whole state holds in addition to `resident`: gradients and fetched state.

    All offloaded state is fetched together. A non-finite step changes nothing, so the update selects between old and
    new values. For the largest arrays this happens after both exist, unless the device is too small for that; then the
    arrays are handled one at a time.
    """
    offloaded_sizes = [leaf.bytes_per_device for leaf in layout if leaf.spec.memory_kind != "device"]
    # GPUs read and write host memory directly.
    if spec.platform == "gpu" or not offloaded_sizes:
        return Counter()
    moved = Counter(gradients=layout.bytes_per_device("parameter"), optimizer_state=sum(offloaded_sizes))
    selected_bytes = sum(size for size in offloaded_sizes if size == max(offloaded_sizes))
    if spec.limit_bytes is not None:
        free_bytes = spec.limit_bytes - resident - sum(moved.values())
        selected_bytes = selected_bytes if selected_bytes <= free_bytes else 0
    return moved + Counter(activations=selected_bytes)


def _locality_by_tensor(learner: Learner) -> dict[str, UpdateLocality]:
    """Return {"stage/path" of a parameter: update locality of its group's optimizer}."""
    locality_by_tensor = {}
    for group in learner.groups:
        update_locality = learner.update_locality(group)
        for path in group.paths:
            locality_by_tensor[f"{group.path_prefix}{path}"] = update_locality
    return locality_by_tensor


def _chunked_update(layout: StateLayout, split_experiment: SplitExperiment) -> Counter[str]:
    """Return the bytes of a chunked update: the offloaded state of two chunks being fetched and two being written."""
    locality_by_tensor = _locality_by_tensor(split_experiment.experiment.learner)
    stacks = split_experiment.stacks
    bytes_by_chunk: Counter[str] = Counter()
    for leaf in layout:
        if leaf.group == "frozen" or leaf.spec.memory_kind == "device":
            continue
        _, stage, path = leaf.path.split("/", 2)
        # A tensor's optimizer state moves together with the tensor.
        owner = path
        if isinstance(leaf.spec, OptStateSpec) and leaf.group == "optimizer":
            owner = leaf.spec.owner
        tensor = f"{stage}/{owner}"
        # This may be a layer range; the learner knows only the whole stack.
        layer_range = stacks[stage].layer_range if stage in stacks else None
        home = stage if layer_range is None else layer_range.home
        update_locality = locality_by_tensor.get(f"{home}/{owner}", "layer")
        layer_bytes = leaf.bytes_per_device // (stacks[stage].num_repeats if stage in stacks else 1)
        # Elementwise and per-row updates run in blocks of BLOCK elements, which have at most 4 bytes each (float32).
        chunk_bytes = min(layer_bytes, 4 * BLOCK) if update_locality in ("element", "row") else layer_bytes
        # A layer whose tensors depend on each other is one chunk.
        bytes_by_chunk[stage if update_locality == "layer" else tensor] += chunk_bytes
    return Counter(optimizer_state=4 * max(bytes_by_chunk.values(), default=0))
