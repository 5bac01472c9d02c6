"""One optimizer for the whole model: an optimizer that combines all parameters gives the results of plain optax."""

import jax
import optax
import pytest
from optax import contrib

from plimsoll.framework.config import config_for
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from tests.support import small, updates


def clip_then_adamw(*, learning_rate: float, max_norm: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(max_norm), optax.adamw(learning_rate, weight_decay=0.1))


PRODIGY = config_for(contrib.prodigy, learning_rate=1.0, estim_lr0=1e-2)
OPTIMIZERS = {"prodigy": PRODIGY, "clip in a chain": config_for(clip_then_adamw, learning_rate=0.02, max_norm=0.5)}


def learner(optimizer, dtype="float32", **fields) -> Learner:
    return config_for(Learner, optimizer=optimizer, clip=None, **fields).instantiate(specs=updates.specs(dtype))


@pytest.mark.pairs
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_plain_optax_on_unstacked_leaves(name: str):
    params, always = updates.draw(0), updates.draw(1, scale=0.3)  # Prodigy's rate grows while gradients agree
    grads = [jax.tree.map(lambda a, b: a + 0.2 * b, always, tree) for tree in updates.gradients(10)]
    history = updates.ours(learner(OPTIMIZERS[name], scope="model"), params, grads)
    expected, _ = updates.plain(OPTIMIZERS[name].instantiate(), params, grads)
    assert updates.worst([updates.unstack(kept.params) for kept in history], expected) <= 1e-6
    per_unit = updates.ours(learner(OPTIMIZERS[name]), params, grads)
    assert updates.worst([updates.unstack(kept.params) for kept in per_unit], expected) > 1e-3, "wrong, as it should be"


def test_rules_still_choose_the_optimizer_and_what_is_frozen():
    sgd = config_for(optax.sgd, learning_rate=0.1, momentum=0.5)
    rules = [config_for(Rule, pattern="embed", freeze=True), config_for(Rule, pattern="bias|norm", optimizer=sgd)]
    fields = {"scope": "model", "rules": rules, "dtype": "bfloat16", "master_dtype": "float32"}
    ours = learner(OPTIMIZERS["clip in a chain"], **fields)
    paths = set(flatten(ours.optimizer_specs()))
    assert {path for path in paths if "/trace/" in path} == {
        "model/rule1/state/0/trace/head/norm/scale",
        *(f"model/rule1/state/0/trace/stack/block0/wide/bias/{layer}" for layer in range(updates.LAYERS)),
    }
    assert not any("token" in path for path in paths)
    assert jax.tree.structure(jax.eval_shape(ours.init, ours.specs).entry) == jax.tree.structure(ours.optimizer_specs())


def experiment(scope: str, **memory: str):
    model = small.llama()
    small.block(model).mlp.hidden = 8192  # leaves of a megabyte are offloaded
    fields = {"scope": scope, "optimizer": PRODIGY.copy(), "clip": None, "master_dtype": "float32", "ema": 0.0}
    return small.experiment(model, mesh={"data": 2, "fsdp": 2, "model": 2}, memory=memory, **fields)


@pytest.mark.pairs
def test_program_state_follows_the_layout():
    program = small.program(experiment("model", optimizer_state="pinned_host"))
    state, metrics = small.run(program, 2)
    program.layout.check(state)
    assert metrics[1]["loss"] != metrics[0]["loss"]
    assert updates.worst([state.ema], [state.parameter]) == 0.0  # decay 0: equal, in the same structure
    offloaded = {path for path, leaf in flatten(state).items() if leaf.sharding.memory_kind != "device"}
    assert "optimizer/model/default/state/exp_avg/stack/block0/mlp/up/weight/1" in offloaded


def test_global_optimizers_are_refused_in_layer_scope():
    with pytest.raises(ValueError, match=r"learner\.optimizer \(default\): .*learner\.clip .*learner\.scope = model"):
        small.program(experiment("layer"))
    with pytest.raises(ValueError, match=r"learner\.scope = model with memory\.update = streamed: .*after_backward"):
        small.program(experiment("model", update="streamed"))
