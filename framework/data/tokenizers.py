"""Text <-> token ids: bytes, byte-level BPE, or no text at all. Each knows how many bytes of text every id stands for.

One separator id opens each document; text never encodes to it. Bits per byte of any set of targets are exact: loss in
bits over the sum of their `byte_lengths`, the separator counting 0 bytes. Byte-level BPE after GPT-2 (Radford et al.
2019), trained by the `tokenizers` library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from framework.config import NonNegativeInt, PositiveInt, component
from framework.data.files import digest_of, find
from framework.files.workdir import write_json

TextBudget = Callable[[int], Iterator[str]]  # training text of about that many bytes


class Tokenizer:
    """Every id is a fixed string of bytes. `vocab_size` is known from the config alone, the rest after `prepare`."""

    has_text = True  # False: ids stand for no text, so there is no decoding and there are no bits per byte
    vocab_size: int
    eos_id: int | None
    bos_id: int | None = None  # what opens a text, for a model that was trained with one
    digest: str | None  # sha256 of all that decides the ids; None where unknown
    table: list[bytes]  # of each id; empty for the separator
    _library: Any  # a tokenizers.Tokenizer, from `prepare` on

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Loads or trains it.

        Args:
            workdir: where what is trained is kept.
            texts: gives training text; None where the training source holds tokens already.
            write: this process may train and write; the others find what it wrote.
        """

    @property
    def separator_id(self) -> int | None:
        """What opens each document of a token stream."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def stop_ids(self) -> list[int]:
        """What ends a generated text."""
        return [] if self.eos_id is None else [self.eos_id]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One unsigned integer array [n] per text; separators are the caller's to add."""
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_document(self, text: str) -> list[int]:
        """A document as a token stream has it: the separator where there is one, and the text."""
        opening = [] if self.separator_id is None else [self.separator_id]
        return opening + self.encode_batch([text])[0].tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """What a model is to continue."""
        return self.encode_document(text)

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """int32[vocab_size]: bytes of text per id; 0 for the separator and for ids without meaning."""
        return np.array([len(piece) for piece in self.table], np.int32)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """The exact bytes, separators left out."""
        return b"".join(self.table[int(token)] for token in tokens)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")


@component
class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is the separator; vocab_size 257. There is no padding id."""

    eos_token = "<|endoftext|>"  # the separator's name in `library_file`

    def __init__(self):
        self.vocab_size, self.eos_id = 257, 256
        self.table = [bytes([byte]) for byte in range(256)] + [b""]
        self.digest = hashlib.sha256(b"bytes, separator 256").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def library_file(self) -> bytes:
        """The same ids as a tokenizer.json: a byte-level BPE without merges, and the separator as a special token."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        library = Tokenizer(models.BPE(vocab=byte_letters(), merges=[]))
        # The regex would only cut texts where merges may not cross, and there are none.
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([self.eos_token])
        assert library.token_to_id(self.eos_token) == self.eos_id
        return library.to_str().encode()


@component
class BPETokenizer(Tokenizer):
    """Byte-level BPE: loaded from `path`, or trained on the training source; kept as `tokenizer.json` in the workdir.

    Without a `path`, one that the workdir holds already is used: a checkpoint means nothing under another.

    Args:
        vocab_size: ids the model must have room for, the separator included. A `path` may hold fewer (padded
            vocabularies).
        path: a byte-level `tokenizer.json` (local or fsspec URL): GPT-2's, Llama 3's, Qwen's, ours.
        eos_token: the special token that opens documents. A trained tokenizer gives it id 0.
        training_bytes: about so much text is trained on, in memory: the first documents, of a mixture by weight.
    """

    def __init__(
        self,
        *,
        vocab_size: PositiveInt,
        path: str | None = None,
        eos_token: str = "<|endoftext|>",
        training_bytes: PositiveInt = 50_000_000,
    ):
        if path is None and vocab_size < 257:
            raise ValueError(f"BPETokenizer.vocab_size: expected at least 257 (256 bytes and eos), given {vocab_size}")
        self.vocab_size, self.path = vocab_size, path
        self.eos_token, self.training_bytes = eos_token, training_bytes

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """As Tokenizer.prepare. What is missing, is no byte-level BPE or does not fit the arguments is an error."""
        kept = workdir / "tokenizer.json"
        if self.path is not None or kept.exists():
            file = find(self.path or str(kept))[0]
            data, name = file.read(), file.name
        elif not write:
            raise FileNotFoundError(
                f"{kept} does not exist: the first process was to write it; do all see that folder?"
            )
        elif texts is None:
            raise ValueError(
                "a BPE tokenizer cannot be trained on tokens; set data.tokenizer.path to the tokenizer.json that the "
                "tokens were made with (launch.prepare leaves it beside them)"
            )
        else:
            data, name = self._train(texts(self.training_bytes)), "the tokenizer trained on the training source"
        self._library, facts = load_library(data, name, self.vocab_size)
        if "ByteLevel" not in _decoders(facts):
            raise ValueError(
                f"{name}: expected a byte-level BPE (as GPT-2, Llama 3, Qwen); for others use PretrainedTokenizer"
            )
        vocab: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        if self.path is None and len(vocab) < self.vocab_size:
            raise ValueError(
                f"{name}: has {len(vocab)} ids, but data.tokenizer.vocab_size is {self.vocab_size}: set that to "
                f"{len(vocab)}, or train a new one in another workdir, on more text"
            )
        if self.eos_token not in vocab:
            special = sorted(token["content"] for token in facts["added_tokens"])
            raise ValueError(f"{name}: no token {self.eos_token!r} for data.tokenizer.eos_token; special are {special}")
        self.digest, self.eos_id = digest_of(facts), vocab[self.eos_token]
        self.table = byte_table(vocab, facts, self.vocab_size)
        if write:
            write_json(kept, facts)

    def _train(self, texts: Iterator[str]) -> bytes:
        from tokenizers import ByteLevelBPETokenizer

        # A list, because the library would run the source's generator in a thread of its own, where what belongs to one
        # thread (a database connection) fails.
        if not (documents := list(texts)):
            raise ValueError("the training source is empty: no text to train a BPE tokenizer on")
        library = ByteLevelBPETokenizer()
        options: dict[str, Any] = {"min_frequency": 0, "show_progress": False, "special_tokens": [self.eos_token]}
        library.train_from_iterator(documents, vocab_size=self.vocab_size, **options)
        return library.to_str().encode()


