"""Commands of a newcomer's first hour, in order, in a folder that already contains a project."""

from __future__ import annotations

import dataclasses
import signal

from plimsoll.framework.terminal.exit_codes import ExitCode


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A signal to send as soon as a command's output contains a text."""

    text: str
    number: signal.Signals


@dataclasses.dataclass(frozen=True)
class RecordedCommand:
    """A command, and its expected exit."""

    purpose: str  # the newcomer's goal
    line: str  # as typed, for bash
    code: int = ExitCode.DONE
    interruption: Interruption | None = None


# The output shows a speed from the first steps on.
CTRL_C = Interruption("tok/s", signal.SIGINT)
KILL = Interruption("tok/s", signal.SIGKILL)
# Exit code that a shell reports for a process killed by SIGKILL.
KILLED = 128 + signal.SIGKILL

# In addition to notes/ (text files), the newcomer's folder has modules whose names collide with ours.
FILES = {
    "configs/__init__.py": "",
    "launch.py": "raise SystemExit('the launch.py of the newcomer has nothing to do with this')\n",
    "tests/test_mine.py": "def test_mine():\n    assert True\n",
    "chats.jsonl": "".join(
        f'{{"messages": [{{"role": "user", "content": "What is {number} + {number}?"}}, '
        f'{{"role": "assistant", "content": "{2 * number}."}}]}}\n'
        for number in range(1, 201)
    ),
    "broken.jsonl": '{"text": "a row"}\n{"text": 7}\n' * 50,
    "chat.jinja": "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}\n",
    "own_layer.py": '''\
import jax.numpy as jnp

import plimsoll as pl
from plimsoll.framework.config import config_for
from plimsoll.framework.layers.norm import RMSNorm


class ClippedNorm(RMSNorm):
    """RMSNorm whose output is between -3 and 3."""

    def __call__(self, weights, x, ctx):
        return jnp.clip(super().__call__(weights, x, ctx), -3, 3)


def clipped():
    """nanogpt-cpu with a norm of my own."""
    config = pl.load_config("nanogpt-cpu")
    config.model.stack.pattern[0].norm = config_for(ClippedNorm)
    return config
''',
    "first.py": """\
import plimsoll as pl

config = pl.load_config("nanogpt-cpu", {"trainer.max_steps": 20})
print(pl.plan(config, target="cpu:1"))
run = pl.train(config, workdir="runs/python")
print(run.metrics["train/loss"].values)
print(pl.load("runs/python").generate("def ", max_new_tokens=20))
""",
}

_GPT = "plimsoll train --config=nanogpt-cpu --workdir=runs/a"
_MINE = "plimsoll train --config=stdlib-tiny --data=notes/ --workdir=runs/mine"
_SHORT = "--config.trainer.max_steps=60"

