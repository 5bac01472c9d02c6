"""Processes of a ladder: one plans all rungs for a machine, and one trains each rung.

    python -m plimsoll.api.ladder_process plan ANSWER.json < JOB.json
    python -m plimsoll.api.ladder_process train CONFIG.json WORKDIR < JOB.json

JAX holds the devices that a process has started with, so neither runs in the process that has the ladder. Jobs come as
JSON; the answer goes to a file, because libraries may print to stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plimsoll.api.configs import ConfigRequest
from plimsoll.extras.scaling.rungs import LadderOptions, Rung, build_rungs
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.processes.child_commands import run_training
from plimsoll.framework.terminal.phases import phase

# The folder of this library, which may be missing from the new process's path.
_LIBRARY = Path(__file__).resolve().parents[2]
_MODULE = "plimsoll.api.ladder_process"


@dataclass(frozen=True)
class RungPlan:
    """What a rung needs, by the analytical estimate.

    Attributes:
        fits: its memory is within the limits of the devices and of the host.
        peak_bytes: bytes of the training step on each device.
        verdict: the verdict on device memory as text, or on the host's if that does not fit.
        seconds: time of its training steps; None if the speed of the target is unknown.
    """

    fits: bool
    peak_bytes: int
    verdict: str
    seconds: float | None


@dataclass(frozen=True)
class MemoryLimits:
    """Limits of memory that the user sets.

    Attributes:
        device_memory_gib: memory of each device in GiB; None for its own.
        host_memory_gib: memory of each host in GiB; None for its own.
    """

    device_memory_gib: float | None = None
    host_memory_gib: float | None = None


@dataclass(frozen=True)
class PlannedRungs:
    """The rungs for a machine, and what they need.

    Attributes:
        rungs: the rungs, smallest first.
        plans: the plan of each.
        rule_lines: a line for each field that the config's rules for the machine have changed.
        data_tokens: training tokens of one epoch of the data; None if the data was not read.
    """

    rungs: list[Rung]
    plans: list[RungPlan]
    rule_lines: list[str]
    data_tokens: int | None


def plan_rungs(
    requests: Sequence[ConfigRequest],
    options: LadderOptions,
    target: str,
    limits: MemoryLimits,
    data_folder: Path | None = None,
    *,
    force: bool = False,
) -> PlannedRungs:
    """Build and plan the rungs for a target, in another process.

    Args:
        requests: the base config; without `options.heads`, the config of each rung.
        options: sizes and lengths.
        target: name of the target.
        limits: limits of memory.
        data_folder: folder for the tokens, to also count these; None to leave the data unread. It is not read if a
            rung does not fit, unless `force` is set.
        force: the rungs are trained even if one does not fit.

    Raises:
        ConfigError: the target does not exist, or a rung does not suit it.
    """
    job = {
        "configs": [
            {"spec": one.spec, "config": one.config.to_json(), "chosen": one.override_paths} for one in requests
        ],
        "options": asdict(options),
        "target": target,
        "limits": asdict(limits),
        "data_folder": None if data_folder is None else str(data_folder),
        "force": force,
    }
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder) / "answer.json"
        words = [sys.executable, "-P", "-m", _MODULE, "plan", str(answer_file)]
        with phase("planning the rungs"):
            done = subprocess.run(
                words, input=json.dumps(job), capture_output=True, text=True, env=_build_environment()
            )
        if not answer_file.is_file():
            last_line = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(f"the process that plans the rungs ended with {done.returncode}: {last_line}")
        answer = json.loads(answer_file.read_text())
    if "error" in answer:
        raise ConfigError(answer["error"])
    rungs = [Rung(**{**one, "config": Config.from_json(one["config"])}) for one in answer["rungs"]]
    plans = [RungPlan(**one) for one in answer["plans"]]
    return PlannedRungs(rungs, plans, answer["rule_lines"], answer["data_tokens"])


def train_rung(spec: str, rung: Rung, workdir: Path, limits: MemoryLimits, *, force: bool) -> int:
    """Train a rung in another process, which ends with this one; returns its exit code.

    A second call resumes from the last checkpoint.

    Args:
        spec: name of the config, for the run's table; a user's own file is loaded again.
        rung: the rung.
        workdir: its workdir. Its config is WORKDIR.json, its output WORKDIR.log.
        limits: limits of memory.
        force: train even if it does not fit.
    """
    config_file = workdir.with_name(f"{workdir.name}.json")
    config_file.write_text(rung.config.to_json() + "\n")
    flags = [f"--{name}={value}" for name, value in asdict(limits).items() if value is not None]
    words = ["-P", "-m", _MODULE, "train", spec, str(config_file), str(workdir), *flags, *(["--force"] * force)]
    return run_training(words, workdir, rung.name, environment=_build_environment())


def _build_environment() -> dict[str, str]:
    search_path = [str(_LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}


def _load_user_file(spec: str) -> None:
    """Load a user's own file, so that its classes can be found by name."""
    from plimsoll import configs

    if ".py:" in spec:
        configs.load(spec)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """Plan the rungs of a job; returns the fields of PlannedRungs, or {"error": a line}."""
    try:
        return _plan(job)
    # An OSError comes from the data, such as a missing file; its message has no line break.
    except (ValueError, OSError) as error:
        return {"error": str(error)}