@component
class NoTokenizer(Tokenizer):
    """Ids that stand for no text: for token files whose tokenizer is not at hand. No decoding, no bits per byte.

    Args:
        vocab_size: every id is below it.
        eos_id: the separator between documents, if it is known.
    """

    has_text = False

    def __init__(self, *, vocab_size: PositiveInt, eos_id: NonNegativeInt | None = None):
        if eos_id is not None and eos_id >= vocab_size:
            raise ValueError(f"NoTokenizer.eos_id: expected an id below vocab_size={vocab_size}, given {eos_id}")
        self.vocab_size, self.eos_id, self.digest = vocab_size, eos_id, None

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Refuses a source of text."""
        if texts is not None:
            raise ValueError("NoTokenizer cannot tokenize the text of data.source; use ByteTokenizer or BPETokenizer")

    @property
    def table(self) -> list[bytes]:
        raise ValueError("data.tokenizer is NoTokenizer: its ids stand for no text (check `has_text` first)")


def load_library(data: bytes, name: str, vocab_size: int) -> tuple[Any, dict[str, Any]]:
    """(the library's tokenizer, the facts of its JSON) of a tokenizer.json whose ids are below `vocab_size`.

    Raises:
        ValueError: it is none, or it has other ids, or bytes per token are not defined for its kind.
    """
    from tokenizers import Tokenizer

    try:
        facts = json.loads(data)
        library = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise ValueError(f"{name}: not a tokenizer.json of the tokenizers library: {error}") from error
    kind, decoders = facts["model"].get("type"), _decoders(facts)
    if kind not in ("BPE", "Unigram") or not {"ByteLevel", "Metaspace", "Replace"} & decoders:
        raise ValueError(
            f"{name}: expected a byte-level BPE, or BPE or Unigram as sentencepiece makes them: bytes per token are "
            f"not defined for {kind} with {sorted(decoders)}. Tokenize elsewhere, and use TokenMemmap with NoTokenizer"
        )
    if (largest := max(library.get_vocab(with_added_tokens=True).values())) >= vocab_size:
        raise ValueError(f"{name}: has ids up to {largest}, but data.tokenizer.vocab_size is {vocab_size}")
    # Otherwise a document that contains the text "<|endoftext|>" would encode to the separator.
    library.encode_special_tokens = True
    return library, facts


def _decoders(facts: dict[str, Any]) -> set[str]:
    decoder = facts.get("decoder") or {}
    return {part["type"] for part in [decoder, *decoder.get("decoders", [])] if part}


def byte_letters() -> dict[str, int]:
    """{letter: byte} of a byte-level vocabulary: GPT-2's alphabet writes printable bytes as themselves, the others as
    the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_table(vocab: dict[str, int], facts: dict[str, Any], vocab_size: int) -> list[bytes]:
    """The bytes of each id, none for special ones. In a byte-level vocabulary each letter of a token stands for one
    byte. As sentencepiece writes it, U+2581 is a space, and <0xAB> a byte."""
    letters = byte_letters()
    byte_level, fallback = "ByteLevel" in _decoders(facts), "ByteFallback" in _decoders(facts)
    added = {token["id"]: token for token in facts["added_tokens"]}
    table = [b""] * vocab_size
    for token, index in vocab.items():
        if index in added:
            table[index] = b"" if added[index]["special"] else token.encode("utf-8")
        elif byte_level and all(letter in letters for letter in token):
            table[index] = bytes(letters[letter] for letter in token)
        elif fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            table[index] = bytes([int(token[3:5], 16)])
        else:
            table[index] = token.replace("\u2581", " ").encode("utf-8")
    return table
