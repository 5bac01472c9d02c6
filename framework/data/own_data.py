"""--data=PATH: puts somebody's own data into a named config, in the place of the data that it comes with."""

from __future__ import annotations

from collections.abc import Sequence

from framework.config import Config, ConfigError, config_for, target_of
from framework.files.hub_names import is_hub_url

# The validation set of one's own data: metrics are called eval/held_out/loss and so on.
HELD_OUT = "held_out"


def with_data(named: Config, path: str, overridden: Sequence[str]) -> tuple[Config, list[str]]:
    """A copy of a config that is trained on the data at `path` and evaluated on what is held out from it.

    Args:
        named: config of an experiment with text or tokens.
        path: a file, a folder, a glob, an fsspec URL, or hf://datasets/ORG/NAME of the Hub.
        overridden: paths of the config that the command line sets itself.

    Returns:
        (the config, lines that say what was found).

    Raises:
        ConfigError: the config does not train on text, or has no tokenizer for conversations.
        FileNotFoundError, PermissionError, ValueError: the data cannot be read.
    """
    # Imported here: every command line is read by this module's caller, few have data.
    from framework.data.chats import ChatSource
    from framework.data.pipeline import DataPipeline
    from framework.data.pretrained_tokenizer import PretrainedTokenizer
    from framework.data.recognize import recognized
    from framework.data.tokenizers import BPETokenizer, NoTokenizer

    config = named.copy()
    if "data" not in config or target_of(config.data) is not DataPipeline:
        raise ConfigError("--data is for configs that train on text; set this one's config.data.*")
    if path.startswith("hf:") and not is_hub_url(path):
        raise ConfigError(f"--data={path}: a data set of the Hub is --data=hf://datasets/{path.removeprefix('hf:')}")
    try:
        data = recognized(path)
    except (OSError, ValueError) as error:
        raise type(error)(f"--data: {error}") from error
    lines = [data.line]
    tokenizer = target_of(config.data.tokenizer)
    sets_tokenizer = any(name.split(".")[:2] == ["data", "tokenizer"] for name in overridden)
    if target_of(data.source) is ChatSource and tokenizer is not PretrainedTokenizer and not sets_tokenizer:
        raise ConfigError(
            f"--data={path} holds conversations, which need the chat template of a model: "
            "--config=hf:DIR with a directory of published weights (docs/finetune.md)"
        )
    config.data.source = data.source
    config.data.validation = {HELD_OUT: data.held_out}
    if data.has_text and tokenizer is NoTokenizer and not sets_tokenizer:
        vocab_size = config.data.tokenizer.vocab_size
        config.data.tokenizer = config_for(BPETokenizer, vocab_size=vocab_size)
        lines.append(f"tokenizer: byte-level BPE of {vocab_size:,} ids, trained on this text")
    return config, lines
