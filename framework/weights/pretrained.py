"""Loads weights from a Hugging Face directory into the layout's shardings and memory kinds, one layer at a time.

A `ModelFamily` maps configs and tensor names in both directions; the supported families are in framework/families/.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.config import Config, component
from plimsoll.framework.layers.quantize import quantize
from plimsoll.framework.layout import Nested, TensorSpec, TrainState, flatten, store_leaf
from plimsoll.framework.learner.update import write_layer
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.per_layer_step import PerLayerStep
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import SHORT, Phase, phase
from plimsoll.framework.weights.directory import Directory, check_tensors
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Index, Source, layer_shape


@component
class Pretrained:
    """Initial weights of a run, loaded from a published model.

    Args:
        path: a directory with config.json and safetensors files, or hf://ORG/NAME@COMMIT, a model of the Hub.
        family: config of the family that maps tensor names, one of framework/families.
        facts: the directory's config.json, the starting point of an export.
        generation: the directory's generation_config.json, which an export writes again; empty if there is none.
        draws_head: whether the directory holds a language model, so that the score head is initialized randomly.
    """

    def __init__(
        self,
        *,
        path: str,
        family: Config,
        facts: dict[str, Any] = {},  # noqa: B006
        generation: dict[str, Any] = {},  # noqa: B006
        draws_head: bool = False,
    ):
        for name, published in (("facts", facts), ("generation", generation)):
            # An export would pass it on to the users who load that.
            if "auto_map" in published:
                raise ValueError(f"{name}: auto_map names code of a directory, which is never executed")
        self.path = path
        self.facts = facts
        self.generation = generation
        self.draws_head = draws_head
        self.family: ModelFamily = family.instantiate()

    def warnings(self, seq_len: int) -> list[str]:
        """List warnings about training on sequences of `seq_len` tokens, one line each."""
        most = self.facts.get("max_position_embeddings")
        if not isinstance(most, int) or seq_len <= most:
            return []
        return [
            f"data.seq_len = {seq_len:,} exceeds the context length of {self.path}: its config.json has "
            f"max_position_embeddings = {most:,}"
        ]

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """Return the sources of each parameter, checked against the headers of all files; no tensor is read.

        Raises:
            FileNotFoundError, ValueError: see `Directory`; or tensors are missing, unexpected, or of another shape.
        """
        return check_tensors(Directory(self.path), self.family, model, draws_head=self.draws_head)

    def init(self, program: Program) -> TrainState:
        """Return the state at step 0, with the directory's weights.

        In addition to the state, only one layer's tensor is in memory.

        Raises:
            FileNotFoundError, ValueError: see `places`.
        """
        with phase(f"reading the weights of {self.path}", patience=SHORT) as reading:
            return self._read(program, reading)

    def _read(self, program: Program, reading: Phase) -> TrainState:
        """Return the state for `init`, and report the progress to the phase."""
        model = program.experiment.language_model
        learner = program.experiment.learner
        directory = Directory(self.path)
        places = self.places(model)
        state = {group: flatten(tree) for group, tree in program.init(given=places).items()}
        trained = flatten(program.checkpoint_layout.specs.parameter)
        # Lists, not sets, because all processes must run the same programs in the same order.
        frozen_parts = [(path,) for path in places if path not in trained]
        parts = [*learner.init_parts(), *frozen_parts]
        for number, paths in enumerate(parts):
            # Adapters are not in the directory, so they keep their initial values.
            if paths[0] not in places:
                continue
            # An optimizer of the whole model has one state for all layers.
            by_layer = model.base_specs[paths[0]].num_layers is not None and learner.scope == "layer"
            num_layers = len(places[paths[0]]) if by_layer else 1
            write = None
            for layer in range(num_layers):
                reading.percent((number + layer / num_layers) / len(parts))
                layer_sources = slice(layer, layer + 1) if by_layer else slice(None)
                values = {}
                for path in paths:
                    values[path] = _read_value(directory, program, path, places[path][layer_sources], by_layer)
                # All layers of a stack have the same shapes, so the writer for the first one also writes the others.
                write = write or _create_writer(program, values, by_layer)
                for group, leaves in write(state, values, layer).items():
                    state[group] |= leaves
        return program.backend.initializer.to_state_tree(state)


def _convert_to_leaves(program: Program, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Convert parameter values to the model's leaves, in float32 or wider, or quantized."""
    model = program.experiment.language_model
    paths = flatten(model.parameter_specs()).keys()
    leaves = {}
    for path, x in values.items():
        leaves[path] = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Weights that are not among the model's own paths are quantized, and stored as several leaves.
    for path in sorted(leaves.keys() - paths):
        assert model.lora is not None
        assert model.lora.storage is not None
        parts = quantize(leaves.pop(path), model.lora.storage)
        for name, part in parts.items():
            leaves[f"{path}/{name}"] = part
    return leaves


