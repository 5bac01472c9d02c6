"""--data=PATH: replaces the data of a named config with the user's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from plimsoll.framework.config import Config, ConfigError, config_for, get_target
from plimsoll.framework.files.hub_names import is_hub_url
from plimsoll.framework.terminal.phases import SHORT, phase

if TYPE_CHECKING:
    from plimsoll.framework.data.detect_format import DetectedData
    from plimsoll.framework.data.mixed_data import MixedData

# Maximum answer length, in tokens, when sampling held-out prompts at the end of a preference run.
_SAMPLE_TOKENS = 64
# For a smaller vocabulary, the number of rows in the model is rounded up to a multiple of this.
_MULTIPLE = 64


def with_data(
    named: Config,
    paths: str | Sequence[str],
    overridden: Collection[str],
    *,
    weights: str | None = None,
    image_size: object = None,
) -> tuple[Config, list[str]]:
    """Return a copy of a config that trains on the user's data and evaluates on a held-out part of it.

    If the tokenizer is trained on a small text, its vocabulary and the model's shrink to what the text supports.

    Args:
        named: config of an experiment that trains on text or tokens.
        paths: files, folders, globs, fsspec URLs, or hf://datasets/ORG/NAME on the Hub; several are mixed.
        overridden: paths of the config fields that the command line sets.
        weights: the weights of several paths, as text; None weights all equally.
        image_size: the value that the command line sets data.image_size to; None if it does not.

    Returns:
        (the config, lines that describe the data and the changed settings).

    Raises:
        ConfigError: the config does not train on text, or has no tokenizer for conversations.
        FileNotFoundError, PermissionError, ValueError: the data cannot be read, or cannot be mixed.
    """
    # Imported here because this module's caller handles every command line, and few use --data.
    from plimsoll.framework.data.pipeline import DataPipeline
    from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
    from plimsoll.framework.data.prompts import Prompts

    config = named.copy()
    paths = [paths] if isinstance(paths, str) else list(paths)
    _check_paths(paths)
    data_class = get_target(config.data) if "data" in config else None
    if data_class is Prompts:
        if weights is not None:
            raise ConfigError(f"--data_weights={weights}: prompts have no weights; all --data are read in turn")
        return config, _set_prompts(config, paths)
    if data_class is not None and data_class.__name__ == "ImagePipeline":
        if weights is not None:
            raise ConfigError(f"--data_weights={weights}: images have no weights; they come from one folder")
        return config, _set_images(config, paths, overridden, image_size)
    if data_class is not DataPipeline:
        raise ConfigError("--data works only with configs that train on text or images; set config.data.* instead")
    mixed = _detect_data(config, paths, weights)
    lines = list(mixed.lines)
    classes = mixed.parts[0].classes
    if classes is not None and not {"model", "model.head", "model.head.num_labels"} & set(overridden):
        config.model.head.num_labels = len(classes)
    tokenizer = get_target(config.data.tokenizer)
    sets_tokenizer = any(name.split(".")[:2] == ["data", "tokenizer"] for name in overridden)
    for path, part in zip(paths, mixed.parts, strict=True):
        if part.needs_template and tokenizer is not PretrainedTokenizer and not sets_tokenizer:
            raise ConfigError(
                f"--data={path} contains conversations, which need the chat template of a model; pass "
                "--config=hf:DIR with a directory of published weights (docs/finetune.md)"
            )
    config.data.source = mixed.source
    config.data.validation = mixed.validation
    config.data.stages = mixed.stages
    lines += _choose_objective(config, mixed.parts[0].source, overridden)
    # A tokenizer set on the command line takes precedence.
    if not sets_tokenizer:
        lines += _choose_tokenizer(config, paths, mixed.parts, overridden)
    return config, lines


def _set_prompts(config: Config, paths: Sequence[str]) -> list[str]:
    """Set the prompts of a config, in place; returns lines that describe them."""
    from plimsoll.framework.data.detect_format import detect_prompts
    from plimsoll.framework.data.mixed_data import HELD_OUT

    with _prefix_errors():
        prompts = detect_prompts(paths)
    config.data.source = prompts.source
    config.data.validation = {} if prompts.held_out is None else {HELD_OUT: prompts.held_out}
    return [prompts.line]


def _set_images(config: Config, paths: Sequence[str], overridden: Collection[str], image_size: object) -> list[str]:
    """Set the images of a config, and the shape of its model, in place; returns lines that describe them."""
    from plimsoll.extras.flows.image_files import ImageFiles, detect_channels, list_images
    from plimsoll.framework.data.mixed_data import HELD_OUT

    if len(paths) > 1:
        raise ConfigError(
            f"--data={paths[1]}: images come from one folder; put several folders into one, which is read with its "
            "subfolders"
        )
    (path,) = paths
    with _prefix_errors():
        listing = list_images(path)
        channels = detect_channels(listing.train)
    size = config.model.image_shape[0]
    if image_size is not None:
        try:
            size = int(str(image_size))
        except ValueError:
            # The override itself reports it.
            size = config.model.image_shape[0]
    source = config_for(ImageFiles, path=path, channels=channels)
    config.data.image_size = max(size, 1)
    config.data.validation = {}
    if listing.validation:
        held_out = source.copy()
        source.split, held_out.split = "train", "validation"
        config.data.validation = {HELD_OUT: held_out}
    config.data.source = source
    if not _is_set("model.image_shape", overridden):
        config.model.image_shape = [config.data.image_size, config.data.image_size, channels]
    if not _is_set("model.levels", overridden):
        config.model.levels = 256
    line = f"data: {len(listing.train):,} images from {path}, {len(listing.validation):,} held out"
    line += ", by their names" if listing.by_name else ""
    line += f"; {config.data.image_size} x {config.data.image_size} x {channels} (height x width x channels)"
    if listing.others:
        line += f"; left out: {', '.join(f'{count} {ending}' for ending, count in listing.others.most_common(5))}"
    return [line]


def _check_paths(paths: Sequence[str]) -> None:
    """Raise ConfigError if a path is given twice, or names a data set of the Hub as --config names a model."""
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"--data={path} is given twice; for a larger share of it, set --data_weights")
        if path.startswith("hf:") and not is_hub_url(path):
            raise ConfigError(
                f"--data={path}: for a data set of the Hub, pass --data=hf://datasets/{path.removeprefix('hf:')}"
            )


def _detect_data(config: Config, paths: Sequence[str], weights: str | None) -> MixedData:
    """Return the data at the paths, mixed by weight if there are several."""
    from plimsoll.framework.data.detect_format import detect_format
    from plimsoll.framework.data.mixed_data import HELD_OUT, MixedData, mix, parse_weights

    numbers = [1.0] * len(paths)
    if weights is not None:
        try:
            numbers = parse_weights(weights, len(paths))
        except ValueError as error:
            raise ConfigError(f"--data_weights={weights}: {error}") from None
    # A score head needs preference pairs, or texts with labels.
    has_score_head = config.model.takes("head") and config.model.head.takes("num_labels")
    with _prefix_errors():
        parts = [_detect_scored_data(config, path) if has_score_head else detect_format(path) for path in paths]
        if len(paths) == 1:
            (part,) = parts
            return MixedData(part.source, {HELD_OUT: part.held_out}, {}, (part,), [part.line])
        return mix(paths, parts, numbers)


def _detect_scored_data(config: Config, path: str) -> DetectedData:
    """Return the data at `path` in the form the scoring head needs: preference pairs, or texts with labels.

    A published classifier keeps its classes; otherwise the classes are those of the file.
    """
    from plimsoll.framework.data.detect_format import detect_scored_format

    is_reward = config.model.head.num_labels == 1
    pretrained = config.pretrained if "pretrained" in config else None
    keeps_classes = not is_reward and pretrained is not None and not pretrained.draws_head
    template = config.data.source if config.data.source.takes("append_eos") else None
    return detect_scored_format(path, template, pairs=is_reward, keeps_classes=keeps_classes)


def _choose_objective(config: Config, source: Config, overridden: Collection[str]) -> list[str]:
    """Set the objective for preference pairs or labeled answers on a language model, and the reference model it needs.

    The run ends with sampled answers to held-out prompts. The config and the command line take precedence for all
    three settings; a config that already has an objective is not changed.

    Returns:
        lines that describe the changes.
    """
    from plimsoll.framework.batch_transforms.reference import Reference
    from plimsoll.framework.data.preferences import PairSource, UnpairedSource
    from plimsoll.framework.objectives.kto import KTO
    from plimsoll.framework.objectives.preferences import DPO

    objectives = {PairSource: DPO, UnpairedSource: KTO}
    objective = objectives.get(get_target(source))
    if objective is None or "head" not in config.model or not config.model.head.takes("objective"):
        return []
    if config.model.head.objective is not None:
        return []
    settings: list[str] = []
    if not _is_set("model.head.objective", overridden):
        config.model.head.objective = config_for(objective)
        settings.append(f"model.head.objective={objective.__name__}")
    if (
        config.takes("batch_transform")
        and config.batch_transform is None
        and not _is_set("batch_transform", overridden)
    ):
        config.batch_transform = config_for(Reference)
        settings.append("batch_transform=Reference")
    if not config.trainer.sample_tokens and not _is_set("trainer.sample_tokens", overridden):
        # Without samples, a run on labeled answers would not end with its table of answers.
        config.trainer.sample_tokens = _SAMPLE_TOKENS
        settings.append(f"trainer.sample_tokens={_SAMPLE_TOKENS}")
    return [f"objective: {', '.join(settings)}, because the data compares answers"] if settings else []


def _is_set(path: str, overridden: Collection[str]) -> bool:
    """Return whether the command line sets a field, or an object that contains it.

    A field below it does not count: that is a setting of the object that is inserted here.
    """
    return any(name == path or path.startswith(f"{name}.") for name in overridden)


def _choose_tokenizer(
    config: Config, paths: Sequence[str], parts: Sequence[DetectedData], overridden: Collection[str]
) -> list[str]:
    """Set the tokenizer that matches the config's new data; return lines that describe the change.

    Raises:
        ConfigError: there are both text and tokens, and no tokenizer that made the tokens.
    """
    from plimsoll.framework.data.tokenizers import BPETokenizer, NoTokenizer

    token_paths = [path for path, part in zip(paths, parts, strict=True) if not part.has_text]
    if token_paths:
        token_source = next(part.source for part in parts if not part.has_text)
        lines = _set_tokenizer_path(config, token_source)
        has_tokenizer = config.data.tokenizer.takes("path") and config.data.tokenizer.path is not None
        if len(token_paths) < len(paths) and not has_tokenizer:
            raise ConfigError(
                f"--data={token_paths[0]} has tokens, and other data is text: expected the tokenizer that made the "
                "tokens, as tokenizer.json next to them or in --config.data.tokenizer.path"
            )
        return lines
    if get_target(config.data.tokenizer) is NoTokenizer:
        config.data.tokenizer = config_for(BPETokenizer, vocab_size=config.data.tokenizer.vocab_size)
    if get_target(config.data.tokenizer) is BPETokenizer and config.data.tokenizer.path is None:
        with _prefix_errors():
            return _fit_vocabulary(config, overridden)
    return []


@contextlib.contextmanager
def _prefix_errors() -> Iterator[None]:
    """Prefix error messages with the flag that named the data."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise type(error)(f"--data: {error}") from error


