"""Groups of parameters that one optimizer updates together, and their part of a tree of all trainable parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layout import Nested, ParameterSpec, flatten, unflatten
from plimsoll.framework.learner.rules import FROZEN
from plimsoll.framework.learner.update_types import ALL_STAGES, ParamGroup


class SplitSpecs(NamedTuple):
    """The parameter specs of a model, split into trainable and frozen ones."""

    trainable: Nested
    frozen: Nested


def split_frozen(specs: Nested, labels: dict[str, str]) -> SplitSpecs:
    """Split the parameter specs into trainable and frozen ones.

    Args:
        specs: the specs of all parameters of the model.
        labels: by path, the label of the parameter's optimizer, or FROZEN.
    """
    flat_specs = flatten(specs)
    trainable = {}
    frozen = {}
    for path, name in labels.items():
        if name == FROZEN:
            frozen[path] = flat_specs[path]
        else:
            trainable[path] = flat_specs[path]
    return SplitSpecs(unflatten(trainable), unflatten(frozen))


def make_groups(trained: Nested, labels: dict[str, str], *, across_stages: bool) -> list[ParamGroup]:
    """Group the trainable parameters.

    Args:
        trained: the specs of the trainable parameters.
        labels: by path, the label of each parameter of the model.
        across_stages: whether to group only by label, not by stage and label.
    """
    flat_specs = flatten(trained)
    if across_stages:
        return _groups_across_stages(flat_specs, labels)
    paths_by_group: dict[tuple[str, str], list[str]] = {}
    for path, group_label in labels.items():
        if path in flat_specs:
            stage, path_in_stage = path.split("/", 1)
            paths_by_group.setdefault((stage, group_label), []).append(path_in_stage)
    stage_groups = []
    for (stage, group_label), paths in paths_by_group.items():
        lengths = {flat_specs[f"{stage}/{path}"].num_layers for path in paths}
        # One vmap over the layers updates the group, so its parameters must all be stacked alike.
        assert len(lengths) == 1, f"stage {stage} mixes stacked and single parameters"
        stage_groups.append(ParamGroup(stage, group_label, tuple(paths), lengths.pop()))
    return stage_groups


def _groups_across_stages(flat_specs: Nested, labels: dict[str, str]) -> list[ParamGroup]:
    """Return one group per label, with the parameters of all stages."""
    # A dict keeps the order of the labels; a set would not.
    group_labels = dict.fromkeys(labels[path] for path in labels if path in flat_specs)
    model_groups = []
    for group_label in group_labels:
        paths = tuple(path for path in labels if labels[path] == group_label)
        model_groups.append(ParamGroup(ALL_STAGES, group_label, paths, None))
    return model_groups


def restrict_groups(all_groups: list[ParamGroup], paths: Container[str]) -> list[ParamGroup]:
    """Restrict groups to the parameters with the given paths in the model, and drop groups that become empty."""
    parts = []
    for group in all_groups:
        part_paths = tuple(path for path in group.paths if f"{group.path_prefix}{path}" in paths)
        if part_paths:
            parts.append(replace(group, paths=part_paths))
    return parts


def split_into_ranges(specs: Nested, layer_ranges: Iterable[LayerRange]) -> Nested:
    """Return the parameter specs of a model, by stage, with stacks replaced by their layer ranges."""
    homes = {layer_range.home for layer_range in layer_ranges}
    cut_specs = {stage: tree for stage, tree in specs.items() if stage not in homes}
    for layer_range in layer_ranges:
        # A completely frozen stack has no trainable parameters.
        if layer_range.home in specs:
            slice_spec = partial(_slice_spec, layer_range)
            cut_specs[layer_range.name] = jax.tree.map(slice_spec, specs[layer_range.home])
    return cut_specs


def _slice_spec(layer_range: LayerRange, spec: ParameterSpec) -> ParameterSpec:
    return replace(spec, shape=(layer_range.count, *spec.shape[1:]))


def split_groups(all_groups: list[ParamGroup], layer_ranges: Iterable[LayerRange]) -> list[ParamGroup]:
    """Return the parameter groups, with each group of a stack repeated for each of its layer ranges."""
    cut_groups = []
    for group in all_groups:
        group_ranges = [layer_range for layer_range in layer_ranges if layer_range.home == group.stage]
        if not group_ranges:
            cut_groups.append(group)
        for layer_range in group_ranges:
            range_group = replace(group, stage=layer_range.name, length=layer_range.count, layer_range=layer_range)
            cut_groups.append(range_group)
    return cut_groups


def select(tree: Nested, group: ParamGroup, specs: Nested) -> Nested:
    """Return a group's part of a tree, without the stage; with separate layers if the group spans all stages.

    Args:
        tree: arrays or specs of all trainable parameters, or at least of the group's stage.
        group: the group to select.
        specs: the specs of all trainable parameters.
    """
    if group.spans_stages:
        leaves = flatten(tree)
        flat_specs = flatten(specs)
        return unflatten({path: _split_layers(flat_specs[path], leaves[path]) for path in group.paths})
    leaves = flatten(tree[group.stage])
    return unflatten({path: leaves[path] for path in group.paths})


def unselect(tree: Nested, group: ParamGroup, specs: Nested) -> dict[str, Any]:
    """Return {path in the model: leaf}; the inverse of `select`.

    Args:
        tree: the group's part of a tree; {} for averages if the learner has none.
        group, specs: see `select`.
    """
    leaves = flatten(tree)
    if not group.spans_stages or not leaves:
        return {f"{group.stage}/{path}": leaf for path, leaf in leaves.items()}
    flat_specs = flatten(specs)
    model_leaves = {}
    for path in group.paths:
        num_layers = flat_specs[path].num_layers
        if num_layers is None:
            model_leaves[path] = leaves[path]
        else:
            model_leaves[path] = jnp.stack([leaves[f"{path}/{i}"] for i in range(num_layers)])
    return model_leaves


def unstack(spec: ParameterSpec, length: int | None) -> ParameterSpec:
    """Return the spec of one layer of a parameter stacked for `length` layers; if `length` is None, the spec itself."""
    if length is None:
        return spec
    return replace(spec, shape=spec.shape[1:], mesh_axes=spec.mesh_axes[1:], roles=spec.roles[1:])


def _split_layers(spec: ParameterSpec, leaf: Any) -> Any:
    """Split a stacked leaf, an array or a spec, into its layers by number; return an unstacked leaf unchanged."""
    length = spec.num_layers
    if length is None:
        return leaf
    layers = {}
    for index in range(length):
        if isinstance(leaf, ParameterSpec):
            layers[str(index)] = unstack(leaf, length)
        else:
            layers[str(index)] = leaf[index]
    return layers
