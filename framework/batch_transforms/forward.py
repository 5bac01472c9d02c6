"""A model's forward pass for an auxiliary model: one compiled function from a batch to per-token arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.devices.executables import HostBytes, compile_or_load
from plimsoll.framework.layers.base import Context, batch_specs
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layout import Group, Nested, TrainState, merge
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.rows import Batch
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker
from plimsoll.framework.schedules.step import microbatches

# (head, its prepared weights, x_BSD before the final norm, context) -> {name: array [B, S, ...]}.
HeadFunction = Callable[[LMHead, Nested, jax.Array, Context], dict[str, jax.Array]]
_GROUPS: tuple[Group, ...] = ("frozen", "buffer")


def log_probs_as(name: str) -> HeadFunction:
    """Return a head function that computes {name: f32[B, S]}, the log-probability of each target of the batch."""

    def function(head: LMHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        return {name: head.log_probs(weights, x_BSD, ctx)}

    return function


class AuxiliaryForward:
    """The forward pass of a program's model, compiled once, over batches as the data pipeline delivers them.

    The batch is split into the same number of microbatches as in training, because the whole batch might not fit. The
    results keep the row order of the batch.

    Args:
        program: program with the model and its layout; its step must be a single program (`JitStep`).
        function: computes the results from the input of the head.
        what: name of the model in status and error messages, such as "the reference".
        group: state group to take the weights from: "parameter" or "ema".
        change: function applied to all parameters before use, inside jit.
        accumulate: number of microbatches per batch.

    Raises:
        ValueError: the model is not a language model, or the step consists of several programs.
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
        backend = program.backend
        if not isinstance(backend, JitStep):
            raise ValueError(f"memory.update = layer_programs: {what} needs a model that runs as one program")
        model = backend.running.model
        if not isinstance(model, CausalLM):
            raise ValueError(f"model is a {type(model).__name__}; {what} needs a language model (CausalLM)")
        self.model = model
        self.program = program
        self._function = function
        self._what = what
        self._groups: tuple[Group, ...] = ("ema" if group == "ema" else "parameter", *_GROUPS)
        self._change = change
        self._accumulate = accumulate

    def __call__(self, state: TrainState, batch: Batch, after: Any = ()) -> Batch:
        """Return the function's results for the rows of the batch, on the devices.

        Args:
            state: state with the groups of weights and buffers; it is not donated.
            batch: batch with at least the arrays that the data pipeline delivers for training.
            after: results of programs that were started earlier; waited for where programs must run one at a time.
        """
        weights = [state[group] for group in self._groups]
        delivered = {name: batch[name] for name in self._input_names}
        if not self._runs_alone:
            return self._compiled(*weights, delivered)
        jax.block_until_ready(after)
        return jax.block_until_ready(self._compiled(*weights, delivered))

    @property
    def resident_bytes(self) -> int:
        """The bytes of the weights in the memory of one device."""
        return sum(self.program.layout.bytes_per_device(group, "device") for group in self._groups)

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of the offloaded weights in host memory, per device."""
        return sum(self.program.layout.bytes_per_device(group, "pinned_host") for group in self._groups)

    def dry_run(self, compile: Compile, *, other_bytes: int) -> MemoryTracker:
        """Compile the function with `compile` and return the memory that a call needs.

        Args:
            compile: see `Compile`. If it compiles for the attached devices, later calls run that executable.
            other_bytes: bytes on a device that are allocated during the call in addition to its arguments.
        """
        offloaded = self.offloaded_bytes
        run = compile(self._lower(), HostBytes(arguments=offloaded))
        if run.run is not None:
            # Fill the cached property, so that calls run this executable instead of compiling again.
            self.__dict__["_compiled"] = run.run
        tracker = MemoryTracker()
        tracker.count(run, run.peak + other_bytes)
        tracker.host_peak = run.host_temp
        # Each offloaded weight is copied to the device once per microbatch.
        tracker.moved = max(run.moved, offloaded * self._accumulate)
        return tracker

    @cached_property
    def _input_names(self) -> Sequence[str]:
        """The names of the batch arrays that the function takes."""
        return tuple(self.program.experiment.data.sequence_arrays())

    @property
    def _runs_alone(self) -> bool:
        """True if programs must run one at a time.

        The devices of a CPU share a thread pool, so two concurrent programs with collectives could deadlock.
        """
        return self.program.mesh.size > 1 and self.program.mesh.devices.flat[0].platform == "cpu"

    @cached_property
    def _compiled(self) -> Any:
        return compile_or_load(self._lower(), self.program.backend.compiler_options, what=self._what)

    def _lower(self) -> Any:
        """Lower the function from specs only, without arrays."""
        layout = self.program.layout
        abstract_weights = [layout.abstract(layout.specs[group]) for group in self._groups]
        delivered = layout.abstract(batch_specs(self.program.experiment.data.sequence_arrays()))
        results = jax.eval_shape(self._run_batch, *abstract_weights, delivered)
        shapes = {name: (x.shape, str(x.dtype)) for name, x in results.items()}
        shardings = {name: layout.sharding(spec) for name, spec in batch_specs(shapes).items()}
        return self.program.jit(self._run_batch, out_shardings=shardings).lower(*abstract_weights, delivered)

    def _run_batch(self, params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> dict[str, jax.Array]:
        """Compute the results of a whole batch from weights and the batch."""
        params = self._change(merge(params, frozen))
        if self._accumulate == 1:
            return self._run_microbatch(params, buffers, batch)
        ctx = self.program.evaluation_context(batch)
        parts = microbatches(batch, self._accumulate, ctx)
        results = jax.lax.map(lambda part: self._run_microbatch(params, buffers, part), parts)
        return jax.tree.map(_merge_microbatches, results)

    def _run_microbatch(self, params: Nested, buffers: Nested, batch: Nested) -> dict[str, jax.Array]:
        """Compute the results of one microbatch."""
        model = self.model
        layout = self.program.layout
        ctx = self.program.evaluation_context(batch)
        storage_specs = model.stage_specs(layout.specs[self._groups[0]], layout.specs.frozen)
        x_BSD = None
        # Not `model.compute_hidden`, which does not handle a stack that is split into layer ranges.
        for stage in model.stages:
            if stage != "head":
                x_BSD, _ = model.run(stage, params, x_BSD, ctx, buffers, storage_specs)
        assert x_BSD is not None
        weights = model.head_weights(params, ctx, storage_specs)
        return self._function(model.language_head, weights, x_BSD, ctx)


def _merge_microbatches(parts: jax.Array) -> jax.Array:
    """Invert `microbatches`: [count, B / count, ...] -> [B, ...]."""
    count, rows, *inner = parts.shape
    return jnp.moveaxis(parts, 0, 1).reshape(count * rows, *inner)
