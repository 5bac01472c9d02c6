"""Train one config with several settings, one run after another; then compare the runs in a table and a picture.

    plimsoll sweep --config=stdlib-tiny --workdir=runs/rates --grid learner.optimizer.learning_rate.peak_value=1e-3,3e-3
    plimsoll sweep --config=stdlib-tiny --workdir=runs/random --runs=8 --random learner.clip=log:0.1:10

The folder has a subfolder for each run, which is the workdir of a `plimsoll train`. A sweep that was stopped or killed
continues with the same command: runs that have ended are skipped, and the one that had not resumes. Before the first
run starts, a plan of each checks that it fits, and estimates the time.

Exit codes: 0 all runs ended; 1 a run failed (the others were trained); 2 the command or a config is invalid, and
nothing was started; 4 a run does not fit, and nothing was started; 130 and 143 stopped by SIGINT and SIGTERM.
"""

import json
import sys
from pathlib import Path

from plimsoll.framework.config import ConfigError
from plimsoll.framework.program import stored_config
from plimsoll.framework.terminal.exit_codes import COMPLETED, STOPPED, ExitCode
from plimsoll.launch import cli, reports
from plimsoll.launch.sweep_runs import Sweep, SweepRun, build_runs

# The files of a sweep's folder with its results.
_PICTURE = "sweep.png"
_RESULTS = "results.json"


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb."""
    add = parser.add_argument
    add("--workdir", required=True, metavar="DIR", help="folder for the runs, one subfolder each")
    add(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="train each value of a config field; repeatable: every combination. ';' separates values with a comma",
    )
    add(
        "--random",
        action="append",
        default=[],
        metavar="KEY=log:LOW:HIGH",
        help="draw values of a config field; also uniform:LOW:HIGH, int:LOW:HIGH and choice:A,B; repeatable",
    )
    add("--runs", type=int, metavar="N", help="number of draws; with --grid, every combination for each draw")
    add("--seed", type=int, default=0, metavar="S", help="seed of the draws; default 0")
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="metric to compare, as in metrics.jsonl; repeatable; the first one decides which run is the best",
    )
    parser.add_data()
    reports.add_flags(parser)
    add("--dry_run", action="store_true", help="list and price the runs, but start none")
    add("--force", action="store_true", help="train even if a run does not fit into memory")
    add("--device_memory_gib", type=float, metavar="GIB", help="memory limit per device; default: its memory")
    add("--host_memory_gib", type=float, metavar="GIB", help="host memory limit of a run; default: what is free")


@cli.main
def main(argv: list[str]) -> int:
    """Check and price every run, then train them one after another."""
    parser = cli.Parser("sweep", __doc__)
    add_flags(parser)
    command = parser.parse(argv)
    args = command.args
    if "://" in args.workdir:
        raise cli.UsageError(f"--workdir={args.workdir}: expected a local folder")
    cli.gib("device_memory_gib", args.device_memory_gib)
    cli.gib("host_memory_gib", args.host_memory_gib)
    runs = build_runs(args.grid, args.random, args.runs, args.seed)
    flags = [f"--config.{path}={text}" for path, text in command.overrides]
    flags += cli.get_data_flags(args)
    sweep = Sweep(command.spec, flags, runs)
    max_steps = _check_runs(command, sweep)
    folder = Path(args.workdir).expanduser()
    num_ended = sweep.resume(folder)
    for note in command.notes:
        print(note, file=sys.stderr)
    if num_ended:
        print(f"{num_ended} of {len(runs)} runs have ended and are skipped")
    open_runs = [run for run in runs if not run.has_ended]
    if open_runs and not _price(command, open_runs, sweep, dict(zip(map(id, runs), max_steps, strict=True))):
        return ExitCode.TOO_BIG
    if args.dry_run:
        print("dry run: nothing was trained")
        return ExitCode.DONE
    folder.mkdir(parents=True, exist_ok=True)
    sweep.write(folder)
    code = _train_all(sweep, folder, command)
    _report(sweep, folder, args.metric)
    if code in STOPPED:
        print("stopped; run the same command to continue")
        return code
    return ExitCode.DONE if all(run.code in COMPLETED for run in runs) else ExitCode.FAILED


def _check_runs(command: cli.Command, sweep: Sweep) -> list[int | None]:
    """Build the experiment of each run; returns their numbers of steps, None where only the data knows.

    Raises:
        ConfigError: the settings of a run are invalid; the message names it.
    """
    from plimsoll.launch.sweep_plan import build_commands

    overrides = {run.label(sweep.runs): [*command.overrides, *run.overrides] for run in sweep.runs}
    max_steps = []
    for label, variant in build_commands(command.args, command.spec, overrides).items():
        try:
            stored_config.check(variant.config)
            max_steps.append(variant.config.instantiate().trainer.known_steps)
        except ConfigError as error:
            raise ConfigError(f"run {label}: {error}") from error
    return max_steps


def _price(command: cli.Command, runs: list[SweepRun], sweep: Sweep, max_steps: dict[int, int | None]) -> bool:
    """Print what the runs need; returns False if one does not fit and --force is not set.

    Runs that differ only in numbers such as a learning rate are planned once.
    """
    from plimsoll.framework.terminal.tables import human_duration
    from plimsoll.launch.sweep_plan import price_runs

    args = command.args
    keys = [tuple(pair for pair in run.overrides if not _is_rate(*pair)) for run in runs]
    representatives: dict[tuple[tuple[str, str], ...], SweepRun] = {}
    for key, run in zip(keys, runs, strict=True):
        representatives.setdefault(key, run)
    limits = {"device_memory_gib": args.device_memory_gib, "host_memory_gib": args.host_memory_gib}
    plans = price_runs(command, {run.label(sweep.runs): run.overrides for run in representatives.values()}, limits)
    plan_by_key = dict(zip(representatives, plans, strict=True))
    bad = 0
    total_seconds: float | None = 0.0
    for key, run in zip(keys, runs, strict=True):
        plan = plan_by_key[key]
        steps = max_steps[id(run)]
        if plan["step_seconds"] is None or steps is None:
            total_seconds = None
        elif total_seconds is not None:
            total_seconds += plan["step_seconds"] * steps
        if not plan["fits"] or not plan["host_fits"]:
            bad += 1
            text = plan["verdict"] if not plan["fits"] else f"host memory {plan['host_verdict']}"
            print(f"run {run.label(sweep.runs)}: {text}")
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    time = "time unknown (of a step on this machine, or of an epoch of this data)"
    if total_seconds is not None:
        time = f"about {human_duration(total_seconds)} of training steps, plus starting and compiling each"
    if bad:
        print(f"plan (estimate): {bad} of {count} do not fit{'; training because of --force' if args.force else ''}")
        return args.force
    largest = max(plans, key=lambda plan: plan["bytes"])
    print(f"plan (estimate): {count}; the largest {largest['verdict']}; {time}")
    return True


def _is_rate(path: str, text: str) -> bool:
    """Return whether an override is a number of the learner that changes neither memory nor time."""
    if path in ("trainer.seed", "data.seed"):
        return True
    if not path.startswith("learner.") or text.lstrip("+-").isdecimal():
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def _train_all(sweep: Sweep, folder: Path, command: cli.Command) -> int:
    """Train the runs that have not ended; returns the exit code of the last one. A signal ends the sweep."""
    args = command.args
    code: int = ExitCode.DONE
    for index, run in enumerate(sweep.runs):
        if run.has_ended:
            continue
        label = run.label(sweep.runs)
        print(f"run {index + 1} of {len(sweep.runs)}: {label}", flush=True)
        words = [f"--config={sweep.config}", f"--workdir={folder / run.folder}", *sweep.flags]
        words += [f"--config.{path}={text}" for path, text in run.overrides]
        for name in ("device_memory_gib", "host_memory_gib"):
            if getattr(args, name) is not None:
                words.append(f"--{name}={getattr(args, name)}")
        if args.force:
            words.append("--force")
        code = _train_one(words, folder / run.folder, label)
        if code in STOPPED:
            return code
        run.code = code
        sweep.write(folder)
    return code


def _train_one(words: list[str], workdir: Path, label: str) -> int:
    """Train a run in a process of its own, with its output in a file; returns its exit code."""
    from plimsoll.framework.processes.child_commands import run_training

    return run_training(["-m", "plimsoll", "train", *words], workdir, label)


def _report(sweep: Sweep, folder: Path, requested: list[str]) -> None:
    """Print the table of the runs that have metrics, and write the picture and the results."""
    from plimsoll.framework.files.workdir import write_json
    from plimsoll.framework.terminal.tables import render
    from plimsoll.launch import comparison

    started = [run for run in sweep.runs if (folder / run.folder / "config.json").is_file()]
    records = comparison.read_runs(
        [str(folder / run.folder) for run in started], [run.label(sweep.runs) for run in started]
    )
    records = [record for record in records if record.rows]
    if not records:
        print("no run has metrics")
        return
    metrics = comparison.choose_metrics(records, requested)
    print(render([comparison.metrics_section(records, metrics)]).rstrip())
    write_json(folder / _RESULTS, json.loads(json.dumps(comparison.summarize(records, metrics))))
    if not metrics:
        return
    # Without a request, an evaluation decides if there is one.
    deciding = metrics[0] if requested else next((name for name in metrics if name.startswith("eval/")), metrics[0])
    best = comparison.find_best(records, deciding)
    if best is not None:
        record, step, value = best
        print(f"best: {record.name}: {deciding} {value:.6g} at step {step:,}")
    print(f"curves: {comparison.plot(records, metrics, folder / _PICTURE)}")


if __name__ == "__main__":
    sys.exit(main())
