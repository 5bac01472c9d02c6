"""TensorBoard event files read with tensorboardX's protos, W&B and MLflow with fakes, and several writers as one."""

import builtins
import struct
import sys
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from plimsoll.framework.metrics import retrying
from plimsoll.framework.metrics.jsonl import JsonlWriter, read_metrics
from plimsoll.framework.metrics.retrying import RetryingWriter
from plimsoll.framework.metrics.writers import (
    MlflowWriter,
    MultiWriter,
    TensorBoardWriter,
    WandbWriter,
    check_installed,
)


def read_events(directory):
    """Return the events of all files, oldest file first (TFRecord framing: length, crc, data, crc)."""
    events = []
    for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return events


def scalars(events):
    """Return what TensorBoard shows: the start of a session hides earlier events at its step or later."""
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
            assert len(scalars(read_events(tmp_path))) == 2  # the first row is visible immediately
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
    assert len(list(tmp_path.iterdir())) == 2  # two files, although opened within the same second


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

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Error=ValueError))
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


def test_a_service_without_its_package_is_refused_with_the_command():
    check_installed(None, None)
    with pytest.raises(ImportError, match=r"--wandb.*run `pip install wandb`"):
        check_installed("mine", None)
    with pytest.raises(ImportError, match=r"--mlflow.*run `pip install mlflow`"):
        check_installed(None, "http://127.0.0.1")


class Server:
    """A fake of MLflow's client that records what is logged and can stop answering."""

    def __init__(self):
        self.runs: list[str] = []
        self.rows: list[tuple[str, dict, dict]] = []
        self.ended: list[str] = []
        self.answers = True

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name)

    def create_run(self, experiment_id, run_name):
        self.runs.append(run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run-{len(self.runs)}"))

    def update_run(self, run_id, status):
        assert (run_id, status) == ("run-1", "RUNNING")

    def log_batch(self, run_id, metrics=(), params=()):
        if not self.answers:
            raise ConnectionError("no answer\nat length")
        numbers = {name: (value, step) for name, value, _, step in metrics}
        self.rows.append((run_id, numbers, dict(params)))

    def set_terminated(self, run_id):
        self.ended.append(run_id)


def test_mlflow_resumes_its_run_and_waits_for_the_server(tmp_path, monkeypatch):
    server = Server()
    modules = {
        "mlflow": types.ModuleType("mlflow"),
        "mlflow.exceptions": types.SimpleNamespace(MlflowException=ConnectionError),
        "mlflow.tracking": types.SimpleNamespace(MlflowClient=lambda uri: server),
        "mlflow.entities": types.SimpleNamespace(Metric=lambda *of: of, Param=lambda *of: of),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(retrying, "RETRY_SECONDS", 0.0)
    said: list[str] = []
    for first in (1, 3):
        mlflow = MlflowWriter("default", "tiny", workdir=tmp_path, config={f"field{i}": "x" for i in range(150)})
        writer = RetryingWriter(mlflow, "MLflow", said.append)
        server.answers = False
        writer.write(first, {"train/loss": 0.5})
        server.answers = True
        writer.write(first + 1, {"train/loss": np.float32(0.25)})
        writer.close()
    assert [len(parameters) for *_, parameters in server.rows] == [100, 50, 0, 0, 0, 0]
    assert [row["train/loss"] for _, row, _ in server.rows[2:]] == [(0.5, 1), (0.25, 2), (0.5, 3), (0.25, 4)]
    assert server.runs == ["tiny"]
    assert server.ended == ["run-1", "run-1"]
    assert said[0].startswith("MLflow cannot be written: no answer. Training continues")
    server.answers = False
    (tmp_path / "mlflow_run_id").unlink()
    with pytest.raises(ValueError, match=r"^--mlflow=default: no answer$"):
        MlflowWriter("default", "tiny", workdir=tmp_path, config={"field": "x"})


def test_multi_writer_forwards_and_closes_all(tmp_path):
    class Broken:
        closed = False

        def write(self, step, metrics): ...
        def resume(self, from_step): ...

        def close(self):
            self.closed = True
            raise OSError("the service is down")

    broken = Broken()
    writer = MultiWriter([broken, JsonlWriter(tmp_path / "m.jsonl"), TensorBoardWriter(tmp_path / "tb")])
    writer.write(1, {"train/loss": 1.0})
    writer.write(2, {"train/loss": 0.5})
    writer.resume(1)
    with pytest.raises(OSError, match="the service is down"):
        writer.close()
    assert broken.closed
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "train/loss": 1.0}, {"step": 1, "resumed_from": 1}]
    assert scalars(read_events(tmp_path / "tb")) == [(1, "train/loss", 1.0)]
