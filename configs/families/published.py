"""Shapes of published models by their Hub id, from published.json: what a plan needs of config.json, without the Hub.

A config that is made of one has `shape:ORG/NAME` where others have a directory or a commit of the Hub.

Each entry says where it was read. Only what the source states is there: `rms_norm_eps` or `torch_dtype` may be absent,
and the reader of config.json (`families.family_of(facts)().model(facts)`) then takes transformers' default.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from framework.files import hub_models
from framework.files.hub_cache import cached
from framework.files.hub_names import is_hub_url, model_named

_FILE = Path(__file__).with_name("published.json")
# `parameters_source` of a number that the model's name states, as 135M.
NAME = "name"
_PLACE = "shape:"


@dataclass(frozen=True)
class Source:
    """A file of a public repository.

    Attributes:
        repository: owner/name on GitHub.
        commit: of the version that was read, 40 hexadecimal digits.
        path: of the file, or of the folder that has a file for each model.
        states: what was taken from there, and how it is written there.
    """

    repository: str
    commit: str
    path: str
    states: str


@dataclass(frozen=True)
class PublishedModel:
    """The shape of one model.

    Attributes:
        hub_id: organization/name, as meta-llama/Llama-3.1-8B.
        config: fields of its config.json, under their names and with their values there.
        source: the key of `sources()` of the file that states them.
        entry: the model's name in that file.
        confirmed_by: {key of another source: the model's name there}; the sources agree in all fields that both state.
        tie_source: the key of the source that states `tie_word_embeddings`, where it is another.
        parameters: the published number of parameters, tied ones counted once. None: no source states it.
        parameters_source: the key of the source of that number, or NAME.
    """

    hub_id: str
    config: dict[str, Any]
    source: str
    entry: str
    confirmed_by: dict[str, str]
    tie_source: str | None
    parameters: int | None
    parameters_source: str | None


@cache
def sources() -> dict[str, Source]:
    """Returns {key: the source}."""
    return {key: Source(**fields) for key, fields in _document()["sources"].items()}


@cache
def published_models() -> dict[str, PublishedModel]:
    """Returns {Hub id: the model}, sorted by id."""
    models = {}
    for hub_id, fields in _document()["models"].items():
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


def published_model(hub_id: str) -> PublishedModel:
    """Returns the model of a Hub id, upper and lower case alike.

    Raises:
        ValueError: it is not in the file. The message names the nearest ids.
    """
    by_lower_case = {model.hub_id.lower(): model for model in published_models().values()}
    wanted = hub_id.lower()
    if wanted in by_lower_case:
        return by_lower_case[wanted]
    nearest = difflib.get_close_matches(wanted, by_lower_case, n=3)
    hint = ""
    if nearest:
        hint = "; did you mean " + " or ".join(by_lower_case[name].hub_id for name in nearest) + "?"
    raise ValueError(f"no shape of {hub_id!r} in configs/families/{_FILE.name}, which has {len(by_lower_case)}{hint}")


def place_to_plan(source: str) -> str:
    """Returns the place of a model of which only the shape is needed.

    A folder goes first, then the cache of the Hub, then the table here; what none of them has is asked of the Hub.

    Args:
        source: as `hub_models.pinned` takes it.

    Raises:
        The errors of `hub_models.pinned`; the message names the nearest ids of the table.
    """
    named = None if is_hub_url(source) or Path(source).expanduser().exists() else model_named(source)
    # A revision is of the Hub: the table has one shape of each model.
    if named is None or "@" in source:
        return hub_models.pinned(source)
    snapshot = cached(named)
    if snapshot is not None and snapshot.has("config.json"):
        return hub_models.pinned(source)
    try:
        return _PLACE + published_model(source).hub_id
    except ValueError as no_shape:
        try:
            return hub_models.pinned(source)
        except OSError as error:
            raise type(error)(f"{error}; {no_shape}") from error


def model_at(place: str | Path) -> PublishedModel | None:
    """Returns the model that `shape:ORG/NAME` means; None of any other place."""
    text = str(place)
    return published_model(text.removeprefix(_PLACE)) if text.startswith(_PLACE) else None


def note(place: str) -> list[str]:
    """Returns a line that says where a shape was read; none for any other place."""
    model = model_at(place)
    if model is None:
        return []
    source = sources()[model.source]
    return [
        f"shape of {model.hub_id}: from the table of published models ({source.repository}, {source.path}); "
        "its files were not looked for on the Hub"
    ]


def _document() -> dict[str, Any]:
    return json.loads(_FILE.read_text())
