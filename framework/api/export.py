"""A model as a directory that transformers' from_pretrained loads, or its adapters as one for peft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from framework.api.loaded import Loaded
from framework.config.named import family_module
from framework.data.tokenizers import ByteTokenizer, Tokenizer
from framework.layers.score_head import ScoreHead
from framework.weights.export import export_adapters, export_model

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    architecture: str  # as transformers calls it
    num_bytes: int


def export(loaded: Loaded, to: str, *, adapter: bool, tell: Callable[[str], None]) -> Exported:
    """Writes a model. Everything that can be refused is, before a file is written.

    Args:
        loaded: the model.
        to: a directory that is not there yet.
        adapter: write the LoRA alone, and do not merge it into the weights.
        tell: gets a line about what is left out.

    Raises:
        FileExistsError: the directory is there.
        ValueError: the model is of no family that transformers has, or has no adapters.
    """
    folder = Path(to).expanduser()
    refuse_existing(folder)
    model = loaded.experiment.language_model
    pretrained = loaded.experiment.pretrained
    tokenizer = loaded.experiment.data.tokenizer
    pretrained_facts = None if pretrained is None else pretrained.facts
    facts, family = family_module().of_model(loaded.config.model, pretrained_facts)
    classes = getattr(loaded.experiment.data, "classes", None)
    if isinstance(model.head, ScoreHead) and classes is not None:
        facts = {**facts, "id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    params = loaded.program.weights(loaded.state, averaged=loaded.averaged)
    beside = _tokenizer(loaded)
    if not beside:
        kind = type(tokenizer).__name__
        tell(f"no tokenizer files are written: data.tokenizer is {kind}, which has none")
    if adapter:
        base = "" if pretrained is None else pretrained.path
        export_adapters(to, model, params, family, base, beside=beside)
    else:
        run_facts: dict[str, Any] = {"eos_token_id": tokenizer.eos_id}
        # With a table of positions, the family has its length, under a name of its own.
        if loaded.config.model.embed.max_positions is None:
            run_facts["max_position_embeddings"] = loaded.experiment.data.seq_len
        if pretrained is not None and pretrained.generation:
            generation = _generation(pretrained.generation, tokenizer)
            beside["generation_config.json"] = _json(generation)
        # What the published model says has the last word.
        export_model(to, model, params, family, {**run_facts, **facts}, beside=beside)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Exported(folder, facts["architectures"][0], size)


def refuse_existing(folder: Path) -> None:
    """Raises FileExistsError where the folder is there."""
    if folder.exists():
        raise FileExistsError(f"--to={folder} is there already; choose another, or remove it")


def _tokenizer(loaded: Loaded) -> dict[str, bytes]:
    """{name: content} of the tokenizer's files. Those that transformers needs are made for a tokenizer that was trained
    by a run, or that has no files. Empty for a tokenizer that makes no text."""
    tokenizer = loaded.experiment.data.tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        files = {"tokenizer.json": tokenizer.library_file()}
    elif not tokenizer.has_text:
        files = {}
    else:
        files = {}
        for name in TOKENIZER_FILES:
            path = loaded.folder / name
            if path.is_file():
                files[name] = path.read_bytes()
    # Without this file, transformers does not know which class reads tokenizer.json, nor where
    # texts end.
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eos_token,
        }
        files["tokenizer_config.json"] = _json(tokenizer_config)
    return files


def _generation(published: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The generation_config.json of the directory that the run began with. Texts end where the run's texts ended: with
    another data.tokenizer.eos_token, the published ids would let them run on."""
    end_ids = published.get("eos_token_id")
    # It may be one id or several.
    if not isinstance(end_ids, list):
        end_ids = [end_ids]
    if tokenizer.eos_id is None or tokenizer.eos_id in end_ids:
        return published
    return {**published, "eos_token_id": tokenizer.stop_ids}


def _json(facts: dict[str, Any]) -> bytes:
    """The content of a JSON file."""
    text = json.dumps(facts, indent=2)
    return f"{text}\n".encode()
