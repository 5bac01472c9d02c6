"""The card of a data set of the Hub: the `configs` in the head of its README.md, which say what its splits are."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from framework.files.hub_cache import Snapshot

# {split: globs of its files}
Splits = dict[str, list[str]]


class CardConfig(NamedTuple):
    """One of the subsets that a card describes."""

    name: str
    is_default: bool
    splits: Splits


def read_card(snapshot: Snapshot) -> list[CardConfig]:
    """Reads the subsets of a card; none where there is no card, or one that says nothing of files.

    Raises:
        ValueError: the head of README.md is not as the Hub describes it.
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
        entries = [entry for entry in facts.get("configs") or [] if entry.get("data_files") or entry.get("data_dir")]
        return [_config(entry) for entry in entries]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{file}: the head of the data set's card cannot be read: {first_line}") from error


def choose(url: str, configs: list[CardConfig], path: str) -> Splits | None:
    """Returns the splits of the subset that is named by `path`, or by none; None: files are to be chosen by names.

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
    raise ValueError(f"{url} has {len(names)} subsets: choose one by {url.rstrip('/')}/{names[0]} (there are {shown})")


def matched(names: list[str], patterns: list[str]) -> list[str]:
    """Returns the names that match any of the globs, as the Hub reads them: only `**` matches a slash.

    Raises:
        ValueError: a glob has `**` as a part of a name.
    """
    from fsspec.utils import glob_translate

    regexes = [re.compile(glob_translate(pattern.removeprefix("./"))) for pattern in patterns]
    # A file's own name may hold the letters of a glob.
    return [name for name in names if name in patterns or any(regex.fullmatch(name) for regex in regexes)]


def _config(entry: dict[str, Any]) -> CardConfig:
    name = str(entry.get("config_name", "default"))
    folder = str(entry.get("data_dir") or "").strip("/")
    prefix = f"{folder}/" if folder else ""
    data_files = entry.get("data_files") or "**"
    if isinstance(data_files, (str, dict)):
        data_files = [data_files]
    splits: Splits = {}
    for part in data_files:
        # A path alone is of the split for training.
        split, paths = ("train", part) if isinstance(part, str) else (str(part["split"]), part["path"])
        patterns = [paths] if isinstance(paths, str) else list(paths)
        splits.setdefault(split, []).extend(prefix + pattern for pattern in patterns)
    return CardConfig(name, bool(entry.get("default")) or name == "default", splits)
