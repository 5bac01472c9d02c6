"""A second model beside the one that is trained: its weights are in host memory, and visit layer by layer.

It is the model of the run itself with its first weights (a reference), or that of a published directory (a reference, a
teacher). Of its weights, the devices hold one layer's at a time, or a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optax

from framework.companions.forward import Forward, HeadFunction
from framework.config import config_for
from framework.config.named import load_named
from framework.data.files import FileHashes, digest_of, find
from framework.data.pretrained_tokenizer import PretrainedTokenizer
from framework.data.tokenizers import Tokenizer
from framework.files import hub_models
from framework.layout import Nested, flatten
from framework.learner.learner import Learner
from framework.program.experiment import Experiment
from framework.program.program import Program
from framework.program.rows import Batch
from framework.schedules.layerwise.programs import Compile, Ledger
from framework.schedules.memory import Memory
from framework.terminal.phases import SHORT, phase
from framework.weights.directory import Directory


class OtherModel:
    """A model that is not trained, on the mesh of a run.

    Args:
        program: of the run.
        function: what is wanted of the input of its head; see `framework.companions.forward`.
        path: a published model's directory, or hf://ORG/NAME; None for the run's own model with its first weights.
        name: of the option that names it, such as "companion.pretrained"; errors begin with it.
        what: what a person is told it is, such as "the reference".
        hosted: its weights live in host memory; otherwise on the devices.

    Raises:
        FileNotFoundError, ValueError: there is no such directory, or its model does not fit the run's data or mesh.
    """

    def __init__(
        self,
        program: Program,
        function: HeadFunction,
        *,
        path: str | None = None,
        name: str = "companion.pretrained",
        what: str = "the other model",
        hosted: bool = True,
    ):
        self.path = path
        self.name = name
        self.what = what
        self.run = program
        try:
            experiment = other_experiment(program.experiment, path)
            self.program = Program(
                experiment,
                program.devices,
                mesh=program.experiment.mesh,
                training=False,
                hosted_weights=hosted,
            )
        except (FileNotFoundError, ValueError) as error:
            raise self._named(error) from None
        accumulate = program.experiment.learner.accumulate
        self._forward = Forward(self.program, function, what=what, accumulate=accumulate)
        self._state: Nested | None = None

    def _named(self, error: FileNotFoundError | ValueError) -> FileNotFoundError | ValueError:
        """The error, beginning with the option that names the directory; as it is where none does."""
        message = f"{self.name} = {self.path}: {error}" if self.path else str(error)
        return FileNotFoundError(message) if isinstance(error, FileNotFoundError) else ValueError(message)

    def weights_digest(self, hashes: FileHashes) -> str:
        """A digest of all that decides the weights: the files' checksums, or the seed of first values; shapes, dtypes.

        Args:
            hashes: keeps the files' checksums.
        """
        experiment: Any = self.program.experiment
        facts: list[Any] = [experiment.trainer.seed]
        if experiment.pretrained is not None:
            directory = Directory(experiment.pretrained.path)
            names = sorted(set(directory.home.values()))
            facts = [hashes.sha256(find(str(directory.path / name))[0]) for name in names]
        # The same files make other weights where these are stored in fewer bits.
        specs = flatten(experiment.model.parameter_specs())
        facts += [[path, list(spec.shape), str(spec.dtype)] for path, spec in sorted(specs.items())]
        return digest_of(facts)

    def check_files(self) -> None:
        """Reads the headers of the directory and its tokenizer; the data is set up.

        Raises:
            FileNotFoundError, ValueError: weights are missing or of another shape, or ids mean other texts; one line.
        """
        experiment = self.program.experiment
        if experiment.pretrained is not None:
            try:
                experiment.pretrained.places(experiment.language_model)
            except (FileNotFoundError, ValueError) as error:
                raise self._named(error) from None
            if self.path is not None:
                self._check_tokenizer(experiment.pretrained.path)

    def load(self) -> None:
        """Reads or draws the weights; beside them, the devices hold a layer. Every process calls this."""
        if self._state is not None:
            return
        experiment = self.program.experiment
        with phase(f"loading {self.what}", patience=SHORT):
            if experiment.pretrained is not None:
                state = experiment.pretrained.init(self.program)
            else:
                state = self.program.init()
        self._state = {group: state[group] for group in ("parameter", "frozen", "buffer")}

    @property
    def is_loaded(self) -> bool:
        """Whether it has its weights."""
        return self._state is not None

    def unload(self) -> None:
        """Lets the weights go."""
        self._state = None

    def __call__(self, batch: Batch, after: object = ()) -> Batch:
        """What the function gives for the rows of a batch, on the devices; `after` as for `Forward`."""
        if self._state is None:
            raise ValueError(f"{self.what} is not loaded: call the companion's open() before a step or an evaluation")
        return self._forward(self._state, batch, after)

    @property
    def hosted_bytes(self) -> int:
        """The bytes of its weights in host memory, of one device."""
        return self._forward.hosted_bytes

    def rehearsed(self, compile: Compile, *, beside: int) -> Ledger:
        """What a call needs with all weights, on the device and on the host; nothing is loaded.

        Args:
            compile: see `Compile`.
            beside: bytes on a device that are there as well, such as the training state's.
        """
        ledger = self._forward.rehearsed(compile, beside=beside)
        ledger.host_peak += self._forward.hosted_bytes
        return ledger

    def _check_tokenizer(self, place: str) -> None:
        """Raises ValueError where an id of the run's tokenizer stands for other text in the directory's."""
        data: Any = self.run.experiment.data
        tokenizer: Tokenizer = data.tokenizer
        if not tokenizer.has_text:
            return
        vocab_size = self.program.experiment.language_model.vocab_size
        other = PretrainedTokenizer(path=place, vocab_size=vocab_size)
        other.prepare(Path(hub_models.folder(place)), None, write=False)
        for token, (ours, theirs) in enumerate(zip(tokenizer.table, other.table, strict=False)):
            if ours != theirs:
                raise ValueError(
                    f"{self.name} = {self.path}: its token {token} is {theirs!r}, that of data.tokenizer is {ours!r}; "
                    "expected a model of the same vocabulary"
                )


def other_experiment(run: Experiment, path: str | None) -> Experiment:
    """The experiment of the other model, on the data and the mesh of the run; nothing of it is trained.

    Where its weights are on the devices, those of the run's memory.parameters are in host memory here, too.
    """
    # Plain SGD keeps no state. Its scope decides in which pieces first values are made.
    optimizer = config_for(optax.sgd, learning_rate=0.0)
    learner = config_for(Learner, optimizer=optimizer, scope=run.learner.scope)
    model = run.model
    pretrained = run.pretrained
    if path is not None:
        published = load_named(f"hf:{path}", shape_is_enough=True)
        # One dtype for both, so that their log-probabilities are rounded alike.
        published.model.param_dtype = str(run.model.param_dtype)
        published.model.compute_dtype = str(run.model.compute_dtype)
        model = published.model.instantiate()
        pretrained = published.pretrained.instantiate()
    experiment: Experiment = config_for(Experiment).instantiate(
        model=model,
        data=run.data,
        mesh=run.mesh,
        learner=learner,
        # Where parameters may be depends on how a step updates them.
        memory=config_for(Memory, update=run.memory.update, parameters=run.memory.parameters.text),
        trainer=run.trainer,
        compiler=run.compiler,
        health=run.health,
    )
    # An instance: the config of the run is not at hand.
    experiment.pretrained = pretrained
    return experiment
