"""Data of reward models and classifiers: JSON lines or Parquet with labeled texts or conversations, or with pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Literal

from plimsoll.framework.config import Fraction, component
from plimsoll.framework.data.chats import FORMATS, parse_conversation
from plimsoll.framework.data.files import DataFile, find
from plimsoll.framework.data.preference_formats import parse_pair
from plimsoll.framework.data.row_files import read_file_rows, text_field
from plimsoll.framework.data.scored_sequences import Content, ScoredRow, SequenceSource
from plimsoll.framework.data.sources import assign_split


@component
class LabeledSource(SequenceSource):
    """Texts or conversations with the name or the number of a class.

    A row is {"text": ..., "label": ...}, or a conversation in one of ChatSource's formats with an additional "label";
    messages need a PretrainedTokenizer.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet, CSV or TSV by file extension.
        classes: names of the classes, in the order of their numbers. A label is one of the names, or a number.
        split: "all", or one of two disjoint parts; the sha256 of a row decides which part it belongs to; for a pair
            with a prompt, the sha256 of the prompt.
        validation_fraction: approximate fraction of the rows in "validation".
        append_eos, pad_token_id, template_variables: see SequenceSource.
    """

    digest_name = "LabelledSource"

    row_arrays = ("ends", "labels")

    def __init__(
        self,
        *,
        paths: list[str],
        classes: list[str],
        split: Literal["all", "train", "validation"] = "all",
        validation_fraction: Fraction = 0.05,
        append_eos: bool = False,
        pad_token_id: int | None = None,
        template_variables: dict[str, object] = {},  # noqa: B006
    ):
        if len(set(classes)) != len(classes):
            raise ValueError(f"classes = {classes}: expected different names")
        self.paths = paths
        self.classes: list[str] = classes  # pyright: ignore[reportIncompatibleVariableOverride]
        self.split = split
        self.validation_fraction = validation_fraction
        self.append_eos = append_eos
        self.pad_token_id = pad_token_id
        self.template_variables = template_variables

    def read_scored_rows(self, file: DataFile) -> Iterator[ScoredRow]:
        """See SequenceSource.read_scored_rows."""
        for location, row in read_file_rows(file):
            try:
                content = parse_content(row)
                label = get_class_index(row, self.classes)
                part = assign_split(json.dumps([content, label]), self.validation_fraction)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, {location}: {error}") from error
            if self.split in ("all", part):
                yield ScoredRow(f"{file}, {location}", [content], label)


@component
class RankedSource(SequenceSource):
    """Pairs of a preferred and a rejected sequence, for a reward model.

    A row has "chosen" and "rejected", in the formats of PairSource. Messages need a PretrainedTokenizer.

    Args:
        paths, split, validation_fraction, pad_token_id, template_variables: as for LabeledSource.
        append_eos: append the token that ends texts to each text, as TRL's RewardTrainer does.
    """

    num_sequences = 2
    row_arrays = ("ends",)

    def __init__(
        self,
        *,
        paths: list[str],
        split: Literal["all", "train", "validation"] = "all",
        validation_fraction: Fraction = 0.05,
        append_eos: bool = True,
        pad_token_id: int | None = None,
        template_variables: dict[str, object] = {},  # noqa: B006
    ):
        self.paths = paths
        self.split = split
        self.validation_fraction = validation_fraction
        self.append_eos = append_eos
        self.pad_token_id = pad_token_id
        self.template_variables = template_variables

    def read_scored_rows(self, file: DataFile) -> Iterator[ScoredRow]:
        """See SequenceSource.read_scored_rows."""
        for location, row in read_file_rows(file):
            try:
                pair = parse_sequences(row)
                # Pairs with the same prompt stay in one part: training answers would leak information about held-out
                # ones.
                prompt = parse_pair(row).prompt
                part = assign_split(json.dumps(prompt or pair), self.validation_fraction)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, {location}: {error}") from error
            if self.split in ("all", part):
                yield ScoredRow(f"{file}, {location}", pair)


def parse_content(row: object) -> Content:
    """Returns the text or the conversation of a row.

    Raises:
        ValueError: it has neither. The message names the field.
    """
    if isinstance(row, dict) and "text" in row:
        text = text_field(row, "text")
        if not text:
            raise ValueError("field 'text' is empty; expected text")
        return text
    return parse_conversation(row, formats=f"text, {FORMATS}")


def get_class_name(row: object) -> str:
    """Returns the label of a row as a class name: for a number, its digits.

    Raises:
        ValueError: there is no label, or it is neither a text nor a whole number.
    """
    if not isinstance(row, dict) or "label" not in row:
        given = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"no field 'label': a row of a classifier has text (or messages) and label, given {given}")
    label = row["label"]
    # In Python, a bool is an int.
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise ValueError(f"field 'label' is {label!r}; expected the name of a class or its number")
    return str(label)


def get_class_index(row: object, classes: list[str]) -> int:
    """Returns the number of a row's class.

    Raises:
        ValueError: as from `get_class_name`, or the label is not one of the classes.
    """
    name = get_class_name(row)
    if name in classes:
        return classes.index(name)
    assert isinstance(row, dict)
    label = row["label"]
    # If classes have names, a number is a class index.
    if isinstance(label, int) and 0 <= label < len(classes) and not any(known.isdecimal() for known in classes):
        return label
    raise ValueError(f"field 'label' is {label!r}; expected one of {', '.join(classes)}")


def collect_class_names(paths: Iterable[str]) -> list[str]:
    """Returns the class names in the user's files, sorted; whole numbers in numerical order.

    Raises:
        ValueError: a row has no label, or all rows have the same one. The message names the file and row.
    """
    names: set[str] = set()
    for file in find(list(paths)):
        for location, row in read_file_rows(file):
            try:
                names.add(get_class_name(row))
            except ValueError as error:
                raise ValueError(f"{file}, {location}: {error}") from error
    if len(names) < 2:
        found = f"field 'label' is {', '.join(names)} everywhere" if names else "there are no rows"
        raise ValueError(f"{found}; expected two classes or more")
    return sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))


def parse_sequences(row: object) -> list[Content]:
    """Returns the chosen and the rejected sequence of a row, each preceded by the prompt.

    The formats are those of `framework.data.preference_formats`.

    Raises:
        ValueError: a field is missing, is neither text nor messages, or the two are the same. The message names it.
    """
    pair = parse_pair(row)
    if pair.problem is not None:
        raise ValueError(f"{pair.problem}; expected a chosen and a rejected sequence that differ")
    sequences: list[Content] = []
    for _, answer in pair.answers:
        if isinstance(answer, str) and isinstance(pair.prompt, str):
            sequences.append(pair.prompt + answer)
        else:
            assert isinstance(answer, list)
            assert isinstance(pair.prompt, list)
            sequences.append([*pair.prompt, *answer])
    return sequences
