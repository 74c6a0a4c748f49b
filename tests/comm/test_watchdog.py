"""The watchdog: a rank that waits in vain, even in a wait for the device, is told within seconds who is missing.

A wait for the device is an event that only aborting the transfers sets, as NCCL's abort ends the kernels that a host
waits for. On GPUs (`make gpu`) NCCL itself is aborted.
"""

import atexit
import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import gpus
import ranks
import zero
from inner import Comm
from matrix import WHOLE, only
from runs import sgd, take_step
from transports import TRANSPORTS, between_hosts, by, overlapping
from zero.comm import waiting, watchdog
from zero.comm.forked import held
from zero.comm.oplog import Log
from zoo import WIDTH, Stack, loss_on

VICTIM = 1
TIMEOUT = 2.0


def ends_with_an_error() -> None:
    """As the interpreter does after an error that nobody catches."""
    sys.last_value = ValueError("no more data")
    atexit._run_exitfuncs()
    os._exit(1)


WAYS: dict[str, tuple[Any, str]] = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 .* has stopped"),
    "ended by an error": (ends_with_an_error, "rank 1 .* has ended with ValueError: no more data"),
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "rank 1 .* has not answered"),
    "elsewhere": (lambda: time.sleep(90), "rank 1 .* has not reached"),
}


def waits_for_the_device(rank: int, world: int, way: str) -> tuple[str, str]:
    """What the wait for the device ended with, and what the next call says."""
    store = dist.distributed_c10d._get_default_store()
    if rank == VICTIM:
        store.set("victim", str(os.getpid()))
    with overlapping(returns_work=False):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        comm = Comm(group)
        full, channel, other = torch.zeros(3), comm.channel("the gather of a unit"), comm.channel("another operation")
        for _ in range(3):
            comm.log.begin_schedule()
            comm.gather(full, range(4), channel).wait()
        if rank == VICTIM:
            time.sleep(0.5)  # the others may still wait for what it has sent
        if rank == VICTIM and way != "another operation":
            WAYS[way][0]()
        aborted = threading.Event()
        comm.log.failure.at_failure.append(lambda reason: aborted.set())
        if rank == VICTIM:
            comm.log.append(other, 12, lambda channel: None)
        else:
            comm.log.append(channel, 12, lambda channel: None)  # launched, so that the device waits in it
        ended = aborted.wait(60)  # at once, unless nobody aborts it
        told = ranks.refusal(lambda: comm.gather(full, range(4), channel))
        if way in ("stopped", "elsewhere") and store.add("told", 1) == world - 1:
            os.kill(int(store.get("victim")), signal.SIGKILL)  # for which the test would wait
        return ended, told


def outcomes(way: str) -> list[tuple[bool, str]]:
    try:
        return ranks.run(waits_for_the_device, 3, args=(way,), timeout=90, fresh=True)
    except ranks.RankError as error:
        return [outcome.value for rank, outcome in enumerate(error.outcomes) if rank != VICTIM]


@pytest.mark.slow
@pytest.mark.matrix
@gpus.cpu_only("an event stands for the wait for the device")
@pytest.mark.parametrize("way", [*WAYS, "another operation"] if WHOLE else ["ended by an error", "elsewhere"])
def test_a_host_that_waits_for_the_device_is_told_which_rank_is_missing_or_elsewhere(way):
    elsewhere = ("rank 1 (is )?in another operation", "rank [02] (is )?in the gather of a unit")
    words = ("rank [02] failed in the gather of a unit", WAYS[way][1]) if way in WAYS else elsewhere
    for ended, told in outcomes(way):
        assert ended, "the device still waits"
        assert all(re.search(word, told) for word in words), told


