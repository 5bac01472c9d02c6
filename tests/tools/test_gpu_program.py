"""The program that XLA makes of a step on a GPU: a recorded program, a cuBLAS matmul, and command-line mistakes."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.plan.hlo import Module
from plimsoll.framework.plan.step_time.device_rates import load_rates
from plimsoll.framework.plan.step_time.gpu_time import GpuKernel, GpuRates, gpu_time, read_step
from plimsoll.framework.plan.step_time.tpu_time import StepProgram
from tools.bench import gpu_program, step_programs
from tools.bench.step_programs import CompiledStep, StepInfo

# The program of jax 0.10.2 for h100x2: a step of four layers x + gelu(attention(x @ w)), with causal cuDNN attention of
# 8 heads of 64, float32 weights [4, 512, 512] sharded over two GPUs and bfloat16 x [4, 256, 512], and an update by the
# gradient of the sum of squares. Each backend_config contains only the fields that we read.
RECORDED = Path(__file__).parents[1] / "plan" / "recorded" / "h100_step.txt"
LAYERS, ROWS, DIM = 4, 2 * 256, 512
SCORES = 2 * 8 * 256 * 256  # batch, heads, queries, keys of one GPU
H100 = GpuRates.look_up(spec_for("h100"))


def step(text: str, runs: int = 1) -> CompiledStep:
    return CompiledStep(StepInfo("small", "h100x2", "h100"), [StepProgram(Module(text), runs)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a saved step."""
    path = tmp_path / "step"
    path.mkdir()
    (path / "hlo.txt").write_text(RECORDED.read_text())
    about = StepInfo("small", "h100x2", "h100", tokens=512, model_flops=1e9, peak_bytes=2**20)
    (path / step_programs.META).write_text(json.dumps(asdict(about)))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = gpu_program.main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def filter_category(kernels: list[GpuKernel], kind: str) -> list[GpuKernel]:
    return [one for one in kernels if one.category == kind]


def test_products_and_attention_match_the_program() -> None:
    kernels = read_step(step(RECORDED.read_text()).parts, H100).kernels
    products, attention = filter_category(kernels, "matmul"), filter_category(kernels, "attention")
    assert {(one.maker, one.dtype) for one in products} == {("Triton", "bf16")}
    assert {(one.maker, one.dtype) for one in attention} == {("cuDNN", "bf16")}
    assert sum(one.runs * one.flops for one in products) == LAYERS * 3 * 2 * ROWS * DIM * DIM
    # Two matmuls forward and five backward, with heads of 64; the causal mask halves each.
    assert sum(one.runs * one.flops for one in attention) == LAYERS * (2 + 5) * 2 * SCORES * 64 // 2
    assert all(one.runs == LAYERS for one in products + attention)
    assert all(one.seconds >= one.flops / 989.5e12 for one in products)
    (update,) = (one for one in kernels if one.op_name == "jit(step)/sub")
    assert update.hbm_bytes == 3 * LAYERS * DIM * DIM // 2 * 4  # weights and gradients read, weights written
    assert update.seconds == update.hbm_bytes / 3352e9


def test_collective_is_hidden_only_by_concurrent_kernels() -> None:
    first, second = read_step(step(RECORDED.read_text(), runs=3).parts, H100).overlaps
    assert (first.collective.kind, second.collective.kind) == ("all-gather", "reduce-scatter")
    assert [one.collective.runs for one in (first, second)] == [3 * LAYERS] * 2
    assert first.collective.bytes_received == DIM * DIM // 2 * 2  # the other GPU's half, in bfloat16
    assert first.seconds == first.collective.bytes_received / 450e9
    assert 0 < first.overlapped_seconds < first.seconds < second.overlapped_seconds


