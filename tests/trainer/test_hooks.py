"""User-defined hooks: the one in docs/architecture.md, when hooks are called, and what is rejected as a hook."""

import re
from pathlib import Path

import pytest

from plimsoll.launch.train import main
from tests.support.runs import ROOT, rows, write_text

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
FILES = '{"$class": "plimsoll.TextFiles", "paths": ["text/train.txt"]}'
SMALL = [
    "--config.model.dim=16",
    "--config.model.stack.num_layers=1",
    "--config.model.stack.pattern.0.attention.num_heads=2",
    "--config.model.embed.max_positions=32",
    "--config.model.vocab_size=257",
    "--config.data.seq_len=32",
    "--config.data.global_batch_size=8",
    '--config.data.tokenizer={"$class": "plimsoll.ByteTokenizer"}',
    f"--config.data.source={FILES}",
    "--config.data.validation={}",
    "--config.trainer.sample_tokens=0",
    "--config.trainer.max_steps=4",
    "--workdir=run",
]


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a new current directory that contains some text."""
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)


@pytest.mark.pairs
def test_hook_in_the_docs_runs_as_written(capsys: pytest.CaptureFixture[str]):
    Path("watch.py").write_text(next(block for block in BLOCKS if "class LargestWeight" in block))
    assert main(["--config=watch.py:watched", *SMALL, "--config.trainer.hooks.0.every=2"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"step (\d+): the largest weight is \d\.\d{3}", printed) == ["2", "4"]
    assert [row["step"] for row in rows(Path("run")) if "watch/largest_weight" in row] == [2, 4]


@pytest.mark.pairs
def test_user_hooks_run_in_order_after_ours(capsys: pytest.CaptureFixture[str]):
    Path("noisy.py").write_text(
        "import configs\n"
        "from plimsoll.framework.config import config_for\n"
        "from plimsoll.framework.run.hooks import Hook\n"
        "class Noisy(Hook):\n"
        "    def __init__(self, *, name: str):\n"
        "        self.name = name\n"
        "    def before_step(self, run, step):\n"
        "        print('heard', self.name, 'before', step)\n"
        "    def on_metrics(self, run, step, metrics):\n"
        "        print('heard', self.name, 'metrics', step)\n"
        "    def at_end(self, run, step):\n"
        "        print('heard', self.name, 'end', step, run.checkpointer.steps() or run.wait_until_saved(step))\n"
        "def noisy():\n"
        "    config = configs.load('nanogpt-cpu')\n"
        "    config.trainer.hooks = [config_for(Noisy, name='a'), config_for(Noisy, name='b')]\n"
        "    return config\n"
    )
    assert main(["--config=noisy.py:noisy", *SMALL, "--config.trainer.max_steps=2"]) == 0
    heard = [line.removeprefix("heard ") for line in capsys.readouterr().out.splitlines() if line.startswith("heard")]
    assert heard[:4] == ["a before 1", "b before 1", "a before 2", "b before 2"]
    assert heard[4:8] == ["a metrics 1", "b metrics 1", "a metrics 2", "b metrics 2"]
    # The run's own Save hook comes first: the last step is saved, or being saved, when the user's hooks are called.
    assert [line.rpartition(" ")[0] for line in heard[8:]] == ["a end 2", "b end 2"]


def test_invalid_hook_is_refused_before_writing(capsys: pytest.CaptureFixture[str]):
    hooks = '--config.trainer.hooks=[{"$class": "plimsoll.ByteTokenizer"}]'
    assert main(["--config=nanogpt-cpu", *SMALL, hooks]) == 2
    expected = "trainer.hooks.0: expected a subclass of plimsoll.framework.run.hooks.Hook, given ByteTokenizer"
    assert expected in capsys.readouterr().err
    assert not Path("run").exists()
