"""Loads the weights of a run or of a published model onto the devices, for inference."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plimsoll import configs
from plimsoll.framework.config import Config, config_for, get_target
from plimsoll.framework.config.changes import config_changes
from plimsoll.framework.data.tokenizers import BPETokenizer
from plimsoll.framework.devices.environment import prepare_jax, start_devices
from plimsoll.framework.files import hub_models
from plimsoll.framework.files.workdir import read_only
from plimsoll.framework.layout import TrainState
from plimsoll.framework.program import stored_config

Log = Callable[[str], None]
# A function that changes a config in place, with the overrides of a command line or a program.
Change = Callable[[Config], object]


@dataclass
class LoadedModel:
    """A loaded model: `state` holds only parameters (or "ema", if `averaged`), frozen weights and buffers."""

    config: Config
    experiment: Any  # its tokenizer is prepared
    program: Any
    state: TrainState
    averaged: bool
    folder: Path  # the workdir, or the directory of the published model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError if there is none, because token ids cannot be converted to text."""
        tokenizer = self.experiment.data.tokenizer
        if not tokenizer.has_text:
            raise ValueError("data.tokenizer is NoTokenizer; set --config.data.tokenizer to the tokenizer of the data")
        return tokenizer


def is_mesh_setting(path: str) -> bool:
    """Return whether a setting, by its dotted path, belongs to the mesh."""
    return path.split(".")[0] == "mesh"


def load_run(
    folder: str,
    change: Change,
    *,
    step: int | Literal["best"] | None,
    averaged: bool,
    host_weights: bool,
    is_mesh_requested: bool = False,
    text: bool = True,
    log: Log,
) -> LoadedModel:
    """Load the model of a run, without the optimizer state.

    Args:
        folder: workdir of the run, or its URL.
        change: changes the stored config of the run.
        step: step of the checkpoint; "best" for the best one, None for the newest valid one.
        averaged: use the moving averages of the weights.
        host_weights: offload the stack to host memory; the device holds one layer of it at a time.
        is_mesh_requested: `change` sets the mesh, so it is an error if the mesh does not fit the devices.
        text: the model is a language model, so prepare its tokenizer.
        log: receives a line about the loaded checkpoint.

    Raises:
        FileNotFoundError, ValueError: the run or checkpoint does not exist, or its parts do not fit together. The
            message is one line.
    """
    prepare_jax()
    workdir, checkpoints = read_only(folder)
    from plimsoll.framework.checkpoint.checkpointer import Checkpointer

    checkpointer = Checkpointer(directory=checkpoints, read_only=True)
    if step == "best":
        step = _find_best_step(checkpointer)
    config = _load_run_config(workdir, checkpointer, step, log)
    change(config)
    experiment = _build_experiment(config, workdir, averaged=averaged, text=text)
    # Imported late, so that errors up to here are reported before JAX looks for devices.
    from plimsoll.framework.devices.executables import use_compilation_cache
    from plimsoll.framework.program.program import inference_program

    if not checkpointer.steps():
        problems = [f"{checkpointer.directory} holds no checkpoint", *checkpointer.problems()]
        raise FileNotFoundError("; ".join(problems))
    start_devices()
    use_compilation_cache(config.trainer.compilation_cache)
    program = inference_program(experiment, host_weights=host_weights, is_mesh_requested=is_mesh_requested, log=log)
    restored = _restore_model(checkpointer, program, step, averaged)
    source = f"{folder}, step {restored.step}{', averaged' if averaged else ''}"
    log("\n".join([*restored.problems, source]))
    return LoadedModel(config, experiment, program, restored.state, averaged, workdir)


def _find_best_step(checkpointer: Any) -> int:
    """Return the step of the run's best checkpoint, which the newest readable manifest names.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the run keeps no best checkpoint, or has not evaluated yet.
    """
    steps = checkpointer.steps()
    if not steps:
        raise FileNotFoundError(f"{checkpointer.directory} holds no checkpoint")
    problem = None
    for saved_step in reversed(steps):
        try:
            extra = checkpointer.manifest(saved_step).extra
        except (ValueError, OSError) as error:
            problem = problem or error
            continue
        best = extra.get("best")
        if not isinstance(best, dict):
            raise ValueError("best: the run keeps no best checkpoint (trainer.keep_best is not set)")
        if not isinstance(best.get("step"), int):
            raise ValueError(f"best: the run has not evaluated {best.get('metric')} yet")
        return best["step"]
    assert problem is not None
    raise problem


