"""Reads the command that a shell script would run: assignments, arrays, line continuations. Executes nothing.

Only what launch scripts use is understood: `A=1`, `A=${1:-x}`, `A=$((B*8))`, `A=(--x 1)`, `A+=(--y)`, `A="$A --z"`,
`[[ $A == "x" ]]` in `if`/`elif`/`else`, and here-documents, which are left out.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError

_ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
# Not a here-string (<<<), nor a shift in an arithmetic expression.
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_REFERENCE = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<name>\w+)(?:\[[@*]\])?(?P<default>:?[-=+][^{}]*(?:\{[^{}]*\}[^{}]*)*)?\}"
    r"|\$(?P<plain>\w+|[@*#?])"
    r"|\$\((?P<output>[^()]*(?:\([^()]*\)[^()]*)*)\)"
)
# `. file`, `source ./file`, and with the folder of the script in front.
_SOURCED = re.compile(r"(?:\.|source)\s+[\"']?(?:(?:`[^`]*`|\$\([^)]*\)|\$\{?\w+\}?|\.)/)?([\w.-]+(?:/[\w.-]+)*)[\"']?")
_TEST = re.compile(r"\[\[?\s*(.*?)\s*\]\]?\s*$")
_CASE_LINE = re.compile(r"(\(?[\w\"'*.|-]+(?:\s*\|\s*[\w\"'*.-]+)*\))\s+(\S.*)", re.DOTALL)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# Text that stands for a variable without a value; no shell script contains it.
UNSET = "\x00"
# Characters of the value of a variable; a script that doubles a variable again and again exceeds any memory.
_MAX_VALUE = 1 << 16
# Scripts that source each other.
_MAX_SOURCED = 20


@dataclass
class Script:
    """The words of a script's commands, with variables replaced.

    Attributes:
        commands: the words of each command.
        variables: the final value of each variable.
        unset: names of variables that the script reads and does not set.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    unset: dict[str, None] = field(default_factory=dict)


@dataclass
class _Case:
    """A `case` statement around a line: its subject, and whether the current branch is open and taken."""

    subject: str
    is_open: bool = False
    is_taken: bool = False
    was_taken: bool = False


def read_script(text: str, source: str, given: Mapping[str, str] | None = None, folder: Path | None = None) -> Script:
    """Read the commands of a script.

    Args:
        text: the script.
        source: its name, for messages.
        given: variables that the user sets; they win over the script's own assignments.
        folder: folder of the files that the script sources (`. file`); None leaves them out.

    Raises:
        ForeignConfigError: a quote or a parenthesis is not closed, a value is too long, or a sourced file is not text.
    """
    script = Script()
    _read_statements(text, source, script, given or {}, folder)
    return script


def _read_statements(
    text: str, source: str, script: Script, given: Mapping[str, str], folder: Path | None, depth: int = 0
) -> None:
    """Read the statements of a script, and of those that it sources; `depth` counts the scripts that source it."""
    if depth > _MAX_SOURCED:
        raise ForeignConfigError(f"{source}: more than {_MAX_SOURCED} scripts source each other")
    script.variables |= given
    # Whether the branches around a line are taken: [taken now, some branch was taken before].
    branches: list[list[bool]] = []
    cases: list[_Case] = []
    for statement in _iter_statements(_join_lines(text, source)):
        if all(taken for taken, _ in branches) and _follow_case(statement, cases, script):
            continue
        if _follow_branch(statement, branches, script):
            continue
        if not all(taken for taken, _ in branches):
            continue
        sourced = _SOURCED.fullmatch(statement)
        path = None if sourced is None or folder is None else folder / sourced[1]
        if path is not None and path.is_file():
            try:
                sourced_text = path.read_text("utf-8")
            except (UnicodeDecodeError, OSError) as error:
                raise ForeignConfigError(f"{source}: {path} cannot be read as text: {error}") from None
            _read_statements(sourced_text, str(path), script, given, path.parent, depth + 1)
        else:
            _read_statement(statement, source, script, given)


def _read_statement(statement: str, source: str, script: Script, given: Mapping[str, str]) -> None:
    """Read an assignment or a command."""
    if re.match(r"(export|local)\s+\w+=\S+\s+\w+=", statement):
        # Several assignments.
        for part in _split_words(statement.split(None, 1)[1]):
            _read_statement(part, source, script, given)
        return
    match = _ASSIGNMENT.fullmatch(statement)
    if match is not None and _is_one_value(match[3]):
        name, append, value = match[1], match[2], match[3].strip()
        if value.startswith("(") and value.endswith(")"):
            value = value[1:-1]
            text = " ".join(
                shlex.quote(word) if UNSET in word else word for word in _expand_words(value, source, script)
            )
        else:
            text = " ".join(_unquote(_expand(value, script)))
        if append:
            text = f"{script.variables.get(name, '')} {text}".strip()
        if len(text) > _MAX_VALUE:
            raise ForeignConfigError(f"{source}: the value of {name} has more than {_MAX_VALUE:,} characters")
        if name not in given:
            script.variables[name] = text
        return
    words = _expand_words(statement, source, script)
    if words:
        script.commands.append(words)


