"""How much a traced program holds at once: its jaxpr walked in order, assuming the fusions that XLA makes.

Products, collectives, kernels, gathers and loops write their results to memory. Elementwise operations, broadcasts and
reductions are fused into what reads them, unless a product or loop reads the result, or several operations do and the
result is smaller than what it is computed from. A fused value keeps what it is computed from alive instead. Loops hold
the stacks that they read and write; what an iteration stores goes into the stack as soon as it is computed.

Nothing here knows of models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from framework.plan.jaxprs import inner_jaxprs, scan_counts

_VIEWS = ("reshape", "squeeze", "expand_dims", "transpose", "name", "copy", "sharding_constraint", "stop_gradient")
_STORED = (
    "dot_general", "conv_general_dilated", "attention_kernel", "all_gather", "reduce_scatter", "psum", "psum_invariant",
    "all_to_all", "ppermute", "gather", "scatter", "scatter-add", "dynamic_update_slice", "scan", "while", "cond",
    "sort", "top_k", "cumsum", "random_bits", "threefry2x32", "pallas_call", "custom_call",
    "device_put",
)  # fmt: skip
_IN_PLACE = ("scatter", "scatter-add", "dynamic_update_slice", "psum", "psum_invariant")
_LOOPS = ("scan", "while", "cond")


def on_host(aval: Any) -> bool:
    """Whether an abstract value says that it is in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


@dataclass(frozen=True)
class Rules:
    """What differs between compilers.

    Args:
        costly: elementwise operations that are computed once and stored when several others read the result.
        late_reduction: reduce-scatters run behind the rest of a loop's body, so what they reduce stays until its end.
        early_zeros: what scatters and loops write into is filled with zeros before anything else.
        pads_products: products copy operands and results with a dimension that is no multiple of 8.
        adds_products: a product that is added to the table's gradient is never stored by itself.
        table: shape of the array whose gradient is summed over the chunks of a loop. table_parts: a device holds one.
        nbytes: what an array of this abstract value takes up.
    """

    costly: tuple[str, ...] = ()
    late_reduction: bool = False
    early_zeros: bool = False
    pads_products: bool = False
    adds_products: bool = False
    table: tuple[int, ...] = ()
    table_parts: int = 1
    nbytes: Callable[[Any], int] = _nbytes


@dataclass(eq=False)
class _Value:
    aval: Any
    made_at: int  # index of the equation, -1 for an input
    nbytes: int
    group: str = "activations"
    fusible: bool = False
    operands: list[_Value] = field(default_factory=list)  # once fusion is decided: what is stored of them
    readers: list[int] = field(default_factory=list)
    stored: bool = True
    held: bool = True  # False: it belongs to whoever runs the program
    at: int = -1  # when it is computed, which for fused values may be later than made_at
    last: int = -1  # when it is read last


@dataclass(eq=False)
class _Equation:
    name: str
    params: dict[str, Any]
    operands: list[_Value | None]
    results: list[_Value]
    scratch: int = 0  # bytes needed while it runs


def most_held(jaxpr: Any, rules: Rules, groups: list[str] | None = None, *, taken: bool = False) -> Counter[str]:
    """Bytes by group at the fullest instant of a program whose inputs are its caller's. `groups` are those of its
    outputs, which are `taken` away as soon as they are there, or stay."""
    program = _Program(rules)
    outputs = program.read(jaxpr, [program.value(v.aval, -1, held=False) for v in jaxpr.invars])
    for value, group in zip(outputs, groups or [], strict=False):
        if value is not None:
            value.group = group
    return program.run([] if taken else outputs, set())


