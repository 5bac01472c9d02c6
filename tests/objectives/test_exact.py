"""Preference losses under every schedule, compared to plain optax on one device, in float64.

The reference computes all logits at once, without chunks, schedules, meshes or microbatches, except for KTO's estimate
of KL. A run has four steps, one of them with a poisoned batch, and a clip that some steps reach, then an evaluation.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layout import merge
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.memory import Memory
from tests.support import exact, small
from tests.support.preferences import OBJECTIVES, plain_loss, random_batch
from tools.peers.preference_rows import GivenBatches

SHAPE = (8, 16)
STEPS, POISONED = 4, 2
COMPARED = ("dpo", "ipo", "orpo", "simpo_smooth_sft", "kto", "dpo_smooth_sft")
SCHEDULES = {
    "after_backward": exact.MEMORY["after_backward"],
    "streamed": exact.MEMORY["streamed"],
    "hosted_gradients": exact.MEMORY["hosted_gradients"],
    "two_pass": exact.MEMORY["two_pass"],
    "in_backward": exact.MEMORY["in_backward"],
    "layers": exact.LAYER_PROGRAMS["layers"],
}
MESHES = {"one": None, "model": {"data": 2, "fsdp": 2, "model": 2}, "seq": {"fsdp": 2, "seq": 2, "model": 2}}
MODELS = ("untied", "tied", "frozen table", "adapters")
OPTIMIZER = config_for(optax.adamw, learning_rate=1e-2, eps=1e-4, weight_decay=0.1)


class Case(NamedTuple):
    """A combination of objective, schedule, mesh, model and microbatches."""

    objective: str
    schedule: str
    mesh: str = "one"
    model: str = "untied"
    microbatches: int = 1

    def clip(self) -> float | None:
        """Return a clip between the norms of the first two steps, or None if the schedule sets its own clip."""
        if "clip" in SCHEDULES[self.schedule][1]:
            return None
        _, _, norms = reference(self.objective, self.model, self.microbatches, None)
        return (norms[0] + norms[1]) / 2

    def program(self, clip: float | None = None) -> Program:
        """Return the experiment's program on one device or on all eight, with logits in chunks of 8 tokens."""
        objective = OBJECTIVES[self.objective]
        memory, learner = SCHEDULES[self.schedule]
        model = small.llama(head__tied=self.model == "tied", head__chunk_tokens=8, head__objective=objective)
        model.param_dtype = model.compute_dtype = "float64"
        if self.model == "adapters":
            model.lora = config_for(LoRA, rank=2, alpha=4.0, dtype="float64")
        rules = [config_for(Rule, pattern="table", freeze=True)] if self.model == "frozen table" else []
        fields = {"clip": clip, "accumulate": self.microbatches, "rules": rules, **learner}
        mesh = MESHES[self.mesh]
        config = config_for(
            Experiment,
            model=model,
            learner=config_for(Learner, optimizer=OPTIMIZER, **fields),
            memory=config_for(Memory, **memory),
            mesh=config_for(MeshShape, **(mesh or {})),
            trainer=config_for(TrainerOptions, max_steps=STEPS),
        )
        extra = {name: "float32" for name in ("reference", "labels") if name in objective.instantiate().arrays}
        data = GivenBatches(SHAPE, small.VOCAB, extra)
        devices = jax.devices() if mesh else jax.devices()[:1]
        return Program(config.instantiate(data=data), devices)


ONCE = [
    Case("dpo", "streamed", "model", "untied", 2),
    Case("orpo", "two_pass", "seq", "tied"),
    Case("kto", "layers", "one", "adapters", 2),
    Case("simpo_smooth_sft", "hosted_gradients", "one", "frozen table", 2),
]


