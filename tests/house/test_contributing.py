"""CONTRIBUTING.md is true: what it names exists, and adding one of each component touches the files that it names.

The test copies the packages, adds a toy layer, variant of attention, optimizer, objective, source, schedule and family
(tests/house/toys.py) in exactly these files, and trains two steps with each.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import toys
from tests.support.runs import ROOT
from tools.peers.families import FAMILIES

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = sorted(set(re.findall(r"(?:framework|configs|launch|tests|tools|docs)/[\w./]*\w", TEXT)))
# {what the table says: ({file: its text}, {file: (a line, the line to add after it)})}
ADDITIONS: dict[str, tuple[dict[str, str], dict[str, list[tuple[str, str]]]]] = {
    "a layer": ({"framework/layers/toy_norm.py": toys.NORM}, {}),
    "a variant of attention": ({"framework/layers/toy_attention.py": toys.ATTENTION}, {}),
    "an optimizer": ({"framework/optimizers/toy_sign.py": toys.OPTIMIZER}, {}),
    "an objective": ({"framework/objectives/toy.py": toys.OBJECTIVE}, {}),
    "a source of data": ({"framework/data/toy_source.py": toys.SOURCE}, {}),
    "a schedule": (
        {"framework/schedules/toy.py": toys.SCHEDULE},
        {
            "framework/schedules/traits.py": [
                ('ScheduleName = Literal["after_backward",', 'ScheduleName = Literal["toy", "after_backward",'),
                (
                    "SCHEDULES: dict[str, ScheduleTraits] = {",
                    'SCHEDULES: dict[str, ScheduleTraits] = {\n    "toy": ScheduleTraits(needs_stack=False, '
                    "updates_in_chunks=False, slices_host_arrays=False),",
                ),
            ],
            "framework/program/jit_step.py": [
                ("from plimsoll.framework.schedules import after_backward,", toys.IMPORT),
                ("STEP_BUILDERS = {", 'STEP_BUILDERS = {\n    "toy": toy.build_step,'),
            ],
        },
    ),
    "a family of published models": ({"framework/families/toy.py": toys.FAMILY}, {}),
}
# Trains two steps for each addition. Reads the text file, and the config.json of the toy family, of its folder.
TRAIN = """
import plimsoll as pl

BASE = {
    "trainer.max_steps": 2, "data.seq_len": 32, "data.global_batch_size": 8, "model.stack.num_layers": 2,
    "model.dim": 32, "data.source": pl.config_for(pl.TextFiles, paths=["text.txt"]), "data.validation": {},
    "data.tokenizer": "ByteTokenizer", "model.vocab_size": 257, "trainer.compilation_cache": None,
}
attention = pl.config_for(pl.ToyAttention, num_heads=2)
for name, changes in {
    "a layer": {"model.stack.pattern.0.norm": "ToyNorm"},
    "a variant of attention": {"model.stack.pattern.0.attention": attention},
    "an optimizer": {"learner.optimizer": "toy_sign", "learner.optimizer.learning_rate": 0.01},
    "an objective": {"model.head.objective": "ToyObjective"},
    "a source of data": {"data.source": pl.config_for(pl.ToySource, paths=["text.txt"])},
    "a schedule": {"memory.update": "toy"},
}.items():
    pl.train(pl.load_config("stdlib-tiny", BASE | changes), workdir=f"runs/{name}")
    print(name)
from plimsoll.framework import families
config = pl.load_config("stdlib-tiny", {k: v for k, v in BASE.items() if not k.startswith("model.")})
config.model, _ = families.load_model_config("toy")
pl.train(config, workdir="runs/family")
print("a family of published models")
"""


@pytest.mark.parametrize("path", PATHS)
def test_named_files_exist(path: str):
    assert (ROOT / path).exists()


def test_names_in_tables_are_in_the_stated_modules():
    for name, file in [
        ("class JsonLines", "framework/data/sources.py"),
        ("ScheduleName", "framework/schedules/traits.py"),
        ("SCHEDULES", "framework/schedules/traits.py"),
        ("STEP_BUILDERS", "framework/program/jit_step.py"),
        ("MEMORY", "tests/support/exact.py"),
        ("SMALL", "tests/support/exact.py"),
    ]:
        assert re.search(rf"^{name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_additions_touch_the_files_that_the_table_names():
    rows = {row.split(" | ")[0]: row for row in re.findall(r"^\| (.+)", TEXT, re.MULTILINE)}
    for name, (new_files, changed_files) in ADDITIONS.items():
        for file in new_files:
            assert f"`{file.rpartition('/')[0]}/`" in rows[name], f"{name}: {file}"
        for file in changed_files:
            assert f"`{file}`" in rows[name], f"{name}: {file}"
        named = re.findall(r"`(framework/[\w/]+\.py)`", rows[name].rpartition(" | ")[0])
        assert sorted(named) == sorted(changed_files), name


@pytest.mark.pairs
def test_toy_additions_train_two_steps(tmp_path: Path):
    shutil.copytree(ROOT / "plimsoll", tmp_path / "plimsoll", ignore=shutil.ignore_patterns("__pycache__"))
    for new_files, changed_files in ADDITIONS.values():
        for file, text in new_files.items():
            (tmp_path / "plimsoll" / file).write_text(text)
        for file, replacements in changed_files.items():
            path = tmp_path / "plimsoll" / file
            for old, new in replacements:
                assert path.read_text().count(old) == 1, (file, old)
                path.write_text(path.read_text().replace(old, new))
    (tmp_path / "text.txt").write_text("the ship sails over the sea. " * 400)
    (tmp_path / "toy").mkdir()
    facts = FAMILIES["gemma2"].facts | {"architectures": ["ToyForCausalLM"], "model_type": "toy", "vocab_size": 320}
    (tmp_path / "toy" / "config.json").write_text(json.dumps(facts))
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    for name in ADDITIONS:
        assert name in done.stdout, done.stdout + done.stderr
