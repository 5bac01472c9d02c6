"""The command line of every verb: `--config=NAME`, ordered overrides `--config.a.b=value`, the verb's own flags.

    parser = cli.Parser("train", __doc__)
    parser.add_argument("--workdir", required=True)

    @cli.main
    def main(argv: list[str]) -> int:
        command = parser.parse(argv)             # named config + overrides, checked; JAX has started nothing
        config, lines = command.resolve("v5e-8")  # named config, then its rules for that accelerator, then overrides

A mistake of the user's ends as one line on stderr and exit code 2; anything unexpected keeps its traceback (set
PLIMSOLL_TRACEBACK=1 to see one for mistakes too). Imports `framework.config`, `configs`.
"""

import argparse
import dataclasses
import fnmatch
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import configs
from framework.config import Config, ConfigError, MissingFieldError, did_you_mean, nearest, target_of
from framework.config_docs import as_text
from framework.config_names import name_of

_OURS = ("framework", "configs", "launch")
_FILE_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class UsageError(ConfigError):
    """The command line cannot be read: an unknown flag, a flag without its value."""


@dataclasses.dataclass
class Command:
    """A parsed command line.

    Args:
        args: the verb's own flags.
        spec: what --config named.
        named: the config as named, untouched.
        overrides: (dotted path, text) in the order given.
        config: named + overrides, without rules by accelerator.
    """

    args: argparse.Namespace
    spec: str
    named: Config
    overrides: list[tuple[str, str]]
    config: Config

    def resolve(self, accelerator: str) -> tuple[Config, list[str]]:
        """(the config for that accelerator, a line for each thing its rules changed): named, rules, overrides."""
        return resolve(self.named, self.overrides, accelerator)


