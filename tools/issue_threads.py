"""Reproduces cases of public issue threads about memory, each with one command.

    python -m tools.issue_threads jax-23316
    python -m tools.issue_threads zygote-1541 --target=v5e-1     # compiled for a TPU, none attached

docs/benchmarks/public_threads.md has the results. Peaks are the target compiler's figures for the program. On a CPU,
host memory is device memory, so bytes on the host are those of the layout. Sizes are small enough for any machine to
compile; only the smallest cases are run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll import configs
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layout import Nested, ParameterSpec, TensorSpec, copy_partition, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.metrics.memory import live_array_bytes
from plimsoll.framework.optimizers.offload import offload_optimizer
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.compilation import CompiledProgram, compile_for
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.tables import human_bytes

SGD = config_for(optax.sgd, learning_rate=0.01)
ADAMW = config_for(optax.adamw, learning_rate=0.01)


def experiment(model: Config, *, batch: int = 1, seq_len: int = 16, memory: dict[str, Any], **learner: Any) -> Config:
    """Build an experiment around a model; its data is never read."""
    config = configs.load("llama2-7b")
    config.model, config.learner = model, config_for(Learner, clip=None, **learner)
    sizes = {"tokenizer.vocab_size": model.vocab_size, "global_batch_size": batch, "seq_len": seq_len}
    for part, fields in {"data": sizes, "memory": memory}.items():
        for path, value in fields.items():
            config.set_path(f"{part}.{path}", value)
    return config


def compile_step(config: Config, target: Any) -> tuple[Program, CompiledProgram]:
    """Return an experiment's program on the target's first device, and its compiled step."""
    program = Program(config.instantiate(), target.devices()[:1])
    offloaded = program.layout.bytes_per_device(memory_kind="pinned_host")
    return program, compile_for(program.jit_step.traced_step.lower(), target.platform, HostBytes.in_place(offloaded))


def host_batch(program: Program) -> Any:
    """Return a batch of one row of 16 tokens."""
    tokens = np.arange(16, dtype=np.int32)[None]
    return program.put({"tokens": tokens, "targets": tokens[:, ::-1], "weights": np.ones((1, 16), np.float32)})


def wide() -> Config:
    """Return a Llama of 0.8B parameters in float32; one layer's parameters exceed a chip's on-chip memory."""
    return llama_model(layers=16, heads=16, dim=2048, hidden=5504, vocab_size=256)


def table(head: str, rows: Sequence[Sequence[Any]]) -> None:
    """Print a markdown table; numbers are bytes."""
    print(f"| {head} |\n|{'---|' * len(head.split('|'))}")
    for row in rows:
        print(f"| {' | '.join(cell if isinstance(cell, str) else human_bytes(cell) for cell in row)} |")


def keras_core_888(target: Any) -> None:
    """Copies of the training state (weights and Adam moments) in each phase, on this machine."""
    live = lambda: sum(live_array_bytes().values())  # noqa: E731
    model = llama_model(layers=8, heads=4, dim=256, hidden=688, vocab_size=512)
    program, step = compile_step(experiment(model, memory={"remat": "full"}, optimizer=ADAMW), target)
    init = compile_for(program.jit_step.init_jit().lower(), target.platform)
    state = program.init()
    rows = [("initialization, compiled peak", init.peak), ("live arrays after initialization", live())]
    rows.append(("step, compiled: arguments + outputs - donated", step.argument + step.output - step.alias))
    for _ in range(3):
        state, _ = program.step(state, host_batch(program))
    rows.append(("live arrays after three steps", live()))
    jax.block_until_ready(program.evaluate(state, host_batch(program)))
    rows += [("live arrays after evaluation", live()), ("step, gradients and activations too: peak", step.peak)]
    size = program.layout.bytes_per_device()
    table("phase | bytes | copies of the state", [(*row, f"{row[1] / size:.2f}") for row in rows])


class LoRALinear(Layer):
    """x W + x A B: one large matrix [dim, dim] and two small ones of inner size `rank`."""

    def __init__(self, *, dim: int, rank: int, output_init_scale: float = 1.0):
        self.shapes = {"weight": (dim, dim), "a": (dim, rank), "b": (rank, dim)}

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of weight, a and b."""
        return {name: ParameterSpec(shape, "float32", roles=("in", "out")) for name, shape in self.shapes.items()}

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Map [B, S, dim] to [B, S, dim]."""
        return carry @ weights["weight"] + (carry @ weights["a"]) @ weights["b"], Out()


def loss_by_hand(params: Any, x: jax.Array) -> jax.Array:
    """Apply the same layers one after the other in plain JAX, with W behind stop_gradient, and return the loss."""
    for layer in params:
        x = x @ jax.lax.stop_gradient(layer["weight"]) + (x @ layer["a"]) @ layer["b"]
    return jnp.mean(jnp.square(x))


def split_by_hand(params: Any, x: jax.Array) -> Any:
    """Return (loss, all parameters) after a step that differentiates only A and B."""
    small = [{name: layer[name] for name in ("a", "b")} for layer in params]
    join = lambda small: [{**old, **new} for old, new in zip(params, small, strict=True)]  # noqa: E731
    value, grads = jax.value_and_grad(lambda small: loss_by_hand(join(small), x))(small)
    return value, join(jax.tree.map(lambda p, g: p - 0.01 * g, small, grads))


def jax_23316(target: Any) -> None:
    """Frozen W, trained A and B: three hand-written programs, and an experiment with a rule."""
    programs = {
        "gradients of the whole tree are returned": jax.jit(jax.value_and_grad(loss_by_hand)),
        "split, but the model is returned without donation": jax.jit(split_by_hand),
        "split, donated": jax.jit(split_by_hand, donate_argnums=0),
    }
    device = jax.sharding.SingleDeviceSharding(target.devices()[0])
    for layers, dim, rank in ((1, 8192, 256), (34, 2048, 16)):
        model = llama_model(layers=layers, heads=1, dim=dim, hidden=1, vocab_size=32)
        model.stack.pattern = [config_for(LoRALinear, rank=rank)]
        rule = config_for(Rule, pattern="^embed|^head|/weight$", freeze=True)
        program, ours = compile_step(experiment(model, memory={"remat": "full"}, optimizer=SGD, rules=[rule]), target)
        size = program.layout.bytes_per_device("parameter") + program.layout.bytes_per_device("frozen")
        array = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)  # noqa: E731
        params = [{name: array(shape) for name, shape in LoRALinear(dim=dim, rank=rank).shapes.items()}] * layers
        by_hand = layers * dim * (dim + 2 * rank) * 4
        lowered = {name: step.lower(params, array((16, dim))) for name, step in programs.items()}
        rows = [(name, by_hand, compile_for(one, target.platform).peak) for name, one in lowered.items()]
        rows.append(("ours: a rule freezes W", size, ours.peak))
        print(f"{layers} x [{dim}, {dim}] frozen, rank {rank} trained, float32")
        table("program | model | peak | peak / model", [(*row, f"{row[2] / row[1]:.2f}") for row in rows])


def zygote_1541(target: Any) -> None:
    """Memory of a step over that of the weights, with the update after or in the backward pass; a tied parameter."""
    rows = []
    for name, optimizer in (("SGD", SGD), ("Adafactor", config_for(optax.adafactor, learning_rate=0.01))):
        for update in ("after_backward", "in_backward"):
            config = experiment(wide(), memory={"update": update, "remat": "full"}, optimizer=optimizer)
            program, found = compile_step(config, target)
            size, state = map(program.layout.bytes_per_device, ("parameter", "optimizer"))
            rows.append((name, update, size, state, found.peak, f"{found.peak / size:.2f}"))
    table("optimizer | memory.update | weights | state | peak | peak / weights", rows)
    if target.platform == "cpu":
        tied, new = llama_model(layers=2, heads=2, dim=32, hidden=48, vocab_size=64, tied=True), []
        for update in ("after_backward", "in_backward"):
            program, _ = compile_step(experiment(tied, memory={"update": update}, optimizer=SGD), target)
            state, _ = program.step(program.init(), host_batch(program))
            new.append(np.asarray(flatten(state)["parameter/embed/token"]))
        print(f"tied embedding after one step: largest difference {np.abs(new[0] - new[1]).max():.1e}")


def invtf_2(target: Any) -> None:
    """Temporaries of a step against depth, by remat policy: 32 x 256 tokens, width 128, float32, SGD."""
    rows = []
    for remat in ("none", "full", "sqrt", "offload", "invert"):
        rows.append([f"`{remat}`" + (", two streams" if remat == "invert" else "")])
        for layers in (4, 16, 64):
            model = llama_model(layers=layers, heads=4, dim=128, hidden=128, vocab_size=64)
            model.stack.streams = "fixed" if remat == "invert" else "one"
            config = experiment(model, batch=32, seq_len=256, memory={"remat": remat}, optimizer=SGD)
            found = compile_step(config, target)[1]
            host = f" + {human_bytes(found.host_temp)} host" if found.host_temp else ""
            rows[-1].append(human_bytes(found.temp) + host)
    table("memory.remat | 4 layers | 16 layers | 64 layers", rows)


def axlearn_867(target: Any) -> None:
    """Optimizer state on the host: moved whole or streamed; and the thread's interface in a custom training loop."""
    rows = []
    for update, kind in (("after_backward", "device"), ("after_backward", "pinned_host"), ("streamed", "pinned_host")):
        memory = {"update": update, "optimizer_state": kind, "remat": "full"}
        program, found = compile_step(experiment(wide(), memory=memory, optimizer=ADAMW), target)
        sizes = [program.layout.bytes_per_device(memory_kind=kind) for kind in ("device", "pinned_host")]
        rows.append((update, kind, *sizes, found.peak))
    table("memory.update | memory.optimizer_state | weights and state | on the host | device peak", rows)
    if target.platform == "cpu":
        plain = optax.adamw(0.01)
        params = {"wide": jnp.ones((1024, 1024)), "bias": jnp.ones((1024,))}
        offloaded = offload_optimizer(plain, pattern="/[mn]u/")
        state, ours = plain.init(params), offloaded.init(params)
        updates = own = params
        for _ in range(3):  # with the weights as gradients
            updates, state = jax.jit(plain.update)(params, state, params)
            own, ours = jax.jit(offloaded.update)(params, ours, params)
        print("offload_optimizer:", {path: leaf.sharding.memory_kind for path, leaf in flatten(ours).items()})
        print("updates equal those of the plain optimizer:", jax.tree.all(jax.tree.map(np.array_equal, updates, own)))
        specs = jax.tree.map(lambda p: TensorSpec(p.shape, p.dtype), params)
        moved = copy_partition(specs, pattern="wide", memory_kind="pinned_host")
        print("copy_partition:", {path: spec.memory_kind for path, spec in flatten(moved).items()})


_CASES = (keras_core_888, jax_23316, zygote_1541, invtf_2, axlearn_867)
CASES = {case.__name__.replace("_", "-"): case for case in _CASES}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one case, or the names of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=list(CASES), help="case to run; default: list all cases")
    parser.add_argument("--target", default="cpu:1", help="machine to compile for, as for `plimsoll plan`")
    args = parser.parse_args(arguments)
    if args.name is None:
        return print(*(f"{name:15} {case.__doc__}" for name, case in CASES.items()), sep="\n")
    targets.set_environment(args.target)
    CASES[args.name](targets.resolve(args.target))


if __name__ == "__main__":
    main()
