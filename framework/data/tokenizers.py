"""Text <-> token ids: bytes, byte-level BPE, or no text at all. Each knows how many bytes of text every id stands for.

One separator id, `eos_id`, opens each document and so also tells where the one before it ends; text never encodes to
it. Bits per byte of any set of target tokens are exact: loss in bits over `num_bytes(targets)`, the separator counting
0 bytes. Byte-level BPE after GPT-2 (Radford et al. 2019), trained by the `tokenizers` library.
May import: framework.config, framework.data.storage, numpy; tokenizers lazily.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from framework.config import NonNegativeInt, PositiveInt
from framework.data.storage import find, write_atomically

TextBudget = Callable[[int], Iterator[str]]  # training text of about that many bytes


class Tokenizer(Protocol):
    """What the pipeline and the trainer need of a tokenizer. `vocab_size` is known from the config alone."""

    vocab_size: int
    has_text: bool  # False: ids stand for no text, so there is no decoding and there are no bits per byte

    @property
    def eos_id(self) -> int | None: ...

    @property
    def digest(self) -> str | None:
        """sha256 of all that decides the ids; None where unknown."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray:
        """int32[vocab_size]: bytes of text per id."""
        ...

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes: ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str: ...

    def num_bytes(self, tokens: np.ndarray, weights: np.ndarray | None = None) -> int: ...


class TableTokenizer:
    """A tokenizer whose every id is a fixed string of bytes; subclasses fill `table` (one entry per id, eos empty)."""

    has_text = True
    table: list[bytes]

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """int32[vocab_size]: bytes of text per id; 0 for the separator and for ids without meaning."""
        return np.array([len(piece) for piece in self.table], np.int32)

    def num_bytes(self, tokens: np.ndarray, weights: np.ndarray | None = None) -> int:
        """Bytes of text that `tokens` (int[...]) stand for; where `weights` (same shape) are 0, tokens do not count."""
        lengths = self.byte_lengths[np.asarray(tokens)]
        return int(lengths.sum() if weights is None else lengths[np.asarray(weights) > 0].sum())

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """The exact bytes, separators left out."""
        return b"".join(self.table[int(token)] for token in tokens)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")


