"""Liveness analysis of a traced program: walks its jaxpr in order, assuming the fusions that XLA makes.

Matrix products, collectives, kernels, gathers and loops write their results to memory. Elementwise operations,
broadcasts and reductions are fused into their readers, unless a product or loop reads the result, or several operations
read it and it is smaller than its inputs. A fused value keeps its inputs alive instead. Loops hold the stacks that they
read and write; an iteration's result goes into the stack as soon as it is computed.

This module is independent of models.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from plimsoll.framework.plan.jaxpr_analysis import LOCAL_EXCHANGE, SCALED_PRODUCTS, inner_jaxprs, scan_counts

_VIEWS = ("reshape", "squeeze", "expand_dims", "transpose", "name", "copy", "sharding_constraint", "stop_gradient")
_STORED = (
    "dot_general", "conv_general_dilated", *SCALED_PRODUCTS, "attention_kernel", LOCAL_EXCHANGE,
    "all_gather", "reduce_scatter", "psum", "psum_invariant",
    "all_to_all", "ppermute", "gather", "scatter", "scatter-add", "dynamic_update_slice", "scan", "while", "cond",
    "sort", "top_k", "cumsum", "random_bits", "threefry2x32", "pallas_call", "custom_call",
    "device_put",
)  # fmt: skip
_IN_PLACE = ("scatter", "scatter-add", "dynamic_update_slice", "psum", "psum_invariant")
_LOOPS = ("scan", "while", "cond")


def on_host(aval: ShapedArray) -> bool:
    """Return whether an abstract value is in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def count_bytes(aval: ShapedArray) -> int:
    """Return the bytes of an array, given its abstract value."""
    # Extended dtypes need not have an itemsize.
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


@dataclass(frozen=True)
class CompilerRules:
    """The differences between compilers, and the arrays to count.

    Attributes:
        costly: elementwise operations that are computed once and stored if several others read the result.
        late_reduction: reduce-scatters run after the rest of a loop's body, so their operands stay alive until its end.
        early_zeros: the buffers that scatters and loops write into are filled with zeros before anything else runs.
        pads_products: products copy operands and results with a dimension that is not a multiple of 8.
        adds_products: a product that is added to the table's gradient is never stored separately.
        table: shape of the array whose gradient is summed over the chunks of a loop.
        table_shards: number of shards of that gradient; a device holds one.
        nbytes: function that returns the bytes of an array, given its abstract value.
    """

    costly: tuple[str, ...] = ()
    late_reduction: bool = False
    early_zeros: bool = False
    pads_products: bool = False
    adds_products: bool = False
    table: tuple[int, ...] = ()
    table_shards: int = 1
    nbytes: Callable[[ShapedArray], int] = count_bytes


@dataclass(eq=False)
class _Value:
    """An array of the program. Times are indices of equations.

    Attributes:
        made_at: equation that produces it; -1 for an input.
        group: key of the report's breakdown that it counts toward.
        fusible: it may be fused into its readers, and is then not stored.
        operands: values that it is computed from; once fusion is decided, only stored ones.
        readers: equations that read it.
        owned: False if the caller of the program owns its memory.
        computed_at: time at which it is computed; for fused values this may be later than `made_at`.
        last_read: time of the last read.
    """

    aval: ShapedArray
    made_at: int
    nbytes: int
    group: str = "activations"
    fusible: bool = False
    operands: list[_Value] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    stored: bool = True
    owned: bool = True
    computed_at: int = -1
    last_read: int = -1

    def in_memory(self) -> list[_Value]:
        """Return the stored values that have to be alive for this one to be read."""
        return [self] if self.stored else self.operands


