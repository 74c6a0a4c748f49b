"""docs/examples/ray_train.py by a Ray on this machine, with a worker killed at each stage."""

import ast
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import matrix
from examples import EXAMPLES
from processes import ROOT

pytestmark = [matrix.clusters("ray"), pytest.mark.timeout(300)]

STEPS, EVERY = 100, 10
# Each report of the script waits until the workers' health is looked at.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_USAGE_STATS_ENABLED": "0"}
ENVIRONMENT |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, int]]:
    """Its address, and the process of which its workers are children."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Paths of sockets have 107 bytes at most.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        options = f"--head --block --node-ip-address 127.0.0.1 --port {port} --num-cpus 2 --include-dashboard false"
        command = [Path(sys.executable).with_name("ray"), "start", *options.split(), "--temp-dir", short]
        log = Path(short, "told")
        with log.open("w") as told:
            process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=told, stderr=told)
        try:
            while "Ray runtime started" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(100)


@contextmanager
def started(cluster: tuple[str, int], folder: Path, stage: int, steps: int = STEPS) -> Iterator[subprocess.Popen[str]]:
    """The script, which prints what was reported with each checkpoint."""
    source = (EXAMPLES / "ray_train.py").read_text()
    for written, instead in (
        ('"stage": 3, "steps": 200', f'"stage": {stage}, "steps": {steps}'),
        ("num_to_keep=2", "num_to_keep=None"),
        ("trainer.fit().metrics", "[metrics for _, metrics in trainer.fit().best_checkpoints]"),
    ):
        assert source.count(written) == 1
        source = source.replace(written, instead)
    (folder / "ray_train.py").write_text(source)
    command = [sys.executable, folder / "ray_train.py", folder / "runs"]
    environment = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": cluster[0]}
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(100)


def losses(folder: Path, process: subprocess.Popen[str]) -> list[float]:
    """At its end, what each report said."""
    told, _ = process.communicate()
    assert process.returncode == 0, told + (folder / "errors").read_text()
    reports = ast.literal_eval(told.splitlines()[-1])
    assert [report["step"] for report in reports] == [*range(EVERY, reports[-1]["step"] + 1, EVERY)]
    return [report["loss"] for report in reports]


def workers(cluster: tuple[str, int]) -> list[int]:
    """Their processes."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below = {cluster[1]}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(pid for pid in below if text_of(pid).startswith("ray::RayTrainWorker"))


def text_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with started(cluster, folder, stage=0) as process:
        found = losses(folder, process)
    assert len(found) == STEPS // EVERY and found[-1] < 0.5 * found[0]
    return found


@pytest.mark.parametrize("stage", range(4))
def test_a_run_whose_worker_is_killed_reports_the_losses_of_one_that_was_not(stage, cluster, undisturbed, tmp_path):
    with started(cluster, tmp_path, stage) as process:
        while not (tmp_path / f"runs/run/checkpoints/{stage + 3:08d}/index.json").exists():
            assert process.poll() is None, (tmp_path / "errors").read_text()
            time.sleep(0.01)
        before = workers(cluster)
        os.kill(before[stage % 2], signal.SIGKILL)
        while not {*workers(cluster)} - {*before}:
            assert process.poll() is None, "the run came to its end without new workers"
            time.sleep(0.1)
        assert losses(tmp_path, process) == undisturbed


def test_a_run_that_is_started_again_goes_on(cluster, undisturbed, tmp_path):
    for steps in (STEPS // 2, STEPS):
        with started(cluster, tmp_path, 2, steps) as process:
            found = losses(tmp_path, process)
    assert found == undisturbed
