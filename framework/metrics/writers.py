"""Metric writers: TensorBoard, Weights & Biases, MLflow, and a combination of several.

Importing this module imports none of their packages. Only one process writes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plimsoll.framework.terminal.install_hints import install_package

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


# Value of `mlflow_uri` that selects MLFLOW_TRACKING_URI, or else MLflow's own default.
MLFLOW_DEFAULT = "default"
# MLflow's limit on the length of a parameter's value.
_MLFLOW_VALUE_LENGTH = 6000
# MLflow's limit on the number of parameters per call.
_MLFLOW_BATCH = 100
# By default MLflow retries for minutes, and would block the training loop.
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def check_installed(wandb_project: str | None, mlflow_uri: str | None) -> None:
    """Check that the packages of the requested services are installed, without importing them.

    Raises:
        ImportError: a package is not installed. The message contains the command that installs it.
    """
    services = {}
    if wandb_project is not None:
        services["wandb"] = "Weights & Biases (--wandb, trainer.wandb_project)"
    if mlflow_uri is not None:
        services["mlflow"] = "MLflow (--mlflow, trainer.mlflow_uri)"
    for package, service in services.items():
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"{service} is requested, but the package `{package}` is not installed; "
                f"run `{install_package(package)}`"
            )


@contextlib.contextmanager
def hide_torch() -> Iterator[None]:
    """Make `import torch` fail within the context, unless torch is already imported.

    tensorboardX imports torch if it is installed, only to recognize its tensors. That takes 2 s and 180 MiB of memory
    for the rest of the run.
    """
    if "torch" in sys.modules:
        yield
        return
    # With None as the module, Python raises ImportError.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["torch"]


def import_writers() -> None:
    """Import the packages of the TensorBoard writer now, which takes 0.3 s, instead of with the first row."""
    with hide_torch():
        import tensorboardX.event_file_writer  # noqa: F401


class Writer(Protocol):
    """Receives rows of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers in `metrics` at `step`."""

    def resume(self, from_step: int) -> None:
        """Discard rows of steps after `from_step`, because the run continues from there.

        By default, record that step, for a service that keeps all rows.
        """
        self.write(from_step, {"resumed_from": from_step})

    def close(self) -> None:
        """Flush everything to the disk or the service. A second call does nothing."""


class TensorBoardWriter:
    """Writes TensorBoard event files to `directory`; a kill loses up to `flush_seconds` of rows.

    It uses tensorboardX's event files without its SummaryWriter: on a full disk, the SummaryWriter's thread dies, and
    its queue then blocks the training loop forever.
    """

    def __init__(self, directory: str | os.PathLike[str], flush_seconds: float = 10.0):
        self._directory = os.fspath(directory)
        self._flush_seconds = flush_seconds
        self._flushed_at = 0.0
        self._file: EventsWriter | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all values of the row.

        Raises OSError on a full disk. The next row then opens another file, because readers stop at a truncated event.
        """
        values = [{"tag": name, "simple_value": float(value)} for name, value in metrics.items()]
        try:
            file = self._add(step, summary={"value": values})
            if time.monotonic() - self._flushed_at > self._flush_seconds:
                file.flush()
                self._flushed_at = time.monotonic()
        except OSError:
            self._abandon()
            raise

    def resume(self, from_step: int) -> None:
        """Start a new event file. Its first event tells TensorBoard to hide earlier events of later steps."""
        self.close()
        self._add(from_step + 1, session_log={"status": "START"})

    def close(self) -> None:
        """Close the event file. Another row would open a new one."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Drop the file as it is, and remove it if it is empty."""
        file = self._file
        self._file = None
        if file is None:
            return
        # On a full disk, the last bytes cannot be written; ValueError means that the file was already closed.
        with contextlib.suppress(OSError, ValueError):
            file._py_recordio_writer.close()
        path = file._file_name
        with contextlib.suppress(OSError):
            if os.path.getsize(path) == 0:
                os.unlink(path)

    def _add(self, step: int, **content: object) -> EventsWriter:
        """Write an event, and return the file that it was written to."""
        import_writers()
        from tensorboardX.event_file_writer import EventsWriter

        # protobuf creates Event when the module is imported, so pyright does not see it.
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        if self._file is None:
            os.makedirs(self._directory, exist_ok=True)
            prefix = os.path.join(self._directory, "events")
            # Files are named by the second in which they were opened. The suffix keeps a quick restart from writing to
            # the previous file.
            suffix = f".{uuid.uuid4().hex[:8]}"
            self._file = EventsWriter(prefix, suffix)
        event = Event(step=step, wall_time=time.time(), **content)
        self._file.write_event(event)
        return self._file


