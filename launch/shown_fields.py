"""Which fields of a config `plimsoll configs show` prints: those that one usually sets, those of --only, or all."""

from collections.abc import Sequence

from framework.config import REQUIRED, Config, did_you_mean, schema_of
from launch import cli

# A config of at most so many fields is shown whole.
_FEW = 60
# Fields that are set for many runs, also where a config leaves them at their defaults.
_USUAL = (
    "data.global_batch_size",
    "data.seq_len",
    "learner.accumulate",
    "learner.clip",
    "learner.optimizer.learning_rate",
    "memory.optimizer_state",
    "memory.remat",
    "memory.update",
    "mesh.data",
    "mesh.fsdp",
    "mesh.model",
    "mesh.seq",
    "model.lora",
    "trainer.eval_every",
    "trainer.log_every",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.save_every",
    "trainer.seed",
)


def usual(config: Config, marked: Sequence[str]) -> list[str]:
    """The paths of a config that are shown first: what it sets to another value than the default, the components of its
    sections, what was marked with all below it, and fields that are set for many runs. All paths of a small config.

    Args:
        config: resolved.
        marked: paths that a rule or the command line has set.
    """
    paths = [path for path, _ in config.walk() if path]
    if len(paths) <= _FEW:
        return paths
    always = {*_USUAL, *marked}
    below_marked = tuple(f"{path}." for path in marked)
    # A component comes before its fields.
    components: dict[str, Config] = {}
    shown = []
    for path, value in config.walk():
        if isinstance(value, Config):
            components[path] = value
        if path and (path in always or path.startswith(below_marked) or _is_chosen(components, path, value)):
            shown.append(path)
    return shown


def _is_chosen(components: dict[str, Config], path: str, value: object) -> bool:
    """Whether somebody has chosen the value: it is another one than the constructor's default. `components` has those
    above it, by path."""
    parent_path, _, name = path.rpartition(".")
    if isinstance(value, Config):
        # The parts of a section: its source and tokenizer, its optimizer, its stages.
        return path.count(".") == 1
    if value is REQUIRED:
        return False
    if parent_path not in components:
        # An entry of a list or of a dict, which is empty by default.
        return True
    field = schema_of(components[parent_path]).get(name)
    return field is None or field.default is REQUIRED or value != field.default


def only(config: Config, words: Sequence[str]) -> list[str]:
    """The paths of a config that somebody asks for.

    Args:
        config: resolved.
        words: each a path, of which all below is meant, or a part of the paths that are meant.

    Raises:
        UsageError: no path has such a word in it.
    """
    paths = [path for path, _ in config.walk() if path]
    found: set[str] = set()
    for word in words:
        text = word.removeprefix("--").removeprefix("config.").rstrip(".")
        if text in paths:
            matches = [path for path in paths if path == text or path.startswith(f"{text}.")]
        else:
            matches = [path for path in paths if text in path]
        if not matches or not text:
            names = sorted({part for path in paths for part in path.split(".")})
            raise cli.UsageError(f"--only={word}: no field has that in its path{did_you_mean(text, names)}")
        found.update(matches)
    return [path for path in paths if path in found]
