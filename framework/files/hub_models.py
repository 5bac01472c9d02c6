"""Published models: a local folder, or a Hub repository, from which only the required files are downloaded.

A config stores a repository as hf://ORG/NAME@COMMIT, so that it always means the same files, on any machine.
"""

from __future__ import annotations

from pathlib import Path

from plimsoll.framework.files import hub
from plimsoll.framework.files.hub_names import HubRepo, is_hub_url, parse_model_id, parse_url
from plimsoll.framework.files.text_files import parse_json

# All files of a model that are read, except its weights.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def pin_model(text: str) -> str:
    """Returns the location of a published model as configs store it: the path of a folder, or hf://ORG/NAME@COMMIT.

    Args:
        text: a folder, ORG/NAME, ORG/NAME@REVISION, or a result of this function. A folder takes precedence.

    Raises:
        FileNotFoundError, PermissionError: there is no such folder, and no such model in the Hub or its cache.
        ValueError: the text is not a valid Hub name.
    """
    if is_hub_url(text):
        repo = _model_repo(text)
    else:
        if Path(text).expanduser().exists():
            return text
        parsed = parse_model_id(text)
        if parsed is None:
            return text
        repo = parsed
    try:
        fetched = hub.fetch(repo, SMALL_FILES)
        # Require every file that the commit is known to have: a model without its tokenizer_config.json is a
        # different one.
        known_names = [] if fetched.snapshot.sizes is None else fetched.snapshot.names(SMALL_FILES)
        hub.require(fetched, ["config.json", *known_names])
    except FileNotFoundError as error:
        if is_hub_url(text):
            raise
        raise FileNotFoundError(f"no folder {text}, and {error}") from error
    return fetched.snapshot.repo.url()


def folder(location: str | Path) -> Path:
    """Returns the folder with the small files of a model; `location` is a folder, or hf://ORG/NAME@COMMIT.

    Raises:
        FileNotFoundError, PermissionError: as `pin_model`.
    """
    if not is_hub_url(str(location)):
        return Path(location).expanduser()
    return hub.fetch(_model_repo(str(location)), SMALL_FILES).snapshot.folder


def folder_with_weights(location: str | Path) -> Path:
    """Returns the folder with the weights of a model, which are downloaded if necessary.

    Raises:
        FileNotFoundError, PermissionError: as `pin_model`, or the model has no safetensors.
        ValueError: there is not enough disk space for them.
    """
    if not is_hub_url(str(location)):
        return Path(location).expanduser()
    repo = _model_repo(str(location))
    fetched = hub.fetch(repo, [*SMALL_FILES, INDEX])
    snapshot = fetched.snapshot
    # As in transformers, a single file takes precedence over an index of shards.
    has_single = snapshot.has(WEIGHTS) or (snapshot.sizes is not None and WEIGHTS in snapshot.sizes)
    names = [WEIGHTS]
    if not has_single and snapshot.has(INDEX):
        names = sorted(set(weight_map(snapshot.folder / INDEX).values()))
    fetched = hub.fetch(repo, names)
    hub.require(fetched, names)
    return fetched.snapshot.folder


def has_weights(location: str | Path) -> bool:
    """Returns whether weights of a model are on this machine."""
    return any(folder(location).glob("*.safetensors"))


def first_dtype(location: str) -> str:
    """Returns safetensors' name of the dtype of a repository's first tensor; only a header is downloaded.

    Raises:
        FileNotFoundError: the Hub cannot be reached.
    """
    fetched = hub.fetch(_model_repo(location), SMALL_FILES)
    snapshot = fetched.snapshot
    unreachable_reason = fetched.unreachable_reason or hub.explain_unreachable()
    if not unreachable_reason:
        from huggingface_hub import get_safetensors_metadata

        try:
            metadata = get_safetensors_metadata(snapshot.repo.name, revision=snapshot.repo.revision)
            first_name = min(metadata.weight_map)
            return metadata.files_metadata[metadata.weight_map[first_name]].tensors[first_name].dtype
        # The library's exceptions have no common base class.
        except Exception as error:
            unreachable_reason = f"the header of its weights cannot be read ({type(error).__name__}: {error})"
    reason = hub.advice(snapshot.repo, unreachable_reason)
    raise FileNotFoundError(
        f"{snapshot.repo}: its config.json has no dtype, its weights are not in the cache, and {reason}"
    )


def get_adapter_base(location: str) -> dict[str, str]:
    """Returns the fields of an adapter_config.json that identify the adapter's base model."""
    if not is_hub_url(location):
        return {"base_model_name_or_path": location}
    repo = _model_repo(location)
    return {"base_model_name_or_path": repo.name, "revision": repo.revision}


def describe_source(location: str) -> list[str]:
    """Returns a line with the resolved commit and the location of its files; empty for a folder."""
    if not is_hub_url(location):
        return []
    snapshot = hub.fetch(_model_repo(location), SMALL_FILES).snapshot
    line = f"hub: {snapshot.repo.name} at commit {snapshot.repo.revision[:12]}, in {snapshot.folder}"
    # If the cache has no list of the commit's files, it is unknown whether others are missing.
    unknown_names = snapshot.missing(SMALL_FILES)
    if unknown_names:
        line += f"; assumed absent, because the cache has no file list: {', '.join(unknown_names)}"
    return [line]


def _model_repo(url: str) -> HubRepo:
    repo, path = parse_url(url)
    if repo.kind != "model" or path:
        raise ValueError(f"{url}: expected a model of the Hub, hf://ORG/NAME or hf://ORG/NAME@REVISION")
    return repo


def weight_map(index: Path) -> dict[str, str]:
    """Returns {tensor name: its file} from an index of shards. Raises ValueError if the index is invalid."""
    try:
        files = parse_json(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not an index of shards: {error!r}") from None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index}: not an index of shards: expected weight_map to name a file for each tensor")
    return files
