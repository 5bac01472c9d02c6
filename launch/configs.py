"""List the named configs, show one as it resolves, or compare two: list | show NAME | diff A B. Trains nothing."""

import argparse
import functools
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import configs
from framework.config import ABSENT, REQUIRED, Config, diff
from framework.config_docs import as_text, describe, summary
from launch import cli

_EPILOG = """\
examples:
  python -m launch.configs list
  python -m launch.configs show gpt2-124m --config.model.stack.num_layers=6 --accelerator=v5e-8
  python -m launch.configs show path/to/file.py:NAME --json
  python -m launch.configs diff gpt2-124m gpt2-350m
"""

_COLUMN, _DOC = 60, 80  # widths at which a column of values and a comment end


@cli.main
def main(argv: list[str]) -> int:
    """Runs one of the three actions; overrides (`--config.a.b=value`) apply to every config that is named."""
    parser = cli.Parser(
        "configs", __doc__, takes_config=False, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", default="", help="list, show or diff")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a named config, or path/to/file.py:NAME")
    parser.add_argument("--accelerator", metavar="NAME", help="apply the config's rules for it: v5e-8, h200x8, cpu-1")
    parser.add_argument("--json", action="store_true", help="show: print the config as it is stored with a checkpoint")
    spec, overrides, rest = cli.split(argv)
    args = parser.parse_flags(rest)
    names = [*args.names, *([spec] if spec else [])]
    if not args.action:
        raise cli.UsageError("say what to do: list, show NAME, or diff A B")
    action = cli.choose("action", args.action, ["list", "show", "diff"])
    if args.json and action != "show":
        raise cli.UsageError("--json goes with show")
    if action == "list" and (overrides or args.accelerator):
        raise cli.UsageError("list takes neither overrides nor --accelerator: it does not build the configs")
    wanted = {"list": 0, "show": 1, "diff": 2}[action]
    if len(names) != wanted:
        raise cli.UsageError(
            f"{action} takes {wanted} names of configs, given {len(names)}: {' '.join(names)}".rstrip(": ")
        )
    if action == "list":
        _list()
        return 0
    resolved = [_resolve(name, overrides, args.accelerator) for name in names]
    if action == "diff":
        _diff(names, [config for config, _ in resolved])
    elif args.json:
        print(resolved[0][0].to_json())
    else:
        _show(names[0], *resolved[0], overrides)
    return 0


def _resolve(name: str, overrides: Sequence[tuple[str, str]], accelerator: str | None) -> tuple[Config, list[str]]:
    named = configs.load(name)
    config, lines = cli.resolve(named, overrides, accelerator or "")
    cli.check_rules(config)
    return config, lines


def _list() -> None:
    functions = configs.functions()
    width = max(map(len, functions), default=0)
    for name, function in functions.items():
        _print([(f"{name:{width}}", "bold"), (f"  {summary(function)}", "")])
    if not functions:
        print("no named configs")


def _show(name: str, config: Config, rules: list[str], overrides: Sequence[tuple[str, str]]) -> None:
    _print([(f"{name}: {summary(configs.find(name))}", "bold")])
    for line in rules:
        _print([(line, "yellow")])
    marks = {line.partition(": ")[2].split()[0]: line.partition(": ")[0] for line in rules}
    marks.update({path: "command line" for path, _ in overrides})
    lines = list(describe(config))
    column = min(max(len(f"{line.path} = {line.value}") for line in lines), _COLUMN)
    for line in lines[1:]:
        text = f"{line.path} = {line.value}"
        mark = f"  <- {marks[line.path]}" if line.path in marks else ""
        comment = f"  # {textwrap.shorten(line.doc, _DOC, placeholder='...')}" if line.doc else ""
        style = "cyan" if line.component else ""
        padding = " " * (column - len(text + mark)) if comment else ""
        _print([(text, style), (mark, "yellow"), (f"{padding}{comment}", "dim")])
    if any(line.value == "?" for line in lines):
        print(
            "\n?: not set here. The parent fills it in when it builds the component; if it does not, training says so."
        )


def _diff(names: list[str], pair: list[Config]) -> None:
    rows = [(path, *(_words(value) for value in values)) for path, *values in diff(*pair)]
    if not rows:
        print(f"{names[0]} and {names[1]} do not differ")
        return
    table = [("", *names), *rows]
    widths = [min(max(len(row[column]) for row in table), _COLUMN) for column in range(2)]
    for index, (path, left, right) in enumerate(table):
        style = "bold" if index == 0 else ""
        _print([(f"{path:{widths[0]}}  ", style), (f"{left:{widths[1]}}  ", style or "red"), (right, style or "green")])


def _words(value: object) -> str:
    return "?" if value is REQUIRED else "-" if value is ABSENT else as_text(value)


def _print(pieces: list[tuple[str, str]]) -> None:
    """Prints one line of (text, style). On a terminal it has colors and is cut at the terminal's width."""
    if not sys.stdout.isatty():
        print("".join(text for text, _ in pieces).rstrip())
        return
    from rich.text import Text

    _console().print(Text.assemble(*pieces), overflow="ellipsis", no_wrap=True)


@functools.cache
def _console() -> Any:
    from rich.console import Console  # not imported above: output into a pipe or file does not need it

    return Console(width=shutil.get_terminal_size().columns)


if __name__ == "__main__":
    sys.exit(main())
