"""Selects the fields that `plimsoll configs show` prints: the commonly set ones, those of --only, or all."""

from collections.abc import Sequence

from plimsoll.framework.config import REQUIRED, Config, did_you_mean, get_schema
from plimsoll.launch import cli

# A config with at most this many fields is shown in full.
_MAX_SHOWN_IN_FULL = 60
# Fields that many runs set. They are shown even if a config leaves them at their defaults.
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


def select_usual(config: Config, marked: Sequence[str]) -> list[str]:
    """Return the paths of a config to show by default; all paths of a small config.

    These are the fields with a non-default value, the components of its sections, marked paths with everything below
    them, and commonly set fields.

    Args:
        config: resolved config.
        marked: paths that a rule or the command line has set.
    """
    paths = [path for path, _ in config.walk() if path]
    if len(paths) <= _MAX_SHOWN_IN_FULL:
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
    """Return whether a value differs from its constructor's default. `components` has those above it, by path."""
    parent_path, _, name = path.rpartition(".")
    if isinstance(value, Config):
        # The parts of a section, such as its source and tokenizer, its optimizer, or its stages.
        return path.count(".") == 1
    if value is REQUIRED:
        return False
    if parent_path not in components:
        # An entry of a list or dict. Their default is empty.
        return True
    field = get_schema(components[parent_path]).get(name)
    return field is None or field.default is REQUIRED or value != field.default


def select_matching(config: Config, words: Sequence[str]) -> list[str]:
    """Return the paths of a config that the user asked for.

    Args:
        config: resolved config.
        words: full paths, which include everything below them, or parts of paths.

    Raises:
        UsageError: no path contains one of the words.
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
            raise cli.UsageError(f"--only={word}: no field path contains it{did_you_mean(text, names)}")
        found.update(matches)
    return [path for path in paths if path in found]
