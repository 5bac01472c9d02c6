"""Train on Google Kubernetes Engine, on TPU slices or GPU nodes: writes a JobSet and applies it.

    plimsoll gke --config=llama3-70b --workdir=gs://bucket/runs/a --target=2xv5e-256 --image=IMAGE
    plimsoll gke --config=llama2-7b --workdir=/runs/b --target=h200x16 --image=IMAGE --pvc=runs:/runs

The cluster needs JobSet (jobset.sigs.k8s.io) and nodes with the target's accelerators. The cluster's own scheduler,
or Kueue with --queue, decides when the run starts. One process runs on each host. When one fails, or a node is
preempted, JobSet restarts all from the last checkpoint, up to --max_restarts times; exit codes 2, 3, 4 and 8 end the
job immediately. Processes get secrets as environment variables from Kubernetes Secrets (--secret), never through this
manifest.
Sources: https://jobset.sigs.k8s.io/docs and https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice.
"""

import argparse
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import yaml

from plimsoll.framework.plan import targets
from plimsoll.framework.terminal.exit_codes import HOPELESS, ExitCode
from plimsoll.launch import cli, commands

# GKE's names for the accelerators of its nodes.
TPUS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
GPUS = {
    "a100-40": "nvidia-tesla-a100",
    "a100-80": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
}
# The port of process 0, where the others connect.
PORT = 8476


@cli.main
def main(argv: list[str]) -> int:
    """Check everything, then print or apply the manifest."""
    parser = commands.LauncherParser("gke", __doc__)
    add = parser.add_argument
    add(
        "--target",
        required=True,
        metavar="T",
        help="machine as for `plimsoll plan`, such as v5e-16, 2xv5e-256, v5p-2048 or h200x16",
    )
    add("--image", required=True, help="container image, built from the Dockerfile of this repository")
    add("--name", help="name of the job; default: derived from the workdir")
    add("--namespace", default="default", help="Kubernetes namespace of the job; default 'default'")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="Kubernetes Secret; each of its entries becomes an environment variable; repeatable",
    )
    add("--service_account", metavar="NAME", help="Kubernetes service account with access to the bucket")
    add("--pvc", metavar="CLAIM:/PATH", help="mount this PersistentVolumeClaim at /PATH")
    add("--queue", metavar="NAME", help="submit to this LocalQueue of Kueue")
    add(
        "--node_selector",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="additional node label to require, such as cloud.google.com/gke-spot=true; repeatable",
    )
    add(
        "--save_seconds",
        type=int,
        default=120,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL, in which the run saves; default 120",
    )
    add(
        "--max_restarts",
        type=int,
        default=20,
        metavar="K",
        help="restarts before the job fails, including those after preemptions; default 20",
    )
    args, words = parser.parse_job(argv)
    manifest = job_set(args, words)
    # Keep the keys in the order of the documentation, because people read the manifest with --dry_run.
    text = yaml.safe_dump(manifest, sort_keys=False, width=120)
    if args.dry_run:
        print(text, end="")
        return ExitCode.DONE
    return commands.execute(["kubectl", "apply", "-f", "-"], text)


@dataclass(frozen=True)
class _Pods:
    """The division of a target's devices among pods. There is one pod per host."""

    on_tpu: bool
    slices: int  # number of jobs in the JobSet
    hosts: int  # number of pods in each job
    chips: int  # number of accelerators in each pod

    @property
    def role(self) -> str:
        """The name of the jobs in the JobSet."""
        return "slice" if self.on_tpu else "node"


