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
import spot
import torch
import two_hosts
from spot import APART, Agent, losses_of, said, script, wait_for_steps
from two_hosts import HOSTS, Hosts, states, train, wait_for

import ranks
from assertions import same
from examples import EXAMPLES

ROOT = Path(__file__).parents[2]
on_hosts = pytest.mark.skipif(bool(two_hosts.problem()), reason=two_hosts.problem() or "it can be run")

FAILING = ["1", "2", "3"]

SCRIPT = (EXAMPLES / "train.sbatch").read_text()
PAGES = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]


def launches(pattern: str, *texts: str) -> set[str]:
    """What torchrun is given in these texts, with nothing of a line's end."""
    lines = (re.sub(r"\\\n *", "", text) for text in texts)
    return {one for text in lines for one in re.findall(rf"torchrun ({pattern} .*?) train\.py", text)}


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# A signal reaches each process of a job's steps, and the batch script not.
SCANCEL = """
told() {{
    for child in $(cat /proc/$1/task/$1/children); do told $child; done
    kill -USR1 $1
}}
[ "$*" = "--signal=USR1 7" ] && for step in $(cat {folder}/steps); do told $step; done
"""


def slurm(folder: Path, hosts: Hosts, script: str) -> subprocess.Popen[bytes]:
    """Runs a batch script as Slurm would on the two hosts: `srun` starts its command on each."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    each = "\n".join(f'{hosts.command(name)} "$@" & steps="$steps $!"' for name in HOSTS)
    wait = "for step in $steps; do wait $step || code=$?; done"
    keep = f"echo $steps > {folder}/steps; {wait}; echo ${{code:-0}} > {folder}/srun"
    executable(tools / "srun", f"{each}\n{keep}")
    names = f"printf '%s\\n' {' '.join(HOSTS)}"
    executable(tools / "scontrol", f'case $1 in show) {names} ;; requeue) echo "$2" > {folder}/requeued ;; esac')
    executable(tools / "scancel", SCANCEL.format(folder=folder))
    executable(tools / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    (folder / "job.sh").write_text(script)
    environment = {
        **os.environ,
        **APART,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": str(len(HOSTS)),
        "SLURM_JOB_NODELIST": "[first-host,second-host]",
    }
    with (folder / "log").open("wb") as log:
        job = ["bash", "job.sh"]
        return subprocess.Popen(job, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)


def test_the_pages_give_one_command():
    """What runs on each machine is what Slurm's script runs, with the names that Slurm knows."""
    (command,) = launches(r'--nnodes "\$SLURM_NNODES"', SCRIPT)
    by_hand = command.replace('"$SLURM_NNODES"', "4").replace('"$first"', "first-host")
    given = launches(r"--nnodes \d", *PAGES)
    assert given and {one.replace(" --max-restarts 3", "") for one in given} == {
        by_hand.replace(" --max-restarts 3", "")
    }


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(400)
@on_hosts
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


def job_ends(hosts: Hosts, folder: Path, batch: str, told_after: int | None = None) -> bool:
    """Whether the job was requeued. told_after: steps after which Slurm tells the batch script that its time ends."""
    job, log = slurm(folder, hosts, batch), folder / "log"
    try:
        if told_after is not None:
            wait_for(lambda: len(said(log)) > told_after or job.poll() is not None)
            job.send_signal(signal.SIGUSR1)
        job.wait(100)
        assert (folder / "srun").read_text() == "0\n", log.read_text()  # no torchrun has ended by the signal
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
    return (folder / "requeued").exists()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(400)
@on_hosts
def test_before_slurm_ends_a_job_its_ranks_save_and_it_goes_on_later_with_the_same_bits(tmp_path):
    hosts = Hosts(tmp_path)
    train = f"{script(tmp_path, seconds=0.05)} {tmp_path}/run 3 200 1000"
    batch = SCRIPT.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("train.py", train)
    try:
        assert job_ends(hosts, tmp_path / "first", batch, told_after=20)
        assert not job_ends(hosts, tmp_path / "second", batch)
    finally:
        hosts.end()
    logs = [tmp_path / name / "log" for name in ("first", "second")]
    with Agent("--standalone --nproc-per-node 2", script(tmp_path), tmp_path / "whole", 3, 200, 1000) as undisturbed:
        assert undisturbed.process.wait(100) == 0
    assert said(*logs) == said(undisturbed.log)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(400)
@on_hosts
def test_a_host_is_lost_and_the_other_goes_on_alone(tmp_path):
    """Nothing tells of it but time: what is sent is lost. The hosts know themselves by a loopback address alone, and
    are told the interface."""
    (launch,) = launches("--nnodes 1:4", *PAGES)
    launch = launch.replace("1:4", "1:2").replace("--nproc-per-node 8", "--nproc-per-node 1")
    launch += " --rdzv-conf last_call_timeout=10"
    given = [script(tmp_path, seconds=0.1, timeout=10), tmp_path / "run", 3, 1000, 20]
    hosts = Hosts(tmp_path, know_themselves=False)
    how = {**APART, "GLOO_SOCKET_IFNAME": "link0"}
    try:
        with (
            Agent(launch, *given, before=hosts.command("first-host"), **how) as first,
            Agent(launch, *given, before=hosts.command("second-host"), **how) as second,
        ):
            spot.wait_for(lambda: 2 in first.worlds() + second.worlds(), first)
            wait_for_steps(30, first, second)
            hosts.cut()
            spot.wait_for(lambda: all("RuntimeError" in one.log.read_text() for one in (first, second)), first)
            wait_for_steps(20, first)
    finally:
        hosts.end()
    with Agent("--standalone --nproc-per-node 2", script(tmp_path), tmp_path / "whole", *given[2:]) as undisturbed:
        assert undisturbed.process.wait(100) == 0
    expected, found = losses_of(undisturbed), losses_of(first, second)
    # In an operation of zero, or in the script's own.
    says = r"RuntimeError: (rank \d failed in .+: rank \d of the group of 2 has not answered for 9 s: |.*[Tt]imed out)"
    assert all(re.search(says, one.log.read_text()) for one in (first, second))
    assert (first.worlds() or second.worlds())[-1:] == [1]
    torch.testing.assert_close(found, {step: expected[step] for step in found}, rtol=1e-3, atol=0)


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
with StoreRendezvous(store, rank, range(2), timeout) as exchange:
    group = next(gloo_groups(dist.ProcessGroupGloo, own, rank, 2, timeout, exchange.address()))
group.allreduce([number := torch.tensor(rank + 1.0)]).wait()
assert number == 3
store.set("over", "") if rank else store.wait(["over"])  # which ends with the first rank
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.faults
@on_hosts
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
