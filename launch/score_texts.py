"""Score texts, conversations or pairs with a reward model or a classifier; writes one JSON line per row.

    plimsoll score --workdir=runs/reward-tiny --texts=pairs.jsonl
    plimsoll score --hf=DIR --texts=texts.jsonl --out=scores.jsonl

A row is {"text": ...}, a conversation, or a pair, {"chosen": ..., "rejected": ...}, with or without a "prompt" field.
A reward model writes "reward", or for a pair "chosen", "rejected" and "margin"; a classifier writes "label" and
"probabilities". If rows are pairs or have a "label", the accuracy goes to stderr.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plimsoll.framework.files.workdir import writing
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.launch import cli, weights

if TYPE_CHECKING:
    from plimsoll.api.loaded import LoadedModel


class ScoreRow(NamedTuple):
    """A row of a file: its location for messages, its sequences (two for a pair), and its label or None."""

    location: str
    contents: list[Any]
    label: Any


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb, in addition to those that name the model."""
    parser.add_argument("--texts", metavar="FILE", required=True, help="rows to score: a JSON Lines or Parquet file")
    parser.add_argument("--out", metavar="FILE", help="write the scores to this file; default: stdout")
    parser.add_argument("--batch_size", type=int, default=8, metavar="B", help="sequences per batch; default 8")


def main(argv: list[str]) -> int:
    """Run `plimsoll score --texts=FILE` with the arguments of that verb; returns 0 once everything is written."""
    parser = weights.parser("score", __doc__)
    add_flags(parser)
    return run(*weights.parse(parser, argv))


def run(args: argparse.Namespace, overrides: cli.Overrides) -> int:
    """Score the rows that the flags name.

    Raises:
        FileNotFoundError, ValueError: the file cannot be read, or the model cannot score texts. The message is one
            line.
    """
    if args.batch_size < 1:
        raise cli.UsageError(f"--batch_size={args.batch_size}: expected at least 1")
    if args.out is not None:
        cli.check_output("out", args.out)
    # Read the rows before JAX starts, so that errors in them are reported immediately.
    rows = list(read_rows(args.texts))
    loaded = weights.load(args, overrides)
    results = score_rows(loaded, rows, args.batch_size)
    with ExitStack() as stack:
        out = sys.stdout
        if args.out is not None:
            stack.enter_context(writing(args.out))
            out = stack.enter_context(Path(args.out).expanduser().open("w", encoding="utf-8"))
        for result in results:
            print(json.dumps(result, ensure_ascii=False), file=out)
    line = accuracy_line(rows, results)
    if line:
        weights.log(line)
    return ExitCode.DONE


def read_rows(path: str) -> Iterator[ScoreRow]:
    """Yield the rows of a file. Raises ValueError with file, row and field if a row has an unknown form."""
    from plimsoll.framework.data.files import find
    from plimsoll.framework.data.row_files import read_file_rows
    from plimsoll.framework.data.scored import get_class_name, parse_content, parse_sequences

    for file in find([path]):
        for place, row in read_file_rows(file):
            try:
                if isinstance(row, dict) and {"chosen", "rejected"} & row.keys():
                    yield ScoreRow(f"{file}, {place}", parse_sequences(row), None)
                    continue
                label = get_class_name(row) if isinstance(row, dict) and "label" in row else None
                yield ScoreRow(f"{file}, {place}", [parse_content(row)], label)
            except ValueError as error:
                raise ValueError(f"{file}, {place}: {error}") from error


def score_rows(loaded: "LoadedModel", rows: list[ScoreRow], batch_size: int = 8) -> list[dict[str, Any]]:
    """Return the result of each row, as the verb writes it.

    Raises:
        ValueError: the model cannot score texts, a classifier is given pairs or a label that is not one of its
            classes, or a row cannot be encoded.
    """
    from plimsoll.framework.inference.sequence_scores import SequenceScorer

    source = loaded.experiment.data.scored_source
    scorer = SequenceScorer(loaded.program, loaded.state, averaged=loaded.averaged, batch_size=batch_size)
    num_labels = loaded.experiment.language_model.score_head.num_labels
    if source is None:
        raise ValueError("data.source is not a source of scored sequences, so it does not define how texts are encoded")
    codec = source.codec(loaded.tokenizer)
    names = source.classes or [str(number) for number in range(num_labels)]
    sequences = []
    for row in rows:
        if num_labels > 1 and row.label is not None and _class_for_label(row.label, names) is None:
            raise ValueError(f"{row.location}: field 'label' is {row.label!r}; expected one of {', '.join(names)}")
        if num_labels > 1 and len(row.contents) > 1:
            raise ValueError(
                f"{row.location}: a classifier of {num_labels} classes cannot score a pair; expected a text"
            )
        for content in row.contents:
            try:
                sequences.append(codec.encode(content))
            except ValueError as error:
                raise ValueError(f"{row.location}: {error}") from error
    num_cut = sum(len(tokens) > scorer.seq_len for tokens in sequences)
    if num_cut:
        weights.log(f"{num_cut} of {len(sequences)} sequences were cut at data.seq_len={scorer.seq_len} tokens")
    scores = []
    with phase("scoring", patience=SHORT) as scoring:
        for score in scorer(sequences):
            scores.append(score)
            scoring.progress(len(scores), len(sequences))
    remaining = iter(scores)
    return [_result([next(remaining) for _ in row.contents], source.classes) for row in rows]


def _result(scores: list[Any], classes: list[str] | None) -> dict[str, Any]:
    """Build the output of a row from its scores, one float32[C] for each of its sequences."""
    import numpy as np

    if len(scores) == 2:
        chosen, rejected = (float(score[0]) for score in scores)
        return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}
    (score,) = scores
    if len(score) == 1:
        return {"reward": float(score[0])}
    # Subtract the maximum, so that no exponential overflows.
    shares = np.exp(score.astype(np.float64) - score.max())
    names = classes or [str(number) for number in range(len(score))]
    probabilities = dict(zip(names, (shares / shares.sum()).tolist(), strict=True))
    return {"label": names[int(score.argmax())], "probabilities": probabilities}


def _class_for_label(label: str, names: list[str]) -> str | None:
    """Return the class name that a label stands for; None if it is not a class."""
    if label in names:
        return label
    # As in training: if no class name is a number, a number is the index of a class.
    has_numbers = any(name.isdecimal() for name in names)
    if label.isdecimal() and not has_numbers and int(label) < len(names):
        return names[int(label)]
    return None


def accuracy_line(rows: list[ScoreRow], results: list[dict[str, Any]]) -> str:
    """Summarize the accuracy on pairs or labels; "" if no row has a known answer."""
    margins = [result["margin"] for result in results if "margin" in result]
    if margins:
        right = sum(margin > 0 for margin in margins)
        mean = sum(margins) / len(margins)
        return f"{len(margins)} pairs: accuracy {right / len(margins):.4f}, margin {mean:.4f}"
    labeled = [(row, result) for row, result in zip(rows, results, strict=True) if row.label is not None]
    labeled = [(row, result) for row, result in labeled if "label" in result]
    if not labeled:
        return ""
    right = 0
    for row, result in labeled:
        names = list(result["probabilities"])
        right += result["label"] == _class_for_label(row.label, names)
    return f"{len(labeled)} labels: accuracy {right / len(labeled):.4f}"
