"""Summaries of traces: own times, kinds, layers, and the planes of each platform."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from plimsoll.framework.plan.trace_summary import TraceSummary, find_traces, summarize_trace
from plimsoll.launch import profile
from tests.support import runs

# A program of a loop with a product, a collective and a fusion without a name of its own.
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p, %p), metadata={op_name="jit(step)/transpose(jvp(stack))/mlp/add"}
}

ENTRY %main (a: f32[8,8], b: f32[8]) -> f32[8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %dot.1 = f32[8]{0} dot(%a, %b), metadata={op_name="jit(step)/jvp(stack)/attention/key/dot_general"}
  %all-reduce.1 = f32[8]{0} all-reduce(%dot.1), replica_groups={}, to_apply=%fused
  %while.1 = f32[8]{0} while(%all-reduce.1), condition=%fused, body=%fused
  ROOT %fusion.1 = f32[8]{0} fusion(%while.1), kind=kLoop, calls=%fused
}
"""


def build_profile(plane: str, lines: dict[str, list[tuple[str, int, int]]], *, stats: bool) -> Any:
    """Build a trace with one plane.

    Args:
        plane: name of the plane.
        lines: (name, start, duration) of the events by line, in microseconds.
        stats: whether the events have the stats hlo_op and hlo_module.
    """
    names = list(dict.fromkeys(name for events in lines.values() for name, _, _ in events))
    text = f'planes {{ name: "{plane}"\n'
    for key, stat in enumerate(("hlo_op", "hlo_module"), 1):
        text += f'stat_metadata {{ key: {key} value {{ id: {key} name: "{stat}" }} }}\n'
    for key, name in enumerate(names, 1):
        text += f'event_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}\n'
    for line, events in lines.items():
        text += f'lines {{ name: "{line}"\n'
        for name, start, duration in events:
            times = f"offset_ps: {start}000000 duration_ps: {duration}000000"
            text += f"events {{ metadata_id: {1 + names.index(name)} {times}\n"
            if stats:
                text += (
                    f'stats {{ metadata_id: 1 str_value: "{name}" }} stats {{ metadata_id: 2 str_value: "jit_step" }}'
                )
            text += "}\n"
        text += "}\n"
    return ProfileData.from_text_proto(text + "}\n")


def find(summary: TraceSummary, name: str):
    (operation,) = (operation for operation in summary.operations if operation.name == name)
    return operation


def test_own_times_layers_and_kinds():
    events = [
        ("while.1", 0, 100),
        ("dot.1", 10, 30),
        ("fusion.1", 50, 20),
        ("dot.1", 110, 10),
        ("all-reduce.1", 200, 5),
    ]
    summary = summarize_trace(build_profile("/host:CPU", {"thread": events}, stats=True), [PROGRAM])
    # The loop only waits for its body.
    assert [operation.name for operation in summary.operations] == ["dot.1", "fusion.1", "all-reduce.1"]
    dot, fusion, reduction = summary.operations
    assert (dot.count, dot.kind, dot.operation) == (2, "product", "stack/attention/key/dot_general, forward")
    assert dot.seconds == pytest.approx(40e-6)
    # A fusion without a name has that of its operations.
    assert (fusion.kind, fusion.operation) == ("other", "stack/mlp/add, backward")
    assert (reduction.kind, reduction.operation) == ("collective", "")
    assert summary.busy_seconds == pytest.approx(65e-6)
    assert summary.span_seconds == pytest.approx(195e-6)
    assert summary.num_devices == 1


def test_time_within_an_operation_is_not_its_own():
    events = [("outer.1", 0, 100), ("middle.1", 10, 50), ("inner.1", 20, 10), ("inner.1", 40, 5), ("late.1", 100, 7)]
    summary = summarize_trace(build_profile("/host:CPU", {"a": events, "b": [("other.1", 90, 30)]}, stats=True))
    microseconds = {operation.name: round(operation.seconds * 1e6) for operation in summary.operations}
    assert microseconds == {"outer.1": 50, "middle.1": 35, "inner.1": 15, "late.1": 7, "other.1": 30}
    # The two threads overlap.
    assert summary.busy_seconds == pytest.approx(120e-6)
    assert summary.total_seconds == pytest.approx(137e-6)


