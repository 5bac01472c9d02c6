"""Peak memory of the optimizer update in addition to the state: gradients, and arrays fetched from the host."""

from __future__ import annotations

from collections import Counter

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.layout import OptStateSpec, StateLayout
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.reach import Reach
from plimsoll.framework.plan.backward_bytes import stage_of
from plimsoll.framework.plan.sectioned import Sectioned
from plimsoll.framework.schedules.division import BLOCK


def update_bytes(
    sectioned: Sectioned,
    layout: StateLayout,
    spec: AcceleratorSpec,
    resident: int,
) -> Counter[str]:
    """Return the bytes by group that a device holds during the update, in addition to the `resident` state and batch.

    Args:
        sectioned: the experiment, with stacks split into layer ranges.
        layout: layout of its state.
        spec: the accelerator in use.
        resident: bytes of state and batch on the device.
    """
    memory = sectioned.experiment.memory
    if memory.update == "after_backward":
        update = _whole_update(layout, spec, resident)
    else:
        update = _piece(layout, sectioned)
    if memory.update in ("streamed", "layer_programs"):
        for leaf in layout:
            if leaf.group == "parameter" and not sectioned.takes_gradients(stage_of(leaf)):
                update["gradients"] += leaf.bytes_per_device
    return update


def _whole_update(layout: StateLayout, spec: AcceleratorSpec, resident: int) -> Counter[str]:
    """Return the bytes that an update of the whole state holds in addition to `resident`: gradients and fetched state.

    All offloaded state is fetched together. A non-finite step changes nothing, so the update selects between old and
    new values. For the largest arrays this happens after both exist, unless the device is too small for that; then the
    arrays are handled one at a time.
    """
    hosted_sizes = [leaf.bytes_per_device for leaf in layout if leaf.spec.memory_kind != "device"]
    # GPUs read and write host memory directly.
    if spec.platform == "gpu" or not hosted_sizes:
        return Counter()
    moved = Counter(gradients=layout.bytes_per_device("parameter"), optimizer_state=sum(hosted_sizes))
    selected_bytes = sum(size for size in hosted_sizes if size == max(hosted_sizes))
    if spec.limit_bytes is not None:
        free_bytes = spec.limit_bytes - resident - sum(moved.values())
        selected_bytes = selected_bytes if selected_bytes <= free_bytes else 0
    return moved + Counter(activations=selected_bytes)


def _reach_by_tensor(learner: Learner) -> dict[str, Reach]:
    """Return {"stage/path" of a parameter: update locality of its group's optimizer}."""
    reach_by_tensor = {}
    for group in learner.groups:
        reach = learner.reach(group)
        for path in group.paths:
            reach_by_tensor[f"{group.path_prefix}{path}"] = reach
    return reach_by_tensor


def _piece(layout: StateLayout, sectioned: Sectioned) -> Counter[str]:
    """Return the bytes of a chunked update: the offloaded state of two chunks being fetched and two being written."""
    reach_by_tensor = _reach_by_tensor(sectioned.experiment.learner)
    stacks = sectioned.stacks
    bytes_by_piece: Counter[str] = Counter()
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
        section = stacks[stage].section if stage in stacks else None
        home = stage if section is None else section.home
        reach = reach_by_tensor.get(f"{home}/{owner}", "unit")
        unit_bytes = leaf.bytes_per_device // (stacks[stage].num_units if stage in stacks else 1)
        # Elementwise and per-row updates run in blocks of BLOCK elements, which have at most 4 bytes each (float32).
        piece_bytes = min(unit_bytes, 4 * BLOCK) if reach in ("element", "row") else unit_bytes
        # A layer whose tensors depend on each other is one chunk.
        bytes_by_piece[stage if reach == "unit" else tensor] += piece_bytes
    return Counter(optimizer_state=4 * max(bytes_by_piece.values(), default=0))
