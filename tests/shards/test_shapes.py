"""What one parameter's elements are in memory, and which parameters can share a buffer, or none."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import zero
from inner import nbytes, shard_groups
from ranks import refusal
from zero.measure.shapes import shard_shape
from zero.shards import layout
from zero.shards.shapes import Shapes, alignment, by_kind, dense_stride, refuse_shared, refuse_unusable


def test_a_part_has_as_many_dimensions_as_the_parameter():
    assert shard_shape(torch.Size([4, 3, 5]), 7) == (7, 1, 1)
    assert shard_shape(torch.Size([4]), 0) == (0,)


def test_strides_are_kept_where_they_are_dense():
    assert dense_stride(torch.zeros(4, 3).t()) == (1, 3)
    assert dense_stride(torch.zeros(6, 1).expand(6, 4)) == (4, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex128])
def test_parameters_start_on_multiples_of_64_bytes(dtype):
    assert alignment(dtype) * dtype.itemsize == 64


def test_only_parameters_of_one_dtype_and_device_and_of_one_mind_about_training_share_a_group():
    params = [
        nn.Parameter(torch.zeros(1)),
        nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(1), requires_grad=False),
        nn.Parameter(torch.zeros(1, device="meta")),
        nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
    ]
    assert by_kind(params) == [[0, 2], [1, 5], [3], [4]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: 3, ["int", "model.parameters()"]),
        (lambda: "weight", ["str", "model.parameters()"]),
        (lambda: nn.Parameter(torch.zeros(2)) * 2, ["leaf", "nn.Parameter"]),
        (lambda: nn.Parameter(TwoTensor(torch.zeros(2), torch.zeros(2))), ["TwoTensor", "other library"]),
        (lambda: torch.eye(2).to_sparse().requires_grad_(), ["torch.sparse_coo", ".to_dense()"]),
        (lambda: nn.Parameter(torch.zeros(2, device="meta")), ["meta device", "model.to_empty"]),
        (lambda: nn.Parameter(torch.zeros(2)).share_memory_(), ["share_memory()", "param.data.clone()"]),
    ],
    ids=["number", "string", "non-leaf", "wrapper", "sparse", "meta", "shared"],
)
def test_what_cannot_be_sharded_is_named_with_the_remedy(make, words):
    reason = refusal(lambda: refuse_unusable(make(), "the name"))
    assert all(word in reason for word in ["the name", *words]), reason


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


def test_what_can_be_sharded_passes():
    for param in [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False), torch.zeros(2)]:
        refuse_unusable(param, "the name")


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


def test_parameters_lie_in_the_full_buffer_one_beside_another_and_padding_is_zero():
    model = Odd()
    [group] = shard_groups(zero.OSS(model.parameters(), SGD, lr=0.1))
    assert group.full.count_nonzero() == sum(param.numel() for param in model.parameters())
    with torch.no_grad():
        for number, param in enumerate(group.params):
            param.fill_(number + 1)
    for number, param in enumerate(group.params):
        assert (group.full == number + 1).sum() == param.numel()
    group.full.fill_(5)
    assert all((param == 5).all() for param in model.parameters())


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
