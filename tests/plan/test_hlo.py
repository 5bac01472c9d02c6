"""The compiler's text: against a small program written by hand, and against what XLA compiles here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.plan.hlo import Array, Module, arrays

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
  %a = f32[8]{0} parameter(0), metadata={op_name="state[\\'parameter\\'][\\'embed\\']"}
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


def test_loops_count_by_their_trips():
    module = Module(TEXT)
    assert module.runs("gather") == 12
    assert module.collective_bytes() == {"all-gather": 12 * 32 * 4}
    assert module.host_bytes() == 12 * 8 * 4


def test_names():
    module = Module(TEXT)
    assert module.parameters == {"a": "state['parameter']['embed']"}
    assert module.instructions["inner"].op_name == "jit(step)/stack/while/body/mul"


@pytest.mark.parametrize("trips", [3, 7])
def test_a_compiled_loop_of_collectives(trips: int):
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
    # Each trip either gathers the weights or moves the 16 x 64 activations; the result is gathered once at the end.
    each = sum(moved.values()) - 16 * 64 * 4
    assert each > 0
    assert each % trips == 0
