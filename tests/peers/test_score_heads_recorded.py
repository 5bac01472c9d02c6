"""A classifier and a reward model, compared with the results that tools.record_score_heads recorded from TRL."""

import numpy as np
import pytest

from tools.peers import ours, score_heads
from tools.peers.recording import TUNING, PeerResults

LIMIT = 1e-5


@pytest.mark.once("reward")
@pytest.mark.parametrize("kind", ["classify", "reward"])
def test_logits_loss_gradients_and_ten_steps(kind):
    seed, weights, gradients, results = score_heads.load_recorded(TUNING / f"scored-{kind}.npz")
    family = score_heads.build_family(score_heads.RECORDED_SHAPE, kind)
    program = score_heads.build_program(family, kind)
    params = ours.parameters(family, program.experiment.model, weights)
    scores, loss, grads = score_heads.gradients(program, params, score_heads.Sequences.draw(seed).batch(kind))
    assert np.abs(scores - results["logits"]).max() <= LIMIT * np.abs(results["logits"]).max()
    assert loss == pytest.approx(float(results["loss"]), rel=LIMIT)
    expected = PeerResults.from_gradients(weights, results["logits"], results["loss"], gradients)
    errors = ours.relative_errors(family, grads, expected)
    assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}
    batches = [step.batch(kind) for step in score_heads.training_sequences(seed)]
    losses, _ = score_heads.train(program, params, batches)
    np.testing.assert_allclose(losses, results["losses"], rtol=LIMIT, atol=LIMIT * losses[0])
