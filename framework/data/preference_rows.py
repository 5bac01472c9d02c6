"""Rows of labeled answers, in the layout that preference losses read.

A row holds pairs of sequences, masked from each other: odd segments are answers, and the even segment after each is
the sequence it is compared with: a pair's rejected answer, or a mismatched one. `ends` f32[S] is 1 in the last column
of each sequence that counts; `labels` f32[S] is 1 in all columns of a desirable answer, and -1 in those of an
undesirable one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll.framework.data.packing import Batch, Examples
from plimsoll.framework.data.preference_codec import get_label_marker
from plimsoll.framework.data.preference_formats import ANSWER_LABELS
from plimsoll.framework.data.token_files import TokenStream

# Warn if a larger fraction of examples than this has truncated answers.
_MANY_CUT = 0.1


@dataclass(frozen=True)
class _Answers:
    """The answers of a stream, in order; all arrays are int64[N].

    Attributes:
        documents: number of the document that each answer belongs to.
        label_indices: index of its label in ANSWER_LABELS.
        starts: index of the first token of its prompt.
        prompt_lens: number of tokens in its prompt.
        answer_lens: number of tokens in the answer, up to its last target; 0 if there is no target.
        num_documents: number of documents in the stream, including those without answers.
    """

    documents: np.ndarray
    label_indices: np.ndarray
    starts: np.ndarray
    prompt_lens: np.ndarray
    answer_lens: np.ndarray
    num_documents: int

    def at(self, numbers: np.ndarray) -> _Answers:
        """Returns a subset of the answers."""
        return _Answers(
            documents=self.documents[numbers],
            label_indices=self.label_indices[numbers],
            starts=self.starts[numbers],
            prompt_lens=self.prompt_lens[numbers],
            answer_lens=self.answer_lens[numbers],
            num_documents=self.num_documents,
        )


def _find_answers(values: np.ndarray, separator: int) -> _Answers:
    """Finds the answers in the values of a stream, as written by PreferenceCodec."""
    marks = np.flatnonzero(values >= separator)
    ends = np.append(marks[1:], len(values))
    documents = np.cumsum(values[marks] == separator) - 1
    opens_answer = values[marks] > separator
    starts = marks[opens_answer] + 1
    stops = ends[opens_answer]
    targets = np.flatnonzero((values & 1 == 1) & (values < separator))
    first = np.searchsorted(targets, starts)
    last = np.searchsorted(targets, stops) - 1
    has_target = last >= first
    # Padded after the last target, so that these indices are valid even if a sequence has none.
    targets = np.append(targets, 0)
    # Nothing predicts the first token of a sequence, so it belongs to the prompt.
    answer_starts = np.where(has_target, np.maximum(targets[first], starts + 1), stops)
    answer_stops = np.where(has_target, np.maximum(targets[last] + 1, answer_starts), stops)
    return _Answers(
        documents=documents[opens_answer],
        label_indices=values[marks][opens_answer] - get_label_marker(ANSWER_LABELS[0], separator),
        starts=starts,
        prompt_lens=answer_starts - starts,
        answer_lens=answer_stops - answer_starts,
        num_documents=int(np.sum(values[marks] == separator)),
    )


@dataclass(frozen=True)
class _Sequences:
    """One sequence of each example: a prompt, and an answer that may belong to another prompt; all are int64[N].

    Attributes:
        prompt_starts: index of the prompt's first token.
        prompt_lens: number of tokens in the prompt.
        answer_starts: index of the answer's first token.
        answer_lens: number of tokens in the answer.
    """

    prompt_starts: np.ndarray
    prompt_lens: np.ndarray
    answer_starts: np.ndarray
    answer_lens: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        """Columns of a row that each sequence takes: one less than its number of tokens."""
        return self.prompt_lens + self.answer_lens - 1


def _combine(prompts: _Answers, answers: _Answers) -> _Sequences:
    """Combines the prompts of some answers with the answers of others."""
    answer_starts = answers.starts + answers.prompt_lens
    return _Sequences(prompts.starts, prompts.prompt_lens, answer_starts, answers.answer_lens)


@dataclass(frozen=True)
class _SequencePairs:
    """Examples of two sequences, in the order of the stream.

    Attributes:
        documents: int64[N], the document of each example.
        first: the first sequence of each example.
        second: the second sequence of each example.
        num_left_out: number of examples that were already skipped.
    """

    documents: np.ndarray
    first: _Sequences
    second: _Sequences
    num_left_out: int


class PreferenceRows(Examples):
    """Rows of examples of two sequences.

    If an example is longer than a row, its answers are truncated: the longer one first, then both to the same length
    if necessary.

    Args:
        stream: a stream written by PreferenceCodec.
        seq_len: S.
        pairs: the examples.
        seed, packed: as for Examples.

    Attributes:
        first_unusable: (number of the first document that does not fit in a row, description of the problem); None if
            all fit.
    """

    def __init__(self, stream: TokenStream, seq_len: int, pairs: _SequencePairs, seed: int | None, *, packed: bool):
        first = pairs.first
        second = pairs.second
        # Tokens available for both answers, next to the prompts.
        answer_budget = seq_len + 2 - first.prompt_lens - second.prompt_lens
        has_answers = (first.answer_lens > 0) & (second.answer_lens > 0)
        is_usable = has_answers & (answer_budget >= 2)
        self.first_unusable: tuple[int, str] | None = None
        if not is_usable.all():
            number = int(np.argmin(is_usable))
            problem = "the chat template renders an answer without tokens"
            if has_answers[number]:
                problem = (
                    f"its prompt of {int(first.prompt_lens[number]):,} tokens leaves no room for two answers in a row "
                    f"of data.seq_len={seq_len:,}, which holds the prompt twice"
                )
            self.first_unusable = int(pairs.documents[number]), problem
        # The longer answer may use the tokens that the shorter one leaves; each gets at least half of the budget.
        shorter = np.minimum(first.answer_lens, second.answer_lens)
        longest = np.maximum(answer_budget // 2, answer_budget - shorter)
        self._sequences: list[_Sequences] = []
        for sequence in (first, second):
            usable_sequence = _Sequences(
                prompt_starts=sequence.prompt_starts[is_usable],
                prompt_lens=sequence.prompt_lens[is_usable],
                answer_starts=sequence.answer_starts[is_usable],
                answer_lens=np.minimum(sequence.answer_lens, longest)[is_usable],
            )
            self._sequences.append(usable_sequence)
        lengths = self._sequences[0].columns + self._sequences[1].columns
        super().__init__(stream, seq_len, lengths, seed, packed=packed)
        is_cut = is_usable & (first.answer_lens + second.answer_lens > answer_budget)
        self.is_usable = is_usable
        if is_cut.sum() > _MANY_CUT * len(lengths):
            self.warnings = (
                f"answers are truncated in {is_cut.sum():,} of {len(lengths):,} examples, because a row of "
                f"data.seq_len={seq_len:,} holds two; increase data.seq_len to keep them whole",
            )
        self.note = (
            f"{len(lengths):,} examples of two sequences, {self.padding:.1%} padding, {is_cut.sum():,} with truncated "
            f"answers, {pairs.num_left_out + np.sum(~is_usable):,} skipped"
        )

    def sequences(self, example: int) -> list[np.ndarray]:
        sequences = []
        for sequence in self._sequences:
            prompt_start = int(sequence.prompt_starts[example])
            prompt = self._stream.read(prompt_start, prompt_start + int(sequence.prompt_lens[example]))
            answer_start = int(sequence.answer_starts[example])
            answer = self._stream.read(answer_start, answer_start + int(sequence.answer_lens[example]))
            # A prompt may include earlier answers, which have no label.
            sequences.append(np.concatenate([prompt & ~1, answer]))
        return sequences

    def row(self, index: int) -> Batch:
        """Returns the arrays [S] of Examples.row, and `ends`."""
        row = super().row(index)
        segments = row["segments"]
        is_last = segments != np.append(segments[1:], 0)
        row["ends"] = (is_last & (segments > 0)).astype(np.float32)
        return row


class PairRows(PreferenceRows):
    """Rows of pairs: a chosen answer, and the rejected one for the same prompt.

    Args:
        stream, seq_len, seed, packed: as for PreferenceRows.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: int | None, *, packed: bool = True):
        answers = _find_answers(stream.read(0, stream.num_tokens), stream.eos_id or 0)
        chosen = answers.at(np.flatnonzero(answers.label_indices == ANSWER_LABELS.index("chosen")))
        rejected = answers.at(np.flatnonzero(answers.label_indices == ANSWER_LABELS.index("rejected")))
        pairs = _SequencePairs(
            documents=chosen.documents,
            first=_combine(chosen, chosen),
            second=_combine(rejected, rejected),
            num_left_out=answers.num_documents - len(chosen.documents),
        )
        super().__init__(stream, seq_len, pairs, seed, packed=packed)


