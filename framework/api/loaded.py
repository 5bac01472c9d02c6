"""The weights of a run or of a published model, ready on the devices, for whoever trains nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config import Config, config_for, target_of
from framework.config.changes import config_changes
from framework.config.named import load_named
from framework.data.tokenizers import BPETokenizer
from framework.devices.environment import prepare_jax, start_devices
from framework.files import hub_models
from framework.files.workdir import read_only
from framework.program import stored

Tell = Callable[[str], None]
# Changes a config in place, as a command line or a program asks.
Change = Callable[[Config], object]


@dataclass
class Loaded:
    """A model that is ready: `state` holds parameters (or "ema", if `averaged`), frozen ones and buffers alone."""

    config: Config
    experiment: Any  # its tokenizer is prepared
    program: Any
    state: dict[str, Any]
    averaged: bool
    folder: Path  # the workdir's, or the published model's

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError where there is none: ids alone are no text."""
        tokenizer = self.experiment.data.tokenizer
        if not tokenizer.has_text:
            raise ValueError("data.tokenizer is NoTokenizer; set --config.data.tokenizer to the one the tokens are of")
        return tokenizer


def is_of_mesh(path: str) -> bool:
    """Whether a setting, by its dotted path, is of the mesh."""
    return path.split(".")[0] == "mesh"


def load_run(
    folder: str,
    change: Change,
    *,
    step: int | None,
    averaged: bool,
    host_weights: bool,
    mesh_is_asked: bool = False,
    text: bool = True,
    tell: Tell,
) -> Loaded:
    """Loads the model of a run; no optimizer state is read.

    Args:
        folder: the workdir, or its URL.
        change: changes the config that the run has stored.
        step: of the checkpoint; None for the newest valid one.
        averaged: take the moving averages of the weights.
        host_weights: the stack stays in host memory, but for one layer.
        mesh_is_asked: `change` sets the mesh, which is refused where it does not fit the devices.
        text: the model is a language model, whose tokenizer is made ready.
        tell: gets a line about what is loaded.

    Raises:
        FileNotFoundError, ValueError: it is not there, or does not fit together; one line.
    """
    prepare_jax()
    workdir, checkpoints = read_only(folder)
    from framework.checkpoint.checkpointer import Checkpointer

    checkpointer = Checkpointer(directory=checkpoints, read_only=True)
    config = _config_of_run(workdir, checkpointer, step, tell)
    change(config)
    experiment = _experiment(config, workdir, averaged=averaged, text=text)
    # Imported late: what is wrong so far is told before the devices are looked for.
    from framework.devices.executables import use_compilation_cache
    from framework.program.inference import inference_program

    _refuse_empty(checkpointer)
    start_devices()
    use_compilation_cache(config.trainer.compilation_cache)
    program = inference_program(experiment, host_weights=host_weights, mesh_is_asked=mesh_is_asked, tell=tell)
    restored = _restored(checkpointer, program, step, averaged)
    source = f"{folder}, step {restored.step}{', averaged' if averaged else ''}"
    tell("\n".join([*restored.problems, source]))
    # The group that was not read is empty.
    state = {"parameter": {}, "ema": {}, **restored.state}
    return Loaded(config, experiment, program, state, averaged, workdir)


def _config_of_run(workdir: Path, checkpointer: Any, step: int | None, tell: Tell) -> Config:
    """Load the config that the checkpoint was saved with, or that of the workdir if the checkpoint has none.

    The manifest's digest covers the former. config.json belongs to the last start, and may have been edited since.
    """
    config = stored.read(workdir, tell)
    steps = checkpointer.steps() if step is None else [step]
    for saved_step in reversed(steps):
        try:
            extra = checkpointer.manifest(saved_step).extra
        except (ValueError, OSError):
            # `restore` says what is wrong with it.
            continue
        if "config" not in extra:
            return config
        saved = stored.of_checkpoint(extra["config"], f"the checkpoint of step {saved_step}", lambda line: None)
        for change in config_changes(saved.to_dict()["model"], config.to_dict()["model"], path="config.model"):
            tell(f"{workdir / 'config.json'} is not what step {saved_step} was saved with, which counts: {change}")
        return saved
    return config


