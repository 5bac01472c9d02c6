"""Image sources and their pipeline: the images, the files that are refused, and the order of batches."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plimsoll.extras.flows.image_source import DigitsSource, ImageFolder, ImagePipeline
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.data.sources import StdlibSource

B = 8


def build(tmp_path: Path, setup: bool = True, **fields: Any) -> ImagePipeline:
    fields = {"source": config_for(DigitsSource), "global_batch_size": B, **fields}
    built = config_for(ImagePipeline, **fields).instantiate()
    if setup:
        built.setup(tmp_path / "workdir")
    return built


def pictures(folder: Path, count: int = 5, size: tuple[int, ...] = (4, 6, 3), seed: int = 0) -> np.ndarray:
    """Write PNG files to `folder`, and return their images."""
    folder.mkdir(exist_ok=True, parents=True)
    images = np.random.default_rng(seed).integers(0, 256, (count, *size), np.uint8)
    for number, image in enumerate(images):
        Image.fromarray(image.squeeze()).save(folder / f"{number:03d}.png")
    return images


def folder(path: Path | str, **fields: Any) -> Config:
    return config_for(ImageFolder, path=str(path), **fields)


def test_digits_match_scikit_learn_and_splits_are_disjoint():
    from sklearn.datasets import load_digits

    whole, train, held = (DigitsSource(split=split).load() for split in ("all", "train", "validation"))
    assert (whole.shape, whole.dtype, whole.min(), whole.max()) == ((1797, 8, 8, 1), np.uint8, 0, 16)
    assert (whole[..., 0] == load_digits().images).all()
    parts = [{image.tobytes() for image in part} for part in (train, held)]
    assert not parts[0] & parts[1]
    assert len(train) + len(held) == 1797
    assert (len(train), len(held)) == (1436, 361)  # 20.1%: a different split would be a different benchmark
    assert sorted(image.tobytes() for part in (train, held) for image in part) == sorted(x.tobytes() for x in whole)


def test_equal_images_are_in_the_same_split(monkeypatch: pytest.MonkeyPatch):
    from sklearn import datasets

    found = datasets.load_digits()
    found.images = np.concatenate([found.images, found.images])
    monkeypatch.setattr(datasets, "load_digits", lambda: found)
    train, held = (DigitsSource(split=split).load() for split in ("train", "validation"))
    assert (len(train), len(held)) == (2 * 1436, 2 * 361)


def test_an_epoch_has_each_image_once_and_the_next_another_order(tmp_path: Path):
    images = pictures(tmp_path / "train", count=16, size=(3, 3))
    built = build(tmp_path, source=folder(tmp_path / "train"), seed=5)
    steps = [built.train_batch(step, range(B)) for step in range(4)]
    assert {name: (x.shape, str(x.dtype)) for name, x in steps[0].items()} == built.arrays()
    assert built.arrays() == {"images": ((B, 3, 3, 1), "uint8"), "weights": ((B,), "float32")}
    assert all((batch["weights"] == 1).all() for batch in steps)
    epochs = [[x.tobytes() for batch in part for x in batch["images"]] for part in (steps[:2], steps[2:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(x.tobytes() for x in images)
    assert epochs[0] != epochs[1]
    assert epochs[0] != [x.tobytes() for x in images]
    assert (built.epoch_steps(1), built.epoch_steps(1.1)) == (2, 3)


@pytest.mark.parametrize("flip", [False, True])
def test_batch_depends_only_on_seed_and_step_and_is_sharded(tmp_path: Path, flip: bool):
    built = build(tmp_path, seed=3, flip=flip)
    whole, again = built.train_batch(7, range(B)), build(tmp_path, seed=3, flip=flip).train_batch(7, range(B))
    assert all((whole[name] == again[name]).all() for name in whole)
    for rows in ([0, 1, 2, 3], np.array([4, 5, 6, 7]), [6, 1]):  # as processes with their own devices
        part = built.train_batch(7, rows)
        assert all((part[name] == whole[name][rows]).all() for name in whole)
    with built.train_iterator(7, range(B)) as batches:
        step, first = next(batches)
    assert step == 7
    assert (first["images"] == whole["images"]).all()
    with built.train_iterator(6, range(B), BatchOrder().without(2)) as batches:
        index, first = next(batches)
    assert index == 7
    assert (first["images"] == whole["images"]).all(), "what is left out changes no other batch"
    other = build(tmp_path, seed=4, flip=flip).train_batch(7, range(B))
    assert (other["images"] != whole["images"]).any()


def test_images_are_flipped_only_on_request_and_in_training(tmp_path: Path):
    held = {"digits": config_for(DigitsSource, split="validation")}
    plain, mirrored = (build(tmp_path, flip=flip, global_batch_size=512, validation=held) for flip in (False, True))
    a, b = (x.train_batch(0, range(512))["images"] for x in (plain, mirrored))
    flipped = [not (x == y).all() for x, y in zip(a, b, strict=True)]
    assert 200 < sum(flipped) < 312
    assert all((x == (y[:, ::-1] if turned else y)).all() for x, y, turned in zip(a, b, flipped, strict=True))
    first, second = (next(x.eval_batches("digits", range(8))) for x in (plain, mirrored))
    assert (first["images"] == second["images"]).all()


def test_an_image_is_flipped_in_some_epochs_only(tmp_path: Path):
    pictures(tmp_path / "train", count=8, size=(3, 3))
    built = build(tmp_path, source=folder(tmp_path / "train"), flip=True)
    seen = [{image.tobytes() for image in built.train_batch(step, range(B))["images"]} for step in range(6)]
    assert len(set.union(*seen)) == 16, "of each image both sides, sooner or later"


def test_evaluation_reads_each_image_once(tmp_path: Path):
    held = config_for(DigitsSource, split="validation")
    built = build(tmp_path, global_batch_size=64, validation={"digits": held})
    batches = list(built.eval_batches("digits", range(64)))
    assert len(batches) == 6
    seen = np.concatenate([batch["images"][batch["weights"] > 0] for batch in batches])
    assert (seen == DigitsSource(split="validation").load()).all()
    assert {name: (x.shape, str(x.dtype)) for name, x in batches[-1].items()} == built.arrays(evaluation=True)
    part = list(built.eval_batches("digits", [63, 2], limit=2))
    assert [(x["images"] == y["images"][[63, 2]]).all() for x, y in zip(part, batches[::5], strict=True)] == [True] * 2
    with pytest.raises(ValueError, match=r"no validation set 'digit'; data\.validation has digits"):
        built.eval_batches("digit", range(8))


def test_fingerprint_covers_everything_that_affects_batches(tmp_path: Path):
    prints = [
        build(tmp_path, **fields).fingerprint()
        for fields in ({}, {"seed": 1}, {"global_batch_size": 16}, {"flip": True})
    ]
    prints.append(build(tmp_path, source=config_for(DigitsSource, split="all")).fingerprint())
    assert len(set(prints)) == 5
    held = {"digits": config_for(DigitsSource, split="validation")}
    assert build(tmp_path, validation=held, prefetch=3).fingerprint() == prints[0]


def test_image_folder_with_png_and_npz_local_and_by_url(tmp_path: Path):
    first = pictures(tmp_path / "mixed", count=2)
    second = np.random.default_rng(1).integers(0, 256, (7, 4, 6, 3), np.uint8)
    np.savez(tmp_path / "mixed/more.npz", a=second[:3], b=second[3:])
    (tmp_path / "mixed/README.txt").write_text("neither")
    both = np.concatenate([first, second])
    for path in (tmp_path / "mixed", f"file://{tmp_path}/mixed/"):
        source = ImageFolder(path=str(path))
        assert source.image_shape == (4, 6, 3)
        assert (source.load() == both).all()
    gray, alpha = pictures(tmp_path / "gray", size=(5, 5)), pictures(tmp_path / "alpha", size=(5, 5, 4))
    assert (ImageFolder(path=str(tmp_path / "gray")).load() == gray[..., None]).all()
    assert (ImageFolder(path=str(tmp_path / "alpha")).load() == alpha).all()
    assert ImageFolder(path="not here", size=[4, 6, 3]).image_shape == (4, 6, 3)  # enough for a plan


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


GRAY = Image.new("L", (6, 4), 200)
BAD = {
    "text.png": (b"no picture", "not a readable PNG"),
    "cut.png": (png(Image.effect_noise((64, 64), 50))[:900], "not a readable PNG"),
    "jpeg.png": (b"\xff\xd8\xff\xe0" + bytes(100), "not a readable PNG"),
    "wide.png": (png(Image.new("I;16", (6, 4))), "pixels of mode I;16, expected 8 bits each: L, RGB, RGBA"),
    "palette.png": (png(GRAY.convert("P")), "pixels of mode P"),
    "large.png": (png(GRAY.resize((7, 4))), r"images of 4 x 7 x 1, expected 4 x 6 x 1 \(height x width x channels\)"),
    "color.png": (png(GRAY.convert("RGB")), "images of 4 x 6 x 3, expected 4 x 6 x 1"),
    "text.npz": (b"no archive", "not a readable NPZ"),
    "cut.npz": (npz(a=np.zeros((9, 4, 6, 1), np.uint8))[:200], "not a readable NPZ"),
    "objects.npz": (npz(a=np.array([{}])), "not a readable NPZ"),
    "float.npz": (npz(a=np.zeros((2, 4, 6, 1))), r"a is float64 \[2, 4, 6, 1\], expected uint8 \[N, H, W, C\]"),
    "flat.npz": (npz(b=np.zeros((2, 4, 6), np.uint8)), r"b is uint8 \[2, 4, 6\], expected uint8 \[N, H, W, C\]"),
    "none.npz": (npz(a=np.zeros((0, 4, 6, 1), np.uint8)), r"a is uint8 \[0, 4, 6, 1\], expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_image_file_is_named(tmp_path: Path, name: str):
    data, message = BAD[name]
    (tmp_path / "000.png").write_bytes(png(GRAY))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"^data\.source: {tmp_path}/{name}: {message}"):
        build(tmp_path, source=folder(tmp_path), global_batch_size=1)


def test_invalid_folder_or_config_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=rf"^data\.source: the folder {tmp_path}/gone of {tmp_path}/gone/\*"):
        build(tmp_path, source=folder(tmp_path / "gone"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"^data\.source: no file matches {tmp_path}/empty/\*"):
        build(tmp_path, source=folder(tmp_path / "empty"))
    (tmp_path / "empty/notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=rf"data\.source: {tmp_path}/empty has no \.png and no \.npz files"):
        build(tmp_path, source=folder(tmp_path / "empty"))
    pictures(tmp_path / "good")
    good = folder(tmp_path / "good")
    with pytest.raises(ValueError, match=r"000\.png: a value of \d+, expected less than levels = 17"):
        build(tmp_path, source=folder(tmp_path / "good", levels=17))
    with pytest.raises(ValueError, match=r"000\.png: images of 4 x 6 x 3, expected 8 x 8 x 3"):
        build(tmp_path, source=folder(tmp_path / "good", size=[8, 8, 3]))
    with pytest.raises(ValueError, match=r"has 5 images, too few for one batch of data\.global_batch_size=8"):
        build(tmp_path, source=good)
    other = {"digits": config_for(DigitsSource, split="validation")}
    with pytest.raises(ValueError, match=r"^data\.validation\.digits: \[H, W, C, levels\] are \[8, 8, 1, 17\], but \["):
        build(tmp_path, source=good, global_batch_size=2, validation=other)
    with pytest.raises(ValueError, match="size: expected"):
        ImageFolder(path="x", size=[8, 8])
    with pytest.raises(ValueError, match=r"data\.source: expected an ImageSource, given StdlibSource"):
        build(tmp_path, setup=False, source=config_for(StdlibSource))
    with pytest.raises(ValueError, match=r"data\.validation\.train: expected a name of letters"):
        build(tmp_path, setup=False, validation={"train": config_for(DigitsSource)})


def test_start_table_lists_the_images(tmp_path: Path):
    built = build(tmp_path, validation={"digits": config_for(DigitsSource, split="validation")})
    train, held = map(str, built.source_report())
    assert train.startswith("DigitsSource: 1,436 images of 8 x 8 x 1, 17 levels, sha256 ")
    assert held.startswith("DigitsSource: 361 images of 8 x 8 x 1, 17 levels, sha256 ")
