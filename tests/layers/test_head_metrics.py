"""Metrics of the user, by a function of logits and targets: `LMHead.metrics`."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.inference.evaluation import evaluate_set
from plimsoll.framework.layers.head import top_k_accuracy
from plimsoll.framework.program.program import Program
from tests.support import runs
from tests.support.tiny import tiny


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text; $TINY_TEXT is restored afterwards."""
    monkeypatch.setenv("TINY_TEXT", "")
    return runs.write_text(tmp_path / "text")


def entropy(logits: jax.Array, targets: jax.Array, *, base: float = math.e) -> jax.Array:
    """Return the entropy of each prediction."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1) / math.log(base)


def with_metrics(**settings: object) -> Config:
    config = tiny()
    # A multiple of the shards of every mesh.
    config.model.vocab_size = 264
    config.model.head.chunk_tokens = 16
    config.model.head.metrics = {"top3": config_for(top_k_accuracy, k=3), "entropy": config_for(entropy, base=2.0)}
    for path, value in settings.items():
        config.set_path(path.replace("__", "."), value)
    return config


SETTINGS = {
    "one": {},
    "microbatches": {"learner__accumulate": 2},
    "eight": {"mesh__data": 2, "mesh__fsdp": 2, "mesh__model": 2},
    "layer_programs": {"memory__update": "layer_programs", "memory__remat": "full"},
    "pipeline": {"mesh__pipe": 2, "learner__accumulate": 2, "mesh__data": 4},
}


@pytest.mark.first(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_means_equal_those_of_numpy(settings: dict[str, object], text: Path, tmp_path: Path):
    experiment = with_metrics(**settings).instantiate()
    shape = experiment.mesh.resolve(8) if "mesh__data" in settings else {"data": 1}
    num_devices = math.prod(shape.values())
    program = Program(experiment, devices=jax.devices()[:num_devices])
    experiment.data.setup(tmp_path)
    state = program.init()
    found = evaluate_set(program, state, "held")
    assert found is not None

    model = with_metrics().model.instantiate()
    checkpoint = program.backend.to_checkpoint(state)
    params = jax.tree.map(np.asarray, checkpoint.parameter)
    sums = {"top3": 0.0, "entropy": 0.0, "tokens": 0.0}
    with experiment.data.eval_batches("held", program.rows) as batches:
        for batch in batches:
            context = program.evaluation_context({name: jnp.asarray(x) for name, x in batch.items()})
            logits = np.asarray(model.logits(params, context, {}), np.float64)
            weights, targets = np.asarray(batch["weights"]), np.asarray(batch["targets"])
            highest = np.argsort(-logits, axis=-1)[..., :3]
            sums["top3"] += np.sum(weights * np.any(highest == targets[..., None], axis=-1))
            probabilities = np.exp(logits - logits.max(-1, keepdims=True))
            probabilities /= probabilities.sum(-1, keepdims=True)
            sums["entropy"] -= np.sum(weights * np.sum(probabilities * np.log2(probabilities), axis=-1))
            sums["tokens"] += weights.sum()
    assert found["tokens"] == sums["tokens"]
    for name in ("top3", "entropy"):
        np.testing.assert_allclose(found[name], sums[name] / sums["tokens"], rtol=1e-5)


def test_what_is_refused():
    def build(**metrics: Config) -> None:
        config = tiny()
        config.model.head.metrics = metrics
        config.instantiate()

    with pytest.raises(ConfigError, match="'loss' is not a name for a metric"):
        build(loss=config_for(top_k_accuracy))
    with pytest.raises(ConfigError, match="has no argument 'logits'"):
        build(mine=config_for(jax.nn.initializers.normal))
    with pytest.raises(ConfigError, match=r"metrics.mine: .*required, and not set: scale"):
        build(mine=config_for(scaled))

    config = tiny()
    config.model.head.metrics = {"mine": config_for(whole)}
    model = config.model.instantiate()
    with pytest.raises(ValueError, match=r"model.head.metrics.mine: expected a number for each target.*given \(\)"):
        jax.eval_shape(lambda: run_head(model))


def scaled(logits: jax.Array, targets: jax.Array, *, scale: float) -> jax.Array:
    """Return a metric with a required argument."""
    return scale * targets


def whole(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return one number for all targets, which is not a metric."""
    return jnp.mean(logits)


def run_head(model) -> object:
    """Run the head of a model on zeros, as an evaluation does."""
    experiment = tiny().instantiate()
    program = Program(experiment, devices=jax.devices()[:1])
    batch = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in experiment.batch_arrays(evaluation=True).items()}
    context = program.evaluation_context(batch)
    params = {"table": jnp.zeros((257, 32)), "norm": {"scale": jnp.zeros(32), "bias": jnp.zeros(32)}}
    return model.head.sum_metrics(params, jnp.zeros((8, 32, 32)), context)
