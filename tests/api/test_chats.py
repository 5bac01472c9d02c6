"""Conversations from Python: the history, invalid messages, and the same answers as `plimsoll chat`."""

from pathlib import Path
from typing import Any

import pytest

import plimsoll as pl
from plimsoll.api.chats import Conversation, history_from_messages
from plimsoll.framework.inference.chat import ChatTurn
from plimsoll.launch import chat as verb
from tests.launch.test_chat import say
from tests.support import chats
from tests.support.runs import CONFIG, write_text

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "two"}]


def test_a_conversation_keeps_its_history() -> None:
    script = chats.Script()
    talk = Conversation(chats.chat(script, num_samples=2), "be kind", [ChatTurn("x", "y")])
    assert talk.say("a") == "I heard a (0)"
    assert talk.samples == ["I heard a (0)", "I heard a (1)"]
    assert "".join(talk.stream("b")) == "I heard b (0)\n"
    assert script.prompts[-1].endswith("Assistant: y\nUser: a\nAssistant: I heard a (0)\nUser: b\nAssistant:")
    contents = [(message["role"], message["content"]) for message in talk.messages]
    assert contents[0] == ("system", "be kind")
    assert contents[-2:] == [("user", "b"), ("assistant", "I heard b (0)")]
    history = history_from_messages(talk.messages)
    assert (history.system, history.turns, history.question) == ("be kind", talk.turns, None)


def test_partially_read_answer_stays_in_the_history() -> None:
    talk = Conversation(chats.chat(chats.Script()))
    chunks = talk.stream("long")
    text = "".join(next(chunks) for _ in range(6))
    chunks.close()
    assert talk.turns == [ChatTurn("long", text.rstrip())]
    unread = talk.stream("never read")
    unread.close()
    assert len(talk.turns) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([ANSWERED[1]], r"messages\[0\]: unexpected role 'assistant'"),
        ([*ASKED, *ASKED], r"messages\[1\]: unexpected role 'user'"),
        ([*ANSWERED, {"role": "system", "content": "x"}], r"messages\[2\]: unexpected role 'system'"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\]: expected {\"role\""),
        ([{"role": "user", "content": 3}], r"messages\[0\]: expected {\"role\""),
        (["hello"], r"messages\[0\]: expected {\"role\""),
    ],
)
def test_invalid_conversations_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        history_from_messages(messages)


def test_a_model_answers_as_the_verb_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINY_TEXT", "")
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text")
    pl.train(pl.load_config(f"{CONFIG}:tiny", {"trainer.max_steps": 2}), tmp_path / "run")
    model = pl.load(tmp_path / "run")
    capsys.readouterr()
    say(monkeypatch, b"a\nb\n")
    assert verb.main([f"--workdir={tmp_path}/run", "--max_new_tokens=3"]) == 0
    told = capsys.readouterr().out
    talk = model.chat(max_new_tokens=3)
    assert told == "".join(f"{talk.say(text)}\n" for text in ("a", "b"))
    assert "no chat template" in capsys.readouterr().err
    assert model.answer(ASKED, max_new_tokens=3) == model.chat(max_new_tokens=3).say("one")
    assert model.chat(ANSWERED, max_new_tokens=3).messages == ANSWERED
    for call, message in [
        (lambda: model.answer(ANSWERED), "expected the last one to be the user's"),
        (lambda: model.chat(ASKED), "the last message is a question"),
        (lambda: model.chat(max_new_tokens=10_000), "max_new_tokens=10000 leaves no room"),
        (lambda: model.chat(num_samples=0), "num_samples: expected at least 1"),
        (lambda: talk.say(" "), "the message is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
