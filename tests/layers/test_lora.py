"""Quantized weights and adapters: definitions in float64, trained parameters, memory, meshes, remat, and merging."""

from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.lora import LoRA, LoRALinear, merge_adapters
from plimsoll.framework.layers.quantize import NF4, dequantize, quantize
from plimsoll.framework.layout import flatten, initialize
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.program.program import Program
from tests.support import small

BASES = [None, "bfloat16", "int8", "nf4"]


def config(base=None, *, mesh=None, remat="none", dropout=0.0, dim=64, **fields):
    model = small.llama(dim=dim, **fields)
    small.block(model).mlp.hidden = 128
    model.lora = config_for(LoRA, rank=4, alpha=6.0, base=base, dropout=dropout)
    return small.experiment(model, mesh=mesh, memory={"remat": remat})


def perturb_adapters(program: Program):
    """Return an initial state in which all adapters have an effect: B is not zero."""
    state, rng = jax.device_get(program.init()), np.random.default_rng(1)
    return replace(state, parameter=jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), state["parameter"]))


@pytest.mark.pairs
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_formula(base, bias):
    lora = config_for(LoRA, rank=3, alpha=6.0, base=base).instantiate()
    layer = LoRALinear(config_for(Linear, inputs=64, outputs=5, bias=bias).instantiate(), lora, "x")
    params, rng = initialize(layer.param_specs(), jax.random.key(0)), np.random.default_rng(0)
    assert not params["lora_b"].any()
    assert 0.115 < np.abs(params["lora_a"]).max() <= 0.125  # 1 / sqrt(64)
    params["lora_b"] = rng.standard_normal((3, 5)).astype(np.float32)
    params |= {"bias": rng.standard_normal(5).astype(np.float32)} if bias else {}
    weight = params["weight"] if lora.storage is None else dequantize(params["weight"], lora.storage, jnp.float32)
    x, ctx = rng.standard_normal((2, 7, 64)).astype(np.float32), Context(batch={})

    def apply(a, b, x, ctx=ctx):
        return layer(layer.prepare({**params, "lora_a": a, "lora_b": b}, ctx), x, ctx)

    @jax.jit
    def both(*inputs):
        y, pull = jax.vjp(apply, *inputs)
        return y, pull(y)

    y, grads = both(params["lora_a"], params["lora_b"], x)
    w, a, b, x64 = (np.asarray(v, np.float64) for v in (weight, params["lora_a"], params["lora_b"], x))
    np.testing.assert_allclose(y, x64 @ w + 2.0 * x64 @ a @ b + params.get("bias", 0.0), atol=2e-6)
    g, rows = np.asarray(y, np.float64), x64.reshape(-1, 64)
    a_grad, b_grad = 2.0 * rows.T @ (g @ b.T).reshape(-1, 3), 2.0 * (rows @ a).T @ g.reshape(-1, 5)
    for found, expected in zip(grads, (a_grad, b_grad, g @ (w + 2.0 * a @ b).T), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    lora.dropout, ctx = 0.5, replace(ctx, rng=jax.random.key(1), rows=jnp.arange(2), training=True)
    masked = np.asarray(ctx.dropout(x, 0.5, "x"), np.float64)
    dropped = apply(params["lora_a"], params["lora_b"], x, ctx)
    np.testing.assert_allclose(dropped - y, 2.0 * (masked - x64) @ a @ b, atol=1e-5)


@pytest.mark.pairs
def test_only_adapters_are_trained_and_saved():
    """With a narrow param_dtype, adapters, their averages and their optimizer state still stay in float32."""
    built = config(param_dtype="bfloat16")
    built.learner.ema = 0.9
    built.learner.rules = [config_for(Rule, pattern="norm", set={"weight_decay": 0.0})]  # all frozen: not an error
    program = small.program(built)
    state = program.init()
    assert {path[-6:] for path in flatten(state["parameter"])} == {"lora_a", "lora_b"}
    assert {leaf.dtype for leaf in jax.tree.leaves(state["parameter"])} == {jnp.dtype("float32")}
    adapters = program.layout.bytes_per_device("parameter")
    assert adapters == 4 * 2 * 4 * (2 * 128 + 2 * 96 + 3 * 192)
    assert program.layout.bytes_per_device("ema") == adapters
    assert program.layout.bytes_per_device("optimizer") == 2 * adapters + 2 * 4  # plus one step count per layer
    built.model.lora, built.learner.ema = None, None
    frozen = small.arrays(state["frozen"])
    small.assert_same_bits(frozen, small.program(built).init()["parameter"])  # the same draws, in bfloat16
    small.assert_same_bits(small.run(program, 2)[0]["frozen"], frozen)


@pytest.mark.pairs
@pytest.mark.parametrize("remat", ["none", "full"])
def test_frozen_base_costs_only_its_storage_bytes(remat):
    needs = {}
    for base in (None, "int8", "nf4", "trained"):
        built = config(None if base == "trained" else base, remat=remat, stack__num_layers=8)
        if base == "trained":
            built.model.lora = None
        program = small.program(built)
        stats = program.compiled_step.memory_analysis()
        assert stats.alias_size_in_bytes == program.layout.bytes_per_device()
        needs[base] = stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    matrices = 8 * 4 * 64 * (2 * 64 + 2 * 32 + 3 * 128)  # bytes of the stack's matrices: eight layers, float32
    assert max(needs["int8"], needs["nf4"]) <= needs[None] + matrices // 8
    assert needs["trained"] > needs[None] + matrices // 2  # gradients


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("base", "axis", "remat"), [(None, "fsdp", "dots"), ("int8", "fsdp", "full"), ("nf4", "seq", "none")]
)
def test_meshes_and_remat_change_no_number_dropout_included(base, axis, remat):
    # A shard never splits an nf4 block, so each half of a matrix needs a whole one.
    dim = 128 if base == "nf4" else 64
    single = small.program(config(base, dropout=0.3, dim=dim))
    fields = {"dim": dim, "mesh": {"data": 2, "fsdp": 1, "model": 2, axis: 2}, "stack__unroll": 0}
    many = small.program(config(base, remat=remat, dropout=0.3, **fields))
    state = perturb_adapters(single)
    (loss, grads), (other, others) = (small.loss_and_grads(program, state) for program in (single, many))
    np.testing.assert_allclose(other, loss, rtol=2e-6)
    small.assert_close(others, grads, 1e-5)
    small.assert_close(small.arrays(many.init()["parameter"]), small.arrays(single.init()["parameter"]), 1e-6)


