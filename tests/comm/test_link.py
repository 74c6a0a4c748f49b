"""Which transport a group gets, that it uses none of the user's own groups, and that a failed transfer ends it."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero
from ranks import refusal
from transports import between_hosts
from zero.comm import Comm, configure
from zero.comm.link import StoreExchange
from zero.comm.process_group import Gloo
from zero.features.host_memory import attach
from zero.features.host_memory.rendezvous import rendezvous

CPU = torch.device("cpu")
LENGTH = 20_000


def launched(comm: Comm, channel: int) -> tuple[torch.Tensor, Any]:
    full = torch.full((comm.world * LENGTH,), float(comm.rank))
    return full, comm.gather(full, range(0, comm.world * LENGTH + 1, LENGTH), channel)


# --------------------------------------------------------------------------------------------------- A failed transfer


def within_a_host() -> AbstractContextManager[Any]:
    """Ranks read one another's memory, also where the whole run is told not to."""
    return mock.patch.dict(os.environ, ZERO_HOST_MEMORY="")


def poisoned(rank: int, world: int, way: str) -> list[str]:
    """The first of two gathers fails while the second is waited for."""
    of_way = between_hosts() if way == "gloo" else within_a_host()
    with of_way, mock.patch.object(attach, "read", wraps=attach.read) as read:
        comm = Comm()
        channel = comm.channel("a test")
        comm.agree(channel)
        first, second = launched(comm, channel)[1], launched(comm, channel)[1]
        if rank == 0:
            if way == "gloo":
                with mock.patch.object(Gloo, "_await", side_effect=RuntimeError("cut off")):
                    told = [refusal(second.wait)]
            else:
                read.side_effect = OSError("cut off")
                told = [refusal(second.wait)]
                read.side_effect = None
            return [*told, refusal(first.wait), refusal(second.wait), refusal(lambda: comm.agree(channel))]
    return []


@pytest.mark.parametrize("way", ["reading", "gloo"])
def test_what_was_in_flight_when_a_transfer_failed_has_not_arrived(way):
    found = ranks.run(poisoned, 2, args=(way,), timeout=20)[0]
    assert all("cut off" in told for told in found), found


@ranks.on(2, timeout=20)
def test_a_unit_whose_gather_failed_does_not_compute(rank, world):
    told = []
    with within_a_host():
        model = zero.FSDP(nn.Linear(8, 8))
        for _ in range(2):
            with mock.patch.object(attach, "read", side_effect=OSError("cut off")):
                told.append(refusal(lambda: model(torch.ones(1, 8))))
    assert all(one.startswith("RuntimeError") for one in told), told


# ----------------------------------------------------------------------------------------------- The user's own groups


@ranks.on(2, timeout=60)
def test_other_threads_may_use_the_default_group_meanwhile(rank, world):
    """Operations on the default group from another thread, as torch's asynchronous checkpoints have them."""
    with between_hosts():
        model = zero.FSDP(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ended: list[int] = []

        def talk() -> None:
            for _ in range(200):
                dist.all_reduce(torch.ones(1000))
            ended.append(1)

        thread = threading.Thread(target=talk)
        thread.start()
        for _ in range(20):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        thread.join()
        assert ended == [1]


def in_different_numbers_of_groups(rank: int, world: int) -> list[float]:
    """A group that has no backend for the CPU, whose ranks are in different numbers of groups."""
    dist.new_group([0])
    group = dist.new_group([0, 1], backend="cuda:gloo")
    comm = Comm(group)
    told = torch.tensor([1.0 + rank])
    comm.all_reduce(told)
    return told.tolist()


@pytest.mark.parametrize("memory", ["", "0"])
def test_ranks_may_be_in_different_numbers_of_groups(memory, monkeypatch):
    assert ranks.run(with_memory, 2, args=(memory, in_different_numbers_of_groups), timeout=20) == [[3.0]] * 2


def with_memory(rank: int, world: int, memory: str, function: Any) -> Any:
    with mock.patch.dict(os.environ, ZERO_HOST_MEMORY=memory):
        return function(rank, world)


@pytest.mark.parametrize("stage", [1, 3])
@ranks.raises(2, ValueError, "parameters are on cpu", "set_device", r"model\.to\(device\)", timeout=15)
def test_a_model_left_on_the_cpu_under_a_group_for_gpus_alone_is_refused(rank, world, stage):
    group = dist.new_group([0, 1], backend="cuda:gloo", timeout=timedelta(seconds=5))
    model = nn.Linear(4, 4)
    if stage == 3:
        zero.FSDP(model, process_group=group)
    else:
        zero.OSS(model.parameters(), torch.optim.SGD, group, lr=0.1)


# -------------------------------------------------------------------------------------------------- What the user says


def transport(rank: int, world: int) -> str:
    return Comm().transport_name(CPU)


@pytest.mark.parametrize(("memory", "name"), [("0", "gloo"), ("", "host memory"), ("ptracer", "host memory")])
def test_the_environment_says_whether_ranks_read_one_anothers_memory(memory, name):
    assert ranks.run(with_memory, 2, args=(memory, transport)) == [name] * 2


def configured(rank: int, world: int) -> str:
    configure(host_memory="off" if rank == 1 else None)
    try:
        return Comm().transport_name(CPU)
    finally:
        configure(host_memory=None)


def test_one_rank_that_says_no_is_enough():
    assert ranks.run(configured, 3) == ["gloo"] * 3


def permitted(rank: int, world: int) -> int:
    with mock.patch.object(attach, "permit_siblings") as permit:
        transport(rank, world)
    return permit.call_count


@pytest.mark.parametrize(("memory", "count"), [("", 0), ("ptracer", 1)])
def test_reading_is_permitted_to_others_only_when_asked_for(memory, count):
    assert ranks.run(with_memory, 2, args=(memory, permitted)) == [count] * 2


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="'auto', 'off', 'ptracer'"):
        configure(host_memory="on")  # type: ignore[arg-type]
    with mock.patch.dict(os.environ, ZERO_HOST_MEMORY="yes"), pytest.raises(ValueError, match="choose 0, ptracer"):
        Comm()


@ranks.on(2, timeout=20)
def test_ranks_may_meet_again_on_the_same_store(rank, world):
    """By another group on the same store, once the first is gone."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    found = []
    for _ in range(3):
        with StoreExchange(store, rank, world, timedelta(seconds=10)) as exchange:
            found.append(rendezvous(exchange, "auto") is not None)
        nonces: list[str] = [""] * world
        dist.all_gather_object(nonces, exchange.nonce)
        assert nonces == [exchange.nonce] * world
    assert found == [True] * 3
