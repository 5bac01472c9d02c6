"""Selects the text to train a tokenizer on, and counts the ids that it supports: a small text has too few words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from plimsoll.framework.data.sources import DataSource, ExampleSource, LeafSource, prefix_errors
from plimsoll.framework.data.tokenize import explain_empty_source
from plimsoll.framework.data.tokenizers import train_bpe

# Characters to split into words at a time: the library returns a Python object for each word.
_SLICE_LETTERS = 1 << 20


def count_vocabulary(texts: Iterable[str], largest: int, eos_token: str) -> int:
    """Returns the number of ids of a BPE trained on these texts, including the separator.

    Merges never cross the words of the pre-tokenizer, and stop when each of them is one token. So each different word
    of two bytes or more becomes an id, and a text with at least `largest` of them reaches that size. Reading stops
    there; only a text with fewer words is trained on, to find its number of ids.

    Args:
        texts: the texts that the tokenizer will be trained on.
        largest: the requested size, at least 257.
        eos_token: the special token of the BPE.

    Returns:
        A number from 257 (the bytes and the separator) to `largest`.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    # The same settings as ByteLevelBPETokenizer; each character represents a byte.
    pre_tokenizer = ByteLevel(add_prefix_space=False)
    read_texts = []
    words: set[str] = set()
    for text in texts:
        read_texts.append(text)
        for start in range(0, len(text), _SLICE_LETTERS):
            pieces = pre_tokenizer.pre_tokenize_str(text[start : start + _SLICE_LETTERS])
            # The slice may have cut off the first and the last word.
            words.update(word for word, _ in pieces[1:-1] if len(word) > 1)
            if len(words) >= largest:
                return largest
    if not read_texts:
        return 257
    tokenizer_file = json.loads(train_bpe(read_texts, largest, eos_token))
    return len(tokenizer_file["model"]["vocab"])


def training_text(leaves: Sequence[LeafSource], budget: int) -> Iterator[str]:
    """Yields the first documents of each text source, `budget` bytes in total, divided by weight.

    Raises:
        ValueError: a source of examples has no documents.
    """
    text_sources: list[tuple[LeafSource, DataSource]] = []
    for leaf in leaves:
        if isinstance(leaf.source, DataSource):
            text_sources.append((leaf, leaf.source))
    total_weight = sum(leaf.weight for leaf, _ in text_sources)
    for leaf, source in text_sources:
        remaining_bytes = budget * leaf.weight / total_weight
        is_empty = True
        with prefix_errors(leaf.label):
            for document in source.training_texts():
                is_empty = False
                yield document
                remaining_bytes -= len(document.encode("utf-8"))
                if remaining_bytes <= 0:
                    break
            if is_empty and isinstance(source, ExampleSource):
                raise ValueError(explain_empty_source(source))
