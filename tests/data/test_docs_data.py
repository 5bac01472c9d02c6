"""docs/data.md: its Python blocks run as written, its files are saved and used, its tables and figures are correct."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer

from plimsoll import configs
from plimsoll.extras.flows import image_source as images
from plimsoll.framework.data import sources, tokenizers
from plimsoll.framework.data.packing import pack

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "data.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the page asks readers to save."""
    for kind, block in BLOCKS:
        if kind == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def chat_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with conversations, and with a model's directory that has a tokenizer and a chat template."""
    chats = [
        [{"role": "user", "content": f"What is {i} + {i}?"}, {"role": "assistant", "content": str(2 * i)}]
        for i in range(200)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    folder = tmp_path / "DIR"
    folder.mkdir()
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(["what is a sum?"], special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    library.save(str(folder / "tokenizer.json"))
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chatml += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": chatml}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run(chat_files: Path):
    space: dict[str, Any] = {"__name__": "docs_data"}
    blocks = [block for kind, block in BLOCKS if kind == "python" and not block.startswith("# ")]
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), space)
    assert len(blocks) == 5
    assert list(space["stages"]) == ["20000", "30000"]
    assert space["images"].dtype == "uint8"
    assert space["counted"] > 1000
    chat_data = space["chats"].instantiate()
    chat_data.setup(chat_files / "runs")
    batch = chat_data.train_batch(0, range(4))
    answers = batch["targets"][0][batch["weights"][0] > 0]
    assert all(chat_data.tokenizer.decode([token]) in "0123456789" for token in answers)
    assert answers.tolist().count(1) == batch["segments"][0].max() > 1


def test_the_added_source_feeds_a_pipeline(page_files: Path):
    subprocess.run([sys.executable, "make_rows.py"], check=True)
    data = configs.load("my_rows.py:tiny_rows").data.instantiate()
    data.setup(page_files / "runs")
    train = data.source_report()[0]
    assert (train.kind, train.documents) == ("SqliteRows", 500)
    assert data.train_batch(0, [0])["tokens"].shape == (1, data.seq_len)
    (page_files / "rows.sqlite").unlink()
    with pytest.raises(FileNotFoundError, match=r"data\.source: rows\.sqlite does not exist"):
        configs.load("my_rows.py:tiny_rows").data.instantiate().setup(page_files / "elsewhere")


_BASES = {
    "DataSource", "ExampleSource", "Tokenizer", "TextBudget", "LeafSource", "ImageSource", "ImagePipeline",
    "ImageReport", "Images", "Levels",
}  # fmt: skip


def test_tables_list_the_existing_components():
    rows = set(re.findall(r"^\| `(\w+)", TEXT, flags=re.MULTILINE))
    for module in (sources, tokenizers, images):
        kinds = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        assert {name for name in kinds if name[0].isupper()} - _BASES <= rows


def test_packing_picture_matches_pack():
    (picture,) = [block for kind, block in BLOCKS if kind == "text" and block.startswith("tokens")]
    rows = {line.split()[0]: line.split()[1:8] for line in picture.splitlines()}
    window = [ord(letter) for letter in [*rows["tokens"], rows["targets"][-1]]]
    batch = pack([__import__("numpy").array(window, "int32")], 7, separators=[ord("#")])
    for name in ("tokens", "targets"):
        assert [chr(token) for token in batch[name][0]] == rows[name]
    for name in ("positions", "segments"):
        assert [str(number) for number in batch[name][0]] == rows[name]
