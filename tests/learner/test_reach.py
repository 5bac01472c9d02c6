"""Update locality: how far a gradient spreads in an optimizer's update, and so the smallest independent chunk."""

from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from plimsoll import configs
from plimsoll.framework.config import config_for
from plimsoll.framework.layout import ParameterSpec, unflatten
from plimsoll.framework.learner import reaches
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.dependence import keeps_apart
from plimsoll.framework.optimizers.reach import probe
from plimsoll.framework.program.program import Program
from tests.support import updates

SHAPES = {"norm/scale": (64,), "attention/weight": (64, 32), "attention/heads": (32, 4, 8), "mlp/up": (32, 64)}
LEAVES = {path: ParameterSpec(shape, "float32", roles=("axis",) * len(shape)) for path, shape in SHAPES.items()}
SPECS, VECTOR, ONE = unflatten(LEAVES), {"scale": LEAVES["norm/scale"]}, {"token": LEAVES["mlp/up"]}

NAMED = {  # optax optimizers, with learning rate 0.1
    "element": "sgd adamw lion yogi rprop sign_sgd adagrad contrib.schedule_free_adamw contrib.ademamix",
    "tensor": "adafactor lamb lars sm3 novograd fromage contrib.muon contrib.galore",
    "global": "contrib.prodigy contrib.dadapt_adamw",
}
CASES: dict[str, tuple[Any, str]] = {
    **{name: (attrgetter(name)(optax)(0.1), reach) for reach, names in NAMED.items() for name in names.split()},
    "momentum": (optax.sgd(0.1, momentum=0.9), "element"),
    "clip by value": (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "element"),
    "hyperparameters in the state": (optax.inject_hyperparams(optax.adamw)(0.1), "element"),
    "centralize": (optax.centralize(), "row"),
    "factored": (optax.scale_by_factored_rms(min_dim_size_to_factor=32), "tensor"),
    "clip_by_block_rms": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "tensor"),
    "adaptive_grad_clip": (optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)), "tensor"),
    "noisy_sgd": (optax.noisy_sgd(0.1, key=3), "unit"),
    "clip_by_global_norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), "global"),
    "apply_if_finite": (optax.apply_if_finite(optax.adamw(1e-3), 3), "global"),
    "normalize": (contrib.normalize(), "global"),
}


def own(update: Any, start: Any = lambda params: jnp.float32(0)) -> optax.GradientTransformation:
    """Return a user's optimizer with `update(gradients, state) -> (updates, state)`."""
    return optax.GradientTransformation(start, lambda grads, state, params=None: update(grads, state))


def each(function: Any) -> optax.GradientTransformation:
    return own(lambda grads, state: (jax.tree.map(function, grads), state))


def norm_of_cubes(grads: Any, state: Any) -> Any:
    norm = optax.tree.norm([g for g in jax.tree.leaves(grads) if g.ndim == 3])
    return jax.tree.map(lambda g: g / norm if g.ndim == 3 else g, grads), state


WHOLE_VECTORS = each(lambda g: g - g.mean() if g.ndim == 1 else g)
CASES |= {
    "own cube": (each(lambda g: g**3), "element"),
    "own rows": (each(lambda g: g / jnp.sum(g, axis=tuple(range(1, g.ndim)) or 0, keepdims=True)), "row"),
    "own mean": (each(lambda g: jnp.sign(g - g.mean())), "tensor"),
    "own blocks": (own(lambda g, s: (g, s), lambda p: jax.tree.map(lambda x: x.ravel()[:8], p)), "tensor"),
    "own, a norm kept and not used": (own(lambda g, s: (g, optax.tree.norm(g))), "unit"),
    "own, a raw key": (own(lambda g, key: (g, jax.random.split(key)[0]), lambda p: jax.random.PRNGKey(0)), "unit"),
    "own, the norm of the step before": (own(lambda g, s: (optax.tree.scale(s, g), optax.tree.norm(g))), "global"),
    "own, of cubes, of which there is one": (own(norm_of_cubes), "global"),  # `probe` has to duplicate it
    "own vectors": (WHOLE_VECTORS, "element"),
}


@pytest.mark.pairs
@pytest.mark.parametrize("name", CASES)
def test_reach(name: str) -> None:
    optimizer, expected = CASES[name]
    assert probe(optimizer, SPECS) == expected


# The state that their parameters share is more than a counter.
UNREADABLE = {"noisy_sgd", "own, a raw key", "own, a norm kept and not used"}


