"""Program: an experiment on a mesh. The layout, and the compiled functions: init, step, evaluate.

The trainer's loop, a person's own loop, and whoever wants to know what a step needs all use the same object.
May import: everything in framework but trainer and hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from framework import executables
from framework.experiment import Experiment
from framework.layers.base import BATCH_AXES, Context
from framework.layers.remat import check_platform
from framework.layout import (
    Nested,
    StateLayout,
    TensorSpec,
    flatten,
    initialize,
    merge,
    move_to_host,
    store_leaf,
    unflatten,
)
from framework.mesh import MeshShape
from framework.schedules import after_backward, in_backward, streamed
from framework.schedules.step import Metrics, State, microbatches
from framework.units import in_structure

SCHEDULES = {  # (memory.update, memory.gradients)
    ("after_backward", "device"): after_backward.build_step,
    ("streamed", "device"): streamed.build_step,
    ("streamed", "pinned_host"): streamed.build_step,
    ("in_backward", "device"): in_backward.build_step,
}


class Program:
    """What runs on the devices.

    Args:
        experiment: what to train.
        devices: where; all devices of all processes by default.
        training: whether the step is to run; otherwise only what concerns the model is checked.

    Raises:
        ValueError: experiment and devices do not fit each other.
    """

    def __init__(self, experiment: Experiment, devices: Sequence[Any] | None = None, *, training: bool = True):
        self.experiment = experiment
        self.mesh = experiment.mesh.build(jax.devices() if devices is None else devices)
        if training:
            experiment.check(self.mesh)
        else:
            experiment.model.check(self.mesh, experiment.data.seq_len)
        experiment.compiler.check(self.mesh)
        self.jit = functools.partial(jax.jit, compiler_options=experiment.compiler.options or None)
        self.layout = StateLayout(experiment.state_specs(), self.mesh)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())

    # --- batches -----------------------------------------------------------------------------------------------------

    @cached_property
    def batch_specs(self) -> dict[str, TensorSpec]:
        """The arrays of one global batch, [B, S], split over data and fsdp, and over seq."""
        data = self.experiment.data
        shape = (data.global_batch_size, data.seq_len)
        names = ["tokens", "targets", *(["positions", "segments"] if data.document_mask else [])]
        specs = {name: TensorSpec(shape, "int32", (BATCH_AXES, "seq")) for name in names}
        return {**specs, "weights": TensorSpec(shape, "float32", (BATCH_AXES, "seq"))}

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of every array of a batch."""
        return self.layout.sharding(self.batch_specs["tokens"])

    @cached_property
    def rows(self) -> np.ndarray:
        """int[R]: the rows of the global batch that this process's devices hold, in order."""
        return self.rows_of_processes[jax.process_index()]

    @cached_property
    def rows_of_processes(self) -> dict[int, np.ndarray]:
        """`rows` of every process that has devices of the mesh."""
        shape, found = self.batch_specs["tokens"].shape, dict[int, list[np.ndarray]]()
        for device, index in self.batch_sharding.devices_indices_map(shape).items():
            found.setdefault(device.process_index, []).append(np.arange(shape[0])[index[0]])
        return {process: np.unique(np.concatenate(rows)) for process, rows in sorted(found.items())}

    def put(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows of a batch (host arrays [R, S]) as global arrays [B, S]."""
        shape = self.batch_specs["tokens"].shape
        if len(self.rows) == shape[0]:
            return jax.device_put(local, self.batch_sharding)

        def shard(array: np.ndarray) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                rows = np.searchsorted(self.rows, np.arange(shape[0])[index[0]])
                return array[rows][:, index[1]]

            return jax.make_array_from_callback(shape, self.batch_sharding, piece)

        return {name: shard(array) for name, array in local.items()}

    # --- state -------------------------------------------------------------------------------------------------------

    def made_of(self, precise: dict[str, jax.Array], *, unit: bool) -> dict[str, dict[str, jax.Array]]:
        """Inside jit: all that the state holds of some parameters, {group: {path: array}}, cast and moved as the layout
        says.

        Args:
            precise: by path, float32 or wider; those of one of `learner.init_parts`, or a frozen one.
            unit: they are one layer's, without the leading axis.
        """
        groups = self._groups
        if next(iter(precise)) in groups["frozen"]:
            made = {"frozen": precise}
        else:
            made = self.experiment.learner.init_part(precise, unit=unit)
        if "gradient" in groups and "parameter" in made:
            made["gradient"] = jax.tree.map(jnp.zeros_like, made["parameter"])
        return {
            name: {path: store_leaf(groups[name][path], x.astype(groups[name][path].dtype)) for path, x in own.items()}
            for name, own in made.items()
        }

    @cached_property
    def _groups(self) -> dict[str, dict[str, TensorSpec]]:
        return {name: flatten(tree) for name, tree in self.layout.specs.items()}

    def nested(self, flat: dict[str, dict[str, jax.Array]]) -> State:
        """{group: {path: array}} as the state's own tree."""
        return {name: in_structure(tree, flat[name]) for name, tree in self.layout.specs.items()}

    def init_function(self, seed: int, given: Collection[str] = ()) -> Callable[[], State]:
        """The function that makes the first state, straight into the layout when jitted with its shardings.

        A stack is made a layer at a time, and what lives on the host goes there at once: nothing is held twice.
        Parameters that are `given` are zeros: who gives them overwrites them.
        """
        learner, groups = self.experiment.learner, self._groups
        specs = flatten(_uncast(self.experiment.model.parameter_specs()))
        specs = {p: replace(s, initializer=jax.nn.initializers.zeros) if p in given else s for p, s in specs.items()}

        def part(key: jax.Array, paths: tuple[str, ...], layer: jax.Array | None = None) -> dict[str, Any]:
            precise = flatten(initialize(unflatten({path: specs[path] for path in paths}), key, layer))
            return self.made_of(precise, unit=layer is not None)

        def init() -> State:
            key, run_key = jax.random.split(jax.random.key(seed))
            flat: dict[str, dict[str, Any]] = {name: {} for name in groups}
            made: dict[str, Any] = {}
            for paths in [*learner.init_parts(), *((path,) for path in groups["frozen"])]:
                # One after the other: many at once would be many float32 copies at once.
                key, made = jax.lax.optimization_barrier((key, made))
                for name, own in made.items():
                    flat[name] |= own
                layers = specs[paths[0]].num_layers if learner.scope == "unit" else None
                one = functools.partial(part, key, paths)
                made = one() if layers is None else jax.lax.map(one, jnp.arange(layers))
            for name, own in made.items():
                flat[name] |= own
            for name in ("buffer", "counter"):
                flat[name] = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in groups[name].items()}
            flat["counter"]["rng"] = jax.random.key_data(run_key)
            return self.nested(flat)

        return init

    @cached_property
    def scratch_jit(self) -> Any:
        """The groups of the state that no checkpoint holds, as zeros."""
        specs = {name: tree for name, tree in self.layout.specs.items() if name not in self.layout.kept}
        zeros = lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)  # noqa: E731
        return jax.jit(zeros, out_shardings=self.layout.shardings(specs))

    def init_jit(self, seed: int | None = None, given: Collection[str] = ()) -> Any:
        """`init_function`, jitted with the layout's shardings; the config's seed by default."""
        seed = self.experiment.trainer.seed if seed is None else seed
        return self.jit(self.init_function(seed, given), out_shardings=self.layout.shardings())

    def init(self, seed: int | None = None, given: Collection[str] = ()) -> State:
        """The state at step 0."""
        return self.init_jit(seed, given)()

    # --- training ----------------------------------------------------------------------------------------------------

    @cached_property
    def step_jit(self) -> Any:
        """The jitted training step: in and out shardings from the layout, the state donated."""
        experiment = self.experiment
        build = SCHEDULES[experiment.memory.update, experiment.memory.gradients]
        check_platform(experiment.memory.remat, self.mesh.devices.flat[0].platform)
        step = build(experiment.model, experiment.learner, self.layout, experiment.memory)
        return self.jit(
            step,
            in_shardings=(self.layout.shardings(), dict.fromkeys(self.batch_specs, self.batch_sharding)),
            out_shardings=(self.layout.shardings(), self.replicated),
            donate_argnums=0,
        )

    @cached_property
    def traced_step(self) -> Any:
        """The step as jax traces it, before any state exists: has its jaxpr, and is lowered from here."""
        return self.step_jit.trace(self.layout.abstract(), self.layout.abstract(self.batch_specs))

    @cached_property
    def compiled_step(self) -> Any:
        """The step compiled ahead of time."""
        return executables.compiled(self.traced_step.lower(), self.experiment.compiler.options)

    def step(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        """One training step; the old state is gone afterwards."""
        return self.compiled_step(state, batch)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluation_context(self, batch: Nested) -> Context:
        """The context of everything that is no training: no dropout, sums instead of means."""
        return Context(
            batch=batch, num_targets=jnp.float32(1.0), mesh=self.mesh, compute_dtype=self.experiment.model.compute_dtype
        )

    @cached_property
    def evaluate_jit(self) -> Any:
        """The jitted evaluation of a batch: (parameters, frozen, buffers, batch) -> sums."""
        return self._evaluation("parameter")

    @cached_property
    def evaluate_averages_jit(self) -> Any:
        """The same with the averages of the trainable parameters."""
        return self._evaluation("ema")

    def _evaluation(self, group: str) -> Any:
        model, count = self.experiment.model, self.experiment.learner.accumulate
        places = model.stage_specs(self.layout.specs[group], self.layout.specs["frozen"])

        def sums(params: Nested, buffers: Nested, batch: Nested) -> Metrics:
            _, out = model.loss(params, self.evaluation_context(batch), buffers, places)
            sums = {"nll": out.metrics["head/nll"], "tokens": jnp.sum(batch["weights"])}
            return {**sums, "bytes": jnp.sum(batch["bytes"])} if "bytes" in batch else sums

        def evaluate(params: Nested, frozen: Nested, buffers: Nested, batch: Nested) -> Metrics:
            params = merge(params, frozen)
            if count == 1:
                return sums(params, buffers, batch)
            # A batch that is trained on in parts would not fit in one piece here either.
            parts = microbatches(batch, count, self.evaluation_context(batch))
            return jax.tree.map(jnp.sum, jax.lax.map(lambda part: sums(params, buffers, part), parts))

        return self.jit(evaluate, out_shardings=self.replicated)

    def evaluate(self, state: State, batch: dict[str, jax.Array], *, averaged: bool = False) -> Metrics:
        """Sums over a batch's counted targets: "nll" in nats, "tokens", how many there are, and their "bytes" if the
        batch has an array of that name.

        Args:
            state: the training state; it stays.
            batch: global arrays.
            averaged: use the moving averages of the trainable parameters.
        """
        evaluate, group = (self.evaluate_averages_jit, "ema") if averaged else (self.evaluate_jit, "parameter")
        return evaluate(state[group], state["frozen"], state["buffer"], batch)

    def weights(self, state: State, *, averaged: bool = False) -> Nested:
        """All parameters as the model takes them; no copies."""
        return merge(state["ema" if averaged else "parameter"], state["frozen"])


def _uncast(specs: Nested) -> Nested:
    """Parameters are drawn in float32 (or wider) and cast afterwards, so that a master copy holds what was drawn."""
    return jax.tree.map(lambda s: s if s.quantized else replace(s, dtype=jnp.promote_types(s.dtype, "float32")), specs)


def inference_program(experiment: Experiment, *, host_weights: bool, tell: Callable[[str], None]) -> Program:
    """The experiment on all devices, to be asked and not trained. A mesh that does not fit them becomes fsdp = -1.

    Args:
        experiment: its mesh may be replaced.
        host_weights: the stack's matrices are to live in host memory.
        tell: gets a message about another mesh.

    Raises:
        ValueError: the model does not fit the mesh.
    """
    try:
        experiment.mesh.build(jax.devices())
    except ValueError as error:
        tell(f"{error}; using mesh.fsdp = {jax.device_count()}")
        experiment.mesh = MeshShape(fsdp=-1)
    program = Program(experiment, training=False)
    if host_weights:
        specs = {group: dict(tree) for group, tree in program.layout.specs.items()}
        for tree in (specs[group] for group in ("parameter", "frozen", "ema") if "stack" in specs[group]):
            tree["stack"] = move_to_host(tree["stack"], "pinned_host", stacked=True, min_bytes=0)
        program.layout = StateLayout(specs, program.mesh)
    return program
