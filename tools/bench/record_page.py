"""The page of the public record: each fact next to our plan of the nearest setting, and a summary."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tools.bench import outside_record
from tools.bench.public_record import Amount, PublicFact
from tools.bench.record_settings import NotPlannedError, nearest_setting

if TYPE_CHECKING:
    from tools.bench.record_results import PlannedFact

# Units of peaks, in bytes. Careful sources mean a billion bytes by "GB", and sources that print torch's own figure
# divide by 1e9.
_UNITS = {"GB": 1e9, "GiB": 2.0**30, "% of 16 GiB": 0.16 * 2.0**30, "% of 32 GiB": 0.32 * 2.0**30}
_UNITS["% of 95 GiB"] = 0.95 * 2.0**30
_UNITS["GB of VRAM"] = 2.0**30


# Peaks and rates that differ by more than this fraction need a reason.
FAR = 0.25
# For similar programs, peaks agree to within this fraction: if ours is this close to the limit, theirs may exceed it.
NEAR = 0.05


class JudgedFact(NamedTuple):
    """A fact next to our plan.

    Attributes:
        number: number of the fact.
        fact: the published fact.
        plan: our plan.
        peak_ratio: our peak over theirs; None if the source has no peak.
        rate_ratio: our rate over theirs, in tokens per second or in model FLOPs per second; None if there is no rate.
    """

    number: int
    fact: PublicFact
    plan: PlannedFact
    peak_ratio: float | None
    rate_ratio: float | None

    @property
    def is_right(self) -> bool:
        """True if the verdicts agree, or the source has none."""
        return not self.has_verdict or self.plan.fits == (self.fact.verdict == "fits")

    @property
    def has_verdict(self) -> bool:
        """True if the source ran the setting."""
        return self.fact.verdict != "needs"

    @property
    def is_at_the_limit(self) -> bool:
        """True if our peak is so close to the limit that it does not predict whether another program fits."""
        limit = self.plan.limit_bytes
        return limit is not None and abs(self.plan.peak_bytes / limit - 1) <= NEAR

    @property
    def reason(self) -> str:
        """The difference in their implementation, if verdicts, peaks or rates are far apart; otherwise empty."""
        is_beyond = self.peak_ratio is not None and abs(self.peak_ratio - 1) > FAR
        reasons = []
        if is_beyond or not self.is_right:
            reasons += [self.fact.outdated, self.fact.differs]
        if self.is_rate_far:
            reasons.append(self.fact.rate_differs)
        return " ".join(filter(None, reasons))

    @property
    def is_rate_far(self) -> bool:
        """True if the rates differ so much that they need a reason."""
        return self.rate_ratio is not None and max(self.rate_ratio, 1 / self.rate_ratio) > 1 + FAR

    @property
    def is_false_fit(self) -> bool:
        """True if our plan fits but theirs ran out of memory."""
        return self.plan.fits and self.fact.verdict == "out of memory"


def is_like_ours(fact: PublicFact) -> bool:
    """Return whether our plan describes a program like theirs.

    That requires that a compiler makes both programs, that rows have one length, and that the source or its code
    specifies what a layer saves and what is sharded over devices. With FP8 products it is not alike: torchao
    saves 16-bit inputs for the backward pass, and we save the 8-bit ones.
    """
    if "float8" in (fact.settings.precision or ""):
        return False
    if fact.outdated is not None or fact.settings.assumed is not None:
        return False
    settings = fact.settings
    has_known_sharding = fact.devices == 1 or settings.sharding is not None
    return bool(settings.compile) and settings.packed is not False and settings.remat is not None and has_known_sharding


def judge_facts(facts: list[PublicFact], results: dict[int, PlannedFact]) -> list[JudgedFact]:
    """Return all planned facts, in the order of the record."""
    rows = []
    for number, plan in sorted(results.items()):
        fact = facts[number - 1]
        rows.append(JudgedFact(number, fact, plan, _peak_ratio(fact, plan), _rate_ratio(fact, plan)))
    return rows


def _peak_ratio(fact: PublicFact, plan: PlannedFact) -> float | None:
    # The bytes in use when a program ran out of memory are not its peak.
    if fact.peak is None or fact.peak.unit not in _UNITS or fact.verdict == "out of memory" or fact.peak.of == "all":
        return None
    return plan.peak_bytes / (fact.peak.value * _UNITS[fact.peak.unit])


def _rate_ratio(fact: PublicFact, plan: PlannedFact) -> float | None:
    if fact.rate is None or not plan.tokens_per_second or not plan.flops_per_second:
        return None
    if fact.rate.unit == "TFLOP/s":
        devices = fact.devices if fact.rate.of == "all" else 1
        return devices * plan.flops_per_second / (1e12 * fact.rate.value)
    if fact.rate.unit == "s/step" and (tokens := _tokens_per_update(fact)) is not None:
        return plan.tokens_per_second * fact.rate.value / tokens
    if fact.rate.unit != "tokens/s":
        return None
    published = fact.rate.value * (fact.devices if fact.rate.of == "device" else 1)
    return plan.tokens_per_second / published


def _tokens_per_update(fact: PublicFact) -> int | None:
    settings = fact.settings
    if settings.global_batch is None or settings.seq_len is None or settings.packed is False:
        return None
    return settings.global_batch * settings.seq_len


class Summary(NamedTuple):
    """Summary of rows of the record.

    Attributes:
        planned: number of planned facts.
        compiled: number of facts judged by the compiler; the others were judged by the analytical estimate.
        verdicts: number of facts with a verdict.
        right: number of these whose verdicts agree.
        at_the_limit: number of facts that ran out of memory although our plan fits within 5% of the limit.
        false_fits: number of facts that ran out of memory although our plan fits with room to spare.
        peaks: number of facts that have a peak.
        median_error: median relative error of these peaks, as a fraction.
        beyond: facts whose peak is off by more than a quarter.
        rates: number of facts that have a rate.
        median_rate_ratio: median of our rate over theirs; None if no fact has a rate.
        median_rate_error: median relative error of our rates, as a fraction; None if no fact has a rate.
        far_rates: facts whose rate is off by more than a quarter.
    """

    planned: int
    compiled: int
    verdicts: int
    right: int
    at_the_limit: int
    false_fits: int
    peaks: int
    median_error: float
    beyond: list[JudgedFact]
    rates: int
    median_rate_ratio: float | None
    median_rate_error: float | None
    far_rates: list[JudgedFact]


def summary(rows: list[JudgedFact]) -> Summary:
    """Summarize the rows."""
    errors = [abs(row.peak_ratio - 1) for row in rows if row.peak_ratio is not None]
    rates = [row.rate_ratio for row in rows if row.rate_ratio is not None]
    return Summary(
        planned=len(rows),
        compiled=sum(row.plan.compiled for row in rows),
        verdicts=sum(row.has_verdict for row in rows),
        right=sum(row.has_verdict and row.is_right for row in rows),
        at_the_limit=sum(row.is_false_fit and row.is_at_the_limit for row in rows),
        false_fits=sum(row.is_false_fit and not row.is_at_the_limit for row in rows),
        peaks=len(errors),
        median_error=median(errors) if errors else 0.0,
        beyond=[row for row in rows if row.peak_ratio is not None and abs(row.peak_ratio - 1) > FAR],
        rates=len(rates),
        median_rate_ratio=median(rates) if rates else None,
        median_rate_error=median(abs(ratio - 1) for ratio in rates) if rates else None,
        far_rates=[row for row in rows if row.is_rate_far],
    )


def page(facts: list[PublicFact], results: dict[int, PlannedFact]) -> str:
    """Return the page in Markdown."""
    rows = judge_facts(facts, results)
    like_ours = [row for row in rows if is_like_ours(row.fact)]
    others = [row for row in rows if not is_like_ours(row.fact)]
    dates = sorted({row.plan.date for row in rows}) or ["never"]
    days = " to ".join(sorted({dates[0], dates[-1]}))
    lines = [
        "# The public record, planned",
        "",
        "Published memory and speed of training, next to our plan of the nearest setting. Each line of",
        "`tools/bench/public_record.jsonl` has its source with a quote, and the differences of the implementation.",
        f"`python -m tools.bench.record_plans` wrote this page from plans of {days}, made by the target's own compiler",
        "without the machine, or by the analytical estimate (column `by`); `--table` writes it again",
        "from the existing plans. A rate ratio is our estimate over theirs: below 1, their run is faster than ours.",
        "",
        *_sums("All facts", rows),
        *_sums("Programs like ours", like_ours),
        "",
        "## Programs like ours",
        "",
        "A compiler makes both programs (XLA or torch.compile), rows have one length, and the source, or its code,",
        "specifies what a layer saves for the backward pass and what is sharded over devices. Products are not in FP8,",
        "for which torchao saves 16-bit inputs and we save 8-bit ones.",
        "",
        *_table(like_ours),
        "",
        "## Other programs",
        "",
        "Eager PyTorch saves arrays that a compiler does not, and with rows of different lengths, the longest one",
        "determines the peak. So our verdict describes the memory of *our* program, not of theirs.",
        "",
        *_table(others),
        "",
        *outside_record.section(),
        "",
        "## Not planned",
        "",
        "| fact | why there is no similar setting |",
        "|---|---|",
        *_list_unplanned(facts, results),
    ]
    return "\n".join(lines) + "\n"


def _sums(title: str, rows: list[JudgedFact]) -> list[str]:
    sums = summary(rows)
    planners = "all by the compiler" if sums.compiled == sums.planned else f"{sums.compiled} of them by the compiler"
    line = f"- **{title}**: {sums.planned} planned, {planners}. "
    share = 100 * sums.right / max(sums.verdicts, 1)
    line += f"Verdicts agree for {sums.right} of {sums.verdicts} ({share:.0f}%). "
    line += (
        f"Of the settings that ran out of memory, {sums.false_fits} fit by our plan with more than 5% to spare, and "
    )
    line += f"{sums.at_the_limit} with less. "
    line += f"The median error for {sums.peaks} published peaks is {100 * sums.median_error:.0f}%, and "
    line += f"{len(sums.beyond)} are off by more than 25%, each with a reason."
    if sums.median_rate_ratio is not None and sums.median_rate_error is not None:
        line += f" For {sums.rates} published rates, the median ratio of our estimate is {sums.median_rate_ratio:.2f}, "
        line += f"and its median error {100 * sums.median_rate_error:.0f}%; {len(sums.far_rates)} are off by more than "
        line += "a quarter, each with a reason."
    return [line]


def _table(rows: list[JudgedFact]) -> list[str]:
    header = ("fact", "theirs", "ours", "peak ratio", "rate ratio", "by", "why they differ")
    return [f"| {' | '.join(header)} |", "|---|---|---|---|---|---|---|", *map(_line, rows)]


def _list_unplanned(facts: list[PublicFact], results: dict[int, PlannedFact]) -> list[str]:
    lines = []
    with tempfile.TemporaryDirectory(prefix="plimsoll-record-") as folder:
        for number, fact in enumerate(facts, start=1):
            if number in results:
                continue
            try:
                nearest_setting(fact, Path(folder))
            except NotPlannedError as error:
                lines.append(f"| [{fact.line()}]({_address(fact)}) | {error} |")
            else:
                lines.append(f"| [{fact.line()}]({_address(fact)}) | {fact.differs} |")
    return lines


def _line(row: JudgedFact) -> str:
    fact = row.fact
    settings = fact.settings
    title = f"{fact.model}, {fact.devices} x {fact.machine}, {settings.method}, "
    title += f"{settings.rows_per_device or '?'} x {settings.seq_len}"
    verdict = "fits" if row.plan.fits else "does not fit"
    marker = "" if row.is_right else " **(differs)**"
    cells = [
        f"[{title}]({_address(fact)})",
        f"{fact.verdict}{_amount(fact.peak)}{_amount(fact.rate)}",
        f"{verdict}, {row.plan.peak_bytes / 2**30:.1f} GiB{marker}",
        "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}",
        "" if row.rate_ratio is None else f"{row.rate_ratio:.2f}",
        row.plan.by,
        row.reason,
    ]
    return f"| {' | '.join(cells)} |"


def _address(fact: PublicFact) -> str:
    source = fact.source
    if source.page is not None:
        return source.page
    return f"https://github.com/{source.repository}/blob/{source.commit}/{source.path}"


def _amount(amount: Amount | None) -> str:
    return "" if amount is None else f", {amount.value:.6g} {amount.unit}"
