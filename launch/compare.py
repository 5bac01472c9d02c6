"""Compare runs: the config fields that differ, a table of metrics, and their curves in one picture.

    plimsoll compare runs/a runs/b
    plimsoll compare runs/sweep/0* --metric=eval/stdlib/loss --out=sweep.png

A run is the workdir of `plimsoll train`, a folder or a URL. Runs that are still training can be compared too.
"""

import json
import sys
from pathlib import Path

from plimsoll.framework.files.workdir import writing
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli


@cli.main
def main(argv: list[str]) -> int:
    """Read the runs, then print the tables and draw the curves. Starts nothing."""
    parser = cli.Parser("compare", __doc__, takes_config=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="workdir of a run; at least two")
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="metric to show, as in metrics.jsonl; repeatable; default: the losses of training and of evaluations",
    )
    parser.add_argument("--out", default="compare.png", metavar="FILE", help="file of the picture; default compare.png")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables, for programs")
    args = parser.parse_flags(argv)
    if len(args.runs) < 2:
        raise cli.UsageError(f"expected the workdirs of at least two runs, given {len(args.runs)}")
    png_path = Path(args.out).expanduser()
    if png_path.suffix != ".png":
        raise cli.UsageError(f"--out={args.out}: expected a .png file")
    cli.check_output("out", args.out)

    # Imported late, so that a typo on the command line shows immediately.
    from plimsoll.framework.terminal.tables import render
    from plimsoll.launch import comparison

    records = comparison.read_runs(args.runs)
    metrics = comparison.choose_metrics(records, args.metric)
    picture = None
    if metrics:
        with writing(args.out):
            picture = comparison.plot(records, metrics, png_path)
    if args.json:
        print(
            json.dumps({**comparison.summarize(records, metrics), "picture": args.out if picture else None}, indent=1)
        )
        return ExitCode.DONE
    sections = [comparison.diff_section(records), comparison.metrics_section(records, metrics)]
    print(render(sections).rstrip())
    print(f"curves: {picture}" if picture else "no curves: no run has written metrics yet")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