def job_set(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Build the manifest. Raises UsageError for an invalid value, or for a workdir that would be lost with its pod."""
    target = targets.resolve(args.target)
    accelerators = {**TPUS, **GPUS}
    accelerator = accelerators.get(target.spec.name)
    if accelerator is None:
        raise cli.UsageError(f"--target={args.target}: GKE only has nodes with {', '.join([*TPUS, *GPUS])}")
    workdir = args.workdir or f"runs/{args.run_name}"
    name = _job_name(args, workdir)
    claim, mount = _volume_claim(args, workdir)
    pods = _divide_into_pods(target)
    pod = _pod(
        args,
        pods,
        selector=_node_selector(args, target, accelerator),
        volumes=_volumes(pods, claim, mount),
        container=_container(args, words, pods, _environment(pods, name)),
    )
    job = _job(pods, pod)
    # Without this rule, the JobSet would restart all jobs after one failed by its pod failure policy.
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(args, name, pods),
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": args.max_restarts, "rules": [final]},
            "replicatedJobs": [{"name": pods.role, "replicas": pods.slices, "template": {"spec": job}}],
        },
    }


def _job_name(args: argparse.Namespace, workdir: str) -> str:
    """Return --name, or a name derived from the workdir. Raises UsageError if Kubernetes does not accept it."""
    last_part = workdir.rstrip("/").rpartition("/")[2]
    default = re.sub("[^a-z0-9]+", "-", last_part.lower()).strip("-")[:40]
    name = args.name or default
    if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise cli.UsageError(
            f"--name={name}: expected 1 to 40 characters from a-z, 0-9 and '-', starting with a letter"
        )
    return name


def _volume_claim(args: argparse.Namespace, workdir: str) -> tuple[str, str]:
    """Return the (claim, mount path) of --pvc, both "" without one.

    Raises:
        UsageError: the workdir is not on a volume that outlives a pod.
    """
    claim, _, mount = (args.pvc or "").partition(":")
    if args.pvc and not (claim and mount.startswith("/")):
        raise cli.UsageError(f"--pvc={args.pvc}: expected CLAIM:/PATH")
    is_object_store = "://" in workdir
    # The trailing slashes keep /runs2 from matching /runs.
    is_mounted = mount and f"{workdir}/".startswith(f"{mount.rstrip('/')}/")
    if not is_object_store and not is_mounted:
        raise cli.UsageError(
            f"--workdir={workdir} would be deleted with its pod; use gs://BUCKET/..., or a path in a --pvc"
        )
    return claim, mount


def _divide_into_pods(target: targets.Target) -> _Pods:
    """Divide a target into pods."""
    on_tpu = target.platform == "tpu"
    # Hosts with GPUs are equal peers on one network, so they are pods of a single job.
    slices = target.num_slices if on_tpu else 1
    hosts = target.num_processes // slices
    if on_tpu:
        # On some TPUs one chip is two JAX devices, so count chips by the topology.
        lengths = map(int, target.topology.split("x"))
        chips = math.prod(lengths) // hosts
    else:
        chips = target.num_devices // hosts
    return _Pods(on_tpu, slices, hosts, chips)


def _environment(pods: _Pods, name: str) -> list[dict[str, Any]]:
    """Return the environment variables that let the processes find each other."""
    # The first pod, in the headless service that JobSet creates.
    first = f"{name}-{pods.role}-0-0.{name}"
    if pods.slices > 1:
        # Within a slice, GKE assigns the process indices.
        return [
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": first},
            {"name": "MEGASCALE_NUM_SLICES", "value": str(pods.slices)},
            _field("MEGASCALE_SLICE_ID", "metadata.labels['jobset.sigs.k8s.io/job-index']"),
        ]
    if not pods.on_tpu and pods.hosts > 1:
        return [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{first}:{PORT}"},
            {"name": "JAX_NUM_PROCESSES", "value": str(pods.hosts)},
            _field("JAX_PROCESS_ID", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        ]
    return []


def _node_selector(args: argparse.Namespace, target: targets.Target, accelerator: str) -> dict[str, str]:
    """Return the labels of the nodes that may run the pods."""
    if target.platform == "tpu":
        selector = {
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": target.topology,
        }
    else:
        selector = {"cloud.google.com/gke-accelerator": accelerator}
    for pair in args.node_selector:
        key, separator, value = pair.partition("=")
        if not separator:
            raise cli.UsageError(f"--node_selector={pair}: expected KEY=VALUE")
        selector[key] = value
    return selector


def _volumes(pods: _Pods, claim: str, mount: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return {name of a volume: (mount path, its source)}."""
    volumes = {}
    if not pods.on_tpu:
        # NCCL needs more shared memory than a container's default of 64 MB.
        volumes["shm"] = ("/dev/shm", {"emptyDir": {"medium": "Memory"}})
    if claim:
        volumes["workdir"] = (mount, {"persistentVolumeClaim": {"claimName": claim}})
    return volumes


def _container(
    args: argparse.Namespace, words: list[str], pods: _Pods, environment: list[dict[str, Any]]
) -> dict[str, Any]:
    """Build the container of a pod, without its volume mounts."""
    resource = "google.com/tpu" if pods.on_tpu else "nvidia.com/gpu"
    return {
        "name": "train",
        "image": args.image,
        "command": ["python", "-m", "plimsoll", "train", *words],
        "env": environment,
        "envFrom": [{"secretRef": {"name": secret}} for secret in args.secret],
        "resources": {"limits": {resource: pods.chips}},
    }


def _pod(
    args: argparse.Namespace,
    pods: _Pods,
    *,
    selector: dict[str, str],
    volumes: dict[str, tuple[str, dict[str, Any]]],
    container: dict[str, Any],
) -> dict[str, Any]:
    """Build the spec of a pod. Empty fields are left out."""
    mounts = [{"name": volume, "mountPath": path} for volume, (path, _) in volumes.items()]
    sources = [{"name": volume, **source} for volume, (_, source) in volumes.items()]
    pod = {
        # JobSet restarts all pods, never a single one.
        "restartPolicy": "Never",
        "nodeSelector": selector,
        "terminationGracePeriodSeconds": args.save_seconds,
        "serviceAccountName": args.service_account,
        # A pod on the host network resolves the cluster's names only with this other DNS policy.
        "hostNetwork": pods.on_tpu,
        "dnsPolicy": "ClusterFirstWithHostNet" if pods.on_tpu else "ClusterFirst",
        "containers": [_without_empty({**container, "volumeMounts": mounts})],
        "volumes": sources,
    }
    return _without_empty(pod)


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {key: value for key, value in fields.items() if value}


def _job(pods: _Pods, pod: dict[str, Any]) -> dict[str, Any]:
    """Build the spec of a Job, which Kubernetes never restarts by itself."""
    # Exit codes of `plimsoll train` after which another start would end in the same way.
    codes = [int(code) for code in (*HOPELESS, ExitCode.STOPPED_EARLY)]
    exits = {"containerName": "train", "operator": "In", "values": codes}
    return {
        "parallelism": pods.hosts,
        "completions": pods.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exits}]},
        "template": {"spec": pod},
    }


def _metadata(args: argparse.Namespace, name: str, pods: _Pods) -> dict[str, Any]:
    """Build the metadata of the JobSet."""
    metadata: dict[str, Any] = {"name": name, "namespace": args.namespace}
    if args.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": args.queue}
    if pods.on_tpu:
        # The pods of a slice share one node pool, exclusively.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return metadata


def _field(name: str, path: str) -> dict[str, Any]:
    """Return an environment variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


if __name__ == "__main__":
    sys.exit(main())
