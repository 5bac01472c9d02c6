"""Compare memory-efficient optimizers with AdamW: bytes of state, step time, and bits per byte after training.

    python -m tools.bench.optimizers --rows adamw,lion --results results.jsonl     # trains, then prints
    python -m tools.bench.optimizers --times --results results.jsonl               # step times, side by side
    python -m tools.bench.optimizers --print --results docs/benchmarks/optimizers.jsonl

Each learning rate of a row is tried with one seed. If the best rate is at an edge, one more rate beyond that edge is
tried. The best rate then gets the other seeds, which change initialization and data order. Every finished run is
appended to the results file immediately and is not repeated as long as the optimizer behaves the same, which a
comparison of three steps checks first. Several processes may append to one file if each has its own rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from plimsoll import configs
from plimsoll.framework.devices.executables import use_compilation_cache
from plimsoll.framework.layout import StateLayout
from plimsoll.framework.program.program import Program
from plimsoll.launch import cli
from tools.bench.optimizer_rows import MODEL, ROWS, Row, build
from tools.bench.ratios import ratio

Line = dict[str, Any]
SAME = 2e-3  # relative tolerance of the change over three steps, for an optimizer to count as unchanged
LOSES = {False: 0.01, True: 0.005}  # fraction of the baseline's bits per byte: for an optimizer, for bf16 weights
TURN = 4  # steps
LARGE = "llama2-7b"  # config whose layout is shown too; none of its arrays is allocated


class StoredResults:
    """A file of JSON lines: runs, with their row, rate, seed, steps and `trace`; and step times of rows."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def lines(self) -> list[Line]:
        """Read all lines."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, line: Line) -> Line:
        """Append a line in a single write."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def runs(self, name: str, steps: int, trace: list[float] | None = None) -> dict[tuple[float, int], Line]:
        """Return a row's runs by rate and seed: those whose trace matches `trace`, or by default the last run's."""
        runs = [line for line in self.lines if line.get("run") == name and line["steps"] == steps]
        like = np.asarray(trace or [line["trace"] for line in runs[-1:]])
        return {(one["rate"], one["seed"]): one for one in runs if np.allclose(one["trace"], like, rtol=SAME, atol=0)}


def build_program(row: Row, rate: float, seed: int, args: Namespace, **data: int) -> Program:
    """Build the program of a row on one device, and set up its data."""
    config = build(row, rate, seed, args.steps, args.config)
    for name, value in data.items():
        config.data.set_path(name, value)
    experiment = config.instantiate()
    experiment.data.setup(args.data)
    return Program(experiment, jax.devices()[:1])


def trace(row: Row, args: Namespace) -> list[float]:
    """Return the RMS change of each parameter over three steps on short sequences. It identifies the optimizer."""
    program = build_program(row, 1e-2, 0, args, seq_len=16)
    first = jax.tree.map(np.asarray, (state := program.init()).parameter)
    for step in range(3):
        state, _ = program.step(state, program.put(program.experiment.data.train_batch(step, program.rows)))
    moved = jax.tree.map(lambda a, b: np.sqrt(np.mean((np.float64(a) - b) ** 2)), state.parameter, first)
    return [float(f"{x:.6g}") for x in jax.tree.leaves(moved)]


