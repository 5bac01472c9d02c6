"""A function of somebody's own, and what it is called with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

# What jax.jit returns. Its functions know what is static and donated, and where their arguments are.
_JITTED = type(jax.jit(lambda: None))


@dataclass(frozen=True)
class Call:
    """A function and what it is called with.

    Attributes:
        function: any function of arrays that JAX can trace, jitted or not.
        arguments: positional ones: trees of arrays or `jax.ShapeDtypeStruct`s. Leaves that are neither, such as the
            activation function of an equinox module, stay as they are.
        donate: positions of the arguments whose memory the results may take, or their names; or one of these alone.
        mesh: {axis: size}, over all devices of the target; None: one device, or all of them with the same arrays. Or a
            mesh: of devices of the target's kind it is taken as it is, and of any others, or of none, its axes are.
        shardings: of the arguments: a tree of PartitionSpecs, or of prefixes of it, for each; None, for all or for one:
            as the leaves' own `sharding` says, of whatever mesh with these axes; without one, whole on each device.
        out_shardings: of the results, likewise; None, for all or for some: as the compiler likes.
        name: what a report calls it; the function's own name by default.
        compiler_options: of XLA, {option: value}.
        argument_names: of its positional parameters, as far as the function tells them.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate: Sequence[int | str] | int | str = ()
    mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None
    shardings: Sequence[Any] | None = None
    out_shardings: Any = None
    name: str = ""
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    argument_names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"expected a function, given {type(self.function).__name__}")
        if not isinstance(self.arguments, (tuple, list)):
            raise TypeError(f"expected a tuple of arguments, given {type(self.arguments).__name__}")
        if isinstance(self.donate, (int, str)):
            object.__setattr__(self, "donate", (self.donate,))
        object.__setattr__(self, "argument_names", _parameter_names(self.function, len(self.arguments)))

    @property
    def title(self) -> str:
        """The name of the function; of a `functools.partial` without one, that of its function."""
        function = self.function
        while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
            function = function.func
        return self.name or getattr(function, "__name__", type(function).__name__)

    @property
    def is_jitted(self) -> bool:
        """Whether the function is compiled as `jax.jit` made it: what is static and donated is said there alone."""
        return isinstance(self.function, _JITTED) and not self.donate and self.out_shardings is None

    @property
    def donated_positions(self) -> tuple[int, ...]:
        """Positions of the donated arguments. Raises ValueError: there is no such argument."""
        positions = []
        assert not isinstance(self.donate, (int, str))
        for which in self.donate:
            if isinstance(which, str) and which not in self.argument_names:
                raise ValueError(
                    f"donate: {self.title} has no argument {which!r}, but: {', '.join(self.argument_names)}"
                )
            position = self.argument_names.index(which) if isinstance(which, str) else which
            if not 0 <= position < len(self.arguments):
                raise ValueError(f"donate: {self.title} is called with {len(self.arguments)} arguments, given {which}")
            positions.append(position)
        return tuple(positions)


def _parameter_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Names of the first positional parameters; fewer where the function does not tell them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(positional[:count])