class _Program:
    def __init__(self, rules: Rules):
        self.rules = rules
        self.equations: list[_Equation] = []
        self.values: list[_Value] = []

    def value(self, aval: Any, made_at: int, **fields: Any) -> _Value:
        self.values.append(_Value(aval, made_at, self.rules.nbytes(aval), **fields))
        return self.values[-1]

    # --- reading a jaxpr: calls are inlined, views are the values that they show -------------------------------------

    def read(self, jaxpr: Any, inputs: list[_Value | None]) -> list[_Value | None]:
        env: dict[Any, _Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {var: self.value(var.aval, -1, held=False) for var in jaxpr.constvars}

        def get(atom: Any) -> _Value | None:
            return None if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            operands, name, bodies = [get(atom) for atom in eqn.invars], eqn.primitive.name, inner_jaxprs(eqn.params)
            if bodies and name not in _STORED:
                results = self.read(bodies[0], operands[len(operands) - len(bodies[0].invars) :])
            elif name in _VIEWS and operands[0] is not None:
                results = operands[:1]
            else:
                results = self._equation(eqn, name, operands)
            env.update(zip(eqn.outvars, results, strict=False))
        return [get(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, name: str, operands: list[_Value | None]) -> list[_Value]:
        index, known = len(self.equations), [value for value in operands if value is not None]
        results = [self.value(v.aval, index, fusible=name not in _STORED, operands=list(known)) for v in eqn.outvars]
        for value in known:
            value.readers.append(index)
        if name == "scan":
            _, num_carries = scan_counts(eqn.params)
            self._share_table(results[:num_carries])
        for value in results:
            if name == "dot_general" and value.aval.shape == self.rules.table:
                value.group = "gradients"
                if self.rules.adds_products and self.rules.table_parts == 1:
                    value.nbytes = 0
            if name == "reduce_scatter":
                for reduced in (value, *known):
                    reduced.group = "gradients"
            shares = (v for v in known if v.nbytes < self.rules.nbytes(v.aval) and v.aval.shape == value.aval.shape)
            if value.fusible and any(shares):  # what is computed from a share is one
                self._share_table([value])
        scratch = self._scratch(known, results[0]) if name == "dot_general" else 0
        self.equations.append(_Equation(name, eqn.params, operands, results, scratch))
        return results

    def _scratch(self, operands: list[_Value], result: _Value) -> int:
        shared = result.aval.shape == self.rules.table and self.rules.table_parts > 1
        written = [result] if shared else []  # else it is cut to size where it is read
        odd = (v for v in (*operands, *written) if any(dim % 8 for dim in v.aval.shape if dim > 8))
        padded = sum(v.nbytes for v in odd) if self.rules.pads_products else 0
        return padded + (result.nbytes // self.rules.table_parts if shared else 0)  # a share, before it is added

    def _share_table(self, values: list[_Value]) -> None:
        for value in values:
            if value.aval.shape == self.rules.table:
                value.nbytes //= self.rules.table_parts
                value.group = "gradients"

    # --- what is stored, when it is computed, and how long it stays -------------------------------------------------

    def _fuse(self, outputs: set[_Value]) -> None:
        end = len(self.equations)
        for value in self.values:
            if not value.fusible:
                continue
            roots = dict.fromkeys(r for v in value.operands for r in ([v] if v.stored else v.operands))
            value.operands = list(roots)
            storing = {self.equations[i].name for i in value.readers if i < end}.intersection(_STORED)
            value.stored = bool(storing) or value in outputs or end in value.readers
            if not roots and value.made_at >= 0:  # a constant: written where it is needed
                value.stored = bool(storing - ({"scan"} if self.rules.early_zeros else {"scan", "scatter-add"}))
            elif len(set(value.readers)) > 1 and value.made_at >= 0:
                value.stored |= self.equations[value.made_at].name in self.rules.costly or self._smaller(value)

    def _smaller(self, value: _Value) -> bool:
        roots = [v.nbytes for v in value.operands if v.held]
        large = sum(size for size in roots if 8 * size >= value.nbytes)
        normed = bool(self.rules.costly) and value.nbytes == large and len(roots) > 1
        return value.nbytes < large or normed

    def _schedule(self, outputs: set[_Value], late: bool) -> None:
        end = len(self.equations)

        def read_at(index: int) -> int:
            return end if index == end else min((v.at for v in self.equations[index].results), default=index)

        for value in reversed(self.values):
            value.at, made = value.made_at, self.equations[value.made_at] if value.made_at >= 0 else None
            if self.rules.early_zeros and value.made_at > 0 and self._begins_as_zeros(value):
                value.at = 0
                continue
            if late and made and made.name == "reduce_scatter":
                value.at = end
            early = len(value.readers) > 1 and value.stored and made and self._smaller(value)
            if value.fusible and value.readers and value not in outputs and not early:
                value.at = max(value.made_at, min(read_at(index) for index in value.readers))
        for value in self.values:
            value.last = value.at
        for value in self.values:
            if value.stored:
                for root in value.operands:
                    for kept in [root] if root.stored else root.operands:
                        kept.last = max(kept.last, value.at)
            if end in value.readers:
                for kept in [value] if value.stored else value.operands:
                    kept.last = end

    def _begins_as_zeros(self, value: _Value) -> bool:
        equation = self.equations[value.made_at]
        stack = equation.name == "scan" and value in equation.results[scan_counts(equation.params)[1] :]
        return stack or (value.fusible and value.stored and not value.operands)

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, outputs: list[_Value | None], stacked: set[_Value], late: bool = False) -> Counter[str]:
        """The most that is held while the equations run; `stacked` outputs belong to the caller once computed."""
        end = len(self.equations)
        for value in outputs:
            if value is not None and value not in stacked:
                value.readers.append(end)
        self._fuse(stacked)
        self._schedule(stacked, late)
        made: dict[int, list[_Value]] = {}
        for value in self.values:
            if value.stored and value.held and (value.made_at >= 0 or value.fusible):
                made.setdefault(value.at, []).append(value)
        live = {v for v in self.values if v.made_at == -1 and v.held and not v.fusible}
        best: Counter[str] = Counter()
        nothing = _Equation("", {}, [], [])
        for now, equation in enumerate([*self.equations, nothing]):
            for value in sorted(made.get(now, []), key=lambda v: v.made_at):
                if value.fusible:
                    over = [v for v in value.operands if v in live and v.last == value.at and v.nbytes >= value.nbytes]
                    read_now = equation.name in _STORED and over and over[0] in equation.operands
                    if over and value.made_at >= 0 and not read_now:
                        live.discard(over[0])
                    live.add(value)
            best = _larger(best, live, Counter())
            if equation.name in _LOOPS:
                best = _larger(best, live, self._loop(equation, live, now))
            for value in made.get(now, []):
                if not value.fusible:
                    if equation.name in _IN_PLACE:
                        dying = (v for v in value.operands if v in live and v.last <= now and v.nbytes == value.nbytes)
                        live.discard(next(dying, value))
                    live.add(value)
            best = _larger(best, live, Counter(activations=equation.scratch))
            live = {v for v in live if v.last > now or v.last == end}
        return best

    def _loop(self, equation: _Equation, live: set[_Value], now: int) -> Counter[str]:
        most = []
        for body in inner_jaxprs(equation.params):
            inner = _Program(self.rules)
            if equation.name != "scan":
                outputs = inner.read(body, [inner.value(v.aval, -1, held=False) for v in body.invars])
                most.append(inner.run(outputs, set()))
                continue
            consts, carries = scan_counts(equation.params)
            first = consts + carries  # of what it goes through
            inputs = [inner.value(v.aval, -1, held=i >= consts, fusible=i >= first) for i, v in enumerate(body.invars)]
            inner._share_table(inputs[consts:first])
            outputs = inner.read(body, list(inputs))
            stacked = {value for value in outputs[carries:] if value is not None and value.made_at >= 0}
            for value, whole in zip(outputs, equation.results, strict=True):
                if value in stacked and whole.group == "gradients":
                    value.group = "gradients"
            # The body owns its carry, and takes the initial one over where nobody reads it afterwards.
            live -= {value for value in equation.operands[consts:first] if value is not None and value.last <= now}
            live |= set(equation.results[carries:])
            coming = sum(  # of inputs in host memory the next slice is on its way
                self.rules.nbytes(inside.aval.update(memory_space=jax.memory.Space.Device))
                for value, inside in zip(equation.operands[first:], body.invars[first:], strict=True)
                if value is not None and value.made_at == -1 and on_host(value.aval)
            )
            most.append(inner.run(outputs, stacked, self.rules.late_reduction) + Counter(activations=coming))
        return max(most, key=Counter.total)


def _larger(best: Counter[str], live: set[_Value], inner: Counter[str]) -> Counter[str]:
    if sum(value.nbytes for value in live) + inner.total() <= best.total():
        return best
    groups = Counter(inner)
    for value in live:
        groups[value.group] += value.nbytes
    return groups
