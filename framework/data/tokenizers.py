"""Tokenizers: bytes, byte-level BPE, or no text at all. Each one knows the number of bytes of text for every id.

A separator id starts each document; text never encodes to it. Bits per byte of any set of targets are exact: loss in
bits over the sum of their `byte_lengths`, with 0 bytes for the separator. Byte-level BPE follows GPT-2 (Radford et
al. 2019), and is trained by the `tokenizers` library.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plimsoll.framework.config import NonNegativeInt, PositiveInt, component
from plimsoll.framework.data.files import compute_digest, find
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.terminal.phases import phase

if TYPE_CHECKING:
    import tokenizers

# A function that yields about the given number of bytes of training text.
TextBudget = Callable[[int], Iterator[str]]


class Tokenizer:
    """A vocabulary in which every id is a fixed string of bytes.

    `vocab_size` is known from the config, the other attributes only after `prepare`.

    Attributes:
        has_text: False if ids represent no text, so that there is no decoding and there are no bits per byte.
        vocab_size: upper bound of the ids, exclusive.
        eos_id: the token that ends texts.
        bos_id: the token that starts a text, for a model that was trained with one.
        digest: sha256 of everything that determines the ids; None if unknown.
        table: the bytes of each id; empty for the separator.
    """

    has_text = True
    vocab_size: int
    eos_id: int | None
    bos_id: int | None = None
    digest: str | None
    table: list[bytes]
    # Set by `prepare`. The library is imported only if it is needed.
    _library: tokenizers.Tokenizer

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Loads or trains the tokenizer.

        Args:
            workdir: folder that stores a trained tokenizer.
            texts: returns training text; None if the training source already consists of tokens.
            write: True if this process may train and write; the others read the files that it wrote.
        """

    @property
    def separator_id(self) -> int | None:
        """The id that starts each document of a token stream."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a generated text."""
        return [] if self.eos_id is None else [self.eos_id]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns one unsigned integer array [n] per text; the caller adds separators."""
        # The fast variant computes no offsets, which only chats need (`encode_rendered`).
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_document(self, text: str) -> list[int]:
        """Returns a document in token stream format: the separator, if there is one, and the text."""
        opening = [] if self.separator_id is None else [self.separator_id]
        (tokens,) = self.encode_batch([text])
        return opening + tokens.tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text for the model to continue."""
        # In training, text follows the separator of its document.
        return self.encode_document(text)

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text per id, int32[vocab_size]; 0 for the separator and for unused ids."""
        lengths = [len(token_bytes) for token_bytes in self.table]
        return np.array(lengths, np.int32)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Returns the exact bytes, without separators and ids beyond the tokenizer's."""
        # A model's vocabulary may be padded, and sampling may return its untrained rows, which represent no text.
        return b"".join(self.table[int(token)] for token in tokens if int(token) < len(self.table))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns the text; bytes that are not UTF-8 (a split character) become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")


@component
class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is the separator; vocab_size 257. There is no padding id."""

    # The separator's name in `library_file`.
    eos_token = "<|endoftext|>"

    def __init__(self):
        self.vocab_size = 257
        self.eos_id = 256
        self.table = [bytes([byte]) for byte in range(256)] + [b""]
        self.digest = hashlib.sha256(b"bytes, separator 256").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def library_file(self) -> bytes:
        """Returns the same ids as a tokenizer.json.

        It is a byte-level BPE without merges, with the separator as a special token.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        model = models.BPE(vocab=byte_letters(), merges=[])
        library = Tokenizer(model)
        # The regex only defines boundaries that merges may not cross, and there are no merges.
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([self.eos_token])
        assert library.token_to_id(self.eos_token) == self.eos_id
        return library.to_str().encode()


