"""Distillation compared to its formulas in float64; every schedule gives the same result."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from plimsoll.framework.batch_transforms.teacher_scoring import make_top_k_function
from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.objectives.distillation import Distillation
from plimsoll.framework.program.batch_transform import BatchTransform
from tests.support import small

B, S, D, V = 2, 12, 8, 11
SETTINGS = [
    {"divergence": "forward", "alpha": 0.0},
    {"divergence": "forward", "temperature": 2.5, "alpha": 0.3},
    {"divergence": "reverse", "temperature": 0.7, "alpha": 0.1},
    {"divergence": "jsd", "beta": 0.2, "temperature": 1.5, "alpha": 0.0},
]


def teacher_arrays(logits_BSV: np.ndarray, top_k: int) -> dict[str, np.ndarray]:
    """Return the batch arrays of a teacher with these logits; the tail follows its definition but is always finite."""
    log_probs = log_softmax(logits_BSV, axis=-1)
    order = np.argsort(-log_probs, axis=-1, kind="stable")
    sorted_log_probs = np.take_along_axis(log_probs, order, -1)
    others = sorted_log_probs[..., top_k:]
    tail = logsumexp(others, axis=-1) if others.shape[-1] else np.full(others.shape[:-1], -50.0)
    return {
        "teacher_ids": order[..., :top_k].astype(np.int32),
        "teacher_log_probs": sorted_log_probs[..., :top_k],
        "teacher_tail": tail,
    }


def merge_tail(probs_BSV: np.ndarray, ids_BSK: np.ndarray) -> np.ndarray:
    """Return the probabilities of the K tokens and, if there are others, the sum of the others."""
    picked = np.take_along_axis(probs_BSV, ids_BSK, -1)
    if ids_BSK.shape[-1] == probs_BSV.shape[-1]:
        return picked
    return np.concatenate([picked, 1 - picked.sum(-1, keepdims=True)], -1)


def compute_expected_loss(
    logits_BSV: np.ndarray, teacher_BSV: np.ndarray, batch: dict, top_k: int, fields: dict
) -> dict:
    """Return the loss and its metrics, computed from probabilities by the formulas of the objective's docstring."""
    fields = {"beta": 0.5, "temperature": 1.0, **fields}
    order = np.argsort(-teacher_BSV, axis=-1, kind="stable")[..., :top_k]
    temperature, beta, alpha = fields["temperature"], fields["beta"], fields["alpha"]
    p1, q1 = (merge_tail(np.exp(log_softmax(logits, axis=-1)), order) for logits in (teacher_BSV, logits_BSV))
    p, q = (x ** (1 / temperature) / (x ** (1 / temperature)).sum(-1, keepdims=True) for x in (p1, q1))

    def kl(a, b):
        return np.sum(a * (np.log(a) - np.log(b)), -1)

    m = beta * p + (1 - beta) * q
    by_name = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}
    nll = -np.take_along_axis(log_softmax(logits_BSV, axis=-1), batch["targets"][..., None], -1)[..., 0]
    weights = batch["weights"] / batch["weights"].sum()
    values = (1 - alpha) * temperature**2 * by_name[fields["divergence"]] + alpha * nll
    agreement = logits_BSV.argmax(-1) == teacher_BSV.argmax(-1)
    sums = {"loss": values, "kl": kl(p1, q1), "nll": nll, "agreement": agreement}
    return {name: float(np.sum(weights * value)) for name, value in sums.items()}


