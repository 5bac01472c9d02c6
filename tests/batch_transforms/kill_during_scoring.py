"""`plimsoll train` that gets SIGKILL while the reference is computed: `kill_during_scoring.py N FLAGS`.

N batches of the data are computed before the kill. Every batch counts as done as soon as it is written.
"""

import os
import signal
import sys
from typing import Any

import jax
import numpy as np

from plimsoll.framework.batch_transforms import stored_reference
from plimsoll.framework.batch_transforms.reference import ReferenceScoring
from plimsoll.launch.train import main


def kill_after(count: int) -> None:
    """From now on, kill this process when it has written `count` batches and gathered the next one."""
    gathered = ReferenceScoring._gather
    seen = [0]

    def gather(self: ReferenceScoring, values: jax.Array) -> np.ndarray:
        array: Any = gathered(self, values)
        if seen[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1
        return array

    ReferenceScoring._gather = gather
    stored_reference._SECONDS = 0.0


if __name__ == "__main__":
    kill_after(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
