"""Images as global batches of uint8 [B,H,W,C], with the same order and the same guarantees as text.

`setup` reads or decodes whole sources, and raises every data error; a training step only picks rows.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import annotated_types
import numpy as np

from plimsoll.framework.config import Config, PositiveInt, Seed, component, get_target
from plimsoll.framework.data.batches import Pipeline, Shapes
from plimsoll.framework.data.files import DataFile, compute_digest, find
from plimsoll.framework.data.order import GlobalOrder
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.sources import assign_split, prefix_errors

Levels = Annotated[int, annotated_types.Interval(ge=2, le=256)]

# Increase this when a change to this file changes the batches of a config: a run then refuses to resume instead of
# continuing with other data.
_FINGERPRINT = 1

# Number of channels of an image by its PIL mode. All of these modes have 8 bits per channel.
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}

# Further errors that a damaged archive raises.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error)


class Images(Protocol):
    """Images uint8 [N,H,W,C], in memory or in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """N, H, W, C."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class ImageSource(abc.ABC):
    """Images of one shape with values 0 to `levels` - 1. The constructor only stores its arguments.

    Attributes:
        levels: number of values that a pixel may have.
        image_shape: (H, W, C); may be a property.
    """

    levels: int
    image_shape: Any

    @abc.abstractmethod
    def load(self) -> np.ndarray:
        """Returns all images as uint8 [N,H,W,C].

        Raises:
            ValueError, FileNotFoundError: a file is not usable. The message names it.
        """

    def open(self, cache: Path, *, write: bool) -> Images:
        """Returns all images; by default, those of `load`.

        Args:
            cache: folder where a source may store decoded images.
            write: whether this process writes there.
        """
        return self.load()


@component
class DigitsSource(ImageSource):
    """The 1,797 handwritten digits that scikit-learn ships in its wheel.

    They have 8 x 8 pixels of 17 levels (UCI, E. Alpaydin and C. Kaynak 1998). About 20% are "validation", by the sha256
    of an image's bytes: equal images are in one part.

    Args:
        split: which part to read; "all" for both.
    """

    levels = 17
    image_shape = (8, 8, 1)

    def __init__(self, *, split: Literal["train", "validation", "all"] = "train"):
        self.split = split

    def load(self) -> np.ndarray:
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        # scikit-learn returns floats [N,H,W] with integer values from 0 to 16.
        images = digits.images.astype(np.uint8)[..., None]
        if self.split == "all":
            return images
        parts = []
        for image in images:
            parts.append(assign_split(image.tobytes().hex(), 0.2))
        return images[np.array(parts) == self.split]


@component
class ImageFolder(ImageSource):
    """The PNG files (8 bits: gray, RGB, RGBA) and NPZ files (each array uint8 [N,H,W,C]) of one folder, by name.

    Args:
        path: a local folder, or its fsspec URL.
        size: [H, W, C] of every image; [] takes the size of the first image, which must then also exist for `plan`.
        levels: number of values; pixels range from 0 to levels - 1.
    """

    def __init__(self, *, path: str, size: list[int] = [], levels: Levels = 256):  # noqa: B006
        if size and (len(size) != 3 or min(size) < 1):
            raise ValueError(f"size: expected [] or [height, width, channels], given {size}")
        self.path = path
        self.size = tuple(size)
        self.levels = levels

    # Cached, because without a `size` this reads the first file.
    @functools.cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C): `size`, or the shape of the first image."""
        shape = self.size
        if not shape:
            _, first_images = next(self._read())
            shape = first_images.shape[1:]
        height, width, channels = shape
        return height, width, channels

    def load(self) -> np.ndarray:
        parts = []
        for file, images in self._read():
            shape = images.shape[1:]
            if shape != self.image_shape:
                expected = f"{_format_shape(self.image_shape)} (height x width x channels)"
                raise ValueError(f"{file}: images of {_format_shape(shape)}, expected {expected}")
            if images.max(initial=0) >= self.levels:
                raise ValueError(f"{file}: a value of {images.max()}, expected less than levels = {self.levels}")
            parts.append(images)
        return np.concatenate(parts)

    def _read(self) -> Iterator[tuple[DataFile, np.ndarray]]:
        """Yields (file, uint8 [n,H,W,C]) in order."""
        folder = self.path.rstrip("/")
        files = []
        for file in find(f"{folder}/*"):
            if file.name.lower().endswith((".png", ".npz")):
                files.append(file)
        if not files:
            raise FileNotFoundError(f"{folder} has no .png and no .npz files")
        for file in files:
            read_images = _read_npz if file.name.lower().endswith(".npz") else _read_png
            for images in read_images(file):
                yield file, images


