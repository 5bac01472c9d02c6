"""The command line of every verb: `--config=NAME`, ordered overrides `--config.a.b=value`, the verb's own flags.

    parser = cli.Parser("train", __doc__)
    parser.add_argument("--workdir", required=True)

    @cli.main
    def main(argv: list[str]) -> int:
        command = parser.parse(argv)             # named config + overrides, checked; JAX has started nothing
        config, lines = command.resolve("v5e-8")  # named config, then its rules for that accelerator, then overrides

User errors end as one line on stderr and exit code 2. An exception in a user's own file ends as one line and that
file's frames. Unexpected errors keep their traceback (set PLIMSOLL_TRACEBACK=1 to see one for user errors too).
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from absl import flags
from absl import logging as absl_logging

from plimsoll import configs
from plimsoll.configs import data_flag
from plimsoll.framework.config import Config, ConfigError, FieldError, did_you_mean
from plimsoll.framework.config.accelerator_rules import apply_accelerator_rules, find_accelerator_rules
from plimsoll.framework.devices.environment import prepare_jax
from plimsoll.framework.run import user_errors
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.escaping import escape_control_chars
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import flag_hints, reports, source_index, startup_message

__all__ = [
    "DATA_FLAGS",
    "Command",
    "Overrides",
    "Parser",
    "UsageError",
    "apply_accelerator_rules",
    "apply_overrides",
    "check_output",
    "choose",
    "get_data_flags",
    "gib",
    "main",
    "prepare_jax",
    "reading",
    "split",
]

# The flags of `Parser.add_data`.
DATA_FLAGS = ("data", "data_weights", "data_at", "reward")
# Fields that --data_at can set.
_STAGE_FIELDS = ("weights", "seq_len", "global_batch_size")

# (dotted path, text) in the order of the command line.
Overrides = Sequence[tuple[str, str]]


class _Setting(NamedTuple):
    """An override with its parsed value."""

    path: str
    text: str
    value: Any


class _Applied(NamedTuple):
    """A named config with its overrides applied, and these overrides, which are applied again after any rules."""

    config: Config
    settings: list[_Setting]


class UsageError(ConfigError):
    """The command line cannot be parsed: for example an unknown flag, or a flag without its value."""


@dataclasses.dataclass
class Command:
    """A parsed command line."""

    args: argparse.Namespace  # the verb's own flags
    spec: str  # the name that --config gives
    named: Config  # that config, unchanged except for --data
    overrides: Overrides
    # Lines about ignored fields of a stored config, and about the detected format of --data.
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        # A path may start with an older name of a field; everything that follows compares paths.
        self.overrides = [(self.named.current_path(path), text) for path, text in self.overrides]

    @functools.cached_property
    def _override_result(self) -> _Applied:
        config = self.named.copy()
        settings = [_override(config, path, text) for path, text in self.overrides]
        return _Applied(config, settings)

    @property
    def config(self) -> Config:
        """The named config with its overrides, without accelerator rules."""
        return self._config_with_rules

    @property
    def override_paths(self) -> tuple[str, ...]:
        """The paths of the fields that the command line sets."""
        return tuple(path for path, _ in self.overrides)

    @functools.cached_property
    def _config_with_rules(self) -> Config:
        """The config, after testing all rules on copies, so that a bad rule shows without its accelerator."""
        config = self._override_result.config
        apply_accelerator_rules(config, None)
        return config

    def resolve(self, accelerator: str) -> tuple[Config, list[str]]:
        """Return (the config for that accelerator, a line for each field that its rules changed).

        Rules are applied to the named config, and overrides after them. Overrides of the rules themselves come first:
        `--config.accelerator_rules=[]` disables the rules.
        """
        overridden, settings = self._override_result
        if not find_accelerator_rules(overridden, accelerator):
            return overridden.copy(), []
        config = self.named.copy()
        for setting in settings:
            if setting.path.split(".")[0] == "accelerator_rules":
                _set(config, setting)
        chosen = {setting.path for setting in settings}

        def is_overridden(path: str) -> bool:
            return any(path == one or path.startswith(f"{one}.") for one in chosen)

        lines = apply_accelerator_rules(config, accelerator, is_overridden)
        for setting in settings:
            _set(config, setting)
        return config, lines


class Parser(argparse.ArgumentParser):
    """argparse with did-you-mean, one-line errors, and `--config*` flags, which are removed before argparse runs."""

    def __init__(
        self,
        verb: str,
        description: str | None = None,
        *,
        takes_config: bool = True,
        shape_only: bool = False,
        **options: Any,
    ):
        # Whether a published model's config works without its files: weights and tokenizer.
        self._shape_is_enough = shape_only
        first_line = (description or "").partition("\n")[0]
        super().__init__(prog=f"plimsoll {verb}", description=first_line, allow_abbrev=False, **options)
        # `split` removes both flags before argparse runs. They are added for --help and did-you-mean.
        if takes_config:
            config_help = (
                "a named config (`plimsoll configs list`), path/to/file.py:NAME, hf:DIR or hf:ORG/NAME, or "
                "WORKDIR/config.json"
            )
            self.add_argument("--config", metavar="NAME", help=config_help)
        self.add_argument(
            "--config.PATH", metavar="VALUE", dest="_override", help="set a config field; repeatable, applied in order"
        )

    def add_data(self) -> None:
        """Add --data, for verbs that read training data."""
        self.add_argument(
            "--data",
            metavar="PATH",
            action="append",
            help="use your own data instead of the config's: a file, folder, glob, URL, or "
            "hf://datasets/ORG/NAME on the Hugging Face Hub. The format is detected, "
            "and 5%% of the data is held out for evaluation. Repeat it to mix several",
        )
        self.add_argument(
            "--data_weights",
            metavar="W,W",
            help="with several --data: a weight for each, in the same order; only proportions matter; default: equal",
        )
        self.add_argument(
            "--reward",
            metavar="FILE.py:FUNCTION",
            action="append",
            help="with prompts as data (--config=grpo:DIR): the function that scores answers. Repeat it to add the "
            "rewards of several",
        )
        self.add_argument(
            "--data_at",
            metavar="STEP:FIELD=VALUE",
            action="append",
            help="change the data from that step on: weights=W,W, seq_len or global_batch_size; repeatable",
        )

    def parse(self, argv: Sequence[str]) -> Command:
        """Parse and check everything, so that any mistake is a ConfigError before JAX starts."""
        spec, overrides, verb_flags = split(argv)
        args = self.parse_flags(verb_flags, spec)
        if spec is None:
            raise UsageError(f"--config=NAME is required; valid names: {', '.join(configs.names())}")
        self._check_fields(spec, overrides)
        notes: list[str] = []
        named = configs.load(spec, notes.append, shape_only=self._shape_is_enough)
        overrides = [
            *reports.overrides(args),
            *_list_stage_overrides(args, named),
            *_list_reward_overrides(args, named),
            *overrides,
        ]
        data_weights = getattr(args, "data_weights", None)
        if getattr(args, "data", None):
            overridden = [named.current_path(path) for path, _ in overrides]
            settings = dict(zip(overridden, [text for _, text in overrides], strict=True))
            named, data_lines = data_flag.with_data(
                named, args.data, overridden, weights=data_weights, image_size=settings.get("data.image_size")
            )
            notes += data_lines
        elif data_weights is not None:
            raise UsageError(f"--data_weights={data_weights} without --data: expected one --data=PATH for each weight")
        command = Command(args, spec, named, overrides, notes)
        # Reading the property checks overrides and rules.
        command.config  # noqa: B018
        return command

    def _check_fields(self, spec: str, overrides: Overrides) -> None:
        """Raise ConfigError for a field that no config of ours has, before the config and JAX are imported."""
        if not source_index.has_only_our_components(spec):
            return
        for path, text in overrides:
            # From here on, sections may have other components, or the last name may be another trainer's.
            if path in source_index.SECTIONS or flag_hints.is_known_elsewhere(path):
                return
            with _prefix_errors(path, text):
                source_index.check_field(path)

    def parse_flags(self, argv: Sequence[str], spec: str | None = None) -> argparse.Namespace:
        """Parse the verb's own flags.

        An unknown flag is refused before a missing one is reported. The message suggests what it may have meant, also
        among the fields of the config that `spec` names.
        """

        # Load the config only if a hint needs it, because loading may run a user's file.
        def load_config() -> Config | None:
            return None if spec is None else configs.load(spec, shape_only=self._shape_is_enough)

        # argparse would report a missing flag first, which hides a typo in its name.
        known_flags = [flag for flag in self._option_string_actions if flag != "--config.PATH"]
        for index, token in enumerate(argv):
            flag, _, value = token.partition("=")
            if not flag.startswith("--") or flag in known_flags:
                continue
            if not value and index + 1 < len(argv) and not argv[index + 1].startswith("--"):
                value = argv[index + 1]
            path = token[2:].removeprefix("config.")
            if "." in flag:
                raise UsageError(f"unknown flag {flag!r}; did you mean '--config.{path}'?")
            hint = flag_hints.hint(
                flag,
                value,
                known_flags,
                load_config,
                has_only_our_components=source_index.has_only_our_components(spec),
            )
            raise UsageError(f"unknown flag {flag!r}{hint}")
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` shows all flags)")


def split(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """Return (the name in --config, overrides in order, everything else). Accepts `--flag=value` and `--flag value`."""
    spec: str | None = None
    overrides: list[tuple[str, str]] = []
    verb_flags: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        flag, separator, value = token.partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            verb_flags.append(token)
            continue
        if not separator:
            value = next(tokens, "--")
            # "-1" is a value, and "--x" is the next flag.
            if value.startswith("--"):
                raise UsageError(f"{flag} needs a value: {flag}=...")
        if flag != "--config":
            overrides.append((flag.removeprefix("--config."), value))
        elif spec is None:
            spec = value
        else:
            raise UsageError(f"--config is given twice: {spec!r} and {value!r}")
    return spec, overrides, verb_flags


def _list_reward_overrides(args: argparse.Namespace, named: Config) -> list[tuple[str, str]]:
    """Return the override that --reward stands for. Raises UsageError if the config learns from no rewards."""
    rewards = getattr(args, "reward", None)
    if rewards is None:
        return []
    transform = named.batch_transform if named.takes("batch_transform") else None
    if transform is None or not transform.takes("reward"):
        raise UsageError(
            f"--reward={rewards[0]}: the config learns from no rewards; expected --config=grpo:DIR or lora-grpo:DIR, "
            "or a config with batch_transform=Rollouts"
        )
    return [("batch_transform.reward", rewards[0] if len(rewards) == 1 else json.dumps(rewards))]


def _list_stage_overrides(args: argparse.Namespace, named: Config) -> list[tuple[str, str]]:
    """Return the overrides that --data_at stands for.

    Raises:
        UsageError: a flag is not STEP:FIELD=VALUE, or the config's data has no stages.
    """
    overrides = []
    steps = set()
    for text in getattr(args, "data_at", None) or []:
        match = re.fullmatch(r"(0|[1-9][0-9]*(?:_[0-9]+)*):(\w+)=(.+)", text)
        if match is None or match[2] not in _STAGE_FIELDS:
            fields = ", ".join(_STAGE_FIELDS)
            raise UsageError(
                f"--data_at={text}: expected STEP:FIELD=VALUE with one of {fields}, such as 20000:weights=1,3"
            )
        if "data" not in named or not named.data.takes("stages"):
            raise UsageError(f"--data_at={text}: only data of text has stages (docs/data.md)")
        step = str(int(match[1]))
        # --data replaces the stages of the config.
        is_new = getattr(args, "data", None) is not None or step not in named.data.stages
        if step not in steps and is_new:
            overrides.append((f"data.stages.{step}", "plimsoll.DataStage"))
        steps.add(step)
        overrides.append((f"data.stages.{step}.{match[2]}", match[3]))
    return overrides


def get_data_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of `Parser.add_data` as they were given, for another command."""
    flags = [f"--data={path}" for path in args.data or []]
    if args.data_weights is not None:
        flags.append(f"--data_weights={args.data_weights}")
    return flags


