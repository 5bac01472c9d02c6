"""Properties of the optimizers that have a short name: signs, scales, shapes, zeros, huge numbers.

A new name must state its properties here. A property that is stated as absent must be absent, so each test can fail.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layout import ParameterSpec, flatten, unflatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.named import OPTIMIZERS
from plimsoll.framework.optimizers.partition import add_partition
from tests.support import updates

Flat = dict[str, np.ndarray]
SHAPES = {"wide/weight": (12, 20), "high/weight": (20, 12), "token": (16, 12), "norm/scale": (20,)}
ROLES = {"token": ("vocab", "out"), "norm/scale": ("channel",)}
TURNED = SHAPES | {"wide/weight": (20, 12), "high/weight": (12, 20)}
STEPS = 4


@dataclass(frozen=True)
class Properties:
    """Properties of an optimizer's update of a matrix.

    Args:
        fields: optimizer arguments for these tests, so that small parameters are treated like large ones.
        odd: maximum relative difference between update(-g, -p) and -update(g, p).
        scale: maximum relative change of updates, due to Adam's eps, if all gradients are multiplied by 1024.
        close: tolerance of comparisons in which elements change places.
        commutes: permutations that may come before or after the update: of rows and columns ("both"), of columns only,
            or of the larger side.
        transposes: whether a matrix may be transposed before or after the update.
        momentum: whether the matrix still moves after the gradients become zero.
        spreads: the elements that change if one element of a gradient is huge.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    odd: float = 1e-9
    scale: float = 2e-4
    close: float = 1e-6
    commutes: Literal["both", "columns", "larger"] = "both"
    transposes: bool = True
    momentum: bool = True
    spreads: Literal["element", "block", "column", "row", "tensor"] = "tensor"


EIGHT = {"min_size": 64, "block": 8}
PROPERTIES = {
    "adamw": Properties(spreads="element"),
    "adafactor": Properties({"min_dim_size_to_factor": 8}, scale=1e-9, momentum=False),
    "lion": Properties(scale=0, spreads="element"),
    "adalomo": Properties(scale=1e-9, momentum=False),
    "adam_mini": Properties(scale=1e-6, transposes=False, spreads="column"),
    # Its quantization map contains 1 but not -1, and its blocks run over rows.
    "adamw8bit": Properties(EIGHT, odd=0.05, commutes="columns", transposes=False, spreads="block"),
    "muon": Properties(),
    # Uses one projection: the sign of singular vectors is arbitrary, so the moments would fit a new one differently.
    "galore": Properties({"rank": 4}, close=1e-4, spreads="row"),
    # Projects the smaller side on random directions, and scales the gradient, without momentum.
    "apollo": Properties({"rank": 4, "update_interval": 2}, commutes="larger", momentum=False),
    "apollo_mini": Properties({"update_interval": 2}, commutes="larger", momentum=False),
}


def test_every_optimizer_declares_its_properties():
    assert PROPERTIES.keys() == OPTIMIZERS.keys()


def draw(seed: int, size: float = 1.0) -> Flat:
    rng = np.random.default_rng(seed)
    return {path: size * rng.normal(size=shape) * rng.exponential(size=shape) for path, shape in SHAPES.items()}


PARAMS, GRADS = draw(0), [draw(1 + step, 2.0**-step) for step in range(STEPS)]


@cache
def build_optimizer(name: str, decay: float, turned: bool) -> tuple[Any, Callable[..., Any]]:
    """Return the optimizer of these parameters and its compiled step, which returns (updates, state, parameters).

    Optimizers that draw random numbers also get the seed.
    """
    shapes = TURNED if turned else SHAPES
    specs = {p: ParameterSpec(s, "float64", roles=ROLES.get(p, ("in", "out"))) for p, s in shapes.items()}
    weight_decay = {"weight_decay_rate" if name == "adafactor" else "weight_decay": decay} if decay else {}
    weight_decay = weight_decay or ({"weight_decay": 0.0} if name != "adafactor" else {})
    made = add_partition(OPTIMIZERS[name](learning_rate=0.01, **PROPERTIES[name].fields, **weight_decay))
    made = made.fit_to_specs(unflatten(specs)) if made.fit_to_specs is not None else made

    def update(grads: Any, state: Any, params: Any, seed: Any) -> Any:
        changes, state = made.update(grads, state, params, **({"seed": seed} if made.draws else {}))
        return changes, state, jax.tree.map(jnp.add, params, changes)

    return made, jax.jit(update)