class _LiveValues:
    """The values in memory at one time, with their bytes by group, which are the same as summing over all of them.

    A value's bytes, group and last read must not change while it is in memory.

    Args:
        values: values that are in memory from the start.
        end: time of the end of the program; values that are last read then stay.
    """

    def __init__(self, values: Iterable[_Value], end: int):
        self._end = end
        self._values: set[_Value] = set()
        self._bytes_by_group: Counter[str] = Counter()
        # (last read, order of addition, value), the earliest first, so that `expire` looks only at what it removes.
        self._expiries: list[tuple[int, int, _Value]] = []
        self._num_added = 0
        self._total = 0
        self.update(values)

    def __contains__(self, value: _Value) -> bool:
        return value in self._values

    def add(self, value: _Value) -> None:
        """Add a value, unless it is in memory already."""
        if value in self._values:
            return
        self._values.add(value)
        self._bytes_by_group[value.group] += value.nbytes
        self._total += value.nbytes
        if value.last_read != self._end:
            heapq.heappush(self._expiries, (value.last_read, self._num_added, value))
            self._num_added += 1

    def update(self, values: Iterable[_Value]) -> None:
        """Add values."""
        for value in values:
            self.add(value)

    def discard(self, value: _Value) -> None:
        """Remove a value, if it is in memory."""
        if value in self._values:
            self._values.remove(value)
            self._bytes_by_group[value.group] -= value.nbytes
            self._total -= value.nbytes

    def expire(self, now: int) -> None:
        """Remove the values that were last read until now."""
        while self._expiries and self._expiries[0][0] <= now:
            self.discard(heapq.heappop(self._expiries)[2])

    def select_larger(self, best: Counter[str], inner: Counter[str]) -> Counter[str]:
        """Return the larger of `best` and of the bytes in memory plus `inner`, by group."""
        if self._total + inner.total() <= best.total():
            return best
        groups = Counter(inner)
        groups.update(self._bytes_by_group)
        return groups


@dataclass(eq=False)
class _Equation:
    """An operation of the program; `scratch` is the number of extra bytes that it needs while it runs."""

    name: str
    params: dict[str, Any]
    operands: list[_Value | None]
    results: list[_Value]
    scratch: int = 0


def find_peak_bytes(
    jaxpr: Jaxpr, rules: CompilerRules, groups: list[str] | None = None, *, frees_outputs: bool = False
) -> Counter[str]:
    """Return the bytes by group at the memory peak of a program, excluding its inputs, which the caller owns.

    Args:
        jaxpr: the program, an open jaxpr.
        rules: the compiler's rules.
        groups: groups of the program's outputs; by default they are activations.
        frees_outputs: the outputs leave memory as soon as they are computed, instead of staying until the end.
    """
    program = _Program(rules)
    outputs = program.add_jaxpr(jaxpr, program.borrow_inputs(jaxpr))
    for value, group in zip(outputs, groups or [], strict=False):
        if value is not None:
            value.group = group
    kept_outputs = [] if frees_outputs else outputs
    return program.run(kept_outputs, set())


