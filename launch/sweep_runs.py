"""The runs of a sweep: their settings, from --grid and --random, and the file that records them."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.terminal.exit_codes import COMPLETED, ExitCode
from plimsoll.launch import cli

# The file of a sweep's folder that has its runs.
SWEEP_FILE = "sweep.json"
_FORMAT = 1
# Codes of runs that would end in the same way again.
_ENDED = (*COMPLETED, ExitCode.NONFINITE)
_RANDOM_FORM = "KEY=log:LOW:HIGH, KEY=uniform:LOW:HIGH, KEY=int:LOW:HIGH or KEY=choice:A,B"


@dataclass
class SweepRun:
    """A run of a sweep.

    Attributes:
        folder: name of its folder in the sweep's.
        overrides: its own overrides, (dotted path, text).
        code: exit code of its last start; None if it has not ended.
    """

    folder: str
    overrides: list[tuple[str, str]]
    code: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is over, so that another start would change nothing."""
        return self.code in _ENDED

    def label(self, runs: Sequence["SweepRun"]) -> str:
        """Return its folder and its settings, with the shortest ends of the paths that tell the keys apart."""
        paths = list(dict.fromkeys(path for run in runs for path, _ in run.overrides))
        short_names = _shorten_paths(paths)
        settings = ", ".join(f"{short_names[path]}={text}" for path, text in self.overrides)
        return f"{self.folder} {settings}"


@dataclass
class Sweep:
    """The runs of a sweep, and what they have in common.

    Attributes:
        config: the name that --config gives.
        flags: the flags of `plimsoll train` that all runs have.
        runs: the runs, in order.
    """

    config: str
    flags: list[str]
    runs: list[SweepRun] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the file of the sweep, atomically."""
        runs = [{"folder": run.folder, "overrides": run.overrides, "code": run.code} for run in self.runs]
        write_json(folder / SWEEP_FILE, {"format": _FORMAT, "config": self.config, "flags": self.flags, "runs": runs})

    def resume(self, folder: Path) -> int:
        """Take over the exit codes of the runs that an earlier start has recorded; returns how many are over.

        Raises:
            ValueError: the folder holds a sweep with other settings, or its file is damaged.
        """
        path = folder / SWEEP_FILE
        if not path.is_file():
            return 0
        try:
            stored: Any = parse_json(path.read_bytes())
            common = (stored["config"], stored["flags"])
            runs = [([tuple(pair) for pair in run["overrides"]], run["code"]) for run in stored["runs"]]
            is_valid = stored["format"] == _FORMAT and all(code is None or type(code) is int for _, code in runs)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
        if not is_valid:
            raise ValueError(f"{path} is not the file of a sweep of this version; choose another --workdir")
        if common != (self.config, self.flags):
            raise ValueError(
                f"--workdir: {folder} holds a sweep of {_describe(*common)}, this command is one of "
                f"{_describe(self.config, self.flags)}; choose another --workdir"
            )
        if [overrides for overrides, _ in runs] != [run.overrides for run in self.runs[: len(runs)]]:
            raise ValueError(
                f"--workdir: {folder} holds a sweep of {len(runs)} runs with other settings; choose another --workdir, "
                "or repeat its --grid, --random and --seed (--runs may be larger)"
            )
        for run, (_, code) in zip(self.runs, runs, strict=False):
            run.code = code
        return sum(run.has_ended for run in self.runs)


def _describe(config: object, flags: object) -> str:
    return " ".join([str(config), *map(str, flags if isinstance(flags, list) else [])])


def build_runs(grid: Sequence[str], randoms: Sequence[str], num_draws: int | None, seed: int) -> list[SweepRun]:
    """Return the runs: every combination of the grid's values, for every draw of the random values.

    Args:
        grid: texts of --grid, KEY=A,B.
        randoms: texts of --random, such as KEY=log:1e-4:1e-2.
        num_draws: --runs, the number of draws; None without --random.
        seed: --seed.

    Raises:
        UsageError: a text is malformed, a key is repeated, or flags do not go together.
    """
    if not grid and not randoms:
        raise cli.UsageError("expected --grid KEY=A,B or --random KEY=log:LOW:HIGH, at least one")
    if bool(randoms) != (num_draws is not None):
        missing = "--random requires --runs=N" if randoms else "--runs requires --random"
        raise cli.UsageError(f"{missing}, the number of draws")
    if num_draws is not None and num_draws < 1:
        raise cli.UsageError(f"--runs={num_draws}: expected at least 1")
    values_by_path = dict(_parse_grid(text) for text in grid)
    samplers = dict(_parse_random(text) for text in randoms)
    keys = [*(_path(text) for text in grid), *(_path(text) for text in randoms)]
    for key in keys:
        if keys.count(key) > 1:
            raise cli.UsageError(f"{key} is given twice in --grid and --random")
    generator = random.Random(seed)
    combinations = list(
        itertools.product(*([(path, text) for text in texts] for path, texts in values_by_path.items()))
    )
    overrides = []
    # The draws come first, so that a larger --runs only adds runs.
    for _ in range(num_draws or 1):
        drawn = [(path, sampler.draw(generator)) for path, sampler in samplers.items()]
        overrides += [[*combination, *drawn] for combination in combinations]
    return [SweepRun(f"{index:03d}", pairs) for index, pairs in enumerate(overrides)]


def _path(text: str) -> str:
    """Return the dotted path of KEY=..., which may start with "config."."""
    return text.partition("=")[0].removeprefix("--").removeprefix("config.")


def _parse_grid(text: str) -> tuple[str, list[str]]:
    """Return (path, values) of KEY=A,B. As in `plan --compare`, values that contain a comma are separated by ";"."""
    _, _, values = text.partition("=")
    texts = [value.strip() for value in values.split(";" if ";" in values else ",")]
    if not _path(text) or not all(texts):
        raise cli.UsageError(f"--grid {text}: expected KEY=A,B, such as learner.optimizer.learning_rate=1e-3,1e-4")
    if len(set(texts)) < len(texts):
        raise cli.UsageError(f"--grid {text}: a value is given twice")
    return _path(text), texts


@dataclass(frozen=True)
class _Sampler:
    """Draws the values of a key."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    def draw(self, generator: random.Random) -> str:
        if self.kind == "choice":
            return generator.choice(self.choices)
        if self.kind == "int":
            return str(generator.randint(int(self.low), int(self.high)))
        if self.kind == "log":
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        # Four digits are enough to tell runs apart, and short enough to type.
        return f"{value:.4g}"