def train(
    name: str, params: Flat, grads: list[Flat], *, decay: float = 0.0, turned: bool = False, dtype: str = "float64"
) -> list[Flat]:
    """Train for a step per gradient tree and return the updates of each step."""
    made, update = build_optimizer(name, decay, turned)
    history = []
    with jax.enable_x64(True) if dtype == "float64" else nullcontext():
        now: Any = unflatten(change(params, lambda _, x: x.astype(dtype)))
        state = made.init(now)
        for tree in grads:
            tree = unflatten(change(tree, lambda _, x: x.astype(dtype)))
            changes, state, now = update(tree, state, now, np.uint32(3))
            history.append({path: np.asarray(x) for path, x in flatten(changes).items()})
    return history


def change(tree: Flat, function: Callable[[str, np.ndarray], np.ndarray]) -> Flat:
    return {path: function(path, x) for path, x in tree.items()}


def distance(actual: list[Flat], expected: list[Flat], paths: Any = SHAPES) -> float:
    """Return the largest difference of a leaf in any step, relative to its largest element."""
    pairs = [(a[path], b[path]) for a, b in zip(actual, expected, strict=True) for path in paths]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


every = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.mark.pairs
@every
def test_signs(name):
    """Negating parameters and gradients negates the updates, including weight decay."""
    plain = train(name, PARAMS, GRADS, decay=0.1)
    minus = train(name, change(PARAMS, lambda _, x: -x), [change(g, lambda _, x: -x) for g in GRADS], decay=0.1)
    error = distance([change(u, lambda _, x: -x) for u in minus], plain)
    assert error <= PROPERTIES[name].odd
    assert PROPERTIES[name].odd < 1e-6 or error > 1e-6  # a loose bound must be necessary


@pytest.mark.pairs
@every
def test_scales(name):
    """All optimizers are invariant to the scale of gradients, up to an eps."""
    scaled = train(name, PARAMS, [change(g, lambda _, x: 1024 * x) for g in GRADS])
    assert distance(scaled, train(name, PARAMS, GRADS)) <= PROPERTIES[name].scale


@pytest.mark.first(8)
@every
@pytest.mark.parametrize("axis", [0, 1])
def test_permutations(name, axis):
    orders = {p: np.random.default_rng(9).permutation(s[axis]) for p, s in SHAPES.items() if p.endswith("/weight")}

    def permute(path: str, x: np.ndarray) -> np.ndarray:
        return x.take(orders[path], axis) if path in orders else x

    permuted = train(name, change(PARAMS, permute), [change(g, permute) for g in GRADS])
    expected = [change(u, permute) for u in train(name, PARAMS, GRADS)]
    for path in orders:
        larger = int(np.argmax(SHAPES[path]))
        holds = {"both": True, "columns": axis == 1, "larger": axis == larger}[PROPERTIES[name].commutes]
        assert (distance(permuted, expected, [path]) < PROPERTIES[name].close) == holds, path


@pytest.mark.pairs
@every
def test_transposition(name):
    matrices = [path for path in SHAPES if path.endswith("/weight")]
    turn = lambda path, x: x.T if path in matrices else x  # noqa: E731
    turned = train(name, change(PARAMS, turn), [change(g, turn) for g in GRADS], turned=True)
    error = distance(turned, [change(u, turn) for u in train(name, PARAMS, GRADS)], matrices)
    assert (error < PROPERTIES[name].close) == PROPERTIES[name].transposes


