"""Records divergences of a teacher and a student, computed by torch and by TRL's GKD, for comparison with ours.

    python -m tools.peers.distillation [--seed=N]    # writes tests/peers/recorded/tuning/distillation.npz

Theirs use whole distributions, so ours use a top-k as large as the vocabulary. Needs torch and trl.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.config import config_for
from plimsoll.framework.objectives.distillation import Distillation, TokenInputs, distillation_loss
from tools.peers.recording import TUNING

FILE = TUNING / "distillation.npz"
SHAPE = (2, 6, 11)


class DivergenceSetting(NamedTuple):
    """A divergence and its parameters in our terms."""

    divergence: str
    beta: float
    temperature: float


SETTINGS = {
    "forward": DivergenceSetting("forward", 0.5, 1.0),
    "forward, T = 2": DivergenceSetting("forward", 0.5, 2.0),
    "reverse": DivergenceSetting("reverse", 0.5, 1.0),
    "reverse, T = 0.7": DivergenceSetting("reverse", 0.5, 0.7),
    "jsd, beta = 0.5": DivergenceSetting("jsd", 0.5, 1.0),
    "jsd, beta = 0.1, T = 3": DivergenceSetting("jsd", 0.1, 3.0),
}


class Logits(NamedTuple):
    """Logits of student and teacher, f64[B, S, V], and targets int32[B, S], which are -100 if ignored, as in TRL."""

    student: np.ndarray
    teacher: np.ndarray
    labels: np.ndarray

    @classmethod
    def draw(cls, seed: int) -> Logits:
        """Draw random logits."""
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, SHAPE[-1], SHAPE[:2]).astype(np.int32)
        labels[rng.random(SHAPE[:2]) < 0.3] = -100
        return cls(2 * rng.normal(size=SHAPE), 2 * rng.normal(size=SHAPE), labels)


class LossAndGrad(NamedTuple):
    """The sum over counted positions, and its gradient with respect to the student's logits."""

    loss: float
    grad: np.ndarray


def ours(logits: Logits, setting: DivergenceSetting) -> LossAndGrad:
    """Compute with `framework.objectives.distillation` in float64, without its factor of T^2."""
    objective: Any = config_for(Distillation, alpha=0.0, **setting._asdict()).instantiate()
    with jax.enable_x64(True):
        log_probs = jax.nn.log_softmax(jnp.asarray(logits.teacher), axis=-1)
        values, ids = jax.lax.top_k(log_probs, SHAPE[-1])
        counted = logits.labels >= 0
        inputs = TokenInputs(
            targets_BS=jnp.asarray(np.where(counted, logits.labels, 0)),
            weights_BS=jnp.asarray(counted, jnp.float64) / setting.temperature**2,
            ids_BSK=ids,
            log_probs_BSK=values,
            tail_BS=jnp.full(SHAPE[:2], -50.0),
        )

        def loss(student: jax.Array) -> jax.Array:
            return distillation_loss(student, inputs, objective=objective, softcap=None)[0]

        value, grad = jax.value_and_grad(loss)(jnp.asarray(logits.student))
        return LossAndGrad(float(value), np.asarray(grad))


def by_trl(logits: Logits, setting: DivergenceSetting) -> LossAndGrad:
    """Compute with trl.experimental.gkd in float64."""
    import torch
    from trl.experimental.gkd import GKDTrainer

    student = torch.tensor(logits.student, requires_grad=True)
    # In TRL, beta = 0 is KL(teacher || student), and beta = 1 the reverse.
    beta = {"forward": 0.0, "reverse": 1.0}.get(setting.divergence, setting.beta)
    loss = GKDTrainer.generalized_jsd_loss(
        student,
        torch.tensor(logits.teacher),
        labels=torch.tensor(logits.labels),
        beta=beta,
        temperature=setting.temperature,
        reduction="sum",
    )
    loss.backward()
    assert student.grad is not None
    return LossAndGrad(float(loss.detach()), student.grad.numpy())


def by_torch(logits: Logits, setting: DivergenceSetting) -> LossAndGrad:
    """Compute with torch.nn.functional.kl_div in float64; only forward and reverse."""
    import torch
    from torch.nn import functional

    student = torch.tensor(logits.student, requires_grad=True)
    teacher = torch.tensor(logits.teacher)
    student_log_probs = functional.log_softmax(student / setting.temperature, dim=-1)
    teacher_log_probs = functional.log_softmax(teacher / setting.temperature, dim=-1)
    pair = (student_log_probs, teacher_log_probs)
    if setting.divergence == "reverse":
        pair = (teacher_log_probs, student_log_probs)
    # kl_div(input, target) is KL(target || input).
    terms = functional.kl_div(*pair, reduction="none", log_target=True)
    loss = terms[torch.tensor(logits.labels >= 0)].sum()
    loss.backward()
    assert student.grad is not None
    return LossAndGrad(float(loss.detach()), student.grad.numpy())


def main(argv: list[str]) -> int:
    """Record TRL's results and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    logits = Logits.draw(args.seed)
    arrays: dict[str, Any] = logits._asdict()
    for name, setting in SETTINGS.items():
        value = by_trl(logits, setting)
        arrays |= {f"{name}: loss": value.loss, f"{name}: grad": value.grad}
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
