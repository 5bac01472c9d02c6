"""A flow trained on digits with `plimsoll train`: the run's files, `plimsoll sample`, and verbs that refuse a flow."""

import math
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plimsoll.configs import load as load_config
from plimsoll.extras.flows.image_sampler import ImageSampler
from plimsoll.extras.flows.image_source import DigitsSource
from plimsoll.framework.layout import TrainState
from plimsoll.framework.metrics.image_grid import save_grid
from plimsoll.framework.program.program import Program
from plimsoll.launch import evaluate, export, generate, prepare, sample, status, train
from tests.support import runs

FILE = str(Path(__file__).parents[1] / "support/tiny_images.py")
FLAGS = ("--config.trainer.max_steps=8", "--config.learner.ema=0.5", "--config.trainer.eval_every=4")
CELL = 34  # pixels from one digit to the next


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with averaged weights, on eight devices."""
    folder = tmp_path_factory.mktemp("flow") / "run"
    assert train.main([f"--config={FILE}:flow", f"--workdir={folder}", *FLAGS]) == 0
    return folder


def digits(path: Path) -> np.ndarray:
    """Return the images of the picture, values 0 to 16: [rows, columns, 8, 8]."""
    with Image.open(path) as image:
        picture = np.asarray(image)[2:, 2:]
    cells = picture.reshape(picture.shape[0] // CELL, CELL, picture.shape[1] // CELL, CELL).swapaxes(1, 2)
    return np.round(cells[:, :, 2:32:4, 2:32:4] * (16 / 255)).astype(np.uint8)


@pytest.mark.pairs
def test_run_leaves_its_files(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = runs.rows(workdir)
    with Image.open(workdir / "samples.png") as picture:
        assert picture.size == (8 * CELL + 2, 8 * CELL + 2)
    assert len({image.tobytes() for row in digits(workdir / "samples.png") for image in row}) == 64
    assert all("train/tokens_per_second" not in row for row in found)
    assert [row["train/images_per_second"] > 0 for row in found if row["step"] == 8 and "train/loss" in row] == [True]
    for row in (row for row in found if "eval/digits/loss" in row):
        for prefix in ("eval/digits", "eval_ema/digits"):
            loss, bits, det, prior = (row[f"{prefix}/{x}"] for x in ("loss", "bits_per_dim", "log_det", "log_prior"))
            assert loss == pytest.approx(bits * math.log(2)) == pytest.approx(-det - prior)
            assert 2.0 < bits < math.log2(17) + 1
    log = (workdir / "log.txt").read_text()
    for text in (
        "images per step   64",
        "FLOPs per image",
        "1,436 images of 8 x 8 x 1, 17 levels",
        " img/s",
        "samples: ",
    ):
        assert text in log
    assert "tok/s" not in log
    assert runs.losses(workdir)[1] < 3.0  # 3.75 without calibration
    assert status.main([f"--workdir={workdir}"]) == 0
    assert "images per second" in capsys.readouterr().out


@pytest.mark.pairs
def test_evaluation_uses_each_held_out_image_once(workdir: Path) -> None:
    (row,) = (row for row in runs.rows(workdir) if row["step"] == 8 and "eval/digits/images" in row)
    assert row["eval/digits/images"] == 361  # not a multiple of the batch size, 64


@pytest.mark.pairs
def test_samples_depend_on_seed_and_temperature(workdir: Path, tmp_path: Path) -> None:
    def draw_samples(*flags: str) -> np.ndarray:
        assert sample.main([f"--workdir={workdir}", f"--output={tmp_path}/x.png", "--num=6", *flags]) == 0
        return digits(tmp_path / "x.png")

    first = draw_samples()
    assert first.shape == (2, 3, 8, 8)
    assert (draw_samples() == first).all()
    assert (draw_samples("--seed=1") != first).any()
    assert (draw_samples("--ema") != first).any()
    assert (draw_samples("--temperature=0.7") == first).all()
    cold = draw_samples("--temperature=0")
    assert (cold == cold[0, 0]).all()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.pairs
def test_rows_lead_from_one_held_out_image_to_another(workdir: Path, tmp_path: Path) -> None:
    output = f"--output={tmp_path}/between.png"
    assert sample.main([f"--workdir={workdir}", output, "--num=17", "--interpolate=5", "--seed=2"]) == 0
    found = digits(tmp_path / "between.png")
    assert found.shape == (3, 5, 8, 8)
    held = {image.tobytes() for image in DigitsSource(split="validation").load()}
    ends = [row[at].tobytes() for row in found for at in (0, -1)]
    assert len({*ends} & held) == 6
    distances = np.abs(found[:, 1:].astype(int) - found[:, :-1]).sum((2, 3))
    assert (distances > 0).all()
    assert (distances < np.abs(found[:, -1].astype(int) - found[:, 0]).sum((1, 2))[:, None]).all()


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output=x.png"], "one of the arguments --workdir is required"),
        (["--workdir={run}"], "the following arguments are required: --output"),
        (["--workdir={run}", "--output=x.jpg"], "--output=x.jpg: expected a .png file in an existing folder"),
        (["--workdir={run}", "--output=nope/x.png"], "--output=nope/x.png: expected a .png file in an existing folder"),
        (["--workdir={run}", "--output=x.png", "--num=0"], "--num=0: expected 1 to 10,000"),
        (["--workdir={run}", "--output=x.png", "--num=1000000000"], "--num=1000000000: expected 1 to 10,000"),
        (
            ["--workdir={run}", "--output=x.png", "--interpolate=2", "--temperature=1"],
            "--temperature changes samples only",
        ),
        (["--workdir={run}", "--output=folder.png"], "--output=folder.png: a folder; expected a file"),
        (
            ["--workdir={run}", "--output=x.png", "--temperature=-1"],
            "--temperature=-1.0: expected a finite number of at least 0",
        ),
        (["--workdir={run}", "--output=x.png", "--temperature=nan"], "--temperature=nan: expected a finite number"),
        (["--workdir={run}", "--output=x.png", "--interpolate=1"], "--interpolate=1: expected 2 to --num=64"),
        (["--workdir={run}", "--output=x.png", "--interpolate=65"], "--interpolate=65: expected 2 to --num=64"),
        (["--workdir={run}", "--output=x.png", "--temprature=1"], "did you mean '--temperature'?"),
        (
            ["--workdir={run}", "--output=x.png", "--num=1000", "--interpolate=2"],
            "need 1000 held-out images, but data.",
        ),
        (
            ["--workdir={run}/nope", "--output=x.png"],
            "holds no config.json; expected the workdir of a `plimsoll train` run",
        ),
    ],
)
def test_user_errors_are_one_line(
    workdir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert sample.main([flag.format(run=workdir) for flag in flags]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "x.png").exists()


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("verb", "flags"), [(generate, ["--prompt=a"]), (evaluate, ["--files", __file__]), (export, ["--to=exported"])]
)
def test_text_verbs_refuse_a_flow(workdir: Path, capsys: pytest.CaptureFixture[str], verb, flags) -> None:
    assert verb.main([f"--workdir={workdir}", *flags]) == 2
    assert capsys.readouterr().err == "error: model is a Flow; this is for language models (CausalLM)\n"


def test_prepare_refuses_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main([f"--config={FILE}:flow", f"--out={tmp_path}/out"]) == 2
    assert "data has type ImagePipeline; only a DataPipeline has text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_language_model_cannot_sample_images() -> None:
    program = Program(load_config(f"{runs.CONFIG}:tiny").instantiate(), training=False)
    with pytest.raises(ValueError, match="model is a CausalLM, which generates no images; expected a flow"):
        ImageSampler(program, TrainState())


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_a_grid_holds_its_images(tmp_path: Path, channels: int, mode: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 40, 20, channels), np.uint8)
    with Image.open(save_grid(images, tmp_path / "x.png", levels=256, columns=2)) as picture:
        assert (picture.mode, picture.size) == (mode, (2 * 22 + 2, 3 * 42 + 2))
        pixels = np.asarray(picture).reshape(128, 46, channels)
    assert (pixels[2:42, 2:22] == images[0]).all()
    assert (pixels[44:84, 24:44] == images[3]).all()
    with pytest.raises(ValueError, match="images with 2 channels cannot be written as PNG"):
        save_grid(images[..., :1].repeat(2, axis=3), tmp_path / "y.png", levels=256)


@pytest.mark.pairs
def test_a_resumed_run_is_not_calibrated_again(workdir: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(workdir, again)
    shutil.rmtree(next((again / "checkpoints").glob("*8")))
    (again / "samples.png").unlink()
    assert train.main([f"--config={FILE}:flow", f"--workdir={again}", *FLAGS]) == 0
    assert [row["resumed_from"] for row in runs.rows(again) if "resumed_from" in row] == [4]
    assert runs.losses(again) == runs.losses(workdir)
    assert (again / "samples.png").read_bytes() == (workdir / "samples.png").read_bytes()


@pytest.mark.slow
def test_two_processes_train_on_the_same_batches(tmp_path: Path) -> None:
    kind = {"file": FILE, "config": "flow"}
    flags = ("--config.trainer.max_steps=4", "--config.data.flip=true")
    processes = [*runs.pair(tmp_path / "two", *flags, **kind)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0], runs.output(tmp_path / "two")
    assert runs.start(tmp_path / "one", *flags, devices=4, **kind).wait(timeout=300) == 0, runs.output(tmp_path / "one")
    found, expected = ([*runs.losses(tmp_path / name).values()] for name in ("two", "one"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    (two, one) = (
        next(row for row in runs.rows(tmp_path / name) if "eval/digits/loss" in row) for name in ("two", "one")
    )
    assert two["eval/digits/loss"] == pytest.approx(one["eval/digits/loss"], rel=1e-5)
    assert (tmp_path / "two/samples.png").exists()


@pytest.mark.slow
def test_killed_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """Initialization is calibrated once; afterwards, the run depends only on seed and step."""
    kind = {"file": FILE, "config": "flow"}
    flags = (*runs.LONG, "--config.data.flip=true")
    assert runs.start(tmp_path / "whole", *flags, **kind).wait(timeout=300) == 0, runs.output(tmp_path / "whole")
    process = runs.start(tmp_path / "run", *flags, **kind)
    end = time.time() + 300
    while not list(tmp_path.glob("run/checkpoints/*/commit_success.txt")) and time.time() < end:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert max(runs.losses(tmp_path / "run")) < 120, "the run was over before it was killed"
    assert runs.start(tmp_path / "run", *flags, **kind).wait(timeout=300) == 0, runs.output(tmp_path / "run")
    assert len([row for row in runs.rows(tmp_path / "run") if "resumed_from" in row]) == 1
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    pictures = [(tmp_path / name / "samples.png").read_bytes() for name in ("run", "whole")]
    assert pictures[0] == pictures[1]