def test_a_tpus_operations_are_in_one_line():
    lines = {
        "XLA Modules": [("jit_step(1)", 0, 100)],
        "XLA Ops": [("%dot.1 = f32[8]{0} dot(%a, %b)", 0, 60), ("%fusion.1 = f32[8]{0} fusion(%c)", 60, 40)],
        "Steps": [("0", 0, 100)],
    }
    summary = summarize_trace(build_profile("/device:TPU:0", lines, stats=False), [PROGRAM])
    assert {operation.name: round(operation.seconds * 1e6) for operation in summary.operations} == {
        "dot.1": 60,
        "fusion.1": 40,
    }
    assert find(summary, "dot.1").operation == "stack/attention/key/dot_general, forward"


def test_a_gpus_kernels_and_copies():
    lines = {"Stream #1": [("MemcpyH2D", 0, 5), ("ncclDevKernel_AllReduce", 5, 7), ("sm90_gemm_f16", 12, 20)]}
    summary = summarize_trace(build_profile("/device:GPU:0", lines, stats=False))
    kinds = {operation.name: operation.kind for operation in summary.operations}
    assert kinds == {"MemcpyH2D": "copy", "ncclDevKernel_AllReduce": "collective", "sm90_gemm_f16": "product"}


def test_a_real_trace_counts_every_execution(tmp_path: Path):
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("wide"):
            x = x @ x
        # A loop of five iterations, each with one product.
        return jax.lax.fori_loop(0, 5, lambda i, y: jnp.sin(y @ y), x)

    x = jnp.eye(256)
    compiled = step.lower(x).compile()
    compiled(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            compiled(x).block_until_ready()
    (path,) = find_traces(tmp_path)
    text = compiled.as_text()
    assert text is not None
    summary = summarize_trace(ProfileData.from_file(str(path)), [text])
    counts = {operation.operation: operation.count for operation in summary.operations if operation.kind == "product"}
    assert counts["wide/dot_general, forward"] == 3
    assert 15 in counts.values()
    assert 0 < summary.busy_seconds <= summary.span_seconds


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text; $TINY_TEXT is restored afterwards."""
    monkeypatch.setenv("TINY_TEXT", "")
    return runs.write_text(tmp_path / "text")


def test_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = [
        f"--config={runs.CONFIG}:tiny",
        f"--out={tmp_path / 'out'}",
        "--config.mesh.fsdp=4",
        "--config.mesh.data=2",
    ]
    flags.append("--config.model.vocab_size=264")
    assert profile.main([*flags, "--steps=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layers = [operation["operation"] for operation in found["operations"]]
    for name in ("stack/attention/", "stack/mlp/", "head/"):
        assert any(layer.startswith(name) for layer in layers), name
    kinds = {operation["kind"] for operation in found["operations"]}
    assert kinds >= {"product", "collective"}
    assert Path(found["trace"]).is_file()
    # The step computes 256 tokens.
    assert found["tokens_per_second"] == pytest.approx(256 / found["step_seconds"])
    # The same trace again, without the program: the same operations and times.
    assert profile.main([f"--trace={tmp_path / 'out'}", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["span_seconds"] == found["span_seconds"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace=nowhere"], "--trace: nowhere does not exist"),
        (["--trace=."], "holds no trace"),
        (["--trace=bad.xplane.pb"], "is not a trace of jax.profiler"),
        (["--trace=.", "--steps=3"], "--steps does not go with --trace"),
        ([], "--config=NAME is required"),
        (["--config=nanogpt-cpu", "--steps=0"], "--steps=0: expected at least 1"),
        (["--config=nanogpt-cpu", "--config.model.dimm=3"], "no such field"),
        (["--config=nanogpt-cpu", "--config.memory.auto=true"], "memory.auto is set"),
    ],
)
def test_what_is_refused(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    if "--trace=." not in flags:
        Path("bad.xplane.pb").write_bytes(b"\xff\x00 no trace")
    assert profile.main(flags) == 2
    assert message in capsys.readouterr().err
    assert not Path("profile").exists()
