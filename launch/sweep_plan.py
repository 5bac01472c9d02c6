"""Prices the runs of a sweep before it starts: the memory and the time of each, by the analytical estimate.

It runs in a process of its own, because JAX would hold the devices that the runs need.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.terminal.phases import phase
from plimsoll.launch import cli


def build_commands(
    args: argparse.Namespace, spec: str, overrides: Mapping[str, cli.Overrides]
) -> dict[str, cli.Command]:
    """Return the commands of runs, each as `plimsoll train` would parse its own.

    Args:
        args: parsed flags, with `data` and `data_weights`.
        spec: name of the config.
        overrides: all overrides of each run, by the name of the run.
    """
    from plimsoll import configs
    from plimsoll.configs import data_flag

    base = configs.load(spec, lambda line: None)
    # --data depends on the names of the overrides and on the size of images. Reading it again may take long.
    named_by_settings: dict[object, Config] = {}
    commands = {}
    for label, run_overrides in overrides.items():
        named = base
        if args.data:
            settings = {base.current_path(path): text for path, text in run_overrides}
            image_size = settings.get("data.image_size")
            key = (frozenset(settings), image_size)
            if key not in named_by_settings:
                named_by_settings[key], _ = data_flag.with_data(
                    base, args.data, settings, weights=args.data_weights, image_size=image_size
                )
            named = named_by_settings[key]
        commands[label] = cli.Command(args, spec, named, run_overrides)
    return commands


def price_runs(
    command: cli.Command, overrides: Mapping[str, cli.Overrides], limits: Mapping[str, float | None]
) -> list[Any]:
    """Return the plan of each run, as a dict: fits, bytes, verdict, host_fits, host_verdict, step_seconds.

    Args:
        command: command line of the sweep.
        overrides: the runs' own overrides, by the name of the run in errors.
        limits: device_memory_gib and host_memory_gib; None for the machine's own.

    Raises:
        ConfigError: a run does not fit the devices (its mesh, for example).
    """
    job = {
        "spec": command.spec,
        "data": getattr(command.args, "data", None),
        "data_weights": getattr(command.args, "data_weights", None),
        "overrides": {label: [*command.overrides, *own] for label, own in overrides.items()},
        **limits,
    }
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder) / "answer.json"
        words = [sys.executable, "-m", "plimsoll.launch.sweep_plan", str(answer_file)]
        with phase("planning the runs"):
            done = subprocess.run(words, input=json.dumps(job), capture_output=True, text=True, env=os.environ)
        if not answer_file.is_file():
            last_line = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(f"the process that plans the runs ended with {done.returncode}: {last_line}")
        answer = json.loads(answer_file.read_text())
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["plans"]


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job; returns {"plans": [...]}, or {"error": a line}."""
    from plimsoll.framework.plan import report_tables
    from plimsoll.framework.plan.build_report import get_report
    from plimsoll.framework.program.stages import with_largest_stage
    from plimsoll.launch.plan_common import resolve_target

    cli.prepare_jax()
    names = ("host_memory_gib", "data", "data_weights")
    arguments = argparse.Namespace(**{name: job[name] for name in names})
    target = resolve_target(arguments, "local")
    limit = cli.gib("device_memory_gib", job["device_memory_gib"])
    overrides = {label: [tuple(pair) for pair in pairs] for label, pairs in job["overrides"].items()}
    plans = []
    for label, command in build_commands(arguments, job["spec"], overrides).items():
        try:
            config = with_largest_stage(command.resolve(target.name)[0])
            run_limit = target.get_config_limit_bytes(config) if limit is None else limit
            report = get_report(
                job["spec"], config, target, run_limit, name="", estimate=True, phases=True, fresh=False, suggests=False
            )
        except ValueError as error:
            return {"error": f"run {label}: {error}"}
        host = report.host
        plans.append(
            {
                "fits": report.fits,
                "bytes": report.device_allocated_bytes,
                "verdict": report_tables.verdict(report),
                "host_fits": host is None or host.fits,
                "host_verdict": "" if host is None else report_tables.host_verdict(host),
                "step_seconds": None if report.time is None else report.time.seconds,
            }
        )
    return {"plans": plans}


if __name__ == "__main__":
    # The job comes from stdin; the answer goes to the file that the parent names.
    Path(sys.argv[1]).write_text(json.dumps(_answer(json.load(sys.stdin))))
