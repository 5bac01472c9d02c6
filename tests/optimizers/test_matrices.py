"""Muon and GaLore: matrices by role, optax.adamw for the rest, GaLore compared to galore-torch, and its SVDs."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layout import ParameterSpec, flatten, unflatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.matrices import galore, muon
from tests.support import updates
from tools.peers import galore as theirs

ROLES = {"weight": ("in", "out"), "bias": ("out",), "scale": ("channel",), "token": ("vocab", "out")}


def with_roles():
    """Return the specs of tests.support.updates, including an embedding, with roles."""
    flat = flatten(updates.specs())
    for path, spec in flat.items():
        roles = ROLES[path.split("/")[-1]]
        flat[path] = ParameterSpec(spec.shape, "float32", roles=("layer", *roles) if spec.num_layers else roles)
    return unflatten(flat)


def train_params(make, **options):
    learner = config_for(
        Learner, optimizer=config_for(make, learning_rate=0.02, weight_decay=0.1, **options), clip=None
    )
    history = updates.ours(learner.instantiate(specs=with_roles()), updates.draw(0), updates.gradients(10))
    return {path: np.asarray(x) for path, x in flatten(updates.unstack(history[-1].params)).items()}


@cache
def plain(optimizer):
    """Return the weights after plain optax on unstacked leaves, with the same optimizer for all."""
    history, _ = updates.plain(optimizer, updates.draw(0), updates.gradients(10))
    return {path: np.asarray(x) for path, x in flatten(history[-1]).items()}


def assert_equal(actual, expected, paths):
    assert paths
    for path in paths:
        np.testing.assert_allclose(actual[path], expected[path], rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("make", "options", "reference"),
    [
        (muon, {}, optax.contrib.muon(0.02, weight_decay=0.1, consistent_rms=0.2)),
        (muon, {"consistent_rms": None, "beta": 0.8}, optax.contrib.muon(0.02, weight_decay=0.1, beta=0.8)),
        (galore, {"rank": 3, "update_proj_gap": 4}, optax.contrib.galore(0.02, 3, 4, 0.25, weight_decay=0.1)),
    ],
)
def test_matrices_are_optaxs_and_the_rest_has_adamw(make, options, reference):
    actual = train_params(make, **options)
    matrices = [path for path in actual if path.endswith("weight")]
    assert_equal(actual, plain(reference), matrices)
    rest = [path for path in actual if path not in matrices]
    assert {path.split("/")[-1] for path in rest} == {"token", "scale", "bias"}
    assert_equal(actual, plain(optax.adamw(0.02, weight_decay=0.1)), rest)


@pytest.mark.pairs
def test_muon_fallback_may_have_another_learning_rate():
    actual = train_params(muon, adam_learning_rate=0.005)
    assert_equal(actual, plain(optax.adamw(0.005, weight_decay=0.1)), ["embed/token", "head/norm/scale"])


@pytest.mark.pairs
def test_moments_in_bfloat16():
    for make in (muon, galore):
        config = config_for(make, learning_rate=0.02)
        learner = config_for(Learner, optimizer=config, clip=None, moment_dtype="bfloat16").instantiate(
            specs=with_roles()
        )
        kept = updates.ours(learner, updates.draw(0), updates.gradients(3))[-1]
        large = [x for x in jax.tree.leaves(kept.optimizer) if x.size >= 64]
        assert large
        assert all(x.dtype == jnp.bfloat16 for x in large)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept.params))


def test_galore_factors_are_sharded_and_others_have_none():
    shapes = {"wide": (8, 12), "high": (12, 8), "square": (8, 8)}
    specs = {
        path: ParameterSpec(shape, "float32", ("fsdp", "model"), roles=("in", "out")) for path, shape in shapes.items()
    }
    specs["token"] = ParameterSpec((16, 8), "float32", ("model", "fsdp"), roles=("vocab", "out"))
    optimizer = galore(learning_rate=0.1, rank=3).fit_to_specs(specs)
    leaves = flatten(optimizer.partition(specs))
    actual = {path.split("inner_state/0/")[1]: leaf for path, leaf in leaves.items() if leaf.owner}
    cut = {path: (leaf.shape, leaf.mesh_axes) for path, leaf in actual.items() if "nu" not in path}
    assert cut == {
        "projector/wide": ((12, 3), ("model", "fsdp")),
        "projector/high": ((12, 3), ("fsdp", "model")),
        "projector/square": ((8, 3), ("fsdp", "model")),
        "base_optimizer_state/mu/wide": ((8, 3), ("fsdp", "model")),
        "base_optimizer_state/mu/high": ((3, 8), ("fsdp", "model")),
        "base_optimizer_state/mu/square": ((3, 8), ("fsdp", "model")),
        "mu/token": ((16, 8), ("model", "fsdp")),
    }
    assert all(leaf.size for leaf in leaves.values())  # no empty arrays in checkpoints


def test_galore_recomputes_the_projection_on_schedule():
    """Mapped over the layers, the decision stays a single branch; it does not compute both sides."""
    config = config_for(galore, learning_rate=0.02, rank=3)
    learner = config_for(Learner, optimizer=config, clip=None).instantiate(specs=with_roles())
    kept, grads = updates.start(learner, updates.draw(0)), updates.gradients(1)[0]
    step = jax.make_jaxpr(lambda *args: updates.stepper(learner)(*args))(kept, jnp.float32(1), grads)

    def find_decompositions(jaxpr, branch=False):
        """Yield, for each decomposition, whether it is inside a branch."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "svd":
                yield branch
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from find_decompositions(inner, branch or eqn.primitive.name == "cond")

    decompositions = list(find_decompositions(step.jaxpr))
    assert len(decompositions) == 3  # wide, high, square
    assert all(decompositions)


RECORDED = Path(__file__).parent / "recorded" / "galore.json"


@pytest.mark.parametrize("case", theirs.CASES)
@pytest.mark.parametrize("name", theirs.SHAPES)
def test_galore_torch_as_recorded(name, case):
    check(json.loads(RECORDED.read_text())["weights"][f"{name} {case}"], name, case)


@pytest.mark.peers
@pytest.mark.parametrize("case", theirs.CASES)
@pytest.mark.parametrize("name", theirs.SHAPES)
def test_galore_torch_live(name, case):
    if not theirs.is_installed():
        pytest.skip("galore-torch is not installed (pip install --no-deps galore-torch==1.0)")
    check(theirs.train(name, case), name, case)


def check(expected, name, case):
    options = dict(theirs.CASES[case])
    b1, b2 = options.pop("betas")
    optimizer = galore(learning_rate=theirs.RATE, b1=b1, b2=b2, **options, **theirs.OPTIONS)
    params, grads = theirs.inputs(name)
    actual = {"w": jnp.asarray(params)}
    state, update = optimizer.init(actual), jax.jit(optimizer.update)
    for step, grad in enumerate(grads):
        changes, state = update({"w": jnp.asarray(grad)}, state, actual)
        actual = optax.apply_updates(actual, changes)
        np.testing.assert_allclose(
            actual["w"], np.asarray(expected[step]), rtol=1e-5, atol=1e-5, err_msg=f"step {step}"
        )
    assert np.abs(np.asarray(actual["w"]) - params).max() > 0.01