def _expand_words(text: str, source: str, script: Script) -> list[str]:
    """Return the words of a command. A quoted word with spaces is split, as Megatron's scripts do in arrays."""
    try:
        words = shlex.split(_expand(_strip_comments(text), script), comments=False)
    except ValueError as error:
        raise ForeignConfigError(f"{source}: cannot read {text.strip()[:60]!r} as a shell command: {error}") from None
    return [part for word in words for part in (word.split() if word.startswith("--") and " " in word else [word])]


def _split_words(text: str) -> list[str]:
    """Split at spaces that are not within quotes or braces."""
    return re.findall(r"(?:\"[^\"]*\"|'[^']*'|\$\{[^}]*\}|\S)+", text)


def _unquote(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return [text]


def _is_one_value(text: str) -> bool:
    """Return whether the right side of `=` is one value: `A=1 command` is a command with a variable of its own."""
    stripped = text.strip()
    if not stripped or stripped.startswith("("):
        return True
    try:
        return len(shlex.split(_REFERENCE.sub("x", stripped), comments=True)) <= 1
    except ValueError:
        return True


def _expand(text: str, script: Script) -> str:
    """Replace the variables of a text; those without a value become UNSET and their name."""

    def replace(match: re.Match[str]) -> str:
        if match["output"] is not None:
            # The output of a command is not known, unless it is the folder of the script.
            if re.search(r"dirname|pwd|BASH_SOURCE|realpath", match["output"]):
                return "."
            name = match["output"].split()[0] if match["output"].split() else "()"
            script.unset[name] = None
            return f"{UNSET}{name}{UNSET}"
        if match["sum"] is not None:
            return _compute(_expand(match["sum"], script), script)
        name = match["name"] or match["plain"]
        value = script.variables.get(name)
        default = match["default"] or ""
        operator_text = default.lstrip(":")[:1]
        fallback = default.lstrip(":")[1:]
        if operator_text == "+":
            return _expand(fallback, script) if value else ""
        if value:
            return value
        if operator_text in ("-", "="):
            return _expand(fallback.strip("\"'"), script)
        if value is not None or name in ("@", "*", "#", "?"):
            return value or ""
        script.unset[name] = None
        return f"{UNSET}{name}{UNSET}"

    return _REFERENCE.sub(replace, text)


def _compute(text: str, script: Script) -> str:
    """Return the value of an arithmetic expression, whose names are variables."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(script.variables[node.id])
        raise ValueError(text)

    try:
        return str(value(ast.parse(text.strip(), mode="eval")))
    except (ValueError, KeyError, SyntaxError, ZeroDivisionError):
        return f"{UNSET}$(({text}{UNSET}"


def _follow_branch(statement: str, branches: list[list[bool]], script: Script) -> bool:
    """Follow `if`, `elif`, `else`, `fi`; returns whether the line was one of these, or belongs to a loop's frame."""
    word = statement.split(" ")[0].rstrip(";")
    if word in ("if", "elif"):
        condition = statement[len(word) :].strip()
        condition = re.sub(r";?\s*then$", "", condition).strip().rstrip(";")
        holds = _holds(condition, script)
        if word == "if":
            branches.append([holds, holds])
        elif branches:
            branches[-1] = [holds and not branches[-1][1], holds or branches[-1][1]]
        return True
    if word == "else" and branches:
        branches[-1] = [not branches[-1][1], True]
        return True
    if word == "fi":
        if branches:
            branches.pop()
        return True
    if word == "for":
        _start_loop(statement, script)
    return word in ("then", "do", "done", "for", "while", "function", "{", "}", "set", "shift")


def _follow_case(statement: str, cases: list[_Case], script: Script) -> bool:
    """Follow `case`, its patterns and `esac`; returns whether the line only belongs to these."""
    match = re.fullmatch(r"case\s+(.*?)\s+in", statement)
    if match is not None:
        subject = " ".join(_unquote(_expand(match[1], script)))
        cases.append(_Case(subject))
        return True
    if not cases:
        return False
    if statement == "esac":
        cases.pop()
        return True
    match = re.match(r"\(?([^\s()]+(?:\s*\|\s*[^\s()]+)*)\)(?:\s|$)", statement)
    if match is not None and not cases[-1].is_open:
        patterns = [pattern.strip().strip("\"'") for pattern in match[1].split("|")]
        fits = any(fnmatch.fnmatchcase(cases[-1].subject, pattern) for pattern in patterns)
        cases[-1].is_open = True
        cases[-1].is_taken = fits and not cases[-1].was_taken
        cases[-1].was_taken |= fits
        return True
    if statement.endswith(";;"):
        cases[-1].is_open = False
    return not cases[-1].is_taken


def _iter_statements(lines: list[str]) -> Iterator[str]:
    """Yield the statements of lines; `pattern) commands ;;` becomes three, `if test; then command; fi` four."""
    for line in lines:
        statement = line.strip()
        match = _CASE_LINE.fullmatch(statement)
        if match is None or statement.startswith(("if", "(", "for")):
            yield from _split_statements(statement)
            continue
        yield match[1]
        yield from _split_statements(match[2].removesuffix(";;").strip())
        if statement.endswith(";;"):
            yield ";;"


def _start_loop(statement: str, script: Script) -> None:
    """Give the variable of a loop its first value: a plan is for one run."""
    match = re.match(r"for\s+(\w+)\s+in\s+(.*?)(?:;\s*do)?\s*$", statement, re.DOTALL)
    if match is None or match[1] in script.variables:
        return
    words = _unquote(_expand(match[2], script))
    if words and UNSET not in words[0] and words[0]:
        script.variables[match[1]] = words[0]


def _holds(condition: str, script: Script) -> bool:
    """Return whether a test of strings holds. A test that is not understood does not."""
    if "&&" in condition or "||" in condition:
        joined = re.split(r"\s*(?:&&|\|\|)\s*", condition.removeprefix("[[").removesuffix("]]"))
        results = [_holds(f"[[ {part.strip().strip('[] ')} ]]", script) for part in joined]
        return all(results) if "&&" in condition else any(results)
    match = _TEST.search(condition)
    if match is None:
        return False
    test = match[1]
    if test.startswith("!"):
        return not _holds(f"[[ {test[1:].strip()} ]]", script)
    words = [one.split(UNSET)[0] for one in _unquote(_expand(test, script))] if test else []
    if len(words) >= 1 and words[0] in ("-z", "-n"):
        is_empty = len(words) == 1 or not words[1]
        return is_empty == (words[0] == "-z")
    if words and words[0] in ("-f", "-d", "-e"):
        return False
    if len(words) == 3 and words[1] in ("=", "==", "-eq"):
        return words[0] == words[2]
    if len(words) == 3 and words[1] in ("!=", "-ne"):
        return words[0] != words[2]
    return False


def _split_statements(line: str) -> list[str]:
    """Split a line at semicolons that are not within quotes, and after `then`, `else` and `do`."""
    if line.endswith(";;"):
        return [*_split_statements(line.removesuffix(";;").strip()), ";;"]
    parts = [line]
    if ";" in line:
        parts = re.split(r";(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)", line)
    statements = []
    for part in parts:
        word, _, rest = part.strip().partition(" ")
        statements += [word, rest.strip()] if word in ("then", "else", "do") else [part.strip()]
    return [statement for statement in statements if statement]


def _strip_comments(text: str) -> str:
    """Remove comments: from a # at the beginning of a word to the end of its line, outside of quotes."""
    return "\n".join(re.sub(r"(^|\s)#(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$).*", r"\1", line) for line in text.split("\n"))


def _join_lines(text: str, source: str) -> list[str]:
    """Return the logical lines of a script: continued lines, open quotes and open parentheses are joined."""
    lines: list[str] = []
    pending = ""
    here_document = ""
    for raw_line in text.replace("\r\n", "\n").split("\n"):
        if here_document:
            if raw_line.strip() == here_document:
                here_document = ""
            continue
        line = raw_line
        if not pending and line.strip().startswith("#"):
            continue
        line = re.sub(r"(?:^|(?<=\s))#(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$).*", "", line) if "#" in line else line
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        pending += line + "\n"
        if _is_open(pending):
            continue
        match = _HERE_DOCUMENT.search(pending)
        if match is not None:
            here_document = match[2]
            pending = ""
            continue
        lines.append(pending)
        pending = ""
    if pending.strip():
        if _is_open(pending):
            raise ForeignConfigError(
                f"{source}: cannot be read as a shell script: a quote or a parenthesis is not closed, "
                f"starting at {pending.strip()[:50]!r}"
            )
        lines.append(pending)
    return lines


def _is_open(text: str) -> bool:
    """Return whether a quote or an array's parenthesis is still open."""
    quote = ""
    depth = 0
    escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = quote != "'"
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
    return bool(quote) or depth > 0


def parse_flags(words: list[str], source: str) -> dict[str, str | bool]:
    """Return {flag without dashes, with underscores: value} of a command's words; flags without a value are True.

    Args:
        words: the words after the program.
        source: name of the file, for messages.
    """
    flags: dict[str, str | bool] = {}
    name = ""
    for word in words:
        if word.endswith(".py") or word == "-m":
            # The program that a launcher starts; what follows are its own flags.
            name = ""
        elif word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value if has_value else True
        elif name and flags[name] is True:
            flags[name] = word
        elif name:
            # Further words of a flag with several values.
            flags[name] = f"{flags[name]} {word}"
    return flags


def check_set(value: str, name: str, source: str) -> str:
    """Return a value without variables that have no value.

    Raises:
        ForeignConfigError: it contains such a variable.
    """
    if UNSET not in value:
        return value
    variable = value.split(UNSET)[1]
    raise ForeignConfigError(
        f"{source}: --{name.replace('_', '-')} is ${variable}, which the script does not set; give {variable}=VALUE "
        f"or --{name.replace('_', '-')}=VALUE after the file"
    )