@only
@ranks.on(3)
def test_ranks_that_all_take_their_time_and_one_that_is_a_little_late_are_not_told(rank, world):
    with overlapping(returns_work=False):
        comm = Comm(dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
        full, channel = torch.zeros(3), comm.channel("the gather of a unit")
        comm.log.begin_schedule()
        comm.gather(full, range(4), channel).wait()
        time.sleep(TIMEOUT + 0.2 + 0.9 * (rank == 1))
        comm.agree(0)


SLIP = 4
"""The step in which a rank goes wrong: those before have settled the schedule, so that no host waits for another."""

SLIPS: dict[str, tuple[Any, str]] = {
    "killed": (WAYS["killed"][0], "rank [02] failed in .*unit.*: rank 1 .* has stopped"),
    "stopped": (WAYS["stopped"][0], "rank [02] failed in .*unit.*: rank 1 .* has not answered"),
    "skips a backward": (None, r"ranks are out of step: .*rank 1 (is )?in .*unit"),
}


def reads_its_losses(rank: int, world: int, way: str, timeout: float) -> None:
    """Trains at stage 3. After each forward the host waits for the device, in which others may be waited for."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = zero.FSDP(layers, process_group=group, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(SLIP + 3):
        slips = rank == VICTIM and step == SLIP
        if slips and way != "skips a backward":
            SLIPS[way][0]()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.item()
        if slips:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@gpus.gpu_only("over Gloo no host waits for a device")
@pytest.mark.parametrize("way", SLIPS)
def test_ranks_that_wait_for_the_gpu_end_with_an_error_that_names_rank_and_unit(way, monkeypatch):
    """Not by SIGABRT: NCCL's own watchdog ends a process at the time-out."""
    monkeypatch.setattr(ranks, "GRACE", 20.0)
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(reads_its_losses, 3, args=(way, 10.0), fresh=True)
    for rank, outcome in enumerate(raised.value.outcomes):
        if rank != VICTIM:
            assert "RuntimeError" in outcome.types, f"{outcome.verdict}\n{outcome.detail}"
            assert re.search(SLIPS[way][1], outcome.message), outcome.message


def within_a_minute(condition: Callable[[], Any]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())


@ranks.on(2)
def test_nothing_is_left_of_a_watchdog_whose_group_is_gone(rank, world):
    """Nor is an error told that ended something else before, as in a notebook."""
    with between_hosts(), mock.patch.object(sys, "last_value", ValueError("earlier"), create=True):
        before, group = {*held}, dist.new_group([0, 1])
        comm = Comm(group)
        comm.agree(0)
        order = comm.log
        assert within_a_minute(lambda: held - before), "not connected"
        dist.barrier()
        dist.destroy_process_group(group)
        del group, comm
        gc.collect()
    assert within_a_minute(lambda: not held - before), "still connected"
    assert order.failure.broken is None


@ranks.on(2)
def test_a_group_that_waits_for_days_is_watched(rank, world):
    before, threads = {*held}, {*threading.enumerate()}
    with between_hosts():
        comm = Comm(dist.new_group(timeout=timedelta(days=30)))
        comm.agree(0)
        assert within_a_minute(lambda: held - before), "not connected"
        time.sleep(1.0)  # in which the ranks greet one another, and say that their logs stand
        comm.agree(0)
        assert "zero-watchdog" in {one.name for one in {*threading.enumerate()} - threads}


@pytest.mark.parametrize("failing", ["accept", "verdict"])
@ranks.on(3)
def test_what_fails_in_the_hub_ends_no_training(rank, world, failing):
    """As where the process has no descriptors left; of a fault of its own it says that nobody is watched any more."""
    said: list[str] = []
    fails = {"accept": (socket.socket, "accept"), "verdict": (watchdog.Hub, "verdict")}[failing]
    with (
        between_hosts(),
        mock.patch.object(*fails, side_effect=OSError("Too many open files")),
        mock.patch.object(waiting, "say", said.append),
        mock.patch.object(threading, "excepthook"),
    ):
        comm = Comm(dist.new_group(timeout=timedelta(seconds=2)))
        for _ in range(4):
            comm.agree(0)
            time.sleep(1.0)
        comm.agree(0)
    if failing == "verdict" and rank == 0:
        assert said and said[0].startswith("rank 0 is not watched any more (OSError: Too many open files)"), said


@ranks.on(3)
def test_a_rank_that_cannot_reach_the_first_one_says_so_once_and_keeps_nothing(rank, world):
    said: list[str] = []
    with (
        between_hosts(),
        mock.patch.object(socket, "create_connection", side_effect=OSError("firewall")) if rank == 1 else nullcontext(),
        mock.patch.object(waiting, "say", said.append),
    ):
        before = {*threading.enumerate()}
        comm = Comm(dist.new_group(timeout=timedelta(seconds=20)))
        comm.agree(0)
        for _ in range(3):
            time.sleep(0.5)  # in which a rank that is watched says that its log stands
            comm.agree(0)
        watches = [one for one in threading.enumerate() if one.name == "zero-watchdog" and one not in before]
    unwatched = [text.startswith("rank 1 is not watched, as it cannot reach rank 0 at") for text in said]
    assert unwatched == [True] * (rank == 1)
    assert len(watches) == (rank != 1)


@gpus.cpu_only("host memory")
@ranks.on(2, timeout=40)
def test_a_rank_that_connects_after_the_verdict_is_told_as_well(rank, world):
    connect = socket.create_connection

    def late(*given: Any) -> socket.socket:
        time.sleep(0.25)
        return connect(*given)

    with by("host memory"), mock.patch.object(socket, "create_connection", late):
        comm = Comm(dist.new_group())
        comm.agree(0)
        if rank == 0:
            comm.log.failure.mark_broken("the victim's own")
        assert "the victim's own" in ranks.refusal(lambda: comm.agree(0))
        dist.barrier()


@gpus.cpu_only("between hosts")
@ranks.on(2, timeout=40)
def test_an_error_of_2_mib_reaches_ranks_that_wait(rank, world):
    """Or the run would end before the group's time-out does."""
    with between_hosts():
        comm = Comm(dist.new_group(timeout=timedelta(seconds=90)))
        comm.agree(0)
        if rank == 1:
            assert within_a_minute(lambda: comm.log.failure.at_failure)
            time.sleep(0.5)  # connected
            comm.log.failure.mark_broken("the victim's own" + " and more" * 250_000)
        assert "the victim's own" in ranks.refusal(lambda: comm.agree(0))


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(torch.zeros(2)),
    "broadcast": lambda: dist.broadcast(torch.zeros(2), 0),
    "all_gather_object": lambda: dist.all_gather_object([None, None], "an object"),
}