class WandbWriter(Writer):
    """Writes to Weights & Biases; WANDB_MODE and other W&B variables work as usual.

    The run id is stored in `workdir/wandb_run_id`, so a resumed run continues the same curves. W&B does not allow
    rewriting history: after a resume from an older step, its curves show the repeated steps twice (metrics.jsonl does
    not).

    Raises:
        ImportError: the package is not installed.
        ValueError: W&B rejects the run, for example because the user is not logged in.
    """

    def __init__(self, project: str, name: str, *, workdir: Path, config: Mapping[str, object]):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "logging to W&B is requested, but the package `wandb` is not installed: "
                f"run `{install_package('wandb')}`, or switch W&B off in the config"
            ) from error
        id_file = workdir / "wandb_run_id"
        run_id = id_file.read_text() if id_file.exists() else uuid.uuid4().hex[:12]
        try:
            self._run: Any = wandb.init(
                project=project, name=name, id=run_id, resume="allow", dir=os.fspath(workdir), config=config
            )
        except wandb.Error as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(
                f"--wandb={project}: {first_line} (WANDB_MODE=offline keeps the run in {workdir}/wandb)"
            ) from error
        id_file.write_text(run_id)
        # W&B's own step can only grow, but the run's step decreases on resume. So use the latter as the axis of all
        # curves.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class MlflowWriter(Writer):
    """Writes to an MLflow tracking server, database or folder.

    The run id is stored in `workdir/mlflow_run_id`, so a resumed run continues the same curves. MLflow keeps all
    logged rows: after a resume from an older step, its curves show the repeated steps twice (metrics.jsonl does not).

    Args:
        uri: URI of the server, or MLFLOW_DEFAULT.
        name: name of the run.
        workdir: folder in which the run id is stored.
        config: JSON values by dotted path, which become the parameters of the MLflow run.

    Raises:
        ImportError: the package is not installed.
        ValueError: the server cannot be reached, or rejects the request.
    """

    def __init__(self, uri: str, name: str, *, workdir: Path, config: Mapping[str, object]):
        for variable, value in _MLFLOW_PATIENCE.items():
            os.environ.setdefault(variable, value)
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._error = MlflowException
        id_file = workdir / "mlflow_run_id"
        try:
            self._client = MlflowClient(None if uri == MLFLOW_DEFAULT else uri)
            if id_file.exists():
                self._run_id = id_file.read_text()
                self._client.update_run(self._run_id, status="RUNNING")
                return
            experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "plimsoll")
            experiment = self._client.get_experiment_by_name(experiment_name)
            if experiment is None:
                experiment_id = self._client.create_experiment(experiment_name)
            else:
                experiment_id = experiment.experiment_id
            self._run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
            id_file.write_text(self._run_id)
            parameters = [Param(path, str(value)[:_MLFLOW_VALUE_LENGTH]) for path, value in config.items()]
            for start in range(0, len(parameters), _MLFLOW_BATCH):
                self._client.log_batch(self._run_id, params=parameters[start : start + _MLFLOW_BATCH])
        except MlflowException as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(f"--mlflow={uri}: {first_line}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row. Raises OSError if the server does not respond; the row can then be written again."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        milliseconds = int(1000 * time.time())
        values = [Metric(name, float(value), milliseconds, step) for name, value in metrics.items()]
        try:
            self._client.log_batch(self._run_id, metrics=values)
        except self._error as error:
            raise OSError(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Mark the run as finished. A later start with the same workdir continues it."""
        try:
            self._client.set_terminated(self._run_id)
        except self._error as error:
            raise OSError(str(error).partition("\n")[0]) from error


class MultiWriter:
    """Passes every row to several writers, and closes all of them even if one fails."""

    def __init__(self, writers: Iterable[Writer]):
        self.writers = list(writers)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for writer in self.writers:
            writer.write(step, metrics)

    def resume(self, from_step: int) -> None:
        for writer in self.writers:
            writer.resume(from_step)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in self.writers:
                stack.callback(writer.close)
