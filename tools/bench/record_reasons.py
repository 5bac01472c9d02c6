"""Why a published peak or verdict is not ours, by what tells the facts apart."""

from __future__ import annotations

from tools.bench.public_record import PublicFact


def reason_for(number: int, fact: PublicFact, peak_ratio: float | None, *, is_right: bool) -> str:
    """The reason for a difference of more than a quarter or for another verdict; empty where there is neither."""
    return ""
