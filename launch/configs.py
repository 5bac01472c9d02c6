"""List the named configs, show a resolved one, or compare two: list | show NAME | diff A B.

plimsoll configs show llama2-7b                     # the commonly set fields
plimsoll configs show llama2-7b --only=learner      # the fields of one component; --all shows all fields
"""

import functools
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from plimsoll import configs
from plimsoll.framework.config import Config, diff, get_target, join
from plimsoll.framework.config.value_parsing import as_text
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, shown_fields

# The maximum widths of a column of values and of a comment.
_COLUMN = 60
_DOC = 80
# Matches `name: text` or `name (type): text`, and the further indented lines below it.
_ARGUMENT = re.compile(r"^( +)(\w+)(?: \([^)\n]*\))?: *(.*(?:\n\1 +.*)*)", re.MULTILINE)


@cli.main
def main(argv: list[str]) -> int:
    """Run one of the three actions; overrides (`--config.a.b=value`) apply to every named config."""
    parser = _parser()
    spec, overrides, verb_flags = cli.split(argv)
    args = parser.parse_flags(verb_flags)
    action = args.action
    names = list(args.names)
    # Accept `--config=NAME` too, as every other verb does.
    if spec:
        names.append(spec)
    resolves_nothing = action == "list" and (overrides or args.accelerator)
    if (args.json and action != "show") or resolves_nothing:
        raise cli.UsageError("--json requires show; overrides and --accelerator require show or diff")
    if (args.only or args.all) and action != "show":
        raise cli.UsageError("--only and --all require show")
    if sum(map(bool, (args.only, args.all, args.json))) > 1:
        raise cli.UsageError("at most one of --only, --all, --json")
    num_names = {"list": 0, "show": 1, "diff": 2}[action]
    if len(names) != num_names:
        raise cli.UsageError(f"{action} takes {num_names} config names, given {len(names)}")
    if action == "list":
        _print(_list())
        return ExitCode.DONE
    commands = [cli.Command(args, name, configs.load(name), overrides) for name in names]
    # Reading `config` checks the overrides and all rules, for every accelerator.
    for command in commands:
        command.config  # noqa: B018
    accelerator = args.accelerator or ""
    config, rules = commands[0].resolve(accelerator)
    if action == "diff":
        right, _ = commands[1].resolve(accelerator)
        _print(_diff(names, config, right))
    elif args.json:
        print(config.to_json())
    else:
        title = f"{names[0]}: {summary(configs.find(names[0]))}"
        _print([title, *_show(config, rules, commands[0].overrides, args.only, everything=args.all)])
    return ExitCode.DONE


def _parser() -> cli.Parser:
    """Build the parser of the verb's own flags."""
    parser = cli.Parser("configs", __doc__, takes_config=False)
    parser.add_argument("action", choices=["list", "show", "diff"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a named config, or path/to/file.py:NAME")
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help="apply the config's rules for this accelerator, such as v5e-8, h200x8 or cpu-1",
    )
    parser.add_argument("--json", action="store_true", help="show: print the config as it is stored with a checkpoint")
    parser.add_argument("--all", action="store_true", help="show: print all fields, not only the commonly set ones")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORD",
        help="show: print a path and all fields below it, or all fields whose path contains WORD; repeatable",
    )
    return parser


def _list() -> list[str]:
    """Return a line for each named config, with the summary of its function."""
    functions = configs.functions()
    width = max(map(len, functions), default=0)
    return [f"{name:{width}}  {summary(function)}" for name, function in functions.items()]


def summary(target: Callable[..., Any]) -> str:
    """Return the first line of a docstring, or of the wrapped function's for a partial; "" without one."""
    while isinstance(target, functools.partial):
        target = target.func
    doc = inspect.getdoc(target) or ""
    return doc.partition("\n")[0]


