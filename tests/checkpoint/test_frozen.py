"""Frozen arrays are written once, by the first save; every step's checkpoint refers to them, and they are verified."""

import contextlib
import random
import shutil
from collections import namedtuple
from pathlib import Path

import jax
import numpy as np
import pytest

from plimsoll.framework.checkpoint.checkpointer import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointMismatchError,
    CheckpointMissingError,
)
from tests.checkpoint.test_checkpoint_faults import data_file, flip, list_files
from tests.support.runs import losses, train, write_text
from tests.support.small import assert_same_bits

Old = namedtuple("Old", ["frozen", "parameter"])  # not a dict, so all of it is one checkpoint


def state(step: int, base: float = 1.0) -> dict:
    values = np.random.default_rng(0).standard_normal((64, 512), np.float32)
    return {"frozen": {"w": jax.device_put(base * values)}, "parameter": {"a": jax.device_put(values[:, :4] + step)}}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    """Steps 1 and 2 from one process, 3 from another one that resumed, 4 from one that did not and has another base."""
    for steps in ([1, 2], [3], [4]):
        with Checkpointer(directory=tmp_path) as checkpointer:
            if steps == [3]:
                checkpointer.restore_latest(ABSTRACT)
            for step in steps:
                checkpointer.save(step, state(step, base=2.0 if step == 4 else 1.0), {})
    return tmp_path


def test_restoring_frozen_arrays_has_its_own_phase(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []

    def record_phase(name: str, **_: object) -> contextlib.AbstractContextManager[None]:
        phases.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr("plimsoll.framework.checkpoint.checkpointer.phase", record_phase)
    Checkpointer(directory=checkpoint_folder, read_only=True).restore(4, ABSTRACT)
    assert phases == ["reading the frozen weights", "reading the checkpoint of step 4"]


def test_frozen_arrays_are_written_once_and_come_back(checkpoint_folder: Path) -> None:
    assert sorted(path.name for path in checkpoint_folder.iterdir()) == ["00000002", "00000003", "00000004", "frozen"]
    assert sorted(path.name for path in (checkpoint_folder / "frozen").iterdir()) == ["00000001", "00000002"]
    assert sum(path.stat().st_size for path in list_files(checkpoint_folder / "00000003")) < 64 * 512
    checkpointer = Checkpointer(directory=checkpoint_folder)
    for step in (2, 3, 4):
        assert_same_bits(checkpointer.restore(step, ABSTRACT).state, state(step, base=2.0 if step == 4 else 1.0))
    other = {**ABSTRACT, "frozen": {"w": jax.ShapeDtypeStruct((64, 512), "int8")}}
    with pytest.raises(CheckpointMismatchError, match=r"(?s)frozen belongs to another model.*w +other dtype"):
        checkpointer.restore(3, other)


def test_damage_is_found(checkpoint_folder: Path) -> None:
    flip(data_file(checkpoint_folder / "frozen" / "00000002"), random.Random(0))
    with pytest.raises(CheckpointCorruptError, match=r"step 2 of \S*frozen is corrupt: 1 of 1 arrays .* saved: w"):
        Checkpointer(directory=checkpoint_folder).restore(4, ABSTRACT)
    assert Checkpointer(directory=checkpoint_folder).restore_latest(ABSTRACT).step == 3
    shutil.rmtree(checkpoint_folder / "frozen" / "00000001")
    with pytest.raises(CheckpointMissingError, match=r"no checkpoint of step 1: \S*frozen/00000001: there is no such"):
        Checkpointer(directory=checkpoint_folder).restore(3, ABSTRACT)


def test_older_checkpoints_include_frozen_arrays(tmp_path: Path) -> None:
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, Old(**state(1)), {})
        checkpointer.wait()
        assert not (tmp_path / "frozen").exists()
        assert_same_bits(checkpointer.restore_latest(ABSTRACT).state, state(1))
        checkpointer.save(2, state(2), {})
    assert_same_bits(Checkpointer(directory=tmp_path).restore_latest(ABSTRACT).state, state(2))


@pytest.mark.pairs
def test_a_resumed_run_has_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")
    # All 32 inputs are in one group of packed words, which no mesh can split.
    fields = ("model.lora=plimsoll.LoRA", "model.lora.base=int8", "trainer.max_steps=8")
    fields += ("mesh.data=-1", "mesh.fsdp=1")
    flags = [f"--config.{field}" for field in fields]
    assert train(tmp_path / "whole", *flags) == 0
    assert train(tmp_path / "parts", *flags, "--config.trainer.max_steps=4") == 0
    assert train(tmp_path / "parts", *flags, "--resume=must") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "parts")) == 8
