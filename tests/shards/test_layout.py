"""Geometry: every element with exactly one rank, in equal shares, cut only where it may be cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import zero
from inner import nbytes, shard_groups
from matrix import WHOLE
from ranks import refusal
from zero.shards import layout
from zero.shards.partition import Shares, arrange, assign, bucket_limit
from zero.shards.shapes import Shapes, dense_stride, refuse_shared


def exhaustively(*draws):
    return lambda test: pytest.mark.slow(settings(deadline=None, max_examples=200)(given(*draws)(test)))


numels = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=12)
worlds = st.integers(1, 64)
alignments = st.sampled_from([1, 4, 16, 32, 64])


@st.composite
def owned(draw, cuts=True):
    """Sizes with an owner each, or none where they are cut, a world that has all these owners, and of what is cut the
    part before the end of each rank's."""
    sizes = draw(numels)
    world = draw(worlds)
    owner = st.integers(0, world - 1)
    owners = [draw(st.one_of(st.none(), owner) if cuts else owner) for _ in sizes]
    parts = draw(st.lists(st.integers(0, 5), min_size=world, max_size=world).filter(any))
    return sizes, owners, world, [sum(parts[: rank + 1]) / sum(parts) for rank in range(world)]


def shares(cut):
    """Of each parameter what each rank has, as (rank, start, stop), in the order of ranks."""
    found = {index: [] for index in range(len(cut.numels))}
    for rank in range(cut.world):
        for span in cut.spans(rank):
            found[span.index].append((rank, span.start, span.stop))
    return found


def assert_each_element_has_one_rank(cut):
    for index, pieces in shares(cut).items():
        assert [*cut.owners(index)] == pieces
        assert pieces, f"parameter {index} of {cut} belongs to no rank"
        edges = [0, *(stop for _, _, stop in pieces)]
        assert [start for _, start, _ in pieces] == edges[:-1], f"parameter {index} of {cut}: {pieces}"
        assert edges[-1] == cut.numels[index]
        assert cut.numels[index] or len(pieces) == 1, f"parameter {index}, which is empty, belongs to {pieces}"


def assert_spans_tell_where_elements_lie(cut):
    for rank in range(cut.world):
        segment = cut.segment(rank)
        end = 0
        for span in cut.spans(rank):
            assert segment.start + span.offset == cut.offsets[span.index] + span.start
            assert end <= span.offset <= span.offset + span.numel <= segment.stop - segment.start
            end = span.offset + span.numel