def apply_overrides(config: Config, overrides: Overrides) -> Config:
    """Apply overrides in order, in place; returns the config."""
    for path, text in overrides:
        _override(config, path, text)
    return config


def _override(config: Config, path: str, text: str) -> _Setting:
    """Apply an override in place; returns it with its parsed value."""
    with _prefix_errors(path, text):
        try:
            config.override(path, text)
        except FieldError as error:
            meant = flag_hints.find_field_alias(path, config)
            if not meant:
                raise
            raise FieldError(f"no such field; did you mean {meant!r}?", path=error.path) from None
        # Copy the value, because later overrides may change it.
        value = copy.deepcopy(config.get_path(path))
    return _Setting(path, text, value)


def _set(config: Config, setting: _Setting) -> None:
    """Apply a parsed override in place."""
    with _prefix_errors(setting.path, setting.text):
        config.set_path(setting.path, setting.value)


@contextlib.contextmanager
def _prefix_errors(path: str, text: str) -> Iterator[None]:
    """Prefix a ConfigError with the flag that caused it."""
    try:
        yield
    except ConfigError as error:
        # The flag already names the path, unless the error is in a part of the value.
        message = error.args[0] if error.path == path else error
        raise ConfigError(f"--config.{path}={text}: {message}") from error


def main(verb: Callable[[list[str]], int]) -> Callable[..., int]:
    """Decorate a verb's `main(argv)`: argv defaults to the process's, and user errors become exit code 2."""

    @functools.wraps(verb)
    def run_verb(argv: list[str] | None = None) -> int:
        # A program that calls a verb has its own logging and signal handlers, so set both only when the verb is the
        # process's own command.
        is_command = argv is None
        try:
            if not is_command:
                return verb(argv)
            with interrupts.watch_signals(), startup_message.show_startup(sys.argv):
                _show_records()
                return verb(sys.argv[1:])
        except BrokenPipeError:
            # The reader of a pipe (`| head`) left. Python would raise again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.DONE
        except Exception as error:
            interrupts.wait_if_exiting()
            code = user_errors.report_error(error, is_command=is_command)
            if code is None:
                raise
            return code

    return run_verb


