"""Which transport a group gets, that it uses none of the user's own groups, and that a failed transfer ends it."""

import ctypes
import gc
import importlib
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpus
import ranks
import zero
from ranks import refusal
from runs import sgd, take_step
from simulated.world import simulated
from transports import READS, TRANSPORTS, between_hosts, by, overlapping
from zero._torch.process_groups import abort
from zero.comm import Comm, host_memory, settings
from zero.comm import transport as all_transports
from zero.comm.link import Link
from zero.comm.oplog import Log
from zero.comm.store import RaisedText, StoreRendezvous
from zero.comm.together import Together
from zero.comm.transport import Gloo
from zoo import WIDTH, Stack, loss_on


def within_a_host() -> AbstractContextManager[Any]:
    """Ranks read one another's memory, also where the whole run is told not to."""
    return mock.patch.dict(os.environ, ZERO_HOST_MEMORY="")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["reading", "gloo"])
@ranks.on(2, timeout=20)
def test_what_was_in_flight_when_a_transfer_failed_has_not_arrived(rank, world, way):
    """The first of two gathers fails while the second is waited for."""
    with between_hosts() if way == "gloo" else within_a_host():
        comm = Comm()
        channel = comm.channel("a test")
        comm.agree(channel)
        first, second = (comm.gather(torch.ones(40_000), [0, 20_000, 40_000], channel) for _ in range(2))
        where = (all_transports, "wait_watching") if way == "gloo" else (host_memory, "read_memory")
        if rank == 0:
            with mock.patch.object(*where, side_effect=OSError("cut off")):
                told = [refusal(second.wait)]
            told += [refusal(first.wait), refusal(second.wait), refusal(lambda: comm.agree(channel))]
            assert all("cut off" in each for each in told), told


@pytest.mark.parametrize("at", ["transfer", "launch"])
@ranks.on(2, timeout=20)
def test_a_unit_whose_gather_has_failed_on_its_way_does_not_compute(rank, world, at):
    with within_a_host():
        model = zero.FSDP(Stack())
        where = (host_memory, "read_memory") if at == "transfer" else (Comm, "gather")
        with mock.patch.object(*where, side_effect=OSError("cut off")):
            assert "cut off" in refusal(lambda: loss_on(rank, 0)(model))
        text = refusal(lambda: loss_on(rank, 0)(model))
    if at == "launch":  # nothing was sent
        assert not text
    else:
        assert all(fact in text for fact in ("RuntimeError: ", "root unit", "have not arrived", "first error")), text


class Aborting:
    """A backend whose abort ends once the other's has begun, as NCCL's where one of its kernels waits for the other."""

    def __init__(self, began: threading.Event, other: threading.Event) -> None:
        self.began, self.other, self.ended = began, other, False

    def abort(self) -> None:
        self.began.set()
        self.ended = self.other.wait(20)


@pytest.mark.parametrize("groups", [1, 2])
def test_both_communicators_of_a_group_and_groups_that_fail_together_are_aborted_at_once(groups):
    """The averaging over replicas waits for a rank that is gone, and the abort of the shards' group for the device."""
    events = threading.Event(), threading.Event()
    both = Aborting(*events), Aborting(*reversed(events))
    logs = [Log(0, 2) for _ in range(groups)]
    logs[0].failure.couple(logs[-1].failure)
    for log, backends in zip(logs, [both] if groups == 1 else [both[:1], both[1:]], strict=True):
        log.failure.at_failure.append(lambda _, backends=backends: abort(backends, torch.device("cpu")))
    logs[0].failure.mark_broken("rank 1 is gone")
    assert both[0].ended and both[1].ended and logs[-1].failure.broken == "rank 1 is gone"


@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_rank_of_a_hybrid_group_ends_the_transfers_of_both(which):
    with simulated() as there:
        comms = there.comm(1, 4), there.comm(0, 2)
        model = zero.FSDP(Stack(), process_group=comms, sharding_strategy="HYBRID_SHARD")
        model(torch.ones(2, WIDTH)).sum().backward()
        comms[which].log.failure.mark_broken("rank 1 is gone")
        assert there.device.aborted == [True] * 2, "what goes among the shards, and averages over replicas"
        assert "rank 1 is gone" in refusal(lambda: model(torch.ones(2, WIDTH)))


def test_buffers_of_what_was_launched_before_ranks_were_out_of_step_are_kept():
    """On a GPU, where a kernel that still runs would write into memory of others."""
    with simulated() as there:
        comm = there.comm(1, 4)
        full = torch.ones(64)
        handle, kept = comm.gather(full, range(0, 65, 16)), weakref.ref(full)
        assert not there.device.aborted
        order = comm.log
        told = [refusal(lambda: order.out_of_step({})), refusal(handle.wait)]
        assert there.device.aborted == [True]
        assert all("different numbers of bytes" in each for each in told), told
        del comm, full, handle
        gc.collect()
        assert kept() is not None