def _parse_random(text: str) -> tuple[str, _Sampler]:
    """Return (path, sampler) of KEY=log:LOW:HIGH and the other forms."""
    path = _path(text)
    kind, _, rest = text.partition("=")[2].partition(":")
    error = cli.UsageError(f"--random {text}: expected {_RANDOM_FORM}")
    if not path or not rest:
        raise error
    if kind == "choice":
        choices = tuple(value.strip() for value in rest.split(";" if ";" in rest else ","))
        if not all(choices):
            raise error
        return path, _Sampler(kind, choices=choices)
    bounds = rest.split(":")
    if kind not in ("log", "uniform", "int") or len(bounds) != 2:
        raise error
    try:
        low, high = (int(bound) if kind == "int" else float(bound) for bound in bounds)
    except ValueError:
        raise error from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (kind == "log" and low <= 0):
        positive = "0 < LOW < HIGH" if kind == "log" else "LOW < HIGH"
        raise cli.UsageError(f"--random {text}: expected finite bounds with {positive}")
    return path, _Sampler(kind, low, high)


def _shorten_paths(paths: Sequence[str]) -> dict[str, str]:
    """Return {path: its shortest end that no other path has}."""
    short_names = {}
    for path in paths:
        parts = path.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        # The whole path may be the end of another one.
        short_names[path] = next((end for end in ends if _count_ends(paths, end) == 1), path)
    return short_names


def _count_ends(paths: Sequence[str], end: str) -> int:
    return sum(f".{path}".endswith(f".{end}") for path in paths)