class _Line(logging.Formatter):
    """Formats a record as `warning: what happened (framework.checkpoint.checkpointer)`, like our other lines."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += f"\n{self.formatException(record.exc_info)}"
        # All users of absl logging share one logger, so its name is not informative.
        origin = _module_at(Path(record.pathname)) if record.name == "absl" else record.name
        return f"{record.levelname.lower()}: {escape_control_chars(message)} ({origin})"


def _module_at(path: Path) -> str:
    """Return the dotted name of the module in a file, derived from its enclosing packages."""
    names = [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").exists():
            break
        names.insert(0, folder.name)
    return ".".join(names)


def _show_records() -> None:
    """Print warnings and errors to stderr in our line format, unless the program has its own handlers.

    The handler is that of absl, which orbax, grain and this framework log through.
    """
    if logging.getLogger().handlers:
        return
    handler = absl_logging.get_absl_handler()
    handler.setFormatter(_Line())
    handler.python_handler.setStream(sys.stderr)
    # argparse parses our flags. Without this, absl prints with its first record that its own flags are not parsed.
    flags.FLAGS.mark_as_parsed()
    absl_logging.use_absl_handler()
    absl_logging.set_verbosity(absl_logging.WARNING)


@contextlib.contextmanager
def reading(flag: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the flag in an OSError about the file that it gives.

    Args:
        flag: name of the flag, without the dashes.
        path: the file, as the user wrote it.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"--{flag}={path}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"--{flag}={path}: a folder; expected a file") from None
    except PermissionError:
        raise UsageError(f"--{flag}={path}: no permission to read it") from None
    except OSError as error:
        raise UsageError(f"--{flag}={path}: cannot be read: {error.strerror or error}") from None


def check_output(flag: str, path: str | os.PathLike[str], *, is_folder: bool = False) -> None:
    """Check that an output can be written, before any work is done for it.

    Args:
        flag: name of the flag, without the dashes.
        path: file or folder to write, as the user wrote it.
        is_folder: whether the output is a folder, which is created with its parents.

    Raises:
        UsageError: it cannot be written.
    """
    output = Path(path).expanduser().absolute()
    shown = f"--{flag}={path}"
    folder = output.parent
    if is_folder:
        folder = next(one for one in (output, *output.parents) if one.exists())
        if not folder.is_dir():
            raise UsageError(f"{shown}: {folder} is a file; expected a folder")
    elif output.is_dir():
        raise UsageError(f"{shown}: a folder; expected a file")
    elif not folder.is_dir():
        raise UsageError(f"{shown}: the folder {Path(path).expanduser().parent} does not exist")
    # A device, such as /dev/stdout, can be written in a folder that cannot.
    is_device = output.exists() and not output.is_file() and not is_folder
    if not (os.access(output, os.W_OK) if is_device else os.access(folder, os.W_OK | os.X_OK)):
        raise UsageError(f"{shown}: no permission to write in {folder}")
    if not is_folder and output.is_file() and not os.access(output, os.W_OK):
        raise UsageError(f"{shown}: no permission to write to it")


def gib(flag: str, value: float | None) -> int | None:
    """Convert a flag in GiB (2^30 bytes) to bytes; None stays None."""
    if value is not None and not value > 0:
        raise UsageError(f"--{flag}={value:g}: expected more than 0")
    if value is None:
        return None
    return int(value * 2**30)


def choose(kind: str, name: str, valid: Sequence[str]) -> str:
    """Return `name` if it is valid; else raise a UsageError that suggests the nearest name."""
    if name not in valid:
        raise UsageError(f"no {kind} {name!r}{did_you_mean(name, valid)}")
    return name
