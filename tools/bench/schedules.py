"""Time of a step under each schedule: the same model with different schedules, side by side in one process.

    python -m tools.bench.schedules --config=nanogpt-cpu --config.model.stack.unroll=1 --rounds 12

Rounds alternate between the schedules, and each takes `--steps` steps per round. Ratios are medians over the pairs of
a round, so other work on the machine affects all schedules alike. Prints a markdown table; the first schedule is the
reference.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import numpy as np

from plimsoll import configs
from plimsoll.framework.plan.memory_budget import measure_need
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.tables import human_bytes
from plimsoll.launch import cli
from tools.bench.ratios import ratio

HOST = {"memory.optimizer_state": "pinned_host"}
CLIP = {"learner.clip_mode": "update_rms"}
LAYERS = {"memory.update": "layer_programs"}
AWAY = ("memory.gradients", "memory.parameters", "memory.activations")
SETTINGS = {
    "`after_backward`, state on the device": {},
    "`after_backward`, state on the host": HOST,
    "`streamed`, state on the device": {"memory.update": "streamed"},
    "`streamed`, state on the host": {"memory.update": "streamed", **HOST},
    "`streamed`, gradients and state on the host": {
        "memory.update": "streamed",
        "memory.gradients": "pinned_host",
        **HOST,
    },
    "`in_backward`, `update_rms`, state on the device": {"memory.update": "in_backward", **CLIP},
    "`in_backward`, `update_rms`, state on the host": {"memory.update": "in_backward", **CLIP, **HOST},
    "`in_backward`, `two_pass`, state on the device": {"memory.update": "in_backward", "learner.clip_mode": "two_pass"},
    "`layer_programs`, all on the device": LAYERS,
    "`layer_programs`, all on the host": {**LAYERS, **HOST, **dict.fromkeys(AWAY, "pinned_host")},
    "`layer_programs`, each layer updated at once, `update_rms`": {**LAYERS, **CLIP, "memory.gradients": "none"},
}


class TimedProgram:
    """A program with its state, and the seconds of its steps per round."""

    def __init__(self, spec: str, overrides: cli.Overrides, name: str):
        config = configs.load(spec)
        cli.apply_overrides(config, [*overrides, *SETTINGS[name].items()])
        self.name = name
        self.program = Program(config.instantiate(), jax.devices()[:1])
        self.offloaded = self.program.layout.bytes_per_device(memory_kind="pinned_host")
        self.state: Any = self.program.init()
        shape = self.program.batch_specs["tokens"].shape
        tokens = np.random.default_rng(0).integers(
            0, self.program.experiment.language_model.vocab_size, shape, np.int32
        )
        self.batch = self.program.put({"tokens": tokens, "targets": tokens, "weights": np.ones(shape, np.float32)})
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def run(self, steps: int) -> None:
        """Take steps and record their seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        metrics = None
        for _ in range(steps):
            self.state, metrics = self.program.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    @property
    def peak(self) -> int:
        """The compiled peak of the step in bytes."""
        return measure_need(self.program).peak


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    spec, overrides, rest = cli.split(sys.argv[1:])
    args = parser.parse_args(rest)
    contestants = [TimedProgram(spec or "nanogpt-cpu", overrides, name) for name in SETTINGS]
    for contestant in contestants:
        contestant.run(1)  # compiles
        contestant.wall.clear()
        contestant.cpu.clear()
    for index in range(args.rounds):
        for contestant in contestants[index % len(contestants) :] + contestants[: index % len(contestants)]:
            contestant.run(args.steps)
    print("| schedule | peak | on the host | step time (wall) | step time (processor) |\n|---|---|---|---|---|")
    first = contestants[0]
    for one in contestants:
        wall, cpu = ratio(one.wall, first.wall), ratio(one.cpu, first.cpu)
        cells = [one.name, human_bytes(one.peak), human_bytes(one.offloaded), f"{wall}", f"{cpu}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
