"""Memory that loading published weights takes in addition to the state itself: one line of docs/models.md.

    python -m tools.bench.import_memory [--gib 2]

Writes a Llama-like directory of that size in bfloat16 (random, four shards), and loads it in a separate process as a
frozen base under adapters, because then the layout is hardly larger than the weights.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.program.program import Program
from tools.bench.workers import ROOT

DIM, HIDDEN, VOCAB, SHARDS = 2048, 5504, 32000, 4


def write(folder: Path, gib: float) -> None:
    """Write a model directory of about that size."""
    layer = 4 * DIM * DIM + 3 * DIM * HIDDEN
    layers = round((gib * 2**30 / 2 - 2 * VOCAB * DIM) / layer)
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": DIM,
        "intermediate_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_attention_heads": 16,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    model, family = families.load_model_config(folder)
    built, rng, home = model.instantiate(), np.random.default_rng(0), {}
    shapes = {
        source.name: source.shape(built.base_specs[path].shape[built.base_specs[path].num_layers is not None :])
        for path, sources in family.instantiate().places(built).items()
        for source in sources
    }
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        names = list(shapes)[shard::SHARDS]
        save_file(
            {n: rng.standard_normal(shapes[n], np.float32).astype(ml_dtypes.bfloat16) for n in names}, folder / file
        )
        home |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))


def status(field: str) -> int:
    """Return a memory figure of this process, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def load(folder: str) -> None:
    """Load the directory, and print how much memory that took."""
    config = configs.load(f"lora:{folder}")
    config.data.global_batch_size = 1
    program = Program(config.instantiate(), jax.devices()[:1])
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    assert program.experiment.pretrained is not None
    state = program.experiment.pretrained.init(program)
    jax.block_until_ready(state)
    peak, layout = status("VmHWM") - before, program.layout.bytes_per_device()
    largest = 2 * VOCAB * DIM
    mib = 2**20
    print(
        f"layout {layout / mib:.0f} MiB, peak beyond before {peak / mib:.0f} MiB: {(peak - layout) / mib:.0f} MiB"
        f" more; largest tensor {largest / mib:.0f} MiB; allowed {(2 * largest + 512 * mib) / mib:.0f} MiB"
    )


def main() -> None:
    """Write the directory, and load it in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--load", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        load(args.load)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.gib)
        command = [sys.executable, "-m", "tools.bench.import_memory", f"--load={folder}"]
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
