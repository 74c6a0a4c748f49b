"""One group's storage: values, identity and shape of the parameters that are bound to it, and what freeing it keeps."""

from unittest import mock

import pytest
import torch
from torch import nn

import ranks
from zero.comm import Comm, Handle
from zero.measure.shapes import shard_shape
from zero.plan.meter import Meter
from zero.shards import layout
from zero.shards.group_state import GroupOptions, GroupState
from zero.shards.placement import Placement
from zero.shards.shapes import alignment, alike, dense_stride, unusable
from zero.shards.shard_group import ShardGroup


def odd_parameters(dtype=torch.float32):
    """Every way in which a parameter may lie in memory."""
    torch.manual_seed(3)
    values = {
        "vector": torch.randn(50, dtype=dtype),
        "scalar": torch.randn((), dtype=dtype),
        "empty": torch.randn(3, 0, dtype=dtype),
        "matrix": torch.randn(17, 5, dtype=dtype),
        "transposed": torch.randn(9, 11, dtype=dtype).t(),
        "permuted": torch.randn(3, 4, 5, dtype=dtype).permute(2, 0, 1),
        "channels_last": torch.randn(4, 3, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
        "sliced": torch.randn(20, 10, dtype=dtype)[::2, 3:7],
        "expanded": torch.randn(6, 1, dtype=dtype).expand(6, 4),
        "last, empty": torch.randn(0, dtype=dtype),
    }
    return {name: nn.Parameter(value) for name, value in values.items()}


def group_of(params, world=None, cut="even", **options):
    """The parameters in one group, cut for `world` ranks, by default as many as there are."""
    comm = Comm()
    sizes = [param.numel() for param in params.values()]
    world, align = world or comm.world, alignment(next(iter(params.values())).dtype)
    owners = sorted(layout.assign(sizes, [0] * world))
    geometry = (
        layout.even(sizes, world, align=align) if cut == "even" else layout.whole(sizes, owners, world, align=align)
    )
    return ShardGroup([*params.values()], [*params], geometry, Placement(comm), GroupOptions(**options))


# ------------------------------------------------------------------------------------------------------------- Binding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_binding_keeps_values_shapes_objects_and_what_dense_parameters_have_of_strides(dtype):
    params = odd_parameters(dtype)
    params["vector"].requires_grad_(False)
    before = {name: (param, param.detach().clone(), param.stride()) for name, param in params.items()}
    group = group_of(params)
    assert group.state is GroupState.UNSHARDED
    for index, (name, (param, values, stride)) in enumerate(before.items()):
        assert group.params[index] is param
        assert torch.equal(param, values), name
        assert param.dtype == dtype
        assert param.is_leaf
        assert param.requires_grad == (name != "vector")
        if name not in ("sliced", "expanded"):  # they do not fill their memory, and need not
            assert param.stride() == stride, name
    assert params["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_parameters_lie_in_the_full_buffer_where_the_layout_says():
    params = odd_parameters()
    group = group_of(params)
    with torch.no_grad():
        for number, param in enumerate(params.values()):
            param.fill_(number + 1)
    for number, (offset, numel) in enumerate(zip(group.layout.offsets, group.layout.numels, strict=True)):
        assert group.full[offset : offset + numel].tolist() == [number + 1] * numel
        group.full[offset : offset + numel] = -number
    assert all((param == -number).all() for number, param in enumerate(params.values()))
    assert group.full.count_nonzero() <= sum(group.layout.numels), "padding was written to"


def test_padding_starts_as_zeros():
    group = group_of(odd_parameters())
    padding = torch.ones(group.layout.numel, dtype=torch.bool)
    for offset, numel in zip(group.layout.offsets, group.layout.numels, strict=True):
        padding[offset : offset + numel] = False
    assert padding.any()
    assert not group.full[padding].any()


def test_bound_parameters_start_on_multiples_of_64_bytes_of_the_buffer():
    for dtype in [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex128]:
        assert alignment(dtype) * dtype.itemsize == 64
    params = odd_parameters(torch.bfloat16)
    start = group_of(params).full.data_ptr()
    assert all((param.data_ptr() - start) % 64 == 0 for param in params.values() if param.numel())


@pytest.mark.parametrize("cut", ["even", "whole"])
@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_parts_of_a_tensor_are_its_elements_as_the_parameter_has_them_in_memory(world, cut):
    params = odd_parameters()
    group = group_of(params, world, cut)
    for index, param in enumerate(params.values()):
        tensor = torch.randn(param.shape)
        flat = group.shapes.in_memory_order(index, tensor)
        for rank in range(world):
            for span in group.layout.spans(rank):
                if span.index == index:
                    shard = group.shapes.shaped(index, flat[span.start : span.stop].clone())
                    assert shard.dim() == param.dim()
                    whole = span.numel == param.numel()
                    assert (
                        torch.equal(shard, tensor)
                        if whole
                        else torch.equal(shard.flatten(), flat[span.start : span.stop])
                    )
        with torch.no_grad():
            offset = group.layout.offsets[index]
            group.full[offset : offset + param.numel()] = flat
        assert torch.equal(param, tensor)


def test_a_part_has_as_many_dimensions_as_the_parameter():
    assert shard_shape(torch.Size([4, 3, 5]), 7) == (7, 1, 1)
    assert shard_shape(torch.Size([4]), 0) == (0,)
    assert dense_stride(torch.zeros(4, 3).t()) == (1, 3)
    assert dense_stride(torch.zeros(6, 1).expand(6, 4)) == (4, 1)


def test_only_parameters_of_one_dtype_and_device_and_of_one_mind_about_training_share_a_group():
    params = [
        nn.Parameter(torch.zeros(1)),
        nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(1), requires_grad=False),
        nn.Parameter(torch.zeros(1, device="meta")),
        nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
    ]
    assert alike(params) == [[0, 2], [1, 5], [3], [4]]


# ----------------------------------------------------------------------------------------------- Freeing and gathering


def gathered(group, **options):
    group.launch_unshard(**options)
    assert group.state is GroupState.GATHERING
    assert group.gathering
    group.finish_unshard()
    assert group.state is GroupState.UNSHARDED
    assert not group.gathering


def assert_is_part(group, values):
    for index, param in enumerate(group.params):
        span, flat = group.spans.get(index), group.shapes.in_memory_order(index, values[index])
        assert param.dim() == values[index].dim() or values[index].dim() == 0
        if param.shape == values[index].shape:
            assert torch.equal(param, values[index])
        else:
            assert torch.equal(param.detach().flatten(), flat[span.start : span.stop] if span else flat[:0])


def _cycle(rank, world, cut, dtype, shard_in_full):
    params = odd_parameters(dtype)
    values = [param.detach().clone() for param in params.values()]
    strides = [dense_stride(param) for param in params.values()]
    group = group_of(params, cut=cut, own_shard=True, shard_in_full=shard_in_full)
    assert group.state is GroupState.SHARDED
    storage, shard = group.full.untyped_storage(), group.shard.untyped_storage()
    of_part = shard.nbytes()
    assert of_part == group.shard.nbytes
    views = None
    for _ in range(3):
        assert storage.nbytes() == 0
        assert shard.nbytes() == of_part
        assert_is_part(group, values)
        assert group.reclaim() is None
        gathered(group)
        assert group.full.untyped_storage().data_ptr() == storage.data_ptr()
        assert storage.nbytes() == group.full.nbytes
        assert shard.nbytes() == (0 if shard_in_full else of_part)
        for param, value, stride in zip(group.params, values, strides, strict=True):
            assert torch.equal(param, value)
            assert param.stride() == stride
        assert group.reclaim() is None
        views = views or [param.detach().unsqueeze(0) for param in group.params]  # as autograd saves them
        for view, param, value in zip(views, group.params, values, strict=True):
            assert torch.equal(view, value.unsqueeze(0)), "a view that was made when it was unsharded before"
            assert not param.numel() or view.data_ptr() == param.data_ptr()
        group.reshard()
        assert group.state is GroupState.SHARDED
    return of_part, group.full.nbytes


@pytest.mark.parametrize("shard_in_full", [False, True])
@pytest.mark.parametrize("cut", ["even", "whole"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_freed_comes_back_bit_for_bit_in_the_same_storage(world, cut, shard_in_full):
    for dtype in [torch.float32, torch.bfloat16]:
        told = ranks.run(_cycle, world, args=(cut, dtype, shard_in_full))
        assert sum(shard for shard, _ in told) == told[0][1]
        if cut == "even":
            assert len({shard for shard, _ in told}) == 1


def test_a_rank_alone_frees_nothing_and_copies_nothing():
    params = odd_parameters()
    values = [param.detach().clone() for param in params.values()]
    group = group_of(params, own_shard=True, shard_in_full=True)
    at = group.full.data_ptr()
    for _ in range(2):
        assert_is_part(group, values)
        assert group.shard.data_ptr() == group.full.data_ptr() == at
        with Meter() as meter:
            gathered(group)
            group.reshard()
        assert meter.peak() <= group.full.nbytes
        assert group.state is GroupState.SHARDED


@pytest.mark.parametrize("own_shard", [False, True])
@ranks.on(3)
def test_what_owners_write_into_their_parts_reaches_every_rank(rank, world, own_shard):
    """What an owner writes into its shard reaches all; what is written into others' shards does not."""
    params = odd_parameters()
    group = group_of(params, own_shard=own_shard)
    with torch.no_grad():
        for view in group.shard_views:
            view.fill_(rank + 1)
    group.launch_unshard()
    group.finish_unshard()
    for peer in range(world):
        for span in group.layout.spans(peer):
            flat = group.shapes.in_memory_order(span.index, group.params[span.index].detach())
            assert flat[span.start : span.stop].tolist() == [peer + 1] * span.numel


@ranks.on(2)
def test_summoned_parameters_have_their_own_precision(rank, world):
    params = odd_parameters()
    values = [param.detach().clone() for param in params.values()]
    group = group_of(params, own_shard=True, compute_dtype=torch.bfloat16)
    group.summon()
    for param, value in zip(group.params, values, strict=True):
        assert torch.equal(param, value)
    group.dismiss(keep=True)
    assert_is_part(group, values)
    assert group.full.untyped_storage().nbytes() == 0


def test_misuse_is_noticed():
    group = group_of(odd_parameters(), own_shard=True)
    with pytest.raises(AssertionError, match="no gather is in flight"):
        group.finish_unshard()
    with pytest.raises(AssertionError):
        group.dismiss(keep=True)  # it was not summoned
    group.launch_unshard()
    with pytest.raises(AssertionError, match="cannot become being gathered"):
        group.launch_unshard()
    with pytest.raises(AssertionError):
        group.reshard()
    group.finish_unshard()
    with pytest.raises(AssertionError):
        group.launch_unshard()  # it is unsharded
    with pytest.raises(AssertionError):
        group.summon()
    with pytest.raises(AssertionError):
        group_of(odd_parameters()).reshard()  # its shard lies in what would be freed


@pytest.mark.parametrize("late", [False, True], ids=["launching", "waiting"])
@pytest.mark.parametrize("own_shard", [False, True])
@ranks.on(2)
def test_a_group_whose_gather_failed_is_lost(rank, world, own_shard, late):
    """The all-gather fails on every rank, as it is launched or as it is waited for."""

    def fail(*_, **__):
        raise RuntimeError("the link is down")

    group = group_of(odd_parameters(), own_shard=own_shard)
    instead = {"return_value": Handle(fail)} if late else {"side_effect": fail}
    with mock.patch.object(Comm, "gather", **instead), pytest.raises(RuntimeError, match="the link is down"):
        gathered(group)
    assert group.state is GroupState.LOST
    assert not group.readable and not group.gathering
    if own_shard:
        with pytest.raises(AssertionError, match="is lost, and cannot become being gathered"):
            group.launch_unshard()
    else:  # the group's ranks may step, load and gather once more
        gathered(group)


# ---------------------------------------------------------------------------------------------------- Moved parameters


def _replace(model):
    model.weight.data = model.weight.data + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.to(memory_format=torch.channels_last),
        _replace,
    ],
    ids=["half", "channels_last", "data ="],
)
@pytest.mark.parametrize("own_shard", [False, True])
def test_a_parameter_whose_data_went_elsewhere_is_named(change, own_shard):
    model = nn.Conv2d(3, 4, 5)
    params = dict(model.named_parameters())
    group = group_of(params, own_shard=own_shard)
    if own_shard:
        gathered(group)
    assert group.reclaim() is None
    change(model)
    assert group.reclaim() == "weight"


@pytest.mark.parametrize(
    "harmless",
    [
        lambda model: model.to("cpu"),
        lambda model: model.float(),
        lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
        lambda model: model.requires_grad_(False),
        lambda model: model.zero_grad(),
        lambda model: nn.init.zeros_(model.weight),
        lambda model: model.to("cpu:0"),
        lambda model: model.double().float(),
    ],
)
@pytest.mark.parametrize("own_shard", [False, True])
def test_parameters_stay_in_the_flat_buffer(harmless, own_shard):
    """Also where torch copies them although nothing changes: they are bound to the buffer again."""
    model = nn.Conv2d(3, 4, 5)
    model.bias.data[0] = torch.nan
    group = group_of(dict(model.named_parameters()), own_shard=own_shard)
    if own_shard:
        gathered(group)
    harmless(model)
    assert group.reclaim() is None
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert (group.shapes.views_of_full(group.full)[0] == 3.0).all()


def test_strays_are_noticed_while_in_part_too():
    params = odd_parameters()
    group = group_of(params, own_shard=True)
    assert group.reclaim() is None
    params["matrix"].data = torch.zeros(17, 5)
    assert group.reclaim() == "matrix"


# ---------------------------------------------------------------------------------------------- What cannot be sharded


def _wrapper():
    from torch.testing._internal.two_tensor import TwoTensor

    return nn.Parameter(TwoTensor(torch.zeros(2), torch.zeros(2)))


@pytest.mark.parametrize(
    ("make", "found", "remedy"),
    [
        (lambda: 3, "the name is a int, not a torch.Tensor", "Pass model.parameters()"),
        (lambda: "weight", "the name is a str, not a torch.Tensor", "Pass model.parameters()"),
        (lambda: nn.Parameter(torch.zeros(2)) * 2, "the name is not a leaf tensor", "Pass the nn.Parameter itself"),
        (_wrapper, "the name is a TwoTensor, which wraps other tensors", "undo the other library's sharding"),
        (
            lambda: torch.eye(2).to_sparse().requires_grad_(),
            "the name has layout torch.sparse_coo",
            r"call .to_dense\(\)",
        ),
        (lambda: nn.Parameter(torch.zeros(2, device="meta")), "the name is on the meta device", "model.to_empty"),
    ],
    ids=["number", "string", "non-leaf", "wrapper", "sparse", "meta"],
)
def test_what_cannot_be_sharded_is_named_with_the_remedy(make, found, remedy):
    reason = unusable(make(), "the name")
    assert reason is not None
    assert reason.startswith(found)
    assert remedy.replace("\\", "") in reason


def test_what_can_be_sharded_passes():
    for param in [*odd_parameters().values(), nn.Parameter(torch.zeros(2), requires_grad=False), torch.zeros(2)]:
        assert unusable(param, "the name") is None
