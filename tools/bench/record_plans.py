"""Plans the public record: published results of training runs, compared with our plan of the nearest setting.

    python -m tools.bench.record_plans --estimate            # every fact with a nearest setting, by the estimate
    python -m tools.bench.record_plans --only v5e            # by the compilers that are here, facts that have the word
    python -m tools.bench.record_plans --only float8         # facts of that precision
    python -m tools.bench.record_plans --missing             # by the compilers, facts that none has judged yet
    python -m tools.bench.record_plans --maxtext=PYTHON      # MaxText's recipes for TPUs, by MaxText's own steps
    python -m tools.bench.record_plans --table               # only the page, from existing plans

A fact that a compiler has judged keeps that verdict until a compiler judges it again. The results are in
docs/benchmarks/public_record.jsonl, and docs/benchmarks/public_record.md is generated from them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path

from plimsoll.launch import cli
from tools.bench import record_maxtext, record_page
from tools.bench.public_record import PublicFact, read_record
from tools.bench.record_results import RESULTS, PlannedFact, read_results, run_plan, write_results
from tools.bench.record_settings import NearestSetting, nearest_setting


def plan_fact(number: int, setting: NearestSetting, *, estimate: bool, folder: Path) -> PlannedFact:
    """Plan a setting in a separate process.

    Raises:
        ValueError: the plan was refused; the message is its last line.
    """
    words = [f"--config={setting.config}", f"--target={setting.target}"]
    words += [f"--config.{path}={value}" for path, value in setting.overrides.items()]
    if setting.device_memory_gib is not None:
        words.append(f"--device_memory_gib={setting.device_memory_gib}")
    flags = ["--step_only", "--verdict_only", *(["--estimate"] if estimate else [])]
    report = run_plan([sys.executable, "-m", "plimsoll", "plan", *words, *flags], folder)
    tokens_per_second = (report.get("time") or {}).get("tokens_per_second")
    flops_per_second = None
    if tokens_per_second is not None:
        flops_per_second = tokens_per_second * report["model_flops_per_token"] / report["devices"]
    return PlannedFact(
        fact=number,
        command=" ".join(["plimsoll plan", *words]).replace(f"{folder}/", ""),
        compiled=not report["estimated"],
        fits=report["fits"],
        peak_bytes=report["device_allocated_bytes"],
        tokens_per_second=tokens_per_second,
        flops_per_second=flops_per_second,
        date=str(date.today()),
        versions=report["versions"],
        limit_bytes=report["device_limit_bytes"],
    )


def plan_all(facts: list[PublicFact], words: list[str], *, estimate: bool, missing: bool) -> None:
    """Plan the facts that contain all words, and save each result as soon as it is there."""
    results = read_results()
    with tempfile.TemporaryDirectory(prefix="plimsoll-record-") as name:
        folder = Path(name)
        for number, fact in enumerate(facts, start=1):
            earlier = results.get(number)
            is_compiled = earlier is not None and earlier.compiled
            if not _matches(fact, words) or ((estimate or missing) and is_compiled):
                continue
            # A plan of their own step is more accurate than one of our nearest setting.
            if earlier is not None and earlier.is_by_maxtext:
                continue
            try:
                setting = nearest_setting(fact, folder)
                result = plan_fact(number, setting, estimate=estimate, folder=folder)
            except ValueError as error:
                print(f"{number}: {fact.line()}: not planned: {error}", file=sys.stderr)
                continue
            results[number] = result
            write_results(results)
            print(f"{number}: {fact.line()}: ours {result.peak_bytes / 2**30:.2f} GiB, fits: {result.fits}", flush=True)


def _matches(fact: PublicFact, words: list[str]) -> bool:
    text = f"{fact.line()} {fact.settings.precision} {fact.source.repository} {fact.source.page}".lower()
    return all(word.lower() in text for word in words)


@cli.main
def main(argv: list[str]) -> int:
    """Plan facts and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--estimate", action="store_true", help="plan by the analytical estimate, which takes seconds per fact"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="plan only facts that contain all these words"
    )
    parser.add_argument(
        "--lines", nargs="*", type=int, default=[], metavar="N", help="with --maxtext: plan only these facts"
    )
    parser.add_argument("--missing", action="store_true", help="plan only facts that no compiler has judged yet")
    parser.add_argument(
        "--maxtext",
        type=Path,
        metavar="PYTHON",
        help="Python of an environment with MaxText: plan its recipes for TPUs by its own steps",
    )
    parser.add_argument("--table", action="store_true", help="only write the page")
    args = parser.parse_args(argv)
    facts = read_record()
    if args.maxtext is not None:
        record_maxtext.plan_recipes(facts, args.maxtext, args.lines)
    elif not args.table:
        plan_all(facts, args.only, estimate=args.estimate, missing=args.missing)
    page = RESULTS.with_suffix(".md")
    page.write_text(record_page.page(facts, read_results()))
    print(f"page: docs/benchmarks/{page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