@pytest.mark.pairs
@pytest.mark.parametrize("base", BASES)
def test_merged_weights_match_a_model_without_adapters(base):
    built = config(base)
    program = small.program(built)
    model, state = program.experiment.model, perturb_adapters(program)
    merged = merge_adapters(model, program.weights(state))
    built.model.lora = None
    plain, drawn = built.model.instantiate(), flatten(small.program(built).init()["parameter"])
    expected = {path: (spec.shape, spec.dtype) for path, spec in flatten(plain.parameter_specs()).items()}
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(merged).items()} == expected
    for path, leaf in flatten(merge_adapters(model, program.weights(program.init()))).items():  # B is zero
        error = {None: 0.0, "bfloat16": 0.004, "int8": 0.004, "nf4": 0.16}[base]  # the same draws, rounded
        assert np.abs(leaf - drawn[path]).max() <= error * np.abs(drawn[path]).max(), path
    ctx = program.evaluation_context(program.put(small.host_batch(program)))
    logits, others = plain.logits(merged, ctx, {}), model.logits(program.weights(state), ctx, {})
    np.testing.assert_allclose(logits, others, atol=1e-5 * np.abs(others).max())
    assert np.abs(others - model.logits(program.weights(program.init()), ctx, {})).max() > 0.1


@pytest.mark.pairs
def test_further_layers_are_stored_in_few_bits_without_an_adapter():
    """Like bitsandbytes, which quantizes all linear layers, with or without adapters."""
    built = config("nf4")
    built.model.lora.targets = "attention/(query|value)"
    narrow = small.program(built)
    built.model.lora.base_targets = "."
    program = small.program(built)
    state = perturb_adapters(program)
    assert program.layout.bytes_per_device("parameter") == narrow.layout.bytes_per_device("parameter")
    weights = {path for path in flatten(state["frozen"]) if "/weight" in path and "stack" in path}
    assert {path.split("/weight/")[-1] for path in weights if "norm" not in path} == {"codes", "scales"}
    merged = merge_adapters(program.experiment.model, program.weights(state))
    built.model.lora = None
    plain = built.model.instantiate()
    expected = {path: (spec.shape, spec.dtype) for path, spec in flatten(plain.parameter_specs()).items()}
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(merged).items()} == expected
    ctx = program.evaluation_context(program.put(small.host_batch(program)))
    others = program.experiment.model.logits(program.weights(state), ctx, {})
    np.testing.assert_allclose(plain.logits(merged, ctx, {}), others, atol=1e-5 * np.abs(others).max())