@component
class BPETokenizer(Tokenizer):
    """Byte-level BPE: loaded from `path`, or trained on the training source; saved as `tokenizer.json` in the workdir.

    Without a `path`, an existing one in the workdir is used: a checkpoint is meaningless with another tokenizer.

    Args:
        vocab_size: number of ids the model must have room for, separator included. A `path` may hold fewer (padded
            vocabularies).
        path: a byte-level `tokenizer.json` (local or fsspec URL): GPT-2's, Llama 3's, Qwen's, ours.
        eos_token: the special token that starts documents. A trained tokenizer gives it id 0.
        training_bytes: approximate amount of text to train on, in memory: the first documents, by weight for a
            mixture.
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
        self.vocab_size = vocab_size
        self.path = path
        self.eos_token = eos_token
        self.training_bytes = training_bytes

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Loads or trains the tokenizer, as Tokenizer.prepare.

        Raises:
            FileNotFoundError: there is no tokenizer.json, and this process may not write one.
            ValueError: it is not a byte-level BPE, or does not fit the arguments.
        """
        data, name = self._load_or_train(workdir, texts, write)
        self._library, facts = load_library(data, name, self.vocab_size)
        if "ByteLevel" not in _decoders(facts):
            raise ValueError(
                f"{name}: expected a byte-level BPE (as GPT-2, Llama 3, Qwen); for others use PretrainedTokenizer"
            )
        vocab: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        # A published vocabulary may be smaller than the padded embedding. One that was trained here is smaller only
        # if there was too little text.
        if self.path is None and len(vocab) < self.vocab_size:
            raise ValueError(
                f"{name}: has {len(vocab)} ids, but data.tokenizer.vocab_size is {self.vocab_size}: "
                f"set that and model.vocab_size to {len(vocab)}, or train a new one in another workdir, on more text"
            )
        if self.eos_token not in vocab:
            special_tokens = sorted(token["content"] for token in facts["added_tokens"])
            raise ValueError(
                f"{name}: no token {self.eos_token!r} for data.tokenizer.eos_token; special are {special_tokens}"
            )
        self.digest = compute_digest(facts)
        self.eos_id = vocab[self.eos_token]
        self.table = byte_table(vocab, facts, self.vocab_size)
        if write:
            write_json(workdir / "tokenizer.json", facts)

    def _load_or_train(self, workdir: Path, texts: TextBudget | None, write: bool) -> tuple[bytes, str]:
        """Returns (content, name) of a tokenizer.json: that of `path`, the workdir's, or a newly trained one."""
        workdir_file = workdir / "tokenizer.json"
        # A tokenizer in the workdir is never retrained: the checkpoints there are meaningless with another one.
        if self.path is not None or workdir_file.exists():
            file = find(self.path or str(workdir_file))[0]
            return file.read(), file.name
        if not write:
            raise FileNotFoundError(
                f"{workdir_file} does not exist, but process 0 should have written it; check that all processes see "
                "the same folder"
            )
        if texts is None:
            raise ValueError(
                "a BPE tokenizer cannot be trained on tokens; set data.tokenizer.path to the tokenizer.json that the "
                "tokens were made with (`plimsoll prepare` writes it next to them)"
            )
        with phase("training the tokenizer"):
            # A list, because the library would run the source's generator in another thread, where objects that
            # belong to one thread (a database connection) fail.
            documents = list(texts(self.training_bytes))
            if not documents:
                raise ValueError("the training source is empty: no text to train a BPE tokenizer on")
            trained_file = train_bpe(documents, self.vocab_size, self.eos_token)
        return trained_file, "the tokenizer trained on the training source"


