"""Runs a random experiment with the framework: programs, steps, and checkpoints between phases."""

from __future__ import annotations

import math
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.layout import TrainState, flatten
from plimsoll.framework.learner.group_optimizer import unflatten_like
from plimsoll.framework.program.program import Program
from tests.oracle import experiments as plain
from tests.oracle.batches import host_batch
from tests.oracle.parameters import first_values, path
from tests.oracle.subject_config import experiment_config
from tests.oracle.training64 import Result


def build_program(drawn: plain.RandomExperiment, phase: plain.Phase) -> Program:
    """Return the program of a phase, on as many devices as its mesh has.

    Raises:
        ValueError: the framework refuses the experiment.
    """
    devices = int(np.prod(list(phase.mesh.values()), dtype=int))
    return Program(experiment_config(drawn, phase).instantiate(), jax.devices()[:devices])


def train(drawn: plain.RandomExperiment, programs: list[Program]) -> Result:
    """Run all steps of all phases. Between phases, the state is saved to a checkpoint on disk and restored."""
    losses, norms, state = [], [], _first_state(drawn, programs[0])
    ends = [phase.start for phase in drawn.phases[1:]] + [drawn.steps]
    with TemporaryDirectory() as folder:
        for number, (program, phase, end) in enumerate(zip(programs, drawn.phases, ends, strict=True)):
            if number > 0:
                state = _through_checkpoint(Path(folder) / str(number), programs[number - 1], program, state)
            for step in range(phase.start, end):
                state, metrics = program.step(state, program.put(host_batch(drawn, step)))
                losses.append(float(metrics["loss"]))
                norms.append(float(metrics["grad_norm"]))
            state = program.complete_update(state)
            program.layout.check(state)
    counter, stored = jax.device_get(state.counter), jax.device_get(programs[-1].backend.to_checkpoint(state))
    assert int(counter["step"]) == drawn.steps
    weights = {**flatten(stored.parameter), **flatten(stored.frozen), **_masters(stored.optimizer)}
    names, averages = list(first_values(drawn)), flatten(stored.ema)
    trained = [name for name in names if path(name) in averages]
    return Result(losses, norms, int(counter["skipped"]), _by_layer(weights, names), _by_layer(averages, trained))


def _first_state(drawn: plain.RandomExperiment, program: Program) -> Any:
    """Return the state at step 0: the weights are drawn, and the learner initializes the rest from them."""
    specs, learner = program.checkpoint_layout.checkpoint_specs, program.experiment.learner
    layers: dict[str, list[np.ndarray]] = {}
    for name, value in first_values(drawn).items():
        layers.setdefault(path(name), []).append(_words(value) if name.endswith("/codes") else value)
    flat = {own: np.stack(one) if own.startswith("stack/") else one[0] for own, one in layers.items()}
    known = {**flatten(specs["parameter"]), **flatten(specs["frozen"])}
    assert flat.keys() == known.keys(), f"parameters differ: {sorted(flat.keys() ^ known.keys())}"
    assert all(flat[own].shape == spec.shape for own, spec in known.items())
    first = jax.jit(learner.init)(
        unflatten_like(specs["parameter"], {own: flat[own] for own in flatten(specs["parameter"])})
    )
    frozen = {own: flat[own].astype(spec.dtype) for own, spec in flatten(specs["frozen"]).items()}
    counter = {own: np.zeros(spec.shape, spec.dtype) for own, spec in specs["counter"].items()}
    state = TrainState(
        parameter=first.weights,
        frozen=unflatten_like(specs.frozen, frozen),
        optimizer=first.entry,
        ema=first.average,
        counter=counter,
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.backend.abstract_checkpoint)
    return program.backend.from_checkpoint(jax.device_put(state, shardings))


def _words(codes: np.ndarray) -> np.ndarray:
    """Pack 8-bit codes into words like the framework, four per word.

    A word holds rows r, r + 8, r + 16 and r + 24 of a tile of 32 rows, lowest byte first. The tile is smaller if a
    quarter of the rows is not a multiple of 8.
    """
    rows, columns = codes.shape
    tile_rows = math.gcd(rows // 4, 8)
    tiles = codes.view(np.uint8).reshape(-1, 4, tile_rows, columns)
    return np.ascontiguousarray(np.moveaxis(tiles, 1, -1)).view("<u4").reshape(rows // 4, columns)


def _codes(words: np.ndarray) -> np.ndarray:
    """Return the codes, int8 [4 R, C], that `_words` packed."""
    word_rows, columns = words.shape
    tile_rows = math.gcd(word_rows, 8)
    tiles = np.ascontiguousarray(words).astype("<u4").view(np.int8).reshape(-1, tile_rows, columns, 4)
    return np.moveaxis(tiles, -1, 1).reshape(4 * word_rows, columns)


def _master_path(entry: str) -> str:
    """Return the parameter's path, stack/block0/..., for a master copy stack/default/master/block0/...; else ""."""
    found = re.fullmatch(r"([^/]+)/[^/]+/master/(.+)", entry)
    return f"{found[1]}/{found[2]}" if found else ""


def _masters(optimizer: Any) -> dict[str, np.ndarray]:
    return {_master_path(entry): leaf for entry, leaf in flatten(optimizer).items() if _master_path(entry)}


def _through_checkpoint(folder: Path, before: Program, after: Program, state: Any) -> Any:
    with Checkpointer(directory=folder) as checkpointer:
        checkpointer.save(int(state.counter["step"]), before.backend.to_checkpoint(state), {})
        checkpointer.wait()
        restored = checkpointer.restore(int(state.counter["step"]), after.backend.abstract_checkpoint)
    return after.backend.from_checkpoint(restored.state)


def _by_layer(tensors: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """Return {name: array}, with one layer's array of each stacked tensor."""

    def one(name: str) -> np.ndarray:
        found = re.match(r"stack/(\d+)/", name)
        tensor = np.asarray(tensors[path(name)][int(found[1])] if found else tensors[path(name)])
        return _codes(tensor) if name.endswith("/codes") else tensor

    return {name: one(name) for name in names}
