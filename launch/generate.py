"""Continue prompts with a trained model; the text appears as it is generated.

    plimsoll generate --workdir=runs/stdlib-tiny --prompt='def main():'
    plimsoll generate --workdir=runs/stdlib-tiny --prompt='import' --prompt='class' --temperature=0

Several prompts are one batch; the first is shown as it grows, the others after it. Only text goes to stdout.
"""

import itertools
import sys

from plimsoll.framework.files.text_files import read_text
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, sampling_flags, weights


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb, in addition to those that name the model."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompt_file", action="append", default=[], metavar="FILE", help="a file's text as a prompt")
    sampling_flags.add_flags(parser, max_new_tokens="per prompt; default 128", seed="of the draws; default 0")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once everything is printed."""
    parser = weights.parser("generate", __doc__)
    add_flags(parser)
    args, overrides = weights.parse(parser, argv)
    file_texts = [read_text(path, may_be_empty=True) for path in args.prompt_file]
    texts = [*args.prompt, *file_texts]
    if not texts:
        raise cli.UsageError("--prompt=TEXT or --prompt_file=FILE is required")

    from plimsoll.api.model import DEFAULT_TOKENS, Model

    sampling = sampling_flags.build_sampling(args, DEFAULT_TOKENS)
    model = Model(weights.load(args, overrides))
    # The default number of tokens is reduced for a short context, but a number from the user is refused. Refuse
    # before the prompt is shown.
    steps = model.stream(texts, sampling, args.stop, clamp_max_tokens=args.max_new_tokens is None)
    # Get the first piece before showing the prompt: compiling ends with it, and its messages would interrupt the
    # text.
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
    """Write to stdout immediately."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
