"""The programs that the compilers for TPUs and GPUs make of 8-bit products."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.plan import targets
from plimsoll.framework.program.program import Program
from tests.support import small

NO_CUDA = "no CUDA plugin of JAX: pip install 'plimsoll-train[plan-gpu]'"
LAYERS, VOCAB = 4, 64
# For the head's products: four chunks of positions.
LARGE_VOCAB = 8192
ROWS, LENGTH = 2, 2048
DIM, HIDDEN = 2048, 4096


@cache
def compile_step(target: str, recipe: str) -> Any:
    """Compile a step of four Llama layers that saves what its products need, with two rows for each device."""
    targets.set_environment(target)
    model = llama_model(layers=LAYERS, heads=16, kv_heads=8, dim=DIM, hidden=HIDDEN, vocab_size=VOCAB)
    model.param_dtype = model.compute_dtype = "bfloat16"
    if recipe:
        model.precision = {"stack/": recipe}
    devices = targets.resolve(target).devices()
    options: dict[str, Any] = {"batch": ROWS * len(devices), "mesh": {"fsdp": len(devices)}}
    experiment = small.experiment(model, seq_len=LENGTH, memory={"remat": "none"}, **options).instantiate()
    return Program(experiment, devices).backend.compiled_step


@cache
def compile_head(target: str, recipe: str) -> Any:
    """Compile a step of one layer whose head computes a large vocabulary, in four chunks."""
    targets.set_environment(target)
    model = llama_model(layers=1, heads=16, kv_heads=8, dim=DIM, hidden=HIDDEN, vocab_size=LARGE_VOCAB)
    model.param_dtype = model.compute_dtype = "bfloat16"
    if recipe:
        model.precision = {"^head$": recipe}
    devices = targets.resolve(target).devices()
    options: dict[str, Any] = {"batch": ROWS * len(devices), "mesh": {"fsdp": len(devices)}}
    config = small.experiment(model, seq_len=LENGTH, memory={"remat": "none"}, **options)
    config.data.tokenizer.vocab_size = LARGE_VOCAB
    return Program(config.instantiate(), devices).backend.compiled_step


def find_loop_lines(text: str, line: str) -> list[str]:
    """Return the lines of a program's loop bodies that match a regex, for loops that multiply hidden states."""
    bodies = re.findall(r"^%\S+ \(arg_tuple[^\n]*\n(.*?)^}", text, re.MULTILINE | re.DOTALL)
    return [one for body in bodies if "jvp(head)" in body for one in body.splitlines() if re.search(line, one)]


def find_products(text: str, opcodes: str) -> list[str]:
    """Return the types of the results of matrix products, such as bf16[64,2048]."""
    return re.findall(rf"= (\w+\[[\d,]*\])\S* (?:{opcodes})\(", text)


def find_saved_stacks(text: str) -> set[str]:
    """Return the types of the 8-bit arrays with an axis of layers: what goes from one loop over layers to another."""
    return set(re.findall(rf"\b(?:s8|u8|f8\w+)\[{LAYERS},[\d,]+\]", text))


SAVED = {f"u8[{LAYERS},{ROWS},{LENGTH},{DIM}]", f"u8[{LAYERS},{ROWS},{LENGTH},{HIDDEN}]"}


@pytest.mark.pairs
def test_integers_on_tpus():
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    text = compile_step("v5e-1", "int8_row").as_text()
    products = find_products(text, "convolution|dot")
    # Seven projections, forward and backward.
    assert sum(product.startswith("s32") for product in products) == 3 * 7
    others = [product for product in products if not product.startswith("s32")]
    # The head's logits and their two gradients are the only others: attention is a kernel.
    assert len(others) == 3
    assert find_saved_stacks(text) == SAVED
    plain = compile_step("v5e-1", "")
    assert find_saved_stacks(plain.as_text()) == set()
    assert compile_step("v5e-1", "int8_row").memory_analysis().temp_size_in_bytes < (
        plain.memory_analysis().temp_size_in_bytes
    )


@pytest.mark.pairs
def test_integers_of_the_head_on_tpus():
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    text = compile_head("v5e-1", "int8_row").as_text()
    products = find_products(text, "convolution|dot")
    # The logits and the gradients of hidden states and table.
    assert sum(product.startswith("s32") for product in products) == 3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row"])
