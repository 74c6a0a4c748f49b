"""Ranks on two hosts, started by the commands that the pages give; skipped where no two hosts can be made.

`make faults` sets ZERO_FAULTS=1 and runs it.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import two_hosts
from two_hosts import APART, HOSTS, Hosts, states, train, wait_for

import ranks
from assertions import same

ROOT = Path(__file__).parents[2]
FAILING = ["1", "2", "3"]

PAGE = (ROOT / "docs" / "several_machines.md").read_text()
(SCRIPT,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", PAGE, re.DOTALL)  # for Slurm


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def slurm(folder: Path, hosts: Hosts, script: str) -> subprocess.Popen[bytes]:
    """Runs a batch script as Slurm would on the two hosts: `srun` starts its command on each."""
    tools = folder / "tools"
    tools.mkdir()
    each = "\n".join(f'{hosts.command(name)} "$@" &' for name in HOSTS)
    executable(tools / "srun", f"{each}\nwait")
    executable(tools / "scontrol", f"printf '%s\\n' {' '.join(HOSTS)}")
    executable(tools / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    (folder / "job.sh").write_text(script)
    environment = {
        **os.environ,
        **APART,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "SLURM_NNODES": str(len(HOSTS)),
        "SLURM_JOB_NODELIST": "[first-host,second-host]",
    }
    with (folder / "log").open("wb") as log:
        job = ["bash", "job.sh"]
        return subprocess.Popen(job, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)


def test_the_pages_give_one_command():
    """What runs on each machine is what Slurm's script runs, with the names that Slurm knows."""
    (command,) = re.findall(r"^srun (torchrun .*)$", SCRIPT, re.MULTILINE)
    by_hand = command.replace('"$SLURM_NNODES"', "4").replace('"$first"', "first-host")
    pages = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    given = {one for page in pages for one in re.findall(r"^(torchrun --nnodes .*? train\.py)", page, re.MULTILINE)}
    assert given <= {by_hand}


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(two_hosts.problem()), reason=two_hosts.problem() or "it can be run")
def test_two_hosts_train_to_the_numbers_of_one_and_both_say_when_the_link_fails(tmp_path):
    """Full optimizer state comes, too, where the link is slow."""
    hosts = Hosts(tmp_path)
    rank_script = f"{two_hosts.__file__} {tmp_path} {' '.join(FAILING)}"
    script = SCRIPT.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("train.py", rank_script)
    try:
        job = slurm(tmp_path, hosts, script)
        try:
            wait_for_both(job, tmp_path, "trained-{}.pt")
            hosts.slow_down()
            (tmp_path / "slow").touch()
            wait_for_both(job, tmp_path, "sent-{}")
            hosts.speed_up()
            (tmp_path / "fast").touch()
            cut_at = [fail(hosts, stage, tmp_path, job) for stage in FAILING]
            job.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)  # which torchrun passes on to its ranks
            job.wait()
    finally:
        hosts.end()
    expected, expected_states = ranks.run(train, 2), ranks.run(states, 2)
    for rank, name in enumerate(HOSTS):
        host, sent_by, found = torch.load(tmp_path / f"trained-{rank}.pt", weights_only=True)
        assert (host, sent_by) == (name, "gloo")
        same(found, expected[rank])
        same(torch.load(tmp_path / f"states-{rank}.pt", weights_only=True), expected_states[rank])
        for stage, cut in zip(FAILING, cut_at, strict=True):
            told, at = json.loads((tmp_path / f"told-{stage}-{rank}").read_text())
            own = rf"rank {rank} failed in (?!a transfer).+: (another rank|rank \d) of the group of 2 has "
            assert re.match("(?!no error)" if stage == "1" else own, told), told
            assert cut < at, told


CONNECT = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from zero._torch.process_groups import gloo_groups
from zero.comm.store import StoreRendezvous
rank = int(sys.argv[1])
store = dist.TCPStore("first-host", 29417, 2, rank == 0)
timeout, own = timedelta(seconds=200), dist.PrefixStore("own", store)
with StoreRendezvous(store, rank, 2, timeout) as exchange:
    group = next(gloo_groups(dist.ProcessGroupGloo, own, rank, 2, timeout, exchange.address()))
group.allreduce([number := torch.tensor(rank + 1.0)]).wait()
assert number == 3
store.set("over", "") if rank else store.wait(["over"])  # which ends with the first rank
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.skipif(bool(two_hosts.problem()), reason=two_hosts.problem() or "it can be run")
def test_hosts_that_know_themselves_by_a_loopback_address_alone_reach_one_another(tmp_path):
    """As Debian's installer writes it; torch's own Gloo group would wait there until its timeout."""
    hosts = Hosts(tmp_path, know_themselves=False)
    try:
        commands = [f"{hosts.command(name)} {sys.executable} -c '{CONNECT}' {rank}" for rank, name in enumerate(HOSTS)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ranks_of = [subprocess.Popen(one, shell=True, env=environment, stderr=-1) for one in commands]
        for one in ranks_of:
            _, said = one.communicate(timeout=300)
            assert one.returncode == 0, said.decode()
    finally:
        hosts.end()


def wait_for_both(job: subprocess.Popen[bytes], folder: Path, file: str) -> None:
    """That each rank has written its file."""
    files = [folder / file.format(rank) for rank in range(2)]
    wait_for(lambda: all(map(Path.exists, files)) or job.poll() is not None, 300)
    assert job.poll() is None, (folder / "log").read_text()


def fail(hosts: Hosts, stage: str, folder: Path, job: subprocess.Popen[bytes]) -> float:
    """Cuts the link while both train at a stage, until both have said so. When that was."""
    wait_for_both(job, folder, f"training-{stage}-{{}}")
    time.sleep(0.2)
    hosts.cut()
    cut = time.monotonic()
    wait_for(lambda: all((folder / f"told-{stage}-{rank}").exists() for rank in range(2)))
    hosts.mend()
    (folder / f"mended-{stage}").touch()
    return cut