@component
class NoTokenizer(Tokenizer):
    """Ids that represent no text: for token files whose tokenizer is not available. No decoding, no bits per byte.

    Args:
        vocab_size: upper bound of the ids, exclusive.
        eos_id: the separator between documents, if known.
    """

    has_text = False

    def __init__(self, *, vocab_size: PositiveInt, eos_id: NonNegativeInt | None = None):
        if eos_id is not None and eos_id >= vocab_size:
            raise ValueError(f"NoTokenizer.eos_id: expected an id below vocab_size={vocab_size}, given {eos_id}")
        self.vocab_size = vocab_size
        self.eos_id = eos_id
        self.digest = None

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Rejects a text source."""
        if texts is not None:
            raise ValueError("NoTokenizer cannot tokenize the text of data.source; use ByteTokenizer or BPETokenizer")

    @property
    def table(self) -> list[bytes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise ValueError("data.tokenizer is NoTokenizer: its ids represent no text (check `has_text` first)")


def train_bpe(documents: list[str], vocab_size: int, eos_token: str) -> bytes:
    """Returns the tokenizer.json of a byte-level BPE trained on documents.

    Args:
        documents: the text.
        vocab_size: maximum number of ids, including `eos_token`; fewer if each word of the text already is one token.
        eos_token: the separator, which gets id 0.
    """
    from tokenizers import ByteLevelBPETokenizer

    library = ByteLevelBPETokenizer()
    # Special tokens get the first ids, so the separator is id 0.
    library.train_from_iterator(
        documents, vocab_size=vocab_size, min_frequency=0, show_progress=False, special_tokens=[eos_token]
    )
    return library.to_str().encode()


def load_library(data: bytes, name: str, vocab_size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Reads a tokenizer.json whose ids are below `vocab_size`.

    Args:
        data: content of the file.
        name: name of the file in messages.
        vocab_size: number of ids that the model has room for.

    Returns:
        (the library's tokenizer, the file's JSON).

    Raises:
        ValueError: it is not a tokenizer.json, has larger ids, or is of a kind for which bytes per token are not
            defined.
    """
    from tokenizers import Tokenizer

    try:
        facts = parse_json(data)
        library = Tokenizer.from_str(data.decode("utf-8"))
    # The library raises plain Exception for anything it cannot read, or panics, which is not an Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{name}: not a tokenizer.json of the tokenizers library: {error}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("model"), dict):
        raise ValueError(f"{name}: not a tokenizer.json of the tokenizers library: it has no model")
    kind = facts["model"].get("type")
    decoders = _decoders(facts)
    if kind not in ("BPE", "Unigram") or not {"ByteLevel", "Metaspace", "Replace"} & decoders:
        raise ValueError(
            f"{name}: expected a byte-level BPE, or BPE or Unigram as sentencepiece makes them: "
            f"bytes per token are not defined for {kind} with {sorted(decoders)}. "
            "Tokenize elsewhere, and use TokenMemmap with NoTokenizer"
        )
    vocab = library.get_vocab(with_added_tokens=True)
    largest_id = max(vocab.values())
    if largest_id >= vocab_size:
        raise ValueError(f"{name}: has ids up to {largest_id}, but data.tokenizer.vocab_size is {vocab_size}")
    # A file may contain truncation and padding settings from an earlier call: disable them, because documents must be
    # neither truncated nor padded to the longest one in their batch.
    library.no_truncation()
    library.no_padding()
    # Otherwise a document that contains the text "<|endoftext|>" would encode to the separator.
    library.encode_special_tokens = True
    return library, facts


def _decoders(facts: dict[str, Any]) -> set[str]:
    """Returns the types of a tokenizer.json's decoder, and of its members if it is a sequence."""
    # The field may be null, or absent.
    decoder = facts.get("decoder") or {}
    decoders = [decoder, *decoder.get("decoders", [])]
    return {part["type"] for part in decoders if part}


def byte_letters() -> dict[str, int]:
    """Returns {character: byte} for a byte-level vocabulary.

    GPT-2's alphabet writes printable bytes as themselves, and the other bytes as the characters from U+0100 on.
    """
    printable_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable_bytes}
    # The order matters: ByteTokenizer writes these characters into a tokenizer.json.
    next_letter = 0x100
    for byte in range(256):
        if byte not in printable_bytes:
            letters[chr(next_letter)] = byte
            next_letter += 1
    return letters


def byte_table(vocab: dict[str, int], facts: dict[str, Any], vocab_size: int) -> list[bytes]:
    """Returns the bytes of each id; empty for special tokens.

    In a byte-level vocabulary each character of a token represents one byte. In a sentencepiece-style vocabulary,
    U+2581 is a space, and <0xAB> a byte.

    Args:
        vocab: {token: id}.
        facts: the JSON of the tokenizer.json.
        vocab_size: length of the table; ids without a token have no bytes.
    """
    letters = byte_letters()
    decoders = _decoders(facts)
    is_byte_level = "ByteLevel" in decoders
    has_byte_tokens = "ByteFallback" in decoders
    added_tokens = {token["id"]: token for token in facts["added_tokens"]}
    table = [b""] * vocab_size
    for token, index in vocab.items():
        if index in added_tokens:
            # Added tokens are spelled as plain text, not in the vocabulary's byte characters.
            is_special = added_tokens[index]["special"]
            table[index] = b"" if is_special else token.encode("utf-8")
        elif is_byte_level and all(letter in letters for letter in token):
            table[index] = bytes(letters[letter] for letter in token)
        elif has_byte_tokens and re.fullmatch("<0x[0-9A-F]{2}>", token):
            table[index] = bytes([int(token[3:5], 16)])
        else:
            table[index] = token.replace("\u2581", " ").encode("utf-8")
    return table