COMMANDS = [
    RecordedCommand("What is there?", "plimsoll"),
    RecordedCommand("How is it used?", "plimsoll train --help"),
    RecordedCommand("What can be trained?", "plimsoll configs list"),
    RecordedCommand("What is in a config?", "plimsoll configs show nanogpt-cpu"),
    RecordedCommand("And about one thing only?", "plimsoll configs show nanogpt-cpu --only=learning_rate"),
    RecordedCommand("A name typed wrong", "plimsoll train --config=nanogtp-cpu --workdir=runs/a", ExitCode.USAGE),
    RecordedCommand("A field typed wrong", f"{_GPT} --config.trainer.max_step=200", ExitCode.USAGE),
    RecordedCommand("A value typed wrong", f"{_GPT} --config.data.global_batch_size=12k", ExitCode.USAGE),
    RecordedCommand("A first run", f"{_GPT} --config.trainer.max_steps=200"),
    RecordedCommand("What came of it?", "plimsoll status --workdir=runs/a"),
    RecordedCommand("Does it speak?", "plimsoll generate --workdir=runs/a --prompt='def ' --max_new_tokens=40"),
    RecordedCommand("A little longer", f"{_GPT} --config.trainer.max_steps=300"),
    RecordedCommand(
        "A smaller batch and rate from here on",
        f"{_GPT} --config.trainer.max_steps=400 --config.data.global_batch_size=6 "
        "--config.learner.optimizer.learning_rate.peak_value=5e-4",
    ),
    RecordedCommand(
        "A change that a resume cannot take",
        f"{_GPT} --config.trainer.max_steps=500 --config.model.dim=256",
        ExitCode.USAGE,
    ),
    RecordedCommand(
        "Ctrl-C in the middle",
        "plimsoll train --config=nanogpt-cpu --workdir=runs/b --config.trainer.max_steps=200",
        ExitCode.INTERRUPTED,
        CTRL_C,
    ),
    RecordedCommand(
        "On with it, and the process is killed",
        "plimsoll train --config=nanogpt-cpu --workdir=runs/b --config.trainer.max_steps=200",
        KILLED,
        KILL,
    ),
    RecordedCommand(
        "The same command once more",
        "plimsoll train --config=nanogpt-cpu --workdir=runs/b --config.trainer.max_steps=200",
    ),
    RecordedCommand(
        "Own text from a folder that is not there", f"{_MINE.replace('notes/', 'note/')} {_SHORT}", ExitCode.USAGE
    ),
    RecordedCommand("Own text: a folder", f"{_MINE} {_SHORT}"),
    RecordedCommand(
        "Own text: JSON lines with a bad row",
        f"plimsoll train --config=stdlib-tiny --data=broken.jsonl --workdir=runs/broken {_SHORT}",
        ExitCode.USAGE,
    ),
    RecordedCommand("How good is it on another file?", "plimsoll evaluate --workdir=runs/mine --files own_layer.py"),
    RecordedCommand("Out to transformers", "plimsoll export --workdir=runs/mine --to=exported"),
    RecordedCommand(
        "Fine-tune the export on chats",
        "plimsoll train --config=lora:exported --data=chats.jsonl --workdir=runs/tuned "
        f"--config.data.tokenizer.chat_template=chat.jinja --config.data.global_batch_size=4 {_SHORT}",
    ),
    RecordedCommand("Talk with it", "echo 'What is 4 + 4?' | plimsoll chat --workdir=runs/tuned --max_new_tokens=12"),
    RecordedCommand("The adapter for peft", "plimsoll export --workdir=runs/tuned --to=adapter --adapter"),
    RecordedCommand(
        "Will 8B fit eight chips?", "plimsoll plan --config=llama3-8b --target=v5e-8 --estimate", ExitCode.TOO_BIG
    ),
    RecordedCommand(
        "And offloaded?",
        "plimsoll plan --config=llama3-8b --target=v5e-16 --estimate --config.memory.optimizer_state=pinned_host "
        "--config.memory.remat=full --config.data.global_batch_size=16",
    ),
    RecordedCommand("A plan by the compiler", "plimsoll plan --config=nanogpt-cpu --target=cpu:2"),
    RecordedCommand("An unknown machine", "plimsoll plan --config=llama3-8b --target=v9e-8 --estimate", ExitCode.USAGE),
    RecordedCommand("What would a run need here?", "plimsoll train --config=nanogpt-cpu --workdir=runs/dry --dry_run"),
    RecordedCommand(
        "A run that does not fit",
        "plimsoll train --config=stdlib-tiny --workdir=runs/big --device_memory_gib=0.05",
        ExitCode.TOO_BIG,
    ),
    RecordedCommand(
        "Optimizer state in host memory",
        "plimsoll train --config=nanogpt-cpu --config.memory.optimizer_state=pinned_host --workdir=runs/offloaded "
        + _SHORT,
    ),
    RecordedCommand(
        "Another optimizer",
        "plimsoll train --config=nanogpt-cpu --config.learner.optimizer=lion "
        f"--config.learner.optimizer.learning_rate=1e-4 --workdir=runs/lion {_SHORT}",
    ),
    RecordedCommand(
        "A user-defined layer", f"plimsoll train --config=own_layer.py:clipped --workdir=runs/own {_SHORT}"
    ),
    RecordedCommand("What is different in it?", "plimsoll configs diff nanogpt-cpu own_layer.py:clipped"),
    RecordedCommand(
        "The same run again from its folder", "plimsoll train --config=runs/lion/config.json --workdir=runs/again"
    ),
    RecordedCommand("Text as token files", "plimsoll prepare --config=stdlib-tiny --data=notes/ --out=tokens"),
    RecordedCommand(
        "From token files", "plimsoll train --config=stdlib-tiny --data=tokens --workdir=runs/tokens " + _SHORT
    ),
    RecordedCommand("From Python", "python first.py"),
    RecordedCommand("A flow of images", f"plimsoll train --config=digits-glow --workdir=runs/glow {_SHORT}"),
]