def test_floats_of_the_head_on_gpus(recipe: str):
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    text = compile_head("h100", recipe).as_text()
    head_products = re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"[^\n]*op_name="[^"]*\(head\)', text)
    assert len(head_products) == 3
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    # The table is rounded and transposed before the loop over chunks.
    table = rf"= f8e4m3fn\[({LARGE_VOCAB},{DIM}|{DIM},{LARGE_VOCAB})\]\S* (fusion|copy|transpose|convert)\("
    assert re.search(table, text)
    assert find_loop_lines(text, r"__cublas\$lt\$matmul\$f8")
    assert find_loop_lines(text, table) == []
    if recipe == "fp8_tensor":
        # The gradients of the group's logits are saved as 8-bit numbers.
        plain = compile_head("h100", "").memory_analysis().temp_size_in_bytes
        assert compile_head("h100", recipe).memory_analysis().temp_size_in_bytes < plain


@pytest.mark.slow
def test_gpus_gather_8_bit_tables():
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    text = compile_head("h100x8", "fp8_tensor").as_text()
    gathers = " ".join(re.findall(r"= (\S.*?) all-gather(?:-start)?\(", text))
    assert re.search(rf"\b(u8|f8e4m3fn)\[{LARGE_VOCAB},{DIM}\]", gathers)
    assert f"bf16[{LARGE_VOCAB},{DIM}]" not in gathers


@pytest.mark.slow
def test_blocks_on_gpus():
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    text = compile_step("b200", "mxfp8").as_text()
    # At least once for each product: XLA may unroll a loop.
    assert text.count('custom_call_target="__cudnn$blockScaledDot"') >= 3 * 7
    # The head's products.
    assert len(find_products(text, "dot")) == 3
    assert not re.findall(r'custom_call_target="[^"]*cublas[^"]*"', text)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "b200", "rtx4090"])
def test_large_blocks_on_gpus(target: str):
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    compiled = compile_step(target, "fp8_block")
    text = compiled.as_text()
    calls = re.findall(r"custom-call\(.*/fp8_block_(\w+)/\w+_call", text)
    # At least once for each product: XLA may unroll a loop.
    assert calls.count("product") >= 3 * 7
    # Shared inputs, their cotangents, and each weight for y and for the gradient of x.
    assert calls.count("rounding") >= 4 + 7 + 2 * 7
    # The head's products.
    assert len(find_products(text, "dot")) == 3
    assert not re.findall(r'custom_call_target="[^"]*cublas[^"]*"', text)
    assert not re.findall(r"f8e4m3fn\[[\d,]*\]\S* (?:transpose|copy)\(", text)
    # Values and scales of the inputs of four groups of products.
    tokens = ROWS * LENGTH
    saved = {f"u8[{LAYERS},{size},{tokens // width}]" for size in (DIM, HIDDEN) for width in (1, 128)}
    assert find_saved_stacks(text) == saved
    assert compiled.memory_analysis().temp_size_in_bytes < (
        compile_step(target, "").memory_analysis().temp_size_in_bytes
    )


@pytest.mark.slow
def test_large_blocks_are_multiplied_in_8_bits_on_hopper(tmp_path: Path):
    """In the instructions of the kernels: without the attribute that the kernel sets, these multiply float16."""
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    script = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from plimsoll.framework.layers.block_kernels_gpu import multiply_blocks
from plimsoll.framework.plan import targets
targets.set_environment("h100")
sharding = SingleDeviceSharding(targets.resolve("h100").devices()[0])
shapes = [((512, 1024), "float8_e4m3fn"), ((512, 8), "float32"), ((256, 1024), "float8_e4m3fn"), ((2, 8), "float32")]
arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
jax.jit(lambda *arrays: multiply_blocks(*arrays, jnp.bfloat16)).lower(*arrays).compile()
"""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path}"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=300)
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    products = set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\S*", text))
    assert products == {"wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_delayed", "fp8_row"])
def test_floats_on_gpus(recipe: str):
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    text = compile_step("h100", recipe).as_text()
    # XLA joins products with the same factor: those of query, key and value and of gate and up, forward and for the
    # gradients of their weights.
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3 * 7 - 2 * 3
    # The head's products.
    assert len(find_products(text, "dot")) == 3
    assert set(re.findall(r'custom_call_target="([^"]*(?:cublas|triton)[^"]*)"', text)) == {"__cublas$lt$matmul$f8"}
    # No transposed 8-bit array is saved for the backward pass.
    assert find_saved_stacks(text) == SAVED
    plain = compile_step("h100", "").memory_analysis().temp_size_in_bytes
    assert compile_step("h100", recipe).memory_analysis().temp_size_in_bytes < plain


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dtype"), [("fp8_tensor", "u8"), ("fp8_row", "bf16")])
def test_what_gpus_gather(recipe: str, dtype: str):
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    text = compile_step("h100x8", recipe).as_text()
    # Each gather returns its operands, of one device, and the whole arrays.
    gathers = " ".join(re.findall(r"= (\S.*?) all-gather(?:-start)?\(", text))
    for shape in (f"{DIM},{HIDDEN}", f"{DIM},{DIM}", f"{DIM},{DIM // 2}"):
        assert f"{dtype}[{shape}]" in gathers
    assert ("u8[" in gathers) == (dtype == "u8")
    assert f"bf16[{DIM},{HIDDEN}]" not in gathers or dtype == "bf16"
