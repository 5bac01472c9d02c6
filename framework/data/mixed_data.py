"""Several --data flags: mixes the data of all paths by weight; each path is evaluated under its own name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plimsoll.framework.config import Config, config_for, get_target
from plimsoll.framework.data.detect_format import DetectedData
from plimsoll.framework.data.file_formats import strip_extensions
from plimsoll.framework.data.order import check_weights
from plimsoll.framework.data.sources import ExampleSource, Mixture
from plimsoll.framework.data.stages import DataStage

# Name of the validation set of a single path: metrics are called eval/held_out/loss and so on.
HELD_OUT = "held_out"


@dataclass(frozen=True)
class MixedData:
    """The user's data, from one path or several, as config nodes.

    Attributes:
        source: config of the training source; a Mixture if there are several paths.
        validation: configs of the evaluation sources, by name.
        stages: configs for `data.stages`; only weights of 0 need one.
        parts: the data of each path.
        lines: lines that describe the data.
    """

    source: Config
    validation: dict[str, Config]
    stages: dict[str, Config]
    parts: tuple[DetectedData, ...]
    lines: list[str]


def parse_weights(text: str, num_paths: int) -> list[float]:
    """Parse --data_weights.

    Args:
        text: numbers, separated by commas.
        num_paths: number of --data flags.

    Raises:
        ValueError: a part is not a number, `check_weights` refuses the weights, or there are more or fewer than paths.
    """
    weights = []
    for part in text.split(","):
        try:
            weights.append(float(part))
        except ValueError:
            raise ValueError(f"expected numbers of at least 0, separated by commas, given {part!r}") from None
    if len(weights) != num_paths:
        raise ValueError(f"expected one weight for each --data, {num_paths} in total, given {len(weights)}")
    check_weights(weights)
    return weights


def mix(paths: Sequence[str], parts: Sequence[DetectedData], weights: Sequence[float]) -> MixedData:
    """Mix the data of several paths.

    Args:
        paths: the paths, all different.
        parts: their data, in the same order.
        weights: weight of each path; one with weight 0 is only evaluated, until a stage changes its weight.

    Raises:
        ValueError: the kinds of data cannot share a batch.
    """
    _check_kinds(paths, parts)
    parts = _unite_classes(parts)
    sources = [part.source for part in parts]
    stages = {}
    if all(weights):
        source = config_for(Mixture, sources=sources, weights=list(weights))
    else:
        # The sources of a Mixture have positive weights; only a stage may leave one out.
        source = config_for(Mixture, sources=sources, weights=[1.0] * len(sources))
        stages = {"0": config_for(DataStage, weights=list(weights))}
    validation = {}
    lines = []
    for name, part, weight in zip(name_paths(paths), parts, weights, strict=True):
        validation[name] = part.held_out
        share = f"{weight / sum(weights):.4g} of the sequences, evaluated as {name}"
        lines.append(f"{part.line}; {share}")
    return MixedData(source, validation, stages, tuple(parts), lines)


def name_paths(paths: Sequence[str]) -> list[str]:
    """Return a different name for each path, for its metrics: the last part of the path, without its extension."""
    candidates = []
    for path in paths:
        words = []
        for part in reversed(re.split(r"[/\\]+", path)):
            word = re.sub(r"[^\w-]+", "_", strip_extensions(part.partition("@")[0])).strip("_")
            if word:
                words.append(word)
        # "train" is the name of the training data itself.
        usable = [word for word in words if word != "train"] or ["data"]
        candidates.append((usable[0], "_".join(reversed(usable[:2]))))
    counts = Counter(short for short, _ in candidates)
    names: list[str] = []
    for short, long in candidates:
        name = short if counts[short] == 1 else long
        number = 2
        unique_name = name
        while unique_name in names or unique_name == "train":
            unique_name = f"{name}_{number}"
            number += 1
        names.append(unique_name)
    return names


def _check_kinds(paths: Sequence[str], parts: Sequence[DetectedData]) -> None:
    """Raise ValueError if the batches of two kinds of data have different arrays."""
    arrays = [_get_row_arrays(part.source) for part in parts]
    for path, part, names in zip(paths, parts, arrays, strict=True):
        # Pairs and single sequences may have the same arrays, but not the same meaning.
        is_same_kind = not names or get_target(part.source) is get_target(parts[0].source)
        if names != arrays[0] or not is_same_kind:
            raise ValueError(
                f"{paths[0]} has {parts[0].kind} and {path} has {part.kind}, which cannot share a batch; train on one "
                "after the other"
            )


def _get_row_arrays(source: Config) -> tuple[str, ...]:
    target = get_target(source)
    if isinstance(target, type) and issubclass(target, ExampleSource):
        return target.row_arrays
    return ()


def _unite_classes(parts: Sequence[DetectedData]) -> list[DetectedData]:
    """Give all sources of labeled sequences the classes of all of them."""
    if parts[0].classes is None:
        return list(parts)
    classes = sorted({name for part in parts for name in part.classes or []})
    united = []
    for part in parts:
        source, held_out = part.source.copy(), part.held_out.copy()
        source.classes = held_out.classes = classes
        united.append(replace(part, source=source, held_out=held_out, classes=classes))
    return united
