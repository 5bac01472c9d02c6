"""Directories of each family with one alteration: we compute what transformers does, or refuse the alteration by name.

This is a sample; `python -m tools.check_altered` runs all alterations.
"""

import collections

import pytest

from tools import check_altered
from tools.peers.families import FAMILIES

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]
SAMPLE, SEED = 200, 0


def test_no_directory_is_silently_read_as_another_model(libraries):
    verdicts = list(check_altered.verdicts(FAMILIES, sample=SAMPLE, seed=SEED))
    assert [str(verdict) for verdict in verdicts if verdict.kind in check_altered.FAILURES] == []
    counts = collections.Counter(verdict.kind for verdict in verdicts)
    assert sum(counts.values()) >= SAMPLE
    assert counts[check_altered.AGREE] > SAMPLE / 5, counts
    assert counts[check_altered.WE_REFUSE] > SAMPLE / 5, counts
