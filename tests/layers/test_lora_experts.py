"""Adapters and stored weights of experts, compared in float64 to a loop over experts with weights merged in NumPy."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.experts.expert_storage import dense_experts
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.experts.moe import MoE
from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layers.lora import LoRA, merge_adapters
from plimsoll.framework.layers.quantize import dequantize, quantize
from plimsoll.framework.layout import flatten, initialize
from tests.support import small

DIM, EXPERTS, HIDDEN, BATCH, LENGTH, TOP_K = 64, 5, 128, 3, 20, 2
NAMES = ("gate", "up", "down")
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
# Implementations of the products: loops over blocks of rows, ragged_dot, or capacity slots (enough for all choices).
WAYS = {
    "blocks": {"implementation": "blocks"},
    "ragged": {"implementation": "ragged"},
    "capacity": {"capacity": float(EXPERTS)},
}


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def lora(**fields: Any) -> LoRA:
    return config_for(
        LoRA, **{"rank": 3, "alpha": 5.0, "targets": "experts", "dtype": "float64", **fields}
    ).instantiate()


def layer(adapters: LoRA, **experts: Any) -> MoE:
    """Return a mixture of experts whose layers have adapters, as in a model."""
    moe = config_for(
        MoE,
        num_experts=EXPERTS,
        router=config_for(Router, top_k=TOP_K, balance=0.0),
        experts=config_for(Experts, hidden=HIDDEN, **experts),
    ).instantiate(dim=DIM)
    adapters.wrap({"moe": moe})
    return moe


def arrays(moe: MoE, base: str | None) -> tuple[Any, Any, np.ndarray]:
    """Return (router and expert parameters, only the expert weights as float64, tokens); no B is zero."""
    rng = np.random.default_rng(0)
    params: dict[str, Any] = {}
    dense = {}
    for name, spec in moe.experts.param_specs().items():
        if "lora" in name:
            params[name] = rng.normal(size=spec.shape) / 4
    for name in NAMES:
        shape = (EXPERTS, HIDDEN, DIM) if name == "down" else (EXPERTS, DIM, HIDDEN)
        weight = rng.normal(size=shape) / 8
        params[name] = dense[name] = weight
        if base in ("nf4", "int8"):
            params[name] = quantize(jnp.asarray(weight), base)
            dense[name] = from_definition(params[name], base)
    router = rng.normal(size=(DIM, EXPERTS))
    return {"router": {"weight": router}, "experts": params}, dense, rng.normal(size=(BATCH, LENGTH, DIM))


def from_definition(parts: Any, base: str) -> np.ndarray:
    """Dequantize the stored experts one by one, in float32 as documented."""
    from plimsoll.framework.layers.quantize import NF4, unpack_codes

    weights = []
    for expert in range(EXPERTS):
        codes = np.asarray(unpack_codes(parts["codes"][expert], base))
        scales = np.asarray(parts["scales"][expert])
        levels = np.asarray(NF4, np.float32)[codes] if base == "nf4" else codes.astype(np.float32) / np.float32(127)
        rows = codes.shape[0] // scales.shape[0]
        weights.append((levels.reshape(-1, rows, levels.shape[1]) * scales[:, None, :]).reshape(levels.shape))
    return np.stack(weights).astype(np.float64)


def context() -> Context:
    return Context({"weights": jnp.ones((BATCH, LENGTH))}, rows=jnp.arange(BATCH), compute_dtype=jnp.float64)


def merge_experts(dense: Any, params: Any, scale: float) -> Any:
    """Return W + scale * A B of each expert that has an adapter, and W of the others."""
    weights = {}
    for name in NAMES:
        experts = []
        for expert in range(EXPERTS):
            weight = dense[name][expert]
            if f"{name}_lora_a" in params:
                weight = weight + scale * params[f"{name}_lora_a"][expert] @ params[f"{name}_lora_b"][expert]
            experts.append(weight)
        weights[name] = experts
    return weights


def loop(weights: Any, router: Any, x_BSD: jax.Array) -> jax.Array:
    """Apply every expert to every token, scaled by its routing weight, which is 0 if the expert is not chosen."""
    shares_BSE = jax.nn.softmax(x_BSD @ router)
    chosen = jax.lax.top_k(shares_BSE, TOP_K)[1]
    is_chosen = jnp.sum(jax.nn.one_hot(chosen, EXPERTS), axis=-2)
    shares_BSE = shares_BSE * is_chosen
    shares_BSE = shares_BSE / jnp.sum(shares_BSE, axis=-1, keepdims=True)
    total = jnp.zeros_like(x_BSD)
    for expert in range(EXPERTS):
        gate, up, down = (weights[name][expert] for name in NAMES)
        total += shares_BSE[..., expert, None] * ((jax.nn.silu(x_BSD @ gate) * (x_BSD @ up)) @ down)
    return total


@pytest.mark.usefixtures("float64")
@pytest.mark.pairs
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("targets", ["experts", "up|down.*experts|experts/up"])
@pytest.mark.parametrize("base", [None, "nf4", "int8"])
def test_values_and_gradients_match_merged_weights(base: str | None, targets: str, way: str):
    adapters = lora(base=base, targets=targets, base_targets=None if base is None else ".")
    moe = layer(adapters, **WAYS[way])
    weights, dense, x_BSD = arrays(moe, base)
    factors = {name: leaf for name, leaf in weights["experts"].items() if "lora" in name}
    assert len(factors) == (6 if targets == "experts" else 2)
    direction = np.random.default_rng(1).normal(size=x_BSD.shape)

    def ours(factors: Any, x_BSD: jax.Array) -> jax.Array:
        params = {"router": weights["router"], "experts": {**weights["experts"], **factors}}
        y_BSD, _ = moe.apply(moe.prepare(params, context()), x_BSD, context(), {})
        return jnp.sum(y_BSD * direction), y_BSD

    def theirs(factors: Any, x_BSD: jax.Array) -> jax.Array:
        y_BSD = loop(merge_experts(dense, factors, 5.0 / 3), weights["router"]["weight"], x_BSD)
        return jnp.sum(y_BSD * direction), y_BSD

    # On both sides, gradients with respect to the router's input flow through its choice.
    (_, y_BSD), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(factors, x_BSD)
    (_, y_expected), expected = jax.jit(jax.value_and_grad(theirs, (0, 1), has_aux=True))(factors, x_BSD)
    # int8 codes are divided by 127 in float32, and XLA turns the division into a multiplication.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if base == "int8" else TOLERANCE
    np.testing.assert_allclose(y_BSD / np.abs(y_expected).max(), y_expected / np.abs(y_expected).max(), **tolerance)
    for path, grad in flatten({"factors": grads[0], "x": grads[1]}).items():
        other = flatten({"factors": expected[0], "x": expected[1]})[path]
        largest = np.abs(other).max()
        assert largest > 0, path
        np.testing.assert_allclose(grad / largest, other / largest, err_msg=path, **tolerance)


@pytest.mark.first(1)
@pytest.mark.parametrize("way", WAYS)
def test_stored_experts_save_only_codes_for_backward(way: str):
    """No saved array is as large as the experts' weights: the backward pass dequantizes them again."""
    moe = layer(lora(base="nf4", dtype="float32"), **WAYS[way])
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), moe.parameter_specs())
    x_BSD = jnp.ones((BATCH, LENGTH, DIM))
    ctx = Context({"weights": jnp.ones((BATCH, LENGTH))}, rows=jnp.arange(BATCH))
    _, pull = jax.vjp(lambda x_BSD: moe.apply(params, x_BSD, ctx, {})[0], x_BSD)
    kept = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.size >= EXPERTS * DIM * HIDDEN]
    assert kept == []


