"""The contestants of the CPU benchmark, one process each.

    python -m tools.bench.contestants NAME SIZE TOKENS_FILE WORKDIR

    ours      `plimsoll train` itself, starting at its command line, with an extra hook that waits for its turn
    torch     the hand-written torch step of plain_torch.py, eager, in a plain loop
    plain     the hand-written JAX step of plain_gpt2.py, in a plain loop (GPT-2 only)
    eager     transformers' GPT2LMHeadModel with torch.optim.AdamW (GPT-2 only)
    compiled  the same through torch.compile

All contestants read the same token file with the same batch shape, and train in float32 with the same AdamW
hyperparameters, global-norm clipping at 1.0 and no dropout. Each reads its loss every ten steps.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tools.bench.sizes import B1, B2, CLIP, LEARNING_RATE, SIZES, WEIGHT_DECAY, Batches, Size
from tools.bench.workers import Channel, Contestant, Hello, RunClock, serve

LOG_EVERY = 10
NAMES = {
    "torch": "hand-written torch, eager",
    "plain": "hand-written JAX + optax",
    "ours": "Plimsoll, `plimsoll train`'s loop",
    "eager": "transformers + torch AdamW, eager",
    "compiled": "transformers + torch AdamW, torch.compile",
}


NEEDS = {"torch": ("torch",), "eager": ("torch", "transformers"), "compiled": ("torch", "transformers")}


def missing(name: str, family: str = "gpt2") -> str | None:
    """Return why a contestant cannot run (missing package, or no model of that family), or None if it can."""
    if name in ("plain", "eager", "compiled") and family != "gpt2":
        return "GPT-2 only"
    absent = [module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
    return f"not installed: {', '.join(absent)} (pip install -e '.[peers]')" if absent else None


class PlainTorch:
    """Calls plain_torch.train_step in a loop."""

    def __init__(self, size: Size, tokens: Path):
        from tools.bench import plain_torch

        self._train_step, self._size = plain_torch.train_step, size
        self.model = plain_torch.build(size)
        self._optimizer = plain_torch.build_optimizer(self.model)
        self._batches = Batches(tokens, size)
        self._count = 0

    def hello(self) -> Hello:
        """Report the model size and the version of torch."""
        count = sum(p.numel() for p in self.model.parameters())
        return Hello(count, self._size.tokens_per_step, _versions("torch"))

    def run(self, steps: int) -> float:
        """Run steps, reading the loss every tenth step."""
        loss: Any = None
        for _ in range(steps):
            loss = self._train_step(self.model, self._optimizer, *self._batches())
            self._count += 1
            if self._count % LOG_EVERY == 0:
                loss.item()
        return float(loss)


class PlainJax:
    """Calls plain_gpt2.step in a loop."""

    def __init__(self, size: Size, tokens: Path):
        from tools.bench import plain_gpt2

        self._step, self._size = plain_gpt2.step, size
        self.params = plain_gpt2.init(size)
        self._state = plain_gpt2.OPTIMIZER.init(self.params)
        self._batches = Batches(tokens, size)
        self._loss: Any = None
        self._count = 0

    def hello(self) -> Hello:
        """Report the model size and the versions of JAX and optax."""
        import jax

        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return Hello(count, self._size.tokens_per_step, _versions("jax", "jaxlib", "optax"))

    def run(self, steps: int) -> float:
        """Run steps, reading the loss every tenth step."""
        import jax

        for _ in range(steps):
            tokens, targets = self._batches()
            self.params, self._state, self._loss = self._step(
                self.params, self._state, tokens, targets, heads=self._size.heads
            )
            self._count += 1
            if self._count % LOG_EVERY == 0:
                float(self._loss)
        jax.block_until_ready((self.params, self._state))
        return float(self._loss)


class Torch:
    """Trains transformers' GPT-2 in a loop.

    Args:
        size: model and batch shape.
        tokens: token file to read.
        compiled: whether to use torch.compile.
        device: device to train on. Other devices than "cpu" use bfloat16 autocast; on "cuda", torch may also choose
            flash attention.
    """

    def __init__(self, size: Size, tokens: Path, *, compiled: bool, device: str = "cpu"):
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        self._size, self._torch, self._device = size, torch, device
        config = GPT2Config(
            vocab_size=size.vocab,
            n_positions=size.positions,
            n_embd=size.dim,
            n_layer=size.layers,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        torch.manual_seed(0)
        self.model: Any = GPT2LMHeadModel(config).train()
        self.model.to(device)
        named = dict(self.model.named_parameters())
        decayed = [p for name, p in named.items() if p.dim() == 2 and "wpe" not in name]
        others = [p for name, p in named.items() if p.dim() != 2 or "wpe" in name]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(B1, B2), fused=True)
        self._batches = Batches(tokens, size)

        def compute_loss(tokens: Any, targets: Any) -> Any:
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                logits = self.model(tokens).logits
            return torch.nn.functional.cross_entropy(logits.view(-1, size.vocab), targets.view(-1))

        self._loss_of: Any = torch.compile(compute_loss) if compiled else compute_loss
        self._count = 0

    def hello(self) -> Hello:
        """Report the model size and the versions of torch and transformers."""
        count = sum(p.numel() for p in self.model.parameters())
        return Hello(count, self._size.tokens_per_step, _versions("torch", "transformers"))

    def run(self, steps: int) -> float:
        """Run steps, reading the loss every tenth step."""
        torch = self._torch
        loss: Any = None
        for _ in range(steps):
            tokens, targets = (torch.from_numpy(x).long().to(self._device) for x in self._batches())
            loss = self._loss_of(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._count += 1
            if self._count % LOG_EVERY == 0:
                loss.item()
        return float(loss.detach())


def overrides(size: Size, tokens: Path) -> list[str]:
    """Return the arguments of `plimsoll train`: the size's config with this shape, data and optimizer, in float32."""
    block = "model.stack.pattern.0"
    fields = {
        "model.dim": size.dim,
        "model.stack.num_layers": size.layers,
        f"{block}.attention.num_heads": size.heads,
        f"{block}.attention.num_kv_heads": size.kv_heads,
        f"{block}.mlp.hidden": size.hidden,
        "model.embed.max_positions": size.positions if size.family == "gpt2" else "none",
        "model.vocab_size": size.vocab,
        "model.param_dtype": "float32",
        "model.compute_dtype": "float32",
        "data.source": "plimsoll.TokenMemmap",
        "data.source.path": tokens,
        "data.tokenizer": "plimsoll.NoTokenizer",
        "data.tokenizer.vocab_size": size.vocab,
        "data.validation": "{}",
        "data.seq_len": size.seq_len,
        "data.global_batch_size": size.batch,
        "learner.optimizer.learning_rate": LEARNING_RATE,
        "learner.optimizer.b1": B1,
        "learner.optimizer.b2": B2,
        "learner.optimizer.weight_decay": WEIGHT_DECAY,
        "learner.clip": CLIP,
        "trainer.log_every": LOG_EVERY,
        "trainer.eval_every": "none",
        "trainer.save_every": 1_000_000_000,
        "trainer.sample_tokens": 0,
    }
    return [f"--config={size.config}", *(f"--config.{path}={value}" for path, value in fields.items())]


