"""Placement and remat settings that differ by layer: their meaning, the bytes that they move, and invalid settings."""

from typing import Any

import jax
import pytest

from plimsoll.framework.config import Config
from plimsoll.framework.config.config import Config as StoredConfig
from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.stack_layout import split_stacks
from tests.support import exact, small
from tests.support.exact import ExactnessCase

PLACED = ("optimizer_state", "gradients", "parameters", "activations")
UNITS = 4


def layer_ranges(memory: dict[str, Any], model: Config | None = None) -> list[tuple[str, str, bool]]:
    """Return (stage, remat policy, whether activations are offloaded) for each layer range of a four-layer stack."""
    model = model or exact.tied(None)
    found = split_stacks(model.instantiate(), Memory(**memory))
    return [(layer_range.name, layer_range.remat, layer_range.offloads) for layer_range in found]


def test_stack_is_split_where_memory_settings_change():
    assert layer_ranges({"remat": "full"}) == []
    assert layer_ranges({"optimizer_state": "pinned_host"}) == []
    assert layer_ranges({"optimizer_state": "pinned_host:4"}) == [], "all layers alike: nothing is cut"
    assert layer_ranges({"optimizer_state": "pinned_host:0.5"}) == [
        ("stack.0-1", "none", False),
        ("stack.2-3", "none", False),
    ]
    assert layer_ranges({"remat": "full:1,save:query,key:2,none"}) == [
        ("stack.0-0", "full", False),
        ("stack.1-2", "save:query,key", False),
        ("stack.3-3", "none", False),
    ]
    both = {"update": "streamed", "remat": "sqrt:2:2,full:2", "activations": "pinned_host:3"}
    assert layer_ranges(both) == [
        ("stack.0-1", "sqrt:2", True),
        ("stack.2-2", "full", True),
        ("stack.3-3", "full", False),
    ]
    # A pattern's layers stay together: the loop over 8 layers has 4 iterations.
    assert layer_ranges({"optimizer_state": "pinned_host:2"}, exact.tied(None, None))[0][0] == "stack.0-0"


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"optimizer_state": "host"}, "memory.optimizer_state: expected device, pinned_host, pinned_host:LAYERS"),
        ({"optimizer_state": "pinned_host:0"}, "given 'pinned_host:0'"),
        ({"optimizer_state": "pinned_host:1.5"}, "given 'pinned_host:1.5'"),
        ({"optimizer_state": "device:3"}, "given 'device:3'"),
        (
            {"optimizer_state": "pinned_host:9"},
            "memory.optimizer_state = pinned_host:9: the stack has 4 layers; expected at most 4",
        ),
        ({"remat": "full:3"}, "memory.remat = full:3: no policy covers the last 1 layers"),
        ({"remat": "full:3,dots:3"}, "memory.remat = full:3,dots:3: the stack has only 4 layers"),
        ({"remat": "full:3,dts"}, r"remat: expected none, full.*with their numbers of layers.*'full:3,dts'"),
        ({"parameters": "pinned_host:2"}, "memory.parameters = pinned_host:2 needs memory.update"),
        ({"gradients": "pinned_host:2"}, "memory.gradients = pinned_host:2 needs memory.update"),
        ({"update": "layer_programs", "remat": "invert:2,full"}, "it inverts all layers or none"),
    ],
)
def test_conflicting_settings_are_refused_in_one_line(memory: dict[str, Any], message: str):
    config = small.experiment(exact.tied(None), memory=memory)
    with pytest.raises(ValueError, match=message):
        small.program(config)


def test_split_patterns_and_model_scope_are_refused():
    with pytest.raises(
        ValueError, match=r"pinned_host:3: the pattern has 2 layers, which stay together; nearest: \[2, 4\]"
    ):
        small.program(small.experiment(exact.tied(None, None), memory={"optimizer_state": "pinned_host:3"}))
    with pytest.raises(ValueError, match=r"learner\.scope = model with memory settings that differ by layer"):
        small.program(small.experiment(exact.tied(None), memory={"remat": "full:2,none"}, scope="model"))


def build_program(case: ExactnessCase) -> Program:
    with exact.enable_exact_numerics():
        return case.program()


@pytest.mark.pairs
def test_init_and_checkpoints_do_not_depend_on_the_split():
    """The initial state has the same bits as without layer ranges, and a stored state can be restored and trained."""
    plain = build_program(ExactnessCase(memory="streamed", precision="float32"))
    cut = build_program(ExactnessCase(memory="hosted_gradients", placement="all", layers="unlike", precision="float32"))
    with exact.enable_exact_numerics():
        state = cut.init()
        cut.layout.check(state)
        stages = [stage for stage in state.parameter if stage.startswith("stack")]
        assert len(stages) > 2
        first = jax.device_get(plain.init())
        small.assert_same_bits(jax.device_get(cut.backend.to_checkpoint(state)), first)
        assert cut.backend.to_checkpoint(state).parameter.keys() == first["parameter"].keys()
        stored = cut.backend.to_checkpoint(state)
        again = cut.backend.from_checkpoint(stored)
        cut.layout.check(again)
        again, metrics = cut.step(again, cut.put(small.host_batch(cut)))
        cut.layout.check(again)
        plain_state = plain.init()
        plain_state, plain_metrics = plain.step(plain_state, plain.put(small.host_batch(plain)))
        assert metrics.keys() == plain_metrics.keys()
        whole = cut.backend.join_stacks(again)
        assert whole["parameter"].keys() == first["parameter"].keys()
        for path, leaf in flatten(whole["parameter"]).items():
            spec = flatten(cut.checkpoint_layout.specs["parameter"])[path]
            assert (leaf.shape, leaf.sharding.memory_kind) == (spec.shape, spec.memory_kind)


@pytest.mark.pairs
@pytest.mark.parametrize("field", PLACED)
def test_moved_bytes_are_proportional_to_offloaded_layers(field: str):
    """The dry-run step counts the moved bytes at every call.

    No placement here offloads the last layer, since its arrays stay on the device from its forward to its backward
    program.
    """
    moved = {}
    with exact.enable_exact_numerics():
        for place in ("pinned_host:0.75", "pinned_host:0.5", "pinned_host:1"):
            memory = {"update": "layer_programs", "remat": "full", field: place}
            program = small.program(small.experiment(exact.tied(None), memory=memory))
            moved[place] = program.backend.dry_run_step(program.backend.compile_here).moved
    one_layer = moved["pinned_host:1"]
    assert one_layer > 0
    assert moved == {"pinned_host:0.75": 3 * one_layer, "pinned_host:0.5": 2 * one_layer, "pinned_host:1": one_layer}


def test_only_offloaded_gradients_are_in_the_state():
    for memory in ("hosted_gradients", "layers_hosted_gradients"):
        program = build_program(ExactnessCase(memory=memory, layers="unlike"))
        leaves = [leaf for leaf in program.layout if leaf.group == "gradient"]
        assert leaves
        paths = {leaf.path for leaf in leaves}
        assert all(path.startswith("gradient/stack") for path in paths)
        whole = flatten(program.checkpoint_layout.specs["gradient"])
        assert all(path.startswith("stack/") for path in whole)


def test_stored_offloaded_layer_count_loads_as_a_placement():
    config = small.experiment(exact.tied(None))
    fields = config.to_dict()
    fields["memory"] |= {"update": "layer_programs", "parameters": "pinned_host", "hosted_layers": 3}
    assert StoredConfig.from_dict(fields).memory.parameters == "pinned_host:3"
    fields["memory"] |= {"parameters": "device", "hosted_layers": None}
    assert StoredConfig.from_dict(fields).memory.parameters == "device"
