"""Gradients that are sums over 16,384 tokens in bfloat16 compute, compared to the same terms added in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import component, config_for
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers import grad_accumulation, lookup
from plimsoll.framework.layers.base import Context, Layer, Out, add_shared
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.lookup import look_up
from plimsoll.framework.layout import ParameterSpec, TensorSpec, flatten
from plimsoll.framework.schedules.step import training_context
from tests.support import small

ROWS, LENGTH, COMMON = 1024, 16, 3
ROUNDED_ONCE = 4e-3  # a sum rounded to bfloat16 is off by at most 2^-9


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference divided by the norm of the expected array."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


def with_a_common_token(tokens: np.ndarray) -> np.ndarray:
    return np.where(np.random.default_rng(1).random(tokens.shape) < 0.1, COMMON, tokens)


def sum_in_float64(indices: np.ndarray, terms: Any, rows: int) -> np.ndarray:
    sums = np.zeros((rows, terms.shape[-1]))
    np.add.at(sums, indices.reshape(-1), np.asarray(terms, np.float64).reshape(-1, terms.shape[-1]))
    return sums


@pytest.mark.pairs
@pytest.mark.parametrize("sum_bytes", [lookup.SUM_BYTES, 1 << 14], ids=["at once", "in parts"])
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "model": 2}, {"fsdp": 4, "seq": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lookup_gradient_is_the_sum_over_its_terms(dtype, mesh, sum_bytes, monkeypatch):
    monkeypatch.setattr(lookup, "SUM_BYTES", sum_bytes)
    rng, (rows, columns) = np.random.default_rng(0), (256, 32)
    indices = with_a_common_token(rng.integers(0, rows, (ROWS, LENGTH)))
    terms = (0.5 + rng.normal(size=(ROWS, LENGTH, columns))).astype(jnp.bfloat16)
    table = rng.normal(size=(rows, columns)).astype(jnp.dtype(dtype))
    devices = MeshShape(**mesh).build(jax.devices()) if mesh else None
    ctx = Context(batch={}, mesh=devices, compute_dtype=jnp.bfloat16)
    spec = TensorSpec((rows, columns), dtype, ("model", "fsdp"))

    @jax.jit
    def both(table, indices, terms):
        taken, pull = jax.vjp(lambda table: look_up(table, indices, ctx, spec), table)
        return taken, pull(terms)[0]

    taken, grad = both(table, indices, terms)
    np.testing.assert_array_equal(taken, table.astype(jnp.bfloat16)[indices])
    expected = sum_in_float64(indices, terms, rows)
    tolerance = ROUNDED_ONCE if dtype == "bfloat16" else 1e-6
    assert grad.dtype == dtype
    assert distance(grad, expected) < tolerance
    assert distance(grad[COMMON], expected[COMMON]) < tolerance


def test_indices_outside_the_table_add_nothing():
    terms = jnp.ones((1, 4, 8), jnp.bfloat16)
    grad = lookup.table_gradient(jnp.array([[0, -1, 5, 2]]), terms, shape=(3, 8), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(grad.astype(jnp.float32), np.array([[1.0], [0.0], [1.0]]) * np.ones(8))


def model(param_dtype: str):
    """Return a one-layer model with tied tables and learned positions."""
    return small.gpt2(
        **{"param_dtype": param_dtype, "compute_dtype": "bfloat16", "embed__dropout": 0.0},
        **{"stack__num_layers": 1, "stack__pattern__0__dropout": 0.0},
    )


def host_batch(program) -> dict[str, np.ndarray]:
    """Return a batch of documents as `small` makes them, in which one token is 10% of all tokens."""
    batch = small.host_batch(program)
    return {**batch, "tokens": with_a_common_token(batch["tokens"])}


@pytest.fixture(scope="module")
def get_expected():
    """Return a cached function from the parameter dtype to {path: gradient} of both tables.

    The terms are those of bfloat16 compute, added in float64.
    """
    known = {}

    def expected(param_dtype: str) -> dict[str, np.ndarray]:
        if param_dtype in known:
            return known[param_dtype]
        program = small.program(experiment(param_dtype))
        state, batch = program.init(), host_batch(program)
        chain = program.experiment.model

        def after(params, x, batch):
            ctx = training_context(batch, state.counter, chain, program.layout, "none")
            for stage in ("stack", "head"):
                x, out = chain.run(stage, params, x, ctx, {})
            return out.loss

        ctx = training_context(batch, state.counter, chain, program.layout, "none")
        x, _ = chain.run("embed", state.parameter, None, ctx, {})
        params_grad, terms = jax.jit(jax.grad(after, (0, 1)))(state.parameter, x, batch)
        head_grad = np.asarray(params_grad["embed"]["token"], np.float64)
        rows = {path: spec.shape[0] for path, spec in flatten(program.layout.specs.parameter["embed"]).items()}
        known[param_dtype] = {
            "token": head_grad + sum_in_float64(batch["tokens"], terms, rows["token"]),
            "position": sum_in_float64(batch["positions"], terms, rows["position"]),
        }
        return known[param_dtype]

    return expected


def experiment(param_dtype: str, mesh: dict | None = None, memory: dict | None = None):
    """Return a config with plain SGD, so that the change of the (master) weights is the gradient times the rate."""
    return small.experiment(
        model(param_dtype),
        seq_len=LENGTH,
        batch=ROWS,
        documents=True,
        mesh=mesh,
        memory=memory,
        optimizer=config_for(optax.sgd, learning_rate=RATE),
        clip=None,
        master_dtype=None if param_dtype == "float32" else "float32",
    )


RATE = 256.0  # steps are large compared to the rounding of float32 weights
SHARDED = {"data": 2, "fsdp": 2, "model": 2}
OFFLOADED = {"update": "streamed", "gradients": "pinned_host", "optimizer_state": "pinned_host"}
SCHEDULES = [
    pytest.param("bfloat16", {}, {}, id="after_backward"),
    pytest.param("float32", {}, SHARDED, id="after_backward, float32, sharded"),
    pytest.param("bfloat16", {"update": "streamed"}, {}, id="streamed"),
    pytest.param("float32", OFFLOADED, {}, id="offloaded gradients, float32"),
    pytest.param("bfloat16", OFFLOADED, SHARDED, id="offloaded gradients, sharded"),
    pytest.param("bfloat16", {"update": "in_backward"}, {}, id="in_backward"),
    pytest.param("bfloat16", {"update": "layer_programs"}, {}, id="layer_programs"),
]


@pytest.mark.pairs
@pytest.mark.parametrize(("param_dtype", "memory", "mesh"), SCHEDULES)
def test_table_updates_equal_the_sum_over_their_terms(param_dtype, memory, mesh, get_expected):
    """Check a tied token table, and positions with document masks, under every schedule."""
    program = small.program(experiment(param_dtype, mesh, memory))
    state = program.init()

    def tables(state) -> dict[str, np.ndarray]:
        kept = state.parameter["embed"]
        if param_dtype == "bfloat16":
            kept = state.optimizer["embed"]["default"]["master"]
        return {path: np.array(x, np.float64) for path, x in flatten(kept).items()}

    before = tables(state)
    state, _ = program.step(state, program.put(host_batch(program)))
    after, expected = tables(state), get_expected(param_dtype)
    for path, terms in expected.items():
        moved = (before[path] - after[path]) / RATE
        assert distance(moved, terms) < 2 * ROUNDED_ONCE, path
        rows = COMMON if path == "token" else slice(0, 4)
        assert distance(moved[rows], terms[rows]) < 2 * ROUNDED_ONCE, path


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_bias_gradient_is_the_sum_over_its_terms(stored):
    layer = Linear(inputs=8, outputs=16, bias=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, LENGTH, 8)).astype(jnp.bfloat16)
    terms = (0.5 + rng.normal(size=(ROWS, LENGTH, 16))).astype(jnp.bfloat16)
    ctx = Context(batch={}, compute_dtype=jnp.bfloat16)
    params = {"weight": jnp.ones((8, 16), stored), "bias": jnp.zeros(16, stored)}

    @jax.jit
    def grads(params, x, terms):
        return jax.vjp(lambda params: layer(layer.prepare(params, ctx), x, ctx), params)[1](terms)[0]

    expected = np.asarray(terms, np.float64).sum((0, 1))
    assert distance(grads(params, x, terms)["bias"], expected) < ROUNDED_ONCE


def test_parameter_uses_in_a_loop_are_summed_in_float32():
    """In bfloat16, a sum of equal terms stops growing after 256 of them."""
    weight, terms = jnp.full(4, 2.0, jnp.bfloat16), jnp.ones((2048, 4), jnp.bfloat16)

    def total(params, terms):
        taps = grad_accumulation.make_taps(params)

        def body(x, term):
            return x + jnp.sum(grad_accumulation.attach_taps(params, taps)["w"] * term, dtype=jnp.float32), None

        return jax.lax.scan(body, jnp.float32(0), terms)[0]

    value, grads = jax.jit(jax.value_and_grad(total))({"w": weight}, terms)
    assert float(value) == 2.0 * terms.size
    np.testing.assert_array_equal(grads["w"].astype(jnp.float32), np.full(4, 2048.0))
    assert grad_accumulation.make_taps({"w": weight.astype(jnp.float32)}) == {}


@component
class Shift(Layer):
    """Layer x + w; the gradient of w is the same at every use."""

    def __init__(self, *, dim: int):
        self.dim = dim

    def param_specs(self) -> dict[str, ParameterSpec]:
        return {"shift": ParameterSpec((self.dim,), "float32", roles=("channel",))}

    def apply(self, weights, carry, ctx, layer_state):
        return add_shared(carry, weights["shift"]), Out()


UNITS = 512


@pytest.mark.pairs
@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"update": "in_backward"},
        OFFLOADED,
        {"update": "in_backward", "remat": "sqrt"},
        {"update": "layer_programs"},
    ],
    ids=str,
)
def test_shared_layer_gradients_are_summed_in_float32(memory):
    """Every unit has its own weight and a shared one; the shared gradient is the sum of the units' own gradients."""
    shared = model("bfloat16")
    shared.stack.pattern, shared.stack.shared = [config_for(Shift), config_for(Shift)], [1]
    shared.stack.num_layers = 2 * UNITS
    more = {"optimizer": config_for(optax.sgd, learning_rate=RATE), "clip": None, "master_dtype": "float32"}
    program = small.program(small.experiment(shared, memory=memory, **more))

    def masters(state) -> dict[str, np.ndarray]:
        kept = {stage: state.optimizer[stage] for stage in ("stack", "shared")}
        return {path: np.array(x, np.float64) for path, x in flatten(kept).items() if "master" in path}

    state = program.init()
    before = masters(state)
    state, _ = program.step(state, program.put(small.host_batch(program)))
    moved = {path: before[path] - x for path, x in masters(state).items()}
    each = [x.reshape(-1, 32) for path, x in moved.items() if path.startswith("stack")]
    terms = np.concatenate(each)
    assert terms.shape[0] == UNITS
    (total,) = (x for path, x in moved.items() if path.startswith("shared"))
    assert distance(total, terms.sum(0)) < ROUNDED_ONCE


