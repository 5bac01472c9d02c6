"""Where the cotangents that a traced backward pass returns come from: from the update of a piece, or from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, Literal

from framework.functions.marker import update_p
from framework.plan.jaxprs import scan_counts

# Equations that hand their operands on as they are, the n-th operand as the n-th result.
_IDENTITIES = {"optimization_barrier", "copy", "copy_p", "sharding_constraint"}
# Equations that call one program with their operands.
_CALLS = {"jit", "pjit", "closed_call", "remat", "remat2", "checkpoint", "core_call", "custom_lin", "shard_map"}
_ZEROS = {"broadcast_in_dim", "zeros_like", "full"}


@dataclass(frozen=True)
class Origin:
    """Where a cotangent comes from.

    Attributes:
      pieces: those whose updates made it; one that occurs twice was updated twice.
      others: the names of the operations that made a part of it otherwise.
      is_zero: whether nothing made it.
      is_in_some_branches: whether a condition decides which pieces make it.
    """

    pieces: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    is_zero: bool = False
    is_in_some_branches: bool = False

    def plus(self, other: Origin) -> Origin:
        """That of a sum."""
        return Origin(
            self.pieces + other.pieces,
            self.others + other.others,
            self.is_zero and other.is_zero,
            self.is_in_some_branches or other.is_in_some_branches,
        )


_ZERO = Origin(is_zero=True)


@dataclass(frozen=True)
class _Operand:
    """An origin that is an operand of the program, by number: its caller knows more."""

    number: int


def origins_of(jaxpr: Jaxpr) -> list[Origin]:
    """The origin of each result of a program."""
    return [_as_origin(source) for source in _results_of(jaxpr)]


def _as_origin(source: Origin | _Operand) -> Origin:
    return source if isinstance(source, Origin) else Origin(others=("an argument",))


def _results_of(jaxpr: Jaxpr) -> list[Origin | _Operand]:
    """For each result its origin, or the operand that it is."""
    search = _Search(jaxpr)
    return [search.origin(var) for var in jaxpr.outvars]


class _Search:
    """The search for origins in one program."""

    def __init__(self, jaxpr: Jaxpr):
        self._numbers = {var: number for number, var in enumerate(jaxpr.invars)}
        self._constants = set(jaxpr.constvars)
        self._equations = {}
        for equation in jaxpr.eqns:
            for position, var in enumerate(equation.outvars):
                self._equations[var] = (equation, position)

    def origin(self, var: Any) -> Origin | _Operand:
        """The origin of a variable."""
        if isinstance(var, Literal) or var in self._constants:
            return _ZERO
        if var in self._numbers:
            return _Operand(self._numbers[var])
        equation, position = self._equations[var]
        name = equation.primitive.name
        if equation.primitive is update_p:
            return Origin(pieces=(equation.params["piece"],))
        if name in _IDENTITIES:
            return self.origin(equation.invars[position])
        if name in ("add", "add_any"):
            left, right = (_as_origin(self.origin(operand)) for operand in equation.invars)
            return left.plus(right)
        if name in _ZEROS and isinstance(equation.invars[0], Literal):
            return _ZERO
        if name in _CALLS:
            return self._of_operand(_results_of(_program(equation.params["jaxpr"]))[position], equation.invars)
        if name == "scan":
            return self._of_loop(equation, position)
        if name == "cond":
            return self._of_branches(equation, position)
        return Origin(others=(name,))

    def _of_operand(self, source: Origin | _Operand, operands: Any) -> Origin | _Operand:
        """What a called program says of a result, in terms of its caller."""
        return self.origin(operands[source.number]) if isinstance(source, _Operand) else source

    def _of_loop(self, equation: Any, position: int) -> Origin:
        """The origin of a loop's result."""
        origin = _as_origin(_results_of(_program(equation.params["jaxpr"]))[position])
        # What is stacked has one turn's in each place; what is carried is a sum over all turns.
        _, num_carry = scan_counts(equation.params)
        is_stacked = position >= num_carry
        if is_stacked or not origin.pieces:
            return origin
        return Origin(pieces=origin.pieces * 2)

    def _of_branches(self, equation: Any, position: int) -> Origin:
        """The origin that all branches have, or what one of them has."""
        origins = []
        for branch in equation.params["branches"]:
            source = _results_of(_program(branch))[position]
            # The first operand is the number of the branch.
            origins.append(_as_origin(self._of_operand(source, equation.invars[1:])))
        if len(set(origins)) == 1:
            return origins[0]
        pieces = {piece for origin in origins for piece in origin.pieces}
        return Origin(pieces=tuple(sorted(pieces)), others=("cond",), is_in_some_branches=True)


def _program(jaxpr: Any) -> Jaxpr:
    """The program of a closed jaxpr, or one that is not closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)
