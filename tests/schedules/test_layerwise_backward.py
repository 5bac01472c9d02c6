"""Schedules with a layer-by-layer backward pass: the memory they hold, the settings they refuse, and their metrics."""

from functools import cache
from typing import Any

import numpy as np
import optax
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.schedules import chunked_update
from tests.support import small

OFFLOADED = {"update": "streamed", "gradients": "pinned_host", "optimizer_state": "pinned_host"}
IN_BACKWARD = {"update": "in_backward"}
FROZEN_STACK = [config_for(Rule, pattern="^stack", freeze=True)]
LAYER_PREFETCHED = {**IN_BACKWARD, "optimizer_state": "pinned_host", "prefetch": "layer"}


def experiment(memory: dict[str, str], layers: int = 8, **learner: Any) -> Config:
    """Return an experiment with eight layers, so that one layer is small compared to the stack."""
    model = small.llama(stack__num_layers=layers)
    small.block(model).mlp.hidden = 512
    return small.experiment(model, memory={"remat": "full", **memory}, **{"clip": None, **learner})


def temporary_bytes(config: Config) -> int:
    """Return the bytes that the compiled step holds in addition to its arguments."""
    stats = small.program(config).jit_step.compiled_step.memory_analysis()
    return stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes


@pytest.mark.pairs
def test_no_program_holds_the_whole_stacks_gradient():
    """The plain step does hold the gradients of the whole stack.

    A step that offloads its gradients, or that updates each layer in the backward pass, holds less than half of their
    bytes in total. The stack is so deep that its gradients exceed everything that does not grow with depth.
    """
    depth = 48
    layers = [leaf for leaf in small.program(experiment({}, depth)).layout if leaf.path.startswith("parameter/stack")]
    gradients = sum(leaf.spec.num_bytes for leaf in layers)
    plain, offloaded, in_backward = (
        temporary_bytes(experiment(memory, depth)) for memory in ({}, OFFLOADED, IN_BACKWARD)
    )
    assert plain > gradients
    assert offloaded < 0.5 * gradients
    assert in_backward < 0.5 * gradients


@pytest.mark.pairs
@pytest.mark.parametrize("mode", ["previous_norm", "update_rms", "norm_growth"])
def test_each_clip_mode_matches_the_plain_schedule(mode: str):
    clip = {"previous_norm": 0.1, "update_rms": 1e-4, "norm_growth": 1.01}[mode]
    learner = {"clip": clip, "clip_mode": mode, "optimizer": config_for(optax.sgd, learning_rate=0.3, momentum=0.9)}
    expected, first = small.run(small.program(experiment({}, 2, **learner)), 4)
    state, metrics = small.run(small.program(experiment(IN_BACKWARD, 2, **learner)), 4)
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in first], rtol=1e-6)
    small.assert_close(small.arrays(state), small.arrays(expected), 1e-5)
    unclipped = small.run(small.program(experiment({}, 2, **{**learner, "clip": None})), 4)[1]
    assert abs(unclipped[-1]["loss"] - first[-1]["loss"]) > 1e-5, "nothing was clipped"


@pytest.mark.pairs  # test_exact.py covers this schedule with an active clip, in float64
def test_two_passes_clip_exactly():
    sgd = config_for(optax.sgd, learning_rate=0.3, momentum=0.9)
    expected, _ = small.run(small.program(experiment({}, 2, clip=0.1, optimizer=sgd)), 4)
    config = experiment(IN_BACKWARD, 2, clip=0.1, clip_mode="two_pass", optimizer=sgd)
    small.assert_close(small.arrays(small.run(small.program(config), 4)[0]), small.arrays(expected), 1e-5)


def test_unsupported_settings_are_refused_by_name():
    for fields, words in (
        ({"clip": 1.0}, r"clip_mode = global_norm with memory\.update = in_backward"),
        ({"accumulate": 2}, r"accumulate = 2 with memory\.update = in_backward"),
    ):
        with pytest.raises(ValueError, match=words):
            small.program(experiment(IN_BACKWARD, **fields)).jit_step.step_jit  # noqa: B018
    with pytest.raises(ValueError, match=r"gradients = pinned_host needs memory\.update = streamed"):
        experiment({"gradients": "pinned_host"}).instantiate()
    with pytest.raises(ValueError, match=r"expected over 1 for clip_mode norm_growth"):
        experiment({}, clip=1.0, clip_mode="norm_growth").instantiate()


