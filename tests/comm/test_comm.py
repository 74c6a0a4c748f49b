"""What ranks say to one another: gather and reduce beside sums computed apart, traffic, and errors on every rank."""

import itertools
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist

import gpus
import matrix
import ranks
from ranks import refusal
from transports import between_hosts, overlapping
from zero.comm import Comm, Traffic, traffic

WORLDS = [2, 3, 4]
WAYS = ["nccl"] if gpus.ON else ["reading", "gloo"]
LARGE = 70_000  # elements


@contextmanager
def as_on(way):
    """How ranks reach each other: by reading each other's memory, by collectives of Gloo, or of another backend.

    What goes by another backend here runs over Gloo all the same.
    """
    with ExitStack() as patches:
        if way == "gloo":
            patches.enter_context(between_hosts())
        elif way == "other":
            patches.enter_context(overlapping(way, returns_work=False))
        yield


def numbers(rank, length, dtype, salt=0):
    """What rank `rank` has, on whatever rank it is asked for."""
    generator = gpus.generator(100 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)
    return torch.randint(-1000, 1000, (length,), generator=generator).to(dtype)


def assert_equal(got, expected, what):
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {list(got.shape)}, expected {list(expected.shape)}"
    assert torch.equal(got, expected), f"{what}: off by {(got - expected).abs().max()}"


# -------------------------------------------------------------------------------------------------------------- gather


def cuts(world):
    """Lengths of segments: equal, all different, with an empty one at each place, all with one rank, nothing at all."""
    yield [16] * world
    yield [LARGE] * world
    yield [3 + 5 * rank for rank in range(world)]
    for empty in range(world):
        yield [0 if rank == empty else 7 + rank for rank in range(world)]
        yield [LARGE if rank == empty else 0 for rank in range(world)]
    yield [0] * world


@pytest.mark.parametrize("way", [*WAYS, "other"])
@pytest.mark.parametrize("world", WORLDS)
@ranks.on("world")
def test_gather_brings_every_segment_to_every_rank(rank, world, way):
    comm = Comm()
    channel = comm.channel("gathering in a test")
    with as_on(way):
        for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]:
            for lengths in cuts(world):
                bounds = [0, *itertools.accumulate(lengths)]
                expected = torch.cat([numbers(peer, length, dtype) for peer, length in enumerate(lengths)])
                full = torch.full_like(expected, 77)
                full[bounds[rank] : bounds[rank + 1]] = numbers(rank, lengths[rank], dtype)
                comm.gather(full, bounds, channel).wait()
                assert_equal(full, expected, f"{dtype} {lengths}")


# -------------------------------------------------------------------------------------------------------------- reduce


def splits(world):
    """Of each message, how many elements go to each rank: even and uneven, to one alone, to all but one, several."""
    yield [[16] * world]
    yield [[LARGE] * world]
    yield [[1 + 3 * rank for rank in range(world)]]
    for one in range(world):
        yield [[0 if rank == one else 9 + rank for rank in range(world)]]
        yield [[LARGE if rank == one else 0 for rank in range(world)]]
        yield [[5] * world, [LARGE if rank == one else 0 for rank in range(world)], [7 * rank for rank in range(world)]]


def sent_to(rank, message, counts):
    return message.split(counts)[rank]


@gpus.cpu_only("NCCL adds up in the order of its ring")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
@ranks.on("world")
def test_reduce_gives_each_owner_the_sum_in_rank_order_and_leaves_what_was_sent(rank, world, way):
    comm = Comm()
    with as_on(way):
        comm.agree(comm.channel("a test"))  # from here on the way stays
    for dtype in [torch.float32, torch.float64, torch.int64, torch.complex64]:
        for lengths in splits(world):
            given = [
                [numbers(peer, sum(counts), dtype, place) for place, counts in enumerate(lengths)]
                for peer in range(world)
            ]
            mine = [message.clone() for message in given[rank]]
            times = 0.25 if dtype.is_floating_point else 1
            result = comm.reduce([*zip(mine, lengths, strict=True)], times=times).wait()

            terms = [torch.cat([*map(sent_to, itertools.repeat(rank), sent, lengths)]) for sent in given]
            expected = terms[0].clone()
            for term in terms[1:]:
                expected += term  # one rank after another
            expected *= times
            assert_equal(result, expected, f"{dtype} {lengths}")
            for message, original in zip(mine, given[rank], strict=True):
                assert_equal(message, original, f"{dtype} {lengths}: what was sent")


