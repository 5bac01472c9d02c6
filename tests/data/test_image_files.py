"""Folders of images of any size: pixels equal Pillow's own, no image stays in memory, damaged files are named."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.extras.flows.image_files import ImageFiles, StoredImages, decode_image, list_images
from plimsoll.extras.flows.image_source import DigitsSource, ImagePipeline
from plimsoll.framework.config import ConfigError, config_for
from plimsoll.launch import train

SIZE = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 images of different sizes, formats and folders, one of them damaged; and a text."""
    draw = np.random.default_rng(0)
    root = tmp_path / "images"
    for number in range(40):
        width, height = draw.integers(5, 60, 2)
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3)).astype(np.uint8))
        path = root / f"class{number % 3}" / f"{number:02d}.{('png', 'jpg')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    (root / "class0/broken.png").write_bytes((root / "class0/00.png").read_bytes()[:80])
    (root / "notes.txt").write_text("not an image")
    (root / ".hidden.png").write_bytes(b"")
    return root


def fit(path: Path, size: int = SIZE, mode: str = "RGB") -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(ImageOps.fit(image.convert(mode), (size, size), Image.Resampling.LANCZOS))


def build(folder: Path, workdir: Path, **fields) -> ImagePipeline:
    source = config_for(ImageFiles, path=str(folder), split="train")
    held = config_for(ImageFiles, path=str(folder), split="validation")
    settings = {"image_size": SIZE, "global_batch_size": 8, **fields}
    built = config_for(ImagePipeline, source=source, validation={"held": held}, **settings).instantiate()
    built.setup(workdir)
    return built


