"""Command line words that start a verb in its own process."""

import os
import sys


def from_here() -> bool:
    """Return whether this process imports packages from its start folder, as `python -m` in a checkout does."""
    return "" in sys.path or os.getcwd() in sys.path


def words_of_train(python: str, *, is_here: bool = True) -> list[str]:
    """Return the words that start `plimsoll train`; see `words_of`."""
    return words_of(python, "train", is_here=is_here)


def words_of(python: str, verb: str, *, is_here: bool = True) -> list[str]:
    """Return the words that start a verb.

    Args:
        python: path of the interpreter.
        verb: name of the verb, such as "train".
        is_here: whether the interpreter is on this machine. Plimsoll is installed on the others.
    """
    if is_here and from_here():
        return [python, "-m", f"launch.{verb}"]
    # Without -P, a launch.py in the start folder would be imported instead of the package.
    return [python, "-P", "-m", f"launch.{verb}"]
