"""Helpers for the leaves of a state in a checkpoint: selection by group, manifest records, and dtype widening."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.checkpoint import directory as files
from plimsoll.framework.checkpoint.integrity import checksums
from plimsoll.framework.layout import PyTree, TrainState, flatten


def to_groups(state: PyTree) -> PyTree:
    """Return a training state as a dict of its groups, and any other pytree unchanged."""
    return dict(state.items()) if isinstance(state, TrainState) else state


def without_frozen(groups: dict[str, Any]) -> dict[str, Any]:
    """Return all groups except "frozen", which a checkpoint stores only once for all steps."""
    return {name: group for name, group in groups.items() if name != "frozen"}


def select_groups(abstract: dict[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """Select groups, in the order of `abstract`. Raises ValueError if a group does not exist."""
    missing_groups = set(groups) - set(abstract)
    if missing_groups:
        raise ValueError(f"groups: expected some of {sorted(abstract)}, got {sorted(missing_groups)}")
    return {name: group for name, group in abstract.items() if name in groups}


def select_records(stored: dict[str, files.LeafRecord], groups: Collection[str]) -> dict[str, files.LeafRecord]:
    """Select the manifest records of the leaves in some groups. The group is the first part of a leaf's path."""
    selected: dict[str, files.LeafRecord] = {}
    for name, record in stored.items():
        group, _, _ = name.partition("/")
        if group in groups:
            selected[name] = record
    return selected


def array_leaves(state: Any) -> dict[str, jax.Array]:
    """Return the leaves of a state by path. Raises TypeError if one of them is not a jax.Array."""
    leaves = flatten(state)
    assert len(leaves) == len(jax.tree.leaves(state)), "two leaves of the state have the same path"
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"{name}: expected a jax.Array, got {type(leaf).__name__}")
    return leaves


def build_manifest(
    step: int, leaves: dict[str, jax.Array], extra: dict[str, Any], frozen_number: int | None
) -> files.Manifest:
    """Build the manifest of a checkpoint, with the checksums of its arrays. Collective.

    Args:
        step: number of training steps that the state has taken.
        leaves: arrays by path, without the frozen ones.
        extra: JSON data of the caller.
        frozen_number: number of the directory with the frozen arrays; None if there are none.
    """
    sums = checksums(leaves)
    saved_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    records: dict[str, files.LeafRecord] = {}
    for name, x in leaves.items():
        records[name] = files.LeafRecord(x.shape, str(x.dtype), sums[name])
    packages = ("jax", "plimsoll-train", "orbax-checkpoint")
    versions = {package: _version(package) for package in packages}
    return files.Manifest(
        step=step, leaves=records, extra=extra, versions=versions, saved_at=saved_at, frozen=frozen_number
    )


def find_narrow_averages(
    target_specs: Mapping[str, Any], stored: Mapping[str, files.LeafRecord]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the stored specs, by name, of moving averages that were saved in bfloat16 and are needed in float32.

    Earlier versions stored the averages in the dtype of the weights.
    """
    narrow_specs: dict[str, jax.ShapeDtypeStruct] = {}
    for name, x in target_specs.items():
        is_average = name.startswith("ema/")
        in_bfloat16 = name in stored and stored[name].dtype == "bfloat16"
        if is_average and in_bfloat16 and x.dtype == jnp.float32:
            narrow_specs[name] = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)
    return narrow_specs


def widen_average(x: jax.Array, spec: Any) -> jax.Array:
    """Cast an array to the dtype of `spec` and move it to the sharding of `spec`."""
    # Cast in device memory, because arithmetic on host memory does not compile.
    device_sharding = spec.sharding.with_memory_kind("device")
    on_device = jax.device_put(x, device_sharding)
    return jax.device_put(on_device.astype(spec.dtype), spec.sharding)


def _version(package: str) -> str:
    # Not importlib.metadata.version, which raises an error for a checkout that was never installed.
    installed = importlib.metadata.distributions(name=package)
    first = next(iter(installed), None)
    return "not installed as a package" if first is None else first.version
