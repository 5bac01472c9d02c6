"""No second copy: in every phase of a run, live arrays are the layout's leaves, a few batches and little else."""

import gc
from pathlib import Path
from typing import Any

import jax
import pytest

from plimsoll.configs import load
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.layout import flatten
from plimsoll.framework.metrics.memory import live_array_bytes
from plimsoll.framework.program.program import Program
from plimsoll.framework.run import hooks
from plimsoll.framework.run.run import Run
from tests.support.runs import CONFIG, rows, start, train

SLACK = 1 << 20


def live(memory_kind: str) -> int:
    """Return the bytes of live arrays in a memory kind, over all devices."""
    return sum(size for (_, kind), size in live_array_bytes().items() if kind == memory_kind)


@pytest.fixture(autouse=True)
def before() -> dict[str, int]:
    """Bytes that other tests of this process left alive, which do not count for this run."""
    gc.collect()
    return {kind: live(kind) for kind in ("device", "pinned_host")}


class Probe:
    """Records the bytes of all live arrays, by phase."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: dict[str, int]) -> None:
        self.before = before
        self.program: Program | None = None
        self.seen: dict[str, tuple[int, int]] = {}  # phase: most bytes beyond the layout's, (device, host)
        for owner, name, phase in [
            (Run, "start", "init or restore"),
            (Program, "step", "train"),
            (Program, "evaluate", "eval"),
            (Run, "save", "save"),
            (Generator, "__call__", "sampling"),
        ]:
            self._wrap(monkeypatch, owner, name, phase)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name)

        def measure(*args: Any, **kwargs: Any) -> Any:
            which = "ema-eval" if kwargs.get("averaged") else phase
            if isinstance(args[0], Run):
                self.program = args[0].program
            if phase != "init or restore":
                self.look(f"before {which}")
            result = original(*args, **kwargs)
            jax.block_until_ready(result)
            self.look(f"after {which}")
            return result

        monkeypatch.setattr(owner, name, measure)

    def look(self, phase: str) -> None:
        """Record how many bytes are alive beyond the layout, over all devices."""
        assert self.program is not None
        count = self.program.mesh.size
        layout = self.program.layout
        device = live("device") - self.before["device"] - count * layout.bytes_per_device(memory_kind="device")
        host = live("pinned_host") - self.before["pinned_host"]
        host -= count * layout.bytes_per_device(memory_kind="pinned_host")
        old = self.seen.get(phase, (0, 0))
        self.seen[phase] = (max(old[0], device), max(old[1], host))


def batch_bytes(program: Program) -> int:
    return sum(spec.num_bytes for spec in program.batch_specs.values())


def beyond_the_layout_while_sampling(monkeypatch: pytest.MonkeyPatch, before: dict[str, int]) -> list[int]:
    """Return a list that collects the device bytes beyond the layout at every token that a run samples from now on."""
    seen: list[int] = []
    original = Generator.stream

    def record_memory(self: Generator, *args: Any) -> Any:
        layout = self._program.mesh.size * self._program.layout.bytes_per_device(memory_kind="device")
        for tokens in original(self, *args):
            seen.append(live("device") - before["device"] - layout)
            yield tokens

    monkeypatch.setattr(Generator, "stream", record_memory)
    return seen


@pytest.mark.once("pinned_host")
@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_one_copy_in_every_phase(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, int], memory_kind: str
) -> None:
    probe = Probe(monkeypatch, before)
    sampling = beyond_the_layout_while_sampling(monkeypatch, before)
    flags = (f"--config.memory.optimizer_state={memory_kind}", "--config.trainer.save_every=1")
    flags += ("--config.trainer.eval_every=1",)
    assert train(tmp_path / "run", *flags, "--config.trainer.max_steps=2", config="wide") == 0
    assert train(tmp_path / "run", *flags, "--config.trainer.max_steps=3", config="wide") == 0
    assert {
        "after init or restore",
        "after train",
        "after eval",
        "after ema-eval",
        "after save",
        "after sampling",
    } <= probe.seen.keys()
    assert probe.program is not None
    state = probe.program.layout
    limit = SLACK + 2 * batch_bytes(probe.program)
    assert state.bytes_per_device("parameter") * probe.program.mesh.size > 2 * limit, "a copy would not be noticed"
    for phase, (device, host) in probe.seen.items():
        assert device <= limit, f"{phase}: {device} bytes on the devices beyond the layout; all: {probe.seen}"
        # An asynchronous save takes its snapshot into plain host memory, so it adds no host arrays either.
        assert host <= SLACK, f"{phase}: {host} bytes of arrays in host memory beyond the layout"
    assert len(sampling) == 6, "three tokens at the end of either run"
    assert 0 < max(sampling) <= SLACK, "a second model"


@pytest.mark.pairs
def test_one_copy_on_one_device(text: Path, tmp_path: Path) -> None:
    flags = ("--config.trainer.max_steps=6", "--config.trainer.save_every=1")
    assert start(tmp_path / "run", *flags, config="wide").wait(timeout=300) == 0, Path(
        f"{tmp_path}/run.out"
    ).read_text()
    config = load(f"{CONFIG}:wide")
    specs = flatten(config.instantiate().state_specs())
    state = sum(spec.num_bytes for spec in specs.values())
    measured = [row["memory/device_bytes"] for row in rows(tmp_path / "run") if "memory/device_bytes" in row]
    assert len(measured) == 6
    assert state <= max(measured) <= state + SLACK


@pytest.mark.pairs
def test_a_lost_donation_is_noticed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, int]
) -> None:
    jit = jax.jit

    def without_donation(function: Any, **options: Any) -> Any:
        options.pop("donate_argnums", None)
        return jit(function, **options)

    probe = Probe(monkeypatch, before)
    monkeypatch.setattr("plimsoll.framework.program.backend.jax.jit", without_donation)
    held: list[Any] = []

    def hold(self: hooks.Hook, run: Run, number: int) -> None:
        held[:] = [run.state]  # without donation, the old state is still alive after the step

    monkeypatch.setattr(hooks.Guard, "before_step", hold, raising=False)
    assert train(tmp_path / "run", "--config.trainer.max_steps=2", config="wide") == 0
    assert probe.program is not None
    assert probe.seen["after train"][0] > SLACK + 2 * batch_bytes(probe.program)
    held.clear()