@pytest.mark.pairs
def test_microbatches_are_added_up_in_float32():
    """The microbatches are equal, so their sum is known; the weights are bfloat16 without a master copy."""
    count = 512

    def gradients(accumulate: int):
        config = small.experiment(model("bfloat16"), seq_len=4, batch=count, accumulate=accumulate)
        config.model.compute_dtype = "float32"  # compare only the sums, not the microbatches
        program = small.program(config)
        row = {name: np.repeat(x[:1], count, 0) for name, x in small.host_batch(program).items()}
        row["weights"][:] = 1.0
        (_, _), grads = small.compile_gradients(program)(program.init(), program.put(row))
        return small.arrays(grads)

    expected, found = gradients(1), gradients(count)
    for path, grad in found.items():
        assert grad.dtype == np.float32, path
        if not path.endswith("key/bias"):  # zero except for rounding: it shifts all logits of a query equally
            assert distance(grad, np.asarray(expected[path], np.float64)) < 5 * ROUNDED_ONCE, path


SUMS = ("reduce_sum", "scatter", "cumsum", "psum", "reduce_window")


def equations(jaxpr) -> list[Any]:
    """Return all equations of a jaxpr, including nested ones."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                found += equations(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("memory", [{}, {"update": "in_backward"}], ids=str)
@pytest.mark.parametrize("family", [small.gpt2, small.llama])
def test_no_step_asks_for_a_sum_in_bfloat16(family, memory):
    """Compilers may or may not add a bfloat16 sum in float32, so no step may contain one."""
    config = small.experiment(
        family(param_dtype="bfloat16", compute_dtype="bfloat16"), documents=True, memory=memory, clip=None
    )
    step = small.program(config).jit_step.traced_step.jaxpr.jaxpr
    asked = [eqn for eqn in equations(step) if any(name in eqn.primitive.name for name in SUMS)]
    assert asked
    narrow = [eqn for eqn in asked if any(x.aval.dtype == jnp.bfloat16 for x in eqn.outvars)]
    assert not narrow, [(eqn.primitive.name, eqn.outvars[0].aval) for eqn in narrow]
