"""Fine-tuning on a chat file with `plimsoll train`: two schedules, adapters, a kill and resume, limits in epochs."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from plimsoll.launch.train import main
from tests.support import pretrained, runs

CONFIG = """
from plimsoll.configs.parts import adamw
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.config import config_for
from plimsoll.framework.data.chats import ChatSource
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.program.options import TrainerOptions


def chat():
    paths = ["FOLDER/chats.jsonl"]
    return config_for(
        Experiment,
        model=llama_model(layers=2, heads=2, dim=32, hidden=64, vocab_size=512),
        data=config_for(
            DataPipeline,
            source=config_for(ChatSource, paths=paths, split="train", validation_fraction=0.1),
            validation={"held": config_for(ChatSource, paths=paths, split="validation", validation_fraction=0.1)},
            tokenizer=config_for(PretrainedTokenizer, path="FOLDER/model", vocab_size=512),
            seq_len=64,
            global_batch_size=8,
        ),
        learner=config_for(Learner, optimizer=adamw(peak=1e-2, warmup=2), clip=None),
        trainer=config_for(
            TrainerOptions, max_steps=20, log_every=1, save_every=5, eval_every=None, compilation_cache="CACHE"
        ),
    )


def lora():
    config = chat()
    config.model.lora = config_for(LoRA, rank=4)
    return config
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory, a chat file and a config file."""
    pretrained.write(tmp_path / "model", "chatml")
    words = pretrained.TEXTS[0].split()
    with open(tmp_path / "chats.jsonl", "w") as file:
        for i in range(180):
            turns = [{"role": "user", "content": f"{words[i % 9]} {i}"}, {"role": "assistant", "content": words[i % 7]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    cache = str(runs.ROOT / ".cache" / "xla")
    (tmp_path / "my.py").write_text(CONFIG.replace("FOLDER", str(tmp_path)).replace("CACHE", cache))
    return tmp_path


def train(folder: Path, workdir: str, *flags: str, config: str = "chat") -> int:
    return main([f"--config={folder}/my.py:{config}", f"--workdir={folder / workdir}", *flags])


@pytest.mark.pairs
def test_schedules_agree_and_the_loss_falls(folder: Path, capsys: pytest.CaptureFixture):
    curves = {}
    for name in ("after_backward", "in_backward"):
        assert train(folder, name, f"--config.memory.update={name}") == 0
        curves[name] = list(runs.losses(folder / name).values())
        assert len(curves[name]) == 20
        assert curves[name][-1] < 0.75 * curves[name][0]
    np.testing.assert_allclose(curves["in_backward"], curves["after_backward"], rtol=1e-4)
    out = capsys.readouterr().out
    assert "ChatSource: " in out
    assert "% padding, 0 conversations truncated to 65 tokens, 0 without an answer skipped" in out
    assert any("eval/held/loss" in row for row in runs.rows(folder / "after_backward"))


@pytest.mark.pairs
def test_adapters_learn_too(folder: Path):
    flags = ("--config.memory.update=in_backward", "--config.trainer.max_steps=8")
    assert train(folder, "lora", *flags, config="lora") == 0
    losses = list(runs.losses(folder / "lora").values())
    assert losses[-1] < losses[0]


@pytest.mark.pairs
def test_a_killed_run_goes_on_with_the_same_batches(folder: Path):
    def start(workdir: Path):  # a process each: the compiler flags of this process change rounding
        flags = ["--config.trainer.max_steps=20"]
        return runs.start(workdir, *flags, config="chat", file=f"{folder}/my.py", devices=8)

    assert start(folder / "whole").wait() == 0
    killed = folder / "killed"
    process = start(killed)
    deadline = time.time() + 120
    while len(runs.rows(killed)) < 7 and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert start(killed).wait() == 0
    assert runs.losses(killed) == runs.losses(folder / "whole")


def list_modification_times(workdir: Path) -> dict[Path, int]:
    """Return each file's modification time, except data hashes, which are stored only once a file is no longer new."""
    files = [path for path in workdir.rglob("*") if path.is_file() and path.name != "hashes.json"]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.pairs
def test_whichever_comes_first_ends_the_run(folder: Path, capsys: pytest.CaptureFixture):
    assert train(folder, "epochs", "--config.trainer.max_epochs=2", "--config.trainer.max_steps=none") == 0
    out, rows = capsys.readouterr().out, runs.losses(folder / "epochs")
    steps = max(rows)
    assert f"trainer.max_epochs = 2: trainer.max_steps none -> {steps}" in out
    stored = json.loads((folder / "epochs/config.json").read_text())
    assert stored["trainer"]["max_steps"] == steps
    before = list_modification_times(folder / "epochs")
    again = ("--config.trainer.max_epochs=2", "--config.trainer.max_steps=none", "--resume=must")
    assert train(folder, "epochs", *again) == 0
    assert capsys.readouterr().out.startswith(f"step {steps} of {steps}: nothing to do")
    assert list_modification_times(folder / "epochs") == before
    assert train(folder, "steps", "--config.trainer.max_epochs=2", "--config.trainer.max_steps=3") == 0
    assert list(runs.losses(folder / "steps")) == [1, 2, 3]
    assert (
        f"trainer.max_epochs = 2 would be {steps} steps: trainer.max_steps = 3 ends the run" in capsys.readouterr().out
    )
