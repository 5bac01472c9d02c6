"""Workdirs that were used before.

Nothing that a run wrote is silently replaced, and a refused start or a dry run changes nothing.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.framework.checkpoint.directory import _digest
from tests.support.runs import losses, train, write_text

SHORT = ("--config.trainer.max_steps=8",)


@pytest.fixture(scope="module")
def run_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints of steps 4 and 8, for tests to copy; its text is next to it."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        write_text(place / "text")
        assert train(place / "run", *SHORT) == 0
    return place / "run"


@pytest.fixture
def run(run_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run."""
    monkeypatch.setenv("TINY_TEXT", str(run_template.parent / "text"))
    return Path(shutil.copytree(run_template, tmp_path / "run"))


def state(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    """Return the content and modification time of everything in a folder."""
    return {
        str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns if path.is_file() else 0)
        for path in sorted(folder.rglob("*"))
    }


def lose_manifests(run: Path) -> None:
    for path in run.glob("checkpoints/*/manifest/data.json"):
        path.unlink()


def lose_markers(run: Path) -> None:
    for path in run.glob("checkpoints/*/commit_success.txt"):
        path.unlink()


def lose_arrays(run: Path) -> None:
    for path in run.glob("checkpoints/*/state"):
        shutil.rmtree(path)


def lose_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def empty_checkpoints(run: Path) -> None:
    lose_checkpoints(run)
    (run / "checkpoints").mkdir()


def lose_checkpoints_and_record(run: Path) -> None:
    lose_checkpoints(run)
    (run / "saved.json").unlink()


def lose_checkpoints_and_metrics(run: Path) -> None:
    lose_checkpoints(run)
    (run / "loss.png").unlink()
    (run / "metrics.jsonl").unlink()


def garble_manifests(run: Path) -> None:
    for path in run.glob("checkpoints/*/manifest/data.json"):
        path.write_bytes(path.read_bytes()[:100])


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("lose", "found"),
    [
        (lose_manifests, "manifest/data.json is missing"),
        (lose_markers, "commit_success.txt is missing"),
        (lose_arrays, "state/_METADATA is missing"),
        (lose_checkpoints, "saved.json: step 8"),
        (empty_checkpoints, "saved.json: step 8"),
        (lose_checkpoints_and_record, "loss.png"),
        (lose_checkpoints_and_metrics, "saved.json: step 8"),
        (garble_manifests, "cannot be read"),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "never", "must"])
def test_run_with_lost_checkpoints_is_not_restarted(
    run: Path, capsys, lose: Callable[[Path], None], found: str, resume: str
) -> None:
    lose(run)
    before = state(run)
    assert train(run, *SHORT, f"--resume={resume}") == 2
    error = capsys.readouterr().err
    assert resume != "auto" or found in error, error
    assert resume != "auto" or str(run) in error, error
    assert state(run) == before


@pytest.mark.pairs
def test_error_names_the_next_step(run: Path, capsys) -> None:
    lose_manifests(run)
    assert train(run, *SHORT) == 2
    error = capsys.readouterr().err
    assert "holds no complete checkpoint; its metrics go up to step 8" in error
    assert "00000004: incomplete" in error
    assert "00000008: incomplete" in error
    assert "Nothing was changed. Copy the checkpoints again" in error
    assert "choose another --workdir" in error


@pytest.mark.pairs
def test_a_run_that_ended_before_its_first_checkpoint_starts_again(run: Path, capsys) -> None:
    """A kill leaves rows of metrics, and no record that anything was saved."""
    wanted = losses(run)
    lose_checkpoints_and_record(run)
    (run / "loss.png").unlink()
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    (run / "metrics.jsonl").write_text("".join(kept))
    config = json.loads((run / "config.json").read_text())
    config["learner"]["max_nonfinite"] = 77
    (run / "config.json").write_text(json.dumps(config))
    assert train(run, *SHORT) == 0
    out = capsys.readouterr().out
    assert "ended at step 3, before its first checkpoint: training starts over, and its 3 rows" in out
    assert "config changed since the last start here: config.learner.max_nonfinite: 77 -> 10" in out
    assert losses(run) == wanted


@pytest.mark.pairs
@pytest.mark.parametrize("keep", ["metrics.jsonl", "config.json", "saved.json"])
def test_resume_never_refuses_a_used_workdir(run: Path, tmp_path: Path, capsys, keep: str) -> None:
    used = tmp_path / "used"
    used.mkdir()
    shutil.copy(run / keep, used)
    before = state(used)
    assert train(used, *SHORT, "--resume=never") == 2
    assert f"a run has written {used / keep}" in capsys.readouterr().err
    assert state(used) == before


