"""Stored values: the data delivers them with their rows; values from different weights or data are refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from plimsoll.framework.batch_transforms.auxiliary_model import AuxiliaryModel
from plimsoll.framework.layout import TrainState
from plimsoll.framework.program.program import Program
from tests.support.paired_rows import dpo
from tests.support.runs import write_text


@pytest.fixture
def program_with_reference(tmp_path: Path, monkeypatch) -> Program:
    """A program whose stored reference was computed in tmp_path/run."""
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")
    program = fresh(tmp_path)
    said: list[str] = []
    program.experiment.batch_transform.open(program, tmp_path / "run", is_new_run=True, log=said.append)
    reason = "all weights are trained; log-probabilities under the initial ones are computed once"
    assert said[0] == f"reference: stored ({reason})"
    return program


def fresh(tmp_path: Path, kind: str = "auto", **fields) -> Program:
    """Return the program of a new start, with its data ready."""
    config = dpo()
    config.batch_transform.kind = kind
    for path, value in fields.items():
        config.set_path(path.replace("__", "."), value)
    program = Program(config.instantiate(), jax.devices()[:1])
    program.experiment.data.setup(tmp_path / "run")
    return program


@pytest.mark.pairs
def test_batches_contain_the_stored_values_for_their_rows(program_with_reference: Program, tmp_path: Path):
    offloaded = fresh(tmp_path, "offloaded")
    offloaded.experiment.batch_transform.open(offloaded, tmp_path / "offloaded", is_new_run=True, log=lambda line: None)
    data = program_with_reference.experiment.data
    batches = [data.train_batch(number, program_with_reference.rows) for number in (0, 7, 33)]
    with data.eval_batches("held", program_with_reference.rows) as evaluations:
        batches += list(evaluations)
    for batch in batches:
        expected = offloaded.complete_batch(
            TrainState(), offloaded.put({name: x for name, x in batch.items() if name != "reference"})
        )
        np.testing.assert_allclose(batch["reference"], expected["reference"], atol=1e-5)
        assert (batch["reference"][batch["weights"] == 0] == 0).all()
    # Rows past the end of a validation set are padding.
    assert any((batch["weights"][-1] == 0).all() for batch in batches)
    assert (
        program_with_reference.experiment.batch_transform.complete_batch(
            program_with_reference, TrainState(), program_with_reference.put(batches[0])
        ).keys()
        == batches[0].keys()
    )


def test_resumed_run_reads_stored_values_without_the_model(
    program_with_reference: Program, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(AuxiliaryModel, "load", lambda self: pytest.fail("the model is loaded"))
    program = fresh(tmp_path)
    program.experiment.batch_transform.open(program, tmp_path / "run", is_new_run=False, log=lambda line: None)
    first = [one.experiment.data.train_batch(3, one.rows)["reference"] for one in (program_with_reference, program)]
    np.testing.assert_array_equal(*first)


@pytest.mark.pairs
@pytest.mark.parametrize(("fields", "what"), [({"trainer__seed": 5}, "weights"), ({"data__seed": 7}, "data")])
def test_stored_values_from_other_weights_or_data_are_refused(
    program_with_reference: Program, fields, what, tmp_path: Path
):
    program = fresh(tmp_path, **fields)
    with pytest.raises(
        ValueError, match=f"run/reference holds a reference for different {what} than those that this run started with"
    ) as e:
        program.experiment.batch_transform.open(program, tmp_path / "run", is_new_run=False, log=lambda line: None)
    assert "\n" not in str(e.value)
    values = tmp_path / "run" / "reference" / "train.f32"
    before = values.read_bytes()
    said: list[str] = []
    program.experiment.batch_transform.open(program, tmp_path / "run", is_new_run=True, log=said.append)
    assert f"holds a reference for different {what}; computing it again" in said[1]
    # Another data seed only changes the order of the same rows of text.
    assert (values.read_bytes() == before) == (what == "data")


@pytest.mark.pairs
def test_values_are_recomputed_if_the_program_differs(program_with_reference: Program, tmp_path: Path):
    program = fresh(tmp_path, model__stack__pattern__0__attention__num_heads=4)
    said: list[str] = []
    program.experiment.batch_transform.open(program, tmp_path / "run", is_new_run=True, log=said.append)
    assert "holds a reference computed by a different program; computing it again" in said[1]
    done = json.loads((tmp_path / "run" / "reference" / "reference.json").read_text())["done"]
    assert done == {name: rows.num_rows for name, rows in program.experiment.data.row_sets().items()}


@pytest.mark.pairs
@pytest.mark.parametrize(("max_steps", "says"), [(3, True), (200, False)])
def test_warning_if_few_stored_rows_are_used(max_steps: int, says: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")
    program = fresh(tmp_path, trainer__max_steps=max_steps)
    said: list[str] = []
    program.experiment.batch_transform.open(program, tmp_path / "run", is_new_run=True, log=said.append)
    read = max_steps * program.experiment.data.global_batch_size
    lines = [
        line for line in said if f"but the run reads only {read:,} of them; batch_transform.kind=offloaded" in line
    ]
    assert len(lines) == says


@pytest.mark.pairs
@pytest.mark.parametrize(
    "damage",
    ["changed", pytest.param("cut", marks=pytest.mark.pairs), pytest.param("removed", marks=pytest.mark.pairs)],
)
def test_damaged_values_are_recomputed(program_with_reference: Program, damage: str, tmp_path: Path):
    file = tmp_path / "run" / "reference" / "train.f32"
    values = file.read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(values[:1000] if damage == "cut" else bytes(400) + values[400:])
    program = fresh(tmp_path)
    inference = Program(program.experiment, jax.devices()[:1], training=False)
    said: list[str] = []
    program.experiment.batch_transform.open(inference, tmp_path / "run", is_new_run=False, log=said.append)
    assert "the workdir has no stored reference for these weights and data; loading the reference model" in said[1]
    assert file.exists() == (damage != "removed")

    program = fresh(tmp_path)
    said.clear()
    program.experiment.batch_transform.check_files(program, tmp_path / "run", is_new_run=False)
    program.experiment.batch_transform.open(program, tmp_path / "run", is_new_run=False, log=said.append)
    assert said[1].endswith("reference is damaged; computing the reference again")
    assert file.read_bytes() == values


def test_resuming_with_another_reference_is_refused_early(program_with_reference: Program, tmp_path: Path):
    program = fresh(tmp_path, trainer__seed=5)
    with pytest.raises(ValueError, match=r"different weights than those that this run started with; expected the"):
        program.experiment.batch_transform.check_files(program, tmp_path / "run", is_new_run=False)
