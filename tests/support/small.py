"""Tiny experiments, synthetic batches, and functions for comparisons in tests of the core; no data is read."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TokenMemmap
from plimsoll.framework.data.tokenizers import NoTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.families.decoders import gpt2_model, llama_model
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.after_backward import accumulate_gradients
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.step import training_context

VOCAB = 64
# A large eps, so that gradients that are only rounding errors, such as those of key biases, do not become full updates.
STEADY_ADAMW = config_for(optax.adamw, learning_rate=1e-2, eps=1e-3, weight_decay=0.1)
ROOT = Path(__file__).parents[2]


def gpt2(**fields: Any) -> Config:
    """GPT-2 with 2 layers of width 32, 4 heads, tied tables, learned positions, biases and dropout.

    `fields` overrides config fields; their paths are written with __ for dots.
    """
    return _with(gpt2_model(layers=2, heads=4, dim=32, vocab_size=VOCAB, positions=32, dropout=0.1), fields)


def llama(**fields: Any) -> Config:
    """Llama with 2 layers of width 32, 4 heads, 2 key-value heads, a gated MLP, rotary positions and an untied head."""
    return _with(llama_model(layers=2, heads=4, kv_heads=2, dim=32, hidden=48, vocab_size=VOCAB), fields)


def block(model: Config) -> Config:
    """Return the config of the only layer in a model's pattern."""
    return model.stack.pattern[0]


def experiment(
    model: Config | None = None,
    *,
    seq_len: int = 16,
    batch: int = 8,
    documents: bool = False,
    mesh: dict[str, int] | None = None,
    memory: dict[str, Any] | None = None,
    **learner: Any,
) -> Config:
    """Return the config of an experiment.

    The optimizer is AdamW with a learning rate that changes every weight, unless `learner` has another one.
    """
    learner.setdefault("optimizer", config_for(optax.adamw, learning_rate=1e-2, weight_decay=0.1))
    return config_for(
        Experiment,
        model=gpt2() if model is None else model,
        data=config_for(
            DataPipeline,
            source=config_for(TokenMemmap, path="never-read.bin"),
            tokenizer=config_for(NoTokenizer, vocab_size=VOCAB),
            seq_len=seq_len,
            global_batch_size=batch,
            document_mask=documents,
        ),
        mesh=config_for(MeshShape, **(mesh or {})),
        learner=config_for(Learner, **learner),
        memory=config_for(Memory, **(memory or {})),
        trainer=config_for(TrainerOptions, max_steps=10),
    )


def program(config: Config) -> Program:
    """Return the program on one device, or on all eight if the config has a mesh."""
    built = config.instantiate()
    single = config.mesh == config_for(MeshShape)
    return Program(built, jax.devices()[:1] if single else jax.devices())


def host_batch(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a batch of random tokens in which some targets have weight 0.

    With a document mask, each row has three documents and padding.
    """
    data = program.experiment.data
    shape = (data.global_batch_size, data.seq_len)
    rng = np.random.default_rng(seed)
    stream = rng.integers(0, program.experiment.model.vocab_size, (shape[0], shape[1] + 1)).astype(np.int32)
    batch = {"tokens": stream[:, :-1], "targets": stream[:, 1:], "weights": np.ones(shape, np.float32)}
    batch["weights"][rng.random(shape) < 0.2] = 0.0
    if data.document_mask:
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row in range(shape[0]):
            first, second = sorted(rng.choice(np.arange(1, shape[1] - 2), 2, replace=False))
            for number, (start, end) in enumerate([(0, first), (first, second), (second, shape[1] - 2)], 1):
                segments[row, start:end] = number
                positions[row, start:end] = np.arange(end - start)
        batch |= {"segments": segments, "positions": positions, "weights": batch["weights"] * (segments > 0)}
    return batch


def run(program: Program, steps: int, state: Any = None) -> tuple[Any, list[dict[str, float]]]:
    """Run `steps` training steps on batches 0, 1, ... and return the last state and the metrics of each step."""
    state = program.init() if state is None else state
    metrics = []
    for step in range(steps):
        state, values = program.step(state, program.put(host_batch(program, step)))
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


def loss_and_grads(program: Program, state: Any = None, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the loss and {path: gradient} of a batch, as the training step computes them.

    `state` may come from a program on another mesh; the default is the initial state of this program.
    """
    state = program.init() if state is None else jax.device_put(state, program.layout.shardings())
    (loss, _), grads = compile_gradients(program)(state, program.put(host_batch(program, seed)))
    return np.asarray(loss), arrays(grads)


def compile_gradients(program: Program) -> Any:
    """Return the function (state, batch) -> ((loss, out), gradients), compiled for the program's mesh."""
    parts = program.experiment

    def gradients(state: Any, batch: Any) -> Any:
        ctx = training_context(batch, state.counter, parts.model, program.layout, parts.memory.remat)
        return accumulate_gradients(parts.model, parts.learner, state, ctx)

    abstract = program.layout.abstract(), program.layout.abstract(program.batch_specs)
    return jax.jit(gradients).lower(*abstract).compile()


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return {path: copy of the leaf as a numpy array}."""
    return {path: np.array(leaf) for path, leaf in flatten(tree).items()}


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Assert that the error of each leaf is at most `tolerance`, relative to the largest element of the expected leaf.

    For leaves close to zero the scale is 1% of the largest element of all floating-point leaves. Integers must be
    equal: the words of a random key, which are billions, would hide all errors.
    """
    assert actual.keys() == expected.keys()
    floats = [value for value in expected.values() if jnp.issubdtype(value.dtype, jnp.inexact)]
    largest = max((np.abs(value).max() for value in floats), default=0.0)
    for path, value in expected.items():
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            np.testing.assert_array_equal(actual[path], value, err_msg=path)
            continue
        scale = max(np.abs(value).max(), 1e-2 * largest)
        error = np.abs(np.asarray(actual[path], np.float64) - np.asarray(value, np.float64)).max() / scale
        assert error <= tolerance, f"{path}: off by {error:.1e} of {scale:.1e}"


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Assert that structures, dtypes and bits are equal (NaN included)."""
    left, right = arrays(actual), arrays(expected)
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype, path
        assert left[path].tobytes() == right[path].tobytes(), f"{path} differs"


def _with(config: Config, fields: dict[str, Any]) -> Config:
    # Large weights make attention far from uniform, so every part of the model affects loss and gradients.
    for path, value in list(config.leaves()):
        if path.endswith("stddev"):
            config.set_path(path, 10 * value)
    for name, value in fields.items():
        config.set_path(name.replace("__", "."), value)
    return config
