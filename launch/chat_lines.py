"""A conversation with one message per line, typed at a terminal or read from a pipe. Only answers go to stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from plimsoll.framework.run import user_errors
from plimsoll.framework.terminal import interrupts
from plimsoll.launch import cli
from plimsoll.launch.generate import show
from plimsoll.launch.weights import log

if TYPE_CHECKING:
    from plimsoll.framework.inference.chat import Chat, ChatTurn

HELP = """/reset         clear the conversation
/system TEXT   set the system prompt; without TEXT, remove it
/take K        continue from answer K to the last message (--num_samples)
/quit          quit, as does Ctrl-D. Ctrl-C stops an answer
A line that starts with a space is always a message, not a command."""
_COMMANDS = ["/reset", "/system", "/take", "/quit", "/help"]

# Characters that could move the cursor or change the terminal's settings.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Session:
    """A conversation, and the commands that change it.

    Attributes:
        turns: turns that the next prompt contains.
        samples: answers to the last message.
    """

    def __init__(self, chat: Chat, system: str | None):
        self.chat = chat
        self.system = system
        self.turns: list[ChatTurn] = []
        self.samples: list[str] = []

    def command(self, line: str) -> bool:
        """Execute a command line; returns whether the conversation continues.

        Raises:
            UsageError: there is no such command or answer.
            ValueError: the system prompt cannot be used; the old one stays.
        """
        name, _, text = line.partition(" ")
        text = text.strip()
        command = cli.choose("command", name, _COMMANDS)
        if command == "/reset":
            self.turns, self.samples = [], []
            log("conversation cleared")
        elif command == "/system":
            self.chat.check_system(text)
            self.system = text or None
            log("system prompt set" if text else "system prompt removed")
        elif command == "/take":
            self._replace_answer(text)
        elif command == "/help":
            log(HELP)
        return command != "/quit"

    def _replace_answer(self, text: str) -> None:
        """Replace the last answer in the history by another sample."""
        numbers = [str(number) for number in range(1, len(self.samples) + 1)]
        if not numbers:
            raise cli.UsageError("/take: there is no answer yet")
        number = int(cli.choose("answer", text, numbers))
        self.turns[-1] = dataclasses.replace(self.turns[-1], answer=self.samples[number - 1])
        log(f"the conversation continues from answer {number}")


class _Signals:
    """Stops the current answer on Ctrl-C; a second Ctrl-C before it has stopped ends the process."""

    def __init__(self, *, typed: bool):
        self.is_answering = False
        self.stopped = False
        self._typed = typed

    def handle_signal(self, number: int) -> str | None:
        """Handle a signal, as a listener of `interrupts.listen_for_signals`."""
        if number == signal.SIGINT and self.is_answering and not self.stopped:
            self.stopped = True
            return None
        # At the prompt of a terminal, Python's own handler interrupts the line.
        if number == signal.SIGINT and self._typed and not self.is_answering:
            return None
        return interrupts.format_stop_message(number)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Mark the time during which an answer can be stopped."""
        self.stopped = False
        self.is_answering = True
        try:
            yield
        finally:
            self.is_answering = False


def run_conversation(session: Session) -> None:
    """Run the conversation until the user quits or the input ends.

    Args:
        session: the conversation, usually empty.

    Raises:
        ValueError: a message from a pipe cannot be answered. At a terminal, the error is shown and the conversation
            continues.
    """
    # If the output is redirected, the prompt of the terminal would end up among the answers.
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    signals = _Signals(typed=typed)
    with interrupts.listen_for_signals(signals.handle_signal), _restore_terminal(typed):
        if typed:
            log("/help lists the commands")
        for line in _read_typed_lines() if typed else _read_piped_lines():
            try:
                # A leading space lets a message begin with a slash.
                if re.match(r"/[a-z]+(\s|$)", line):
                    if not session.command(line.strip()):
                        return
                elif line.strip():
                    _answer(session, line.strip(), signals, typed=typed)
            except ValueError as error:
                if not typed or not user_errors.is_user_error(error):
                    raise
                log(f"error: {error}")


def _answer(session: Session, question: str, signals: _Signals, *, typed: bool) -> None:
    """Show the answers to a message as they are generated, and add the first one to the conversation."""
    from plimsoll.framework.inference.chat import ChatTurn

    prompt = session.chat.prompt(session.system, session.turns, question)
    if prompt.num_dropped_turns:
        session.turns = session.turns[prompt.num_dropped_turns :]
        # The samples belong to the last turn.
        session.samples = session.samples if session.turns else []
        log(format_omitted_turns(prompt.num_dropped_turns, session.chat.context))
    screen = _Screen(is_terminal=typed)
    answer = session.chat.answer(prompt)
    with signals.answering():
        for pieces in answer:
            screen.show(pieces[0])
            if signals.stopped:
                break
    screen.end()
    # Do not store an answer that was stopped before its first word.
    if not signals.stopped or answer.texts[0]:
        session.samples = answer.texts
        session.turns.append(ChatTurn(question, answer.texts[0]))
    for number, text in enumerate(answer.texts[1:], start=2):
        screen.show(f"--- {number}\n{text}\n" if typed else f"---\n{text}\n")
    if signals.stopped:
        log("(stopped)")
    elif answer.at_limit:
        log("(ended by --max_new_tokens)")


def format_omitted_turns(num_turns: int, context: int) -> str:
    """Return the line about the oldest turns, which no longer fit into the prompt."""
    turns = "the oldest turn is" if num_turns == 1 else f"the oldest {num_turns} turns are"
    return f"({turns} left out: the context of {context} tokens is full)"


class _Screen:
    """Writes an answer to stdout immediately.

    A terminal shows dots until the first letter, and no control characters.
    """

    def __init__(self, *, is_terminal: bool):
        self._is_terminal = is_terminal
        self._is_waiting = is_terminal
        if is_terminal:
            show("...\r")

    def show(self, text: str) -> None:
        """Write a part of the answer."""
        if self._is_terminal:
            text = _CONTROL.sub("\ufffd", text)
        if text and self._is_waiting:
            # Clear the dots.
            text = f"\x1b[K{text}"
            self._is_waiting = False
        show(text)

    def end(self) -> None:
        """End the line."""
        self.show("\n")


def _read_typed_lines() -> Iterator[str]:
    """Yield the lines typed at the terminal, with the keys and the history of readline."""
    # Not every Python has readline. Importing it is enough for `input` to use it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        # Only an exception interrupts `input`.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = input("> ")
        except KeyboardInterrupt:
            log("\nuse /quit or Ctrl-D to quit")
            continue
        except UnicodeDecodeError as error:
            log(f"error: not UTF-8: {error}")
            continue
        except EOFError:
            show("\n")
            return
        finally:
            signal.signal(signal.SIGINT, handler)
        yield line


def _read_piped_lines() -> Iterator[str]:
    """Yield the lines of stdin. Raises ValueError if a line is not UTF-8."""
    # Read bytes, because the encoding of sys.stdin depends on the machine.
    for number, data in enumerate(sys.stdin.buffer, start=1):
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin, line {number}: not UTF-8: {error}") from None


@contextlib.contextmanager
def _restore_terminal(typed: bool) -> Iterator[None]:
    """Restore the terminal's settings if a signal ends the process while readline has changed them."""
    if not typed:
        yield
        return
    import termios

    settings = termios.tcgetattr(sys.stdin)
    unregister = interrupts.register_cleanup(
        lambda number, line: termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
    )
    try:
        yield
    finally:
        unregister()