class _Program:
    """A jaxpr, or the body of one of its loops, as equations and values."""

    def __init__(self, rules: CompilerRules):
        self.rules = rules
        self.equations: list[_Equation] = []
        self.values: list[_Value] = []

    def value(self, aval: ShapedArray, made_at: int, **fields: Any) -> _Value:
        new_value = _Value(aval, made_at, self.rules.nbytes(aval), **fields)
        self.values.append(new_value)
        return new_value

    def borrow_inputs(self, jaxpr: Jaxpr) -> list[_Value]:
        """Return values of a jaxpr's inputs whose memory the caller owns."""
        return [self.value(_aval(var), -1, owned=False) for var in jaxpr.invars]

    # --- reading a jaxpr: calls are inlined, views are replaced by the values that they show -------------------------

    def add_jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[_Value | None]) -> list[_Value | None]:
        """Append the equations of a jaxpr and return the values of its outputs, None for literals."""
        value_by_var: dict[Var, _Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            value_by_var[var] = self.value(_aval(var), -1, owned=False)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            operands = [None if isinstance(atom, Literal) else value_by_var[atom] for atom in eqn.invars]
            bodies = inner_jaxprs(eqn.params)
            if bodies and name not in _STORED:
                # The body takes the last operands of the call.
                num_skipped = len(operands) - len(bodies[0].invars)
                results = self.add_jaxpr(bodies[0], operands[num_skipped:])
            elif name in _VIEWS and operands[0] is not None:
                results = operands[:1]
            else:
                results = self._equation(eqn, name, operands)
            value_by_var.update(zip(eqn.outvars, results, strict=False))
        return [None if isinstance(atom, Literal) else value_by_var[atom] for atom in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, name: str, operands: list[_Value | None]) -> list[_Value]:
        index = len(self.equations)
        rules = self.rules
        operand_values = [value for value in operands if value is not None]
        results = []
        for var in eqn.outvars:
            result = self.value(_aval(var), index, fusible=name not in _STORED, operands=list(operand_values))
            results.append(result)
        for value in operand_values:
            value.readers.append(index)
        # Assign gradients to their group, and count results that are shards of the table's gradient as shards.
        if name == "scan":
            _, num_carries = scan_counts(eqn.params)
            self._share_table(results[:num_carries])
        for result in results:
            if name == "dot_general" and result.aval.shape == rules.table:
                result.group = "gradients"
                if rules.adds_products and rules.table_shards == 1:
                    result.nbytes = 0
            if name == "reduce_scatter":
                # The operand is one device's gradient before the sum over devices.
                for reduced in (result, *operand_values):
                    reduced.group = "gradients"
            if result.fusible:
                # A result that is computed from a shard of the table is a shard too: an operand has the result's shape
                # but counts fewer bytes than a full array of that shape.
                alike = [operand for operand in operand_values if operand.aval.shape == result.aval.shape]
                if any(operand.nbytes < rules.nbytes(operand.aval) for operand in alike):
                    self._share_table([result])
        scratch = self._scratch(operand_values, results[0]) if name == "dot_general" else 0
        self.equations.append(_Equation(name, eqn.params, operands, results, scratch))
        return results

    def _scratch(self, operands: list[_Value], result: _Value) -> int:
        """Return the bytes that a matrix product needs in addition to its operands and its result."""
        is_shared = result.aval.shape == self.rules.table and self.rules.table_shards > 1
        padded_bytes = 0
        if self.rules.pads_products:
            # Results other than the table's are sliced to size where they are read, so they need no padded copy.
            written = [result] if is_shared else []
            for value in (*operands, *written):
                # Tensor cores need dimensions that are multiples of 8; smaller ones are not padded.
                if any(dim % 8 for dim in value.aval.shape if dim > 8):
                    padded_bytes += value.nbytes
        # The product is one shard, before it is added to the sum.
        share_bytes = result.nbytes // self.rules.table_shards if is_shared else 0
        return padded_bytes + share_bytes

    def _share_table(self, values: list[_Value]) -> None:
        for value in values:
            if value.aval.shape == self.rules.table:
                value.nbytes //= self.rules.table_shards
                value.group = "gradients"

    # --- what is stored, when it is computed, and how long it stays -------------------------------------------------

    def _fuse(self, outputs: set[_Value]) -> None:
        """Decide which fusible values are stored, and replace `operands` by the stored values that each depends on."""
        end = len(self.equations)
        for value in self.values:
            if not value.fusible:
                continue
            # Values are in program order, so the stored inputs of the operands are already decided.
            roots: dict[_Value, None] = {}
            for operand in value.operands:
                roots.update(dict.fromkeys(operand.in_memory()))
            value.operands = list(roots)
            reader_names = {self.equations[index].name for index in value.readers if index < end}
            storing_names = reader_names.intersection(_STORED)
            value.stored = bool(storing_names) or value in outputs or end in value.readers
            if not roots and value.made_at >= 0:
                # A constant is written directly where it is needed: into the carry of a loop, or into the buffer that a
                # scatter updates.
                free_names = {"scan"} if self.rules.early_zeros else {"scan", "scatter-add"}
                value.stored = bool(storing_names - free_names)
            elif len(set(value.readers)) > 1 and value.made_at >= 0:
                is_costly = self.equations[value.made_at].name in self.rules.costly
                value.stored |= is_costly or self._smaller(value)

    def _smaller(self, value: _Value) -> bool:
        """Return whether storing a value takes less memory than keeping its inputs alive."""
        root_sizes = [operand.nbytes for operand in value.operands if operand.owned]
        # Operands smaller than an eighth of the value, such as vectors next to matrices, are ignored.
        large_bytes = sum(size for size in root_sizes if 8 * size >= value.nbytes)
        is_normed = bool(self.rules.costly) and value.nbytes == large_bytes and len(root_sizes) > 1
        return value.nbytes < large_bytes or is_normed

    def _schedule(self, outputs: set[_Value], late: bool) -> None:
        """Find when each value is computed and last read; with `late`, reduce-scatters run at the end."""
        # Go backwards, because a fused value is computed together with its first reader, which may itself be fused.
        for value in reversed(self.values):
            value.computed_at = self._find_compute_index(value, outputs, late)
        for value in self.values:
            value.last_read = value.computed_at
        end = len(self.equations)
        for value in self.values:
            if value.stored:
                for operand in value.operands:
                    for root in operand.in_memory():
                        root.last_read = max(root.last_read, value.computed_at)
            if end in value.readers:
                for root in value.in_memory():
                    root.last_read = end

    def _find_compute_index(self, value: _Value, outputs: set[_Value], late: bool) -> int:
        """Return the index of the equation at which a value is computed."""
        equation = self.equations[value.made_at] if value.made_at >= 0 else None
        if self.rules.early_zeros and value.made_at > 0 and equation is not None:
            # A loop's stacked result, and a stored constant, begin as zeros.
            is_stacked = False
            if equation.name == "scan":
                _, num_carries = scan_counts(equation.params)
                is_stacked = value in equation.results[num_carries:]
            if is_stacked or (value.fusible and value.stored and not value.operands):
                return 0
        # Storing a value early frees memory if it is smaller than its inputs.
        is_early = len(value.readers) > 1 and value.stored and equation is not None and self._smaller(value)
        end = len(self.equations)
        if value.fusible and value.readers and value not in outputs and not is_early:
            # An equation reads its operands when the first of its results is computed.
            read_times = []
            for index in value.readers:
                results = self.equations[index].results if index < end else []
                read_times.append(min((result.computed_at for result in results), default=index))
            return max(value.made_at, min(read_times))
        if late and equation is not None and equation.name == "reduce_scatter":
            return end
        return value.made_at

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, outputs: list[_Value | None], stacked: set[_Value], late: bool = False) -> Counter[str]:
        """Return the peak bytes by group while the equations run.

        Args:
            outputs: outputs of the program; those that are not in `stacked` stay alive until the end.
            stacked: outputs that the caller owns once they are computed.
            late: reduce-scatters run at the end.
        """
        end = len(self.equations)
        for value in outputs:
            if value is not None and value not in stacked:
                value.readers.append(end)
        self._fuse(stacked)
        self._schedule(stacked, late)
        values_by_time: dict[int, list[_Value]] = {}
        for value in self.values:
            if value.stored and value.owned and (value.made_at >= 0 or value.fusible):
                values_by_time.setdefault(value.computed_at, []).append(value)
        inputs = (value for value in self.values if value.made_at == -1 and value.owned and not value.fusible)
        live = _LiveValues(inputs, end)
        best: Counter[str] = Counter()
        # An empty equation represents the end, when outputs and late reductions are computed.
        nothing = _Equation("", {}, [], [])
        for now, equation in enumerate([*self.equations, nothing]):
            new_values = values_by_time.get(now, [])
            for value in sorted(new_values, key=lambda value: value.made_at):
                if value.fusible:
                    _add_fused_value(value, equation, live)
            best = live.select_larger(best, Counter())
            if equation.name == "scan":
                inside_loop = self._scan(equation, live, now)
                best = live.select_larger(best, inside_loop)
            elif equation.name in _LOOPS:
                best = live.select_larger(best, self._largest_body(equation))
            for value in new_values:
                if value.fusible:
                    continue
                if equation.name in _IN_PLACE:
                    # The update overwrites one of its operands.
                    for operand in value.operands:
                        if operand in live and operand.last_read <= now and operand.nbytes == value.nbytes:
                            live.discard(operand)
                            break
                live.add(value)
            best = live.select_larger(best, Counter(activations=equation.scratch))
            live.expire(now)
        return best

    def _largest_body(self, equation: _Equation) -> Counter[str]:
        """Return the peak bytes of one iteration of a while loop, or of the largest branch."""
        most_by_body = []
        for body in inner_jaxprs(equation.params):
            inner = _Program(self.rules)
            outputs = inner.add_jaxpr(body, inner.borrow_inputs(body))
            most_by_body.append(inner.run(outputs, set()))
        return max(most_by_body, key=Counter.total)

    def _scan(self, equation: _Equation, live: _LiveValues, now: int) -> Counter[str]:
        """Return the peak bytes of one iteration of a scan. Updates `live`, because the body owns its carry."""
        (body,) = inner_jaxprs(equation.params)
        num_consts, num_carries = scan_counts(equation.params)
        first_stack = num_consts + num_carries
        inner = _Program(self.rules)
        inputs: list[_Value] = []
        for i, var in enumerate(body.invars):
            # A slice of a stack is fusible: it may be read in place. Constants belong to the outer program.
            inputs.append(inner.value(_aval(var), -1, owned=i >= num_consts, fusible=i >= first_stack))
        inner._share_table(inputs[num_consts:first_stack])
        outputs = inner.add_jaxpr(body, inputs)
        stacked = {value for value in outputs[num_carries:] if value is not None and value.made_at >= 0}
        for value, stack in zip(outputs, equation.results, strict=True):
            if value in stacked and stack.group == "gradients":
                value.group = "gradients"
        # The body owns its carry and reuses the initial one if nothing reads that afterwards.
        initial_carry = equation.operands[num_consts:first_stack]
        for value in initial_carry:
            if value is not None and value.last_read <= now:
                live.discard(value)
        live.update(equation.results[num_carries:])
        # For inputs in host memory, the next slice is prefetched while the current one is used.
        prefetched_bytes = 0
        for value, var in zip(equation.operands[first_stack:], body.invars[first_stack:], strict=True):
            if value is not None and value.made_at == -1 and on_host(value.aval):
                slice_on_device = _aval(var).update(memory_space=jax.memory.Space.Device)
                prefetched_bytes += self.rules.nbytes(slice_on_device)
        most = inner.run(outputs, stacked, self.rules.late_reduction)
        return most + Counter(activations=prefetched_bytes)


def _aval(var: Var | Literal) -> ShapedArray:
    """Return the abstract value of a variable. Tokens, which have no shape, do not occur in a model's passes."""
    return cast(ShapedArray, var.aval)


def _add_fused_value(value: _Value, equation: _Equation, live: _LiveValues) -> None:
    """Add a fused value to `live`; it overwrites an operand that nothing else reads, if there is one."""
    overwritable: list[_Value] = []
    for operand in value.operands:
        is_dying = operand in live and operand.last_read == value.computed_at
        if is_dying and operand.nbytes >= value.nbytes:
            overwritable.append(operand)
    if overwritable and value.made_at >= 0:
        # An operation that writes to memory cannot write over an operand that it still reads.
        read_now = equation.name in _STORED and overwritable[0] in equation.operands
        if not read_now:
            live.discard(overwritable[0])
    live.add(value)
