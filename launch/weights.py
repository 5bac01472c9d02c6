"""The weights of a run (--workdir) or of a published model (--hf), for verbs that train nothing."""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import configs
from framework.config import Config, config_for, target_of
from framework.data.tokenizers import BPETokenizer
from framework.files.workdir import read_only
from framework.program import stored
from launch import cli


@dataclass
class Loaded:
    """A model that is ready: `state` holds parameters (or "ema", if `averaged`), frozen ones and buffers alone."""

    config: Config
    experiment: Any  # its tokenizer is prepared
    program: Any
    state: dict[str, Any]
    averaged: bool
    folder: Path  # the workdir's, or the published model's

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError where there is none: ids alone are no text."""
        tokenizer = self.experiment.data.tokenizer
        if not tokenizer.has_text:
            raise ValueError("data.tokenizer is NoTokenizer; set --config.data.tokenizer to the one the tokens are of")
        return tokenizer


def parser(verb: str, doc: str | None, *, hf: bool = True) -> cli.Parser:
    """The verb's parser with the flags that `load` reads, --hf among them or not."""
    verb_parser = cli.Parser(verb, doc, takes_config=False)
    verb_parser.add_argument("--config", metavar="FILE.py:NAME", help="where a run's own classes are, if it has any")
    place = verb_parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--workdir", metavar="DIR", help="a run of launch.train")
    if hf:
        place.add_argument("--hf", metavar="DIR", help="a Hugging Face directory")
    # `load` asks for it, also where a verb has no such flag.
    verb_parser.set_defaults(hf=None)
    add = verb_parser.add_argument
    add("--step", type=int, metavar="N", help="this checkpoint of the workdir, not the newest")
    add("--ema", action="store_true", help="the averaged weights of the workdir")
    add(
        "--host_weights",
        action="store_true",
        help="the stack stays in host memory, but for one layer",
    )
    return verb_parser


def parse(verb_parser: cli.Parser, argv: list[str]) -> tuple[argparse.Namespace, cli.Overrides]:
    """(flags, overrides in order). Imports the file that --config names, so that its classes are known."""
    spec, overrides, verb_flags = cli.split(argv)
    args = verb_parser.parse_flags(verb_flags)
    if spec is not None:
        configs.load(spec)
    if args.hf is not None and (args.step is not None or args.ema):
        raise cli.UsageError("--step and --ema are of a --workdir")
    return args, overrides


def load(args: argparse.Namespace, overrides: cli.Overrides, *, text: bool = True) -> Loaded:
    """Loads the model that the flags name; no optimizer state is read.

    Args:
        args: the flags of `parser`.
        overrides: of the config.
        text: the model is a language model, whose tokenizer is made ready.

    Raises:
        FileNotFoundError, ValueError: it is not there, or does not fit together; one line.
    """
    cli.prepare_jax()
    if args.hf is not None:
        return _load_hf(args, overrides)
    workdir, checkpoints = read_only(args.workdir)
    stored_config = stored.read(workdir, tell)
    config = cli.apply_overrides(stored_config, overrides)
    if text:
        _name_tokenizer_file(config, workdir)
    experiment: Any = config.instantiate()
    if args.ema and not experiment.learner.ema_specs():
        raise ValueError("--ema: the run keeps no averages (learner.ema is not set)")
    if text:
        _prepare_tokenizer(experiment, workdir)

    # Imported late: a config or a tokenizer that is wrong is told before the devices are looked
    # for.
    from framework.checkpoint.checkpointer import Checkpointer
    from framework.devices.executables import use_compilation_cache
    from framework.program.inference import inference_program

    checkpointer = Checkpointer(directory=checkpoints, read_only=True)
    if not checkpointer.steps():
        problems = [f"{checkpointer.directory} holds no checkpoint", *checkpointer.problems()]
        raise FileNotFoundError("; ".join(problems))
    use_compilation_cache(config.trainer.compilation_cache)
    program = inference_program(experiment, host_weights=args.host_weights, tell=tell)
    # The optimizer's state, often the largest group, is not needed here.
    groups = ("ema" if args.ema else "parameter", "frozen", "buffer")
    specs = {group: program.layout.specs[group] for group in groups}
    abstract = program.layout.abstract(specs)
    restore = checkpointer.restore_latest
    if args.step is not None:
        restore = partial(checkpointer.restore, args.step)
    restored = restore(abstract, groups=groups)
    source = f"{args.workdir}, step {restored.step}{', averaged' if args.ema else ''}"
    tell("\n".join([*restored.problems, source]))
    # The group that was not read is empty.
    state = {"parameter": {}, "ema": {}, **restored.state}
    return Loaded(config, experiment, program, state, args.ema, workdir)


def _name_tokenizer_file(config: Config, workdir: Path) -> None:
    """Has the run's copy of its tokenizer read, wherever the tokenizer came from. Changes the config in place."""
    if not config.data.takes("tokenizer"):
        return
    tokenizer = config.data.tokenizer
    target = target_of(tokenizer)
    if isinstance(target, type) and issubclass(target, BPETokenizer):
        tokenizer.path = str(workdir / "tokenizer.json")


def _prepare_tokenizer(experiment: Any, workdir: Path) -> None:
    """Makes the run's tokenizer ready. Raises ValueError: its model has no use for text."""
    # Reading the property is the check.
    _ = experiment.language_model
    tokenizer = experiment.data.tokenizer
    file = workdir / "tokenizer.json"
    if isinstance(tokenizer, BPETokenizer) and not file.exists():
        raise FileNotFoundError(f"{file} does not exist: the tokenizer of the run")
    tokenizer.prepare(workdir, None, write=False)


def _load_hf(args: argparse.Namespace, overrides: cli.Overrides) -> Loaded:
    """The published model that --hf names."""
    import optax

    from framework.data.pretrained_tokenizer import PretrainedTokenizer
    from framework.devices.executables import use_compilation_cache
    from framework.learner.learner import Learner
    from framework.program.inference import inference_program

    config = configs.load(f"hf:{args.hf}")
    # An experiment needs a learner. Plain SGD keeps no state, so it takes no memory.
    optimizer = config_for(optax.sgd, learning_rate=0.0)
    config.learner = config_for(Learner, optimizer=optimizer)
    config.data.tokenizer = config_for(PretrainedTokenizer, path=args.hf, vocab_size=config.model.vocab_size)
    cli.apply_overrides(config, overrides)
    experiment: Any = config.instantiate()
    experiment.data.tokenizer.prepare(Path(args.hf), None, write=False)
    use_compilation_cache(config.trainer.compilation_cache)
    program = inference_program(experiment, host_weights=args.host_weights, tell=tell)
    state = experiment.pretrained.init(program)
    folder = Path(args.hf).expanduser()
    return Loaded(config, experiment, program, state, False, folder)


def tell(message: str) -> None:
    """Prints a message to stderr: stdout is for results."""
    print(message, file=sys.stderr, flush=True)
