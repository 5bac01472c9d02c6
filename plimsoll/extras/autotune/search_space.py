"""The search space: meshes that suit model and target, microbatches, remat policies, schedules and placements.

This module does not estimate costs. Placements are counted in layers: none, the first N, or all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plimsoll.extras.autotune.cost_model import Candidate, CostModel, MemoryBudget, SettingsCost
from plimsoll.extras.autotune.settings import (
    ACCUMULATE,
    ACCUMULATE_BY,
    CLIP_MODE,
    EXPERTS,
    GRADIENTS,
    HOST,
    MESH,
    PIPE,
    PIPE_CHUNKS,
    PLACEMENT_FIELDS,
    PREFETCH,
    REMAT,
    UPDATE,
    Setting,
    Settings,
    get_text,
    select_changes,
    setting,
    sort_settings,
)
from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.layers.experts.moe import MoE
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.schedules.stack_layout import find_expert_paths
from plimsoll.framework.schedules.traits import SCHEDULES, find_offloading_schedule

# Minimum number of positions per device when sequences are sharded.
_LEAST_POSITIONS = 512
# Maximum number of shards of positions, heads or experts: these axes communicate in each layer.
_MOST_SHARDS = 8
# Numbers of chunks of layers that a stage of a pipeline may have.
_PIPE_CHUNKS = (1, 2)
# Ordered from the least recomputation to the smallest residuals.
_REMATS = ("none", "dots", "save:query,key,value,attention", "full", "sqrt")
_SAVE_PREFIX = "save:"


class OffloadLevel(NamedTuple):
    """An offload level: the fields that are completely offloaded, and the field that moves next.

    Attributes:
        offloaded: fields that are completely offloaded.
        field: field whose layers move between this level and the next; None at the last level.
    """

    offloaded: tuple[str, ...]
    field: str | None


class SearchSpace:
    """The values that the tuned fields of a config may have on a target.

    Args:
        config: config, resolved for the target.
        target: the machine.
        fixed: paths of fields that must not change.
    """

    def __init__(self, config: Config, target: Target, fixed: frozenset[str]):
        self._config = config
        self._target = target
        self._fixed = fixed
        experiment: Experiment = config.instantiate()
        self._experiment = experiment
        self._is_language_model = isinstance(experiment.model, CausalLM)
        self._has_experts = bool(find_expert_paths(experiment.model))
        stacks = [stack for stack in experiment.model.stacks.values() if not stack.is_first]
        # With several stacks, one number cannot select layers, so partial placements are off. The layers of one
        # repeat of the pattern are always placed together.
        self.num_repeats = 0
        self.pattern_length = 1
        if len(stacks) == 1:
            (stack,) = stacks
            self.num_repeats = stack.num_repeats
            self.pattern_length = len(stack.pattern.layers)

    def meshes(self) -> list[Settings]:
        """Return the meshes over the target's devices; the first, empty one keeps the config's own."""
        if self._fixed & set(MESH):
            return [()]
        present = self._experiment.mesh.resolve(self._target.num_devices)
        present_by_path = {f"mesh.{axis}": size for axis, size in present.items()} | {PIPE_CHUNKS: self._pipe_chunks}
        present_sizes = tuple(present_by_path[path] for path in MESH)
        meshes = []
        for stages, chunks in self._list_pipelines():
            is_new_pipeline = stages != present["pipe"]
            devices = self._target.num_devices // stages
            for expert, seq, model in itertools.product(
                self._expert_shards(), self._seq_shards(), self._model_shards()
            ):
                batch_shards, remainder = divmod(devices, expert * seq * model)
                # Shard at most one of positions, heads and experts: combining them pays off only with too few rows.
                if remainder or sum(size > 1 for size in (expert, seq, model)) > 1:
                    continue
                for data in _divisors(batch_shards):
                    # Only gradients should cross the network between slices, or between hosts without NVLink, so the
                    # stages and the data axis have to cover the slices.
                    sizes = (stages, chunks, data, batch_shards // data, expert, seq, model)
                    if stages * data % self._target.num_slices == 0 and sizes != present_sizes:
                        meshes.append(sizes)
                        if is_new_pipeline:
                            # More replicas would need more memory, and stages already exchange little.
                            break
        meshes.sort(key=lambda sizes: (*sizes[:2], sizes[6], sizes[5], sizes[4], sizes[2]))
        as_settings = [tuple(map(setting, MESH, sizes)) for sizes in meshes]
        return [(), *as_settings]

    @property
    def _pipe_chunks(self) -> int:
        return self._experiment.mesh.pipe_chunks

    def is_pipeline(self, mesh: Settings) -> bool:
        """Return whether a mesh makes the config's layers a pipeline that they are not yet."""
        stages = get_text(mesh, PIPE)
        return stages is not None and int(stages) != self._experiment.mesh.resolve(self._target.num_devices)["pipe"]

    def _list_pipelines(self) -> list[tuple[int, int]]:
        """Return the values of (mesh.pipe, mesh.pipe_chunks), beginning with the config's own.

        Others are included only where they can pay: if the network between slices is slow, or if there are more chips
        than rows, so that the batch cannot be sharded over all of them.
        """
        target = self._target
        present = self._experiment.mesh.resolve(target.num_devices)["pipe"]
        pipelines = [(present, self._pipe_chunks)]
        has_slow_network = target.num_slices > 1 and target.spec.dcn_bytes_per_second is not None
        has_too_few_rows = target.num_devices > self._experiment.data.global_batch_size
        if present > 1 or not self._is_language_model or target.platform == "cpu":
            return pipelines
        if not has_slow_network and not has_too_few_rows:
            return pipelines
        for stages in _divisors(target.num_devices)[1:]:
            # Stages are whole slices, unless there are too few rows.
            if stages > _MOST_SHARDS or (not has_too_few_rows and target.num_slices % stages):
                continue
            for chunks in _PIPE_CHUNKS:
                if self.num_repeats and self.num_repeats % (stages * chunks) == 0:
                    pipelines.append((stages, chunks))
        return pipelines

    def _expert_shards(self) -> list[int]:
        """Return the sizes of the mesh axis `expert` that divide the numbers of experts; only 1 without experts."""
        # The devices of a CPU share one memory, so sharding saves nothing.
        if self._target.platform == "cpu":
            return [1]
        counts = []
        for stack in self._experiment.model.stacks.values():
            counts += [layer.experts.num_experts for layer in stack.pattern.walk() if isinstance(layer, MoE)]
        if not counts:
            return [1]
        sizes = _divisors(math.gcd(*counts, self._target.num_devices))
        return [size for size in sizes if size <= _MOST_SHARDS]

    def _seq_shards(self) -> list[int]:
        """Return the sizes of the mesh axis `seq` that leave each device enough positions."""
        # The estimate models sharded positions only for kernels, and a CPU has none.
        if not self._is_language_model or self._target.platform == "cpu":
            return [1]
        length = self._experiment.data.seq_len
        most = min(_MOST_SHARDS, length // _LEAST_POSITIONS)
        return [size for size in _divisors(self._target.num_devices) if size <= most and length % size == 0] or [1]

    def _model_shards(self) -> list[int]:
        """Return the sizes of the mesh axis `model`; only 1 for models other than language models."""
        # The devices of a CPU share one memory, so sharding saves nothing.
        if not self._is_language_model or self._target.platform == "cpu":
            return [1]
        return [size for size in _divisors(self._target.num_devices) if size <= _MOST_SHARDS]

    def accumulations(self, mesh: Settings) -> list[int]:
        """Return the numbers of microbatches that the batch can be split into on a mesh, smallest first."""
        experiment = self._experiment
        parts = [stage.pattern if isinstance(stage, Stack) else stage for stage in experiment.model.stages.values()]
        layers = [layer for part in parts for layer in part.walk()]
        # Tuning may change memory and time, but not the result, which depends on the microbatches in these layers.
        if ACCUMULATE in self._fixed or any(layer.depends_on_microbatches for layer in layers):
            return [experiment.learner.accumulate]
        sizes = experiment.mesh.resolve(self._target.num_devices)
        sizes |= {path.removeprefix("mesh."): int(text) for path, text in mesh}
        shards = batch_shards(sizes)
        batch = experiment.data.global_batch_size
        return _divisors(batch // shards) if batch % shards == 0 else []

    def remats(self) -> list[str]:
        """Return the remat policies, from the fastest to the one with the smallest residuals."""
        present = self._experiment.memory.remat
        if REMAT in self._fixed:
            return [present]
        remats = [remat for remat in _REMATS if self._is_language_model or not remat.startswith(_SAVE_PREFIX)]
        return remats if present in remats else [*remats, present]

    def schedules(self, accumulate: int) -> list[Settings]:
        """Return the schedules that work with the platform and `accumulate` microbatches, simplest first."""
        if UPDATE in self._fixed:
            return [()]
        updates = ["after_backward", find_offloading_schedule(self._target.platform)]
        schedules: list[Settings] = [(setting(UPDATE, update),) for update in updates]
        in_backward: Settings = (setting(UPDATE, "in_backward"),)
        if accumulate == 1:
            schedules += self._in_backward_schedules(in_backward)
        elif self._target.platform == "tpu" and ACCUMULATE_BY not in self._fixed:
            schedules += self._in_backward_schedules((*in_backward, setting(ACCUMULATE_BY, "layer")))
        if self._target.platform != "gpu" or (accumulate > 1 and ACCUMULATE_BY in self._fixed):
            return schedules
        programs: Settings = (setting(UPDATE, "layer_programs"),)
        if accumulate > 1:
            programs = (*programs, setting(ACCUMULATE_BY, "layer"))
            schedules.append(programs)
        if GRADIENTS not in self._fixed:
            schedules += self._in_backward_schedules((*programs, setting(GRADIENTS, "none")))
        return schedules

    def prefetching(self, settings: Settings) -> list[Settings]:
        """Return what to add to settings so that offloaded optimizer state is fetched a layer ahead; [] if they cannot.

        Args:
            settings: settings that offload optimizer state. The sum may still be impossible.
        """
        memory = self._experiment.memory
        traits = SCHEDULES[get_text(settings, UPDATE) or memory.update]
        if PREFETCH in self._fixed or not traits.can_prefetch_layers:
            return []
        if not traits.delays_prefetched:
            return [(setting(PREFETCH, "layer"),)]
        # The gradients are where the state is, and there is one pass for all microbatches.
        state = get_text(settings, PLACEMENT_FIELDS[0]) or memory.optimizer_state.text
        others = [setting(GRADIENTS, state)]
        if int(get_text(settings, ACCUMULATE) or self._experiment.learner.accumulate) > 1:
            others.append(setting(ACCUMULATE_BY, "layer"))
        if self._fixed & {path for path, _ in others}:
            return []
        return [(setting(PREFETCH, "layer"), *others), (setting(PREFETCH, "speculative"), *others)]

    def _in_backward_schedules(self, update: Settings) -> list[Settings]:
        """Return the schedule for an update during the backward pass; empty if it is not possible.

        If clipping needs the norm of all gradients, the schedule includes a second backward pass, which is exact.
        """
        learner = self._experiment.learner
        if not learner.clipping.needs_all_gradients or learner.clip_mode == "two_pass":
            return [update]
        return [] if CLIP_MODE in self._fixed else [(*update, setting(CLIP_MODE, "two_pass"))]

    def offload_orders(self, schedule: Settings) -> list[list[OffloadLevel]]:
        """Return the orders in which fields may be offloaded under a schedule, each from nothing to everything."""
        update = dict(schedule).get(UPDATE, self._experiment.memory.update)
        # Fields that the schedule sets itself cannot move: with layer_programs and gradients=none, each gradient is
        # freed as soon as it is used.
        excluded = {path for path, _ in schedule} | self._fixed
        offloadable = [path for path in self._list_offloadable(update) if path not in excluded]
        # Everything includes the experts.
        fields = [path for path in offloadable if path != EXPERTS]
        orders = [_build_levels(fields)]
        activations = PLACEMENT_FIELDS[-1]
        if activations in fields and len(fields) > 1:
            # The activations of one microbatch may be smaller than the state.
            orders.append(_build_levels([activations, *(path for path in fields if path != activations)]))
        if EXPERTS in offloadable and self._has_experts:
            # The other weights, which every token uses, may then stay.
            orders.append(_build_levels([EXPERTS, *fields]))
        return orders

    def _list_offloadable(self, update: str) -> Sequence[str]:
        """Return the fields that a schedule can offload; none on a CPU, where host memory is the same memory."""
        platform = self._target.platform
        if platform == "cpu" or (platform == "gpu" and SCHEDULES[update].slices_host_arrays):
            return ()
        if not SCHEDULES[update].needs_stack:
            return PLACEMENT_FIELDS[:1]
        if not SCHEDULES[update].can_offload_gradients:
            return [path for path in PLACEMENT_FIELDS if path != GRADIENTS]
        return PLACEMENT_FIELDS


def offload_settings(level: OffloadLevel, num_layers: int = 0) -> Settings:
    """Return the placements of an offload level.

    Args:
        level: the offload level.
        num_layers: number of layers to offload, in addition, of the field that moves next.
    """
    settings: list[Setting] = [setting(path, HOST) for path in level.offloaded]
    if num_layers and level.field is not None:
        settings.append(setting(level.field, f"{HOST}:{num_layers}"))
    return tuple(settings)


def _build_levels(fields: Sequence[str]) -> list[OffloadLevel]:
    levels = []
    for index in range(len(fields) + 1):
        following = fields[index] if index < len(fields) else None
        levels.append(OffloadLevel(tuple(fields[:index]), following))
    return levels


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# Maximum number of tries with more layers. Peaks are nearly linear in their number, so one is usually enough.
_CORRECTIONS = 4


class OffloadLevels:
    """Offload levels for some settings, from nothing offloaded to everything.

    Args:
        estimate_cost: returns the estimated cost of settings; None if they are not possible.
        budget: decides whether settings fit.
        space: search space, with the number of repeats of the stack's pattern and the layers of each.
    """

    def __init__(
        self, estimate_cost: Callable[[Settings], SettingsCost | None], budget: MemoryBudget, space: SearchSpace
    ):
        self._estimate_cost = estimate_cost
        self._budget = budget
        self._num_repeats = space.num_repeats
        self._pattern_length = space.pattern_length

    def find_cheapest_fit(
        self, settings: Settings, levels: list[OffloadLevel], *, offloads_least: bool = True
    ) -> Candidate | None:
        """Return the settings that fit with the least offloading; None if none fit.

        Args:
            settings: settings that offload nothing.
            levels: offload levels, in order.
            offloads_least: offload only as many layers as necessary. Without it, a level that fits is returned as it
                is, which takes less time.
        """
        below: OffloadLevel | None = None
        for level in levels:
            candidate = self._evaluate((*settings, *offload_settings(level)))
            # A level can be impossible although later ones are possible: offloaded gradients need a certain schedule.
            if candidate is None:
                continue
            if not offloads_least and self._budget.fits(candidate.settings, candidate.cost):
                return candidate
            if self._budget.over(candidate.settings, candidate.cost) <= 0:
                by_layers = None if below is None else self._interpolate_layers(settings, below, candidate)
                fit = by_layers or candidate
                return fit if self._budget.host_over(fit.cost) <= 0 else None
            # Later levels need even more host memory.
            if self._budget.host_over(candidate.cost) > 0:
                return None
            below = level
        return None

    def may_fit(self, settings: Settings, levels: list[OffloadLevel]) -> bool:
        """Return whether the device has room at the first level (nothing offloaded) or at the last (everything).

        Args:
            settings: settings that offload nothing.
            levels: offload levels, in order.
        """
        for level in dict.fromkeys((levels[0], levels[-1])):
            end = self._evaluate((*settings, *offload_settings(level)))
            if end is not None and self._budget.over(end.settings, end.cost) <= 0:
                return True
        return False

    def _interpolate_layers(self, settings: Settings, below: OffloadLevel, above: Candidate) -> Candidate | None:
        """Return a candidate between two levels, with the fewest layers that suffice; None if all layers have to move.

        The number of layers is interpolated between the levels, because bytes are linear in it. Seconds are not
        linear: transfers cost nothing until matmuls no longer hide them. So the result gets its own estimate.

        Args:
            settings: settings that offload nothing.
            below: the level that does not suffice.
            above: candidate of the next level, which suffices.
        """
        nothing = self._evaluate((*settings, *offload_settings(below)))
        if nothing is None or not self._num_repeats:
            return None
        over = self._budget.over(nothing.settings, nothing.cost)
        headroom = -self._budget.over(above.settings, above.cost)
        num_repeats = max(1, math.ceil(over / max((over + headroom) / self._num_repeats, 1)))
        if num_repeats >= self._num_repeats:
            return None
        return self._find_first_fit((*settings, *offload_settings(below, num_repeats * self._pattern_length)))

    def _find_first_fit(self, settings: Settings) -> Candidate | None:
        """Return the settings, with a few more offloaded layers if necessary; None if that fails."""
        for _ in range(_CORRECTIONS):
            candidate = self._evaluate(settings)
            if candidate is None or self._budget.fits(candidate.settings, candidate.cost):
                return candidate
            # More layers need even more host memory.
            if self._budget.host_over(candidate.cost) > 0:
                return None
            more = self._add_layers(settings)
            if more is None:
                return None
            settings = more
        return None

    def _add_layers(self, settings: Settings) -> Settings | None:
        """Return the settings with one more repeat of the partially offloaded field; None if there is no such field."""
        for path in PLACEMENT_FIELDS:
            text = dict(settings).get(path, "")
            kind, _, count = text.partition(":")
            if kind == HOST and count.isdecimal():
                num_layers = int(count) + self._pattern_length
                if num_layers >= self._num_repeats * self._pattern_length:
                    return sort_settings((*settings, setting(path, HOST)))
                return sort_settings((*settings, setting(path, f"{HOST}:{num_layers}")))
        return None

    def _evaluate(self, settings: Settings) -> Candidate | None:
        cost = self._estimate_cost(settings)
        if cost is None:
            return None
        return Candidate(settings, cost, self._budget.peak(settings, cost))


class RematMixtures:
    """Derives mixtures of two remat policies from settings that use one policy for all layers.

    Args:
        cost_model: estimates the cost of settings.
        budget: decides whether settings fit.
        space: search space, with the policies and the number of layers.
    """

    def __init__(self, cost_model: CostModel, budget: MemoryBudget, space: SearchSpace):
        self._cost_model = cost_model
        self._budget = budget
        self._space = space

    def iter_candidates(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield, for each faster policy, the settings with as many layers of it as fit."""
        remats = self._space.remats()
        present = dict(candidate.settings).get(REMAT, self._cost_model.config.memory.remat)
        # For sqrt, the number after the colon is the group size, not a layer count.
        if present not in remats or present.startswith("sqrt") or self._space.num_repeats < 2:
            return
        for fast in remats[: remats.index(present)]:
            mixture = self._maximize_fast_layers(candidate, present, fast)
            if mixture is not None:
                yield mixture

    def _maximize_fast_layers(self, candidate: Candidate, cheap: str, fast: str) -> Candidate | None:
        """Return the settings with as many layers of the fast policy as fit; None if none fits."""
        # Binary search: `least` repeats are known to fit, `most` are not. All of them would be no mixture.
        least, most = 0, self._space.num_repeats
        mixture: Candidate | None = None
        while most - least > 1:
            middle = (least + most) // 2
            settings = select_changes(
                self._cost_model.config, (*candidate.settings, self._mix_policies(cheap, fast, middle))
            )
            cost = self._cost_model.cost(settings)
            if cost is not None and self._budget.fits(settings, cost):
                least = middle
                mixture = Candidate(settings, cost, self._budget.peak(settings, cost))
            else:
                most = middle
        return mixture

    def _mix_policies(self, cheap: str, fast: str, num_fast: int) -> Setting:
        """Return a remat setting with two policies: the last `num_fast` repeats of the pattern use the fast one."""
        pattern_length = self._space.pattern_length
        fast_layers = num_fast * pattern_length
        cheap_layers = self._space.num_repeats * pattern_length - fast_layers
        return setting(REMAT, f"{cheap}:{cheap_layers},{fast}:{fast_layers}")
