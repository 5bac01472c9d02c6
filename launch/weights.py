"""Loads the weights of a run (--workdir) or of a published model (--hf), for verbs that do not train."""

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Literal

from plimsoll import configs
from plimsoll.framework.terminal.escaping import escape_control_chars
from plimsoll.launch import cli

if TYPE_CHECKING:
    from plimsoll.api.loaded import LoadedModel

__all__ = ["add_step", "load", "log", "parse", "parser"]


def parser(verb: str, doc: str | None, *, hf: bool = True) -> cli.Parser:
    """Build the verb's parser with the flags that `load` reads; `hf` adds --hf."""
    verb_parser = cli.Parser(verb, doc, takes_config=False)
    verb_parser.add_argument(
        "--config", metavar="FILE.py:NAME", help="file that defines the run's own classes, if it has any"
    )
    model = verb_parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--workdir", metavar="DIR", help="load a run of `plimsoll train`")
    if hf:
        model.add_argument("--hf", metavar="DIR", help="load a Hugging Face directory, or ORG/NAME from the Hub")
    # `load` reads this even if a verb has no such flag.
    verb_parser.set_defaults(hf=None)
    add = verb_parser.add_argument
    add_step(verb_parser)
    add("--ema", action="store_true", help="use the averaged weights (EMA) of the run")
    add("--host_weights", action="store_true", help="keep the stack in host memory, except for one layer at a time")
    return verb_parser


def add_step(verb_parser: argparse.ArgumentParser) -> None:
    """Add --step, which `load` reads."""
    verb_parser.add_argument(
        "--step",
        type=_parse_step,
        metavar="N|best",
        help="step of the checkpoint to load, or the best one (of trainer.keep_best); default: the newest",
    )


def _parse_step(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a step or best, given {text!r}")
    return int(text)


def parse(verb_parser: cli.Parser, argv: list[str]) -> tuple[argparse.Namespace, cli.Overrides]:
    """Return (flags, overrides in order). Imports the file that --config names, so that its classes are known."""
    spec, overrides, verb_flags = cli.split(argv)
    args = verb_parser.parse_flags(verb_flags)
    if spec is not None:
        configs.load(spec)
    if args.hf is not None and (args.step is not None or args.ema):
        raise cli.UsageError("--step and --ema require --workdir")
    return args, overrides


def load(args: argparse.Namespace, overrides: cli.Overrides, *, text: bool = True) -> "LoadedModel":
    """Load the model that the flags name, without optimizer state.

    Args:
        args: flags of `parser`.
        overrides: overrides of the config.
        text: whether the model is a language model whose tokenizer must be prepared.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or the files do not match. The message is one line.
    """
    # Imported late, so that a typo on the command line shows immediately.
    from plimsoll.api import loaded

    change = partial(cli.apply_overrides, overrides=overrides)
    is_mesh_requested = any(loaded.is_mesh_setting(path) for path, _ in overrides)
    if args.hf is not None:
        return loaded.load_published(
            args.hf, change, host_weights=args.host_weights, is_mesh_requested=is_mesh_requested, log=log
        )
    return loaded.load_run(
        args.workdir,
        change,
        step=args.step,
        averaged=args.ema,
        host_weights=args.host_weights,
        is_mesh_requested=is_mesh_requested,
        text=text,
        log=log,
    )


def log(message: str) -> None:
    """Print a message to stderr, because stdout is for results."""
    print(escape_control_chars(message), file=sys.stderr, flush=True)
