"""Checks that a test here runs every block of commands in the documentation, or that the page records who ran it.

`QUICK` recipes run in this process. `WHOLE` recipes run in a shell, as a reader would paste them, with fewer steps and
without commands that need a network, another machine or a user at the terminal. `make test-pairs` always runs the
pages that the last commit changed.
"""

import gzip
import json
from pathlib import Path

import pytest

from tests.support.pages import PAGES, blocks
from tests.support.recipes import Recipe, run_here, run_in_shell

STEPS = "--config.trainer.max_steps=2 --config.trainer.eval_batches=1"
# These also use only a twentieth of the standard library, because its whole text takes 16 s to tokenize.
FEW = f"{STEPS} --config.data.source.share=0.05"
# Blocks of `make` and pytest commands would start this suite again.
NO_MAKE = {"make ": "make --dry-run ", "source .venv/bin/activate": "true"}
A_RUN = f"plimsoll train --config=nanogpt-cpu {FEW} --workdir="
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Makes a directory like those that transformers writes: a chat model whose adapters peft can load.
PUBLISHED = (
    f"plimsoll train --config=stdlib-tiny {FEW} --workdir=runs/base",
    "plimsoll export --workdir=runs/base --to=DIR",
    "cp template.jinja DIR/chat_template.jinja",
)

QUICK = (
    Recipe(
        "docs/configs.md",
        (
            "plimsoll configs list",
            "plimsoll configs show gpt2-124m --config.model.stack.num_layers=6",
            "plimsoll configs show gpt2-124m --config.learner",
            "plimsoll configs show gpt2-124m --config.model.lora",
            "plimsoll configs show my_configs.py:small",
            "plimsoll configs show my_configs.py:small --accelerator",
        ),
        replaced={"train --config=my_configs.py:small --workdir=runs/small": "configs show my_configs.py:small"},
        files={"my_configs.py": "# my_configs.py"},
        has_outputs=True,
    ),
    Recipe("docs/configs.md", ("plimsoll train --config=gpt2-124m",), has_outputs=True, fails=True),
    Recipe(
        "docs/data.md",
        ("plimsoll configs show stdlib-tiny", "plimsoll prepare", "python make_rows.py"),
        # Training takes longer; tests/data/test_docs_data.py checks that the data are as promised.
        replaced={"train --config=my_rows.py:tiny_rows --workdir=runs/rows": "configs show my_rows.py:tiny_rows"},
        files={"my_rows.py": "# my_rows.py", "make_rows.py": "# make_rows.py"},
    ),
    Recipe("docs/plan.md", ("plimsoll plan --config=llama3-8b --target=2xv5e-256",), has_outputs=True, fails=True),
    Recipe("docs/plan.md", ("plimsoll plan --config=hf:meta-llama/Llama-3.1-8B --target=4090",), has_outputs=True),
    Recipe(
        "docs/multihost.md",
        ("plimsoll local", "plimsoll slurm", "docker build", "plimsoll tpu_vm"),
        replaced={
            "docker ": "true ",
            "plimsoll gke": "plimsoll gke --dry_run",
            "--gpus=all": "--gpus=all --dry_run",
            "--config.mesh.data=8": "--config.mesh.data=8 --dry_run",
            "plimsoll slurm": "plimsoll slurm --dry_run",
            "--zone=us-west4-a": "--zone=us-west4-a --dry_run",
        },
    ),
)