@pytest.mark.pairs
def test_nonfinite_gradient_skips_its_layer_and_all_later_ones():
    program = small.program(experiment(IN_BACKWARD))
    state = program.init()
    # Layer 3 has huge activations but zero output: the loss is finite, the squares of its gradients are not.
    weight = state.parameter["stack"]["block0"]["mlp"]["down"]["weight"]
    state.parameter["stack"]["block0"]["mlp"]["down"]["weight"] = weight.at[3].set(0.0)
    up = state.parameter["stack"]["block0"]["mlp"]["up"]["weight"]
    state.parameter["stack"]["block0"]["mlp"]["up"]["weight"] = up.at[3].set(1e30)
    before = small.arrays(state)
    after, metrics = program.step(state, program.put(small.host_batch(program)))
    after = small.arrays(after)
    moved = float(metrics["updated_units"])
    assert np.isfinite(float(metrics["loss"]))
    assert float(metrics["skipped"]) == 1.0
    assert moved == 1 + 4  # the head, and layers 7 to 4
    query = "parameter/stack/block0/attention/query/weight"
    changed = [not np.array_equal(after[query][i], before[query][i]) for i in range(8)]
    assert changed == [False] * 4 + [True] * 4
    np.testing.assert_array_equal(after["parameter/embed/token"], before["parameter/embed/token"])


def test_rows_with_any_shape_are_split_evenly():
    for shape in ((4096, 11008), (11008, 4096), (32000, 4096), (32000, 512), (2048,), (50257, 768), (64, 8)):
        blocks = chunked_update.num_blocks(shape)
        assert shape[0] % blocks == 0
        assert blocks == 1 or (shape[0] // blocks % 32 == 0 and np.prod(shape) // blocks <= 2 << 20)


@pytest.mark.pairs
def test_row_blocks_equal_the_whole_update(monkeypatch: pytest.MonkeyPatch):
    """Row blocks of 4096 instead of two million elements give the same numbers as one block, also on a mesh."""
    monkeypatch.setattr(chunked_update, "_SMALL", 1)
    monkeypatch.setattr(chunked_update, "_ROWS", 4)
    states = {}
    for size in (1 << 21, 4096):
        monkeypatch.setattr(chunked_update, "BLOCK", size)
        for mesh in (None, {"fsdp": 2, "data": 2, "model": 2}):
            config = experiment({"update": "streamed"}, layers=2, mesh=mesh)
            states[size, mesh is None] = small.arrays(small.run(small.program(config), 2)[0])
    assert chunked_update.num_blocks((32, 512)) > 1
    for single in (True, False):
        small.assert_close(states[4096, single], states[1 << 21, single], 1e-6)


@cache
def plain_run_with_a_frozen_stack() -> dict[str, np.ndarray]:
    """Return the last state of the plain schedule."""
    state, _ = small.run(small.program(experiment({}, layers=2, rules=FROZEN_STACK)), 2)
    return small.arrays(state)


@pytest.mark.pairs
@pytest.mark.parametrize(
    "memory", [OFFLOADED, IN_BACKWARD, LAYER_PREFETCHED], ids=["offloaded", "in backward", "layer prefetched"]
)
def test_frozen_stack_is_skipped(memory: dict[str, str]):
    state, _ = small.run(small.program(experiment(memory, layers=2, rules=FROZEN_STACK)), 2)
    found = {k: v for k, v in small.arrays(state).items() if not k.startswith("gradient/")}
    small.assert_close(found, plain_run_with_a_frozen_stack(), 1e-5)


def test_microbatches_by_layer_need_a_layerwise_schedule():
    config = small.experiment(small.llama(), memory={"accumulate_by": "layer"}, accumulate=2)
    with pytest.raises(ValueError, match=r"memory.accumulate_by = layer needs .* given after_backward"):
        small.program(config)
