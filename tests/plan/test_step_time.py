"""Step time from counted operations: a recorded v5e program, the same recompiled (with libtpu), and hand examples."""

from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.devices.accelerators import ACCELERATORS, spec_for
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.compilation import compile_for
from plimsoll.framework.plan.hlo import Module
from plimsoll.framework.plan.hlo.computations import SourceLine
from plimsoll.framework.plan.hlo.transfers import collectives, slice_transfers
from plimsoll.framework.plan.step_time import StepCount, TpuRates, count
from plimsoll.framework.plan.step_time.schedule_simulation import AsyncCollective, InstructionCost, share_busy, simulate
from plimsoll.framework.plan.step_time.tpu_time import StepProgram
from plimsoll.framework.plan.step_time.work_categories import AttentionWork, count_attention

# The program that libtpu 0.0.42.1 compiled from `lower_step`; each backend_config has only the estimated cycles.
RECORDED = Path(__file__).parent / "recorded" / "v5e_step.txt"
LAYERS, DIM, ROWS, CHIPS = 6, 512, 256, 4
V5E = TpuRates.look_up(spec_for("v5e"))


def lower_step() -> jax.stages.Lowered:
    """Lower a loop over layers with weights sharded over four chips, and an update of offloaded state."""
    targets.set_environment("v5e-4")
    mesh = Mesh(np.array(targets.resolve("v5e-4").devices()), ("fsdp",))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in [(None, "fsdp"), ()])
    offloaded, split = rows.with_memory_kind("pinned_host"), NamedSharding(mesh, PartitionSpec("fsdp"))

    def step(weights: jax.Array, moments: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def layer(h: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ jax.lax.with_sharding_constraint(weight, whole)), None

        h, _ = jax.lax.scan(layer, x, weights)
        moments = jax.device_put(moments, jax.memory.Space.Device) * 0.9 + h.sum()
        return h, weights + moments.astype(weights.dtype), jax.device_put(moments, jax.memory.Space.Host)

    shape = (LAYERS, DIM, DIM)
    return jax.jit(step, out_shardings=(split, rows, offloaded)).lower(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows),
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=offloaded),
        jax.ShapeDtypeStruct((CHIPS * ROWS, DIM), jnp.bfloat16, sharding=split),
    )


@pytest.fixture(scope="module")
def recorded_module() -> Module:
    return Module(RECORDED.read_text())


def count_on_v5e(module: Module) -> StepCount:
    return count([StepProgram(module, 1)], V5E)


# --- a recorded program ----------------------------------------------------------------------------------------------


def test_flops_match_the_layers(recorded_module: Module):
    assert count_on_v5e(recorded_module).product_flops == LAYERS * 2 * ROWS * DIM * DIM
    assert count_on_v5e(recorded_module).attention_flops == 0


def test_collectives_count_only_received_bytes(recorded_module: Module):
    gathers = [one for one in collectives(recorded_module) if one.kind == "all-gather"]
    assert [(one.mode, one.runs) for one in gathers] == [("sync", LAYERS)]
    assert gathers[0].bytes_received == (CHIPS - 1) / CHIPS * DIM * DIM * 2
    (reduced,) = (one for one in collectives(recorded_module) if one.kind == "all-reduce")
    assert reduced.bytes_received == 2 * (CHIPS - 1) / CHIPS * 2  # one bfloat16, twice around the ring


def test_host_transfers(recorded_module: Module):
    timeline = count_on_v5e(recorded_module).at_all_links
    shard = LAYERS * DIM * DIM * 4 // CHIPS
    assert timeline.moved == {"to host": shard, "from host": shard}
    assert timeline.transfers == {"to host": 1, "from host": 1}
    # The write at the end has no computation to overlap with; the read overlaps with the layers.
    assert timeline.exposed["to host"] == pytest.approx(shard / V5E.pcie)
    assert timeline.exposed["from host"] == pytest.approx(shard / V5E.pcie - layers_seconds(recorded_module), rel=1e-2)


