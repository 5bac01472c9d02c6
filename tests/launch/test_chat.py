"""`plimsoll chat` in line mode, over a pipe and at a terminal, with a scripted model."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.launch import chat as verb
from plimsoll.launch.chat_lines import Session, run_conversation
from tests.support import chats
from tests.support.runs import ROOT


def say(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_one_message_per_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = chats.Script()
    lines = "é\n\n /etc is what?\n/system be kind\nb\n/take 2\nc\n/reset\n/system\nd\n/quit\nnever read\n"
    say(monkeypatch, lines.encode())
    run_conversation(Session(chats.chat(script, num_samples=2), "old"))
    out, err = capsys.readouterr()
    answers = [
        f"I heard {question} (0)\n\n---\nI heard {question} (1)\n" for question in ("é", "/etc is what?", "b", "c", "d")
    ]
    assert out == "".join(answers)
    assert err.splitlines() == [
        "system prompt set",
        "the conversation continues from answer 2",
        "conversation cleared",
        "system prompt removed",
    ]
    assert script.prompts[0] == "old\n\nUser: é\nAssistant:"
    assert script.prompts[3].startswith("be kind\n\nUser: é\nAssistant: I heard é (0)\nUser: /etc")
    assert script.prompts[3].endswith("\nUser: b\nAssistant: I heard b (1)\nUser: c\nAssistant:")
    assert script.prompts[4] == "User: d\nAssistant:"


def test_dropping_the_oldest_messages_prints_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = chats.Script()
    say(monkeypatch, b"one\ntwo\nthree\nfour\n")
    run_conversation(Session(chats.chat(script, context=150, max_new_tokens=40), None))
    out, err = capsys.readouterr()
    assert out.count("I heard") == 4
    assert err == "(the oldest turn is left out: the context of 150 tokens is full)\n"
    assert script.prompts[3].startswith("User: two")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\n/sytem x\n", "no command '/sytem'; did you mean '/system'"),
        (b"a\n/take 3\n", "no answer '3'"),
        (b"a\n/reset\n/take 1\n", "there is no answer yet"),
        (b"a\nb \xff\n", "stdin, line 2: not UTF-8"),
        (b"a\n" + b"z" * 300, "has room for 100 in addition to max_new_tokens = 100"),
    ],
)
def test_unanswerable_message_ends_piped_input(monkeypatch, capsys, data: bytes, message: str) -> None:
    say(monkeypatch, data)
    with pytest.raises(ValueError, match=message):
        run_conversation(Session(chats.chat(chats.Script(), context=200, max_new_tokens=100), None))
    assert capsys.readouterr().out == "I heard a (0)\n\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(monkeypatch, capsys) -> None:
    def interrupt(index: int) -> None:
        if index == 30:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)

    script = chats.Script(interrupt)
    say(monkeypatch, b"long\nb\n")
    run_conversation(Session(chats.chat(script), None))
    out, err = capsys.readouterr()
    assert err == "(stopped)\n"
    assert out.startswith("many words many words ")
    assert out.endswith("\nI heard b (0)\n\n")
    assert 20 < script.given < 2000
    assert "Assistant: many words many words" in script.prompts[1], "what was shown is part of the conversation"


def test_command_line_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for flags, message in [
        ((), "one of the arguments --workdir --hf is required"),
        ((f"--workdir={tmp_path}",), "holds no config.json"),
        ((f"--workdir={tmp_path}", "--port=1"), "--port requires --web"),
        ((f"--workdir={tmp_path}", "--num_samples=0"), "--num_samples=0: expected at least 1"),
        ((f"--workdir={tmp_path}", "--top_p=2"), "top_p: expected over 0"),
        ((f"--workdir={tmp_path}", "--web", "--port=65536"), "--port=65536: expected 0 to 65535"),
    ]:
        assert verb.main(list(flags)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


class Terminal:
    """A process with its own terminal."""

    def __init__(self, *words: str):
        self.descriptor, other_end = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), other_end)
        self.process = subprocess.Popen([sys.executable, *words], env=environment, start_new_session=True, **streams)
        os.close(other_end)

    def type(self, text: str, wanted: str) -> str:
        """Type `text`, and return the terminal's output up to `wanted`."""
        os.write(self.descriptor, text.encode())
        shown = ""
        end = time.monotonic() + 30
        while wanted not in shown:
            assert time.monotonic() < end, shown
            if select.select([self.descriptor], [], [], 0.2)[0]:
                shown += os.read(self.descriptor, 4096).decode(errors="replace")
        return shown


@pytest.mark.pairs
def test_a_terminal() -> None:
    terminal = Terminal("-m", "tests.support.chats")
    assert "/help lists the commands" in terminal.type("", "> ")
    assert "\x1b[KI heard a (0)\r\n" in terminal.type("a\x1b[D\n", "\n> "), "an arrow key moves the cursor"
    assert "many words" in terminal.type("long\n", "many words")
    assert "(stopped)" in terminal.type("\x03", "\n> ")
    # Readline misses a signal that arrives between its prompt and its first read of the keys.
    time.sleep(0.3)
    assert "use /quit or Ctrl-D to quit" in terminal.type("half a li\x03", "\n> ")
    assert "error: no command '/quti'; did you mean '/quit'?" in terminal.type("/quti\n", "\n> ")
    terminal.type("/quit\n", "/quit")
    assert terminal.process.wait(30) == 0
    os.close(terminal.descriptor)
