"""What a choice is made of: meshes that go with model and target, microbatches, recomputation, schedules, placements.

Nothing here says what anything costs. Placements are counted in layers: 0 of them, some, or everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from framework.config import Config
from framework.layers.base import batch_shards
from framework.layers.experts.moe import MoE
from framework.layers.stack import Stack
from framework.models.causal_lm import CausalLM
from framework.plan.auto.settings import (
    ACCUMULATE,
    CLIP_MODE,
    GRADIENTS,
    HOST,
    MESH,
    PLACES,
    REMAT,
    UPDATE,
    Setting,
    Settings,
    setting,
)
from framework.plan.targets import Target
from framework.program.experiment import Experiment

# Positions of a sequence that a device has at the least, where sequences are cut.
_LEAST_POSITIONS = 512
_MOST_SHARDS = 8
# From the one that computes least to the one that keeps least.
_REMATS = ("none", "dots", "save:query,key,value,attention", "full", "sqrt")
_NAMED = "save:"


class Level(NamedTuple):
    """A rung of a ladder of placements: what is wholly on the host, and the field that moves next.

    Attributes:
        hosted: fields of which everything is on the host.
        field: whose layers move from this rung to the next; None on the last rung.
    """

    hosted: tuple[str, ...]
    field: str | None


class Space:
    """The values that the searched fields of a config may have on a target.

    Args:
        config: resolved for the target.
        target: the machine.
        fixed: paths of fields that stay as they are.
    """

    def __init__(self, config: Config, target: Target, fixed: frozenset[str]):
        self._config = config
        self._target = target
        self._fixed = fixed
        experiment: Experiment = config.instantiate()
        self._experiment = experiment
        self._is_language_model = isinstance(experiment.model, CausalLM)
        stacks = [stack for stack in experiment.model.stacks.values() if not stack.is_first]
        # Layers of several stacks cannot be told apart by one number. A unit stays together.
        self.num_units = 0
        self.unit_layers = 1
        if len(stacks) == 1:
            (stack,) = stacks
            self.num_units = stack.num_units
            self.unit_layers = len(stack.unit.layers)

    def meshes(self) -> list[Settings]:
        """The meshes over the target's devices, that of the config first."""
        if self._fixed & set(MESH):
            return [()]
        present = self._experiment.mesh.resolve(self._target.num_devices)
        devices = self._target.num_devices
        present_sizes = tuple(present[path.removeprefix("mesh.")] for path in MESH)
        meshes = []
        for expert, seq, model in itertools.product(self._expert_shards(), self._seq_shards(), self._model_shards()):
            batch_shards, remainder = divmod(devices, expert * seq * model)
            # Positions, heads and experts are cut together by nobody who has rows enough.
            if remainder or sum(size > 1 for size in (expert, seq, model)) > 1:
                continue
            for data in _divisors(batch_shards):
                # Between slices, or hosts that NVLink does not join, gradients alone should have to go.
                sizes = (data, batch_shards // data, expert, seq, model)
                if data % self._target.num_slices == 0 and sizes != present_sizes:
                    meshes.append(sizes)
        meshes.sort(key=lambda sizes: (sizes[4], sizes[3], sizes[2], sizes[0]))
        as_settings = [tuple(map(setting, MESH, sizes)) for sizes in meshes]
        return [(), *as_settings]

    def _expert_shards(self) -> list[int]:
        """The sizes of the mesh axis `expert` that divide the numbers of experts; 1 alone without any."""
        # The devices of a CPU share one memory, over which nothing has to be cut.
        if self._target.platform == "cpu":
            return [1]
        counts = []
        for stack in self._experiment.model.stacks.values():
            counts += [layer.experts.num_experts for layer in stack.unit.walk() if isinstance(layer, MoE)]
        if not counts:
            return [1]
        sizes = _divisors(math.gcd(*counts, self._target.num_devices))
        return [size for size in sizes if size <= _MOST_SHARDS]

    def _seq_shards(self) -> list[int]:
        # The closed form knows what positions cost that are cut for kernels alone, and a CPU has none.
        if not self._is_language_model or self._target.platform == "cpu":
            return [1]
        length = self._experiment.data.seq_len
        most = min(_MOST_SHARDS, length // _LEAST_POSITIONS)
        return [size for size in _divisors(self._target.num_devices) if size <= most and length % size == 0] or [1]

    def _model_shards(self) -> list[int]:
        # The devices of a CPU share one memory, over which nothing has to be cut.
        if not self._is_language_model or self._target.platform == "cpu":
            return [1]
        return [size for size in _divisors(self._target.num_devices) if size <= _MOST_SHARDS]

    def accumulations(self, mesh: Settings) -> list[int]:
        """The numbers of microbatches that the batch can be split into on a mesh, the fewest first."""
        experiment = self._experiment
        parts = [stage.unit if isinstance(stage, Stack) else stage for stage in experiment.model.stages.values()]
        layers = [layer for part in parts for layer in part.walk()]
        # A choice changes memory and time, and nothing that is computed.
        if ACCUMULATE in self._fixed or any(layer.depends_on_microbatches for layer in layers):
            return [experiment.learner.accumulate]
        sizes = experiment.mesh.resolve(self._target.num_devices)
        sizes |= {path.removeprefix("mesh."): int(text) for path, text in mesh}
        shards = batch_shards(sizes)
        batch = experiment.data.global_batch_size
        return _divisors(batch // shards) if batch % shards == 0 else []

    def remats(self) -> list[str]:
        """What may be recomputed, from the policy that is fastest to the one that keeps least."""
        present = self._experiment.memory.remat
        if REMAT in self._fixed:
            return [present]
        remats = [remat for remat in _REMATS if self._is_language_model or not remat.startswith(_NAMED)]
        return remats if present in remats else [*remats, present]

    def schedules(self, accumulate: int) -> list[Settings]:
        """The schedules that go with the platform and so many microbatches, the plainest first."""
        if UPDATE in self._fixed:
            return [()]
        updates = ["after_backward"]
        # XLA's GPU compiler cannot take a part of what is in host memory within a program.
        updates.append("layer_programs" if self._target.platform == "gpu" else "streamed")
        schedules: list[Settings] = [(setting(UPDATE, update),) for update in updates]
        if accumulate == 1:
            schedules += self._at_once((setting(UPDATE, "in_backward"),))
            if self._target.platform == "gpu" and GRADIENTS not in self._fixed:
                schedules += self._at_once((setting(UPDATE, "layer_programs"), setting(GRADIENTS, "none")))
        return schedules

    def _at_once(self, update: Settings) -> list[Settings]:
        """The update within the backward pass; a norm of all gradients then takes a second pass, which is exact."""
        learner = self._experiment.learner
        if not learner.clipping.needs_all_gradients or learner.clip_mode == "two_pass":
            return [update]
        return [] if CLIP_MODE in self._fixed else [(*update, setting(CLIP_MODE, "two_pass"))]

    def ladders(self, schedule: Settings) -> list[list[Level]]:
        """The orders in which things may move to the host under a schedule, from nothing to everything."""
        update = dict(schedule).get(UPDATE, self._experiment.memory.update)
        # Gradients that are gone as soon as they are there have no place.
        taken = {path for path, _ in schedule} | self._fixed
        fields = [path for path in self._movable(update) if path not in taken]
        ladders = [_rungs(fields)]
        activations = PLACES[-1]
        if activations in fields and len(fields) > 1:
            # One microbatch's activations may be less to move than the state.
            ladders.append(_rungs([activations, *(path for path in fields if path != activations)]))
        return ladders

    def _movable(self, update: str) -> Sequence[str]:
        """What a schedule can have on the host. On a CPU that is the same memory, so nothing would be won."""
        platform = self._target.platform
        if platform == "cpu" or (platform == "gpu" and update in ("streamed", "in_backward")):
            return ()
        if update == "after_backward":
            return PLACES[:1]
        if update == "in_backward":
            # Its gradients are gone as soon as they are there.
            return [path for path in PLACES if path != GRADIENTS]
        return PLACES


def placed(level: Level, num_layers: int = 0) -> Settings:
    """The placements of a rung, with so many layers of the field that moves next."""
    settings: list[Setting] = [setting(path, HOST) for path in level.hosted]
    if num_layers and level.field is not None:
        settings.append(setting(level.field, f"{HOST}:{num_layers}"))
    return tuple(settings)


def _rungs(fields: Sequence[str]) -> list[Level]:
    levels = []
    for place in range(len(fields) + 1):
        following = fields[place] if place < len(fields) else None
        levels.append(Level(tuple(fields[:place]), following))
    return levels


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
