"""On CPU, XLA copies no stack of weights or optimizer state in a loop that updates it in place."""

import jax
import pytest

from plimsoll import configs
from plimsoll.framework.plan import hlo
from plimsoll.framework.program.program import Program

LAYERS = 11  # no other dimension of the model has this size


IN_BACKWARD = {"memory.update": "in_backward", "learner.clip_mode": "previous_norm"}
STREAMED = {"memory.update": "streamed", "memory.optimizer_state": "pinned_host"}


@pytest.mark.pairs
@pytest.mark.parametrize(
    "fields",
    [
        IN_BACKWARD,
        {**IN_BACKWARD, "learner.ema": "0.9"},
        {**IN_BACKWARD, "memory.remat": "full"},
        {**IN_BACKWARD, "memory.optimizer_state": "pinned_host", "memory.prefetch": "layer"},
        STREAMED,
        {**STREAMED, "memory.gradients": "pinned_host", "memory.parameters": "pinned_host"},
    ],
    ids=["in backward", "averages", "full remat", "state prefetched", "streamed", "all offloaded"],
)
def test_matrix_stacks_are_not_copied(fields: dict[str, str]) -> None:
    config = configs.load("nanogpt-cpu")
    sizes = {"model.stack.num_layers": str(LAYERS), "model.stack.unroll": "1", "data.global_batch_size": "4"}
    for path, value in (sizes | fields).items():
        config.override(path, value)
    program = Program(config.instantiate(), jax.devices()[:1])
    stacks = {leaf.spec.shape for leaf in program.layout if leaf.spec.shape[:1] == (LAYERS,)}
    matrices = {shape for shape in stacks if len(shape) > 2}
    assert matrices
    module = hlo.Module(program.jit_step.compiled_step.as_text())
    copied = [
        array.dims
        for instruction in module.instructions.values()
        if instruction.opcode == "copy" and module.runs(instruction.computation) > 1
        for array in hlo.arrays(instruction.type)
        if tuple(array.dims) in matrices
    ]
    assert not copied