class UnpairedRows(PreferenceRows):
    """Rows of desirable and undesirable answers, each followed by a mismatched one.

    The mismatched sequence is the prompt of this answer with the previous answer in the stream (for the first answer,
    the last one): KTO's estimate of the KL divergence between two models uses answers that are unrelated to their
    prompts (Ethayarajh et al. 2024, arXiv 2402.01306, section 4.2). Answers to the same prompt are skipped. A
    mismatched sequence has the label 0, and does not count as a sequence.

    Args:
        stream, seq_len, seed, packed: as for PreferenceRows.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: int | None, *, packed: bool = True):
        values = stream.read(0, stream.num_tokens)
        answers = _find_answers(values, stream.eos_id or 0)
        mismatched = answers.at(_find_mismatches(values, answers))
        pairs = _SequencePairs(
            documents=answers.documents,
            first=_combine(answers, answers),
            second=_combine(answers, mismatched),
            num_left_out=answers.num_documents - len(answers.documents),
        )
        super().__init__(stream, seq_len, pairs, seed, packed=packed)
        is_desirable = answers.label_indices[self.is_usable] == ANSWER_LABELS.index("desirable")
        self._labels = np.where(is_desirable, 1.0, -1.0).astype(np.float32)
        if is_desirable.all() or not is_desirable.any():
            kind = "desirable" if is_desirable.all() else "undesirable"
            self.warnings += (
                f"all {len(is_desirable):,} labeled answers are {kind}: KTO learns the difference between good and bad "
                "answers; add some of the other kind",
            )
        self.note += f", {is_desirable.sum():,} desirable and {np.sum(~is_desirable):,} undesirable"

    def row(self, index: int) -> Batch:
        """Returns the arrays [S] of PreferenceRows.row, and `labels`."""
        row = super().row(index)
        labels_by_segment = [0.0]
        for example in self.get_examples(index):
            labels_by_segment += [float(self._labels[example]), 0.0]
        row["labels"] = np.array(labels_by_segment, np.float32)[row["segments"]]
        # A mismatched sequence has the label 0: it serves the KL estimate only.
        row["ends"] *= np.abs(row["labels"])
        return row


def _find_mismatches(values: np.ndarray, answers: _Answers) -> np.ndarray:
    """Returns int64[N], the index of the answer that each prompt is mismatched with.

    Raises:
        ValueError: there is only one answer.
    """
    num_answers = len(answers.starts)
    if num_answers == 1:
        raise ValueError("only one labeled answer: KTO's estimate of the KL divergence needs two; expected more rows")
    prompts = []
    for start, length in zip(answers.starts.tolist(), answers.prompt_lens.tolist(), strict=True):
        prompts.append(values[start : start + length].tobytes())
    previous = np.arange(-1, num_answers - 1) % max(1, num_answers)
    if len(set(prompts)) == 1:
        # If all answers have the same prompt, use the previous one.
        return previous
    mismatches = previous.copy()
    # The second pass is for prompts that skip back past the first answer, whose own mismatch is known only then.
    for _ in range(2):
        for number in range(num_answers):
            neighbor = int(previous[number])
            if prompts[neighbor] == prompts[number]:
                mismatches[number] = mismatches[neighbor]
    return mismatches
