"""A Hugging Face Hub dataset: which of its files are used for training, and which for evaluation.

The splits come from the dataset card (`configs` in the front matter of README.md), or else from the names of files
and folders (the Hub's documentation, "Data files Configuration").
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from plimsoll.framework.data.file_formats import (
    FORMAT_BY_EXTENSION,
    DataFormat,
    DataListing,
    detect_json_format,
    detect_split,
    get_extension,
    group_by_split,
)
from plimsoll.framework.data.files import find
from plimsoll.framework.files import hub
from plimsoll.framework.files.hub_cache import Snapshot
from plimsoll.framework.files.hub_names import HubRepo, parse_url

# Endings that identify data by themselves: a file's content is inspected only after it is downloaded.
_HUB_FORMATS: dict[str, DataFormat] = {
    **{ending: data_format for ending, data_format in FORMAT_BY_EXTENSION.items() if data_format != "tokens"},
    ".json": "JSON lines",
    ".txt": "text",
    ".text": "text",
}

# {split: globs of its files}
Splits = dict[str, list[str]]


@dataclass(frozen=True)
class CardConfig:
    """One of the subsets (configs) that a card describes."""

    name: str
    is_default: bool
    splits: Splits


@dataclass(frozen=True)
class _HubSplits:
    """Names of the training and evaluation files, and the information that the split is based on."""

    train: list[str]
    validation: list[str]
    split_basis: str


def data_listing(url: str) -> DataListing:
    """Inspects a dataset; only the first training file is downloaded.

    Args:
        url: hf://datasets/ORG/NAME, optionally with @REVISION, and with a path in it: a name from the card's
            `configs`, a folder, a file or a glob. hf://ORG/NAME is read as the same.

    Raises:
        FileNotFoundError, PermissionError: there is no such dataset, or it is gated.
        ValueError: it has no readable data, or several kinds of data to choose from.
    """
    repo, path = parse_url(url)
    fetched = hub.fetch(HubRepo("dataset", repo.name, repo.revision), ["README.md", hub.UNKNOWN_FILE])
    snapshot = fetched.snapshot
    location = snapshot.repo.url(path)
    parts, candidates = _split_files(url, snapshot, path)
    # The kind with the most bytes is used. Sizes are known from the commit's file list, or from the files in the cache.
    bytes_by_format: Counter[DataFormat] = Counter()
    for name in [*parts.train, *parts.validation]:
        size = (snapshot.folder / name).stat().st_size if snapshot.sizes is None else snapshot.sizes[name]
        format_for_name = _HUB_FORMATS.get(get_extension(name))
        if format_for_name is not None:
            bytes_by_format[format_for_name] += size
    if not bytes_by_format:
        endings = ", ".join(sorted({get_extension(name) or name for name in candidates})[:8])
        raise ValueError(f"{location} has no data in a known format ({endings}): expected Parquet, JSON lines or .txt")
    data_format = max(bytes_by_format, key=lambda data_format: bytes_by_format[data_format])
    train = [name for name in parts.train if _HUB_FORMATS.get(get_extension(name)) == data_format]
    validation = [name for name in parts.validation if _HUB_FORMATS.get(get_extension(name)) == data_format]
    if not train:
        raise ValueError(
            f"{location} has no {data_format} files to train on, only some to evaluate: {', '.join(validation[:3])}"
        )
    # A file is reported as left out if neither part uses it.
    left_out = Counter(get_extension(name) or name.rpartition("/")[2] for name in candidates)
    left_out.subtract(get_extension(name) for name in [*train, *validation])
    (first,) = find(snapshot.repo.url(train[0]))
    if get_extension(train[0]) == ".json" and detect_json_format(first) is None:
        raise ValueError(f"{snapshot.repo.url(train[0])} is one JSON value; expected a JSON object on each line")
    if fetched.unreachable_reason:
        location += f" (from the cache only: {fetched.unreachable_reason})"
    return DataListing(
        location=location,
        data_format=data_format,
        first=first,
        train=[snapshot.repo.url(name) for name in train],
        validation=[snapshot.repo.url(name) for name in validation],
        num_train=len(train),
        num_validation=len(validation),
        split_basis=parts.split_basis,
        left_out=+left_out,  # the unary plus drops counts of zero
    )


def _split_files(url: str, snapshot: Snapshot, path: str) -> tuple[_HubSplits, list[str]]:
    """Returns (the parts, the names of all files that were considered for them)."""
    names = []
    for name in snapshot.names(["*"]):
        # Leave out files that are hidden, or that describe the data rather than being data.
        is_hidden = any(component.startswith(".") for component in name.split("/"))
        is_license = name.rpartition("/")[2].upper().startswith("LICENSE")
        if not is_hidden and not is_license and get_extension(name) not in (".md", ".py"):
            names.append(name)
    splits = choose_splits(url, read_card(snapshot), path)
    if splits is not None:
        return _files_from_splits(url, splits, names), names
    candidates = match_globs(names, [path, f"{path}/**"]) if path else names
    if not candidates:
        raise FileNotFoundError(f"{snapshot.repo.url(path)} does not exist: the dataset has {', '.join(names[:8])}")
    data_names = [name for name in candidates if _HUB_FORMATS.get(get_extension(name)) is not None]
    if not data_names:
        endings = sorted({get_extension(name) or name for name in candidates})
        converted = snapshot.repo.at("refs/convert/parquet").url()
        raise ValueError(
            f"{snapshot.repo.url(path)} has no data in a known format ({', '.join(endings[:8])}): expected Parquet, "
            f"JSON lines or .txt; the Hub may have converted it: --data={converted}"
        )
    parts = group_by_split(data_names)
    if parts.train:
        return _HubSplits(parts.train, parts.validation or parts.test, "by their names"), candidates
    if parts.validation or parts.test:
        return _HubSplits(parts.others, parts.validation or parts.test, "by their names"), candidates
    return _HubSplits(parts.others, [], ""), candidates


def _files_from_splits(url: str, splits: Splits, names: list[str]) -> _HubSplits:
    """Returns the parts according to the splits of a card.

    Raises:
        ValueError: several splits, or none, are for training.
    """
    for_training = [split for split in splits if detect_split(split) == "train"]
    if "train" in splits:
        for_training = ["train"]
    if not for_training and len(splits) == 1:
        # A dataset with one split has no parts, whatever the split is called.
        for_training = list(splits)
    if len(for_training) != 1:
        files = "; ".join(f"{split}: {', '.join(patterns)}" for split, patterns in splits.items())
        raise ValueError(
            f"{url} has {len(for_training) or 'no'} splits for training; append a path to the URL, such as a glob. Its "
            f"splits are {files}"
        )
    by_split: dict[str | None, list[str]] = {}
    for split, patterns in splits.items():
        if split not in for_training:
            by_split.setdefault(detect_split(split), []).extend(match_globs(names, patterns))
    train = match_globs(names, splits[for_training[0]])
    if not train:
        raise FileNotFoundError(f"{url}: no file matches {', '.join(splits[for_training[0]])}, which its card lists")
    held_out = by_split.get("validation") or by_split.get("test") or []
    return _HubSplits(train, held_out, "by the splits of its card")


def read_card(snapshot: Snapshot) -> list[CardConfig]:
    """Reads the subsets of a card; empty if there is no card, or it lists no files.

    Raises:
        ValueError: the front matter of README.md does not follow the Hub's format.
    """
    file = snapshot.folder / "README.md"
    if not file.is_file():
        return []
    head = re.match(r"---\s*\n(.*?\n)---\s*(\n|$)", file.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    if head is None:
        return []
    import yaml

    try:
        facts = yaml.safe_load(head[1]) or {}
        configs = []
        for entry in facts.get("configs") or []:
            if not entry.get("data_files") and not entry.get("data_dir"):
                continue
            name = str(entry.get("config_name", "default"))
            folder = str(entry.get("data_dir") or "").strip("/")
            prefix = f"{folder}/" if folder else ""
            data_files = entry.get("data_files") or "**"
            if isinstance(data_files, (str, dict)):
                data_files = [data_files]
            splits: Splits = {}
            for part in data_files:
                # A path without a split belongs to the training split.
                split, paths = ("train", part) if isinstance(part, str) else (str(part["split"]), part["path"])
                patterns = [paths] if isinstance(paths, str) else list(paths)
                splits.setdefault(split, []).extend(prefix + pattern for pattern in patterns)
            configs.append(CardConfig(name, bool(entry.get("default")) or name == "default", splits))
        return configs
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{file}: the front matter of the dataset card cannot be read: {first_line}") from error


def choose_splits(url: str, configs: list[CardConfig], path: str) -> Splits | None:
    """Returns the splits of the subset that `path` names, or of the default one; None to choose files by name.

    Raises:
        ValueError: there are several subsets to choose from.
    """
    for config in configs:
        if config.name == path:
            return config.splits
    if path or not configs:
        return None
    if len(configs) == 1:
        return configs[0].splits
    for config in configs:
        if config.is_default:
            return config.splits
    names = [config.name for config in configs]
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    raise ValueError(
        f"{url} has {len(names)} subsets; choose one, such as {url.rstrip('/')}/{names[0]} (subsets: {shown})"
    )


def match_globs(names: list[str], patterns: list[str]) -> list[str]:
    """Returns the names that match any of the globs, with the Hub's rules: only `**` matches a slash.

    Raises:
        ValueError: a glob uses `**` inside a path component.
    """
    from fsspec.utils import glob_translate

    regexes = [re.compile(glob_translate(pattern.removeprefix("./"))) for pattern in patterns]
    # A file's own name may contain glob characters.
    return [name for name in names if name in patterns or any(regex.fullmatch(name) for regex in regexes)]
