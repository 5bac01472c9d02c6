"""The text of training steps, so that a change of the code that is to change no computation can be seen to change none.

    git worktree add ../before COMMIT; cd ../before; python -m tools.step_text --save /tmp/before.json
    cd -; python -m tools.step_text --against /tmp/before.json

What is compared is the jaxpr of each step (with `memory.update = layer_programs`: the StableHLO of each of its
programs), of every named config under each schedule that takes it, and of cases of the exactness suite in which any two
values of its axes meet. Prints how many are equal, and the names of those that are not; ends with 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for meshes of eight

import jax

import configs
from framework.config import ConfigError
from framework.program.program import Program
from framework.schedules.layerwise.programs import Compiled
from tests.support import exact

# Overrides that every named config is tried with.
SETTINGS = {
    "plain": {},
    "streamed": {"update": "streamed", "gradients": "pinned_host", "optimizer_state": "pinned_host", "remat": "full"},
    "hosted": {"update": "streamed", "parameters": "pinned_host", "activations": "pinned_host", "remat": "full"},
    "in_backward": {"update": "in_backward", "optimizer_state": "pinned_host", "remat": "full"},
    "unit ahead": {"update": "in_backward", "optimizer_state": "pinned_host", "prefetch": "unit"},
    "layer_programs": {"update": "layer_programs", "optimizer_state": "pinned_host", "remat": "full"},
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def texts(program: Program) -> list[str]:
    """The jaxpr of a program's step, or the lowered text of each of its programs."""
    if not program.in_parts:
        return [str(program.traced_step.jaxpr)]
    lowered_texts: list[str] = []

    def compile(lowered: jax.stages.Lowered, hosted: object) -> Compiled:
        lowered_texts.append(lowered.as_text())
        return Compiled(None, 0, None)

    program.layers.rehearse(program.layout.abstract(), program.layout.abstract(program.batch_specs), compile)
    return lowered_texts


def digest(program: Program) -> str:
    """A hash of a program's texts, without addresses in memory."""
    text = "\n".join(_ADDRESS.sub("", text) for text in texts(program))
    jax.clear_caches()  # they would hold the jaxprs of all programs, gigabytes in the end
    return hashlib.sha256(text.encode()).hexdigest()


def named_steps() -> Iterator[tuple[str, str]]:
    """(name, digest) of the named configs under each schedule. One that a schedule refuses is a line of its own."""
    for name in configs.names():
        for setting, fields in SETTINGS.items():
            config = configs.load(name)
            config.accelerator_rules = []
            if setting in ("in_backward", "unit ahead"):
                config.learner.clip_mode = "previous_norm"
            for field, value in fields.items():
                config.set_path(f"memory.{field}", value)
            try:
                yield f"{name}, {setting}", digest(Program(config.instantiate(), jax.devices()[:1]))
            except (ConfigError, ValueError) as error:
                yield f"{name}, {setting}", f"refused: {error}"


def exactness_steps() -> Iterator[tuple[str, str]]:
    """(name, digest) of cases of the exactness suite."""
    axes = {
        "model": exact.MODELS,
        "optimizer": exact.OPTIMIZERS | exact.SMALL,
        "memory": exact.SCHEDULES,
        "placement": exact.PLACEMENTS,
        "remat": exact.REMATS,
        "mesh": exact.MESHES,
        "precision": exact.PRECISIONS,
        "microbatches": (1, 2),
    }
    for case in exact.covering(exact.every(**axes)):
        with exact.conditions():
            try:
                yield "-".join(map(str, case)), digest(case.program())
            except ValueError as error:
                yield "-".join(map(str, case)), f"refused: {error}"


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE", help="write all digests into FILE")
    parser.add_argument("--against", metavar="FILE", help="compare with those in FILE")
    args = parser.parse_args(argv)
    digests: dict[str, str] = {}
    for name, found in [*named_steps(), *exactness_steps()]:
        digests[name] = found
    if args.save:
        Path(args.save).write_text(json.dumps(digests, indent=1))
    refused = sum(found.startswith("refused") for found in digests.values())
    print(f"{len(digests)} steps, {refused} of them refused")
    if not args.against:
        return 0
    before: dict[str, str] = json.loads(Path(args.against).read_text())
    different = [name for name in {**before, **digests} if before.get(name) != digests.get(name)]
    for name in different:
        print(f"differs: {name}")
    print(f"{len(digests) - len(different)} equal, {len(different)} different")
    return 1 if different else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
