"""Loss and gradients on eight devices against one, for combinations of mesh axes, with packed documents and dropout."""

import re
from collections import Counter

import jax
import numpy as np
import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.experts.experts import ClampedSwiGLU
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.plan import hlo
from plimsoll.framework.plan.hlo import transfers
from tests.support import small

MODELS = {
    # Tied embeddings, learned positions, biases; chunks of 8 tokens per device.
    "gpt2": lambda: small.gpt2(head__chunk_tokens=8),
    # Grouped queries, rotary positions, an untied head, both layers unrolled.
    "llama": lambda: small.llama(stack__unroll=0, embed__dropout=0.1, head__z_loss=1e-3),
    # A width that two devices divide, and eight do not.
    "narrow": lambda: small.gpt2(dim=36),
    "mixture": lambda: mixture_model(None),
    "capacity": lambda: mixture_model(0.75),
    "gpt-oss": lambda: gpt_oss_model(None),
    "gpt-oss, capacity": lambda: gpt_oss_model(0.75),
    "exchange": lambda: exchange_model(mixture_model(None)),
    "gpt-oss, exchange": lambda: exchange_model(gpt_oss_model(None)),
}
MESHES = [
    ("gpt2", {"data": 8, "fsdp": 1}),
    ("gpt2", {"fsdp": 8}),
    ("gpt2", {"data": 2, "seq": 4, "fsdp": 1}),
    ("gpt2", {"fsdp": 2, "seq": 2, "model": 2}),
    ("llama", {"data": 2, "fsdp": 2, "model": 2}),
    ("llama", {"fsdp": 2, "seq": 2, "model": 2}),
    # Weights are sharded over seq too.
    ("gpt2", {"fsdp": 1, "seq": 8}),
    ("llama", {"fsdp": 2, "seq": 4}),
    ("llama", {"data": 2, "fsdp": 1, "seq": 2, "model": 2}),
    ("narrow", {"fsdp": 2, "seq": 4}),
]
# Experts are sharded over their axis only, together with all other axes, and with one expert per device.
EXPERT_MESHES = [
    ("mixture", {"data": 2, "fsdp": 1, "expert": 4}),
    ("mixture", {"fsdp": 2, "expert": 2, "model": 2}),
    ("mixture", {"fsdp": 2, "expert": 2, "seq": 2}),
    ("mixture", {"expert": 8, "fsdp": 1}),
    ("mixture", {"data": 2, "fsdp": 2, "model": 2}),
    ("capacity", {"fsdp": 2, "expert": 2, "model": 2}),
    ("capacity", {"fsdp": 1, "expert": 4, "seq": 2}),
    ("capacity", {"fsdp": 2, "expert": 2, "seq": 2}),
    ("gpt-oss", {"data": 2, "fsdp": 2, "model": 2}),
    ("gpt-oss", {"expert": 4, "seq": 2, "fsdp": 1}),
    ("gpt-oss", {"fsdp": 2, "expert": 2, "model": 2}),
    ("gpt-oss, capacity", {"fsdp": 2, "expert": 2, "model": 2}),
    ("exchange", {"expert": 8, "fsdp": 1}),
    ("exchange", {"fsdp": 2, "expert": 2, "model": 2}),
    ("exchange", {"data": 2, "fsdp": 1, "expert": 4}),
    ("gpt-oss, exchange", {"expert": 4, "seq": 2, "fsdp": 1}),
]


def mixture_model(capacity: float | None):
    """Return a Llama with 8 experts, a shared expert, all auxiliary losses, and router noise."""
    model = small.llama(embed__dropout=0.1)
    moe = mixture(experts=8, top_k=3, hidden=20, balance=0.5)
    moe.router.z = 0.1
    moe.router.jitter = 0.2
    moe.experts.capacity = capacity
    # With the usual stddev, the outputs of two layers of small experts would be too small to matter.
    moe.experts.init.stddev = 0.3
    linear = config_for(Linear, init=moe.experts.init)
    moe.shared = config_for(MLP, hidden=24, activation="silu", gated=True, linear=linear)
    small.block(model).mlp = moe
    return model


def gpt_oss_model(capacity: float | None):
    """Return the mixture model with gpt-oss features: sinks, windows, biases in attention, router and experts."""
    model = mixture_model(capacity)
    block = small.block(model)
    block.attention.sinks = True
    block.attention.window = 5
    block.attention.linear.bias = True
    block.mlp.router.logit_bias = True
    block.mlp.experts.bias = True
    block.mlp.experts.gating = config_for(ClampedSwiGLU, limit=0.5)
    return model


def exchange_model(model):
    """Return a mixture model whose tokens travel only to their experts; about half of them in a second round."""
    experts = small.block(model).mlp.experts
    experts.exchange = "all_to_all"
    experts.buffer_factor = 0.6
    return model


@pytest.fixture(scope="module")
def one_device():
    """Function from a model to (state, loss, gradients) on one device, computed when first needed."""
    results = {}

    def compute(model: str):
        if model not in results:
            program = small.program(config(model))
            state = jax.device_get(program.init())
            results[model] = state, *small.loss_and_grads(program, state)
        return results[model]

    return compute


def config(model: str, mesh: dict[str, int] | None = None):
    return small.experiment(MODELS[model](), documents=True, mesh=mesh)


