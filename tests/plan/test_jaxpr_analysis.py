"""FLOPs and zero gradients read off a program, compared with the compiler, hand formulas and computed gradients."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from plimsoll import configs
from plimsoll.framework.config import config_for
from plimsoll.framework.layers import kernels_splash, kernels_triton, kernels_xla
from plimsoll.framework.layers.kernels_call import describe_call
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.low_precision import RECIPES, multiply
from plimsoll.framework.plan.build_report import list_zero_gradients
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, find_zero_gradients, flops
from plimsoll.framework.plan.step_time.estimated_time import count_traced_work
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.after_backward import accumulate_gradients
from plimsoll.framework.schedules.step import training_context
from tests.support import small


def count(function, *shapes):
    return flops(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes))).flops


# Those of mxfp8 are in tests/layers/test_microscaling.py.
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "int8_row"])
def test_products_of_8_bit_numbers_are_counted_by_format(name):
    tokens, inputs, outputs = 12, 6, 10

    def loss(x, weight):
        return jnp.sum(jnp.tanh(multiply(x, weight, None, RECIPES[name], "cpu")))

    found = flops(
        jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jnp.ones((tokens, inputs)), jnp.ones((inputs, outputs)))
    )
    # Forward, and one product for each gradient.
    expected = 3 * 2 * tokens * inputs * outputs
    is_integer = name == "int8_row"
    assert found == FlopCount(expected, fp8=0 if is_integer else expected, int8=expected if is_integer else 0)
    assert found.scale(4) == FlopCount(4 * expected, fp8=4 * found.fp8, int8=4 * found.int8)


@pytest.mark.parametrize(("name", "cotangents"), [("fp8_tensor", 1), ("fp8_row", 2), ("int8_row", 2)])
def test_rounding_reads_an_array_twice_and_writes_it_once(name: str, cotangents: int):
    tokens, inputs, outputs = 12, 6, 10
    x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)

    def loss(x, weight):
        return jnp.sum(multiply(x, weight, None, RECIPES[name], "gpu").astype(jnp.float32))

    found = count_traced_work(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, weight)).product_bytes
    sizes = (tokens * inputs, inputs * outputs, tokens * outputs)
    # Integers are summed to int32.
    wide = 4 if name == "int8_row" else 2
    products = sum(sum(sizes) - size + wide * size for size in sizes)
    # The weight is rounded forward and backward; with a scale for each row, the cotangent for each product.
    rounded = sizes[0] + 2 * sizes[1] + cotangents * sizes[2]
    assert found == products + 5 * rounded


def chain(x, w):
    return jnp.tanh(x @ w)


PRODUCTS = {
    "product": (lambda x, y: x @ y, (3, 5), (5, 7)),
    "batched, contracting two": (lambda x, y: jnp.einsum("bijk,jblk->bil", x, y), (2, 3, 4, 5), (4, 2, 6, 5)),
    "of vectors": (jnp.vdot, (6,), (6,)),
    "convolution": (
        lambda x, y: jax.lax.conv_general_dilated(x, y, (2, 1), "VALID", feature_group_count=2),
        (2, 6, 9, 8),
        (4, 3, 3, 2),
    ),
    "gradient of a convolution's kernel": (
        lambda x, g: jax.linear_transpose(lambda y: jax.lax.conv(x, y, (1, 1), "VALID"), jnp.ones((4, 6, 3, 2)))(g),
        (2, 6, 9, 8),
        (2, 4, 7, 7),
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_count_as_the_compiler_counts_them(case):
    function, *shapes = PRODUCTS[case]
    analysis = jax.jit(function).lower(*(jnp.ones(shape) for shape in shapes)).cost_analysis()
    assert count(function, *shapes) == analysis["flops"] > 0


def test_nested_jaxprs_are_counted_equally():
    once = 2 * 8 * 16 * 16

    @jax.custom_vjp
    def with_custom_rule(x, w):
        return chain(x, w)

    with_custom_rule.defvjp(lambda x, w: (chain(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
    rows = jax.shard_map(chain, mesh=mesh, in_specs=(PartitionSpec("b"), None), out_specs=PartitionSpec("b"))
    one_axis = jax.shard_map(
        chain, mesh=mesh, in_specs=(PartitionSpec("a"), None), out_specs=PartitionSpec("a"), axis_names={"a"}
    )
    for function in (chain, jax.jit(chain), jax.checkpoint(chain), with_custom_rule, jax.jit(one_axis)):
        assert count(function, (8, 16), (16, 16)) == once
    assert count(jax.grad(lambda x, w: with_custom_rule(x, w).sum(), argnums=(0, 1)), (8, 16), (16, 16)) == 3 * once
    # Both devices along axis "a" compute the same rows; the count includes this duplicate work.
    assert count(rows, (8, 16), (16, 16)) == 2 * once
    assert (
        count(
            lambda x, w: jax.lax.cond(x[0, 0] > 0, chain, lambda x, w: chain(chain(x, w), w), x, w), (8, 16), (16, 16)
        )
        == 2 * once
    )


def test_loops_count_by_their_trips():
    once = 2 * 8 * 16 * 16

    def run_scan(x, w):
        return jax.lax.scan(
            lambda x, _: (jax.lax.scan(lambda x, _: (chain(x, w), None), x, length=3)[0], None), x, length=5
        )[0]

    def run_unrolled(x, w):
        for _ in range(15):
            x = chain(x, w)
        return x

    def loop(trips, x, w):
        return jax.lax.fori_loop(0, trips, lambda _, x: chain(x, w), x)

    assert count(run_scan, (8, 16), (16, 16)) == count(run_unrolled, (8, 16), (16, 16)) == 15 * once
    assert count(jax.jit(partial(loop, 7)), (8, 16), (16, 16)) == 7 * once
    arrays = jnp.ones((8, 16)), jnp.ones((16, 16))
    assert flops(jax.make_jaxpr(loop)(7, *arrays)) == FlopCount(once, uncounted_loops=1)
    assert flops(jax.make_jaxpr(lambda n: jax.lax.fori_loop(0, n, lambda i, x: x + i, 0))(7)) == FlopCount()


def test_pallas_kernels_count_by_grid_or_cost_estimate():
    def kernel(x, w, y):
        y[...] = x[...] @ w[...]

    def call(x, w, cost=None):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 16), jnp.float32),
            grid=(4, 2),
            in_specs=[pl.BlockSpec((2, 16), lambda i, j: (i, 0)), pl.BlockSpec((16, 8), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((2, 8), lambda i, j: (i, j)),
            cost_estimate=cost,
        )(x, w)

    said = pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=0)
    assert count(call, (8, 16), (16, 16)) == 2 * 8 * 16 * 16
    assert count(partial(call, cost=said), (8, 16), (16, 16)) == 77
    assert count(jax.vmap(partial(call, cost=said)), (3, 8, 16), (3, 16, 16)) == 3 * 77


# --- attention ----------------------------------------------------------------------------------------------------

B, S, N, K, H = 2, 1024, 4, 2, 64


def attention_flops(kernel, sizes=None):
    """Return [FLOPs of the forward pass, FLOPs of forward and backward] in units of one product, 2 B N S S H."""
    mesh = (
        None
        if sizes is None
        else Mesh(np.asarray(jax.devices()).reshape(sizes), ("data", "fsdp", "expert", "seq", "model"))
    )
    q, k = (jax.ShapeDtypeStruct((B, S, n, H), jnp.bfloat16) for n in (N, K))
    call = describe_call(q, k, k, None, None, None, mesh)

    def attend(q, k, v):
        return kernel.attend(call, q, k, v, None).astype(jnp.float32).sum()

    counts = [flops(jax.make_jaxpr(f)(q, k, k)).flops for f in (attend, jax.grad(attend, argnums=(0, 1, 2)))]
    return [flops / (2 * B * N * S * S * H) for flops in counts]


@pytest.mark.parametrize("sizes", [None, (1, 2, 1, 2, 2)])
def test_splash_counts_its_products(sizes):
    """All blocks count: q k and w v forward; q k, dw, dq and q k, dw, dk, dv in the two backward kernels."""
    forward, both = attention_flops(kernels_splash, sizes)
    assert forward == 2
    assert both == pytest.approx(9, abs=0.01)  # plus the row sums of output times gradient


@pytest.mark.pairs
def test_xla_attention_counts_the_keys_visible_to_a_row_block():
    """Eight blocks of 128 rows attend to 1/8, 2/8, ..., 8/8 of the keys, 9/16 in total."""
    assert attention_flops(kernels_xla) == [2 * 9 / 16, 6 * 9 / 16]


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")),
    reason="JAX without CUDA makes no cuDNN calls",
)
def test_cudnn_counts_its_products():
    from plimsoll.framework.layers import kernels_cudnn

    assert attention_flops(kernels_cudnn) == [2, 7]


def test_triton_attention_counts_its_products():
    """As splash: the logits and the gradients of weights are computed in both backward kernels."""
    assert attention_flops(kernels_triton) == [2, 9]


# --- a model --------------------------------------------------------------------------------------------------------


def gradients_jaxpr(program):
    """Return the jaxpr of the gradients as the training step computes them."""
    parts = program.experiment

    def gradients(state, batch):
        ctx = training_context(batch, state.counter, parts.model, program.layout, parts.memory.remat)
        return accumulate_gradients(parts.model, parts.learner, state, ctx)[1]

    return jax.make_jaxpr(gradients)(program.layout.abstract(), program.layout.abstract(program.batch_specs))


def gradient_flops(model=None, **options):
    return flops(gradients_jaxpr(small.program(small.experiment(model, **options))))


def hand_formula(S, pairs, *, L=2, D=32, N=4, K=2, H=8, F=48, V=small.VOCAB, B=8):
    """Return the FLOPs of forward and backward of `small.llama`: three times each product.

    `pairs` is the number of (query, key) pairs per sequence and head.
    """
    weights = L * (D * N * H + 2 * D * K * H + N * H * D + 3 * D * F) + V * D
    return 3 * 2 * B * (S * weights + L * 2 * N * H * pairs)


@pytest.mark.pairs
@pytest.mark.parametrize("unroll", [0, 1])
def test_model_flops_match_a_manual_count(unroll):
    model = small.llama(stack__unroll=unroll)
    built = small.experiment(model).instantiate().model
    # 16 positions are one block of rows, so every pair is computed and the model's own formula is exact.
    assert gradient_flops(model).flops == hand_formula(16, 16 * 16) == built.flops_per_token(16) * 16 * 8
    # 128 positions are two blocks of 64 rows, and the first uses only 64 keys: the formula counts 64 * 64 pairs more.
    pairs = 128 * 128 - 64 * 64
    assert gradient_flops(model, seq_len=128).flops == hand_formula(128, pairs) < built.flops_per_token(128) * 128 * 8


@pytest.mark.pairs
def test_neither_loops_nor_microbatches_nor_meshes_change_the_count():
    expected = gradient_flops(small.gpt2(stack__num_layers=4), seq_len=32)
    assert expected.uncounted_loops == 0
    for model in ({"stack__unroll": 0}, {"stack__unroll": 2}, {"head__chunk_tokens": 8}):
        assert gradient_flops(small.gpt2(stack__num_layers=4, **model), seq_len=32) == expected
    for options in ({"accumulate": 4}, {"mesh": {"data": 2, "fsdp": 2, "model": 2}}):
        assert gradient_flops(small.gpt2(stack__num_layers=4), seq_len=32, **options) == expected


@pytest.mark.pairs
@pytest.mark.parametrize("unroll", [0, 1])
def test_full_remat_adds_one_forward_pass_through_the_stack(unroll):
    """Each layer's last product is not recomputed, because the backward pass does not read its result."""
    model = small.llama(stack__unroll=unroll)
    stack = small.experiment(model).instantiate().model.stack
    last = stack.num_repeats * 2 * 48 * 32
    added = gradient_flops(model, memory={"remat": "full"}).flops - gradient_flops(model).flops
    assert added == (stack.flops_per_token(16) - last) * 16 * 8