def layers_seconds(module: Module) -> float:
    """Return the seconds from the entry's first operation to the update."""
    found = count_on_v5e(module)
    update = [one.seconds for one in found.operations if one.instruction.name == "convert_add_fusion"]
    assert len(update) == 1
    return found.at_all_links.compute + found.at_all_links.collectives - update[0]


def test_times(recorded_module: Module):
    found = count_on_v5e(recorded_module)
    operations = {one.instruction.name: one for one in found.operations}
    (product,) = (one for one in found.operations if one.category == "matmul")
    assert product.estimate is not None
    assert product.estimate * V5E.cycles == pytest.approx(4146)  # as in the text; the MXU itself needs only 1,024
    assert product.seconds == product.estimate
    assert product.roof >= 2 * ROWS * DIM * DIM / V5E.flops
    update = operations["convert_add_fusion"]
    assert update.category == "vector"
    shard = LAYERS * DIM * DIM // CHIPS
    assert update.hbm_bytes == shard * (2 + 4 + 2 + 4)  # weights and moments, in and out
    assert update.seconds == pytest.approx(1.25 * update.hbm_bytes / V5E.hbm)
    assert update.estimate is not None
    assert update.seconds < update.estimate
    for timeline, speed in ((found.at_all_links, V5E.all_links), (found.at_two_links, V5E.two_links)):
        received = sum(one.bytes_received * one.runs for one in found.collectives)
        assert timeline.collectives == pytest.approx(received / speed)
        assert timeline.seconds == timeline.compute + timeline.collectives + timeline.waits
    # Reading the moments takes longer than the layers, at either speed of their collectives.
    assert found.low == pytest.approx(found.high)


def test_names_and_lines(recorded_module: Module):
    (product,) = (one for one in count_on_v5e(recorded_module).operations if one.category == "matmul")
    assert product.op_name == "jit(step)/while/body/closed_call/dot_general"
    assert product.source == SourceLine("model.py", 36)


def test_step_programs_add_up(recorded_module: Module):
    once, thrice = (
        count_on_v5e(recorded_module),
        count([StepProgram(recorded_module, 2), StepProgram(recorded_module, 1)], V5E),
    )
    assert thrice.product_flops == 3 * once.product_flops
    assert thrice.low == pytest.approx(3 * once.low)
    assert thrice.at_all_links.moved["to host"] == 3 * once.at_all_links.moved["to host"]


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU's compiler is not installed")
def test_the_compiler_still_writes_what_was_recorded(recorded_module: Module):
    compiled = compile_for(lower_step(), "tpu")  # as a plan does
    fresh, before = count_on_v5e(Module(compiled.text)), count_on_v5e(recorded_module)
    assert fresh.product_flops == before.product_flops
    assert fresh.at_all_links.moved == before.at_all_links.moved
    received = [sum(one.bytes_received * one.runs for one in found.collectives) for found in (fresh, before)]
    assert received[0] == pytest.approx(received[1], rel=0.01)
    assert fresh.low == pytest.approx(before.low, rel=0.2)  # another version may fuse and tile differently
    assert {one.category for one in fresh.operations} >= {"matmul", "vector", "host transfer"}
    (product,) = (one for one in fresh.operations if one.category == "matmul")
    assert product.source is not None
    line = Path(product.source.file).read_text().splitlines()[product.source.line - 1]
    assert "h @ jax.lax.with_sharding_constraint(weight, whole)" in line
    assert compiled.buffers is not None
    with pytest.raises(ValueError, match="no estimated_cycles"):
        count_on_v5e(compiled.buffers.module)  # this text is from before code generation


# --- by hand ---------------------------------------------------------------------------------------------------------

