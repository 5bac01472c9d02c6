"""Tokenizers: every byte survives and is counted, and text never yields the separator."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer, NoTokenizer

CORPUS = [
    "def train(self):\n    return self.loss\n" * 20,
    "the quick brown fox é naïve 你好 🚢\n" * 30,
    "a<|endoftext|>b " * 9,
]
NASTY = ["", " ", "\x00\x01\x7f\x80\xff", "\r\n\t", "<|endoftext|>", "\u2028\ufeff\U0010ffff", "a" * 500, "  \n \n"]


def corpus(budget: int):
    assert budget == 50_000_000
    return iter(CORPUS)


@pytest.fixture
def bpe(tmp_path: Path) -> BPETokenizer:
    tokenizer = BPETokenizer(vocab_size=320)
    tokenizer.prepare(tmp_path, corpus, write=True)
    return tokenizer


def test_byte_values_are_the_ids():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.encode_batch(["aé"])[0].tolist() == [0x61, 0xC3, 0xA9]
    assert tokenizer.byte_lengths.tolist() == [1] * 256 + [0]
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path, bpe: BPETokenizer):
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(max_length=4)
    library.enable_padding(pad_id=1, pad_token="!")
    library.save(str(tmp_path / "set.json"))
    tokenizer = BPETokenizer(vocab_size=320, path=str(tmp_path / "set.json"))
    tokenizer.prepare(tmp_path / "other", None, write=False)
    for tokens, expected in zip(tokenizer.encode_batch(CORPUS), bpe.encode_batch(CORPUS), strict=True):
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_byte_round_trips_and_is_counted(kind: str, bpe: BPETokenizer):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    texts = [*NASTY, *CORPUS, *(chr(code) for code in range(0, 0x3000, 7))]
    for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode_bytes(tokens) == text.encode()
        assert tokenizer.decode(tokens) == text
        assert tokenizer.byte_lengths[tokens].sum() == len(text.encode())
        assert tokenizer.eos_id not in tokens
    assert tokenizer.decode_bytes([tokenizer.eos_id]) == b""
    assert {piece for piece in tokenizer.table if len(piece) == 1} == {bytes([byte]) for byte in range(256)}


def test_tokenizer_is_trained_once_and_then_loaded(tmp_path: Path, bpe: BPETokenizer):
    assert len(bpe.encode_batch([CORPUS[0]])[0]) < len(CORPUS[0]) / 3
    again = BPETokenizer(vocab_size=320)
    again.prepare(tmp_path, lambda budget: pytest.fail("trained again"), write=False)
    assert (again.digest, again.table, again.eos_id) == (bpe.digest, bpe.table, bpe.eos_id)
    explicit = BPETokenizer(vocab_size=512, path=str(tmp_path / "tokenizer.json"))
    (tmp_path / "other").mkdir()
    explicit.prepare(tmp_path / "other", None, write=True)
    assert (tmp_path / "other/tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert explicit.digest == bpe.digest
    assert explicit.encode_batch(CORPUS)[1].tolist() == bpe.encode_batch(CORPUS)[1].tolist()
    assert len(explicit.byte_lengths) == 512
    assert explicit.byte_lengths[320:].sum() == 0
    # Ids beyond the table, as a padded model has them, stand for no text.
    assert bpe.decode_bytes([*bpe.encode_batch(["ab"])[0], 320, 500]) == b"ab"
    anew = BPETokenizer(vocab_size=320)
    (tmp_path / "anew").mkdir()
    anew.prepare(tmp_path / "anew", corpus, write=True)
    assert anew.digest == bpe.digest  # training is deterministic


def test_vocabulary_with_another_size_is_refused(tmp_path: Path, bpe: BPETokenizer):
    with pytest.raises(ValueError, match=r"tokenizer.json: has ids up to 319, but data.tokenizer.vocab_size is 300"):
        BPETokenizer(vocab_size=300).prepare(tmp_path, corpus, write=True)
    with pytest.raises(ValueError, match=r"tokenizer.json: has 320 ids, but data.tokenizer.vocab_size is 500"):
        BPETokenizer(vocab_size=500).prepare(tmp_path, corpus, write=True)
    (tmp_path / "new").mkdir()
    with pytest.raises(ValueError, match=r"has 259 ids, .* is 5000: set that and model.vocab_size to 259"):
        BPETokenizer(vocab_size=5000).prepare(tmp_path / "new", lambda budget: iter(["ab ab ab"]), write=True)
    assert not (tmp_path / "new/tokenizer.json").exists()


def test_untrainable_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"vocab_size: expected at least 257"):
        BPETokenizer(vocab_size=256)
    with pytest.raises(ValueError, match=r"cannot be trained on tokens"):
        BPETokenizer(vocab_size=300).prepare(tmp_path, None, write=True)
    with pytest.raises(ValueError, match=r"the training source is empty"):
        BPETokenizer(vocab_size=300).prepare(tmp_path, lambda budget: iter([]), write=True)
    with pytest.raises(FileNotFoundError, match=r"process 0 should have written it"):
        BPETokenizer(vocab_size=300).prepare(tmp_path, corpus, write=False)
    assert list(tmp_path.glob("tokenizer.json")) == []


def save(library: Tokenizer, path: Path) -> str:
    library.save(str(path))
    return str(path)


def test_other_files_than_byte_level_bpe_are_refused(tmp_path: Path):
    wordpiece = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    path = save(wordpiece, tmp_path / "wp.json")
    with pytest.raises(ValueError, match=r"wp.json: expected a byte-level BPE"):
        BPETokenizer(vocab_size=1000, path=path).prepare(tmp_path, None, write=True)
    (tmp_path / "half.json").write_bytes(Path(path).read_bytes()[:50])
    with pytest.raises(ValueError, match=r"half.json: not a tokenizer.json"):
        BPETokenizer(vocab_size=1000, path=str(tmp_path / "half.json")).prepare(tmp_path, None, write=True)


def test_a_foreign_byte_level_file_with_added_tokens(tmp_path: Path):
    """A file like those of GPT-2 and Qwen: special tokens at the end, several pre-tokenizers, added plain tokens."""
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens(["<|im_end|>"])
    library.add_tokens(["höchst"])
    path, text = save(library, tmp_path / "t.json"), "it is höchst <|im_end|> 42"
    tokenizer = BPETokenizer(vocab_size=320, path=path, eos_token="<|im_end|>")
    tokenizer.prepare(tmp_path, None, write=True)
    assert tokenizer.eos_id == 300
    (tokens,) = tokenizer.encode_batch([text])
    assert 301 in tokens
    assert tokenizer.eos_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.byte_lengths[tokens].sum() == len(text.encode())
    with pytest.raises(ValueError, match=r"has ids up to 301, but data.tokenizer.vocab_size is 301"):
        BPETokenizer(vocab_size=301, path=path, eos_token="<|im_end|>").prepare(tmp_path, None, write=True)
    with pytest.raises(ValueError, match=r"no token '<.endoftext.>' .*special are .*<.im_end.>"):
        BPETokenizer(vocab_size=320, path=path).prepare(tmp_path, None, write=True)


def test_no_tokenizer_has_no_text(tmp_path: Path):
    tokenizer = NoTokenizer(vocab_size=50257, eos_id=50256)
    tokenizer.prepare(tmp_path, None, write=True)
    assert not tokenizer.has_text
    for use in (lambda: tokenizer.byte_lengths, lambda: tokenizer.decode([1])):
        with pytest.raises(ValueError, match=r"represent no text"):
            use()
    with pytest.raises(ValueError, match=r"NoTokenizer cannot tokenize"):
        tokenizer.prepare(tmp_path, corpus, write=True)
    with pytest.raises(ValueError, match=r"eos_id: expected an id below vocab_size=100, given 100"):
        NoTokenizer(vocab_size=100, eos_id=100)
