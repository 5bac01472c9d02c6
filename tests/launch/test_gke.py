"""`plimsoll gke`: kubeflow-trainer-api's models check the JobSet, and kubernetes-validate checks the Job inside it."""

import copy
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError

from plimsoll.launch.gke import main
from tests.support.runs import CONFIG

TINY = f"--config={CONFIG}:tiny"
TARGETS = ["v5e-8", "v5e-16", "2xv5e-256", "v5p-2048", "v4-8", "v6e-64", "tpu7x-8", "h200", "h200x16", "a100-80x8"]


def dry(capsys, *flags: str) -> dict[str, Any]:
    assert main([TINY, "--workdir=gs://bucket/runs/My_Run.1", "--image=registry/i:1", "--dry_run", *flags]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def inner(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the Job that the JobSet controller creates from the manifest's template."""
    template = manifest["spec"]["replicatedJobs"][0]["template"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": template["spec"]}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return inner(manifest)["spec"]["template"]["spec"]


def check_job_set(manifest: dict[str, Any]) -> None:
    """Raise an error unless the models read the whole manifest. They drop fields that they do not know."""
    # Imported here because it takes 1.4 s: every worker collects this file, but only one runs it.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    read = JobsetV1alpha2JobSet.from_dict(manifest)
    assert read is not None
    ours, theirs = copy.deepcopy(manifest), read.to_dict()
    for one in (ours, theirs):
        del one["spec"]["replicatedJobs"][0]["template"]
    assert theirs == ours


def check_job(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(inner(manifest), "1.30", strict=True)


@pytest.mark.pairs
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("more", [[], ["--pvc=runs:/mnt", "--secret=a", "--secret=b", "--service_account=train"]])
def test_both_validators_accept(capsys, target: str, more: list[str]) -> None:
    manifest = dry(capsys, f"--target={target}", *more)
    check_job_set(manifest)
    check_job(manifest)


@pytest.mark.pairs
def test_validators_catch_different_errors(capsys) -> None:
    manifest = dry(capsys, "--target=2xv5e-256")
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["replicatedJobs"][0]["replicas"] = "2"  # outside the Job
    check_job(wrong)
    with pytest.raises(ValidationError, match="replicas"):
        check_job_set(wrong)
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["failurePolicy"]["maxRestart"] = 3
    check_job(wrong)
    with pytest.raises(AssertionError):
        check_job_set(wrong)
    wrong = copy.deepcopy(manifest)
    pod(wrong)["hostNetwrok"] = pod(wrong).pop("hostNetwork")  # inside the Job, an unknown field
    check_job_set(wrong)
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetwrok"):
        check_job(wrong)


def test_slices(capsys) -> None:
    manifest = dry(
        capsys, "--target=2xv5e-256", "--config.trainer.max_steps=7", "--save_seconds", "90", "--resume=must"
    )
    assert manifest["metadata"]["name"] == "my-run-1"
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (2, 64, 64, 0)
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4, 8]
    assert manifest["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert pod(manifest)["terminationGracePeriodSeconds"] == 90
    assert pod(manifest)["restartPolicy"] == "Never"
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "16x16",
    }
    (container,) = pod(manifest)["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    flags = ["--workdir=gs://bucket/runs/My_Run.1", "--config.trainer.max_steps=7", "--resume=must"]
    assert container["command"] == ["python", "-m", "plimsoll", "train", TINY, *flags]
    env = {one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]}
    assert env == {
        "MEGASCALE_COORDINATOR_ADDRESS": "my-run-1-slice-0-0.my-run-1",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "metadata.labels['jobset.sigs.k8s.io/job-index']",
    }


# target -> (replicas, hosts per replica, chips per host, topology)
SHAPES = {
    "v5e-8": (1, 1, 8, "2x4"),
    "v5litepod-16": (1, 4, 4, "4x4"),
    "v5p-2048": (1, 256, 4, "8x8x16"),
    "3xv6e-16": (3, 4, 4, "4x4"),
    "h200x16": (1, 2, 8, None),
    "h100x4": (1, 1, 4, None),
}


@pytest.mark.pairs
@pytest.mark.parametrize("target", SHAPES)
def test_shapes(capsys, target: str) -> None:
    replicas, hosts, chips, topology = SHAPES[target]
    manifest = dry(capsys, f"--target={target}")
    (job,) = manifest["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (replicas, hosts)
    assert list(pod(manifest)["containers"][0]["resources"]["limits"].values()) == [chips]
    assert pod(manifest)["nodeSelector"].get("cloud.google.com/gke-tpu-topology") == topology


def test_gpu_nodes_find_each_other_by_jax_variables(capsys) -> None:
    manifest = dry(capsys, "--target=h200x16", "--name=big")
    env = {one["name"]: one for one in pod(manifest)["containers"][0]["env"]}
    assert env["JAX_COORDINATOR_ADDRESS"]["value"] == "big-node-0-0.big:8476"
    assert env["JAX_NUM_PROCESSES"]["value"] == "2"
    assert "job-completion-index" in env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert "env" not in pod(dry(capsys, "--target=h200x8"))["containers"][0]  # a single process needs none
    assert pod(manifest)["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]


def test_secrets_are_referenced_by_name(capsys, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    manifest = dry(capsys, "--target=v5e-16", "--secret=wandb", "--secret", "hub")
    assert pod(manifest)["containers"][0]["envFrom"] == [
        {"secretRef": {"name": "wandb"}},
        {"secretRef": {"name": "hub"}},
    ]
    assert "hush" not in yaml.safe_dump(manifest)


def test_other_choices(capsys) -> None:
    flags = ["--queue=team", "--namespace=ml", "--service_account=sa", "--node_selector=cloud.google.com/gke-spot=true"]
    manifest = dry(capsys, "--target=v5e-16", "--pvc=claim:/runs", *flags)
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert manifest["metadata"]["namespace"] == "ml"
    assert pod(manifest)["serviceAccountName"] == "sa"
    assert pod(manifest)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod(manifest)["volumes"] == [{"name": "workdir", "persistentVolumeClaim": {"claimName": "claim"}}]
    assert pod(manifest)["containers"][0]["volumeMounts"] == [{"name": "workdir", "mountPath": "/runs"}]


WRONG = [
    (["--target=v5e-17"], "nearest: v5e-16, v5e-32"),
    (["--target=v5x-16"], "unknown target 'v5x-16'"),
    (["--target=cpu:8"], "GKE only has nodes with v4, v5e"),
    (["--target=v5e-16", "--name=My_Run"], "--name=My_Run: expected 1 to 40 characters from a-z"),
    (["--target=v5e-16", "--pvc=claim"], "expected CLAIM:/PATH"),
    (["--target=v5e-16", "--node_selector=spot"], "expected KEY=VALUE"),
    (["--target=v5e-16", "--imge=x"], "did you mean '--image'?"),
    (["--target=v5e-16", "--config.trainer.max_stps=1"], "did you mean 'max_steps'?"),
    ([], "the following arguments are required: --target"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_wrong_usage_applies_nothing(capsys, monkeypatch, tmp_path: Path, flags: list[str], message: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([TINY, "--workdir=gs://bucket/a", "--image=i", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_workdir_on_pod_local_disk_is_refused(capsys) -> None:
    flags = [TINY, "--image=i", "--target=v5e-16", "--dry_run"]
    assert main([*flags, "--workdir=runs/a"]) == 2
    assert "would be deleted with its pod; use gs://BUCKET" in capsys.readouterr().err
    assert main([*flags, "--workdir=/runs/a", "--pvc=c:/run"]) == 2
    assert main([*flags, "--workdir=/run/a", "--pvc=c:/run"]) == 0


def test_it_is_applied_by_kubectl(capfd, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\necho "$@"\ncat > {tmp_path}/applied\nexit 7\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    flags = [TINY, "--workdir=gs://bucket/a", "--image=i", "--target=v5e-16"]
    assert main(flags) == 7  # kubectl's exit code
    assert capfd.readouterr().out == "apply -f -\n"
    assert main([*flags, "--dry_run"]) == 0
    assert yaml.safe_load((tmp_path / "applied").read_text()) == yaml.safe_load(capfd.readouterr().out)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(flags) == 2
    assert "kubectl is not installed on this machine" in capfd.readouterr().err