@pytest.mark.pairs
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("specs", [SPECS, ONE], ids=["all", "one"])
def test_what_the_text_of_an_update_shows(name: str, specs: Any) -> None:
    """The text never misses a dependence that the trial finds, and makes the trial unnecessary if there is none."""
    optimizer, expected = CASES[name]
    if expected == "global":
        # A norm of three-dimensional arrays, but this layer has none.
        assert not keeps_apart(optimizer, specs) or (name == "own, of cubes, of which there is one" and specs is ONE)
    elif name not in UNREADABLE:
        assert keeps_apart(optimizer, specs)


@pytest.mark.pairs
def test_named_configs_are_checked_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.framework.learner.reaches.probe", lambda *_: pytest.fail("a trial compiles"))
    for name in ("nanogpt-cpu", "stdlib-tiny", "llama2-7b", "digits-glow"):
        configs.load(name).instantiate().learner.check_reach()


def test_a_trial_runs_while_a_step_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Startup runs no trial if it can read the optimizer; schedules with chunked updates then run it while traced."""
    monkeypatch.setattr("plimsoll.framework.learner.reaches._reaches", {})
    learner = config_for(Learner, optimizer=config_for(optax.adamw, learning_rate=0.1)).instantiate(
        specs=updates.specs()
    )
    reaches: list[str] = []
    jax.jit(lambda x: reaches.extend(learner.reach(group) for group in learner.groups) or x)(1.0)
    assert reaches == ["element"] * len(learner.groups)


def test_units_of_one_leaf() -> None:
    assert {probe(CASES[name][0], ONE) for name in NAMED["global"].split()} == {"global"}
    assert probe(WHOLE_VECTORS, VECTOR) == "tensor"  # vectors count only if there is nothing larger
    assert probe(CASES["contrib.muon"][0], VECTOR) == "element"  # Muon uses Adam for vectors


@pytest.mark.parametrize("order", [1, -1])
def test_a_tensor_of_one_row_is_not_the_only_one_that_is_tried(order: int) -> None:
    """LAMB divides by a tensor's norm; with one row, as in LoRA of rank 1, this equals the row's norm."""
    shapes = {"lora_a": (64, 1), "lora_b": (1, 8)}
    specs = {name: ParameterSpec(shape, "float32", roles=("in", "rank")) for name, shape in [*shapes.items()][::order]}
    assert probe(optax.lamb(0.1), specs) == "tensor"


def test_no_array_of_the_true_size_is_made_while_a_step_is_traced():
    """A terabyte array would not fit: a large model may be planned on a laptop."""
    specs = {"weight": ParameterSpec((1 << 19, 1 << 19), "float32", roles=("axis", "axis"))}
    reaches = []

    def step(x: jax.Array) -> jax.Array:
        reaches.append(probe(optax.adamw(0.1), specs))
        return x

    jax.eval_shape(step, jnp.zeros(()))
    assert reaches == ["element"]


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["streamed", "in_backward"])
def test_schedules_ask_before_a_step_is_traced(update: str, monkeypatch: pytest.MonkeyPatch):
    """A trial inside a trace would compile each of its operations separately."""
    config = configs.load("nanogpt-cpu")
    config.model.stack.num_layers = 2
    config.memory.update = update
    config.learner.clip_mode = "update_rms"
    program = Program(config.instantiate(), jax.devices()[:1])
    monkeypatch.setattr(reaches, "_reaches", {})
    _ = program.step_jit
    monkeypatch.setattr(reaches, "probe", lambda *_: pytest.fail("tried while the step is traced"))
    _ = program.traced_step


@pytest.mark.pairs
def test_the_learner_tries_each_kind_of_unit_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "plimsoll.framework.learner.reaches.probe", lambda one, specs: calls.append(specs) or probe(one, specs)
    )
    monkeypatch.setattr("plimsoll.framework.learner.reaches._reaches", {})
    config = config_for(Learner, optimizer=config_for(contrib.muon, learning_rate=0.1))
    for _ in range(2):
        learner = config.copy().instantiate(specs=updates.specs())
        [learner.reach(group) for group in learner.groups]
    assert [learner.reach(group) for group in learner.groups] == ["tensor", "element", "tensor"]
    assert len(calls) == 3
    assert [leaf.shape for leaf in jax.tree.leaves(calls[-1])] == [(12, 8), (8, 8), (12,), (8, 12)]  # one layer's
    config.optimizer.learning_rate = 0.2
    learner = config.instantiate(specs=updates.specs())
    [learner.reach(group) for group in learner.groups]
    assert len(calls) == 6
