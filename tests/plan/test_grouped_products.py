"""FLOPs of grouped products in traced and compiled programs, compared with 2 N I O for each of three products."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from plimsoll.framework.config import config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.experts.grouped import Chosen, grouped_dot, with_spare_rows
from plimsoll.framework.layers.experts.scores import ExpertChoice
from plimsoll.framework.plan import gpu_description, targets
from plimsoll.framework.plan.grouped_products import count_further_rounds, note_exchange, note_ragged_products
from plimsoll.framework.plan.hlo.flops import Flops
from plimsoll.framework.plan.hlo.module import Module, iter_executed
from plimsoll.framework.plan.jaxpr_analysis import flops
from plimsoll.launch import plan
from tests.support import small

EXPERTS, INPUTS, OUTPUTS = 8, 256, 128
ROWS, EVEN_ROWS = 4096, 1024
EXPECTED = 3 * 2 * EVEN_ROWS * INPUTS * OUTPUTS


def gradients(implementation: Chosen) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function from (rows, weights, sizes) to the product and the gradients of rows and weights."""

    def compute(x_NI: jax.Array, weight_EIO: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, ...]:
        def product(x_NI: jax.Array, weight_EIO: jax.Array) -> jax.Array:
            return grouped_dot(x_NI, weight_EIO, sizes_E, implementation, even_rows=EVEN_ROWS)

        y_NO, pull_back = jax.vjp(product, x_NI, weight_EIO)
        return y_NO, *pull_back(y_NO)

    return compute


def arguments(implementation: Chosen, sharding: SingleDeviceSharding | None = None) -> list[jax.ShapeDtypeStruct]:
    rows = with_spare_rows(ROWS, implementation)
    shapes = [(rows, INPUTS), (EXPERTS, INPUTS, OUTPUTS), (EXPERTS,)]
    dtypes = [jnp.bfloat16, jnp.bfloat16, jnp.int32]
    pairs = zip(shapes, dtypes, strict=True)
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in pairs]


@pytest.mark.parametrize("implementation", ["blocks", "megablox", "triton"])
def test_a_traced_program_counts_the_rows_that_an_even_router_fills(implementation: Chosen):
    traced = jax.make_jaxpr(gradients(implementation))(*arguments(implementation))
    count = flops(traced)
    assert (count.flops, count.uncounted_loops) == (EXPECTED, 0)


@pytest.mark.parametrize("factor", [1.5, 0.25])
def test_an_exchange_counts_the_rounds_of_an_even_router(factor: float):
    """On each of four devices, 128 rows go through three products, in one round or in four."""
    experts = config_for(Experts, hidden=OUTPUTS, exchange="all_to_all", buffer_factor=factor, implementation="blocks")
    layer = experts.instantiate(dim=INPUTS, num_experts=4, top_k=2)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 1, 4, 1, 1), ("data", "fsdp", "expert", "seq", "model"))
    weights = {name: jnp.zeros(spec.shape) for name, spec in layer.param_specs().items()}
    choice = ExpertChoice(jnp.zeros((4, 64, 2), jnp.int32), jnp.ones((4, 64, 2)))

    def apply(x_BSD: jax.Array) -> jax.Array:
        return layer(weights, x_BSD, choice, Context({}, mesh=mesh))[0]

    traced = jax.make_jaxpr(apply)(jnp.zeros((4, 64, INPUTS)))
    count = flops(traced)
    assert count.flops == 4 * 3 * 2 * 128 * INPUTS * OUTPUTS
    assert count.uncounted_loops == 0


def test_scopes_of_further_rounds():
    assert count_further_rounds("jit(step)/transpose(jvp(stack))/shard_map/further_rounds_0/while") == 0
    assert count_further_rounds("jit(step)/jvp(further_rounds_3)/while") == 3
    assert count_further_rounds("experts/further_rounds_3") == 3
    assert count_further_rounds("experts/further_rounds_3/while/body/even_rows_8/while") is None
    assert count_further_rounds("experts/while") is None


def count_compiled_flops(target: str, implementation: Chosen) -> int:
    targets.set_environment(target)
    sharding = SingleDeviceSharding(targets.resolve(target).devices()[0])
    function = jax.jit(gradients(implementation), out_shardings=sharding)
    compiled = function.lower(*arguments(implementation, sharding)).compile()
    module = Module(compiled.as_text())
    counter = Flops(module)
    return sum(runs * counter.look_up(instruction) for instruction, runs in iter_executed(module))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU's compiler is not installed")
def test_tpu_multiplies_experts_only_with_their_own_rows():
    assert count_compiled_flops("v5e-1", "megablox") == EXPECTED
    # This is why TPUs do not use `ragged_dot`: one of its gradients multiplies every expert by all rows.
    assert count_compiled_flops("v5e-1", "ragged") >= 2 * EXPERTS * ROWS * INPUTS * OUTPUTS


@pytest.mark.skipif(gpu_description.installed_cuda() is None, reason="JAX's CUDA plugin is not installed")
@pytest.mark.parametrize("target", ["h100x1", "4090"])
def test_gpu_multiplies_experts_only_with_their_own_rows(target: str):
    assert count_compiled_flops(target, "triton") == EXPECTED


def test_estimate_reports_what_it_omits_in_ragged_products():
    def notes(implementation: str, platform: str, capacity: float | None = None) -> list[str]:
        model = small.llama()
        moe = mixture(experts=4, top_k=2, hidden=24)
        moe.experts.implementation = implementation
        moe.experts.capacity = capacity
        small.block(model).mlp = moe
        return note_ragged_products(model.instantiate(), platform)

    assert notes("auto", "gpu") == notes("ragged", "gpu", capacity=1.5) == []
    (line,) = notes("ragged", "gpu")
    assert "because XLA for GPU multiplies all rows with all experts" in line
    (line,) = notes("ragged", "tpu")
    assert "because for the gradient of the weights XLA for TPU multiplies" in line


def test_notes_on_the_exchange_of_tokens():
    def notes(expert: int, num_tokens: int, **fields: float) -> list[str]:
        model = small.llama()
        moe = mixture(experts=4, top_k=2, hidden=24)
        for name, value in fields.items():
            setattr(moe.experts, name, value)
        small.block(model).mlp = moe
        return note_exchange(model.instantiate(), {"expert": expert}, num_tokens)

    assert notes(1, 10**6) == notes(4, 10**6, capacity=1.5) == []
    # In the worst case, a device has a row for each token of four devices.
    (line,) = notes(4, 1024)
    assert line == "experts.exchange is all_gather: arrays have room for the tokens of 4 devices"
    (line,) = notes(4, 1025, buffer_factor=1.5)
    assert line.startswith("experts.exchange is all_to_all: a device receives up to 1.5 times its even share of rows")


@pytest.mark.pairs
def test_estimate_note_is_in_the_report(capsys: pytest.CaptureFixture):
    setting = "--config.model.stack.pattern.0.mlp.experts.implementation=ragged"
    assert plan.main(["--config=moe-tiny", "--target=h100x1", "--estimate", setting]) == 0
    assert re.search("note +the estimate assumes grouped kernels for the experts' products", capsys.readouterr().out)
