"""The loss of docs/own_loss_and_metric.md: equal to NumPy's on all logits, however the step is divided."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.program.program import Program
from tests.support import runs
from tests.support.pages import python_block
from tests.support.tiny import tiny

SETTINGS: dict[str, dict[str, object]] = {
    "one": {},
    "microbatches": {"learner.accumulate": 2},
    "eight": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.model": 2},
    "layer_programs": {"memory.update": "layer_programs", "memory.remat": "full"},
    "pipeline": {"mesh.pipe": 2, "learner.accumulate": 2, "mesh.data": 4},
}
GAMMA = 1.5


def build_config(settings: dict[str, object]) -> Config:
    """Return a tiny config with the page's loss, without dropout, so that the expected loss needs no random draws."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(python_block("docs/own_loss_and_metric.md", "class FocalLoss"), names)
    config = tiny()
    config.model.embed.dropout = 0.0
    config.model.stack.pattern[0].dropout = 0.0
    # A multiple of the shards of every mesh.
    config.model.vocab_size = 264
    config.model.head.chunk_tokens = 16
    config.model.head.objective = config_for(names["FocalLoss"], gamma=GAMMA)
    for path, value in settings.items():
        config.set_path(path, value)
    return config


def compute_loss(program: Program, params: Any, batch: Any) -> float:
    """Return the mean focal loss of a batch in float64, from all of its logits."""
    context = program.evaluation_context({name: jnp.asarray(x) for name, x in batch.items()})
    logits = np.asarray(build_config({}).model.instantiate().logits(params, context, {}), np.float64)
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    p = np.take_along_axis(probabilities, np.asarray(batch["targets"])[..., None], axis=-1)[..., 0]
    weights = np.asarray(batch["weights"], np.float64)
    return float(np.sum(weights * -((1 - p) ** GAMMA) * np.log(p)) / weights.sum())


@pytest.mark.first(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_loss_equals_numpys(settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_TEXT", "")
    runs.write_text(tmp_path / "text")
    experiment = build_config(settings).instantiate()
    shape = experiment.mesh.resolve(8) if "mesh.data" in settings else {"data": 1}
    program = Program(experiment, devices=jax.devices()[: math.prod(shape.values())])
    experiment.data.setup(tmp_path)
    state = program.init()
    params = jax.tree.map(np.asarray, program.backend.to_checkpoint(state).parameter)
    batch = experiment.data.train_batch(0, program.rows)
    _, metrics = program.step(state, program.put(batch))
    assert float(metrics["loss"]) == pytest.approx(compute_loss(program, params, batch), rel=1e-5)
