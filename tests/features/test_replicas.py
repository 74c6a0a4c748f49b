"""zero.fault_tolerant: replicas are killed at any place of a step, others join, and all train to the numbers of one
process that takes the same steps with the replicas that were there.

`make faults` sets ZERO_FAULTS=1 and kills ten times in a run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from replicated import Death, Run, Served, batch, build, doomed, ended, loss_of, replicate, trained_alone
from zero.features.replicas.coordinator import Coordinator
from zero.features.replicas.membership import Membership

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "replicas.py"
WHOLE = bool(os.environ.get("ZERO_FAULTS"))
PLACES = ["forward", "backward", "averaging", "averaged", "step"]


def deaths(replicas: int, shards: int, number: int) -> tuple[Death, ...]:
    places = itertools.islice(itertools.cycle(PLACES), number)
    return tuple(Death(n % replicas, (n + 1) % shards, place) for n, place in enumerate(places))


def assert_as_alone(run: Run) -> list[list[str]]:
    """That all replicas end with the losses and weights of one process. Returns the names of each step."""
    found = replicate(run)
    errors = [str(one) for one in found.values() if isinstance(one, ranks.RankError)]
    assert len(errors) == (0 if run.restarts else len(run.deaths)), "\n".join(errors)
    of_ranks = {name: returned for name, returned in found.items() if not isinstance(returned, ranks.RankError)}
    history = next(iter(of_ranks.values()))[0][0].history
    ((expected, weights),) = ranks.run(trained_alone, args=(run, history), bare=True)
    for name, returned in of_ranks.items():
        _, losses, _ = returned[0]
        assert losses
        assert losses == {step: expected[step, name] for step in losses}
        for progress, _, own in returned:
            assert progress.history == history
            assert all(torch.equal(own[key], weight) for key, weight in weights.items() if "running" not in key)
        first = returned[0][2]
        assert all(torch.equal(first[key], weight) for key, weight in weights.items())
    return history


CASES = [(1, 3, 1, "sgd"), (2, 2, 2, "sgd"), (3, 2, 2, "adam")]
ALL = [(stage, *layout, "adam") for stage in (1, 2, 3) for layout in ((2, 2), (3, 1))]


@pytest.mark.parametrize(("stage", "replicas", "shards", "optimizer"), ALL if WHOLE else CASES)
def test_replicas_are_killed_and_join_again_and_all_train_as_one_process(stage, replicas, shards, optimizer):
    number = 10 if WHOLE else 5
    run = Run(replicas, shards, stage, deaths(replicas, shards, number), optimizer)
    history = assert_as_alone(run)
    assert len({name for names in history for name in names}) == replicas + number


def test_others_join_from_another_replica_if_the_one_that_sends_its_state_dies_or_a_joining_one():
    run = Run(3, 1, 3, (Death(0, 0, "forward"), Death(0, 0, "sending")), stillborn=("b1",))
    history = assert_as_alone(run)
    assert history[-1][:2] == ["c0", "a1"]


def test_without_restarts_fewer_replicas_train_on():
    history = assert_as_alone(Run(3, 1, 3, (Death(0, 0, "averaging"), Death(1, 0, "step")), "sgd", restarts=False))
    assert [names for names, _ in itertools.groupby(history)] == [["a0", "b0", "c0"], ["b0", "c0"], ["b0"]]


# ----------------------------------------------------------------------------------------- what a step may consist of


class Branches(nn.Module):
    """The first replica alone uses one layer, the second replica alone another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        return self.layers[branch](self.shared(inputs))


