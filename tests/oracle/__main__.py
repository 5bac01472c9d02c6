"""python -m tests.oracle --seeds 0:200: random experiments, the framework's numbers against float64 and plain optax.

`--seed 17` runs one experiment and prints its settings first. The exit code is 1 if any experiment disagrees.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from tests import conftest  # noqa: F401  (eight CPU devices and cheap compiles, set before JAX is imported)
from tests.oracle.compare import Verdict, compare_seed, drop_caches
from tests.oracle.generator import as_text, draw


def main(arguments: list[str] | None = None) -> int:
    """Run the experiments, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=_seed, help="one experiment; what was drawn is printed first")
    which.add_argument("--seeds", type=_seeds, metavar="FIRST:END", help="experiments FIRST to END - 1")
    given = parser.parse_args(arguments)
    seeds: range = given.seeds or range(given.seed, given.seed + 1)
    if given.seed is not None:
        print("\n".join(as_text(draw(given.seed))))
    counts, is_stopped = dict.fromkeys(("agree", "refused", "unstable", "disagree"), 0), False
    try:
        for seed in seeds:
            verdict = compare_seed(draw(seed))
            counts[verdict.outcome] += 1
            print("\n".join(_lines(verdict)), flush=True)
            drop_caches()
    except KeyboardInterrupt:
        is_stopped = True
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 130 if is_stopped else int(counts["disagree"] > 0)


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, given {text!r}")
    return int(text)


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (first.isdigit() and end.isdigit() and colon and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"expected FIRST:END, 0:200 say, given {text!r}")
    return range(int(first), int(end))


def _lines(verdict: Verdict) -> list[str]:
    head = f"seed {verdict.seed}: {verdict.outcome}"
    if verdict.outcome == "agree":
        return [f"{head}, at most {verdict.error:.1e} of the tolerance ({verdict.detail}), {verdict.seconds:.1f} s"]
    if verdict.outcome == "refused":
        return [f"{head}: {verdict.detail}"]
    if verdict.outcome == "unstable":
        size = f"{verdict.error:.1e} times the tolerance"
        return [f"{head}: rounding changes the result by {size}; it agrees with less rounding"]
    settings = [f"    {line}" for line in as_text(draw(verdict.seed))]
    return [
        f"{head}: {verdict.error:.1e} times the tolerance: {verdict.detail}",
        *settings,
        f"    python -m tests.oracle --seed {verdict.seed}",
    ]


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.exit(main())