@gpus.cpu_only("a kernel adds up in an order of its own")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ranks.on(4)
def test_half_precision_is_added_up_in_float32(rank, world, dtype, way):
    given = [numbers(peer, world * 1000, dtype) for peer in range(world)]
    with as_on(way):
        result = Comm().reduce([(given[rank], [1000] * world)]).wait()
    expected = given[0].chunk(world)[rank].float()
    for term in given[1:]:
        expected += term.chunk(world)[rank].float()
    assert_equal(result, expected, "the sum")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", WORLDS)
@ranks.on("world")
def test_sums_may_take_the_place_of_what_a_rank_has_for_itself(rank, world, dtype, way):
    given = [numbers(peer, world * LARGE, dtype) for peer in range(world)]
    mine = given[rank].clone()
    own = mine.chunk(world)[rank]
    with as_on(way):
        result = Comm().reduce([(mine, [LARGE] * world)], times=0.25, into=own).wait()
        expected = Comm().reduce([(given[rank], [LARGE] * world)], times=0.25).wait()
    assert result is own
    given[rank].chunk(world)[rank].copy_(expected)
    assert_equal(mine, given[rank], "what was sent, with the sums in it")


@ranks.on(2)
def test_on_two_ranks_reduce_gives_the_bits_of_all_reduce(rank, world):
    """An average as DistributedDataParallel takes it: Gloo's own sum over two ranks."""
    comm = Comm()
    own = numbers(rank, 2 * LARGE, torch.float32)
    result = comm.reduce([(own, [LARGE] * world)]).wait()
    expected = own.clone()
    dist.all_reduce(expected)
    assert_equal(result, expected.chunk(world)[rank], "the reduced segment")


# -------------------------------------------------------------------------------------------------------------- Groups