@pytest.mark.pairs
def test_the_whole_step_counts_the_optimizer_too():
    """Muon takes five steps of X <- a X + (b A + c A A) X with A = X X^T for each matrix; m is its shorter side."""
    program = Program(configs.load("stdlib-tiny").instantiate(), jax.devices()[:1])
    jaxpr = program.jit_step.step_jit.trace(
        program.layout.abstract(), program.layout.abstract(program.batch_specs)
    ).jaxpr
    matrices = [(128, 128)] * 4 + [(128, 344)] * 3
    muon = 4 * 5 * sum(2 * m * m * n + 2 * m * m * m + 2 * m * m * n for m, n in matrices)
    assert flops(jaxpr) == FlopCount(flops(gradients_jaxpr(program)).flops + muon, uncounted_loops=0)


# --- zeros ------------------------------------------------------------------------------------------------------------


class StoppedLinear(Linear):
    """A user's layer whose weight gets no gradient, although it is not frozen in the learner."""

    def __call__(self, weights, x, ctx):
        """Return Linear's result with a `stop_gradient` on the weight."""
        return super().__call__({**weights, "weight": jax.lax.stop_gradient(weights["weight"])}, x, ctx)


def build_stopped_model(**fields):
    model = small.gpt2(**fields)
    small.block(model).mlp.linear = config_for(StoppedLinear, bias=True)
    return model