TRANSFERS = """HloModule step, is_scheduled=true

%body (b: (s32[], f32[250])) -> (s32[], f32[250]) {
  %b = (s32[], f32[250]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %row = f32[250]{0} get-tuple-element(%b), index=1
  %out = (f32[250]{0:S(5)}, f32[250]{0}, u32[]) copy-start(%row)
  %work = f32[250]{0} negate(%row)
  %out-done = f32[250]{0:S(5)} copy-done(%out)
  ROOT %carry = (s32[], f32[250]) tuple(%next, %work)
}

%condition (c: (s32[], f32[250])) -> pred[] {
  %c = (s32[], f32[250]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(3)
  ROOT %less = pred[] compare(%j, %bound), direction=LT
}

ENTRY %main (a: f32[1000], h: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %h = f32[1000]{0:S(5)} parameter(1)
  %in = (f32[1000]{0}, f32[1000]{0:S(5)}, u32[]) copy-start(%h)
  %in2 = (f32[1000]{0}, f32[1000]{0:S(5)}, u32[]) copy-start(%h)
  %before = f32[1000]{0} negate(%a)
  %in-done = f32[1000]{0} copy-done(%in)
  %zero = s32[] constant(0)
  %part = f32[250]{0} slice(%before), slice={[0:250]}
  %start = (s32[], f32[250]) tuple(%zero, %part)
  %loop = (s32[], f32[250]) while(%start), condition=%condition, body=%body
  %in2-done = f32[1000]{0} copy-done(%in2)
  ROOT %sum = f32[1000]{0} add(%in2-done, %in-done)
}
"""


def test_transfers_share_the_link():
    """The link moves 1 kB/s: two reads of 4 kB; after 1 s of work, three iterations write 1 kB during 0.5 s of work."""
    costs = {"before": InstructionCost(1.0, 0.0), "work": InstructionCost(0.5, 0.0), "sum": InstructionCost(0.25, 10.0)}
    timeline = simulate(Module(TRANSFERS), costs, received_per_second=100.0, host_per_second=1000.0)
    assert timeline.moved == {"from host": 8000, "to host": 3000}
    assert timeline.compute == 1.0 + 3 * 0.5 + 0.25
    assert timeline.collectives == pytest.approx(0.1)
    # The first read ends at 4 s, 3 s after the work before it. The loop takes 3 x 1 s, half of it waiting. The second
    # read, queued behind the first, ends at 8 s, one second after the loop.
    assert timeline.waits == pytest.approx(3.0 + 3 * 0.5 + 1.0)
    assert timeline.seconds == pytest.approx(8.0 + 0.25 + 0.1)
    assert timeline.exposed["to host"] == pytest.approx(3 * 0.5)
    assert timeline.exposed["from host"] == pytest.approx(3.0 + 3 * 0.5 + 1.0)
    # Without contention, work hides 1 s of the first read, 1 + 1.5 s of the second, and half a second of each write.
    assert timeline.hidden_without_contention == {
        "from host": pytest.approx(1000 + 2500),
        "to host": pytest.approx(3 * 500),
    }


BETWEEN_SLICES = """HloModule step, is_scheduled=true

ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %token = token[] after-all()
  %send = (f32[1000]{0}, u32[], token[]) send(%a, %token), channel_id=2, frontend_attributes={HANDLER}
  %recv = (f32[1000]{0}, u32[], token[]) recv(%token), channel_id=1, frontend_attributes={HANDLER}
  %work = f32[1000]{0} negate(%a)
  %recv-done = (f32[1000]{0}, token[]) recv-done(%recv), channel_id=1
  %arrived = f32[1000]{0} get-tuple-element(%recv-done), index=0
  ROOT %sum = f32[1000]{0} add(%arrived, %work)
}
""".replace("HANDLER", '_xla_host_transfer_handler_name="xla_megascale_runtime"')