def covering() -> list[Case]:
    """Return each loss with each schedule; meshes, models and microbatches rotate over the losses and schedules."""
    cases = []
    for i, objective in enumerate(COMPARED):
        for j, schedule in enumerate(SCHEDULES):
            mesh = list(MESHES)[(i + j) % 3]
            model = MODELS[(i + 2 * j + j // 2) % 4]
            microbatches = 1 if schedule in exact.NO_PARTS else 1 + (i + j // 2) % 2
            cases.append(Case(objective, schedule, mesh, model, microbatches))
    return [case for case in cases if case not in ONCE]


class GivenLogProbs:
    """A fake head whose inputs already are log-probabilities."""

    softcap = None

    def log_probs(self, weights, x_BS, ctx):
        return x_BS


@cache
def simplest(objective: str, model: str) -> tuple[Program, Any]:
    """Return a program on one device and the initial state of all cases, on the host; adapters have an effect."""
    program = Case(objective, "after_backward", model=model).program()
    first = jax.device_get(program.init())
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + (0.05 * rng.standard_normal(x.shape)).astype(x.dtype), first.parameter)
    return program, replace(first, parameter=params)


def host_batch(case: Case, step: int) -> dict[str, np.ndarray]:
    """Return the batch of a step; one step's batch is poisoned with NaN."""
    batch = random_batch(case.objective, SHAPE, small.VOCAB, step)
    if "reference" not in OBJECTIVES[case.objective].instantiate().arrays:
        del batch["reference"]
    factor = np.float32(np.nan if step == POISONED else 1.0)
    return {**batch, "weights": batch["weights"] * factor}


def compute_log_probs(program: Program, params: Any, batch: Any) -> jax.Array:
    """Return the log-probabilities f64[B, S] of all targets, computed from all logits."""
    ctx = Context(batch, compute_dtype=jnp.float64)
    logits_BSV = program.experiment.language_model.logits(params, ctx, {})
    log_probs_BSV = jax.nn.log_softmax(logits_BSV)
    return jnp.take_along_axis(log_probs_BSV, batch["targets"][..., None], axis=-1)[..., 0]


@cache
def reference(
    objective: str, model: str, microbatches: int, clip: float | None
) -> tuple[Any, list[float], list[float]]:
    """Train with plain optax and return (parameters, losses, norms)."""
    _, first = simplest(objective, model)
    case = Case(objective, "after_backward", model=model)
    gradients = compile_gradients(objective, model, microbatches)
    optimizer = OPTIMIZER.instantiate()
    update = jax.jit(partial(_apply_update, optimizer))
    params = first["parameter"]
    opt_state = optimizer.init(params)
    losses, norms = [], []
    for step in range(STEPS):
        loss, grads = gradients(params, first["frozen"], host_batch(case, step))
        norm = float(optax.tree.norm(grads))
        losses.append(float(loss))
        norms.append(norm)
        if np.isfinite(norm):
            factor = min(1.0, clip / norm) if clip else 1.0
            params, opt_state = update(params, opt_state, grads, factor)
    return jax.device_get(params), losses, norms


@cache
def compile_gradients(objective: str, model: str, microbatches: int) -> Any:
    """Return a compiled function (parameters, frozen parameters, batch) -> (loss, gradients)."""
    program, _ = simplest(objective, model)
    loss_over = OBJECTIVES[objective].instantiate()

    def compute_loss(params: Any, frozen: Any, batch: Any) -> jax.Array:
        # test_formulas.py checks these counts.
        counts = loss_over.counts(batch)
        log_probs_BS = compute_log_probs(program, merge(params, frozen), batch)
        losses = []
        for part in range(microbatches):
            rows = slice(part, None, microbatches)
            part_batch = {name: array[rows] for name, array in batch.items()}
            ctx = Context(part_batch, num_sequences=jnp.sum(batch["ends"]), counts=counts)
            losses.append(loss_over.loss(GivenLogProbs(), {}, log_probs_BS[rows], ctx)[0])  # pyright: ignore
        return sum(losses[1:], losses[0])

    return jax.jit(jax.value_and_grad(compute_loss))


def _apply_update(optimizer: Any, params: Any, opt_state: Any, grads: Any, factor: jax.Array) -> Any:
    changes, opt_state = optimizer.update(jax.tree.map(lambda g: g * factor, grads), opt_state, params)
    return optax.apply_updates(params, changes), opt_state


@pytest.mark.pairs
@pytest.mark.parametrize(
    "case",
    [*ONCE, *(pytest.param(case, marks=pytest.mark.pairs) for case in covering())],
    ids=lambda case: "-".join(map(str, case)),
)
def test_steps_equal_plain_optax(case: Case):
    with exact.enable_exact_numerics():
        clip = case.clip()
        expected, *expected_metrics = reference(case.objective, case.model, case.microbatches, clip)
        program = case.program(clip)
        _, first = simplest(case.objective, case.model)
        places = jax.tree.map(lambda x: x.sharding, program.backend.abstract_checkpoint)
        state = program.backend.from_checkpoint(jax.device_put(first, places))
        losses, norms = [], []
        for step in range(STEPS):
            state, metrics = program.step(state, program.put(host_batch(case, step)))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        assert {"head/preference", "head/margin", "head/accuracy"} <= metrics.keys()
        sums = program.evaluate(state, program.put(host_batch(case, STEPS)))
        summary = program.experiment.language_model.summary({name: float(value) for name, value in sums.items()})
        trained = jax.device_get(program.backend.to_checkpoint(state))
    np.testing.assert_allclose([losses, norms], expected_metrics, rtol=3e-6)  # metrics are float32
    assert int(trained.counter["skipped"]) == 1
    for path, error in exact.differences(trained.parameter, expected).items():
        assert error <= 1e-11, f"{path}: off by {error:.1e}"
    if clip is not None:
        assert np.nanmin(norms) < clip < np.nanmax(norms), f"{norms}: the clip is reached in some steps, not in all"
    assert summary["loss"] == pytest.approx(evaluation_loss(case, expected), rel=3e-6)


def evaluation_loss(case: Case, params: Any) -> float:
    """Return the evaluation loss by the papers' formulas, at the reference's weights."""
    program, first = simplest(case.objective, case.model)
    batch = host_batch(case, STEPS)
    with jax.enable_x64(True):
        log_probs_BS = jax.jit(partial(compute_log_probs, program))(merge(params, first["frozen"]), batch)
    zeros = {"reference": np.zeros(SHAPE, np.float32)}
    return plain_loss(case.objective, zeros | batch, np.asarray(log_probs_BS), case.microbatches)
