"""Companion: what adds arrays to a batch before a step sees it, by another model or by the one that is trained.

A reference adds the log-probabilities that preferences are compared with, a teacher its likeliest tokens, rollouts the
answers that the model itself gives and what they are worth. `framework.companions` has these; `Program.step` and
`Program.evaluate` ask them. So no schedule knows of a second model: the step's batch has arrays like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from framework.data.batches import Shapes
from framework.program.rows import Batch
from framework.schedules.layerwise.programs import Compile, Ledger

Tell = Callable[[str], None]


class Passes(NamedTuple):
    """The forward passes that complete the batch of a step, as a plan without a compiler counts them.

    Attributes:
        flops: of matrix products, on all devices.
        read_bytes: of weights, that one device reads from its memory.
        hosted_bytes: of weights, in the host memory of one device, between steps too.
        moved_bytes: of weights, that come to one device from its host.
    """

    flops: float = 0.0
    read_bytes: int = 0
    hosted_bytes: int = 0
    moved_bytes: int = 0

    def and_then(self, later: Passes) -> Passes:
        """Both, one after the other."""
        return Passes(
            flops=self.flops + later.flops,
            read_bytes=self.read_bytes + later.read_bytes,
            hosted_bytes=self.hosted_bytes + later.hosted_bytes,
            moved_bytes=self.moved_bytes + later.moved_bytes,
        )


class Companion:
    """The base of companions; building one touches no device and no file.

    `experiment` is a `framework.program.experiment.Experiment`, `program` a `framework.program.program.Program`: these
    files import this one, and so are not named as types here. Subclasses name them.
    """

    def join(self, experiment: Any) -> None:
        """Told the experiment that it is a part of, as soon as the other parts are built."""

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """Returns the arrays of a batch as a step, or an evaluation, sees it.

        Args:
            delivered: those that the data pipeline gives.
            evaluation: they are of an evaluation.
        """
        raise NotImplementedError

    def check(self, experiment: Any) -> None:
        """Raises ValueError when the companion does not fit model, data or memory; nothing is read."""

    def check_files(self, program: Any, workdir: Path, *, begins: bool) -> None:
        """Looks at the files that it needs, once the data is set up and before anything is compiled.

        It loads no weights. Every process calls this.

        Args:
            program, workdir, begins: as for `open`.

        Raises:
            FileNotFoundError, ValueError: files are not there, or are of another model or of other data.
        """

    def open(self, program: Any, workdir: Path, *, begins: bool, tell: Tell) -> None:
        """Makes it ready, once data is set up and before the program's state exists: the devices are empty.

        Every process calls this.

        Args:
            program: whose batches are completed.
            workdir: a local folder, where it may keep what it computes once.
            begins: the run has no checkpoint yet.
            tell: prints a line above the progress.

        Raises:
            FileNotFoundError, ValueError: what it needs is not there, or is of another model.
        """

    def is_open(self, program: Any) -> bool:
        """Whether `completed` can be called, as `open` was called with this program or is not needed."""
        return True

    def completed(self, program: Any, state: dict[str, Any], batch: Batch, *, group: str = "parameter") -> Batch:
        """Returns the batch with all arrays of `arrays`.

        Args:
            program: as `open` was given it.
            state: the running state; it stays.
            batch: what the data delivered, on the devices.
            group: of the state, whose weights count where the model itself is asked: "parameter" or "ema".
        """
        raise NotImplementedError

    def host_bytes(self, program: Any) -> int:
        """The bytes of host memory, of one device, in which it keeps arrays between steps."""
        return 0

    def passes(self, experiment: Any, mesh: Any) -> Passes:
        """What `completed` runs for a training step, by arithmetic. Nothing is opened or traced for that.

        Args:
            experiment: whose batches are completed.
            mesh: of its devices, which may be abstract.
        """
        return Passes()

    def rehearsed(self, program: Any, compile: Compile) -> dict[str, Ledger]:
        """Compiles what `completed` runs with `compile`, also for a machine that is not here: {name: what it needs}.

        Nothing is opened for that. A ledger's peak is all that a device holds then, the training state included where
        it exists; its `host_peak` are the bytes in host memory that are no part of the state, such as a reference's
        weights; `once` says that steps do not wait for it.
        """
        return {}
