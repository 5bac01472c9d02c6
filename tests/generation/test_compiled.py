"""The program that the TPU compiler makes for one token: it updates the cache in place and fetches offloaded weights
one layer at a time."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.layout import StateLayout, move_to_host
from plimsoll.framework.plan import targets
from plimsoll.framework.program.program import Program
from tests.support import small

ROWS, SLOTS = 8, 2048


@pytest.fixture(autouse=True)
def tpu():
    """Set up the TPU compiler on a machine without a TPU."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    targets.set_environment("v5e-1")


def decode_memory(*, offloaded: bool) -> Any:
    """Return the memory analysis of decoding with 8 layers of width 1024: 196 MiB of weights, 512 MiB of cache."""
    model = llama_model(layers=8, heads=8, dim=1024, hidden=2816, vocab_size=1024)
    model.param_dtype = model.compute_dtype = "bfloat16"
    experiment = small.experiment(model, batch=1).instantiate()
    program = Program(experiment, targets.resolve("v5e-1").devices(), training=False)
    specs = dict(program.layout.specs.parameter)
    if offloaded:
        specs["stack"] = move_to_host(specs["stack"], "pinned_host", stacked=True, min_bytes=0)
    layout = StateLayout(replace(program.layout.specs, parameter=specs), program.mesh)
    generator = Generator(program, layout.abstract())

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=program.replicated)

    one = array("bfloat16", 8, ROWS, SLOTS, 8, 128)
    cache = {"stack": {"block0": {"attention": {"key": one, "value": one}}}}
    where = {"slot": array("int32"), "first": array("int32", ROWS), "index": array("int32")}
    chosen = {"keys": array("uint32", ROWS, 2), "temperature": array("float32")}
    lowered = generator._decode.lower(("all",), generator._arrays, cache, array("int32", ROWS), where, chosen)
    return lowered.compile().memory_analysis()


@pytest.mark.slow
def test_decoding_copies_neither_cache_nor_offloaded_stack() -> None:
    here, there = decode_memory(offloaded=False), decode_memory(offloaded=True)
    assert here.alias_size_in_bytes == there.alias_size_in_bytes == 512 << 20
    assert here.temp_size_in_bytes < 64 << 20
    assert here.host_argument_size_in_bytes == 0
    assert there.host_argument_size_in_bytes >= 190 << 20
    assert there.temp_size_in_bytes < 96 << 20, "more than two layers of 25 MiB and their working space"
