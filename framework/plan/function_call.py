"""A user's function and the arguments of one call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

# Type of the functions that jax.jit returns. They already carry static and donated arguments, and shardings.
_JITTED = type(jax.jit(lambda: None))


@dataclass(frozen=True)
class FunctionCall:
    """A function and the arguments of one call.

    Attributes:
        function: any function of arrays that JAX can trace, jitted or not.
        arguments: positional arguments: trees of arrays or `jax.ShapeDtypeStruct`s. Leaves that are neither, such as
            the activation function of an equinox module, stay as they are.
        donate: positions or names of the arguments whose memory the results may reuse; a single one needs no sequence.
        mesh: {axis: size} over all devices of the target, or a mesh. None means one device, or all devices with
            replicated arrays. A mesh of devices of the target's kind is used unchanged; of any other mesh, only the
            axes are used.
        shardings: one tree of PartitionSpecs, or a prefix of it, per argument. None, for all arguments or for one,
            uses the leaves' own `sharding`, which may belong to any mesh with these axes; leaves without one are
            replicated.
        out_shardings: tree of PartitionSpecs of the results, or a prefix of it; None, for all or some results, leaves
            the choice to the compiler.
        name: name of the call in a report; by default the function's own name.
        compiler_options: {option: value} for XLA.
        argument_names: names of the positional parameters, as far as the signature is known.
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
        """The given name, or the function's own name; a `functools.partial` without a name uses its function's."""
        function = self.function
        while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
            function = function.func
        return self.name or getattr(function, "__name__", type(function).__name__)

    @property
    def is_jitted(self) -> bool:
        """True if the function's own `jax.jit` is used, which then defines static and donated arguments."""
        return isinstance(self.function, _JITTED) and not self.donate and self.out_shardings is None

    @property
    def donated_positions(self) -> tuple[int, ...]:
        """Positions of the donated arguments.

        Raises:
            ValueError: there is no such argument.
        """
        positions = []
        assert not isinstance(self.donate, (int, str))
        for which in self.donate:
            if isinstance(which, str) and which not in self.argument_names:
                raise ValueError(
                    f"donate: {self.title} has no argument {which!r}; its arguments: {', '.join(self.argument_names)}"
                )
            position = self.argument_names.index(which) if isinstance(which, str) else which
            if not 0 <= position < len(self.arguments):
                raise ValueError(f"donate: {self.title} is called with {len(self.arguments)} arguments, given {which}")
            positions.append(position)
        return tuple(positions)


def _parameter_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Return the names of the first `count` positional parameters; fewer if the signature does not have them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(positional[:count])