def field_docs(target: Callable[..., Any]) -> dict[str, str]:
    """Return {field name: first sentence in "Args:"}, from the docstring of a function or a class and its bases."""
    sources: Sequence[Any] = [target]
    if isinstance(target, type):
        # Bases come first, without `object`, so that a class overrides the text of its bases.
        sources = target.__mro__[-2::-1]
    docs: dict[str, str] = {}
    for source in sources:
        _, _, section = (source.__doc__ or "").partition("Args:\n")
        for _, name, text in _ARGUMENT.findall(section):
            one_line = " ".join(text.split())
            sentences = re.split(r"\. (?=[A-Z])", one_line)
            docs[name] = sentences[0].rstrip(".")
    return docs


def _show(
    config: Config, rules: list[str], overrides: Sequence[tuple[str, str]], words: Sequence[str], *, everything: bool
) -> list[str]:
    """Return the lines of a config: the changes of its rules, then a line for each shown field."""
    marks = _marks(rules, overrides)
    if words:
        paths = shown_fields.select_matching(config, words)
    elif everything:
        paths = [path for path, _ in config.walk() if path]
    else:
        paths = shown_fields.select_usual(config, list(marks))
    shown_paths = set(paths)
    num_fields = 0
    # Descriptions of fields by path; `walk` yields a component before its fields.
    docs: dict[str, str] = {}
    rows: list[tuple[str, str]] = []
    for path, value in config.walk():
        doc = docs.get(path, "")
        if isinstance(value, Config):
            target = get_target(value)
            for name, field_doc in field_docs(target).items():
                docs[join(path, name)] = field_doc
            doc = doc or summary(target)
        # Skip the experiment itself, which the title describes.
        if not path:
            continue
        num_fields += 1
        if path not in shown_paths:
            continue
        text = f"{path} = {as_text(value)}{marks.get(path, '')}"
        rows.append((text, textwrap.shorten(doc, _DOC, placeholder="...")))
    width = _column_width(rows, 0)
    lines = []
    for text, doc in rows:
        lines.append(f"{text:{width}}  # {doc}" if doc else text)
    if any(text.endswith(" = ?") for text, _ in rows):
        note = (
            "?: not set here. The parent sets it when it builds the component; otherwise, training stops with an error."
        )
        lines += ["", note]
    if not words and len(rows) < num_fields:
        lines += [
            "",
            f"{len(rows)} of {num_fields} fields; --all shows all, --only=WORD shows fields whose path contains WORD",
        ]
    return [*rules, *lines]


def _marks(rules: list[str], overrides: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the origin of each changed field, by path."""
    marks: dict[str, str] = {}
    # The line of a rule is `rule PATTERN: PATH OLD -> NEW`.
    for line in rules:
        rule, _, change = line.partition(": ")
        path = change.split()[0]
        marks[path] = f"  <- {rule}"
    for path, _ in overrides:
        marks[path] = "  <- command line"
    return marks


def _diff(names: list[str], left: Config, right: Config) -> list[str]:
    """Return the lines of a table of the fields that differ, with both values."""
    rows = [(path, as_text(left_value), as_text(right_value)) for path, left_value, right_value in diff(left, right)]
    if not rows:
        return [f"{names[0]} and {names[1]} are identical"]
    table = [("", names[0], names[1]), *rows]
    path_width = _column_width(table, 0)
    left_width = _column_width(table, 1)
    return [f"{path:{path_width}}  {a:{left_width}}  {b}" for path, a, b in table]


def _column_width(rows: Sequence[tuple[str, ...]], column: int) -> int:
    """Return the width of a column of text, at most _COLUMN."""
    longest = max(len(row[column]) for row in rows)
    return min(longest, _COLUMN)


def _print(lines: Iterable[str]) -> None:
    """Print lines, truncated to the width of the terminal if there is one."""
    width = None
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    for line in lines:
        print(line[:width].rstrip())


if __name__ == "__main__":
    sys.exit(main())
