"""Published memory and speed of training: public_record.jsonl, one fact per line, each with a quote of its source.

    python -m tools.bench.public_record            # the facts, a line each
    python -m tools.bench.public_record v6e LoRA   # those whose model, machine, method or verdict has all these words

A fact is a setting and its outcome: it fits, it runs out of memory, it has a certain peak, or it runs at a certain
rate. Units are the source's. `differs` explains why a figure cannot be compared directly with ours.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

RECORD = Path(__file__).with_name("public_record.jsonl")
Verdict = Literal["fits", "out of memory", "needs"]
Method = Literal["pretrain", "full", "lora", "qlora", "adapter"]
# Whether a figure is for one device or for all devices together; "unsaid" if the source does not specify.
Scope = Literal["device", "all", "unsaid"]
Row = TypeVar("Row")


@dataclass(frozen=True)
class Amount:
    """A published figure.

    Attributes:
        value: value in `unit`, as published.
        unit: GB, GiB, tokens/s, TFLOP/s, s/step, ...
        of: Scope of the figure.
    """

    value: float
    unit: str
    of: str


@dataclass(frozen=True)
class Settings:
    """Settings of a published training run. None means that the source does not specify.

    Attributes:
        method: Method.
        rows_per_device: rows that a device, or a group of devices that shards rows or tensors, computes at a time.
        global_batch: rows of one update.
        seq_len: tokens per row; the maximum if rows are not packed.
        packed: rows are filled up to seq_len.
        precision, optimizer, remat, sharding, attention: in the source's words or ours.
        loss: "whole" if the logits of all tokens exist at the same time; otherwise in the source's words.
        update: when the optimizer steps, if not after the backward pass.
        offload: what is in host memory.
        lora: rank and the layers that have adapters.
        quantization: quantization of frozen weights.
        compile: whether XLA or torch.compile compiles the step.
        scan: whether layers run in a loop.
        devices_used: number of the fact's devices that are in use, if the others are idle.
        maxtext: fields of MaxText's config, if the source is a recipe of MaxText for TPUs.
        accumulation: microbatches per update.
        assumed: values that the source does not state, by field, chosen so that the fact can be planned.
        note: where the settings were found, if not in the quote.
    """

    method: str
    rows_per_device: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    packed: bool | None = None
    precision: str | None = None
    optimizer: str | None = None
    update: str | None = None
    remat: str | None = None
    sharding: str | None = None
    offload: str | None = None
    loss: str | None = None
    attention: str | None = None
    lora: str | None = None
    quantization: str | None = None
    compile: bool | None = None
    scan: bool | None = None
    devices_used: int | None = None
    maxtext: str | None = None
    accumulation: int | None = None
    assumed: dict[str, int] | None = None
    note: str | None = None


@dataclass(frozen=True)
class FactSource:
    """Location of a fact: a file of a repository at a commit, or a page.

    Attributes:
        quote: the words of the source, with runs of white space as one space.
        repository: owner/name on GitHub.
        path, commit: file in the repository, and its commit.
        page: address of a thread or page.
    """

    quote: str
    repository: str | None = None
    path: str | None = None
    commit: str | None = None
    page: str | None = None


@dataclass(frozen=True)
class PublicFact:
    """One line of the record.

    Attributes:
        model: model in the source's words.
        machine: the unit that `devices` counts: a GPU, or a TPU chip.
        verdict: Verdict; "needs" if a source states the required memory, or the longest row for it, without a run.
        differs: difference from what we would compute or measure.
        hub_id: id of the published model, listed in framework/families/published.json if we can load it.
        shape: fields of config.json of a model that was not published.
        rate_differs: why the rate is far from our estimate, if it is.
        not_of_the_step: why the figure does not describe a training step, if it does not.
        outdated: why the source's own program gives another figure today, if we compiled it.
    """

    model: str
    machine: str
    devices: int
    settings: Settings
    verdict: str
    source: FactSource
    differs: str
    peak: Amount | None = None
    rate: Amount | None = None
    hub_id: str | None = None
    shape: dict[str, Any] | None = None
    rate_differs: str | None = None
    not_of_the_step: str | None = None
    outdated: str | None = None

    def line(self) -> str:
        """Return the fact as one line of text."""
        result = self.verdict
        for amount in (self.peak, self.rate):
            if amount is not None:
                scope = "" if amount.of == "unsaid" else f" ({amount.of})"
                result += f", {amount.value:g} {amount.unit}{scope}"
        rows = self.settings.rows_per_device or "?"
        length = self.settings.seq_len or "?"
        return f"{self.model}, {self.devices} x {self.machine}, {self.settings.method}, {rows} x {length}: {result}"


def read_record(path: Path = RECORD) -> list[PublicFact]:
    """Read the record.

    Raises:
        ValueError: a line has an unknown or missing field, or an invalid value. The message begins with the file's name
            and the line's number.
    """
    facts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            facts.append(_fact(json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path.name}:{number}: {error}") from None
    return facts


def _fact(values: dict[str, Any]) -> PublicFact:
    parts: dict[str, Any] = dict(values)
    for name, kind in (("settings", Settings), ("source", FactSource), ("peak", Amount), ("rate", Amount)):
        if name in parts:
            parts[name] = _row(kind, parts[name])
    fact = _row(PublicFact, parts)
    _check_choice(fact.verdict, Verdict, "verdict")
    _check_choice(fact.settings.method, Method, "method")
    for amount in (fact.peak, fact.rate):
        if amount is not None:
            _check_choice(amount.of, Scope, "of")
    if fact.source.page is None and None in (fact.source.repository, fact.source.path, fact.source.commit):
        raise ValueError("source: expected a page, or a repository with path and commit")
    return fact


def _row(kind: type[Row], values: dict[str, Any]) -> Row:
    unknown = sorted(values.keys() - inspect.signature(kind).parameters.keys())
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r} of {kind.__name__}")
    return kind(**values)


def _check_choice(word: str, words: Any, name: str) -> None:
    if word not in get_args(words):
        raise ValueError(f"{name} = {word!r}; expected one of {', '.join(get_args(words))}")


def main(words: list[str]) -> None:
    """Print the facts that contain all words."""
    facts = read_record()
    shown = 0
    for fact in facts:
        text = f"{fact.model} {fact.hub_id or ''} {fact.machine} {fact.settings.method} {fact.verdict}".lower()
        if all(word.lower() in text for word in words):
            print(fact.line())
            shown += 1
    print(f"{shown} of {len(facts)} facts")


if __name__ == "__main__":
    main(sys.argv[1:])
