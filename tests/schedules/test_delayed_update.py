"""Updates before the norm of all gradients is known, or in the next step: the same state, checkpoints and losses.

tests/schedules/test_exact.py compares the numbers with optax, under all remat policies.
"""

from pathlib import Path
from typing import Any

import jax
import pytest

from plimsoll.framework import layout
from plimsoll.framework.config import config_for
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.learner.rules import Rule
from tests.support import runs, small

IMMEDIATE = {"update": "streamed", "optimizer_state": "pinned_host", "gradients": "pinned_host"}
DELAYED = {**IMMEDIATE, "prefetch": "layer"}
SPECULATIVE = {**IMMEDIATE, "prefetch": "speculative"}
# Of float32: the programs round differently.
TOLERANCE = 1e-5
FLAGS = [f"--config.memory.{name}={value}" for name, value in IMMEDIATE.items()]


@pytest.fixture(autouse=True)
def offload_small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layout.move_to_host.__kwdefaults__, "min_bytes", 256)


def train(memory: dict[str, Any], steps: int, **learner: Any) -> tuple[Any, Any]:
    """Return the program, and the state after some steps."""
    config = small.experiment(small.llama(), memory=memory, clip=0.5, **learner)
    program = small.program(config)
    state, _ = small.run(program, steps)
    return program, state


def test_the_next_step_updates_the_stacks() -> None:
    """After a step, stages outside the stacks are updated, and the stacks are not; `complete_update` updates them."""
    _, immediate = train(IMMEDIATE, 3)
    _, before = train(IMMEDIATE, 2)
    program, state = train(DELAYED, 3)
    weights, old, new = (small.arrays(tree.parameter) for tree in (state, before, immediate))
    expected = {path: (old if path.startswith("stack/") else new)[path] for path in weights}
    small.assert_close(weights, expected, TOLERANCE)
    assert 0 < float(state.pending["clip_factor"]) < 1, "clipped"
    completed = program.complete_update(state)
    small.assert_close(small.arrays(completed.parameter), new, TOLERANCE)
    small.assert_close(small.arrays(completed.optimizer), small.arrays(immediate.optimizer), TOLERANCE)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.optimizer["stack"])), "donated"
    # Nothing is left, so neither another call nor the next step repeats it.
    expected = small.arrays(completed.parameter)
    again = program.complete_update(completed)
    small.assert_close(small.arrays(again.parameter), expected, 0.0)
    continued, _ = small.run(program, 1, again)
    weights = small.arrays(continued.parameter)
    stack = [path for path in weights if path.startswith("stack/")]
    small.assert_close({path: weights[path] for path in stack}, {path: expected[path] for path in stack}, 0.0)


@pytest.mark.parametrize("clip", [0.5, 100.0], ids=["clipped", "not clipped"])
def test_a_speculative_update_keeps_the_old_state_as_the_next_spare(clip: float) -> None:
    """The new state goes to the second copy, and no array moves when the two are exchanged."""
    program = small.program(small.experiment(small.llama(), memory=SPECULATIVE, clip=clip))
    before, _ = small.run(program, 2)
    old = small.arrays(before.optimizer["stack"])
    after, _ = small.run(program, 3)
    spares = small.arrays(after.spare["stack"])
    assert spares.keys() == {path for path, leaf in layout.flatten(program.layout.specs.spare["stack"]).items()}
    small.assert_close(spares, {path: old[path] for path in spares}, 0.0)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(after.spare)}
    assert kinds == {"pinned_host"}
    checkpoint = program.backend.to_checkpoint(after)
    assert not checkpoint.spare, "checkpoints hold the state once"


@pytest.mark.pairs
@pytest.mark.parametrize("memory", [DELAYED, SPECULATIVE], ids=["delayed", "speculative"])
@pytest.mark.parametrize(
    "learner",
    [{"ema": 0.9}, {"spike": 3.0}, {"rules": [config_for(Rule, pattern="^stack", freeze=True)]}, {"clip": None}],
    ids=["averages", "spikes", "frozen stack", "no clip"],
)
def test_the_state_is_that_of_an_immediate_update(learner: dict[str, Any], memory: dict[str, str]) -> None:
    learner = {"clip": 0.5, **learner}
    states = []
    for placement in (IMMEDIATE, memory):
        program = small.program(small.experiment(small.llama(), memory=placement, **learner))
        state, _ = small.run(program, 5)
        states.append(program.backend.to_checkpoint(program.complete_update(state)))
    # Each group on its own scale: the words of the random key are billions.
    for group in ("parameter", "optimizer", "ema"):
        if states[0][group]:
            small.assert_close(small.arrays(states[1][group]), small.arrays(states[0][group]), TOLERANCE)


