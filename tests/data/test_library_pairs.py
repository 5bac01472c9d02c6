"""Pairs from the standard library source: both sides have the same words, in a different order."""

from plimsoll.framework.data.library_pairs import make_pairs

CODE = "\n".join(f"    value_{number} = first + second_{number}" for number in range(12))


def test_rejected_answer_reverses_the_chosen_words():
    pairs = list(make_pairs(CODE + "\n\n"))
    assert len(pairs) == 2, "six lines each, and blank ones are none"
    for pair in pairs:
        (_, chosen), (_, rejected) = pair.answers
        assert [verdict for verdict, _ in pair.answers] == ["chosen", "rejected"]
        assert pair.prompt + chosen in CODE
        for right, wrong in zip(chosen.split("\n"), rejected.split("\n"), strict=True):
            assert wrong.split() == right.split()[::-1] != right.split()
            assert wrong.startswith("    ")


def test_palindromes_and_long_lines_make_no_pairs():
    assert list(make_pairs("\n".join(["word"] * 12))) == []
    assert list(make_pairs("\n".join(["many words " * 20] * 6))) == []
