"""The program of an experiment for inference: on whatever devices there are, with its stack in host memory if asked."""

from __future__ import annotations

from collections.abc import Callable

import jax

from framework.devices.mesh import MeshShape
from framework.program.experiment import Experiment
from framework.program.program import Program


def inference_program(
    experiment: Experiment,
    *,
    host_weights: bool,
    mesh_is_asked: bool,
    tell: Callable[[str], None],
) -> Program:
    """The experiment's program on all devices, for inference. A run's mesh that does not fit them becomes fsdp = -1.

    Args:
        experiment: has the model.
        host_weights: the stack's matrices are to live in host memory.
        mesh_is_asked: the mesh is what the user asks for now, and not only the run's: no other one takes its place.
        tell: gets a message about another mesh.

    Raises:
        ValueError: the model does not fit the mesh, or a mesh that was asked for does not fit the devices.
    """
    mesh = experiment.mesh
    try:
        mesh.build(jax.devices())
    except ValueError as error:
        if mesh_is_asked:
            raise
        tell(f"{error}; using mesh.fsdp = {jax.device_count()}")
        mesh = MeshShape(fsdp=-1)
    return Program(experiment, mesh=mesh, training=False, hosted_stack=host_weights)
