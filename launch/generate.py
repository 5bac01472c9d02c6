"""Continue prompts with a trained model; the text appears as it is made.

    plimsoll generate --workdir=runs/stdlib-tiny --prompt='def main():'
    plimsoll generate --workdir=runs/stdlib-tiny --prompt='import' --prompt='class' --temperature=0

Several prompts are one batch; the first is shown as it grows, the others after it. Only text goes to stdout.
"""

import itertools
import sys

from framework.files.texts import read_text
from framework.terminal.exit_codes import ExitCode
from launch import cli, sampling_flags, weights


def add_flags(parser: cli.Parser) -> None:
    """The flags of this verb, beside those that name the model."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompt_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file's text as a prompt",
    )
    sampling_flags.add_flags(parser, max_new_tokens="per prompt; default 128", seed="of the draws; default 0")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")


@cli.main
def main(argv: list[str]) -> int:
    """Runs the verb; 0 when all is printed."""
    parser = weights.parser("generate", __doc__)
    add_flags(parser)
    args, overrides = weights.parse(parser, argv)
    file_texts = [read_text(path, may_be_empty=True) for path in args.prompt_file]
    texts = [*args.prompt, *file_texts]
    if not texts:
        raise cli.UsageError("--prompt=TEXT or --prompt_file=FILE is required")

    from framework.api.model import DEFAULT_TOKENS, Model

    sampling = sampling_flags.sampling_of(args, DEFAULT_TOKENS)
    model = Model(weights.load(args, overrides))
    # The default gives way to a short context; a number of the user's own is refused. A refusal
    # comes before the prompt is shown.
    steps = model.stream(texts, sampling, args.stop, shortens=args.max_new_tokens is None)
    # Compiling is over with the first piece: what is said of it would stand in the middle of the text.
    first_pieces = list(itertools.islice(steps, 1))
    show(texts[0])
    continuations = [""] * len(texts)
    for pieces in itertools.chain(first_pieces, steps):
        show(pieces[0])
        continuations = [text + piece for text, piece in zip(continuations, pieces, strict=True)]
    for text, continuation in zip(texts[1:], continuations[1:], strict=True):
        show(f"\n---\n{text}{continuation}")
    show("\n")
    return ExitCode.DONE


def show(text: str) -> None:
    """Writes to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
