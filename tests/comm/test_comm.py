"""What ranks say to one another: gather and reduce beside sums computed apart, traffic, and errors on every rank."""

import gc
import itertools
import math
import re
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gpus
import matrix
import ranks
from assertions import same
from ranks import refusal
from transports import between_hosts, overlapping
from zero.comm import Comm, Traffic, Work, traffic
from zero.comm import comm as comm_module
from zero.comm.oplog import Log
from zero.comm.streams import StreamWork
from zero.comm.transport import GroupWork, SumWork
from zero.shards.shard_group import ReplicaWork

WORLDS = [2, 3, 4] if matrix.WHOLE else [2, 3]
WAYS = ["nccl"] if gpus.ON else ["reading", "gloo"]
LARGE = 70_000  # elements, which are not sent like a few
HERE = torch.device(gpus.DEVICE)


def large(dtype):
    return LARGE if dtype in (torch.float32, torch.bfloat16) else 90


def as_on(way: str) -> AbstractContextManager[None]:
    """How ranks reach each other: by reading each other's memory, by collectives of Gloo, or of another backend.

    What goes by another backend here runs over Gloo all the same.
    """
    ways = {"gloo": between_hosts, "other": partial(overlapping, "other", returns_work=False)}
    return ways.get(way, nullcontext)()


def numbers(rank, length, dtype, salt=0):
    """What rank `rank` has, on whatever rank it is asked for."""
    generator = gpus.generator(100 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)
    return torch.randint(-1000, 1000, (length,), generator=generator).to(dtype)


# -------------------------------------------------------------------------------------------------- Gather and reduce


def cuts(world, most):
    """Lengths of segments: equal, all different, with an empty one at each place, all with one rank, nothing at all."""
    yield [16] * world
    yield [most] * world
    yield [3 + 5 * rank for rank in range(world)]
    for empty in range(world):
        yield [0 if rank == empty else 7 + rank for rank in range(world)]
        yield [most if rank == empty else 0 for rank in range(world)]
    yield [0] * world


@matrix.combined("world, way", WORLDS, [*WAYS, "other"], each=2)
@ranks.on("world")
def test_gather_brings_every_segment_to_every_rank(rank, world, way):
    comm = Comm()
    channel = comm.channel("gathering in a test")
    with as_on(way):
        for dtype in [torch.float32, torch.bfloat16, torch.complex64]:
            for lengths in cuts(world, large(dtype)):
                bounds = [0, *itertools.accumulate(lengths)]
                expected = torch.cat([numbers(peer, length, dtype) for peer, length in enumerate(lengths)])
                full = torch.full_like(expected, 77)
                full[bounds[rank] : bounds[rank + 1]] = numbers(rank, lengths[rank], dtype)
                comm.gather(full, bounds, channel).wait()
                same(full, expected, f"{dtype} {lengths}")


def splits(world, most):
    """Of each message, how many elements go to each rank: even and uneven, to one alone, to all but one, several."""
    yield [[16] * world]
    yield [[most] * world]
    yield [[1 + 3 * rank for rank in range(world)]]
    for one in range(world):
        yield [[0 if rank == one else 9 + rank for rank in range(world)]]
        yield [[most if rank == one else 0 for rank in range(world)]]
        yield [[5] * world, [most if rank == one else 0 for rank in range(world)], [7 * rank for rank in range(world)]]


def sum_in_rank_order(terms, times):
    total = terms[0].float() if terms[0].element_size() == 2 else terms[0].clone()
    for term in terms[1:]:
        total += term
    return total * times


@gpus.cpu_only("NCCL adds up in the order of its ring")
@matrix.combined("world, way", WORLDS, WAYS)
@ranks.on("world")
def test_reduce_gives_each_owner_the_sum_in_rank_order_and_leaves_what_was_sent(rank, world, way):
    comm = Comm()
    with as_on(way):
        comm.agree(comm.channel("a test"))  # from here on the way stays
    dtypes = [torch.float32, torch.int64, torch.complex64, torch.bfloat16]
    for dtype, lengths in [(each, lengths) for each in dtypes for lengths in splits(world, large(each))]:
        given = [
            [numbers(peer, sum(counts), dtype, place) for place, counts in enumerate(lengths)] for peer in range(world)
        ]
        mine = [message.clone() for message in given[rank]]
        times = 0.25 if dtype.is_floating_point else 1
        result = comm.reduce([*zip(mine, lengths, strict=True)], times=times).wait()
        parts = [zip(sent, lengths, strict=True) for sent in given]
        terms = [torch.cat([message.split(counts)[rank] for message, counts in of_rank]) for of_rank in parts]
        same(result, sum_in_rank_order(terms, times), f"{dtype} {lengths}")
        same(mine, given[rank], f"{dtype} {lengths}: what was sent")


