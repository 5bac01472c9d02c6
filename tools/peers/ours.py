"""Our results: the same weights and inputs, through the parts that training uses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TokenMemmap
from plimsoll.framework.data.tokenizers import NoTokenizer
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import rope
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.layout import Nested, TrainState, flatten, unflatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.after_backward import accumulate_gradients
from plimsoll.framework.schedules.step import training_context
from tools.peers.families import BATCH, SEQ_LEN, VOCAB, PeerFamily
from tools.peers.recording import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY, Inputs, PeerResults, Tensors


def to_ours(family: PeerFamily, tensors: Tensors) -> Nested:
    """Convert transformers' tensors (weights, gradients, or anything else per element) to our nested arrays.

    Raises:
        ValueError: a tensor is left over, so the mapping is not complete.
    """
    covered_shares, flat, specs = dict.fromkeys(tensors, 0.0), {}, family.ours().instantiate().base_specs
    for path, sources in family.places.items():
        shape = specs[path].shape if specs[path].num_layers is None else specs[path].shape[1:]
        whole = tuple(slice(None) for _ in shape)
        parts = [source.read(tensors.__getitem__, shape, whole) for source in sources]
        flat[path] = parts[0] if specs[path].num_layers is None else np.stack(parts)
        for source in sources:
            for part in source.parts(shape):
                covered_shares[part.source.name] += part.ours[-1] / part.source.width(part.ours)
    wrong = [name for name, share in covered_shares.items() if not np.isclose(share, 1.0)]
    if wrong:
        raise ValueError(f"these tensors of transformers do not end up once each in our parameters: {wrong}")
    return unflatten(flat)


def parameters(family: PeerFamily, model: CausalLM, tensors: Tensors) -> Nested:
    """Convert transformers' tensors to our parameters (or gradients, ...).

    Raises:
        ValueError: a tensor has no destination, or a parameter of the model is not filled, or has another shape.
    """
    params = to_ours(family, tensors)
    expected = {path: spec.shape for path, spec in flatten(model.parameter_specs()).items()}
    actual = {path: array.shape for path, array in flatten(params).items()}
    if expected != actual:
        raise ValueError(f"{family.name}: parameters differ: {sorted(set(expected.items()) ^ set(actual.items()))}")
    return params


def experiment(family: PeerFamily, *, unroll: int = 1, chunk_tokens: int = 1024, **memory: Any) -> Config:
    """Build a whole experiment with the family's model; its data is never opened."""
    model = family.ours()
    model.stack.unroll = unroll
    model.head.chunk_tokens = chunk_tokens
    optimizer = config_for(
        optax.adamw, learning_rate=LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY
    )
    config = config_for(
        Experiment,
        model=model,
        data=config_for(
            DataPipeline,
            source=config_for(TokenMemmap, path="not-there.bin"),
            tokenizer=config_for(NoTokenizer, vocab_size=VOCAB),
            seq_len=SEQ_LEN,
            global_batch_size=BATCH,
        ),
        learner=config_for(Learner, optimizer=optimizer, clip=CLIP),
        trainer=config_for(TrainerOptions, max_steps=1),
    )
    for field, value in memory.items():
        config.memory[field] = value
    return config


def build_program(config: Config) -> Program:
    """Build the program on one device."""
    return Program(config.instantiate(), jax.devices()[:1])


def gradients(program: Program, params: Nested, batch: Batch) -> tuple[np.ndarray, np.ndarray, Nested]:
    """Return (logits [B, S, V], loss, gradients) on the host, computed by the functions of a training step."""
    model, experiment = program.experiment.language_model, program.experiment

    def run(params: Nested, batch: Batch) -> Any:
        counter = {"rng": jax.random.key_data(jax.random.key(0)), "step": jnp.int32(0)}
        ctx = training_context(batch, counter, model, program.layout, experiment.memory.remat)
        state = TrainState(parameter=params)
        (loss, _), grads = accumulate_gradients(model, experiment.learner, state, ctx)
        return model.logits(params, program.evaluation_context(batch), {}), loss, grads

    return jax.device_get(jax.jit(run)(params, batch))


def logits(program: Program, params: Nested, batch: Batch) -> np.ndarray:
    """Return logits, float32[B, S, V]."""

    def run(params: Nested, batch: Batch) -> jax.Array:
        context: Context = program.evaluation_context(batch)
        return program.experiment.language_model.logits(params, context, {})

    return jax.device_get(jax.jit(run)(params, batch))


def train(program: Program, params: Nested, inputs: Inputs) -> tuple[np.ndarray, Tensors]:
    """Run the compiled training step; return (losses [steps], norm of each parameter's change by path)."""
    first = flatten(params)
    trained, frozen = [
        unflatten({path: first[path] for path in flatten(specs)})
        for specs in (program.layout.specs.parameter, program.layout.specs.frozen)
    ]
    new = program.experiment.learner.init(trained)
    counter = {"step": np.int32(0), "skipped": np.int32(0), "grad_norm": np.float32(0)}
    counter["rng"] = jax.random.key_data(jax.random.key(0))
    state = TrainState(parameter=new.weights, frozen=frozen, optimizer=new.entry, ema=new.average, counter=counter)
    state = jax.device_put(state, program.layout.shardings())
    losses = []
    for batch in inputs.training_batches():
        state, metrics = program.step(state, program.put(batch))
        losses.append(np.asarray(metrics["loss"]))
    last = flatten(state.parameter) | flatten(state.frozen)
    moved = {path: np.asarray(array, np.float64) - first[path] for path, array in last.items()}
    return np.asarray(losses), {path: np.asarray(np.linalg.norm(array)) for path, array in moved.items()}


def _rotary(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Rotary:
    theta, ours = rope(ConfigFacts({"rope_theta": theta, "rope_scaling": scaling}))
    return config_for(Rotary, theta=theta, scaling=ours).instantiate(head_dim=head_dim)


def rotary_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> np.ndarray:
    """Return float64[H / 2] in radians per position; `scaling` has transformers' format."""
    return _rotary(head_dim, theta, scaling).frequencies


def rotate(
    head_dim: int, theta: float, scaling: dict[str, Any] | None, positions_P: np.ndarray, query_PH: np.ndarray
) -> np.ndarray:
    """Rotate queries [P, H] by their positions [P], in the query's dtype."""
    rotary = _rotary(head_dim, theta, scaling)
    (turned,) = rotary(jnp.asarray(positions_P)[None], jnp.asarray(query_PH)[None, :, None])
    return np.asarray(turned[0, :, 0])


def relative_errors(family: PeerFamily, ours: Nested, theirs: PeerResults) -> dict[str, float]:
    """Return ||ours - theirs|| / ||theirs|| of each gradient.

    The error of a gradient that is zero in exact arithmetic is relative to the norm of all gradients.
    """
    expected = flatten(to_ours(family, theirs.gradients))
    total = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in expected.values())))
    errors = {}
    for path, gradient in flatten(ours).items():
        difference = float(np.linalg.norm(np.asarray(gradient, np.float64) - expected[path]))
        scale = total if path in family.no_gradient else float(np.linalg.norm(expected[path].astype(np.float64)))
        errors[path] = difference / scale
    return errors
