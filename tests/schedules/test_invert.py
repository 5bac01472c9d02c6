"""Training by inversion: the losses equal those of remat none, and memory does not grow with depth."""

from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layers.lora import LoRA
from tests.support import small

LATER = ("in_backward", "layer_programs")


def experiment(num_layers: int = 4, remat: str = "invert", update: str = "in_backward", **fields: Any) -> Config:
    """Return an experiment with two fixed-point streams and dropout."""
    model = small.llama(stack__num_layers=num_layers, stack__streams="fixed")
    small.block(model).dropout = 0.1
    model.param_dtype = model.compute_dtype = "float64" if jax.config.jax_enable_x64 else "float32"
    return small.experiment(model, memory={"update": update, "remat": remat}, clip=None, **fields)


def trace(config: Config, steps: int = 12) -> list[float]:
    program = small.program(config)
    state, losses = program.init(), []
    for step in range(steps):
        state, metrics = program.step(state, program.put(small.host_batch(program, step)))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["after_backward", "in_backward", "layer_programs"])
def test_training_trace_matches_linear_memory(update: str):
    """This runs in float64, because AdamW scales up even a gradient that is only rounding error."""
    with jax.enable_x64(True):
        plain, inverted = trace(experiment(remat="none", update=update)), trace(experiment(update=update))
    np.testing.assert_allclose(inverted, plain, rtol=1e-6)  # the metrics are float32
    assert plain[-1] < plain[0] - 0.1


@pytest.mark.once("in_backward")
@pytest.mark.parametrize("update", ["after_backward", "in_backward"])
def test_layer_residuals_are_eliminated(update: str):
    """On CPU, loops copy the stack that they change, so only the difference of two policies measures activations.

    For TPU and GPU see tests/tools/test_memory_vs_depth.py.
    """
    depth, temporaries = 32, {}
    for remat in ("invert", "full"):
        program = small.program(experiment(depth, remat, update, seq_len=64))
        temporaries[remat] = program.jit_step.compiled_step.memory_analysis().temp_size_in_bytes
    inputs = depth * 2 * 4 * 8 * 64 * 32  # of all layers: two streams of [8, 64, 32] in float32
    assert temporaries["full"] - temporaries["invert"] >= 0.9 * inputs


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["after_backward", *(pytest.param(u, marks=pytest.mark.slow) for u in LATER)])
def test_adapters_on_quantized_weights(update: str):
    """Quantized weights have no gradient."""
    losses = {}
    for remat in ("none", "invert"):
        config = experiment(2, remat, update)
        config.model.lora = config_for(LoRA, rank=2, targets="attention|mlp", base="int8")
        losses[remat] = trace(config, 4)
    np.testing.assert_allclose(losses["invert"], losses["none"], rtol=1e-4)
