"""Mutation test: breaks the source in 17 ways, one at a time, and reports whether a test fails each time.

    python tools/mutate.py             all
    python tools/mutate.py --only mask only those whose name contains "mask"

Each mutation is applied to a copy of the checkout in a temporary folder, and the tests that guard it run there. A
mutation that no test notices is a gap in the tests: exit code 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """Replacement of `old` by `new` in `file`, which must make `tests` (pytest arguments) fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "drop the causal mask",
        "framework/layers/kernels_call.py",
        "mask = (columns_1T <= rows_S1)[None]",
        "mask = (columns_1T <= rows_S1 + 10**6)[None]",
        ("tests/layers/test_attention_kernels.py",),
    ),
    Mutation(
        "skip bias correction",
        "framework/learner/group_optimizer.py",
        "lambda new, old: new.astype(old.dtype), state",
        "lambda new, old: new.astype(old.dtype) if new.dtype.kind == 'f' else old + 1000, state",
        ("tests/learner",),
    ),
    Mutation(
        "do not donate",
        "framework/program/jit_step.py",
        "donate_argnums=0,",
        "donate_argnums=(),",
        ("tests/trainer/test_memory.py", "tests/schedules"),
    ),
    Mutation(
        "shift labels by two",
        "framework/data/packing.py",
        "targets[row, :count] = window[1:]",
        "targets[row, : count - 1] = window[2:]",
        ("tests/data/test_packing.py", "tests/data/test_pipeline.py"),
    ),
    Mutation(
        "drop a checksum",
        "framework/checkpoint/checkpointer.py",
        "if sums[name] != stored[name].checksum",
        'if sums[name] != stored[name].checksum and "weight" not in name',
        ("tests/checkpoint/test_checkpoint_faults.py", "tests/faults/test_faults.py"),
    ),
    Mutation(
        "ignore a memory kind",
        "framework/layout/table.py",
        "memory_kind=spec.memory_kind)",
        'memory_kind="device")',
        ("tests/layout",),
    ),
    Mutation(
        "reuse a dropout key",
        "framework/layers/base.py",
        "layer_rng = jax.random.fold_in(self.rng, index)",
        "layer_rng = self.rng",
        ("tests/layers", "tests/models"),
    ),
    Mutation(
        "forget weight-decay rules",
        "framework/learner/rules.py",
        "for field, value in rule.set.items():",
        "for field, value in ():",
        ("tests/learner",),
    ),
    Mutation(
        "the same noise in every layer",
        "framework/schedules/chunked_update.py",
        "layer=decision.layer + self.start + step // self.blocks",
        "layer=decision.layer",
        ("tests/schedules/test_rounding.py",),
    ),
    Mutation(
        "the noise of a block's own rows",
        "framework/schedules/chunked_update.py",
        "replace(decision, origin=self._origin(step))",
        "decision",
        ("tests/schedules/test_rounding.py",),
    ),
    Mutation(
        "an off-by-one in the data index",
        "framework/data/batches.py",
        "self._read_rows(self._order, origin + index * self.global_batch_size, rows)",
        "self._read_rows(self._order, origin + index * self.global_batch_size + 1, rows)",
        ("tests/data/test_pipeline.py",),
    ),
    Mutation(
        "swallow a NaN",
        "framework/learner/learner.py",
        "jnp.isfinite(norm) & jnp.isfinite(loss)",
        "jnp.ones_like(loss, bool)",
        ("tests/learner", "tests/faults/test_faults.py"),
    ),
    Mutation(
        "count a loop's collectives once",
        "framework/plan/hlo/module.py",
        'self.trip_count(i) if role == "body" else 1',
        "1",
        ("tests/plan/test_hlo.py",),
    ),
    Mutation(
        "take every loop to go up by one",
        "framework/plan/hlo/trip_counts.py",
        "divmod(abs(distance), abs(step))",
        "divmod(abs(distance), 1)",
        ("tests/plan/test_hlo.py",),
    ),
    Mutation(
        "give each transfer a link of its own",
        "framework/plan/step_time/schedule_simulation.py",
        "begin = max(self._now, self._free_at[start.lane])",
        "begin = self._now",
        ("tests/plan/test_step_time.py",),
    ),
    Mutation(
        "plan for what is too big",
        "framework/plan/memory_budget.py",
        "found.peak <= limit",
        "found.resident <= limit",
        ("tests/plan/test_cli.py",),
    ),
    Mutation(
        "forget what the forward pass keeps",
        "framework/plan/buffers.py",
        "v.start <= instant <= v.end",
        "v.start <= instant <= min(v.end, v.start + 20)",
        ("tests/plan/test_buffers.py", "tests/plan/test_plan.py"),
    ),
)


def copy_checkout(folder: Path) -> None:
    """Copy the checkout into a new folder, without what is built or downloaded."""
    skip = shutil.ignore_patterns(".git", ".venv", ".cache", "runs", "build", "__pycache__", "*.egg-info")
    # plimsoll/framework is a link: tests would import a second copy of it, without the mutation.
    shutil.copytree(ROOT, folder, ignore=skip, symlinks=True)


def mutate(mutation: Mutation, python: str) -> tuple[bool, str, float]:
    """Return (noticed, the first test that failed or pytest's last line, seconds)."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(copy)
        path = copy / mutation.file
        source = path.read_text()
        if source.count(mutation.old) != 1:
            raise SystemExit(
                f"{mutation.name}: {mutation.file} holds {mutation.old!r} {source.count(mutation.old)} times"
            )
        path.write_text(source.replace(mutation.old, mutation.new))
        began = time.perf_counter()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not pairs and not slow and not peers"]
        done = subprocess.run(
            [python, "-m", "pytest", *options, *mutation.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else done.stderr)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.name}: pytest ended with {done.returncode}: {failed}")
    return done.returncode == 1, failed, time.perf_counter() - began


def main() -> int:
    """Run the mutations and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="run only mutations whose name contains TEXT")
    chosen = [mutation for mutation in MUTATIONS if parser.parse_args().only in mutation.name]
    survivors = 0
    for mutation in chosen:
        noticed, what, seconds = mutate(mutation, sys.executable)
        survivors += not noticed
        print(
            f"{'noticed ' if noticed else 'SURVIVED'}  {mutation.name:32}  {seconds:4.0f} s  {what[:110]}", flush=True
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