class Finished(BaseException):
    """Raised when the driver exits. A BaseException, so that the run does not handle it as an error of its own."""


def train_with_driver(channel: Channel, arguments: list[str]) -> None:
    """Run `plimsoll train` with an extra hook, first in the list, that runs steps when the driver asks for them."""
    import jax

    from plimsoll.framework.run import training
    from plimsoll.framework.run.hooks import Hook
    from plimsoll.framework.run.run import Run
    from plimsoll.framework.run.trainer import Trainer
    from plimsoll.launch.train import main

    class Gate(Hook):
        """Ends turns between steps, after all pending computation is done."""

        def __init__(self) -> None:
            self.left, self.loss = 0, float("nan")
            self.clock: RunClock | None = None

        def before_step(self, run: Run, step: int) -> None:
            """Wait for the driver if the turn is over."""
            if self.left == 0:
                if self.clock is None:
                    count = sum(leaf.size for leaf in jax.tree.leaves(run.state.parameter))
                    tokens = run.data.global_batch_size * run.data.seq_len
                    channel.send(Hello(count, tokens, _versions("jax", "jaxlib", "optax")))
                else:
                    jax.block_until_ready(run.state)
                    channel.send(self.clock.timed_run(self.loss))
                steps = channel.receive()
                if steps is None:
                    raise Finished
                self.left, self.clock = steps, RunClock()
            self.left -= 1

        def on_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
            """Keep the newest loss."""
            self.loss = metrics["loss"]

    class GatedTrainer(Trainer):
        """The trainer that `plimsoll train` builds, with the gate added."""

        def __init__(self, *args: Any):
            super().__init__(*args)
            self.hooks.insert(0, Gate())

    training.Trainer = GatedTrainer  # pyright: ignore[reportAttributeAccessIssue]
    try:
        code = main(arguments)
    except Finished:
        return
    finally:
        training.Trainer = Trainer  # pyright: ignore[reportPrivateImportUsage]
    sys.exit(code)


def _versions(*packages: str) -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in packages}


def main() -> None:
    """Run the process of one contestant."""
    name, size, tokens, workdir = sys.argv[1], SIZES[sys.argv[2]], Path(sys.argv[3]), sys.argv[4]
    channel = Channel.from_process()
    if name == "ours":
        # No compilation cache, so that the measured program is always the one compiled by this command.
        extra = [f"--workdir={workdir}", "--config.trainer.max_steps=1000000000"]
        train_with_driver(channel, [*overrides(size, tokens), *extra, "--config.trainer.compilation_cache=none"])
        return
    contestant: Contestant
    if name == "torch":
        contestant = PlainTorch(size, tokens)
    elif name == "plain":
        contestant = PlainJax(size, tokens)
    else:
        contestant = Torch(size, tokens, compiled=name == "compiled")
    serve(contestant, channel)


if __name__ == "__main__":
    main()
