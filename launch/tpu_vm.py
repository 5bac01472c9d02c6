"""Train on Cloud TPU VMs with gcloud: create VMs, copy this checkout, run on all workers, show logs, delete.

    plimsoll tpu_vm create --name=a --zone=us-west4-a --target=v5e-16 --spot
    plimsoll tpu_vm copy   --name=a --zone=us-west4-a --target=v5e-16
    plimsoll tpu_vm run    --name=a --zone=us-west4-a --target=v5e-16 --config=llama2-7b --workdir=gs://bucket/runs/a
    plimsoll tpu_vm logs   --name=a --zone=us-west4-a --target=v5e-16
    plimsoll tpu_vm delete --name=a --zone=us-west4-a --target=v5e-16 --spot

`copy` archives the committed files and installs them there. `run` starts `plimsoll local` on every worker in the
background: it restarts its process as long as that helps, and the workers find each other through the metadata of the
VMs. With --spot, --reserved or several slices, a queued resource creates the VMs when they become available. `stop`
ends a run, which saves first.
Source: https://cloud.google.com/sdk/gcloud/reference/compute/tpus.
"""

import argparse
import re
import shlex
import sys

from plimsoll.framework.plan import targets
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, commands

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
RUN = "cd plimsoll && echo $$ >../{name}.pid && exec .venv/bin/python -m plimsoll local {words}"


@cli.main
def main(argv: list[str]) -> int:
    """Check everything, then print or run the commands, up to the first one that fails."""
    # --help without a subverb shows the flags of `run`, which has the most.
    if argv[:1] in (["-h"], ["--help"]):
        subverb = "run"
        subverb_text = "|".join(SUBVERBS)
        flags = argv
    else:
        subverb = cli.choose("subverb of `plimsoll tpu_vm`", argv[0] if argv else "", SUBVERBS)
        subverb_text = subverb
        flags = argv[1:]
    verb = f"tpu_vm {subverb_text}"
    if subverb == "run":
        parser = commands.LauncherParser(verb, __doc__)
    else:
        parser = cli.Parser(verb, __doc__, takes_config=False)
    add = parser.add_argument
    add("--name", required=True, help="name of the VMs")
    add("--zone", required=True, help="Google Cloud zone of the VMs")
    add("--project", metavar="ID", help="Google Cloud project; default: the one that gcloud is configured for")
    add("--target", required=True, metavar="T", help="machine as for `plimsoll plan`, such as v5e-16 or 2xv5p-512")
    add("--spot", action="store_true", help="spot VMs: cheaper, but they can be preempted")
    add("--reserved", action="store_true", help="use a reservation")
    if subverb == "create":
        add("--runtime_version", metavar="V", help="software version of the VMs; default: the version for the target")
    if subverb == "logs":
        add("--worker", default="0", metavar="I", help="index of the worker whose log is shown, or all; default 0")
    if isinstance(parser, commands.LauncherParser):
        args, words = parser.parse_job(flags)
    else:
        parser.add_argument("--dry_run", action="store_true", help="print the commands without running them")
        args = parser.parse_flags(flags)
        words = []
    for line in lines(subverb, args, words):
        if args.dry_run:
            print(shlex.join(line))
            continue
        code = commands.execute(line)
        if code:
            return code
    return ExitCode.DONE


def lines(subverb: str, args: argparse.Namespace, words: list[str]) -> list[list[str]]:
    """Return the commands, in order. Raises ValueError for an invalid value."""
    target = targets.resolve(args.target)
    if target.platform != "tpu":
        raise cli.UsageError(f"--target={args.target}: expected a TPU, such as v5e-16")
    if not re.fullmatch("[a-z]([-a-z0-9]{0,60}[a-z0-9])?", args.name):
        raise cli.UsageError(f"--name={args.name}: expected only a-z, 0-9 and '-', starting with a letter")
    slices = target.num_slices
    zone_flags = _zone_flags(args)
    # Only a queued resource creates such VMs, and it must also delete them.
    queued = args.spot or args.reserved or slices > 1
    if subverb == "create":
        return [_create(args, target, queued=queued)]
    if subverb == "delete":
        if queued:
            return [[*TPUS, "queued-resources", "delete", args.name, "--force", *zone_flags]]
        return [[*TPUS, "tpu-vm", "delete", args.name, *zone_flags]]
    # The names that a queued resource gives to the nodes of several slices.
    nodes = [f"{args.name}-{i}" for i in range(slices)] if slices > 1 else [args.name]

    def ssh(command: str, workers: str = "all") -> list[list[str]]:
        return [
            [*TPUS, "tpu-vm", "ssh", node, *zone_flags, f"--worker={workers}", f"--command={command}"] for node in nodes
        ]

    if subverb == "copy":
        archive = ["git", "archive", f"--output={ARCHIVE}", "HEAD"]
        copies = [[*TPUS, "tpu-vm", "scp", ARCHIVE, f"{node}:", *zone_flags, "--worker=all"] for node in nodes]
        return [archive, *copies, *ssh(INSTALL)]
    if subverb == "logs":
        # `tail -F` does not end, so show the log of only one node.
        return ssh(f"tail -n 100 -F {args.name}.log", args.worker)[:1]
    if subverb == "stop":
        return ssh(f"kill -TERM $(cat {args.name}.pid)")
    workdir = args.workdir or ""
    is_shared = "://" in workdir or workdir.startswith("/")
    if target.num_processes > 1 and not is_shared:
        raise cli.UsageError(
            "--workdir: several workers need a shared workdir: gs://BUCKET/..., or a file system mounted on all"
        )
    inner = RUN.format(name=args.name, words=shlex.join(words))
    # Detach from ssh, so that the run continues when the connection ends.
    return ssh(f"setsid nohup bash -c {shlex.quote(inner)} >>{args.name}.log 2>&1 </dev/null &")


def _zone_flags(args: argparse.Namespace) -> list[str]:
    """Return the gcloud flags for the location of the VMs."""
    zone_flags = [f"--zone={args.zone}"]
    if args.project:
        zone_flags.append(f"--project={args.project}")
    return zone_flags


def _create(args: argparse.Namespace, target: targets.Target, *, queued: bool) -> list[str]:
    """Return the command that creates the VMs. Raises UsageError if the software for this family is unknown."""
    family = target.spec.name
    runtime = args.runtime_version or RUNTIMES.get(family)
    if runtime is None:
        raise cli.UsageError(f"--runtime_version is required for {family}")
    # The name of one slice; Cloud uses another name for v5e.
    slice_name = target.name.rpartition("x")[2]
    accelerator = f"--accelerator-type={slice_name.replace('v5e', 'v5litepod')}"
    zone_flags = _zone_flags(args)
    if not queued:
        return [*TPUS, "tpu-vm", "create", args.name, *zone_flags, accelerator, f"--version={runtime}"]
    if target.num_slices > 1:
        node_flags = [f"--node-count={target.num_slices}", f"--node-prefix={args.name}"]
    else:
        node_flags = [f"--node-id={args.name}"]
    command = [*TPUS, "queued-resources", "create", args.name, *zone_flags]
    command += [*node_flags, accelerator, f"--runtime-version={runtime}"]
    if args.spot:
        command.append("--spot")
    if args.reserved:
        command.append("--reserved")
    return command


if __name__ == "__main__":
    sys.exit(main())