@gpus.cpu_only("over NCCL no collective of torch blocks the host")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("collective", "comes"), [*((name, False) for name in COLLECTIVES), ("barrier", True), ("all_reduce", True)]
)
@ranks.on(2, timeout=30)
def test_a_rank_that_evaluates_while_others_are_in_a_collective_is_told_unless_a_thread_may_come(
    rank, world, collective, comes, transport
):
    """As in `if rank == 0: evaluate(model)` before `dist.barrier()`, or before an average of the loss."""
    said: list[str] = []
    of_tests = {ranks.__file__}  # whose threads call nothing
    is_idle = watchdog._is_idle
    with (
        by(transport),
        mock.patch.object(watchdog, "APART", 1.0),
        mock.patch.object(watchdog, "_is_idle", lambda file: file in of_tests or is_idle(file)),
        mock.patch.object(waiting, "say", said.append),
    ):
        model, optimizer = zero.setup(Stack(), sgd, stage=3)
        take_step(optimizer, loss_on(rank, 0)(model))

        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(2, WIDTH))

        def late() -> None:
            time.sleep(4)
            evaluate()

        text = ""
        if comes and rank == 1:
            thread = threading.Thread(target=late)
            thread.start()
        if rank == 0:
            text = ranks.refusal(evaluate)
        COLLECTIVES[collective]()
        if comes and rank == 1:
            thread.join()
    told = (
        "ranks can never meet: rank 0 waits in the gathering of the root unit for forward for rank 1, which waits in "
    )
    if comes:
        assert not text and not said
    elif rank == 0:
        assert text.startswith(f"RuntimeError: {told}torch.distributed.{collective}()."), text
    else:
        assert [line.startswith(f"rank 1: {told}") for line in said] == [True], said


@ranks.on(2)
def test_a_forked_process_holds_no_connection_open(rank, world):
    """Such as a worker of a DataLoader, which may outlive a rank that was killed."""
    with between_hosts():
        Comm().agree(0)
        assert within_a_minute(lambda: held), "not connected"
        numbers = [one.fileno() for one in held]
        child = os.fork()
        if not child:
            there = [os.readlink(f"/proc/self/fd/{number}") for number in numbers]
            os._exit(int(any(one != os.devnull for one in there)))
        assert os.waitpid(child, 0)[1] == 0
        Comm().agree(0)


@pytest.mark.parametrize("elsewhere", [None, 700])
def test_of_many_ranks_that_stand_the_hub_compares_the_logs_that_differ_alone(elsewhere):
    """Where they all stand in one place, as while they load data, it has nothing to find, and takes no time for it."""
    world = 1024
    log = Log(0, world)
    one, other = log.channels.add("a gather", ""), log.channels.add("a reduction", "")
    hub = watchdog.Hub(log, 600.0)
    for rank in range(world):
        hub.hear(rank, {"at": [5, 200], "log": [one] * 199 + [other if rank == elsewhere else one]})
    with mock.patch.object(Log, "difference", autospec=True, side_effect=Log.difference) as compared:
        verdict = hub.verdict()
    assert compared.call_count <= 2 and compared.called == (elsewhere is not None)
    if elsewhere is not None:
        assert "rank 700 in a reduction" in verdict["failed"]
