"""Writers: where metrics go. JSONL and TensorBoard always, Weights & Biases if installed and asked for.

Imports framework.metrics.jsonl; tensorboardX and wandb are imported by the methods that use them: configs name
these classes, and reading a config must stay quick. One process writes (the trainer builds writers on process 0 only).
"""

import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from framework.metrics.jsonl import JsonlWriter, read_metrics

__all__ = ["JsonlWriter", "MultiWriter", "TensorBoardWriter", "WandbWriter", "Writer", "read_metrics"]


class Writer(Protocol):
    """Takes one row of metrics per step."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the values of `metrics` (numbers; strings and None where the format has them) at `step`."""
        ...

    def resume(self, from_step: int) -> None:
        """Forgets what was written after `from_step`. Called once, before the first write of a resumed run."""
        ...

    def flush(self) -> None:
        """Hands everything written so far to the disk or the service."""
        ...

    def close(self) -> None:
        """Flushes and releases. A second call does nothing."""
        ...


class TensorBoardWriter:
    """Scalars, texts and pictures as TensorBoard event files.

    Uses tensorboardX's event files without its SummaryWriter, which sends every scalar through a queue to a thread:
    here a row is one event, `flush` means it, and a fork finds no thread. After a kill, up to `flush_seconds` of rows
    are missing; metrics.jsonl is the record.

    Args:
      directory: folder of the event files; created with the first row.
      flush_seconds: longest time that a row waits to be seen by TensorBoard.
    """

    def __init__(self, directory: str | os.PathLike[str], flush_seconds: float = 10.0):
        self._directory = os.fspath(directory)
        self._flush_seconds = flush_seconds
        self._flushed_at = 0.0
        self._file: Any = None
        self._closed = False

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers become scalars; strings, texts; None is left out, as TensorBoard has no word for it."""
        from tensorboardX import summary

        values = []
        for name, value in metrics.items():
            if isinstance(value, str):
                self.text(step, name, value)
            elif value is not None:
                values.extend(summary.scalar(name, float(value)).value)
        if values:
            self._add(step, values)

    def text(self, step: int, name: str, text: str) -> None:
        """Shows `text` as it is (TensorBoard would read it as Markdown, so it is fenced)."""
        from tensorboardX import summary

        self._add(step, summary.text(name, f"```\n{text}\n```").value)

    def image(self, step: int, name: str, image_HWC: Any) -> None:
        """Shows a picture: uint8[H,W,C], or float[H,W,C] from 0 to 1, with C = 1, 3 or 4."""
        from tensorboardX import summary

        self._add(step, summary.image(name, image_HWC, dataformats="HWC").value)

    def resume(self, from_step: int) -> None:
        """Starts a new event file that tells TensorBoard to hide earlier events of later steps."""
        self._release()
        self._open().write_event(_event(from_step + 1, session_log={"status": "START"}))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._flushed_at = time.monotonic()

    def close(self) -> None:
        self._closed = True
        self._release()

    def _add(self, step: int, values: Iterable[Any]) -> None:
        self._open().write_event(_event(step, summary={"value": values}))
        if time.monotonic() - self._flushed_at > self._flush_seconds:
            self.flush()

    def _open(self) -> Any:
        if self._closed:
            raise ValueError(f"the TensorBoard writer of {self._directory} is closed")
        if self._file is None:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.record_writer import directory_check

            directory_check(self._directory)  # creates it, unless it is a bucket
            # Files are named by the second they were opened in; the suffix keeps a quick restart out of the last one.
            self._file = EventsWriter(os.path.join(self._directory, "events"), f".{uuid.uuid4().hex[:8]}")
        return self._file

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class WandbWriter:
    """Weights & Biases, if the package is installed.

    The run's id is kept in `workdir/wandb_run_id`, so a resumed run continues the same curves. W&B refuses to rewrite
    history: after a resume from an older step, its curves show the repeated steps twice (metrics.jsonl does not).

    Args:
      project: W&B project.
      name: name of the run; W&B makes one up if None.
      workdir: folder of the id and of W&B's own files.
      config: shown beside the run, as plain data.
      mode: "online", "offline", "disabled", or None to let the WANDB_MODE variable decide.

    Raises:
      ImportError: wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        *,
        workdir: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "logging to W&B was asked for, but the package `wandb` is not installed: "
                "run `pip install wandb`, or switch W&B off in the config"
            ) from error
        Path(workdir).mkdir(parents=True, exist_ok=True)
        id_file = Path(workdir) / "wandb_run_id"
        run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:12]
        self._wandb = wandb
        self._run: Any = wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=os.fspath(workdir),
            config=dict(config or {}),
            **({"mode": mode} if mode else {}),
        )
        id_file.write_text(run_id + "\n")
        # W&B's own step only grows; ours goes back on resume, so ours is the axis of every curve.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        self._run.log({"step": int(step), **values})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": int(step), name: self._wandb.Html(f"<pre>{_escape(text)}</pre>", inject=False)})

    def image(self, step: int, name: str, image_HWC: Any) -> None:
        self._run.log({"step": int(step), name: self._wandb.Image(image_HWC)})

    def resume(self, from_step: int) -> None:
        self._run.log({"step": int(from_step), "resumed_from": int(from_step)})

    def flush(self) -> None:
        """W&B uploads from a process of its own; there is nothing to wait for before `close`."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MultiWriter:
    """Hands every row to several writers, and texts and pictures to those that can show them."""

    def __init__(self, writers: Iterable[Writer]):
        self.writers = list(writers)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for writer in self.writers:
            writer.write(step, metrics)

    def text(self, step: int, name: str, text: str) -> None:
        for writer in self.writers:
            if isinstance(writer, (TensorBoardWriter, WandbWriter)):
                writer.text(step, name, text)

    def image(self, step: int, name: str, image_HWC: Any) -> None:
        for writer in self.writers:
            if isinstance(writer, (TensorBoardWriter, WandbWriter)):
                writer.image(step, name, image_HWC)

    def resume(self, from_step: int) -> None:
        for writer in self.writers:
            writer.resume(from_step)

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        """Closes all of them, also when one fails; raises the failures together."""
        failures: list[Exception] = []
        for writer in self.writers:
            try:
                writer.close()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise ExceptionGroup("closing the metric writers", failures)


def _event(step: int, **content: Any) -> Any:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] (made at import)

    return Event(step=int(step), wall_time=time.time(), **content)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