@pytest.mark.pairs
@pytest.mark.parametrize("num_elements", [1, 2 * DIM * HIDDEN, 1 << 24])
@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_experts_are_dequantized_in_groups(storage: str, num_elements: int):
    weight = np.random.default_rng(0).normal(size=(EXPERTS, DIM, HIDDEN)).astype(np.float32)
    parts = quantize(jnp.asarray(weight), storage)

    def dense(parts: Any) -> jax.Array:
        return dequantize(parts, storage, jnp.float32)

    # Rows with infinities and NaNs must not change the weights.
    for first in (1.0, -np.inf, np.inf, np.nan):
        x = jnp.full((2, DIM), first)
        found = dense_experts(dense, parts, x, num_elements)
        np.testing.assert_allclose(found, dense(parts), rtol=1e-6)
    num_loops = str(jax.make_jaxpr(lambda parts: dense_experts(dense, parts, x, num_elements))(parts)).count("scan[")
    assert (num_loops > 0) == (num_elements < EXPERTS * DIM * HIDDEN)


def test_dense_experts_of_one_layer_exist_at_a_time():
    """The compiler may not make room for the dense weights of all layers before the first product."""
    shape = (EXPERTS, DIM, DIM)
    layers = [quantize(jnp.ones(shape), "nf4") for _ in range(8)]

    def run(x_NI: jax.Array, layers: list[Any]) -> jax.Array:
        for parts in layers:
            weight_EIO = dense_experts(lambda parts: dequantize(parts, "nf4", jnp.float32), parts, x_NI, 1)
            x_NI = jnp.tanh(jnp.einsum("ni,eio->no", x_NI, weight_EIO))
        return x_NI

    compiled = jax.jit(run).lower(jnp.ones((EXPERTS, DIM)), layers).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * math.prod(shape)