def _create_writer(
    program: Program, like: dict[str, jax.Array], by_layer: bool
) -> Callable[[Nested, dict[str, jax.Array], int], Nested]:
    """Return a function (state, parameter values, layer) -> the state's new leaves, including copies and averages.

    Args:
        program: the program whose state is written.
        like: values of the same parameters, for their shapes and dtypes.
        by_layer: whether the values are those of one layer.
    """
    backend = program.backend

    def compute_leaves(values: dict[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
        leaves = _convert_to_leaves(program, values)
        computed_values = backend.initializer.build_arrays(leaves, single_layer=by_layer)
        # Gradients stay zero.
        return {group: leaves for group, leaves in computed_values.items() if group != "gradient"}

    def put(places: Nested, old: Nested, values: dict[str, jax.Array], layer: jax.Array) -> Nested:
        new = jax.tree.map(store_leaf, places, compute_leaves(values))
        if not by_layer:
            return new
        if isinstance(backend, PerLayerStep):
            # Each leaf of the state holds one layer: [1, ...].
            return jax.tree.map(lambda x: x[None], new)
        return write_layer(old, new, layer)

    written_leaves = jax.eval_shape(compute_leaves, like)
    # Compiled programs by the leaves' memory kinds: one layer may be in host memory, another on the device.
    programs_by_kinds: dict[tuple[str, ...], Callable[..., Nested]] = {}
    specs = {group: flatten(tree) for group, tree in program.layout.specs.items()}

    def write(state: Nested, values: dict[str, jax.Array], layer: int) -> Nested:
        # The path in the state of each written leaf, which differs if the state stores layers separately.
        paths = [path for leaves in written_leaves.values() for path in leaves]
        stored_paths = {path: backend.parts.place(path, layer)[0] if by_layer else path for path in paths}
        # All leaves of a layer are at the same index.
        index = backend.parts.place(next(iter(values)), layer)[1] if by_layer else layer
        places = {}
        old = {}
        for group, leaves in written_leaves.items():
            places[group] = {path: specs[group][stored_paths[path]] for path in leaves}
            old[group] = {path: state[group][stored_paths[path]] for path in leaves}
        kinds = tuple(spec.memory_kind for spec in jax.tree.leaves(places))
        if kinds not in programs_by_kinds:
            shardings = program.layout.shardings(places)
            programs_by_kinds[kinds] = jax.jit(partial(put, places), donate_argnums=0, out_shardings=shardings)
        new = programs_by_kinds[kinds](old, values, jnp.int32(index))
        new_leaves = {}
        for group, leaves in new.items():
            new_leaves[group] = {stored_paths[path]: x for path, x in leaves.items()}
        return new_leaves

    return write


def _read_value(directory: Directory, program: Program, path: str, sources: list[Source], by_layer: bool) -> jax.Array:
    """Return a layer's array, or a whole stack, in the directory's dtype; each process reads its devices' shards.

    Args:
        directory: the directory to read from.
        program: the program whose layout defines the array's sharding.
        path: path of the parameter.
        sources: one source for each layer of the array.
        by_layer: whether the array is one layer's, without the layer axis.
    """
    spec = program.experiment.language_model.base_specs[path]
    shape = layer_shape(spec)
    is_stacked = spec.num_layers is not None and not by_layer
    axes = spec.mesh_axes
    if spec.num_layers is not None and by_layer:
        axes = spec.mesh_axes[1:]

    def read(index: Index | None) -> np.ndarray:
        assert index is not None
        if not is_stacked:
            return np.ascontiguousarray(sources[0].read(directory.tensor, shape, index))
        layers = [source.read(directory.tensor, shape, index[1:]) for source in sources[index[0]]]
        return np.stack([np.ascontiguousarray(layer) for layer in layers])

    array_shape = (len(sources), *shape) if is_stacked else shape
    # The sharding does not depend on the dtype.
    sharding = program.layout.sharding(TensorSpec(array_shape, "float32", axes))
    return jax.make_array_from_callback(array_shape, sharding, read)
