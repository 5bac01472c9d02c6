"""Suggests settings that fit when a config does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from jax.sharding import AbstractMesh

from plimsoll.framework.config import Config
from plimsoll.framework.layers.remat import check_platform
from plimsoll.framework.plan.buffer_names import REPORT_GROUPS
from plimsoll.framework.plan.device_trace import TraceCache, trace
from plimsoll.framework.plan.dry_run import compile_step
from plimsoll.framework.plan.estimate import Estimate, estimate, least_bytes
from plimsoll.framework.plan.plan_report import Suggestion
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.traits import SCHEDULES, find_offloading_schedule
from plimsoll.framework.terminal.phases import SHORT, phase

# Settings to change together, by config path.
Settings = dict[str, str | int]
# Settings that do not affect `least_bytes`, because they move neither state nor gradients.
_MOVES_NO_STATE = ("memory.remat", "memory.activations", "learner.accumulate", "data.global_batch_size")


def check_target(experiment: Experiment, target: Target) -> dict[str, int]:
    """Check that an experiment is valid for a target, and return {mesh axis: size}.

    Args:
        experiment: the experiment to train.
        target: the machine to plan for.

    Raises:
        ValueError: the experiment is not valid for the target.
    """
    sizes = experiment.mesh.resolve(target.num_devices)
    experiment.mesh.split(sizes, target.num_slices)
    experiment.check(AbstractMesh(tuple(sizes.values()), tuple(sizes)), update_locality=False)
    experiment.model.check_platform(target.platform, target.spec.compute_capability)
    check_platform(experiment.memory.remat, target.platform)
    return sizes


def estimate_for_target(experiment: Experiment, target: Target, traces: TraceCache | None = None) -> Estimate:
    """Return the analytical estimate for a target.

    Args:
        experiment: the experiment to train.
        target: the machine to plan for.
        traces: traces of experiments that differ only in settings of memory and batch; None for no others.

    Raises:
        ValueError: the experiment is not valid for the target.
    """
    trace_fn = trace if traces is None else traces
    return estimate(experiment, check_target(experiment, target), target.spec, trace_fn, num_slices=target.num_slices)


def state_bytes(need: Estimate) -> int:
    """Return the estimated bytes that stay on the device between steps."""
    return sum(size for key, size in need.breakdown.items() if key in REPORT_GROUPS.values())


@dataclass(frozen=True)
class _Trial:
    """An experiment with other settings, and its estimate.

    Attributes:
        experiment: the experiment.
        peak: bytes of device memory at the peak, per device.
        host_bytes: bytes of the arrays that it offloads, per process.
    """

    experiment: Experiment
    peak: int
    host_bytes: int


def suggestions(
    config: Config, target: Target, limit: int, peak: int, *, present: Estimate | None = None, seconds: float = 300.0
) -> list[Suggestion]:
    """Return up to three settings that fit, cheapest first; none of them changes what is computed.

    Args:
        config: config that does not fit.
        target: machine on which it does not fit.
        limit: device memory in bytes.
        peak: bytes that the config needs.
        present: estimate of the current settings, if there is one already.
        seconds: time limit for compiling.
    """
    return SettingsSearch(config, target, limit, peak, present=present).find_settings(seconds)


class SettingsSearch:
    """Searches for settings that fit. The analytical estimate selects candidates.

    Args:
        config: config that does not fit.
        target: machine on which it does not fit.
        limit: device memory in bytes.
        peak: bytes that the config needs; the part beyond the state is assumed to scale like its estimate.
        present: estimate of the current settings, if there is one already.
        traces: traces of the config, if there are any already.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        limit: int,
        peak: int,
        *,
        present: Estimate | None = None,
        traces: TraceCache | None = None,
    ):
        self._config = config
        self._target = target
        self._limit = limit
        self._traces = TraceCache() if traces is None else traces
        present = present or estimate_for_target(config.instantiate(), target, self._traces)
        present_state = state_bytes(present)
        # The factor for the bytes other than state that makes the estimate of the current settings match their peak.
        self._scale = max(peak - present_state, 0) / max(present.peak_bytes - present_state, 1)
        self._least_by_placement: dict[frozenset[tuple[str, str | int]], int] = {}
        self._tried: dict[frozenset[tuple[str, str | int]], _Trial | None] = {}

    def find_settings(self, seconds: float = 300.0) -> list[Suggestion]:
        """Return up to three settings that fit, cheapest first; none of them changes what is computed.

        The compiler decides whether candidates fit. After `seconds` of searching, the remaining candidates are returned
        with their estimates and `compiled` False.

        Args:
            seconds: time limit for compiling.
        """
        start = time.monotonic()
        fitting: list[Suggestion] = []
        listed: set[frozenset[tuple[str, str | int]]] = set()
        for series in _choices(self._config, self._target):
            # Trying the last one first saves time only where it stands for several others.
            if len(series) > 2 and not self._last_fits(series):
                continue
            for choice in series:
                # Combinations with an empty building block repeat others.
                if frozenset(choice.items()) in listed:
                    continue
                listed.add(frozenset(choice.items()))
                trial = self._try(choice)
                if trial is None or not self._fits(trial):
                    continue
                peak = trial.peak
                compiled = time.monotonic() - start < seconds
                if compiled:
                    try:
                        with phase(f"compiling {_format_choice(choice)}", patience=SHORT):
                            program = Program(trial.experiment, self._target.devices())
                            peak = compile_step(program, self._target, self._limit).allocated
                    except ValueError:
                        # The target does not support the schedule.
                        continue
                if peak <= self._limit:
                    fitting.append(Suggestion(_format_choice(choice), peak, compiled, trial.host_bytes))
                if len(fitting) == 3:
                    return fitting
        return fitting

    def _last_fits(self, series: list[Settings]) -> bool:
        """Return whether the last valid choice of a series fits by estimate; if not, none of the series does."""
        for choice in reversed(series):
            trial = self._try(choice)
            if trial is not None:
                return self._fits(trial)
        return False

    def _fits(self, trial: _Trial) -> bool:
        """Return whether an experiment fits the device, and the host if its memory is known."""
        host_limit = self._target.host_limit_bytes
        return trial.peak <= self._limit and (host_limit is None or trial.host_bytes <= host_limit)

    def _try(self, choice: Settings) -> _Trial | None:
        """Return the estimate for other settings; None if they are not valid, or if their state exceeds the limit."""
        key = frozenset(choice.items())
        if key in self._tried:
            return self._tried[key]
        self._tried[key] = None
        # The settings that `least_bytes` depends on: if it exceeds the limit, no choice with these settings fits.
        placement = frozenset(pair for pair in choice.items() if pair[0] not in _MOVES_NO_STATE)
        if self._least_by_placement.get(placement, 0) > self._limit:
            return None
        try:
            experiment = self._build(choice)
            self._least_by_placement[placement] = least_bytes(experiment, check_target(experiment, self._target))
            if self._least_by_placement[placement] <= self._limit:
                with phase(f"trying {_format_choice(choice)}", patience=SHORT):
                    self._tried[key] = self._estimate(experiment)
        except ValueError:
            # The batch does not divide into the microbatches, or the target does not support the schedule.
            pass
        return self._tried[key]

    def find_batch(self) -> Suggestion | None:
        """Return the largest power of two below the config's batch that fits by estimate; None if no batch fits.

        The settings of the config come first, then other settings of `memory`, cheapest first.
        """
        choices: list[Settings] = [{}]
        for choice in chain.from_iterable(_choices(self._config, self._target)):
            if choice not in choices and all(path.startswith("memory.") for path in choice):
                choices.append(choice)
        for choice in choices:
            best: Suggestion | None = None
            # The need grows with the batch, so double it from the smallest one until it does not fit.
            rows = 1
            while rows < self._config.data.global_batch_size:
                settings = {"data.global_batch_size": rows} | choice
                trial = self._try(settings)
                # None: so few rows do not divide over the devices and microbatches.
                if trial is not None:
                    if not self._fits(trial):
                        break
                    best = Suggestion(_format_choice(settings), trial.peak, False, trial.host_bytes)
                rows *= 2
            if best is not None:
                return best
        return None

    def _build(self, choice: Settings) -> Experiment:
        """Return the experiment with other settings. Raises ValueError if they are not valid together."""
        trial = self._config.copy()
        for path, value in sorted(choice.items()):
            trial.set_path(path, value)
        return trial.instantiate()

    def _estimate(self, experiment: Experiment) -> _Trial:
        need = estimate_for_target(experiment, self._target, self._traces)
        state = state_bytes(need)
        # A process holds the shards of all of its devices.
        host_bytes = need.host_bytes * self._target.num_devices // self._target.num_processes
        return _Trial(experiment, int(state + self._scale * (need.peak_bytes - state)), host_bytes)


