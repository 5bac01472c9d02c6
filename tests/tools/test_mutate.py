"""tools/mutate.py: every mutation still finds its line in the source, so that none silently stops working."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_mutation_applies_to_one_place() -> None:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    mutate = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = mutate
    spec.loader.exec_module(mutate)
    assert len(mutate.MUTATIONS) >= 10
    for mutation in mutate.MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old
        assert all((ROOT / test).exists() for test in mutation.tests), mutation.name