def _plan(job: dict[str, Any]) -> dict[str, Any]:
    from plimsoll.framework.devices.environment import prepare_jax
    from plimsoll.framework.plan import report_tables, targets
    from plimsoll.framework.plan.build_report import get_report

    requests = []
    for one in job["configs"]:
        _load_user_file(one["spec"])
        requests.append(ConfigRequest(one["spec"], [], Config.from_json(one["config"]), tuple(one["chosen"])))
    limits = MemoryLimits(**job["limits"])
    if job["target"] != "local":
        targets.set_environment(job["target"])
    prepare_jax()
    target = targets.resolve(job["target"])
    if limits.host_memory_gib is not None:
        target = dataclasses.replace(target, host_bytes=int(limits.host_memory_gib * 2**30))
    configs, rule_lines = [], []
    for request in requests:
        config, lines = request.resolve(target.name)
        # Applied once: the config of a rung is already that of the machine.
        config.accelerator_rules = []
        configs.append(config)
        rule_lines += [line for line in lines if line not in rule_lines]
    heads = job["options"]["heads"]
    options = LadderOptions(**{**job["options"], "heads": None if heads is None else tuple(heads)})
    rungs = build_rungs(configs, options)
    plans = []
    for rung in rungs:
        limit = target.get_config_limit_bytes(rung.config)
        if limits.device_memory_gib is not None:
            limit = int(limits.device_memory_gib * 2**30)
        try:
            report = get_report(
                rung.name,
                rung.config,
                target,
                limit,
                name="" if job["target"] == "local" else job["target"],
                estimate=True,
                phases=True,
                fresh=False,
                suggests=False,
            )
        except ValueError as error:
            raise ConfigError(f"{rung.name}: {error}") from error
        host = report.host
        host_fits = host is None or host.fits
        verdict = report_tables.verdict(report)
        if host is not None and report.fits and not host_fits:
            verdict = f"host memory {report_tables.host_verdict(host)}"
        seconds = None if report.time is None else report.time.seconds * rung.steps
        plans.append(RungPlan(report.fits and host_fits, report.device_allocated_bytes, verdict, seconds))
    data_tokens = None
    if job["data_folder"] is not None and (job["force"] or all(plan.fits for plan in plans)):
        experiment = rungs[-1].config.instantiate()
        experiment.data.setup(job["data_folder"])
        data_tokens = experiment.data.num_rows * experiment.data.seq_len
    contents = []
    for rung in rungs:
        values = {one.name: getattr(rung, one.name) for one in dataclasses.fields(rung)}
        contents.append({**values, "config": rung.config.to_json()})
    plan_contents = [asdict(plan) for plan in plans]
    return {"rungs": contents, "plans": plan_contents, "rule_lines": rule_lines, "data_tokens": data_tokens}


def _train(spec: str, config_file: Path, workdir: str, flags: Sequence[str]) -> int:
    """Train a rung in this process; returns the exit code."""
    from plimsoll.api.runs import train
    from plimsoll.framework.run import user_errors
    from plimsoll.framework.run.request import RunError
    from plimsoll.framework.terminal.exit_codes import ExitCode

    values = dict(flag.removeprefix("--").split("=") for flag in flags if "=" in flag)
    limits = MemoryLimits(**{name: float(value) for name, value in values.items()})
    try:
        _load_user_file(spec)
        config = Config.from_json(config_file.read_bytes())
        train(
            config,
            workdir,
            force="--force" in flags,
            device_memory_gib=limits.device_memory_gib,
            host_memory_gib=limits.host_memory_gib,
        )
    except RunError as error:
        return error.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        code = user_errors.report_error(error, is_command=True)
        if code is None:
            raise
        return code
    return ExitCode.DONE


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        Path(sys.argv[2]).write_text(json.dumps(_answer(json.load(sys.stdin))))
    else:
        sys.exit(_train(sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:]))
