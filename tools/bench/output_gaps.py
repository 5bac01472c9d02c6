"""Longest silence of each command: until its first character of output, and between any two.

    python -m tools.bench.output_gaps                      # all verbs, in a pipe and on a terminal
    python -m tools.bench.output_gaps --verb=train --verb=generate --set=model.stack.num_layers=12

Each command is a separate process. `train` is started twice, first without and then with compiled programs; the other
commands use its run. Only wall-clock time is measured, so the machine should be idle; the load of the last minute is
printed with the table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.support.timed_output import TimedOutput, run_module_timed

_CONFIG = "stdlib-tiny"
_STEPS = 30
_LINE_LENGTH = 60


def commands(root: Path, overrides: list[str]) -> dict[str, list[str]]:
    """Return the command line for each verb, by name, ordered so that each verb finds the outputs that it needs."""
    run = f"--workdir={root}/run"
    cache = f"--config.trainer.compilation_cache={root}/programs"
    short = [f"--config.trainer.max_steps={_STEPS}", *(f"--config.{override}" for override in overrides)]
    text = root / "text.txt"
    return {
        "train": ["plimsoll.launch.train", f"--config={_CONFIG}", run, cache, *short],
        "train, cached": ["plimsoll.launch.train", f"--config={_CONFIG}", f"--workdir={root}/again", cache, *short],
        "train, resumed": [
            "plimsoll.launch.train",
            f"--config={_CONFIG}",
            run,
            cache,
            *short,
            "--config.trainer.max_steps=40",
        ],
        "train, over": [
            "plimsoll.launch.train",
            f"--config={_CONFIG}",
            run,
            cache,
            *short,
            "--config.trainer.max_steps=40",
        ],
        "generate": ["plimsoll.launch.generate", run, "--prompt=def main():", "--max_new_tokens=32"],
        "chat": ["plimsoll.launch.chat", run, "--max_new_tokens=16"],
        "evaluate": ["plimsoll.launch.evaluate", run, "--validation", f"--files={text}"],
        "export": ["plimsoll.launch.export", run, f"--to={root}/exported"],
        "plan": ["plimsoll.launch.plan", f"--config={_CONFIG}", "--target=cpu:1", "--fresh"],
        "plan, v5e-8": ["plimsoll.launch.plan", "--config=gpt2-124m", "--target=v5e-8", "--fresh"],
        "prepare": ["plimsoll.launch.prepare", f"--config={_CONFIG}", f"--out={root}/prepared"],
        "status": ["plimsoll.launch.status", run],
        "configs": ["plimsoll", "configs", "list"],
        "train a flow": [
            "plimsoll.launch.train",
            "--config=digits-glow",
            f"--workdir={root}/flow",
            cache,
            "--config.trainer.max_steps=10",
        ],
        "sample": ["plimsoll.launch.sample", f"--workdir={root}/flow", f"--output={root}/samples.png"],
        "a typo": ["plimsoll.launch.train", "--config=stdlib-tiyn", run],
    }


def row(verb: str, kind: str, output: TimedOutput) -> str:
    """Return a row of the table."""
    seconds, line = output.longest()
    # The end of a line was printed last.
    line = line if len(line) <= _LINE_LENGTH else f"...{line[-_LINE_LENGTH:]}"
    line = line.replace("|", " ")
    times = [f"{output.first:.2f}", f"{seconds:.2f}"]
    return f"| {verb} | {kind} | {' | '.join(times)} | `{line.strip()}` | {output.seconds:.1f} | {output.code} |"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verb", action="append", metavar="NAME", help="measure only this verb; repeatable")
    parser.add_argument("--kind", choices=["pipe", "terminal"], help="output to measure; default: both")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="override a field of train's config; repeatable",
    )
    parser.add_argument("--keep", metavar="DIR", help="write the recorded output to DIR")
    args = parser.parse_args()
    print(f"seconds of wall time; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| verb | kind | first character | longest silence | after | in all | exit code |")
    print("|---|---|---|---|---|---|---|")
    for kind in [args.kind] if args.kind else ["pipe", "terminal"]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "text.txt").write_text("def main():\n    return 0\n" * 200)
            # Keeps stored plans and compile times of earlier runs out of the measurement.
            environment = {"XDG_CACHE_HOME": f"{root}/cache"}
            for verb, argv in commands(root, args.set).items():
                is_needed = verb in ("train", "train a flow")
                if args.verb and verb not in args.verb and not is_needed:
                    continue
                output = run_module_timed(argv, terminal=kind == "terminal", environment=environment)
                if not args.verb or verb in args.verb:
                    print(row(verb, kind, output), flush=True)
                if args.keep:
                    Path(args.keep).mkdir(parents=True, exist_ok=True)
                    lines = [f"{chunk.seconds:7.2f} {chunk.text!r}\n" for chunk in output.chunks]
                    (Path(args.keep) / f"{verb}-{kind}".replace(" ", "_")).write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
