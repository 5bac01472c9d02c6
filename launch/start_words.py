"""The words that start a verb in a process of its own."""

import os
import sys


def from_here() -> bool:
    """Whether this process finds packages in the folder that it was started in, as `python -m` in a checkout does."""
    return "" in sys.path or os.getcwd() in sys.path


def words_of_train(python: str, *, is_here: bool = True) -> list[str]:
    """The words that start `plimsoll train`; see `words_of`."""
    return words_of(python, "train", is_here=is_here)


def words_of(python: str, verb: str, *, is_here: bool = True) -> list[str]:
    """The words that start a verb.

    Args:
        python: the interpreter.
        verb: such as "train".
        is_here: it is this machine's. Plimsoll is installed on the others.
    """
    if is_here and from_here():
        return [python, "-m", f"launch.{verb}"]
    # Without -P, a launch.py in the folder of the start would be taken for the package.
    return [python, "-P", "-m", f"launch.{verb}"]