def test_pixels_equal_those_of_pillow_and_parts_are_disjoint(folder: Path, tmp_path: Path):
    built = build(folder, tmp_path / "run")
    names = {fit(path).tobytes(): path for path in folder.rglob("[0-9]*.*")}
    assert len(names) == 40
    rows = [built.train_batch(step, range(8))["images"] for step in range(built.num_rows // 8 + 1)]
    seen = {image.tobytes() for batch in rows for image in batch}
    held = {image.tobytes() for batch in built.eval_batches("held", range(8)) for image in batch["images"]}
    assert seen | held == set(names)
    assert not seen & held
    # The split depends on names only: it stays in another folder, with other files.
    moved = folder.rename(tmp_path / "moved")
    (moved / "class1/99.png").write_bytes((moved / "class0/00.png").read_bytes())
    listed = {file.name for file in list_images(str(moved)).validation} - {"class1/99.png"}
    assert listed == {str(names[image].relative_to(folder)) for image in held}


def test_damaged_files_are_left_out_with_a_warning(folder: Path, tmp_path: Path):
    built = build(folder, tmp_path / "run")
    (warning,) = built.warnings()
    assert "of 4" in warning or "of 3" in warning
    assert "files are left out, as unreadable: class0/broken.png: image file is truncated" in warning
    for path in folder.rglob("*.*g"):
        path.write_bytes(b"nothing")
    with pytest.raises(
        ValueError, match=r"data.source: .*: none of .* files is a readable image \(class0/.*: no image\)"
    ):
        build(folder, tmp_path / "other")


def test_images_are_decoded_once_and_are_not_held(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = build(folder, tmp_path / "a", cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr("plimsoll.extras.flows.image_files.decode_image", lambda *a: pytest.fail("decoded again"))
    tracemalloc.start()
    again = build(folder, tmp_path / "b", cache_dir=str(tmp_path / "cache"))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    images = again.images["train"]
    assert isinstance(images, StoredImages)
    assert np.array_equal(images[3], first.images["train"][3])
    assert again.fingerprint() == first.fingerprint()
    assert held_bytes < 200_000
    # A process that may not write opens the files of the one that did.
    other = config_for(
        ImagePipeline, source=config_for(ImageFiles, path=str(folder)), image_size=SIZE, global_batch_size=8
    ).instantiate()
    with pytest.raises(FileNotFoundError, match="process 0 should have written it"):
        other.setup(tmp_path / "c", is_primary=False)


def encode(image: Image.Image, path: Path, **options) -> bytes:
    image.save(path, **options)
    return path.read_bytes()


def decode(content: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    return decode_image(content, shape).pixels


def test_every_pixel_format(tmp_path: Path):
    draw = np.random.default_rng(1)
    gray = draw.integers(0, 256, (SIZE, SIZE)).astype(np.uint8)
    color = draw.integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)
    path = tmp_path / "x.png"
    shape = (SIZE, SIZE, 3)
    one = decode(encode(Image.fromarray(gray), path), shape)
    assert np.array_equal(one, np.repeat(gray[..., None], 3, 2))
    # 16 bits are scaled, not clipped.
    deep = Image.fromarray(gray.astype(np.uint16) * 257)
    assert np.array_equal(decode(encode(deep, path), (SIZE, SIZE, 1)), gray[..., None])
    # Transparent pixels become white, opaque ones stay.
    alpha = np.where(np.arange(SIZE) < 8, 255, 0).astype(np.uint8)[None].repeat(SIZE, 0)
    rgba = decode(encode(Image.fromarray(np.dstack([color, alpha])), path), shape)
    assert np.array_equal(rgba[:, :8], color[:, :8])
    assert (rgba[:, 8:] == 255).all()
    palette = Image.fromarray(color).quantize(200)
    assert np.array_equal(decode(encode(palette, path), shape), np.asarray(palette.convert("RGB")))
    # EXIF orientation 6: turned clockwise by a quarter.
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode(encode(Image.fromarray(color), tmp_path / "x.tiff", exif=exif), shape)
    assert np.array_equal(turned, np.rot90(color, -1))
    cmyk = decode(encode(Image.fromarray(color).convert("CMYK"), tmp_path / "x.jpg"), shape)
    assert cmyk.shape == shape
    bits = decode(encode(Image.fromarray(gray > 127), path), (SIZE, SIZE, 1))
    assert np.array_equal(bits[..., 0], np.where(gray > 127, 255, 0))
    with pytest.raises(ValueError, match="floating-point"):
        decode(encode(Image.fromarray(gray.astype(np.float32)), tmp_path / "f.tiff"), shape)


def test_the_model_follows_the_images(folder: Path, tmp_path: Path):
    config, (line,) = with_data(configs.load("digits-glow"), str(folder), [], image_size="32")
    assert config.model.image_shape == (32, 32, 3)
    assert (config.model.levels, config.data.image_size) == (256, 32)
    assert line.endswith("32 x 32 x 3 (height x width x channels); left out: 1 .txt")
    config.instantiate()
    (folder / "class0/broken.png").unlink()
    for number, path in enumerate(sorted(folder.rglob("[0-9]*.*"))):
        draw = np.random.default_rng(number).integers(0, 256, (9, 9)).astype(np.uint8)
        Image.fromarray(draw).save(path)
    config, _ = with_data(configs.load("digits-glow"), str(folder), [])
    assert config.model.image_shape == (8, 8, 1)
    # A folder with parts keeps them.
    (folder / "class0").rename(folder / "val")
    (folder / "class1").rename(folder / "train")
    for path in (folder / "class2").iterdir():
        path.rename(folder / "train" / path.name)
    listing = list_images(str(folder))
    assert listing.by_name
    assert {file.name.split("/")[0] for file in listing.validation} == {"val"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_images_are_enough(count: int, tmp_path: Path):
    (tmp_path / "few").mkdir()
    for number in range(count):
        Image.new("L", (9, 12), 40 * number).save(tmp_path / f"few/{number}.png")
    config, _ = with_data(configs.load("digits-glow"), str(tmp_path / "few"), [])
    data = config.data.instantiate()
    data.allows_small_data = True
    data.setup(tmp_path / "run")
    assert data.num_rows == max(1, count - 1)
    assert len(data.validation_names) == (count > 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data={tmp}/none"], "does not exist"),
        (["--data={tmp}/file.png"], "is a file; expected a folder of images"),
        (["--data={tmp}/texts"], "has no images (.txt): expected .png"),
        (["--data=s3://bucket/images"], "images are read from local folders"),
        (["--data={tmp}/images", "--config.data.image_size=30"], "expected an even height and width"),
        (["--data={tmp}/images", "--config.data.image_size=big"], "expected an integer > 0"),
        (["--data={tmp}/images", "--data={tmp}/texts"], "images come from one folder"),
        (["--config.data.image_size=16"], "DigitsSource has images of its own size"),
        (["--data={tmp}/images", "--reward=f.py:g"], "the config learns from no rewards"),
        (["--data={tmp}/images", "--data_at=5:seq_len=4"], "only data of text has stages"),
        (["--data={tmp}/images", "--data_weights=2"], "--data_weights=2: images have no weights"),
    ],
)
def test_user_errors_are_one_line(flags: list[str], message: str, folder: Path, tmp_path: Path, capsys):
    (tmp_path / "file.png").write_bytes(b"")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a")
    argv = [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
    assert train.main(["--config=digits-glow", f"--workdir={tmp_path}/run", *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_a_source_of_one_size_takes_no_image_size():
    with pytest.raises(ValueError, match=r"data.image_size = 4: a DigitsSource"):
        config_for(ImagePipeline, source=config_for(DigitsSource), global_batch_size=8, image_size=4).instantiate()
    with pytest.raises(ConfigError, match=r"height and width of the images in data.image_size"):
        config_for(ImageFiles, path="x").instantiate()