class ByteTokenizer(TableTokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is the separator; vocab_size 257. There is no padding id."""

    def __init__(self):
        self.vocab_size = 257
        self.eos_id = 256
        self.table = [bytes([byte]) for byte in range(256)] + [b""]
        self.digest = hashlib.sha256(b"plimsoll bytes + eos 256").hexdigest()

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Nothing to prepare."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint8[n] per text; separators are the caller's to add."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]


class BPETokenizer(TableTokenizer):
    """Byte-level BPE: loaded from `path`, or trained on the training source and kept as `tokenizer.json` in the
    workdir.

    When the workdir holds a `tokenizer.json` already, that one is used: a checkpoint means nothing under another.

    Args:
        vocab_size: ids the model must have room for, the separator included. A file may hold fewer (padded
            vocabularies).
        path: a `tokenizer.json` of the `tokenizers` library (local or fsspec URL), byte-level: GPT-2, Llama 3, Qwen,
            ours.
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
        self.vocab_size = vocab_size
        self.path = path
        self.eos_token = eos_token
        self.training_bytes = training_bytes
        self._library: Any = None  # the loaded tokenizers.Tokenizer
        self._digest: str | None = None
        self._eos_id: int | None = None
        self.source = ""  # where it came from, for the start table

    @property
    def digest(self) -> str:
        assert self._digest is not None, "prepare() first"
        return self._digest

    @property
    def eos_id(self) -> int:
        assert self._eos_id is not None, "prepare() first"
        return self._eos_id

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Loads the tokenizer, training it first where there is none.

        Args:
            workdir: where `tokenizer.json` is kept.
            texts: gives training text; None where the training source holds tokens already.
            write: this process may train and write; the others find what it wrote.

        Raises:
            FileNotFoundError, PermissionError, ValueError: as for any data file; not a byte-level tokenizer; its ids do
                not fit `vocab_size`; no `eos_token` in it; nothing to train on.
        """
        kept = workdir / "tokenizer.json"
        if self.path is not None:
            file = find(self.path)[0]
            self._load(file.read(0, file.size()), file.name)
        elif kept.exists():
            self._check_kept(kept)
            self._load(kept.read_bytes(), str(kept))
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
            trained = self._train(texts(self.training_bytes))
            meta = {"vocab_size": self.vocab_size, "eos_token": self.eos_token}
            write_atomically(_meta(kept), json.dumps(meta).encode())
            write_atomically(kept, trained.encode())
            self._load(kept.read_bytes(), f"{kept} (trained now)")

    def _check_kept(self, kept: Path) -> None:
        """A tokenizer that was trained for another `vocab_size` would be used without a word otherwise."""
        meta = json.loads(_meta(kept).read_bytes()) if _meta(kept).exists() else {}
        trained_for = meta.get("vocab_size", self.vocab_size)
        if trained_for != self.vocab_size:
            raise ValueError(
                f"{kept} was trained for vocab_size={trained_for}, but {self.vocab_size} is configured; use another "
                f"workdir, or remove that file to train anew (checkpoints in the workdir will not fit it)"
            )

    def _train(self, texts: Iterator[str]) -> str:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        # A list, because the library would run the source's generator in a thread of its own, where what belongs to one
        # thread (a database connection) fails.
        documents = list(texts)
        if not documents:
            raise ValueError("the training source is empty: no text to train a BPE tokenizer on")
        library = Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,  # type: ignore[call-arg]
            special_tokens=[self.eos_token],  # type: ignore[call-arg]
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # type: ignore[call-arg]
            show_progress=False,  # type: ignore[call-arg]
        )
        library.train_from_iterator(documents, trainer)
        return library.to_str(pretty=True)

    def _load(self, data: bytes, name: str) -> None:
        from tokenizers import Tokenizer

        try:
            facts = json.loads(data)
            library = Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception for whatever it cannot read
            raise ValueError(f"{name}: not a tokenizer.json of the tokenizers library: {error}") from error
        if not _is_byte_level(facts):
            raise ValueError(
                f"{name}: expected a byte-level BPE (as GPT-2, Llama 3, Qwen); with this one the bytes per token, and "
                "so bits per byte, are not defined. Tokenize with it elsewhere and configure TokenMemmap with "
                "NoTokenizer"
            )
        vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if (largest := max(vocab.values())) >= self.vocab_size:
            raise ValueError(f"{name}: has ids up to {largest}, but data.tokenizer.vocab_size is {self.vocab_size}")
        if self.eos_token not in vocab:
            special = sorted(token["content"] for token in facts["added_tokens"])
            raise ValueError(f"{name}: no token {self.eos_token!r} for data.tokenizer.eos_token; special are {special}")
        # Otherwise a document that contains the text "<|endoftext|>" would encode to the separator.
        library.encode_special_tokens = True
        self._library, self.source = library, name
        self._digest = hashlib.sha256(data).hexdigest()
        self._eos_id = vocab[self.eos_token]
        self.table = _byte_table(vocab, facts, self.vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32[n] per text, on all cores; separators are the caller's to add."""
        assert self._library is not None, "prepare() first"
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


class NoTokenizer:
    """Ids that stand for no text: for token files whose tokenizer is not at hand. No decoding, no bits per byte.

    Args:
        vocab_size: every id is below it.
        eos_id: the separator between documents, if it is known.
    """

    has_text = False

    def __init__(self, *, vocab_size: PositiveInt, eos_id: NonNegativeInt | None = None):
        if eos_id is not None and eos_id >= vocab_size:
            raise ValueError(f"NoTokenizer.eos_id: expected an id below vocab_size={vocab_size}, given {eos_id}")
        self.vocab_size = vocab_size
        self.eos_id: int | None = eos_id
        self.digest = None

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Refuses a source of text.

        Raises:
            ValueError: the source yields text, which nothing here can tokenize.
        """
        if texts is not None:
            raise ValueError(
                "data.source yields text, but data.tokenizer is NoTokenizer; use ByteTokenizer or BPETokenizer"
            )

    @property
    def byte_lengths(self) -> np.ndarray:
        raise ValueError(_NO_TEXT)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise ValueError(_NO_TEXT)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        raise ValueError(_NO_TEXT)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        raise ValueError(_NO_TEXT)

    def num_bytes(self, tokens: np.ndarray, weights: np.ndarray | None = None) -> int:
        raise ValueError(_NO_TEXT)


_NO_TEXT = "data.tokenizer is NoTokenizer: its ids stand for no text (check `has_text` first)"


def _meta(kept: Path) -> Path:
    return kept.with_name("tokenizer.meta.json")


def _is_byte_level(facts: dict[str, Any]) -> bool:
    decoder = facts.get("decoder") or {}
    parts = [decoder, *(decoder.get("decoders") or [])]
    return facts["model"].get("type") == "BPE" and any(part.get("type") == "ByteLevel" for part in parts)


def _byte_table(vocab: dict[str, int], facts: dict[str, Any], vocab_size: int) -> list[bytes]:
    """The bytes of each id. In a byte-level vocabulary each letter of a token stands for one byte."""
    letters = _byte_letters()
    added = {token["id"]: token for token in facts["added_tokens"]}
    table = [b""] * vocab_size
    for token, index in vocab.items():
        if index not in added:
            table[index] = bytes(letters[letter] for letter in token)
        elif not added[index]["special"]:
            table[index] = token.encode("utf-8")
    return table


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are written as themselves, the others as the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
