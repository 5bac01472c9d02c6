"""Layer programs: exact steps, a number of programs that does not depend on depth, and a dry run that tracks memory."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import jax
import pytest

from plimsoll.framework import layout
from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import BATCH_AXES
from plimsoll.framework.plan import memory_budget
from plimsoll.framework.schedules.layer_vjp import LayerResiduals
from plimsoll.framework.schedules.layerwise import programs
from plimsoll.framework.schedules.layerwise.save_policy import SavePolicy, residual_specs
from tests.schedules.test_exact import test_twenty_steps_equal_plain_optax as twenty_steps_equal_plain_optax
from tests.support import exact, small
from tests.support.exact import ExactnessCase
from tests.support.selection import slow

OFFLOADED = dict.fromkeys(("parameters", "activations", "optimizer_state", "gradients"), "pinned_host")
# Every combination of offloaded weights, state and boundaries, and every value of the other axes.
AXES: dict[str, list[Any]] = {
    "memory": [*exact.LAYER_PROGRAMS],
    "model": ["tied", "recurrent", "twins", "shared"],
    "remat": ["full", "none", "sqrt", "save:attention"],
    "mesh": ["eight", "one"],
    "optimizer": ["adamw", "adafactor", "muon", "sgd", "lion"],
}
CASES = [
    ExactnessCase(
        placement=placement, **{axis: values[(number * (1 + at)) % len(values)] for at, (axis, values) in axes}
    )
    for number, (placement, fields) in enumerate(exact.PLACEMENTS.items())
    for axes in [list(enumerate(AXES.items()))]
    # None of these models has experts, see test_offloaded_experts.
    if "experts" not in fields
]
CASES += [
    ExactnessCase(memory=memory, placement="all", mesh="eight", precision=precision, microbatches=count, remat="full")
    for memory, precision, count in [
        ("layers", "float64", 2),
        ("layers_hosted_gradients", "float32", 2),
        ("layers_at_once", "bfloat16", 1),
    ]
]
CASES += [
    ExactnessCase(memory="layers", placement="all", remat="full", layers="unlike", microbatches=2),
    ExactnessCase(
        model="twins", memory="layers_hosted_gradients", placement="all", remat="sqrt", layers="unlike", mesh="eight"
    ),
    ExactnessCase(
        memory="layers_at_once", placement="all", remat="save:attention", layers="unlike", precision="bfloat16"
    ),
]
CASES += [
    ExactnessCase(memory=f"{memory}_together", placement=placement, precision=precision, microbatches=2, **rest)
    for memory, placement, precision, rest in [
        ("layers", "state", "float64", {"remat": "save:attention", "model": "tied"}),
        ("layers_hosted_gradients", "all", "float64", {"remat": "sqrt", "mesh": "eight"}),
        ("layers_at_once", "all", "float32", {"remat": "full", "layers": "unlike"}),
        ("layers_two_pass", "boundaries", "float64", {"remat": "full", "mesh": "eight"}),
    ]
]
CASES += [
    ExactnessCase(model="experts", memory="layers", placement="all", remat="full"),
    ExactnessCase(model="latent", memory="layers"),
    ExactnessCase(model="latent", memory="layers_two_pass", placement="all", remat="full", mesh="eight"),
    ExactnessCase(model="experts", memory="layers_at_once", placement="state", remat="save:attention", mesh="eight"),
]
STREAMS = [
    ExactnessCase("streams", memory=memory, placement=placement, mesh=mesh, remat="invert")
    for memory, placement, mesh in [
        ("layers_at_once", "device", "eight"),
        ("layers", "state+weights", "one"),
        ("layers_two_pass", "device", "one"),
    ]
]
CASES = [case if case.is_tried() else case._replace(optimizer="adamw") for case in CASES] + STREAMS[:1]
SLOW = STREAMS[1:] + [
    case
    for memory, placement, remat, mesh in product(exact.LAYER_PROGRAMS, exact.PLACEMENTS, AXES["remat"], AXES["mesh"])
    if (case := ExactnessCase(memory=memory, placement=placement, remat=remat, mesh=mesh)).is_tried()
]


@pytest.mark.once("twins-adamw-layers_hosted_gradients-state-save:attention-eight-float64-1")
@pytest.mark.parametrize("case", [*CASES, *slow(case for case in SLOW if case not in CASES)], ids=exact.get_case_id)
def test_twenty_steps_equal_plain_optax(case: ExactnessCase):
    """Run the same test as for the other schedules."""
    twenty_steps_equal_plain_optax(case)


@pytest.mark.pairs
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.memory)
def test_no_tracer_leaks(case: ExactnessCase):
    with exact.enable_exact_numerics():
        exact.check_leaks(case)


@pytest.mark.pairs
@pytest.mark.parametrize("memory", ["layers", pytest.param("layers_two_pass", marks=pytest.mark.pairs)])
def test_two_stream_groups_are_recomputed(memory: str):
    """With two streams, two arrays pass between layers."""
    twenty_steps_equal_plain_optax(ExactnessCase("streams", memory=memory, remat="sqrt"))


@pytest.fixture(autouse=True)
def small_leaves_are_offloaded() -> Iterator[None]:
    """Offload leaves from 256 bytes."""
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        yield


def deep(num_layers: int, memory: dict[str, Any], **fields: Any) -> Config:
    """Return the config of a Llama with `num_layers` layers."""
    memory = {"update": "layer_programs", "remat": "full", **memory}
    return small.experiment(small.llama(stack__num_layers=num_layers), memory=memory, **fields)


@pytest.mark.pairs
@pytest.mark.parametrize(
    "memory", [{}, OFFLOADED, {**OFFLOADED, "gradients": "none"}], ids=["device", "offloaded", "at once"]
)
def test_program_count_does_not_depend_on_depth(memory: dict[str, Any]):
    """The number of programs does not depend on depth, and a step compiles none in addition."""
    found = {}
    for depth in (4, 9):
        program = small.program(deep(depth, memory, clip=None))
        state = program.init()
        program.backend.compile()
        found[depth] = len(program.backend.layers.programs)
        with mock.patch.object(programs.Programs, "_compile") as compiled:
            program.step(state, program.put(small.host_batch(program)))
        assert not compiled.called
        assert len(program.backend.step_memory.calls) > 2 * depth
    assert found[4] == found[9] < 40


ALIVE = {"device": {}, "offloaded": OFFLOADED, "sqrt": {**OFFLOADED, "remat": "sqrt"}, "remat none": {"remat": "none"}}
ALIVE = {f"{name}-{count}": (memory, count) for name, memory in ALIVE.items() for count in (1, 2)}
ALIVE |= {"at once": ({**OFFLOADED, "gradients": "none"}, 1)}
TOGETHER = {"accumulate_by": "layer"}
ALIVE |= {
    f"{name}, together": ({**memory, **TOGETHER}, 2)
    for name, memory in {
        "offloaded": OFFLOADED,
        "sqrt": {**OFFLOADED, "remat": "sqrt"},
        "at once": {**OFFLOADED, "gradients": "none"},
    }.items()
}


@pytest.mark.pairs
@pytest.mark.parametrize(("memory", "accumulate"), ALIVE.values(), ids=ALIVE)
def test_dry_run_counts_the_live_bytes(memory: dict[str, Any], accumulate: int, monkeypatch: pytest.MonkeyPatch):
    """At each call of a program, the dry run counts the bytes of the arrays that are alive, on device and host."""
    program = small.program(deep(4, memory, clip=None, accumulate=accumulate))
    counted: list[tuple[str, int, int]] = []
    call = programs.Programs.__call__

    def counting(self: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if self._dry_run is not None:
            _, tracker = self._dry_run
            counted.append((name, tracker.live["device"], tracker.live["pinned_host"]))
        else:
            new = [x for x in jax.live_arrays() if id(x) not in others]
            jax.block_until_ready(new)
            sizes = Counter[str]()
            for x in new:
                sizes[x.sharding.memory_kind] += x.nbytes
            counted.append((name, sizes["device"], sizes["pinned_host"]))
        return call(self, name, *args, **kwargs)

    monkeypatch.setattr(programs.Programs, "__call__", counting)
    program.backend.compile()
    rehearsed, counted[:] = list(counted), []
    monkeypatch.undo()
    gc.collect()
    kept = jax.live_arrays()  # keep other tests' arrays alive, so that no new array gets the id of a deleted one
    others = {id(x) for x in kept}
    state = program.init()
    monkeypatch.setattr(programs.Programs, "__call__", counting)
    batch = program.put(small.host_batch(program))
    numbers = 4 * len(program.backend.layers._numbers)
    program.step(state, batch)
    del state
    assert len(rehearsed) == len(counted) > 10
    for ghosts, arrays in zip(rehearsed, counted, strict=True):
        assert ghosts[0] == arrays[0]
        assert abs(ghosts[1] - numbers - arrays[1]) <= 256, f"{ghosts} {arrays}"
        assert ghosts[2] == arrays[2], f"{ghosts} {arrays}"


@pytest.mark.pairs
@pytest.mark.parametrize("gradients", ["pinned_host", "none"])
def test_microbatches_together_move_a_layer_once(gradients: str):
    """Weights, gradients and state cross the link once per step; only the residuals do for each microbatch."""
    moved = {}
    memory = {**OFFLOADED, "gradients": gradients, **TOGETHER}
    for accumulate in (1, 2, 4):
        program = small.program(deep(4, memory, clip=None, accumulate=accumulate))
        # Residuals have as many rows as the batch, whatever the number of microbatches.
        moved[accumulate] = program.backend.step_memory.moved
    assert moved[1] == moved[2] == moved[4]
    one_by_one = small.program(deep(4, OFFLOADED, clip=None, accumulate=4)).backend.step_memory.moved
    assert one_by_one > 1.5 * moved[4]


def live_bytes(dry_run: Callable[[], Any]) -> list[tuple[str, int]]:
    """Return the programs that a dry run calls, each with the bytes on the device at that time."""
    found: list[tuple[str, int]] = []
    call = programs.Programs.__call__

    def counting(self: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if self._dry_run is not None:
            _, tracker = self._dry_run
            found.append((name, tracker.live["device"]))
        return call(self, name, *args, **kwargs)

    with mock.patch.object(programs.Programs, "__call__", counting):
        dry_run()
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("accumulate", [1, 2])
def test_tied_table_gradients_end_with_the_backward_program(accumulate: int):
    """Regression test: these gradients were alive during all updates, as many bytes as the table again."""
    memory = {"update": "layer_programs", "remat": "full"}
    model = small.gpt2(vocab_size=512)
    program = small.program(small.experiment(model, memory=memory, clip=None, accumulate=accumulate))
    table = next(leaf for leaf in program.layout if leaf.path == "parameter/embed/token").spec.num_bytes
    groups = ("parameter", "optimizer", "counter", "buffer")
    state = sum(leaf.spec.num_bytes for leaf in program.layout if leaf.path.startswith(groups))
    found = live_bytes(program.backend.compile)
    updates = [size for name, size in found if name.startswith("update")]
    assert [name for name, _ in found if name.startswith("update")][-1] == "update embed"
    # During the last update, only the state and the gradients of the embedding are alive.
    assert updates[-1] < state + 1.5 * table


def test_saved_layer_constants_are_replicated():
    """A kernel's constant of shape (1, 1, 1) has no rows to shard over devices, so it is replicated."""
    x = jax.ShapeDtypeStruct((4, 8, 16), jax.numpy.float32)
    constant = jax.ShapeDtypeStruct((1, 1, 1), jax.numpy.float32)
    kept = LayerResiduals([x, constant], None, None)
    rows, whole = residual_specs(kept, SavePolicy("now", "full"), x).leaves
    assert rows.mesh_axes == (BATCH_AXES, "seq", None)
    assert not any(whole.mesh_axes)


