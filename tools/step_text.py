"""Compares the programs of training steps between two commits, to prove that a refactoring changes no computation.

    git worktree add ../before COMMIT; cd ../before; python -m tools.step_text --save /tmp/before.json
    cd -; python -m tools.step_text --against /tmp/before.json

Compares the jaxpr of each step (with `memory.update = layer_programs`, the StableHLO of each of its programs), for
every named config under each schedule that accepts it, and for pairwise-covering cases of the exactness suite. Prints
the number of equal steps, and the names of those that differ; exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for meshes of eight devices

import jax

from plimsoll import configs
from plimsoll.framework.config import ConfigError
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.layerwise.programs import LayerProgram
from tests.support import exact

# Overrides to try with every named config.
SETTINGS = {
    "plain": {},
    "streamed": {"update": "streamed", "gradients": "pinned_host", "optimizer_state": "pinned_host", "remat": "full"},
    "offloaded": {"update": "streamed", "parameters": "pinned_host", "activations": "pinned_host", "remat": "full"},
    "in_backward": {"update": "in_backward", "optimizer_state": "pinned_host", "remat": "full"},
    "layer ahead": {"update": "in_backward", "optimizer_state": "pinned_host", "prefetch": "layer"},
    "layer_programs": {"update": "layer_programs", "optimizer_state": "pinned_host", "remat": "full"},
}
# Names of Python functions, in jaxprs and in StableHLO, and memory addresses.
_FUNCTION_NAME = re.compile(r"<(function|bound method) [^>]*>| at 0x[0-9a-f]+|\b(name|fwd|bwd)=[\w<>.]+")
_SYMBOL = re.compile(r"@[\w.$]+")
# Names of results in StableHLO: the path of each in the Python object that the function returns.
_RESULT_NAME = re.compile(r'jax\.result_info = "[^"]*"')


def texts(program: Program) -> list[str]:
    """Return the jaxpr of a program's step, or the lowered text of each of its programs."""
    jaxprs = program.backend.step_jaxprs()
    if jaxprs:
        return [str(jaxpr) for jaxpr in jaxprs]
    lowered_texts: list[str] = []

    def compile(lowered: jax.stages.Lowered, offloaded: object) -> LayerProgram:
        lowered_texts.append(lowered.as_text())
        return LayerProgram(None, 0, None)

    program.backend.dry_run_step(compile)
    return lowered_texts


def digest(program: Program) -> str:
    """Return a hash of a program's texts that does not depend on the names of Python functions and results."""
    text = _RESULT_NAME.sub("", _FUNCTION_NAME.sub("", "\n".join(texts(program))))
    # Number the symbols of StableHLO in the order in which they appear.
    number_by_symbol: dict[str, str] = {}
    text = _SYMBOL.sub(lambda match: number_by_symbol.setdefault(match[0], f"@{len(number_by_symbol)}"), text)
    jax.clear_caches()  # otherwise the caches keep the jaxprs of all programs, gigabytes in the end
    return hashlib.sha256(text.encode()).hexdigest()


def digest_config(name: str) -> dict[str, str]:
    """Return {name and setting: digest} of a named config under each schedule, or why a schedule refuses it."""
    digests: dict[str, str] = {}
    for setting, fields in SETTINGS.items():
        config = configs.load(name)
        config.accelerator_rules = []
        if setting in ("in_backward", "layer ahead"):
            config.learner.clip_mode = "previous_norm"
        for field, value in fields.items():
            config.set_path(f"memory.{field}", value)
        try:
            digests[f"{name}, {setting}"] = digest(Program(config.instantiate(), jax.devices()[:1]))
        except (ConfigError, ValueError) as error:
            digests[f"{name}, {setting}"] = f"refused: {error}"
    return digests


def exactness_cases() -> list[exact.ExactnessCase]:
    """Return cases of the exactness suite that cover every pair of values of two axes."""
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
    return exact.cover_value_pairs(exact.list_cases(**axes))


def exactness_steps(cases: list[exact.ExactnessCase]) -> dict[str, str]:
    """Return {case: digest}, or why the case is refused."""
    digests: dict[str, str] = {}
    for case in cases:
        name = "-".join(map(str, case))
        with exact.enable_exact_numerics():
            try:
                digests[name] = digest(case.program())
            except ValueError as error:
                digests[name] = f"refused: {error}"
    return digests


def all_steps() -> dict[str, str]:
    """Return the digests of all steps. A new process starts for every few, as JAX's caches would grow to gigabytes."""
    cases = exactness_cases()
    slices = [cases[start : start + 20] for start in range(0, len(cases), 20)]
    digests: dict[str, str] = {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [pool.apply_async(digest_config, (name,)) for name in configs.names()]
        jobs += [pool.apply_async(exactness_steps, (part,)) for part in slices]
        for number, job in enumerate(jobs, start=1):
            digests |= job.get()
            print(f"{number} of {len(jobs)}: {len(digests)} steps", file=sys.stderr, flush=True)
    return digests


def main(argv: list[str]) -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE", help="write all digests to FILE")
    parser.add_argument("--against", metavar="FILE", help="compare with the digests in FILE")
    args = parser.parse_args(argv)
    digests = all_steps()
    if args.save:
        Path(args.save).write_text(json.dumps(digests, indent=1))
    refused = sum(text.startswith("refused") for text in digests.values())
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
