"""Ranks of one host that read one another's memory: who does, what a rank that ends does to the others, and that nobody
overwrites what others still read. That the results are those of collectives is seen in test_comm.py."""

import ctypes
import mmap
import os
import re
import sys
import time
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ranks
from inner import Comm
from ranks import refusal
from zero.comm import host_memory
from zero.comm.forked import Pipe, held

LENGTH = 5000


def together(rank, world):
    """A Comm of the default group after its first operation, and whether its ranks read one another's memory."""
    comm = Comm()
    comm.agree(comm.channel("a first meeting"))
    return comm, comm.reads_memory(torch.device("cpu"))


def gathered(comm, start=0.0, length=LENGTH):
    full = torch.full((comm.world * length,), -1.0)
    full[comm.rank * length : (comm.rank + 1) * length] = start + comm.rank
    comm.gather(full, range(0, comm.world * length + 1, length)).wait()
    return full.view(comm.world, length).unique(dim=1).squeeze(1).tolist()


def _read_one_another(rank, world):
    return together(rank, world)[1]


@pytest.fixture(autouse=True, scope="module")
def _readable():
    if not all(ranks.run(_read_one_another, 2)):
        pytest.skip("this system does not let processes read one another's memory")


ERROR = {"side_effect": OSError("not here")}


@pytest.mark.parametrize(
    ("hindered", "target", "effect"),
    [
        (1, "zero.comm.host_memory.host_name", {"return_value": "another"}),
        (2, "zero.comm.host_memory.read_memory", {"return_value": None}),  # not what the other has there
        (1, "os.pipe", ERROR),
        (0, "zero.comm.host_memory.read_memory", ERROR),
    ],
)
@ranks.on(3)
def test_where_one_rank_cannot_read_another_all_use_collectives(rank, world, hindered, target, effect):
    with mock.patch(target, **effect) if rank == hindered else nullcontext():
        comm, reads = together(rank, world)
    assert not reads and gathered(comm) == [0.0, 1.0, 2.0]
    assert comm.reduce([(torch.ones(world), [1] * world)]).wait().tolist() == [3.0]


@pytest.mark.slow
@ranks.on(3)
def test_a_rank_that_goes_on_at_once_does_not_overwrite_what_a_slow_one_reads(rank, world):
    comm, _ = together(rank, world)
    read = host_memory.read_memory

    def slowly(*args):
        time.sleep(0.02)
        read(*args)

    found = []
    with mock.patch.object(host_memory, "read_memory", slowly if rank == 2 else read):
        for step in range(3):
            full = torch.zeros(world * LENGTH)
            own = full[rank * LENGTH : (rank + 1) * LENGTH]
            own.fill_(10.0 * step + rank)
            comm.gather(full, range(0, world * LENGTH + 1, LENGTH)).wait()
            own.fill_(-1000.0)
            messages = [torch.full((world * LENGTH,), 10.0 * step + rank), torch.full((world,), 1.0)]
            sums = comm.reduce([(messages[0], [LENGTH] * world), (messages[1], [1] * world)]).wait()
            for message in messages:
                message.fill_(-1000.0)
            found.append((full[(rank + 1) % world * LENGTH :][:LENGTH].unique().tolist(), sums.unique().tolist()))
    for step, (from_next, sums) in enumerate(found):
        assert from_next == [10.0 * step + (rank + 1) % world]
        assert sums == sorted({float(world), 10.0 * step * world + 3})


@pytest.mark.slow
@ranks.on(2)
def test_any_number_of_operations_may_be_in_flight(rank, world):
    comm, _ = together(rank, world)
    fulls = [torch.full((world,), 10.0 * which + rank) for which in range(1000)]
    dist.barrier()
    if rank == 1:
        time.sleep(0.1)  # the notes of the other rank are more than its socket holds
    handles = [comm.gather(full, range(world + 1)) for full in fulls]
    for handle in handles:
        handle.wait()
    assert all(full.tolist() == [10.0 * which, 10.0 * which + 1] for which, full in enumerate(fulls))


