"""Batch transforms add arrays to a batch, from an auxiliary model or from the trained model itself.

A reference adds the log-probabilities that preference losses compare with, a teacher adds its most likely tokens, and
rollouts add the model's own answers and their rewards. The implementations are in `framework.batch_transforms`;
`Program.step` and `Program.evaluate` call them. So schedules need not know about a second model: the additional
arrays are part of the batch like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.data.batches import Shapes
from plimsoll.framework.layout import TrainState
from plimsoll.framework.program.rows import Batch
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker

if TYPE_CHECKING:
    # These modules import this one.
    from plimsoll.framework.program.experiment import Experiment
    from plimsoll.framework.program.program import Program

Log = Callable[[str], None]


@dataclass(frozen=True)
class ForwardCost:
    """The cost of the forward passes that complete a training batch, as an analytical plan counts it.

    Attributes:
        flops: FLOPs of matrix products on all devices.
        read_bytes: bytes of weights that one device reads from its memory.
        offloaded_bytes: bytes of offloaded weights in the host memory of one device, also between steps.
        moved_bytes: bytes of weights transferred from the host to one device.
    """

    flops: float = 0.0
    read_bytes: int = 0
    offloaded_bytes: int = 0
    moved_bytes: int = 0

    def __add__(self, later: ForwardCost) -> ForwardCost:
        """Return the total cost of both, run one after the other."""
        return ForwardCost(
            flops=self.flops + later.flops,
            read_bytes=self.read_bytes + later.read_bytes,
            offloaded_bytes=self.offloaded_bytes + later.offloaded_bytes,
            moved_bytes=self.moved_bytes + later.moved_bytes,
        )


class BatchTransform:
    """Base class of batch transforms; building one touches no device and no file."""

    def join(self, experiment: Experiment) -> None:
        """Receive the experiment that this transform belongs to, as soon as its other parts are built."""

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """Return the arrays of a batch as a step or an evaluation sees it.

        Args:
            delivered: arrays that the data pipeline delivers.
            evaluation: whether they belong to an evaluation.
        """
        raise NotImplementedError

    def check(self, experiment: Experiment) -> None:
        """Raise ValueError if the transform does not fit model, data or memory. Reads nothing."""

    def check_files(self, program: Program, workdir: Path, *, is_new_run: bool) -> None:
        """Check the files that the transform needs, once the data is set up and before anything is compiled.

        Loads no weights. Every process calls this.

        Args:
            program, workdir, is_new_run: as for `open`.

        Raises:
            FileNotFoundError, ValueError: files are missing, or belong to another model or other data.
        """

    def open(self, program: Program, workdir: Path, *, is_new_run: bool, log: Log) -> None:
        """Prepare the transform.

        Called once the data is set up and before the program's state exists, so the devices are empty. Every process
        calls this.

        Args:
            program: program whose batches are completed.
            workdir: local folder where the transform may store results that it computes once.
            is_new_run: whether the run has no checkpoint yet.
            log: function that prints a line above the progress bar.

        Raises:
            FileNotFoundError, ValueError: a required file is missing or belongs to another model.
        """

    def is_open(self, program: Program) -> bool:
        """Return whether `complete_batch` can be called: `open` was called with this program, or is not needed."""
        return True

    def complete_batch(self, program: Program, state: TrainState, batch: Batch, *, group: str = "parameter") -> Batch:
        """Return the batch with all arrays of `arrays`.

        Args:
            program: the program that was passed to `open`.
            state: the training state; it is not modified.
            batch: the delivered batch, on the devices.
            group: group of the state whose weights are used if the trained model itself is run: "parameter" or "ema".
        """
        raise NotImplementedError

    def host_bytes(self, program: Program) -> int:
        """Return the bytes of one device's host memory that the transform occupies between steps."""
        return 0

    def passes(self, experiment: Experiment, mesh: Mesh | AbstractMesh) -> ForwardCost:
        """Estimate analytically what `complete_batch` runs for a training step. Opens and traces nothing.

        Args:
            experiment: experiment whose batches are completed.
            mesh: mesh of its devices, which may be abstract.
        """
        return ForwardCost()

    def dry_run(self, program: Program, compile: Compile) -> dict[str, MemoryTracker]:
        """Compile the programs of `complete_batch`, also for an absent machine. Opens nothing.

        Args:
            program: program whose batches are completed.
            compile: function that compiles a lowered program.

        Returns:
            Memory trackers by name. The peak of a tracker is everything that a device holds at that time, including the
            training state where it exists. Its `host_peak` counts the bytes in host memory that are not part of the
            state, such as a reference's weights. `once` means that steps do not wait for it.
        """
        return {}