WHOLE = (
    Recipe(
        "README.md",
        ("plimsoll plan --config=hf:Qwen/Qwen3-8B",),
        setup=PUBLISHED,
        replaced={"--data=my_folder/": f"--data=raw/ {STEPS}", "--config=lora:DIR": f"--config=lora:DIR {STEPS}"},
        has_outputs=True,
    ),
    Recipe(
        "docs/coming_from/axlearn.md",
        ("plimsoll configs show llama2-7b",),
        replaced={"--config=stdlib-tiny": f"--config=stdlib-tiny {FEW}"},
        prints=(r"step +2/2\b", "kind: JobSet"),
    ),
    Recipe(
        "docs/coming_from/litgpt.md",
        ("plimsoll train --config=stdlib-tiny",),
        setup=(*PUBLISHED, "cp README.md raw/notes.txt"),
        replaced={
            "--config=stdlib-tiny": f"--config=stdlib-tiny {STEPS}",
            "--config=lora:DIR": f"--config=lora:DIR {STEPS}",
        },
        prints=("raw/notes.txt: .* bits per byte", "merged: LlamaForCausalLM"),
    ),
    Recipe(
        "docs/coming_from/maxtext.md",
        ("plimsoll configs diff",),
        setup=PUBLISHED,
        replaced={
            "--config=stdlib-tiny": f"--config=stdlib-tiny {FEW}",
            "--config=hf:DIR": f"--config=hf:DIR {STEPS} --config.data.seq_len=64",
        },
        prints=("exported: ", "kind: JobSet"),
    ),
    Recipe(
        "docs/coming_from/torchtitan.md",
        ("plimsoll plan --config=llama3-8b",),
        setup=PUBLISHED,
        replaced={
            "--config=stdlib-tiny": f"--config=stdlib-tiny {FEW}",
            "--config=hf:DIR": f"--config=hf:DIR {STEPS} --config.data.seq_len=64",
            "/shared/runs": "shared/runs",
        },
        prints=("verdict", "exported: ", "#SBATCH"),
    ),
    Recipe(
        "docs/coming_from/trl.md",
        ("plimsoll plan --config=qlora:Qwen/Qwen3-8B",),
        setup=PUBLISHED,
        replaced={"--config=lora:DIR": f"--config=lora:DIR {STEPS}"},
        prints=("adapter: LlamaForCausalLM", "merged: LlamaForCausalLM", "objective"),
    ),
    Recipe(
        "CONTRIBUTING.md",
        ("make lint", "python -m pytest tests/layers/test_layers.py --record", "python tools/mutate.py"),
        replaced={
            **NO_MAKE,
            "python -m pytest": "python -m pytest --collect-only -q",
            "-k lion": "-k lion tests/optimizers",
            "mutate.py --only mask": "mutate.py --help",
        },
    ),
    Recipe(
        "docs/architecture.md",
        ("plimsoll train --config=my.py", "python -m tests.oracle"),
        replaced={"--config.trainer.max_steps=20": STEPS, "--seeds 0:200": "--seeds 0:1"},
        files={"my.py": "class ScaleNorm"},
        prints=(r"step +2/2\b", r"1 agree, 0 refused, 0 unstable, 0 disagree"),
    ),
    Recipe(
        "docs/experts.md",
        ("plimsoll train --config=moe-tiny",),
        replaced={"--workdir=runs/moe": f"{FEW} --workdir=runs/moe"},
        prints=(r"step +2/2\b", r"num_experts", r"verdict"),
    ),
    Recipe(
        "docs/precision.md",
        ("plimsoll train --config=stdlib-tiny --workdir=runs/int8",),
        replaced={"--workdir=runs/int8": f"{FEW} --workdir=runs/int8"},
        prints=(r"step +2/2\b",),
    ),
    Recipe("docs/benchmarks/optimizers.md", ("python -m tools.bench.optimizers",), prints=(r"\| AdamW \| 8 \|",)),
    Recipe(
        "docs/checkpoints.md",
        ("python -m json.tool",),
        setup=(f"{A_RUN}runs/x",),
        replaced={"00000100": "00000002"},
        prints=(r'"format"', "parameter/"),
    ),
    Recipe(
        "docs/configs.md",
        ("plimsoll train --config=stdlib-tiny",),
        replaced={"--workdir=runs/exact": f"--workdir=runs/exact {FEW}"},
    ),
    Recipe(
        "docs/data.md",
        ("plimsoll train --config=stdlib-tiny --data=raw/", "python make_rows.py"),
        replaced={"--workdir=runs/mine": f"--workdir=runs/mine {STEPS}", "--config.trainer.max_steps=20": STEPS},
        files={"my_rows.py": "# my_rows.py", "make_rows.py": "# make_rows.py"},
        prints=(r"data: JSON lines from raw/: 1 file, 5% held out",),
    ),
    Recipe(
        "docs/early_stopping.md",
        ("plimsoll train --config=nanogpt-cpu",),
        replaced={
            "--config=nanogpt-cpu": f"--config=nanogpt-cpu {FEW}",
            "eval_every=20": "eval_every=1",
            "stop.target=3": "stop.target=100",
            "keep_best=loss": "keep_best=loss; test $? -eq 8",
            "--files README.md": "--files template.jinja",
        },
        prints=(r"step 1: stopped early: .*trainer\.stop\.target = 100", r"bits per byte"),
    ),
    Recipe("docs/faults.md", ("pytest ",), replaced={"pytest ": "pytest --collect-only -q "}),
    Recipe(
        "docs/finetune.md",
        ("plimsoll train --config=lora:DIR",),
        setup=PUBLISHED,
        replaced={"--config=lora:DIR": f"--config=lora:DIR {STEPS}"},
    ),
    Recipe(
        "docs/finetune.md",
        (
            "plimsoll train --config=stdlib-tiny",
            "python - > chats.jsonl",
            "plimsoll plan",
            "plimsoll train --config=lora:tiny",
            "plimsoll export --workdir=runs/tuned --to=tuned",
        ),
        replaced={"--config.trainer.max_steps=100": FEW, "--config.trainer.max_epochs=20": STEPS},
        prints=("verdict +fits",),
    ),
    Recipe(
        "docs/first_hour.md",
        ("plimsoll train --config=stdlib-tiny --data=notes/",),
        setup=(*PUBLISHED, "mkdir notes; for page in docs/*.md; do cp $page notes/$(basename $page .md).txt; done"),
        replaced={
            "stdlib-tiny --data=notes/ --workdir=runs/mine ": f"stdlib-tiny --data=notes/ --workdir=runs/mine {STEPS} ",
            "--config=lora:DIR --data": f"--config=lora:DIR {STEPS} --data",
            "--config=norm.py:scale_norm": f"--config=norm.py:scale_norm {STEPS}",
            # A finished run continues for two more steps.
            "global_batch_size=16": "global_batch_size=16 --config.trainer.max_steps=4",
        },
        files={"norm.py": "scale_norm():"},
        prints=(
            r"global batch \d+ -> 16",
            "verdict +fits",
            "exported: LlamaForCausalLM",
            "notes/faults.txt: .* bits per byte",
        ),
    ),
    Recipe(
        "docs/flows.md",
        ("plimsoll train --config=digits-glow --workdir",),
        replaced={"--config=digits-glow": f"--config=digits-glow {STEPS}"},
    ),
    Recipe(
        "docs/generate.md",
        ("plimsoll train", "plimsoll chat"),
        replaced={"--config.trainer.max_steps=100": FEW, "--hf=DIR": "--workdir=runs/ask", "--web ": ""},
        after=("python ask.py",),
        files={"ask.py": "pl.Sampling(max_new_tokens=5)"},
        prints=(
            "def main\\(\\):",
            r"README.md: \d+ tokens, loss [\d.]+, perplexity [\d.]+, [\d.]+ bits per byte\n",
            r"questions 2, accuracy [\d.]+, accuracy_per_character [\d.]+\n",
            r"\n\[\[(\d+, ){4}\d+\], \[(\d+, ){4}\d+\]\]\n",
        ),
    ),
    Recipe(
        "docs/memory.md",
        ("plimsoll train --config=stdlib-tiny-reversible",),
        replaced={"--config=stdlib-tiny-reversible": f"--config=stdlib-tiny-reversible {FEW}"},
    ),
    Recipe(
        "docs/models.md",
        ("plimsoll plan",),
        setup=PUBLISHED,
        # A CPU has no memory of a device's own, so the machine that runs the tests need not hold the state.
        replaced={
            "--target=v5e-1": "--target=cpu:1 --host_memory_gib=64",
            "--config=lora:DIR": f"--config=lora:DIR {STEPS}",
        },
    ),
    Recipe(
        "docs/multihost.md",
        ("JAX_COORDINATOR_ADDRESS",),
        replaced={
            "host-of-process-0": "127.0.0.1",
            "JAX_NUM_PROCESSES=16": "JAX_NUM_PROCESSES=1",
            "plimsoll train ...": f"{A_RUN}runs/by-hand",
        },
    ),
    Recipe(
        "docs/parallelism.md",
        ("plimsoll local --config=nanogpt-cpu",),
        replaced={"--config.mesh.pipe=4": f"--config.mesh.pipe=4 {FEW}"},
    ),
    Recipe("docs/operations.md", ("plimsoll status",), setup=(f"{A_RUN}runs/a",), prints=("step 2",)),
    Recipe(
        "docs/optimizers.md",
        ("plimsoll train",),
        replaced={"--workdir=runs/adalomo": f"--workdir=runs/adalomo {FEW}"},
        prints=("AdaLomo|apollo",),
    ),
    Recipe(
        "docs/own_loss_and_metric.md",
        ("plimsoll train --config=my_loss.py:focal",),
        replaced={
            "--config=my_loss.py:focal --workdir=runs/focal --config.trainer.max_steps=20": (
                f"--config=my_loss.py:focal --workdir=runs/focal {FEW}"
            ),
            "eval_every=10": "eval_every=2",
        },
        files={"my_loss.py": "class FocalLoss"},
        prints=(r"step 2: eval/stdlib/loss [\d.]+, eval/stdlib/entropy [\d.]+, eval/stdlib/top5 0\.\d+",),
    ),
    Recipe(
        "docs/performance.md",
        ("plimsoll plan --config=gpt2-124m",),
        prints=(r"a step .* tokens a second, .* \(MFU\)", r"tokens per second "),
    ),
    Recipe("docs/profiling.md", ("plimsoll profile",), prints=("by layer and phase", "stack/mlp")),
    Recipe(
        "docs/preferences.md",
        ("python -c",),
        replaced={"--workdir=runs/task": f"--workdir=runs/task {STEPS}"},
        files={"my_rewards.py": "# my_rewards.py", "my_task.py": "# my_task.py"},
        prints=("step 2",),
    ),
    # The numbers depend on the CPU's compiler.
    Recipe(
        "docs/plan.md",
        ("plimsoll train --config=stdlib-tiny",),
        prints=("the training step needs .* MiB per device", "would fit: --config.memory.remat=full"),
        fails=True,
    ),
    Recipe(
        "docs/benchmarks/plan_examples.md",
        ("plimsoll plan --config=llama3-70b --target=2xv5e-256",),
        prints=(r"mesh.model=8 mesh.seq=2 learner.accumulate=4",),
    ),
    Recipe(
        "docs/sweeps.md",
        ("plimsoll sweep",),
        replaced={
            "--config=nanogpt-cpu": "--config=nanogpt-cpu --config.data.source.share=0.05",
            "3e-4,1e-3,3e-3": "3e-4,1e-3",
            "max_steps=50": "max_steps=2",
            "eval_every=25": "eval_every=2",
            "eval_batches=4": "eval_batches=1",
            "runs/rates/002": "runs/rates/001",
        },
        prints=(r"best: 00\d peak_value=", r"curves: .*compare\.png"),
    ),
    Recipe("docs/tour.md", ("python -m pytest",), prints=(r"\d+ passed",)),
)


