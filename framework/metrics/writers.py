"""Writers of metrics: TensorBoard, Weights & Biases, and several at once.

tensorboardX and wandb are imported by the methods that use them. One process writes.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Writer(Protocol):
    """Takes rows of metrics."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the numbers in `metrics` at `step`."""

    def resume(self, from_step: int) -> None:
        """Forgets rows of steps after `from_step`: the run goes on from there."""

    def close(self) -> None:
        """Hands everything to the disk or the service. A second call does nothing."""


class TensorBoardWriter:
    """Writes TensorBoard event files in `directory`; a kill loses up to `flush_seconds` of rows.

    It uses tensorboardX's event files without its SummaryWriter, whose thread dies of a full disk
    and whose queue then blocks the training loop for ever.
    """

    def __init__(self, directory: str | os.PathLike[str], flush_seconds: float = 10.0):
        self._directory = os.fspath(directory)
        self._flush_seconds = flush_seconds
        self._flushed_at = 0.0
        self._file: Any = None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one event with all values of the row.

        Raises OSError on a full disk; the next row then opens another file, as nobody reads on
        behind half an event.
        """
        values = [{"tag": name, "simple_value": float(value)} for name, value in metrics.items()]
        try:
            self._add(step, summary={"value": values})
            if time.monotonic() - self._flushed_at > self._flush_seconds:
                self._file.flush()
                self._flushed_at = time.monotonic()
        except OSError:
            self._abandon()
            raise

    def resume(self, from_step: int) -> None:
        """Starts a new event file.

        Its first event tells TensorBoard to hide earlier events of later steps.
        """
        self.close()
        self._add(from_step + 1, session_log={"status": "START"})

    def close(self) -> None:
        """Closes the event file. The next row would open another one."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Drops the file as it is, and removes one that is empty."""
        file = self._file
        self._file = None
        if file is None:
            return
        # On a full disk its last bytes cannot be written; ValueError means that it was closed.
        with contextlib.suppress(OSError, ValueError):
            file._py_recordio_writer.close()
        path = file._file_name
        with contextlib.suppress(OSError):
            if os.path.getsize(path) == 0:
                os.unlink(path)

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        # Event is made when its module is imported, which pyright does not see.
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        if self._file is None:
            os.makedirs(self._directory, exist_ok=True)
            prefix = os.path.join(self._directory, "events")
            # Files are named by the second they were opened in; the suffix keeps a quick restart
            # out of the last one.
            suffix = f".{uuid.uuid4().hex[:8]}"
            self._file = EventsWriter(prefix, suffix)
        event = Event(step=step, wall_time=time.time(), **content)
        self._file.write_event(event)


class WandbWriter:
    """Writes to Weights & Biases; WANDB_MODE and its other variables work as usual.

    The run's id is stored in `workdir/wandb_run_id`, so a resumed run continues the same curves.
    W&B refuses to rewrite history: after a resume from an older step, its curves show the repeated
    steps twice (metrics.jsonl does not).

    Raises:
        ImportError: the package is not installed.
        ValueError: W&B refuses: nobody is logged in, say.
    """

    def __init__(self, project: str, name: str, *, workdir: Path, config: Mapping[str, Any]):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "logging to W&B was asked for, but the package `wandb` is not installed: "
                "run `pip install wandb`, or switch W&B off in the config"
            ) from error
        id_file = workdir / "wandb_run_id"
        run_id = id_file.read_text() if id_file.exists() else uuid.uuid4().hex[:12]
        try:
            self._run: Any = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                dir=os.fspath(workdir),
                config=config,
            )
        except wandb.Error as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(
                f"--wandb={project}: {first_line} (WANDB_MODE=offline keeps the run in {workdir}/wandb)"
            ) from error
        id_file.write_text(run_id)
        # W&B's own step only grows; the run's step goes back on resume, so it is the axis of every
        # curve.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})

    def resume(self, from_step: int) -> None:
        self._run.log({"step": from_step, "resumed_from": from_step})

    def close(self) -> None:
        self._run.finish()


class MultiWriter:
    """Hands every row to several writers, and closes all of them, also when one fails."""

    def __init__(self, writers: Iterable[Writer]):
        self.writers = list(writers)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for writer in self.writers:
            writer.write(step, metrics)

    def resume(self, from_step: int) -> None:
        for writer in self.writers:
            writer.resume(from_step)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in self.writers:
                stack.callback(writer.close)