def test_data_from_other_slices_arrives_while_others_work():
    """The network moves 1 kB/s: of 4 s, work hides 1.5 s."""
    module = Module(BETWEEN_SLICES)
    (transfer,) = slice_transfers(module)
    assert (transfer.num_bytes, transfer.runs) == (4000, 1)
    spans = [AsyncCollective(transfer.started.name, transfer.done.name, transfer.num_bytes, "from slices")]
    costs = {"work": InstructionCost(1.5, 0.0), "sum": InstructionCost(0.25, 0.0)}
    rates = {"received_per_second": 1.0, "host_per_second": 1.0}
    timeline = simulate(module, costs, spans, **rates, slices_per_second=1000.0)
    assert timeline.slice_waits == pytest.approx(2.5)
    assert timeline.seconds == pytest.approx(1.5 + 2.5 + 0.25)
    assert simulate(module, costs, spans, **rates).seconds == 1.75


def test_lanes_are_busy_as_long_as_they_move_and_compute():
    costs = {"before": InstructionCost(1.0, 0.0), "work": InstructionCost(0.5, 0.0), "sum": InstructionCost(0.25, 10.0)}
    timeline = simulate(Module(TRANSFERS), costs, received_per_second=100.0, host_per_second=1000.0)
    seconds = {"computation": 1.0 + 3 * 0.5 + 0.25, "collectives": 0.1, "from host": 8.0, "to host": 3.0}
    shares = share_busy([timeline.activity], 7)
    for name, intervals in shares.items():
        assert sum(intervals) * timeline.seconds / 7 == pytest.approx(seconds[name]), name
        assert max(intervals) <= 1.0 + 1e-9
    # The computation begins at once, and the reads fill the link until the last interval.
    assert shares["computation"][0] == pytest.approx(1.0 / (timeline.seconds / 7))
    assert shares["from host"][:6] == pytest.approx([1.0] * 6)
    # A second run of the program repeats the first.
    twice = share_busy([timeline.activity] * 2, 14)
    assert twice["to host"] == pytest.approx(shares["to host"] * 2)


EXCHANGES = """HloModule step, is_scheduled=true

%first_step (p: f32[100]) -> f32[400] {
  %p = f32[100]{0} parameter(0)
  ROOT %g = f32[400]{0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}

%second_step (q: f32[100]) -> f32[400] {
  %q = f32[100]{0} parameter(0)
  ROOT %h = f32[400]{0} all-gather(%q), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}

ENTRY %main (a: f32[100]) -> f32[400] {
  %a = f32[100]{0} parameter(0)
  %send = (f32[100]{0}, f32[100]{0}, u32[]) collective-permute-start(%a), channel_id=2, source_target_pairs={{0,1}}
  %one = f32[400]{0} fusion(%a), kind=kCustom, calls=%first_step
  %between = f32[100]{0} negate(%a)
  %sent = f32[100]{0} collective-permute-done(%send)
  %two = f32[400]{0} fusion(%sent), kind=kCustom, calls=%second_step
  ROOT %end = f32[400]{0} negate(%two)
}
"""


def test_asynchronous_collectives_share_the_links():
    """At 400 bytes/s, 400 bytes are sent, and 1,200 bytes are gathered by two fusions of one channel."""
    module = Module(EXCHANGES)
    found = {one.kind: one for one in collectives(module)}
    spans = [AsyncCollective(one.scheduled.name, one.last.name, one.bytes_received) for one in found.values()]
    assert set(spans) == {AsyncCollective("send", "sent", 400.0), AsyncCollective("one", "two", 1200.0)}
    costs = {
        "one": InstructionCost(0.5, 0.0),
        "between": InstructionCost(0.25, 0.0),
        "two": InstructionCost(0.5, 0.0),
        "end": InstructionCost(1.0, 0.0),
    }
    timeline = simulate(module, costs, spans, received_per_second=400.0, host_per_second=1.0)
    # The send ends at 1 s, 0.75 s of it during work. The gather, queued behind it, ends at 4 s, with 0.5 s more work.
    assert timeline.collective_waits == pytest.approx(0.25 + 2.5)
    assert timeline.seconds == pytest.approx(4.0 + 1.0)
    hidden = simulate(module, costs, received_per_second=400.0, host_per_second=1.0)
    assert hidden.seconds == pytest.approx(0.5 + 0.25 + 0.5 + 1.0)


