"""The command line of every verb: `--config=NAME`, ordered overrides `--config.a.b=value`, the verb's own flags.

    parser = cli.Parser("train", __doc__)
    parser.add_argument("--workdir", required=True)

    @cli.main
    def main(argv: list[str]) -> int:
        command = parser.parse(argv)             # named config + overrides, checked; JAX has started nothing
        config, lines = command.resolve("v5e-8")  # named config, then its rules for that accelerator, then overrides

A mistake of the user's ends as one line on stderr and exit code 2, an exception in a user's own file as one line and
that file's frames; anything unexpected keeps its traceback (set PLIMSOLL_TRACEBACK=1 to see one for mistakes too).
Imports `framework.config`, `configs`, `launch.flag_hints`, `launch.mistakes`.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import configs
from framework.config import Config, ConfigError, did_you_mean, diff
from framework.config.schema import as_text
from framework.terminal import interrupts
from launch import flag_hints, mistakes

Overrides = Sequence[tuple[str, str]]  # (dotted path, text) in the order given


class UsageError(ConfigError):
    """The command line cannot be read: an unknown flag, a flag without its value."""


@dataclasses.dataclass
class Command:
    """A parsed command line."""

    args: argparse.Namespace  # the verb's own flags
    spec: str  # what --config named
    named: Config  # that config, untouched
    overrides: Overrides

    @functools.cached_property
    def config(self) -> Config:
        """Named + overrides, without rules by accelerator. Those are all tried on copies: a mistake in one should not
        wait for that accelerator."""
        config = apply_overrides(self.named.copy(), self.overrides)
        apply_accelerator_rules(config, None)
        return config

    def resolve(self, accelerator: str) -> tuple[Config, list[str]]:
        """(the config for that accelerator, a line for each thing its rules changed): named, rules, overrides. Those of
        the rules themselves go first: `--config.accelerator_rules=[]` switches the rules off."""
        of_rules = [one for one in self.overrides if one[0].split(".")[0] == "accelerator_rules"]
        config = apply_overrides(self.named.copy(), of_rules)
        lines = apply_accelerator_rules(config, accelerator)
        return apply_overrides(config, self.overrides), lines


class Parser(argparse.ArgumentParser):
    """argparse with did-you-mean, one-line errors, and `--config*`, which are taken out before argparse sees them."""

    def __init__(self, verb: str, description: str | None = None, *, takes_config: bool = True, **options: Any):
        text = (description or "").partition("\n")[0]
        super().__init__(prog=f"python -m launch.{verb}", description=text, allow_abbrev=False, **options)
        if takes_config:
            what = "a named config (`python -m launch.configs list`), or path/to/file.py:NAME"
            self.add_argument("--config", metavar="NAME", help=what)
        self.add_argument("--config.PATH", metavar="VALUE", dest="_override", help="sets one field; applied in order")

    def parse(self, argv: Sequence[str]) -> Command:
        """Reads and checks everything, so that a mistake anywhere is a ConfigError before JAX starts."""
        spec, overrides, rest = split(argv)
        args = self.parse_flags(rest, spec)
        if spec is None:
            raise UsageError(f"--config=NAME is required; valid names: {', '.join(configs.names())}")
        command = Command(args, spec, configs.load(spec), overrides)
        command.config  # noqa: B018
        return command

    def parse_flags(self, argv: Sequence[str], spec: str | None = None) -> argparse.Namespace:
        """The verb's own flags; an unknown one is refused before a missing one is complained about. Among the fields of
        the config that `spec` names is what it may have meant."""
        known = [flag for flag in self._option_string_actions if flag != "--config.PATH"]
        for index, token in enumerate(argv):
            flag, _, value = token.partition("=")
            if flag.startswith("--") and flag not in known:
                if not value and index + 1 < len(argv) and not argv[index + 1].startswith("--"):
                    value = argv[index + 1]
                path = token[2:].removeprefix("config.")
                if "." in flag:
                    raise UsageError(f"unknown flag {flag!r}; did you mean '--config.{path}'?")
                hint = flag_hints.hint(flag, value, known, lambda: None if spec is None else configs.load(spec))
                raise UsageError(f"unknown flag {flag!r}{hint}")
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` shows all flags)")


def split(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """(what --config names, overrides in order, everything else). Both `--flag=value` and `--flag value` are read."""
    spec: str | None = None
    overrides: list[tuple[str, str]] = []
    rest: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        flag, separator, value = token.partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            rest.append(token)
            continue
        if not separator:
            value = next(tokens, "--")
            if value.startswith("--"):  # "-1" is a value, "--x" is the next flag
                raise UsageError(f"{flag} needs a value: {flag}=...")
        if flag != "--config":
            overrides.append((flag.removeprefix("--config."), value))
        elif spec is None:
            spec = value
        else:
            raise UsageError(f"--config is given twice: {spec!r} and {value!r}")
    return spec, overrides, rest


def apply_overrides(config: Config, overrides: Overrides) -> Config:
    """Applies overrides in order, in place; returns the config."""
    for path, text in overrides:
        try:
            config.override(path, text)
        except ConfigError as error:
            told = error.args[0] if error.path == path else error
            raise ConfigError(f"--config.{path}={text}: {told}") from error
    return config


def apply_accelerator_rules(config: Config, accelerator: str | None) -> list[str]:
    """Applies, in place and in order, the rules whose pattern matches a name such as "v5e-8", "h200x8" or "cpu-8".
    Returns a line for each field that one changes: `rule v5e-*: memory.remat none -> full`. None: all, on copies."""
    lines: list[str] = []
    for index, rule in enumerate(config.accelerator_rules if "accelerator_rules" in config else []):
        if accelerator is not None and not fnmatch.fnmatchcase(accelerator, rule.pattern):
            continue
        before, changed = config.copy(), config if accelerator is not None else config.copy()
        for path, value in rule.set.items():
            try:
                changed.set_path(path, value)
            except ConfigError as error:
                raise ConfigError(str(error), path=f"accelerator_rules.{index} ({rule.pattern})") from error
        rows = diff(before, changed)
        lines += [f"rule {rule.pattern}: {path} {as_text(a)} -> {as_text(b)}" for path, a, b in rows]
    return lines


def main(verb: Callable[[list[str]], int]) -> Callable[..., int]:
    """Decorates a verb's `main(argv)`: argv defaults to the process's, and the user's mistakes become exit code 2."""

    @functools.wraps(verb)
    def wrapped(argv: list[str] | None = None) -> int:
        if argv is None:
            _show_records()
        try:
            with interrupts.watched() if argv is None else contextlib.nullcontext():
                return verb(sys.argv[1:] if argv is None else argv)
        except BrokenPipeError:
            # The reader of a pipe (`| head`) left. Python would complain once more when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:
            interrupts.settle()
            code = mistakes.tell(error, of_process=argv is None)
            if code is None:
                raise
            return code

    return wrapped


