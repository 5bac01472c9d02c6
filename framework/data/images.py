"""Images -> global batches of uint8 [B,H,W,C], in the same order and by the same promises as text.

A source is read whole into memory by `setup`, which raises every data error; a training step only picks rows.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types
import numpy as np

from framework.config import Config, PositiveInt, Seed, component
from framework.data.batches import Pipeline, Shapes
from framework.data.files import DataFile, digest_of, find
from framework.data.order import GlobalOrder
from framework.data.packing import Batch
from framework.data.sources import located, split_of

Levels = Annotated[int, annotated_types.Interval(ge=2, le=256)]
_FINGERPRINT = 1  # raise when a change of this file changes the batches that a config gives
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}  # of a PNG's mode


class ImageSource(abc.ABC):
    """Images of one shape with values 0 to `levels` - 1. The constructor only keeps its arguments."""

    levels: int
    image_shape: Any  # (H, W, C); may be a property

    @abc.abstractmethod
    def load(self) -> np.ndarray:
        """uint8 [N,H,W,C]. ValueError, FileNotFoundError: naming the file that is not usable."""


@component
class DigitsSource(ImageSource):
    """The 1,797 handwritten digits that scikit-learn ships in its wheel (UCI, E. Alpaydin and C. Kaynak 1998; 8 x 8
    pixels of 17 levels). About 20% are "validation", by the sha256 of an image's bytes: equal images are in one part.

    Args:
        split: which part to read; "all" for both.
    """

    levels, image_shape = 17, (8, 8, 1)

    def __init__(self, *, split: Literal["train", "validation", "all"] = "train"):
        self.split = split

    def load(self) -> np.ndarray:
        from sklearn.datasets import load_digits

        found: Any = load_digits()
        images = found.images.astype(np.uint8)[..., None]
        parts = np.array([split_of(image.tobytes().hex(), 0.2) for image in images])
        return images if self.split == "all" else images[parts == self.split]


@component
class ImageFolder(ImageSource):
    """The PNG files (8 bits: gray, RGB, RGBA) and NPZ files (each array uint8 [N,H,W,C]) of one folder, by name.

    Args:
        path: a local folder, or an fsspec URL of one.
        size: [H, W, C] of every image; [] takes those of the first one, which then has to be there for a plan too.
        levels: values are 0 to levels - 1.
    """

    def __init__(self, *, path: str, size: list[int] = [], levels: Levels = 256):  # noqa: B006
        if size and (len(size) != 3 or min(size) < 1):
            raise ValueError(f"size: expected [] or [height, width, channels], given {size}")
        self.path, self.size, self.levels = path, tuple(size), levels

    @functools.cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C): `size`, or that of the first image."""
        height, width, channels = self.size or next(self._read())[1].shape[1:]
        return height, width, channels

    def load(self) -> np.ndarray:
        found = []
        for file, images in self._read():
            if images.shape[1:] != self.image_shape:
                here, wanted = (" x ".join(map(str, shape)) for shape in (images.shape[1:], self.image_shape))
                raise ValueError(f"{file}: images of {here}, expected {wanted} (height x width x channels)")
            if images.max(initial=0) >= self.levels:
                raise ValueError(f"{file}: a value of {images.max()}, expected less than levels = {self.levels}")
            found.append(images)
        return np.concatenate(found)

    def _read(self) -> Iterator[tuple[DataFile, np.ndarray]]:
        """(file, uint8 [n,H,W,C]) in order."""
        folder = self.path.rstrip("/")
        files = [file for file in find(f"{folder}/*") if file.name.lower().endswith((".png", ".npz"))]
        if not files:
            raise FileNotFoundError(f"{folder} holds no .png and no .npz file")
        for file in files:
            for images in (_arrays if file.name.lower().endswith(".npz") else _png)(file):
                yield file, images


def _png(file: DataFile) -> Iterator[np.ndarray]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file.read()), formats=["PNG"]) as image:
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file}: no PNG that can be read: {error}") from error
    if image.mode not in _CHANNELS:
        raise ValueError(f"{file}: pixels of mode {image.mode}, expected 8 bits each: {', '.join(_CHANNELS)}")
    yield np.asarray(image).reshape(1, image.height, image.width, _CHANNELS[image.mode])