@pytest.mark.parametrize(
    ("name", "pairs", "channels"),
    [
        ("flash_attention_forward", 64 * 96, 192 + 128),
        # Query i sees keys up to 32 + i.
        ("flash_attention_backward_queries_causal", 64 * 32 + 64 * 65 // 2, 2 * 192 + 128),
        ("flash_attention_backward_keys_window_40", 40 * 64 - 7 * 8 // 2, 2 * 192 + 2 * 128),
    ],
)
def test_triton_attention(name: str, pairs: int, channels: int) -> None:
    text = f"""
ENTRY %main (q: bf16[2,6,64,192], k: bf16[2,3,96,192], v: bf16[2,3,96,128]) -> bf16[2,6,64,128] {{
  %q = bf16[2,6,64,192]{{3,2,1,0}} parameter(0)
  %k = bf16[2,3,96,192]{{3,2,1,0}} parameter(1)
  %v = bf16[2,3,96,128]{{3,2,1,0}} parameter(2)
  ROOT %call = bf16[2,6,64,128]{{3,2,1,0}} custom-call(%q, %k, %v), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="jit(step)/transpose(jvp({name}))/pallas_call"}}
}}
"""  # noqa: E501
    (kernel,) = read_step(step(text).parts, H100).kernels
    assert (kernel.category, kernel.maker, kernel.dtype) == ("attention", "Triton", "bf16")
    assert kernel.flops == 2 * 2 * 6 * pairs * channels


def test_triton_attention_takes_longer_than_that_of_cudnn() -> None:
    text = """
ENTRY %main (q: bf16[2,8,4096,128], k: bf16[2,8,4096,128], v: bf16[2,8,4096,128]) -> bf16[2,8,4096,128] {
  %q = bf16[2,8,4096,128]{3,2,1,0} parameter(0)
  %k = bf16[2,8,4096,128]{3,2,1,0} parameter(1)
  %v = bf16[2,8,4096,128]{3,2,1,0} parameter(2)
  ROOT %call = bf16[2,8,4096,128]{3,2,1,0} custom-call(%q, %k, %v), custom_call_target="TARGET", metadata={op_name="SCOPE"}, backend_config={"intermediate_tensor_shape":{"dimensions":["2","8","4096","4096"]}}
}
"""  # noqa: E501
    triton = text.replace("TARGET", "__gpu$xla.gpu.triton").replace("SCOPE", "/flash_attention_forward/pallas_call")
    cudnn = text.replace("TARGET", "__cudnn$fmhaSoftmax")
    spec = spec_for("h100")
    rates = load_rates(spec, 1)
    assert rates is not None
    seconds = [gpu_time(Module(program), spec, rates).products for program in (triton, cudnn)]
    assert seconds[0] == pytest.approx(seconds[1] * 0.7 / 0.4)


def test_cublas_product() -> None:
    text = """
ENTRY %main (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %gemm = (bf16[64,16]{1,0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501
    (kernel,) = read_step(step(text).parts, H100).kernels
    assert (kernel.category, kernel.maker, kernel.dtype) == ("matmul", "cuBLAS", "bf16")
    assert kernel.flops == 2 * 64 * 32 * 16


def test_saved_step(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, text = run(capsys, "--program", folder, "--top=3", "--against", folder)
    assert code == 0
    for words in ("990 TFLOP/s in bfloat16", "matmul", "cuDNN", "reduce-scatter", "async", "ideal", "side by side"):
        assert words in text
    matmul = next(line for line in text.partition("side by side")[2].splitlines() if "matmul" in line)
    assert matmul.split()[-1] == "1.000"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--program=x", "h100"], "expected a target and --config"),
        (["h100"], "--config=NAME is required"),
        (
            ["v5e-4", "--config=gpt2-124m"],
            "v5e: expected a GPU with bandwidth and bfloat16 and TF32 peaks in framework/devices/",
        ),
        (["h101", "--config=gpt2-124m"], "unknown target 'h101'"),
        (["--program=nowhere"], "no compiled step in nowhere"),
    ],
)
def test_user_errors(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    code, text = run(capsys, *argv)
    assert code == 2
    assert words in text
    assert "Traceback" not in text