def _load_run_config(workdir: Path, checkpointer: Any, step: int | None, log: Log) -> Config:
    """Load the config that the checkpoint was saved with, or that of the workdir if the checkpoint has none.

    The manifest's digest covers the former. config.json belongs to the last start, and may have been edited since.
    """
    from plimsoll.framework.data.order import BatchOrder
    from plimsoll.framework.program.stages import with_stage_at

    config = stored_config.read(workdir, log)
    steps = checkpointer.steps() if step is None else [step]
    for saved_step in reversed(steps):
        try:
            extra = checkpointer.manifest(saved_step).extra
        except (ValueError, OSError):
            # `restore` reports the problem.
            continue
        order = BatchOrder.from_json(extra["data"]) if "data" in extra else BatchOrder()
        if "config" not in extra:
            return with_stage_at(config, saved_step, order)
        saved = stored_config.read_from_checkpoint(
            extra["config"], f"the checkpoint of step {saved_step}", lambda line: None
        )
        for change in config_changes(saved.to_dict()["model"], config.to_dict()["model"], path="config.model"):
            log(
                f"{workdir / 'config.json'} differs from the config saved at step {saved_step}, which is used: {change}"
            )
        return with_stage_at(saved, saved_step, order)
    return with_stage_at(config, None)


def _build_experiment(config: Config, workdir: Path, *, averaged: bool, text: bool) -> Any:
    """Build the experiment of a run's config; arguments as for `load_run`. Raises ValueError without averages."""
    if text:
        _name_tokenizer_file(config, workdir)
    experiment: Any = config.instantiate()
    if averaged and not experiment.learner.ema_specs():
        raise ValueError("--ema: the run has no moving averages (learner.ema is not set)")
    if text:
        _prepare_tokenizer(experiment, workdir)
    return experiment


def _restore_model(checkpointer: Any, program: Any, step: int | None, averaged: bool) -> Any:
    """Restore the model from a checkpoint onto the program's devices; `step` None selects the newest valid one."""
    # The optimizer state, often the largest group, is not needed here.
    groups = ("ema" if averaged else "parameter", "frozen", "buffer")
    abstract = program.layout.abstract(program.layout.specs.select(groups))
    if step is None:
        return checkpointer.restore_latest(abstract, groups=groups)
    return checkpointer.restore(step, abstract, groups=groups)


def _name_tokenizer_file(config: Config, workdir: Path) -> None:
    """Point the config, in place, to the workdir's copy of the tokenizer instead of its original path."""
    if not config.data.takes("tokenizer"):
        return
    tokenizer = config.data.tokenizer
    target = get_target(tokenizer)
    if isinstance(target, type) and issubclass(target, BPETokenizer):
        tokenizer.path = str(workdir / "tokenizer.json")


def _prepare_tokenizer(experiment: Any, workdir: Path) -> None:
    """Prepare the run's tokenizer. Raises ValueError if the model is not a language model."""
    # The property raises ValueError if the model is not a language model.
    _ = experiment.language_model
    tokenizer = experiment.data.tokenizer
    file = workdir / "tokenizer.json"
    if isinstance(tokenizer, BPETokenizer) and not file.exists():
        raise FileNotFoundError(f"the tokenizer of the run, {file}, does not exist")
    tokenizer.prepare(workdir, None, write=False)


def load_published(
    path: str, change: Change, *, host_weights: bool, is_mesh_requested: bool = False, log: Log
) -> LoadedModel:
    """Load a published model from a Hugging Face directory or by its Hub id. Other arguments as for `load_run`."""
    prepare_jax()
    import optax

    from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
    from plimsoll.framework.devices.executables import use_compilation_cache
    from plimsoll.framework.learner.learner import Learner
    from plimsoll.framework.program.program import inference_program

    config = configs.load(f"hf:{path}")
    location = config.pretrained.path
    for line in hub_models.describe_source(location):
        log(line)
    # An experiment needs a learner. Plain SGD has no state, so it takes no memory.
    optimizer = config_for(optax.sgd, learning_rate=0.0)
    config.learner = config_for(Learner, optimizer=optimizer)
    config.data.tokenizer = config_for(PretrainedTokenizer, path=location, vocab_size=config.model.vocab_size)
    change(config)
    experiment: Any = config.instantiate()
    folder = hub_models.folder(location)
    experiment.data.tokenizer.prepare(folder, None, write=False)
    start_devices()
    use_compilation_cache(config.trainer.compilation_cache)
    program = inference_program(experiment, host_weights=host_weights, is_mesh_requested=is_mesh_requested, log=log)
    state = experiment.pretrained.init(program)
    return LoadedModel(config, experiment, program, state, False, folder)
