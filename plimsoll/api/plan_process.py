"""Plans in a separate process, for more CPU devices than JAX has started with here.

The number of CPU devices of a process is fixed when JAX starts. The job is sent to the new process as JSON, and the
report comes back in a file, because libraries may print to stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.phases import phase

# The folder of this library, which may be missing from the new process's path.
_LIBRARY = Path(__file__).resolve().parents[2]


def lacks_devices(target: Target) -> bool:
    """Return whether a target has more CPU devices than JAX has started with."""
    import jax

    # Evaluated last, because listing the devices starts JAX.
    return target.platform == "cpu" and not target.available_devices and target.num_devices > len(jax.devices("cpu"))


def plan_in_subprocess(
    spec: str, config: Config, name: str, limit: int | None, host_bytes: int | None, *, phases: bool, fresh: bool
) -> PlanReport:
    """Run framework.plan.build_report in another process and return its report.

    The arguments are the same; `name` and `host_bytes` are those of the target.

    Raises:
        ConfigError: the plan is refused, or the config has classes that another process cannot find.
    """
    job = {"spec": spec, "config": config.to_json(), "name": name, "limit": limit, "host_bytes": host_bytes}
    job |= {"phases": phases, "fresh": fresh}
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder) / "answer.json"
        command = [sys.executable, "-P", "-m", "plimsoll.api.plan_process", str(answer_file)]
        search_path = [str(_LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        with phase(f"planning for {name} in another process"):
            done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=environment)
        if not answer_file.is_file():
            last_line = done.stderr.strip().rpartition("\n")[2]
            raise ConfigError(f"the process that plans for {name} ended with {done.returncode}: {last_line}")
        answer = json.loads(answer_file.read_text())
    if "error" in answer:
        raise ConfigError(answer["error"])
    return PlanReport.from_json(answer["report"])


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job; returns {"report": JSON of the PlanReport}, or {"error": a line}."""
    from plimsoll import configs
    from plimsoll.framework.devices.environment import prepare_jax
    from plimsoll.framework.plan import targets
    from plimsoll.framework.plan.build_report import get_report

    name = job["name"]
    try:
        if ".py:" in job["spec"]:
            # Loading a user's own file makes its classes loadable by name.
            configs.load(job["spec"])
        config = Config.from_json(job["config"])
    except ConfigError as error:
        reason = f"a plan for {name} needs another process, because JAX has started with fewer CPU devices in this one"
        return {"error": f"{reason}; that process failed: {error}; or start Python with JAX_NUM_CPU_DEVICES set"}
    targets.set_environment(name)
    prepare_jax()
    try:
        report = get_report(
            job["spec"],
            config,
            dataclasses.replace(targets.resolve(name), host_bytes=job["host_bytes"]),
            job["limit"],
            name=name,
            estimate=False,
            phases=job["phases"],
            fresh=job["fresh"],
        )
    except ValueError as error:
        return {"error": str(error)}
    return {"report": report.to_json()}


if __name__ == "__main__":
    # The job comes from stdin; the answer goes to the file that the parent names.
    Path(sys.argv[1]).write_text(json.dumps(_answer(json.load(sys.stdin))))