def _arrays(file: DataFile) -> Iterator[np.ndarray]:
    try:
        with np.load(io.BytesIO(file.read())) as archive:
            arrays = dict(archive)
    except (OSError, ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: no NPZ that can be read: {error}") from error
    for name, array in arrays.items():
        if array.dtype != np.uint8 or array.ndim != 4 or not array.size:
            raise ValueError(f"{file}: {name} is {array.dtype} {list(array.shape)}, expected uint8 [N, H, W, C]")
        yield array


class ImageReport(NamedTuple):
    """One row of the start table: "train" or a validation set's name, its source and images."""

    name: str
    source: ImageSource
    images: np.ndarray

    def __str__(self) -> str:
        size, kind = " x ".join(map(str, self.images.shape[1:])), type(self.source).__name__
        what = f"{kind}: {len(self.images):,} images of {size}, {self.source.levels} levels"
        return f"{what}, sha256 {_digest(self.images)[:12]}"


@component
class ImagePipeline(Pipeline):
    """Images in, batches out.

    A batch is a dict: images uint8[B,H,W,C], weights float32[B] (0 = padding).

    Args:
        source: config of the training source, of this module or your own ImageSource.
        validation: named validation sources, each read once in order by an evaluation.
        global_batch_size: B, images per step over all processes and devices.
        seed: decides the order of training images, which is reshuffled each epoch, and which are flipped.
        flip: mirror half of the training images, left to right.
        prefetch: batches that wait ready in the background.
    """

    item, loss_unit, seq_len = "image", "nats per dimension", 1

    def __init__(
        self,
        *,
        source: Config,
        validation: dict[str, Config] = {},  # noqa: B006
        global_batch_size: PositiveInt,
        seed: Seed = 0,
        flip: bool = False,
        prefetch: PositiveInt = 2,
    ):
        self.global_batch_size, self.seed, self.flip, self.prefetch = global_batch_size, seed, flip, prefetch
        self.sources: dict[str, ImageSource] = {"train": source.instantiate()}
        for name, config in validation.items():
            if not re.fullmatch(r"[\w-]+", name) or name == "train":
                label = f"data.validation.{name}"
                raise ValueError(f"{label}: expected a name of letters, digits, _ and -, and not 'train'")
            self.sources[name] = config.instantiate()
        for name, given in self.sources.items():
            if not isinstance(given, ImageSource):
                raise ValueError(f"{_label(name)}: expected an ImageSource, given {type(given).__name__}")
        self.levels = self.sources["train"].levels  # values are 0 to levels - 1
        self.images: dict[str, np.ndarray] = {}  # by source, uint8 [N,H,W,C]; set by setup

    @property
    def validation_names(self) -> list[str]:
        """The validation sets, in the order in which they are configured."""
        return list(self.sources)[1:]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        with located(_label("train")):
            return self.sources["train"].image_shape

    def arrays(self, *, evaluation: bool = False) -> Shapes:
        size = self.global_batch_size
        return {"images": ((size, *self.image_shape), "uint8"), "weights": ((size,), "float32")}

    def setup(
        self, workdir: str | Path, *, is_primary: bool = True, barrier: Callable[[], object] = lambda: None
    ) -> None:
        """Reads all images. Nothing is written, so every process does the same.

        Raises:
            FileNotFoundError, PermissionError, ValueError: data are not usable, from which config path on.
        """
        for name, source in self.sources.items():
            with located(_label(name)):
                images = source.load()
                if source.levels != self.levels or images.shape[1:] != self.image_shape:
                    given, wanted = [*images.shape[1:], source.levels], [*self.image_shape, self.levels]
                    raise ValueError(f"[H, W, C, levels] are {given}, but {wanted} in data.source")
                if not len(images):
                    raise ValueError("no images")
            self.images[name] = images
        self._num_rows = len(self.images["train"])
        if self._num_rows < self.global_batch_size:
            raise ValueError(
                f"data.source: holds {self._num_rows} images, too few for one batch of "
                f"data.global_batch_size={self.global_batch_size}"
            )
        self._order = GlobalOrder([self._num_rows], [1.0], self.seed)
        barrier()

    def fingerprint(self) -> str:
        """sha256 of all that decides the training batches: a run that resumes under another one would see other data.
        The number of processes is no part of it."""
        return digest_of([_FINGERPRINT, _digest(self.images["train"]), self.global_batch_size, self.seed, self.flip])

    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        image = self.images["train"][index]
        if self.flip and hashlib.blake2b(f"{self.seed}/flip/{sequence}".encode()).digest()[0] & 1:
            image = image[:, ::-1]
        return {"images": image, "weights": np.ones((), np.float32)}

    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        if name not in self.validation_names:
            raise ValueError(f"no validation set {name!r}; data.validation has {', '.join(self.validation_names)}")
        images = self.images[name]

        def row(index: int) -> Batch:
            is_image = index < len(images)
            return {"images": images[index if is_image else 0], "weights": np.array(is_image, np.float32)}

        return len(images), row

    def source_report(self) -> list[ImageReport]:
        """What training and each validation set hold: rows for the start table."""
        return [ImageReport(name, self.sources[name], images) for name, images in self.images.items()]


def _label(name: str) -> str:
    return "data.source" if name == "train" else f"data.validation.{name}"


def _digest(images: np.ndarray) -> str:
    return hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()
