"""Run a training on Cloud TPU VMs, with gcloud: make them, copy this checkout there, run on all workers, look, delete.

    python -m launch.tpu_vm create --name=a --zone=us-west4-a --target=v5e-16 --spot
    python -m launch.tpu_vm copy   --name=a --zone=us-west4-a --target=v5e-16
    python -m launch.tpu_vm run    --name=a --zone=us-west4-a --target=v5e-16 --config=llama2-7b --workdir=gs://bucket/runs/a
    python -m launch.tpu_vm logs   --name=a --zone=us-west4-a --target=v5e-16
    python -m launch.tpu_vm delete --name=a --zone=us-west4-a --target=v5e-16 --spot

`copy` takes what is committed, and installs it there. `run` starts launch.local on every worker, in the background: it
starts its process again as long as that helps, and the workers find each other by what Cloud tells them. With --spot,
--reserved or several slices, a queued resource makes the VMs when there are any. `stop` ends a run, which saves first.
Source: https://cloud.google.com/sdk/gcloud/reference/compute/tpus.
"""

import argparse
import re
import shlex
import sys

from framework.plan import targets
from launch import cli, commands

RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
SUBVERBS = ("create", "copy", "run", "logs", "stop", "delete")
TPUS = ["gcloud", "compute", "tpus"]
ARCHIVE = "plimsoll.tar.gz"
INSTALL = (
    f"mkdir -p plimsoll && tar -xzf {ARCHIVE} -C plimsoll && cd plimsoll && python3 -m venv .venv && "
    ".venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[tpu]'"
)
RUN = "cd plimsoll && echo $$ >../{name}.pid && exec .venv/bin/python -m launch.local {words}"


@cli.main
def main(argv: list[str]) -> int:
    """Checks everything, then prints or runs the commands, up to the first one that fails."""
    asked = argv[:1] in (["-h"], ["--help"])
    subverb = "run" if asked else cli.choose("subverb of launch.tpu_vm", argv[0] if argv else "", SUBVERBS)
    flags = argv if asked else argv[1:]
    runs, about = subverb == "run", (f"tpu_vm {'|'.join(SUBVERBS) if asked else subverb}", __doc__)
    parser = commands.Parser(*about) if runs else cli.Parser(*about, takes_config=False)
    add = parser.add_argument
    add("--name", required=True, help="of the VMs")
    add("--zone", required=True)
    add("--project", metavar="ID", help="default: gcloud's own")
    add("--target", required=True, metavar="T", help="v5e-16, 2xv5p-512 ..., as launch.plan has it")
    add("--spot", action="store_true", help="cheaper, and taken away when others want them")
    add("--reserved", action="store_true", help="from a reservation")
    if subverb == "create":
        add("--runtime_version", metavar="V", help="the VM's software; default: what fits the target")
    if subverb == "logs":
        add("--worker", default="0", metavar="I", help="which one, or all")
    if isinstance(parser, commands.Parser):
        args, words = parser.parse_job(flags)
    else:
        parser.add_argument("--dry_run", action="store_true", help="print the commands, and run none")
        args, words = parser.parse_flags(flags), []
    for line in lines(subverb, args, words):
        if args.dry_run:
            print(shlex.join(line))
        elif code := commands.execute(line):
            return code
    return 0


def lines(subverb: str, args: argparse.Namespace, words: list[str]) -> list[list[str]]:
    """The commands, in order. Raises ValueError: a value that cannot stand in them."""
    target = targets.resolve(args.target)
    family = target.spec.name
    if target.platform != "tpu":
        raise cli.UsageError(f"--target={args.target}: expected a TPU, such as v5e-16")
    if not re.fullmatch("[a-z]([-a-z0-9]{0,60}[a-z0-9])?", args.name):
        raise cli.UsageError(f"--name={args.name}: expected a-z, 0-9 and '-', the first a letter")
    slices, place = target.num_slices, [f"--zone={args.zone}"] + ([f"--project={args.project}"] if args.project else [])
    queued = args.spot or args.reserved or slices > 1
    nodes = [f"{args.name}-{i}" for i in range(slices)] if slices > 1 else [args.name]
    if subverb == "create":
        runtime = args.runtime_version or RUNTIMES.get(family)
        if runtime is None:
            raise cli.UsageError(f"--runtime_version is needed for {family}")
        kind = f"--accelerator-type={target.name.rpartition('x')[2].replace('v5e', 'v5litepod')}"
        if not queued:
            return [[*TPUS, "tpu-vm", "create", args.name, *place, kind, f"--version={runtime}"]]
        ids = [f"--node-count={slices}", f"--node-prefix={args.name}"] if slices > 1 else [f"--node-id={args.name}"]
        how = ["--spot"] * args.spot + ["--reserved"] * args.reserved
        return [
            [*TPUS, "queued-resources", "create", args.name, *place, *ids, kind, f"--runtime-version={runtime}", *how]
        ]
    if subverb == "delete":
        kind = ["queued-resources", "delete", args.name, "--force"] if queued else ["tpu-vm", "delete", args.name]
        return [[*TPUS, *kind, *place]]

    def ssh(command: str, workers: str = "all") -> list[list[str]]:
        return [[*TPUS, "tpu-vm", "ssh", node, *place, f"--worker={workers}", f"--command={command}"] for node in nodes]

    if subverb == "copy":
        copies = [[*TPUS, "tpu-vm", "scp", ARCHIVE, f"{node}:", *place, "--worker=all"] for node in nodes]
        return [["git", "archive", f"--output={ARCHIVE}", "HEAD"], *copies, *ssh(INSTALL)]
    if subverb == "logs":
        return ssh(f"tail -n 100 -F {args.name}.log", args.worker)[:1]
    if subverb == "stop":
        return ssh(f"kill -TERM $(cat {args.name}.pid)")
    if target.num_processes > 1 and "://" not in (args.workdir or "") and not (args.workdir or "").startswith("/"):
        raise cli.UsageError(
            "--workdir: several workers need one place: gs://BUCKET/..., or a file system mounted on all"
        )
    inner = RUN.format(name=args.name, words=shlex.join(words))
    return ssh(f"setsid nohup bash -c {shlex.quote(inner)} >>{args.name}.log 2>&1 </dev/null &")


if __name__ == "__main__":
    sys.exit(main())
