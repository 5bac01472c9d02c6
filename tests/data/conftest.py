"""Small real corpora on disk, and pipelines over them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TextFiles
from plimsoll.framework.data.tokenizers import ByteTokenizer

WORDS = [*"def return import self for print lambda yield é 你好 naïve 🚢 0 ( )".split(" "), "\n"]  # noqa: SIM905


@pytest.fixture
def documents(tmp_path: Path) -> Callable[..., list[str]]:
    """documents("name", count=..., seed=...) writes tmp_path/name/*.txt: random words, some of them non-ASCII."""

    def write(name: str = "corpus", count: int = 40, seed: int = 0) -> list[str]:
        (tmp_path / name).mkdir()
        draw = random.Random(seed)
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) + "\n" for _ in range(count)]
        for number, text in enumerate(texts):
            (tmp_path / name / f"{number:04d}.txt").write_bytes(text.encode())
        return texts

    return write


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., DataPipeline]:
    """pipeline(source=..., ...) over tmp_path/corpus/*.txt, set up in tmp_path/workdir."""

    def build(workdir: str = "workdir", setup: bool = True, **fields: Any) -> DataPipeline:
        fields.setdefault("source", config_for(TextFiles, paths=[str(tmp_path / "corpus/*.txt")]))
        fields.setdefault("tokenizer", config_for(ByteTokenizer))
        config: Config = config_for(DataPipeline, **{"seq_len": 32, "global_batch_size": 8, **fields})
        built = config.instantiate()
        if setup:
            built.setup(tmp_path / workdir)
        return built

    return build
