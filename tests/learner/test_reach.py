"""How far a gradient spreads in an optimizer's update, and so the smallest piece that may be updated alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from framework.config import config_for
from framework.layout import ParameterSpec
from framework.learner import Learner
from framework.optimizers import reach
from framework.optimizers.reach import probe
from tests.support import updates


def spec(*shape: int) -> ParameterSpec:
    return ParameterSpec(shape, "float32", roles=("axis",) * len(shape))


SPECS = {
    "attention": {"weight": spec(64, 32), "heads": spec(32, 4, 8)},
    "mlp": {"up": spec(32, 64)},
    "norm": {"scale": spec(64)},
}
ONE = {"token": spec(64, 32)}
VECTOR = {"norm": {"scale": spec(64)}}

OPTAX: dict[str, tuple[Any, reach.Reach]] = {
    "sgd": (optax.sgd(0.1), "element"),
    "momentum": (optax.sgd(0.1, momentum=0.9), "element"),
    "adamw": (optax.adamw(optax.cosine_decay_schedule(0.1, 10)), "element"),
    "lion": (optax.lion(1e-3), "element"),
    "yogi": (optax.yogi(1e-3), "element"),
    "rprop": (optax.rprop(1e-3), "element"),
    "sign_sgd": (optax.sign_sgd(1e-3), "element"),
    "clip by value": (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "element"),
    "hyperparameters in the state": (optax.inject_hyperparams(optax.adamw)(0.1), "element"),
    "schedule_free": (contrib.schedule_free_adamw(0.1), "element"),
    "factored_rms, too small to factor": (optax.scale_by_factored_rms(min_dim_size_to_factor=128), "element"),
    "centralize": (optax.centralize(), "row"),
    "factored_rms": (optax.scale_by_factored_rms(min_dim_size_to_factor=32), "tensor"),
    "adafactor": (optax.adafactor(1e-3), "tensor"),
    "muon": (contrib.muon(1e-3), "tensor"),
    "lamb": (optax.lamb(1e-3), "tensor"),
    "lars": (optax.lars(0.1), "tensor"),
    "sm3": (optax.sm3(0.1), "tensor"),
    "novograd": (optax.novograd(0.1), "tensor"),
    "galore": (contrib.galore(0.1), "tensor"),
    "clip_by_block_rms": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "tensor"),
    "adaptive_grad_clip": (optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)), "tensor"),
    "noisy_sgd": (optax.noisy_sgd(0.1, key=3), "unit"),
    "clip_by_global_norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), "global"),
    "apply_if_finite": (optax.apply_if_finite(optax.adamw(1e-3), 3), "global"),
    "prodigy": (contrib.prodigy(1.0), "global"),
    "dadapt_adamw": (contrib.dadapt_adamw(1.0), "global"),
    "normalize": (contrib.normalize(), "global"),
}


@pytest.mark.parametrize("name", OPTAX)
def test_optax(name: str) -> None:
    optimizer, expected = OPTAX[name]
    assert probe(optimizer, SPECS) == expected


# --- a user's own of each kind ---------------------------------------------------------------------------------------


class OwnState(NamedTuple):
    kept: Any


def own(update: Any, start: Any = lambda params: ()) -> optax.GradientTransformation:
    """`update(gradients, kept) -> (updates, kept)`."""

    def apply(grads: Any, state: OwnState, params: Any = None) -> tuple[Any, OwnState]:
        updates, kept = update(grads, state.kept)
        return updates, OwnState(kept)

    return optax.GradientTransformation(lambda params: OwnState(start(params)), apply)


def each(function: Any) -> optax.GradientTransformation:
    return own(lambda grads, kept: (jax.tree.map(function, grads), kept))


def normalized_rows(g: jax.Array) -> jax.Array:
    rows = tuple(range(1, g.ndim)) or 0  # a vector is one row
    return g / jnp.sqrt(jnp.sum(g**2, axis=rows, keepdims=True))


def late(grads: Any, seen: jax.Array) -> Any:
    """Looks at all gradients of the step before."""
    scale = 1 / (1 + seen)
    return jax.tree.map(lambda g: scale * g, grads), optax.tree.norm(grads)


def noise(grads: Any, key: jax.Array) -> Any:
    key, draw = jax.random.split(key)
    return jax.tree.map(lambda g: g + jax.random.normal(draw, g.shape), grads), key


def norm_of_cubes(grads: Any, kept: Any) -> Any:
    norm = optax.tree.norm([g for g in jax.tree.leaves(grads) if g.ndim == 3])
    return jax.tree.map(lambda g: g / norm if g.ndim == 3 else g, grads), kept


OWN = {
    "cube": (each(lambda g: g**3), "element"),
    "rows": (each(normalized_rows), "row"),
    "sign against the tensor's mean": (each(lambda g: jnp.sign(g - g.mean())), "tensor"),
    "columns": (each(lambda g: g - g.mean(axis=0)), "tensor"),
    "matrices alone": (each(lambda g: g - g.max() if g.ndim == 2 else g), "tensor"),
    "a norm kept and not used": (own(lambda g, kept: (g, optax.tree.norm(g)), lambda p: jnp.float32(0)), "unit"),
    "a raw key": (own(noise, lambda params: jax.random.PRNGKey(0)), "unit"),
    "moments of blocks": (own(lambda g, kept: (g, kept), lambda p: jax.tree.map(lambda x: x.ravel()[:8], p)), "tensor"),
    "late": (own(late, lambda params: jnp.float32(0)), "global"),
    # One leaf of a kind: something like it must be there that could change.
    "a norm over cubes, of which there is one": (own(norm_of_cubes), "global"),
}


@pytest.mark.parametrize("name", OWN)
def test_own(name: str) -> None:
    optimizer, expected = OWN[name]
    assert probe(optimizer, SPECS) == expected


@pytest.mark.parametrize("name", ["clip_by_global_norm", "apply_if_finite", "prodigy"])
def test_a_unit_of_one_leaf_shows_global_ones_too(name: str) -> None:
    assert probe(OPTAX[name][0], ONE) == "global"


def test_vectors_decide_only_where_there_is_nothing_larger() -> None:
    whole_vectors = each(lambda g: g - g.mean() if g.ndim == 1 else g)
    assert probe(whole_vectors, SPECS) == "element"
    assert probe(whole_vectors, VECTOR) == "tensor"
    assert probe(OPTAX["muon"][0], VECTOR) == "element"  # Adam's


# --- in the learner --------------------------------------------------------------------------------------------------


def test_the_learner_tries_each_kind_of_unit_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(optimizer: Any, specs: Any) -> reach.Reach:
        calls.append(specs)
        return probe(optimizer, specs)

    monkeypatch.setattr("framework.learner.probe", counted)
    monkeypatch.setattr("framework.learner._reaches", {})
    config = config_for(Learner, optimizer=config_for(contrib.muon, learning_rate=0.1))
    for _ in range(2):
        learner = config.copy().instantiate(specs=updates.specs())
        found = {group.stage: learner.reach(group) for group in learner.groups}
        assert found == {"embed": "tensor", "stack": "tensor", "head": "element"}
        learner.check_reach()
    assert len(calls) == 3
    assert [leaf.shape for leaf in jax.tree.leaves(calls[-1])] == [(12, 8), (8, 8), (12,), (8, 12)]  # one layer's
    config.optimizer.learning_rate = 0.2
    learner = config.instantiate(specs=updates.specs())
    learner.check_reach()
    assert len(calls) == 6


def test_global_ones_are_refused_by_name() -> None:
    config = config_for(Learner, optimizer=config_for(contrib.prodigy))
    learner = config.instantiate(specs=updates.specs())
    with pytest.raises(ValueError, match=r"learner\.optimizer \(default\): .*learner\.clip and learner\.nonfinite"):
        learner.check_reach()
