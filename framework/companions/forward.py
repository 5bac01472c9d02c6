"""A model's forward pass over batches, for a companion: one compiled function from a batch to arrays of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from framework.devices.executables import HostBytes, compiled
from framework.layers.base import Context, batch_specs
from framework.layers.head import LMHead
from framework.layout import Group, Nested, merge
from framework.models.causal_lm import CausalLM
from framework.program.program import Program
from framework.program.rows import Batch
from framework.program.whole import Whole
from framework.schedules.layerwise.programs import Compile, Ledger
from framework.schedules.step import microbatches

# (head, its prepared weights, x_BSD before the final norm, context) -> {name: array [B, S, ...]}.
HeadFunction = Callable[[LMHead, Nested, jax.Array, Context], dict[str, jax.Array]]
_GROUPS: tuple[Group, ...] = ("frozen", "buffer")


def log_probs_as(name: str) -> HeadFunction:
    """The function that returns {name: f32[B, S]}, the log-probability of each of the batch's targets."""

    def function(head: LMHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        return {name: head.log_probs(weights, x_BSD, ctx)}

    return function


class Forward:
    """The forward pass of a program's model, compiled once, over batches as the data delivers them.

    A batch that is trained on in microbatches runs in as many parts here, as it would not fit in one piece; the rows of
    the results are in the batch's order.

    Args:
        program: whose model and layout these are; its step is one program (`Whole`).
        function: what is wanted of the input of the head.
        what: what a person is told is being compiled, such as "the reference".
        group: of the state, whose weights count: "parameter" or "ema".
        change: what becomes of all parameters before they are used, inside jit.
        accumulate: parts in which a batch runs.

    Raises:
        ValueError: the model is no language model, or the step is several programs.
    """

    def __init__(
        self,
        program: Program,
        function: HeadFunction,
        *,
        what: str,
        group: str = "parameter",
        change: Callable[[Nested], Nested] = lambda params: params,
        accumulate: int = 1,
    ):
        execution = program.execution
        if not isinstance(execution, Whole):
            raise ValueError(f"memory.update = layer_programs: {what} needs a model that runs as one program")
        model = execution.running.model
        if not isinstance(model, CausalLM):
            raise ValueError(f"model is a {type(model).__name__}; {what} is of a language model (CausalLM)")
        self.model = model
        self.program = program
        self._function = function
        self._what = what
        self._groups: tuple[Group, ...] = ("ema" if group == "ema" else "parameter", *_GROUPS)
        self._change = change
        self._accumulate = accumulate

    def __call__(self, state: Nested, batch: Batch, after: Any = ()) -> Batch:
        """The arrays of the batch's rows, on the devices.

        Args:
            state: with the groups of weights and buffers; it stays.
            batch: at least the arrays that the data delivers for training.
            after: arrays of programs that were started before.
        """
        weights = [state[group] for group in self._groups]
        delivered = {name: batch[name] for name in self._delivered}
        if not self._waits:
            return self._compiled(*weights, delivered)
        jax.block_until_ready(after)
        return jax.block_until_ready(self._compiled(*weights, delivered))

    @property
    def resident_bytes(self) -> int:
        """The bytes of the weights in a device's memory."""
        return sum(self.program.layout.bytes_per_device(group, "device") for group in self._groups)

    @property
    def hosted_bytes(self) -> int:
        """The bytes of the weights in host memory, of one device."""
        return sum(self.program.layout.bytes_per_device(group, "pinned_host") for group in self._groups)

    def rehearsed(self, compile: Compile, *, beside: int) -> Ledger:
        """Compiles the function with `compile`: what a call needs.

        Args:
            compile: see `Compile`. What it compiles for the devices that are here is what is called.
            beside: bytes on a device that are there as well, and are no arguments.
        """
        hosted = self.hosted_bytes
        run = compile(self._lowered(), HostBytes(arguments=hosted))
        if run.run is not None:
            self.__dict__["_compiled"] = run.run
        ledger = Ledger()
        ledger.count(run, run.peak + beside)
        ledger.host_peak = run.host_temp
        # Each weight in host memory is brought once for each part of the batch.
        ledger.moved = max(run.moved, hosted * self._accumulate)
        return ledger

    @cached_property
    def _delivered(self) -> Sequence[str]:
        """The names of the batch's arrays that the function takes."""
        return tuple(self.program.experiment.data.sequence_arrays())

    @property
    def _waits(self) -> bool:
        """Whether programs run one at a time: the devices of a CPU share threads, for which two programs with
        collectives could wait for ever."""
        return self.program.mesh.size > 1 and self.program.mesh.devices.flat[0].platform == "cpu"

    @cached_property
    def _compiled(self) -> Any:
        return compiled(self._lowered(), self.program.execution.compiler_options, what=self._what)

    def _lowered(self) -> Any:
        """The function, lowered from specs alone."""
        layout = self.program.layout
        abstract_weights = [layout.abstract(layout.specs[group]) for group in self._groups]
        delivered = layout.abstract(batch_specs(self.program.experiment.data.sequence_arrays()))
        results = jax.eval_shape(self._rows, *abstract_weights, delivered)
        shapes = {name: (x.shape, str(x.dtype)) for name, x in results.items()}
        shardings = {name: layout.sharding(spec) for name, spec in batch_specs(shapes).items()}
        return self.program.jit(self._rows, out_shardings=shardings).lower(*abstract_weights, delivered)

    def _rows(self, params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> dict[str, jax.Array]:
        """The whole function, of weights and a batch."""
        params = self._change(merge(params, frozen))
        if self._accumulate == 1:
            return self._part(params, buffers, batch)
        ctx = self.program.evaluation_context(batch)
        parts = microbatches(batch, self._accumulate, ctx)
        results = jax.lax.map(lambda part: self._part(params, buffers, part), parts)
        return jax.tree.map(_in_order, results)

    def _part(self, params: Nested, buffers: Nested, batch: Nested) -> dict[str, jax.Array]:
        """The function of one microbatch."""
        model = self.model
        layout = self.program.layout
        ctx = self.program.evaluation_context(batch)
        places = model.stage_specs(layout.specs[self._groups[0]], layout.specs["frozen"])
        x_BSD = None
        # Not `model.hidden`, which knows no sections in the place of a stack.
        for stage in model.stages:
            if stage != "head":
                x_BSD, _ = model.run(stage, params, x_BSD, ctx, buffers, places)
        assert x_BSD is not None
        weights = model.head_weights(params, ctx, places)
        return self._function(model.language_head, weights, x_BSD, ctx)


def _in_order(parts: jax.Array) -> jax.Array:
    """[count, B / count, ...] -> [B, ...], the inverse of `microbatches`."""
    count, rows, *inner = parts.shape
    return jnp.moveaxis(parts, 0, 1).reshape(count * rows, *inner)
