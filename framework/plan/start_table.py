"""Builds the table shown at a run's start: parameters, bytes, mesh, data, versions."""

from __future__ import annotations

from importlib.metadata import version

from plimsoll.framework.data.batches import Pipeline
from plimsoll.framework.devices.accelerators import accelerator_name, spec_for
from plimsoll.framework.devices.mesh import island, mesh_text
from plimsoll.framework.layout import GROUPS, MemoryKind
from plimsoll.framework.learner.rules import DEFAULT
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.run_length import rate_course
from plimsoll.framework.terminal.tables import TableSection, start_table


def build_start_table(name: str, program: Program, without_data: str = "", starts_at: str = "") -> list[TableSection]:
    """Return the table that is shown at a run's start.

    It lists parameters by group, bytes per device by group and memory kind, mesh, items per step, FLOPs per item,
    length of the run, learning rates, and data.

    Args:
        name: name of the config.
        program: the experiment's program on the devices.
        without_data: reason why there is no data; "" if the pipeline was set up.
        starts_at: first step of the run and the source of its weights; "" leaves the row out.
    """
    layout = program.layout
    experiment = program.experiment
    devices = list(program.mesh.devices.flat)
    mesh_shape = dict(program.mesh.shape)
    num_slices = len(set(map(island, devices)))
    parameters = []
    for group in ("parameter", "frozen"):
        if layout.size(group):
            num_bytes = sum(leaf.spec.num_bytes for leaf in layout if leaf.group == group)
            parameters.append((group, layout.size(group), num_bytes))
    kinds: list[MemoryKind] = sorted({leaf.spec.memory_kind for leaf in layout})
    device_bytes = {}
    for group in GROUPS:
        for kind in kinds:
            size = layout.bytes_per_device(group, kind)
            if size:
                device_bytes[group, kind] = size
    data: Pipeline = experiment.data
    return start_table(
        config=name,
        accelerator=accelerator_name(devices),
        mesh=mesh_text(mesh_shape, experiment.mesh.split(mesh_shape, num_slices), devices[0].platform),
        parameters=parameters,
        device_bytes=device_bytes,
        tokens_per_step=data.global_batch_size * data.seq_len,
        flops_per_token=experiment.model.flops_per_token(data.seq_len),
        device_limit_bytes=spec_for(devices).limit_bytes,
        data={"not checked": without_data} if without_data else {row.name: str(row) for row in data.source_report()},
        item=data.item,
        versions={name: version(name) for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain")},
        course=_describe_run_length(program, starts_at, has_data=not without_data),
    )


def _describe_run_length(program: Program, starts_at: str, *, has_data: bool) -> dict[str, str]:
    """Return the rows about a run's length, learning rates and first step."""
    experiment = program.experiment
    steps = experiment.trainer.known_steps
    rows = {}
    # The length is unknown if it is given in epochs and the data is not on this machine.
    if steps is not None:
        epochs = ""
        if has_data:
            epochs = f" ({experiment.data.count_epochs(steps):.3g} epochs)"
        rows["steps"] = f"{steps:,}{epochs}"
        for label, rate in experiment.learner.learning_rates.items():
            row = "learning rate" if label == DEFAULT else f"learning rate ({label})"
            rows[row] = rate_course(rate, steps)
    if starts_at:
        rows["starts at"] = starts_at
    return rows
