"""Our results for preferences: the same weights and examples, through the parts that training uses."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layout import Nested, TrainState, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.after_backward import accumulate_gradients
from plimsoll.framework.schedules.step import training_context
from tools.peers import ours
from tools.peers.preference_cases import (
    BATCH,
    BETAS,
    EPS,
    LEARNING_RATE,
    MODEL,
    PACKED_LEN,
    PACKED_ROWS,
    PADDED_LEN,
    VOCAB,
    PreferenceCase,
    examples,
    training_seeds,
)
from tools.peers.preference_recording import PreferenceResults
from tools.peers.preference_rows import GivenBatches, to_batch, to_rows
from tools.peers.recording import Tensors


def get_batch_shape(*, packed: bool) -> tuple[int, int]:
    """Return [B, S]: one example per row, or two if packed."""
    return (PACKED_ROWS, PACKED_LEN) if packed else (BATCH, PADDED_LEN)


def extra_arrays(objective: Any) -> dict[str, str]:
    """Return {name: dtype} of the arrays that an objective reads but not all batches have."""
    return {name: "float32" for name in ("reference", "labels") if name in objective.arrays}


def build_program(case: PreferenceCase, *, packed: bool, chunk_tokens: int = 8) -> Program:
    """Build the program of the case's loss on one device, with small chunks of logits."""
    model = MODEL.ours()
    model.head.chunk_tokens = chunk_tokens
    model.head.objective = case.objective
    optimizer = config_for(
        optax.adamw, learning_rate=LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=0.0
    )
    data = GivenBatches(get_batch_shape(packed=packed), VOCAB, extra_arrays(case.objective.instantiate()))
    config: Config = config_for(
        Experiment,
        model=model,
        mesh=config_for(MeshShape),
        learner=config_for(Learner, optimizer=optimizer, clip=None),
        trainer=config_for(TrainerOptions, max_steps=1),
    )
    return Program(config.instantiate(data=data), jax.devices()[:1])


def batch(program: Program, case: PreferenceCase, reference: Nested, seed: int, *, packed: bool) -> Batch:
    """Return the examples of a seed as a batch; `reference` are the weights of the reference model."""
    num_rows, seq_len = get_batch_shape(packed=packed)
    rows = to_rows(examples(case, seed), num_rows)
    arrays = to_batch(rows, seq_len, labels=case.thumbs)
    if "reference" not in program.batch_specs:
        return arrays
    return {**arrays, "reference": np.asarray(_log_probs(program)(reference, arrays))}


@cache
def _log_probs(program: Program) -> Any:
    """Compile (weights, batch) -> f32[B, S]."""

    def log_probs(params: Nested, arrays: Batch) -> jax.Array:
        ctx = program.evaluation_context(arrays)
        return program.experiment.language_model.log_probs(params, ctx, {})

    return jax.jit(log_probs)


def gradient_errors(case: PreferenceCase, results: PreferenceResults, seed: int, *, packed: bool) -> dict[str, float]:
    """Return the relative errors of our loss, gradients and metrics of a batch against TRL's, by path.

    Compares only the metrics that TRL has.
    """
    program, params, reference = _build_case(case, results, packed=packed)
    arrays = batch(program, case, reference, seed, packed=packed)
    loss, metrics, gradients = _gradients(program, params, arrays)
    errors = {"loss": _relative(loss, results.loss)}
    errors |= _tensor_errors(flatten(gradients), results.gradients)
    for name, value in results.metrics.items():
        errors[f"metrics/{name}"] = _relative(metrics[f"head/{name}"], value)
    return errors


def training_errors(case: PreferenceCase, results: PreferenceResults, seed: int, *, packed: bool) -> dict[str, float]:
    """Return the relative errors of the losses of ten steps, and of the weights after them, against TRL's, by path."""
    program, params, reference = _build_case(case, results, packed=packed)
    batches = [batch(program, case, reference, number, packed=packed) for number in training_seeds(seed)]
    losses, trained = _train(program, params, batches)
    worst_loss = float(np.max(np.abs(losses / results.losses - 1)))
    return {"losses": worst_loss, **_tensor_errors(trained, results.trained)}


def _build_case(case: PreferenceCase, results: PreferenceResults, *, packed: bool) -> tuple[Program, Nested, Nested]:
    """Return (program, weights, weights of the reference)."""
    program = build_program(case, packed=packed)
    model = program.experiment.language_model
    params = ours.parameters(MODEL, model, results.weights)
    return program, params, ours.parameters(MODEL, model, results.reference)


def _gradients(program: Program, params: Nested, arrays: Batch) -> tuple[np.ndarray, Tensors, Nested]:
    """Return (loss, metrics, gradients), computed by the functions of a training step."""
    experiment = program.experiment

    def run(state: TrainState, arrays: Batch) -> Any:
        ctx = training_context(arrays, state.counter, experiment.model, program.layout, experiment.memory.remat)
        (loss, out), grads = accumulate_gradients(experiment.model, experiment.learner, state, ctx)
        return loss, out.metrics, grads

    return jax.device_get(jax.jit(run)(_state(program, params), program.put(arrays)))


def _train(program: Program, params: Nested, batches: list[Batch]) -> tuple[np.ndarray, Tensors]:
    """Run the compiled training step; return (losses [steps], weights by path)."""
    state = _state(program, params)
    losses = []
    for arrays in batches:
        state, metrics = program.step(state, program.put(arrays))
        losses.append(np.asarray(metrics["loss"]))
    return np.asarray(losses), jax.device_get(flatten(state.parameter))


def _state(program: Program, params: Nested) -> TrainState:
    new = program.experiment.learner.init(params)
    counter = {"step": np.int32(0), "skipped": np.int32(0), "grad_norm": np.float32(0)}
    counter["rng"] = jax.random.key_data(jax.random.key(0))
    state = TrainState(parameter=new.weights, optimizer=new.entry, ema=new.average, counter=counter)
    # Copied, because a step takes over the state's arrays.
    return jax.device_put(jax.tree.map(np.array, state), program.layout.shardings())


def _tensor_errors(actual: Tensors, theirs: Tensors) -> dict[str, float]:
    expected = flatten(ours.to_ours(MODEL, theirs))
    assert expected.keys() == actual.keys()
    return {path: _relative(actual[path], array) for path, array in expected.items()}


def _relative(actual: np.ndarray, expected: np.ndarray) -> float:
    wide = np.asarray(expected, np.float64)
    difference = np.linalg.norm(np.asarray(actual, np.float64) - wide)
    return float(difference / max(np.linalg.norm(wide), 1e-30))
