"""Models by the names that other frameworks give them: ids on the Hub whose shapes are in our table, and copies."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError, ForeignModel, ModelShape

_FILE = Path(__file__).with_name("model_names.json")


@functools.cache
def load_names() -> dict[str, Any]:
    """Return the tables of names; their sources are in the file."""
    return json.loads(_FILE.read_text())


def find_hub_id(name: str) -> str:
    """Return the id whose shape a model has: of a known copy, that of its original; otherwise the name itself.

    Args:
        name: id on the Hub, such as NousResearch/Meta-Llama-3-8B, or a folder.
    """
    copies = {copy.lower(): original for copy, original in load_names()["copies"].items()}
    if name.lower() in copies:
        return copies[name.lower()]
    owner, _, model = name.rpartition("/")
    # These accounts copy models under their original names.
    if owner.lower() in ("unsloth", "nousresearch", "axolotl-ai-co", "huggyllama"):
        model = re.sub(r"-(unsloth-)?bnb-4bit$", "", model)
        by_name = _ids_by_model_name()
        if model.lower() in by_name:
            return by_name[model.lower()]
    return name


def find_model(name: str, source: str) -> ForeignModel:
    """Return the model of an id on the Hub, or of a folder with a config.json.

    Args:
        name: the id, or the folder.
        source: name of the file that names it, for messages.

    Raises:
        ForeignConfigError: it has no shape in our tables, in a folder, or in the cache of the Hub.
    """
    if (Path(name).expanduser() / "config.json").is_file():
        return ForeignModel(name, hub_id=name)
    original = find_hub_id(name)
    shapes = {key.lower(): shape for key, shape in load_names()["shapes"].items()}
    if original.lower() in shapes:
        return ForeignModel(name, shape=ModelShape(**shapes[original.lower()]))
    if original.lower() in _published():
        return ForeignModel(name, hub_id=_published()[original.lower()].hub_id)
    # Imported here, because it is needed only for models that are in no table.
    from plimsoll.framework.files.hub_cache import find_snapshot
    from plimsoll.framework.files.hub_names import parse_model_id

    try:
        model_id = parse_model_id(original)
    except ValueError:
        # A local folder that is not here may have a name that no model of the Hub can have.
        model_id = None
    snapshot = None if model_id is None else find_snapshot(model_id)
    if snapshot is not None and snapshot.has("config.json"):
        return ForeignModel(name, hub_id=original)
    raise ForeignConfigError(
        f"{source}: the shape of the model {name!r} is not in the tables of published models, and no such folder has a "
        "config.json; download its config.json and pass the folder as the model"
    )


def get_vocab_size(hub_id: str) -> int | None:
    """Return the size of the vocabulary of a published model; None if it is not in our table."""
    published = _published().get(hub_id.lower())
    size = None if published is None else published.config.get("vocab_size")
    return size if isinstance(size, int) else None


def get_width(model: ForeignModel) -> int | None:
    """Return the width of a model's residual stream; None if our tables do not have it."""
    if model.shape is not None:
        return model.shape.dim
    published = _published().get((model.hub_id or "").lower())
    if published is None:
        return None
    width = published.config.get("hidden_size", published.config.get("n_embd"))
    return width if isinstance(width, int) else None


def find_flavor(framework: str, family: str, flavor: str) -> tuple[str | None, ModelShape | None]:
    """Return (id on the Hub, or None; shape, or None) of a model of another framework; (None, None) if unknown.

    Args:
        framework: key of the table: torchtitan or maxtext.
        family: name of the model, such as llama3; "" if the framework has none.
        flavor: name of its size.
    """
    entry = load_names()[framework].get(f"{family} {flavor}".strip())
    if entry is None:
        return None, None
    if isinstance(entry, str):
        return entry, None
    return None, ModelShape(**entry)


def list_flavors(framework: str) -> list[str]:
    """Return the names in a framework's table."""
    return list(load_names()[framework])


def _published() -> dict[str, Any]:
    # Imported here, because the package imports JAX.
    from plimsoll.framework.families.published import load_published_models

    return {hub_id.lower(): model for hub_id, model in load_published_models().items()}


@functools.cache
def _ids_by_model_name() -> dict[str, str]:
    """Return {the part of an id after the owner, in lower case: id}."""
    return {model.hub_id.rpartition("/")[2].lower(): model.hub_id for model in _published().values()}
