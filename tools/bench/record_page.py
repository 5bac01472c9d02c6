"""The page of the public record: each fact beside our plan of the nearest setting, and what it comes to."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tools.bench.public_record import Amount, PublicFact

if TYPE_CHECKING:
    from tools.bench.record_plans import PlannedFact

# Units of peaks, in bytes; "GB" is a billion of them where sources are careful, and sources that print torch's own
# figure divide by 1e9.
_UNITS = {"GB": 1e9, "GiB": 2.0**30, "% of 16 GiB": 0.16 * 2.0**30, "% of 32 GiB": 0.32 * 2.0**30}
_UNITS["% of 95 GiB"] = 0.95 * 2.0**30


# Peaks that differ by more than this part need a reason.
FAR = 0.25


class Judged(NamedTuple):
    """A fact beside our plan.

    Attributes:
        number: of the fact.
        fact: what was published.
        plan: what we say.
        peak_ratio: our peak over theirs; None where the source has none.
        rate_ratio: likewise tokens a second.
    """

    number: int
    fact: PublicFact
    plan: PlannedFact
    peak_ratio: float | None
    rate_ratio: float | None

    @property
    def is_right(self) -> bool:
        """Whether the verdicts agree."""
        return self.plan.fits == (self.fact.verdict == "fits")

    @property
    def reason(self) -> str:
        """What differs in their implementation, where verdicts or peaks are far apart; else empty."""
        is_beyond = self.peak_ratio is not None and abs(self.peak_ratio - 1) > FAR
        return self.fact.differs if is_beyond or not self.is_right else ""

    @property
    def is_false_fit(self) -> bool:
        """Whether we say that fits what ran out of memory."""
        return self.plan.fits and self.fact.verdict == "out of memory"


def judged(facts: list[PublicFact], results: dict[int, PlannedFact]) -> list[Judged]:
    """All facts that were planned, in the order of the record."""
    rows = []
    for number, plan in sorted(results.items()):
        fact = facts[number - 1]
        rows.append(Judged(number, fact, plan, _peak_ratio(fact, plan), _rate_ratio(fact, plan)))
    return rows


def _peak_ratio(fact: PublicFact, plan: PlannedFact) -> float | None:
    # The bytes at which something ran out of memory are no peak.
    if fact.peak is None or fact.peak.unit not in _UNITS or fact.verdict != "fits" or fact.peak.of == "all":
        return None
    return plan.peak_bytes / (fact.peak.value * _UNITS[fact.peak.unit])


def _rate_ratio(fact: PublicFact, plan: PlannedFact) -> float | None:
    if fact.rate is None or fact.rate.unit != "tokens/s" or not plan.tokens_per_second:
        return None
    published = fact.rate.value * (fact.devices if fact.rate.of == "device" else 1)
    return plan.tokens_per_second / published


class Summary(NamedTuple):
    """What the record comes to.

    Attributes:
        planned: facts.
        right: facts whose verdicts agree.
        false_fits: facts that we say fit, and that ran out of memory.
        peaks: facts that have a peak.
        median_error: of these peaks, as a part.
        beyond: the facts whose peak is off by more than a quarter.
        median_rate_ratio: ours over theirs; None where none has a rate.
    """

    planned: int
    right: int
    false_fits: int
    peaks: int
    median_error: float
    beyond: list[Judged]
    median_rate_ratio: float | None


def summary(rows: list[Judged]) -> Summary:
    """The sums of the page."""
    errors = [abs(row.peak_ratio - 1) for row in rows if row.peak_ratio is not None]
    rates = [row.rate_ratio for row in rows if row.rate_ratio is not None]
    return Summary(
        planned=len(rows),
        right=sum(row.is_right for row in rows),
        false_fits=sum(row.is_false_fit for row in rows),
        peaks=len(errors),
        median_error=median(errors) if errors else 0.0,
        beyond=[row for row in rows if row.peak_ratio is not None and abs(row.peak_ratio - 1) > FAR],
        median_rate_ratio=median(rates) if rates else None,
    )


def page(facts: list[PublicFact], results: dict[int, PlannedFact]) -> str:
    """The page in Markdown."""
    rows = judged(facts, results)
    sums = summary(rows)
    compiled = sum(row.plan.compiled for row in rows)
    dates = sorted({row.plan.date for row in rows}) or ["never"]
    days = " to ".join(sorted({dates[0], dates[-1]}))
    lines = [
        "# The public record, planned",
        "",
        "What others published of memory and speed, beside our plan of the nearest setting. Each line of",
        "`tools/bench/public_record.jsonl` has its source with a quote, and what differs in their implementation.",
        f"Made by `python -m tools.bench.record_plans --table` from plans of {days}.",
        "",
        f"- {sums.planned} facts planned, {compiled} by the compiler, the others by the closed form.",
        f"- Verdicts that agree: {sums.right} of {sums.planned}. Facts that we say fit, and that ran out of memory: "
        f"{sums.false_fits}.",
        f"- Peaks: {sums.peaks} are published; median error {100 * sums.median_error:.0f}%, "
        f"{len(sums.beyond)} beyond 25%, each with a reason below.",
    ]
    if sums.median_rate_ratio is not None:
        ratio = f"{sums.median_rate_ratio:.2f}"
        lines.append(f"- Tokens a second, our estimate over what they measured: {ratio} in the median.")
    header = ("fact", "theirs", "ours", "peak ratio", "tokens/s ratio", "by", "why they differ")
    lines += ["", f"| {' | '.join(header)} |", "|---|---|---|---|---|---|---|"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Judged) -> str:
    fact = row.fact
    settings = fact.settings
    title = f"{fact.model}, {fact.devices} x {fact.machine}, {settings.method}, "
    title += f"{settings.rows_per_device or '?'} x {settings.seq_len}"
    verdict = "fits" if row.plan.fits else "does not fit"
    marker = "" if row.is_right else " **(differs)**"
    cells = [
        f"[{title}]({_address(fact)})",
        f"{fact.verdict}{_amount(fact.peak)}",
        f"{verdict}, {row.plan.peak_bytes / 2**30:.1f} GiB{marker}",
        "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}",
        "" if row.rate_ratio is None else f"{row.rate_ratio:.2f}",
        "compiler" if row.plan.compiled else "closed form",
        row.reason,
    ]
    return f"| {' | '.join(cells)} |"


def _address(fact: PublicFact) -> str:
    source = fact.source
    if source.page is not None:
        return source.page
    return f"https://github.com/{source.repository}/blob/{source.commit}/{source.path}"


def _amount(amount: Amount | None) -> str:
    return "" if amount is None else f", {amount.value:.4g} {amount.unit}"
