"""Live buffers at the peak, compared with hand-computed programs and with XLA's own totals."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.plan import buffers
from plimsoll.framework.plan.compilation import compile_for, parse_refusal

MIB = 1 << 20


def dump(tmp_path: Path, f, *shapes: tuple[int, ...], **options):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(f, **options).lower(*arguments).compile(compiler_options={buffers.DUMP_OPTION: str(tmp_path)})


def test_chained_products_keep_two_alive(tmp_path: Path):
    # a @ a -> b, b @ b -> c, c @ a -> out. While c is computed, b is alive; the argument and the result always are.
    dump(tmp_path, lambda a: ((a @ a) @ (a @ a)) @ a, (512, 512))
    found = buffers.read_dump(tmp_path)
    assert list(found.parameters.values()) == [MIB]
    assert found.output_bytes == MIB
    assert found.live_bytes == pytest.approx(4 * MIB, abs=8192) or found.live_bytes == pytest.approx(3 * MIB, abs=8192)


def test_peak_equals_the_live_buffers_and_xlas_total(tmp_path: Path):
    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(h @ w), None

            return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

        return w - jax.grad(loss)(w)

    compiled = dump(tmp_path, f, (8, 256, 256), (1024, 256), donate_argnums=0)
    stats, found = compiled.memory_analysis(), buffers.read_dump(tmp_path)
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert found.live_bytes + found.gap_bytes == pytest.approx(total + stats.temp_size_in_bytes, abs=8192)
    assert 0 <= found.gap_bytes < 0.2 * found.heap_bytes
    # The layers' inputs, [8, 1024, 256], are saved for the backward pass and alive at the peak.
    assert 8 * MIB in [block.size for block in found.blocks]


def test_no_dump_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="the compiler wrote no"):
        buffers.read_dump(tmp_path)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (52.07G) "
            "exceeds available HBM (15.75G).",
            int(52.07 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: ... Used 16.94G of 15.75G hbm. Exceeded hbm capacity by 1.19G.", int(16.94 * 2**30)),
        ("RESOURCE_EXHAUSTED: the total memory required (812.5M) exceeds available HBM (100.0M)", int(812.5 * 2**20)),
        ("INVALID_ARGUMENT: no such flag (5.0G)", None),
        ("RESOURCE_EXHAUSTED: no more file descriptors", None),
    ],
)
def test_the_compilers_refusal(message: str, needed: int | None):
    error = jax.errors.JaxRuntimeError(message)
    if needed is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message.partition("(")[0]):
            parse_refusal(error)
    else:
        assert parse_refusal(error) == (needed, message)


def test_offloaded_arguments_are_not_device_bytes():
    compiled = jax.jit(lambda a: a + 1.0).lower(jax.ShapeDtypeStruct((256, 1024), jnp.float32))
    resident, offloaded = compile_for(compiled, "cpu"), compile_for(compiled, "cpu", offloaded=HostBytes(arguments=MIB))
    assert resident.argument - offloaded.argument == MIB
    assert resident.peak - offloaded.peak == MIB