def _experiment(config: Config, workdir: Path, *, averaged: bool, text: bool) -> Any:
    """The experiment of a run's config; arguments as for `load_run`. Raises ValueError: the run keeps no averages."""
    if text:
        _name_tokenizer_file(config, workdir)
    experiment: Any = config.instantiate()
    if averaged and not experiment.learner.ema_specs():
        raise ValueError("--ema: the run keeps no averages (learner.ema is not set)")
    if text:
        _prepare_tokenizer(experiment, workdir)
    return experiment


def _refuse_empty(checkpointer: Any) -> None:
    """Raises FileNotFoundError where there is no checkpoint."""
    if not checkpointer.steps():
        problems = [f"{checkpointer.directory} holds no checkpoint", *checkpointer.problems()]
        raise FileNotFoundError("; ".join(problems))


def _restored(checkpointer: Any, program: Any, step: int | None, averaged: bool) -> Any:
    """What a checkpoint holds of the model, on the program's devices; None for the newest step that is valid."""
    # The optimizer's state, often the largest group, is not needed here.
    groups = ("ema" if averaged else "parameter", "frozen", "buffer")
    specs = {group: program.layout.specs[group] for group in groups}
    abstract = program.layout.abstract(specs)
    if step is None:
        return checkpointer.restore_latest(abstract, groups=groups)
    return checkpointer.restore(step, abstract, groups=groups)


def _name_tokenizer_file(config: Config, workdir: Path) -> None:
    """Has the run's copy of its tokenizer read, wherever the tokenizer came from. Changes the config in place."""
    if not config.data.takes("tokenizer"):
        return
    tokenizer = config.data.tokenizer
    target = target_of(tokenizer)
    if isinstance(target, type) and issubclass(target, BPETokenizer):
        tokenizer.path = str(workdir / "tokenizer.json")


def _prepare_tokenizer(experiment: Any, workdir: Path) -> None:
    """Makes the run's tokenizer ready. Raises ValueError: its model has no use for text."""
    # Reading the property is the check.
    _ = experiment.language_model
    tokenizer = experiment.data.tokenizer
    file = workdir / "tokenizer.json"
    if isinstance(tokenizer, BPETokenizer) and not file.exists():
        raise FileNotFoundError(f"{file} does not exist: the tokenizer of the run")
    tokenizer.prepare(workdir, None, write=False)


def load_published(path: str, change: Change, *, host_weights: bool, mesh_is_asked: bool = False, tell: Tell) -> Loaded:
    """Loads a published model: of a Hugging Face directory, or by the Hub's id. Other arguments as for `load_run`."""
    prepare_jax()
    import optax

    from framework.data.pretrained_tokenizer import PretrainedTokenizer
    from framework.devices.executables import use_compilation_cache
    from framework.learner.learner import Learner
    from framework.program.inference import inference_program

    config = load_named(f"hf:{path}")
    place = config.pretrained.path
    for line in hub_models.note(place):
        tell(line)
    # An experiment needs a learner. Plain SGD keeps no state, so it takes no memory.
    optimizer = config_for(optax.sgd, learning_rate=0.0)
    config.learner = config_for(Learner, optimizer=optimizer)
    config.data.tokenizer = config_for(PretrainedTokenizer, path=place, vocab_size=config.model.vocab_size)
    change(config)
    experiment: Any = config.instantiate()
    folder = hub_models.folder(place)
    experiment.data.tokenizer.prepare(folder, None, write=False)
    start_devices()
    use_compilation_cache(config.trainer.compilation_cache)
    program = inference_program(experiment, host_weights=host_weights, mesh_is_asked=mesh_is_asked, tell=tell)
    state = experiment.pretrained.init(program)
    return Loaded(config, experiment, program, state, False, folder)
