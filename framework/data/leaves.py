"""Configured sources, taken apart into those that hold data, and the place of each in the config, for errors.

May import: framework.data.sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from framework.data.sources import Mixture, TextSource, TokenMemmap


@dataclass
class Leaf:
    """One source that is not a mixture."""

    label: str  # its dotted config path: data.source.sources.1
    name: str  # "train", "train.1", or a validation set's name
    weight: float  # its share of the training sequences; 1.0 for a validation set
    source: TextSource | TokenMemmap


def leaves_of(source: object, label: str, name: str, weight: float = 1.0) -> Iterator[Leaf]:
    """The sources in `source`, mixtures (of mixtures) opened up.

    Raises:
        ValueError: something that is no source.
    """
    if isinstance(source, Mixture):
        for i, (child, share) in enumerate(zip(source.sources, source.weights, strict=True)):
            yield from leaves_of(child, f"{label}.sources.{i}", f"{name}.{i}", weight * share)
    elif isinstance(source, TextSource | TokenMemmap):
        yield Leaf(label, name, weight, source)
    else:
        given = type(source).__name__
        raise ValueError(f"{label}: expected a source (TextSource, TokenMemmap or Mixture), given {given}")


def training_text(leaves: Sequence[Leaf], budget: int) -> Iterator[str]:
    """The first documents of each source of text, `budget` bytes in all, shared by weight."""
    texts = [(leaf, leaf.source) for leaf in leaves if isinstance(leaf.source, TextSource)]
    total = sum(leaf.weight for leaf, _ in texts)
    for leaf, source in texts:
        left = budget * leaf.weight / total
        with located(leaf.label):
            for document in source.documents():
                yield document
                left -= len(document.encode("utf-8"))
                if left <= 0:
                    break


@contextlib.contextmanager
def located(label: str) -> Iterator[None]:
    """Puts the config path in front of a data error."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, ValueError) as error:
        if str(error).startswith("data."):  # from further inside, where the place is known better
            raise
        kinds = (FileNotFoundError, PermissionError, IsADirectoryError, ValueError)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        raise kind(f"{label}: {error}") from error