def train(row: Row, rate: float, seed: int, args: Namespace) -> Line:
    """Train once; return the validation bits per byte at the end, and the mean loss of the last tenth of the steps."""
    started = time.process_time()
    program = build_program(row, rate, seed, args)
    experiment, state = program.experiment, program.init()
    losses: list[float] = []
    with experiment.data.train_iterator(0, program.rows) as batches:
        for _ in range(args.steps):
            state, metrics = program.step(state, program.put(next(batches)[1]))
            losses.append(float(metrics["loss"]))
    totals: dict[str, float] = {}
    with experiment.data.eval_batches(experiment.data.validation_names[0], program.rows, args.eval_batches) as batches:
        for batch in batches:
            for name, value in program.evaluate(state, program.put(batch)).items():
                totals[name] = totals.get(name, 0.0) + float(value)
    found = {"bits_per_byte": experiment.model.summary(totals)["bits_per_byte"]}
    found["loss"] = statistics.fmean(losses[-max(1, args.steps // 10) :])
    tokens = args.steps * experiment.data.global_batch_size * experiment.data.seq_len
    return {**found, "tokens": tokens, "cpu_seconds": round(time.process_time() - started, 1)}


def search(name: str, results: StoredResults, args: Namespace) -> None:
    """Do the missing runs of a row: its rates, one more beyond an edge, then the other seeds at the best rate."""
    row = ROWS[name]
    if isinstance(row.rates, str) and not results.runs(row.rates, args.steps):
        raise cli.UsageError(
            f"row {name} takes the best learning rate of {row.rates}, which has no results; run that row"
        )
    mark = trace(row, args)

    def bits(rate: float, seed: int) -> float:
        done = results.runs(name, args.steps, mark)
        if (rate, seed) not in done:
            key = {"run": name, "rate": rate, "seed": seed, "steps": args.steps}
            done[rate, seed] = results.add({**key, **train(row, rate, seed, args), "trace": mark})
            print(json.dumps(done[rate, seed]), flush=True)
            jax.clear_caches()
        return _comparable(done[rate, seed])

    if isinstance(row.rates, str):
        best = best_rate(results.runs(row.rates, args.steps))
    else:
        rates = list(row.rates)
        best = min(rates, key=lambda rate: bits(rate, 0))
        for _ in range(args.extend):
            if best not in (rates[0], rates[-1]):
                break
            beyond = rates[0] ** 2 / rates[1] if best == rates[0] else rates[-1] ** 2 / rates[-2]
            rates = sorted([*rates, float(f"{beyond:.3g}")])
            best = min(rates, key=lambda rate: bits(rate, 0))
    for seed in range(args.seeds):
        bits(best, seed)


def _comparable(run: Line) -> float:
    bits = run["bits_per_byte"]
    return bits if np.isfinite(bits) else np.inf


def best_rate(runs: dict[tuple[float, int], Line]) -> float:
    """Return the rate with the lowest bits per byte for the first seed."""
    first = {rate: _comparable(run) for (rate, seed), run in runs.items() if seed == 0}
    return min(first, key=lambda rate: first[rate])


def state_bytes(row: Row, spec: str, offloaded: bool) -> tuple[float, float]:
    """Return the layout's bytes of optimizer state per trained parameter, on the device and on the host."""
    config = build(row, 1e-2, 0, 10, spec)
    config.memory.optimizer_state = "pinned_host" if offloaded else "device"
    experiment = config.instantiate()
    layout = StateLayout(experiment.state_specs(), experiment.mesh.build(jax.devices()[:1]))
    sizes = (layout.bytes_per_device("optimizer", kind) for kind in ("device", "pinned_host"))
    here, away = (size / layout.size("parameter") for size in sizes)
    return here, away


def time_steps(names: list[str], results: StoredResults, args: Namespace) -> None:
    """Time steps of all rows side by side; rows take turns within a round. See tools.bench.ratios for the ratios."""
    times_by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in ("adamw", *names)}
    programs = {name: build_program(ROWS[name], 1e-3, 0, args) for name in times_by_name}
    states = {name: program.init() for name, program in programs.items()}
    batch = programs["adamw"].put(programs["adamw"].experiment.data.train_batch(0, programs["adamw"].rows))
    for index in range(-1, args.times):  # the first round compiles
        order = list(times_by_name)[index % len(times_by_name) :] + list(times_by_name)[: index % len(times_by_name)]
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(TURN):
                states[name], _ = programs[name].step(states[name], batch)
            jax.block_until_ready(states[name])
            if index >= 0:
                times_by_name[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    for name, own in times_by_name.items():
        ratios = [
            ratio([pair_times[i] for pair_times in own], [pair_times[i] for pair_times in times_by_name["adamw"]])
            for i in (0, 1)
        ]
        found = {key: [r.median, *r.interval] for key, r in zip(("wall", "processor"), ratios, strict=True)}
        results.add({"time": name, "rounds": args.times, "steps": TURN, **found})


def quality(name: str, results: StoredResults, args: Namespace) -> list[str]:
    """Return the cells: best learning rate, bits per byte, difference from the baseline by seed, and verdict."""
    runs, base = (results.runs(one, args.steps) for one in (name, ROWS[name].baseline))
    if not runs or not base:
        return ["not run", "", "", ""]
    rate, other = best_rate(runs), best_rate(base)
    bits = {seed: _comparable(run) for (at, seed), run in runs.items() if at == rate}
    apart = [x / _comparable(base[other, seed]) - 1 for seed, x in bits.items() if (other, seed) in base]
    tried = sorted(at for at, seed in runs if seed == 0)
    edge = " (edge)" if len(tried) > 1 and rate in (tried[0], tried[-1]) else ""
    cells = [
        f"{rate:g}{edge}",
        _spread([*bits.values()], "{:.4f}"),
        _spread([100 * x for x in apart], "{:+.2f}") + " %",
    ]
    return [*cells, "yes" if statistics.fmean(apart) > LOSES[ROWS[name].weights] else "no"]


def _spread(values: list[float], form: str) -> str:
    spread = form.replace("+", "").format(statistics.stdev(values)) if len(values) > 1 else "one seed"
    return f"{form.format(statistics.fmean(values))} ± {spread}"


def tables(names: list[str], results: StoredResults, args: Namespace) -> str:
    """Return all results as markdown. Rows without results are left out."""
    times = {line["time"]: line for line in results.lines if "time" in line}
    names = [name for name in names if name in times or results.runs(name, args.steps)]
    text = ""
    for weights in (False, True):
        if not (own := [name for name in names if ROWS[name].weights == weights]):
            continue
        head = ["bf16 weights" if weights else "optimizer", "B/param", "7B", "7B offloaded: device", "host"]
        head += ["step, wall", "step, processor", "learning rate", "bits per byte"]
        head += [f"to {ROWS[ROWS[own[0]].baseline].title}", "loses quality"]
        text += f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|\n"
        for name in own:
            row = ROWS[name]
            large = [state_bytes(row, LARGE, offloaded) for offloaded in (False, True)]
            sizes = [state_bytes(row, args.config, False)[0], large[0][0], *large[1]]
            clock = [times[name][key] if name in times else None for key in ("wall", "processor")]
            shown = ["not run" if one is None else f"{one[0]:.2f} [{one[1]:.2f}, {one[2]:.2f}]" for one in clock]
            cells = [row.title, *(f"{size:.4g}" for size in sizes), *shown, *quality(name, results, args)]
            text += f"| {' | '.join(cells)} |\n"
    text += "\n| optimizer | bits per byte of the first seed by learning rate |\n|---|---|\n"
    for name in names:
        first = {rate: run for (rate, seed), run in results.runs(name, args.steps).items() if seed == 0}
        tried = ", ".join(f"{rate:g}: {first[rate]['bits_per_byte']:.4f}" for rate in sorted(first))
        text += f"| {ROWS[name].title} | {tried or 'not run'} |\n"
    return text


def parser() -> cli.Parser:
    """Build the argument parser."""
    parser = cli.Parser("optimizers", __doc__, takes_config=False)
    parser.add_argument("--results", type=Path, default=Path("docs/benchmarks/optimizers.jsonl"), metavar="FILE")
    parser.add_argument("--rows", default=",".join(ROWS), help="names of the rows; default: all of " + ", ".join(ROWS))
    parser.add_argument("--config", default=MODEL, help="a named config, or path/to/file.py:NAME")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds for the best learning rate")
    parser.add_argument("--extend", type=int, default=1, help="number of rates to try beyond an edge that is the best")
    parser.add_argument("--eval-batches", type=int, default=50)
    parser.add_argument("--data", default="~/.cache/plimsoll/optimizers", help="folder for the tokenized data")
    parser.add_argument(
        "--times",
        type=int,
        default=0,
        metavar="ROUNDS",
        help="measure step times over this many rounds instead of training",
    )
    parser.add_argument("--print", action="store_true", help="print stored results without training")
    return parser


@cli.main
def main(argv: list[str]) -> int:
    """Train the missing runs of the rows, in order, print the tables and return 0."""
    args = parser().parse_flags(argv)
    args.data, names = str(Path(args.data).expanduser()), args.rows.split(",")
    use_compilation_cache(configs.load(args.config).trainer.compilation_cache)
    results = StoredResults(args.results)
    for name in names:
        if name not in ROWS:
            raise cli.UsageError(f"--rows: no row {name!r}; valid: {', '.join(ROWS)}")
    if args.times:
        time_steps(names, results, args)
    for name in () if args.times or args.print else names:
        search(name, results, args)
    print(tables(names, results, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