def _subgroup(rank, world, way):
    group = dist.new_group([0, 2])
    if rank == 1:
        return refusal(lambda: Comm(group))
    comm = Comm(group)
    assert (comm.rank, comm.world) == (rank // 2, 2)
    channel = comm.channel("gathering")
    with as_on(way):
        for lengths in [[4, 4], [2, 6], [0, 8], [LARGE, 1]]:
            bounds = [0, lengths[0], sum(lengths)]
            full = torch.full((sum(lengths),), float(rank))
            comm.gather(full, bounds, channel).wait()
            assert full.tolist() == [0.0] * lengths[0] + [2.0] * lengths[1]
            result = comm.reduce([(torch.full((sum(lengths),), rank + 1.0), lengths)]).wait()
            assert result.tolist() == [4.0] * lengths[comm.rank]
        comm.agree(channel)
    told = torch.tensor([float(rank)])
    comm.broadcast([told], source=1)
    assert told.item() == 2
    comm.all_reduce(told)
    assert told.item() == 4
    assert comm.all_gather_text(str(rank)) == ["0", "2"]
    first, second = (torch.full((3,), float(rank)) for _ in range(2))
    comm.collect([(0, first), (1, second)], None)
    assert (first.tolist(), second.tolist()) == ([0.0] * 3, [2.0] * 3)
    value = torch.tensor([float(rank)])
    comm.collect([(0, value)], 1)
    assert value.item() == 0
    return ""


@pytest.mark.parametrize("way", [*WAYS, "other"])
def test_ranks_are_of_the_group_not_of_the_world(way):
    first, outside, second = ranks.run(_subgroup, 3, args=(way,))
    assert first == second == ""
    assert outside.startswith("ValueError: rank 1 of the job is not in the process group")


def test_without_a_process_group_this_process_is_a_world_of_its_own():
    comm = Comm()
    before = traffic()
    assert (comm.rank, comm.world, comm.group) == (0, 1, None)
    channel = comm.channel("anything")
    full, messages = torch.arange(5.0), [(torch.arange(3.0), [3]), (torch.arange(2.0), [2])]
    comm.gather(full, [0, 5], channel).wait()
    assert_equal(full, torch.arange(5.0), "what was gathered")
    assert comm.reduce(messages).wait().tolist() == [0, 1, 2, 0, 1]
    comm.agree(channel)
    comm.compare("things", ["one"])
    assert comm.all_gather_text("ü") == ["ü"]
    comm.broadcast([full])
    comm.all_reduce(full)
    comm.collect([(0, full)], 0)
    comm.collect([(0, full)], None)
    assert_equal(full, torch.arange(5.0), "what was sent about")
    with pytest.raises(ValueError, match=r"^a bad thing$"):
        comm.compare("things", ["one"], "a bad thing")
    assert traffic() == before


def test_in_a_world_of_one_too_reduce_returns_a_new_tensor_in_float32():
    given = torch.ones(3, dtype=torch.bfloat16)
    assert_equal(Comm().reduce([(given, [3])]).wait(), torch.ones(3), "the sum")
    given = torch.ones(3)
    Comm().reduce([(given, [3])]).wait().zero_()
    assert given.tolist() == [1, 1, 1]
    assert Comm().reduce([(given, [3])], times=0.5).wait().tolist() == [0.5, 0.5, 0.5]
    assert Comm().reduce([(given, [3])], times=0.5, into=given).wait() is given
    assert given.tolist() == [0.5, 0.5, 0.5]


def _channels(rank, world):
    one, another = Comm(), Comm()
    return [one.channel("a"), another.channel("b"), one.channel("c"), Comm(dist.new_group([0, 1])).channel("d")]


def test_users_of_one_group_never_share_a_channel():
    first, second = ranks.run(_channels, 2)
    assert first == second
    assert len(set(first[:3])) == 3


# -------------------------------------------------------------------------------------------------------- Full tensors


@matrix.combined("world, way", WORLDS, WAYS)
@ranks.on("world")
def test_whole_tensors_and_texts_reach_whom_they_are_meant_for(rank, world, way):
    comm = Comm()
    with as_on(way):
        comm.agree(comm.channel("a test"))  # from here on the way stays
    lengths = [0, 1, 5, 5_000_000, 0, 3]  # the long one passes the limit of one message
    mine = [numbers(rank, length, torch.float32, salt) for salt, length in enumerate(lengths)]
    mine += [torch.tensor(rank + 0.5), numbers(rank, 12, torch.int64).view(3, 4).t(), torch.tensor([rank == 1])]
    for source in range(world):
        received = [tensor.clone(memory_format=torch.preserve_format) for tensor in mine]
        comm.broadcast(received, source)
        expected = [numbers(source, length, torch.float32, salt) for salt, length in enumerate(lengths)]
        expected += [torch.tensor(source + 0.5), numbers(source, 12, torch.int64).view(3, 4).t()]
        expected += [torch.tensor([source == 1])]
        for got, wanted in zip(received, expected, strict=True):
            assert_equal(got, wanted, f"from rank {source}")

    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    comm.broadcast([weight], 1)
    assert weight.tolist() == [1.0] * 3
    assert weight.requires_grad

    total, most = torch.tensor([1.0 + rank, 2.0]), torch.tensor([rank, -rank])
    comm.all_reduce(total)
    comm.all_reduce(most, maximum=True)
    assert total.tolist() == [world * (world + 1) / 2, 2.0 * world]
    assert most.tolist() == [world - 1, 0]

    for to in [None, *range(world)]:
        owners = [0, world - 1, 0, 1]
        values = [numbers(owner, 4 + place, torch.float64, place) for place, owner in enumerate(owners)]
        room = [
            value.clone() if rank == owner else torch.zeros_like(value) if to in (None, rank) else None
            for owner, value in zip(owners, values, strict=True)
        ]
        comm.collect([*zip(owners, room, strict=True)], to)
        for got, wanted in zip(room, values, strict=True):
            if to in (None, rank):
                assert_equal(got, wanted, f"collected by {to}")

    texts = ["", "ä" * 5000, "rank 2", "x"][:world]
    assert comm.all_gather_text(texts[rank]) == texts


# ------------------------------------------------------------------------------------------------------------- Traffic


@pytest.mark.parametrize("way", WAYS)
@ranks.on(3)
def test_traffic_counts_the_bytes_that_each_rank_sends(rank, world, way):
    comm = Comm()
    channel = comm.channel("a test")
    with as_on(way):
        comm.agree(channel)
    spent = []

    def count(operation):
        before = traffic()
        operation()
        spent.append(traffic() - before)

    count(lambda: comm.gather(torch.zeros(LARGE + 40), [0, LARGE + 10, LARGE + 10, LARGE + 40], channel).wait())
    messages = [(torch.zeros(8), [2, 0, 6]), (torch.zeros(LARGE, dtype=torch.float32), [LARGE, 0, 0])]
    count(lambda: comm.reduce(messages).wait())
    count(lambda: comm.reduce([(torch.zeros(8, dtype=torch.bfloat16), [2, 0, 6])]).wait())
    count(lambda: comm.agree(channel))
    six = torch.zeros(6, dtype=torch.bfloat16)
    count(lambda: comm.collect([(1, six)], None))
    count(lambda: comm.collect([(1, six if rank else None), (2, six if rank == 2 else None)], 2))
    count(lambda: comm.broadcast([torch.zeros(7)], source=2))
    count(lambda: comm.all_reduce(torch.zeros(6)))
    gather, reduce, half, agree, collect, collect_to, broadcast, all_reduce = spent
    assert gather == Traffic(gather=2 * 4 * [LARGE + 10, 0, 30][rank])
    assert reduce == Traffic(reduce=4 * (8 + LARGE - [2 + LARGE, 0, 6][rank]))
    assert half == Traffic(reduce=2 * (8 - [2, 0, 6][rank]))
    assert agree == Traffic()
    assert collect == Traffic(other=2 * 12 if rank == 1 else 0)
    assert collect_to == Traffic(other=12 if rank == 1 else 0)
    assert broadcast == Traffic(other=2 * 28 if rank == 2 else 0)
    assert all_reduce == Traffic(other=2 * 24 * 2 // 3)


def test_traffic_is_added_and_subtracted_kind_by_kind():
    more, less = Traffic(gather=5, reduce=7, other=11), Traffic(gather=1, reduce=2, other=3)
    assert more - less == Traffic(gather=4, reduce=5, other=8)
    assert more + less == Traffic(gather=6, reduce=9, other=14)
    assert more.total == 23


# ------------------------------------------------------------------------------ Several at once, and ranks out of step


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
@ranks.on("world", timeout=20)
def test_operations_in_flight_at_once_do_not_mix(rank, world, way):
    comm = Comm()
    channel = comm.channel("a test")
    with as_on(way):
        comm.agree(channel)
    fulls, gathers, reduces = [], [], []
    for which, length in enumerate([10, LARGE, 20]):  # launched in one order, waited for in each rank's own
        full = torch.zeros(world * length)
        full[rank * length : (rank + 1) * length] = 100 * which + rank
        fulls.append(full)
        gathers.append(comm.gather(full, range(0, world * length + 1, length), channel))
        reduces.append(comm.reduce([(torch.full((world * length,), 10.0 * which + rank), [length] * world)]))
    for which in [(rank + place) % 3 for place in range(3)]:
        total = reduces[which].wait()
        assert set(total.tolist()) == {sum(10.0 * which + peer for peer in range(world))}
    for which in range(3):
        gathers[which].wait()
        expected = torch.arange(world).repeat_interleave(len(fulls[which]) // world) + 100.0 * which
        assert_equal(fulls[which], expected, f"gather {which}")


@pytest.mark.parametrize("way", WAYS)
@ranks.on(2, timeout=20)
def test_gathers_may_be_waited_for_in_an_order_of_each_ranks_own(rank, world, way):
    comm = Comm()
    with as_on(way):
        comm.agree(comm.channel("another test"))
    fulls = [torch.full((world * LARGE,), 10.0 * which + rank) for which in range(2)]
    bounds = range(0, world * LARGE + 1, LARGE)
    handles = [comm.gather(full, bounds, comm.channel("a test")) for full in fulls]
    for which in range(2) if rank == 0 else reversed(range(2)):
        handles[which].wait()
    assert [full.view(world, LARGE).unique(dim=1).squeeze(1).tolist() for full in fulls] == [[0.0, 1.0], [10.0, 11.0]]


@ranks.on(2)
def test_a_handle_is_waited_for_once(rank, world):
    handle = Comm().reduce([(torch.ones(2), [1, 1])])
    handle.wait()
    text = refusal(handle.wait)
    assert "was waited for before" in text


def _out_of_step(rank, world, operations, way):
    comm = Comm()
    channels = {name: comm.channel(f"the {name} of a test") for name in ["gather", "agree", "other agree"]}

    def come_to(name):
        if name == "gather":
            comm.gather(torch.zeros(4 * world), range(0, 4 * world + 1, 4), channels[name]).wait()
        else:
            comm.agree(channels[name])

    with as_on(way):
        come_to("agree")  # all together: no harm
        return refusal(lambda: come_to(operations[rank])), refusal(lambda: come_to("agree"))


@pytest.mark.parametrize(
    "operations",
    [("agree", "other agree"), ("gather", "agree"), ("agree", "gather", "agree"), ("gather", "other agree", "gather")],
)
@pytest.mark.parametrize("way", [*WAYS, "other"])
def test_ranks_out_of_step_are_told_on_every_rank_what_each_is_doing(operations, way):
    told = ranks.run(_out_of_step, len(operations), args=(operations, way), timeout=20)
    for rank, (first, _) in enumerate(told):
        assert first.startswith(
            f"RuntimeError: ranks are out of step: rank {rank} is in the {operations[rank]} of a test"
        )
        for peer, operation in enumerate(operations):
            named = f"rank {peer} in the {operation} of a test"
            assert (named in first) == (operation != operations[rank]), first


@pytest.mark.parametrize("way", [*WAYS, "other"])
def test_after_ranks_were_out_of_step_the_group_refuses_to_go_on(way):
    for _, second in ranks.run(_out_of_step, 2, args=(("agree", "gather"), way), timeout=20):
        assert second.startswith("RuntimeError: ranks are out of step")
        assert "nitialise the process group again" in second


# ------------------------------------------------------------------------------ Groups that send only what is on a GPU


def _host_group(rank, world):
    """As of NCCL alone, but that it sends nothing; the last rank is no member."""
    members = [*range(world - 1)]
    group = dist.new_group(members, backend="cuda:gloo")
    if rank not in members:
        return None
    comm = Comm(group)
    channel = comm.channel("a test")
    comm.agree(channel)
    told = torch.tensor([float(rank)])
    comm.all_reduce(told)
    full = torch.full((len(members),), float(rank))
    comm.gather(full, range(len(members) + 1), channel).wait()
    own = Comm(group).all_gather_text(str(rank))
    return told.item(), full.tolist(), own, refusal(lambda: comm.compare("the things", [f"a: {rank}"]))


@gpus.cpu_only("Gloo stands for NCCL in this group, and sends nothing that is on a GPU")
def test_ranks_of_a_group_for_gpus_alone_are_compared_all_the_same():
    first, second, outside = ranks.run(_host_group, 3)
    assert first == second == (1.0, [0.0, 1.0], ["0", "1"], first[3])
    assert first[3].startswith("ValueError: the things differ between ranks")
    assert outside is None


# ----------------------------------------------------------------------------------------------------------- Comparing


def _compare(rank, world):
    comm = Comm()
    last = rank == world - 1

    def told(lines, problem=None):
        return refusal(lambda: comm.compare("the things", lines, problem))

    return {
        "same": told(["a: 1", "b: 2"]),
        "nothing": told([]),
        "value": told(["a: 1", "b: 3" if last else "b: 2"]),
        "order": told(["b: 2", "a: 1"] if last else ["a: 1", "b: 2"]),
        "fewer": told(["a: 1"] if last else ["a: 1", "b: 2"]),
        "more": told(["a: 1", "b: 2"] if last else ["a: 1"]),
        "problem": told(["a: 1"], "a is bad." if last else None),
        "problem of all": told(["a: 1"], "a is bad."),
        "problem and difference": told([f"a: {rank}"], "a is worse." if rank == 0 else None),
        "same again": told(["a: 1"]),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_a_difference_or_a_problem_raises_the_same_on_every_rank(world):
    first, *others = ranks.run(_compare, world)
    assert all(other == first for other in others)
    last = world - 1
    differ = "ValueError: the things differ between ranks: at position"
    everyone = ", ".join(map(str, range(world)))
    assert first == {
        "same": "",
        "nothing": "",
        "value": f"{differ} 1, rank 0 has b: 2, rank {last} has b: 3. {REMEDY}",
        "order": f"{differ} 0, rank 0 has a: 1, rank {last} has b: 2. {REMEDY}",
        "fewer": f"{differ} 1, rank 0 has b: 2, rank {last} has nothing. {REMEDY}",
        "more": f"{differ} 1, rank 0 has nothing, rank {last} has b: 2. {REMEDY}",
        "problem": f"ValueError: a is bad. (on rank {last})",
        "problem of all": f"ValueError: a is bad. (on rank {everyone})",
        "problem and difference": "ValueError: a is worse. (on rank 0)",
        "same again": "",
    }


REMEDY = "Build the same on every rank, in the same order."