def _format_shape(shape: tuple[int, ...]) -> str:
    """Formats a shape for messages: 8 x 8 x 1."""
    return " x ".join(map(str, shape))


def _read_png(file: DataFile) -> Iterator[np.ndarray]:
    """Yields the one image of a PNG file as uint8 [1,H,W,C]."""
    from PIL import Image

    try:
        # Only PNG is allowed: PIL would read a file of another format regardless of its name.
        with Image.open(io.BytesIO(file.read()), formats=["PNG"]) as image:
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file}: not a readable PNG: {error}") from error
    if image.mode not in _CHANNELS:
        modes = ", ".join(_CHANNELS)
        raise ValueError(f"{file}: pixels of mode {image.mode}, expected 8 bits each: {modes}")
    # A gray image has no channel axis in PIL.
    pixels = np.asarray(image)
    yield pixels.reshape(1, image.height, image.width, _CHANNELS[image.mode])


def _read_npz(file: DataFile) -> Iterator[np.ndarray]:
    """Yields the arrays of an NPZ file, each uint8 [n,H,W,C]."""
    try:
        with np.load(io.BytesIO(file.read())) as archive:
            arrays = dict(archive)
    # A header may request more memory than there is; zipfile raises RuntimeErrors.
    except (OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, MemoryError, *_ZIP_ERRORS) as error:
        raise ValueError(f"{file}: not a readable NPZ: {error}") from error
    for name, array in arrays.items():
        if array.dtype != np.uint8 or array.ndim != 4 or not array.size:
            raise ValueError(f"{file}: {name} is {array.dtype} {list(array.shape)}, expected uint8 [N, H, W, C]")
        yield array


class ImageReport(NamedTuple):
    """One row of the startup table: "train" or a validation set's name, its source, images and their hash."""

    name: str
    source: ImageSource
    images: Images
    digest: str

    def __str__(self) -> str:
        kind = type(self.source).__name__
        size = _format_shape(self.images.shape[1:])
        count = f"{len(self.images):,} images of {size}, {self.source.levels} levels"
        return f"{kind}: {count}, sha256 {self.digest[:12]}"


