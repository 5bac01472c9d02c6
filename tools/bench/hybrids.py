"""Memory and time of layers of linear attention next to layers of full attention, by the compilers. Needs no device.

    python -m tools.bench.hybrids v5e-1 --lengths 1024 4096 16384 65536
    python -m tools.bench.hybrids h100 --lengths 4096 --depths 4 8 16

Compiles the training step of models of one kind of layer, with the widths of Qwen3.5's attention (arXiv 2412.06464 for
Gated DeltaNet) in a narrower model, for one sequence per step, and prints a row for each: the peak of device memory,
and, for TPUs, the time by the compiler's cost estimates (tools/bench/tpu_time.py). The inversion of a triangular matrix
is a call into the TPU's runtime: only its bytes are counted.
"""

from __future__ import annotations

import argparse
import sys

from plimsoll import configs
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.layers.mamba2 import Mamba2
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.step_time import TpuRates, count
from plimsoll.framework.terminal.tables import TableSection, render
from plimsoll.launch import cli
from tools.bench.step_programs import compile_config
from tools.bench.tpu_figures import Sums

_GIB = 1 << 30


def _build_config(block_index: int) -> Config:
    """Build qwen3.6-27b, narrower, with one kind of layer."""
    config = configs.load("qwen3.6-27b")
    model = config.model
    model.dim = 2048
    model.vocab_size = 32_000
    config.data.tokenizer.vocab_size = 32_000
    block = model.stack.pattern[block_index]
    block.mlp.hidden = 5632
    model.stack.pattern = [block]
    model.stack.num_layers = 4
    config.data.global_batch_size = 1
    config.memory.remat = "full"
    config.learner.master_dtype = None
    config.learner.moment_dtype = "bfloat16"
    return config


def linear() -> Config:
    """Layers of Gated DeltaNet: 16 heads of keys, 48 of values, 128 channels each."""
    return _build_config(0)


def state_space() -> Config:
    """Layers of Mamba-2: 48 heads of 128 channels and 128 states, which share B and C."""
    config = linear()
    config.model.stack.pattern[0].attention = config_for(Mamba2, num_heads=48, head_dim=128)
    return config


def attention() -> Config:
    """Layers of gated attention: 24 heads of 256 channels, 4 heads of keys and values."""
    return _build_config(3)


@cli.main
def main(argv: list[str]) -> int:
    """Compile each step, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="machine to compile for, such as v5e-1 or h100")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096], help="tokens of the sequence")
    parser.add_argument("--depths", type=int, nargs="+", default=[4], help="number of layers")
    kinds = ["linear", "state_space", "attention"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    args = parser.parse_args(argv)
    is_tpu = targets.resolve(args.target).spec.platform == "tpu"
    rows = [("layers", "tokens", "peak GiB", "ms a step" if is_tpu else "")]
    for kind in args.kinds:
        for depth in args.depths:
            for length in args.lengths:
                overrides = [("model.stack.num_layers", str(depth)), ("data.seq_len", str(length))]
                step = compile_config(args.target, f"{__file__}:{kind}", overrides, lambda spec: None)
                assert step.about.peak_bytes is not None
                time = ""
                if is_tpu:
                    counted = count(step.parts, TpuRates.look_up(spec_for(step.about.accelerator)))
                    time = f"{1e3 * Sums.total(counted.operations).seconds:.1f}"
                rows.append((f"{depth} x {kind}", f"{length:,}", f"{step.about.peak_bytes / _GIB:.2f}", time))
                print("  ".join(rows[-1]), flush=True)
    print(render([TableSection(f"one sequence per step, {args.target}", rows, numbers=True)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
