"""Prompts that the model answers itself, from files or generated; their other fields are for the reward function.

A run on prompts has no targets of its own. `framework.batch_transforms.rollouts` samples the answers, which fill the
rest of a row. Each prompt of a training batch occupies `group_size` consecutive rows, so that its answers can be
compared.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plimsoll.framework.config import Config, Fraction, PositiveInt, Seed, component
from plimsoll.framework.data.batches import Pipeline, Shapes
from plimsoll.framework.data.chats import ChatCodec
from plimsoll.framework.data.files import compute_digest, find
from plimsoll.framework.data.order import GlobalOrder
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.row_files import read_file_rows
from plimsoll.framework.data.sources import assign_split, prefix_errors
from plimsoll.framework.data.tokenizers import Tokenizer

# A row of the source: "prompt", and any other fields.
Row = dict[str, Any]
Split = Literal["all", "train", "validation"]

# Increase this when a change to this file changes the batches of a config.
_FINGERPRINT = 1
# All problems are generated before some are chosen: 1000 times 1000 per operator takes about a second.
_LARGEST_NUMBER = 999


class PromptSource(abc.ABC):
    """A source of prompts. The constructor only stores its arguments."""

    @abc.abstractmethod
    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yields (location, row), in order; a row's "prompt" is a text, or a list of messages.

        Raises:
            FileNotFoundError, ValueError: a file is missing, or invalid.
        """


@component
class PromptFiles(PromptSource):
    """Rows of JSON lines or Parquet files with a field "prompt": a text, or messages ({"role", "content"}).

    A row may have "messages" instead; they are the prompt, without an assistant's message at the end. The reward
    function receives each row as a whole.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet, CSV or TSV by file extension.
        split: "all", or one of two disjoint parts; the sha256 of a prompt decides which part it belongs to.
        validation_fraction: approximate fraction of the prompts in "validation".
    """

    def __init__(self, *, paths: list[str], split: Split = "all", validation_fraction: Fraction = 0.05):
        self.paths = paths
        self.split = split
        self.validation_fraction = validation_fraction

    def rows(self) -> Iterator[tuple[str, Row]]:
        for file in find(self.paths):
            for location, row in read_file_rows(file):
                try:
                    row = parse_prompt(row)
                except ValueError as error:
                    raise ValueError(f"{file}, {location}: {error}") from error
                part = assign_split(json.dumps(row["prompt"], sort_keys=True), self.validation_fraction)
                if self.split in ("all", part):
                    yield f"{file}, {location}", row


def parse_prompt(row: object) -> Row:
    """Returns a row with a field "prompt", which comes from "messages" if there is none.

    Raises:
        ValueError: the row has neither.
    """
    if not isinstance(row, dict) or not {"prompt", "messages"} & set(row):
        fields = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f'expected a row with a field "prompt" (or "messages"), given {fields or "none"}')
    if "prompt" in row:
        return row
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'field "messages": expected a list of messages, given {type(messages).__name__}')
    # Rows for supervised fine-tuning end with the answer, which the model is to write itself.
    has_answer = bool(messages) and messages[-1].get("role") == "assistant"
    return {**row, "prompt": messages[:-1] if has_answer else messages}


@component
class Arithmetic(PromptSource):
    """Problems such as {"prompt": "3+4=", "answer": "7"}: all different, in an order determined by the seed.

    Args:
        operators: operators of the problems, some of "+-*".
        largest: largest number in a problem, at most 999; numbers start at 0.
        count: maximum number of problems; None for all.
        seed: seed for the order, and thus for the choice of problems.
        split: "all", or one of two disjoint parts; the sha256 of a problem decides which part it belongs to.
        validation_fraction: approximate fraction of the problems in "validation".
    """

    def __init__(
        self,
        *,
        operators: str = "+",
        largest: PositiveInt = 9,
        count: PositiveInt | None = None,
        seed: Seed = 0,
        split: Split = "all",
        validation_fraction: Fraction = 0.1,
    ):
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f'Arithmetic.operators: expected some of "+-*", given {operators!r}')
        if largest > _LARGEST_NUMBER:
            raise ValueError(f"Arithmetic.largest: expected {_LARGEST_NUMBER} at most, given {largest}")
        self.operators = operators
        self.largest = largest
        self.count = count
        self.seed = seed
        self.split = split
        self.validation_fraction = validation_fraction

    def rows(self) -> Iterator[tuple[str, Row]]:
        numbers = range(self.largest + 1)
        problems = []
        for operator, first, second in itertools.product(self.operators, numbers, numbers):
            prompt = f"{first}{operator}{second}="
            if self.split in ("all", assign_split(prompt, self.validation_fraction)):
                answer = {"+": first + second, "-": first - second, "*": first * second}[operator]
                problems.append({"prompt": prompt, "answer": str(answer)})

        # Sorting by a hash shuffles in the same way on every machine and in every version of Python.
        problems.sort(key=lambda problem: hashlib.sha256(f"{self.seed}/{problem['prompt']}".encode()).digest())
        for number, problem in enumerate(problems[: self.count]):
            yield f"problem {number}", problem


