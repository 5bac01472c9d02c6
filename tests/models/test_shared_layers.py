"""stack.shared: one copy of a layer's parameters for all units; its gradient is the sum over equal copies."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import config_for
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.plan.suggest import estimate_for_target
from plimsoll.framework.plan.targets import resolve
from tests.support import small

UNITS = 4


def config(shared=(1,), dtype="float32", unroll=1, remat="none", mesh=None, memory=(), **learner):
    """Return a model of four units, each a block with a window and a shared block with different dropout."""
    model = small.gpt2(stack__num_layers=2 * UNITS, stack__unroll=unroll)
    model.param_dtype = model.compute_dtype = dtype
    windowed, other = small.block(model).copy(), small.block(model).copy()
    windowed.attention.window, other.dropout = 5, 0.2
    model.stack.pattern, model.stack.shared = [windowed, other], list(shared)
    return small.experiment(model, mesh=mesh, memory={"remat": remat, **dict(memory)}, **learner)


@pytest.fixture(scope="module")
def by_copies():
    """Return (state, loss, gradients of the stack with equal copies) on one device."""
    with jax.enable_x64(True):
        program, state = small.program(config((), "float64")), small.program(config((1,), "float64")).init()
        own = dict(state.parameter)
        copies = jax.tree.map(lambda value: jnp.stack([value] * UNITS), own.pop("shared"))
        own["stack"] = own["stack"] | copies
        loss, grads = small.loss_and_grads(program, replace(program.init(), parameter=own))
    return jax.device_get(state), loss, grads


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("unroll", "remat", "mesh"),
    [(1, "none", None), (0, "none", None), (1, "sqrt:2", None), (1, "full", {"fsdp": 8}), (0, "sqrt", {"fsdp": 8})],
)
def test_the_gradient_is_the_sum_over_equal_copies(by_copies, unroll, remat, mesh):
    state, expected_loss, expected = by_copies
    with jax.enable_x64(True):
        loss, grads = small.loss_and_grads(small.program(config((1,), "float64", unroll, remat, mesh)), state)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-14)
    sums = {path: grad.sum(0) for path, grad in expected.items() if path.startswith("stack/block1/")}
    expected = {path: grad for path, grad in expected.items() if path not in sums}
    small.assert_close(grads, expected | {f"shared{path[5:]}": grad for path, grad in sums.items()}, 1e-12)


@pytest.mark.pairs
def test_shared_layer_is_stored_once_and_every_use_counts():
    sharing, apart = config().instantiate(), config(()).instantiate()
    specs, unit = sharing.model.parameter_specs(), sharing.model.stack.pattern.parameter_specs()
    assert specs["shared"] == {"block1": unit["block1"]}
    one = sum(spec.size for spec in jax.tree.leaves(specs["shared"]))
    layout, more = small.program(config()).layout, small.program(config(())).layout
    assert more.size("parameter") - layout.size("parameter") == (UNITS - 1) * one > 30_000
    assert sharing.model.flops_per_token(16) == apart.model.flops_per_token(16)
    needs = [estimate_for_target(experiment, resolve("v5e-8")).breakdown for experiment in (sharing, apart)]
    assert needs[0]["parameters"] < 0.7 * needs[1]["parameters"]
    assert needs[0]["gradients"] < needs[1]["gradients"]


@pytest.mark.pairs
@pytest.mark.parametrize("memory", [{"update": "streamed", "gradients": "pinned_host"}, {"update": "in_backward"}])
def test_schedules_agree(memory):
    learner = {"optimizer": config_for(optax.sgd, learning_rate=0.3, momentum=0.9), "clip": None}
    expected, losses = small.run(small.program(config(**learner)), 3)
    state, metrics = small.run(small.program(config(memory=memory, **learner)), 3)
    assert [one["loss"] for one in metrics] == pytest.approx([one["loss"] for one in losses], rel=1e-6)
    small.assert_close(small.arrays(state.parameter), small.arrays(expected["parameter"]), 2e-6)


@pytest.mark.pairs
def test_evaluation_rules_and_checkpoints_know_them(tmp_path):
    """Sampling with shared layers is tested in tests/generation."""
    rules = [config_for(Rule, pattern="^shared/block1/mlp", freeze=True)]
    program = small.program(config(rules=rules, ema=0.9))
    state = program.init()
    assert "mlp" in state.frozen["shared"]["block1"]
    assert "attention" in state.ema["shared"]["block1"]
    before = small.arrays(state)
    state, _ = small.run(program, 1, state)
    moved = {path for path, value in small.arrays(state).items() if not np.array_equal(value, before[path])}
    assert "parameter/shared/block1/attention/query/weight" in moved
    assert not any(path.startswith("frozen/") for path in moved)
    sums = program.evaluate(state, program.put(small.host_batch(program)), averaged=True)
    assert float(sums["nll"]) > 0
    averages = flatten(program.weights(state, averaged=True))
    for group, name in (("ema", "attention/query/weight"), ("frozen", "mlp/up/weight")):
        kept = flatten(state[group])[f"shared/block1/{name}"]
        np.testing.assert_array_equal(averages[f"shared/block1/{name}"], kept)
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        small.assert_same_bits(checkpointer.restore(1, program.layout.abstract()).state, state)


@pytest.mark.parametrize("shared", [(2,), (-1,), (0, 1)])
def test_positions_that_cannot_be_shared_are_refused(shared):
    with pytest.raises(ValueError, match=r"shared = .*expected positions of the pattern, 0 to 1, and not all"):
        config(shared).instantiate()