def test_bad_configs():
    for field, value, message in (
        ("rank", "0", r"lora.rank: expected an integer > 0, given 0"),
        ("base", "nf5", r"lora.base: expected one of .*'nf4' or none, given 'nf5' .*; did you mean 'nf4'\?"),
        ("targets", "querry", r"lora.targets = 'querry' matches none of 7 layers: .*attention/query"),
        ("targets", "(", r"lora: .*targets = '\(' is not a regular expression"),
        (
            "base_targets",
            ".",
            r"lora: .*base_targets = '.' without base; set base to the format in which to store these weights",
        ),
    ):
        model = small.llama(lora=config_for(LoRA))
        with pytest.raises(ConfigError, match=message):  # noqa: PT012  (when it is set, or when it is built)
            model.override(f"lora.{field}", value)
            model.instantiate()


def test_nf4_values_are_the_quantiles_that_define_them():
    half, quantile = 0.5 - 0.5 * (1 / 32 + 1 / 30), NormalDist().inv_cdf
    positive = [quantile(0.5 + half * i / 8) for i in range(1, 9)]
    negative = [quantile(0.5 - half * i / 7) for i in range(7, 0, -1)]
    np.testing.assert_allclose(NF4, np.array([*negative, 0.0, *positive]) / positive[-1], atol=2e-7)


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_codes_values_and_products_match_the_definition(storage):
    levels, block = (np.arange(-127, 128) / 127, 192) if storage == "int8" else (np.array(NF4), 64)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3, 192, 10)).astype(np.float32)
    weight[0, :64, 3] = 0.0  # an all-zero block
    blocks = weight.astype(np.float64).reshape(3, -1, block, 10)
    scales = np.abs(blocks).max(axis=2, keepdims=True)
    expected = np.abs((blocks / np.where(scales == 0, 1, scales))[..., None] - levels).argmin(axis=-1)
    values = (levels[expected] * scales).reshape(weight.shape)
    parts = jax.jit(quantize, static_argnums=1)(weight, storage)
    # Eight rows of words hold the codes of 32 rows (nf4: of the 64 rows of a block). Byte t (nf4: half byte t) of them
    # holds the codes of rows 8 t to 8 t + 7.
    bits, kind = (8, np.int8) if storage == "int8" else (4, np.uint8)
    words = np.asarray(parts["codes"]).reshape(3, -1, 1, 8, 10)
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(-1, 1, 1)
    codes = (words >> shifts & (2**bits - 1)).astype(np.uint8).view(kind).astype(np.int64).reshape(expected.shape)
    np.testing.assert_array_equal(codes, expected - (127 if storage == "int8" else 0))
    np.testing.assert_allclose(dequantize(parts, storage, jnp.float32), values, rtol=1e-6)
    assert parts["codes"].nbytes * {"int8": 1, "nf4": 2}[storage] == weight.size


