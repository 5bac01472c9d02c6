"""Weights, EMA and activations in host memory: every phase gives the plain run's numbers, and placement is as expected.

test_exact.py compares every combination with optax. This file covers frozen and quantized weights, EMA, rules,
evaluation and generation.
"""

import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest

from plimsoll.framework import layout
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.learner.rules import Rule
from tests.support import small

EVERYTHING = dict.fromkeys(("parameters", "activations", "optimizer_state"), "pinned_host")
SCHEDULES = {
    "streamed": {"update": "streamed"},
    "hosted_gradients": {"update": "streamed", "gradients": "pinned_host"},
    "in_backward": {"update": "in_backward"},
    "layer_programs": {"update": "layer_programs"},
}


# Adapters and biases start at zero, so they are all update: with an eps of 1e-3, AdamW makes an error of 1e-5 of them
# from a rounding error of 5e-8 in a gradient.
ADAMW = config_for(optax.adamw, learning_rate=1e-2, eps=1e-2, weight_decay=0.1)


@pytest.fixture(autouse=True)
def small_leaves_are_offloaded() -> Iterator[None]:
    """Offload leaves from 256 bytes."""
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        yield


def experiment_with_ema(memory: dict[str, str]) -> Config:
    """An experiment with a tied table, dropout, a rule, frozen position embeddings, and EMA."""
    rules = [
        config_for(Rule, pattern="norm", optimizer=config_for(optax.sgd, learning_rate=1e-2)),
        config_for(Rule, pattern="position|attention/query", freeze=True),
    ]
    settings = {"remat": "full", **memory}
    return small.experiment(memory=settings, optimizer=ADAMW, rules=rules, ema=0.9, clip=None)


def experiment_with_lora(memory: dict[str, str]) -> Config:
    """An experiment with LoRA adapters on 4-bit weights."""
    lora = config_for(LoRA, rank=16, targets=".", base="nf4")
    model = small.llama(dim=64, stack__num_layers=4, lora=lora)
    small.block(model).mlp.hidden = 128
    return small.experiment(model, memory={"remat": "full", **memory}, optimizer=ADAMW, clip=None)


def find_offloaded(tree: Any) -> set[str]:
    """Return the paths of the arrays in host memory; the number of a stack's part is left out."""
    paths = [path for path, x in layout.flatten(tree).items() if x.sharding.memory_kind == "pinned_host"]
    return {re.sub("/stack/[0-9]+/", "/stack/", path) for path in paths}


@pytest.mark.pairs
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [experiment_with_ema, experiment_with_lora])
def test_frozen_quantized_and_averaged_weights_too(make: Any, schedule: str):
    plain = small.program(make({}))
    expected, losses = small.run(plain, 4)
    program = small.program(make({**SCHEDULES[schedule], **EVERYTHING}))
    state, metrics = small.run(program, 4)
    program.layout.check(state)
    away = find_offloaded(state)
    assert any(path.startswith("parameter/stack") for path in away)
    assert any(path.startswith("frozen") for path in away)
    if make is experiment_with_ema:
        assert {"parameter/embed/token", "ema/embed/token", "frozen/embed/position"} <= away
    else:
        assert "frozen/stack/block0/mlp/up/weight/codes" in away
    assert not any("norm" in path for path in away)
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in losses], rtol=2e-6)
    small.assert_close(small.arrays(program.backend.to_checkpoint(state)), small.arrays(expected), 1e-5)

    batch = program.put(small.host_batch(program, 9))
    for averages in (False, True) if make is experiment_with_ema else (False,):
        found, known = (
            jax.device_get(one.evaluate(at, batch, averaged=averages))
            for one, at in ((program, state), (plain, expected))
        )
        np.testing.assert_allclose(found["nll"], known["nll"], rtol=1e-5)
    assert find_offloaded(state) == away
    sampling, prompts = Sampling(max_new_tokens=8, temperature=0.0), [[1, 2, 3], [5]]
    state = program.backend.join_stacks(state)
    assert Generator(program, state)(prompts, sampling) == Generator(plain, expected)(prompts, sampling)


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [None, {"data": 2, "fsdp": 2, "model": 2}], ids=["one", "eight"])
def test_the_whole_update_moves_averages_too(mesh: Any):
    """This covers after_backward, whose weights stay on the device."""
    config = experiment_with_ema({"optimizer_state": "pinned_host"})
    config.mesh = small.experiment(mesh=mesh).mesh
    program = small.program(config)
    state, _ = small.run(program, 3)
    program.layout.check(state)
    assert "ema/stack/block0/mlp/up/weight" in find_offloaded(state)
    expected, _ = small.run(small.program(experiment_with_ema({})), 3)
    small.assert_close(small.arrays(state), small.arrays(expected), 1e-5)
