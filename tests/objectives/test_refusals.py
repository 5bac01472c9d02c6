"""A preference loss that does not match its data or has no meaning fails with one line, before any compilation."""

import jax
import jax.numpy as jnp
import pytest

from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.layers.objective import Objective
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.objectives.kto import KTO
from plimsoll.framework.objectives.preferences import DPO, SimPO
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.program import Program
from tests.support import small
from tests.support.exact import OPTIMIZERS
from tests.support.preferences import random_batch
from tools.peers.preference_rows import GivenBatches


def program(objective, extra, **fields):
    config = config_for(
        Experiment,
        model=small.llama(head__objective=objective, **fields),
        learner=config_for(Learner, optimizer=OPTIMIZERS["adamw"].copy()),
        trainer=config_for(TrainerOptions, max_steps=1),
    )
    data = GivenBatches((4, 16), small.VOCAB, dict.fromkeys(extra, "float32"))
    return Program(config.instantiate(data=data), jax.devices()[:1])


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("objective", "extra", "missing"),
    [
        (config_for(DPO), [], "reference"),
        (config_for(KTO), ["reference"], "labels"),
        (config_for(KTO), [], "reference, labels"),
    ],
)
def test_missing_batch_array_is_refused(objective, extra, missing):
    with pytest.raises(ValueError, match=f"which reads {missing} of a batch; data is a GivenBatches") as error:
        program(objective, extra)
    assert "\n" not in str(error.value)


def test_reference_free_loss_refuses_a_reference():
    assert "reference" not in program(config_for(SimPO), []).batch_specs


@pytest.mark.parametrize(
    ("objective", "field", "value"),
    [(DPO, "beta", 0.0), (DPO, "label_smoothing", 1.0), (SimPO, "gamma", -1.0), (KTO, "desirable_weight", -0.5)],
)
def test_values_outside_their_range_are_refused(objective, field, value):
    with pytest.raises(ConfigError, match=field):
        config_for(objective, **{field: value}).instantiate()


def test_z_loss_is_refused_without_next_token_loss():
    with pytest.raises(ValueError, match="z_loss"):
        program(config_for(SimPO), [], head__z_loss=1e-3)


class PerToken(Objective):
    """An objective that forgets to sum."""

    arrays = ("ends",)

    def loss(self, head, weights, x_BSD, ctx):
        return head.log_probs(weights, x_BSD, ctx), {}

    def summary(self, totals):
        return totals


class WithoutSummary(Objective):
    """An objective that evaluations cannot report."""

    arrays = ("ends",)

    def loss(self, head, weights, x_BSD, ctx):
        return jnp.zeros(()), {}


def test_other_class_is_refused_as_objective():
    with pytest.raises(
        ConfigError, match=r"objective: expected a subclass of plimsoll.Objective, given TrainerOptions"
    ):
        program(config_for(TrainerOptions, max_steps=1), [])


def test_objective_without_summary_is_refused():
    with pytest.raises(ConfigError, match=r"objective: WithoutSummary does not define the method 'summary'"):
        program(config_for(WithoutSummary), [])


def test_loss_that_is_no_scalar_is_refused_when_traced():
    built = program(config_for(PerToken), [])
    message = r"model.head.objective: PerToken.loss returned a loss of shape \(4, 16\); expected scalars"
    batch = random_batch("simpo", (4, 16), small.VOCAB, 0)
    del batch["reference"]
    with pytest.raises(ConfigError, match=message):
        built.step(built.init(), built.put(batch))
