"""Parsing the compiler's text: a small handwritten program, and programs that XLA compiles here."""

# ruff: noqa: E501  (lines of programs are long)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.plan.hlo import Array, Module, arrays
from plimsoll.framework.plan.hlo.arrays import parse_stored_arrays

TEXT = """
HloModule jit_step, is_scheduled=true

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %bound = s32[]{:T(128)} constant(12)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%gather (q: f32[8]) -> f32[32] {
  %q = f32[8]{0} parameter(0)
  ROOT %all-gather.1 = f32[32]{0} all-gather(%q), channel_id=1, dimensions={0}
}

%body (r: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = (s32[], f32[8]{0}) parameter(0)
  %row = f32[8]{0} get-tuple-element(%r), index=1
  %inner = f32[32]{0} fusion(%row), kind=kCustom, calls=%gather, metadata={op_name="jit(step)/stack/while/body/mul"}
  %home = f32[8]{0:T(128)S(5)} copy(%row)
  %n = s32[] get-tuple-element(%r), index=0
  ROOT %next = (s32[], f32[8]{0}) tuple(%n, %row)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="state.parameter[\\'embed\\']"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body
  ROOT %done = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_types():
    assert arrays("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, s32[]{:T(128)}, pred[7], f32[4]{0:S(5)})") == [
        Array("bf16", (2, 3)),
        Array("s32", ()),
        Array("pred", (7,)),
        Array("f32", (4,), on_host=True),
    ]
    sizes = [array.num_bytes for array in arrays("bf16[2,3] s32[] pred[7] f8e4m3fn[5] s4[6] u64[2]")]
    assert sizes == [12, 4, 7, 5, 3, 16]


def test_tiles_are_padded_and_memory_spaces_read():
    text = "bf16[3,100,200]{2,1,0:T(8,128)(2,1)S(1)} f32[100,200]{0,1:T(8,128)} f32[100]{0:T(128)S(5)} s32[]{:T(128)}"
    sizes = [(one.space, one.padded_bytes) for one in parse_stored_arrays(text)]
    # 100 x 200 in tiles of 8 x 128; in the second array, dimension 0 is the minor one.
    assert sizes == [(1, 3 * 104 * 256 * 2), (0, 128 * 200 * 4), (5, 128 * 4), (0, 4)]


COUNTING = """
%condition (p: (s32[], s32[], f32[8])) -> pred[] {
  %p = (s32[], s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = BOUND
  ROOT %less = pred[] compare(%i, %limit), direction=DIRECTION
}

%advance (v: s32[], w: s32[]) -> s32[] {
  %v = s32[] parameter(0)
  %w = s32[] parameter(1)
  ROOT %sum = s32[] add(%v, %w)
}

%body (r: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %r = (s32[], s32[], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%r), index=0
  %m = s32[] get-tuple-element(%r), index=1
  %row = f32[8] get-tuple-element(%r), index=2
  %step = s32[] constant(STEP)
  %next = s32[] fusion(%n, %step), kind=kLoop, calls=%advance
  %again = s32[] copy(%next)
  ROOT %carry = (s32[], s32[], f32[8]) tuple(%again, %m, %row)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %first = s32[] constant(FIRST)
  %begin = s32[] copy(%first)
  %ten = s32[] constant(10)
  %start = (s32[], s32[], f32[8]) tuple(%begin, %ten, %a)
  %loop = (s32[], s32[], f32[8]) while(%start), condition=%condition, body=%body
  ROOT %done = f32[8] get-tuple-element(%loop), index=2
}
"""


@pytest.mark.parametrize("bound", ["s32[] constant(10)", "s32[] get-tuple-element(%p), index=1"])
@pytest.mark.parametrize(
    ("first", "step", "direction", "trips"),
    [
        (0, 1, "LT", len(range(0, 10))),
        (1, 1, "LT", len(range(1, 10))),  # a loop whose first iteration was peeled off
        (0, 2, "LT", len(range(0, 10, 2))),  # collective matrix products
        (1, 2, "LT", len(range(1, 10, 2))),
        (0, 3, "LT", len(range(0, 10, 3))),
        (0, 3, "LE", len(range(0, 11, 3))),
        (0, 5, "LE", len(range(0, 11, 5))),
        (31, -1, "GT", len(range(31, 10, -1))),
        (31, -1, "GE", len(range(31, 9, -1))),
    ],
)
def test_trip_counts(bound: str, first: int, step: int, direction: str, trips: int):
    values = {"BOUND": bound, "FIRST": str(first), "STEP": str(step), "DIRECTION": direction}
    text = COUNTING
    for name, value in values.items():
        text = text.replace(name, value)
    module = Module(text)
    assert module.trip_count(module.instructions["loop"]) == trips
    assert module.runs("body") == trips


def test_a_loop_that_data_ends_counts_once():
    text = COUNTING.replace("BOUND", "s32[] get-tuple-element(%q), index=1").replace("DIRECTION", "LT")
    module = Module(text.replace("FIRST", "0").replace("STEP", "1"))
    assert module.trip_count(module.instructions["loop"]) == 1
    assert [loop.name for loop in module.unknown_loops] == ["loop"]


def test_an_instruction_over_several_lines():
    """The metadata of a Pallas kernel has a line that starts with a brace, like the end of a computation."""
    kernel = """  %kernel = f32[8]{0} custom-call(%row), custom_call_target="tpu_custom_call", frontend_attributes={metadata={
"text":"{\\"block\\": 512}"
}}, metadata={op_name="jit(step)/stack/attention/pallas_call"}
  %inner ="""
    module = Module(TEXT.replace("  %inner =", kernel))
    assert module.instructions["kernel"].op_name == "jit(step)/stack/attention/pallas_call"
    assert [i.name for i in module.computations["body"]][2:4] == ["kernel", "inner"]
    assert module.runs("gather") == 12


SOURCES = """HloModule m

FileNames
1 "/venv/lib/python3.11/site-packages/optax/_src/update.py"
2 "/home/me/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=2 end_column=3}
2 {file_name_id=1 function_name_id=1 line=70 end_line=70 column=2 end_column=3}
3 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=2 end_column=3}

