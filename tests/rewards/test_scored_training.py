"""Score heads give the same numbers under every schedule, on meshes, with adapters and with microbatches."""

from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.layout import flatten
from tests.support import score_heads, small

MESHES = [{"data": 2, "fsdp": 2, "model": 2}, {"fsdp": 2, "seq": 4}]
STEPS = 3


def train(kind: str, steps: int = STEPS, **fields: Any) -> tuple[dict[str, np.ndarray], list[float]]:
    """Train for some steps and return (weights, losses), with the schedule's own weight paths."""
    program = small.program(score_heads.experiment(kind, **fields))
    state, metrics = score_heads.run(program, steps)
    return small.arrays(state.parameter), [step["loss"] for step in metrics]


@pytest.fixture(scope="module", params=["reward", "classify"])
def reference(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """(kind, result of plain training)."""
    return request.param, train(request.param)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("memory", "learner"),
    [
        ({"update": "streamed"}, {}),
        ({"update": "in_backward"}, {}),
        ({"update": "layer_programs"}, {}),
        ({"update": "streamed", "gradients": "pinned_host"}, {}),
        ({"remat": "full"}, {"accumulate": 2}),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "plain",
)
def test_schedules_give_the_same(reference, memory: dict[str, Any], learner: dict[str, Any]):
    kind, (_, losses) = reference
    _, other_losses = train(kind, memory=memory, **learner)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-6)
    assert losses[-1] != losses[0]


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh))
def test_meshes_give_the_same(reference, mesh: dict[str, int]):
    kind, (weights, losses) = reference
    other, other_losses = train(kind, mesh=mesh)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)
    small.assert_close(other, weights, 2e-3)


@pytest.mark.pairs
@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("update", ["after_backward", "in_backward"])
def test_with_adapters_the_score_head_learns_whole_and_the_base_is_frozen(base: str, update: str):
    program = small.program(score_heads.experiment("reward", lora=base, memory={"update": update}))
    first = jax.device_get(program.init())
    trained_paths = {path.rsplit("/", 1)[1] for path in flatten(first["parameter"])}
    assert trained_paths == {"lora_a", "lora_b", "score"}
    before = small.arrays(first)
    state, _ = score_heads.run(program, 2)
    after = small.arrays(state)
    assert not np.array_equal(after["parameter/head/score"], before["parameter/head/score"])
    small.assert_same_bits(state.frozen, first["frozen"])


@pytest.mark.pairs
def test_an_evaluation_reports_means_over_sequences(reference):
    kind, _ = reference
    program = small.program(score_heads.experiment(kind))
    state = program.init()
    batch = score_heads.batch(program)
    sums = {name: float(value) for name, value in program.evaluate(state, program.put(batch)).items()}
    summary = program.experiment.model.summary(sums)
    _, metrics = program.step(state, program.put(batch))
    assert summary["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert summary["accuracy"] == pytest.approx(float(metrics["head/accuracy"]), rel=1e-5)
    count = batch["ends"].sum()
    assert summary["pairs" if kind == "reward" else "sequences"] == (count / 2 if kind == "reward" else count)
