"""The card of a Hub dataset: the `configs` in the front matter of its README.md, which define its splits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from plimsoll.framework.files.hub_cache import Snapshot

# {split: globs of its files}
Splits = dict[str, list[str]]


@dataclass(frozen=True)
class CardConfig:
    """One of the subsets (configs) that a card describes."""

    name: str
    is_default: bool
    splits: Splits


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
        entries = [entry for entry in facts.get("configs") or [] if entry.get("data_files") or entry.get("data_dir")]
        return [_config(entry) for entry in entries]
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


def _config(entry: dict[str, Any]) -> CardConfig:
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
    return CardConfig(name, bool(entry.get("default")) or name == "default", splits)