class _Line(logging.Formatter):
    """`warning: what happened (framework.checkpoint.checkpointer)`, as other lines of ours look."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += f"\n{self.formatException(record.exc_info)}"
        return f"{record.levelname.lower()}: {message} ({record.name})"


def _show_records() -> None:
    """Warnings and errors that packages log go to stderr as lines of ours, unless the program has its own handlers."""
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        handler.setFormatter(_Line())
        root.addHandler(handler)


def prepare_jax() -> None:
    """Checks the environment of JAX's backends, for verbs that start them, and sets it where it says nothing yet."""
    import jax  # noqa: F401

    from framework.devices.accelerators import (
        GIB,
        GPU_MEMORY_FRACTION,
        HOST_LIMIT,
        HOST_MEMORY_FRACTION,
        machine_memory_bytes,
    )
    from framework.devices.compiler import check_environment

    check_environment()

    # JAX takes three quarters of a GPU unless told otherwise; the largest model needs nearly all of it.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name; jaxlib refuses both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    # Nor more host memory than 64 GiB. Only GPUs read either.
    os.environ.setdefault(HOST_LIMIT, str(int(HOST_MEMORY_FRACTION * machine_memory_bytes() / GIB)))
    # On a machine without TPU chips, which jax tells when it is imported, libtpu would complain about that in five
    # lines on stderr, if it is installed for planning.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")


def gib(flag: str, value: float | None) -> int | None:
    """A flag in GiB (of 2^30 bytes) as bytes; None stays."""
    if value is not None and not value > 0:
        raise UsageError(f"--{flag}={value:g}: expected more than 0")
    return None if value is None else int(value * 2**30)


def choose(kind: str, name: str, valid: Sequence[str]) -> str:
    """`name` if it is valid, else a UsageError that names the nearest."""
    if name not in valid:
        raise UsageError(f"no {kind} {name!r}{did_you_mean(name, valid)}")
    return name
