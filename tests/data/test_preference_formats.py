"""Pairs and unpaired preferences in every common format, and the errors for rows in any other."""

from typing import Any

import pytest

from plimsoll.framework.data.preference_formats import LabeledAnswers, parse_pair, parse_unpaired

USER = {"role": "user", "content": "who?"}
SYSTEM = {"role": "system", "content": "short"}
GOOD = {"role": "assistant", "content": "a model"}
BAD = {"role": "assistant", "content": "a fox"}
LABEL = {"prompt": "2+2=", "completion": "4", "label": True}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}

MESSAGES = LabeledAnswers([USER], [("chosen", [GOOD]), ("rejected", [BAD])])
WITH_SYSTEM = LabeledAnswers([SYSTEM, USER], [("chosen", [GOOD]), ("rejected", [BAD])])
PAIRS: dict[str, tuple[dict[str, Any], LabeledAnswers]] = {
    "texts": (PAIR, LabeledAnswers("2+2=", [("chosen", "4"), ("rejected", "5")])),
    "texts with the prompt in them": (
        {"chosen": "Human: hi\n\nAssistant: the best", "rejected": "Human: hi\n\nAssistant: the bear"},
        LabeledAnswers("Human: hi\n\nAssistant: the", [("chosen", " best"), ("rejected", " bear")]),
    ),
    "one text continues the other": (
        {"chosen": "a b", "rejected": "a bc"},
        LabeledAnswers("a", [("chosen", " b"), ("rejected", " bc")]),
    ),
    "messages": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, MESSAGES),
    "messages with the prompt in them": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, MESSAGES),
    "the prompt in them and next to them": (
        {"prompt": "who?", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
        MESSAGES,
    ),
    "a text and messages": ({"prompt": "who?", "chosen": [GOOD], "rejected": [BAD]}, MESSAGES),
    "messages and texts": ({"prompt": [USER], "chosen": "a model", "rejected": "a fox"}, MESSAGES),
    "a conversation and two messages": (
        {"conversations": [{"from": "human", "value": "who?"}], "chosen": GOOD, "rejected": BAD},
        MESSAGES,
    ),
    "a system prompt with texts": (
        {"system": "short", "prompt": "who?", "chosen": "a model", "rejected": "a fox"},
        WITH_SYSTEM,
    ),
    "a system prompt with messages": (
        {"system": "short", "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        WITH_SYSTEM,
    ),
    "a system prompt in them": ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, WITH_SYSTEM),
    "several turns": (
        {"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, GOOD, USER, GOOD]},
        LabeledAnswers([USER, GOOD, USER], [("chosen", [BAD]), ("rejected", [GOOD])]),
    ),
    "turns that differ early": (
        {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD]},
        LabeledAnswers([USER], [("chosen", [GOOD, USER, GOOD]), ("rejected", [BAD])]),
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pair_formats(case: str):
    row, expected = PAIRS[case]
    assert parse_pair(row) == expected
    assert expected.problem is None


def test_texts_may_be_messages():
    row = {"prompt": "who?", "chosen": "a model", "rejected": "a fox"}
    assert parse_pair(row, strings_are_messages=True) == MESSAGES
    assert parse_pair(row).prompt == "who?"


UNPAIRED: dict[str, tuple[dict[str, Any], list[LabeledAnswers]]] = {
    "texts": (LABEL, [LabeledAnswers("2+2=", [("desirable", "4")])]),
    "a number as the label": ({**LABEL, "label": 0}, [LabeledAnswers("2+2=", [("undesirable", "4")])]),
    "messages": (
        {"prompt": [USER], "completion": [BAD], "label": False},
        [LabeledAnswers([USER], [("undesirable", [BAD])])],
    ),
    "a conversation": (
        {"messages": [USER, GOOD, USER, BAD], "label": False},
        [LabeledAnswers([USER, GOOD, USER], [("undesirable", [BAD])])],
    ),
    "a pair": (PAIR, [LabeledAnswers("2+2=", [("desirable", "4")]), LabeledAnswers("2+2=", [("undesirable", "5")])]),
}


@pytest.mark.parametrize("case", UNPAIRED)
def test_unpaired_formats(case: str):
    row, expected = UNPAIRED[case]
    assert parse_unpaired(row) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no field 'rejected': a pair has chosen and rejected, given prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "field 'rejected' is null"),
        ({"prompt": "a", "chosen": "b", "rejcted": "c"}, "no field 'rejected': .*; did you mean 'rejcted'"),
        ({**PAIR, "chosen": 3}, "field 'chosen' is int, expected text or messages"),
        ({**PAIR, "prompt": 3}, "field 'prompt' is int"),
        (
            {"prompt": [USER], "chosen": [{"role": "assistant"}], "rejected": [BAD]},
            "field 'chosen': message 0: content",
        ),
        ({"prompt": "what?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "field 'chosen' .* without the prompt"),
        ({"prompt": "who?", "chosen": [USER, GOOD], "rejected": [BAD]}, "'chosen' is a conversation and the other one"),
        ({"chosen": "a", "rejected": [USER, BAD]}, "no field 'prompt', and 'chosen' is a string"),
        ({**PAIR, "system": 3}, "field 'system' is int"),
        ({**PAIR, "chosen": "\ud800"}, "surrogates not allowed"),
        (["a"], "expected a JSON object, given list"),
    ],
)
def test_invalid_pairs_are_refused(row: Any, message: str):
    with pytest.raises(ValueError, match=message):
        parse_pair(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "no field 'label': a labeled answer has prompt, completion and label"),
        ({**LABEL, "label": "good"}, "field 'label' is 'good', expected true or false"),
        ({"prompt": "a", "label": True}, "no field 'completion'"),
        ({"completion": "a", "label": True}, "no field 'prompt'"),
    ],
)
def test_invalid_unpaired_rows_are_refused(row: Any, message: str):
    with pytest.raises(ValueError, match=message):
        parse_unpaired(row)
