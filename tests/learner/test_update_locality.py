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
from plimsoll.framework.learner import group_optimizer
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.update_locality import probe, proves_independence
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
    **{
        name: (attrgetter(name)(optax)(0.1), update_locality)
        for update_locality, names in NAMED.items()
        for name in names.split()
    },
    "momentum": (optax.sgd(0.1, momentum=0.9), "element"),
    "clip by value": (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "element"),
    "hyperparameters in the state": (optax.inject_hyperparams(optax.adamw)(0.1), "element"),
    "centralize": (optax.centralize(), "row"),
    "factored": (optax.scale_by_factored_rms(min_dim_size_to_factor=32), "tensor"),
    "clip_by_block_rms": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "tensor"),
    "adaptive_grad_clip": (optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)), "tensor"),
    "noisy_sgd": (optax.noisy_sgd(0.1, key=3), "layer"),
    "clip_by_global_norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), "global"),
    "apply_if_finite": (optax.apply_if_finite(optax.adamw(1e-3), 3), "global"),
    "normalize": (contrib.normalize(), "global"),
}


def user_optimizer(update: Any, start: Any = lambda params: jnp.float32(0)) -> optax.GradientTransformation:
    """Return a user's optimizer with `update(gradients, state) -> (updates, state)`."""
    return optax.GradientTransformation(start, lambda grads, state, params=None: update(grads, state))


def each(function: Any) -> optax.GradientTransformation:
    return user_optimizer(lambda grads, state: (jax.tree.map(function, grads), state))


def divide_by_cube_norm(grads: Any, state: Any) -> Any:
    norm = optax.tree.norm([g for g in jax.tree.leaves(grads) if g.ndim == 3])
    return jax.tree.map(lambda g: g / norm if g.ndim == 3 else g, grads), state


WHOLE_VECTORS = each(lambda g: g - g.mean() if g.ndim == 1 else g)
CASES |= {
    "own cube": (each(lambda g: g**3), "element"),
    "own rows": (each(lambda g: g / jnp.sum(g, axis=tuple(range(1, g.ndim)) or 0, keepdims=True)), "row"),
    "own mean": (each(lambda g: jnp.sign(g - g.mean())), "tensor"),
    "own blocks": (user_optimizer(lambda g, s: (g, s), lambda p: jax.tree.map(lambda x: x.ravel()[:8], p)), "tensor"),
    "own, an unused norm": (user_optimizer(lambda g, s: (g, optax.tree.norm(g))), "layer"),
    "own, a raw key": (
        user_optimizer(lambda g, key: (g, jax.random.split(key)[0]), lambda p: jax.random.PRNGKey(0)),
        "layer",
    ),
    "own, the previous step's norm": (
        user_optimizer(lambda g, s: (optax.tree.scale(s, g), optax.tree.norm(g))),
        "global",
    ),
    "own, one cube": (user_optimizer(divide_by_cube_norm), "global"),  # `probe` has to duplicate it
    "own vectors": (WHOLE_VECTORS, "element"),
}


@pytest.mark.pairs
@pytest.mark.parametrize("name", CASES)
def test_update_locality(name: str) -> None:
    optimizer, expected = CASES[name]
    assert probe(optimizer, SPECS) == expected


# The state that their parameters share is more than a counter.
UNREADABLE = {"noisy_sgd", "own, a raw key", "own, an unused norm"}


@pytest.mark.pairs
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("specs", [SPECS, ONE], ids=["all", "one"])
def test_text_analysis_never_misses_a_dependence(name: str, specs: Any) -> None:
    """The text never misses a dependence that the trial finds, and makes the trial unnecessary if there is none."""
    optimizer, expected = CASES[name]
    if expected == "global":
        # A norm of three-dimensional arrays, but this layer has none.
        assert not proves_independence(optimizer, specs) or (name == "own, one cube" and specs is ONE)
    elif name not in UNREADABLE:
        assert proves_independence(optimizer, specs)


