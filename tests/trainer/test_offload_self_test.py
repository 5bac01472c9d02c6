"""The offload self-test passes valid offloading, and stops at a wrong value or placement."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

from plimsoll.configs import load
from plimsoll.framework import layout
from plimsoll.framework.config import config_for
from plimsoll.framework.devices.executables import use_compilation_cache
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers import remat
from plimsoll.framework.layout import StateLayout
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.program.program import Program
from plimsoll.framework.run import offload_self_test
from plimsoll.framework.schedules import chunked_update
from plimsoll.framework.schedules.memory import Memory
from tests.support import small
from tests.support.runs import train
from tests.support.tiny import CACHE

OFFLOADED = {"optimizer_state": "pinned_host"}
STREAMED = {"update": "streamed", "gradients": "pinned_host", **OFFLOADED}
TWO_PASS = {"update": "in_backward", **OFFLOADED}
OFFLOAD = {"remat": "offload"}
PLACES = dict.fromkeys(("optimizer_state", "parameters", "gradients", "activations"), "pinned_host")
IN_LAYERS = {"update": "layer_programs", "remat": "full", **PLACES}
BFLOAT16 = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
FREEZE = config_for(Rule, pattern="query", freeze=True)
CASES: dict[str, tuple[Any, ...]] = {
    "offloaded state": (OFFLOADED,),
    "offloaded inputs": (OFFLOAD, {}, None, {"ema": 0.9}),
    "in the backward pass": (TWO_PASS, {}, None, {"clip_mode": "two_pass"}),
    "all of it": ({"update": "streamed", "remat": "full", **PLACES},),
    "in layers": (IN_LAYERS,),
    "in layers, some offloaded": (
        {**IN_LAYERS, "gradients": "none", "parameters": "pinned_host:1", "remat": "sqrt"},
        {},
        None,
        {"clip_mode": "update_rms"},
    ),
    "bfloat16, part frozen": (STREAMED, BFLOAT16, None, {"master_dtype": "float32", "rules": [FREEZE]}),
    "eight devices": ({**STREAMED, "remat": "sqrt:2"}, {}, {"data": 2, "fsdp": 2, "model": 2}, {"accumulate": 2}),
}


@pytest.fixture(autouse=True)
def shared_compile_cache() -> None:
    """Share the compilation cache, so that identical programs (such as the fully resident ones) compile once."""
    use_compilation_cache(CACHE)


def build_run(memory: Any, model: Any = None, mesh: Any = None, learner: Any = None) -> tuple[Any, Program]:
    """Return (config, program) of a run on one device, or on all eight.

    The minimum size of an offloaded leaf is lowered to 256 bytes.
    """
    config = small.experiment(small.llama(**(model or {})), mesh=mesh, memory=memory, **(learner or {}))
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        return config, small.program(config)


@pytest.mark.pairs
@pytest.mark.parametrize("case", CASES)
def test_self_test_passes(case: str) -> None:
    line = offload_self_test.check(*build_run(*CASES[case]))
    assert line.startswith("offload self-test: offloaded and resident agree to "), line
    assert float(line.split("agree to ")[1].split()[0]) < (1e-2 if "bfloat16" in case else 1e-5)


@pytest.mark.pairs
def test_no_self_test_without_offloading() -> None:
    assert offload_self_test.check(*build_run({})) == ""
    config = small.experiment(small.llama(), memory=OFFLOADED)
    assert offload_self_test.check(config, small.program(config)) == "", (
        "all of its leaves are too small to be offloaded"
    )


@pytest.mark.pairs
def test_reversible_flow_has_a_self_test() -> None:
    config = load("tests/support/tiny_images.py:flow")
    config.memory = config_for(Memory, remat="invert", **STREAMED)
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        program = Program(config.instantiate(), jax.devices()[:1])
    line = offload_self_test.check(config, program)
    assert line.startswith("offload self-test: offloaded and resident agree to "), line
    assert float(line.split("agree to ")[1].split()[0]) < 1e-4


@pytest.mark.parametrize("memory", [OFFLOADED, STREAMED])
def test_self_test_offloads_like_the_run(memory: dict[str, Any]) -> None:
    config, program = build_run(memory)
    ours = Program(offload_self_test.shrink_config(config, program).instantiate(), jax.devices()[:1])
    offloaded = [{leaf.group for leaf in p.layout if leaf.spec.is_offloaded} for p in (program, ours)]
    assert offloaded[0] == offloaded[1] != set()


def test_reports_when_it_cannot_run() -> None:
    """The self-test reports that it did not run; the run itself then reports the error."""
    line = offload_self_test.check(*build_run(TWO_PASS, {}, None, {"clip_mode": "global_norm"}))
    message = "did not run, so offloading is not checked: learner.clip_mode = global_norm with "
    assert line.startswith(f"offload self-test: {message}")


@pytest.mark.pairs
def test_wrong_gradient_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reproduce openxla/xla#46231: the backward pass gets back values that differ from the offloaded ones."""

    @jax.custom_vjp
    def scale_gradient(x: jax.Array) -> jax.Array:
        return x

    scale_gradient.defvjp(lambda x: (x, None), lambda _, ct: (0.9 * ct,))
    tag = remat.tag
    monkeypatch.setattr(remat, "tag", lambda tree, name: tag(jax.tree.map(scale_gradient, tree), name))
    with pytest.raises(
        offload_self_test.SelfTestError, match=r"#46231\): optimizer/.* differs by .*tolerance 0.001.*as do [1-9]"
    ):
        offload_self_test.check(*build_run(OFFLOAD))


