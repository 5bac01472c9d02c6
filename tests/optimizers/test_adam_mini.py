"""Adam-mini compared to the paper's algorithms in float64 numpy, and its blocks in one of our models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layout import ParameterSpec, flatten, unflatten
from plimsoll.framework.optimizers.adam_mini import adam_mini
from plimsoll.framework.optimizers.update_locality import probe
from tests.support import small

B1, B2, EPS, RATE, DECAY = 0.9, 0.95, 1e-8, 0.05, 0.1


def spec(*shape: int, roles: str, axes: tuple = (), heads: int | None = None) -> ParameterSpec:
    return ParameterSpec(shape, "float32", axes, roles=tuple(roles.split()), num_heads=heads)


# LABELS defines the blocks: element labels that broadcast to the shape. Elements with one label share a second moment.
SPECS = {
    "token": spec(11, 8, roles="vocab out", axes=("model", "fsdp")),
    "head/token": spec(11, 8, roles="vocab in", axes=("model", "fsdp")),
    "query/weight": spec(8, 12, roles="in heads", axes=("fsdp", "model"), heads=3),
    "key/weight": spec(8, 8, roles="in heads", axes=("fsdp", "model"), heads=2),
    "value/weight": spec(8, 8, roles="in heads", axes=("fsdp", "model")),
    "output/weight": spec(12, 8, roles="heads out", axes=("model", "fsdp")),
    "mlp/up/weight": spec(8, 20, roles="in hidden", axes=("fsdp", "model")),
    "mixer/weight": spec(8, 6, roles="out in", axes=("fsdp", "model")),
    "kernel": spec(3, 3, 4, 8, roles="height width in out"),
    "mlp/up/bias": spec(20, roles="hidden", axes=("model",)),
    "norm/scale": spec(8, roles="channel"),
}
LABELS = {
    "token": np.arange(11)[:, None],
    "head/token": np.arange(11)[:, None],
    "query/weight": np.arange(12)[None] // 4,
    "key/weight": np.arange(8)[None] // 4,
    "value/weight": np.arange(8)[None],
    "output/weight": np.arange(8)[None],
    "mlp/up/weight": np.arange(20)[None],
    "mixer/weight": np.arange(8)[:, None],
}
LABELS |= {path: np.zeros((), int) for path in SPECS.keys() - LABELS.keys()}


def paper(p: np.ndarray, grads: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Train by algorithm 1 of arXiv 2406.16793; the labels implement algorithms 2 and 3."""
    labels, mu = np.broadcast_to(labels, p.shape), np.zeros_like(p)
    nu = np.zeros(labels.max() + 1)
    for step, g in enumerate(grads, start=1):
        p = p - RATE * DECAY * p
        mu = B1 * mu + (1 - B1) * g
        nu = B2 * nu + (1 - B2) * np.array([np.mean(g[labels == label] ** 2) for label in range(len(nu))])
        root = np.sqrt(nu / (1 - B2**step)) + EPS
        p = p - RATE * mu / (1 - B1**step) / root[labels]
    return p


def optimizer() -> Any:
    return adam_mini(learning_rate=RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)


@pytest.mark.parametrize("roles", [True, False])
def test_the_papers_equations_in_float64(roles):
    """Without roles, the blocks are the columns of matrices."""
    rng = np.random.default_rng(0)
    draw = lambda size: {k: size * rng.normal(size=s.shape) * rng.exponential(size=s.shape) for k, s in SPECS.items()}  # noqa: E731
    params, grads = draw(1.0), [draw(size) for size in (1e-3, 5.0, 0.1, 1.0, 30.0)]
    with jax.enable_x64(True):
        fitted = optimizer().fit_to_specs(unflatten(SPECS)) if roles else optimizer()
        actual = jax.tree.map(jnp.asarray, unflatten(params))
        state, update = fitted.init(actual), jax.jit(fitted.update)
        for tree in grads:
            change, state = update(unflatten(tree), state, actual)
            actual = optax.apply_updates(actual, change)
    for path, value in flatten(jax.device_get(actual)).items():
        columns = np.arange(SPECS[path].shape[-1])[None] if len(SPECS[path].shape) == 2 else np.zeros((), int)
        expected = paper(params[path], [tree[path] for tree in grads], LABELS[path] if roles else columns)
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12, err_msg=path)


def test_state_is_one_sharded_number_per_block():
    fitted = optimizer().fit_to_specs(unflatten(SPECS))
    specs = fitted.partition(unflatten(SPECS))
    made = jax.eval_shape(fitted.init, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), unflatten(SPECS)))
    assert jax.tree.structure(specs) == jax.tree.structure(made)
    leaves = flatten(specs)
    for path, leaf in flatten(made).items():
        assert (leaves[path].shape, leaves[path].dtype) == (leaf.shape, leaf.dtype), path
    for path, one in SPECS.items():
        mu, nu = leaves[f"0/mu/{path}"], leaves[f"0/nu/{path}"]
        assert (mu.shape, mu.mesh_axes, mu.owner, nu.owner) == (one.shape, one.mesh_axes, path, path)
        assert nu.size == LABELS[path].max() + 1
        cut = {"token": "model", "head/token": "model", "output/weight": "fsdp", "mixer/weight": "fsdp"}
        expected = () if nu.size == 1 else (cut.get(path, "model"),)
        assert nu.mesh_axes == expected, path


def test_tensors_cannot_be_updated_in_chunks():
    for one in ("token", "query/weight", "mlp/up/weight"):
        tree = unflatten({one: SPECS[one]})
        assert probe(optimizer().fit_to_specs(tree), tree) == "tensor"
    assert probe(optimizer(), {"weight": SPECS["kernel"]}) == "tensor"


def test_blocks_follow_the_model():
    """With grouped queries, queries and keys have one block per head; values, outputs and the MLP one per output."""
    config = small.llama()
    optimizer = config_for(adam_mini, learning_rate=0.1)
    specs = small.experiment(config, optimizer=optimizer).instantiate().learner.optimizer_specs()
    stack = {path.split("/nu/block0/")[1]: leaf for path, leaf in flatten(specs["stack"]).items() if "/nu/" in path}
    assert {path: leaf.shape for path, leaf in stack.items()} == {
        "attention/query/weight": (2, 4),
        "attention/key/weight": (2, 2),
        "attention/value/weight": (2, 16),
        "attention/output/weight": (2, 32),
        "mlp/gate/weight": (2, 48),
        "mlp/up/weight": (2, 48),
        "mlp/down/weight": (2, 32),
        "attention_norm/scale": (2,),
        "mlp_norm/scale": (2,),
    }
    assert stack["attention/query/weight"].mesh_axes == ("pipe", "model")
    tables = [leaf.shape for part in ("embed", "head") for path, leaf in flatten(specs[part]).items() if "/nu/" in path]
    assert sorted(tables) == [(), (small.VOCAB,), (small.VOCAB,)]
