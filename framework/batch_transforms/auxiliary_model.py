"""A second, frozen model next to the one being trained: its weights, its forward pass, and the cost of that pass.

It is either the run's own model with its initial weights (a reference), or a published model (a reference or teacher).
Its weights are normally offloaded: the devices hold only one layer, or one table, of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework import families
from plimsoll.framework.config import config_for
from plimsoll.framework.data.files import FileHashes, compute_digest, find
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.devices.executables import HostBytes, compile_or_load
from plimsoll.framework.families.published import shape_url
from plimsoll.framework.files import hub_models
from plimsoll.framework.layers.base import Context, batch_specs
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layout import Group, MemoryKind, Nested, StateLayout, TrainState, flatten, merge
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.batch_transform import ForwardCost
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.program import Program, offload_stages
from plimsoll.framework.program.rows import Batch
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker
from plimsoll.framework.schedules.memory import DEVICE, Memory
from plimsoll.framework.schedules.stack_layout import find_expert_paths
from plimsoll.framework.schedules.step import microbatches
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.weights.directory import Directory

# (head, its prepared weights, x_BSD before the final norm, context) -> {name: array [B, S, ...]}.
HeadFunction = Callable[[LMHead, Nested, jax.Array, Context], dict[str, jax.Array]]
_WEIGHT_GROUPS: tuple[Group, ...] = ("parameter", "frozen", "buffer")


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
        self._groups: tuple[Group, ...] = ("ema" if group == "ema" else "parameter", "frozen", "buffer")
        self._change = change
        self._accumulate = accumulate
        # The devices of a CPU share a thread pool, so two concurrent programs with collectives could deadlock.
        self._runs_alone = program.mesh.size > 1 and program.mesh.devices.flat[0].platform == "cpu"

    def __call__(self, state: TrainState, batch: Batch, after: object = ()) -> Batch:
        """Return the function's results for the rows of the batch, on the devices.

        Args:
            state: state with the groups of weights and buffers; it is not donated.
            batch: batch with at least the arrays that the data pipeline delivers for training.
            after: results of programs that were started earlier; waited for where programs must run one at a time.
        """
        weights = [state[group] for group in self._groups]
        delivered = {name: batch[name] for name in self.program.experiment.data.sequence_arrays()}
        if not self._runs_alone:
            return self._compiled(*weights, delivered)
        jax.block_until_ready(after)
        return jax.block_until_ready(self._compiled(*weights, delivered))

    def weight_bytes(self, memory_kind: MemoryKind) -> int:
        """Return the bytes of the weights per device in its own memory ("device") or offloaded ("pinned_host")."""
        return sum(self.program.layout.bytes_per_device(group, memory_kind) for group in self._groups)

    def dry_run(self, compile: Compile, *, other_bytes: int) -> MemoryTracker:
        """Compile the function with `compile` and return the memory that a call needs.

        Args:
            compile: see `Compile`. If it compiles for the attached devices, later calls run that executable.
            other_bytes: bytes on a device that are allocated during the call in addition to its arguments.
        """
        offloaded = self.weight_bytes("pinned_host")
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
    def _compiled(self) -> Callable[..., Batch]:
        return compile_or_load(self._lower(), self.program.backend.compiler_options, what=self._what)

    def _lower(self) -> jax.stages.Lowered:
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
        # The inverse of `microbatches`: [count, B / count, ...] -> [B, ...].
        return {name: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]) for name, x in results.items()}

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


class AuxiliaryModel:
    """A frozen model on the mesh of a run.

    Args:
        program: program of the run.
        function: computes the results from the input of the model's head, see `HeadFunction`.
        path: directory of a published model, or hf://ORG/NAME; None for the run's own model with its initial weights.
        name: option that names the model, such as "batch_transform.pretrained"; error messages start with it.
        what: name of the model in messages, such as "the reference".
        offloaded: offload the weights to host memory; otherwise they stay on the devices.

    Attributes:
        run: program of the run.
        program: program of this model.
        state: the weights; None unless they are loaded.

    Raises:
        FileNotFoundError, ValueError: the directory does not exist, or its model does not fit the run's data or mesh.
    """

    def __init__(
        self,
        program: Program,
        function: HeadFunction,
        *,
        path: str | None = None,
        name: str = "batch_transform.pretrained",
        what: str = "the other model",
        offloaded: bool = True,
    ):
        self.path = path
        self.name = name
        self.what = what
        self.run = program
        try:
            experiment = auxiliary_experiment(program.experiment, path)
            self.program = Program(
                experiment, program.devices, mesh=program.experiment.mesh, training=False, offload_weights=offloaded
            )
        except (FileNotFoundError, ValueError) as error:
            raise self._name_option(error) from None
        accumulate = program.experiment.learner.accumulate
        self._forward = AuxiliaryForward(self.program, function, what=what, accumulate=accumulate)
        self.state: TrainState | None = None

    def _name_option(self, error: FileNotFoundError | ValueError) -> FileNotFoundError | ValueError:
        """Prefix the error with the option that names the directory; return it unchanged if there is no path."""
        message = f"{self.name} = {self.path}: {error}" if self.path else str(error)
        return FileNotFoundError(message) if isinstance(error, FileNotFoundError) else ValueError(message)

    def weights_digest(self, hashes: FileHashes) -> str:
        """Return a digest of everything that determines the weights.

        That is the checksums of the weight files, or the initialization seed, plus all shapes and dtypes.

        Args:
            hashes: cache of file checksums.
        """
        experiment = self.program.experiment
        facts: list[object] = [experiment.trainer.seed]
        if experiment.pretrained is not None:
            directory = Directory(experiment.pretrained.path)
            names = sorted(set(directory.home.values()))
            facts = [hashes.sha256(find(str(directory.path / name))[0]) for name in names]
        # The same files give different weights if the weights are stored in fewer bits.
        specs = flatten(experiment.model.parameter_specs())
        facts += [[path, list(spec.shape), str(spec.dtype)] for path, spec in sorted(specs.items())]
        return compute_digest(facts)

    def check_files(self) -> None:
        """Read the headers of the weight files and the tokenizer; the data must be set up.

        Raises:
            FileNotFoundError, ValueError: weights are missing or have a different shape, or token ids stand for
                different text. The message is one line.
        """
        experiment = self.program.experiment
        if experiment.pretrained is not None:
            try:
                experiment.pretrained.places(experiment.language_model)
            except (FileNotFoundError, ValueError) as error:
                raise self._name_option(error) from None
            if self.path is None:
                return
            # Only pipelines with a tokenizer are used with published models.
            tokenizer: Tokenizer = self.run.experiment.data.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
            if not tokenizer.has_text:
                return
            vocab_size = experiment.language_model.vocab_size
            other = PretrainedTokenizer(path=experiment.pretrained.path, vocab_size=vocab_size)
            other.prepare(Path(hub_models.folder(experiment.pretrained.path)), None, write=False)
            # The vocabularies may be padded to different sizes, so compare only the ids that both have.
            for token, (ours, theirs) in enumerate(zip(tokenizer.table, other.table, strict=False)):
                if ours != theirs:
                    raise ValueError(
                        f"{self.name} = {self.path}: token {token} is {theirs!r} there and {ours!r} in "
                        "data.tokenizer; expected a model with the same vocabulary"
                    )

    def load(self) -> None:
        """Read or initialize the weights; with offloading the devices hold one layer. Every process calls this."""
        if self.state is not None:
            return
        experiment = self.program.experiment
        with phase(f"loading {self.what}", patience=SHORT):
            if experiment.pretrained is not None:
                state = experiment.pretrained.init(self.program)
            else:
                state = self.program.init()
        self.state = state.select(_WEIGHT_GROUPS)

    def unload(self) -> None:
        """Free the weights."""
        self.state = None

    def __call__(self, batch: Batch, after: object = ()) -> Batch:
        """Return the function's results for the rows of a batch, on the devices; `after`: see `AuxiliaryForward`."""
        if self.state is None:
            raise ValueError(
                f"{self.what} is not loaded: call the batch transform's open() before a step or an evaluation"
            )
        return self._forward(self.state, batch, after)

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of the offloaded weights in host memory, per device."""
        return self._forward.weight_bytes("pinned_host")

    def dry_run(self, compile: Compile, *, other_bytes: int) -> MemoryTracker:
        """Return the device and host memory that a call needs, including all weights; nothing is loaded.

        Args:
            compile: see `Compile`.
            other_bytes: bytes on a device that are allocated as well, such as the training state.
        """
        tracker = self._forward.dry_run(compile, other_bytes=other_bytes)
        tracker.host_peak += self.offloaded_bytes
        return tracker


def auxiliary_experiment(run: Experiment, path: str | None) -> Experiment:
    """Return the experiment of the other model, on the data and mesh of the run; nothing in it is trained.

    It has the run's memory.parameters and memory.experts, so a model that is not offloaded as a whole still offloads
    those parameters.
    """
    # Plain SGD has no optimizer state. The learner's scope decides in which chunks the weights are initialized.
    optimizer = config_for(optax.sgd, learning_rate=0.0)
    learner = config_for(Learner, optimizer=optimizer, scope=run.learner.scope)
    model = run.model
    pretrained = run.pretrained
    if path is not None:
        published_model, published_weights = families.build_pretrained_configs(shape_url(path))
        # The same dtypes for both models, so that their log-probabilities are rounded the same way.
        published_model.param_dtype = str(run.model.param_dtype)
        published_model.compute_dtype = str(run.model.compute_dtype)
        model = published_model.instantiate()
        pretrained = published_weights.instantiate()
    # The run's model may have experts that the other one does not have.
    experts = run.memory.experts.text if find_expert_paths(model) else DEVICE
    # The allowed placement of parameters depends on how a step updates them. This schedule allows all, and has no
    # buffers for gradients of experts.
    update = run.memory.update if experts == DEVICE else "in_backward"
    experiment: Experiment = config_for(Experiment).instantiate(
        model=model,
        data=run.data,
        mesh=run.mesh,
        learner=learner,
        memory=config_for(Memory, update=update, parameters=run.memory.parameters.text, experts=experts),
        trainer=run.trainer,
        compiler=run.compiler,
        health=run.health,
    )
    # Assigned as an instance, because the run's config is not available here.
    experiment.pretrained = pretrained
    return experiment


def estimate_forward(run: Experiment, model: Experiment, mesh: Mesh | AbstractMesh, *, offloaded: bool) -> ForwardCost:
    """Estimate one forward pass over the batch of a step, split into the step's number of microbatches.

    Args:
        run: experiment whose batches are processed.
        model: experiment with the model that processes them.
        mesh: device mesh.
        offloaded: the model's weights are offloaded; each microbatch copies them to the device once.
    """
    specs = model.state_specs()
    if offloaded:
        specs = offload_stages(specs, {*model.model.stages, "shared"})
    # Only the shape of the mesh is used.
    layout = StateLayout(specs, cast(Mesh, mesh))
    offloaded_bytes = sum(layout.bytes_per_device(group, "pinned_host") for group in _WEIGHT_GROUPS)
    parts = run.learner.accumulate
    tokens = run.data.global_batch_size * run.data.seq_len
    return ForwardCost(
        flops=model.model.forward_flops_per_token(run.data.seq_len) * tokens,
        read_bytes=parts * sum(layout.bytes_per_device(group) for group in _WEIGHT_GROUPS),
        offloaded_bytes=offloaded_bytes,
        moved_bytes=parts * offloaded_bytes,
    )


def estimate_sampling(run: Experiment, mesh: Mesh | AbstractMesh, *, answer_tokens: int) -> ForwardCost:
    """Estimate sampling an answer to each row's prompt with the run's own weights, which are read once per token.

    Reads of the KV cache are not counted.

    Args:
        run: experiment whose model answers.
        mesh: device mesh.
        answer_tokens: number of tokens of the longest answer.
    """
    forward = estimate_forward(run, run, mesh, offloaded=False)
    # Offloaded weights are copied in for each token, but in host memory they are part of the run's own state.
    return ForwardCost(
        flops=forward.flops,
        read_bytes=forward.read_bytes // run.learner.accumulate * answer_tokens,
        moved_bytes=forward.offloaded_bytes * answer_tokens,
    )
