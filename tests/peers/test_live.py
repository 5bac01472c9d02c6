"""The comparisons of test_recorded.py, live with torch and transformers, on other weights and tokens.

In float64 both sides agree to fifteen digits, so the difference in float32 is only rounding.
"""

import jax
import numpy as np
import pytest

from tools.peers import ours
from tools.peers.families import FAMILIES, ROTARY, ROTARY_POSITIONS
from tools.peers.recording import Inputs, PeerResults

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]
SEED = 7
LIMIT = 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_float32(name, theirs):
    family, inputs = FAMILIES[name], Inputs.draw(SEED)
    expected = theirs.compute(theirs.build(family, SEED), family, inputs)
    program = ours.build_program(ours.experiment(family, chunk_tokens=8))
    params = ours.parameters(family, program.experiment.model, expected.weights)

    logits, loss, grads = ours.gradients(program, params, inputs.batch())
    assert np.linalg.norm(logits - expected.logits) <= LIMIT * np.linalg.norm(expected.logits)
    assert loss == pytest.approx(expected.loss, rel=LIMIT)
    errors = ours.relative_errors(family, grads, expected)
    assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}

    batch = inputs.pack_batch()
    packed = ours.logits(program, params, batch)
    used = batch["weights"] > 0
    assert np.abs(packed - expected.packed_logits)[used].max() <= LIMIT * np.abs(expected.packed_logits).max()

    losses, moved = ours.train(program, params, inputs)
    np.testing.assert_allclose(losses, expected.losses, rtol=LIMIT)
    for path in set(moved) - set(family.no_gradient):
        assert moved[path] == pytest.approx(expected.update_norms[path], rel=20 * LIMIT), path


@pytest.mark.parametrize("name", FAMILIES)
def test_float64(name, theirs):
    family, inputs = FAMILIES[name], Inputs.draw(SEED)
    model = theirs.build(family, SEED)
    weights = {name: tensor.astype(np.float64) for name, tensor in theirs.get_weights(model).items()}
    expected = PeerResults.from_gradients(weights, *theirs.compute_wide(model, family, inputs))
    with jax.enable_x64(True):
        config = ours.experiment(family)
        config.model.param_dtype = config.model.compute_dtype = "float64"
        program = ours.build_program(config)
        params = ours.parameters(family, program.experiment.model, expected.weights)
        logits, loss, grads = ours.gradients(program, params, inputs.batch())
    assert logits.dtype == np.float64
    assert np.abs(logits - expected.logits).max() <= 1e-13 * np.abs(expected.logits).max()
    assert loss == pytest.approx(float(expected.loss), rel=1e-14)
    errors = ours.relative_errors(family, grads, expected)
    assert {path: error for path, error in errors.items() if not error <= 1e-13} == {}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_tables(name, theirs):
    tables = theirs.rotary(name)
    with jax.enable_x64(True):
        rotated = ours.rotate(*ROTARY[name], np.asarray(ROTARY_POSITIONS), tables["query"])
    np.testing.assert_allclose(rotated, tables["rotated"], rtol=0, atol=1e-10)
