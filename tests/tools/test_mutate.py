"""tools/mutate.py: every mutation still finds its line in the source, so that none silently stops working."""

from pathlib import Path

from tools import mutate

ROOT = Path(__file__).parents[2]


def test_tests_of_a_copy_import_its_own_files(tmp_path: Path) -> None:
    mutate.copy_checkout(tmp_path / "copy")
    for name in ("framework", "launch", "configs"):
        assert (tmp_path / "copy" / "plimsoll" / name).resolve() == (tmp_path / "copy" / name).resolve()


def test_each_mutation_applies_to_one_place() -> None:
    assert len(mutate.MUTATIONS) >= 10
    for mutation in mutate.MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old
        assert all((ROOT / test).exists() for test in mutation.tests), mutation.name
