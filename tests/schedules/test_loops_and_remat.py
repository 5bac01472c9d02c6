"""The stack's loop and its remat policy change only memory: with dropout, and with two different layers."""

import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers import remat
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.schedules.memory import Memory
from tests.support import small


def config(policy: str = "none", unroll: int = 1, unlike: bool = False):
    """Return an experiment with four equal layers, or (unlike) two repeats of a windowed block and a gated block."""
    model = small.gpt2(stack__num_layers=4, stack__unroll=unroll)
    if unlike:
        windowed, gated = small.block(model).copy(), small.block(small.llama()).copy()
        windowed.attention.window = 5
        gated.dropout = 0.2
        model.stack.pattern = [windowed, gated]
    return small.experiment(model, memory={"remat": policy})


@pytest.fixture(scope="module")
def results():
    """Function from `config`'s arguments to (loss, gradients, bytes of temporaries), computed when first needed."""
    found, states = {}, {}

    def compute(policy: str = "none", unroll: int = 1, unlike: bool = False):
        key = (policy, unroll, unlike)
        if key not in found:
            program = small.program(config(*key))
            if unlike not in states:
                states[unlike] = program.init()
            gradients = small.compile_gradients(program)
            (loss, _), grads = gradients(states[unlike], program.put(small.host_batch(program)))
            temporaries = gradients.memory_analysis().temp_size_in_bytes
            found[key] = np.asarray(loss), small.arrays(grads), temporaries
        return found[key]

    return compute


@pytest.mark.pairs
@pytest.mark.parametrize(
    "policy", ["full", "sqrt", "dots", "dots_no_batch", "save:query,mlp_up", "offload", "save:query;offload:mlp_up"]
)
def test_recomputing_changes_no_number(results, policy):
    """The recomputed forward pass draws the same dropout masks from the same keys."""
    loss, grads, _ = results(policy)
    expected_loss, expected, _ = results()
    assert loss == expected_loss
    small.assert_close(grads, expected, 5e-6)


@pytest.mark.pairs
def test_recomputing_saves_memory(results):
    none, dots, named, full = (results(policy)[2] for policy in ("none", "dots", "save:query,mlp_up", "full"))
    assert full < named < dots < none


@pytest.mark.pairs
def test_recomputing_saves_memory_also_where_there_was_no_loop(results):
    assert results("full", 0)[2] < 0.8 * results("none", 0)[2]


@pytest.mark.pairs
@pytest.mark.parametrize(("policy", "frozen"), [("none", False), ("none", True), ("dots", False), ("full", False)])
def test_no_layers_gathered_weights_wait_for_the_backward_pass(policy, frozen):
    experiment = small.experiment(small.llama(), mesh={"data": 4, "fsdp": 2}, memory={"remat": policy})
    experiment.learner.rules = [config_for(Rule, pattern="mlp/gate", freeze=True)] if frozen else []
    text = small.program(experiment).jit_step.compiled_step.as_text()
    assert "f32[2,16,48]" in text  # each device's shard of the stack of gate weights
    assert "f32[2,32,48]" not in text  # the same, gathered


@pytest.mark.pairs
@pytest.mark.parametrize(("policy", "unlike"), [("full", False), ("none", True)])
def test_a_stack_without_a_loop_computes_the_same(results, policy, unlike):
    loss, grads, _ = results(policy, 0, unlike)
    expected_loss, expected, _ = results("none", 1, unlike)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    small.assert_close(grads, expected, 1e-5)


@pytest.mark.parametrize(
    "given",
    ["some", "save:", "save", "save:query,keys", "save:query,", "dots_saveable", "none,full"]
    + ["sqrt:", "sqrt:0", "sqrt:two", "offload:", "offload:keys", "offload:key;save:query", "save:key;offload:key"],
)
def test_unknown_policies_are_named_with_the_valid_ones(given):
    with pytest.raises(
        ValueError, match=r"remat: expected none, full, sqrt, dots, dots_no_batch, offload, invert, sqrt:NUM.*given '"
    ):
        config_for(Memory, remat=given).instantiate()


def test_every_name_that_may_be_saved_is_a_policy():
    for name in remat.ACTIVATION_NAMES:
        remat.parse_policies(f"save:{name}")
        remat.parse_policies(f"save:{name};offload:{remat.INPUT}")
    remat.parse_policies("save:" + ",".join(remat.ACTIVATION_NAMES))
    remat.parse_policies("offload:" + ",".join(remat.ACTIVATION_NAMES))