def loss_of_branch(model: nn.Module, step: int, micro: int, branch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(8 * step + 4 * micro + 2 * branch + rank)
    loss = model(torch.randn(6, 4, generator=generator), branch).square().sum()
    return loss * (torch.inf if (step, branch, rank) == (1, 0, 0) else 1)  # that step is skipped


def steps_of_branches(rank: int, world: int, port: int, letter: str, stage: int) -> tuple[dict[str, Tensor], float]:
    model: nn.Module = Branches()
    if stage == 1:
        model = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer: torch.optim.Optimizer = zero.OSS(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    else:
        model, optimizer = zero.setup(model, torch.optim.SGD, stage=stage, lr=0.1, momentum=0.9)
    scaler = zero.GradScaler("cpu", init_scale=4.0)
    replicas = zero.fault_tolerant(model, optimizer, f"localhost:{port}", name=letter)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            with zero.no_sync(model) if micro == 0 else nullcontext():
                scaler.scale(loss_of_branch(model, step, micro, replicas.index, rank)).backward()
        scaler.unscale_(optimizer)
        zero.clip_grad_norm_(model, optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert replicas.step == 3
    return zero.full_state_dict(model), scaler.get_scale()


def branches_alone(rank: int, world: int) -> dict[str, Tensor]:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2, 3):
        optimizer.zero_grad()
        for micro, branch, of_replica in itertools.product(range(2), range(2), range(2)):
            (loss_of_branch(model, step, micro, branch, of_replica) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulated_gradients_are_averaged_before_they_are_unscaled_and_clipped_and_all_skip_the_same_step(stage):
    with Served(2) as served:
        found = ended(steps_of_branches, served, {"a": 2, "b": 2}, stage)
    (expected,) = ranks.run(branches_alone, bare=True)
    for weights, scale in (of_rank for of_ranks in found.values() for of_rank in of_ranks):
        assert scale == 2.0
        torch.testing.assert_close(weights, expected)


def masters_of_both(rank: int, world: int, port: int, letter: str) -> list[Tensor]:
    """Trains for some steps with another replica. Returns the weights, masters and optimizer state."""
    options: dict[str, Any] = {"master_dtype": torch.float32, "offload": zero.CPUOffload(), "lr": 0.02}
    model, optimizer = zero.setup(build().to(torch.bfloat16), torch.optim.Adam, stage=2, **options)
    replicas, together = zero.fault_tolerant(model, optimizer, f"localhost:{port}", name=letter), 0
    while together < 4:
        loss_of(model(batch(replicas.step, letter + "0", rank).to(torch.bfloat16))).backward()
        optimizer.step()
        optimizer.zero_grad()
        together += replicas.count == 2
    states = zero.full_optimizer_state_dict(model, optimizer)["state"].values()
    weights = [value for name, value in zero.full_state_dict(model).items() if name.endswith(("weight", "bias"))]
    return [*weights, *(value for state in states for value in state.values())]


def test_a_replica_that_joins_has_the_masters_and_the_offloaded_state():
    with Served(1) as served:
        found = ended(masters_of_both, served, {"a": 2, "b": 2})
    first, *others = [returned for of_ranks in found.values() for returned in of_ranks]
    assert len(first) > 20
    for other in others:
        assert all(map(torch.equal, first, other))


# ----------------------------------------------------------------------------------------------- what cannot go on


def until_the_end(rank: int, world: int, port: int, letter: str, act: str) -> str:
    """Trains until an error, of which the text is returned. At step 2 there happens what `act` says."""
    model, optimizer = zero.setup(build(), torch.optim.SGD, stage=2 if (act, letter) == ("stages", "b") else 3, lr=0.1)
    names: list[list[str]] = []
    try:
        replicas = zero.fault_tolerant(model, optimizer, f"localhost:{port}", name=letter)
        while replicas.step < (5 if act != "coordinator" else 100_000):
            due = replicas.step == 2
            if due and (act, letter) == ("stopped", "b"):
                with subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"]):
                    os.kill(os.getpid(), signal.SIGSTOP)
            backwards = 2 if due and (act, letter) == ("twice", "b") else 1
            with doomed(model, optimizer, "averaged" if due and act == "gone" and "ab"[rank] == letter else ""):
                for _ in range(backwards):
                    loss_of(model(batch(replicas.step, letter + "0", rank))).backward()
            names.append([*replicas.names])
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"trained with {[group for group, _ in itertools.groupby(names)]}"


def how_it_ended(act: str, a: int = 1, b: int = 1, **options: float) -> dict[str, list[str]]:
    with Served(2, **options) as served:
        if act == "coordinator":
            served.end_soon()
        return ended(until_the_end, served, {"a": a, "b": b}, act)


def test_a_rank_that_is_stopped_is_taken_for_lost_and_told_so_when_it_runs_again():
    found = how_it_ended("stopped", timeout=1.0)
    assert found["a"] == ["trained with [['a', 'b'], ['a']]"]
    assert found["b"][0].startswith("RuntimeError: replica b cannot go on: it has not come where others wait for 1 s.")


@ranks.on(1, fresh=True)
def test_a_connection_ends_with_its_process_although_a_process_that_was_forked_lives_on(rank, world):
    with socket.create_server(("localhost", 0)) as server:
        membership = Membership(f"localhost:{server.getsockname()[1]}", "key", "a", 0, 1)
        connection, _ = server.accept()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(writes)
        os.read(reads, 1)  # until the parent closes its end, or ends
        os._exit(0)
    del membership
    connection.settimeout(10)
    with connection:
        while connection.recv(1024):
            pass
    os.close(writes)
    os.waitpid(child, 0)
    os.close(reads)


def test_when_no_replica_has_all_shards_the_ranks_that_live_are_told():
    found = how_it_ended("gone", 2, 2)
    killed, (last, first) = [found["a"][0], found["b"][1]], sorted([found["a"][1], found["b"][0]], key=len)[::-1]
    assert killed == ["died with exit code -9"] * 2
    assert "has ended. The others go on without it. Start it again, and it joins them." in first
    assert "No replica is left that has all shards of the training state." in last


def test_when_the_coordinator_ends_all_ranks_are_told():
    found = how_it_ended("coordinator", 2, 1 + 1)
    for text in found["a"] + found["b"]:
        assert "coordinator of replicas at localhost:" in text
        assert "Start it and the replicas again, from the last checkpoint." in text


def test_a_replica_that_is_built_otherwise_does_not_join():
    found = how_it_ended("stages")
    assert found["a"] == ["trained with [['a']]"]
    assert found["b"][0].startswith("ValueError: this replica differs from those that train: another model, stage,")


def test_replicas_that_run_other_backwards_are_told():
    found = how_it_ended("twice")
    for text in found["a"] + found["b"]:
        assert "out of step: they are in average at step 2 and in average at step 3. All must run as many" in text


# ------------------------------------------------------------------------------------------------------ under torchrun


def start(*command: str, **how: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *command], env=environment, text=True, **how)


def ranks_of(torchrun: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    return [int(child) for child in children if "slower.py" in Path(f"/proc/{child}/cmdline").read_text()]


def test_the_command_serves_until_no_replica_is_left():
    served = start("-m", "zero.features.replicas", "--port", "0", stdout=PIPE, stderr=PIPE)
    try:
        membership = Membership(f"localhost:{served.stdout.readline().split()[1]}", "key", "a", 0, 1)
        assert membership.run("join", 0, lambda this: this.members) == ["a"]
        del membership
        assert served.wait(30) == 0
    finally:
        served.kill()
        _, told = served.communicate()
    assert told == "a joined; 1 replicas train\nreplica a is gone: rank 0 has ended; 0 train\n"


@pytest.mark.timeout(600)
@pytest.mark.skipif(not WHOLE, reason="make faults runs it; above, replicas are killed without torchrun")
def test_under_torchrun_replicas_that_are_killed_start_again_and_end_with_the_same_weights(tmp_path):
    script, step = tmp_path / "slower.py", "        schedule.step()\n"  # so that others still train after a restart
    script.write_text(SCRIPT.read_text().replace(step, f"{step}        __import__('time').sleep(0.01)\n"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "9"]
    served = start("-m", "zero.features.replicas", "--port", "0", "--replicas", "2", stdout=PIPE, stderr=PIPE)
    address = f"localhost:{served.stdout.readline().split()[1]}"
    options = ["--steps", "3000"]
    jobs = {name: start(*launcher, str(script), address, name, *options, cwd=tmp_path) for name in ("a", "b")}
    try:
        for victim in ("a", "b", "a", ""):
            assert any("2 replicas train" in line for line in served.stderr)
            for rank in ranks_of(jobs[victim])[-1:] if victim else ():
                os.kill(rank, signal.SIGKILL)
        assert [job.wait(300) for job in jobs.values()] == [0, 0]
    finally:
        for process in (*jobs.values(), served):
            process.terminate()
            process.communicate()
    first, second = (torch.load(tmp_path / f"weights-{name}.pt", weights_only=True) for name in jobs)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


# -------------------------------------------------------------------------------------- the coordinator without ranks


class Rank:
    """The only rank of a replica, which says what a test lets it say. `told`: what the coordinator has said."""

    def __init__(self, coordinator: Coordinator, name: str, size: int = 1) -> None:
        self.told: list[dict[str, Any]] = []
        self._reader = asyncio.StreamReader()
        self._task = asyncio.create_task(coordinator.serve(self._reader, self))
        self._say({"enter": name, "name": name, "rank": 0, "size": size})

    def _say(self, message: dict[str, Any]) -> None:
        self._reader.feed_data(json.dumps(message).encode() + b"\n")

    async def says(self, **message: Any) -> dict[str, Any]:
        """Returns what it is told last."""
        self._say(message)
        await asyncio.sleep(0.01)
        return self.told[-1] if self.told else {}

    def write(self, line: bytes) -> None:
        self.told.append(json.loads(line))

    def close(self) -> None:
        pass


async def rounds_that_fail() -> None:
    coordinator = Coordinator(2, 30.0, 1)
    first, second = Rank(coordinator, "a"), Rank(coordinator, "b")
    for number in (1, 2, 3):
        await first.says(ready="join", step=0)
        begun = await second.says(ready="join", step=0)
        assert (begun["go"], begun["generation"], begun["joining"]) == (number, number, [1])
        await first.says(failed=number, why="no route")
        assert {"abort": number} in second.told
    for rank in (first, second):
        assert rank.told[-1]["error"] == "3 rounds failed although no replica was lost. The last error: no route"
    assert coordinator.over.is_set()


def test_rounds_that_fail_are_repeated_with_new_groups_but_not_for_ever():
    asyncio.run(rounds_that_fail())


async def a_replica_of_two_ranks_beside_one_of_one() -> None:
    coordinator = Coordinator(1, 30.0, 1)
    assert (await Rank(coordinator, "a").says(ready="join", step=0))["members"] == ["a"]
    told = await Rank(coordinator, "b", size=2).says(ready="join", step=0)
    assert "it has 2 ranks, and replica a has 1. Start all replicas with the same number of ranks." in told["error"]


def test_replicas_of_other_sizes_are_refused():
    asyncio.run(a_replica_of_two_ranks_beside_one_of_one())


async def a_rank_that_is_silent_when_others_are_done() -> None:
    coordinator = Coordinator(2, 0.1, 1)
    first, second = Rank(coordinator, "a"), Rank(coordinator, "b")
    await first.says(ready="join", step=0)
    await second.says(ready="join", step=0)
    await first.says(done=1)
    await second.says(done=1)
    await first.says(ready="average", step=0)
    assert (await second.says(ready="average", step=0))["go"] == 2
    await first.says(done=2)
    await asyncio.sleep(0.2)
    assert second.told[-1]["error"].startswith("replica b cannot go on: it has not come where others wait")
    assert first.told[-1] == {"abort": 2}
    assert (await first.says(ready="average", step=0))["members"] == ["a"]


def test_a_rank_that_does_not_say_that_it_is_done_is_lost():
    asyncio.run(a_rank_that_is_silent_when_others_are_done())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("Linear", "was given a Linear and a SGD. Pass a model and its optimizer of stage 1, 2 or 3"),
        ("address", "coordinator='29400' is no address. Pass host:port"),
        ("nobody", "no coordinator of replicas answers at localhost:1 .* Start it first: python -m"),
        ("in backward", "and zero.step_in_backward, which was called before .*, steps parameters.* Call only one"),
    ],
)
@ranks.on(1)
def test_what_cannot_be_replicated_is_refused(rank, world, given, text):
    model, optimizer = zero.setup(nn.Linear(4, 4), torch.optim.SGD, stage=3, lr=0.1)
    if given == "Linear":
        model = nn.Linear(4, 4)
    if given == "in backward":
        zero.step_in_backward(model, optimizer)
    with pytest.raises(RuntimeError if given == "nobody" else ValueError, match=text):
        zero.fault_tolerant(model, optimizer, "29400" if given == "address" else "localhost:1")


def refused_after_it(rank: int, world: int, port: int, letter: str, stage: int) -> list[str]:
    model, optimizer = zero.setup(nn.Linear(4, 4), torch.optim.SGD, stage=stage, lr=0.1)
    address = f"localhost:{port}"
    zero.fault_tolerant(model, optimizer, address)
    calls = [lambda: zero.step_in_backward(model, optimizer), lambda: zero.fault_tolerant(model, optimizer, address)]
    return [ranks.refusal(call) for call in calls]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_replica_is_not_stepped_before_gradients_are_averaged_and_is_one_only_once(stage):
    with Served(1) as served:
        in_backward, again = ended(refused_after_it, served, {"a": 1}, stage)["a"][0]
    assert "zero.fault_tolerant, which was called before" in in_backward and "averages gradients" in in_backward
    assert in_backward.endswith("Call only one of them.")
    assert again == "ValueError: zero.fault_tolerant was called before for this model and optimizer. Call it once."