StackFrames
FRAMES

"""


@pytest.mark.parametrize("shift", [0, 1])  # callers are numbered from 0 or 1, depending on the version
def test_source_lines(shift: int):
    """Frame 1 is line 7 of the model, frame 2 is optax (called there), frame 3 is line 9 of the model (under optax)."""
    callers = [shift, 1 + shift, 2 + shift]
    frames = [f"{n} {{file_location_id={n} parent_frame_id={c}}}" for n, c in zip((1, 2, 3), callers, strict=True)]
    assert frames[0].endswith("parent_frame_id=1}" if shift else "parent_frame_id=0}")
    text = SOURCES.replace("FRAMES", "\n".join(frames)) + TEXT.split("m", 1)[1].partition("\n")[2]
    lines = []
    for frame in (1, 2, 3, 8):
        module = Module(text.replace('mul"}', f'mul" stack_frame_id={frame}}}'))
        lines.append(module.source(module.instructions["inner"]))
    assert lines == [("/home/me/model.py", 7), ("/home/me/model.py", 7), ("/home/me/model.py", 9), None]


def test_source_lines_at_the_instruction():
    module = Module(TEXT.replace('mul"}', 'mul" source_file="model.py" source_line=12}'))
    assert module.source(module.instructions["inner"]) == ("model.py", 12)


def test_loops_count_by_their_trips():
    module = Module(TEXT)
    assert module.runs("gather") == 12
    assert module.collective_bytes() == {"all-gather": 12 * 32 * 4}
    assert module.host_bytes() == 12 * 8 * 4


def test_names():
    module = Module(TEXT)
    assert module.parameters == {"a": "state.parameter['embed']"}
    assert module.instructions["inner"].op_name == "jit(step)/stack/while/body/mul"


@pytest.mark.parametrize("trips", [3, 7])
def test_compiled_loop_with_collectives(trips: int):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())

    def f(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(jnp.tanh(h @ w), split), None

        return jax.lax.scan(body, x, weights)[0]

    columns = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    weights = jax.ShapeDtypeStruct((trips, 64, 64), jnp.float32, sharding=columns)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split)
    module = Module(jax.jit(f, out_shardings=whole).lower(weights, x).compile().as_text())
    moved = module.collective_bytes()
    # Each iteration either gathers the weights or moves the 16 x 64 activations; the result is gathered at the end.
    each = sum(moved.values()) - 16 * 64 * 4
    assert each > 0
    assert each % trips == 0
