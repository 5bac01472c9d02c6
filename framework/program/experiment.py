"""Experiment: the root of every named config. It builds the sections and checks that they fit together.

Building an experiment touches no device and no file, so a bad config fails before anything starts.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, ConfigError, component, config_for, get_target
from plimsoll.framework.data.batches import Pipeline, Shapes
from plimsoll.framework.devices.compiler import Compiler
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers.base import LAYER_AXIS, batch_shards
from plimsoll.framework.layout import Nested, TensorSpec, TrainState, move_to_host, nearest_divisors
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ALL_STAGES
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.optimizers.schedule_steps import with_run_length
from plimsoll.framework.processes.health import Health
from plimsoll.framework.program.batch_transform import BatchTransform
from plimsoll.framework.program.options import CheckpointOptions, TrainerOptions
from plimsoll.framework.program.stop_rules import resolve_metric
from plimsoll.framework.schedules.delayed_update import pending_specs
from plimsoll.framework.schedules.memory import Memory, Placement
from plimsoll.framework.schedules.pipeline_shape import check_pipeline
from plimsoll.framework.schedules.speculative_update import select_spare_specs
from plimsoll.framework.schedules.stack_layout import OffloadedExperts, select_offloaded, split_stacks

Part = TypeVar("Part")
# Assumed number of steps while the steps per epoch are unknown. Bytes and FLOPs, which are needed by then, do not
# depend on it. `framework.program.run_length.set_length` sets the real number before anything is compiled.
_NOMINAL_STEPS = 1000
# Sources of the batch arrays that an objective may miss, by array name.
_ARRAY_SOURCES = {
    "ends": "ends by data.source=PairSource or UnpairedSource (RankedSource of a reward model)",
    "labels": "labels by data.source=UnpairedSource (LabeledSource of a classifier)",
    "reference": "reference by batch_transform=Reference",
    "teacher_ids": "teacher_ids by batch_transform=Teacher",
    "advantages": "advantages by batch_transform=Rollouts",
}


@component
class AcceleratorRule:
    """Config changes for some accelerators; applied before the command line's overrides, and printed.

    Args:
        pattern: shell pattern of accelerator names, "v5e-*" or "h200x8".
        set: values by dotted path, {"memory.remat": "full"}.
    """

    def __init__(self, *, pattern: str, set: dict[str, Any]):
        self.pattern = pattern
        self.set = set


@component
class Experiment:
    """A complete description of a training run.

    Args:
        model: model to train.
        data: training and validation data; `instantiate` also accepts a finished Pipeline, and likewise other parts.
        mesh: arrangement of the devices.
        learner: optimizer, rules, clipping, averaging.
        memory: placement of the state, and recomputation of activations.
        compiler: compiler options.
        trainer: length of the run, and intervals and contents of its outputs.
        checkpoint: options for writing checkpoints.
        health: how processes monitor themselves and each other.
        pretrained: directory of the initial weights; without one they are initialized randomly.
        batch_transform: config of what completes batches before a step sees them (a reference, a teacher, rollouts),
            from framework.batch_transforms; None if the data has all arrays.
        accelerator_rules: config changes by accelerator.
    """

    def __init__(
        self,
        *,
        model: Config,
        data: Config,
        learner: Config,
        trainer: Config,
        mesh: Config = config_for(MeshShape),
        memory: Config = config_for(Memory),
        checkpoint: Config = config_for(CheckpointOptions),
        health: Config = config_for(Health),
        compiler: Config = config_for(Compiler),
        pretrained: Config | None = None,
        batch_transform: Config | None = None,
        accelerator_rules: list[Config] = [],  # noqa: B006
    ):
        # Rules are applied to the config before it is built. Building them here only validates them.
        for rule in accelerator_rules:
            rule.instantiate()
        self.model = _build_section("model", model, Chain)
        self.data = _build_section("data", data, Pipeline)
        self.mesh = _build_section("mesh", mesh, MeshShape)
        self.trainer = _build_section("trainer", trainer, TrainerOptions)
        if isinstance(learner, Config):
            num_steps = self.trainer.known_steps or _NOMINAL_STEPS
            learner = with_run_length(learner, num_steps)
        self.learner = _build_section("learner", learner, Learner, specs=self.model.parameter_specs())
        self._resolve_metrics()
        self.memory = _build_section("memory", memory, Memory)
        self.checkpoint = _build_section("checkpoint", checkpoint, CheckpointOptions)
        self.compiler = _build_section("compiler", compiler, Compiler)
        self.health = _build_section("health", health, Health)
        self.pretrained = None
        if pretrained is not None:
            self.pretrained = pretrained.instantiate()
        self.batch_transform: BatchTransform | None = None
        if batch_transform is not None:
            self.batch_transform = _build_section("batch_transform", batch_transform, BatchTransform)
            self.batch_transform.join(self)

    def _resolve_metrics(self) -> None:
        """Set the full names of the metrics that the trainer's rules read. Raises ConfigError for an unknown set."""
        trainer = self.trainer
        sets = self.data.validation_names
        has_averages = self.learner.ema is not None
        # The metric that ends the run, and the one that the best checkpoint has; None where no rule reads it.
        self.stop_metric: str | None = None
        self.best_metric: str | None = None
        if trainer.stop.reads_metric:
            name = trainer.stop.metric
            self.stop_metric = resolve_metric(name, sets, path="trainer.stop.metric", has_averages=has_averages)
        if trainer.keep_best is not None:
            name = trainer.keep_best
            self.best_metric = resolve_metric(name, sets, path="trainer.keep_best", has_averages=has_averages)

    @property
    def microbatches_per_pass(self) -> int:
        """The number of microbatches that run through the layers together; see `Memory.accumulate_by`."""
        return self.learner.accumulate if self.memory.accumulate_by == "layer" else 1

    def check(self, mesh: Mesh | AbstractMesh, *, update_locality: bool = True) -> None:
        """Check that mesh, batch, model, memory and data fit together.

        Args:
            mesh: device mesh; only the sizes of its axes matter.
            update_locality: whether to also check that no optimizer mixes parameters, which may take a second.

        Raises:
            ValueError: they do not fit; the error names both numbers.
        """
        self.model.check(mesh, self.data)
        if mesh.shape[LAYER_AXIS] > 1:
            self.check_pipeline(mesh.shape[LAYER_AXIS])
        if self.learner.scope == "model" and self.memory.traits.updates_in_chunks:
            raise ValueError(
                f"learner.scope = model with memory.update = {self.memory.update}: one optimizer for all parameters "
                "needs all gradients; expected memory.update = after_backward, or learner.scope = layer and "
                "learner.clip"
            )
        if self.memory.delays_update and self.learner.accumulate > self.microbatches_per_pass:
            raise ValueError(
                f"learner.accumulate = {self.learner.accumulate} with memory.update = {self.memory.update} and "
                "memory.prefetch = layer, which updates each layer before the next step's forward pass, but a step has "
                "a forward pass for each microbatch; expected memory.accumulate_by = layer, or memory.prefetch = chunk"
            )
        if self.memory.speculates and self.learner.accumulate > self.microbatches_per_pass:
            raise ValueError(
                f"learner.accumulate = {self.learner.accumulate} with memory.prefetch = speculative, which updates "
                "each layer in the backward pass, but a step has a backward pass for each microbatch; expected "
                "memory.accumulate_by = layer, or memory.prefetch = chunk"
            )
        # The stacks can be split and recomputed as the memory section specifies.
        layer_ranges = split_stacks(self.model, self.memory)
        running_model = self.model.split_into_ranges(layer_ranges)
        for stack in running_model.stacks.values():
            stack.check_remat(stack.policy(self.memory.remat))
        if not all(layer_range.is_whole for layer_range in layer_ranges):
            if self.learner.scope == "model":
                raise ValueError(
                    "learner.scope = model with memory settings that differ by layer: its single optimizer cannot be "
                    "split by layer; expected the same memory.optimizer_state and memory.remat for all layers"
                )
            if self.model.calibrates:
                raise ValueError(
                    "memory settings that differ by layer, with a model that is calibrated on its first batch: "
                    "expected the same settings for all layers"
                )
        if update_locality:
            self.learner.check_update_locality()
        # The batch can be split into microbatches, and these into shards.
        batch = self.data.global_batch_size
        accumulate = self.learner.accumulate
        # Only these axes split a batch; the others split the model's tensors.
        shards = batch_shards(mesh.shape)
        if batch % accumulate:
            raise ValueError(
                f"learner.accumulate = {accumulate} does not divide data.global_batch_size = {batch}; "
                f"nearest: {nearest_divisors(batch, accumulate)}"
            )
        microbatch = batch // accumulate
        if microbatch % shards:
            step = shards * accumulate
            below = batch // step * step
            above = -(-batch // step) * step
            # The next lower multiple may be zero, which is not a valid size.
            nearest_sizes = [size for size in (below, above) if size]
            axes = "mesh.data * mesh.fsdp" + (" * mesh.expert" if mesh.shape["expert"] > 1 else "")
            raise ValueError(
                f"{axes} = {shards} does not divide the {microbatch} sequences of a "
                f"microbatch (data.global_batch_size = {batch}, learner.accumulate = {accumulate}); "
                f"nearest global_batch_size: {nearest_sizes}"
            )
        self._check_objective()
        self._check_stages(mesh)

    def _check_stages(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model, the mesh or the batch transform does not accept the batches of a stage."""
        data = self.data
        for index, stage in enumerate(data.stages):
            if (stage.seq_len, stage.batch_size) == (data.seq_len, data.global_batch_size):
                continue
            if self.batch_transform is not None:
                raise ValueError(
                    f"{stage.label} changes data.seq_len or data.global_batch_size, with batch_transform = "
                    f"{type(self.batch_transform).__name__}, whose values belong to rows of one length; expected a "
                    "stage that changes only weights, or no batch_transform"
                )
            other: Experiment = copy.copy(self)
            other.data = data.at_stage(index)
            try:
                other.check(mesh, update_locality=False)
            except ValueError as error:
                raise ValueError(f"{stage.label}: {error}") from error

    def check_pipeline(self, stages: int) -> None:
        """Raise ValueError if the experiment cannot train in a pipeline of this many stages, the size of mesh.pipe."""
        check_pipeline(self.model, self.learner, self.memory, stages, self.mesh.pipe_chunks)
        if self.batch_transform is not None:
            raise ValueError(
                f"mesh.pipe = {stages} with batch_transform = {type(self.batch_transform).__name__}: its model runs "
                "outside of the pipeline; expected no batch_transform, or mesh.pipe = 1"
            )

    def _check_objective(self) -> None:
        """Raise ValueError if batches lack an array that the head's objective reads, or are not meant for it."""
        if self.batch_transform is not None:
            self.batch_transform.check(self)
        objective = self.model.head.objective if isinstance(self.model, CausalLM) else None
        read = () if objective is None else objective.arrays
        unread = [name for name in ("ends", "labels") if name in self.data.arrays() and name not in read]
        if unread:
            # A next-token loss would learn rejected answers as well as chosen ones.
            given = "None, the loss of next tokens" if objective is None else type(objective).__name__
            raise ValueError(
                f"model.head.objective is {given}, which does not read {' and '.join(unread)} of the batches: data has "
                "preference labels; expected an objective that reads them (DPO of pairs, KTO of judged "
                "answers), or other data"
            )
        if objective is None:
            return
        missing = [name for name in objective.arrays if name not in self.batch_arrays()]
        if missing:
            # The framework has no source for an array of a user's objective.
            hints = [hint for name, hint in _ARRAY_SOURCES.items() if name in missing]
            if "reference" in missing and getattr(self.batch_transform, "kind", None) == "none":
                hint = "batch_transform.kind = none adds no reference, auto does"
                hints[hints.index(_ARRAY_SOURCES["reference"])] = hint
            sources = f": {', '.join(hints)}" if hints else ""
            raise ValueError(
                f"model.head.objective is {type(objective).__name__}, which reads {', '.join(missing)} of a batch; "
                f"data is a {type(self.data).__name__}, which provides {', '.join(self.batch_arrays())}; "
                f"expected other data, or a batch transform that adds them{sources}"
            )

    def batch_arrays(self, *, evaluation: bool = False) -> Shapes:
        """Return the arrays of a global batch as the step, or an evaluation, sees it: {name: (shape, dtype)}."""
        delivered = self.data.arrays(evaluation=evaluation)
        if self.batch_transform is None:
            return delivered
        return self.batch_transform.arrays(delivered, evaluation=evaluation)

    @property
    def language_model(self) -> CausalLM:
        """The model as a language model. Raises ValueError if it is a different kind of model."""
        if not isinstance(self.model, CausalLM):
            raise ValueError(f"model is a {type(self.model).__name__}; this is for language models (CausalLM)")
        return self.model

    def state_specs(self) -> TrainState:
        """Return the specs of the training state, in checkpoint form."""
        learner = self.learner
        # step and skipped are counts; grad_norm is that of the last update; rng is the run's key data (threefry: two
        # words).
        counters = {
            "step": TensorSpec((), "int32"),
            "skipped": TensorSpec((), "int32"),
            "grad_norm": TensorSpec((), "float32"),
            "rng": TensorSpec((2,), "uint32"),
        }
        experts = OffloadedExperts.find(self.model, self.memory)
        optimizer = self._place("optimizer_state", learner.optimizer_specs(), experts)
        ema = self._place("optimizer_state", learner.ema_specs(), experts)
        speculates = self.memory.speculates
        return TrainState(
            pending=pending_specs() if self.memory.delays_update else {},
            spare=select_spare_specs(optimizer, self.model) if speculates else {},
            spare_ema=select_spare_specs(ema, self.model) if speculates else {},
            gradient=self._select_buffers(self._place("gradients", learner.gradient_specs(), experts)),
            parameter=self._place("parameters", learner.specs, experts),
            frozen=self._place("parameters", learner.frozen_specs, experts),
            buffer=self.model.buffer_specs(),
            optimizer=optimizer,
            ema=ema,
            counter=counters | learner.spikes.counter_specs(),
        )

    def _place(self, field: str, tree: Nested, experts: OffloadedExperts) -> Nested:
        """Return specs, by stage, in the memory that a field of the memory section says; small leaves stay.

        Args:
            field: the field.
            tree: specs on the device, by stage.
            experts: the experts that are offloaded in addition.
        """
        stages = self._find_offloaded_stages(field)
        placed = dict(tree)
        for stage, specs in tree.items():
            if stage not in stages and stage not in experts.paths:
                continue
            offloaded = move_to_host(specs, "pinned_host", stacked=stage in self.model.stacks)
            placed[stage] = offloaded if stage in stages else experts.place(stage, specs, offloaded)
        return placed

    def _select_buffers(self, gradients: Nested) -> Nested:
        """Return the specs of the gradients that are part of the state; on the device they exist only within a step."""
        offloaded_stages = self._find_offloaded_stages("gradients")
        buffers = {}
        for stage, specs in gradients.items():
            if stage in offloaded_stages:
                buffers[stage] = specs
            elif self.memory.offloads_expert_gradients:
                buffers[stage] = select_offloaded(specs)
        return {stage: specs for stage, specs in buffers.items() if specs}

    def _find_offloaded_stages(self, field: str) -> set[str]:
        """Return the stages that a placement of the memory section offloads, at least in part.

        The names are those of whole stacks, even if only the first layers are offloaded.
        """
        placement: Placement = getattr(self.memory, field)
        stacks = self.model.stacks
        stages = {name for name, stack in stacks.items() if placement.num_offloaded(field, stack)}
        if placement.offloads_everything:
            stages |= {*self.model.stages, "shared", ALL_STAGES}
        return stages


def _build_section(name: str, config: Config | Part, kind: type[Part], **late: object) -> Part:
    """Build a section of the experiment from its config.

    Args:
        name: name of the section, for errors.
        config: the section's config, or the finished object, which is returned unchanged.
        kind: class that the section must have.
        late: arguments that the config does not hold.

    Raises:
        ConfigError: the config builds an object of another class.
    """
    if isinstance(config, kind):
        return config
    assert isinstance(config, Config)
    # Check before building: a learner, for example, needs arguments that no other part takes.
    target = get_target(config)
    if isinstance(target, type) and not issubclass(target, kind):
        raise ConfigError(f"expected a config of {kind.__name__}, given that of {target.__name__}", path=name)
    part = config.instantiate(**late)
    if not isinstance(part, kind):
        actual = f"that of {target.__name__}, which returns a {type(part).__name__}"
        raise ConfigError(f"expected a config of {kind.__name__}, given {actual}", path=name)
    return part
