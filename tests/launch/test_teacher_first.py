"""`plimsoll train` of a student whose config names a teacher that does not exist yet."""

from pathlib import Path

import pytest

from plimsoll.launch import score, teacher_first
from tests.launch.test_score import STUDENT
from tests.support import runs

TEACHER = "distil-tiny-teacher"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that ran. Each runs in this process, and the teacher is a model of a few steps."""
    ran = []

    def execute(verb: str, *flags: str) -> int:
        ran.append((verb, *flags))
        if verb == "score":
            return score.main(list(flags))
        workdir = next(flag.removeprefix("--workdir=") for flag in flags if flag.startswith("--workdir="))
        return runs.train(workdir, "--config.trainer.max_steps=4")

    monkeypatch.setattr(teacher_first, "_execute", execute)
    return ran


def student(folder: Path, *more: str) -> list[str]:
    """Return the overrides of a student that expects its teacher's answers in folder/scores."""
    place = [f"--config.batch_transform.path={folder}/scores", f"--config.batch_transform.train_first={TEACHER}"]
    return [*STUDENT, *place, "--config.batch_transform.top_k=16", "--config.trainer.max_steps=4", *more]


@pytest.mark.pairs
def test_teacher_is_trained_and_scores_the_data(
    tmp_path: Path, commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write_text(tmp_path / "text")
    assert runs.train(tmp_path / "student", *student(tmp_path)) == 0
    out = capsys.readouterr().out
    assert f"teacher: {TEACHER} is trained first, in {tmp_path}/scores/model" in out
    assert f"teacher: {tmp_path}/scores has " in out
    train, scored = commands
    assert train == ("train", f"--config={TEACHER}", f"--workdir={tmp_path}/scores/model")
    assert scored[:3] == ("score", f"--workdir={tmp_path}/scores/model", f"--config={runs.CONFIG}:tiny")
    # The rows are those of the student's run, so the command has all of the student's overrides.
    assert set(student(tmp_path)) < set(scored)
    assert scored[-2:] == ("--top_k=16", f"--out={tmp_path}/scores")

    # A resumed run starts no command. Another student uses the stored answers, and adds rows that only it reads.
    longer = student(tmp_path, "--config.trainer.max_steps=5")
    commands.clear()
    assert runs.train(tmp_path / "student", *student(tmp_path)) == 0
    assert commands == []
    assert runs.train(tmp_path / "other", *longer) == 0
    assert [verb for verb, *_ in commands] == ["train", "score"]


def test_files_from_another_teacher_are_kept(
    tmp_path: Path, commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write_text(tmp_path / "text")
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "notes.txt").write_text("mine")
    assert runs.train(tmp_path / "student", *student(tmp_path)) == 2
    assert commands == []
    assert "holds no teacher.json" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "scores").iterdir()] == ["notes.txt"]


@pytest.mark.pairs
def test_a_dry_run_trains_no_teacher(
    tmp_path: Path, commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write_text(tmp_path / "text")
    assert runs.train(tmp_path / "student", *student(tmp_path, "--dry_run")) == 2
    assert commands == []
    assert "`plimsoll train` without --dry_run creates it" in capsys.readouterr().err


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.batch_transform.train_first=mine.py:teacher", "expected the name of a config"),
        ("--config.batch_transform.kind=live", "expected kind = stored"),
    ],
)
def test_user_errors(
    tmp_path: Path, commands: list[tuple[str, ...]], flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write_text(tmp_path / "text")
    assert runs.train(tmp_path / "student", *student(tmp_path, flag)) == 2
    assert commands == []
    assert message in capsys.readouterr().err


def test_a_command_that_fails_ends_the_run_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write_text(tmp_path / "text")
    monkeypatch.setattr(teacher_first, "_execute", lambda verb, *flags: 143)
    assert runs.train(tmp_path / "student", *student(tmp_path)) == 143
    assert not (tmp_path / "student").exists()


@pytest.mark.pairs
def test_verb_runs_in_its_own_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert teacher_first._execute("configs", "show", "no-such-config") == 2
    assert "no-such-config" in capfd.readouterr().err
