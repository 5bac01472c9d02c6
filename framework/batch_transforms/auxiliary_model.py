"""A second, frozen model next to the one being trained.

It is either the run's own model with its initial weights (a reference), or a published model (a reference or teacher).
Its weights are normally offloaded: the devices hold only one layer, or one table, of them at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optax

from plimsoll.framework import families
from plimsoll.framework.batch_transforms.forward import AuxiliaryForward, HeadFunction
from plimsoll.framework.config import config_for
from plimsoll.framework.data.files import FileHashes, compute_digest, find
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.families.published import shape_url
from plimsoll.framework.files import hub_models
from plimsoll.framework.layout import TrainState, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.rows import Batch
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.weights.directory import Directory


class AuxiliaryModel:
    """A frozen model on the mesh of a run.

    Args:
        program: program of the run.
        function: computes the results from the input of the model's head; see `framework.batch_transforms.forward`.
        path: directory of a published model, or hf://ORG/NAME; None for the run's own model with its initial weights.
        name: option that names the model, such as "batch_transform.pretrained"; error messages start with it.
        what: name of the model in messages, such as "the reference".
        offloaded: offload the weights to host memory; otherwise they stay on the devices.

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
        self._state: TrainState | None = None

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
        experiment: Any = self.program.experiment
        facts: list[Any] = [experiment.trainer.seed]
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
            if self.path is not None:
                self._check_tokenizer(experiment.pretrained.path)

    def load(self) -> None:
        """Read or initialize the weights; with offloading the devices hold one layer. Every process calls this."""
        if self._state is not None:
            return
        experiment = self.program.experiment
        with phase(f"loading {self.what}", patience=SHORT):
            if experiment.pretrained is not None:
                state = experiment.pretrained.init(self.program)
            else:
                state = self.program.init()
        self._state = state.select(("parameter", "frozen", "buffer"))

    @property
    def is_loaded(self) -> bool:
        """True if the weights are loaded."""
        return self._state is not None

    def unload(self) -> None:
        """Free the weights."""
        self._state = None

    def __call__(self, batch: Batch, after: object = ()) -> Batch:
        """Return the function's results for the rows of a batch, on the devices; `after`: see `AuxiliaryForward`."""
        if self._state is None:
            raise ValueError(
                f"{self.what} is not loaded: call the batch transform's open() before a step or an evaluation"
            )
        return self._forward(self._state, batch, after)

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of the offloaded weights in host memory, per device."""
        return self._forward.offloaded_bytes

    def dry_run(self, compile: Compile, *, other_bytes: int) -> MemoryTracker:
        """Return the device and host memory that a call needs, including all weights; nothing is loaded.

        Args:
            compile: see `Compile`.
            other_bytes: bytes on a device that are allocated as well, such as the training state.
        """
        tracker = self._forward.dry_run(compile, other_bytes=other_bytes)
        tracker.host_peak += self._forward.offloaded_bytes
        return tracker

    def _check_tokenizer(self, path: str) -> None:
        """Raise ValueError if a token id stands for different text in the run's tokenizer and the directory's."""
        data: Any = self.run.experiment.data
        tokenizer: Tokenizer = data.tokenizer
        if not tokenizer.has_text:
            return
        vocab_size = self.program.experiment.language_model.vocab_size
        other = PretrainedTokenizer(path=path, vocab_size=vocab_size)
        other.prepare(Path(hub_models.folder(path)), None, write=False)
        # The vocabularies may be padded to different sizes, so compare only the ids that both have.
        for token, (ours, theirs) in enumerate(zip(tokenizer.table, other.table, strict=False)):
            if ours != theirs:
                raise ValueError(
                    f"{self.name} = {self.path}: token {token} is {theirs!r} there and {ours!r} in data.tokenizer; "
                    "expected a model with the same vocabulary"
                )


def auxiliary_experiment(run: Experiment, path: str | None) -> Experiment:
    """Return the experiment of the other model, on the data and mesh of the run; nothing in it is trained.

    It has the run's memory.parameters, so a model that is not offloaded as a whole still offloads those parameters.
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
    experiment: Experiment = config_for(Experiment).instantiate(
        model=model,
        data=run.data,
        mesh=run.mesh,
        learner=learner,
        # The allowed placement of parameters depends on how a step updates them.
        memory=config_for(Memory, update=run.memory.update, parameters=run.memory.parameters.text),
        trainer=run.trainer,
        compiler=run.compiler,
        health=run.health,
    )
    # Assigned as an instance, because the run's config is not available here.
    experiment.pretrained = pretrained
    return experiment