@pytest.mark.pairs
@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("memory", [DELAYED, SPECULATIVE], ids=["delayed", "speculative"])
def test_adapters_are_those_of_an_immediate_update(memory: dict[str, str], base: str | None) -> None:
    """On eight devices, clipped in some steps; the frozen base is neither fetched nor copied."""
    clip = 1.0
    model = small.llama(dim=64)
    small.block(model).mlp.hidden = 128
    model.lora = config_for(LoRA, rank=4, alpha=6.0, base=base)
    states = []
    for placement in (IMMEDIATE, memory):
        mesh = {"data": 2, "fsdp": 2, "model": 2}
        config = small.experiment(model, memory=placement, clip=clip, mesh=mesh, optimizer=small.STEADY_ADAMW)
        program = small.program(config)
        state, metrics = small.run(program, 6)
        states.append(program.backend.to_checkpoint(program.complete_update(state)))
        norms = [values["grad_norm"] for values in metrics]
        assert min(norms) < clip < max(norms)
    offloaded = [path for path, spec in layout.flatten(program.layout.specs.optimizer).items() if spec.is_offloaded]
    assert all("lora_" in path for path in offloaded)
    assert any(path.startswith("stack/") for path in offloaded)
    for group in ("parameter", "optimizer"):
        small.assert_close(small.arrays(states[1][group]), small.arrays(states[0][group]), TOLERANCE)


@pytest.mark.pairs
@pytest.mark.parametrize("prefetch", ["layer", "speculative"])
def test_a_run_saves_evaluates_and_resumes_as_with_an_immediate_update(tmp_path: Path, prefetch: str) -> None:
    """Either kind of run may resume from a checkpoint of the other."""
    runs.write_text(tmp_path / "text")
    common = [*FLAGS, "--config.trainer.save_every=3", "--config.trainer.eval_every=2", "--config.trainer.keep=9"]
    delayed = [*common, f"--config.memory.prefetch={prefetch}"]
    assert runs.train(tmp_path / "immediate", *common, "--config.trainer.max_steps=7") == 0
    assert runs.train(tmp_path / "delayed", *delayed, "--config.trainer.max_steps=4") == 0
    assert runs.train(tmp_path / "delayed", *delayed, "--config.trainer.max_steps=7") == 0
    assert runs.train(tmp_path / "delayed", *common, "--config.trainer.max_steps=8") == 0
    assert runs.train(tmp_path / "immediate", *delayed, "--config.trainer.max_steps=8") == 0
    rows = []
    for name in ("immediate", "delayed"):
        numbers = {}
        for row in runs.rows(tmp_path / name):
            numbers |= {
                (row["step"], key): value
                for key, value in row.items()
                if key in ("loss", "grad_norm") or key.startswith("eval/")
            }
        rows.append(numbers)
    assert rows[0].keys() == rows[1].keys()
    assert {(8, "eval/held/loss"), (4, "eval/held/loss")} <= rows[0].keys()
    for key, value in rows[0].items():
        assert rows[1][key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize(
    ("memory", "accumulate", "message"),
    [
        ({"prefetch": "speculative", "gradients": "device"}, 1, "for as many layers, and memory.parameters = device"),
        ({"prefetch": "speculative", "optimizer_state": "pinned_host:2", "gradients": "pinned_host:1"}, 1, "as many"),
        ({"prefetch": "speculative", "parameters": "pinned_host"}, 1, "given streamed, pinned_host, pinned_host and"),
        ({"prefetch": "speculative", "update": "in_backward", "gradients": "device"}, 1, "memory.update = streamed"),
        ({"prefetch": "speculative"}, 2, "a step has a backward pass for each microbatch"),
        (
            {"gradients": "device"},
            1,
            "needs memory.gradients = pinned_host and memory.parameters = device, given device",
        ),
        ({"parameters": "pinned_host"}, 1, "needs memory.gradients = pinned_host and memory.parameters = device"),
        ({}, 2, "learner.accumulate = 2 with memory.update = streamed and memory.prefetch = layer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(memory: dict[str, str], accumulate: int, message: str) -> None:
    config = small.experiment(small.llama(), memory={**DELAYED, **memory}, accumulate=accumulate)
    with pytest.raises(ValueError, match=message):
        small.program(config)
