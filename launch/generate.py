"""Continue prompts with a trained model; prints the text as it is generated.

    plimsoll generate --workdir=runs/stdlib-tiny --prompt='def main():'
    plimsoll generate --workdir=runs/stdlib-tiny --prompt='import' --prompt='class' --temperature=0

Several prompts form one batch: the first answer is printed as it is generated, the others after it. Only text goes to
stdout.
"""

import itertools
import sys

from plimsoll.framework.files.text_files import read_text
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, sampling_flags, weights


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb, in addition to those that name the model."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeatable")
    parser.add_argument(
        "--prompt_file", action="append", default=[], metavar="FILE", help="file with a text to continue; repeatable"
    )
    sampling_flags.add_flags(
        parser, max_new_tokens="maximum number of new tokens per prompt; default 128", seed="random seed; default 0"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once everything is printed."""
    parser = weights.parser("generate", __doc__)
    add_flags(parser)
    args, overrides = weights.parse(parser, argv)
    file_texts = []
    for path in args.prompt_file:
        with cli.reading("prompt_file", path):
            file_texts.append(read_text(path, may_be_empty=True))
    texts = [*args.prompt, *file_texts]
    if not texts:
        raise cli.UsageError("--prompt=TEXT or --prompt_file=FILE is required")

    from plimsoll.api.model import DEFAULT_TOKENS, Model

    sampling = sampling_flags.build_sampling(args, DEFAULT_TOKENS)
    model = Model(weights.load(args, overrides))
    # With a short context, the default number of tokens is reduced, but a number from the user is an error, which is
    # raised here, before the prompt is shown.
    steps = model.stream(texts, sampling, args.stop, clamp_max_tokens=args.max_new_tokens is None)
    # Get the first piece before showing the prompt, because the step is compiled for it, and messages about that would
    # interrupt the text.
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
