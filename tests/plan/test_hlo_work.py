"""FLOPs, bytes and collectives of instructions, compared with XLA's cost analysis and with hand-computed numbers."""

# ruff: noqa: E501  (lines of programs are long)
import jax
import jax.numpy as jnp
import pytest

from plimsoll.framework.plan.hlo import Module
from plimsoll.framework.plan.hlo.flops import Flops
from plimsoll.framework.plan.hlo.memory_traffic import Traffic
from plimsoll.framework.plan.hlo.module import iter_executed
from plimsoll.framework.plan.hlo.transfers import HostTransfer, collectives, find_transfer, group_size
from plimsoll.framework.plan.step_time.work_categories import categorize, is_work


def flops(module: Module) -> int:
    counter = Flops(module)
    return sum(counter.look_up(instruction) * runs for instruction, runs in iter_executed(module))


@pytest.mark.parametrize(
    ("strides", "padding", "lhs_dilation", "rhs_dilation", "groups"),
    [
        ((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), 1),
        ((1, 1), ((1, 1), (2, 1)), (1, 1), (1, 1), 1),
        ((2, 3), ((1, 2), (0, 3)), (1, 1), (1, 1), 2),
        ((1, 1), ((2, 2), (3, 3)), (1, 1), (2, 1), 1),
        ((1, 2), ((1, 2), (0, 3)), (2, 3), (1, 1), 1),
        ((2, 3), ((1, 2), (4, 3)), (3, 2), (2, 3), 2),
        ((7, 1), ((7, 7), (0, 0)), (8, 1), (1, 1), 1),
    ],
)
def test_convolutions_as_xla_counts_them(strides, padding, lhs_dilation, rhs_dilation, groups):
    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, strides, padding, lhs_dilation, rhs_dilation, feature_group_count=groups
        )

    x = jax.ShapeDtypeStruct((3, 8, 9, 10), jnp.float32)
    lowered = jax.jit(convolve).lower(x, jax.ShapeDtypeStruct((6, 8 // groups, 3, 4), jnp.float32))
    text = lowered.compiler_ir("hlo").as_hlo_module().to_string()
    assert flops(Module(text)) == lowered.cost_analysis()["flops"]


@pytest.mark.parametrize("spec", ["bsd,de->bse", "bhsd,bhtd->bhst", "abc,abc->", "xy,yz->zx"])
def test_products_as_xla_counts_them(spec: str):
    sizes = {"b": 3, "s": 5, "d": 7, "e": 2, "h": 4, "t": 6, "a": 3, "c": 9, "x": 8, "y": 3, "z": 5}
    left, right = spec.split("->")[0].split(",")
    arrays = [jax.ShapeDtypeStruct([sizes[axis] for axis in axes], jnp.float32) for axes in (left, right)]
    text = jax.jit(lambda x, y: jnp.einsum(spec, x, y)).lower(*arrays).compiler_ir("hlo").as_hlo_module().to_string()
    expected = 2
    for axis in {*left, *right}:
        expected *= sizes[axis]
    assert flops(Module(text)) == expected


# A batch of products as the TPU compiler writes it: each of 12 results uses one of 12 window positions.
BATCHED = """
ENTRY %main (x: bf16[12,64,32], y: bf16[12,32,16]) -> bf16[12,64,16] {
  %x = bf16[12,64,32]{2,1,0} parameter(0)
  %y = bf16[12,32,16]{2,1,0} parameter(1)
  ROOT %c = bf16[12,64,16]{2,1,0} convolution(%x, %y), window={size=12 stride=11 lhs_dilate=12}, dim_labels=0bf_0io->0bf
}
"""


def test_batched_products():
    assert flops(Module(BATCHED)) == 2 * 12 * 64 * 32 * 16


FUSIONS = """
%reads (p0: bf16[32,256,512], p1: s32[], p2: f32[8,128]) -> bf16[256,512] {
  %p0 = bf16[32,256,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8,128]{1,0:T(8,128)S(1)} parameter(2)
  %zero = s32[] constant(0)
  %slice = bf16[1,256,512]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,256,512}
  ROOT %row = bf16[256,512]{1,0:T(8,128)(2,1)} bitcast(%slice)
}

%writes (q0: bf16[32,256,512], q1: bf16[1,256,512], q2: s32[]) -> bf16[32,256,512] {
  %q0 = bf16[32,256,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %q1 = bf16[1,256,512]{2,1,0:T(8,128)(2,1)} parameter(1)
  %q2 = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %update = bf16[32,256,512]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%q0, %q1, %q2, %nought, %nought)
}

ENTRY %main (stack: bf16[32,256,512], i: s32[], v: f32[8,128]) -> bf16[32,256,512] {
  %stack = bf16[32,256,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[] parameter(1)
  %v = f32[8,128]{1,0:T(8,128)S(1)} parameter(2)
  %read = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} fusion(%stack, %i, %v), kind=kLoop, calls=%reads
  %new = bf16[1,256,512]{2,1,0:T(8,128)(2,1)} bitcast(%read)
  %whole = bf16[32,256,512]{2,1,0:T(8,128)(2,1)} negate(%stack)
  ROOT %written = bf16[32,256,512]{2,1,0:T(8,128)(2,1)} fusion(%stack, %new, %i), kind=kLoop, calls=%writes
}
"""


def test_slice_and_update_traffic_counts_only_the_slice():
    module = Module(FUSIONS)
    traffic, row, index = Traffic(module), 256 * 512 * 2, 4
    assert traffic.hbm_bytes(module.instructions["read"]) == row + index  # the result is in VMEM
    assert traffic.vmem_bytes(module.instructions["read"]) == row + 8 * 128 * 4
    assert traffic.hbm_bytes(module.instructions["written"]) == 2 * row + index
    assert traffic.hbm_bytes(module.instructions["whole"]) == 2 * 32 * row


EXCHANGE = """
%fused (f0: bf16[64,128]) -> bf16[1024,128] {
  %f0 = bf16[64,128] parameter(0)
  ROOT %gather = bf16[1024,128] all-gather(%f0), channel_id=7, replica_groups=[4,16]<=[64], dimensions={0}, frontend_attributes={chain_id="3"}
}

%all-reduce-scatter.1 (g0: f32[1024]) -> f32[64] {
  %g0 = f32[1024] parameter(0)
  %reduced = f32[1024] all-reduce(%g0), channel_id=8, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %cut = f32[64] slice(%reduced), slice={[0:64]}
}

ENTRY %main (a: bf16[64,128], b: f32[1024]) -> f32[64] {
  %a = bf16[64,128] parameter(0)
  %b = f32[1024] parameter(1)
  %first = bf16[1024,128] fusion(%a), kind=kCustom, calls=%fused
  %second = bf16[1024,128] fusion(%a), kind=kCustom, calls=%fused
  %send = (f32[1024], f32[1024], u32[], u32[]) collective-permute-start(%b), channel_id=9, source_target_pairs={{0,1},{1,0}}
  %sent = f32[1024] collective-permute-done(%send)
  %swap = bf16[64,128] all-to-all(%a), channel_id=10, replica_groups=mesh['x'=2,'y'=4] {'x','y'}, dimensions={0}
  %room = bf16[80,128] broadcast(%zero), dimensions={}
  %i = s32[16] constant({...})
  %rows = bf16[80,128] ragged-all-to-all(%a, %room, %i, %i, %i, /*index=5*/%i), channel_id=11, replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %last = f32[64] fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_collectives():
    found = {(one.kind, one.mode): one for one in collectives(Module(EXCHANGE))}
    assert {key: one.bytes_received for key, one in found.items()} == {
        ("all-gather", "async"): 15 * 64 * 128 * 2,
        ("collective-permute", "async"): 1024 * 4,
        ("all-to-all", "sync"): 7 / 8 * 64 * 128 * 2,
        # All 64 rows of a chip; the array that they arrive in has room for 80.
        ("ragged-all-to-all", "sync"): 7 / 8 * 64 * 128 * 2,
        ("reduce-scatter", "fused"): 3 / 4 * 1024 * 4,
    }
    # Two fusions with the same channel are steps of one collective.
    assert all(one.runs == 1 for key, one in found.items() if key[0] != "all-gather")
    assert [group_size(one.instruction) for one in found.values()] == [16, 1, 8, 8, 4]
    assert Module(EXCHANGE).collective_bytes()["ragged-all-to-all"] == 80 * 128 * 2


ON_A_SPARSE_CORE = """HloModule offloaded, is_scheduled=true
%gather (p: f32[100]) -> f32[400] {
  %p = f32[100] parameter(0)
  ROOT %all-gather.1 = f32[400] all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (a: f32[100]) -> f32[400] {
  %a = f32[100] parameter(0)
  %prepared = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"
  %start = ((f32[100], s32[]), f32[400]) call-start(%a, %prepared), async_execution_thread="sparsecore", to_apply=%gather
  %between = f32[100] negate(%a)
  ROOT %end = f32[400] call-done(%start)
}
"""


def test_a_collective_on_a_sparse_core_runs_beside_the_others():
    module = Module(ON_A_SPARSE_CORE)
    (one,) = collectives(module)
    assert (one.kind, one.mode, one.bytes_received) == ("all-gather", "async", 3 * 100 * 4)
    assert (one.scheduled.name, one.last.name) == ("start", "end")
    assert [i.name for i in module.computations["main"] if is_work(i)] == ["start", "between"]
    assert categorize(module, Flops(module), one.scheduled) == "collective"


HOSTED = """
ENTRY %main (h: f32[4,16,128], d: f32[1,16,128], i: s32[]) -> f32[4,16,128] {
  %h = f32[4,16,128]{2,1,0:T(8,128)S(5)} parameter(0)
  %d = f32[1,16,128]{2,1,0:T(8,128)} parameter(1)
  %i = s32[] parameter(2)
  %fetch = ((f32[4,16,128]{2,1,0:T(8,128)S(5)}, s32[], s32[], s32[]), f32[1,16,128]{2,1,0:T(8,128)}, u32[]{:S(2)}) dynamic-slice-start(%h, %i, %i, %i), dynamic_slice_sizes={1,16,128}
  %store = ((f32[4,16,128]{2,1,0:T(8,128)S(5)}, f32[1,16,128]{2,1,0:T(8,128)}, s32[], s32[], s32[]), f32[4,16,128]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%h, %d, %i, %i, %i)
  %whole = (f32[4,16,128]{2,1,0:T(8,128)}, f32[4,16,128]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%h)
  %part = ((f32[4,16,128]{2,1,0:T(8,128)S(5)}), f32[2,16,128]{2,1,0:T(8,128)}, s32[]{:S(2)}) slice-start(%h), slice={[0:2], [0:16], [0:128]}
  %waiting = f32[1,16,128]{2,1,0:T(8,128)S(5)} copy(%d)
  %near = (f32[1,16,128]{2,1,0:T(8,128)S(1)}, f32[1,16,128]{2,1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%d)
  ROOT %stored = f32[4,16,128]{2,1,0:T(8,128)S(5)} dynamic-update-slice-done(%store)
}
"""


def test_host_transfers():
    module = Module(HOSTED)
    row = 16 * 128 * 4
    found = {name: find_transfer(module, instruction) for name, instruction in module.instructions.items()}
    assert {name: one for name, one in found.items() if one} == {
        "fetch": HostTransfer("from host", row, False),
        "store": HostTransfer("to host", row, False),
        "whole": HostTransfer("from host", 4 * row, False),
        "part": HostTransfer("from host", 2 * row, False),
        "waiting": HostTransfer("to host", row, True),
    }