def earlier(weight, storage):
    """Return quantized weights as computed when codes were bytes, with two nf4 codes per byte: rows i and i + 32."""
    *stack, inputs, outputs = weight.shape
    block = 64 if storage == "nf4" else inputs
    blocks = weight.reshape(*stack, inputs // block, block, outputs)
    scales = jnp.max(jnp.abs(blocks), axis=-2)
    units = blocks / jnp.where(scales == 0, 1, scales)[..., None, :]
    if storage == "int8":
        levels = jnp.round(127 * units).astype(jnp.int8).astype(jnp.float32) / 127
    else:
        midpoints = [(low + high) / 2 for low, high in pairwise(NF4)]
        levels = jnp.asarray(NF4)[sum((units > middle).astype(jnp.int32) for middle in midpoints)]
    return (levels * scales[..., None, :]).reshape(weight.shape)


@pytest.mark.pairs
@pytest.mark.parametrize("storage", ["int8", "nf4"])
@pytest.mark.parametrize("inputs", [64, 320])
def test_bit_packing_changes_no_value(storage, inputs):
    weight = np.random.default_rng(inputs).standard_normal((2, inputs, 6)).astype(np.float32)
    found = jax.jit(lambda w: dequantize(quantize(w, storage), storage, jnp.float32))(weight)
    small.assert_same_bits({"w": found}, {"w": jax.jit(earlier, static_argnums=1)(weight, storage)})


@pytest.mark.pairs
@pytest.mark.parametrize(("inputs", "parts"), [(24, 3), (48, 3), (64, 2), (128, 2), (160, 5)])
def test_aligned_shard_is_quantized_independently(inputs, parts):
    """A device's values depend only on its own rows of codes, as long as the shards do not split a group of words."""
    weight = np.random.default_rng(0).standard_normal((inputs, 6)).astype(np.float32)
    whole = quantize(weight, "int8")
    values = dequantize(whole, "int8", jnp.float32)
    for number, codes in enumerate(jnp.split(whole["codes"], parts)):
        part = dequantize({"codes": codes, "scales": whole["scales"]}, "int8", jnp.float32)
        np.testing.assert_array_equal(part, jnp.split(values, parts)[number])


@pytest.mark.pairs
def test_blocks_must_be_whole_and_on_one_device():
    model = small.llama(dim=128, lora=config_for(LoRA, base="nf4"))
    with pytest.raises(ValueError, match=r"blocks of 64, which do not divide 48, the inputs of .*mlp/down; try"):
        small.program(small.experiment(model))
    model.lora.targets = "query"
    with pytest.raises(ValueError, match=r"mesh.fsdp = 4 does not divide rows of 64 inputs = 2 of .*/query"):
        small.program(small.experiment(model, mesh={"fsdp": 4, "data": 2}))
    model.lora.base = "int8"
    with pytest.raises(ValueError, match=r"mesh.fsdp = 8 does not divide rows of 32 inputs = 4 of .*/query"):
        small.program(small.experiment(model, mesh={"fsdp": 8}))
    model = small.llama(dim=64, lora=config_for(LoRA, base="nf4", targets="query"))
    state = small.program(small.experiment(model, mesh={"fsdp": 8})).init()
    codes = flatten(state["frozen"])["stack/block0/attention/query/weight/codes"]
    assert codes.sharding.is_fully_replicated, "a single block is whole on every device"
    odd = small.llama(dim=64, lora=config_for(LoRA, base="int8"))
    small.block(odd).mlp.hidden = 46
    with pytest.raises(ValueError, match=r"int8 has four codes in a word, and 4 does not divide 46, .*mlp/down"):
        small.program(small.experiment(odd))
