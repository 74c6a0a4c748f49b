"""Int8: how far off what arrives is, what of it is not finite, and both operations beside the same by share."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ranks
import zero
from transports import TRANSPORTS, by, overlapping
from zero._torch import without_values
from zero.comm import Comm
from zero.comm.order import GATHER, REDUCTION
from zero.features.int8 import Int8
from zero.plan.rehearsal import rehearsed_traffic
from zero.plan.transport import rehearsed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = [*TRANSPORTS, "nccl"]


LARGE = 70_000  # elements
CUTS = {
    2: [[16, 16], [LARGE, LARGE], [60, 50], [0, 300], [LARGE, 0], [0, 0]],
    3: [[16, 16, 16], [LARGE] * 3, [3, 600, 64], [7, 0, 9], [0, 0, LARGE], [0, 0, 0]],
}
"""How many elements go from, or to, each of so many ranks: equally many, as many records, none here and there."""


def numbers(rank, length, dtype, salt=0):
    """What rank `rank` has, on whatever rank it is asked for."""
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * salt + rank)).to(dtype)


def assert_equal(got, expected, what):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(got, expected), f"{what}: off by {(got - expected).abs().max()}"


def arrived(int8, flat, counts):
    into = torch.full_like(flat, 77)
    int8.decode(int8.encode(flat, counts), into, counts)
    return into


def furthest(int8, share):
    """Of each element, how far off it may be: by 1/254 of the largest one of its block, and by rounding."""
    numbers = torch.arange(len(share)) // int8.block
    largest = torch.zeros(len(share)).scatter_reduce(0, numbers, share.float().abs(), "amax").clamp(min=2.0**-118)
    info = torch.finfo(share.dtype)
    return largest[numbers] * ((1 + 2**-14) / 254 + info.eps / 2) + info.smallest_normal * info.eps / 2


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 3000)), min_size=1, max_size=4),
    alike=st.booleans(),
    block=st.integers(1, 40).map(lambda number: 8 * number),
    dtype=st.sampled_from(DTYPES),
    spread=st.integers(0, 40),
    seed=st.integers(0, 10**6),
)
def test_no_element_is_off_by_more_than_a_254th_of_the_largest_of_its_block(counts, alike, block, dtype, spread, seed):
    counts, int8 = [counts[0]] * len(counts) if alike else counts, Int8(block)
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(counts),)
    powers = torch.randint(-spread, 1, shape, generator=generator) if spread else torch.zeros(shape)
    flat = (torch.randn(shape, generator=generator) * 2.0**powers).to(dtype)
    found = arrived(int8, flat, counts)
    for share, its in zip(flat.split(counts), found.split(counts), strict=True):
        assert ((its.float() - share.float()).abs() <= furthest(int8, share)).all()
        assert torch.equal(int8.rounded(share), its)  # whatever lies beside it


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_of_a_dtype_do_not_overflow(dtype):
    flat = torch.linspace(-1, 1, 512).to(dtype) * torch.finfo(dtype).max
    assert arrived(Int8(), flat, [512]).isfinite().all()


def test_zeros_arrive_as_zeros_and_very_small_numbers_as_almost_these():
    flat = torch.cat([torch.zeros(256), torch.full((256,), 2.0**-140)])
    found = arrived(Int8(), flat, [512])
    scales = Int8().encode(flat, [512]).view(2, -1)[:, 256:].view(torch.float32)
    assert (scales >= torch.finfo(torch.float32).tiny).all()  # what divides by less may be rounded to 0
    assert not found[:256].any()
    assert (found - flat).abs().max() <= 2.0**-118 / 254


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_that_is_not_finite_arrives_so_and_no_other_does(dtype):
    flat = numbers(0, 1000, torch.float32).to(dtype)
    flat[300], flat[600], flat[601] = torch.nan, -torch.inf, torch.inf
    found = arrived(Int8(), flat, [1000])
    assert found[256:512].isnan().all()
    assert (found[600], found[601]) == (-torch.inf, torch.inf)
    assert not found[512:768].isfinite().any()
    assert found[:256].isfinite().all()
    assert found[768:].isfinite().all()


@pytest.mark.parametrize("block", [0, -8, 12, 256.0, True, None], ids=str)
def test_a_block_of_other_lengths_is_refused(block):
    with pytest.raises(ValueError, match=r"Int8\(block=.*positive multiple of 8"):
        Int8(block)


# ------------------------------------------------------------------------------------------------------ gather, reduce


def on(way):
    return overlapping(way) if way == "nccl" else by(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
@ranks.on("world")
def test_every_rank_gathers_what_each_owner_has_as_it_is_rounded(rank, world, way):
    int8 = Int8(64)
    with on(way):
        comm = Comm()
        for dtype, keeps, lengths in itertools.product([torch.float32, torch.bfloat16], [True, False], CUTS[world]):
            bounds, what = [0, *itertools.accumulate(lengths)], f"{dtype} {lengths}"
            shards = [numbers(peer, length, dtype) for peer, length in enumerate(lengths)]
            full = torch.full((bounds[-1],), 77, dtype=dtype)
            full[bounds[rank] : bounds[rank + 1]] = shards[rank]
            before = zero.traffic()
            int8.gather(comm, full, bounds, GATHER, keeps_own=keeps).wait()
            assert (zero.traffic() - before).gather == int8.lengths(lengths)[rank] * (world - 1)
            for peer, shard in enumerate(shards):
                expected = shard if keeps and peer == rank else int8.rounded(shard)
                assert_equal(full[bounds[peer] : bounds[peer + 1]], expected, what)
        exact = torch.arange(1000 * world)
        full = torch.where(exact // 1000 == rank, exact, 0)
        int8.gather(comm, full, range(0, 1000 * world + 1, 1000), GATHER, keeps_own=False).wait()
        assert_equal(full, exact, "integers")


SPLITS = {world: [*([cut] for cut in cuts), cuts[:3]] for world, cuts in CUTS.items()}
"""The same of one message after another."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
@ranks.on("world")
def test_rounded_shares_are_added_up_in_float32_in_rank_order(rank, world, way):
    int8 = Int8(64)
    with on(way):
        comm = Comm()
        for dtype, lengths in itertools.product([torch.float32, torch.bfloat16], SPLITS[world]):
            given = [
                [numbers(peer, sum(counts), dtype, place) for place, counts in enumerate(lengths)]
                for peer in range(world)
            ]
            mine = [message.clone() for message in given[rank]]
            before = zero.traffic()
            result = int8.reduce(comm, [*zip(mine, lengths, strict=True)], 0.25, REDUCTION).wait()
            others = [number for counts in lengths for peer, number in enumerate(counts) if peer != rank]
            assert (zero.traffic() - before).reduce == sum(int8.lengths(others))

            expected = torch.zeros(len(result))
            for sent in given:
                shares = [message.split(counts)[rank] for message, counts in zip(sent, lengths, strict=True)]
                expected += torch.cat([int8.rounded(share.float()) for share in shares])
            assert_equal(result, expected * 0.25, f"{dtype} {lengths}")
            for message, original in zip(mine, given[rank], strict=True):
                assert_equal(message, original, f"{dtype} {lengths}: what was sent")


@ranks.on(bare=True)
def test_a_rank_by_itself_rounds_nothing(rank, world):
    comm, int8, full = Comm(), Int8(), numbers(0, 1000, torch.float32)
    before = full.clone()
    int8.gather(comm, full, [0, 1000], GATHER, keeps_own=False).wait()
    assert_equal(full, before, "gathered alone")
    assert_equal(int8.reduce(comm, [(full, [1000])], 1, REDUCTION).wait(), before, "reduced alone")


@pytest.mark.parametrize("like", ["gloo", "host memory", "nccl"])
def test_ranks_that_are_not_there_send_as_many_bytes(like):
    comm = rehearsed(1, 4, like)
    with rehearsed_traffic(), without_values():
        Int8().gather(comm, torch.empty(4000), range(0, 4001, 1000), GATHER, keeps_own=False).wait()
        sums = Int8().reduce(comm, [(torch.empty(4000), [1000] * 4)], 1, REDUCTION).wait()
        assert (zero.traffic().gather, zero.traffic().reduce) == (3 * 4 * 260, 3 * 4 * 260)
    assert (len(sums), sums.dtype) == (1000, torch.float32)