@pytest.mark.pairs
@pytest.mark.parametrize(("memory", "module"), [(OFFLOADED, layout.table), (STREAMED, chunked_update)])
def test_wrong_transfer_is_detected(monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], module: Any) -> None:
    fetch = module.fetch_leaf
    monkeypatch.setattr(module, "fetch_leaf", lambda spec, x: fetch(spec, x) * (1 - 0.01 * (spec.is_offloaded)))
    with pytest.raises(offload_self_test.SelfTestError, match=r" of a small model differs by"):
        offload_self_test.check(*build_run(memory))


@pytest.mark.pairs
def test_misplaced_leaf_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    config, program = build_run(OFFLOADED)
    right = StateLayout.sharding
    lost = "optimizer/embed/default/state/0/trace/token"
    monkeypatch.setattr(
        StateLayout,
        "sharding",
        lambda self, spec: (
            right(self, spec).with_memory_kind("device")
            if getattr(spec, "owner", None) == "token"
            else right(self, spec)
        ),
    )
    with pytest.raises(
        offload_self_test.SelfTestError, match=f"not offloaded on these devices: {lost} is in device; the layout says"
    ):
        offload_self_test.check(config, program)


@pytest.mark.first(1)
@pytest.mark.parametrize("memory", [OFFLOADED, IN_LAYERS])
def test_misplaced_argument_is_detected(monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]) -> None:
    """The CPU compiler reports 0 bytes of host arguments; on other backends this means that the placement was lost."""
    monkeypatch.setattr(offload_self_test.jax, "default_backend", lambda: "gpu")
    with pytest.raises(
        offload_self_test.SelfTestError, match=r"the compiled step takes 0 bytes from host memory; the layout has [1-9]"
    ):
        offload_self_test.check(*build_run(memory))


@pytest.mark.pairs
def test_launch_train_runs_the_self_test(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A start prints the self-test's line; a failure is a user error, reported before the step is compiled."""
    monkeypatch.setitem(layout.move_to_host.__kwdefaults__, "min_bytes", 256)
    flags = "--config.memory.optimizer_state=pinned_host", "--dry_run"
    assert train(tmp_path / "run", *flags) == 0
    lines = "offload self-test: offloaded and resident agree.*dry run: the step compiles"
    assert re.search(lines, output(capfd), re.DOTALL)
    fetch = layout.fetch_leaf
    monkeypatch.setattr(layout.table, "fetch_leaf", lambda spec, x: fetch(spec, x) * (1 - 0.01 * (spec.is_offloaded)))
    assert train(tmp_path / "run", *flags) == 2
    said = output(capfd)
    assert "error: offload self-test: offloaded values are computed wrong" in said
    assert "the step compiles" not in said
    assert train(tmp_path / "run", *flags, "--config.health.offload_self_test=false") == 0
    assert "self-test" not in output(capfd)


def output(capfd: Any) -> str:
    return "".join(capfd.readouterr())


@pytest.mark.parametrize("memory", [{"update": "streamed"}, {"update": "layer_programs", "gradients": "none"}])
@pytest.mark.parametrize("experts", ["pinned_host", "pinned_host:1"])
def test_dense_matrices_stand_in_for_experts(memory: dict[str, str], experts: str) -> None:
    model = small.llama(dim=64)
    small.block(model).mlp = mixture(experts=4, top_k=2, hidden=64)
    config = small.experiment(model, memory={**memory, "experts": experts}, clip=None)
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        program = small.program(config)
    ours = Program(offload_self_test.shrink_config(config, program).instantiate(), jax.devices()[:1])
    offloaded, standing_in = ({leaf.group for leaf in p.layout if leaf.spec.is_offloaded} for p in (program, ours))
    assert offloaded == standing_in != set()
    resident = {leaf.path for leaf in ours.layout if leaf.path.startswith("parameter/stack") and leaf.spec.size > 2**16}
    assert any(not leaf.spec.is_offloaded for leaf in ours.layout if leaf.path in resident) == (":" in experts)
