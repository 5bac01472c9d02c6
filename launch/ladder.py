"""Train one config at several sizes, fit a scaling law to the losses, and predict larger runs.

    plimsoll ladder --config=nanogpt-cpu --heads=2,4,6,8 --workdir=runs/ladder --extrapolate_to=1e16
    plimsoll ladder --config=llama3.2-1b --heads=8,12,16,24 --target=h100x8 --dry_run

The widths are parametrized by muP relative to the config, with its learning rate, and trained on 20 tokens per
parameter (docs/scaling.md). The folder has a subfolder for each rung, ladder.json and ladder.png. A ladder that was
stopped or killed continues with the same command. Before the first rung starts, a plan checks that all of them fit.

Exit codes: 0 all rungs have a loss; 1 a rung failed (the others were trained); 2 the command, a config or the data is
wrong, and nothing was started; 4 a rung does not fit, and nothing was started; 130 and 143 stopped by SIGINT and
SIGTERM.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from plimsoll.framework.terminal.exit_codes import STOPPED, ExitCode
from plimsoll.launch import cli

if TYPE_CHECKING:
    from plimsoll.api.ladder import Ladder


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb."""
    add = parser.add_argument
    add("--heads", required=True, metavar="N,N,...", help="widths of the rungs, in heads of attention")
    add("--tokens_per_parameter", type=float, metavar="N", help="training tokens for each parameter; default 20")
    add("--steps", type=int, metavar="N", help="steps of every rung, instead of --tokens_per_parameter")
    add(
        "--parametrization",
        choices=["mup", "usual"],
        default="mup",
        help="mup: widths keep the config's learning rate; usual: only the sizes change",
    )
    add("--workdir", metavar="DIR", help="folder for the rungs; not needed with --dry_run")
    add("--max_epochs", type=float, default=1.0, metavar="N", help="how often the data may be read; default 1")
    add("--metric", metavar="NAME", help="loss to compare, as in metrics.jsonl; default: that of the validation set")
    add("--holdout", action="store_true", help="also fit all rungs but the largest, and show the error there")
    add(
        "--extrapolate",
        action="append",
        default=[],
        metavar="CONFIG",
        help="predict the loss of a config with the same number of tokens per parameter, or of steps; repeatable",
    )
    add(
        "--extrapolate_to",
        type=float,
        action="append",
        default=[],
        metavar="FLOPS",
        help="predict the loss after this compute, such as 1e21; repeatable",
    )
    parser.add_data()
    add("--dry_run", action="store_true", help="price the rungs, but train none")
    add("--target", help="with --dry_run: price them for another machine, named as for `plimsoll plan`")
    add("--force", action="store_true", help="train even if a rung does not fit into memory")
    add("--device_memory_gib", type=float, metavar="GIB", help="memory limit per device; default: its memory")
    add("--host_memory_gib", type=float, metavar="GIB", help="host memory limit of a rung; default: what is free")


@cli.main
def main(argv: list[str]) -> int:
    """Price the rungs, train them, and print the law and the predictions."""
    parser = cli.Parser("ladder", __doc__)
    add_flags(parser)
    command = parser.parse(argv)
    args = command.args
    limits = {"device_memory_gib": args.device_memory_gib, "host_memory_gib": args.host_memory_gib}
    for name, value in limits.items():
        cli.gib(name, value)
    if args.target is not None and not args.dry_run:
        raise cli.UsageError("--target requires --dry_run: training is only possible on the devices of this machine")
    if args.workdir is None and not args.dry_run:
        raise cli.UsageError("--workdir=DIR is required, or --dry_run to only price the rungs")
    for flops in args.extrapolate_to:
        if not 0 < flops < float("inf"):
            raise cli.UsageError(f"--extrapolate_to={flops:g}: expected FLOPs > 0")
    heads = _parse_heads(args.heads)
    if args.holdout and len(heads) < 3:
        raise cli.UsageError(f"--holdout needs at least 3 rungs, and --heads={args.heads} has {len(heads)}")

    # Imported late, so that a mistake on the command line shows immediately.
    from plimsoll.api.configs import attach_origin
    from plimsoll.api.ladder import Ladder

    ladder = Ladder(
        attach_origin(command.config, command.spec, command.named, command.override_paths),
        heads,
        tokens_per_parameter=args.tokens_per_parameter,
        steps=args.steps,
        parametrization=args.parametrization,
        max_epochs=args.max_epochs,
        metric=args.metric,
    )
    targets = [*args.extrapolate, *args.extrapolate_to]
    for target in targets:
        ladder.check_extrapolation(target)
    for note in command.notes:
        print(note, file=sys.stderr)
    if args.dry_run:
        plan = ladder.plan(args.target or "local", **limits)
        print(plan)
        for line in plan.misfits:
            print(line)
        print("dry run: nothing was trained")
        return ExitCode.DONE if plan.fits else ExitCode.TOO_BIG
    return _train(ladder, args, targets)


def _train(ladder: "Ladder", args: argparse.Namespace, targets: list[str | float]) -> int:
    """Train the rungs and print the results; returns the exit code."""
    from plimsoll.framework.run.request import RunError

    code = ExitCode.DONE
    failure = ""
    try:
        ladder.train(
            args.workdir,
            force=args.force,
            device_memory_gib=args.device_memory_gib,
            host_memory_gib=args.host_memory_gib,
        )
    except RunError as error:
        code, failure = ExitCode(error.code), str(error)
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except SystemExit as error:
        code = ExitCode(error.code)
    if code in STOPPED:
        print("stopped; run the same command to continue")
        return code
    if ladder.record.fit is not None:
        if args.holdout:
            ladder.hold_out()
        for target in targets:
            ladder.extrapolate(target)
    print(ladder)
    print(f"curve: {ladder.write(args.workdir)}")
    if failure:
        print(failure, file=sys.stderr)
    return code


def _parse_heads(text: str) -> list[int]:
    try:
        heads = [int(part) for part in text.split(",")]
    except ValueError:
        raise cli.UsageError(f"--heads={text}: expected numbers of heads, such as 2,4,6,8") from None
    if len(heads) < 2:
        raise cli.UsageError(f"--heads={text}: expected at least two numbers of heads, such as 2,4,6,8")
    return heads


if __name__ == "__main__":
    sys.exit(main())
