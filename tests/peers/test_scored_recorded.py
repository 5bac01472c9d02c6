"""A classifier and a reward model compared to what `python -m tools.record_scored` recorded of transformers and TRL."""

import numpy as np
import pytest

from tools.peers import ours, scored
from tools.peers.recording import TUNING, Results

LIMIT = 1e-5


@pytest.mark.once("reward")
@pytest.mark.parametrize("kind", ["classify", "reward"])
def test_logits_loss_gradients_and_ten_steps(kind):
    seed, weights, gradients, results = scored.recorded(TUNING / f"scored-{kind}.npz")
    family = scored.family_of(scored.RECORDED_SHAPE, kind)
    program = scored.program_of(family, kind)
    params = ours.parameters(family, program.experiment.model, weights)
    scores, loss, grads = scored.gradients(program, params, scored.Sequences.draw(seed).batch(kind))
    assert np.abs(scores - results["logits"]).max() <= LIMIT * np.abs(results["logits"]).max()
    assert loss == pytest.approx(float(results["loss"]), rel=LIMIT)
    expected = Results.of_gradients(weights, results["logits"], results["loss"], gradients)
    errors = ours.relative_errors(family, grads, expected)
    assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}
    batches = [step.batch(kind) for step in scored.training_sequences(seed)]
    losses, _ = scored.train(program, params, batches)
    np.testing.assert_allclose(losses, results["losses"], rtol=LIMIT, atol=LIMIT * losses[0])
