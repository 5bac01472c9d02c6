"""What an update holds at its fullest instant besides the state: gradients, and what comes from the host."""

from __future__ import annotations

from collections import Counter

from framework.devices.accelerators import AcceleratorSpec
from framework.layout import OptStateSpec, StateLayout
from framework.optimizers.reach import Reach
from framework.plan.backward_bytes import stage_of
from framework.plan.sectioned import Sectioned
from framework.schedules.division import BLOCK


def update_bytes(
    sectioned: Sectioned,
    layout: StateLayout,
    spec: AcceleratorSpec,
    resident: int,
) -> Counter[str]:
    """Bytes that a device holds in the update, besides the `resident` state and batch."""
    learner = sectioned.experiment.learner
    memory = sectioned.experiment.memory
    if memory.update == "after_backward":
        update = _whole_update(layout, spec, resident)
    else:
        reaches: set[Reach] = {learner.reach(group) for group in learner.groups}
        unit_counts = {name: stack.num_units for name, stack in sectioned.stacks.items()}
        update = _piece(layout, unit_counts, reaches)
    if memory.update in ("streamed", "layer_programs"):
        for leaf in layout:
            if leaf.group == "parameter" and not sectioned.takes_gradients(stage_of(leaf)):
                update["gradients"] += leaf.bytes_per_device
    return update


def _whole_update(layout: StateLayout, spec: AcceleratorSpec, resident: int) -> Counter[str]:
    """What an update of everything at once holds besides the `resident` state: gradients, and what comes from the host.

    All of the host's state comes at once. Selecting between old and new values (a step that is not finite changes
    nothing) happens after both exist for the largest arrays, unless the device would be too small: then one at a time.
    """
    hosted_sizes = [leaf.bytes_per_device for leaf in layout if leaf.spec.memory_kind != "device"]
    # GPUs read and write host memory where it is.
    if spec.platform == "gpu" or not hosted_sizes:
        return Counter()
    moved = Counter(gradients=layout.bytes_per_device("parameter"), optimizer_state=sum(hosted_sizes))
    selected_bytes = sum(size for size in hosted_sizes if size == max(hosted_sizes))
    if spec.limit_bytes is not None:
        free_bytes = spec.limit_bytes - resident - sum(moved.values())
        selected_bytes = selected_bytes if selected_bytes <= free_bytes else 0
    return moved + Counter(activations=selected_bytes)


def _piece(layout: StateLayout, unit_counts: dict[str, int], reaches: set[Reach]) -> Counter[str]:
    """What an update by pieces moves: what is hosted of two pieces on its way in, and of two on its way out."""
    updates_blocks = reaches <= {"element", "row"}
    bytes_by_tensor: Counter[str] = Counter()
    for leaf in layout:
        if leaf.group == "frozen" or leaf.spec.memory_kind == "device":
            continue
        _, stage, path = leaf.path.split("/", 2)
        # The optimizer's state of a tensor is moved together with the tensor.
        owner = path
        if isinstance(leaf.spec, OptStateSpec) and leaf.group == "optimizer":
            owner = leaf.spec.owner
        unit_bytes = leaf.bytes_per_device // unit_counts.get(stage, 1)
        # Elements and rows are updated in blocks of so many elements, which are float32 (4 bytes)
        # at most.
        piece_bytes = min(unit_bytes, 4 * BLOCK) if updates_blocks else unit_bytes
        bytes_by_tensor[f"{stage}/{owner}"] += piece_bytes
    if reaches & {"unit"}:
        largest = sum(bytes_by_tensor.values())
    else:
        largest = max(bytes_by_tensor.values(), default=0)
    return Counter(optimizer_state=4 * largest)