class Parser(argparse.ArgumentParser):
    """argparse with did-you-mean, one-line errors, and `--config*`, which are taken out before argparse sees them."""

    def __init__(self, verb: str, description: str | None = None, **options: Any):
        self.takes_config = options.pop("takes_config", True)
        text = (description or "").partition("\n")[0]
        super().__init__(prog=f"python -m launch.{verb}", description=text, allow_abbrev=False, **options)
        if self.takes_config:
            what = "a named config (`python -m launch.configs list`), or path/to/file.py:NAME"
            self.add_argument("--config", metavar="NAME", help=what)
        self.add_argument("--config.PATH", metavar="VALUE", dest="_override", help="sets one field; applied in order")

    def parse(self, argv: Sequence[str]) -> Command:
        """Reads everything, applies the overrides, and tries all rules by accelerator on copies, so that a mistake in
        any of them shows before JAX starts.

        Raises:
            ConfigError: any mistake in flags, the config's name, overrides or rules.
        """
        spec, overrides, rest = split(argv)
        args = self.parse_flags(rest)
        if spec is None:
            raise UsageError(f"--config=NAME is required; valid names: {', '.join(configs.names())}")
        named = configs.load(spec)
        config = named.copy()
        apply_overrides(config, overrides)
        check_rules(config)
        return Command(args, spec, named, overrides, config)

    def parse_flags(self, argv: Sequence[str]) -> argparse.Namespace:
        """The verb's own flags; an unknown one is refused before a missing one is complained about."""
        known = [flag for action in self._actions for flag in action.option_strings if flag != "--config.PATH"]
        for token in argv:
            flag = token.partition("=")[0]
            if token == "--":
                break
            if flag.startswith("--") and flag not in known:
                if "." in flag:
                    hint = f"; did you mean '--config.{token[2:].removeprefix('config.')}'?"
                else:
                    hint = did_you_mean(flag, known)
                raise UsageError(f"unknown flag {flag!r}{hint}")
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` shows all flags)")


def split(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """(what --config names, overrides in order, everything else). Both `--flag=value` and `--flag value` are read."""
    spec: str | None = None
    overrides: list[tuple[str, str]] = []
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, separator, value = token.partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            rest.append(token)
            continue
        if not separator:
            # "-1" is a value, "--x" is the next flag.
            if not tokens or tokens[0].startswith("--"):
                raise UsageError(f"{flag} needs a value: {flag}=...")
            value = tokens.pop(0)
        if flag == "--config" and spec is not None:
            raise UsageError(f"--config is given twice: {spec!r} and {value!r}")
        if flag == "--config":
            spec = value
        else:
            overrides.append((flag.removeprefix("--config."), value))
    return spec, overrides, rest


def apply_overrides(config: Config, overrides: Sequence[tuple[str, str]]) -> None:
    """Applies overrides in order, in place."""
    for path, text in overrides:
        try:
            config.override(path, text)
        except ConfigError as error:
            told = ConfigError(f"--config.{path}={text}: {str(error).removeprefix(f'{path}: ')}")
            told.path = error.path
            raise told from error


def resolve(named: Config, overrides: Sequence[tuple[str, str]], accelerator: str) -> tuple[Config, list[str]]:
    """A copy of `named` with its rules for the accelerator and then the overrides applied, and what the rules changed.

    Overrides of the rules themselves go first: `--config.accelerator_rules=[]` switches the rules off.
    """
    config = named.copy()
    apply_overrides(config, [one for one in overrides if one[0].split(".")[0] == "accelerator_rules"])
    lines = apply_accelerator_rules(config, accelerator)
    apply_overrides(config, overrides)
    return config, lines


def apply_accelerator_rules(config: Config, accelerator: str) -> list[str]:
    """Applies, in place and in order, the rules whose pattern matches a name such as "v5e-8", "h200x8" or "cpu-8".

    Returns:
        A line for people for each field that a rule sets: `rule v5e-*: memory.remat none -> full`.
    """
    lines = []
    for index, rule in _rules(config):
        if fnmatch.fnmatchcase(accelerator, rule.pattern):
            lines += _apply_rule(config, index, rule)
    return lines


def check_rules(config: Config) -> None:
    """Applies every rule by accelerator to a copy: a mistake in one should not wait for that accelerator."""
    for index, rule in _rules(config):
        _apply_rule(config.copy(), index, rule)


def _rules(config: Config) -> list[tuple[int, Config]]:
    return list(enumerate(config.accelerator_rules)) if "accelerator_rules" in config else []


def _apply_rule(config: Config, index: int, rule: Config) -> list[str]:
    lines = []
    for path, value in rule.set.items():
        try:
            before = _text_at(config, path)
            config.set_path(path, value)
        except ConfigError as error:
            raise ConfigError(str(error), path=f"accelerator_rules.{index} ({rule.pattern})") from error
        lines.append(f"rule {rule.pattern}: {path} {before} -> {_text_at(config, path)}")
    return lines


def _text_at(config: Config, path: str) -> str:
    try:
        value = config.get_path(path)
    except MissingFieldError:
        return "?"
    return name_of(target_of(value)) if isinstance(value, Config) else as_text(value)


def main(verb: Callable[[list[str]], int]) -> Callable[..., int]:
    """Decorates a verb's `main(argv)`: argv defaults to the process's, and the user's mistakes become exit code 2."""

    @functools.wraps(verb)
    def wrapped(argv: list[str] | None = None) -> int:
        try:
            return verb(sys.argv[1:] if argv is None else argv)
        except BrokenPipeError:
            # The reader of a pipe (`| head`) left. Python would complain once more when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:
            if not is_user_error(error):
                raise
            if os.environ.get("PLIMSOLL_TRACEBACK"):
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped


def is_user_error(error: BaseException) -> bool:
    """Whether an error is a message for the user rather than a bug: a ConfigError, a missing or forbidden file, or a
    ValueError that Plimsoll's own code raised (one raised inside JAX or numpy is not meant for the user)."""
    if isinstance(error, (ConfigError, *_FILE_ERRORS)):
        return True
    # JAX cuts its own frames out of a traceback, and notes that it did: who raised the error cannot be seen then.
    if any("JAX" in note for note in getattr(error, "__notes__", ())):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return isinstance(error, ValueError) and module.partition(".")[0] in _OURS


def choose(kind: str, name: str, valid: Sequence[str]) -> str:
    """`name` if it is valid.

    Raises:
        UsageError: it is not; names the nearest.
    """
    if name in valid:
        return name
    close = nearest(name, valid)
    raise UsageError(
        f"no {kind} {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}")
    )
