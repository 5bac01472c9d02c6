"""Limits on host memory: the variable set before JAX starts, and refusals before anything is compiled."""

import functools
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework import layout
from plimsoll.framework.devices import accelerators
from plimsoll.framework.devices.accelerators import GIB, HOST_LIMIT, get_machine_memory_bytes
from plimsoll.framework.plan import memory_budget
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.exit_codes import DoesNotFitError
from plimsoll.launch import cli
from tests.support import runs, small

# Two moments in float32: per layer 32 x 32 for queries and outputs, 32 x 16 for keys and values, three times 32 x 48.
STATE = 2 * 4 * (2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program with offloaded optimizer state on eight devices, one copy each."""
    monkeypatch.setitem(layout.move_to_host.__kwdefaults__, "min_bytes", 256)
    memory = {"optimizer_state": "pinned_host"}
    return small.program(small.experiment(small.llama(), mesh={"data": 8, "fsdp": 1}, memory=memory))


def test_the_limit_is_set_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_LIMIT, "")  # so that monkeypatch restores it afterwards
    monkeypatch.delenv(HOST_LIMIT)
    monkeypatch.setattr(accelerators, "get_machine_memory_bytes", lambda: 2000 * GIB)
    cli.prepare_jax()
    assert cli.os.environ[HOST_LIMIT] == "1800"
    monkeypatch.setenv(HOST_LIMIT, "7")
    cli.prepare_jax()
    assert cli.os.environ[HOST_LIMIT] == "7", "the user's own stays"


@pytest.mark.parametrize(("said", "bytes_"), [("max\n", 5 * 2**40), ("1073741824\n", GIB), (None, 5 * 2**40)])
def test_container_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None, bytes_: int) -> None:
    monkeypatch.setattr(accelerators.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 5 * 2**28}.__getitem__)
    monkeypatch.setattr(accelerators, "Path", lambda path: tmp_path / path.removeprefix("/"))
    if said is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(said)
    assert get_machine_memory_bytes() == bytes_


def test_plan_that_exceeds_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    offloaded = 8 * program.layout.bytes_per_device(memory_kind="pinned_host")
    assert offloaded == 8 * STATE
    monkeypatch.setenv(HOST_LIMIT, "0")
    text = r"config.memory offloads 1.19 MiB to host memory \(optimizer 1.19 MiB\), but "
    with pytest.raises(ValueError, match=text + f"{HOST_LIMIT}=0 lets XLA pin 0 B; set it to 1 or unset it"):
        memory_budget.check_host(program, "gpu")
    memory_budget.check_host(program, "tpu")  # only GPUs have that limit
    memory_budget.check_host(program)  # on a CPU, host memory is the device memory
    monkeypatch.setenv(HOST_LIMIT, "1")
    memory_budget.check_host(program, "gpu")
    for memory_bytes, fits in ((offloaded - 1, False), (offloaded, True)):
        monkeypatch.setattr(memory_budget, "get_machine_memory_bytes", lambda memory_bytes=memory_bytes: memory_bytes)
        for platform in ("gpu", "tpu"):
            if fits:
                memory_budget.check_host(program, platform)
                continue
            with pytest.raises(
                DoesNotFitError, match=text + "this machine has 1.19 MiB; increase mesh.fsdp.* or offload fewer layers"
            ):
                memory_budget.check_host(program, platform)


@pytest.mark.pairs
def test_a_run_is_refused_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, program: Program
) -> None:
    monkeypatch.setenv("TINY_TEXT", "")
    runs.write_text(tmp_path / "text")
    monkeypatch.setenv(HOST_LIMIT, "0")
    monkeypatch.setattr(memory_budget, "check_host", functools.partial(memory_budget.check_host, platform="gpu"))
    monkeypatch.setattr(memory_budget, "measure_need", lambda _: pytest.fail("compiled"))
    assert runs.train(tmp_path / "run", "--config.memory.optimizer_state=pinned_host") == 2
    assert f"but {HOST_LIMIT}=0 lets XLA pin 0 B; set it to 1 or unset it" in "".join(capfd.readouterr())
    monkeypatch.setattr(memory_budget, "get_machine_memory_bytes", lambda: 1)
    assert runs.train(tmp_path / "run", "--config.memory.optimizer_state=pinned_host") == 4
    assert "but this machine has 1 B; increase mesh.fsdp" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
