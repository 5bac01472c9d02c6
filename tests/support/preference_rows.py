"""Rows of pairs and judged answers, as TRL reads them, of which tests compare the tokens."""

from typing import Any

from tests.support.pretrained import CHATS as CONVERSATIONS

TEXTS: list[dict[str, Any]] = [
    {"prompt": "the fox", "chosen": " jumps over", "rejected": " sleeps"},
    {"prompt": "who are you?\n", "chosen": "I am a model", "rejected": "é 你好"},
]


def _pair(conversation: list[dict[str, str]]) -> dict[str, Any]:
    """The conversation with its last answer, and with another one."""
    *prompt, answer = conversation
    return {"prompt": prompt, "chosen": [answer], "rejected": [{**answer, "content": "the dog"}]}


CHATS: list[dict[str, Any]] = [_pair(chat) for chat in CONVERSATIONS if chat[-1]["role"] == "assistant"]

# Prompts that differ from each other, so that each is mismatched with the answer before it.
THUMBS: list[dict[str, Any]] = [
    {"prompt": f"{number} is", "completion": completion, "label": label}
    for number, (completion, label) in enumerate([(" a fox", True), (" a dog", False), (" you", True)])
]