@pytest.mark.slow
@ranks.on(2, timeout=60)
def test_other_threads_may_use_the_default_group_meanwhile(rank, world):
    """Operations on the default group from another thread, as torch's asynchronous checkpoints have them."""
    with between_hosts():
        model, optimizer = zero.setup(Stack(), sgd, stage=3)
        ended: list[int] = []

        def talk() -> None:
            for _ in range(50):
                dist.all_reduce(torch.ones(1000))
            ended.append(1)

        thread = threading.Thread(target=talk)
        thread.start()
        for step in range(5):
            take_step(optimizer, loss_on(rank, step)(model))
        thread.join()
        assert ended == [1]


@pytest.mark.parametrize("stage", [1, 3])
@ranks.raises(2, ValueError, "parameters are on cpu", "set_device", r"model\.to\(device\)", timeout=15)
def test_a_model_left_on_the_cpu_under_a_group_for_gpus_alone_is_refused(rank, world, stage):
    group = dist.new_group([0, 1], backend="cuda:gloo", timeout=timedelta(seconds=5))
    model = nn.Linear(4, 4, device="cpu")
    if stage == 3:
        zero.FSDP(model, process_group=group)
    else:
        zero.OSS(model.parameters(), sgd, group)


LACKED = [torch.int16, torch.uint16, torch.uint32, torch.float8_e5m2]


@pytest.mark.parametrize("beside", [False, True], ids=["gloo", "overlapping"])
@ranks.on(2)
def test_dtypes_that_backends_lack_move_as_bytes(rank, world, beside):
    for dtype in LACKED:
        with overlapping() if beside else between_hosts():
            comm = Comm()
            buffer = torch.full((3,), 5 * (1 - rank), dtype=torch.int32).to(dtype)
            comm.broadcast([buffer])
            full = torch.full((4,), rank + 1, dtype=torch.int32).to(dtype)
            comm.gather(full, [0, 2, 4]).wait()
        assert buffer.to(torch.int32).tolist() == [5, 5, 5]
        assert full.to(torch.int32).tolist() == [1, 1, 2, 2]


def transport(rank: int, world: int, memory: str, others: str) -> tuple[str, int]:
    """The name of what the group gets, and how often reading was permitted to others. memory: on rank 1."""
    with (
        mock.patch.dict(os.environ, ZERO_HOST_MEMORY=memory if rank == 1 else others),
        mock.patch.object(host_memory, "permit_siblings") as permit,
    ):
        return Comm().transport_name(torch.device("cpu")), permit.call_count


@pytest.mark.parametrize(
    ("memory", "others", "expected"),
    [("0", "0", ("gloo", 0)), ("", "", ("host memory", 0)), ("ptracer", "ptracer", ("host memory", 1))]
    + [("0", "", ("gloo", 0))],
)
def test_ranks_read_one_anothers_memory_where_nobody_says_no_and_permit_it_where_asked_to(memory, others, expected):
    assert ranks.run(transport, 3, args=(memory, others)) == [expected] * 3


@ranks.on(2)
def test_what_one_rank_is_told_that_means_nothing_is_refused_on_every_rank(rank, world):
    for name, value, told in [
        ("ZERO_SECOND_COMMUNICATOR", "yes", "choose 0, 1"),
        ("ZERO_HOST_MEMORY", "yes", "choose 0, ptracer"),
        ("ZERO_CHECK", "always", "ZERO_CHECK='always'"),
    ]:
        with mock.patch.dict(os.environ, {name: value} if rank == 1 else {}):
            text = refusal(lambda: Comm().agree(0))
            assert text.startswith("ValueError") and told in text and text.endswith("(on rank 1)"), text
    Comm().agree(0)


