"""Image files of any size and format, decoded once into a file of uint8 pixels that training reads image by image.

The decoded images are stored in the cache folder and never held in memory, so a folder may be larger than memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from plimsoll.extras.flows.image_source import ImageSource
from plimsoll.framework.config import Fraction, PositiveInt, component
from plimsoll.framework.data.file_formats import group_by_split
from plimsoll.framework.data.files import compute_digest
from plimsoll.framework.data.sources import assign_split
from plimsoll.framework.files import durable
from plimsoll.framework.files.remote import is_url
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.terminal.phases import phase

# Increase this when a change to this file changes the pixels of an image.
_VERSION = 1
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Pillow reads only these formats, whatever the name of a file says.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# Number of images decoded between two writes; they are in memory at the same time.
_CHUNK = 256
# Number of files that decide whether a folder has colors, and number of names to show in a message.
_SAMPLED = 256
_NUM_SHOWN = 3


class ImageFile(NamedTuple):
    """A file of an image: its path, and its name relative to the folder of the source."""

    path: str
    name: str


@dataclass(frozen=True)
class ImageListing:
    """The files of a folder: those of images, by part, and the number of other files by extension."""

    train: list[ImageFile]
    validation: list[ImageFile]
    others: Counter[str]
    by_name: bool


class StoredImages:
    """Decoded images in a file, read one by one. Behaves like an array uint8 [N,H,W,C] that is not in memory.

    Attributes:
        shape: (N, H, W, C).
        sha256: hash of the shape and all pixels.
        warnings: what the user should know about the files, one line each.
    """

    def __init__(self, folder: Path):
        facts = json.loads((folder / "images.json").read_text())
        self.shape: tuple[int, ...] = tuple(facts["shape"])
        self.sha256: str = facts["sha256"]
        self.warnings: list[str] = facts["warnings"]
        # Not a memory map, whose pages would count as memory of this process.
        self._file = os.open(folder / "images.bin", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._num_bytes = int(np.prod(self.shape[1:]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, np.ndarray | list | slice):
            numbers = range(len(self))[index] if isinstance(index, slice) else index
            images = [self[int(number)] for number in numbers]
            return np.stack(images) if images else np.zeros((0, *self.shape[1:]), np.uint8)
        pixels = os.pread(self._file, self._num_bytes, int(index) * self._num_bytes)
        return np.frombuffer(pixels, np.uint8).reshape(self.shape[1:])


@component
class ImageFiles(ImageSource):
    """The images in a folder and its subfolders: PNG, JPEG, WebP, BMP, GIF (first frame) and TIFF, of any size.

    Each image is rotated as its EXIF data say, resized and cropped at its center to a square (Pillow's ImageOps.fit
    with a Lanczos filter), and put on white where it is transparent. 16-bit gray becomes 8-bit. Files that cannot be
    read are left out, with a warning. Hidden files and folders are ignored; subfolders have no other meaning, except
    that names such as train/ and val/ are the parts.

    Args:
        path: the folder.
        image_size: height and width of the images; set by the pipeline from `data.image_size`.
        channels: 3 for RGB, 1 for gray.
        split: "all", or one of two disjoint parts: by the names of folders and files if they all say so, otherwise by
            the sha256 of the names. No part is empty if there are two images.
        validation_fraction: approximate fraction of the images in "validation".
    """

    levels = 256

    def __init__(
        self,
        *,
        path: str,
        image_size: PositiveInt | None = None,
        channels: Literal[1, 3] = 3,
        split: Literal["all", "train", "validation"] = "all",
        validation_fraction: Fraction = 0.05,
    ):
        if image_size is None:
            raise ValueError("expected the height and width of the images in data.image_size")
        self.path = path
        self.image_shape = (image_size, image_size, channels)
        self.split = split
        self.validation_fraction = validation_fraction

    def files(self) -> list[ImageFile]:
        """Return the files of the part, by name. Raises ValueError or FileNotFoundError if there are none."""
        listing = list_images(self.path, self.validation_fraction)
        if self.split == "all":
            return sorted([*listing.train, *listing.validation], key=lambda file: file.name)
        files = listing.train if self.split == "train" else listing.validation
        if not files:
            raise ValueError(f"{self.path} has too few images for a part {self.split!r}")
        return files

    def load(self) -> np.ndarray:
        """See `ImageSource`. For use without a pipeline: all images are in memory."""
        decoded = _decode_files(self.files(), self.image_shape)
        return np.stack([image.pixels for image in decoded if isinstance(image, DecodedImage)])

    def open(self, cache: Path, *, write: bool) -> StoredImages:
        """Decode all images into the cache folder, unless they are there, and open them.

        Args:
            cache: folder of decoded images.
            write: whether this process may decode; other processes open the files that it wrote.

        Raises:
            FileNotFoundError: there are no files, or this process may not decode them.
            ValueError: no file is a readable image.
        """
        files = self.files()
        stats = [os.stat(file.path) for file in files]
        facts = [[file.name, one.st_size, one.st_mtime_ns] for file, one in zip(files, stats, strict=True)]
        key = compute_digest([_VERSION, self.image_shape, facts])
        folder = cache / f"images-{key[:16]}"
        if not folder.exists():
            if not write:
                raise FileNotFoundError(f"{folder} does not exist, but process 0 should have written it")
            self._decode(files, folder)
        return StoredImages(folder)

    def _decode(self, files: Sequence[ImageFile], folder: Path) -> None:
        """Write the pixels of all files into a folder."""
        temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
        temporary.mkdir(parents=True)
        try:
            failures = []
            count = num_colored = 0
            pixels_digest = hashlib.sha256()
            with (
                phase(f"decoding {len(files):,} images of {self.path}") as decoding,
                (temporary / "images.bin").open("wb") as stream,
            ):
                for number, image in enumerate(_decode_files(files, self.image_shape)):
                    decoding.percent(number / len(files))
                    if isinstance(image, str):
                        failures.append(f"{files[number].name}: {image}")
                        continue
                    stream.write(image.pixels.tobytes())
                    pixels_digest.update(image.pixels.tobytes())
                    num_colored += image.loses_colors
                    count += 1
            if not count:
                raise ValueError(f"{self.path}: none of {len(files):,} files is a readable image ({failures[0]})")
            warnings = []
            if failures:
                shown = "; ".join(failures[:_NUM_SHOWN]) + ("; ..." if len(failures) > _NUM_SHOWN else "")
                warnings.append(f"{len(failures):,} of {len(files):,} files are left out, as unreadable: {shown}")
            if num_colored:
                warnings.append(f"{num_colored:,} of {count:,} images have colors and become gray (channels = 1)")
            shape = (count, *self.image_shape)
            digest = hashlib.sha256(repr(shape).encode() + pixels_digest.digest()).hexdigest()
            write_json(temporary / "images.json", {"shape": shape, "sha256": digest, "warnings": warnings})
            durable.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


class DecodedImage(NamedTuple):
    """The pixels of an image, uint8 [H,W,C], and whether it had colors that one channel cannot hold."""

    pixels: np.ndarray
    loses_colors: bool


def list_images(path: str, validation_fraction: float = 0.05) -> ImageListing:
    """List the images in a folder and divide them into two parts.

    Raises:
        ValueError: the path is no local folder, or has no images.
        FileNotFoundError: it does not exist.
    """
    if is_url(path):
        raise ValueError(f"{path}: images are read from local folders; copy them to this machine first")
    folder = Path(path).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"the folder {path} does not exist")
    if not folder.is_dir():
        raise ValueError(f"{path} is a file; expected a folder of images")
    files = []
    others: Counter[str] = Counter()
    for parent, subfolders, names in os.walk(folder):
        # The list is modified in place, which keeps os.walk out of hidden folders.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            ending = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                continue
            if ending in _ENDINGS:
                full = os.path.join(parent, name)
                files.append(ImageFile(full, os.path.relpath(full, folder).replace(os.sep, "/")))
            else:
                others[ending or "files without an ending"] += 1
    if not files:
        found = f" ({', '.join(others)})" if others else ""
        raise ValueError(f"{path} has no images{found}: expected {', '.join(_ENDINGS)}")
    files.sort(key=lambda file: file.name)
    by_name = {file.name: file for file in files}
    parts = group_by_split(list(by_name))
    held_out = {*parts.validation, *parts.test}
    is_split_by_name = bool(parts.train and held_out and not parts.others)
    if not is_split_by_name:
        held_out = {name for name in by_name if assign_split(name, validation_fraction) == "validation"}
        if len(files) > 1 and len(held_out) in (0, len(files)):
            moved = min(by_name, key=lambda name: hashlib.sha256(name.encode()).digest())
            held_out ^= {moved}
        elif len(files) == 1:
            held_out = set()
    train = [file for file in files if file.name not in held_out]
    validation = [file for file in files if file.name in held_out]
    return ImageListing(train, validation, others, is_split_by_name)


def detect_channels(files: Sequence[ImageFile]) -> Literal[1, 3]:
    """Return 1 if none of a sample of the files has colors, by its header, otherwise 3."""
    step = max(1, len(files) // _SAMPLED)
    for file in files[::step]:
        try:
            if _has_colors(_open(Path(file.path).read_bytes())):
                return 3
        except (OSError, SyntaxError, ValueError, _bomb_error()):
            # Decoding reports it.
            continue
    return 1


def _decode_files(files: Sequence[ImageFile], shape: tuple[int, int, int]) -> Iterator[DecodedImage | str]:
    """Yield the pixels of each file, uint8 [H,W,C], or the reason why it cannot be read."""
    # Pillow releases the interpreter's lock while it decodes and resizes.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(files), _CHUNK):
            yield from pool.map(lambda file: _decode_file(file, shape), files[start : start + _CHUNK])


def _decode_file(file: ImageFile, shape: tuple[int, int, int]) -> DecodedImage | str:
    try:
        return decode_image(Path(file.path).read_bytes(), shape)
    # A damaged file may raise nearly anything.
    except Exception as error:
        if type(error).__name__ == "UnidentifiedImageError":
            return "no image"
        return " ".join(str(error).split()) or type(error).__name__


def decode_image(content: bytes, shape: tuple[int, int, int]) -> DecodedImage:
    """Decode an image file.

    Args:
        content: the bytes of the file.
        shape: H, W and C; C = 1 makes the image gray.

    Raises:
        Exception: whatever Pillow raises for a file that it cannot read.
    """
    from PIL import Image, ImageOps

    height, width, channels = shape
    image = _open(content)
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("32-bit pixels")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels")
    has_colors = _has_colors(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    image = image.convert("L" if channels == 1 else "RGB")
    image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(image).reshape(shape)
    return DecodedImage(pixels, channels == 1 and has_colors)


def _open(content: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(content), formats=_FORMATS)


def _bomb_error() -> type[Exception]:
    from PIL import Image

    return Image.DecompressionBombError


def _has_colors(image: Any) -> bool:
    """Return whether the pixel format of an image, or its palette, has colors."""
    if image.mode in ("P", "PA"):
        palette = np.array(image.getpalette("RGB")).reshape(-1, 3)
        return bool((palette != palette[:, :1]).any())
    return image.mode not in ("1", "L", "LA", "La", "F") and not image.mode.startswith("I")