def sample_inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return (x_BSD, table_VD, the teacher's logits_BSV, targets and weights), float64."""
    rng = np.random.default_rng(seed)
    batch = {
        "targets": rng.integers(0, V, (B, S)).astype(np.int32),
        "weights": (rng.random((B, S)) > 0.3).astype(np.float64),
    }
    return rng.normal(size=(B, S, D)), rng.normal(size=(V, D)), 2 * rng.normal(size=(B, S, V)), batch


def head_loss(fields: dict, batch: dict, chunk_tokens: int = 3):
    """Return (table, x) -> (loss, metrics) and (table, x) -> logits, both of the head; call both with x64 enabled."""
    objective = config_for(Distillation, **fields)
    head = config_for(LMHead, dim=D, vocab_size=V, chunk_tokens=chunk_tokens, objective=objective).instantiate()
    arrays = {name: jnp.asarray(value) for name, value in batch.items()}
    ctx = Context(batch=arrays, num_targets=jnp.sum(arrays["weights"]), compute_dtype=jnp.float64)
    norm = {"scale": jnp.ones(D)}

    def loss(table, x):
        _, out = head.apply({"table": table, "norm": norm}, x, ctx, {})
        return out.loss, out.metrics

    def logits(table, x):
        return head.logits({"table": table, "norm": norm}, x, ctx)

    return loss, logits


@pytest.mark.pairs
@pytest.mark.parametrize("top_k", [1, 4, V])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_loss_and_gradients_match_the_formulas(fields, top_k):
    x, table, teacher, batch = sample_inputs()
    with jax.enable_x64(True):
        compute_loss, compute_logits = head_loss(fields, batch | teacher_arrays(teacher, top_k))
        (loss, metrics), grads = jax.value_and_grad(compute_loss, argnums=(0, 1), has_aux=True)(table, x)
        expected = compute_expected_loss(np.asarray(compute_logits(table, x)), teacher, batch, top_k, fields)
        for name, value in {"loss": loss, **metrics}.items():
            assert float(value) == pytest.approx(expected[name], abs=1e-12), name
        rng = np.random.default_rng(1)
        for index, array in enumerate((table, x)):
            direction = rng.normal(size=array.shape)
            values = []
            for step in (1e-5, -1e-5):
                moved = [table, x]
                moved[index] = array + step * direction
                logits = np.asarray(compute_logits(*moved))
                values.append(compute_expected_loss(logits, teacher, batch, top_k, fields)["loss"])
            slope = (values[0] - values[1]) / 2e-5
            assert float(np.sum(np.asarray(grads[index]) * direction)) == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.pairs
def test_the_bucket_keeps_its_digits_where_it_is_all_but_empty():
    """In float32, a student that gives the other tokens a total of 1e-9 still gets their gradient."""
    x, table, _, batch = sample_inputs()
    sharp = np.full((B, S, V), -30.0)
    sharp[..., 0] = 0.0
    compute_loss, _ = head_loss({"alpha": 0.0}, batch | teacher_arrays(sharp, 1))
    grads = []
    for dtype in ("float32", "float64"):
        with jax.enable_x64(True):
            grad = jax.grad(lambda table, x: compute_loss(table, x)[0])(
                jnp.asarray(10 * table, dtype), jnp.asarray(3 * x, dtype)
            )
            grads.append(np.asarray(grad, np.float64))
    assert np.isfinite(grads[0]).all()
    np.testing.assert_allclose(grads[0], grads[1], atol=1e-5 * np.abs(grads[1]).max())


def test_a_student_that_equals_its_teacher_has_no_divergence():
    x, table, _, batch = sample_inputs()
    with jax.enable_x64(True):
        _, compute_logits = head_loss({}, batch | teacher_arrays(np.zeros((B, S, V)), 1))
        logits = np.asarray(compute_logits(table, x))
        for fields in SETTINGS:
            compute_loss, _ = head_loss({**fields, "alpha": 0.0}, batch | teacher_arrays(logits, 4))
            loss, metrics = compute_loss(table, x)
            assert abs(float(loss)) < 1e-12
            assert float(metrics["agreement"]) == pytest.approx(1.0)


@pytest.mark.pairs
def test_fewer_teacher_tokens_never_increase_the_divergence():
    x, table, teacher, batch = sample_inputs()
    with jax.enable_x64(True):
        losses = []
        for top_k in range(1, V + 1):
            compute_loss, _ = head_loss({"alpha": 0.0}, batch | teacher_arrays(teacher, top_k))
            losses.append(float(compute_loss(table, x)[0]))
    assert losses == sorted(losses)
    assert losses[0] < losses[-1]


def test_evaluation_reports_means_and_next_token_perplexity():
    objective = config_for(Distillation).instantiate()
    totals = {"loss": 6.0, "kl": 4.0, "nll": 8.0, "agreement": 3.0, "tokens": 4.0}
    summary = objective.summary(totals)
    assert summary == {"loss": 1.5, "kl": 1.0, "nll": 2.0, "agreement": 0.75, "perplexity": math.exp(2), "tokens": 4.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("temperature", -1.0), ("temperature", math.inf), ("alpha", 1.5), ("beta", 0.0)],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises((ConfigError, ValueError), match=field) as info:
        config_for(Distillation, **{field: value}).instantiate()
    assert "\n" not in str(info.value)


def test_batches_without_a_teacher_are_refused():
    model = small.llama(head__objective=config_for(Distillation))
    with pytest.raises(ValueError, match="reads teacher_ids, teacher_log_probs, teacher_tail of a batch"):
        small.program(small.experiment(model))


class RandomTeacher(BatchTransform):
    """Adds the arrays of a teacher with random logits, seeded by the first token of the batch."""

    def __init__(self, *, top_k: int = 3):
        self.top_k = top_k

    def arrays(self, delivered, *, evaluation=False):
        rows, length = delivered["tokens"][0]
        tokens_shape = (rows, length, self.top_k)
        added = {
            "teacher_ids": (tokens_shape, "int32"),
            "teacher_log_probs": (tokens_shape, "float32"),
            "teacher_tail": ((rows, length), "float32"),
        }
        return {**delivered, **added}

    def complete_batch(self, program, state, batch, *, group="parameter"):
        tokens = np.asarray(batch["tokens"])
        logits = 2 * np.random.default_rng(int(tokens[0, 0])).normal(size=(*tokens.shape, small.VOCAB))
        arrays = teacher_arrays(logits, self.top_k)
        typed = {name: np.asarray(value, np.int32 if "ids" in name else np.float32) for name, value in arrays.items()}
        return {**batch, **program.put(typed)}


def train(memory: dict | None = None, mesh: dict | None = None, steps: int = 3, **learner):
    """Train a distilled llama for a few steps and return (losses, final weights)."""
    model = small.llama(head__objective=config_for(Distillation, divergence="jsd", temperature=2.0))
    config = small.experiment(model, documents=True, memory=memory, mesh=mesh, **learner)
    config.batch_transform = config_for(RandomTeacher)
    program = small.program(config)
    state, metrics = small.run(program, steps)
    stored = program.backend.to_checkpoint(state)
    return [row["loss"] for row in metrics], small.arrays(stored.parameter)


WAYS = {
    "accumulated": {"accumulate": 2},
    "streamed": {"memory": {"update": "streamed"}},
    "offloaded gradients": {"memory": {"update": "streamed", "gradients": "pinned_host"}},
    "in_backward": {"memory": {"update": "in_backward"}, "clip_mode": "two_pass"},
    "layer programs": {"memory": {"update": "layer_programs"}},
    "eight devices": {"mesh": {"data": 2, "fsdp": 2, "model": 2}},
    "positions cut": {"mesh": {"data": 2, "seq": 4}},
}


@pytest.mark.pairs
@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_under_every_schedule(way):
    losses, weights = train()
    other_losses, other_weights = train(**WAYS[way])
    np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
    small.assert_close(other_weights, weights, 2e-3)


def test_logits_never_exist_whole():
    """No buffer holds all logits: not for the student with its gradient, and not for the teacher."""
    length, vocab, width, top_k = 64, 101, 8, 5
    head = config_for(
        LMHead,
        dim=width,
        vocab_size=vocab,
        chunk_tokens=8,
        gradient_tokens=8,
        objective=config_for(Distillation, divergence="jsd"),
    ).instantiate()
    params = {"table": jnp.ones((vocab, width)), "norm": {"scale": jnp.ones(width)}}
    ids = jnp.tile(jnp.arange(top_k), (1, length, 1))
    batch = {
        "targets": jnp.zeros((1, length), jnp.int32),
        "weights": jnp.ones((1, length)),
        "teacher_ids": ids,
        "teacher_log_probs": jnp.full(ids.shape, -2.0),
        "teacher_tail": jnp.full((1, length), -1.0),
    }
    x = jnp.ones((1, length, width))

    def student(params, x):
        ctx = Context(batch=batch, num_targets=jnp.float32(length), training=True)
        return head.apply(head.prepare(params, ctx), x, ctx, {})[1].loss

    def teacher(params, x):
        ctx = Context(batch=batch)
        return make_top_k_function(top_k, vocab)(head, head.prepare(params, ctx), x, ctx)

    for function in (jax.grad(student, argnums=(0, 1)), teacher):
        text = jax.jit(function).lower(params, x).compile().as_text()
        sizes = {math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
        assert 8 * vocab in sizes
        assert max(sizes) < length * vocab / 2