KERNEL = """HloModule k
ENTRY %main (q: bf16[2,8,1024,64], k: bf16[2,4,1024,64]) -> bf16[2,8,1024,64] {
  %q = bf16[2,8,1024,64]{3,2,1,0} parameter(0)
  %k = bf16[2,4,1024,64]{3,2,1,0} parameter(1)
  %blocks = s8[1,2,2]{2,1,0} constant({...})
  %p = s32[1024,128]{1,0} iota(), iota_dimension=0
  ROOT %splash_mha_NAME = TYPE custom-call(%blocks, %blocks, %q, %k, %k, %p), custom_call_target="tpu_custom_call"
}
"""
QUERIES, KEYS, RUNNING_SUM = "bf16[2,8,1024,64]{3,2,1,0}", "bf16[2,4,1024,64]{3,2,1,0}", "f32[2,512,64]{2,1,0}"


@pytest.mark.parametrize(
    ("name", "results", "products"),
    [
        ("fwd_residuals", [RUNNING_SUM, QUERIES], 2),
        ("dq_no_residuals", [RUNNING_SUM, QUERIES], 3),
        ("dkv_no_residuals", [RUNNING_SUM, RUNNING_SUM, KEYS, KEYS], 4),
        ("dkv_no_residuals", [RUNNING_SUM, RUNNING_SUM, "f32[2,2,8,1024,64]{4,3,2,1,0}", KEYS, KEYS], 5),
    ],
)
def test_attention_kernels(name: str, results: list[str], products: int):
    module = Module(KERNEL.replace("NAME", name).replace("TYPE", f"({', '.join(results)})"))
    kernel = module.root(module.entry)
    assert kernel is not None
    flops = products * 2 * 2 * 8 * 1024 * 1024 * 64
    assert count_attention(module, kernel) == AttentionWork(flops, 64, seen_share=0.5)
    (operation,) = (one for one in count_on_v5e(module).operations if one.category == "attention")
    assert operation.seconds == pytest.approx(
        flops / 2 / (V5E.flops / 4)
    )  # causal; heads of 64 run at a quarter of the peak


@pytest.mark.parametrize(
    ("queries", "keys", "table", "positions", "share"),
    [
        (1024, 1024, "1,2,2", 1, 0.5),
        (1024, 1024, "1,2,2", 3, 0.5),
        (1024, 1024, "1,2,2", 0, 1.0),
        (1024, 1024, "1,2,2", 2, 1.0),
        # The last of four devices sees its own keys by half, and those of the others.
        (1024, 4096, "1,2,8", 1, 0.875),
        # A window of at most two blocks out of eight.
        (4096, 4096, "1,8,2", 1, 0.25),
    ],
    ids=["causal", "causal, documents", "all keys", "all keys, documents", "gathered keys", "window"],
)
def test_attention_kernels_skip_what_masks_hide(queries, keys, table, positions, share):
    text = KERNEL.replace("NAME", "fwd_residuals").replace("TYPE", "bf16[2,8,1024,64]{3,2,1,0}")
    text = text.replace("[2,8,1024,64]", f"[2,8,{queries},64]").replace("[2,4,1024,64]", f"[2,4,{keys},64]")
    text = text.replace("s8[1,2,2]", f"s8[{table}]").replace(", %p)", ", %p" * positions + ")")
    module = Module(text)
    kernel = module.root(module.entry)
    assert kernel is not None
    assert count_attention(module, kernel).seen_share == share


def test_every_tpu_has_rates():
    for spec in ACCELERATORS:
        if spec.platform == "tpu":
            rates = TpuRates.look_up(spec)
            assert 0.9e9 < rates.cycles < 2.5e9
            assert rates.two_links < rates.all_links
        else:
            with pytest.raises(ValueError, match="TPUs whose rates are known"):
                TpuRates.look_up(spec)