STOPPED = {"stack/block0/mlp/up/weight", "stack/block0/mlp/down/weight"}


def find_zero_paths(program):
    return {one.path for one in list_zero_gradients(program)}


@pytest.mark.pairs
@pytest.mark.parametrize("unroll", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 4, "memory": {"remat": "dots"}},
        {"accumulate": 2, "memory": {"remat": "full"}, "mesh": {"data": 2, "fsdp": 2, "model": 2}},
    ],
)
def test_a_stopped_weight_is_found_and_no_other(unroll, options):
    assert (
        find_zero_paths(small.program(small.experiment(build_stopped_model(stack__unroll=unroll), **options)))
        == STOPPED
    )


@pytest.mark.pairs
@pytest.mark.parametrize("accumulate", [1, 4])
def test_predicted_zeros_match_computed_gradients(accumulate):
    program = small.program(small.experiment(build_stopped_model(), accumulate=accumulate))
    _, gradients = small.loss_and_grads(program)
    assert {path for path, gradient in gradients.items() if not gradient.any()} == find_zero_paths(program) == STOPPED


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["stdlib-tiny", "nanogpt-cpu"])
def test_named_configs_train_every_weight(name):
    config = configs.load(name)
    program = Program(config.instantiate(), jax.devices()[:1])
    assert find_zero_paths(program) == set()