@component
class ImagePipeline(Pipeline):
    """Global batches of images.

    A batch is a dict: images uint8[B,H,W,C], weights float32[B] (0 = padding).

    Args:
        source: config of the training source, from this module or your own ImageSource.
        validation: named validation sources; an evaluation reads each one once, in order.
        global_batch_size: B, images per step over all processes and devices.
        seed: seed for the order of the training images, which are reshuffled each epoch, and for flips.
        flip: mirror half of the training images, left to right.
        image_size: height and width that the images of an ImageFiles source are resized to.
        prefetch: number of batches prepared in the background.
        cache_dir: folder for decoded images; None uses the workdir. A shared folder saves work across runs.
    """

    item = "image"
    loss_unit = "nats per dimension"
    # Throughput counts items, and a row is one image.
    seq_len = 1

    def __init__(
        self,
        *,
        source: Config,
        validation: dict[str, Config] = {},  # noqa: B006
        global_batch_size: PositiveInt,
        seed: Seed = 0,
        flip: bool = False,
        image_size: PositiveInt | None = None,
        prefetch: PositiveInt = 2,
        cache_dir: str | None = None,
    ):
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.flip = flip
        self.prefetch = prefetch
        # Training first, then validation sets by name. No validation set may be called "train".
        self.cache_dir = cache_dir
        self.sources: dict[str, ImageSource] = {"train": _build_source("train", source, image_size)}
        for name, config in validation.items():
            if not re.fullmatch(r"[\w-]+", name) or name == "train":
                label = f"data.validation.{name}"
                raise ValueError(f"{label}: expected a name of letters, digits, _ and -, and not 'train'")
            self.sources[name] = _build_source(name, config, image_size)
        for name, configured in self.sources.items():
            if not isinstance(configured, ImageSource):
                kind = type(configured).__name__
                raise ValueError(f"{_label(name)}: expected an ImageSource, given {kind}")
        # Pixels have values 0 to levels - 1.
        self.levels = self.sources["train"].levels
        self.validation_names = list(self.sources)[1:]
        # Images uint8 [N,H,W,C] by source, and their hashes; read by `setup`.
        self.images: dict[str, Images] = {}
        self._digests: dict[str, str] = {}

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        with prefix_errors(_label("train")):
            return self.sources["train"].image_shape

    def arrays(self, *, evaluation: bool = False) -> Shapes:
        batch_size = self.global_batch_size
        return {"images": ((batch_size, *self.image_shape), "uint8"), "weights": ((batch_size,), "float32")}

    def setup(
        self, workdir: str | Path, *, is_primary: bool = True, barrier: Callable[[], object] = lambda: None
    ) -> None:
        """Reads all images, or decodes them into files.

        Args:
            workdir: a local folder for decoded images.
            is_primary: True in the one process that writes.
            barrier: waits for all processes; called once.

        Raises:
            FileNotFoundError, PermissionError, ValueError: the data is not usable. The message begins with the config
                path.
        """
        cache = Path(workdir) / "data" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        if not is_primary:
            # The other processes can open files only after the primary one has written them.
            barrier()
        for name, source in self.sources.items():
            with prefix_errors(_label(name)):
                images = source.open(cache, write=is_primary)
                shape = images.shape[1:]
                if source.levels != self.levels or shape != self.image_shape:
                    source_sizes = [*shape, source.levels]
                    train_sizes = [*self.image_shape, self.levels]
                    raise ValueError(f"[H, W, C, levels] are {source_sizes}, but {train_sizes} in data.source")
                if not len(images):
                    raise ValueError("no images")
            self.images[name] = images
            self._digests[name] = _digest(images)
        self._num_rows = len(self.images["train"])
        if self._num_rows < (1 if self.allows_small_data else self.global_batch_size):
            raise ValueError(
                f"data.source: has {self._num_rows} images, too few for one batch of "
                f"data.global_batch_size={self.global_batch_size}"
            )
        self._order = GlobalOrder([self._num_rows], [1.0], self.seed)
        if is_primary:
            barrier()

    def warnings(self) -> list[str]:
        """See `Pipeline`."""
        return [
            f"{_label(name)}: {warning}"
            for name, images in self.images.items()
            for warning in getattr(images, "warnings", ())
        ]

    def fingerprint(self) -> str:
        """Returns the sha256 of everything that determines the training batches.

        Resuming with another fingerprint would change the data. It does not depend on the number of processes.
        """
        facts = [_FINGERPRINT, self._digests["train"], self.global_batch_size, self.seed, self.flip]
        return compute_digest(facts)

    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        image = self.images["train"][index]
        # A hash of (seed, sequence) needs no random state, so a resumed run flips the same images. Using the sequence
        # rather than the index allows an image to be flipped in one epoch and not in another.
        if self.flip:
            digest = hashlib.blake2b(f"{self.seed}/flip/{sequence}".encode()).digest()
            if digest[0] & 1:
                image = image[:, ::-1]
        return {"images": image, "weights": np.ones((), np.float32)}

    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        if name not in self.validation_names:
            valid_names = ", ".join(self.validation_names)
            raise ValueError(f"no validation set {name!r}; data.validation has {valid_names}")
        images = self.images[name]

        def row(index: int) -> Batch:
            is_image = index < len(images)
            # Padding repeats the first image; its weight of 0 excludes it from every sum.
            image = images[index if is_image else 0]
            return {"images": image, "weights": np.array(is_image, np.float32)}

        return len(images), row

    def source_report(self) -> list[ImageReport]:
        """Returns the rows of the startup table: the contents of the training set and of each validation set."""
        report = []
        for name, images in self.images.items():
            report.append(ImageReport(name, self.sources[name], images, self._digests[name]))
        return report


def _label(name: str) -> str:
    """Returns the config path of a source."""
    return "data.source" if name == "train" else f"data.validation.{name}"


def _build_source(name: str, config: Config, image_size: int | None) -> ImageSource:
    """Builds a source, with the size that its images are resized to if it takes one."""
    if config.takes("image_size"):
        with prefix_errors(_label(name)):
            return config.instantiate(image_size=image_size)
    if image_size is not None:
        raise ValueError(
            f"data.image_size = {image_size}: a {get_target(config).__name__} has images of its own size; expected "
            "--data=FOLDER, or data.source=ImageFiles"
        )
    return config.instantiate()


def _digest(images: Images) -> str:
    if not isinstance(images, np.ndarray):
        # Decoded files have their hash.
        return images.sha256  # pyright: ignore[reportAttributeAccessIssue]
    # Include the shape: the same bytes may be images of another size.
    content = repr(images.shape).encode() + images.tobytes()
    return hashlib.sha256(content).hexdigest()