@pytest.mark.pairs
def test_named_configs_are_checked_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_optimizer, "probe", lambda *_: pytest.fail("a trial compiles"))
    for name in ("nanogpt-cpu", "stdlib-tiny", "llama2-7b", "digits-glow"):
        configs.load(name).instantiate().learner.check_update_locality()


def test_probing_works_while_a_step_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Startup runs no trial if it can read the optimizer; schedules with chunked updates then run it while traced."""
    monkeypatch.setattr(group_optimizer, "_localities", {})
    learner = config_for(Learner, optimizer=config_for(optax.adamw, learning_rate=0.1)).instantiate(
        specs=updates.specs()
    )
    update_locality: list[str] = []
    jax.jit(lambda x: update_locality.extend(learner.update_locality(group) for group in learner.groups) or x)(1.0)
    assert update_locality == ["element"] * len(learner.groups)


def test_layers_with_one_leaf() -> None:
    assert {probe(CASES[name][0], ONE) for name in NAMED["global"].split()} == {"global"}
    assert probe(WHOLE_VECTORS, VECTOR) == "tensor"  # vectors count only if there is nothing larger
    assert probe(CASES["contrib.muon"][0], VECTOR) == "element"  # Muon uses Adam for vectors


@pytest.mark.parametrize("order", [1, -1])
def test_one_row_tensor_is_not_the_only_probe(order: int) -> None:
    """LAMB divides by a tensor's norm; with one row, as in LoRA of rank 1, this equals the row's norm."""
    shapes = {"lora_a": (64, 1), "lora_b": (1, 8)}
    specs = {name: ParameterSpec(shape, "float32", roles=("in", "rank")) for name, shape in [*shapes.items()][::order]}
    assert probe(optax.lamb(0.1), specs) == "tensor"


def test_no_full_size_array_is_made_while_tracing():
    """A terabyte array would not fit: a large model may be planned on a laptop."""
    specs = {"weight": ParameterSpec((1 << 19, 1 << 19), "float32", roles=("axis", "axis"))}
    update_locality = []

    def step(x: jax.Array) -> jax.Array:
        update_locality.append(probe(optax.adamw(0.1), specs))
        return x

    jax.eval_shape(step, jnp.zeros(()))
    assert update_locality == ["element"]


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["streamed", "in_backward"])
def test_schedules_probe_before_tracing(update: str, monkeypatch: pytest.MonkeyPatch):
    """A trial inside a trace would compile each of its operations separately."""
    config = configs.load("nanogpt-cpu")
    config.model.stack.num_layers = 2
    config.memory.update = update
    config.learner.clip_mode = "update_rms"
    program = Program(config.instantiate(), jax.devices()[:1])
    monkeypatch.setattr(group_optimizer, "_localities", {})
    _ = program.jit_step.step_jit
    monkeypatch.setattr(group_optimizer, "probe", lambda *_: pytest.fail("tried while the step is traced"))
    _ = program.jit_step.traced_step


@pytest.mark.pairs
def test_learner_probes_each_layer_type_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(group_optimizer, "probe", lambda one, specs: calls.append(specs) or probe(one, specs))
    monkeypatch.setattr(group_optimizer, "_localities", {})
    config = config_for(Learner, optimizer=config_for(contrib.muon, learning_rate=0.1))
    for _ in range(2):
        learner = config.copy().instantiate(specs=updates.specs())
        [learner.update_locality(group) for group in learner.groups]
    assert [learner.update_locality(group) for group in learner.groups] == ["tensor", "element", "tensor"]
    assert len(calls) == 3
    assert [leaf.shape for leaf in jax.tree.leaves(calls[-1])] == [(12, 8), (8, 8), (12,), (8, 12)]  # one layer's
    config.optimizer.learning_rate = 0.2
    learner = config.instantiate(specs=updates.specs())
    [learner.update_locality(group) for group in learner.groups]
    assert len(calls) == 6
