"""`value_and_update`: `jax.value_and_grad` for trees with trained modules, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from plimsoll.extras.functions.module_updates import update_p
from plimsoll.extras.functions.trained_weights import Trained, describe_double_use
from plimsoll.framework.layout import PyTree
from plimsoll.framework.plan.jaxpr_analysis import scan_counts


def value_and_update(loss: Callable[..., PyTree], has_aux: bool = False) -> Callable[..., tuple[PyTree, PyTree]]:
    """Make a function of the loss's arguments that returns the loss and its first argument after the update.

        value, params = pl.value_and_update(loss)(params, batch)

    In the returned tree, each `Trained` is the one after the update; any other leaf is its gradient, as from
    `jax.value_and_grad`. The traced backward pass is checked before it runs. An error names any module that would be
    updated wrongly: one whose weights are used twice, are read outside its call, or do not affect the loss.

    Complexity: the computation is that of `jax.value_and_grad`. The check takes time proportional to the number of
    operations each time the program is traced; under `jax.jit` that is once.

    Args:
        loss: `loss(params, *args, **kwargs) -> scalar`, or (scalar, auxiliary outputs) with `has_aux`.
        has_aux: whether the loss returns auxiliary outputs, as in `jax.value_and_grad`.

    Raises:
        ValueError: from the returned function: a module would be updated wrongly.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=has_aux)

    def run_checked(params: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        def call_with_params(params: PyTree) -> tuple[PyTree, PyTree]:
            return value_and_grad(params, *args, **kwargs)

        program, shapes = jax.make_jaxpr(call_with_params, return_shape=True)(params)
        num_params = len(jax.tree.leaves(params))
        # The value and auxiliary outputs come first.
        origins = [_as_origin(source) for source in _trace_results(program.jaxpr)[-num_params:]]
        # The same tree with the origin of each leaf.
        tree = jax.tree.unflatten(jax.tree.structure(params), origins)
        for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Trained)):
            if isinstance(node, Trained):
                _check_module(node.name, jax.tree.leaves(node))
        # Run the program that was checked instead of tracing the loss again.
        results = jaxpr_as_fun(program)(*jax.tree.leaves(params))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run_checked


def _check_module(name: str, origins: list[CotangentOrigin]) -> None:
    """Raise ValueError unless a module's new weights and state, by their origins, result from exactly one update."""
    if all(origin.is_zero for origin in origins):
        raise ValueError(
            f"the module {name!r} is not used: the loss does not depend on it, so zeros would be returned for its "
            "weights; remove it from the trained parameters"
        )
    if not any(origin.modules for origin in origins):
        raise ValueError(
            f"the module {name!r} is not used by an eager call: its gradient comes from {_list_origins(origins)}; call "
            "the module, or get its weights through eager_weights"
        )
    for origin in origins:
        if origin.is_in_some_branches:
            raise ValueError(
                f"the module {name!r} is used in some branches of a condition: the other branches would return zeros "
                "for its weights; move the condition into the module"
            )
        if len(origin.modules) > 1:
            raise ValueError(describe_double_use(name, set(origin.modules)))
        if origin.others or not origin.modules:
            raise ValueError(
                f"the module {name!r} is also used outside its eager call: JAX would add the gradient from "
                f"{_list_origins([origin])} to the new weights; get the weights once from eager_weights, and use them "
                "as often as you like"
            )


def _list_origins(origins: list[CotangentOrigin]) -> str:
    """Return the names of the operations that a gradient comes from."""
    return ", ".join(sorted({operation for origin in origins for operation in origin.others}))


# --- origins of cotangents -------------------------------------------------------------------------------------------

# Equations that pass their operands on unchanged, the n-th operand as the n-th result.
_IDENTITIES = {"optimization_barrier", "copy", "copy_p", "sharding_constraint"}
# Equations that call a single program with their operands.
_CALLS = {"jit", "pjit", "closed_call", "remat", "remat2", "checkpoint", "core_call", "custom_lin", "shard_map"}
_ZEROS = {"broadcast_in_dim", "zeros_like", "full"}


