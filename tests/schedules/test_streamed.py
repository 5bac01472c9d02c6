"""The streamed update against the plain one: the same numbers, one unit's state at a time on the device."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from framework.config import Config, config_for
from framework.layout import flatten
from framework.learner import Rule
from framework.schedules import streamed
from tests.support import small

OPTIMIZERS = {
    "sgd": config_for(optax.sgd, learning_rate=0.3, momentum=0.9),
    "adamw": config_for(optax.adamw, learning_rate=1e-2, weight_decay=0.1),
    "adafactor": config_for(optax.adafactor, learning_rate=1e-2, min_dim_size_to_factor=8),
    "lion": config_for(optax.lion, learning_rate=1e-3),
    "muon": config_for(optax.contrib.muon, learning_rate=1e-2),
}


def experiment(update: str, kind: str, optimizer: str = "adamw", mesh: Any = None) -> Config:
    """Dropout, a tied table, a rule, averages, an active clip, two microbatches.

    Leaves of a megabyte are hosted: the table's state and that of each layer's MLP.

    No biases: those of keys have a gradient of zero, and so of nothing but rounding.
    """
    model = small.llama(stack__num_layers=4, embed__dropout=0.1, head__tied=True)
    model.vocab_size = 8192
    small.block(model).mlp.hidden = 2048
    rules = [config_for(Rule, pattern="norm", optimizer=OPTIMIZERS["sgd"])]
    learner = {"optimizer": OPTIMIZERS[optimizer].copy(), "rules": rules, "ema": 0.9, "accumulate": 2, "clip": 0.1}
    config = small.experiment(model, mesh=mesh, memory={"update": update, "optimizer_state": kind}, **learner)
    config.set_path("data.tokenizer.vocab_size", 8192)
    return config


def trained(config: Config) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    program = small.program(config)
    state, metrics = small.run(program, 4)
    program.layout.check(state)  # host leaves are back on the host
    return small.arrays(state), metrics


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_numbers_are_those_of_the_plain_update(optimizer: str):
    expected, losses = trained(experiment("after_backward", "device", optimizer))
    for kind in ("device", "pinned_host"):
        state, metrics = trained(experiment("streamed", kind, optimizer))
        for one, other in zip(metrics, losses, strict=True):
            np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)
        small.assert_close(state, expected, 1e-5 if optimizer == "muon" else 2e-6)


def test_on_a_mesh_too():
    mesh = {"data": 2, "fsdp": 2, "model": 2}
    expected, losses = trained(experiment("after_backward", "device", "sgd", mesh))
    state, metrics = trained(experiment("streamed", "pinned_host", "sgd", mesh))
    np.testing.assert_allclose(metrics[-1]["loss"], losses[-1]["loss"], rtol=1e-6)
    small.assert_close(state, expected, 1e-5)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
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


def test_checkpoints_are_the_same():
    layouts = [small.program(experiment(update, "pinned_host")).layout for update in ("after_backward", "streamed")]
    assert [(leaf.path, leaf.spec) for leaf in layouts[0]] == [(leaf.path, leaf.spec) for leaf in layouts[1]]


def test_gpus_refuse_by_name():
    layout = small.program(experiment("streamed", "pinned_host")).layout
    assert [leaf for leaf in layout if leaf.path.startswith("optimizer/stack/") and leaf.spec.memory_kind != "device"]
    streamed.check(layout, "tpu")
    with pytest.raises(ValueError, match=r"streamed with memory\.optimizer_state = pinned_host: XLA's GPU compiler"):
        streamed.check(layout, "gpu")
    streamed.check(small.program(experiment("streamed", "device")).layout, "gpu")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make plan-tpu")
def test_the_tpu_compiler_holds_one_units_state(tmp_path: Path):
    """12 layers whose f32 state is 12 MiB each: whole, all 144 MiB come; streamed, two layers' worth."""
    root, peaks = Path(__file__).parents[2], {}
    for update in ("after_backward", "streamed"):
        file = tmp_path / f"{update}.json"
        fields = {
            "data.global_batch_size": 1, "data.seq_len": 256, "model.dim": 256, "model.stack.num_layers": 12,
            "model.stack.pattern.0.attention.num_heads": 2, "model.stack.pattern.0.mlp.hidden": 1024,
            "model.vocab_size": 1024, "data.tokenizer.vocab_size": 1024, "model.embed.max_positions": 256,
            "memory.remat": "full", "memory.optimizer_state": "pinned_host", "memory.update": update,
        }  # fmt: skip
        flags = [f"--config.{path}={value}" for path, value in fields.items()]
        command = [sys.executable, "-m", "launch.plan", "--config=gpt2-124m", "--target=v5e-1", "--step_only"]
        done = subprocess.run([*command, f"--json={file}", *flags], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks[update] = json.loads(file.read_text())
    whole, streamed = peaks["after_backward"], peaks["streamed"]
    assert streamed["host_argument_bytes"] == whole["host_argument_bytes"] > 100 << 20
    assert streamed["device_peak_bytes"] < whole["device_peak_bytes"] - 0.7 * whole["host_argument_bytes"]
    copies = [one for one in streamed["largest"] if re.match("(copy of|new) optimizer/stack", one["name"])]
    assert not [one for one in copies if "[12," in one["shape"]], "a whole stack came along"