@pytest.mark.pairs
def test_expert_adapters_start_at_zero_and_differ():
    moe = layer(lora(dtype="float32"))
    params = initialize(moe.experts.param_specs(), jax.random.key(0))
    assert not params["gate_lora_b"].any()
    lora_a = np.asarray(params["down_lora_a"])
    assert lora_a.shape == (EXPERTS, HIDDEN, 3)
    assert 0.95 * HIDDEN**-0.5 < np.abs(lora_a).max() <= HIDDEN**-0.5
    assert np.unique(lora_a).size > 0.99 * lora_a.size, "each expert has draws of its own"


# --- in a model -------------------------------------------------------------------------------------------------------


def model(**fields: Any) -> Config:
    config = small.llama(dim=64)
    small.block(config).mlp = mixture(experts=4, top_k=2, hidden=128)
    if fields:
        config.lora = config_for(LoRA, **{"rank": 2, "targets": "experts|.", **fields})
    return config


def perturb_adapters(state: Any) -> Any:
    """Return a state in which all adapters have an effect: B is not zero."""
    rng = np.random.default_rng(1)
    state = jax.device_get(state)
    return replace(state, parameter=jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), state.parameter))


def adapter_paths(config: Config) -> set[str]:
    specs = flatten(config.instantiate().parameter_specs())
    return {path.removeprefix("stack/block0/") for path, spec in specs.items() if "rank" in spec.roles}


def test_which_experts_are_targets():
    experts = {f"mlp/experts/{name}_lora_{letter}" for name in NAMES for letter in "ab"}
    linears = {f"attention/{name}/lora_{letter}" for name in ("query", "key", "value", "output") for letter in "ab"}
    assert adapter_paths(model(targets=".")) == linears
    assert adapter_paths(model(targets="mlp|attention")) == linears
    assert adapter_paths(model(targets="experts/")) == experts
    assert adapter_paths(model(targets="experts|.")) == experts | linears
    down = {path for path in experts if "down" in path}
    assert adapter_paths(model(targets="experts/down")) == down
    with pytest.raises(ValueError, match=r"lora.dropout = 0.1: adapters of experts have none .*expected 0"):
        model(targets="experts|.", dropout=0.1).instantiate()
    with pytest.raises(ValueError, match=r"'experts/gates' matches none of 7 layers: .*'stack/block0/mlp/experts/up'"):
        model(targets="experts/gates").instantiate()
    narrow = model(targets="experts", base="nf4")
    small.block(narrow).mlp.experts.hidden = 96
    with pytest.raises(ValueError, match=r"blocks of 64, which do not divide 96, the inputs of .*experts/down; try"):
        small.program(small.experiment(narrow))


@pytest.mark.pairs
def test_a_zero_adapter_is_the_base_model():
    base = small.program(small.experiment(model()))
    adapted = small.program(small.experiment(model(targets="experts|.")))
    state = adapted.init()
    small.assert_same_bits(state.frozen, base.init().parameter)
    batch = base.put(small.host_batch(base))
    first = adapted.experiment.model.logits(adapted.weights(state), adapted.evaluation_context(batch), {})
    other = base.experiment.model.logits(base.init().parameter, base.evaluation_context(batch), {})
    np.testing.assert_array_equal(first, other)


