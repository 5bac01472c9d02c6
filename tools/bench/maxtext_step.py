"""Compile MaxText's training step for a TPU, and save the compiler's output.

    PYTHON tools/bench/maxtext_step.py FOLDER compile_topology=v5e-16 model_name=llama2-7b ...

Needs an environment in which MaxText is installed; tools/bench/tpu_time_maxtext.py starts this script with that
environment's Python. It runs MaxText's own ahead-of-time compilation (maxtext.trainers.pre_train.train_compile) with
the arguments after FOLDER. In FOLDER it saves the executable's text, the compiler's dump, and step.json: seconds,
`memory_analysis()`, and versions. Imports nothing of Plimsoll.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax


def main(folder: Path, arguments: list[str]) -> None:
    """Compile the step that the arguments of train_compile describe."""
    compile_lowered = jax.stages.Lowered.compile
    seconds: list[float] = []
    memory: dict[str, int] = {}

    def compile_and_dump(lowered: Any, compiler_options: Any = None, **others: Any) -> Any:
        # train_compile compiles one program. If it compiled several, the step would be the last one.
        dump = {"xla_dump_to": str(folder / f"dump-{len(seconds):03d}")}
        start = time.perf_counter()
        compiled = compile_lowered(lowered, compiler_options={**(compiler_options or {}), **dump}, **others)
        seconds.append(time.perf_counter() - start)
        (folder / "hlo.txt").write_text(compiled.as_text() or "")
        stats = compiled.memory_analysis()
        assert stats is not None
        # Results that reuse donated arguments are counted once; the compiler's peak counts host memory too.
        host_results = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        host_arguments_and_results = stats.host_argument_size_in_bytes + host_results
        memory.update(
            argument=stats.argument_size_in_bytes,
            output=stats.output_size_in_bytes,
            alias=stats.alias_size_in_bytes,
            temp=stats.temp_size_in_bytes,
            peak=stats.peak_memory_in_bytes - host_arguments_and_results,
            host=host_arguments_and_results + stats.host_temp_size_in_bytes,
        )
        return compiled

    jax.stages.Lowered.compile = compile_and_dump  # pyright: ignore[reportAttributeAccessIssue]

    import maxtext  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train_compile  # pyright: ignore[reportMissingImports]

    base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    train_compile.main(["train_compile", str(base), *arguments])
    packages = ("maxtext", "jax", "jaxlib", "libtpu")
    step = {
        "dump": f"dump-{len(seconds) - 1:03d}",
        "compile_seconds": round(seconds[-1], 1),
        "memory": memory,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    (folder / "step.json").write_text(json.dumps(step) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