def _ends(rank, world, operation, launched):
    comm, _ = together(rank, world)
    launch = {
        "gather": lambda: comm.gather(torch.zeros(world * LENGTH), range(0, world * LENGTH + 1, LENGTH)).wait,
        "reduce": lambda: comm.reduce([(torch.zeros(world * LENGTH), [LENGTH] * world)]).wait,
        "agree": lambda: lambda: comm.agree(0),
    }[operation]
    if rank == 1:
        if launched:
            launch()
        os._exit(7)
    return refusal(launch()), refusal(lambda: comm.agree(0))


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "launched"), [("gather", True), ("reduce", False), ("agree", False)])
def test_when_a_rank_ends_the_others_are_told_and_do_not_wait(operation, launched):
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_ends, 3, args=(operation, launched), timeout=20)
    first, ended, third = caught.value.outcomes
    assert ended.verdict == "died with exit code 7"
    for survivor in first, third:
        now, later = survivor.value
        assert now.startswith("RuntimeError") and "has stopped" in now
        assert "nitialise the process group again" in later


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of later Pythons, where there are threads
        return os.fork()


def _leaves_a_child(rank, world):
    comm, _ = together(rank, world)
    if rank == 1:
        pipes = [pipe.fileno() for pipe in held]
        if fork() == 0:  # as a worker of a DataLoader: it has all files of the rank, and outlives it for a while
            for name in os.listdir("/proc/self/fd"):
                if int(name) not in pipes:
                    with suppress(OSError):
                        os.close(int(name))
            time.sleep(15)
            os._exit(0)
        os._exit(7)
    return refusal(lambda: gathered(comm))


def test_a_rank_that_ends_is_missed_though_a_process_forked_from_it_lives():
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_leaves_a_child, 2, timeout=10)
    assert "has stopped" in caught.value.outcomes[0].value


@ranks.on(2)
def test_a_process_forked_from_a_rank_is_told_that_it_is_none_and_disturbs_nobody(rank, world):
    comm, _ = together(rank, world)
    child = fork()
    if child == 0:
        os._exit(int("was forked from rank" not in refusal(lambda: gathered(comm))))
    assert os.waitpid(child, 0)[1] == 0
    assert gathered(comm) == [0.0, 1.0]


def test_a_pipe_that_is_closed_meanwhile_is_cut_in_silence():
    """As at the end of a process in which another thread marks a failure."""
    inbox, entry = os.pipe()
    pipe, other = Pipe(inbox, "rb"), Pipe(entry, "wb")
    pipe.cut()
    assert pipe.read(1) == b"" and not pipe.closed
    with pytest.raises(BrokenPipeError):
        other.write(b"x")
    for one in (pipe, other):
        one.close()
        one.cut()


def test_a_rank_that_reads_no_notes_is_waited_for_as_long_as_the_group_says():
    (from_it, its_entry), (its_inbox, to_it) = os.pipe(), os.pipe()
    kept = Pipe(its_entry, "wb"), Pipe(its_inbox, "rb")  # of the other rank, which does nothing with them
    peer = host_memory.Peer(os.getpid(), Pipe(from_it, "rb"), Pipe(to_it, "wb"))
    told = refusal(lambda: [peer.send(bytes(24), 0.2) for _ in range(1 << 16)])
    assert told.startswith("OSError: ") and "has read nothing for 0.2 s" in told
    for pipe in (*kept, peer.inbox, peer.outbox):
        pipe.close()


@pytest.mark.slow
@ranks.on(2)
def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_group_says(rank, world):
    comm = Comm(dist.new_group([0, 1], timeout=timedelta(seconds=1)))
    comm.agree(0)
    if rank == 0:
        told = refusal(lambda: gathered(comm))
        assert re.search("failed in a gather.*rank 1 of the group (of 2 has not reached|sent nothing for 1 s)", told)
    dist.barrier()


# Reading another process's memory: all of it or an error, and who is permitted to.


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a system call of Linux")


def test_what_ends_before_all_is_read_is_an_error():
    target = ctypes.create_string_buffer(3 * mmap.PAGESIZE)
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        mapped = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(mapped)
        ctypes.CDLL(None).munmap(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE)
        with pytest.raises(OSError, match="Bad address"):
            host_memory.read_memory(os.getpid(), start, ctypes.addressof(target), 2 * mmap.PAGESIZE)
        del mapped


@pytest.mark.parametrize(
    ("scope", "parent", "permitted"), [("1", 1234, [1234]), ("1", 1, []), ("0", 1234, []), ("2", 1234, [])]
)
def test_siblings_are_permitted_only_where_yama_forbids_them_and_the_parent_is_a_launcher(scope, parent, permitted):
    with (
        mock.patch.object(Path, "exists", return_value=True),
        mock.patch.object(Path, "read_text", return_value=f"{scope}\n"),
        mock.patch.object(os, "getppid", return_value=parent),
        mock.patch.object(host_memory, "_libc") as libc,
    ):
        host_memory.permit_siblings()
    assert [call.args[1].value for call in libc().prctl.call_args_list] == permitted