@pytest.mark.pairs
@pytest.mark.parametrize("base", [None, "nf4", "int8"])
def test_merged_experts_match_a_model_without_adapters(base: str | None):
    with jax.enable_x64(base is None):
        check_merged_experts(base)


def check_merged_experts(base: str | None) -> None:
    config = model(base=base)
    plain_config = model()
    if base is None:
        # The weights are large: float32 sums in another order differ by 1.1e-4 on an AMD EPYC.
        for one in (config, plain_config):
            one.param_dtype = one.compute_dtype = "float64"
    adapted = small.program(small.experiment(config))
    state = perturb_adapters(adapted.init())
    state = jax.tree.map(lambda x, spec: x.astype(spec.dtype), state, adapted.layout.abstract())
    plain = plain_config.instantiate()
    merged_params = merge_adapters(adapted.experiment.model, adapted.weights(state))
    expected = {path: (spec.shape, spec.dtype) for path, spec in flatten(plain.parameter_specs()).items()}
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(merged_params).items()} == expected
    ctx = adapted.evaluation_context(adapted.put(small.host_batch(adapted)))
    logits = adapted.experiment.model.logits(adapted.weights(state), ctx, {})
    np.testing.assert_allclose(plain.logits(merged_params, ctx, {}), logits, atol=2e-5 * np.abs(logits).max())
    without = adapted.experiment.model.logits(adapted.weights(adapted.init()), ctx, {})
    assert np.abs(logits - without).max() > 0.1


FSDP_MODEL = {"expert": 2, "fsdp": 2, "model": 2}
SEQ_DATA = {"expert": 2, "seq": 2, "data": 2}


# Any two values of two different parameters occur together in some case.
@pytest.mark.pairs
@pytest.mark.parametrize(
    ("base", "capacity", "mesh"),
    [
        (None, None, FSDP_MODEL),
        (None, 8.0, SEQ_DATA),
        ("nf4", None, SEQ_DATA),
        ("nf4", 8.0, FSDP_MODEL),
        ("int8", None, FSDP_MODEL),
        ("int8", 8.0, SEQ_DATA),
    ],
)
def test_meshes_change_no_number(base: str | None, capacity: float | None, mesh: dict[str, int]):
    def program(mesh: dict[str, int] | None) -> Any:
        config = model(base=base)
        config.dim = 128
        experts = small.block(config).mlp.experts
        experts.capacity = capacity
        # Without a capacity, some tokens travel in a second round.
        experts.exchange = "all_to_all"
        experts.buffer_factor = 0.75
        config.stack.unroll = 1
        # The weights are large: float32 sums in another order differ by 2.6e-4 on an AMD EPYC.
        config.compute_dtype = "float64"
        return small.program(small.experiment(config, mesh=mesh))

    with jax.enable_x64(True):
        single = program(None)
        perturbed = perturb_adapters(single.init())
        state = jax.tree.map(lambda x, spec: x.astype(spec.dtype), perturbed, single.layout.abstract())
        loss, grads = small.loss_and_grads(single, state)
        other, others = small.loss_and_grads(program(mesh), state)
    np.testing.assert_allclose(other, loss, rtol=2e-6)
    small.assert_close(others, grads, 1e-4)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("base", "update"), [("nf4", "streamed"), ("nf4", "in_backward"), ("nf4", "layer_programs"), (None, "streamed")]
)
def test_full_offload_changes_no_value_in_any_schedule(base: str | None, update: str):
    from unittest import mock

    from plimsoll.framework import layout

    def program(memory: dict[str, str]) -> Any:
        settings = {"remat": "full", **memory}
        config = small.experiment(model(base=base), memory=settings, optimizer=small.STEADY_ADAMW, clip=None)
        return small.program(config)

    plain = program({})
    expected, losses = small.run(plain, 3)
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        places = dict.fromkeys(("parameters", "activations", "optimizer_state"), "pinned_host")
        offloaded = program({"update": update, **places})
        state, metrics = small.run(offloaded, 3)
    away = {path for path, x in flatten(state.frozen).items() if x.sharding.memory_kind == "pinned_host"}
    assert any(path.endswith("experts/up" if base is None else "experts/up/codes") for path in away)
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in losses], rtol=2e-6)
    small.assert_close(small.arrays(offloaded.backend.to_checkpoint(state)), small.arrays(expected), 1e-5)