@every
def test_zero_gradients(name):
    """Nothing moves before the first nonzero gradient; after the last, only optimizers with momentum move."""
    zero = change(GRADS[0], lambda _, x: 0 * x)
    first, *_, last = train(name, PARAMS, [zero, *GRADS, zero])
    assert {path: np.abs(x).max() for path, x in first.items()} == dict.fromkeys(SHAPES, 0.0)
    assert all(np.isfinite(x).all() for x in last.values())
    moves = any(np.abs(last[path]).max() > 0 for path in SHAPES if path.endswith("/weight"))
    assert moves == PROPERTIES[name].momentum
    decayed = train(name, PARAMS, [zero], decay=0.1)[0]
    for path, x in decayed.items():  # toward zero, equally for all elements of a tensor
        ratio = -x / PARAMS[path]
        assert 0 < ratio.min() <= ratio.max() < 0.2, path
        np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-6)


def train_with_huge_element(
    name: str, huge: float, path: str, at: tuple[int, int]
) -> tuple[list[Flat], dict[str, np.ndarray]]:
    """Return the updates with a huge element in the second gradient, and masks of the elements that it changes."""
    spoiled = [{p: x.copy() for p, x in tree.items()} for tree in GRADS]
    spoiled[1][path][at] = huge
    runs = [train(name, PARAMS, grads, dtype="float32") for grads in (spoiled, GRADS)]
    different = {p: np.any([a[p] != b[p] for a, b in zip(*runs, strict=True)], axis=0) for p in SHAPES}
    return runs[0], different


@pytest.mark.pairs
@every
def test_one_huge_element(name):
    """In float32, all stays finite and only stated elements change. (The squares, 1e30, can still be summed.)"""
    found, different = train_with_huge_element(name, 1e15, "wide/weight", (5, 7))
    assert all(np.isfinite(x).all() for tree in found for x in tree.values())
    assert max(np.abs(x).max() for tree in found for x in tree.values()) < 10  # the steps are not huge
    assert {path for path, where in different.items() if where.any()} == {"wide/weight"}
    where = different["wide/weight"]
    expected = np.zeros_like(where)
    spreads = PROPERTIES[name].spreads
    rows = {"element": slice(5, 6), "block": slice(0, 8), "row": slice(5, 6)}.get(spreads, slice(None))
    expected[rows, slice(None) if spreads in ("row", "tensor") else 7] = True
    assert not (where & ~expected).any()
    assert where.sum() > expected.sum() / 2


@pytest.mark.pairs
@every
def test_a_step_whose_norm_is_infinite_changes_nothing(name):
    """The square of 1e30 overflows float32: some optimizers would return a tensor of NaN, but the learner does not."""
    config = config_for(OPTIMIZERS[name], learning_rate=0.01, **PROPERTIES[name].fields)
    learner = config_for(Learner, optimizer=config).instantiate(specs=updates.specs())
    params, (before, spoiled) = updates.draw(0), updates.gradients(2)
    weight = spoiled["stack"]["block0"]["wide"]["weight"]
    spoiled["stack"]["block0"]["wide"]["weight"] = weight.at[1, 2, 3].set(1e30)
    one, two = updates.ours(learner, params, [before, spoiled])
    for path, x in flatten(two._asdict()).items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(flatten(one._asdict())[path]), err_msg=path)
        assert np.isfinite(np.asarray(x, np.float64)).all(), path


@pytest.mark.pairs
@every
def test_updating_layers_together_equals_one_by_one(name):
    """Mapped over layers, each layer has its own noise if the optimizer draws any."""
    made, _ = build_optimizer(name, 0.1, False)
    single = build_optimizer(name, 0.1, False)[1]
    with jax.enable_x64(True):
        stack = lambda trees: jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *map(unflatten, trees))  # noqa: E731
        params, grads = (
            stack([draw(i) for i in range(3)]),
            [stack([draw(10 * s + i) for i in range(3)]) for s in (1, 2)],
        )
        seeds = jnp.arange(3, dtype=jnp.uint32)
        state, mapped = jax.vmap(made.init)(params), jax.jit(jax.vmap(single))
        layer = lambda tree, i: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
        apart = [made.init(layer(params, i)) for i in range(3)]
        for tree in grads:
            changes, state, _ = mapped(tree, state, params, seeds)
            for i in range(3):
                alone, apart[i], _ = single(layer(tree, i), apart[i], layer(params, i), seeds[i])
                ours, theirs = ({p: np.asarray(x) for p, x in flatten(t).items()} for t in (layer(changes, i), alone))
                assert distance([ours], [theirs]) < 1e-9, i
