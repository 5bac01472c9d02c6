"""Autotuning on eight pairs of a model and a machine: the chosen settings, compared with all-or-nothing switches.

    python -m tools.bench.autotune [PAIR ...] [--estimate] [--jsonl=FILE] [--page=FILE]

Without names, runs all pairs. Running a pair again replaces its row. Measures for each pair:

- the choice, confirmed by the target's compiler (unless --estimate), the share of the device's limit that it uses, the
  seconds that the search took, and the seconds of asking again;
- the same search with the switches of other frameworks: each kind of array entirely on the host or not at all, and one
  remat policy for all layers;
- the best of a sweep of a smaller space by the same analytical estimates: the config's own mesh, every number of
  microbatches, three policies (none, dots, full), every schedule of the platform, and, for each kind of array that can
  be offloaded, eighths of the layers, moved in the order of the search.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.configs import load
from plimsoll.extras.autotune.autotune import MEMORY, CompiledBytes, TuningRequest, autotune
from plimsoll.extras.autotune.cost_model import Candidate
from plimsoll.extras.autotune.search_space import offload_settings
from plimsoll.extras.autotune.settings import (
    ACCUMULATE,
    REMAT,
    Machine,
    Settings,
    TunedSettings,
    flags,
    select_changes,
    setting,
)
from plimsoll.extras.autotune.tuner import Tuner
from plimsoll.framework.config import Config
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.tables import human_bytes, human_duration
from plimsoll.launch.cli import apply_overrides
from plimsoll.launch.plan_common import start_cpus
from tools.bench.autotune_page import render_page

GIB = 1 << 30
_EIGHTHS = 8
_REMATS = ("none", "dots", "full")


class ModelAndMachine(NamedTuple):
    """A model and a machine.

    Attributes:
        config: name of the config.
        target: target name of the machine.
        overrides: overrides of the config.
        host_gib: host memory in GiB; None uses the target's known host memory.
        allowed: names of the changes to the training that autotuning may make.
    """

    config: str
    target: str
    overrides: tuple[tuple[str, str], ...] = ()
    host_gib: int | None = None
    allowed: tuple[str, ...] = ()


_ROWS = "data.global_batch_size"
# By bytes only, AdamW with 70 billion parameters does not fit in one device and 128 GiB of host memory.
_ADALOMO = (
    ("learner.optimizer", "adalomo"),
    ("learner.optimizer.learning_rate", "5e-4"),
    ("learner.master_dtype", "None"),
    ("learner.rounding", "stochastic"),
)
PAIRS = {
    "8b-v5e-1": ModelAndMachine("llama3-8b", "v5e-1", ((_ROWS, "1"),), None, ("rounding", "optimizer8bit")),
    "8b-v5e-8": ModelAndMachine("llama3-8b", "v5e-8", ((_ROWS, "64"),)),
    "8b-v5e-256": ModelAndMachine("llama3-8b", "v5e-256"),
    "8b-h100": ModelAndMachine("llama3-8b", "h100", ((_ROWS, "8"),), 128),
    "70b-v5p-128": ModelAndMachine("llama2-70b", "v5p-128"),
    "70b-h200": ModelAndMachine("llama2-70b", "h200", ((_ROWS, "4"), *_ADALOMO), 128),
    "7b-lora-4090": ModelAndMachine("lora:Qwen/Qwen2.5-7B", "4090", ((_ROWS, "16"),), 64),
    "124m-cpu-8": ModelAndMachine("gpt2-124m", "cpu:8"),
}


class UniformSettings(NamedTuple):
    """The best settings with switches for all layers.

    Attributes:
        overrides: the settings as flags.
        seconds: estimated seconds of a step.
        moved: bytes that cross the host link in a step.
        peak: estimated peak bytes of one device.
    """

    overrides: str
    seconds: float
    moved: float
    peak: int


class TuningRow(NamedTuple):
    """Result for a pair.

    Attributes:
        pair: name of the pair.
        choice: the chosen settings, or None if nothing fits.
        failure: why nothing fits.
        searched: seconds of the search.
        again: seconds of asking the same question again.
        switched: the best with switches for all layers, or None if nothing fits.
        swept: number of settings in the smaller space.
        best_of_sweep: least seconds of a step in the smaller space, or None if nothing in it fits.
    """

    pair: str
    choice: TunedSettings | None
    failure: str
    searched: float
    again: float
    switched: UniformSettings | None
    swept: int
    best_of_sweep: float | None

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        choice = None if self.choice is None else self.choice.without_neighbors().to_json()
        switched = None if self.switched is None else self.switched._asdict()
        return {**self._asdict(), "choice": choice, "switched": switched}


def tune_pair(name: str, *, estimate: bool) -> TuningRow:
    """Run the search for a pair, and the searches that it is compared with."""
    pair = PAIRS[name]
    target = targets.resolve(pair.target)
    config = load(pair.config, shape_only=True)
    apply_overrides(config, list(pair.overrides))
    host_bytes = None if pair.host_gib is None else pair.host_gib * GIB
    machine = Machine.derive(target, target.limit_bytes, host_bytes)
    question = TuningRequest(config, machine, MEMORY, [], pair.allowed, estimate)
    start = time.monotonic()
    found = autotune(question, target, host_bytes=host_bytes, fresh=True)
    searched = time.monotonic() - start
    start = time.monotonic()
    autotune(question, target, host_bytes=host_bytes)
    again = time.monotonic() - start
    known = CompiledBytes(question, fresh=False)
    best, count = _sweep(_add_known_peaks(_build_tuner(pair, config, target, host_bytes), known))
    switched = _find_uniform_settings(_add_known_peaks(_build_tuner(pair, config, target, host_bytes), known))
    return TuningRow(name, found.choice, found.failure, searched, again, switched, count, best)


def _build_tuner(pair: ModelAndMachine, config: Config, target: Target, host_bytes: int | None) -> Tuner:
    return Tuner(config, target, device_bytes=target.limit_bytes, host_bytes=host_bytes, allowed=pair.allowed)


def _add_known_peaks(tuner: Tuner, known: CompiledBytes) -> Tuner:
    """Record all compiled peaks of the search in the tuner, so that both judge in the same way what fits."""
    for settings, compiled in known.items():
        cost = tuner.cost_model.cost(settings)
        if cost is not None:
            tuner.record_compiled(Candidate(settings, cost, compiled), compiled)
    return tuner


def _find_uniform_settings(tuner: Tuner) -> UniformSettings | None:
    """Return the best settings that are the same for all layers."""
    # Without repeats of the layer pattern, the search can only offload all layers or none.
    tuner.space.num_repeats = 0
    best = tuner.propose()
    if best is None:
        return None
    return UniformSettings(flags(best.settings), best.cost.seconds, best.cost.moved, best.peak)


def _sweep(tuner: Tuner) -> tuple[float | None, int]:
    """Return (least seconds of a step in the smaller space, number of settings in it)."""
    seconds = []
    count = 0
    for settings in _smaller_space(tuner):
        count += 1
        cost = tuner.cost_model.cost(settings)
        if cost is not None and tuner.budget.fits(settings, cost):
            seconds.append(cost.seconds)
    return min(seconds, default=None), count


def _smaller_space(tuner: Tuner) -> Iterator[Settings]:
    """Yield the settings of the sweep, each once."""
    space = tuner.space
    known: set[Settings] = set()
    for variant, remat, count in itertools.product(tuner.variants, _REMATS, space.accumulations(())):
        for schedule in space.schedules(count):
            base = (*variant, setting(ACCUMULATE, count), *schedule, setting(REMAT, remat))
            for placement in _placements(tuner, schedule):
                settings = select_changes(tuner.cost_model.config, (*base, *placement))
                if settings not in known:
                    known.add(settings)
                    yield settings


def _placements(tuner: Tuner, schedule: Settings) -> Iterator[Settings]:
    """Yield placements of arrays on the host, from none to all, by eighths of the layers."""
    space = tuner.space
    for levels in space.offload_orders(schedule):
        for level in levels:
            yield offload_settings(level)
            if level.field is None:
                continue
            for eighths in range(1, _EIGHTHS):
                layers = round(space.num_repeats * eighths / _EIGHTHS) * space.pattern_length
                yield offload_settings(level, layers)


def main() -> None:
    """Run the searches for the pairs, and write the rows and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help="pairs to run; default: all of " + ", ".join(PAIRS))
    parser.add_argument(
        "--estimate", action="store_true", help="rank by the analytical estimate only, without compiling"
    )
    parser.add_argument("--jsonl", type=Path, default=Path("docs/benchmarks/load_line.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks/load_line.md"))
    args = parser.parse_args()
    unknown = set(args.pairs) - set(PAIRS)
    if unknown:
        parser.error(f"no pairs {sorted(unknown)}; there are {', '.join(PAIRS)}")
    rows = {}
    if args.jsonl.exists():
        stored_rows = [json.loads(line) for line in args.jsonl.read_text().splitlines()]
        rows = {row["pair"]: row for row in stored_rows}
    names = args.pairs or list(PAIRS)
    targets.set_environment(",".join(PAIRS[name].target for name in names))
    # JAX starts only once, so it needs as many CPU devices as the largest pair.
    start_cpus(targets.resolve(PAIRS[name].target) for name in names)
    for name in names:
        row = tune_pair(name, estimate=args.estimate)
        rows[name] = row.to_json()
        outcome = row.failure
        if row.choice is not None:
            seconds = human_duration(row.choice.seconds or 0.0)
            outcome = f"{human_bytes(row.choice.peak)}, {seconds} a step: {row.choice.flags}"
        print(f"{name} ({row.searched:.0f} s): {outcome}", flush=True)
        # Write after each row: a later pair may take minutes, or fail.
        ordered_rows = [rows[pair] for pair in PAIRS if pair in rows]
        args.jsonl.write_text("".join(f"{json.dumps(one)}\n" for one in ordered_rows))
        args.page.write_text(render_page(ordered_rows))


if __name__ == "__main__":
    main()
