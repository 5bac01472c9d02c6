"""Shapes of published models by Hub id, from published.json: the part of config.json that a plan needs.

Reading a shape needs no access to the Hub. A config built from one has `shape:ORG/NAME` where others have a directory
or a commit of the Hub.

Each entry names its source and has only what that source states. `rms_norm_eps` or `torch_dtype` may be missing; the
reader of config.json (`families.find_family(facts)().model(facts)`) then uses transformers' default.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from plimsoll.framework.files import hub_models
from plimsoll.framework.files.hub_cache import find_snapshot
from plimsoll.framework.files.hub_names import is_hub_url, parse_model_id

_FILE = Path(__file__).with_name("published.json")
# `parameters_source` of a number that the model's name states, such as 135M.
NAME = "name"
_SHAPE_SCHEME = "shape:"


@dataclass(frozen=True)
class ShapeSource:
    """A file of a public repository.

    Attributes:
        repository: owner/name on GitHub.
        commit: commit of the version that was read, 40 hexadecimal digits.
        path: path of the file, or of the folder with one file per model.
        states: values taken from there, and how they are written there.
    """

    repository: str
    commit: str
    path: str
    states: str


@dataclass(frozen=True)
class PublishedModel:
    """The shape of one model.

    Attributes:
        hub_id: organization/name, such as meta-llama/Llama-3.1-8B.
        config: fields of its config.json, with their original names and values.
        source: key in `load_sources()` of the file that states them.
        entry: the model's name in that file.
        confirmed_by: {key of another source: the model's name there}; the sources agree in all fields that both
            state.
        tie_source: key of the source that states `tie_word_embeddings`, if it is a different one.
        parameters: published number of parameters, counting tied ones once. None: no source states it.
        parameters_source: key of the source of that number, or NAME.
    """

    hub_id: str
    config: dict[str, object]
    source: str
    entry: str
    confirmed_by: dict[str, str]
    tie_source: str | None
    parameters: int | None
    parameters_source: str | None


@cache
def load_sources() -> dict[str, ShapeSource]:
    """Return {key: the source}."""
    return {key: ShapeSource(**fields) for key, fields in _load_document()["sources"].items()}


@cache
def load_published_models() -> dict[str, PublishedModel]:
    """Return {Hub id: the model}, sorted by id."""
    models = {}
    for hub_id, fields in _load_document()["models"].items():
        models[hub_id] = PublishedModel(
            hub_id=hub_id,
            config=fields["config"],
            source=fields["source"],
            entry=fields["entry"],
            confirmed_by=fields.get("confirmed_by", {}),
            tie_source=fields.get("tie_source"),
            parameters=fields.get("parameters"),
            parameters_source=fields.get("parameters_source"),
        )
    return models


def find_published_model(hub_id: str) -> PublishedModel:
    """Return the model of a Hub id, ignoring case.

    Raises:
        ValueError: it is not in the file. The message names the nearest ids.
    """
    by_lower_case = {model.hub_id.lower(): model for model in load_published_models().values()}
    wanted = hub_id.lower()
    if wanted in by_lower_case:
        return by_lower_case[wanted]
    nearest = difflib.get_close_matches(wanted, by_lower_case, n=3)
    hint = ""
    if nearest:
        hint = "; did you mean " + " or ".join(by_lower_case[name].hub_id for name in nearest) + "?"
    raise ValueError(
        f"no shape of {hub_id!r} in framework/families/{_FILE.name}, which has {len(by_lower_case)} models{hint}"
    )


def shape_url(source: str) -> str:
    """Return the location of a model when only its shape is needed.

    Tries a folder first, then the cache of the Hub, then this table, and then the Hub itself.

    Args:
        source: source as accepted by `hub_models.pin_model`.

    Raises:
        OSError, ValueError: as from `hub_models.pin_model`; the message names the nearest ids of the table.
    """
    named = None if is_hub_url(source) or Path(source).expanduser().exists() else parse_model_id(source)
    # A revision exists only on the Hub: the table has one shape for each model.
    if named is None or "@" in source:
        return hub_models.pin_model(source)
    snapshot = find_snapshot(named)
    if snapshot is not None and snapshot.has("config.json"):
        return hub_models.pin_model(source)
    try:
        return _SHAPE_SCHEME + find_published_model(source).hub_id
    except ValueError as no_shape:
        try:
            return hub_models.pin_model(source)
        except OSError as error:
            raise type(error)(f"{error}; {no_shape}") from error


def model_at(location: str | Path) -> PublishedModel | None:
    """Return the model of a `shape:ORG/NAME`; None for any other location."""
    text = str(location)
    return find_published_model(text.removeprefix(_SHAPE_SCHEME)) if text.startswith(_SHAPE_SCHEME) else None


def note(location: str) -> list[str]:
    """Return a line that names the source of a shape; no line for any other location."""
    model = model_at(location)
    if model is None:
        return []
    source = load_sources()[model.source]
    return [
        f"shape of {model.hub_id}: from the table of published models ({source.repository}, {source.path}); "
        "the Hub was not queried"
    ]


def _load_document() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(_FILE.read_text())