def _format_choice(choice: Settings) -> str:
    """Return settings in command-line syntax."""
    return " ".join(f"--config.{path}={value}" for path, value in choice.items())


def _choices(config: Config, target: Target) -> Iterator[list[Settings]]:
    """Yield series of settings to change together on a target, cheapest first.

    They recompute, split into microbatches, offload state, shard it instead of replicating it, and finally offload
    everything. The settings of a series differ in one field, and the last ones need the least memory.
    """
    memory = config.memory
    # The building blocks; one is empty if the config has its settings already.
    recompute: list[Settings] = []
    if memory.remat in ("none", "dots"):
        recompute = [{"memory.remat": name} for name in ("dots", "full") if name != memory.remat]
    microbatches: list[Settings] = []
    for doublings in range(1, 7):
        # Two to 64 times the current number of microbatches, up to one row in each.
        count = config.learner.accumulate * 2**doublings
        if count <= config.data.global_batch_size:
            microbatches.append({"learner.accumulate": count})
    offload: Settings = {}
    if memory.optimizer_state == "device":
        offload = {"memory.optimizer_state": "pinned_host"}
    streamed: Settings = {}
    offload_gradients: Settings = {}
    if not SCHEDULES[memory.update].updates_in_chunks:
        streamed = offload | {"memory.update": find_offloading_schedule(target.platform)}
        # Gradients are offloaded only together with a streamed update, which loads a part of them at a time.
        if memory.gradients == "device":
            offload_gradients = {"memory.gradients": "pinned_host"}
    sharded: Settings = {}
    if config.mesh.data != 1:
        sharded = {"mesh.data": 1, "mesh.fsdp": -1}
    # The last remat setting needs the least memory.
    recompute_most = recompute[-1] if recompute else {}
    offload_all = recompute_most | (streamed or offload)

    yield recompute
    yield microbatches[:3]
    combinations = [offload, streamed, sharded, recompute_most | offload, offload_all]
    if offload_gradients:
        combinations.append(offload_all | offload_gradients)
    yield from ([choice] for choice in combinations if choice)
    yield [offload_all | microbatch for microbatch in microbatches]
    if sharded:
        yield [offload_all | sharded]
        yield [offload_all | sharded | microbatch for microbatch in microbatches]
    # Sharding along the sequence is for the case that each device has only one sequence left.
    split_sequences: Settings = {"mesh.fsdp": -1, "mesh.seq": 2 * config.mesh.seq}
    if target.num_devices > 1:
        yield [offload_all | split_sequences | microbatch for microbatch in microbatches[:2]]
    offload_weights: Settings = {}
    for field in ("parameters", "activations"):
        if memory[field] == "device":
            offload_weights[f"memory.{field}"] = "pinned_host"
    yield [offload_all | offload_gradients | offload_weights]
