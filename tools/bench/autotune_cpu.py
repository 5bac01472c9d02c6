"""Test whether the plan ranks settings as measured times do: GPT-2 124M on eight CPU devices.

    python -m tools.bench.autotune_cpu [--rounds=3] [--page=FILE]

Of all fitting combinations of mesh, number of microbatches, schedule and remat policy in the search, measures the five
fastest by the analytical estimate. Among settings whose times differ by less than 1%, which the search treats as
equally fast, it takes the one with the fewest changes. The first five are close to each other, so it also measures
three slower ones, each 25% slower than the one before. Rounds alternate between the settings; seconds are medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from plimsoll.configs import load
from plimsoll.extras.autotune.search import TIE_FACTOR
from plimsoll.extras.autotune.settings import ACCUMULATE, REMAT, Settings, flags, select_changes, setting, with_settings
from plimsoll.extras.autotune.tuner import Tuner
from plimsoll.framework.config import Config
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.cache import versions
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.tables import human_duration
from plimsoll.launch.cli import apply_overrides

_BEST = 5
_SLOWER = 1.25
_MOST_SLOWER = 3
# A step with the config's own batch takes minutes here.
_SMALLER = (("data.global_batch_size", "8"), ("data.seq_len", "128"))
_HEAD = """# Autotuning against measured step times

GPT-2 124M with 8 rows of 128 tokens on eight CPU devices, which share two cores: the five fastest settings of the
search by the analytical estimate, and some slower ones, measured. `python -m tools.bench.autotune_cpu` wrote this on
{day}: {versions}, medians of {rounds} steps, which alternate between the settings.

Ranks agree to {best:.2f} among the five best, and to {all:.2f} among all (Spearman's coefficient).

| settings | planned | measured | measured / fastest measured | planned / fastest planned |
|---|---|---|---|---|
"""


class Rival(NamedTuple):
    """Settings, and their estimated seconds of a step."""

    settings: Settings
    seconds: float


class MeasuredSettings:
    """The program for one choice of settings, and the measured seconds of its steps.

    Args:
        config: config of the training run.
        rival: settings to measure.
    """

    def __init__(self, config: Config, rival: Rival):
        self.rival = rival
        self.seconds: list[float] = []
        self._program = Program(with_settings(config, rival.settings).instantiate(), jax.devices())
        shape = self._program.batch_specs["tokens"].shape
        vocab_size = self._program.experiment.language_model.vocab_size
        tokens = np.random.default_rng(0).integers(0, vocab_size, shape, np.int32)
        self._batch = self._program.put({"tokens": tokens, "targets": tokens, "weights": np.ones(shape, np.float32)})

    def run(self) -> None:
        """Take two steps and record the seconds of the second one. Only one program's state is alive at a time."""
        state: Any = self._program.init()
        state, _ = self._program.step(state, self._batch)
        jax.block_until_ready(state)
        start = time.perf_counter()
        result = self._program.step(state, self._batch)
        jax.block_until_ready(result)
        self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.seconds)


def rivals(tuner: Tuner) -> list[Rival]:
    """Return all settings of the search that fit, fastest first."""
    space = tuner.space
    seconds: dict[Settings, float] = {}
    for variant, mesh in itertools.product(tuner.variants, space.meshes()):
        for count in space.accumulations(mesh):
            for schedule, remat in itertools.product(space.schedules(count), space.remats()):
                every = (*variant, *mesh, setting(ACCUMULATE, count), *schedule, setting(REMAT, remat))
                settings = select_changes(tuner.cost_model.config, every)
                cost = tuner.cost_model.cost(settings)
                if cost is not None and tuner.budget.fits(settings, cost):
                    seconds[settings] = cost.seconds
    by_time = sorted(seconds, key=lambda settings: (seconds[settings], len(settings)))
    return [Rival(settings, seconds[settings]) for settings in by_time]


def select_rivals(ordered_rivals: Sequence[Rival]) -> list[Rival]:
    """Select the settings to measure: the best, and some slower ones."""
    measured_rivals: list[Rival] = []
    for rival in ordered_rivals:
        apart = TIE_FACTOR if len(measured_rivals) < _BEST else _SLOWER
        if not measured_rivals or rival.seconds > apart * measured_rivals[-1].seconds:
            measured_rivals.append(rival)
        if len(measured_rivals) == _BEST + _MOST_SLOWER:
            break
    return measured_rivals


def render_page(measured: Sequence[MeasuredSettings], rounds: int) -> str:
    """Return the page in Markdown."""
    used_versions = ", ".join(f"{name} {version}" for name, version in versions("jax", "jaxlib").items())
    head = _HEAD.format(
        day=date.today().isoformat(),
        versions=used_versions,
        rounds=rounds,
        best=_agreement(measured[:_BEST]),
        all=_agreement(measured),
    )
    fastest = min(one.median for one in measured)
    fastest_planned = measured[0].rival.seconds
    lines = []
    for one in measured:
        planned = one.rival.seconds
        cells = [
            f"`{flags(one.rival.settings)}`" if one.rival.settings else "as it is",
            human_duration(planned),
            human_duration(one.median),
            f"{one.median / fastest:.3f}",
            f"{planned / fastest_planned:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return head + "".join(lines)


def _agreement(measured: Sequence[MeasuredSettings]) -> float:
    """Return Spearman's rank correlation of planned and measured seconds."""
    planned_ranks = stats.rankdata([one.rival.seconds for one in measured])
    measured_ranks = stats.rankdata([one.median for one in measured])
    return float(np.corrcoef(planned_ranks, measured_ranks)[0, 1])


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks/load_line_cpu.md"))
    args = parser.parse_args()
    targets.set_environment("cpu:8")
    target = targets.resolve("cpu:8")
    config = load("gpt2-124m")
    apply_overrides(config, list(_SMALLER))
    tuner = Tuner(config, target, device_bytes=target.limit_bytes)
    target.devices()
    measured = [MeasuredSettings(config, rival) for rival in select_rivals(rivals(tuner))]
    for round_index in range(args.rounds):
        first = round_index % len(measured)
        for one in [*measured[first:], *measured[:first]]:
            one.run()
            planned = one.rival.seconds
            print(f"{one.seconds[-1]:.2f} s, planned {planned:.2f} s: {flags(one.rival.settings)}", flush=True)
    args.page.write_text(render_page(measured, args.rounds))


if __name__ == "__main__":
    main()
