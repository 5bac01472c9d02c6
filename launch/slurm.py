"""Train on a SLURM cluster: writes the batch script and submits it with sbatch.

    plimsoll slurm --config=llama2-7b --workdir=/shared/runs/a --nodes=4 --gpus_per_node=8 --time=1-00:00:00

One process per GPU, on every node, finds the others through SLURM. SLURM sends SIGTERM before the time limit: the run
saves and is requeued, as often as needed. It is also requeued after a failure, up to --max_restarts times, but not
after exit codes 2, 3, 4 and 8. `scancel` ends it. The nodes must have the directory in which this is started.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, commands

# srun itself returns only the highest exit code, which hides why the first task ended from those that were terminated
# afterwards, so every task records its own. A task that has saved and stopped returns 0 to srun, which would otherwise
# terminate the others.
TASK = """
trap : TERM INT
"$@"
code=$?
echo "$code" >"$CODES/$SLURM_PROCID"
case $code in 8 | 130 | 143) exit 0 ;; *) exit "$code" ;; esac
"""
SCRIPT = """
cd -- {directory} || exit 2
CODES=$(mktemp -d "$PWD/.slurm-$SLURM_JOB_ID-XXXXXX") || exit 2
# Process 0 accepts only processes that know this key.
export PLIMSOLL_RENDEZVOUS_KEY="${{PLIMSOLL_RENDEZVOUS_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"
export CODES
# shellcheck disable=SC2016  # the tasks expand it
{srun} bash -c {task} task {line}
ended=$(cat "$CODES"/* | sort -n | uniq -c | awk '{{print $2 "x" $1}}' | paste -sd ' ')
rm -r -- "$CODES"
echo "slurm: tasks ended with exit codes (code x tasks): $ended of $SLURM_NTASKS"
case " $ended" in
*' '[234]x*) exit "$(grep -o '\\b[234]x' <<<"$ended" | head -n 1 | tr -d x)" ;;
" 0x$SLURM_NTASKS") exit 0 ;;
" 8x$SLURM_NTASKS") exit 8 ;;
" 130x$SLURM_NTASKS") exit 130 ;;
" 143x$SLURM_NTASKS") exec scontrol requeue "$SLURM_JOB_ID" ;;
esac
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_restarts} ]; then
  echo "slurm: gave up after $SLURM_RESTART_COUNT restarts"
  exit 1
fi
exec scontrol requeue "$SLURM_JOB_ID"
"""


@cli.main
def main(argv: list[str]) -> int:
    """Check everything, then print or submit the script."""
    parser = commands.LauncherParser("slurm", __doc__)
    add = parser.add_argument
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes; default 1")
    add(
        "--gpus_per_node",
        type=int,
        default=0,
        metavar="K",
        help="GPUs per node, with one process each; default 0: CPU nodes",
    )
    add("--tasks_per_node", type=int, metavar="K", help="processes per node; default: one for each GPU, or one")
    add("--time", metavar="D-HH:MM:SS", help="time limit of one allocation; the run continues in the next one")
    add("--partition", metavar="NAME", help="SLURM partition")
    add("--account", metavar="NAME", help="SLURM account to charge")
    add("--job_name", metavar="NAME", help="name of the job; default: the name of the workdir")
    add(
        "--container",
        metavar="IMAGE",
        help="run in this image (requires Pyxis); this directory and the workdir are mounted",
    )
    add(
        "--save_seconds",
        type=int,
        default=120,
        metavar="S",
        help="seconds between SIGTERM and the time limit, in which the run saves; default 120",
    )
    add(
        "--max_restarts", type=int, default=20, metavar="K", help="restarts after failures before giving up; default 20"
    )
    add(
        "--sbatch", action="append", default=[], metavar="--OPTION=VALUE", help="any other option of sbatch; repeatable"
    )
    args, words = parser.parse_job(argv)
    text = script(args, words)
    if args.dry_run:
        print(text, end="")
        return ExitCode.DONE
    return commands.execute(["sbatch"], text)


def script(args: argparse.Namespace, words: list[str]) -> str:
    """Build the batch script. Raises UsageError for an invalid value."""
    if min(args.nodes, args.tasks_per_node or 1) < 1 or args.gpus_per_node < 0:
        raise cli.UsageError("--nodes and --tasks_per_node must be at least 1, and --gpus_per_node at least 0")
    tasks_per_node = args.tasks_per_node or args.gpus_per_node or 1
    options = {
        "job-name": args.job_name or Path(args.workdir or args.run_name).name,
        "nodes": args.nodes,
        "ntasks": args.nodes * tasks_per_node,
        "ntasks-per-node": tasks_per_node,
        "gpus-per-node": args.gpus_per_node or None,
        "time": args.time,
        "partition": args.partition,
        "account": args.account,
        "signal": f"TERM@{args.save_seconds}",
        # The next allocation of the same job appends to the same output file.
        "open-mode": "append",
    }
    sbatch_options = [f"--{name}={value}" for name, value in options.items() if value is not None]
    sbatch_options += ["--requeue", *args.sbatch]
    srun = ["srun", "--kill-on-bad-exit=1", *_container_options(args)]
    # The image has its own Python.
    python = "python" if args.container else sys.executable
    line = [python, "-m", "plimsoll", "train", *words]
    # sbatch reads its options from lines of the script, so no word may contain a line break.
    for word in (*sbatch_options, *srun, *line):
        if not word.isprintable():
            raise cli.UsageError(f"{word!r}: expected printable characters on one line")
    body = SCRIPT.lstrip().format(
        directory=shlex.quote(os.getcwd()),
        srun=shlex.join(srun),
        task=shlex.quote(TASK),
        line=shlex.join(line),
        max_restarts=args.max_restarts,
    )
    header = [f"#SBATCH {shlex.quote(option)}" for option in sbatch_options]
    return "\n".join(["#!/usr/bin/env bash", *header, body])


def _container_options(args: argparse.Namespace) -> list[str]:
    """Return the srun options (Pyxis) that run a task in --container; none without it."""
    if not args.container:
        return []
    workdir = Path(args.workdir or "runs").absolute()
    # A set, because the workdir may be this directory.
    folders = {os.getcwd(), str(workdir)}
    mounts = ",".join(f"{path}:{path}" for path in sorted(folders))
    return [f"--container-image={args.container}", f"--container-workdir={os.getcwd()}", f"--container-mounts={mounts}"]


if __name__ == "__main__":
    sys.exit(main())
