"""memory.experts: experts are in host memory and nothing else is, and the numbers are those of plain optax."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest

from plimsoll.framework import layout
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.memory import Memory
from tests.support import exact, small
from tests.support.exact import ExactnessCase

EXPERTS = {"experts": "pinned_host"}
HOSTED = {"update": "streamed", **EXPERTS}
# With a smaller eps, AdamW would amplify the rounding of small gradients.
ADAMW = config_for(optax.adamw, learning_rate=1e-2, eps=1e-2, weight_decay=0.1)

ONCE = [
    ExactnessCase(model="experts", memory="streamed", placement="experts", remat="full", mesh="eight"),
    ExactnessCase(model="experts", memory="layers", placement="experts", layers="unlike"),
]
PAIRS = [
    ExactnessCase(model="experts", memory=memory, placement=placement, remat=remat, **rest)
    for memory, placement, remat, rest in [
        ("streamed", "experts", "none", {}),
        ("streamed", "experts+boundaries", "sqrt", {"layers": "unlike"}),
        ("hosted_gradients", "experts", "full", {"mesh": "eight", "layers": "unlike"}),
        ("in_backward", "experts", "none", {}),
        ("in_backward", "experts", "full", {"mesh": "eight"}),
        ("two_pass_ahead", "experts", "full", {}),
        ("two_pass", "experts+boundaries", "full", {"mesh": "shared rows"}),
        ("layers", "experts", "full", {"mesh": "eight"}),
        ("layers_hosted_gradients", "experts", "none", {}),
        ("layers_at_once", "experts+boundaries", "full", {}),
        ("streamed", "experts", "full", {"precision": "bfloat16"}),
    ]
]


@pytest.mark.parametrize(
    "case", [*ONCE, *(pytest.param(case, marks=pytest.mark.pairs) for case in PAIRS)], ids=exact.get_case_id
)
def test_twenty_steps_equal_plain_optax(case: ExactnessCase):
    """`exact.train` also checks that each leaf is where the layout places it."""
    with exact.enable_exact_numerics():
        found, losses, norms, weights = exact.train(case)
        _, master, tolerance = exact.PRECISIONS[case.precision]
        known = case.model, case.optimizer, case.precision, case.clip()
        expected, *metrics = exact.plain(*known, weights) if master else exact.once(*known)
    for path, error in exact.differences(found, expected).items():
        assert error <= tolerance, f"{path}: off by {error:.1e}"
    np.testing.assert_allclose([losses, norms], metrics, rtol=3e-6)


@pytest.mark.pairs
@pytest.mark.parametrize("memory", ["streamed", "layers"])
def test_gradients_of_microbatches_are_summed_in_host_memory(memory: str):
    """Buffers, which the router has, see every microbatch: the reference has the same microbatches on the device."""
    results = []
    with exact.enable_exact_numerics():
        for placement in ("device", "experts"):
            case = ExactnessCase(model="experts", memory=memory, placement=placement, microbatches=4)
            results.append(exact.train(case)[0])
    assert max(exact.differences(*results).values()) <= 1e-12


# --- where the arrays are --------------------------------------------------------------------------------------------


@pytest.fixture
def small_leaves() -> Iterator[None]:
    """Offload leaves from 256 bytes."""
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        yield


def make_config(memory: dict[str, Any], *, num_layers: int = 4, **fields: Any) -> Config:
    """Return an experiment with experts in every second layer, and averages."""
    model = small.llama(dim=64, stack__num_layers=num_layers)
    dense = small.block(model)
    sparse = dense.copy()
    sparse.mlp = mixture(experts=4, top_k=2, hidden=64)
    model.stack.pattern = [dense, sparse]
    return small.experiment(model, memory={"remat": "full", **memory}, optimizer=ADAMW, ema=0.9, **fields)


def find_offloaded(tree: Any) -> set[str]:
    """Return the paths of the arrays, or specs, in host memory."""
    paths = set()
    for path, leaf in layout.flatten(tree).items():
        memory_kind = leaf.memory_kind if isinstance(leaf, layout.TensorSpec) else leaf.sharding.memory_kind
        if memory_kind == "pinned_host":
            paths.add(path)
    return paths


def list_expert_leaves(program: Program) -> set[str]:
    """Return the paths of the leaves of the state that belong to experts, by their names."""
    return {leaf.path for leaf in program.layout if re.search(r"/experts/(gate|up|down)(/|$|_lora)", leaf.path)}


@pytest.mark.pairs
@pytest.mark.usefixtures("small_leaves")
@pytest.mark.parametrize("mesh", [None, {"data": 2, "fsdp": 2, "expert": 2}], ids=["one", "eight"])
@pytest.mark.parametrize("update", ["streamed", "in_backward", "layer_programs"])
def test_experts_are_in_host_memory_and_nothing_else_is(update: str, mesh: dict[str, int] | None):
    clip = {"clip": None} if update == "in_backward" else {}
    program = small.program(make_config({"update": update, **EXPERTS}, mesh=mesh, **clip))
    state, metrics = small.run(program, 3)
    program.layout.check(state)
    experts = list_expert_leaves(program)
    assert find_offloaded(state) == experts
    groups = {path.split("/")[0] for path in experts}
    assert groups == {"parameter", "optimizer", "ema"} | ({"gradient"} if update != "in_backward" else set())
    # The gradients of everything else exist only within a step.
    assert {path for path in layout.flatten(state) if path.startswith("gradient/")} <= experts

    plain = small.program(make_config({}, mesh=mesh, **clip))
    expected, losses = small.run(plain, 3)
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in losses], rtol=1e-5)
    batch = program.put(small.host_batch(program, 9))
    for averages in (False, True):
        found, known = (
            jax.device_get(one.evaluate(at, batch, averaged=averages)["nll"])
            for one, at in ((program, state), (plain, expected))
        )
        np.testing.assert_allclose(found, known, rtol=1e-5)


@pytest.mark.usefixtures("small_leaves")
def test_layer_counts_add_to_those_of_other_fields():
    """Of eight layers with experts in every second one, the first four have experts in host memory."""
    memory = {"update": "layer_programs", "experts": "pinned_host:4"}
    memory |= {"parameters": "pinned_host:2", "gradients": "pinned_host:6", "optimizer_state": "pinned_host:2"}
    specs = small.program(make_config(memory, num_layers=8)).layout.specs

    def describe(group: Any, repeat: int) -> tuple[bool, bool]:
        """Return whether the experts of a repeat of the pattern are offloaded, and whether other matrices are."""
        offloaded = find_offloaded(group["stack"][repeat])
        experts = {path for path in offloaded if "/experts/" in path}
        return bool(experts), bool(offloaded - experts)

    for name, whole, partial in (("parameter", 1, 2), ("gradient", 3, 3), ("optimizer", 1, 2), ("ema", 1, 2)):
        expected = [(repeat < partial, repeat < whole) for repeat in range(4)]
        assert [describe(specs[name], repeat) for repeat in range(4)] == expected, name
    streamed = small.program(make_config({**memory, "update": "streamed"}, num_layers=8)).layout.specs
    found = {name: find_offloaded(tree) for name, tree in streamed.parameter.items() if name.startswith("stack")}
    experts = {f"block1/mlp/experts/{name}" for name in ("gate", "up", "down")}
    assert found["stack.0-0"] > experts
    assert [found[f"stack.{layers}"] for layers in ("1-1", "2-2", "3-3")] == [experts, set(), set()]


@pytest.mark.usefixtures("small_leaves")
def test_the_experts_of_the_first_layers_and_of_a_shared_layer():
    """Both are stages of their own: layers before the stack, and the parameters that layers share."""
    config = make_config(HOSTED)
    config.model.stack.shared = [1]
    specs = small.program(config).layout.specs
    assert {path.split("/")[0] for path in find_offloaded(specs.parameter)} == {"shared"}
    config = make_config(HOSTED)
    config.model.first = config.model.stack.copy()
    config.model.first.num_layers = 2
    assert {path.split("/")[0] for path in find_offloaded(small.program(config).layout.specs.parameter)} == {
        "first",
        "stack",
    }


@pytest.mark.pairs
@pytest.mark.usefixtures("small_leaves")
@pytest.mark.parametrize("update", ["streamed", "layer_programs"])
@pytest.mark.parametrize("targets", ["attention", "experts/"])
def test_quantized_experts_and_adapters(targets: str, update: str):
    """With adapters on attention, only frozen codes and scales are offloaded; adapters of experts go with them."""

    def make(memory: dict[str, Any]) -> Config:
        model = small.llama(dim=64, stack__num_layers=2)
        small.block(model).mlp = mixture(experts=4, top_k=2, hidden=64)
        model.lora = config_for(LoRA, rank=16, targets=targets, base="nf4", base_targets=".")
        return small.experiment(model, memory={"remat": "full", **memory}, optimizer=ADAMW, clip=None)

    program = small.program(make({"update": update, **EXPERTS}))
    state, metrics = small.run(program, 4)
    program.layout.check(state)
    offloaded = find_offloaded(state)
    assert offloaded == list_expert_leaves(program)
    assert any(re.match("frozen/.*/experts/gate/codes", path) for path in offloaded)
    assert any("lora_a" in path for path in offloaded) == (targets == "experts/")
    expected, losses = small.run(small.program(make({})), 4)
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in losses], rtol=2e-6)
    small.assert_close(small.arrays(program.backend.to_checkpoint(state)), small.arrays(expected), 1e-5)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.usefixtures("small_leaves")
def test_a_checkpoint_resumes_with_other_placements(tmp_path: Path):
    """Five steps, with another placement after each one, and five steps on the device."""
    expected, _ = small.run(small.program(make_config({}, clip=None)), 5)
    memories = [
        {"update": "streamed", "experts": "pinned_host:2"},
        {"update": "layer_programs", **EXPERTS},
        {},
        {"update": "in_backward", **EXPERTS},
        {"update": "streamed", "parameters": "pinned_host", "optimizer_state": "pinned_host"},
    ]
    for step, memory in enumerate(memories):
        program = small.program(make_config(memory, clip=None))
        with Checkpointer(directory=tmp_path) as checkpointer:
            if step:
                restored = checkpointer.restore(step, program.backend.abstract_checkpoint)
                state = program.backend.from_checkpoint(restored.state)
            else:
                state = program.init()
            program.layout.check(state)
            state, _ = program.step(state, program.put(small.host_batch(program, step)))
            checkpointer.save(step + 1, program.backend.to_checkpoint(state), {})
    found = small.arrays(program.backend.to_checkpoint(state))
    small.assert_close(found, small.arrays(expected), 1e-5)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            {"update": "streamed", "experts": "host"},
            r"memory.experts: expected device, pinned_host, pinned_host:LAYERS or pinned_host:FRACTION .*'host'",
        ),
        (
            {"update": "after_backward", **EXPERTS},
            r"memory.experts = pinned_host needs memory.update = streamed, in_backward or layer_programs",
        ),
        (
            {"update": "streamed", "prefetch": "layer", "gradients": "pinned_host", **EXPERTS},
            r"memory.experts = pinned_host with memory.prefetch = layer .* expected memory.experts = device",
        ),
        (
            {
                "update": "streamed",
                "prefetch": "speculative",
                **dict.fromkeys(("gradients", "optimizer_state"), "pinned_host"),
                **EXPERTS,
            },
            r"memory.experts = pinned_host with memory.prefetch = speculative .* expected memory.experts = device",
        ),
    ],
)
def test_settings_that_exclude_each_other(memory: dict[str, str], message: str):
    with pytest.raises((ConfigError, ValueError), match=message):
        config_for(Memory, **memory).instantiate()


def test_models_without_experts_and_too_many_layers():
    with pytest.raises(ValueError, match=r"memory.experts = pinned_host, but the model has no experts; expected"):
        small.program(small.experiment(memory=HOSTED))
    config = make_config({"update": "streamed", "experts": "pinned_host:6"})
    with pytest.raises(ValueError, match=r"memory.experts = pinned_host:6: the stack has 4 layers; expected at most 4"):
        small.program(config)
    config = make_config({"update": "streamed", "experts": "pinned_host:3"})
    with pytest.raises(ValueError, match=r"memory.experts = pinned_host:3: the pattern has 2 layers, which stay"):
        small.program(config)
