"""Tokenizers of published models: every byte is counted, special tokens stay where they belong, errors are clear."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.tokenizers import BPETokenizer
from tests.support import pretrained

NASTY = [
    "x",
    "a  b",
    " leading",
    "\r\n\t",
    "\u2028\U0010ffff",
    "你好 🚢 naïve",
    "  \n \n",
    "<0x41> </s> <|im_end|> <eos>",
]


def load(folder: Path, workdir: Path, write: bool = True, **fields) -> PretrainedTokenizer:
    workdir.mkdir(exist_ok=True)
    tokenizer = PretrainedTokenizer(**{"path": str(folder), "vocab_size": 512, **fields})
    tokenizer.prepare(workdir, None, write=write)
    return tokenizer


@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_text_comes_back_and_every_byte_is_counted(family: str, tmp_path: Path):
    tokenizer = load(pretrained.write(tmp_path / "model", family), tmp_path / "run")
    opening = " " if family == "mistral" else ""  # its normalizer puts a space before each text
    for text in [*NASTY, *pretrained.TEXTS[:3]]:
        (tokens,) = tokenizer.encode_batch([text])
        assert tokenizer.decode_bytes(tokens) == (opening + text).encode()
        assert tokenizer.byte_lengths[tokens].sum() == len((opening + text).encode())
        assert tokenizer.decode(tokens) == text
        assert not {*tokenizer.stop_ids, tokenizer.bos_id} & set(tokens.tolist())
    assert tokenizer.decode([tokenizer.eos_id, 511]) == ""


def test_unigram(tmp_path: Path):
    folder = pretrained.write(tmp_path / "model", "mistral")
    pretrained.library("unigram", ["<unk>", "<s>", "</s>"]).save(str(folder / "tokenizer.json"))
    tokenizer = load(folder, tmp_path / "run")
    (tokens,) = tokenizer.encode_batch(["the quick dog"])
    assert tokenizer.decode(tokens) == "the quick dog"
    assert tokenizer.decode_bytes(tokens) == b" the quick dog"


def test_special_tokens_from_whichever_file_has_them(tmp_path: Path):
    folder = pretrained.write(tmp_path / "model", "gemma")
    tokenizer = load(folder, tmp_path / "run")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.separator_id, tokenizer.stop_ids) == (1, 2, 1, [2])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4], "bos_token_id": 1}))
    assert load(folder, tmp_path / "run").stop_ids == [2, 4]
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load(folder, tmp_path / "run")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (1, 2, None)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    tokenizer = load(folder, tmp_path / "run")
    assert (tokenizer.bos_id, tokenizer.separator_id) == (None, 2)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<end_of_turn>", "bos_token": {"content": "<bos>"}}')
    tokenizer = load(folder, tmp_path / "run")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 4, [2, 4])
    assert load(folder, tmp_path / "run", eos_token="<eos>").eos_id == 2
    # bos_token is null: this model was trained without one, although config.json has an id for it.
    folder = pretrained.write(tmp_path / "qwen", "chatml")
    (folder / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 0}')
    tokenizer = load(folder, tmp_path / "run")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (None, 2, [0, 2])
    assert tokenizer.encode_prompt("<|im_end|>") == [2]


def test_template_is_found_in_any_supported_file(tmp_path: Path):
    folder = pretrained.write(tmp_path / "model", "chatml", chat_template=[{"name": "default", "template": "one"}])
    assert load(folder, tmp_path / "run").render([])[0] == "one"
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0] | tojson }}{% if strftime_now('%Y') > '2' %}2{% endif %}"
    )
    assert load(folder, tmp_path / "run").render([{"content": "<é>", "x": None}])[0] == '{"content": "<é>"}2'
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ eos_token }}")
    tokenizer = load(folder, tmp_path / "run", chat_template=str(tmp_path / "own.jinja"))
    assert tokenizer.render([{"content": "a"}, {"content": "b"}])[0] == "a<|im_end|>"


def test_the_workdir_keeps_a_copy(tmp_path: Path):
    folder = pretrained.write(tmp_path / "model", "llama3")
    before = load(folder, tmp_path / "run")
    folder.rename(tmp_path / "moved")
    for write in (False, True):
        after = load(folder, tmp_path / "run", write=write)
        assert (after.digest, after.stop_ids, after.table) == (before.digest, before.stop_ids, before.table)
        assert after.render([{"role": "user", "content": "x"}]) == before.render([{"role": "user", "content": "x"}])
    with pytest.raises(FileNotFoundError, match="other"):  # the copy is of another model
        load(tmp_path / "other", tmp_path / "run")


def test_refusals(tmp_path: Path):
    folder = pretrained.write(tmp_path / "model", "llama3")

    def assert_refused(match: str, error: type[Exception] = ValueError, **fields) -> None:
        with pytest.raises(error, match=match):
            load(folder, tmp_path / "new", **fields)

    assert_refused("has ids up to .*, but data.tokenizer.vocab_size is 100", vocab_size=100)
    assert_refused(
        "eos_token is '</s>', which is not one of its tokens; set data.tokenizer.eos_token", eos_token="</s>"
    )
    assert_refused("none.jinja does not exist", FileNotFoundError, chat_template=str(tmp_path / "none.jinja"))
    (folder / "tokenizer_config.json").write_text("{}")
    assert_refused("its eos_token is 'unknown'")
    with pytest.raises(ValueError, match=r"has no chat template: put a chat_template\.jinja there"):
        load(folder, tmp_path / "run", eos_token="<|eot_id|>").render([])
    (folder / "tokenizer_config.json").write_text("[")
    assert_refused("tokenizer_config.json: not a JSON object")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text('{"model": ')
    assert_refused("tokenizer.json: not a tokenizer.json of the tokenizers library")
    Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    assert_refused("bytes per token are not defined for WordPiece")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert_refused("tokenizer.json does not exist.*save_pretrained", FileNotFoundError)


def test_a_template_is_not_trusted(tmp_path: Path):
    for template in (
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for %}",
        "{{ 1 / 0 }}",
    ):
        folder = pretrained.write(tmp_path / "model", "llama3", chat_template=template)
        with pytest.raises(ValueError, match="the chat template fails"):
            load(folder, tmp_path / "run").render([])


def test_a_trained_tokenizer_opens_with_its_separator(tmp_path: Path):
    tokenizer = BPETokenizer(vocab_size=300)
    tokenizer.prepare(tmp_path, lambda budget: iter(pretrained.TEXTS), write=True)
    assert tokenizer.encode_prompt("a")[0] == tokenizer.separator_id == tokenizer.eos_id
    assert tokenizer.stop_ids == [tokenizer.eos_id]