ORDERED = {"ZERO_SECOND_COMMUNICATOR": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.parametrize(
    ("environment", "how", "expected"),
    [
        ({}, ((2, 28, 9), 13000), False),
        ({"ZERO_SECOND_COMMUNICATOR": "0"}, ((2, 28, 9), 13000), False),
        (ORDERED, ((2, 26, 2), 12030), True),
        (ORDERED, ((2, 25, 1), 13000), "NCCL 2.25.1 orders no launches. Take 2.26"),
        (ORDERED, ((2, 28, 9), 12020), "the driver is of CUDA 12.2"),
        ({**ORDERED, "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, ((2, 28, 9), 13000), "may deadlock"),
    ],
)
def test_reductions_have_a_communicator_of_their_own_where_that_is_asked_for_and_ordered(environment, how, expected):
    with mock.patch.dict(os.environ, environment):
        if isinstance(expected, bool):
            assert settings.second_communicator(*how) is expected
        else:
            assert expected in refusal(lambda: settings.second_communicator(*how))


@pytest.mark.parametrize("asked", ["", "1"])
def test_importing_zero_has_nccl_order_launches_where_two_communicators_are_asked_for(asked):
    code = "import os, zero; print(os.environ.get('NCCL_LAUNCH_ORDER_IMPLICIT', ''))"
    given = {**os.environ, "ZERO_SECOND_COMMUNICATOR": asked}
    told = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    assert told.stdout.strip() == asked


class Stuck(dist.Store):
    """A store on a host that cannot be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.ends = threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        self.reached.set()
        self.ends.wait()  # until the test ends it, or runs out of time

    def check(self, keys: list[str]) -> bool:
        self.ends.wait()  # until the test ends it, or runs out of time
        return False


def test_a_store_that_does_not_answer_holds_up_no_error():
    store = Stuck()
    text = RaisedText()
    text.store = store
    text.publish("what a rank has raised")
    assert store.reached.is_set() and text.explained("a reason") == "a reason"
    assert not store.ends.is_set(), "it still waits"
    store.ends.set()


@pytest.mark.parametrize("way", ["host memory", "gloo"])
@ranks.on(2, timeout=20)
def test_what_a_rank_has_raised_explains_nothing_later(rank, world, way):
    """Not a group of the same name and store, nor an error after others that all ranks have raised."""
    told = []
    with by(way):
        for turn in range(2):
            comm = Comm(Link(dist.group.WORLD))
            together = Together([comm], "a section of a test")
            for _ in range(2 * turn):
                assert f"in turn {turn}" in ranks.refusal(partial(raises_alone, rank, turn, together))
            if turn == 0 and rank == 0:
                told.append(ranks.refusal(partial(raises_alone, rank, turn, together)))
            else:
                told.append(ranks.refusal(lambda comm=comm: comm.agree(0)))
            if turn and rank == 0:
                told.append(ranks.refusal(lambda comm=comm: comm.agree(0)))
            elif turn:
                told.append(ranks.refusal(lambda comm=comm: comm.agree(1)))
    assert "in turn 0" in told[0] and all("in turn" not in text for text in told[1:]), told


def raises_alone(rank: int, turn: int, together: Together) -> None:
    with together:
        if rank == 0:
            raise ValueError(f"in turn {turn}")
        together.agree()


@pytest.mark.parametrize("left", ["drawn", "both"])
def test_what_a_rank_that_died_has_left_in_the_store_misleads_no_later_group(left):
    store, found = dist.HashStore(), dict[int, Any]()
    for rank in range(2):
        dist.PrefixStore("zero", store).set(f"drawn/{rank}", f"old {rank}")
        if left == "both":
            dist.PrefixStore("zero", store).set(f"read/{rank}", "old")

    def meet(rank: int) -> None:
        time.sleep(0.1 * rank)  # the first one reads what is old
        with StoreRendezvous(store, rank, range(2), timedelta(seconds=5)) as exchange:
            found[rank] = exchange.nonce, exchange.all_gather(bytes([rank]))

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found[0] == found[1] and found[0][1] == [b"\0", b"\1"]
    assert store.num_keys() == 0
    with pytest.raises(RuntimeError, match="rank 1 did not come within 1 s"):  # though it has come before
        StoreRendezvous(store, 0, range(2), timedelta(seconds=1)).__enter__()


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks.on(2, timeout=20)
def test_a_forward_in_a_process_that_was_forked_from_a_rank_is_refused_at_once(rank, world, transport):
    """As in a worker of a DataLoader that calls the model."""
    with by(transport):
        model, optimizer = zero.setup(Stack(), sgd, stage=3)
        take_step(optimizer, loss_on(rank, 0)(model))
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                text = refusal(lambda: model(torch.ones(2, WIDTH)))
            refused = f"was forked from rank {rank}," in text and "again" not in text
            os._exit(0 if refused else 1)
        assert os.waitpid(child, 0)[1] == 0
        take_step(optimizer, loss_on(rank, 1)(model))


@ranks.on(2)
def test_gloo_takes_the_interface_that_the_environment_names(rank, world):
    """torch reads it for its own groups only."""
    named = mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="nowhere0")
    with between_hosts(), named, pytest.raises(RuntimeError, match="nowhere0"):
        zero.OSS([nn.Parameter(torch.ones(4))], torch.optim.SGD, lr=0.1)


class Noted:
    def __init__(self, lane: Any, rank: int) -> None:
        self._lane, self._rank = lane, rank
        self.broadcasts: list[int] = []
        self.to: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._lane, name)
        if name == "broadcast":
            return lambda tensors, options: (self.broadcasts.append(options.rootRank), call(tensors, options))[1]
        if name.startswith(("alltoall", "all_to_all")):

            def noting(into: Any, sent: Any, out_counts: list[int], in_counts: list[int], options: Any) -> Any:
                self.to |= {peer for peer, count in enumerate(in_counts) if count and peer != self._rank}
                return call(into, sent, out_counts, in_counts, options)

            return noting
        return call


@gpus.cpu_only("NCCL has no lanes")
@ranks.on(3)
def test_large_messages_of_two_ranks_to_one_another_go_by_different_connections(rank, world):
    """Over Gloo they would take turns on one: a link of two hosts would carry half as much."""
    with between_hosts():
        comm = Comm()
        transport = comm._transports["cpu"]
        assert isinstance(transport, Gloo)
        lanes = [Noted(lane, rank) for lane in transport._lanes]
        with mock.patch.object(Gloo, "_lanes", lanes):
            comm.gather(torch.zeros(world), range(world + 1), comm.channel("a test")).wait()
            comm.reduce([(torch.ones(100_000 * world), [100_000] * world)]).wait()
    assert [lane.broadcasts for lane in lanes] == [[owner] for owner in range(world)]
    assert [lane.to for lane in lanes] == [{*range(rank + 1, world)}, set(), {*range(rank)}]


# Systems that lack what Linux has: zero is imported and trains over Gloo. What they lack is taken away on Linux.


WINDOWS = {
    os: "fork register_at_fork pidfd_open posix_fadvise posix_fallocate setpriority PRIO_PROCESS sched_getaffinity",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MADV_DONTFORK MADV_DONTNEED MADV_HUGEPAGE MADV_WILLNEED",
    select: "poll epoll",
    socket: "SO_PEERCRED MSG_NOSIGNAL SOCK_SEQPACKET TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT",
}
MACOS = {
    os: "pidfd_open posix_fadvise posix_fallocate sched_getaffinity",
    mmap: "MADV_DONTFORK MADV_HUGEPAGE",
    select: "epoll",
    socket: "SO_PEERCRED MSG_NOSIGNAL",
}


class WithoutReading(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "process_vm_readv":
            raise AttributeError(name)
        return super().__getattr__(name)


def no_library(*args: Any, **kwargs: Any) -> Any:
    raise OSError("there is no such library")


def take(names: dict[Any, str], platform: str = sys.platform) -> None:
    sys.platform = platform
    for module, of_module in names.items():
        for name in of_module.split():
            vars(module).pop(name, None)


LACKING: dict[str, Callable[[], object]] = {
    "process_vm_readv": lambda: setattr(ctypes, "CDLL", WithoutReading),
    "libc": lambda: setattr(ctypes, "CDLL", no_library),
    "register_at_fork": lambda: take({os: "register_at_fork"}),
    "macOS": lambda: (take(MACOS, "darwin"), setattr(ctypes, "CDLL", WithoutReading)),
    "Windows": lambda: (take(WINDOWS, "win32"), setattr(ctypes, "CDLL", no_library)),
}


def trains(rank: int, world: int, lacking: str, folder: Path) -> tuple[str, list[list[float]]]:
    for name in [name for name in sys.modules if name.split(".")[0] == "zero"]:
        del sys.modules[name]
    LACKING[lacking]()
    again: Any = importlib.import_module("zero")
    found = []
    for stage, offload in [(0, None), (1, None), (2, None), (3, None), (3, again.DiskOffload(folder))]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        model, optimizer = again.setup(model, torch.optim.Adam, stage=stage, lr=0.1, offload=offload)
        losses = []
        for step in range(4):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    comm: Any = importlib.import_module("zero.comm").Comm()
    return comm.transport_name(torch.device("cpu")), found


@pytest.mark.slow
@pytest.mark.parametrize("lacking", LACKING)
def test_all_stages_train_over_gloo_as_ddp_does(lacking, tmp_path):
    expected = "host memory" if lacking == "register_at_fork" else "gloo"
    for transport, (plainly, *others) in ranks.run(trains, 2, (lacking, tmp_path), fresh=True):
        assert len({*plainly}) == 4
        assert others == [pytest.approx(plainly, rel=1e-6)] * 4
        assert transport == (expected if READS else "gloo")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,mps:gloo"])
@ranks.raises(2, ValueError, r'no backend for mps: move the model to the CPU by model\.to\("cpu"\) first')
def test_a_model_on_mps_is_refused_on_every_rank(rank, world, stage, backend):
    on_mps = {"return_value": [torch.device("mps")]}
    with (
        mock.patch("zero.oss.options.devices_of", **on_mps),
        mock.patch("zero.fsdp.choice.UnitChoice.devices", **on_mps),
    ):
        group = dist.new_group(backend=backend)
        zero.setup(nn.Linear(3, 3), torch.optim.Adam, stage=stage, process_group=group)
