"""Our results for sampled answers, computed by the functions of a training step."""

from __future__ import annotations

import jax
import numpy as np

from plimsoll.framework.batch_transforms.answers import compute_advantages
from plimsoll.framework.layout import Nested, flatten
from plimsoll.framework.program.program import Program
from tools.peers import ours
from tools.peers.policy_cases import BATCH, GROUP, MODEL, SEQ_LEN, VOCAB, PolicyCase, PolicyResults, Samples


def loss_and_gradients(
    case: PolicyCase, samples: Samples, results: PolicyResults, *, dtype: str = "float32"
) -> tuple[np.ndarray, Nested, np.ndarray]:
    """Return (loss, gradients, advantages f32[B])."""
    config = ours.experiment(MODEL, chunk_tokens=8)
    config.data.tokenizer.vocab_size = VOCAB
    config.data.seq_len = SEQ_LEN
    config.data.global_batch_size = BATCH
    config.model.head.objective = case.objective
    config.model.param_dtype = config.model.compute_dtype = dtype
    # Not for training: the batch below has arrays that this experiment's data lacks.
    program = Program(config.instantiate(), jax.devices()[:1], training=False)
    params = ours.parameters(MODEL, program.experiment.language_model, results.weights)
    advantages_B, spreads_B = compute_advantages(samples.rewards, GROUP, "group")
    batch = samples.batch(advantages_B, spreads_B)
    if dtype == "float64":
        params = jax.tree.map(lambda x: x.astype(np.float64), params)
        batch = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in batch.items()}
    _, loss, grads = ours.gradients(program, params, batch)
    return loss, grads, advantages_B


def relative_errors(grads: Nested, results: PolicyResults) -> dict[str, float]:
    """Return ||ours - theirs|| / ||theirs|| of each gradient."""
    expected = flatten(ours.to_ours(MODEL, results.gradients))
    errors = {}
    for path, gradient in flatten(grads).items():
        difference = np.asarray(gradient, np.float64) - expected[path]
        errors[path] = float(np.linalg.norm(difference) / np.linalg.norm(expected[path].astype(np.float64)))
    return errors
