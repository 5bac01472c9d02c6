"""remat sqrt and offload give the numbers of remat none, and place their bytes as expected."""

from functools import cache

import jax
import pytest

from plimsoll.framework.layers import remat
from plimsoll.framework.plan.suggest import estimate_for_target
from plimsoll.framework.plan.targets import resolve
from tests.support import small


def config(policy: str, layers: int = 6, dtype: str = "float32", **fields):
    """Return a GPT-2 experiment with dropout."""
    model = small.gpt2(stack__num_layers=layers)
    model.param_dtype = model.compute_dtype = dtype
    return small.experiment(model, memory={"remat": policy}, **fields)


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [None, {"fsdp": 8}], ids=["one device", "fsdp"])
def test_float64_gradients_equal_those_without_remat(mesh):
    with jax.enable_x64(True):
        loss, expected = small.loss_and_grads(small.program(config("none", dtype="float64", mesh=mesh)))
        for policy in ("sqrt:3", "offload", "save:query;offload:input,mlp_up"):
            same, grads = small.loss_and_grads(small.program(config(policy, dtype="float64", mesh=mesh)))
            assert same == loss
            small.assert_close(grads, expected, 1e-13)


@pytest.mark.pairs
def test_groups_save_memory():
    """full saves the inputs of 36 layers; sqrt those of 6 groups and of the 6 layers of one group.

    A group's weights and gradients come on top.
    """
    needs = {}
    for policy in ("full", "sqrt", "sqrt:12"):
        stats = small.program(config(policy, 36, batch=128)).jit_step.compiled_step.memory_analysis()
        total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        needs[policy] = total + stats.temp_size_in_bytes
    input_bytes = 128 * 16 * 32 * 4  # of one layer
    assert needs["sqrt"] < needs["full"] - 0.85 * (36 - 6 - 6) * input_bytes
    assert needs["sqrt"] + 0.85 * (12 + 3 - 6 - 6) * input_bytes < needs["sqrt:12"] < needs["full"]


def test_group_sizes():
    sizes = {layers: remat.group_size("sqrt", layers) for layers in (36, 32, 12, 80, 6, 4, 3, 7, 1)}
    assert sizes == {36: 6, 32: 4, 12: 3, 80: 8, 6: 2, 4: 2, 3: None, 7: None, 1: None}
    assert [remat.group_size(f"sqrt:{size}", 12) for size in (1, 2, 4, 6, 12)] == [None, 2, 4, 6, None]
    assert remat.group_size("full", 36) is None
    with pytest.raises(ValueError, match=r"memory\.remat = sqrt:4: groups of 4 do not divide.* 6 repeats.*\[3, 6\]"):
        small.program(config("sqrt:4"))


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("policy", "shapes"),
    [("full", []), ("offload", [(6, 8, 16, 32)]), ("offload:mlp_up", [(6, 8, 16, 128)])]
    + [("save:mlp_up;offload:query,input", [(6, 8, 16, 4, 8), (6, 8, 16, 32)])],
)
def test_offloaded_inputs_are_on_the_host_between_passes(policy, shapes):
    """The test reads the jaxpr, because XLA for CPU has only one memory."""
    jaxpr = small.program(config(policy)).jit_step.traced_step.jaxpr.jaxpr
    loops = [var.aval for eqn in jaxpr.eqns if eqn.primitive.name == "scan" for var in eqn.outvars]
    offloaded = [aval.shape for aval in loops if aval.memory_space == jax.memory.Space.Host]
    assert sorted(offloaded) == sorted(shapes)


def test_gpus_refuse_by_name(monkeypatch):
    program = small.program(config("save:query;offload:input"))
    monkeypatch.setattr(program.backend, "platform", "gpu")
    with pytest.raises(ValueError, match=r"memory\.remat = save:query;offload:input: .*openxla/xla#46231.*on GPU, use"):
        program.jit_step.step_jit  # noqa: B018
    with pytest.raises(ValueError, match="on GPU, use"):
        estimate_for_target(config("offload").instantiate(), resolve("h200"))
    estimate_for_target(config("sqrt").instantiate(), resolve("h200"))


@pytest.mark.pairs
def test_estimate_counts_host_and_device_memory():
    @cache
    def estimate_activations(policy, layers):
        found = estimate_for_target(config(policy, layers, batch=64).instantiate(), resolve("v5e-1"))
        return found.breakdown["activations"], found.host_breakdown["activations"]

    input_bytes = 64 * 16 * 128 * 4  # rows of 32 are padded to the TPU's register width of 128
    assert estimate_activations("offload", 36)[0] - estimate_activations("offload", 18)[0] < 1024  # the layers' indices
    assert estimate_activations("offload", 36)[1] - estimate_activations("offload", 18)[1] == 18 * input_bytes
    assert estimate_activations("full", 36)[1] == estimate_activations("sqrt", 36)[1] == 0
    assert (
        20 * input_bytes < estimate_activations("full", 36)[0] - estimate_activations("sqrt", 36)[0] <= 24 * input_bytes
    )