@dataclass(frozen=True)
class CotangentOrigin:
    """Origin of a cotangent.

    Attributes:
        modules: names of the modules whose updates produce it; a module that occurs twice was updated twice.
        others: names of the other operations that contribute to it.
        is_zero: whether nothing contributes to it.
        is_in_some_branches: whether a condition decides which modules produce it.
    """

    modules: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    is_zero: bool = False
    is_in_some_branches: bool = False

    def plus(self, other: CotangentOrigin) -> CotangentOrigin:
        """Return the origin of the sum of two cotangents."""
        return CotangentOrigin(
            self.modules + other.modules,
            self.others + other.others,
            self.is_zero and other.is_zero,
            self.is_in_some_branches or other.is_in_some_branches,
        )


_ZERO = CotangentOrigin(is_zero=True)


@dataclass(frozen=True)
class _Operand:
    """Placeholder for a value that is an operand of the program, by number; its caller knows the origin."""

    number: int


def _as_origin(source: CotangentOrigin | _Operand) -> CotangentOrigin:
    return source if isinstance(source, CotangentOrigin) else CotangentOrigin(others=("an argument",))


def _trace_results(jaxpr: Jaxpr) -> list[CotangentOrigin | _Operand]:
    """Return the origin of each result, or the operand that it equals."""
    tracer = _OriginTracer(jaxpr)
    return [tracer.origin(var) for var in jaxpr.outvars]


class _OriginTracer:
    """Finds the origins of one program's variables."""

    def __init__(self, jaxpr: Jaxpr):
        self._numbers = {var: number for number, var in enumerate(jaxpr.invars)}
        self._constants = set(jaxpr.constvars)
        self._equations = {}
        for equation in jaxpr.eqns:
            for position, var in enumerate(equation.outvars):
                self._equations[var] = (equation, position)

    def origin(self, var: Var | Literal) -> CotangentOrigin | _Operand:
        """Return the origin of a variable."""
        if isinstance(var, Literal) or var in self._constants:
            return _ZERO
        if var in self._numbers:
            return _Operand(self._numbers[var])
        equation, position = self._equations[var]
        name = equation.primitive.name
        if equation.primitive is update_p:
            return CotangentOrigin(modules=(equation.params["module"],))
        if name in _IDENTITIES:
            return self.origin(equation.invars[position])
        if name in ("add", "add_any"):
            left, right = (_as_origin(self.origin(operand)) for operand in equation.invars)
            return left.plus(right)
        if name in _ZEROS and isinstance(equation.invars[0], Literal):
            return _ZERO
        if name in _CALLS:
            source = _trace_results(_program(equation.params["jaxpr"]))[position]
            # An operand of the called program is the caller's variable.
            return self.origin(equation.invars[source.number]) if isinstance(source, _Operand) else source
        if name == "scan":
            return self._find_loop_origin(equation, position)
        if name == "cond":
            return self._find_branch_origin(equation, position)
        return CotangentOrigin(others=(name,))

    def _find_loop_origin(self, equation: JaxprEqn, position: int) -> CotangentOrigin:
        """Return the origin of a loop's result."""
        origin = _as_origin(_trace_results(_program(equation.params["jaxpr"]))[position])
        # A stacked result holds one iteration's value at each index; a carried result is a sum over all iterations.
        _, num_carry = scan_counts(equation.params)
        is_stacked = position >= num_carry
        if is_stacked or not origin.modules:
            return origin
        # Two entries mark a double update, which `value_and_update` refuses.
        return CotangentOrigin(modules=origin.modules * 2)

    def _find_branch_origin(self, equation: JaxprEqn, position: int) -> CotangentOrigin:
        """Return the origin that all branches share, or a combined origin if they differ."""
        origins = []
        for branch in equation.params["branches"]:
            source = _trace_results(_program(branch))[position]
            if isinstance(source, _Operand):
                # The first operand is the index of the branch.
                source = self.origin(equation.invars[1 + source.number])
            origins.append(_as_origin(source))
        if len(set(origins)) == 1:
            return origins[0]
        modules = {module for origin in origins for module in origin.modules}
        return CotangentOrigin(modules=tuple(sorted(modules)), others=("cond",), is_in_some_branches=True)


def _program(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return the program of a closed jaxpr, or the jaxpr itself if it is not closed."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