@pytest.mark.pairs
def test_evaluation_frees_each_microbatch():
    """Each microbatch starts with as many live bytes as the first one, apart from the sums."""
    program = small.program(deep(4, {}, clip=None, accumulate=4))
    state = program.init()
    # The first evaluation runs a dry run first.
    found = live_bytes(lambda: program.evaluate(state, program.put(small.host_batch(program))))
    beginnings = [size for name, size in found if name == "embed forward"]
    assert len(beginnings) == 4
    assert max(beginnings) - beginnings[0] <= 256


@pytest.mark.pairs
def test_one_layers_gradients_and_state_are_on_the_device():
    """With everything offloaded, the peak of a deep stack is only a fraction of its weights (or gradients)."""
    depth = 96
    model = small.llama(dim=64, stack__num_layers=depth)
    small.block(model).mlp.hidden = 256
    config = small.experiment(model, memory={"update": "layer_programs", "remat": "full", **OFFLOADED}, clip=None)
    program = small.program(config)
    weights = sum(leaf.spec.num_bytes for leaf in program.layout if leaf.path.startswith("parameter/stack"))
    # At least one layer's weights, gradients and both moments.
    assert 4 * weights / depth < memory_budget.measure_need(program).peak < 0.2 * weights


@pytest.mark.pairs
def test_some_layers_are_offloaded():
    program = small.program(deep(4, {"parameters": "pinned_host:1"}))
    state = program.init()
    program.layout.check(state)
    kinds = [{x.sharding.memory_kind for x in jax.tree.leaves(part)} for part in state.parameter["stack"]]
    assert kinds == [{"pinned_host", "device"}, {"device"}, {"device"}, {"device"}]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.parameter["embed"])} == {"device"}
    state, _ = program.step(state, program.put(small.host_batch(program)))
    program.layout.check(state)


