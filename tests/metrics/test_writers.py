"""TensorBoard event files read back with tensorboardX's own protos, W&B against a stand-in, several writers as one."""

import builtins
import struct
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from framework.metrics.jsonl import JsonlWriter, read_metrics
from framework.metrics.writers import MultiWriter, TensorBoardWriter, WandbWriter


def read_events(directory):
    """Events of all files, in the order in which the files were made (TFRecord framing: length, crc, data, crc)."""
    events = []
    for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return events


def scalars(events):
    """What TensorBoard shows: a session's start hides what came before it at its step or later."""
    shown = []
    for event in events:
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            shown = [row for row in shown if row[0] < event.step]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                shown.append((event.step, value.tag, value.simple_value))
    return shown


def test_tensorboard_scalars(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step in range(3):
        writer.write(step, {"train/loss": np.float32(0.1) + step, "train/mfu": 1})
        if step == 0:
            assert len(scalars(read_events(tmp_path))) == 2  # the first row is to be seen at once
    writer.close()
    losses = [row for row in scalars(read_events(tmp_path)) if row[1] == "train/loss"]
    assert losses == [(s, "train/loss", np.float32(0.1) + np.float32(s)) for s in range(3)]


def test_tensorboard_resume_hides_later_steps_only(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"loss": float(step)})
    writer.close()
    writer = TensorBoardWriter(tmp_path)
    writer.resume(3)
    writer.write(4, {"loss": 40.0})
    writer.close()
    assert scalars(read_events(tmp_path)) == [(1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0), (4, "loss", 40.0)]
    assert len(list(tmp_path.iterdir())) == 2  # within the same second, and yet not the same file


def test_wandb_missing_names_the_package(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_wandb(name, *args, **kwargs):
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbWriter("project", "name", workdir=tmp_path, config={})


def test_wandb_resumes_the_same_run(tmp_path, monkeypatch):
    calls = []

    class Run:
        def define_metric(self, name, step_metric=None):
            calls.append(("define", name, step_metric))

        def log(self, row):
            calls.append(("log", row))

        def finish(self):
            calls.append(("finish",))

    def init(**kwargs):
        calls.append(("init", kwargs))
        return Run()

    monkeypatch.setitem(__import__("sys").modules, "wandb", types.SimpleNamespace(init=init))
    for start in (0, 5):
        writer = WandbWriter("plimsoll", "tiny", workdir=tmp_path, config={"a": 1})
        if start:
            writer.resume(start)
        writer.write(start + 1, {"train/loss": 0.5})
        writer.close()
    inits = [call[1] for call in calls if call[0] == "init"]
    assert inits[0] == inits[1]
    assert inits[0]["id"] == (tmp_path / "wandb_run_id").read_text().strip()
    assert (inits[0]["resume"], inits[0]["project"]) == ("allow", "plimsoll")
    logged = [call[1] for call in calls if call[0] == "log"]
    assert logged == [{"step": 1, "train/loss": 0.5}, {"step": 5, "resumed_from": 5}, {"step": 6, "train/loss": 0.5}]
    assert ("define", "*", "step") in calls
    assert calls.count(("finish",)) == 2


def test_multi_writer_hands_on_and_closes_all(tmp_path):
    class Broken:
        closed = False

        def write(self, step, metrics): ...
        def resume(self, from_step): ...

        def close(self):
            self.closed = True
            raise OSError("the service is gone")

    broken = Broken()
    writer = MultiWriter([broken, JsonlWriter(tmp_path / "m.jsonl"), TensorBoardWriter(tmp_path / "tb")])
    writer.write(1, {"train/loss": 1.0})
    writer.write(2, {"train/loss": 0.5})
    writer.resume(1)
    with pytest.raises(OSError, match="the service is gone"):
        writer.close()
    assert broken.closed
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "train/loss": 1.0}, {"step": 1, "resumed_from": 1}]
    assert scalars(read_events(tmp_path / "tb")) == [(1, "train/loss", 1.0)]
