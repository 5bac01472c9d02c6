"""One optimizer for the whole model: what looks at all parameters at once computes what plain optax does."""

import jax
import optax
import pytest
from optax import contrib

from framework.config import config_for
from framework.layout import flatten
from framework.learner import Learner, Rule
from tests.support import small, updates


def clipped(*, learning_rate: float, max_norm: float) -> optax.GradientTransformation:
    """A norm over all gradients, inside of the optimizer."""
    return optax.chain(optax.clip_by_global_norm(max_norm), optax.adamw(learning_rate, weight_decay=0.1))


PRODIGY = config_for(contrib.prodigy, learning_rate=1.0, estim_lr0=1e-2)
OPTIMIZERS = {"prodigy": PRODIGY, "clip in a chain": config_for(clipped, learning_rate=0.02, max_norm=0.5)}


def learner(optimizer, **fields) -> Learner:
    return config_for(Learner, optimizer=optimizer, clip=None, **fields).instantiate(specs=updates.specs())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_plain_optax_on_unstacked_leaves(name: str):
    params, always = updates.draw(0), updates.draw(1, scale=0.3)  # Prodigy's rate grows while gradients agree
    grads = [jax.tree.map(lambda a, b: a + 0.2 * b, always, tree) for tree in updates.gradients(10)]
    ours = learner(OPTIMIZERS[name], scope="model", ema=0.5)
    history = updates.ours(ours, params, grads)
    expected, _ = updates.plain(OPTIMIZERS[name].instantiate(), params, grads)
    assert updates.worst(expected[-1:], [updates.unstack(params)]) > 0.01, "nothing moved"
    assert updates.worst([updates.unstack(kept.params) for kept in history], expected) <= 1e-6
    average = params
    for kept in history:
        average = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, average, kept.params)
    assert updates.worst([history[-1].ema], [average]) <= 1e-6
    # An optimizer for each unit would be wrong.
    per_unit = updates.ours(learner(OPTIMIZERS[name]), params, grads)
    assert updates.worst([updates.unstack(kept.params) for kept in per_unit], expected) > 1e-3


def test_rules_still_choose_the_optimizer_and_what_is_frozen():
    sgd = config_for(optax.sgd, learning_rate=0.1, momentum=0.5)
    rules = [
        config_for(Rule, pattern="embed", freeze=True),
        config_for(Rule, pattern="bias|norm", optimizer=sgd),
    ]
    ours = learner(OPTIMIZERS["clip in a chain"], scope="model", rules=rules)
    assert {(group.stage, group.label, group.length) for group in ours.groups} == {
        ("model", "default", None),
        ("model", "rule1", None),
    }
    assert {path for path in flatten(ours.optimizer_specs()) if "/trace/" in path} == {
        "model/rule1/state/0/trace/head/norm/scale",
        *(f"model/rule1/state/0/trace/stack/{layer}/block0/wide/bias" for layer in range(updates.LAYERS)),
    }
    assert not any("token" in path for path in flatten(ours.optimizer_specs()))
    _, state, _ = jax.eval_shape(ours.init, ours.specs)
    assert jax.tree.structure(state) == jax.tree.structure(ours.optimizer_specs())


def experiment(**memory: str):
    model = small.llama(stack__num_layers=2)
    small.block(model).mlp.hidden = 8192  # leaves of a megabyte: these are hosted
    mesh = {"data": 2, "fsdp": 2, "model": 2}
    fields = {"scope": "model", "optimizer": PRODIGY.copy(), "clip": None, "master_dtype": "float32", "ema": 0.9}
    return small.experiment(model, mesh=mesh, memory=memory, **fields)


def test_a_program_keeps_its_state_where_the_layout_says():
    program = small.program(experiment(optimizer_state="pinned_host"))
    state, metrics = small.run(program, 2)
    program.layout.check(state)
    assert metrics[1]["loss"] != metrics[0]["loss"]
    assert not metrics[1]["skipped"]
    hosted = {path for path, leaf in flatten(state).items() if leaf.sharding.memory_kind != "device"}
    assert "optimizer/model/default/state/exp_avg/stack/1/block0/mlp/up/weight" in hosted


def test_global_optimizers_are_refused_where_they_would_be_wrong():
    config = experiment()
    config.learner.scope = "unit"
    with pytest.raises(ValueError, match=r"learner\.optimizer \(default\): .*learner\.clip .*learner\.scope = model"):
        small.program(config)
    config = experiment(update="streamed")
    with pytest.raises(ValueError, match=r"learner\.scope = model with memory\.update = streamed: .*after_backward"):
        small.program(config)
