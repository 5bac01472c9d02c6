"""Builds the program of an experiment for inference on the available devices, optionally with an offloaded stack."""

from __future__ import annotations

from collections.abc import Callable

import jax

from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program


def inference_program(
    experiment: Experiment, *, host_weights: bool, is_mesh_requested: bool, log: Callable[[str], None]
) -> Program:
    """Build the experiment's inference program on all devices. If the run's mesh does not fit, fsdp = -1 replaces it.

    Args:
        experiment: experiment with the model.
        host_weights: whether to offload the matrices of the stack to host memory.
        is_mesh_requested: whether the user requested this mesh explicitly, so that no other mesh may replace it.
        log: function that prints a message about a replaced mesh.

    Raises:
        ValueError: the model does not fit the mesh, or a requested mesh does not fit the devices.
    """
    mesh = experiment.mesh
    try:
        mesh.build(jax.devices())
    except ValueError as error:
        if is_mesh_requested:
            raise
        log(f"{error}; using mesh.fsdp = {jax.device_count()}")
        mesh = MeshShape(fsdp=-1)
    return Program(experiment, mesh=mesh, training=False, offload_stack=host_weights)