@dataclass(frozen=True)
class PromptReport:
    """One row of the startup table: the contents of a source.

    Attributes:
        name: "train", or a validation set's name.
        kind: class of the source.
        prompts: number of prompts.
        longest: tokens of the longest prompt.
        prompt_limit: maximum number of tokens of a prompt.
    """

    name: str
    kind: str
    prompts: int
    longest: int
    prompt_limit: int

    def __str__(self) -> str:
        longest = f"the longest of {self.longest} tokens (room for {self.prompt_limit})"
        return f"{self.kind}: {self.prompts:,} prompts, {longest}"


@dataclass
class PromptSet:
    """The prompts of one source.

    Attributes:
        label: the source's dotted config path.
        name: "train", or a validation set's name.
        source: the source.
        rows: rows as the source yields them; set by Prompts.setup, like `tokens` and `locations`.
        tokens: tokens of each prompt, int32[n].
        locations: where each row is from, for messages.
    """

    label: str
    name: str
    source: PromptSource
    rows: list[Row] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)


@component
class Prompts(Pipeline):
    """Global batches of prompts.

    A batch is a dict: prompts int32[B,S], which start in column 0, lengths int32[B] (0 = no prompt), and sources
    int32[B] and indices int32[B], which identify the source row (see `row`).

    In training, rows g * group_size to (g + 1) * group_size - 1 have the same prompt. In an evaluation each prompt
    occurs once. All prompts are in memory.

    Args:
        source: config of PromptFiles, Arithmetic, or your own PromptSource.
        validation: named sources of held-out prompts.
        tokenizer: config of ByteTokenizer, BPETokenizer (with a `path`) or PretrainedTokenizer. Prompts that are
            messages need a PretrainedTokenizer, which applies its chat template.
        seq_len: S, tokens of a prompt and its answer, without the last one, which is only a target.
        answer_tokens: maximum tokens of an answer, including the token that ends it; longer answers are truncated.
            The prompt may use the rest of S, and one token more.
        group_size: answers to each prompt of a training batch.
        global_batch_size: B, answers per step over all devices; a multiple of group_size.
        seed: seed for the order of the prompts, which are reshuffled each epoch.
        template_variables: variables passed to the chat template, such as {"enable_thinking": false}.
        prefetch: number of batches prepared in the background.
    """

    item = "token"
    loss_unit = "advantage per token"

    def __init__(
        self,
        *,
        source: Config,
        validation: dict[str, Config] = {},  # noqa: B006
        tokenizer: Config,
        seq_len: PositiveInt,
        answer_tokens: PositiveInt,
        group_size: PositiveInt = 8,
        global_batch_size: PositiveInt,
        seed: Seed = 0,
        template_variables: dict[str, object] = {},  # noqa: B006
        prefetch: PositiveInt = 2,
    ):
        if group_size < 2:
            raise ValueError(
                f"data.group_size: expected at least 2, given {group_size}: each answer is compared with the others"
            )
        if global_batch_size % group_size:
            raise ValueError(
                f"data.group_size = {group_size} does not divide data.global_batch_size = {global_batch_size}"
            )
        if answer_tokens > seq_len:
            raise ValueError(
                f"data.answer_tokens = {answer_tokens} leaves no room for a prompt in data.seq_len = {seq_len}"
            )
        self.seq_len = seq_len
        self.answer_tokens = answer_tokens
        # Maximum number of tokens of a prompt.
        self.prompt_tokens = seq_len + 1 - answer_tokens
        self.group_size = group_size
        self.global_batch_size = global_batch_size
        self.batch_multiple = group_size
        self.seed = seed
        self.template_variables = template_variables
        self.prefetch = prefetch
        self.tokenizer: Tokenizer = tokenizer.instantiate()
        # The number of a set in `sources` is its index here.
        self.validation_names = list(validation)
        self.sets: list[PromptSet] = []
        for name, config in [("train", source), *validation.items()]:
            label = f"data.validation.{name}" if self.sets else "data.source"
            prompt_source = config.instantiate()
            if not isinstance(prompt_source, PromptSource):
                kind = type(prompt_source).__name__
                raise ValueError(f"{label}: expected a PromptSource (PromptFiles, Arithmetic), given {kind}")
            self.sets.append(PromptSet(label, name, prompt_source))
        self._codec: ChatCodec | None = None
        # True once `setup` is done.
        self.is_ready = False

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; available after `setup`."""
        turn_ends = [] if self._codec is None else self._codec.turn_end_ids()
        return tuple(sorted({*self.tokenizer.stop_ids, *turn_ends}))

    @property
    def end_id(self) -> int:
        """The token that ends an answer which is given to the model; available after `setup`."""
        turn_ends = [] if self._codec is None else self._codec.turn_end_ids()
        return [*turn_ends, *self.tokenizer.stop_ids][0]

    def setup(
        self, workdir: str | Path, *, is_primary: bool = True, barrier: Callable[[], object] = lambda: None
    ) -> None:
        """Reads and tokenizes all prompts.

        Args:
            workdir: a local folder; the tokenizer may be stored in it.
            is_primary: True in the one process that writes.
            barrier: waits for all processes; called once.

        Raises:
            FileNotFoundError, ValueError: a file is missing, a row has no prompt, or it is too long. The message
                begins with the config path, and names the row.
        """
        folder = Path(workdir)
        if is_primary:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            # The other processes can read files only after the primary one has written them.
            barrier()
        with prefix_errors("data.tokenizer"):
            self.tokenizer.prepare(folder, None, write=is_primary)
            if not self.tokenizer.has_text:
                raise ValueError(f"expected a tokenizer with text, given {type(self.tokenizer).__name__}")
            if not self.tokenizer.stop_ids:
                raise ValueError("expected a tokenizer with an end token, because answers end with it")
        if is_primary:
            barrier()
        for prompts in self.sets:
            with prefix_errors(prompts.label):
                self._read(prompts)
        num_prompts = len(self.sets[0].rows)
        groups = self.global_batch_size // self.group_size
        if num_prompts < (1 if self.allows_small_data else groups):
            raise ValueError(
                f"data.source: has {num_prompts} prompts, too few for the {groups} of a batch "
                f"(data.global_batch_size = {self.global_batch_size}, data.group_size = {self.group_size})"
            )
        self._num_rows = num_prompts * self.group_size
        # The order of prompts, not of rows: see `training_row`.
        self._prompt_order = GlobalOrder([num_prompts], [1.0], self.seed)
        self._order = _IdentityOrder()
        self.is_ready = True

    def _read(self, prompts: PromptSet) -> None:
        """Reads the rows of a source, and tokenizes their prompts."""
        prompts.rows, prompts.tokens, prompts.locations = [], [], []
        for location, row in prompts.source.rows():
            try:
                tokens = self._encode_prompt(row["prompt"])
            except ValueError as error:
                raise ValueError(f"{location}: {error}") from error
            if len(tokens) > self.prompt_tokens:
                raise ValueError(
                    f"{location}: a prompt of {len(tokens)} tokens is too long; data.seq_len = {self.seq_len} and "
                    f"data.answer_tokens = {self.answer_tokens} leave room for {self.prompt_tokens}"
                )
            prompts.rows.append(row)
            prompts.locations.append(location)
            prompts.tokens.append(np.asarray(tokens, np.int32))
        if not prompts.rows:
            raise ValueError("has no prompts")

    def _encode_prompt(self, prompt: object) -> list[int]:
        """Returns the tokens of a prompt. Raises ValueError if it is neither text nor messages, or has no template."""
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode_prompt(prompt)
            if not tokens:
                raise ValueError("the prompt has no tokens")
            return tokens
        if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
            raise ValueError(f'field "prompt": expected text or a list of messages, given {type(prompt).__name__}')
        if self._codec is None:
            if not isinstance(self.tokenizer, PretrainedTokenizer) or self.tokenizer.chat_template is None:
                raise ValueError(
                    f'field "prompt" is a list of messages, which needs a PretrainedTokenizer with a chat template; '
                    f"data.tokenizer is a {type(self.tokenizer).__name__}"
                )
            self._codec = ChatCodec(self.tokenizer, self.template_variables)
        return self._codec.encode_question(prompt)

    def fingerprint(self) -> str:
        """Returns the sha256 of everything that determines the training batches, including fields for the reward."""
        train = self.sets[0]
        prompts = [[tokens.tolist(), row] for tokens, row in zip(train.tokens, train.rows, strict=True)]
        # Some values in Parquet files, such as dates, are not JSON.
        digest = hashlib.sha256(json.dumps(prompts, sort_keys=True, default=str).encode()).hexdigest()
        facts = [
            _FINGERPRINT,
            digest,
            self.seq_len,
            self.answer_tokens,
            self.group_size,
            self.global_batch_size,
            self.seed,
        ]
        return compute_digest(facts)

    def arrays(self, *, evaluation: bool = False) -> Shapes:
        """Returns the arrays of a batch, which are the same in training and evaluation."""
        batch = self.global_batch_size
        shapes: Shapes = {"prompts": ((batch, self.seq_len), "int32")}
        for name in ("lengths", "sources", "indices"):
            shapes[name] = ((batch,), "int32")
        return shapes

    def sequence_arrays(self) -> Shapes:
        """Returns the arrays of prompts with their answers."""
        shape = (self.global_batch_size, self.seq_len)
        shapes: Shapes = dict.fromkeys(("tokens", "targets", "positions", "segments"), (shape, "int32"))
        return {**shapes, "weights": (shape, "float32")}

    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        """Returns the prompt of the group that row `sequence` of the run belongs to."""
        _, prompt_index = self._prompt_order.locate(sequence // self.group_size)
        return self._array_row(0, prompt_index)

    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        """See `Pipeline`. Rows beyond the end of a set have length 0."""
        if name not in self.validation_names:
            raise ValueError(f"no validation set {name!r}; data.validation has {', '.join(self.validation_names)}")
        number = 1 + self.validation_names.index(name)
        return len(self.sets[number].rows), lambda index: self._array_row(number, index)

    def _array_row(self, number: int, index: int) -> Batch:
        """Returns the arrays of prompt `index` of set `number`, without a batch axis."""
        prompts = self.sets[number]
        tokens = prompts.tokens[index] if index < len(prompts.tokens) else np.zeros(0, np.int32)
        prompt_S = np.zeros(self.seq_len, np.int32)
        prompt_S[: len(tokens)] = tokens
        return {
            "prompts": prompt_S,
            "lengths": np.asarray(len(tokens), np.int32),
            "sources": np.asarray(number, np.int32),
            "indices": np.asarray(index, np.int32),
        }

    def row(self, source: int, index: int) -> Row:
        """Returns the row of a prompt, from its `sources` and `indices` entries in a batch."""
        return self.sets[source].rows[index]

    def source_report(self) -> list[PromptReport]:
        """Returns the rows of the startup table."""
        report = []
        for prompts in self.sets:
            longest = max(map(len, prompts.tokens))
            kind = type(prompts.source).__name__
            report.append(PromptReport(prompts.name, kind, len(prompts.rows), longest, self.prompt_tokens))
        return report


class _IdentityOrder(GlobalOrder):
    """An order in which sequence g of the run is row g of the only source: `Prompts.training_row` finds its prompt."""

    def __init__(self) -> None:
        super().__init__([1], [1.0], 0)

    def locate(self, sequence: int) -> tuple[int, int]:
        return 0, sequence


def prompt_text(prompt: Any) -> str:
    """Returns the text of a prompt for display and reward functions: its text, or the content of its last message."""
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1].get("content", ""))