def _set_tokenizer_path(config: Config, source: Config) -> list[str]:
    """Set the tokenizer.json next to the token files, if there is one, in a config whose tokenizer has no file.

    Returns:
        lines that describe the change.
    """
    from plimsoll.framework.data.tokenizers import BPETokenizer

    tokenizer = config.data.tokenizer
    if get_target(tokenizer) is not BPETokenizer or tokenizer.path is not None:
        return []
    with _prefix_errors():
        token_file = source.instantiate().files()[0]
        if not token_file.fs.exists(f"{os.path.dirname(token_file.path)}/tokenizer.json"):
            return []
    tokenizer.path = f"{os.path.dirname(token_file.name)}/tokenizer.json"
    return [f"tokenizer: {tokenizer.path}, found next to the tokens"]


def _fit_vocabulary(config: Config, overridden: Collection[str]) -> list[str]:
    """Reduce the vocabulary of a tokenizer trained on the config's text, and of the model, to what the text supports.

    Returns:
        lines that describe the change.
    """
    from plimsoll.framework.data.sources import flatten_sources
    from plimsoll.framework.data.vocabulary import count_vocabulary, training_text

    tokenizer = config.data.tokenizer
    leaves = list(flatten_sources(config.data.source.instantiate(), "data.source", "train"))
    texts = training_text(leaves, tokenizer.training_bytes)
    wanted = tokenizer.vocab_size
    with phase("counting the text's words", patience=SHORT):
        num_ids = count_vocabulary(texts, wanted, tokenizer.eos_token)
    if num_ids == wanted:
        return [f"tokenizer: byte-level BPE of {wanted:,} ids, trained on this text"]
    tokenizer.vocab_size = num_ids
    line = f"tokenizer: byte-level BPE of {num_ids:,} ids, not {wanted:,}, because this text supports no more"
    if {"model", "model.vocab_size"} & set(overridden):
        return [line]
    # Padded, because the mesh shards the vocabulary, and the number of ids may be prime.
    num_rows = -(-num_ids // _MULTIPLE) * _MULTIPLE
    config.model.vocab_size = min(num_rows, config.model.vocab_size)
    return [f"{line} (model.vocab_size={config.model.vocab_size})"]
