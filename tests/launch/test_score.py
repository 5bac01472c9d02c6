"""`plimsoll score`, and a student's run on the answers it stores, called from the command line."""

import shutil
from pathlib import Path

import pytest

from plimsoll.framework.batch_transforms.teacher_files import TeacherRows
from plimsoll.launch import evaluate, generate, score
from tests.support import runs

STUDENT = (
    "--config.model.head.objective=plimsoll.Distillation",
    "--config.model.head.objective.alpha=0",
    "--config.batch_transform=plimsoll.Teacher",
)
# `plimsoll score` that kills its process with SIGKILL after rows that are written, but not committed.
KILLED = """
import os, signal
from plimsoll.framework.batch_transforms import teacher_files, teacher_scoring

teacher_scoring._COMMIT_SECONDS = 0.0
append = teacher_files.TeacherWriter.append

def append_and_die(self, rows):
    append(self, rows)
    if self.num_rows > 20:
        for file in self._files:
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

teacher_files.TeacherWriter.append = append_and_die
from plimsoll.launch import score
score.main()
"""


def flags(folder: Path, scores: Path, *more: str) -> list[str]:
    """Return the flags of `plimsoll score` for the student."""
    config = [f"--config={runs.CONFIG}:tiny", *STUDENT, f"--config.batch_transform.path={scores}"]
    return [f"--workdir={folder}/teacher", f"--out={scores}", *config, *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher of four steps in teacher/, its answers in scores/ and text in text/."""
    folder = tmp_path_factory.mktemp("score")
    runs.write_text(folder / "text")
    assert runs.train(folder / "teacher", "--config.trainer.max_steps=4") == 0
    assert score.main(flags(folder, folder / "scores")) == 0
    return folder


@pytest.mark.pairs
def test_student_trains_on_stored_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"--config.batch_transform.path={folder}/scores"
    assert runs.train(folder / "student", *STUDENT, place, "--config.trainer.eval_every=6") == 0
    assert f"teacher: {folder}/scores has " in capsys.readouterr().out
    rows = runs.rows(folder / "student")
    divergences = [row["train/head/kl"] for row in rows if "train/head/kl" in row]
    assert len(divergences) == 12
    assert divergences[-1] < divergences[0]
    last = next(row for row in reversed(rows) if "eval/held/kl" in row)
    capsys.readouterr()

    assert evaluate.main([f"--workdir={folder}/student", "--config", runs.CONFIG + ":tiny", "--validation"]) == 0
    assert f"held: loss {last['eval/held/loss']:,.6g}, kl {last['eval/held/kl']:,.6g}" in capsys.readouterr().out
    words = ["--prompt=the", "--max_new_tokens=3", f"--config={runs.CONFIG}:tiny"]
    assert generate.main([f"--workdir={folder}/student", *words]) == 0


@pytest.mark.pairs
def test_output_bytes_are_printed_first(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score.main(flags(folder, tmp_path / "scores", "--top_k=10", "--rows=all")) == 0
    captured = capsys.readouterr()
    # Per token: 10 ids of 2 bytes, 10 float16, a float32. Per row of 32 tokens: a key of 16 bytes, a checksum of 4.
    assert "rows of 32 tokens, the 10 most likely of 257 tokens: 44.6 bytes per token, at most " in captured.err
    sizes = sum(path.stat().st_size for path in (tmp_path / "scores").glob("*.bin"))
    rows = TeacherRows(tmp_path / "scores")
    assert sizes == rows.num_rows * (44 * 32 + 20)
    assert f"{rows.num_rows:,} rows, {rows.num_rows:,} of them new" in captured.out
    assert score.main(flags(folder, tmp_path / "scores", "--top_k=10", "--rows=all")) == 0
    assert f"{rows.num_rows:,} rows, 0 of them new" in capsys.readouterr().out


@pytest.mark.pairs
def test_error_names_the_flag_for_another_token_count(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score.main(flags(folder, folder / "scores")) == 0
    assert capsys.readouterr().out.endswith(f"train with --config.batch_transform.path={folder}/scores\n")
    assert score.main(flags(folder, tmp_path / "few", "--top_k=3")) == 0
    path = f"--config.batch_transform.path={tmp_path}/few"
    assert capsys.readouterr().out.endswith(f"train with {path} --config.batch_transform.top_k=3\n")


def test_the_help_names_the_other_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        score.main(["--help"])
    assert "--texts FILE" in capsys.readouterr().out


@pytest.mark.pairs
def test_more_steps_add_rows(folder: Path, tmp_path: Path) -> None:
    """Stored rows are not written again."""
    scores = tmp_path / "scores"
    assert score.main(flags(folder, scores, "--config.trainer.max_steps=2")) == 0
    few = TeacherRows(scores).num_rows
    first = (scores / "ids.bin").read_bytes()
    assert score.main(flags(folder, scores, "--config.trainer.max_steps=12")) == 0
    assert TeacherRows(scores).num_rows > few
    assert (scores / "ids.bin").read_bytes().startswith(first)


@pytest.mark.pairs
def test_kill_9_and_the_same_command_again_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def run_score(scores: Path, program: tuple[str, ...]) -> int:
        # runs.start passes the teacher's folder as the workdir.
        more = [flag for flag in flags(folder, scores) if not flag.startswith(("--workdir", "--config="))]
        process = runs.start(folder / "teacher", *more, program=program, out=tmp_path / "out")
        return process.wait(timeout=300)

    assert run_score(whole, ("-m", "plimsoll", "score")) == 0, (tmp_path / "out").read_text()
    assert run_score(killed, ("-c", KILLED)) == -9
    assert 0 < TeacherRows(killed).num_rows < TeacherRows(whole).num_rows
    assert (killed / "ids.bin").stat().st_size > TeacherRows(killed).num_rows * 32 * 64 * 2
    assert run_score(killed, ("-m", "plimsoll", "score")) == 0, (tmp_path / "out").read_text()
    names = sorted(path.name for path in whole.glob("*.bin"))
    assert names == ["checksums.bin", "ids.bin", "log_probs.bin", "rows.bin", "tails.bin"]
    for name in (*names, "teacher.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


MISTAKES = {
    "no tokens": (["--top_k=0"], "--top_k=0: expected at least 1"),
    "too many": (["--top_k=300"], "--top_k=300: expected 1 to 257, the ids of teacher and student"),
    "too long": (["--config.data.seq_len=64", "--config.model.embed.max_positions=64"], "64"),
    "another tokenizer": (
        ["--config.data.tokenizer=plimsoll.BPETokenizer", "--config.data.tokenizer.vocab_size=257"],
        "the teacher's tokenizer differs from data.tokenizer",
    ),
    "two teachers": (["--hf=x"], "not allowed with argument"),
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=distil-tiny", "--out={file}"], "--out={file}: {file} is a file; expected a folder"),
        (["--config=distil-tiny", "--out={file}/a/b"], "--out={file}/a/b: {file} is a file; expected a folder"),
        (["--texts=nowhere.jsonl", "--out={folder}"], "--out={folder}: a folder; expected a file"),
        (["--texts=nowhere.jsonl", "--out=no/x"], "--out=no/x: the folder no does not exist"),
    ],
)
def test_outputs_are_checked_before_the_model_is_loaded(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"file": tmp_path / "file", "folder": tmp_path}
    places["file"].write_text("")
    assert score.main(["--workdir=nowhere", *(word.format(**places) for word in words)]) == 2
    assert f"error: {message.format(**places)}\n" in capsys.readouterr().err


@pytest.mark.pairs
@pytest.mark.parametrize("mistake", MISTAKES)
def test_user_error_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    more, message = MISTAKES[mistake]
    assert score.main(flags(folder, tmp_path / "scores", *more)) == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith("error: ")
    assert message in last_line
    assert not (tmp_path / "scores" / "teacher.json").exists()


@pytest.mark.pairs
def test_another_teacher_does_not_write_into_the_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "scores", tmp_path / "scores")
    before = (tmp_path / "scores" / "ids.bin").read_bytes()
    assert score.main(flags(folder, tmp_path / "scores", "--step=3")) == 2
    assert runs.train(folder / "other", "--config.trainer.max_steps=4", "--config.trainer.seed=1") == 0
    words = [word for word in flags(folder, tmp_path / "scores") if not word.startswith("--workdir")]
    capsys.readouterr()
    assert score.main([f"--workdir={folder}/other", *words]) == 2
    assert "holds the outputs of a teacher with different weights: " in capsys.readouterr().err
    assert (tmp_path / "scores" / "ids.bin").read_bytes() == before


@pytest.mark.pairs
def test_texts_are_scored_by_another_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score.main([f"--workdir={folder}/teacher", "--texts=nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