def assert_parameters_lie_side_by_side(cut, align):
    padded = [-(-numel // align) * align for numel in cut.numels]
    assert list(cut.offsets) == [0, *itertools.accumulate(padded)][:-1]
    assert cut.bounds[0] == 0
    assert list(cut.bounds) == sorted(cut.bounds)
    assert cut.numel >= sum(padded)


@exhaustively(numels, worlds, alignments)
def test_even_cut_gives_equal_segments_that_hold_each_element_once(sizes, world, align):
    cut = layout.even(sizes, world, align=align)
    assert cut.numels == tuple(sizes)
    assert cut.world == world
    assert_parameters_lie_side_by_side(cut, align)
    assert_each_element_has_one_rank(cut)
    assert_spans_tell_where_elements_lie(cut)
    (length,) = {segment.stop - segment.start for segment in map(cut.segment, range(world))}
    assert length % align == 0
    padded = sum(-(-size // align) * align for size in sizes)
    assert padded <= cut.numel < padded + align * world
    assert all(start % align == 0 for pieces in shares(cut).values() for _, start, _ in pieces)


@exhaustively(owned(), alignments)
def test_a_mixed_cut_keeps_whole_parameters_with_their_owners(given_, align):
    sizes, owners, world, ends = given_
    order, cut = layout.mixed(sizes, owners, ends, align=align)
    assert sorted(order) == [*range(len(sizes))]
    assert cut.numels == tuple(sizes[index] for index in order)
    assert cut.world == world
    assert_parameters_lie_side_by_side(cut, align)
    assert_each_element_has_one_rank(cut)
    assert_spans_tell_where_elements_lie(cut)
    assert all(start % align == 0 for pieces in shares(cut).values() for _, start, _ in pieces)
    for index, pieces in shares(cut).items():
        if sizes[order[index]] and owners[order[index]] is not None:
            assert pieces == [(owners[order[index]], 0, sizes[order[index]])]


@exhaustively(owned(), alignments)
def test_a_mixed_cut_gives_each_rank_what_it_is_to_get_up_to_one_parameter(given_, align):
    sizes, owners, world, ends = given_
    _, cut = layout.mixed(sizes, owners, ends, align=align)
    of_all = [-(-size // align) * align for size, owner in zip(sizes, owners, strict=True) if owner is None]
    before = 0
    for rank in range(world):
        whole = sum(-(-size // align) * align for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        got = cut.segment(rank).stop - cut.segment(rank).start - whole
        wanted = (ends[rank] - before) * sum(of_all)
        assert abs(got - wanted) <= 2 * max([align, *of_all])
        before = ends[rank]


@exhaustively(owned(cuts=False), alignments, st.sampled_from([1.0, 1.25, 64.0]))
def test_padding_keeps_owners_and_adds_no_more_than_it_may(given_, align, pads):
    sizes, owners, world, ends = given_
    _, plain = layout.mixed(sizes, owners, ends, align=align)
    cut = layout.padded(plain, align=align, pads_up_to=pads)
    if cut != plain:
        assert len({segment.stop - segment.start for segment in map(cut.segment, range(world))}) == 1
        assert plain.numel < cut.numel <= pads * plain.numel
    assert_each_element_has_one_rank(cut)
    assert_spans_tell_where_elements_lie(cut)
    for index, pieces in shares(cut).items():
        if cut.numels[index]:
            assert pieces == shares(plain)[index]


@pytest.mark.parametrize("sizes", [[0], [0, 0, 4], [4, 0, 0, 4], [4, 0], [0] * 5])
def test_parameters_without_elements_have_one_owner_whatever_lies_beside_them(sizes):
    for world in range(1, 5):
        assert_each_element_has_one_rank(layout.even(sizes, world, align=1))
        ends = [(rank + 1) / world for rank in range(world)]
        for owner in (0, world - 1, None):
            assert_each_element_has_one_rank(layout.mixed(sizes, [owner] * len(sizes), ends, align=1)[1])


def totals(sizes, owners, loads):
    result = list(loads)
    for size, owner in zip(sizes, owners, strict=True):
        result[owner] += size
    return result


@exhaustively(st.lists(st.integers(0, 1000), max_size=40), st.lists(st.integers(0, 500), min_size=1, max_size=16))
def test_no_rank_is_given_a_parameter_while_another_has_less(sizes, loads):
    owners = assign(sizes, loads)
    final = totals(sizes, owners, loads)
    for rank in set(owners):
        smallest = min(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        assert final[rank] - smallest <= min(final)


@exhaustively(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_balance_is_within_grahams_bound_of_the_best_there_is(sizes, world):
    best = min(max(totals(sizes, owners, [0] * world)) for owners in itertools.product(range(world), repeat=len(sizes)))
    got = max(totals(sizes, assign(sizes, [0] * world), [0] * world))
    assert got <= best * (4 / 3 - 1 / (3 * world)) + 1e-9


@exhaustively(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 100))
def test_runs_are_consecutive_and_as_long_as_the_limit_allows(sizes, limit):
    runs = layout.runs(sizes, limit)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for run in runs:
        assert len(run) == 1 or sum(sizes[i] for i in run) <= limit
    for run, following in itertools.pairwise(runs):
        assert sum(sizes[i] for i in run) + sizes[following[0]] > limit


def gpt2():
    block = [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]
    return [50257 * 768, 1024 * 768, *block * 12, 768, 768]


def llama3_8b():
    block = [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, *[14336 * 4096] * 3, 4096, 4096]
    return [128256 * 4096, *block * 32, 4096, 128256 * 4096]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sizes", "dtype"), [(gpt2(), torch.float32), *([(llama3_8b(), torch.bfloat16)] if WHOLE else [])]
)
def test_even_cut_in_the_buckets_of_oss_is_balanced_within_two_percent(sizes, dtype):
    params = [nn.Parameter(torch.empty(size, dtype=dtype, device="meta")) for size in sizes[::-1]]
    for world in range(2, 65):
        loads = [0] * world
        for _, cut in arrange(params, world, Shares(world).divide(params, ()), limit=bucket_limit(params)):
            for rank in range(world):
                loads[rank] += sum(span.numel for span in cut.spans(rank))
        assert sum(loads) == sum(sizes)
        assert max(loads) <= 1.02 * sum(sizes) / world, f"{world} ranks"


def test_a_gpu_sends_a_model_of_any_size_in_few_buckets_of_bounded_size():
    def buckets(params: int) -> tuple[int, int]:
        """Their number and the bytes of the largest, for blocks of 12 times 1,024 squared parameters in float32."""
        blocks = [nn.Parameter(torch.empty(12, 1024, 1024, device="meta")) for _ in range(params // (12 << 20))]
        limit = bucket_limit(blocks, overlaps=True)
        return len([*arrange(blocks, 8, Shares(8).divide(blocks, ()), limit=limit)]), limit

    assert 16 <= buckets(1_040_000_000)[0] <= 24
    assert buckets(7_000_000_000)[1] == 256 << 20
    assert buckets(13_000_000)[1] == 4 * (12 << 20) // 8


# What one parameter's elements are in memory, and which parameters can share a buffer, or none.


def test_strides_are_kept_where_they_are_dense():
    assert dense_stride(torch.zeros(4, 3).t()) == (1, 3)
    assert dense_stride(torch.zeros(6, 1).expand(6, 4)) == (4, 1)


def test_shared_memory_is_found_behind_buffers_that_overlap():
    """Whichever lies between in the order of addresses."""
    memory = torch.zeros(100)
    buffers = [("long", memory[:90]), ("short", memory[10:20])]
    refuse_shared([], buffers)
    refuse_shared([("beside", memory[90:])], buffers)
    for name, param in [("after", memory[40:50]), ("around", memory), ("in both", memory[12:15])]:
        assert name in refusal(lambda: refuse_shared([(name, param)], buffers))  # noqa: B023
    params = [("one", memory[:50]), ("first", memory[:5]), ("other", memory[40:])]
    assert "two parameters" in refusal(lambda: refuse_shared(params))


class Copied(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.elements += result.numel()
        return result


SHAPED = {
    "every second column": lambda numbers: numbers.view(40, 60)[:, ::2],
    "some columns": lambda numbers: numbers.view(40, 60)[:, 7:31],
    "columns of the first dimensions": lambda numbers: numbers.view(1, 2, 20, 60)[..., 7:31],
    "expanded": lambda numbers: numbers[:40, None].expand(40, 60),
    "every second": lambda numbers: numbers[::2],
    "transposed": lambda numbers: numbers.view(40, 60).t(),
    "channels_last": lambda numbers: numbers.view(10, 4, 12, 5).to(memory_format=torch.channels_last),
    "conjugated": lambda numbers: numbers.to(torch.complex64).mul(1j).view(40, 60).conj(),
    "a number": lambda numbers: numbers[3],
}


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("piece", [7, 64, 2400])
def test_pieces_of_a_parameter_copy_little_more_than_they_have(name, piece):
    """In a parameter that does not fill its memory a piece copies rows: not the parameter, as often as there are
    pieces."""
    param = SHAPED[name](torch.arange(2400.0))
    shapes = Shapes([param], layout.even([param.numel()], 1, align=1), 0)
    whole = torch.empty_like(param).copy_(param).as_strided((param.numel(),), (1,))
    found = torch.empty_like(whole)
    with Copied() as copied:
        for low in range(0, len(found), piece):
            shapes.read([param], low, found[low : low + piece])
    assert torch.equal(found, whole)
    rows = 2 * 60 * -(-len(found) // piece)
    assert copied.elements <= 2 * len(found) + rows


# Parameters in flat buffers: they keep values, identity and shape; what is freed comes back as it was.


class Odd(nn.Module):
    """Every way in which a parameter may lie in memory."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        draw = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
        values = {
            "vector": draw(50),
            "scalar": draw(),
            "empty": draw(3, 0),
            "matrix": draw(17, 5),
            "transposed": draw(9, 11).t(),
            "permuted": draw(3, 4, 5).permute(2, 0, 1),
            "channels_last": draw(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
            "sliced": draw(20, 10)[::2, 3:7],
            "expanded": draw(6, 1).expand(6, 4),
            "last, empty": draw(0),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        self.seen = {name: (param.detach().clone(), param.stride()) for name, param in self.named_parameters()}
        self.views = self.__dict__.get("views") or [param.detach().unsqueeze(0) for param in self.parameters()]
        for view, param in zip(
            self.views, self.parameters(), strict=True
        ):  # of the first forward, as autograd saves them
            assert torch.equal(view[0], param) and view.data_ptr() == param.data_ptr()
        return x * sum(param.abs().sum() for param in self.parameters())


def assert_as(seen, expected):
    """Values, and the strides of what fills its memory."""
    for name, param in expected.named_parameters():
        value, stride = seen[name]
        assert torch.equal(value, param), name
        if name not in ("sliced", "expanded"):
            assert stride == param.stride(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_binding_keeps_objects_values_shapes_and_dense_strides(dtype):
    model, before = Odd(dtype), Odd(dtype)
    model.vector.requires_grad_(False)
    params = [*model.parameters()]
    optimizer = zero.OSS(params, SGD, lr=0.1)
    assert_as({name: (param.detach(), param.stride()) for name, param in model.named_parameters()}, before)
    for one, other in zip(model.parameters(), params, strict=True):
        assert one is other and one.is_leaf and one.dtype == dtype
        assert one.requires_grad == (one is not model.vector)
    bound = [param for group in shard_groups(optimizer) for param in group.params]
    assert {*map(id, bound)} >= {id(param) for param in params if param.requires_grad}
    for group in shard_groups(optimizer):
        start = group.full.data_ptr()
        assert all((param.data_ptr() - start) % 64 == 0 for param in group.params if param.numel())


def cycle(rank, world, partition, dtype):
    """Bytes of this rank's shards, and of the full parameters."""
    inner, before = Odd(dtype), Odd(dtype)
    del inner.expanded, before.expanded
    model = zero.FSDP(inner, partition=partition)
    groups = shard_groups(model)
    own, full = (sum(getattr(group, name).nbytes for group in groups) for name in ("shard", "full"))
    for _ in range(3):
        assert not any(group.full.untyped_storage().nbytes() for group in groups)
        assert nbytes(group.shard for group in groups) == own
        with torch.no_grad():
            model(torch.ones(1, dtype=dtype))
        assert_as(model.module.seen, before)
    return own, full


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_freed_comes_back_bit_for_bit_in_the_same_storage(world, partition):
    for dtype in (torch.float32, torch.bfloat16):
        told = ranks.run(cycle, world, args=(partition, dtype))
        assert sum(own for own, _ in told) == told[0][1]
        assert partition == "whole" or len({own for own, _ in told}) == 1


def test_a_rank_alone_frees_nothing_and_copies_nothing():
    model = zero.FSDP(Odd())
    [group] = shard_groups(model)
    at = group.full.data_ptr()
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(1))
        assert group.full.data_ptr() == group.shard.data_ptr() == at
        assert all(at <= param.data_ptr() < at + group.full.nbytes for param in group.params if param.numel())
