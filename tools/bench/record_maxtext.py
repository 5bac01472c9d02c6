"""Plans the MaxText recipes of the public record with MaxText's own step: tools/bench/maxtext_function.py."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from plimsoll import configs
from tools.bench.maxtext_function import ENVIRONMENT
from tools.bench.public_record import PublicFact
from tools.bench.record_results import PlannedFact, read_results, run_plan, write_results
from tools.bench.record_settings import nearest_setting

_FUNCTION = Path(__file__).with_name("maxtext_function.py")


def plan_recipes(facts: list[PublicFact], python: Path, numbers: Sequence[int] = ()) -> None:
    """Plan the facts that are recipes of MaxText for TPUs, and save each result as soon as it is there.

    Args:
        facts: the record.
        python: Python of an environment that has MaxText and Plimsoll's requirements.
        numbers: numbers of the facts to plan; empty means all.
    """
    results = read_results()
    with tempfile.TemporaryDirectory(prefix="plimsoll-record-") as name:
        folder = Path(name)
        for number, fact in enumerate(facts, start=1):
            if fact.settings.maxtext is None or (numbers and number not in numbers):
                continue
            try:
                result = _plan_fact(number, fact, python, folder)
            except ValueError as error:
                print(f"{number}: {fact.line()}: not planned: {error}", file=sys.stderr)
                continue
            results[number] = result
            write_results(results)
            print(f"{number}: {fact.line()}: {result.peak_bytes / 2**30:.2f} GiB, fits: {result.fits}", flush=True)


def _plan_fact(number: int, fact: PublicFact, python: Path, folder: Path) -> PlannedFact:
    """Plan MaxText's own step in a process of MaxText's environment.

    Raises:
        ValueError: the plan was refused; the message is its last line.
    """
    setting = nearest_setting(fact, folder)
    fields = f"compile_topology={setting.target} {fact.settings.maxtext}"
    root = Path(__file__).parents[2]
    argv = [f"--function={_FUNCTION.relative_to(root)}:step", f"--target={setting.target}"]
    environment = os.environ | ENVIRONMENT | {"MAXTEXT": fields, "PYTHONPATH": str(root)}
    report = run_plan([str(python), "-m", "plimsoll", "plan", *argv], folder, env=environment, cwd=root)
    seconds = (report["time"] or {}).get("seconds")
    tokens_per_second = None
    flops_per_second = None
    if seconds is not None and fact.settings.rows_per_device is not None and fact.settings.seq_len is not None:
        device_tokens = fact.settings.rows_per_device * fact.settings.seq_len
        # FLOPs per token come from our model: MaxText's shapes are also written as configs of ours.
        model = configs.load(setting.config, shape_only=True).instantiate().model
        tokens_per_second = device_tokens * fact.devices / seconds
        flops_per_second = device_tokens * model.flops_per_token(fact.settings.seq_len) / seconds
    return PlannedFact(
        fact=number,
        command=" ".join([f'MAXTEXT="{fields}" plimsoll plan', *argv]),
        compiled=True,
        fits=report["fits"],
        peak_bytes=report["device_allocated_bytes"],
        tokens_per_second=tokens_per_second,
        flops_per_second=flops_per_second,
        date=str(date.today()),
        versions=report["versions"],
        limit_bytes=report["device_limit_bytes"],
    )
