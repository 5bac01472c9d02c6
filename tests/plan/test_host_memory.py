"""Host memory: the limits of a machine, what a run needs by phase, and refusals before anything is compiled."""

import functools
import math
import resource
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework import layout
from plimsoll.framework.devices import environment, host
from plimsoll.framework.devices.accelerators import GIB, HOST_LIMIT, MIB
from plimsoll.framework.devices.host import get_free_memory_bytes, get_machine_memory_bytes
from plimsoll.framework.plan import host_memory, memory_budget
from plimsoll.framework.plan.host_memory import Host, HostMemoryModel
from plimsoll.framework.plan.plan_report import HostReport, PhaseReport
from plimsoll.framework.program.program import Program
from plimsoll.framework.run import train as run_train
from plimsoll.launch import cli
from tests.support import runs, small

# Two moments in float32: per layer 32 x 32 for queries and outputs, 32 x 16 for keys and values, three times 32 x 48.
STATE = 2 * 4 * (2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48))
PROCESS = 100 * MIB


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program with offloaded optimizer state on eight devices, one copy each."""
    monkeypatch.setitem(layout.move_to_host.__kwdefaults__, "min_bytes", 256)
    memory = {"optimizer_state": "pinned_host"}
    return small.program(small.experiment(small.llama(), mesh={"data": 8, "fsdp": 1}, memory=memory))


def build_model(
    program: Program, limit: int | None = None, num_here: int = 1, platform: str = "gpu"
) -> HostMemoryModel:
    return HostMemoryModel(program.experiment, program.layout, platform, 8, 1, Host(limit, num_here, PROCESS))


def predict(program: Program, limit: int | None = None, num_here: int = 1, platform: str = "gpu") -> HostReport:
    model = build_model(program, limit, num_here, platform)
    return model.report(model.checkpoint_peaks())


def _count_batch_bytes(program: Program) -> int:
    return sum(
        math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in program.experiment.data.arrays().values()
    )


# --- the machine's limits --------------------------------------------------------------------------------------------


def test_the_limit_is_set_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_LIMIT, "")  # so that monkeypatch restores it afterwards
    monkeypatch.delenv(HOST_LIMIT)
    monkeypatch.setattr(host, "get_free_memory_bytes", lambda: 2000 * GIB)
    cli.prepare_jax()
    assert cli.os.environ[HOST_LIMIT] == "1997", "2.5 GiB are left to Python, libraries and programs"
    monkeypatch.delenv(HOST_LIMIT)
    monkeypatch.setattr(host, "get_free_memory_bytes", lambda: 4 * GIB)
    environment.prepare_jax()
    assert cli.os.environ[HOST_LIMIT] == "2", "at least half"
    monkeypatch.setenv(HOST_LIMIT, "7")
    environment.prepare_jax()
    assert cli.os.environ[HOST_LIMIT] == "7", "the user's own stays"


@pytest.mark.parametrize(("said", "bytes_"), [("max\n", 5 * 2**40), ("1073741824\n", GIB), (None, 5 * 2**40)])
def test_container_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None, bytes_: int) -> None:
    monkeypatch.setattr(host.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 5 * 2**28}.__getitem__)
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / path.removeprefix("/"))
    if said is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(said)
    assert get_machine_memory_bytes() == bytes_


@pytest.mark.parametrize(
    ("groups", "folder", "names"),
    [
        ("0::/job_7/step_0\n", "sys/fs/cgroup/job_7", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpuset:/other\n4:memory:/uid_0/job_7/step_0\n0::/\n",
            "sys/fs/cgroup/memory/uid_0/job_7",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_limits_of_outer_control_groups_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, folder: str, names: tuple[str, str, str]
) -> None:
    """SLURM and systemd limit a group around that of the process, below the root that the process sees."""
    limit_name, usage_name, cache_name = names
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    job = tmp_path / folder
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / limit_name).write_text("max\n")
    (job / limit_name).write_text("1000000\n")
    (job / usage_name).write_text("700000\n")
    (job / "memory.stat").write_text(f"{cache_name} 150000\n")
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / str(path).removeprefix("/"))
    assert get_machine_memory_bytes() == 1000000
    assert get_free_memory_bytes() == 450000


@pytest.mark.parametrize("kind", [resource.RLIMIT_RSS, resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_limits_of_the_process(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """`ulimit -m`, `-v` and `-d`."""
    limit = host.rss_bytes() + GIB
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(host.resource, "getrlimit", lambda asked: (limit, limit) if asked == kind else unlimited)
    assert get_machine_memory_bytes() == limit
    assert GIB - 64 * MIB < get_free_memory_bytes() <= GIB


# --- what a run needs ------------------------------------------------------------------------------------------------


def test_the_parts_of_every_phase(program: Program) -> None:
    """Counted by hand: the process, the offloaded state of all devices, the batches, and what a checkpoint needs."""
    offloaded = 8 * STATE
    leaves = [leaf for leaf in program.layout if leaf.group != "gradient"]
    saved = sum(leaf.spec.num_bytes for leaf in leaves)
    report = predict(program, limit=64 * GIB)
    assert list(report.phases) == ["start", "compile", "restore", "save", "end", "export"]
    assert report.phases["start"] == {"Python and libraries": PROCESS}
    assert report.phases["compile"] == {"Python and libraries": PROCESS, "compiler": 5 * GIB}
    save = report.phases["save"]
    assert save["offloaded state"] == offloaded
    assert save["writing the checkpoint"] == saved // 8 * 8
    # Tokens and segments as int32: [4, 16] each; two prefetched batches, one in use, one being prepared.
    batch = _count_batch_bytes(program)
    assert save["batches"] == 4 * batch
    assert sum(save.values()) == PROCESS + 512 * MIB + offloaded + saved // 8 * 8 + 4 * batch
    # Everything that a process holds passes through it at most once: the state is smaller than the buffer.
    passing = 8 * (program.layout.bytes_per_device(memory_kind="device") + STATE)
    assert report.phases["restore"]["reading the checkpoint"] == passing
    # An export starts a process of its own, which reads the weights only.
    assert report.phases["export"] == {"Python and libraries": PROCESS, "reading the checkpoint": 256 * MIB}


def test_memory_of_cpu_devices_is_host_memory(program: Program) -> None:
    model = build_model(program, limit=64 * GIB, platform="cpu")
    report = model.report(model.checkpoint_peaks() | {"train": PhaseReport(10 * MIB, STATE + MIB)})
    assert report.phases["train"]["memory of the devices"] == 80 * MIB
    assert report.phases["train"]["activations and temporaries"] == 8 * MIB
    weights = sum(leaf.spec.num_bytes for leaf in program.layout if leaf.group == "parameter")
    assert report.phases["export"]["memory of the devices"] == weights, "of the whole model, in one process"
    # A copy is written while the next steps run, so it comes on top of them.
    assert report.phases["save"]["memory of the devices"] == 80 * MIB
    assert report.phases["save"]["writing the checkpoint"] > 8 * MIB
    # To draw a sample, offloaded weights are moved to the devices, next to the state.
    offloaded_weights = program.layout.bytes_per_device("parameter", "pinned_host")
    device_bytes = program.layout.bytes_per_device(memory_kind="device")
    assert report.phases["end"]["memory of the devices"] == 8 * (device_bytes + offloaded_weights)


def test_a_large_run_on_cpus_does_not_compile_next_to_its_state(program: Program) -> None:
    model = build_model(program, limit=64 * GIB, platform="cpu")
    for step_bytes, phases in ((10 * MIB, ["train", "end"]), (GIB, ["end"])):
        report = model.report(model.checkpoint_peaks() | {"train": PhaseReport(step_bytes, STATE)})
        compiling = [name for name, parts in report.phases.items() if "compiler" in parts]
        assert compiling == ["compile", *phases]
    assert report.peak_phase == "save", "of the large run: a copy is written while the next steps run"


def test_a_save_that_has_no_room_goes_through_a_window(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    base = PROCESS + 512 * MIB + 8 * STATE + 4 * _count_batch_bytes(program)
    copied = host_memory.save_window.count_copied_bytes(program.layout, program.backend.parts, 8, "gpu")
    room = base + copied + GIB
    assert build_model(program, room).window_bytes is None
    assert build_model(program, room - 1).window_bytes == (copied + GIB - 1) // 4
    assert predict(program, room - 1).phases["save"]["writing the checkpoint"] <= copied
    # With several processes on the machine, each has its share.
    assert build_model(program, 2 * room, num_here=2).window_bytes is None
    assert build_model(program, 2 * room - 2, num_here=2).window_bytes is not None
    monkeypatch.setattr(program.experiment.checkpoint, "window_gib", 2**-20)
    assert build_model(program, room).window_bytes == 1024
    assert predict(program, room).phases["save"]["writing the checkpoint"] == 1024


def test_without_room_to_join_the_layers_no_sample_is_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = small.program(small.experiment(small.llama(), memory={"update": "layer_programs", "remat": "full"}))
    end = predict(layers, limit=64 * GIB).phases["end"]
    weights = sum(leaf.bytes_per_device for leaf in layers.layout if leaf.path.startswith("parameter/stack"))
    assert end["joining layers"] == 8 * weights > 0
    left = predict(layers, limit=sum(end.values()) - 1).phases["end"]
    assert left == {part: size for part, size in end.items() if part != "joining layers"}
    runs.write_text(tmp_path / "text")
    monkeypatch.setattr(run_train, "get_free_memory_bytes", lambda: 0)
    flags = ("--config.memory.update=layer_programs", "--config.memory.remat=full", "--config.trainer.max_steps=1")
    assert runs.train(tmp_path / "run", *flags) == 0
    output = capsys.readouterr()
    assert "no sample is drawn: host memory has no room to join the layers" in output.out + output.err


def test_processes_of_one_machine_share_its_memory(program: Program) -> None:
    one = predict(program, limit=64 * GIB)
    two = predict(program, limit=64 * GIB, num_here=2)
    assert two.peak_bytes == 2 * one.peak_bytes
    limit = two.peak_bytes - 1
    assert HostReport(limit, 1, one.phases).fits
    tight = HostReport(limit, 2, one.phases)
    assert not tight.fits
    assert "for 2 processes on this machine" in (host_memory.explain_host_refusal(tight) or "")
    assert HostReport(None, 2, one.phases).fits, "an unknown limit refuses nothing"


# --- refusals --------------------------------------------------------------------------------------------------------


def test_more_than_xla_may_pin_is_refused(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    offloaded = 8 * program.layout.bytes_per_device(memory_kind="pinned_host")
    assert offloaded == 8 * STATE
    monkeypatch.setenv(HOST_LIMIT, "0")
    text = r"config.memory offloads 1.19 MiB to host memory \(optimizer 1.19 MiB\), but "
    with pytest.raises(ValueError, match=text + f"{HOST_LIMIT}=0 lets XLA pin 0 B; set it to 1 or unset it"):
        memory_budget.check_pinned_memory(program, "gpu")
    memory_budget.check_pinned_memory(program, "tpu")  # only GPUs have that limit
    memory_budget.check_pinned_memory(program)
    monkeypatch.setenv(HOST_LIMIT, "1")
    memory_budget.check_pinned_memory(program, "gpu")


@pytest.mark.pairs
def test_a_run_is_refused_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, program: Program
) -> None:
    monkeypatch.setenv("TINY_TEXT", "")
    runs.write_text(tmp_path / "text")
    monkeypatch.setenv(HOST_LIMIT, "0")
    on_gpu = functools.partial(memory_budget.check_pinned_memory, platform="gpu")
    monkeypatch.setattr("plimsoll.framework.run.train.check_pinned_memory", on_gpu)
    monkeypatch.setattr("plimsoll.framework.run.train.measure_largest_need", lambda _: pytest.fail("compiled"))
    assert runs.train(tmp_path / "run", "--config.memory.optimizer_state=pinned_host") == 2
    assert f"but {HOST_LIMIT}=0 lets XLA pin 0 B; set it to 1 or unset it" in "".join(capfd.readouterr())
    monkeypatch.setenv(HOST_LIMIT, "64")
    assert runs.train(tmp_path / "run", "--host_memory_gib=0.05") == 4
    assert "of host memory (" in capfd.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.pairs
def test_a_known_step_is_refused_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The memory of a step that this machine has compiled before is known; --force starts the run anyway."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs.write_text(tmp_path / "text")
    need: list[HostReport] = []
    predict_host = memory_budget.predict_host_memory

    def record(*args: Any) -> HostReport:
        need.append(predict_host(*args))
        return need[-1]

    monkeypatch.setattr("plimsoll.framework.run.train.predict_host_memory", record)
    assert runs.train(tmp_path / "run", "--dry_run", config="wide") == 0
    before, after = need
    assert sum(before.phases["train"].values()) < sum(after.phases["train"].values()), "the state only"
    capfd.readouterr()
    need.clear()
    assert runs.train(tmp_path / "run", "--dry_run", config="wide") == 0
    assert sum(need[0].phases["train"].values()) == pytest.approx(sum(after.phases["train"].values()), rel=0.2)
    assert need[0].phases["train"]["memory of the devices"] == after.phases["train"]["memory of the devices"]
    limit_gib = (sum(need[0].phases["train"].values()) - (after.phases["train"]["memory of the devices"] >> 1)) / GIB
    monkeypatch.setattr("plimsoll.framework.run.train.measure_largest_need", lambda _: pytest.fail("compiled"))
    assert runs.train(tmp_path / "run", f"--host_memory_gib={limit_gib}", config="wide") == 4
    assert "the run needs " in capfd.readouterr().out
    assert not (tmp_path / "run").exists()


def test_processes_here() -> None:
    assert memory_budget.distributed.count_processes_here() == 1
    assert jax.process_count() == 1
