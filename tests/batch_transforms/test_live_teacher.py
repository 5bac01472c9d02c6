"""A published model as the teacher of packed chats: live from host memory, it matches what `plimsoll score` stores."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.batch_transforms.teacher import Teacher
from plimsoll.framework.batch_transforms.teacher_scoring import IDS, LOG_PROBS, TAIL
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layout import TrainState, flatten
from plimsoll.framework.objectives.distillation import Distillation
from plimsoll.framework.program.program import Program
from plimsoll.framework.weights.export import export_model
from plimsoll.launch import score
from tests.support import pretrained, small

TOP_K = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats and, in folder/model, a small Llama with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("live")
    program = small.program(small.experiment(small.llama(vocab_size=512)))
    facts, family = families.export_config(small.llama(vocab_size=512))
    params = program.init().parameter
    export_model(folder / "model", program.experiment.model, params, family, facts | {"max_position_embeddings": 64})
    pretrained.write(folder / "model", "chatml")
    words = pretrained.TEXTS[0].split()
    chats = [
        [{"role": "user", "content": f"{words[i % 9]} {i}"}, {"role": "assistant", "content": words[i % 7]}]
        for i in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return folder


def overrides(folder: Path) -> dict[str, object]:
    """Return the settings of the run on chats, by config path."""
    chats = [f"{folder}/chats.jsonl"]
    return {
        "data.source.paths": chats,
        "data.validation.chats.paths": chats,
        "data.global_batch_size": 2,
        "data.seq_len": 64,
        "trainer.max_epochs": None,
        "trainer.max_steps": 3,
    }


def student(folder: Path, kind: str, path: Path, **fields: object) -> Config:
    """Return a config in which the model itself learns from a teacher of this kind, on the chats."""
    config = configs.load(f"hf:{folder}/model")
    for name, value in overrides(folder).items():
        config.set_path(name, value)
    config.model.head.objective = config_for(Distillation)
    config.batch_transform = config_for(Teacher, kind=kind, path=str(path), top_k=TOP_K)
    for name, value in fields.items():
        config.set_path(name.replace("__", "."), value)
    return config


def open_program(config: Config, workdir: Path) -> Program:
    program = Program(config.instantiate(), jax.devices()[:2])
    program.experiment.data.setup(workdir)
    batch_transform = program.experiment.batch_transform
    assert batch_transform is not None
    batch_transform.check_files(program, workdir, is_new_run=True)
    batch_transform.open(program, workdir, is_new_run=True, log=lambda line: None)
    return program


@pytest.mark.pairs
def test_live_teacher_equals_stored_scores_on_packed_chats(folder: Path, tmp_path: Path) -> None:
    flags = [f"--config.{name}={json.dumps(value)}" for name, value in overrides(folder).items() if value is not None]
    words = [f"--hf={folder}/model", f"--config=hf:{folder}/model", "--config.trainer.max_epochs=none", *flags]
    assert score.main([*words, f"--top_k={TOP_K}", f"--out={tmp_path}/scores"]) == 0
    complete_batch = {}
    for kind, path in (("stored", tmp_path / "scores"), ("live", folder / "model")):
        program = open_program(student(folder, kind, path), tmp_path / kind)
        data = program.experiment.data
        batch = data.train_batch(1, program.rows)
        assert 0 < batch["weights"].sum() < batch["weights"].size
        assert batch["segments"].max() > 1
        state = TrainState()
        complete_batch[kind] = jax.device_get(program.complete_batch(state, program.put(batch)))
    stored, live = complete_batch["stored"], complete_batch["live"]
    used = batch["segments"] > 0
    np.testing.assert_allclose(stored[LOG_PROBS][used], live[LOG_PROBS][used], atol=4e-3)
    np.testing.assert_allclose(stored[TAIL][used], live[TAIL][used], atol=1e-3)
    # Two tokens may be equally likely, up to rounding.
    assert (stored[IDS] == live[IDS])[used].mean() > 0.99


@pytest.mark.pairs
def test_live_teacher_weights_are_counted_in_host_memory(folder: Path, tmp_path: Path) -> None:
    program = open_program(student(folder, "live", folder / "model"), tmp_path)
    batch_transform = program.experiment.batch_transform
    assert batch_transform is not None
    state = batch_transform._model.state  # pyright: ignore
    leaves = flatten(state.parameter)
    matrices = {path: leaf for path, leaf in leaves.items() if path.startswith("stack") and leaf.ndim == 3}
    assert matrices
    assert {leaf.sharding.memory_kind for leaf in matrices.values()} == {"pinned_host"}
    assert batch_transform.host_bytes(program) >= sum(leaf.nbytes for leaf in matrices.values()) // len(program.devices)


def test_incompatible_teachers_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as info:
        open_program(student(folder, "live", tmp_path / "nowhere"), tmp_path)
    assert "nowhere" in str(info.value)
    other = tmp_path / "other"
    other.mkdir()
    for file in (folder / "model").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    pretrained.write(other, "llama3")
    with pytest.raises(ValueError, match=r"batch_transform.path = .*token \d+ is .*expected a model with the same voc"):
        open_program(student(folder, "live", other), tmp_path)
