"""Encodes labeled answers as tokens.

Each answer is one sequence, prompt and answer together: the value 2 * id + 1 is an answer token, 2 * id a prompt
token. A mark with the answer's label precedes each sequence, and a separator each document; these values come after
all others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from plimsoll.framework.data.chats import ChatCodec
from plimsoll.framework.data.files import compute_digest
from plimsoll.framework.data.preference_formats import ANSWER_LABELS, AnswerLabel
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.tokenizers import Tokenizer

# A private-use character, which stands for the prompt when an answer is encoded separately.
_PROMPT = "\U0010fffd"


def get_label_marker(answer_label: AnswerLabel, separator: int) -> int:
    """Returns the value that starts a sequence, given the value that starts a document."""
    return separator + 1 + ANSWER_LABELS.index(answer_label)


class PreferenceCodec(Tokenizer):
    """A tokenizer for the documents of PairSource and UnpairedSource.

    Args:
        tokenizer: the config's tokenizer; messages need a PretrainedTokenizer.
        variables: variables for the chat template.
    """

    def __init__(self, tokenizer: Tokenizer, variables: dict[str, object]):
        self.tokenizer = tokenizer
        self._chats = ChatCodec(tokenizer, variables) if isinstance(tokenizer, PretrainedTokenizer) else None
        self._separator = 2 * tokenizer.vocab_size
        self.eos_id = self._separator
        self.vocab_size = self._separator + 1 + len(ANSWER_LABELS)
        template = tokenizer.chat_template if isinstance(tokenizer, PretrainedTokenizer) else None
        # The number is the version of this encoding: increase it to invalidate cached files.
        facts = ["preferences", 1, tokenizer.digest, tokenizer.eos_id, template, variables]
        self.digest = compute_digest(facts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the values of each document, int64[n]; empty if it has no answers.

        Raises:
            ValueError: there is no chat template for messages, or it cannot render them. The message names the file
                and row.
        """
        records = [json.loads(text) for text in texts]
        rendered = []
        for location, prompt, answers, tools in records:
            for _, answer in answers:
                if isinstance(answer, str):
                    continue
                if self._chats is None:
                    raise ValueError(
                        f"{location}: messages need the chat template of a PretrainedTokenizer, "
                        f"given {type(self.tokenizer).__name__}"
                    )
                roles = [message["role"] for message in answer]
                first_turn = len(prompt) + roles.index("assistant")
                rendered.append(self._chats.render_conversation(location, [*prompt, *answer], tools, first_turn))
        # Encode all conversations in one call, because the library uses many threads.
        encoded_chats = iter(self._chats.encode_spans(rendered) if self._chats else [])
        encoded_documents = []
        for _, prompt, answers, _ in records:
            parts = [np.zeros(0, np.int64)]
            for answer_label, answer in answers:
                mark = np.array([get_label_marker(answer_label, self._separator)], np.int64)
                values = self._text_values(prompt, answer) if isinstance(answer, str) else next(encoded_chats)
                parts += [mark, values]
            encoded_documents.append(np.concatenate(parts))
        return encoded_documents

    def _text_values(self, prompt: str, answer: str) -> np.ndarray:
        """Returns the values of a prompt as the model receives it, followed by an answer and the end token."""
        tokenizer = self.tokenizer
        assert tokenizer.eos_id is not None
        prompt_ids = tokenizer.encode_prompt(prompt)
        both_ids = tokenizer.encode_prompt(prompt + answer)
        answer_ids = both_ids[len(prompt_ids) :]
        if both_ids[: len(prompt_ids)] != prompt_ids:
            # A token would span the boundary, which no prompt ends with: encode the answer separately.
            if isinstance(tokenizer, PretrainedTokenizer):
                # At the start of a text, sentencepiece would insert a space.
                (encoding,) = tokenizer.encode_rendered([_PROMPT + answer])
                offsets = zip(encoding.ids, encoding.offsets, strict=True)
                answer_ids = [token for token, (start, _) in offsets if start >= len(_PROMPT)]
            else:
                (ids,) = tokenizer.encode_batch([answer])
                answer_ids = ids.tolist()
        if not prompt_ids:
            # The answer's first token needs an input to be predicted from.
            prompt_ids = [tokenizer.eos_id if tokenizer.separator_id is None else tokenizer.separator_id]
        if answer_ids[-1:] != [tokenizer.eos_id]:
            answer_ids = [*answer_ids, tokenizer.eos_id]
        return np.concatenate([2 * np.array(prompt_ids, np.int64), 2 * np.array(answer_ids, np.int64) + 1])
