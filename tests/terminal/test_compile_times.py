"""The last compile time of each program, stored in a folder next to the compilation cache."""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from plimsoll.framework.devices import compile_times
from plimsoll.framework.terminal import phases
from plimsoll.framework.terminal.phase_views import Lines


@pytest.fixture
def phase_output():
    stream = io.StringIO()
    with phases.show_phases(Lines(stream)):  # pyright: ignore[reportArgumentType]
        yield stream


def lower_scaling(factor: float):
    return jax.jit(lambda x: x * factor).lower(jnp.zeros(3))


def test_previous_time_is_shown_only_for_the_same_program(phase_output: io.StringIO, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(compile_times, "_MIN_SECONDS", 0.0)
    for program in (lower_scaling(2.0), lower_scaling(2.0), lower_scaling(3.0)):
        with compile_times.compiling("the step", program, times=tmp_path):
            program.compile()
    first, second, third = phase_output.getvalue().splitlines()
    assert first.startswith("compiling the step ... done in ")
    assert second.startswith("compiling the step (0.")
    assert "the last time) ... done in" in second
    assert third.startswith("compiling the step ... done in ")
    assert len([*tmp_path.iterdir()]) == 2


def test_cache_hits_do_not_record_a_time(phase_output: io.StringIO, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(compile_times, "_MIN_SECONDS", 0.0)
    program = lower_scaling(5.0)
    with compile_times.compiling("the step", program, times=tmp_path):
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert phase_output.getvalue().rstrip().endswith(" s, from the cache")
    assert not [*tmp_path.iterdir()]


def test_damaged_file_or_unwritable_folder_is_ignored(tmp_path: Path):
    (tmp_path / "key").write_text("soon")
    assert compile_times.read(tmp_path, "key") is None
    compile_times.write(tmp_path / "key", "other", 1.0)
    assert compile_times.read(tmp_path / "key", "other") is None
    compile_times.write(tmp_path / "new", "key", 4.4)
    assert compile_times.read(tmp_path / "new", "key") == 4.4
