"""`plimsoll train` with a fault in this process only: `python tests/faults/fault_injection.py FAULT ARGUMENT FLAGS`.

flip STEP: after that step, flip one bit of one parameter on this process's last device.
stall STEP: stop the training loop for ten minutes after that step.
kill STEP: send this process SIGKILL after that step, just after a save of it has started.
clock RATE: add 0.1 s to every step, and print the step and the true time of each save. Unless RATE is 1, this
    process's clocks are an hour ahead and run RATE times as fast.
"""

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

from plimsoll.framework.layout import TrainState, flatten
from plimsoll.framework.run.hooks import Hook
from plimsoll.framework.run.run import Run
from plimsoll.framework.run.trainer import Trainer
from plimsoll.launch.train import main

LEAF = "embed/token"


class Fault(Hook):
    """Injects the fault; it comes before all other hooks."""

    def __init__(self, kind: str, step: int):
        self.kind, self.step = kind, step

    def before_step(self, run: Run, step: int) -> None:
        """Kill the process after all other hooks of its step."""
        if self.kind == "kill" and step == self.step + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, run: Run, step: int) -> None:
        """Inject the fault before all other hooks of its step."""
        if self.kind == "clock":
            time.sleep(0.1)
        elif step == self.step and self.kind in ("flip", "stall"):
            print(f"fault: {self.kind} after step {step}", flush=True)
            if self.kind == "flip":
                flip(run.state)
            else:
                time.sleep(600)


def flip(state: TrainState) -> None:
    """Flip the lowest bit of the first number of LEAF on this process's last device."""
    table = flatten(state.parameter)[LEAF]
    shards = [shard.data for shard in table.addressable_shards]
    words = np.asarray(shards[-1]).view(np.uint32).copy()
    words.flat[0] ^= 1
    shards[-1] = jax.device_put(words.view(np.float32), shards[-1].sharding)
    at, name = state.parameter, LEAF.split("/")
    for part in name[:-1]:
        at = at[part]
    at[name[-1]] = jax.make_array_from_single_device_arrays(table.shape, table.sharding, shards)


def inject(kind: str, argument: float) -> None:
    """Inject the fault into this process from now on."""
    true, began, save = time.monotonic, time.monotonic(), Run.save
    if kind == "clock":

        def save_and_print(self: Run, step: int) -> None:
            print(f"process {jax.process_index()} saves step {step} at {true():.2f}", flush=True)
            save(self, step)

        Run.save = save_and_print
        if argument != 1.0:
            epoch = time.time()
            time.monotonic = lambda: began + 3600 + argument * (true() - began)
            time.time = lambda: epoch + 3600 + argument * (true() - began)

    start = Trainer.__init__

    def begin(self: Trainer, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.hooks.insert(0, Fault(kind, int(argument)))

    Trainer.__init__ = begin


if __name__ == "__main__":
    inject(sys.argv[1], float(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
