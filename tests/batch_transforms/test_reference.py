"""Every kind of reference gives the log-probabilities of the model that the run started with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.chunked_loss import LossAndMetrics
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.objective import Objective
from plimsoll.framework.program.program import Program
from tests.support import small

MESH = {"data": 2, "fsdp": 2, "model": 2}


class Apart(Objective):
    """Mean squared difference of log-probabilities from one nat above the reference's, so it can test every kind."""

    arrays = ("reference",)

    def loss(self, head, weights, x_BSD, ctx) -> LossAndMetrics:
        """Return the mean over counted targets."""
        ratios_BS = head.log_probs(weights, x_BSD, ctx) - ctx.batch["reference"]
        squares = jnp.sum(ctx.batch["weights"] * (ratios_BS - 1.0) ** 2) / ctx.num_targets
        return squares, {"ratio": jax.lax.stop_gradient(jnp.sum(ctx.batch["weights"] * ratios_BS))}

    def summary(self, totals):
        """Return the mean."""
        return {"loss": totals["loss"] / totals["tokens"]}


def experiment(kind: str = "auto", model: Config | None = None, **fields) -> Config:
    """Return an experiment whose objective reads a reference."""
    config = small.experiment(small.llama() if model is None else model, **fields)
    config.model.head.objective = config_for(Apart)
    config.batch_transform = config_for(Reference, kind=kind)
    return config


def open_program(config: Config, tmp_path) -> Program:
    program = small.program(config)
    program.experiment.batch_transform.open(program, tmp_path, is_new_run=True, log=lambda line: None)
    return program


def with_lora(model: Config, **fields) -> Config:
    model.lora = config_for(LoRA, rank=4, **fields)
    return model


def expert_model(**router) -> Config:
    """Return a small model with experts."""
    model = small.llama()
    small.block(model).mlp = mixture(experts=4, top_k=2, hidden=24, **router)
    return model


ADAPTERS = {
    "experts": (lambda: with_lora(expert_model(), targets="experts|."), {}),
    "lora": (lambda: with_lora(small.llama()), {}),
    "dropout": (lambda: with_lora(small.gpt2(), dropout=0.2), {}),
    "nf4": (
        lambda: with_lora(small.llama(dim=64, stack__pattern__0__mlp__hidden=64), base="nf4", base_targets="."),
        {},
    ),
    "sections": (
        lambda: with_lora(small.llama(stack__num_layers=4)),
        {"memory": {"parameters": "pinned_host:2", "update": "in_backward"}, "clip": None},
    ),
    "mesh": (lambda: with_lora(small.llama()), {"mesh": MESH, "accumulate": 2}),
    "in_backward": (lambda: with_lora(small.llama()), {"memory": {"update": "in_backward"}, "clip": None}),
}


@pytest.mark.pairs
@pytest.mark.parametrize("case", ADAPTERS)
def test_disabling_adapters_recovers_the_initial_weights(case, tmp_path):
    model, fields = ADAPTERS[case]
    program = open_program(experiment("adapter_off", model(), **fields), tmp_path)
    offloaded = open_program(experiment("offloaded", model(), **fields), tmp_path)
    batch = program.put(small.host_batch(program))
    expected = offloaded.complete_batch(offloaded.init(), batch)["reference"]
    state, metrics = small.run(program, 2)
    # Trained adapters change the loss, so they do not match the reference by chance.
    assert metrics[0]["loss"] != metrics[1]["loss"]
    complete_batch = program.complete_batch(state, batch)
    np.testing.assert_allclose(complete_batch["reference"], expected, atol=2e-5)
    assert (np.asarray(complete_batch["reference"])[np.asarray(batch["weights"]) == 0] == 0).all()
    trained = program.backend.evaluate(state, complete_batch, "parameter")
    assert abs(float(trained["ratio"])) > 1e-3


@pytest.mark.pairs
def test_kl_to_the_reference_is_zero_at_the_first_step(tmp_path):
    for kind in ("adapter_off", "offloaded"):
        program = open_program(experiment(kind, with_lora(small.llama())), tmp_path)
        _, metrics = small.run(program, 1)
        # The objective asks for one nat above the reference.
        assert metrics[0]["loss"] == pytest.approx(1.0, abs=1e-5)


CHOICES = [
    ({}, "stored", "all weights are trained"),
    ({"model": "lora"}, "adapter_off", "without its adapters"),
    ({"model": "lora", "memory": {"update": "layer_programs"}, "clip": None}, "stored", "layer_programs"),
    ({"objective": None}, "none", "reads no reference"),
    ({"model": "lora", "pretrained": "dir"}, "stored", "under batch_transform.pretrained"),
]


@pytest.mark.parametrize(
    ("fields", "kind", "reason"), CHOICES, ids=[f"{kind}-{i}" for i, (_, kind, _) in enumerate(CHOICES)]
)
def test_auto_selects_the_reference(fields, kind, reason):
    fields = dict(fields)
    model = with_lora(small.llama()) if fields.pop("model", None) else small.llama()
    pretrained = fields.pop("pretrained", None)
    objective = fields.pop("objective", Apart)
    config = experiment("auto", model, **fields)
    config.batch_transform.pretrained = pretrained
    config.model.head.objective = None if objective is None else config_for(objective)
    choice = config.instantiate().batch_transform.choice
    assert choice.kind == kind
    assert reason in choice.reason


WRONG = [
    (
        {},
        "adapter_off",
        None,
        "batch_transform.kind = adapter_off, but model.lora is not set; expected stored or offloaded",
    ),
    (
        {"memory": {"update": "layer_programs"}, "clip": None},
        "adapter_off",
        "lora",
        "batch_transform.kind = adapter_off with memory.update = layer_programs",
    ),
    ({}, "none", None, "model.head.objective is Apart, which reads reference of a batch"),
]


@pytest.mark.pairs
@pytest.mark.parametrize(("fields", "kind", "lora", "message"), WRONG, ids=[case[3][:40] for case in WRONG])
def test_incompatible_settings_fail_before_compilation(fields, kind, lora, message):
    model = with_lora(small.llama()) if lora else small.llama()
    with pytest.raises(ValueError, match=message) as error:
        small.program(experiment(kind, model, **fields))
    assert "\n" not in str(error.value)


def test_other_model_reference_refuses_the_adapter_mode():
    config = experiment("adapter_off", with_lora(small.llama()))
    config.batch_transform.pretrained = "somewhere"
    with pytest.raises(ConfigError, match=r"pretrained = somewhere with kind = adapter_off; expected kind = stored"):
        config.instantiate()


def test_step_error_if_the_transform_is_not_open():
    program = small.program(experiment("offloaded"))
    with pytest.raises(
        ValueError, match=r"experiment.batch_transform \(Reference\) is not open: .*batch_transform.open\(program"
    ):
        program.step({}, program.put(small.host_batch(program)))