@pytest.mark.pairs
def test_split_and_whole_stacks_agree():
    """Conversions between a stack in parts and a whole stack, on eight devices and with parts in both memories.

    Each conversion deletes its input, so there is only one copy.
    """
    config = deep(4, {"parameters": "pinned_host:2"}, mesh={"data": 2, "fsdp": 2, "model": 2}, ema=0.9)
    program = small.program(config)
    state = program.init()
    plain = deep(4, {"update": "after_backward"}, mesh={"data": 2, "fsdp": 2, "model": 2}, ema=0.9)
    small.assert_same_bits(program.backend.to_checkpoint(state), small.program(plain).init())
    stored = program.backend.to_checkpoint(state)
    assert all(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(stored.parameter["stack"]))
    before = jax.device_get(state)
    again = program.backend.from_checkpoint(stored)
    program.layout.check(again)
    small.assert_same_bits(again, before)
    assert all(x.is_deleted() for x in jax.tree.leaves(stored.optimizer["stack"]))
    whole = program.backend.join_stacks(again)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(whole["ema"]["stack"])} == {"device"}
    assert all(x.is_deleted() for x in jax.tree.leaves(again["parameter"]["stack"]))


@pytest.mark.parametrize(
    ("memory", "learner", "message"),
    [
        ({"gradients": "none"}, {"accumulate": 2, "clip": None}, "memory.gradients = none"),
        ({"gradients": "none"}, {}, "clip_mode = global_norm with memory.gradients = none"),
        ({"remat": "offload"}, {}, "memory.activations = pinned_host"),
        ({"remat": "save:attention;offload:mlp_up"}, {}, "memory.activations = pinned_host"),
        ({"parameters": "pinned_host:5"}, {}, "memory.parameters = pinned_host:5"),
        ({}, {"scope": "model"}, "learner.scope = model"),
    ],
)
def test_conflicting_settings_fail_before_compilation(memory: dict[str, Any], learner: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        small.program(deep(4, memory, **learner))


@pytest.mark.pairs
def test_plan_for_a_step_in_layer_programs(tmp_path: Any):
    """The bytes by group add up to the peak, and the FLOPs equal those of the step in one program."""
    from plimsoll.framework.plan import build_report, targets

    target = targets.resolve("cpu-1")
    layers = build_report.compile_report("small", deep(4, OFFLOADED), target, None).to_json()
    plain = deep(4, {"update": "after_backward"})
    whole = build_report.compile_report("small", plain, target, None, phases=False).to_json()
    assert sum(layers["breakdown"].values()) == layers["device_peak_bytes"]
    assert layers["flops_per_step"] == whole["flops_per_step"]
    assert layers["host_argument_bytes"] <= layers["host_peak_bytes"] < 1.5 * layers["host_argument_bytes"]
    assert layers["device_peak_bytes"] < 0.6 * whole["device_peak_bytes"]
    # The initial state is never on the device as a whole.
    assert layers["phases"]["init"]["device_peak_bytes"] < whole["device_argument_bytes"]
    names = {one["name"] for one in layers["largest"]}
    assert any("from the host" in name for name in names), names
    assert layers["breakdown"]["optimizer_state"] > 0


@pytest.mark.pairs
def test_evaluation_sums_microbatches():
    programs_ = [small.program(deep(4, memory, accumulate=2)) for memory in ({"update": "after_backward"}, OFFLOADED)]
    sums = []
    for program in programs_:
        state = program.init()
        sums.append(program.evaluate(state, program.put(small.host_batch(program))))
    assert {k: float(v) for k, v in sums[0].items()} == pytest.approx({k: float(v) for k, v in sums[1].items()})


@pytest.mark.parametrize("counts", [(3, 3), (3, 1), (0, 2), (0, 0)])
def test_copies_in_both_directions_take_turns(counts: tuple[int, int]):
    stored = {"state": {str(i): f"stored {i}" for i in range(counts[0])}}
    arrived = {"weights": {str(i): f"arrived {i}" for i in range(counts[1])}}
    moved = programs._interleave(stored, arrived)
    assert len(moved) == sum(counts)
    pairs = min(counts)
    leaves = jax.tree.leaves(moved)
    assert [leaf.split()[0] for leaf in leaves[: 2 * pairs]] == ["stored", "arrived"] * pairs
    assert programs._separate(moved, stored, arrived) == (stored, arrived)


def test_programs_compiled_together_are_the_same(monkeypatch: pytest.MonkeyPatch):
    """Several threads compile, and the memory that the dry run counts does not depend on them."""
    threads: set[str] = set()

    def dry_run(num_threads: int) -> tuple[int, int, int, list[int]]:
        program = small.program(deep(4, OFFLOADED))
        layers = program.backend.layers
        monkeypatch.setattr(layers.programs, "_num_threads", num_threads)

        def compile_in_thread(*args: Any) -> programs.LayerProgram:
            threads.add(threading.current_thread().name)
            return program.backend.compile_here(*args)

        specs, batch = program.backend.layout.specs, program.backend.rows.specs
        tracker = layers.dry_run(specs, batch, compile_in_thread)
        state = program.init()
        program.step(state, program.put(small.host_batch(program)))
        return tracker.peak, tracker.host_peak, len(layers.programs), [call.peak for call in tracker.calls]

    alone = dry_run(1)
    assert threads == {threading.main_thread().name}
    threads.clear()
    assert dry_run(3) == alone
    assert len(threads) == 3


def test_refused_program_leaves_none_behind(monkeypatch: pytest.MonkeyPatch):
    """A program that cannot be compiled raises its error, and a second dry run compiles all of them."""
    program = small.program(deep(4, OFFLOADED))
    layers = program.backend.layers
    monkeypatch.setattr(layers.programs, "_num_threads", 2)
    specs, batch = program.backend.layout.specs, program.backend.rows.specs

    def refuse(*_: Any) -> programs.LayerProgram:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        layers.dry_run(specs, batch, refuse)
    assert not len(layers.programs)
    assert layers.dry_run(specs, batch, program.backend.compile_here).peak > 0


def test_dry_run_for_a_gpu_simulates_its_allocator(monkeypatch: pytest.MonkeyPatch):
    """The pool holds all arrays and temporaries of the peak, and what stays empty is counted in addition."""
    program = small.program(deep(4, OFFLOADED))
    layers = program.backend.layers
    specs, batch = program.backend.layout.specs, program.backend.rows.specs
    peak = layers.dry_run(specs, batch, program.backend.compile_here).peak
    monkeypatch.setattr(layers.programs, "_platform", "gpu")
    tracker = layers.dry_run(specs, batch, program.backend.compile_here)
    assert tracker.peak == peak
    assert tracker._pool is not None
    assert peak <= tracker._pool.end == tracker.allocated < 2 * peak
