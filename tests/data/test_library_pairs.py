"""Pairs from the standard library source: both sides have the same words, in a different order."""

from plimsoll.framework.data.library_pairs import pairs_of_code

CODE = "\n".join(f"    value_{number} = first + second_{number}" for number in range(12))


def test_a_rejected_answer_has_the_words_of_the_chosen_one_backwards():
    pairs = list(pairs_of_code(CODE + "\n\n"))
    assert len(pairs) == 2, "six lines each, and blank ones are none"
    for pair in pairs:
        (_, chosen), (_, rejected) = pair.answers
        assert [verdict for verdict, _ in pair.answers] == ["chosen", "rejected"]
        assert pair.prompt + chosen in CODE
        for right, wrong in zip(chosen.split("\n"), rejected.split("\n"), strict=True):
            assert wrong.split() == right.split()[::-1] != right.split()
            assert wrong.startswith("    ")


def test_lines_that_say_the_same_backwards_and_long_ones_are_no_pairs():
    assert list(pairs_of_code("\n".join(["word"] * 12))) == []
    assert list(pairs_of_code("\n".join(["many words " * 20] * 6))) == []
