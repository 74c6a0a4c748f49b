"""docs/examples/kubernetes.yaml by the schema of Kubeflow Trainer, and its command as two pods would run it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import matrix
from examples import EXAMPLES
from processes import ROOT

pytestmark = [matrix.clusters("kubeflow_trainer_api"), pytest.mark.timeout(300)]

DOCUMENTS = {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}
RUNTIME, JOB = DOCUMENTS["TrainingRuntime"], DOCUMENTS["TrainJob"]


def test_it_is_what_the_schema_of_kubeflow_trainer_says():
    from kubeflow_trainer_api import models

    kinds = {
        "PersistentVolumeClaim": models.IoK8sApiCoreV1PersistentVolumeClaim,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    assert DOCUMENTS.keys() == kinds.keys()
    for kind, written in DOCUMENTS.items():
        assert kinds[kind].from_dict(written).to_dict() == written  # what the schema lacks is not in it


def test_its_names_fit():
    assert JOB["spec"]["runtimeRef"] == {"kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    (replicated,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # By these Trainer finds the container to which it gives what the TrainJob says.
    assert replicated["name"] == container["name"] == "node"
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["name"]: Path(one["mountPath"]) for one in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    claim = volumes["runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == DOCUMENTS["PersistentVolumeClaim"]["metadata"]["name"]
    job = JOB["spec"]["trainer"]
    assert Path(job["args"][1]).is_relative_to(mounts["runs"])
    assert int(job["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == job["numProcPerNode"]
    given = {one["name"]: one["value"] for one in job["env"]}
    assert 30 < int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


def pods(folder: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    """The job's command on each node, with what Trainer sets, and train.py as the comment says."""
    job = JOB["spec"]["trainer"]
    written = (EXAMPLES / "resume.py").read_text()
    assert "(3, 1000, 10)" in written
    (folder / "train.py").write_text(written.replace("(3, 1000, 10)", f"(3, {steps}, 10)"))
    assert job["command"] == ["torchrun"]
    arguments = [one.replace("/runs/", f"{folder}/") for one in job["args"]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given: dict[str, Any] = {one["name"]: one["value"] for one in job["env"]}
    given |= {"PET_NNODES": job["numNodes"], "PET_NPROC_PER_NODE": job["numProcPerNode"]}
    given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    given |= {"PYTHONPATH": ROOT, "ZERO_LOG": "info"}
    started = []
    for node in range(job["numNodes"]):
        environment = {**os.environ, **{key: str(value) for key, value in {**given, "PET_NODE_RANK": node}.items()}}
        with (folder / f"told {node}").open("w") as told:
            command = [sys.executable, "-m", "torch.distributed.run", *arguments]
            started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=told, stderr=told))
    return started


def last(folder: Path) -> dict[str, Any]:
    run = folder / Path(JOB["spec"]["trainer"]["args"][1]).name
    return json.loads((run / (run / "latest").read_text().strip() / "index.json").read_text())


def test_a_pod_that_is_evicted_saves_all_and_the_next_start_goes_on(tmp_path):
    first, second = pods(tmp_path, 10**6)
    try:
        while "FSDP(" not in (tmp_path / "told 0").read_text():
            assert first.poll() is None and second.poll() is None, (tmp_path / "told 0").read_text()
            time.sleep(0.1)
        second.send_signal(signal.SIGTERM)
        assert second.wait(100) and first.wait(100)  # neither is 0: the Job fails, and JobSet starts it again
    finally:
        for pod in (first, second):
            pod.kill()
            pod.wait()
    saved = last(tmp_path)
    assert saved["world"] == 4 and 0 < saved["extra"]["step"] < 10**6
    more = (saved["extra"]["step"] // 10 + 1) * 10  # of which it saves the last
    assert [pod.wait(100) for pod in pods(tmp_path, more)] == [0, 0]
    assert last(tmp_path)["extra"]["step"] == more
