"""Chat with a model: in the terminal, over a pipe (one message per line), or on a local web page with --web.

    plimsoll chat --workdir=runs/tuned
    plimsoll chat --hf=DIR --system='You answer in one word.' --temperature=0
    printf 'Hello\nAnd you?\n' | plimsoll chat --workdir=runs/tuned > answers.txt
    plimsoll chat --workdir=runs/tuned --web --port=8000

The model's own chat template is used if its tokenizer has one. Only answers go to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import chat_lines, chat_web, cli, sampling_flags, weights

if TYPE_CHECKING:
    from plimsoll.framework.inference.chat import Chat
    from plimsoll.framework.inference.sampling import Sampling

_DEFAULT_TOKENS = 512
_DEFAULT_PORT = 8000


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb, in addition to those that name the model."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system prompt of the conversation")
    add(
        "--num_samples",
        type=int,
        default=1,
        metavar="N",
        help="answers per message; the conversation continues from the first one",
    )
    sampling_flags.add_flags(
        parser,
        max_new_tokens=f"maximum length of an answer in tokens; default {_DEFAULT_TOKENS}, or half the context",
        seed="random seed of the first answer; each further answer uses the next seed; default 0",
    )
    add("--web", action="store_true", help="serve a page for a browser on this machine instead of using the terminal")
    add("--port", type=int, metavar="N", help=f"port of --web; default {_DEFAULT_PORT}; 0 selects a free port")


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once the user has left."""
    parser = weights.parser("chat", __doc__)
    add_flags(parser)
    args, overrides = weights.parse(parser, argv)
    if args.num_samples < 1:
        raise cli.UsageError(f"--num_samples={args.num_samples}: expected at least 1")
    if args.port is not None and not args.web:
        raise cli.UsageError("--port requires --web")

    sampling = sampling_flags.build_sampling(args, _DEFAULT_TOKENS)
    with contextlib.ExitStack() as open_until_end:
        server = None
        if args.web:
            port = _DEFAULT_PORT if args.port is None else args.port
            # Open the port first, so that a port in use is reported before the model is loaded.
            server = open_until_end.enter_context(chat_web.ChatServer(port))
        chat = make_chat(args, overrides, sampling)
        chat.check_system(args.system)
        if server is not None:
            server.serve(chat, args.system)
        else:
            session = chat_lines.Session(chat, args.system)
            chat_lines.run_conversation(session)
    return ExitCode.DONE


def make_chat(args: argparse.Namespace, overrides: cli.Overrides, sampling: Sampling) -> Chat:
    """Load the model, and report on stderr how conversations with it are formatted.

    Args:
        args: flags of the verb.
        overrides: overrides of the model's config.
        sampling: sampling settings of the answers.

    Raises:
        ValueError: the model has no text tokenizer, or the context has no room for a message and max_new_tokens.
    """
    loaded = weights.load(args, overrides)

    from plimsoll.api.chats import create_chat
    from plimsoll.framework.inference.generation import Generator

    return create_chat(
        loaded,
        Generator(loaded.program, loaded.state, averaged=loaded.averaged),
        sampling,
        num_samples=args.num_samples,
        clamp_max_tokens=args.max_new_tokens is None,
        log=weights.log,
    )


if __name__ == "__main__":
    sys.exit(main())
