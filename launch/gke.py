"""Run a training on Google Kubernetes Engine, on TPU slices or GPU nodes: writes a JobSet and applies it.

    python -m launch.gke --config=llama3-70b --workdir=gs://bucket/runs/a --target=2xv5e-256 --image=IMAGE
    python -m launch.gke --config=llama2-7b --workdir=/runs/b --target=h200x16 --image=IMAGE --pvc=runs:/runs

The cluster needs JobSet (jobset.sigs.k8s.io) and nodes of the target's kind; the cluster's own scheduler, or Kueue with
--queue, decides when. One process runs on each host. When one fails, or a node is taken away, JobSet starts all again
from the last checkpoint, --max_restarts times; exit codes 2, 3 and 4 end the job at once. Secrets come to the processes
as environment variables from Kubernetes Secrets (--secret), never through this manifest.
Sources: https://jobset.sigs.k8s.io/docs and https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice.
"""

import argparse
import math
import re
import sys
from typing import Any

import yaml

from framework.plan import targets
from launch import cli, commands

# The names that GKE gives to the accelerators of its nodes.
TPUS = {"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}
TPUS |= {"tpu7x": "tpu7x"}
GPUS = {
    "a100-40": "nvidia-tesla-a100",
    "a100-80": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
}
PORT = 8476  # of the first process, where the others find it


@cli.main
def main(argv: list[str]) -> int:
    """Checks everything, then prints or applies the manifest."""
    parser = commands.Parser("gke", __doc__)
    add = parser.add_argument
    add("--target", required=True, metavar="T", help="v5e-16, 2xv5e-256, v5p-2048, h200x16 ..., as launch.plan has it")
    add("--image", required=True, help="a container image, made from the Dockerfile of this repository")
    add("--name", help="of the job; default: the workdir's")
    add("--namespace", default="default")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a Secret, all as environment variables; repeatable",
    )
    add("--service_account", metavar="NAME", help="a Kubernetes service account that may use the bucket")
    add("--pvc", metavar="CLAIM:/PATH", help="mount a PersistentVolumeClaim")
    add("--queue", metavar="NAME", help="a LocalQueue of Kueue")
    add(
        "--node_selector",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="such as cloud.google.com/gke-spot=true",
    )
    add("--save_seconds", type=int, default=120, metavar="S", help="between SIGTERM and SIGKILL")
    add("--max_restarts", type=int, default=20, metavar="K", help="preemptions count too")
    args, words = parser.parse_job(argv)
    text = yaml.safe_dump(job_set(args, words), sort_keys=False, width=120)
    if args.dry_run:
        print(text, end="")
        return 0
    return commands.execute(["kubectl", "apply", "-f", "-"], text)


def job_set(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """The manifest. Raises UsageError: a value that cannot stand in it, or a workdir that ends with its pod."""
    target = targets.resolve(args.target)
    accelerator = {**TPUS, **GPUS}.get(target.spec.name)
    if accelerator is None:
        raise cli.UsageError(f"--target={args.target}: GKE has nodes with {', '.join([*TPUS, *GPUS])}")
    workdir = args.workdir or f"runs/{args.run_name}"
    name = args.name or re.sub("[^a-z0-9]+", "-", workdir.rstrip("/").rpartition("/")[2].lower()).strip("-")[:40]
    if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise cli.UsageError(f"--name={name}: expected 1 to 40 of a-z, 0-9 and '-', the first a letter")
    claim, _, mount = (args.pvc or "").partition(":")
    if args.pvc and not (claim and mount.startswith("/")):
        raise cli.UsageError(f"--pvc={args.pvc}: expected CLAIM:/PATH")
    if "://" not in workdir and not (mount and f"{workdir}/".startswith(f"{mount.rstrip('/')}/")):
        raise cli.UsageError(f"--workdir={workdir} would end with its pod: give gs://BUCKET/..., or a path in a --pvc")
    on_tpu = target.platform == "tpu"
    slices = target.num_slices if on_tpu else 1
    hosts = target.num_processes // slices
    chips = math.prod(map(int, target.topology.split("x"))) // hosts if on_tpu else target.num_devices // hosts
    role = "slice" if on_tpu else "node"
    first = f"{name}-{role}-0-0.{name}"  # the first pod, in the headless service that JobSet makes
    env: list[dict[str, Any]] = []
    if slices > 1:  # within a slice, GKE says who is who
        env = [
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": first},
            {"name": "MEGASCALE_NUM_SLICES", "value": str(slices)},
            _field("MEGASCALE_SLICE_ID", "metadata.labels['jobset.sigs.k8s.io/job-index']"),
        ]
    elif not on_tpu and hosts > 1:
        env = [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{first}:{PORT}"},
            {"name": "JAX_NUM_PROCESSES", "value": str(hosts)},
            _field("JAX_PROCESS_ID", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        ]
    selector = {"cloud.google.com/gke-tpu-accelerator" if on_tpu else "cloud.google.com/gke-accelerator": accelerator}
    if on_tpu:
        selector["cloud.google.com/gke-tpu-topology"] = target.topology
    for pair in args.node_selector:
        key, separator, value = pair.partition("=")
        if not separator:
            raise cli.UsageError(f"--node_selector={pair}: expected KEY=VALUE")
        selector[key] = value
    volumes = {} if on_tpu else {"shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}})}  # NCCL wants more than 64 MB
    if args.pvc:
        volumes["workdir"] = (mount, {"persistentVolumeClaim": {"claimName": claim}})
    container = {
        "name": "train",
        "image": args.image,
        "command": ["python", "-m", "launch.train", *words],
        "env": env,
        "envFrom": [{"secretRef": {"name": secret}} for secret in args.secret],
        "resources": {"limits": {"google.com/tpu" if on_tpu else "nvidia.com/gpu": chips}},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, (path, _) in volumes.items()],
    }
    pod = {
        "restartPolicy": "Never",  # JobSet starts all pods again, not one
        "nodeSelector": selector,
        "terminationGracePeriodSeconds": args.save_seconds,
        "serviceAccountName": args.service_account,
        "hostNetwork": on_tpu,
        "dnsPolicy": "ClusterFirstWithHostNet" if on_tpu else "ClusterFirst",
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": [{"name": volume, **source} for volume, (_, source) in volumes.items()],
    }
    exits = {"containerName": "train", "operator": "In", "values": [2, 3, 4]}
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exits}]},
        "template": {"spec": {key: value for key, value in pod.items() if value}},
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    metadata: dict[str, Any] = {"name": name, "namespace": args.namespace}
    if args.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": args.queue}
    if on_tpu:  # the pods of a slice in one node pool, and nobody else's there
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": args.max_restarts, "rules": [final]},
            "replicatedJobs": [{"name": role, "replicas": slices, "template": {"spec": job}}],
        },
    }


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


if __name__ == "__main__":
    sys.exit(main())
