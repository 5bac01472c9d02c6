"""The streamed update against the plain one: the same numbers, with one layer's state at a time on the device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.schedules import streamed
from tests.support import small

OPTIMIZERS = {
    "sgd": config_for(optax.sgd, learning_rate=0.3, momentum=0.9),
    # Gradients that are only rounding errors do not become full updates.
    "adamw": small.STEADY_ADAMW,
    "adafactor": config_for(optax.adafactor, learning_rate=1e-2, min_dim_size_to_factor=8),
    "lion": config_for(optax.lion, learning_rate=1e-3),
    "muon": config_for(optax.contrib.muon, learning_rate=1e-2),
}


def experiment(update: str, kind: str, optimizer: str = "adamw", mesh: Any = None) -> Config:
    """Return an experiment with dropout, a tied table, a rule, EMA, an active clip and two microbatches.

    Leaves of a megabyte are offloaded: the state of the table and of each layer's MLP. There are no biases, because the
    gradient of a key bias is zero and thus only rounding error.
    """
    model = small.llama(stack__num_layers=4, embed__dropout=0.1, head__tied=True)
    model.vocab_size = 8192
    small.block(model).mlp.hidden = 2048
    rules = [config_for(Rule, pattern="norm", optimizer=OPTIMIZERS["sgd"])]
    learner = {"optimizer": OPTIMIZERS[optimizer].copy(), "rules": rules, "ema": 0.9, "accumulate": 2, "clip": 0.1}
    config = small.experiment(model, mesh=mesh, memory={"update": update, "optimizer_state": kind}, **learner)
    config.set_path("data.tokenizer.vocab_size", 8192)
    return config


def train(config: Config) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    program = small.program(config)
    state, metrics = small.run(program, 4)
    program.layout.check(state)  # offloaded leaves are back in host memory
    return small.arrays(state), metrics


@pytest.mark.pairs
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_results_match_the_plain_update(optimizer: str):
    expected, losses = train(experiment("after_backward", "device", optimizer))
    for kind in ("device", "pinned_host"):
        state, metrics = train(experiment("streamed", kind, optimizer))
        for one, other in zip(metrics, losses, strict=True):
            np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)
        small.assert_close(state, expected, 1e-5 if optimizer == "muon" else 2e-6)


@pytest.mark.pairs
def test_also_on_a_mesh():
    mesh = {"data": 2, "fsdp": 2, "model": 2}
    expected, losses = train(experiment("after_backward", "device", "sgd", mesh))
    state, metrics = train(experiment("streamed", "pinned_host", "sgd", mesh))
    np.testing.assert_allclose(metrics[-1]["loss"], losses[-1]["loss"], rtol=1e-6)
    small.assert_close(state, expected, 1e-5)


@pytest.mark.pairs  # each run of test_exact.py has such a step
def test_nonfinite_step_changes_nothing_and_is_counted():
    config = experiment("streamed", "pinned_host")
    program = small.program(config)
    before = program.init()
    kept = small.arrays(before)
    batch = small.host_batch(program)
    batch["weights"] = batch["weights"] * np.nan
    after, metrics = program.step(before, program.put(batch))
    assert float(metrics["skipped"]) == 1.0
    for path, value in flatten(jax.device_get(after)).items():
        if not path.startswith("counter"):
            np.testing.assert_array_equal(np.asarray(value), kept[path], err_msg=path)


@pytest.mark.pairs
def test_checkpoints_are_the_same():
    layouts = [small.program(experiment(update, "pinned_host")).layout for update in ("after_backward", "streamed")]
    assert [(leaf.path, leaf.spec) for leaf in layouts[0]] == [(leaf.path, leaf.spec) for leaf in layouts[1]]


def test_gpus_refuse_by_name():
    def check(platform: str, config: Config) -> None:
        program = small.program(config)
        streamed.check(program.layout, program.experiment.memory, platform)

    offloaded = experiment("streamed", "pinned_host")
    offloaded.memory.parameters = "pinned_host"
    check("tpu", offloaded)
    message = (
        r"streamed with memory\.parameters = pinned_host, memory\.optimizer_state = pinned_host: XLA's GPU compiler"
    )
    with pytest.raises(ValueError, match=f"{message}.*on GPU expected memory.update = layer_programs"):
        check("gpu", offloaded)
    check("gpu", experiment("streamed", "device"))
    inputs = experiment("streamed", "device")
    inputs.memory.activations = "pinned_host"
    with pytest.raises(ValueError, match=r"streamed with memory\.activations = pinned_host: XLA's GPU compiler"):
        check("gpu", inputs)