@pytest.mark.parametrize("way", WAYS)
@ranks.on(3, timeout=20)
def test_operations_in_flight_at_once_do_not_mix_in_whatever_order_a_rank_waits_for_them(rank, world, way):
    comm = Comm()
    channel = comm.channel("a test")
    with as_on(way):
        comm.agree(channel)
    fulls, gathers, reduces = [], [], []
    for which, length in enumerate([10, LARGE, 20]):
        full = torch.full((world * length,), 100.0 * which + rank)
        fulls.append(full)
        gathers.append(comm.gather(full, range(0, world * length + 1, length), channel))
        reduces.append(comm.reduce([(torch.full((world * length,), 10.0 * which + rank), [length] * world)]))
    for which in [(rank + place) % 3 for place in range(3)]:
        assert set(reduces[which].wait().tolist()) == {sum(10.0 * which + peer for peer in range(world))}
        gathers[which].wait()
        expected = torch.arange(world).repeat_interleave(len(fulls[which]) // world) + 100.0 * which
        same(fulls[which], expected, f"gather {which}")


# -------------------------------------------------------------------------------------------------------------- Groups


def _read(values: torch.Tensor, start: int, into: torch.Tensor) -> None:
    into.copy_(values[start : start + len(into)])


@pytest.mark.parametrize("way", [*WAYS, "other"])
@ranks.on(3)
def test_ranks_are_of_the_group_not_of_the_world(rank, world, way):
    group = dist.new_group([0, 2])
    if rank == 1:
        assert re.search("ValueError: rank 1 of the job .*process group", refusal(lambda: Comm(group)))
        return
    comm = Comm(group)
    assert (comm.rank, comm.world) == (rank // 2, 2)
    full, value = torch.full((8,), float(rank)), torch.tensor([float(rank)])
    with as_on(way):
        comm.gather(full, [0, 2, 8], comm.channel("gathering")).wait()
        sums = comm.reduce([(torch.full((8,), rank + 1.0), [2, 6])]).wait()
    assert full.tolist() == [0.0] * 2 + [2.0] * 6
    assert sums.tolist() == [4.0] * [2, 6][comm.rank]
    assert comm.all_gather_text(str(rank)) == ["0", "2"]
    comm.broadcast([value], source=1)
    comm.all_reduce(value)
    assert value.item() == 4
    with mock.patch("zero.comm.comm.BATCH", 4 * 6):  # 3 elements for each rank
        comm.scatter(partial(_read, full + comm.rank), [0, 7, 8], own := torch.zeros(7 - 6 * comm.rank))
    assert own.tolist() == ([0.0] * 2 + [2.0] * 5 if comm.rank == 0 else [2.0])
    comm.collect([(0, value.nbytes, value.fill_(rank))], 1, HERE)
    assert value.item() == 0
    # Errors name ranks as the launcher and the logs do.
    assert "rank 0 has a, rank 2 has b" in refusal(lambda: comm.compare("letters", ["a" if rank == 0 else "b"]))
    own = ValueError("odd") if rank == 2 else None
    assert refusal(lambda: comm.compare("letters", [], own)) == "ValueError: odd (on rank 2)"
    channels = [comm.channel(name) for name in ("one call", "another call")]
    told = refusal(lambda: comm.agree(channels[rank // 2]))
    assert re.search("rank 0 (is )?in one call", told) and re.search("rank 2 (is )?in another call", told)


def test_without_a_process_group_this_process_is_a_world_of_its_own():
    comm, before = Comm(), traffic()
    assert (comm.rank, comm.world, comm.group) == (0, 1, None)
    channel = comm.channel("anything")
    full = torch.arange(5.0)
    comm.gather(full, [0, 5], channel).wait()
    assert comm.reduce([(torch.arange(3.0), [3]), (torch.arange(2.0), [2])]).wait().tolist() == [0, 1, 2, 0, 1]
    comm.agree(channel)
    comm.compare("things", ["one"])
    assert comm.all_gather_text("ü") == ["ü"]
    comm.broadcast([full])
    comm.scatter(partial(_read, torch.arange(5.0)), [0, 5], full.zero_())
    comm.all_reduce(full)
    comm.collect([(0, full.nbytes, full)], 0, HERE)
    comm.collect([(0, full.nbytes, full)], None, HERE)
    same(full, torch.arange(5.0), "what was sent about")
    assert refusal(lambda: comm.compare("things", ["one"], ValueError("a bad thing"))) == "ValueError: a bad thing"
    assert traffic() == before
    same(comm.reduce([(torch.ones(3, dtype=torch.bfloat16), [3])]).wait(), torch.ones(3), "the sum, in float32")


# -------------------------------------------------------------------------------------------------------- Full tensors


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@ranks.on(3)
def test_whole_tensors_and_texts_reach_whom_they_are_meant_for(rank, world, way):
    comm = Comm()
    with as_on(way):
        comm.agree(comm.channel("a test"))  # from here on the way stays

    def tensors(of, source):
        """From rank 0 one passes the limit of one message."""
        found = [numbers(of, length, torch.float32) for length in [0, 1, 5, 3 if source else 5_000_000, 0, 3]]
        return [*found, torch.tensor(of + 0.5), numbers(of, 12, torch.int64).view(3, 4).t(), torch.tensor([of == 1])]

    for source in range(world):
        received = tensors(rank, source)
        comm.broadcast(received, source)
        same(received, tensors(source, source), f"from rank {source}")

    for bounds in ([0, 2, 2, 7], [0, 0, 5_000_000, 5_000_007], [0, 3, 6, 9]):
        for dtype in (torch.float32, torch.complex64, torch.bfloat16, torch.bool, torch.uint16):
            full, segment = numbers(0, bounds[-1], torch.int64).to(dtype), slice(*bounds[rank : rank + 2])
            own = torch.zeros_like(full[segment])
            comm.scatter(partial(_read, full), bounds, own)
            same(own, full[segment], f"{dtype} in the first rank's segments")

    # Elements that lie conjugated or negated in memory, on the first rank alone.
    pair = torch.tensor([1 + 2j, 3 - 1j])
    for view, expected in ((pair.conj(), [1 - 2j, 3 + 1j]), (pair.conj().imag, [-2.0, 1.0])):
        own = torch.zeros(2, dtype=view.dtype) if rank else view
        comm.broadcast([own])
        assert own.tolist() == expected
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    comm.broadcast([weight], 1)
    assert weight.tolist() == [1.0] * 3 and weight.requires_grad

    total, most = torch.tensor([1.0 + rank, 2.0]), torch.tensor([rank, -rank])
    comm.all_reduce(total)
    comm.all_reduce(most, maximum=True)
    for place in range(world):
        holes = torch.tensor([math.nan if rank == place else float(rank), -math.inf, float(rank)])
        comm.all_reduce(holes, maximum=True)
        assert holes[0].isnan() and holes[1:].tolist() == [-math.inf, world - 1]
    averages = [numbers(rank, length, dtype) for dtype in [torch.float32, torch.bfloat16] for length in [7, LARGE]]
    expected = [
        sum_in_rank_order([numbers(peer, length, dtype) for peer in range(world)], 1 / world).to(dtype)
        for dtype in [torch.float32, torch.bfloat16]
        for length in [7, LARGE]
    ]
    for tensor, average in zip(averages, expected, strict=True):
        comm.all_reduce(tensor, times=1 / world)
        if comm.reads_memory(tensor.device):
            same(tensor, average, "an average")
        elif tensor.dtype == torch.float32:  # others add 16-bit floats as such
            torch.testing.assert_close(tensor, average)
    assert total.tolist() == [world * (world + 1) / 2, 2.0 * world]
    assert most.tolist() == [world - 1, 0]

    owners = [0, world - 1, 0, 1]
    values = [numbers(owner, 4 + place, torch.float64, place) for place, owner in enumerate(owners)]
    for to in [None, *range(world)]:
        room = [
            value.clone() if rank == owner else torch.zeros_like(value) if to in (None, rank) else None
            for owner, value in zip(owners, values, strict=True)
        ]
        sizes = [value.nbytes for value in values]
        comm.collect([*zip(owners, sizes, room, strict=True)], to, HERE)
        if to in (None, rank):
            same(room, values, f"collected by {to}")

    texts = ["", "ä" * 5000, "rank 2", "x"][:world]
    assert comm.all_gather_text(texts[rank]) == texts


# ------------------------------------------------------------------------------------------------------------- Traffic


@pytest.mark.parametrize("way", WAYS)
@ranks.on(2, timeout=20)
def test_ranks_that_move_other_numbers_of_bytes_are_out_of_step(rank, world, way):
    with as_on(way):
        comm = Comm(dist.new_group())
        comm.all_reduce(torch.ones(8))
        assert "moved different numbers of bytes" in refusal(lambda: comm.all_reduce(torch.ones(8 + 92 * rank)))


@pytest.mark.parametrize("way", WAYS)
@ranks.on(3)
def test_traffic_counts_the_bytes_that_each_rank_sends(rank, world, way):
    comm = Comm()
    channel = comm.channel("a test")
    with as_on(way):
        comm.agree(channel)

    def spent(operation, *args, **options):
        before = traffic()
        handle = operation(*args, **options)
        if hasattr(handle, "wait"):
            handle.wait()
        return traffic() - before

    bounds, messages = [0, LARGE + 10, LARGE + 10, LARGE + 40], [(torch.zeros(LARGE), [LARGE, 0, 0])]
    eight, six = (torch.zeros(8), [2, 0, 6]), torch.zeros(6, dtype=torch.bfloat16)
    assert spent(comm.gather, torch.zeros(LARGE + 40), bounds, channel).gather == 8 * [LARGE + 10, 0, 30][rank]
    assert spent(comm.reduce, [eight, *messages]) == Traffic(reduce=4 * (8 + LARGE - [2 + LARGE, 0, 6][rank]))
    assert spent(comm.reduce, [(eight[0].bfloat16(), eight[1])]) == Traffic(reduce=2 * (8 - [2, 0, 6][rank]))
    assert spent(comm.agree, channel) == Traffic()
    assert spent(comm.collect, [(1, 12, six)], None, HERE) == Traffic(other=2 * 12 if rank == 1 else 0)
    to_last = [(1, 12, six if rank else None), (2, 12, six if rank == 2 else None)]
    assert spent(comm.collect, to_last, 2, HERE) == Traffic(other=12 if rank == 1 else 0)
    read = partial(_read, torch.zeros(7))
    assert spent(comm.scatter, read, [0, 2, 4, 6], torch.zeros(2)) == Traffic(other=0 if rank else 2 * 2 * 4)
    found = spent(comm.scatter, read, [0, 2, 4, 7], torch.zeros([2, 2, 3][rank]))
    assert found == Traffic(other=0 if rank else 5 * 4)
    assert spent(comm.broadcast, [torch.zeros(7)], source=2) == Traffic(other=2 * 28 if rank == 2 else 0)
    assert spent(comm.all_reduce, torch.zeros(6)) == Traffic(other=2 * 24 * 2 // 3)


# ----------------------------------------------------------------------------------------------------------- Comparing

COMPARED = {  # what the last rank has in place of a: 1 and b: 2, its problem, and what every rank is told
    "the same": (["a: 1", "b: 2"], None, "^$"),
    "another value": (["a: 1", "b: 3"], None, "differ .* position 1, rank 0 has b: 2, rank {last} has b: 3"),
    "fewer": (["a: 1"], None, "differ .* position 1, rank 0 has b: 2, rank {last} has nothing"),
    "more": (["a: 1", "b: 2", "c"], None, "differ .* position 2, rank 0 has nothing, rank {last} has c"),
    "a problem": (["a: 1", "b: 2"], ValueError("a is bad."), r"^ValueError: a is bad\. \(on rank {last}\)$"),
    "a problem and a difference": (["a: 3"], ValueError("a is bad."), r"^ValueError: a is bad\. \(on rank {last}\)$"),
}


@ranks.on(3)
def test_a_difference_or_a_problem_raises_the_same_on_every_rank(rank, world):
    comm, last = Comm(), world - 1
    for name, (lines, problem, fact) in COMPARED.items():
        given = ("the things", lines, problem) if rank == last else ("the things", ["a: 1", "b: 2"])
        text = refusal(partial(comm.compare, *given))
        assert re.search(fact.format(last=last), text), f"{name}: {text}"
        assert comm.all_gather_text(text) == [text] * world, name
    everyone = ", ".join(map(str, range(world)))
    assert f"(on rank {everyone})" in refusal(lambda: comm.compare("the things", ["a: 1"], ValueError("a is bad.")))


# ------------------------------------------------------------------------------------------------- Nobody waits for it


WORKS = {
    "in a group": lambda buffer: GroupWork(Log(0, 2), True, 0, buffer, []),
    "sums": lambda buffer: SumWork(torch.sum, Work([buffer]), 1),
    "over replicas": lambda buffer: ReplicaWork(Work(buffer), Comm.alone(), 0, torch.float32),
    "on a stream": lambda buffer: StreamWork(buffer, None, None, None, Comm.alone(), buffer),
}


@pytest.mark.parametrize("work", WORKS)
def test_buffers_of_what_nobody_waits_for_are_freed_without_the_garbage_collector(work):
    gc.disable()
    try:
        buffer = torch.ones(8)
        kept, made = weakref.ref(buffer), WORKS[work](buffer)
        del buffer
        assert kept() is not None
        del made
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize("way", WAYS)
@ranks.on(2, timeout=20)
def test_a_rank_that_fails_to_read_what_it_scatters_fails_on_every_rank(rank, world, way, fails_at):
    comm, reads = Comm(), []

    def read(start: int, into: torch.Tensor) -> None:
        reads.append(start)
        if len(reads) > 2 * fails_at:
            raise OSError("the file is damaged")
        into.fill_(1)

    with as_on(way), mock.patch.object(comm_module, "BATCH", 800):
        into = torch.zeros(350 + rank)
        text = ranks.refusal(lambda: comm.scatter(read, [0, 350, 701], into))
        assert text == f"OSError: {'' if rank == 0 else 'rank 0 has raised OSError: '}the file is damaged"
        comm.agree(0)  # the group goes on
