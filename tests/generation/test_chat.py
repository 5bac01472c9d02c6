"""Conversations as tokens: the model's template or a transcript, truncated from the front; answers as clean text."""

from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.inference.chat import ChatTurn, TemplateFormat, TranscriptFormat, get_chat_format
from tests.support import chats, pretrained

TURNS = [ChatTurn("who are you?", "I am a model"), ChatTurn("and you?", "a lazy dog")]


def tokenizer(folder: Path, family: str, **facts: Any) -> PretrainedTokenizer:
    made = PretrainedTokenizer(path=str(pretrained.write(folder / family, family, **facts)), vocab_size=400)
    made.prepare(folder, None, write=False)
    return made


@pytest.mark.once("chatml", "mistral")
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_model_template_is_used(tmp_path: Path, family: str) -> None:
    made = tokenizer(tmp_path, family)
    form = get_chat_format(made, {})
    assert isinstance(form, TemplateFormat)
    messages = [
        {"role": "user", "content": "who are you?"},
        {"role": "assistant", "content": "I am a model"},
        {"role": "user", "content": "and?"},
    ]
    text, _ = made.render(messages, add_generation_prompt=True)
    (encoding,) = made.encode_rendered([text])
    assert form.encode(None, TURNS[:1], "and?") == encoding.ids
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}[family]
    (end_id,) = form.stop_ids
    assert made._library.id_to_token(end_id) == end
    # A message that spells the token does not end its turn.
    spelled = form.encode(None, [], f"a{end}b")
    assert spelled.count(end_id) == form.encode(None, [], "ab").count(end_id)
    if family == "gemma":
        with pytest.raises(ValueError, match="System role not supported"):
            form.encode("be kind", [], "x")


def test_a_model_without_template_continues_a_transcript(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, "chatml", chat_template=None)
    assert isinstance(get_chat_format(made, {}), TranscriptFormat)
    form = get_chat_format(ByteTokenizer(), {})
    tokens = form.encode("Be kind.", TURNS[:1], "and?")
    expected = "Be kind.\n\nUser: who are you?\nAssistant: I am a model\nUser: and?\nAssistant:"
    assert ByteTokenizer().decode(tokens) == expected


def test_as_few_whole_messages_as_possible_are_dropped() -> None:
    turns = [ChatTurn("x" * (7 * number % 40), "y") for number in range(13)]
    form = TranscriptFormat(ByteTokenizer())
    for context in range(60, 700, 9):
        chat = chats.chat(chats.Script(), context=context, max_new_tokens=20)
        prompt = chat.prompt("s", turns, "question")
        lengths = [len(form.encode("s", turns[number:], "question")) for number in range(14)]
        assert prompt.num_dropped_turns == next(number for number in range(14) if lengths[number] <= context - 20)
        assert prompt.tokens == form.encode("s", turns[prompt.num_dropped_turns :], "question")
    with pytest.raises(ValueError, match=r"prompt of 128 tokens.* of 100 .* has room for 80"):
        chats.chat(chats.Script(), context=100, max_new_tokens=20).prompt(None, turns, "z" * 110)
    with pytest.raises(ValueError, match="not valid Unicode text"):
        chat.prompt(None, [], "\ud800")


def test_answers() -> None:
    """Each answer is clean text, has its own random draws, and reports whether it stopped at the token limit."""
    script = chats.Script()
    chat = chats.chat(script, num_samples=2, max_new_tokens=20)
    for _ in range(2):
        answer = chat.answer(chat.prompt(None, TURNS, "a"))
        pieces = list(answer)
        assert answer.texts == ["I heard a (0)", "I heard a (1)"]
        assert "".join(piece for piece, _ in pieces) == "I heard a (0)\n"
        assert not answer.at_limit
    assert script.seeds == [7, 8]
    long = chat.answer(chat.prompt(None, [], "long"))
    list(long)
    assert long.at_limit
    # A model that continues a transcript also writes the user's next turn, which is not part of the answer.
    quoting = chats.chat(script)
    answer = quoting.answer(quoting.prompt(None, [], "b\nUser : c\nAssistant "))
    list(answer)
    assert answer.texts == ["I heard b\nUser : c\nAssistant  (0)"]
    answer = quoting.answer(quoting.prompt(None, [], "b\nAssistant: c"))
    list(answer)
    assert answer.texts == ["I heard b"]
