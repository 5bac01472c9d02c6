"""Rows of preference pairs and of unpaired preferences in TRL's format, to compare tokens."""

from typing import Any

from tests.support.pretrained import CHATS as CONVERSATIONS

TEXTS: list[dict[str, Any]] = [
    {"prompt": "the fox", "chosen": " jumps over", "rejected": " sleeps"},
    {"prompt": "who are you?\n", "chosen": "I am a model", "rejected": "é 你好"},
]


def _pair(conversation: list[dict[str, str]]) -> dict[str, Any]:
    """Return a pair: the conversation with its last answer (chosen), and with another one (rejected)."""
    *prompt, answer = conversation
    return {"prompt": prompt, "chosen": [answer], "rejected": [{**answer, "content": "the dog"}]}


CHATS: list[dict[str, Any]] = [_pair(chat) for chat in CONVERSATIONS if chat[-1]["role"] == "assistant"]

# The prompts differ, so that pairing each prompt with the previous answer gives a mismatch.
THUMBS: list[dict[str, Any]] = [
    {"prompt": f"{number} is", "completion": completion, "label": label}
    for number, (completion, label) in enumerate([(" a fox", True), (" a dog", False), (" you", True)])
]