@pytest.mark.pairs  # an SGD step below covers loss and gradients on such a mesh; test_exact.py covers a Llama on one
@pytest.mark.parametrize(("model", "mesh"), MESHES, ids=lambda value: str(value).replace(" ", ""))
def test_loss_and_gradients_do_not_depend_on_the_mesh(one_device, model, mesh):
    state, expected_loss, expected = one_device(model)
    loss, grads = small.loss_and_grads(small.program(config(model, mesh)), state)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    small.assert_close(grads, expected, 1e-5)
    largest = {path: np.abs(value).max() for path, value in grads.items()}
    assert all(size > 1e-3 for path, size in largest.items() if not path.endswith("key/bias")), largest


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("model", "mesh"),
    [pytest.param(*case, marks=() if case in EXPERT_MESHES[1::4] else pytest.mark.pairs) for case in EXPERT_MESHES],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_mixtures_do_not_depend_on_the_mesh(one_device, model, mesh):
    """Tokens are sent to the devices of their experts; all other layers compute each sequence once."""
    test_loss_and_gradients_do_not_depend_on_the_mesh(one_device, model, mesh)


def test_experts_that_the_mesh_does_not_divide_are_refused():
    model = small.llama()
    small.block(model).mlp = mixture(experts=6, top_k=2, hidden=16)
    with pytest.raises(ValueError, match=r"mesh\.expert = 4 does not divide num_experts = 6; nearest that do: \["):
        small.program(small.experiment(model, mesh={"fsdp": 2, "expert": 4}))
    with pytest.raises(
        ValueError, match=r"mesh\.data \* mesh\.fsdp \* mesh\.expert = 8 does not divide the 4 sequences"
    ):
        small.program(small.experiment(MODELS["mixture"](), batch=4, mesh={"fsdp": 2, "expert": 4}))


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("model", "operations"),
    [("mixture", ("all-gather", "reduce-scatter")), ("capacity", ("all-to-all",)), ("exchange", ("all-to-all",))],
)
def test_token_dispatch_collectives(model, operations):
    """Also, no device ever holds the weights of another device's experts."""
    program = small.program(config(model, {"expert": 8, "fsdp": 1}))
    text = program.jit_step.compiled_step.as_text()
    for operation in operations:
        assert f"{operation}(" in text or f"{operation}-start(" in text, operation
    width, hidden = 32, 20
    for shape in (f"[8,{width},{hidden}]", f"[8,{hidden},{width}]", f"[2,8,{width},{hidden}]"):
        assert f"f32{shape}" not in text, shape


@pytest.mark.once("{'data':2,'fsdp':2,'model':2}")
@pytest.mark.parametrize(
    "mesh",
    [{"data": 2, "fsdp": 2, "model": 2}, {"fsdp": 2, "seq": 4}, {"fsdp": 1, "seq": 8}],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_init_and_steps_do_not_depend_on_the_mesh(mesh):
    """This includes clipping, EMA and counters.

    It uses SGD, because Adam turns the rounding error of a zero gradient into a full update.
    """
    fields = {"ema": 0.9, "clip": 0.5, "optimizer": config_for(optax.sgd, learning_rate=0.3, momentum=0.9)}
    single = small.program(small.experiment(documents=True, **fields))
    program = small.program(small.experiment(documents=True, mesh=mesh, **fields))
    alone, together = single.init(), program.init()
    program.layout.check(together)
    # These differ by one rounding, because XLA folds an initializer's constants in one compilation but not the other.
    for group in ("parameter", "ema"):
        small.assert_close(small.arrays(together[group]), small.arrays(alone[group]), 2e-7)
    for group in ("optimizer", "counter"):
        small.assert_same_bits(together[group], alone[group])

    alone, metrics = small.run(single, 3, alone)
    together, sharded_metrics = small.run(program, 3, together)
    program.layout.check(together)
    for one, eight in zip(metrics, sharded_metrics, strict=True):
        assert one.keys() == eight.keys()
        for name in one:
            np.testing.assert_allclose(eight[name], one[name], rtol=1e-5, err_msg=name)
    assert metrics[0]["grad_norm"] > 0.5, "the clip should be active"
    for group in ("parameter", "ema", "optimizer"):
        small.assert_close(small.arrays(together[group]), small.arrays(alone[group]), 2e-5)
    for name in ("step", "skipped", "rng"):
        small.assert_same_bits({name: together["counter"][name]}, {name: alone["counter"][name]})


@pytest.mark.pairs
def test_the_devices_of_a_row_gather_weights_at_once():
    """Eight devices hold an eighth of the weights each, and one collective over both axes gathers them."""

    def count_gathers(mesh: dict[str, int]) -> Counter[tuple[int, str]]:
        """Return the number of all-gathers of floats, by the size of their groups and their result.

        Those of the heads of keys and values, which have four axes, are left out.
        """
        program = small.program(small.experiment(small.llama(stack__unroll=0), mesh=mesh))
        module = hlo.Module(program.jit_step.compiled_step.as_text())
        counts: Counter[tuple[int, str]] = Counter()
        for one in transfers.collectives(module):
            result = one.instruction.type
            # Token ids, which are integers, are gathered over one axis after the other.
            if one.kind == "all-gather" and re.match(r"f32\[(\d+,){0,2}\d+\]", result):
                counts[transfers.group_size(one.instruction), result] += one.runs
        return counts

    expected = count_gathers({"fsdp": 8})
    # Seven matrices in each of two layers, and the head's table.
    assert expected.total() >= 2 * 7 + 1
    assert count_gathers({"fsdp": 2, "seq": 4}) == expected