def conversation(number: int) -> str:
    """Return one line of chats.jsonl."""
    question = {"role": "user", "content": f"What is {number}?"}
    answer = {"role": "assistant", "content": f"It is {number + 1} less one."}
    return json.dumps({"messages": [question, answer]}) + "\n"


def pair(number: int) -> str:
    """Return one line of pairs.jsonl."""
    answers = {"chosen": f"It is {number + 1} less one.", "rejected": "No idea."}
    return json.dumps({"prompt": f"What is {number}?", **answers}) + "\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the data that the pages assume."""
    (tmp_path / "raw").mkdir()
    lines = "".join(json.dumps({"body": f"document {i * i} of the corpus, " * 5}) + "\n" for i in range(2000))
    (tmp_path / "raw/a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "chats.jsonl").write_text("".join(conversation(i) for i in range(200)))
    (tmp_path / "pairs.jsonl").write_text("".join(pair(i) for i in range(200)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the GPUs that --gpus=all finds
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.once("docs/configs.md0", "docs/configs.md1", "docs/data.md", "docs/plan.md0", "docs/multihost.md")
@pytest.mark.parametrize("recipe", QUICK, ids=lambda recipe: recipe.page)
def test_commands_run(recipe: Recipe, folder: Path) -> None:
    recipe.lay_out(folder)
    run_here(recipe)


@pytest.mark.pairs
@pytest.mark.parametrize("recipe", WHOLE, ids=lambda recipe: recipe.page)
def test_commands_run_in_a_shell(recipe: Recipe, folder: Path) -> None:
    recipe.lay_out(folder)
    run_in_shell(recipe, folder)


def not_accounted_for(page: str, text: str | None = None) -> list[str]:
    """Return the blocks of a page that no recipe runs and no adjacent line records: page, line and first command."""
    run_lines = {block.line for recipe in (*QUICK, *WHOLE) if recipe.page == page for block in recipe.select_blocks()}
    return [
        f"{page}:{block.line}: {block.commands[0]}"
        for block in blocks(page, text)
        if block.line not in run_lines and block.record() is None
    ]


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_tested_or_explained(page: str) -> None:
    lines = not_accounted_for(page)
    assert not lines, "\n".join(
        [*lines, "run it in a recipe of this file, or state next to the block when, on what and with which jax it was"
        " run, or `Not run: needs ...`"]
    )  # fmt: skip


BLOCK = "# Title\n\nPara.\n\n```\nplimsoll train --config=new\n```\n\n"


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        (BLOCK, True),
        (BLOCK + "Run on 2026-11-24 on two CPU cores, Python 3.11, jax 0.10.2.\n", False),
        (BLOCK + "Two CPU cores, jax 0.10.2.\n", True),
        (BLOCK + "Not run: it needs a GPU.\n", False),
        (BLOCK + "Run by `tests/launch/test_slurm.py`.\n", False),
        (BLOCK + "Run by `tests/launch/test_gone.py`.\n", True),
        (BLOCK + "## Next\n\nNot run: it needs a GPU.\n", True),
        (BLOCK.replace("plimsoll train", "$ plimsoll train"), True),
        (BLOCK.replace("plimsoll train --config=new", "config: new"), False),
    ],
)
def test_untested_new_block_is_reported(text: str, is_told: bool) -> None:
    lines = not_accounted_for("docs/new.md", text)
    assert lines == (["docs/new.md:6: plimsoll train --config=new"] if is_told else [])