@pytest.mark.pairs
def test_every_way_from_a_parameter_to_the_loss():
    """No derivative passes from a to the loss, but from b it does; `unreached` agrees with computed gradients."""
    mesh = Mesh(np.asarray(jax.devices()), ("a",))
    everywhere = PartitionSpec()
    stopped = jax.lax.stop_gradient

    @jax.custom_vjp
    def with_custom_rule(a, b):
        return stopped(a) * b

    with_custom_rule.defvjp(lambda a, b: (with_custom_rule(a, b), (a, b)), lambda kept, g: (0 * g, kept[0] * g))

    def run_scan(a, b):
        def body(carry, _):
            return (carry[0] + 1, carry[1] * carry[2], carry[2]), stopped(carry[0]) * carry[2]

        (_, product, _), rows = jax.lax.scan(body, (a, a * 0 + 1, b), length=3)
        return rows + stopped(a) * product

    def twice_later(a, b):
        return jax.lax.scan(lambda c, _: ((c[1], c[2], c[2]), c[0]), (stopped(a), stopped(a), b), length=4)[0][0]

    ways = {
        "stopped": lambda a, b: stopped(a) * b,
        "not used": lambda a, b: b**2,
        "rounded": lambda a, b: a.astype(int) * b,
        "compared": lambda a, b: jnp.where(a > 1, b, 2 * b),
        "index": lambda a, b: jax.lax.dynamic_slice(b, (a[0].astype(int),), (2,)),
        "jit": lambda a, b: jax.jit(lambda a, b: (a, b))(a, b)[1],
        "cond": lambda a, b: jax.lax.cond(a[0] > 0, lambda a, b: b, lambda a, b: stopped(a) * b, a, b),
        "scan": lambda a, b: run_scan(stopped(a), b),
        "scan, two later": twice_later,
        "remat": jax.checkpoint(lambda a, b: jnp.sin(stopped(a)) * b),
        "shard_map": jax.shard_map(
            lambda a, b: jax.lax.psum(stopped(a) * b, "a"), mesh=mesh, in_specs=everywhere, out_specs=everywhere,
            check_vma=False,
        ),
    }  # fmt: skip
    a, b = jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)
    losses = {name: (lambda params, way=way: jnp.sum(way(*params))) for name, way in ways.items()}
    computed = jax.jit(lambda params: {name: jax.grad(loss)(params) for name, loss in losses.items()})((a, b))
    for name, loss in losses.items():
        assert [not gradient.any() for gradient in jax.device_get(computed[name])] == [True, False], name
        assert find_zero_gradients(loss, (a, b)) == [True, False], name
    # A custom rule may do anything: its zeros are not detected, and no false zeros are reported.
    assert find_zero_gradients(lambda params: jnp.sum(with_custom_rule(*params)), (a, b)) == [False, False]
