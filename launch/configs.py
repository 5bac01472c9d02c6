"""List the named configs, show one as it resolves, or compare two: list | show NAME | diff A B. Trains nothing."""

import functools
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import configs
from framework.config import Config, diff, join, target_of
from framework.config.schema import as_text
from launch import cli

_COLUMN, _DOC = 60, 80  # widths at which a column of values and a comment end
# `name: text` or `name (type): text`, and the lines below that are indented further.
_ARGUMENT = re.compile(r"^( +)(\w+)(?: \([^)\n]*\))?: *(.*(?:\n\1 +.*)*)", re.MULTILINE)


@cli.main
def main(argv: list[str]) -> int:
    """Runs one of the three actions; overrides (`--config.a.b=value`) apply to every config that is named."""
    parser = cli.Parser("configs", __doc__, takes_config=False)
    parser.add_argument("action", choices=["list", "show", "diff"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a named config, or path/to/file.py:NAME")
    parser.add_argument("--accelerator", metavar="NAME", help="apply the config's rules for it: v5e-8, h200x8, cpu-1")
    parser.add_argument("--json", action="store_true", help="show: print the config as it is stored with a checkpoint")
    spec, overrides, rest = cli.split(argv)
    args = parser.parse_flags(rest)
    action, names = args.action, [*args.names, *([spec] if spec else [])]
    if (args.json and action != "show") or (action == "list" and (overrides or args.accelerator)):
        raise cli.UsageError("--json goes with show; overrides and --accelerator go with show and diff")
    wanted = {"list": 0, "show": 1, "diff": 2}[action]
    if len(names) != wanted:
        raise cli.UsageError(f"{action} takes {wanted} names of configs, given {len(names)}")
    if action == "list":
        functions = configs.functions()
        _print(f"{name:{max(map(len, functions))}}  {summary(function)}" for name, function in functions.items())
        return 0
    commands = [cli.Command(args, name, configs.load(name), overrides) for name in names]
    for command in commands:
        command.config  # noqa: B018  (says what is wrong)
    config, rules = commands[0].resolve(args.accelerator or "")
    if action == "diff":
        _print(_diff(names, config, commands[1].resolve(args.accelerator or "")[0]))
    elif args.json:
        print(config.to_json())
    else:
        _print([f"{names[0]}: {summary(configs.find(names[0]))}", *_show(config, rules, overrides)])
    return 0


def summary(target: Callable[..., Any]) -> str:
    """The first line of a docstring, of a partial that of its function; "" without one."""
    while isinstance(target, functools.partial):
        target = target.func
    return (inspect.getdoc(target) or "").partition("\n")[0]


def field_docs(target: Callable[..., Any]) -> dict[str, str]:
    """Field name -> the first sentence that "Args:" has on it, in the function, the class or its bases."""
    found: dict[str, str] = {}
    for source in reversed(target.__mro__[:-1]) if isinstance(target, type) else [target]:
        for _, name, text in _ARGUMENT.findall((source.__doc__ or "").partition("Args:\n")[2]):
            found[name] = re.split(r"\. (?=[A-Z])", " ".join(text.split()))[0].rstrip(".")
    return found


def _show(config: Config, rules: list[str], overrides: Sequence[tuple[str, str]]) -> list[str]:
    marks = {line.partition(": ")[2].split()[0]: f"  <- {line.partition(': ')[0]}" for line in rules}
    marks.update({path: "  <- command line" for path, _ in overrides})
    docs: dict[str, str] = {}
    rows = []
    for path, value in config.walk():
        doc, text = docs.get(path, ""), as_text(value)
        if isinstance(value, Config):
            docs |= {join(path, name): doc for name, doc in field_docs(target_of(value)).items()}
            doc = doc or summary(target_of(value))
        rows.append((f"{path} = {text}{marks.get(path, '')}", textwrap.shorten(doc, _DOC, placeholder="...")))
    width = min(max(len(text) for text, _ in rows), _COLUMN)
    lines = [f"{text:{width}}  # {doc}" if doc else text for text, doc in rows[1:]]
    note = "?: not set here. The parent fills it in when it builds the component; if it does not, training says so."
    return [*rules, *lines, *(["", note] if any(text.endswith(" = ?") for text, _ in rows) else [])]


def _diff(names: list[str], left: Config, right: Config) -> list[str]:
    rows = [(path, *map(as_text, values)) for path, *values in diff(left, right)]
    if not rows:
        return [f"{names[0]} and {names[1]} do not differ"]
    table = [("", *names), *rows]
    one, two = (min(max(len(row[column]) for row in table), _COLUMN) for column in (0, 1))
    return [f"{path:{one}}  {a:{two}}  {b}" for path, a, b in table]


def _print(lines: Iterable[str]) -> None:
    """Prints lines, on a terminal cut at its width."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        print(line[:width].rstrip())


if __name__ == "__main__":
    sys.exit(main())
