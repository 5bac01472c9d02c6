"""A chat whose model is a script; everything except the model is Plimsoll's own code."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.inference.chat import Chat, TranscriptFormat
from plimsoll.framework.inference.sampling import Sampling

# Repeated without end as the answer to the question "long", so that a test has to interrupt it.
LONG = "many words "


class Script:
    """A generator that answers "I heard QUESTION (ROW)" in bytes, and records the prompts and seeds it was given.

    If the question is "long", the answer never ends.

    Args:
        meanwhile: called before each token, with the token's index.
    """

    def __init__(self, meanwhile: Callable[[int], Any] = lambda index: None):
        self.prompts: list[str] = []
        self.seeds: list[int] = []
        self.given = 0
        self.meanwhile = meanwhile

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keep_cache: bool = False
    ) -> Iterator[list[int | None]]:
        prompt = ByteTokenizer().decode(prompts[0])
        self.prompts.append(prompt)
        self.seeds.append(sampling.seed)
        question = prompt.rpartition("User: ")[2].removesuffix("\nAssistant:")
        rows = [iter(f" I heard {question} ({row})\n".encode()) for row in range(len(prompts))]
        if question == "long":
            rows = [itertools.cycle(LONG.encode()) for _ in prompts]
        for index in range(sampling.max_new_tokens):
            self.meanwhile(index)
            tokens = [next(row, None) for row in rows]
            if not any(tokens):
                return
            self.given += 1
            yield tokens


def chat(script: Script, *, context: int = 20_000, max_new_tokens: int = 10_000, **options: Any) -> Chat:
    """Return a chat with the script as its model and a plain transcript as its format."""
    tokenizer = ByteTokenizer()
    generator: Any = script
    sampling = Sampling(max_new_tokens, seed=7)
    return Chat(generator, tokenizer, TranscriptFormat(tokenizer), sampling, context=context, **options)


if __name__ == "__main__":
    # For tests with a terminal: `plimsoll chat` with the script as its model.
    import fcntl
    import termios

    from plimsoll.framework.terminal import interrupts
    from plimsoll.launch.chat_lines import Session, run_conversation

    # Ctrl-C reaches only processes whose controlling terminal this is.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    interrupts.begin()
    run_conversation(Session(chat(Script(lambda index: time.sleep(0.002)), num_samples=2), None))
    sys.exit(0)