@pytest.mark.pairs
def test_checkpoint_in_another_format_is_not_skipped(run: Path, capsys) -> None:
    path = run / "checkpoints" / "00000008" / "manifest" / "data.json"
    body = json.loads(path.read_text())
    body.pop("digest")
    body |= {"format": 2, "versions": {"plimsoll-train": "9.1"}}
    path.write_text(json.dumps({**body, "digest": _digest(body)}))
    before = state(run)
    assert train(run, *SHORT) == 2
    assert "has format 2, written by plimsoll-train 9.1; this version reads format 1" in capsys.readouterr().err
    assert state(run) == before


def test_a_manifest_that_may_not_be_read_is_not_passed_over(run: Path, capsys, monkeypatch) -> None:
    """Reading is patched to fail, because root can read everything."""
    forbidden = run / "checkpoints" / "00000008" / "manifest" / "data.json"
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path == forbidden:
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    before = state(run)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        assert train(run, *SHORT) == 2
    assert f"no permission to read {forbidden}" in capsys.readouterr().err
    assert state(run) == before


# --- refused starts, and dry runs -------------------------------------------------------------------------------------

REFUSED = {
    "checkpoint": ["--resume=must"],
    "data": ["--config.data.source.paths=['/nowhere/*.txt']"],
    "validation": ["--config.data.validation.held.paths=['/nowhere/*.txt']"],
    "mesh": ["--config.mesh.fsdp=3"],
    "batch": ["--config.data.global_batch_size=12"],
    "rows": ["--config.data.seq_len=100000"],
    "room": ["--device_memory_gib=0.0003", "--config.model.stack.num_layers=1"],
    "flag": ["--nonsense"],
}


@pytest.mark.pairs
@pytest.mark.parametrize("flags", REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_start_leaves_no_folder(run_template: Path, tmp_path: Path, monkeypatch, flags: list[str]) -> None:
    monkeypatch.setenv("TINY_TEXT", str(run_template.parent / "text"))
    assert train(tmp_path / "runs" / "a", *flags) in (2, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--resume=never"],
        ["--config.data.seed=9"],
        ["--config.model.stack.num_layers=3"],
        ["--device_memory_gib=0.0003"],
        REFUSED["data"],
        REFUSED["rows"],
        ["--dry_run"],
        ["--dry_run", "--config.data.source.paths=['{valid}']"],
    ],
    ids=["never", "seed", "model", "room", "data", "rows", "dry", "dry-other-text"],
)
def test_a_refused_start_leaves_a_used_workdir_as_it_was(run: Path, flags: list[str]) -> None:
    valid = Path(os.environ["TINY_TEXT"]) / "valid.txt"
    before = state(run)
    assert train(run, *SHORT, *(flag.replace("{valid}", str(valid)) for flag in flags)) in (0, 2, 4)
    assert state(run) == before


@pytest.mark.pairs
@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--target=v5e-1",), marks=pytest.mark.slow)], ids=["here", "elsewhere"]
)
def test_a_dry_run_leaves_nothing(run_template: Path, tmp_path: Path, monkeypatch, flags: tuple[str, ...]) -> None:
    monkeypatch.setenv("TINY_TEXT", str(run_template.parent / "text"))
    if flags:
        pytest.importorskip("libtpu")
    assert train(tmp_path / "runs" / "a", "--dry_run", *flags) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.pairs
def test_unrelated_files_are_kept(run_template: Path, tmp_path: Path, monkeypatch) -> None:
    """Keep a user's notes and shell redirections in the workdir, written before or while the start is refused."""
    from plimsoll.framework.config import ConfigError
    from plimsoll.framework.data.pipeline import DataPipeline

    monkeypatch.setenv("TINY_TEXT", str(run_template.parent / "text"))
    setup = DataPipeline.setup

    def with_notes(self: DataPipeline, *args: object, **options: object) -> None:
        setup(self, *args, **options)  # pyright: ignore[reportArgumentType]
        (tmp_path / "run" / "data" / "mine.txt").write_text("mine")
        raise ConfigError("refused after the start has written its own files")

    monkeypatch.setattr(DataPipeline, "setup", with_notes)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert train(tmp_path / "run") == 2
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {
        "run",
        "run/notes.txt",
        "run/data",
        "run/data/mine.txt",
    }


@pytest.mark.pairs
def test_log_includes_output_from_before_training(run: Path) -> None:
    log = (run / "log.txt").read_text()
    assert log.index("sequences") < log.index("step 1/8")
